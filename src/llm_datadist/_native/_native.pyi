from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, Literal, final

import numpy as np
from numpy.typing import NDArray

CHANGED: int
"""Status of a job whose target's guard had changed: bytes that were read must not be used, none were written."""
ABORTED: int
"""Status of a read whose target took the memory back by :meth:`LaneEngine.quiesce`."""
LOST: int
"""Status of a job whose lane ended because it was given up."""
MISFIT: int
"""Status of a write whose payload has another size than what was granted."""
TORN: int
"""Status of a write whose guard changed, or whose memory was taken back, after the grant: part may be written."""

class Ending(Enum):
    """How a job ended for its initiator."""

    GOOD = ...
    REFUSED = ...  # by the target; the outcome has its code and text
    LOST = ...  # with its lane
    TIMEOUT = ...  # or given up
    TRAILER = ...  # the bytes came, but the target's status in the outcome says that they must not be used

WRITER_SLOTS: int
WRITER_PAGE_BYTES: int

@final
class BlockList:
    """Block numbers of a caller, parsed once."""

    largest: Final[int]  # -1 of an empty list
    array: Final[NDArray[np.int64]]  # read-only, shape ``(N,)``, not copied

    def __init__(self, array: NDArray[np.int64]) -> None: ...
    def __len__(self) -> int: ...

@final
class TensorList:
    """The addresses of the tensors of one end, and their bytes."""

    def __init__(self, bases: NDArray[np.uint64], extent: int) -> None: ...
    def same_bases(self, other: TensorList) -> bool:
        """Return True if both have the same addresses."""

@final
class UseGate:
    """Counts the users inside a gate that can be shut. Any thread; takes no lock, each call is atomic.

    A user that is inside when it is shut leaves by :meth:`leave`, which returns 0 to the last.
    """

    def __init__(self, is_open: bool = True) -> None: ...
    def try_enter(self) -> bool:
        """Count one user more inside; return False, without counting, if it is shut."""
    def try_leave(self) -> bool:
        """Count one user less inside; return False, without counting, if it is shut: use :meth:`leave`."""
    def enter(self) -> None:
        """Count one user more inside, even if it is shut."""
    def leave(self) -> int:
        """Count one user less inside, open or shut; return how many are left."""
    def open(self) -> None:
        """Let users in. Idempotent."""
    def shut(self) -> int:
        """Let no user in any more; return how many are inside, -1 if it was shut already."""
    @property
    def is_open(self) -> bool:
        """True if users may enter."""
    @property
    def inside(self) -> int:
        """Number of users inside."""

@final
class Meter:
    """Totals of one kind of operation. Any thread; takes no lock."""

    def __init__(self) -> None: ...
    def add(self, nbytes: int, seconds: float = 0.0, failed: bool = False) -> None:
        """Add one finished operation."""
    @property
    def count(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...

FIRST_DURATION_BIT: Final[int]
LAST_DURATION_BIT: Final[int]

@final
class OperationMeter:
    """What a :class:`Timer` adds to: totals, durations by transport, failures by exception. Any thread."""

    def __init__(self) -> None: ...
    @property
    def count(self) -> int: ...
    @property
    def errors(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def failures(self) -> dict[str, int]:
        """Failed operations by the name of the exception's class."""
    @property
    def transports(self) -> list[tuple[str, int, float, tuple[int, ...]]]:
        """For each transport its name, bytes, seconds, and operations by duration."""

@final
class Timer:
    """Adds its with block to a meter as one operation of :attr:`nbytes` bytes. Used by one thread."""

    nbytes: int
    transport: str  # what moves the bytes; empty where no transport does

    def __init__(self, meter: OperationMeter) -> None: ...
    @property
    def seconds(self) -> float:
        """Duration of the block, once it has ended."""
    def __enter__(self) -> Timer: ...
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...

@final
class Plan:
    """A copy in factored form: tensor pairs times runs, because what is asked of one tensor is asked of all.

    Destination tensor ``dst_first + i`` takes from source tensor ``src_first + i``, for ``i`` below ``count``.

    Attributes:
        dst_first: First tensor of the destination.
        src_first: First tensor of the source.
        count: Tensor pairs.
        runs: Shape ``(R, 3)``, C-contiguous: destination offset, source offset and length in bytes inside a tensor.
            Not to be changed while the plan is executed.
        ordered: True when the runs must take effect one after the other (interface R26).
        nbytes: Bytes over all tensors: ``count`` times the sum of the lengths.
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
    ) -> Plan:
        """Return a plan that differs in the fields that are named."""

@final
class GuardSet:
    """Generations that slots of a peer's guard table must show."""

    def __init__(self, promised: list[tuple[int, int]], slot_bytes: int) -> None: ...
    def unchanged(self, base: int, nbytes: int) -> bool:
        """Return True if every slot of the table at ``base`` shows its generation, loaded as by load_generation.

        ParamError: a slot outside the table.
        """

def parse_blocks(name: str, values: object) -> BlockList | None:
    """Return the numbers of a list, a tuple, or a 1-D int64 array without negatives; None for anything else."""

def parse_pairs(pairs: dict[Any, Any], lists: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
    """Return the (keys, values) of a dict of int to int, or of int to list of int when ``lists``, pair by pair in the
    order given; None when there is anything else in it, a negative int or one beyond int64 too.
    """

def readable(fd: int) -> bool:
    """Return True if a descriptor can be read without waiting, or is invalid; False for -1. Never waits."""

def unmap_elsewhere(address: int, nbytes: int, piece: int) -> bool:
    """Have a new thread unmap memory, ``piece`` (a multiple of the page size) bytes at a time. False: no thread."""

def close_elsewhere(fds: Sequence[int]) -> None:
    """Close a peer's descriptors, and sockets in which some may wait, on a thread for which nothing waits.

    The last close of one may block for as long as its sender wants: SO_LINGER. Closes here if no thread can be had.
    """

def closing() -> int:
    """Return how many descriptors :func:`close_elsewhere` has not closed yet."""

@final
class BlockPlanner:
    """Plans blocks between two caches whose geometries were compared once; each call gives the lists only."""

    def __init__(
        self,
        *,
        block_bytes: int,
        dst_count: int,
        src_count: int,
        alias: bool,
        tensors: tuple[int, int, int] = (0, 0, 1),
    ) -> None:
        """Take the arguments of :func:`plan_blocks` except the lists."""
    def plan(
        self,
        dst: BlockList | NDArray[np.int64],
        src: BlockList | NDArray[np.int64],
        dst_name: str = "dst_blocks",
        src_name: str = "src_blocks",
    ) -> Plan:
        """Plan as :func:`plan_blocks`, with the same errors."""

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
    """Plan the copy of source block ``src[i]`` to destination block ``dst[i]``, for every ``i``.

    Args:
        dst: Destination blocks, shape ``(N,)``.
        src: Source blocks, shape ``(N,)``.
        block_bytes: Bytes of a block, the same at both ends.
        dst_count: Blocks of a destination tensor.
        src_count: Blocks of a source tensor.
        alias: True when both ends are the same tensors: pairs with ``src == dst`` then move nothing.
        tensors: First destination tensor, first source tensor, and how many.
        dst_name: What errors call ``dst``.
        src_name: What errors call ``src``.

    Returns:
        The plan, its runs read-only and neighbours merged. It is ``ordered``, and nothing merged, when merging or doing
        pairs at once could be seen: a destination occurs twice, or a block of aliased tensors is the source of one
        pair and the destination of another (interface R26).

    Raises:
        ParamError: Unequal lengths, a block outside its tensor, or an impossible geometry.
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
    """Plan the copy of a row in pieces of ``block_bytes`` (the last may be short), piece ``i`` to block ``dst[i]``.

    Args:
        dst: Destination blocks, shape ``(N,)``.
        block_bytes: Bytes of a block and of a piece.
        dst_count: Blocks of a destination tensor.
        src_offset: Where the row begins in a source tensor, in bytes.
        src_bytes: Bytes of the row.
        tensors: First destination tensor, first source tensor, and how many.
        dst_name: What errors call ``dst``.

    Returns:
        The plan, as :func:`plan_blocks`; it is ``ordered`` when a destination block occurs twice.

    Raises:
        ParamError: A block outside its tensor, or a piece that starts at or beyond the end of the row.
    """

def plan_row(dst_offset: int, src_offset: int, length: int) -> NDArray[np.uint64]:
    """Return one run of ``length`` bytes, shape ``(1, 3)``. ParamError: a negative value."""

def execute(
    plan: Plan,
    dst: TensorList,
    src: TensorList,
    pool: CopyPool | None,
    deadline_ns: int,
    cancelled: bytearray | None = None,
) -> int: ...

@final
class Canary:
    """A private page at a random address: a peer that writes into this address space overwrites a byte of it first.

    Neither a forked child has it, nor what runs after exec, nor what gets the pid again. MemoryError: none to be had.
    """

    def __init__(self) -> None: ...
    @property
    def address(self) -> int:
        """Where the page is; 0 once it is closed."""

    def close(self) -> None:
        """Unmap it: writers are refused from now on. Idempotent; does nothing in a forked child."""

@final
class ProcessMemory:
    """The memory of process ``pid`` of this host, by its addresses there, moved by system calls.

    What proves that it is that process: ``pidfd``, readable once it has ended and kept open by the caller. For reading
    ``cookie``, at most 16 bytes that no other address space shows at ``cookie_address``. For writing ``canaries``: a
    byte at each of these two addresses is overwritten first, and no other address space has both. -1 and an empty
    cookie: not looked at.
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
    ) -> int:
        """Move the bytes of ``plan`` from ``remote``, of that process, to ``local``. Otherwise as ``execute``.

        The two ends must not overlap in memory that the processes share.

        OSError: the kernel refused; the destination is undefined. ProcessLookupError: there is no such process any
        more, or it shows another cookie, as after exec; PermissionError: it may not be touched; errno.EFAULT: an end is
        not mapped that way. ParamError as ``execute``: nothing is written.
        """

    def write(
        self,
        plan: Plan,
        local: TensorList,
        remote: TensorList,
        pool: CopyPool | None,
        deadline_ns: int,
        cancelled: bytearray | None = None,
    ) -> int:
        """Move the bytes of ``plan`` from ``local`` to ``remote``; as ``read``."""

def load_generation(address: int) -> int:
    """Return the uint64 at ``address``, after every load made before: bytes copied until now are judged by it.

    ParamError: a null or misaligned address.
    """

def advance_generation(address: int) -> int:
    """Add one to the uint64 at ``address``, sequentially consistent among all processes, and return the new value.

    ParamError: a null or misaligned address.
    """

def announce_writer(page: int, slot: int, what: int) -> bool:
    """Show in a slot, which only the caller uses, that ``what`` is being written; False if the page is closed.

    Generations that are loaded afterwards are newer than what the owner did before it could see this.
    ParamError: no such slot, or an impossible address.
    """

def retract_writer(page: int, slot: int) -> None:
    """Show that the work is over, after everything that was written. ParamError: as ``announce_writer``."""

def close_writers(page: int) -> None:
    """Refuse new announcements in the page. ParamError: an impossible address."""

def writer_sequence(page: int, slot: int) -> int:
    """Return the sequence a slot shows, odd while its writer works. ParamError: as ``announce_writer``."""

def find_writers(pages: NDArray[np.uint64], what: list[int], any: bool) -> list[tuple[int, int, int]]:
    """Return (index of the page, slot, sequence) of each writer at work on one of ``what``, or on ``any``.

    ParamError: an impossible address.
    """

def check_mapped(name: str, addresses: list[int], nbytes: int) -> None:
    """Raise ParamError unless ``nbytes`` bytes are mapped at each address, with a readable first and last page.

    The kernel looks, in time that depends on the number of mappings. A page in between that cannot be read is not
    found. Nothing is changed. Errors begin with ``name``, the argument.
    """

def peek_process(pid: int, address: int, nbytes: int) -> bytes:
    """Return ``nbytes`` (at most 1 MiB) bytes at ``address`` of process ``pid``: a probe, not a transfer.

    OSError: the kernel refused; errno says why. ParamError: too many bytes.
    """

@final
class CopyPool:
    """Threads that help with large copies.

    ``threads`` (1 to 1024) copy at once in one call, the caller's own among them. Several callers may use one pool at a
    time. A closed pool, or one in a forked child, leaves the caller to copy alone.
    """

    threads: Final[int]

    def __init__(self, threads: int) -> None: ...
    @property
    def closed(self) -> bool:
        """True once close() was called."""
    def close(self) -> None:
        """Join the threads. Idempotent."""

def check_plan(plan: Plan, dst: TensorList, src: TensorList) -> None: ...
def encode_request(handle: bytes, extent: int, plan: Plan, write: bool) -> bytes:
    """Return the meta of a lane request for the peer's side of a plan: its source, or its destination."""

@final
class StandingGrants:
    """What the owner has granted to one link for good, by verb and handle: at most 4096. Threads: any."""

    def __init__(self) -> None: ...
    def keep(
        self, handle: bytes, write: bool, tensors: TensorList, guards: Sequence[tuple[int, int]], tag: int, mapped: bool
    ) -> None:
        """Grant all tensors of a handle, until one of the guards changes or :meth:`LaneEngine.quiesce` of the tag."""

    def __len__(self) -> int: ...

@final
class LaneEngine:
    """Threads that move the bytes of jobs over stream sockets.

    Any thread may call; in a forked child everything but close() is a ParamError.
    """

    threads: Final[int]  # that move bytes

    def __init__(self, threads: int, drain_ms: int = 10_000) -> None: ...
    @property
    def closed(self) -> bool:
        """True once close() was called."""
    def close(self) -> None:
        """Lose every lane and join the threads; no memory is touched any more. Idempotent."""
    def add_lane(self, fd: int, keys: tuple[bytes, bytes] | None = None) -> int:
        """Take over a connected stream socket, also if this raises; return its lane number.

        ``keys`` seals the lane: (send_key, receive_key), 32 bytes each, not the same. The peer has them the other way
        round, and no other lane may ever have them. What somebody changed on its way costs the lane.

        Raises ParamError: not a socket, too many lanes (4096), other keys, or no OpenSSL 3 to seal with.
        """
    def reserve_lane(self) -> int:
        """Return the number of a lane that is attached later: known before its first event."""
    def attach_lane(
        self, lane: int, fd: int, grants: StandingGrants | None = None, keys: tuple[bytes, bytes] | None = None
    ) -> None:
        """Like add_lane(), as the reserved ``lane``, on which requests that ``grants`` fit are answered natively."""
    def drop_lane(self, lane: int) -> None:
        """Close a lane, after which its jobs are lost and touch no memory; ignore an unknown one."""
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
    def start(self, lane: int, write: bool, meta: bytes, plan: Plan, tensors: TensorList, mapped: bool) -> int: ...
    def move(
        self,
        lane: int,
        write: bool,
        handle: bytes,
        extent: int,
        plan: Plan,
        tensors: TensorList,
        mapped: bool,
        deadline_ns: int,
        cancelled: bytearray | None = None,
    ) -> tuple[Ending, int, int, str]:
        """Start a job that asks for ``handle`` as :func:`encode_request` does, and wait for its end."""
    def wait(self, job: int, deadline_ns: int, cancelled: bytearray | None = None) -> tuple[Ending, int, int, str]: ...
    def give_up(self, job: int) -> tuple[Ending, int, int, str]: ...
    def grant(
        self,
        lane: int,
        id: int,
        write: bool,
        plan: Plan,
        tensors: TensorList,
        guards: Sequence[tuple[int, int]],
        tag: int,
        mapped: bool,
    ) -> None: ...
    def refuse(self, lane: int, id: int, code: int, text: str) -> None:
        """Refuse a request: ``code`` is unsigned, not 0; ``text`` is cut at 4000 bytes."""
    def quiesce(self, tag: int) -> None:
        """Stop using memory granted under ``tag``; it is not touched once this returns.

        Its jobs end as ABORTED. Advance its guards before this: they stop what is granted later.
        """

def digest(
    bases: NDArray[np.uint64],
    extent: int,
    first: int,
    count: int,
    runs: NDArray[np.uint64],
    dst: bool,
    each_run: bool,
    nonce: bytes,
    pool: CopyPool | None,
    deadline_ns: int,
    cancelled: bytearray | None = None,
) -> NDArray[np.uint64] | None: ...
def standing_runs(runs: NDArray[np.uint64], alias: bool) -> NDArray[np.uint64]: ...

class HoldingCall:
    """A function in Python during which the main thread holds signals; see ``signals.py``."""

    def __init__(
        self, function: Callable[..., Any], undo: Callable[[Any, Any], object] | None = None, whole: bool = False
    ) -> None: ...
    def __call__(self, *args: object, **kwargs: object) -> object: ...

def inside_another_call() -> bool:
    """Return True if the calling thread is in two calls of the library or more, one inside the other."""

def put_off(function: Callable[..., object], *args: object) -> bool:
    """Queue a function for the end of the thread's outermost call; False if the thread is in one call only.

    It is called as if inside of one call; so it is no :class:`HoldingCall` that asks again.
    """

def do_what_was_put_off() -> None:
    """Do it now, unless the thread is inside of a call inside of another one."""

def deliver_signals() -> None:
    """Run the handlers of signals that the calling thread holds; raises what a handler raises."""

def send_now(fd: int, data: bytes | bytearray) -> int:
    """Send to a stream socket without waiting; return how many bytes the kernel took, all if the connection is broken.

    Keeps the interpreter lock.
    """

@final
class SocketInput:
    """The input of one stream socket, which the caller keeps open."""

    def __init__(self, fd: int) -> None: ...
    def receive(self, seconds: float = 0.0) -> bytes | None:
        """Return at most 64 KiB, ``b""`` at the end of the stream; None without input in time, or after a signal.

        Gives the interpreter lock up only to wait, once: the first 250 us without sleeping, while that succeeds.
        OSError: the connection is broken.
        """

def listen_for_input(epoll: int, fd: int, listens: bool) -> None:
    """Change if an epoll reports the input of a descriptor that it has. Keeps the interpreter lock."""
