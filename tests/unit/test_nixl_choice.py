"""Who decides that a link uses NIXL, and what an owner serves over it. No NIXL is needed."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading

import numpy as np
import pytest

from llm_datadist._native import Plan, encode_request, plan_row
from llm_datadist._transport.choose import choose
from llm_datadist._transport.connect import NixlEndpoint
from llm_datadist._transport.lanes import LaneGrant, LaneRequest
from llm_datadist._transport.nixl import Ask, Nixl, Refused, Server, _answer_of, _encode, _End
from llm_datadist._transport.peer_memory import why_stranger
from llm_datadist.errors import LinkRefused, LLMStatusCode, ProtocolError
from llm_datadist.testing.scene import tensors_over
from tests.support.linking import has_ipv6

PLAN = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)


class Owner:
    """Grants 64 bytes under one tag, whoever asks."""

    def __init__(self) -> None:
        self.memory = np.zeros(64, np.uint8)

    def on_read(self, link: object, request: LaneRequest) -> LaneGrant:
        return LaneGrant(tensors=tensors_over(self.memory), guards=(), tag=7, plan=None)

    on_write = on_read

    def on_lane_lost(self, link: object, left: int, reason: str) -> None:
        raise AssertionError("there are no lanes here")


class NoWire:
    def ask(self, *_: object) -> bytes:
        raise AssertionError("nothing is asked here")

    def tell(self, *_: object) -> None:
        raise AssertionError("nothing is told here")


def server(*, writable: bool) -> Server:
    nixl = Nixl(NoWire(), Owner(), [])
    sender, receiver, pushed = (_End(nixl, "tcp", progress=False) for _ in range(3))
    return Server(nixl, sender, receiver, pushed, writable=writable)


def ask(*, write: bool) -> bytes:
    return _encode(Ask(1, write, True, encode_request(b"x", 64, PLAN, write), None, b"", b"", "", 1000))


@pytest.mark.parametrize(
    ("mine", "theirs", "asked", "authenticated", "used"),
    [
        ("tcp", "tcp", True, False, "tcp"),
        ("tcp", "tcp", False, True, ""),
        ("rdma", "tcp", False, True, ""),
        ("tcp", "rdma", True, False, "tcp"),
        ("rdma", "rdma", False, False, ""),
        ("rdma", "rdma", False, True, "rdma"),
        ("rdma", "rdma", True, False, "rdma"),
        ("", "tcp", True, True, ""),
    ],
)
def test_a_peer_never_chooses_nixl_over_tcp_or_without_credentials_for_this_end(
    mine: str, theirs: str, asked: bool, authenticated: bool, used: str
) -> None:
    nixl = Nixl(NoWire(), Owner(), [])
    offer = NixlEndpoint(nixl, mine, "not here", asked=asked, authenticated=authenticated).offer(theirs)
    assert offer.fabric == used
    if not used:
        with pytest.raises(LinkRefused, match=r"not nixl: (this end does not ask for it|not here)"):
            choose(same_process=False, same_host=None, forced="nixl", nixl=offer)


def test_a_peer_reads_by_itself_only_where_rdma_keys_hold_it() -> None:
    with pytest.raises(ProtocolError, match="over RDMA only"):
        server(writable=True).on_request(ask(write=False), lambda answer: None)


def test_without_remote_access_nothing_is_pushed_and_a_request_after_the_end_of_its_link_holds_no_memory() -> None:
    """Nor is a receiver for it made: there is no NIXL here."""
    owner, late, answers = server(writable=False), server(writable=True), list[bytes]()
    owner.on_request(ask(write=True), answers.append)
    (answer,) = map(_answer_of, answers)
    assert isinstance(answer, Refused)
    assert (answer.code, answer.touched) == (int(LLMStatusCode.LLM_FEATURE_NOT_ENABLED) & 0xFFFFFFFF, False)
    owner.stop()
    owner.join()
    late.stop()
    late.on_request(ask(write=True), lambda answer: None)
    waiting = threading.Thread(target=late.quiesce, args=(7,), daemon=True)
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")
@pytest.mark.parametrize(("listen", "dial"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1")])
def test_nobody_but_the_users_that_are_admitted_is_at_the_other_end(listen: str, dial: str) -> None:
    if ":" in listen and not has_ipv6():
        pytest.skip("this machine has no IPv6 loopback")
    script = (
        "import os, socket, sys; os.setuid(54321); near = socket.socket(int(sys.argv[1]))\n"
        "near.connect((sys.argv[2], int(sys.argv[3]))); near.recv(1)"
    )
    families = [socket.AF_INET6 if ":" in each else socket.AF_INET for each in (listen, dial)]
    with socket.create_server((listen, 0), family=families[0], dualstack_ipv6=listen == "::") as listener:
        port = listener.getsockname()[1]
        arguments = [str(int(families[1])), dial, str(port)]
        with subprocess.Popen([sys.executable, "-c", script, *arguments]) as other:
            stranger, _ = listener.accept()
            with stranger:
                assert why_stranger(stranger, frozenset()).startswith("the peer runs as uid 54321, this process as")
                assert why_stranger(stranger, frozenset({54321})) == ""
            assert other.wait(60) == 0
        with socket.create_connection((dial, port)) as near, listener.accept()[0] as far:
            assert (why_stranger(near, frozenset()), why_stranger(far, frozenset())) == ("", "")
            near.close()  # then the kernel shows root
            assert why_stranger(far, frozenset()).startswith("the user of the peer is unknown")
