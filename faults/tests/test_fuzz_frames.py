"""Wrong frames of every kind: typed refusals only, tables whole, memory bounded, neighbours served.

The targets raise a Finding by themselves for whatever must not happen; here is shown that they did their work: every
message was said and taken, and every way to be wrong was gone. `make faults` judges ten times as many.
"""

import math
import ssl
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, Final, get_args

import pytest

from faults import fuzz
from faults.__main__ import main
from faults.fuzz import forge as forges
from faults.fuzz import greetings, links, readers
from faults.fuzz.command import TARGETS
from llm_datadist._links import messages
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.messages import Release, decode
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._log import logger
from llm_datadist._transfer.target import Target
from llm_datadist.errors import AuthFailed, ProtocolError
from tests.support.world import anonymous_bytes, residue, settled

FRAMES: Final = 20_000
SEED: Final = 20_260
MOST_GROWTH: Final = 64 << 20
#: What a reader may say no with; anything else would be news.
TYPED: Final = {
    *("ProtocolError", "header: ProtocolError", "ParamError", "LinkError", "LinkRefused", "LLMException"),
    *("CacheMismatch", "CacheNotFound", "TransferFailed", "DeadlineExceeded", "PeerLost", "NotLinked", "AuthFailed"),
    *("Refused", "hung up", "dropped", "breach", "another message"),
}
_LINKED: Final = {"Resolve": 0.1, "Release": 0.1, "Consumed": 0.03, "Resolved": 0.01}
_READ: Final = {"Resolve": 0.05, "Release": 0.03, "Hello": 0.01, "Resolved": 0.005}
#: Per target, kinds of which at least that part of its frames must be: it did not pass by doing one thing only.
TAKEN: Final[dict[str, dict[str, float]]] = {
    "parser": _READ | {"TransportChoice": 0.005, "UnlinkAck": 0.002},
    "same-host packets": {"RendezvousHello": 0.1, "Refusal": 0.01},
    "lane requests": {"MoveRequest": 0.1},
    "handlers": _LINKED | {"UnlinkCancel": 0.008, "Verify": 0.01},
    "handlers, RCA": _LINKED | {"UnlinkRequest": 0.005},
    "sealed handlers": _LINKED | {"Verify": 0.01},
    "answers": {"Resolved": 0.02, "pull": 0.0001},
    **{target: {"Welcome": 0.02} for target in ("greetings", "sealed greetings")},
    **{target: {"Welcome": 0.05, "Linked": 0.01} for target in ("dials", "sealed dials")},
    **{target: {"read": 0.1, "write": 0.1} for target in ("lanes", "sealed lanes")},
    "rendezvous": {},
    "lane handles": {"MoveReply": 0.001},
    "lane greetings": {"greeting": 0.1},
    "nixl requests": {"Moved": 0.05, "Ready": 0.01, "Meet": 0.01},
}
TAGS: Final = {kind.__name__: str(kind.__struct_config__.tag) for kind in get_args(messages.AnyMessage)}
#: Targets that are fed with messages, and those of which each kind must have been taken.
ALL_TAKEN: Final = {
    "parser": forges.LINK.keys() | forges.HANDSHAKE.keys(),
    # These links have neither authentication nor NIXL, and nothing was asked that could be answered so.
    "handlers": forges.LINK.keys() - {"authenticate", "authenticated", "nixlask"},
    "handlers, RCA": forges.LINK.keys() - {"authenticate", "authenticated", "nixlask"},
    "sealed handlers": forges.LINK.keys() - {"authenticated", "nixlask"},
}
#: Targets whose messages a forge spoils; the others only have their bytes changed.
SPOILED: Final = {*ALL_TAKEN, "greetings", "dials", "sealed greetings", "sealed dials"}


def frames_of(target: str) -> int:
    """Return its share, and no fewer than make what is asserted likely."""
    return max(math.ceil(FRAMES * TARGETS[target][0]), 10_000 if target in {*ALL_TAKEN, "answers"} else 300)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the forge has used each of its ways to be wrong."""
    used: Counter[str] = Counter()

    def counted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any) -> Any:
            used[name] += 1
            return change(*args)

        return changed

    for table in (forges.MUTATIONS, forges.SPOILS):
        for name, change in table.items():
            monkeypatch.setitem(table, name, counted(name, change))
    return used


def test_the_shares_make_all_frames_and_every_target_has_one() -> None:
    assert set(TARGETS) == set(TAKEN)
    assert sum(share for share, _ in TARGETS.values()) >= 1


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = residue()
    yield
    assert settled(before) == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("target", TARGETS)
def test_wrong_frames_are_refused_with_typed_errors_and_cost_nobody_else(target: str, ways: Counter[str]) -> None:
    _, function = TARGETS[target]
    function(min(frames_of(target), 2_000), SEED + 1)  # whatever is made once is made now
    ways.clear()
    before = anonymous_bytes()
    verdicts = function(frames_of(target), SEED)
    grown = anonymous_bytes() - before
    sys.stdout.write(f"{verdicts}\n")
    assert verdicts.judged >= frames_of(target)
    few = {kind: part for kind, part in TAKEN[target].items() if verdicts.accepted[kind] < part * verdicts.judged}
    assert few == {}, verdicts
    assert set(ALL_TAKEN.get(target, ())) <= {TAGS.get(kind, kind) for kind in verdicts.accepted}
    assert set(ways) == {*forges.MUTATIONS, *(forges.SPOILS if target in SPOILED else ())}
    assert verdicts.refused.total() > verdicts.judged / 50, verdicts
    assert set(verdicts.refused) <= TYPED
    assert grown < MOST_GROWTH


def test_the_same_seed_makes_the_same_frames() -> None:
    first, second = (readers.fuzz_parser(5_000, 7) for _ in range(2))
    assert (first.accepted, first.refused) == (second.accepted, second.refused)
    assert readers.fuzz_parser(5_000, 8).accepted != first.accepted


def test_the_command_runs_one_target_or_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fuzz", "--frames", "2000", "--seed", "3", "--target", "same-host packets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("same-host packets, seed 3: 2000 frames, ")
    assert lines[1] == "2000 frames judged, no finding"


# --- that a fault would be found --------------------------------------------------------------------------------------


def test_a_reader_that_raises_something_else_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(payload: bytes) -> Any:
        message = decode(payload)
        if isinstance(message, Release) and message.count == 3:
            raise IndexError(message.count)
        return message

    monkeypatch.setattr(readers, "decode", careless)
    with pytest.raises(fuzz.Finding, match=r"parser, seed 5, after \d+ frames: IndexError"):
        readers.fuzz_parser(5_000, 5)


def test_a_parser_that_is_led_astray_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    take = FrameParser.take

    def losing(self: FrameParser) -> bytes | None:
        payload = take(self)
        return payload[:-1] if payload is not None and len(payload) == 77 else payload

    monkeypatch.setattr(FrameParser, "take", losing)
    verdicts = readers.fuzz_parser(5_000, 5)
    monkeypatch.undo()
    assert verdicts.refused.total() > readers.fuzz_parser(5_000, 5).refused.total()


@pytest.mark.usefixtures("nothing_left")
def test_a_handler_that_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = Target.on_release

    def careless(self: Target, link: Any, message: Release) -> None:
        release(self, link, message)
        if message.first == 4:
            raise ZeroDivisionError

    monkeypatch.setattr(Target, "on_release", careless)
    with pytest.raises(fuzz.Finding, match=r"handlers, seed 1: the library logged .*ZeroDivisionError"):
        links.fuzz_handlers(2_000, 1)


@pytest.mark.usefixtures("nothing_left")
def test_a_pin_that_stays_behind_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Target, "drop_peer", lambda self, link: None)
    monkeypatch.setattr("faults.fuzz.stage.PATIENCE_SECONDS", 0.2)
    with pytest.raises(fuzz.Finding, match=r"left behind after all strangers went: \d+ pins"):
        links.fuzz_handlers(2_000, 1)


@pytest.mark.usefixtures("nothing_left")
def test_a_stranger_that_is_believed_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    session = greetings.Sessions.session

    def gullible(self: greetings.Sessions, *, server_side: bool) -> TlsSession:
        context = self.current()[server_side]
        context.verify_mode = ssl.CERT_NONE
        return session(self, server_side=server_side)

    monkeypatch.setattr(greetings.Sessions, "session", gullible)
    with pytest.raises(fuzz.Finding, match="a stranger was authenticated"):
        greetings.fuzz_greetings(2_000, 1, sealed=True)


@pytest.mark.usefixtures("nothing_left")
def test_a_session_that_keeps_what_it_never_opens_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    decrypt = TlsSession.decrypt

    def patient(self: TlsSession, received: bytes) -> bytes:
        try:
            return decrypt(self, received)
        except AuthFailed as error:
            if "ended the session" in str(error):
                return b""
            raise

    monkeypatch.setattr(TlsSession, "decrypt", patient)
    with pytest.raises(fuzz.Finding, match=r"a TLS session keeps \d+ bytes unopened"):
        links.fuzz_handlers(10_000, 1, sealed=True)


def test_what_the_library_logs_against_itself_is_found() -> None:
    with pytest.raises(fuzz.Finding, match="the library logged"), fuzz.trial("nothing", 1):
        logger.info("link to %s ended: internal error: %r", "cluster 1", IndexError())
    with fuzz.trial("nothing", 1):
        logger.warning("link to cluster 1 ended: the connection broke")


# --- the forge --------------------------------------------------------------------------------------------------------


def test_every_message_has_its_right_and_its_wrong_forms() -> None:
    # A new message has to be forged too.
    assert set(TAGS.values()) == set(forges.LINK | forges.HANDSHAKE)
    forge = forges.Forge(1, forges.LINK | forges.HANDSHAKE)
    payloads = [forge.payload() for _ in range(20_000)]
    right: set[str] = set()
    for payload in payloads:
        with suppress(ProtocolError):
            right.add(TAGS[type(decode(payload)).__name__])
    assert right == set(forges.LINK | forges.HANDSHAKE)
    assert len(set(payloads)) < len(payloads), "some are said again"
    assert min(map(len, payloads)) < 3
    assert max(map(len, payloads)) > 4096


def test_what_is_done_to_a_wild_value_does_not_stay() -> None:
    rng = forges.Forge(1, forges.LINK).rng
    for value in (forges.wild(rng) for _ in range(2_000)):
        if isinstance(value, list):
            assert "mark" not in value
            value.append("mark")


def test_mutation_changes_what_it_is_given() -> None:
    rng = forges.Forge(1, forges.LINK).rng
    data = rng.randbytes(200)
    changed = [forges.mutated(data, rng) for _ in range(500)]
    assert sum(each != data for each in changed) > 480
    assert {len(each) < 200 for each in changed} == {True, False}
    assert max(map(len, changed)) > 200
    assert len(forges.mutated(b"", rng)) > 0
