"""Processes that are not the peer although a pidfd or a user id says so."""

from __future__ import annotations

import os
import socket

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._memory.exports import PRIVATE
from llm_datadist._native import Plan, plan_row
from llm_datadist._transport import peer_memory
from llm_datadist._transport.cma import CmaConnection
from llm_datadist._transport.peer_memory import PeerMemory, peer_credentials
from llm_datadist.errors import LinkRefused, PeerLost
from llm_datadist.testing import PeerProcess
from llm_datadist.testing.scene import tensors_over


def test_a_peer_that_runs_another_program_by_now_is_lost_and_not_written() -> None:
    """After exec the pid and the pidfd are the same, and the address space is another one."""
    kept: list[PeerMemory] = []

    def open_connection(memory: PeerMemory) -> CmaConnection:
        kept.append(memory)
        return CmaConnection(memory, writable=True)

    plan, mine, local = (
        Plan(0, 0, 1, plan_row(0, 0, 64), False, 64),
        np.arange(64, dtype=np.uint8),
        np.zeros(64, np.uint8),
    )
    with PeerProcess(open_connection) as process, process.serving(writable=True), process.connect():
        memory = kept[0].share()
        memory.pid, pid = os.getpid(), memory.pid  # an address space without the cookie at its address
        with CmaConnection(memory, writable=True) as connection:
            regions, offsets = np.array([PRIVATE], np.uint32), np.array([mine.ctypes.data], np.uint64)
            remote = connection.map(regions, offsets, 64, writable=True)
            for verb in (connection.read, connection.write):
                with pytest.raises(PeerLost, match="it is another process"):
                    verb(plan, tensors_over(local), remote, None, Deadline(1000))
        memory.pid = pid
    assert mine.tolist() == list(range(64))


@pytest.mark.parametrize("same_namespace", [True, False])
def test_the_number_of_unknown_users_is_no_user(monkeypatch: pytest.MonkeyPatch, same_namespace: bool) -> None:
    monkeypatch.setattr(peer_memory, "_overflow_uid", os.geteuid)
    if not same_namespace:
        monkeypatch.setattr(peer_memory, "_shares_users", lambda pid: False)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        if same_namespace:
            assert peer_credentials(ours) == (os.getpid(), os.geteuid())
        else:
            with pytest.raises(LinkRefused, match="another user namespace"):
                peer_credentials(ours)
