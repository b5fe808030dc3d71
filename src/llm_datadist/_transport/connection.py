"""What a transport is: a connection that maps the peer's regions and moves plans between them and local memory.

Which keys, caches or pins are behind the bytes is never known here; retries, the comparison of generations and the
error texts of whole operations live above (rule 13).
"""

from __future__ import annotations

import itertools
import os
import warnings
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, NoReturn, Protocol, Self

import msgspec
import numpy as np

from llm_datadist._memory.exports import PRIVATE, Exports, RegionDescriptor
from llm_datadist._memory.guards import slot_address
from llm_datadist._native import CopyPool, GuardSet, Meter, Plan, Tensors, UseGate, execute, load_generation
from llm_datadist.errors import LinkError, ParamError, ProtocolError, StateError, TransferAborted, TransferFailed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.write_intents import IntentWriter, WriteIntent

__all__ = [
    "PRIVATE",
    "Capabilities",
    "Connection",
    "DataPath",
    "Exports",
    "MemoryChanged",
    "RegionDescriptor",
    "RemoteTensors",
    "RoutedConnection",
    "Transfer",
    "Window",
    "move_mapped",
]

# Marks the tensors of one connection for good, unlike id(), which a later connection may get again.
_serials: Final = itertools.count(1)
# The pid of this process, without a system call at each use.
_here: Final = {"pid": os.getpid()}
os.register_at_fork(after_in_child=lambda: _here.update(pid=os.getpid()))


class Connection(ABC):
    """One link's data path to one peer, both directions. The base checks and counts, a transport only moves.

    Threads: any number may map, read, write and load generations at once; any thread may close or abort. What the
    connection owns (mappings, descriptors) is released by the last call that uses it, so that a lost link never
    unmaps memory under a copy. In a forked child every call raises and ``close`` drops only the child's references.

    Attributes:
        capabilities: What the transport can do.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self) -> None:
        self._serial = next(_serials)
        self._pid = _here["pid"]
        self._users = UseGate()  # shut once closed; the last one out of it releases
        self._aborted = False
        self._read, self._written = Meter(), Meter()

    # Public verbs

    @property
    def closed(self) -> bool:
        """True after :meth:`close` or :meth:`abort`."""
        return not self._users.is_open

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the peer so far."""
        return self._read.nbytes

    @property
    def bytes_written(self) -> int:
        """Bytes moved to the peer so far."""
        return self._written.nbytes

    def map(
        self,
        regions: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        extent: int,
        *,
        writable: bool,
        handle: bytes = b"",
        located: bool = False,
    ) -> RemoteTensors:
        """Return where the peer's tensors are, every one checked against its region.

        Args:
            regions: Shape (T,): region id of each tensor.
            offsets: Shape (T,): byte offset in its region, or absolute address for :data:`PRIVATE`.
            extent: Bytes of each tensor.
            writable: True when the tensors will be written.
            handle: What the peer needs to find these tensors again; only transports with ``remote_guards`` send it.
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
                window = self._checked_window(region, writable and not (located and region == PRIVATE))
                if bases is offsets:  # all in one region, as a rule
                    bases = _addresses(window, region, offsets, extent)
                else:
                    chosen = regions == region
                    bases[chosen] = _addresses(window, region, offsets[chosen], extent)
            private, remote_guards = named[:1] == [PRIVATE], self.capabilities.remote_guards
            return RemoteTensors(bases, extent, self._serial, writable, handle, private, remote_guards)
        finally:
            self._leave()

    def generation(self, slot: int) -> int:
        """Return the generation in the peer's guard ``slot``, by an acquire load.

        Raises:
            ProtocolError: The slot is outside the peer's guard table.
            LinkError: The connection is closed.
        """
        self._enter("generation")
        try:
            guards = self._guards()
            return load_generation(slot_address(guards.base, slot, guards.nbytes))
        finally:
            self._leave()

    def guards_unchanged(self, guard_set: GuardSet) -> bool:
        """Return True while every guard of the peer shows the generation that was promised, by acquire loads.

        Raises:
            ProtocolError: A slot is outside the peer's guard table.
            LinkError: The connection is closed.
        """
        if self._pid != _here["pid"] or not self._users.is_open:
            self._refuse("hold")
        guards = self._guards()  # keeps the table mapped, whoever closes the connection meanwhile
        try:
            return guard_set.unchanged(guards.base, guards.nbytes)
        except ParamError as error:
            raise ProtocolError(str(error)) from error

    def announced(self, remote: RemoteTensors, slot: int, deadline: Deadline, *, write: bool) -> WriteIntent | None:
        """Announce a movement of ``remote``, whose memory is under guard ``slot``, to its owner; the caller ends it.

        The owner does not let the memory be used again before that. Generations that are looked at in between decide
        whether the movement may begin, and whether it counts. None where it does not matter: then there is no end.

        Raises:
            LinkError: The connection, or the peer's end of it, is closed.
            DeadlineExceeded: Too many are going on already (phase ``copy``).
            ProtocolError: No such guard slot.
        """
        if self._pid != _here["pid"] or not self._users.is_open:
            self._refuse("announced")
        intent_writer = self._intent_writer(write=write)
        return None if intent_writer is None else intent_writer.announce(slot, deadline, reading=not write)

    def introduce(self, who: str, cluster_id: int) -> None:  # noqa: B027 (most transports have nothing to name)
        """Learn who the peer is, for messages about what it does in our memory."""

    def read(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from the peer's ``remote`` tensors (source) to ``local`` ones (destination).

        Raises:
            ParamError: ``remote`` is not of this connection, or the plan leaves a tensor; nothing moved.
            DeadlineExceeded: The deadline passed (phase ``copy``); the destination is undefined.
            TransferAborted: :meth:`abort` was called meanwhile.
            LinkError: The connection is closed, or the peer is gone.
        """
        return self._transfer(plan, local, remote, pool, deadline, write=False)

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from ``local`` tensors (source) to the peer's ``remote`` ones (destination).

        Raises:
            ParamError: ``remote`` is not of this connection or was mapped for reading, or the plan leaves a tensor.
            DeadlineExceeded: The deadline passed (phase ``copy``); the destination is undefined.
            TransferAborted: :meth:`abort` was called meanwhile.
            LinkError: The connection is closed, or the peer is gone.
        """
        if not remote.writable:
            raise ParamError("write: the remote tensors were mapped with writable=False; map them with writable=True")
        return self._transfer(plan, local, remote, pool, deadline, write=True)

    def begin(self, link: object) -> None:  # noqa: B027 (most transports have nothing to begin)
        """The handshake is over: serve what the peer asks of this connection, in the name of ``link``.

        Raises:
            LinkRefused: This process is being finalised.
        """

    def reconnect_lanes(self, deadline: Deadline) -> None:  # noqa: B027 (most transports have nothing to mend)
        """Make again what was lost without the link, where this end can and the transport has such a thing.

        Raises:
            LLMException: It cannot.
        """

    def owns(self, remote: RemoteTensors) -> bool:
        """Return True when :meth:`map` of this connection made ``remote``."""
        return remote.owner == self._serial

    def peer_ended(self) -> bool:
        """Return True when it is certain that the peer's process has ended, or this connection is closed."""
        return self.closed

    def peer_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended; None when nothing tells that."""
        try:
            self._enter("peer_pidfd")
        except LinkError:
            return None
        try:
            return self._duplicate_pidfd()
        finally:
            self._leave()

    def close(self) -> None:
        """Refuse new calls and release everything once the calls in progress have ended. Idempotent, never waits."""
        self._shut(abort=False)

    def abort(self) -> None:
        """Like :meth:`close`, but the calls in progress fail with ``TransferAborted``. Idempotent, never waits."""
        self._shut(abort=True)

    # What a transport provides

    @abstractmethod
    def _window(self, region: int) -> Window | None:
        """Return where the region is, None when the peer exports no such region."""

    @abstractmethod
    def _guards(self) -> Window:
        """Return where the peer's guard table is in this process."""

    @abstractmethod
    def _move(
        self,
        plan: Plan,
        local: Tensors,
        remote: RemoteTensors,
        pool: CopyPool | None,
        deadline: Deadline,
        *,
        write: bool,
    ) -> Transfer:
        """Start or do the movement; the tensors are this connection's and the deadline has not passed yet."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the connection owns. Called once, without any lock, when nobody uses it any more."""

    def _intent_writer(self, *, write: bool) -> IntentWriter | None:
        """Return where movements are announced; None where the owner of the memory knows of them by itself."""
        return None

    def _duplicate_pidfd(self) -> int | None:
        """Return a new descriptor of the peer's process, where the transport has one."""
        return None

    # Checks, who is inside, and when to release

    def _checked_window(self, region: int, writable: bool) -> Window:
        if region == PRIVATE and not self.capabilities.private_memory:
            raise LinkError(f"map: {self.capabilities.name} reaches exported pools only, not the peer's private memory")
        window = self._window(region)
        if window is None:
            raise ProtocolError(f"map: the peer exports no region {region}")
        if writable and not window.writable:
            raise LinkError(f"map: the peer exports region {region} read-only: it has no remote cache access (RCA)")
        return window

    def _enter(self, what: str) -> None:
        if self._pid != _here["pid"] or not self._users.try_enter():
            self._refuse(what)

    def _refuse(self, what: str) -> NoReturn:
        if self._pid != _here["pid"]:
            raise StateError(f"{what}: this {self.capabilities.name} connection belongs to process {self._pid}, not us")
        raise LinkError(f"{what}: the {self.capabilities.name} connection is closed; link again", phase="copy")

    def _leave(self) -> None:
        if not self._users.try_leave() and self._users.leave() == 0:
            self._release()

    def _shut(self, *, abort: bool) -> None:
        if self._pid != _here["pid"] and not self.closed:
            # Forked: a call may be inside for ever, by a thread that only the parent has.
            self._users = UseGate()
        self._aborted |= abort
        if self._users.shut() == 0:
            self._release()

    def _transfer(
        self,
        plan: Plan,
        local: Tensors,
        remote: RemoteTensors,
        pool: CopyPool | None,
        deadline: Deadline,
        *,
        write: bool,
    ) -> Transfer:
        what = "write" if write else "read"
        if remote.owner != self._serial:
            raise ParamError(f"{what}: the remote tensors were mapped by another connection; map them with this one")
        if self._pid != _here["pid"] or not self._users.try_enter():
            self._refuse(what)
        try:
            if deadline.expired():
                raise deadline.error(f"{what} of {plan.nbytes} bytes over {self.capabilities.name}", "copy")
            transfer = self._move(plan, local, remote, pool, deadline, write=write)
            (self._written if write else self._read).add(transfer.nbytes)
        finally:
            self._leave()
        if self._aborted:
            raise TransferAborted(
                f"{what}: the {self.capabilities.name} connection was aborted while {plan.nbytes} bytes moved",
                phase="copy",
            )
        return transfer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self) -> None:
        # No lock: nobody else holds a reference. getattr: a constructor may have failed half way.
        users: UseGate | None = getattr(self, "_users", None)
        if users is None or not users.is_open:
            return
        users.shut()
        if self._pid == _here["pid"]:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        self._release()

    def __repr__(self) -> str:
        state = "closed" if self.closed else "open"
        return (
            f"<{type(self).__name__} {state}: {self._users.inside} in use, "
            f"{self.bytes_read} bytes read, {self.bytes_written} written>"
        )


def move_mapped(
    plan: Plan, local: Tensors, remote: Tensors, pool: CopyPool | None, deadline: Deadline, *, write: bool
) -> Transfer:
    """Move a plan between two ends that both have addresses in this process.

    Raises:
        DeadlineExceeded: The deadline passed between two chunks (phase ``copy``).
        ParamError: The plan leaves a tensor; nothing moved.
    """
    destination, source = (remote, local) if write else (local, remote)
    done = execute(plan, destination, source, pool, deadline.expires_ns, deadline.cancelled)
    if done < plan.nbytes:
        raise deadline.error(f"{'write' if write else 'read'} ({done} of {plan.nbytes} bytes done)", "copy")
    return Transfer(done)


def _addresses(window: Window, region: int, offsets: NDArray[np.uint64], extent: int) -> NDArray[np.uint64]:
    """Return the addresses of offsets in a window. Compared so that nothing can wrap (rule 10)."""
    limit = window.nbytes - extent
    worst = max(offsets.tolist())  # an array's own maximum takes ten times as long for one tensor
    if extent < 0 or limit < 0 or worst > limit:
        raise ProtocolError(
            f"map: region {region} has {window.nbytes} bytes, a tensor at offset {worst} of {extent} bytes ends outside"
        )
    return offsets + np.uint64(window.base)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a transport can do, as data.

    Attributes:
        name: Name of the transport, as in ``llm.Transport``.
        shared_regions: True when exported regions (ids from 1) can be reached.
        private_memory: True when :data:`PRIVATE` memory can be reached.
        remote_guards: True when the owner of the memory checks its guards by itself, before the first byte and after
            the last: :meth:`Connection.generation` is not available then, and a change is ``TransferFailed``.
        same_addresses: True when an address of the peer means the same memory here.
        announces_reads: True when :meth:`Connection.announced` is for reads too, not for writes only.
    """

    name: str
    shared_regions: bool
    private_memory: bool
    remote_guards: bool = False
    same_addresses: bool = False
    announces_reads: bool = False


@dataclass(frozen=True, slots=True)
class Window:
    """Where a peer's memory lies, by address, and whether this process may write it. Size in bytes.

    Attributes:
        memory: What keeps it mapped for as long as somebody has this; None where the connection does.
    """

    base: int
    nbytes: int
    writable: bool
    memory: object = None


@dataclass(slots=True, eq=False)
class RemoteTensors(Tensors):
    """Tensors of a peer as returned by :meth:`Connection.map`; only the connection that made them may use them.

    Attributes:
        owner: Serial number of that connection: another one would read these addresses blindly.
        writable: False when the mapping is read-only and a write would be a segmentation fault.
        handle: What the owner of the memory needs to find it again, opaque to transports.
        private: True when the addresses are those of the peer's private memory.
        remote_guards: True when the owner checks its guards by itself, see :class:`Capabilities`.
    """

    owner: int
    writable: bool
    handle: bytes = b""
    private: bool = False
    remote_guards: bool = False


class MemoryChanged(TransferFailed):
    """The owner says that the memory is not what was resolved any more.

    It said so before the first byte: nothing was moved.
    """


class Transfer(msgspec.Struct, eq=False):
    """A movement of bytes. This class is the finished one: shm and inproc are done at return.

    Attributes:
        nbytes: Bytes that move.
    """

    nbytes: int

    def done(self) -> bool:
        """Return True when every byte is in place."""
        return True

    def wait(self, deadline: Deadline) -> None:
        """Return when every byte is in place.

        Raises:
            DeadlineExceeded: The deadline passed first (phase ``copy``); the transfer is aborted.
        """

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.nbytes} bytes: {'done' if self.done() else 'running'}>"


class DataPath(Protocol):
    """The public verbs of :class:`llm_datadist._transport.connection.Connection`, which documents them."""

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the peer so far."""

    @property
    def bytes_written(self) -> int:
        """Bytes moved to the peer so far."""

    @property
    def closed(self) -> bool:
        """True after close or abort."""

    def map(
        self,
        regions: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        extent: int,
        *,
        writable: bool,
        handle: bytes = b"",
        located: bool = False,
    ) -> RemoteTensors:
        """Return where the peer's tensors are."""

    def generation(self, slot: int) -> int:
        """Return what a guard of the peer shows."""

    def guards_unchanged(self, guard_set: GuardSet) -> bool:
        """Return True while guards of the peer show what was promised."""

    def announced(self, remote: RemoteTensors, slot: int, deadline: Deadline, *, write: bool) -> WriteIntent | None:
        """Announce a movement to the owner of the memory."""

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn who the peer is."""

    def read(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move from the peer."""

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move to the peer."""

    def begin(self, link: object) -> None:
        """Serve what the peer asks, in the name of ``link``."""

    def reconnect_lanes(self, deadline: Deadline) -> None:
        """Make again what was lost without the link."""

    def peer_ended(self) -> bool:
        """Return True when it is certain that the peer has ended."""

    def peer_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended, or None."""

    def close(self) -> None:
        """Refuse new calls, release when the running ones have ended."""

    def abort(self) -> None:
        """Close, and fail the running calls."""


class RoutedConnection:
    """Two connections to one peer behind the verbs of one. Owns both; threads as for each of them.

    Tensors are mapped by the one that reaches them, and moved by the one that mapped them.

    Args:
        shared: Reaches what the peer exports, and its guards.
        private: Reaches the peer's private memory.
    """

    def __init__(self, shared: Connection, private: Connection) -> None:
        self._shared = shared
        self._private = private
        ways = shared.capabilities, private.capabilities
        self.capabilities = Capabilities(
            shared.capabilities.name,
            shared_regions=True,
            private_memory=True,
            announces_reads=any(each.announces_reads for each in ways),
        )

    @property
    def bytes_read(self) -> int:
        """Bytes moved from the peer so far."""
        return self._shared.bytes_read + self._private.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes moved to the peer so far."""
        return self._shared.bytes_written + self._private.bytes_written

    @property
    def closed(self) -> bool:
        """True after :meth:`close` or :meth:`abort`."""
        return self._shared.closed

    def map(
        self,
        regions: NDArray[np.uint32],
        offsets: NDArray[np.uint64],
        extent: int,
        *,
        writable: bool,
        handle: bytes = b"",
        located: bool = False,
    ) -> RemoteTensors:
        """Return where the peer's tensors are; all of them lie in exported regions, or none."""
        chosen = self._private if {PRIVATE}.issuperset(regions.tolist()) else self._shared
        return chosen.map(regions, offsets, extent, writable=writable, handle=handle, located=located)

    def generation(self, slot: int) -> int:
        """Return the generation in the peer's guard ``slot``."""
        return self._shared.generation(slot)

    def guards_unchanged(self, guard_set: GuardSet) -> bool:
        """Return True while guards of the peer show what was promised."""
        return self._shared.guards_unchanged(guard_set)

    def announced(self, remote: RemoteTensors, slot: int, deadline: Deadline, *, write: bool) -> WriteIntent | None:
        """Announce a movement of the peer's tensors to their owner."""
        return self._route(remote).announced(remote, slot, deadline, write=write)

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn who the peer is."""
        self._shared.introduce(who, cluster_id)
        self._private.introduce(who, cluster_id)

    def read(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from the peer's tensors to local ones."""
        return self._route(remote).read(plan, local, remote, pool, deadline)

    def write(
        self, plan: Plan, local: Tensors, remote: RemoteTensors, pool: CopyPool | None, deadline: Deadline
    ) -> Transfer:
        """Move ``plan`` from local tensors to the peer's."""
        return self._route(remote).write(plan, local, remote, pool, deadline)

    def begin(self, link: object) -> None:
        """Serve what the peer asks, in the name of ``link``."""
        self._shared.begin(link)
        self._private.begin(link)

    def reconnect_lanes(self, deadline: Deadline) -> None:
        """Make again what was lost without the link."""
        self._shared.reconnect_lanes(deadline)
        self._private.reconnect_lanes(deadline)

    def peer_ended(self) -> bool:
        """Return True when it is certain that the peer's process has ended."""
        return self._shared.peer_ended() or self._private.peer_ended()

    def peer_pidfd(self) -> int | None:
        """Return a new descriptor that is readable once the peer's process has ended, if either route has one."""
        shared = self._shared.peer_pidfd()
        return self._private.peer_pidfd() if shared is None else shared

    def close(self) -> None:
        """Close both. Idempotent, never waits."""
        self._shared.close()
        self._private.close()

    def abort(self) -> None:
        """Abort both. Idempotent, never waits."""
        self._shared.abort()
        self._private.abort()

    def _route(self, remote: RemoteTensors) -> Connection:
        # What neither of them mapped is refused by the first.
        return self._private if self._private.owns(remote) else self._shared

    def __repr__(self) -> str:
        return f"<RoutedConnection {self._shared!r}, {self._private!r}>"
