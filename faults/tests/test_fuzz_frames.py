"""Wrong frames of every kind: typed refusals only, tables whole, memory bounded, neighbours served.

The targets raise a Finding by themselves for whatever must not happen; here is shown that they did their work: every
message was said and taken. `make faults` judges ten times as many.
"""

import math
import ssl
import sys
from collections.abc import Iterator
from typing import Any, Final, get_args

import pytest

from faults import fuzz
from faults.fuzz import forge as forges
from faults.fuzz import greetings, links, readers
from faults.fuzz.command import TARGETS
from llm_datadist._links import messages
from llm_datadist._links.messages import Release, decode
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._transfer.target import Target
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


def test_every_message_is_forged_and_every_target_judged() -> None:
    assert set(TAGS.values()) == set(forges.LINK | forges.HANDSHAKE)
    assert set(TARGETS) == set(TAKEN)


def frames_of(target: str) -> int:
    """Return its share, and no fewer than make what is asserted likely."""
    return max(math.ceil(FRAMES * TARGETS[target][0]), 10_000 if target in {*ALL_TAKEN, "answers"} else 300)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    before = residue()
    yield
    assert settled(before) == before


@pytest.mark.usefixtures("nothing_left")
@pytest.mark.parametrize("target", TARGETS)
def test_wrong_frames_are_refused_with_typed_errors_and_cost_nobody_else(target: str) -> None:
    _, function = TARGETS[target]
    function(min(frames_of(target), 2_000), SEED + 1)  # whatever is made once is made now
    before = anonymous_bytes()
    verdicts = function(frames_of(target), SEED)
    grown = anonymous_bytes() - before
    sys.stdout.write(f"{verdicts}\n")
    assert verdicts.judged >= frames_of(target)
    few = {kind: part for kind, part in TAKEN[target].items() if verdicts.accepted[kind] < part * verdicts.judged}
    assert few == {}, verdicts
    assert set(ALL_TAKEN.get(target, ())) <= {TAGS.get(kind, kind) for kind in verdicts.accepted}
    assert verdicts.refused.total() > verdicts.judged / 50, verdicts
    assert set(verdicts.refused) <= TYPED
    assert grown < MOST_GROWTH


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


# --- the forge --------------------------------------------------------------------------------------------------------
