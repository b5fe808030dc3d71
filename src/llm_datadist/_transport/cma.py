"""The transport cma: non-pool memory of another process of this host, by process_vm_readv and process_vm_writev.

The kernel copies between the processes. Only the peer's guard table is mapped, as over shm.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Final

from llm_datadist._memory.exports import ADDRESS_SPACE, NON_POOL
from llm_datadist._native import NO_DEADLINE, ProcessMemory, peek_process
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import AddressRange, Capabilities, Connection, Transfer
from llm_datadist._transport.peer_memory import PeerMemory, SameHostConnection
from llm_datadist._transport.transport import Meeting, Transport
from llm_datadist.errors import LinkError, LinkRefused, LLMException, PeerLost, TransferFailed

_YAMA: Final = Path("/proc/sys/kernel/yama/ptrace_scope")

_CAPABILITIES = Capabilities("cma", shared_regions=False, non_pool_memory=True)


class CmaTransport(Transport):
    """The transport; it uses the rendezvous of shm and offers nothing."""

    name = "cma"
    capabilities = _CAPABILITIES
    beside = True
    # Only the dialer can make lanes. So both sides use lanes, although only the peer is shut out.
    peer_cannot = "the kernel does not let the peer into this process"

    def judge(self, meeting: Meeting) -> Verdict:
        memory = meeting.memory
        if not isinstance(memory, PeerMemory):
            return Verdict(False, "no same-host rendezvous was made" if memory is None else str(memory))
        if not memory.cookie_address:
            return Verdict(False, "the peer lets this side into none of its memory", final=True)
        reason = probe(memory, memory.cookie_address, memory.cookie)
        if reason is None and memory.shut_out:
            reason = self.peer_cannot
        return Verdict(reason is None, reason or "the kernel lets us into the peer's memory")

    def connect(self, meeting: Meeting) -> Connection:
        assert isinstance(meeting.memory, PeerMemory), "it is chosen after a rendezvous only"
        return CmaConnection(meeting.memory.share(), writable=meeting.exports.writable)


class CmaConnection(SameHostConnection):
    """Connection to non-pool memory of another process; ``writable`` (RCA) is a rule that the kernel does not know."""

    capabilities = _CAPABILITIES

    def __init__(self, peer: PeerMemory, *, writable: bool) -> None:
        self._private = AddressRange(0, ADDRESS_SPACE, writable)
        # The pidfd reports the end of the process too late for a running call, so each call proves the address space: a
        # read compares the cookie along with the bytes, a write touches the canaries before its first byte.
        self._memory = ProcessMemory(peer.pid, peer.pidfd, peer.cookie_address, peer.cookie, peer.canaries)
        super().__init__(peer)

    def _range(self, region: int) -> AddressRange | None:
        if region != NON_POOL:
            raise LinkError(f"map: cma does not reach the peer's exported region {region} but its non-pool memory only")
        return self._private

    def _move(self, transfer: Transfer) -> None:
        plan, deadline, memory = transfer.plan, transfer.deadline, self._memory
        local, remote, until_ns = transfer.local.native, transfer.remote.native, min(deadline.expires_ns, NO_DEADLINE)
        move = memory.write if transfer.write else memory.read
        try:
            done = move(plan, local, remote, transfer.pool, until_ns, deadline.cancelled)
        except OSError as error:
            raise self._failure(transfer.what, error) from error
        if done < plan.nbytes:
            raise transfer.timeout(done)

    def _failure(self, what: str, error: OSError) -> LLMException:
        reason = probe(self._peer, self._peer.cookie_address, self._peer.cookie)
        if reason is None and error.errno != errno.ESRCH:
            return TransferFailed(f"{what}: {error.strerror}; the bytes addressed are undefined", phase="copy")
        lost = LinkRefused if error.errno == errno.EPERM else PeerLost
        return lost(f"{what}: {reason or error.strerror}", phase="copy")


def probe(peer: PeerMemory, cookie_address: int, cookie: bytes) -> str | None:
    """Return None if cma can be used, else the reason in one line.

    Reads the guard table's cookie at the address that the peer told.
    """
    if peer.pid == 0:
        return "the peer's process is not visible from our pid namespace"
    if not 0 < cookie_address <= ADDRESS_SPACE - len(cookie):
        return f"the peer told an impossible address of its cookie: {cookie_address}"
    try:
        same = peek_process(peer.pid, cookie_address, len(cookie)) == cookie
        reason = None if same else f"pid {peer.pid} shows another cookie than the peer's: it is another process"
    except OSError as error:
        reason = _refusal(peer, error)
    return reason if peer.alive() else f"the peer process {peer.pid} has ended"


def _refusal(peer: PeerMemory, error: OSError) -> str:
    if error.errno == errno.ESRCH:
        return f"the peer process {peer.pid} has ended"
    if error.errno == errno.EFAULT:
        return f"pid {peer.pid} has no cookie where the peer has it: it is another process"
    if error.errno == errno.EPERM:
        return f"the kernel does not let us into pid {peer.pid}: {_why_not_permitted(peer)}"
    return str(error.strerror)


def _why_not_permitted(peer: PeerMemory) -> str:
    if peer.uid != os.getuid():
        return f"it runs as uid {peer.uid}, this process as uid {os.getuid()}"
    scope = _ptrace_scope()
    if scope not in ("", "0"):
        return f"{_YAMA} is {scope}, so that only its parent or a tracer it names may; 0 lets all of one user"
    return "it is not dumpable, has more capabilities than we, or lives in another user namespace"


def _ptrace_scope() -> str:
    try:
        return _YAMA.read_text().strip()
    except OSError:  # a kernel without Yama
        return ""
