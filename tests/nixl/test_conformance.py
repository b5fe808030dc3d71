"""The transport nixl keeps the contract of all transports, between two real processes."""

import ctypes
import mmap
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from faults.nixlpeer import NixlPeerProcess, SocketConnection
from llm_datadist._deadline import Deadline
from llm_datadist._transport.nixl.agent import Agent
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import Address, NixlRefused, encode
from llm_datadist.errors import DeadlineExceeded, LinkError, PeerLost, TransferFailed
from llm_datadist.testing import Peer
from llm_datadist.testing.conformance import ServedConformance
from llm_datadist.testing.peers import REGION_BYTES
from llm_datadist.testing.scene import BUDGET_MS, beginning_of, one_row, pull, push, read_beginning, tensors_over
from tests.support.moves import wait_until


class TestNixl(ServedConformance):
    process: NixlPeerProcess
    lost = PeerLost, TransferFailed

    @staticmethod
    def start() -> NixlPeerProcess:
        return NixlPeerProcess()

    @pytest.mark.parametrize("seed", range(3))
    def test_a_read_by_this_end_moves_exactly_the_addressed_bytes(
        self, peer: Peer, connection: SocketConnection, seed: int
    ) -> None:
        """As over RDMA: UCX over tcp emulates it."""
        connection.reads = True
        self.test_read_moves_exactly_the_addressed_bytes(peer, connection, seed)

    def test_quiesce_ends_what_is_held_for_a_push(self, peer: NixlPeerProcess, connection: SocketConnection) -> None:
        """The owner takes its memory back from an initiator that was told where it is, before that has written."""
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        wire, told = connection.context.wire, threading.Event()
        ask = wire.ask

        def stops_after_the_grant(link: object, data: bytes, deadline: Deadline) -> bytes:
            answer = ask(link, data, deadline)
            if not told.is_set():
                told.set()
                peer.quiesce()
            return answer

        wire.ask = stops_after_the_grant  # type: ignore[method-assign]
        with pytest.raises((TransferFailed, LinkError)):
            push(one_row(64), tensors_over(np.ones(64, np.uint8)), remote, Deadline(BUDGET_MS))
        wire.ask = ask  # type: ignore[method-assign]
        assert told.is_set()
        push(one_row(64), tensors_over(np.full(64, 3, np.uint8)), remote, Deadline(BUDGET_MS))
        assert (peer.peek(1)[:64] == 3).all()

    @pytest.mark.parametrize("verb", ["read", "write"])
    def test_an_agent_that_ends_for_another_transfer_costs_a_transfer_nothing(
        self, peer: Peer, connection: SocketConnection, verb: str
    ) -> None:
        """It ends after the peer was asked: the memory is registered again, and metadata are sent again."""
        data, server = np.full(64, 3, np.uint8), connection.server
        slot = server.pull_receiver if verb == "read" else server.push_sender
        remote = beginning_of(peer, connection, 1, 64, writable=True)
        move = pull if verb == "read" else push
        # So that either end knows the other's agent.
        move(one_row(64), tensors_over(data), remote, Deadline(BUDGET_MS))
        peer.poke(1, np.full(64, 5, np.uint8))
        wire, ask, asked = connection.context.wire, connection.context.wire.ask, []

        def ends_an_agent(link: object, data: bytes, deadline: Deadline) -> bytes:
            asked.append(data)
            if len(asked) > 1:
                return ask(link, data, deadline)
            unknown = encode(NixlRefused(NixlRefused.UNKNOWN, "", False))
            answer = unknown if verb == "read" else ask(link, data, deadline)
            slot.end()
            return answer

        wire.ask = ends_an_agent  # type: ignore[method-assign]
        move(one_row(64), tensors_over(data), remote, Deadline(BUDGET_MS))
        assert len(asked) > 1
        assert (data == (5 if verb == "read" else 3)).all()
        assert (peer.peek(1)[:64] == data).all()
        assert not peer.peek(1)[64:].any()


@pytest.mark.parametrize("verb", ["read", "write"])
def test_no_byte_comes_late_from_a_peer_that_was_stopped(verb: str) -> None:
    """What was given up under a stopped peer changes no memory when the peer goes on."""
    nbytes = REGION_BYTES[1]
    plan, data = one_row(nbytes), np.zeros(nbytes, np.uint8)
    with NixlPeerProcess() as process, process.serving(writable=True), process.connect() as connection:
        remote = beginning_of(process, connection, 1, nbytes, writable=True)
        move = pull if verb == "read" else push
        move(plan, tensors_over(data), remote, Deadline(BUDGET_MS))
        process.poke(1, np.full(nbytes, 5, np.uint8))
        for _ in range(5):
            timer = threading.Timer(0.001, os.kill, (process.pid, signal.SIGSTOP))
            timer.start()
            with suppress(DeadlineExceeded):
                move(plan, tensors_over(data), remote, Deadline(100))
            timer.join()
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            data[:] = 9
            os.kill(process.pid, signal.SIGCONT)
            received = np.zeros(64, np.uint8)
            read_beginning(process, connection, received)  # everything before it was served, or dropped
            assert (data == 9).all()
            assert set(received.tolist()) <= {0, 5, 9}


def test_a_sender_forgets_the_receivers_of_long_ago() -> None:
    """A peer that ends its receivers again and again, as after each revoked transfer, costs no more memory."""
    source, target = np.arange(64, dtype=np.uint8), np.zeros((6, 64), np.uint8)
    sender, receivers = Agent("tcp", progress=False), [Agent("tcp", progress=True) for _ in range(6)]
    sender.cover(*_span(source))
    for each, row in zip(receivers, target, strict=True):
        each.cover(*_span(row))

    def write(index: int) -> None:
        assert sender.load(receivers[index].address(""))
        here, there = (np.array([[each.ctypes.data, 64, 0]], np.uint64) for each in (source, target[index]))
        sender.move("WRITE", receivers[index].name, here, there, lambda: None, lambda _: None)

    for index in range(6):
        write(index)
    assert list(sender.loaded) == [each.name for each in receivers[2:]]
    target[:] = 0
    assert not sender.load(receivers[0].address(receivers[0].address("").known_as)), "it must be told again"
    for index in (0, 5, 3):
        write(index)
    assert list(sender.loaded) == [receivers[each].name for each in (4, 0, 5, 3)]
    wait_until(lambda: bool((target[[0, 3, 5]] == source).all()))
    assert not target[[1, 2, 4]].any()
    for agent in (sender, *receivers):
        agent.end()


def test_a_kept_exception_keeps_no_agent() -> None:
    """Its frames hold what NIXL was called by."""
    Agent("tcp", progress=True).end()  # what the first agent of a process leaves
    before = os.listdir("/proc/self/fd")
    agent, known = Agent("tcp", progress=True), Address("nobody", 1, b"not metadata", "?")
    with pytest.raises(NixlFailed) as kept:
        agent.load(known)
    assert len(os.listdir("/proc/self/fd")) > len(before)
    agent.end()
    assert (os.listdir("/proc/self/fd"), kept.value.__traceback__ is None) == (before, False)
    with pytest.raises(NixlFailed) as kept:
        Agent("tcp", progress=True, pools=[(0, -1, -1)])
    assert (os.listdir("/proc/self/fd"), kept.value.__traceback__ is None) == (before, False)


def test_one_thread_asks_what_is_registered_while_another_registers() -> None:
    """The first deallocates, the second transfers."""
    rows = np.zeros((3, 64), np.uint8)
    agent = Agent("tcp", progress=False)

    class Slow(set[Any]):
        def __iter__(self) -> Iterator[Any]:
            for each in super().__iter__():
                agent.cover(*_span(rows[2]))
                yield each

    agent.cover(np.array([rows[0].ctypes.data, rows[1].ctypes.data], np.uint64), 64)
    agent.others = Slow(agent.others)
    assert agent.covers_any([rows[1].ctypes.data])
    assert agent.covers_any([rows[2].ctypes.data])
    agent.end()


def test_an_agent_does_not_touch_mallocs_program_break() -> None:
    """UCX's cache of registrations stores what the kernel says, without malloc's lock: "break adjusted to free malloc
    space" if another thread's malloc has raised it meanwhile.
    """
    Agent("tcp", progress=False).end()  # the first of a process loads UCX
    known = ctypes.c_void_p.in_dll(ctypes.CDLL(None), "__curbrk")
    for _ in range(3):  # where malloc itself raises it, nothing can be seen
        assert known.value is not None
        kernels = known.value
        known.value = raised = kernels + mmap.PAGESIZE  # as if another part of the program had raised it
        Agent("tcp", progress=False).end()
        after = known.value
        if after == raised:
            known.value = kernels
        assert after != kernels


def _span(array: NDArray[np.uint8]) -> tuple[NDArray[np.uint64], int]:
    return np.array([array.ctypes.data], np.uint64), array.nbytes
