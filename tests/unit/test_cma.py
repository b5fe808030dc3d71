"""Who may use cma and who is told why not; a recycled pid; and peers that are shared by two connections."""

import errno
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._transport import users
from llm_datadist._transport.connection import Connection
from llm_datadist._transport.samehost import cma
from llm_datadist._transport.samehost.cma import CmaConnection, probe
from llm_datadist._transport.samehost.peer_memory import PeerMemory
from llm_datadist._transport.samehost.shm import ShmConnection
from llm_datadist._transport.users import peer_credentials
from llm_datadist.errors import LinkRefused, PeerLost, StateError
from llm_datadist.testing import PeerProcess
from llm_datadist.testing.scene import one_row, pull, push, residue, settled, tensors_over, unchanged


@pytest.fixture
def met() -> Iterator[tuple[PeerProcess, PeerMemory]]:
    """A child that was met once, and what the rendezvous yielded."""
    connect = partial(CmaConnection, writable=True)
    with PeerProcess(connect) as process, process.serving(writable=True), process.connect() as connection:
        assert isinstance(connection, CmaConnection)
        yield process, connection._peer


def test_a_peer_is_reached_only_where_it_shows_its_cookie(met: tuple[PeerProcess, PeerMemory]) -> None:
    """The header of the guard table serves as cookie too; an address comes from the wire and is not trusted."""
    (process, peer), cookie, own = met, secrets.token_bytes(16), met[1].hello.cookie
    process.poke(NON_POOL, np.frombuffer(cookie, np.uint8))
    place, pid = process.address(NON_POOL), f"pid {peer.pid}"

    def reason_of(address: int, cookie: bytes, pid: int = peer.pid) -> str | None:
        hello = SimpleNamespace(cookie_address=address, cookie=cookie)
        told: Any = SimpleNamespace(pid=pid, uid=peer.uid, hello=hello, alive=peer.alive)
        return probe(told)

    for address, shown, reason in (
        (place, cookie, None),
        (process.ask(int, "cookie_address"), own, None),
        (place + 1, cookie, f"{pid} shows another cookie than the peer's: it is another process"),
        (8, cookie, f"{pid} has no cookie where the peer has it: it is another process"),
    ):
        assert reason_of(address, shown) == reason
    for address in (-1, 0, 2**63 - 1, 2**63, 2**64, 2**200):
        assert reason_of(address, own) == f"the peer told an impossible address of its cookie: {address}"
    # What SO_PEERCRED says of another pid namespace.
    assert reason_of(place, cookie, pid=0) == "the peer's process is not visible from our pid namespace"


def test_why_the_kernel_refuses_is_told_with_the_users_or_the_value_of_ptrace_scope(
    met: tuple[PeerProcess, PeerMemory], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That it refuses: test_native_movers.py."""
    peer, scope = met[1], tmp_path / "ptrace_scope"
    monkeypatch.setattr(cma, "_YAMA", scope)
    monkeypatch.setattr(cma, "peek_process", Mock(side_effect=PermissionError(errno.EPERM, "no")))
    refused = f"the kernel does not let us into pid {peer.pid}: "
    assert f"{refused}it is not dumpable" in str(probe(peer))
    for value, part in ((0, "it is not dumpable"), (1, f"{scope} is 1, so that only its parent")):
        scope.write_text(f"{value}\n")
        assert refused + part in str(probe(peer))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert probe(peer) == f"{refused}it runs as uid {peer.uid}, this process as uid 12345"


@pytest.mark.parametrize("ended", [True, False], ids=["a recycled pid", "another program"])
def test_a_process_that_is_not_the_peer_any_more_is_a_lost_peer_and_is_not_written(
    met: tuple[PeerProcess, PeerMemory], ended: bool
) -> None:
    """The pid is that of a living process with the same user, without the cookie at its address.

    After a recycling only the pidfd knows; after exec the pid and the pidfd are the same, and only the cookie knows.
    """
    (process, peer), mine, local = met, np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    if ended:
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not peer.alive(), "an ended process that is not reaped yet"
        process.kill()
    peer.share().pid, pid = os.getpid(), peer.pid
    stranger = CmaConnection(peer, writable=True)
    at = np.array([mine.ctypes.data], np.uint64)
    remote = stranger.map(np.array([NON_POOL], np.uint32), at, 64, writable=True)
    for verb in (pull, push):
        with pytest.raises(PeerLost, match="has ended" if ended else "it is another process"):
            verb(one_row(64), tensors_over(local), remote, Deadline(1000))
    assert mine.tolist() == list(range(64))
    if ended:
        told = msgspec.structs.replace(peer.hello, cookie_address=mine.ctypes.data, cookie=mine[:16].tobytes())
        peer.hello = told
        assert probe(peer) == f"the peer process {os.getpid()} has ended"
    stranger.close()
    peer.pid = pid


@pytest.mark.parametrize("same_namespace", [True, False])
def test_the_number_of_unknown_users_is_no_user(monkeypatch: pytest.MonkeyPatch, same_namespace: bool) -> None:
    monkeypatch.setattr(users, "_overflow_uid", os.geteuid)
    if not same_namespace:
        monkeypatch.setattr(users, "_shares_users", lambda pid: False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if same_namespace:
            assert peer_credentials(ours) == (os.getpid(), os.geteuid())
        else:
            with pytest.raises(LinkRefused, match="another user namespace"):
                peer_credentials(ours)


def test_two_connections_share_one_peer_and_the_last_gives_it_back() -> None:
    """Regions over shm, non-pool memory over cma, guards over both; either may go first."""
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
