"""Peers of another build: with features and elements that this one does not know, without those that it has, of another
wire major, or with another same-host rendezvous. docs/protocol.md says what each of these means.
"""

import logging
import socket
import struct
from pathlib import Path
from typing import Final

import msgspec
import pytest

import llm_datadist
from faults.relay import Relay, Rewriter
from faults.strangers import Stranger, listener
from llm_datadist import CacheKey, LLMStatusCode
from tests.support.authority import secret_file
from tests.support.kinds import LocalEnd, Pair, World
from tests.support.layers import make_both, received
from tests.support.linking import SUCCESS, bytes_move_both_ways, dialled, explain, info, language, link, links, speaking
from tests.support.moves import Spec, Use, call, moved, same_bytes
from tests.support.wire import FEATURES, LANE_PREAMBLE, VERSIONS, WIRE_MAJOR, preamble, rendezvous
from tests.support.wire import messages as wire

OLD_MAJOR: Final = 10


def packets_of(world: World, version: int) -> None:
    """From now on this process exchanges same-host packets of this version."""
    vars(rendezvous)["VERSION"] = version


@pytest.mark.parametrize("over", ["tcp", "shm"])
def test_unknown_features_and_elements_are_ignored_by_both_sides(request: pytest.FixtureRequest, over: str) -> None:
    """Each message has two elements more at the end, as a later version's may have."""
    pair: Pair = request.getfixturevalue(f"{over}_pair")
    prompt, decoder = pair.start(linked=False)
    kinds: set[type[wire.Message]] = set()

    def longer(message: wire.Message) -> bytes:
        kinds.add(type(message))
        payload = wire.encode([*msgspec.msgpack.decode(wire.encode(message)), "later", {"x": [1]}])
        return wire.FRAME_HEADER.pack(len(payload)) + payload

    ways = Rewriter(longer), Rewriter(longer)
    unknown = speaking(prompt, features=["unknown", *FEATURES]), speaking(decoder, features=[*FEATURES, "x" * 64])
    with unknown[0], unknown[1], Relay(("127.0.0.1", prompt.port or 0), ways) as relay:
        assert decoder.do(link, [info(1, relay.port)]) == SUCCESS
        bytes_move_both_ways(prompt, decoder)
        spoken = f"{VERSIONS[1]}: {' '.join(FEATURES)}"
        assert [prompt.do(language, 2), decoder.do(language, 1)] == [spoken] * 2
        assert decoder.do(explain, 1).transport == over
    assert kinds >= {wire.Hello, wire.Welcome, wire.TransportChoice, wire.Linked, wire.Resolve, wire.Resolved}


def _who(world: World) -> list[tuple[str, str]]:
    now = world.dd.statistics()
    (link,) = now.links
    return [(now.release, now.role), (link.peer_release, link.peer_role)]


@pytest.mark.parametrize("older", [None, wire.Hello, wire.Welcome])
def test_both_sides_know_release_and_role_of_the_other_unless_it_is_older(
    tcp_pair: Pair, older: type[wire.Message] | None
) -> None:
    """An older greeting ends before both."""
    prompt, decoder = tcp_pair.start(linked=False)

    def cut(message: wire.Message) -> bytes:
        elements = msgspec.msgpack.decode(wire.encode(message))
        payload = wire.encode(elements[:-2] if type(message) is older else elements)
        return wire.FRAME_HEADER.pack(len(payload)) + payload

    with Relay(("127.0.0.1", prompt.port or 0), (Rewriter(cut), Rewriter(cut))) as relay:
        assert decoder.do(link, [info(1, relay.port)]) == SUCCESS
        here, there = (llm_datadist.__version__, "PROMPT"), (llm_datadist.__version__, "DECODER")
        assert prompt.do(_who) == [here, ("", "") if older is wire.Hello else there]
        assert decoder.do(_who) == [there, ("", "") if older is wire.Welcome else here]


def _be_of(_: World, version: str) -> None:
    llm_datadist.__version__ = version


def test_a_long_version_is_cut(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.start(linked=False)
    own = f"0.2.0+{'local.' * 20}"
    try:
        for end in (prompt, decoder):
            end.do(_be_of, own)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        assert prompt.do(_who) == [(own, "PROMPT"), (own[:64], "DECODER")]
        assert decoder.do(_who) == [(own, "DECODER"), (own[:64], "PROMPT")]
    finally:
        for end in (prompt, decoder):
            end.do(_be_of, llm_datadist.__version__)  # later tests use these processes


@pytest.mark.parametrize("lacking", ["nobody", "dialer", "listener"])
def test_a_peer_without_reads_by_key_is_asked_where_each_row_is(tcp_pair: Pair, lacking: str) -> None:
    prompt, decoder = tcp_pair.start(linked=False)
    asked: list[wire.Resolve] = []

    def count(message: wire.Message) -> wire.Message:
        asked.extend([message] if isinstance(message, wire.Resolve) else [])
        return message

    lacks = {"dialer": [decoder], "listener": [prompt]}.get(lacking, [])
    ways = Rewriter(count), Rewriter(lambda each: each)
    with speaking(*lacks, features=[]), Relay(("127.0.0.1", prompt.port or 0), ways) as relay:
        assert decoder.do(link, [info(1, relay.port)]) == SUCCESS
        keys = tuple(CacheKey(1, number) for number in range(10, 14))
        target, source = make_both(decoder, prompt, Spec(), Spec(keys=keys))
        for row, key in enumerate(keys):
            decoder.do(call, "pull_cache", key, Use("kv"), 7 - row)
        same_bytes(received(decoder), moved(target, source, [(7 - row, row) for row in range(4)]))
        same_bytes(received(prompt), source)
    assert len(asked) == (len(keys) if lacks else 1)  # the first pull is always resolved


# --- another wire major -----------------------------------------------------------------------------------------------


def of_major(major: int, purpose: int) -> bytes:
    """Return the preamble of a build with this wire major."""
    return preamble(purpose)[:8] + struct.pack(">HH", major, purpose)


@pytest.mark.parametrize("major", [0, OLD_MAJOR, WIRE_MAJOR + 1, 0xFFFF])
def test_dialers_of_another_wire_major_are_told_so_and_the_log_says_it(
    end: LocalEnd, caplog: pytest.LogCaptureFixture, major: int
) -> None:
    caplog.set_level(logging.INFO)
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    text = f"the dialer's wire major is {major}, the listener's {WIRE_MAJOR}: install releases next to each other"
    for number, purpose in enumerate((0, 1, 2), 1):
        with Stranger(end.port) as stranger:
            stranger.say(of_major(major, purpose) + (b"\0\0\0\1\xc0" if purpose == 0 else b""))
            if purpose == 0:
                refused = stranger.hear(wire.Refused)
                assert (refused.code, refused.text) == (LLMStatusCode.LLM_LINK_FAILED, text)
            assert stranger.is_hung_up_on()
        said = [each.getMessage() for each in caplog.records if text in each.getMessage()]
        assert len(said) == number
    with Stranger(end.port) as stranger:
        stranger.say(of_major(WIRE_MAJOR, 7))  # a purpose that this build does not have
        assert stranger.is_hung_up_on()
    assert f"{of_major(WIRE_MAJOR, 7)!r} is not one of ours" in caplog.text
    assert of_major(WIRE_MAJOR, 0) == wire.CONTROL_PREAMBLE
    assert of_major(WIRE_MAJOR, 1) == LANE_PREAMBLE
    assert end.do(links) == {}


@pytest.mark.parametrize(
    ("waits", "secure", "text"),
    [
        (True, False, "LinkRefused: {}: the peer closed the connection in the handshake{}"),
        (False, False, "LinkRefused: {}: cannot handshake: Connection reset by peer{}"),
        (True, True, "AuthFailed: {}: not authenticated: the peer closed the connection in the handshake: {}"),
        (False, True, "AuthFailed: {}: not authenticated: cannot handshake: Connection reset by peer: {}"),
    ],
)
def test_a_listener_of_an_older_wire_major_is_named_as_the_possible_reason(
    end: LocalEnd, tmp_path: Path, waits: bool, secure: bool, text: str
) -> None:
    """It reads a preamble that is not its own, and closes: with a reset if more is there already."""

    def hangs_up(sock: socket.socket) -> None:
        assert sock.recv(wire.PREAMBLE_BYTES, socket.MSG_WAITALL) != of_major(OLD_MAJOR, 0)
        if waits:
            sock.recv(1 << 16)
        sock.close()
        raise ConnectionAbortedError

    end.start("DECODER", 2, extra=secret_file(tmp_path / "secrets", a=b"a" * 32) if secure else {})
    rest = "it rejected this instance's credentials, has none, or is" if secure else "; is it another program, or"
    with listener(hangs_up) as port:
        said = end.do(dialled, port)
    assert said.rstrip("?") == text.format(f"link to 127.0.0.1:{port}", f"{rest} a release before 0.2.0")


# --- another rendezvous -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forced", [False, True])
def test_builds_with_other_same_host_packets_link_over_tcp_or_say_why_not(shm_pair: Pair, forced: bool) -> None:
    prompt, decoder = shm_pair.start(linked=False, extra={"llm.Transport": "shm" if forced else "auto"})
    here = rendezvous.VERSION
    why = f"same-host packets of version {here + 2} are not understood here, only {here}"
    try:
        decoder.do(packets_of, here + 2)
        text = decoder.do(dialled, prompt.port)
        if forced:
            assert text.startswith("LinkRefused: link to 127.0.0.1:")
            assert "llm.Transport='shm' cannot reach the peer: not shm: " in text
            assert why in text
            assert (prompt.do(links), decoder.do(links)) == ({}, {})
            return
        assert text == ""
        reports = decoder.do(explain, 1), prompt.do(explain, 2)
        assert [each.transport for each in reports] == ["tcp", "tcp"]
        assert why in reports[0].reason
        assert "not shm: no same-host rendezvous was made" in reports[1].reason
        bytes_move_both_ways(prompt, decoder)
    finally:
        decoder.do(packets_of, here)
