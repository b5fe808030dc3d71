"""Connections: :class:`Connection` checks and counts, a transport's subclass maps memory and moves plans."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, NoReturn, Protocol, Self

import msgspec
import numpy as np

from llm_datadist._checks import HERE
from llm_datadist._deadline import Deadline  # noqa: TC001 (the reference resolves what Transfer names)
from llm_datadist._memory.exports import ADDRESS_SPACE, NON_POOL
from llm_datadist._memory.guards import SLOT_BYTES
from llm_datadist._native import (
    CHANGED_BEFORE,
    CHANGED_DURING,
    USER,
    CopyPool,
    Device,
    GuardSet,
    Meter,
    Place,
    Plan,
    Tensors,
    Use,
    UseGate,
    WriteIntent,
    await_work,
    check_plan,
    execute,
)
from llm_datadist._native.public_call import public_call
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    ParamError,
    ProtocolError,
    StateError,
    TransferAborted,
    TransferFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from llm_datadist._memory.write_intents import IntentWriter
    from llm_datadist._native._native import TensorList
    from llm_datadist.errors import LLMException


#: Base address of a served peer's regions; no process has such addresses, so none passes for a local one.
_ELSEWHERE: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class Capabilities:
    name: str  # as in ``llm.Transport``
    shared_regions: bool  # reaches exported regions (ids from 1)
    non_pool_memory: bool  # reaches non-pool memory (:data:`NON_POOL`)
    remote_guards: bool = False  # the owner checks its guards, before the first byte and after the last
    same_addresses: bool = False  # an address of the peer means the same memory here
    announces_reads: bool = False  # :meth:`Connection.announce` serves reads as well as writes


@dataclass(frozen=True, slots=True)
class PeerRange:
    """Address range of a peer's memory, in bytes; ``writable`` by this process or not."""

    base: int
    nbytes: int
    writable: bool
    memory: object = None  # keeps the range mapped; None if the connection does
    place: Place = USER  # for copies

    def addresses(self, region: int, offsets: NDArray[np.uint64], extent: int) -> NDArray[np.uint64]:
        limit = self.nbytes - extent  # no sum with an untrusted offset, which could wrap
        far = max(offsets.tolist())  # for one tensor, ten times as fast as the array's own maximum
        if extent < 0 or limit < 0 or far > limit:
            raise ProtocolError(
                f"map: region {region} has {self.nbytes} bytes, a tensor at offset {far} of {extent} bytes ends outside"
            )
        return offsets + np.uint64(self.base)


@dataclass(slots=True, eq=False)
class RemoteTensors(Tensors):
    """Tensors of a peer as :meth:`Connection.map` returns them."""

    connection: Connection  # mapped them; another one must not use their addresses
    writable: bool  # if False, a write would be a segmentation fault
    private: bool  # in the peer's non-pool memory
    handle: bytes = b""  # names the memory to the owner, with ``remote_guards``


class Transfer(msgspec.Struct, frozen=True, eq=False):
    """Work of one call, for a transport."""

    plan: Plan  # from ``local`` to ``remote`` if ``write``, else back
    local: Tensors
    remote: RemoteTensors
    pool: CopyPool | None  # threads that may help
    deadline: Deadline
    write: bool
    guards: GuardSet | None = None  # to be compared, unless the owner does

    @property
    def what(self) -> str:
        return "write" if self.write else "read"

    def sides(self) -> tuple[TensorList, TensorList]:
        """Return the destination and the source."""
        local, remote = self.local.native, self.remote.native
        return (remote, local) if self.write else (local, remote)

    def prepare(self) -> None:
        """Do what :func:`execute` does before its first byte, for transports that move bytes by other means.

        Check the plan; raise if the GPU of this side has failed; wait for the work of ``devices.after``.
        """
        check_plan(self.plan, *self.sides())
        if self.local.place.device >= 0:
            Device.open(self.local.place.device)
        if not await_work(self.deadline.expires_ns, self.deadline.cancelled):
            raise self.timeout(0)

    def progress(self, done: int) -> str:
        return f"{self.what} ({done} of {self.plan.nbytes} bytes done)"

    def timeout(self, done: int) -> DeadlineExceeded:
        return self.deadline.error(self.progress(done), "copy")

    def stopped(self, done: int) -> LLMException:
        """Return the error for a result of native code below the plan's bytes."""
        if done == CHANGED_BEFORE:
            return MemoryChanged(f"{self.what}: the memory has changed since it was resolved", phase="copy")
        if done == CHANGED_DURING:
            return MemoryTorn(f"{self.what}: the memory has changed during the copy", phase="copy")
        return self.timeout(done)


def move_mapped(transfer: Transfer) -> None:
    """Move bytes between sides that both have addresses here. Raises as ``Transfer.stopped``."""
    plan, deadline, sides = transfer.plan, transfer.deadline, transfer.sides()
    done = execute(plan, *sides, transfer.pool, deadline.expires_ns, deadline.cancelled, transfer.guards)
    if done < plan.nbytes:
        raise transfer.stopped(done)


class MemoryChanged(TransferFailed):
    """Refusal before the first byte: the memory has changed since it was resolved."""


class MemoryTorn(TransferFailed):
    """The memory has changed before the last byte: those at the destination are undefined."""


class Recovery(Protocol):
    """Sockets beside the control channel, which may break while the link goes on. Threads: any."""

    suspects: set[int]
    """Numbers of the sockets that are suspected to be dead."""

    def drop_suspects(self, *, peer_lives: bool) -> int:
        """Drop the suspects without a byte since if the peer lives: the network dropped them. Return how many."""

    def drop(self) -> None:
        """Drop all sockets: the peer asks for new ones."""

    @property
    def doubts_writes(self) -> bool:
        """True if a write ended without the owner's answer, so that its bytes may still arrive."""

    def give_up_writes(self, tell: Callable[[], int]) -> tuple[int, int]:
        """``tell`` the owner to stop doubted writes, unless it has been told; return (newest socket then, ``Ping``).

        The answer to that Ping says that the owner has dropped that socket and all older ones.
        """

    def writes_given_up(self, newest: int) -> None:
        """Note that the owner has dropped ``newest`` and all older sockets."""

    def redial_soon(self) -> None:
        """Have lost sockets dialled again if this side dials. Never waits."""


class PeerServer(Protocol):
    """Handler of the peer's requests over the control channel."""

    def on_request(self, data: bytes, reply: Callable[[bytes], None]) -> None:
        """Take a request; any thread calls ``reply`` once. Raises ProtocolError. Threads: control, briefly."""

    def on_late_answer(self, data: bytes) -> bytes | None:
        """Return the request that gives back a late answer's memory, if it has any."""


class Watch(NamedTuple):
    """Check for the end of a peer's process, which outlives the connection; its owner closes it once."""

    ended: Callable[[], bool]  # True once that is certain
    close: Callable[[], None]


class Usage(NamedTuple):
    """Work of a connection, for statistics."""

    read_bytes: int
    written_bytes: int
    progress_seconds: float = 0.0  # CPU time of another library's threads
    remark: str = ""  # follows the reason of the choice


class Connection(AbstractContextManager["Connection"]):
    """Access to one peer's memory over one transport, for reads and writes.

    Owns: mappings and descriptors. After :meth:`close` the last running call frees them, so a lost link never unmaps
    memory during a copy.
    Threads: any, concurrently.
    Errors: in a forked child calls raise StateError; close drops only its references.
    """

    capabilities: ClassVar[Capabilities]
    intent_writer: IntentWriter | None = None  # announces transfers; None if the owner takes part in them
    recovery: Recovery | None = None  # None if nothing breaks but the link
    server: PeerServer | None = None  # None if the peer asks nothing over the control channel
    _ranges: dict[int, PeerRange]  # by region
    _guard_range: PeerRange | None = None  # of the peer's guard table here; None if it is not mapped

    def __init__(self) -> None:
        self._pid = HERE["pid"]
        self._users = UseGate()  # counts running calls; shut by close()
        self._aborted = False  # True: running calls shall fail
        self._read, self._written = Meter(), Meter()

    def _range(self, region: int) -> PeerRange | None:
        """Return the range of a region; None if the peer exports no such region."""
        return self._ranges.get(region)

    def _place(self, found: PeerRange, bases: NDArray[np.uint64]) -> Place:
        """Return the place of tensors that lie in a range."""
        return found.place

    def leaves_out(self, region: int) -> bool:
        """Return True for a region of the peer's that is not mapped, or not yet. Never waits."""
        return False

    def _guards(self) -> PeerRange:
        """Return the range of the peer's guard table here. Raises LinkError if it is not mapped."""
        if (found := self._guard_range) is None:
            raise LinkError(f"{self.capabilities.name} maps no guards, the peer checks them (remote_guards)")
        return found

    @abstractmethod
    def _move(self, transfer: Transfer) -> None:
        """Move every byte; the arguments are checked."""

    @abstractmethod
    def _release(self) -> None:
        """Give back what the connection owns: once, without a lock, after the last call."""

    def begin(self, link: object) -> None:
        """Serve the peer of ``link`` from now on. Raises LinkRefused during finalize."""

    def usage(self) -> Usage:
        return Usage(*self.moved)

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes that this side has read and written."""
        return self._read.nbytes, self._written.nbytes

    @property
    def served(self) -> tuple[int, int] | None:
        """Bytes that the peer has read and written here, if this side counts them; else the peer reports its own."""
        return None

    def peer_ended(self) -> bool:
        """Return True once the peer's process has certainly ended or this is closed."""
        return self.closed

    def watch(self) -> Watch | None:
        """Return a watch of the peer's process, if the transport has one."""
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
        """Return the peer's tensors of ``extent`` bytes, each checked against its region.

        ``regions`` and byte ``offsets``, for :data:`NON_POOL` absolute addresses, have shape (T,). If
        ``located`` (found by address), the peer's non-pool memory may be written without RCA.
        Raises ProtocolError for no such region, a tensor outside it, or pools and non-pool memory in one cache;
        LinkError if the connection is closed, cannot reach the region, or may not write it.
        """
        if regions.ndim != 1 or regions.shape != offsets.shape:
            raise ParamError(f"map: regions and offsets must be 1-D and as long, got {regions.shape}, {offsets.shape}")
        with self._use("map"):
            named = sorted(set(regions.tolist()))
            bases, place = offsets if len(named) == 1 else offsets.copy(), USER
            if NON_POOL in named and len(named) > 1 and not self.capabilities.same_addresses:
                raise ProtocolError(f"map: non-pool memory and exported regions {named[1:]} in one cache")
            for region in named:
                found = _checked_range(self, region, writable and not (located and region == NON_POOL))
                if bases is offsets:  # usually all are in one region
                    bases = found.addresses(region, offsets, extent)
                else:
                    chosen = regions == region
                    bases[chosen] = found.addresses(region, offsets[chosen], extent)
                place = self._place(found, bases)
            return RemoteTensors(bases, extent, self, writable, named[:1] == [NON_POOL], place=place)

    def guards_unchanged(self, guards: GuardSet) -> bool:
        """Return True while every guard of :func:`guards_of` shows its generation. Raises LinkError once closed."""
        with self._use("guards_unchanged"):  # keeps the table mapped
            self._guards()
            return guards.unchanged()

    def announce(self, slot: int, deadline: Deadline, *, write: bool) -> WriteIntent | None:
        """Return a context manager that announces a transfer in memory under guard ``slot``; None if none is needed.

        During its block the owner does not reuse that memory. Compare the generations in it. Raises, also at its
        beginning: LinkError if a side is closed, ProtocolError for an impossible slot number, DeadlineExceeded while
        the intent page is full.
        """
        if self._pid != HERE["pid"] or not self._users.is_open:
            self.refuse(self, "announce")
        # The owner waits for no reader: a generation fails it.
        if self.intent_writer is None or not (write or self.capabilities.announces_reads):
            return None
        return self.intent_writer.announce(slot, deadline, reading=not write)

    def move(self, transfer: Transfer) -> int:
        """Move a plan from the remote tensors to the local ones, or back; return its bytes.

        The guards are compared before the first byte and after the last; with ``remote_guards`` the owner does that.
        Nothing has moved after ParamError (the remote tensors are of another connection, or were mapped for reading; or
        the plan leaves a tensor) or after MemoryChanged and CacheMismatch (the owner refused). After DeadlineExceeded,
        TransferFailed, TransferAborted or LinkError (the connection is closed, or the peer has ended) the destination
        is undefined.
        """
        if transfer.remote.connection is not self:
            text = f"{transfer.what}: the remote tensors were mapped by another connection; map them with this one"
            raise ParamError(text)
        if transfer.write and not transfer.remote.writable:
            raise ParamError("write: the remote tensors were mapped with writable=False; map them with writable=True")
        if self._pid != HERE["pid"]:
            self.refuse(self, transfer.what)
        nbytes = transfer.plan.nbytes
        with Use(self._users, self, self, "write" if transfer.write else "read"):
            try:
                self._move(transfer)
                (self._written if transfer.write else self._read).add(nbytes)
            except (LinkError, TransferFailed, DeadlineExceeded):
                if not self._aborted:
                    raise
        if self._aborted:
            name = self.capabilities.name
            text = f"{transfer.what}: the {name} connection was aborted during a transfer of {nbytes} bytes"
            raise TransferAborted(text, phase="copy")
        return nbytes

    @property
    def closed(self) -> bool:
        return not self._users.is_open

    def close(self) -> None:
        """Refuse new calls, and release everything once running calls have ended. Idempotent; never waits."""
        if self._pid != HERE["pid"] and self._users.is_open:
            # A thread that only the parent has may be inside; it never leaves in this process.
            self._users = UseGate()
        if self._users.shut() == 0:
            self._release()

    def abort(self) -> None:
        """:meth:`close`, and let running calls fail with TransferAborted. Idempotent; never waits."""
        self._aborted = True
        self.close()

    def _use(self, call: str) -> Use[Self]:
        """Return a context manager for a running call; the last one after :meth:`close` releases everything."""
        if self._pid != HERE["pid"]:
            self.refuse(self, call)
        return Use(self._users, self, self, call)

    def last_left(self, _: Connection) -> None:
        """Release everything: no call runs any more."""
        self._release()

    def refuse(self, _: Connection, call: str) -> NoReturn:
        """Raise LinkError or StateError."""
        what = f"{self.capabilities.name} connection"
        if self._pid != HERE["pid"]:
            raise StateError(f"{call}: this {what} belongs to process {self._pid}, not us")
        raise LinkError(f"{call}: the {what} is closed; link again", phase="copy")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @partial(public_call, here=True)  # below any lock of this thread
    def __del__(self) -> None:
        # The last reference, so the count does not matter. A constructor may have failed half way.
        if not hasattr(self, "_users") or self.closed:
            return
        self._users.shut()
        if self._pid == HERE["pid"]:
            warnings.warn(f"unclosed {self!r}", ResourceWarning, source=self, stacklevel=2)
        self._release()

    def __repr__(self) -> str:
        state, usage = "closed" if self.closed else "open", self.usage()
        return (
            f"<{type(self).__name__} {state}: {self._users.inside} in use, "
            f"{usage.read_bytes} bytes read, {usage.written_bytes} written>"
        )


class ServedConnection(Connection):
    """Connection to an owner that takes part in every transfer (``remote_guards``)."""

    def __init__(self, *, writable: bool) -> None:
        self._ranges = {NON_POOL: PeerRange(_ELSEWHERE, ADDRESS_SPACE, writable)}
        super().__init__()


def guards_of(connection: Connection, promised: list[tuple[int, int]]) -> GuardSet:
    """Return guards, each a slot and its generation, for calls of this connection.

    Raises ProtocolError for a slot outside the peer's guard table, LinkError if the transport maps no guards.
    """
    with connection._use("guards"):
        guards = connection._guards()
        try:
            return GuardSet(promised, SLOT_BYTES, guards.base, guards.nbytes)
        except ParamError as error:
            raise ProtocolError(str(error)) from error


def _checked_range(connection: Connection, region: int, writable: bool) -> PeerRange:
    capabilities = connection.capabilities
    if region == NON_POOL and not capabilities.non_pool_memory:
        raise LinkError(f"map: {capabilities.name} reaches exported pools only, not the peer's non-pool memory")
    if (found := connection._range(region)) is None:
        raise ProtocolError(f"map: the peer exports no region {region}")
    if writable and not found.writable:
        raise LinkError(f"map: the peer exports region {region} read-only: it has no remote cache access (RCA)")
    return found


class DataPath:
    """Owner of a link's connections: ``shared`` reaches pools and guards, ``private`` non-pool memory.

    ``private`` is None if ``shared`` reaches non-pool memory, or nothing does. ``devices``: the peer was offered this
    side's pools in a GPU.
    """

    def __init__(self, shared: Connection, private: Connection | None = None, *, devices: bool = False) -> None:
        self.devices = devices
        self.shared = shared
        self.private = private
        self.connections = (shared,) if private is None else (shared, private)
        self.server = next((each.server for each in self.connections if each.server is not None), None)
        self.capabilities = shared.capabilities
        if private is not None:
            announces_reads = any(each.capabilities.announces_reads for each in self.connections)
            self.capabilities = replace(shared.capabilities, non_pool_memory=True, announces_reads=announces_reads)

    def reaching(self, regions: NDArray[np.uint32]) -> Connection:
        """Return the connection for tensors of these regions: all of them in pools, or none."""
        if self.private is not None:
            named = set(regions.tolist())
            if named <= {NON_POOL} or any(map(self.shared.leaves_out, named)):
                return self.private
        return self.shared

    def for_ours(self, *, non_pool: bool) -> Connection:
        """Return the connection by which the peer reaches this side's memory, unless its import of a GPU's fails."""
        return self.private if self.private is not None and non_pool else self.shared

    def close(self) -> None:
        for each in self.connections:
            each.close()
