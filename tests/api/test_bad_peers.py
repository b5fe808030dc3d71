"""Strangers at our listener and linked peers that misbehave: each costs its own link at most, in bounded memory, and
leaves nothing (architecture rules 8 and 10). Linking to what is no good listener, and pulling from a target whose
answers are wrong: an error within the deadline, nothing written, nothing left, and the next link or pull works."""

import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest import mock

import msgspec
import numpy as np
import pytest

from faults.gated import count_messages, releases
from faults.strangers import Stranger, listener, read_hello, welcome_of
from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import LLMException, ProtocolError, TransferFailed
from tests.support.ends import Call
from tests.support.kinds import LocalEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.pairs import Pair, pair_of
from tests.support.wire import MAX_PINS_PER_PEER, VERSIONS, CacheKind, Geometry, Namespace, PeerSecrets, key_of
from tests.support.wire import messages as wire
from tests.support.world import World, anonymous_bytes, make_config, residue_of

Behaviour = Callable[[socket.socket], None]

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR", "errors.ProtocolError")

Code = LLMStatusCode
MAX = 2**63 - 1
HELD = ("fds", "memfd mappings")
OVERSIZED = struct.pack(">I", wire.FRAME_LIMIT + 1)
KEY, MANY = CacheKey(1, 5), BlocksCacheKey(1, 3)
#: What costs a stranger its connection: instead of a greeting (False), and on a link (True).
HUNG_UP_ON: Final[dict[str, tuple[bool, bytes]]] = {
    "nothing, then the end": (False, b""),
    "garbage": (False, b"\xff" * 4096),
    "half a preamble, then the end": (False, wire.CONTROL_PREAMBLE[:5]),
    "another version": (False, wire.CONTROL_PREAMBLE[:9] + b"\x63" + wire.CONTROL_PREAMBLE[10:]),
    "another purpose": (False, wire.CONTROL_PREAMBLE[:11] + b"\x09"),
    "half a header, then the end": (False, wire.CONTROL_PREAMBLE + b"\0\0"),
    "half a frame, then the end": (False, wire.CONTROL_PREAMBLE + struct.pack(">I", 100) + b"abc"),
    "an oversized frame": (False, wire.CONTROL_PREAMBLE + OVERSIZED),
    "no message": (False, wire.CONTROL_PREAMBLE + struct.pack(">I", 3) + b"abc"),
    "another message": (False, wire.CONTROL_PREAMBLE + wire.frame(wire.Beat(1))),
    "a resolve": (False, wire.CONTROL_PREAMBLE + wire.frame(wire.Resolve(1, False, None, 1, 0, 1000))),
    "linked: Linked": (True, wire.frame(wire.Linked(1, bytes(16)))),
    "linked: TransportChoice": (True, wire.frame(wire.TransportChoice("shm", "", 1, bytes(16)))),
    "linked: Refused": (True, wire.frame(wire.Refused(0, ""))),
    "linked: an oversized frame": (True, OVERSIZED),
    "linked: no message": (True, struct.pack(">I", 1) + b"\xc1"),
    "linked: half a frame, then the end": (True, wire.frame(wire.Ping(1))[:6]),
}
COMMUNICATOR = wire.CommunicatorId("n", [(1, 0), (2, 1)], b"d" * 16, b"t" * 16)
#: Changes of the Hello, what is said to the Welcome (None: there is none), and the refusal.
REFUSALS: Final[dict[str, tuple[dict[str, Any], str | type[wire.Welcome] | None, Code, str]]] = {
    "another version": ({"versions": (99, 100)}, None, Code.LLM_LINK_FAILED, "no common protocol version: 99 to 100"),
    "another cluster wanted": ({"wanted": 77}, None, Code.LLM_LINK_FAILED, "remote_cluster_id=77"),
    "another rca flag": ({"remote_accessible": True}, None, Code.LLM_PARAM_INVALID, "EnableRemoteCacheAccessible"),
    "the id of a linked cluster": ({"cluster_id": 2}, None, Code.LLM_ALREADY_LINK, "another cluster id"),
    "a communicator": ({"communicator": COMMUNICATOR}, None, Code.LLM_NOT_YET_LINK, ""),
    "an echo of the Welcome": ({}, wire.Welcome, Code.LLM_FAILED, "expected TransportChoice"),
    "shm, not at the rendezvous": ({}, "shm", Code.LLM_LINK_FAILED, ""),
    "inproc, in another process": ({}, "inproc", Code.LLM_LINK_FAILED, ""),
    "no transport": ({}, "x\ny", Code.LLM_LINK_FAILED, ""),
}
#: How many strangers stop in a handshake, how much of it the first and the last of them say, and whether they are more
#: than are greeted at once.
CROWDS: Final = {
    "silent": (200, 0.0, 0.0, True),
    "welcomed": (150, 1.0, 1.0, True),
    "at every byte of the greeting": (60, 0.0, 1.0, False),
}
WILD_QUESTIONS: Final = [
    wire.Resolve(1, False, None, MAX, MAX, MAX),
    wire.Resolve(MAX, False, None, -(2**63), 0, 0),
    wire.Resolve(3, False, None, 2**64 - 1, 0, 0),
    wire.Resolve(4, False, (99, 0, 0), 1, 0, 10),
    wire.Resolve(5, False, (-(2**63), 2**64 - 1, 2**64 - 1), 1, 0, 10),
    wire.Resolve(6, False, (int(Namespace.REQUEST), 2**64 - 1, 1), 0, 0, MAX),
    wire.Resolve(7, True, None, 1, 0, 1000),
    wire.Resolve(8, True, None, 0, MAX, 1000),
    wire.Resolve(9, False, None, 0, 0, 1000),
]
UNASKED: Final = [
    wire.Failed(1, 0, "x"),
    wire.UnlinkAck(1),
    wire.Pong(MAX),
    wire.UnlinkCancel(),
    wire.UnlinkCancel(),
    wire.Beat(MAX),
    wire.Consumed(1, 0, 0, 4),
    wire.Consumed(-5, MAX, MAX, MAX),
    *(wire.Release(pin, 0, count) for pin in (0, 1, 2, 3, MAX) for count in (0, 1, MAX)),
]


@pytest.fixture(scope="module")
def linked_once(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A prompt and a decoder that are linked, for all tests of this file."""
    for pair in pair_of(request, "shm"):
        pair.start()
        pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
        bytes_move_both_ways(pair.prompt, pair.decoder)
        yield pair


@pytest.fixture
def linked(linked_once: Pair) -> Iterator[Pair]:
    """The two; the prompt must be afterwards as it was before, and so must its link to the decoder."""
    prompt = linked_once.prompt
    if prompt.do(links) != {2: "ready"}:  # a test has failed while they were parted
        linked_once.link()
    before, bytes_before, held = prompt.do(picture), prompt.do(show, "kv"), prompt.do(residue_of)
    yield linked_once
    wait_until(lambda: prompt.do(links) == {2: "ready"})
    wait_until(lambda: prompt.do(picture).pins == 0)
    after = prompt.do(picture)
    assert (after.caches, after.keys) == (before.caches, before.keys)
    assert [pool.used_bytes for pool in after.pools] == [pool.used_bytes for pool in before.pools]
    same_bytes(prompt.do(show, "kv"), bytes_before)
    bytes_move_both_ways(prompt, linked_once.decoder)
    wait_until(lambda: [prompt.do(residue_of)[kind] for kind in HELD] == [held[kind] for kind in HELD])


@pytest.mark.parametrize("name", HUNG_UP_ON)
def test_a_stranger_that_says_what_has_no_place_is_hung_up_on(linked: Pair, name: str) -> None:
    when_linked, said = HUNG_UP_ON[name]
    with Stranger(linked.prompt.port) as stranger:
        if when_linked:
            stranger.link()
        stranger.say(said)
        if name.endswith("then the end"):  # the other side would wait for the rest: a greeting has ten seconds
            stranger.sock.shutdown(1)
        assert stranger.is_hung_up_on()


@pytest.mark.parametrize("name", REFUSALS)
def test_a_stranger_that_may_not_link_is_told_why_and_hung_up_on(linked: Pair, name: str) -> None:
    changes, then, code, text = REFUSALS[name]
    with Stranger(linked.prompt.port) as stranger:
        stranger.say(wire.CONTROL_PREAMBLE, stranger.hello(**changes))
        if then is not None:
            welcome = stranger.hear(wire.Welcome)
            stranger.choose(then, 1) if isinstance(then, str) else stranger.say(welcome)
        refused = stranger.hear(wire.Refused)
        assert refused.code == code
        assert text in refused.text
        assert "\n" not in refused.text
        assert stranger.is_hung_up_on()


@pytest.mark.parametrize("name", CROWDS)
def test_rule_10_strangers_that_stop_in_a_handshake_keep_no_good_peer_out(linked: Pair, name: str) -> None:
    count, first, last, too_many = CROWDS[name]
    assert linked.decoder.do(unlink, [info(1, linked.prompt.port)]) == SUCCESS
    alone(linked.prompt)
    with ExitStack() as leaving:
        crowd = []
        for number in range(count):
            crowd.append(stranger := leaving.enter_context(Stranger(linked.prompt.port)))
            said = wire.CONTROL_PREAMBLE + wire.frame(stranger.hello())
            share = round(len(said) * (first + (last - first) * number / (count - 1)))
            stranger.say(said[:share])
            if share == len(said):
                stranger.hear(wire.Welcome)
        linked.link()
        bytes_move_both_ways(linked.prompt, linked.decoder)
        if too_many:
            assert crowd[0].is_hung_up_on(), "the one that has been at it for longest makes room"
        if last == 0:  # the last one is still listened to
            crowd[-1].say(wire.CONTROL_PREAMBLE, crowd[-1].hello())
            crowd[-1].hear(wire.Welcome)


def test_a_stranger_in_a_handshake_reserves_neither_its_token_nor_a_cluster_id(linked: Pair) -> None:
    assert linked.decoder.do(unlink, [info(1, linked.prompt.port)]) == SUCCESS
    alone(linked.prompt)
    token = b"t" * 16
    with Stranger(linked.prompt.port, cluster_id=2) as first, Stranger(linked.prompt.port) as second:
        first.say(wire.CONTROL_PREAMBLE, first.hello(token=token))
        first.hear(wire.Welcome)
        second.say(wire.CONTROL_PREAMBLE, second.hello(token=token))
        assert "token" in second.hear(wire.Refused).text  # two may not be expected with one token
        linked.link()
        first.choose("shm", 1)
        first.hear(wire.Refused)


def test_wild_questions_are_failures_what_was_not_asked_for_is_ignored_and_unlink_requests_are_answered(
    linked: Pair,
) -> None:
    with Stranger(linked.prompt.port) as stranger:
        stranger.link()
        for message in WILD_QUESTIONS:
            stranger.say(message)
            answer = stranger.hear(wire.Failed)
            assert answer.id == message.id
            assert answer.code in (Code.LLM_KV_CACHE_NOT_EXIST, Code.LLM_PARAM_INVALID)
        stranger.say(*UNASKED)
        stranger.is_served()
        # But a pin in an answer that was not asked for is given back.
        stranger.say(wire.Resolved(9, 1, msgspec.Raw(b"\xc0"), 0, b"", b"", [], 77))
        assert stranger.hear(wire.Release) == wire.Release(77, 0, 0)
        stranger.is_served()
        for number in range(20):
            stranger.say(wire.UnlinkRequest(number))
            assert stranger.hear(wire.UnlinkAck).id == number
        assert linked.prompt.do(links)[66] == "draining"
        stranger.say(wire.UnlinkCancel())
        stranger.is_served()
        assert linked.prompt.do(links)[66] == "ready"


def question(number: int, key: CacheKey | BlocksCacheKey) -> wire.Resolve:
    return wire.Resolve(number, False, key_of(key), 0, 0, 600_000)


def test_rule_10_the_pins_of_a_peer_are_bounded_released_once_each_and_go_with_it(linked: Pair) -> None:
    prompt = linked.prompt
    prompt.do(make, "pinned", Spec(rows=2, stride=64, keys=(KEY,)), 1)
    before, more = prompt.do(picture), 7
    with Stranger(linked.prompt.port) as stranger:
        stranger.link()
        # From a thread: the other side may take it only later.
        talker = Call(stranger.say, *(question(number, KEY) for number in range(1, MAX_PINS_PER_PEER + more + 1)))
        pins = [stranger.hear(wire.Resolved).pin for _ in range(MAX_PINS_PER_PEER)]
        refusals = [stranger.hear(wire.Failed) for _ in range(more)]
        talker.result()
        assert len(set(pins)) == MAX_PINS_PER_PEER
        assert {refusal.code for refusal in refusals} == {Code.LLM_LINK_BUSY}
        assert all(str(MAX_PINS_PER_PEER) in refusal.text for refusal in refusals)
        assert prompt.do(picture).pins == MAX_PINS_PER_PEER
        bytes_move_both_ways(prompt, linked.decoder)  # another peer is not concerned
        with Stranger(linked.prompt.port, 67) as other:
            other.link()
            other.say(*(wire.Release(pin, 0, 4) for pin in pins))
            other.is_served()
        now = prompt.do(picture)
        told = now.unknown_releases - before.unknown_releases
        assert (now.pins, told, now.keys) == (len(pins), len(pins), before.keys)
        # One released, one more. The same frame again releases nothing, and consumes no part of the key either.
        stranger.say(*[wire.Release(pins[0], 0, 2)] * 3, question(9999, KEY))
        assert stranger.hear(wire.Resolved).id == 9999
        after = prompt.do(picture)
        assert (after.pins, after.unknown_releases) == (len(pins), now.unknown_releases + 2)
        assert [key.unconsumed_bytes for key in after.keys if key.key == "(0, 5, 0)"] == [2 * 64], "half, once"
    wait_until(lambda: prompt.do(picture).pins == 0)
    assert prompt.do(picture).keys == after.keys, "what goes with its peer consumes nothing"
    prompt.do(forget, "pinned")
    prompt.do(call, "remove_cache_key", KEY)


def unsent(world: World, peer: int) -> int:
    return world.probe.unsent(peer)


def test_rule_10_ten_thousand_questions_whose_answers_are_not_read_cost_bounded_memory(linked: Pair) -> None:
    count, bound = 10_000, 64 << 20
    prompt = linked.prompt
    # An answer is 24 KB long: all of them would be 240 MB.
    prompt.do(make, "many", Spec(tensors=2000, rows=1, stride=16, blocks=True, blocks_key=MANY), 1)
    with Stranger(linked.prompt.port) as stranger:
        stranger.link()
        before = prompt.do(anonymous_bytes)
        questions: list[wire.Message] = [question(number, MANY) for number in range(1, count + 1)]
        talker = Call(stranger.say, *questions)
        # The first answers fill what the kernel and the backlog hold: from then on the stranger is not read any more.
        wait_until(lambda: prompt.do(unsent, 66) > 1 << 20)
        for _ in range(3):
            bytes_move_both_ways(prompt, linked.decoder)
        assert prompt.do(anonymous_bytes) - before < bound
        # Nothing was lost: a stranger that begins to read gets every answer, in order.
        for number in range(1, count + 1):
            assert stranger.hear(wire.Resolved).id == number
        talker.result()
        assert prompt.do(anonymous_bytes) - before < bound
        assert prompt.do(links) == {2: "ready", 66: "ready"}
        stranger.say(*questions[:500])  # and it may leave without reading
        wait_until(lambda: prompt.do(unsent, 66) > 1 << 20)
    wait_until(lambda: prompt.do(links) == {2: "ready"})
    prompt.do(forget, "many")


def test_a_stranger_may_link_again_and_replaces_its_own_link_only(linked: Pair) -> None:
    port, incarnation, known = linked.prompt.port, b"s" * 16, PeerSecrets()
    with Stranger(port, 66, incarnation, known) as first, Stranger(port, 66, incarnation, known) as second:
        first.link(sequence=1)
        second.link(sequence=2)
        assert first.is_hung_up_on()
        second.is_served()
        with Stranger(port, 66, incarnation, known) as stale, pytest.raises(AssertionError, match="Linked"):
            stale.link(sequence=1)
        second.is_served()
        assert linked.prompt.do(links) == {2: "ready", 66: "ready"}


FAILED, TIMEOUT, INVALID = Code.LLM_LINK_FAILED, Code.LLM_TIMEOUT, Code.LLM_PARAM_INVALID
ROW_KEY = CacheKey(1, 10)


def says(*what: bytes, close: bool = False) -> Behaviour:
    """Read the greeting and say this, then close or fall silent."""

    def behave(sock: socket.socket) -> None:
        read_hello(sock)
        sock.sendall(b"".join(what))
        if close:
            sock.shutdown(socket.SHUT_RDWR)

    return behave


def echoes(sock: socket.socket) -> None:
    """Send the initiator's own greeting back."""
    sock.sendall(wire.frame(read_hello(sock)))


def drips(sock: socket.socket) -> None:
    """A byte now and then: every single wait is short, the whole never ends."""
    for byte in wire.frame(welcome())[:-1] * 1000:
        sock.sendall(bytes([byte]))
        time.sleep(0.02)


def welcome(**changes: Any) -> wire.Welcome:
    return welcome_of(1, b"i" * 16, b"c" * 16, **{"rendezvous": "@llm-datadist-without-listener"} | changes)


def welcomes(**changes: Any) -> Behaviour:
    return says(wire.frame(welcome(**changes)))


def mutes(sock: socket.socket) -> None:
    """Name a rendezvous that takes connections and never answers."""
    name = f"llm-datadist-mute-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind("\0" + name)
        mute.listen()
        welcomes(rendezvous="@" + name)(sock)
        sock.recv(1)


#: What a listener does and what the call says.
LISTENERS: Final[dict[str, tuple[Behaviour, LLMStatusCode]]] = {
    "never answers": (says(), TIMEOUT),
    "half a frame, then silence": (says(wire.frame(welcome())[:20]), TIMEOUT),
    "a byte now and then": (drips, TIMEOUT),
    "always busy": (says(wire.frame(wire.Refused(int(Code.LLM_LINK_BUSY), "")), close=True), TIMEOUT),
    "a mute rendezvous": (mutes, TIMEOUT),
    "closes at once": (lambda sock: sock.shutdown(socket.SHUT_RDWR), FAILED),
    "half a frame, then the end": (says(wire.frame(welcome())[:20], close=True), FAILED),
    "garbage": (says(secrets.token_bytes(3) + b"\xff" * 4096), FAILED),
    "an oversized frame": (says(struct.pack(">I", wire.FRAME_LIMIT + 1)), FAILED),
    "an empty frame": (says(struct.pack(">I", 0)), FAILED),
    "no message": (says(struct.pack(">I", 3) + b"abc"), FAILED),
    "another message": (says(wire.frame(wire.Beat(1))), FAILED),
    "refuses, with success": (says(wire.frame(wire.Refused(0, "all is well"))), FAILED),
    "refuses, with a code": (says(wire.frame(wire.Refused(int(INVALID), "no\nsuch\nthing"))), INVALID),
    "refuses, with no code of ours": (says(wire.frame(wire.Refused(123, "x"))), Code.LLM_FAILED),
    "an echo of our own greeting": (echoes, FAILED),
    "another version": (welcomes(versions=(VERSIONS[1] + 1, VERSIONS[1] + 2)), FAILED),
    "another cluster": (welcomes(cluster_id=2**64 - 1), FAILED),
    "another rca flag": (welcomes(remote_accessible=True), INVALID),
    "an unknown transport": (welcomes(transport="rdma"), FAILED),
    "a rendezvous without a listener": (welcomes(), FAILED),
    "a rendezvous that is a file": (welcomes(rendezvous="/etc/passwd"), FAILED),
    "a rendezvous that is no name": (welcomes(rendezvous="x" * 4000), FAILED),
}

#: What the log says of some of them, which would fail later anyhow.
REASONS: Final = {
    "another version": f"no common protocol version: {VERSIONS[1] + 1} to {VERSIONS[1] + 2} at cluster",
    "another cluster": "remote_cluster_id=1, but cluster 18446744073709551615 answered",
}


@contextmanager
def full_backlog() -> Iterator[int]:
    """A port where the one connection that may wait to be accepted does, so the kernel takes no other."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, socket.create_connection(server.getsockname()):
        yield server.getsockname()[1]


@pytest.mark.parametrize("in_time", [False, True], ids=["timeouts", "failures"])
def test_bad_listeners_cost_a_code_within_the_deadline_and_leave_nothing(
    end: LocalEnd, in_time: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them in one call: none costs another one anything."""
    end.start("DECODER", 2)
    before = end.do(picture)
    rows = {name: row for name, row in LISTENERS.items() if (row[1] is not TIMEOUT) == in_time}
    wanted = {name: code for name, (_, code) in rows.items()}
    with ExitStack() as listening:
        ports = {name: listening.enter_context(listener(behave)) for name, (behave, _) in rows.items()}
        if not in_time:
            ports["a full backlog"], wanted["a full backlog"] = listening.enter_context(full_backlog()), TIMEOUT
        clusters = [info(1, port) for port in ports.values()]
        _, codes = end.do(link, clusters, 20_000 if in_time else 500)
    assert dict(zip(wanted, codes, strict=True)) == wanted
    told = [record.getMessage() for record in caplog.records if "link cluster 1" in record.getMessage()]
    assert len(told) == len(clusters)
    for name, port in ports.items():
        place = "@llm-datadist-mute" if name == "a mute rendezvous" else f"127.0.0.1:{port}"
        (reason,) = [message for message in told if place in message]
        assert "\n" not in reason
        assert REASONS.get(name, "") in reason
        assert ("500 ms" in reason) == (wanted[name] is TIMEOUT), reason
    overall, alone = end.do(link, [info(1, 9, ip="255.255.255.255")], 300)  # no route there
    assert alone == [overall]
    assert overall in (FAILED, TIMEOUT)
    assert end.do(picture) == before
    prompt = World("prompt")
    assert end.do(link, [info(1, prompt.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0")))]) == SUCCESS
    assert end.do(links) == {1: "ready"}
    prompt.stop()


def geometry(**changes: Any) -> msgspec.Raw:
    good = Geometry.of(Spec().desc, CacheKind.CACHE)
    return msgspec.Raw(msgspec.msgpack.encode(msgspec.structs.replace(good, **changes)))


def words(kind: str, *values: int) -> bytes:
    return np.array(values, dtype=kind).tobytes()


#: What is wrong in an answer, and a part of the error.
LIES: Final[list[tuple[dict[str, Any], str]]] = [
    ({"geometry": msgspec.Raw(b"\xc0")}, "an invalid cache geometry"),
    ({"geometry": geometry(kind=5)}, "an invalid cache geometry"),
    ({"geometry": geometry(rows=2**40)}, "impossible cache geometry"),
    ({"geometry": geometry(stride=0)}, "impossible cache geometry"),
    ({"geometry": geometry(num_tensors=5)}, "4 tensors"),
    ({"geometry": geometry(tensor_bytes=2**62, stride=2**50)}, "ends outside"),
    ({"row": 8}, "row 8"),
    ({"row": 2**63 - 1}, "row 9223372036854775807"),
    ({"regions": b""}, "0 tensors"),
    ({"regions": words("<u4", 1, 1, 1)}, "3 tensors"),
    ({"regions": b"\1\0\0"}, "broken answer"),
    ({"regions": words("<u4", 1, 1, 1, 7)}, "no region 7"),
    ({"offsets": words("<u8", 0, 0, 0)}, "tensors"),
    ({"offsets": b"\0" * 31}, "broken answer"),
    ({"offsets": words("<u8", 0, 0, 0, 32 << 20)}, "ends outside"),
    ({"offsets": words("<u8", 0, 0, 0, (32 << 20) - 8 * 48 + 1)}, "ends outside"),
    ({"offsets": words("<u8", 2**64 - 1, 0, 0, 0)}, "ends outside"),
    ({"guards": [wire.Guarded(2**40, 0)]}, "guard"),
    ({"guards": [wire.Guarded(2**63 - 1, 0)]}, "guard"),
]
TWO_LINES = "two\nlines\r\nof text"
#: What is said instead of a Resolved, and the error; interface R29: nothing that is raised carries success.
NO_ANSWERS: Final[list[tuple[wire.Message, type[LLMException], LLMStatusCode, str]]] = [
    (wire.UnlinkAck(0), ProtocolError, Code.LLM_FAILED, "answered a Resolve with UnlinkAck"),
    (wire.Failed(0, 0, TWO_LINES), TransferFailed, Code.LLM_FAILED, "two lines of text"),
    (wire.Failed(0, 1234, TWO_LINES), TransferFailed, Code.LLM_FAILED, "two lines of text"),
    (wire.Failed(0, -1, TWO_LINES), TransferFailed, Code.LLM_UNKNOWN_ERROR, "two lines of text"),
    (wire.Failed(0, 507057, TWO_LINES), TransferFailed, Code.LLM_SUSPECT_REMOTE_ERROR, "two lines of text"),
]


class Liar:
    """Doctors the answers of an end while ``lie`` is set."""

    lie: Callable[[wire.Resolved], wire.Message] | None = None

    def answer(self, link: Any, message: wire.Resolve, honest: Callable[[Any, wire.Resolve], None]) -> None:
        lie = self.lie
        if lie is None:
            honest(link, message)
            return
        # A liar's answer has to fit the link's own tables, which only an honest target makes.
        with mock.patch.object(link, "tell", lambda resolved: link.send(lie(resolved))):
            honest(link, message)


def pull(world: World, row: int, layers: int = 2) -> None:
    call(world, "pull_cache", ROW_KEY, Use("kv"), row, src_layer_range=range(layers), dst_layer_range=range(layers))


@pytest.mark.gpu
@pytest.mark.parametrize("mapped", [False, True], ids=["a first answer", "places that were mapped before"])
def test_rule_10_r29_a_lie_is_a_typed_error_that_moves_nothing_and_gives_its_pin_back(
    local_pair: Pair, mapped: bool
) -> None:
    prompt, decoder = local_pair.start()
    src, dst = prompt.do(make, "kv", Spec(keys=(ROW_KEY,)), 1), decoder.do(make, "kv", Spec(), 2)
    prompt.do(count_messages)
    liar = Liar()
    with prompt.world.probe.answered(wire.Resolve, liar.answer):  # type: ignore[attr-defined]  # both ends are here
        for change, text in LIES:
            liar.lie = None
            if mapped:
                decoder.do(pull, 3, 1)  # one layer, and true: not yet all that the key is for
                dst = moved(dst[:2], src[:2], [(3, 0)]) + dst[2:]
            wait_until(lambda: prompt.do(picture).pins == 0)
            was = prompt.do(releases)
            liar.lie = lambda answer, change=change: msgspec.structs.replace(answer, **change)
            with pytest.raises(ProtocolError, match=text) as caught:
                decoder.do(pull, 5)
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert "\n" not in str(caught.value)
            wait_until(lambda was=was: prompt.do(releases) == was + 1 and prompt.do(picture).pins == 0)  # type: ignore[misc]
            assert [key.key for key in prompt.do(picture).keys] == ["(0, 10, 0)"]
            same_bytes(decoder.do(show, "kv"), dst)
        for answer, kind, status, text in NO_ANSWERS:
            liar.lie = lambda resolved, answer=answer: msgspec.structs.replace(answer, id=resolved.id)
            with pytest.raises(kind, match=text) as failed:
                decoder.do(pull, 5)
            assert failed.value.status_code is status
            if kind is TransferFailed:
                assert (failed.value.peer, failed.value.phase) == (1, "resolve")
            assert "\n" not in str(failed.value)
            same_bytes(decoder.do(show, "kv"), dst)
        liar.lie = None
        decoder.do(pull, 5)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))
