"""Who may use cma and who is told why not; a recycled pid; and peers that are shared by two connections."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import PRIVATE
from llm_datadist._native import Plan, plan_row
from llm_datadist._transport import PeerMemory, ShmConnection, cma
from llm_datadist._transport.cma import CmaConnection, probe
from llm_datadist.errors import PeerLost, StateError
from llm_datadist.testing import PeerProcess
from llm_datadist.testing.scene import residue, settled, tensors_over, unchanged

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist._transport import Connection

SOURCE = Path(__file__).parents[2] / "src"
PLAN = Plan(0, 0, 1, plan_row(0, 0, 64), False, 64)


class TransportChoice:
    """A child that was met once, and what the rendezvous yielded."""

    def __init__(self) -> None:
        self.memory: PeerMemory
        self.process = PeerProcess(self._keep)

    def _keep(self, memory: PeerMemory) -> Connection:
        self.memory = memory
        return CmaConnection(memory, writable=True)


@pytest.fixture(scope="module")
def met() -> Iterator[TransportChoice]:
    met = TransportChoice()
    with met.process as process, process.serving(writable=True), process.connect():
        yield met


# The probe


def test_a_peer_is_reached_only_where_it_shows_its_cookie(
    met: TransportChoice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of the guard table serves as cookie too; an address comes from the wire and is not trusted."""
    peer, cookie = met.memory, secrets.token_bytes(16)
    met.process.poke(PRIVATE, np.frombuffer(cookie, np.uint8))
    place, process = met.process.address(PRIVATE), f"pid {peer.pid}"
    for address, shown, reason in (
        (place, cookie, None),
        (met.process.cookie_address(), peer.cookie, None),
        (place + 1, cookie, f"{process} shows another cookie than the peer's: it is another process"),
        (8, cookie, f"{process} has no cookie where the peer has it: it is another process"),
    ):
        assert probe(peer, address, shown) == reason
    for address in (-1, 0, 2**63 - 1, 2**63, 2**64, 2**200):
        assert probe(peer, address, cookie) == f"the peer told an impossible address of its cookie: {address}"
    monkeypatch.setattr(peer, "pid", 0)  # what SO_PEERCRED says of another pid namespace
    assert probe(peer, 4096, cookie) == "the peer's process is not visible from our pid namespace"


STRANGER = """
import os, sys
from types import SimpleNamespace
from llm_datadist._transport.cma import probe

pid, address = map(int, sys.argv[1:])
os.setuid(65534)
for uid in (0, 65534):
    print(probe(SimpleNamespace(pid=pid, uid=uid, alive=lambda: True), address, b"0" * 16))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_the_kernel_refuses_another_user(met: TransportChoice) -> None:
    peer = met.memory
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", STRANGER, str(peer.pid), str(met.process.address(PRIVATE))]
    said = subprocess.run(command, env=environment, timeout=60, check=True, capture_output=True, text=True).stdout
    other_user, same_user = said.splitlines()
    assert other_user == f"the kernel does not let us into pid {peer.pid}: it runs as uid 0, this process as uid 65534"
    scope = cma._ptrace_scope()
    expected = f"ptrace_scope is {scope}, so that only" if scope not in ("", "0") else "not dumpable"
    assert expected in same_user


def test_the_reason_holds_the_value_of_ptrace_scope(
    met: TransportChoice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scope = tmp_path / "ptrace_scope"
    monkeypatch.setattr(cma, "_YAMA", scope)
    assert "not dumpable" in cma._why_not_permitted(met.memory)
    for value, part in ((0, "not dumpable"), (1, f"{scope} is 1, so that only its parent")):
        scope.write_text(f"{value}\n")
        assert part in cma._why_not_permitted(met.memory)


# Ends of the peer


def test_a_recycled_pid_is_a_lost_peer_and_is_not_written() -> None:
    """The pid is that of a living process with the same user, as after a recycling; only the pidfd knows."""
    met = TransportChoice()
    mine, local = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    with met.process as process, process.serving(writable=True), process.connect() as connection:
        process.kill()
        peer = met.memory.share()
        peer.pid = os.getpid()
        stranger = CmaConnection(peer, writable=True)
        at = np.array([mine.ctypes.data], np.uint64)
        remote = stranger.map(np.array([PRIVATE], np.uint32), at, 64, writable=True)
        for verb in (stranger.read, stranger.write):
            with pytest.raises(PeerLost, match="has ended"):
                verb(PLAN, tensors_over(local), remote, None, Deadline(1000))
        assert mine.tolist() == list(range(64))
        assert probe(peer, mine.ctypes.data, mine[:16].tobytes()) == f"the peer process {os.getpid()} has ended"
        stranger.close()
        connection.close()


# Sharing


def test_two_connections_share_one_peer_and_the_last_gives_it_back() -> None:
    """Regions over shm, private memory over cma, guards over both; either may go first."""
    opened: list[tuple[CmaConnection, PeerMemory]] = []

    def both(memory: PeerMemory) -> Connection:
        assert memory.share() is memory
        opened.append((CmaConnection(memory, writable=True), memory))
        return ShmConnection(memory)

    with PeerProcess(both) as process, process.serving(writable=True):
        process.connect().close()
        opened.pop()[0].close()
        before = residue()
        for first in (0, 1):
            shm = process.connect()
            cma_connection, memory = opened.pop()
            memory.share()
            assert repr(memory) == f"<PeerMemory of pid {process.pid}: 2 regions mapped, 3 holders>"
            memory.close()
            ends = [shm, cma_connection]
            ended = ends.pop(first)
            ended.close()
            assert ended.peer_ended()
            (left,) = ends
            assert (memory.closed, memory.alive(), left.peer_ended()) == (False, True, False)
            assert unchanged(left, *process.guard())
            left.close()
            memory.close()  # once more than it was shared: nothing
            assert (memory.closed, memory.alive()) == (True, False)
            with pytest.raises(StateError, match="closed"):
                memory.share()
            assert repr(memory) == f"<PeerMemory of pid {process.pid}: closed>"
            del memory
            assert settled(before) == before


def test_memory_closed_by_many_threads_is_released_once(monkeypatch: pytest.MonkeyPatch) -> None:
    releases: list[None] = []
    monkeypatch.setattr(PeerMemory, "_release", lambda memory: releases.append(None))

    def close(memory: PeerMemory, gate: threading.Barrier) -> None:
        gate.wait()
        memory.close()

    for number in range(50):
        memory = object.__new__(PeerMemory)
        memory.pidfd, memory._others = 0, []
        for _ in range(7):
            memory.share()
        gate = threading.Barrier(8)
        threads = [threading.Thread(target=close, args=(memory, gate)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        memory.pidfd = -1
        assert len(releases) == number + 1
