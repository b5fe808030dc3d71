"""Linking to what is no good listener, and pulling from a target whose answers are wrong: an error within the deadline,
nothing written, nothing left, and the next link or pull works."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pytest

from faults.gated import count_messages, releases
from faults.strangers import listener, read_hello
from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._links import messages as wire
from llm_datadist.errors import LLMException, ProtocolError, TransferFailed
from tests.support.linking import SUCCESS, info, link, links
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.kinds import LocalEnd, Pair

    Behaviour = Callable[[socket.socket], None]

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR", "errors.ProtocolError")

Code = LLMStatusCode
FAILED, TIMEOUT, INVALID = Code.LLM_LINK_FAILED, Code.LLM_TIMEOUT, Code.LLM_PARAM_INVALID
KEY = CacheKey(1, 10)


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
    good = wire.Welcome(
        version=wire.PROTOCOL_VERSION,
        cluster_id=1,
        incarnation=b"i" * 16,
        remote_accessible=False,
        pid=1,
        host="stranger",
        rendezvous="@llm-datadist-without-listener",
        cookie=b"c" * 16,
        nonce=bytes(16),
        lane_share=b"",
        fabric="",
        proof=b"",
        transport=None,
        lane_token=b"t" * 16,
    )
    return msgspec.structs.replace(good, **changes)


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
    "another version": (welcomes(version=wire.PROTOCOL_VERSION + 1), FAILED),
    "another cluster": (welcomes(cluster_id=2**64 - 1), FAILED),
    "another rca flag": (welcomes(remote_accessible=True), INVALID),
    "an unknown transport": (welcomes(transport="rdma"), FAILED),
    "a rendezvous without a listener": (welcomes(), FAILED),
    "a rendezvous that is a file": (welcomes(rendezvous="/etc/passwd"), FAILED),
    "a rendezvous that is no name": (welcomes(rendezvous="x" * 4000), FAILED),
}

#: What the log says of some of them, which would fail later anyhow.
REASONS: Final = {
    "another version": f"version {wire.PROTOCOL_VERSION + 1}",
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
    ({"geometry": msgspec.Raw(b"\xc0")}, "no cache geometry"),
    ({"geometry": geometry(kind=5)}, "no cache geometry"),
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
    """Doctors the prompt's answers while ``lie`` is set."""

    def __init__(self, end: LocalEnd) -> None:
        engine: Any = end.world.dd._engine
        self.lie: Callable[[wire.Resolved], wire.Message] | None = None
        honest = engine.links._handlers[wire.Resolve]

        def resolve(link: Any, message: wire.Resolve) -> None:
            if self.lie is None:
                honest(link, message)
                return
            link.send(self.lie(engine._target._resolved(link, message)))

        engine.links._handlers[wire.Resolve] = resolve


def pull(world: World, row: int, layers: int = 2) -> None:
    call(world, "pull_cache", KEY, Use("kv"), row, src_layer_range=range(layers), dst_layer_range=range(layers))


@pytest.mark.parametrize("mapped", [False, True], ids=["a first answer", "places that were mapped before"])
def test_rule_10_r29_a_lie_is_a_typed_error_that_moves_nothing_and_gives_its_pin_back(
    local_pair: Pair, mapped: bool
) -> None:
    local_pair.start()
    prompt, decoder = local_pair.prompt, local_pair.decoder
    src, dst = prompt.do(make, "kv", Spec(keys=(KEY,)), 1), decoder.do(make, "kv", Spec(), 2)
    prompt.do(count_messages)
    liar = Liar(prompt)  # type: ignore[arg-type]  # both ends are here
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
