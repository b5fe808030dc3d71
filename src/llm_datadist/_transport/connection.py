"""What a transport is: a connection that maps the memory of one peer and moves plans between that and local memory.

:class:`Connection` checks, counts and refuses; a transport only maps and moves. :class:`DataPath` is what a link owns:
one connection, or two. Nothing here knows keys, caches or pins, retries a transfer, or compares generations by itself.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

import msgspec
import numpy as np

from llm_datadist._checks import HERE
from llm_datadist._memory.exports import ADDRESS_SPACE, PRIVATE, RegionDescriptor
from llm_datadist._native import CopyPool, GuardSet, Meter, Plan, Tensors, execute
from llm_datadist._transport.lifetime import Lifetime, unusable
from llm_datadist.errors import LinkError, ParamError, ProtocolError, TransferAborted, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.write_intents import IntentWriter, WriteIntent
    from llm_datadist.errors import DeadlineExceeded


#: Base address of every region of a served peer: no process has addresses like these, so they are never taken for local
#: ones.
_ELSEWHERE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as data."""

    name: str  # as in ``llm.Transport``
    shared_regions: bool  # exported regions (ids from 1) can be reached
    private_memory: bool  # :data:`PRIVATE` memory can be reached
    #: The owner of the memory checks its guards, before the first byte and after the last.
    #: :meth:`Connection.guards_unchanged` is not available then, and a change is ``TransferFailed``.
    remote_guards: bool = False
    same_addresses: bool = False  # an address of the peer means the same memory here
    announces_reads: bool = False  # :meth:`Connection.announce` is for reads too, not for writes only


@dataclass(frozen=True, slots=True)
class Window:
    """Where memory of a peer lies, and whether this process may write it. Size in bytes."""

    base: int
    nbytes: int
    writable: bool
    memory: object = None  # keeps it mapped while this window exists; None where the connection does

    def addresses(self, region: int, offsets: NDArray[np.uint64], extent: int) -> NDArray[np.uint64]:
        limit = self.nbytes - extent  # compared with an offset, so that no sum of untrusted numbers can wrap
        far = max(offsets.tolist())  # an array's own maximum takes ten times as long for one tensor
        if extent < 0 or limit < 0 or far > limit:
            raise ProtocolError(
                f"map: region {region} has {self.nbytes} bytes, a tensor at offset {far} of {extent} bytes ends outside"
            )
        return offsets + np.uint64(self.base)


@dataclass(slots=True, eq=False)
class RemoteTensors(Tensors):
    """Tensors of a peer as returned by :meth:`Connection.map`."""

    connection: Connection  # mapped them; no other may move them, because it would use their addresses blindly
    writable: bool  # False when the mapping is read-only and a write would be a segmentation fault
    private: bool  # the addresses are those of the peer's private memory
    handle: bytes = b""  # what the owner needs to find the memory again; sent by transports with ``remote_guards``

    @property
    def remote_guards(self) -> bool:
        """True when the owner checks its guards, see :class:`Capabilities`."""
        return self.connection.capabilities.remote_guards


class Transfer(msgspec.Struct, frozen=True, eq=False):
    """The bytes of one call, as a transport is asked to move them."""

    plan: Plan  # what to move: from ``local`` to ``remote`` when ``write``, else the other way
    local: Tensors
    remote: RemoteTensors
    pool: CopyPool | None  # threads that may help
    deadline: Deadline
    write: bool

    @property
    def what(self) -> str:
        return "write" if self.write else "read"

    def progress(self, done: int) -> str:
        return f"{self.what} ({done} of {self.plan.nbytes} bytes done)"

    def timeout(self, done: int) -> DeadlineExceeded:
        return self.deadline.error(self.progress(done), "copy")


def move_mapped(transfer: Transfer) -> None:
    """Move bytes between two ends that both have addresses in this process. Raises as :meth:`Connection.read`."""
    plan, deadline = transfer.plan, transfer.deadline
    destination: Tensors = transfer.local
    source: Tensors = transfer.remote
    if transfer.write:
        destination, source = source, destination
    done = execute(plan, destination, source, transfer.pool, deadline.expires_ns, deadline.cancelled)
    if done < plan.nbytes:
        raise transfer.timeout(done)


class MemoryChanged(TransferFailed):
    """The owner refused before the first byte, because the memory is not what was resolved any more."""


class Recovery(Protocol):
    """What a connection has that can break while its link goes on: sockets of its own beside the control connection.

    Threads: any.
    """

    @property
    def suspects(self) -> bool:
        """True while sockets are suspected of being dead: :meth:`drop_suspects` decides."""

    def drop_suspects(self, *, peer_lives: bool) -> int:
        """Drop the sockets that moved nothing although the peer lives; return how many."""

    def drop(self) -> None:
        """Drop every socket, because the peer asks for new ones."""

    @property
    def doubts_writes(self) -> bool:
        """True if a write ended without the owner's answer: its bytes may still be on their way into the memory."""

    def give_up_writes(self, tell: Callable[[], int]) -> tuple[int, int]:
        """Have the owner stop what :attr:`doubts_writes` speaks of: ``tell`` it, unless it has been told.

        Return the newest socket of that time, and the number of the ``Ping`` whose answer says that the owner has
        dropped it and all older ones; then call :meth:`writes_given_up`.
        """

    def writes_given_up(self, newest: int) -> None:
        """Take note that the owner has dropped the socket ``newest`` and all older ones."""

    def redial_soon(self) -> None:
        """Have lost sockets dialled again, if this side dials them. Returns at once."""


class PeerServer(Protocol):
    """What serves the requests of a connection's peer that come over the control connection of their link."""

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Take a request of the peer; ``reply`` is called once, by any thread. Raises ProtocolError.

        On the control thread, and short.
        """

    def on_late_answer(self, data: bytes) -> bytes | None:
        """Return the request that gives back what an answer has granted to a caller that has given up, if anything."""


class Watch(NamedTuple):
    """Tells whether a peer's process has ended, after its connection too. The owner closes it once."""

    ended: Callable[[], bool]  # True once it is certain
    close: Callable[[], None]


class Usage(NamedTuple):
    """What a connection has done, for statistics."""

    read_bytes: int
    written_bytes: int
    progress_seconds: float = 0.0  # CPU time of threads that another library runs for it
    remark: str = ""  # what became of it since it was chosen, to follow the reason of the choice


class Connection(Lifetime):
    """Access to one peer's memory over one transport, for reads and writes.

    Owns: mappings and descriptors; after :meth:`close` the last running call frees them.
    Threads: any number may map, read and write at once; any thread may close or abort.
    Errors: in a forked child calls raise StateError; close drops only its references.
    """

    capabilities: ClassVar[Capabilities]
    #: Where transfers are announced; None where the owner of the memory runs them.
    intent_writer: IntentWriter | None = None
    recovery: Recovery | None = None  # None where nothing breaks but the link
    server: PeerServer | None = None  # None where the peer asks nothing over the control connection

    def __init__(self) -> None:
        super().__init__(f"{self.capabilities.name} connection")
        self._read, self._written = Meter(), Meter()

    @abstractmethod
    def _window(self, region: int) -> Window | None:
        """Return where the region is; None when the peer exports no such region."""

    @abstractmethod
    def _guards(self) -> Window:
        """Return where the peer's guard table is in this process."""

    @abstractmethod
    def _move(self, transfer: Transfer) -> None:
        """Move every byte. The tensors are this connection's, and the deadline has not passed yet."""

    def begin(self, link: object) -> None:
        """Serve what the peer asks from now on, in the name of ``link``; ``LinkRefused`` while finalising."""

    def usage(self) -> Usage:
        return Usage(self._read.nbytes, self._written.nbytes)

    def peer_ended(self) -> bool:
        """Return True when the peer's process has certainly ended, or this connection is closed."""
        return self.closed

    def watch(self) -> Watch | None:
        """Return what tells that the peer has ended; None where this transport cannot know."""
        return None

    def map(
        self,
        regions: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        extent: int,
        *,
        writable: bool,
        located: bool = False,
    ) -> RemoteTensors:
        """Return where the peer's tensors are, each one checked against its region.

        Args:
            regions: Shape (T,): region id of each tensor.
            offsets: Shape (T,): byte offset in its region, or absolute address for :data:`PRIVATE`.
            extent: Bytes of each tensor.
            located: True when the peer was asked for them by address: its private memory may be written then, though
                it has no remote cache access.

        Raises:
            ProtocolError: The peer has no such region, or a tensor ends outside it.
            LinkError: The connection is closed, cannot reach the region, or the region is read-only for us.
        """
        if regions.ndim != 1 or regions.shape != offsets.shape:
            raise ParamError(f"map: regions and offsets must be 1-D and as long, got {regions.shape}, {offsets.shape}")
        self._enter("map")
        try:
            named = sorted(set(regions.tolist()))
            bases = offsets if len(named) == 1 else offsets.copy()
            if PRIVATE in named and len(named) > 1 and not self.capabilities.same_addresses:
                raise ProtocolError(f"map: private memory and exported regions {named[1:]} in one cache")
            for region in named:
                window = _checked_window(self, region, writable and not (located and region == PRIVATE))
                if bases is offsets:  # all in one region, as a rule
                    bases = window.addresses(region, offsets, extent)
                else:
                    chosen = regions == region
                    bases[chosen] = window.addresses(region, offsets[chosen], extent)
            return RemoteTensors(bases, extent, self, writable, named[:1] == [PRIVATE])
        finally:
            self._leave()

    def guards_unchanged(self, guard_set: GuardSet) -> bool:
        """Return True while every guard shows its generation, by acquire loads.

        ``ProtocolError``: a slot is outside the peer's guard table; ``LinkError``: the transport maps no guards.
        """
        if self._pid != HERE["pid"] or not self._users.is_open:
            raise unusable(self, "guards_unchanged")
        guards = self._guards()  # keeps the table mapped when the connection is closed meanwhile
        try:
            return guard_set.unchanged(guards.base, guards.nbytes)
        except ParamError as error:
            raise ProtocolError(str(error)) from error

    def announce(self, slot: int, deadline: Deadline, *, write: bool) -> WriteIntent | None:
        """Announce a transfer in memory under guard ``slot`` to its owner. The caller ends the announcement.

        The owner does not use that memory again before the end. The caller compares the generations after this call:
        they decide whether the transfer may begin. Returns None where the owner needs no announcement. Raises LinkError
        when either end is closed, DeadlineExceeded when too many go on already, ProtocolError for no such guard slot.
        """
        if self._pid != HERE["pid"] or not self._users.is_open:
            raise unusable(self, "announce")
        # A reader fails by the generation; the owner of the memory does not wait for it.
        if self.intent_writer is None or not (write or self.capabilities.announces_reads):
            return None
        return self.intent_writer.announce(slot, deadline, reading=not write)

    def read(self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline) -> int:
        """Move ``plan`` from the peer's ``remote`` tensors (source) to ``local`` ones (destination).

        Raises:
            ParamError: ``remote`` is not of this connection, or the plan leaves a tensor; nothing moved.
            DeadlineExceeded: The deadline passed (phase ``copy``); the destination is undefined.
            TransferAborted: :meth:`abort` was called meanwhile.
            LinkError: The connection is closed, or the peer is gone.
        """
        return _run(self, Transfer(plan, local, remote, pool, deadline, False), self._read)

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> int:
        """Move ``plan`` from ``local`` tensors (source) to the peer's ``remote`` ones (destination).

        Errors as :meth:`read`, and ``ParamError`` when ``remote`` was mapped for reading.
        """
        if not remote.writable:
            raise ParamError("write: the remote tensors were mapped with writable=False; map them with writable=True")
        return _run(self, Transfer(plan, local, remote, pool, deadline, True), self._written)

    def __repr__(self) -> str:
        state, usage = "closed" if self.closed else "open", self.usage()
        return (
            f"<{type(self).__name__} {state}: {self._users.inside} in use, "
            f"{usage.read_bytes} bytes read, {usage.written_bytes} written>"
        )


class ServedConnection(Connection):
    """A connection to an owner that takes part in every transfer, and checks its guards itself."""

    def __init__(self, regions: Iterable[RegionDescriptor] = (), *, writable: bool) -> None:
        self._windows = {each.region: Window(_ELSEWHERE, each.nbytes, each.writable) for each in regions}
        self._windows[PRIVATE] = Window(_ELSEWHERE, ADDRESS_SPACE, writable)
        super().__init__()

    def _window(self, region: int) -> Window | None:
        return self._windows.get(region)

    def _guards(self) -> Window:
        raise LinkError(f"{self.capabilities.name} maps no guards, the peer checks them by itself (remote_guards)")


def _checked_window(connection: Connection, region: int, writable: bool) -> Window:
    capabilities = connection.capabilities
    if region == PRIVATE and not capabilities.private_memory:
        raise LinkError(f"map: {capabilities.name} reaches exported pools only, not the peer's private memory")
    window = connection._window(region)
    if window is None:
        raise ProtocolError(f"map: the peer exports no region {region}")
    if writable and not window.writable:
        raise LinkError(f"map: the peer exports region {region} read-only: it has no remote cache access (RCA)")
    return window


def _run(connection: Connection, transfer: Transfer, meter: Meter) -> int:
    what, nbytes, name = transfer.what, transfer.plan.nbytes, connection.capabilities.name
    if transfer.remote.connection is not connection:
        raise ParamError(f"{what}: the remote tensors were mapped by another connection; map them with this one")
    connection._enter(what)
    try:
        if transfer.deadline.expired():
            raise transfer.deadline.error(f"{what} of {nbytes} bytes over {name}", "copy")
        connection._move(transfer)
        meter.add(nbytes)
    finally:
        connection._leave()
    if connection._aborted:
        raise TransferAborted(f"{what}: the {name} connection was aborted while {nbytes} bytes moved", phase="copy")
    return nbytes


class DataPath:
    """The connections of one link: one, or another one beside it for the peer's private memory.

    Owns both. Tensors carry the connection that mapped them, which then moves them. ``shared`` reaches what the peer
    exports, and its guards; ``private`` its private memory: None where ``shared`` does, or nothing.
    """

    def __init__(self, shared: Connection, private: Connection | None = None) -> None:
        self.shared = shared
        self.private = private
        self.connections = (shared,) if private is None else (shared, private)
        self.server = next((each.server for each in self.connections if each.server is not None), None)
        self.capabilities = shared.capabilities
        if private is not None:
            self.capabilities = Capabilities(
                shared.capabilities.name,
                shared_regions=True,
                private_memory=True,
                announces_reads=any(each.capabilities.announces_reads for each in self.connections),
            )

    def reaching(self, regions: NDArray[np.uint32]) -> Connection:
        """Return the connection that maps tensors in these regions: all of them exported, or none."""
        if self.private is not None and {PRIVATE}.issuperset(regions.tolist()):
            return self.private
        return self.shared

    def close(self) -> None:
        for each in self.connections:
            each.close()
