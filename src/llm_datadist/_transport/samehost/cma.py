"""The transport cma: non-pool memory of another process of this host, by process_vm_readv and process_vm_writev.

The kernel copies between the processes. Guards are compared in the peer's guard table, which the rendezvous has mapped.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from llm_datadist._memory.exports import ADDRESS_SPACE, NON_POOL
from llm_datadist._native import ProcessMemory, peek_process
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, PeerRange, Transfer
from llm_datadist._transport.samehost.peer_memory import PeerMemory, SameHostConnection
from llm_datadist._transport.transport import Meeting, Transport
from llm_datadist.errors import LinkError, LinkRefused, PeerLost, TransferFailed

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
        if meeting.any_has_device:
            return Verdict(False, "a side has memory of a GPU, which the kernel does not copy")
        if not isinstance(memory, PeerMemory):
            return Verdict(False, "no same-host rendezvous was made" if memory is None else str(memory))
        if not memory.hello.cookie_address:
            return Verdict(False, "the peer lets this side into none of its memory", final=True)
        if (reason := probe(memory)) is None and memory.hello.shut_out:
            reason = self.peer_cannot
        return Verdict(reason is None, reason or "the kernel lets us into the peer's memory")

    def connect(self, meeting: Meeting) -> Connection:
        assert isinstance(meeting.memory, PeerMemory), "it is chosen after a rendezvous only"
        return CmaConnection(meeting.memory.share(), writable=meeting.exports.writable)


class CmaConnection(SameHostConnection):
    """Connection to non-pool memory of another process; ``writable`` (RCA) is a rule that the kernel does not know."""

    capabilities = _CAPABILITIES

    def __init__(self, peer: PeerMemory, *, writable: bool) -> None:
        self._ranges = {NON_POOL: PeerRange(0, ADDRESS_SPACE, writable)}
        # The pidfd reports the end of the process too late for a running call, so each call proves the address space: a
        # read compares the cookie along with the bytes, a write touches the canaries before its first byte.
        hello = peer.hello
        self._memory = ProcessMemory(peer.pid, peer.pidfd, hello.cookie_address, hello.cookie, hello.canaries)
        super().__init__(peer)

    def _range(self, region: int) -> PeerRange | None:
        if region != NON_POOL:
            raise LinkError(f"map: cma does not reach the peer's exported region {region} but its non-pool memory only")
        return super()._range(region)

    def _move(self, transfer: Transfer) -> None:
        plan, deadline, memory = transfer.plan, transfer.deadline, self._memory
        local, remote = transfer.local.native, transfer.remote.native
        move = memory.write if transfer.write else memory.read
        try:
            done = move(plan, local, remote, transfer.pool, deadline.expires_ns, deadline.cancelled, transfer.guards)
        except OSError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is not None:
                raise  # of a signal handler
            if (reason := probe(self._peer)) is None and error.errno != errno.ESRCH:
                text = f"{transfer.what}: {error.strerror}; the bytes addressed are undefined"
                raise TransferFailed(text, phase="copy") from error
            lost = LinkRefused if error.errno == errno.EPERM else PeerLost
            raise lost(f"{transfer.what}: {reason or error.strerror}", phase="copy") from error
        if done < plan.nbytes:
            raise transfer.stopped(done)


def probe(peer: PeerMemory) -> str | None:
    """Return None if cma reads the guard table's cookie where the peer has it, else why not, in one line."""
    address, cookie = peer.hello.cookie_address, peer.hello.cookie
    if peer.pid == 0:
        return "the peer's process is not visible from our pid namespace"
    if not 0 < address <= ADDRESS_SPACE - len(cookie):
        return f"the peer told an impossible address of its cookie: {address}"
    try:
        same = peek_process(peer.pid, address, len(cookie)) == cookie
        reason = None if same else f"pid {peer.pid} shows another cookie than the peer's: it is another process"
    except OSError as error:
        reasons = {
            errno.ESRCH: f"the peer process {peer.pid} has ended",
            errno.EFAULT: f"pid {peer.pid} has no cookie where the peer has it: it is another process",
            errno.EPERM: f"the kernel does not let us into pid {peer.pid}: {_why_not_permitted(peer)}",
        }
        reason = reasons.get(error.errno or 0, str(error.strerror))
    return reason if peer.alive() else f"the peer process {peer.pid} has ended"


def _why_not_permitted(peer: PeerMemory) -> str:
    if peer.uid != os.getuid():
        return f"it runs as uid {peer.uid}, this process as uid {os.getuid()}"
    with suppress(OSError):  # a kernel without Yama
        scope = _YAMA.read_text().strip()
        if scope not in ("", "0"):
            return f"{_YAMA} is {scope}, so that only its parent or a tracer it names may; 0 lets all of one user"
    return "it is not dumpable, has more capabilities than we, or lives in another user namespace"
