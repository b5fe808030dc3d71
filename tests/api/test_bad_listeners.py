"""Linking to what is no good listener: a code within the deadline, nothing left, and the next link works."""

from __future__ import annotations

import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._links.messages import FRAME_LIMIT, PROTOCOL_VERSION, Beat, Linked, Refused, Welcome, frame
from tests.support.linking import SUCCESS, info, link, links
from tests.support.moves import picture
from tests.support.strangers import listener, read_hello, silent_port
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.ends import LocalEnd

    Behaviour = Callable[[socket.socket], None]

FAILED, TIMEOUT, INVALID = (
    LLMStatusCode.LLM_LINK_FAILED,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_PARAM_INVALID,
)


def says(*what: bytes, close: bool = False) -> Behaviour:
    """Say this when somebody has introduced himself, then close or fall silent."""

    def behave(sock: socket.socket) -> None:
        read_hello(sock)
        sock.sendall(b"".join(what))
        if close:
            sock.shutdown(socket.SHUT_RDWR)

    return behave


def echoes(sock: socket.socket) -> None:
    """Send the initiator's own greeting back."""
    sock.sendall(frame(read_hello(sock)))


def resets(sock: socket.socket) -> None:
    read_hello(sock)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def closes_at_once(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_RDWR)


def drips(sock: socket.socket) -> None:
    """A byte now and then: every single wait is short, the whole never ends."""
    for byte in frame(welcome())[:-1] * 1000:
        sock.sendall(bytes([byte]))
        time.sleep(0.02)


def welcome(**changes: Any) -> Welcome:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "cluster_id": 1,
        "incarnation": b"i" * 16,
        "remote_accessible": False,
        "pid": 1,
        "host": "stranger",
        "rendezvous": "@llm-datadist-nobody",
        "cookie": b"c" * 16,
        "transport": None,
        "nonce": bytes(32),
        "credentials": b"",
        "lane_token": b"t" * 16,
        "proof": b"",
    }
    return Welcome(**(fields | changes))


def welcomes(**changes: Any) -> Behaviour:
    return says(frame(welcome(**changes)))


LISTENERS: Final[dict[str, tuple[Behaviour, LLMStatusCode]]] = {
    "never answers": (says(), TIMEOUT),
    "half a frame, then silence": (says(frame(welcome())[:20]), TIMEOUT),
    "a byte now and then": (drips, TIMEOUT),
    "always busy": (says(frame(Refused(int(LLMStatusCode.LLM_LINK_BUSY), "")), close=True), TIMEOUT),
    "closes at once": (closes_at_once, FAILED),
    "resets": (resets, FAILED),
    "half a frame, then the end": (says(frame(welcome())[:20], close=True), FAILED),
    "garbage": (says(secrets.token_bytes(3) + b"\xff" * 4096), FAILED),
    "http": (says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"), FAILED),
    "ssh": (says(b"SSH-2.0-OpenSSH_9.2\r\n"), FAILED),
    "an oversized frame": (says(struct.pack(">I", FRAME_LIMIT + 1)), FAILED),
    "an empty frame": (says(struct.pack(">I", 0)), FAILED),
    "no message": (says(struct.pack(">I", 3) + b"abc"), FAILED),
    "another message": (says(frame(Beat(1))), FAILED),
    "the last message first": (says(frame(Linked(1, b""))), FAILED),
    "refuses, with success": (says(frame(Refused(0, "all is well"))), FAILED),
    "refuses, with a code": (says(frame(Refused(int(INVALID), "no\nsuch\nthing"))), INVALID),
    "refuses, with no code of ours": (says(frame(Refused(123, "x"))), LLMStatusCode.LLM_FAILED),
    "an echo of our own greeting": (echoes, FAILED),
    "another version": (welcomes(version=PROTOCOL_VERSION + 1), FAILED),
    "another cluster": (welcomes(cluster_id=2**64 - 1), FAILED),
    "another rca flag": (welcomes(remote_accessible=True), INVALID),
    "an unknown transport": (welcomes(transport="rdma"), FAILED),
    "a rendezvous nobody is at": (welcomes(), FAILED),
    "a rendezvous that is a file": (welcomes(rendezvous="/etc/passwd"), FAILED),
    "a rendezvous that is no name": (welcomes(rendezvous="x" * 4000), FAILED),
}


@pytest.fixture
def dialler(end: LocalEnd) -> Iterator[LocalEnd]:
    """An end that must be as it was afterwards, and able to link to somebody better."""
    end.start("DECODER", 2)
    before = end.do(picture)
    yield end
    assert end.do(picture) == before
    prompt = World("prompt")
    assert end.do(link, [info(1, prompt.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0")))]) == SUCCESS
    assert end.do(links) == {1: "ready"}
    prompt.stop()


@pytest.mark.parametrize("name", LISTENERS)
def test_a_bad_listener_costs_a_code_within_the_deadline(
    dialler: LocalEnd, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    behave, code = LISTENERS[name]
    timeout = 300 if code is TIMEOUT else 20_000
    with listener(behave) as port:
        assert dialler.do(link, [info(1, port)], timeout) == (code, [code])
    (reason,) = [record.getMessage() for record in caplog.records if "link cluster 1" in record.getMessage()]
    assert f"127.0.0.1:{port}" in reason
    assert "\n" not in reason
    if code is TIMEOUT:
        assert "300 ms" in reason


def test_a_rendezvous_that_never_answers_is_a_timeout(dialler: LocalEnd) -> None:
    name = f"llm-datadist-mute-{secrets.token_hex(4)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as mute:
        mute.bind("\0" + name)
        mute.listen()
        with listener(welcomes(rendezvous="@" + name)) as port:
            assert dialler.do(link, [info(1, port)], 300) == (TIMEOUT, [TIMEOUT])


def test_an_unreachable_port_is_link_failed(dialler: LocalEnd) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound, so that it is nobody else's, and not listening
        port = nobody.getsockname()[1]
        assert dialler.do(link, [info(1, port)], 20_000) == (FAILED, [FAILED])


def test_a_full_backlog_is_a_timeout(dialler: LocalEnd) -> None:
    with silent_port() as port, socket.socket() as filler:
        crowd = [filler]
        # Connections that nobody accepts, until the kernel takes no more.
        filler.settimeout(0.2)
        with suppress(TimeoutError):
            while True:
                crowd[-1].connect(("127.0.0.1", port))
                crowd.append(socket.socket())
                crowd[-1].settimeout(0.2)
        assert dialler.do(link, [info(1, port)], 300) == (TIMEOUT, [TIMEOUT])
        for sock in crowd:
            sock.close()


def test_an_address_without_a_route_is_a_code(dialler: LocalEnd) -> None:
    overall, codes = dialler.do(link, [info(1, 9, ip="255.255.255.255")], 300)
    assert overall in (FAILED, TIMEOUT)
    assert codes == [overall]
