"""The transport shm: the peer's sealed memfds are mapped here; a copy is one native call without a message."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, PeerRange, Transfer, Usage, move_mapped
from llm_datadist._transport.samehost.listener import SameHostListener, exchange_memory
from llm_datadist._transport.samehost.peer_memory import PeerMemory, SameHostConnection
from llm_datadist._transport.transport import Context, Meeting, Transport
from llm_datadist.errors import DeadlineExceeded, LinkError, LinkRefused, PeerLost

if TYPE_CHECKING:
    import asyncio

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports

COOKIE_BYTES: Final = 16
_MAX_NAME: Final = 256  # of the peer's listener: a unix socket has fewer bytes
_CAPABILITIES = Capabilities("shm", shared_regions=True, non_pool_memory=False)


class ShmTransport(Transport):
    """The transport, with the same-host rendezvous for shm and cma.

    It offers the cookie of the guard table and, at the listener, the name of the rendezvous, whose listener it owns.
    """

    name = "shm"
    capabilities = _CAPABILITIES

    def __init__(self, context: Context) -> None:
        self.rendezvous = SameHostListener(context.exports, context.options.shm_socket_dir)

    def offer(self, meeting: Meeting) -> bytes:
        cookie = meeting.exports.guards.cookie
        if meeting.dialled:
            return cookie
        offered = _offered(meeting)
        self.rendezvous.expect(meeting.token, lambda outcome: meeting.bring(_proven(meeting, outcome)), offered)
        if isinstance(meeting.offered, LinkError):
            meeting.bring(meeting.offered)  # without waiting for the peer
        return cookie + self.rendezvous.name.encode()

    def exchange(self, meeting: Meeting, deadline: Deadline) -> None:
        """Try the rendezvous, unless the peer lives in this process or a forced transport needs none."""
        if meeting.forced not in (None, self.name, "cma") or (meeting.forced is None and meeting.here is not None):
            return
        if isinstance(offered := _offered(meeting), LinkError):
            meeting.bring(offered)
            return
        name = meeting.theirs.get(self.name, b"")[COOKIE_BYTES:][:_MAX_NAME].decode(errors="replace")
        try:
            meeting.bring(_proven(meeting, exchange_memory(name, meeting.token, offered, deadline)))
        except LinkError as error:
            meeting.bring(error)
        except DeadlineExceeded:  # an OSError too, but not of the socket
            raise
        except OSError as error:
            meeting.bring(LinkRefused(f"same-host rendezvous with {name!r}: {error}"))

    def judge(self, meeting: Meeting) -> Verdict:
        memory = meeting.memory
        if isinstance(memory, PeerMemory):
            return Verdict(True, f"the peer (pid {memory.pid}) is on this host, {len(memory.regions)} regions mapped")
        return Verdict(False, "no same-host rendezvous was made" if memory is None else str(memory))

    def connect(self, meeting: Meeting) -> Connection:
        assert isinstance(meeting.memory, PeerMemory), "it is chosen after a rendezvous only"
        return ShmConnection(meeting.memory.share())

    def forget(self, meeting: Meeting) -> None:
        if not meeting.dialled:
            self.rendezvous.forget(meeting.token)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self.rendezvous.start(loop)

    def stop(self) -> None:
        self.rendezvous.close()

    close = abandon = stop


def _offered(meeting: Meeting) -> Exports | LinkRefused:
    """Return what the peer may map: memory of a GPU only if both sides have announced one."""
    offered = meeting.offered
    return offered if isinstance(offered, LinkRefused) or meeting.both_have_devices else offered.on_host()


def _proven(meeting: Meeting, memory: PeerMemory | LinkError) -> PeerMemory | LinkError:
    """Return the memory if it is this peer's; else close it and return the reason."""
    if isinstance(memory, LinkError):
        return memory
    if memory.hello.incarnation != meeting.incarnation:
        what = "incarnation"
    elif memory.hello.cookie != meeting.theirs.get(ShmTransport.name, b"")[:COOKIE_BYTES]:
        what = "guard table's cookie"
    else:
        return memory
    memory.close()
    return LinkRefused(f"the rendezvous reached another process: its {what} is not the one from the control channel")


class ShmConnection(SameHostConnection):
    capabilities = _CAPABILITIES

    def __init__(self, peer: PeerMemory) -> None:
        self._ranges = {
            region: PeerRange(segment.address, segment.nbytes, segment.writable)
            for region, segment in peer.regions.items()
        }
        super().__init__(peer)

    def _range(self, region: int) -> PeerRange | None:
        found, on_device = super()._range(region), self._peer.on_device
        if found is None and on_device is not None and (segment := on_device.get(region)) is not None:
            found = PeerRange(segment.address, segment.nbytes, segment.writable, place=segment.place)
            self._ranges[region] = found
        return found

    def leaves_out(self, region: int) -> bool:
        on_device = self._peer.on_device
        return on_device is not None and region in on_device.left_out

    def usage(self) -> Usage:
        return super().usage()._replace(remark=self._peer.remark())

    def _move(self, transfer: Transfer) -> None:
        move_mapped(transfer)
        # The mapping outlives its owner: a write into an ended process's memory is not delivered. For a read, the
        # guard decides.
        if transfer.write and not self._peer.alive():
            raise PeerLost(f"write: the peer process {self._peer.pid} has ended; nobody sees the bytes", phase="copy")
