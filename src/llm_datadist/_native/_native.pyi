from _thread import LockType
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from enum import Enum
from typing import Any, Final, Generic, Literal, Protocol, Self, TypeVar, final, overload

import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

CHANGED: int
"""Status of a job: a guard had changed; read bytes are invalid, none were written."""
ABORTED: int
"""Status of a read: the target took its memory back by :meth:`LaneEngine.quiesce`."""
LOST: int
"""Status of a job: the lane ended because the job was given up."""
MISFIT: int
"""Status of a write: the accepted memory differs in size from the payload."""
TORN: int
"""Status of a write: a guard changed, or memory was taken back, after it was accepted; part may be written."""

class Ending(Enum):
    """End of a job for its initiator."""

    GOOD = ...
    REFUSED = ...  # by the target
    LOST = ...  # with the lane
    TIMEOUT = ...  # or given up
    TRAILER = ...  # the bytes came, but the target's status forbids their use
    DEVICE = ...  # a device of this side failed

WRITER_SLOTS: int
WRITER_PAGE_BYTES: int

@final
class BlockList:
    """Parsed block numbers."""

    largest: Final[int]  # -1 if empty
    array: Final[NDArray[np.int64]]  # read-only, shape ``(N,)``

    def __init__(self, array: NDArray[np.int64]) -> None: ...
    def __len__(self) -> int: ...

class DeviceMover(Enum):
    """How a device moves bytes: as the plan suits, by the kernel where the order of runs allows it, by plain copies."""

    AUTO = 0
    KERNEL = 1
    COPY = 2

@final
class Place:
    """Where memory is: ``device``, the ordinal of a GPU, or -1 for the host.

    Of host memory: ``mapped`` if only this library can unmap or protect it, ``pinned`` if devices reach it.
    """

    device: Final[int]
    mapped: Final[bool]
    pinned: Final[bool]

    def __init__(
        self, *, device: int = -1, mapped: bool = False, pinned: bool = False, mover: DeviceMover = DeviceMover.AUTO
    ) -> None: ...

@final
class Device:
    """A GPU of NVIDIA; one object for each ordinal, which lives as long as the process. Any thread.

    LLMException (``LLM_FEATURE_NOT_ENABLED``): no driver, or no such device. DeviceError: it has failed.
    """

    ordinal: Final[int]
    name: Final[str]
    uuid: Final[bytes]  # 16 bytes
    version: Final[int]  # of the driver's CUDA, as 12080
    no_kernel: Final[str]  # why plain copies do all; empty if there is a kernel

    @staticmethod
    def count() -> int:
        """Return how many GPUs this process sees."""
    @staticmethod
    def open(ordinal: int) -> Device: ...
    def attribute(self, which: int) -> int:
        """Return an attribute by its number in the driver's header."""
    def windows(self) -> tuple[int, int]:
        """Return the bytes that went through windows in this process, and the ns that lanes have waited for one."""
    def memory(self) -> tuple[int, int]:
        """Return (free, total) bytes."""
    def device_of(self, address: int) -> int:
        """Return the ordinal of the device that has the memory at ``address``; -1 for the host."""

@final
class PinnedMemory:
    """Host memory that the device reaches, until :meth:`release`, at the latest its end."""

    def __init__(self, ordinal: int, address: int, nbytes: int) -> None: ...
    def release(self) -> bool:
        """Unpin the memory; return False if it must stay mapped, because a copy of it does not end."""

@final
class DeviceMemory:
    """Memory of a device, mapped here; with ``fd`` that of a peer, which is then used during this call only.

    Its end unmaps it; no copy may run then.
    """

    address: Final[int]
    size: Final[int]  # ``nbytes`` in whole pages of the device

    @overload
    def __init__(self, ordinal: int, nbytes: int) -> None: ...
    @overload
    def __init__(self, ordinal: int, nbytes: int, fd: int, writable: bool) -> None: ...
    def export_fd(self) -> int:
        """Return a descriptor by which peers map it; the caller closes it."""
    def close(self) -> None: ...

@final
class StreamEvent:
    """Work that a stream of a GPU has been given so far, and that of ``before``."""

    def __init__(self, ordinal: int, stream: int, before: StreamEvent | None) -> None: ...

AFTER: ContextVar[StreamEvent | None]

def await_work(deadline_ns: int, cancelled: bytearray | None = None) -> bool:
    """Wait for the work of :data:`AFTER`, which :func:`execute` does by itself; False: not in time."""

def set_device_patience(ms: int) -> None:
    """Set how long after its deadline a call waits for a copy that has begun: 10 000 ms. For tests."""

@final
class TensorList:
    """Addresses of one side's tensors, and their bytes."""

    def __init__(self, bases: NDArray[np.uint64], extent: int, place: Place) -> None: ...
    def same_bases(self, other: TensorList) -> bool: ...

@final
class UseGate:
    """Counter of users inside a gate that can be shut. Calls are atomic.

    After :meth:`shut` users leave by :meth:`leave`, which returns 0 to the last.
    """

    def __init__(self, is_open: bool = True) -> None: ...
    def try_enter(self) -> bool:
        """Count a user in unless the gate is shut: then return False."""
    def try_leave(self) -> bool:
        """Count a user out unless the gate is shut: then return False."""
    def enter(self) -> None:
        """Count a user in, even if the gate is shut."""
    def leave(self) -> int:
        """Count a user out, open or shut; return the number left."""
    def open(self) -> None: ...
    def shut(self) -> int:
        """Let no user in; return the number inside, -1 if it was already shut."""
    @property
    def is_open(self) -> bool: ...
    @property
    def inside(self) -> int: ...

class _Owner(Protocol):
    def refuse(self, used: Any, what: Any, /) -> object: ...  # noqa: ANN401 (of any user)
    def last_left(self, used: Any, /) -> object: ...  # noqa: ANN401 (as above)

@final
class Use(Generic[T]):
    """Use of what a gate guards during a ``with`` block, which gets ``used``.

    If the gate is shut, ``owner.refuse(used, what)`` raises. The last user of a shut gate calls
    ``owner.last_left(used)``.
    """

    def __init__(self, gate: UseGate, used: T, owner: _Owner, what: object) -> None: ...
    def __enter__(self) -> T: ...
    def __exit__(self, *exc_info: object) -> None: ...

class _Totals:
    @property
    def count(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...

@final
class Meter(_Totals):
    """Totals of one kind of operation. Any thread."""

    def __init__(self) -> None: ...
    def add(self, nbytes: int, seconds: float = 0.0, failed: bool = False) -> None:
        """Add an operation."""

FIRST_DURATION_BIT: Final[int]
LAST_DURATION_BIT: Final[int]

@final
class OperationMeter(_Totals):
    """Totals, durations by transport and failures by exception of :class:`Timer` blocks. Any thread."""

    def __init__(self) -> None: ...
    @property
    def failures(self) -> dict[str, int]:
        """Failed operations by exception class."""
    @property
    def transports(self) -> list[tuple[str, int, float, tuple[int, ...]]]:
        """Name, bytes, seconds and operations by duration of each transport."""

@final
class Timer:
    """Context manager that adds an operation of :attr:`nbytes` bytes to a meter."""

    nbytes: int
    transport: str  # empty if no transport moves bytes

    def __init__(self, meter: OperationMeter) -> None: ...
    @property
    def seconds(self) -> float:
        """Duration of the block, once ended."""
    def __enter__(self) -> Timer: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

@final
class Plan:
    """Copy in factored form: the same runs from source tensor ``src_first + i`` to ``dst_first + i``, i < ``count``.

    Attributes:
        runs: Shape ``(R, 3)``, C-contiguous: destination offset, source offset and length, in bytes inside a tensor.
            Unchanged while the plan is executed.
        ordered: True if the runs must take effect one after the other (interface R26).
        nbytes: ``count`` times the sum of the lengths.
    """

    dst_first: Final[int]
    src_first: Final[int]
    count: Final[int]
    runs: Final[NDArray[np.uint64]]
    ordered: Final[bool]
    nbytes: Final[int]

    def __init__(
        self, dst_first: int, src_first: int, count: int, runs: NDArray[np.uint64], ordered: bool, nbytes: int
    ) -> None: ...
    def replace(
        self,
        *,
        dst_first: int = ...,
        src_first: int = ...,
        count: int = ...,
        runs: NDArray[np.uint64] = ...,
        ordered: bool = ...,
        nbytes: int = ...,
    ) -> Plan: ...

@final
class GuardSet:
    """Generations that slots of the guard table at ``base`` must show. ParamError: a slot is outside the table."""

    def __init__(self, promised: list[tuple[int, int]], slot_bytes: int, base: int, nbytes: int) -> None: ...
    def unchanged(self) -> bool:
        """Return True if every slot shows its generation. The table must be mapped."""

CHANGED_BEFORE: Final[int]
CHANGED_DURING: Final[int]

def parse_blocks(name: str, values: object) -> BlockList:
    """Parse a list or tuple of integers, a range, or a 1-D integer array or CPU tensor. Errors begin with ``name``.

    Raises TypeError for others, NoneArgument for None, ParamError for a negative number or one beyond int64.
    """

def parse_pairs(pairs: dict[Any, Any], lists: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return (keys, values) of a dict of ints, with ``lists`` of int lists, a key for each value.

    None if it has anything else, or an int outside [0, 2**63).
    """

def readable(fd: int) -> bool:
    """Return True if a descriptor can be read without waiting, or is invalid; False for -1."""

def unmap_elsewhere(address: int, nbytes: int, piece: int) -> bool:
    """Unmap on a new thread, ``piece`` bytes (whole pages) at a time; return False without a thread."""

def close_elsewhere(fds: Sequence[int]) -> None:
    """Close a peer's descriptors on a new thread, or here without one; SO_LINGER may block it."""

def closing() -> int:
    """Return the number of descriptors left to :func:`close_elsewhere`."""

@final
class BlockPlanner:
    """Planner between two compared caches; each call gives only the lists."""

    def __init__(
        self,
        *,
        block_bytes: int,
        dst_count: int,
        src_count: int,
        alias: bool,
        tensors: tuple[int, int, int] = (0, 0, 1),
    ) -> None: ...
    def plan(
        self,
        dst: BlockList | NDArray[np.int64],
        src: BlockList | NDArray[np.int64],
        dst_name: str = "dst_blocks",
        src_name: str = "src_blocks",
    ) -> Plan:
        """Plan as :func:`plan_blocks`."""

def plan_blocks(
    dst: BlockList | NDArray[np.int64],
    src: BlockList | NDArray[np.int64],
    *,
    block_bytes: int,
    dst_count: int,
    src_count: int,
    alias: bool,
    tensors: tuple[int, int, int] = (0, 0, 1),
    dst_name: str = "dst_blocks",
    src_name: str = "src_blocks",
) -> Plan:
    """Plan source block ``src[i]`` to destination block ``dst[i]``; shapes ``(N,)``.

    Runs are read-only, neighbours merged. The plan is ``ordered``, and not merged, if a destination occurs twice. So it
    is if a block of aliased tensors is source of one pair and destination of another (interface R26).

    Args:
        dst_count: Blocks of a tensor; ``src_count`` likewise.
        alias: True if both sides are the same tensors: pairs with ``src == dst`` move nothing.
        tensors: First destination tensor, first source tensor, count.
        dst_name: Name in errors; ``src_name`` likewise.

    Raises:
        ParamError: Lengths differ, a block is outside its tensor, or the geometry is impossible.
    """

def plan_pieces(
    dst: BlockList | NDArray[np.int64],
    *,
    block_bytes: int,
    dst_count: int,
    src_offset: int,
    src_bytes: int,
    tensors: tuple[int, int, int] = (0, 0, 1),
    dst_name: str = "dst_blocks",
) -> Plan:
    """Plan a row in pieces of ``block_bytes`` (the last may be short), piece ``i`` to block ``dst[i]``.

    The row has ``src_bytes`` bytes at byte ``src_offset`` of a source tensor. Otherwise as :func:`plan_blocks`.

    Raises:
        ParamError: As :func:`plan_blocks`, or a piece begins at or beyond the row's end.
    """

def plan_row(dst_offset: int, src_offset: int, length: int) -> NDArray[np.uint64]:
    """Return one run, shape ``(1, 3)``. ParamError: a value is negative."""

def copy_rule() -> tuple[int, int, int, int]:
    """Return how :func:`execute` chooses its stores.

    (width of this processor's streaming stores in bits, 0: none; bytes of a transfer above which they are used; least
    bytes of a run that uses them; bytes of a run that are prefetched while the one before it is copied)
    """

def execute(
    plan: Plan,
    dst: TensorList,
    src: TensorList,
    pool: CopyPool | None,
    deadline_ns: int,
    cancelled: bytearray | None = None,
    guards: GuardSet | None = None,
) -> int:
    """Copy the bytes of ``plan`` from ``src`` to ``dst``; when the call returns every process sees them.

    Above 256 KiB it releases the GIL and runs signal handlers. Above 1 MiB threads of ``pool`` help, unless the plan is
    ordered or a run overlaps itself. Such a run moves like ``memmove``. It stops at ``deadline_ns`` (of
    ``time.monotonic_ns()``) or once the byte ``cancelled`` is not zero, both checked about every 4 MiB.
    Returns the bytes copied, fewer than ``plan.nbytes`` only if it stopped. ``guards`` are compared before the first
    byte (``CHANGED_BEFORE``: nothing was copied) and after the last (``CHANGED_DURING``). Raises ParamError, and writes
    nothing, if a tensor is missing, a run leaves its tensor, or ``plan.nbytes`` is wrong.
    """

@final
class Canary:
    """Private page at a random address; a peer that writes into this address space writes a byte of it first.

    A forked child, a program after exec and a later process with the pid lack it. MemoryError: no page.
    """

    def __init__(self) -> None: ...
    @property
    def address(self) -> int:
        """Address of the page; 0 once closed."""

    def close(self) -> None:
        """Unmap the page, unless in a forked child; later writers fail. Idempotent."""

@final
class ProcessMemory:
    """Memory of process ``pid`` of this host, by its own addresses, moved by system calls.

    ``pidfd``, which the caller keeps open, proves the process. So does, for reads, ``cookie``: at most 16 bytes at
    ``cookie_address``. Writes first overwrite a byte at each of the two ``canaries``. -1 skips the pidfd, an empty
    cookie the others.
    """

    def __init__(
        self,
        pid: int,
        pidfd: int = -1,
        cookie_address: int = 0,
        cookie: bytes = b"",
        canaries: tuple[int, int] = (0, 0),
    ) -> None: ...
    def read(
        self,
        plan: Plan,
        local: TensorList,
        remote: TensorList,
        pool: CopyPool | None,
        deadline_ns: int,
        cancelled: bytearray | None = None,
        guards: GuardSet | None = None,
    ) -> int:
        """Copy the bytes of ``plan`` from ``remote``, of that process, to ``local``. Otherwise as ``execute``.

        The sides must not overlap in memory that the processes share.

        OSError: the kernel refused; the destination is undefined. ProcessLookupError: the process has ended, or a proof
        fails, as after exec. PermissionError: access is denied. EFAULT: a side is not mapped for it. ParamError: as
        ``execute``; nothing is written.
        """

    write = read  # copies from ``local`` to ``remote``; otherwise as ``read``

def load_generation(address: int) -> int:
    """Return the uint64 at ``address``, loaded after all earlier loads: it judges bytes copied before.

    ParamError: the address is null or misaligned.
    """

def advance_generation(address: int) -> int:
    """Add one to the uint64 at ``address``, sequentially consistent across processes; return the sum.

    ParamError: the address is null or misaligned.
    """

@final
class WriteIntent:
    """Announcement in an intent page that lasts for a ``with`` block."""

    def __init__(
        self,
        free: list[int],
        page: NDArray[np.uint8],
        address: int,
        what: int,
        full: Callable[[], object],
        closed: Callable[[], object],
    ) -> None: ...
    def __enter__(self) -> None: ...
    def __exit__(self, *exc_info: object) -> None: ...

def close_writers(page: int) -> None:
    """Refuse new announcements. ParamError: an impossible address."""

def writer_sequence(page: int, slot: int) -> int:
    """Return a slot's sequence, odd while its writer works. ParamError: as ``announce_writer``."""

def find_writers(pages: NDArray[np.uint64], what: list[int], any: bool) -> list[tuple[int, int, int]]:
    """Return (page index, slot, sequence) of each writer at work on ``what``, or on anything if ``any``.

    ParamError: an impossible address.
    """

def check_mapped(name: str, addresses: list[int], nbytes: int) -> None:
    """Raise ParamError, beginning with ``name``, unless ``nbytes`` bytes are mapped at each address.

    The first and the last page must be readable, too; pages between them are not read. The time depends on the number
    of mappings.
    """

def peek_process(pid: int, address: int, nbytes: int) -> bytes:
    """Return ``nbytes`` (at most 1 MiB) bytes of process ``pid``.

    OSError: the kernel refused. ParamError: too many bytes.
    """

@final
class CopyPool:
    """Threads that help with large copies, of several callers at once.

    ``threads`` (1 to 1024) includes the caller's. If the pool is closed, or in a forked child, the caller copies alone.
    """

    threads: Final[int]

    def __init__(self, threads: int) -> None: ...
    @property
    def closed(self) -> bool: ...
    def close(self) -> None:
        """Join the threads. Idempotent."""

def check_plan(plan: Plan, dst: TensorList, src: TensorList) -> None:
    """Raise the ParamError that ``execute`` would raise before its first byte."""

MAX_REQUEST_RUNS: Final[int]
"""Runs of one request: half of what a meta of 1 MiB has room for."""

def decode_request(meta: bytes) -> tuple[bytes, int, Plan]:
    """Return the handle, the bytes of a tensor and the plan of a lane request. Raises ParamError for what is none.

    The plan has the same offsets as destination and source; nothing is checked against any memory yet.
    """

def encode_request(handle: bytes, extent: int, plan: Plan, write: bool) -> bytes:
    """Return the meta of a lane request for the target's side of a plan.

    ParamError: the handle has more than 65535 bytes.
    """

def least_loaded(loads: dict[int, int], bulk: bool = False) -> int:
    """Return the lane with the smallest load, 0 without lanes; atomic. ``bulk``: none on the oldest of several."""

def add_load(loads: dict[int, int], lane: int, nbytes: int, doubts: list[int] | None = None) -> None:
    """Add to the load of a lane, unless it has gone, and make ``doubts[0]`` at least the lane; atomic."""

@final
class LaneLoad:
    """Load of one job on a lane for a ``with`` block; unless ``answered``, ``doubts[0]`` is at least the lane then."""

    answered: bool
    def __init__(self, loads: dict[int, int], lane: int, nbytes: int, doubts: list[int] | None) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...

@final
class LentBlocks:
    """Ascending blocks, of ``stride`` bytes, that a grant lends. ``hold``: the source of every run lies inside."""

    def __init__(self, blocks: list[int], stride: int) -> None: ...
    def hold(self, plan: Plan) -> bool: ...

@final
class ReplyCache:
    """Replies to one link's lane requests, by verb and handle; at most 4096. Any thread."""

    def __init__(self) -> None: ...
    def keep(
        self,
        handle: bytes,
        write: bool,
        tensors: TensorList,
        guards: Sequence[tuple[int, int]],
        tag: int,
        lent: LentBlocks | None = None,
    ) -> None:
        """Keep the reply for all tensors of a handle, until a guard changes or :meth:`LaneEngine.quiesce` of the tag.

        With ``lent`` only for these blocks. A full table is emptied first.
        """
    @property
    def moved(self) -> tuple[int, int]:
        """Bytes of all replies, kept or not: sent, and received. Those of a reply that failed do not count."""

    def __len__(self) -> int: ...

@final
class LaneEngine:
    """Threads that move jobs over stream sockets. Any thread.

    In a forked child all but close(), threads and reserve_lane() raise ParamError.
    """

    threads: Final[int]

    def __init__(self, threads: int, drain_ms: int = 10_000) -> None: ...
    def close(self) -> None:
        """Lose every lane and join the threads; then no memory is touched. Idempotent."""
    def add_lane(self, fd: int, keys: tuple[bytes, bytes] | None = None) -> int:
        """Take over a connected stream socket, also if this raises; return its lane number.

        ``keys`` encrypts it: (send_key, receive_key), two different keys of 32 bytes, swapped at the peer. No other
        lane may have them. Bytes changed on their way cost the lane.

        ParamError: not an open descriptor, 10240 lanes exist, wrong keys, or no OpenSSL 3.
        """
    def reserve_lane(self) -> int:
        """Return a lane number for :meth:`attach_lane`."""
    def attach_lane(
        self, lane: int, fd: int, replies: ReplyCache | None = None, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        """Add a lane under a reserved number, as add_lane(); ``replies`` answers requests natively."""
    def drop_lane(self, lane: int) -> None:
        """Close a lane, if it exists; its jobs are lost and touch no memory."""
    def event_fd(self) -> int:
        """Return a descriptor that is readable while there are events."""
    def poll_events(
        self,
    ) -> list[
        tuple[Literal["read"], int, int, bytes]
        | tuple[Literal["write"], int, int, bytes, int]
        | tuple[Literal["lost"], int, str]
    ]:
        """Return the events since the last call."""
    def start(self, lane: int, write: bool, meta: bytes, plan: Plan, tensors: TensorList) -> int: ...
    def move(
        self,
        lane: int,
        write: bool,
        handle: bytes,
        extent: int,
        plan: Plan,
        tensors: TensorList,
        deadline_ns: int,
        cancelled: bytearray | None = None,
    ) -> tuple[Ending, int, int, str]:
        """Start a job with the meta of :func:`encode_request`; :meth:`wait` for its end.

        A signal handler's exception ends the job.
        """
    def wait(self, job: int, deadline_ns: int, cancelled: bytearray | None = None) -> tuple[Ending, int, int, str]: ...
    def give_up(self, job: int) -> tuple[Ending, int, int, str]: ...
    def reply(
        self,
        lane: int,
        id: int,
        write: bool,
        plan: Plan,
        tensors: TensorList,
        guards: Sequence[tuple[int, int]],
        tag: int,
    ) -> None: ...
    def refuse(self, lane: int, id: int, code: int, text: str) -> None:
        """Refuse a request; ``code`` is a uint32, not 0; ``text`` is cut at 4000 bytes."""
    def quiesce(self, tag: int) -> None:
        """Stop all use of memory under ``tag``; reads end as ABORTED, writes as TORN. Advance its guards first."""

def digest(
    plan: Plan,
    tensors: TensorList,
    dst: bool,
    each_run: bool,
    nonce: bytes,
    pool: CopyPool | None,
    deadline_ns: int,
    cancelled: bytearray | None = None,
) -> NDArray[np.uint64] | None: ...
def surviving(plan: Plan, *, alias: bool) -> Plan:
    """Return the surviving runs of an executed plan: those whose bytes can still be compared.

    In an ordered plan (interface R26) later runs may have overwritten bytes that earlier ones wrote. With ``alias``,
    the same tensors on both sides, also bytes that they read.
    """

class CutOff(BaseException):
    """Raised in an errand of the main thread, where a signal handler has raised."""

def public_call(function: F, elsewhere: bool, whole: bool, refuse: Callable[[Any, Any], object] | None) -> F:
    """Return a function that is a public call; see ``public_call.py``."""

def elsewhere(function: Callable[..., T], args: tuple[Any, ...], named: dict[str, Any], whole: bool) -> T:
    """In the main thread: call a function in another thread."""

def in_main_thread() -> bool: ...
def for_main_thread() -> bool:
    """Return True in the main thread and in its errands."""

def inside_another_call() -> bool:
    """Return True if the thread is in a call inside another one."""

def put_off(function: Callable[..., object], *args: object) -> bool:
    """Queue a function for the end of the thread's outermost call; return False unless inside another call.

    It must be no public call, which would queue it again.
    """

def do_what_was_put_off() -> None:
    """Run the queue of :func:`put_off`, unless inside another call."""

def check_signals() -> None:
    """Run signal handlers in the main thread; raise CutOff in an errand for which one has raised."""

@final
class Requests:
    """The callers of a link that wait for answers. Threads: any."""

    late: list[bytes]
    """Answers whose callers were cut off."""

    reported: int
    """Number of messages that ``Stream.send`` has counted."""

    def number(self) -> int:
        """Return a new number."""

    def close(self) -> None:
        """Wake all callers without an answer; admit no more."""

    @property
    def closed(self) -> bool: ...
    @property
    def waiting(self) -> int: ...

@final
class Waiter:
    """A caller that waits for one answer, in a ``with`` block. If the requests are closed, it is done at once."""

    def __init__(self, requests: Requests) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc_info: object) -> None: ...
    @property
    def number(self) -> int: ...
    @property
    def done(self) -> bool: ...
    @property
    def answer(self) -> bytes | None:
        """The message; None without one."""

    taken: bool
    """Unless set, an exception in the block makes the answer one of ``Requests.late``."""

    @property
    def gate(self) -> LockType:
        """Open once done."""

@final
class Stream:
    """Frames on a stream socket, which the caller keeps open. One thread has the reader role, first its maker.

    Each call is one step, for other threads, except where it waits.
    """

    def __init__(self, fd: int, epoll: int, answers: Sequence[str], limit: int, most: int = 65536) -> None:
        """``answers``: names of messages. ``limit``: bytes of one. ``most``: bytes received at once, at most 64 KiB."""

    @property
    def open(self) -> bool: ...
    def shut(self) -> bool:
        """Send nothing and admit no reader from now on; return False if that has been."""

    def release(self) -> bool:
        """Let the last reader close the socket; return True if nobody has the role."""

    @property
    def released(self) -> bool: ...
    def send(self, data: bytes, now: bool = True, reports: Requests | None = None) -> int | None:
        """Send what the kernel takes ``now``; return the bytes that are kept, None once shut. ``reports`` counts it.

        A broken connection takes all: reading reports it.
        """

    def flush(self) -> int:
        """Send what was kept; return what is left."""

    @property
    def unsent(self) -> int: ...
    def take_role(self) -> bool:
        """Take the reader role; return False if another thread has it, or once shut."""

    def leave_role(self) -> bool:
        """Give the reader role up; return True if the socket is to be closed."""

    @property
    def held(self) -> bool: ...
    def watch(self, watched: bool) -> None:
        """Set whether the epoll reports input."""

    def feed(self, data: bytes) -> None: ...
    def receive(self, seconds: float = 0.0) -> bytes | None:
        """Return what comes in time: ``b""`` at the stream's end, None for nothing, or after a signal.

        It first polls for 250 us while that pays. OSError: the connection is broken.
        """

    def deliver(self, requests: Requests) -> bool:
        """Deliver leading answers; return True if no whole frame follows."""

    def take(self) -> bytes | None:
        """Return the first message, if it is complete. ParamError: it is too long."""

    @property
    def rest(self) -> int:
        """Bytes that wait."""

    def read_answers(
        self, requests: Requests, waiter: Waiter, seconds: float, decrypt: Callable[[bytes], bytes] | None
    ) -> bool | None:
        """Take the role, and deliver answers until ``waiter`` is done; return after ``seconds`` or a signal.

        None: another thread has the role. False: the control thread has to read what comes next. Errors: those of
        ``decrypt``.
        """

@final
class BriefPoll:
    """Polling of one descriptor before its owner sleeps on it: a wake-up often costs more than the wait."""

    def __init__(self, fd: int) -> None: ...
    def run(self) -> None:
        """Return when it can be read, after 60 us at most, or at once while polling has not paid. Releases the GIL."""

def count_keys(keys: bytes, /) -> int:
    """Return the length of a MessagePack array of keys. ParamError: it is none."""

@final
class KeyTable:
    """Slots by key. Threads: one at a time."""

    def __init__(self) -> None: ...
    def __setitem__(self, key: bytes, slot: int, /) -> None: ...
    def __delitem__(self, key: bytes, /) -> None: ...
    def find(self, key: bytes, /) -> int: ...  # -1 without
    def run(self, keys: bytes, states: NDArray[np.uint8], state: int, marks: NDArray[np.uint8], /) -> NDArray[np.int64]:
        """Return the slots of the leading keys whose states, by slot, are ``state``; set their marks."""
