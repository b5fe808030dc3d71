"""Cases of the bench, made from the user's options. A case becomes one row for each peer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist._native import usable_cpus
from llm_datadist.tools.bench import BenchError
from llm_datadist.tools.bench.contenders import LIMITS, PEERS
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.workload import BESIDE_GPU, MOVES, BenchMemory, BenchWorkload, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

_PASSES: Final = 5
_BLOCK_BYTES: Final = 64 << 10
_LATENCY_BLOCKS: Final = 1000
_KEY_BLOCKS: Final = 200
_TENSORS: Final = {Op.PLAN: 122, Op.ALLOC: 122}
_COPY_CACHE_TENSORS: Final = 64
_PLANNED: Final = (100, 1000, 10_000, 100_000, 1_000_000)

_WORK: Final = {"transport", "block_bytes", "blocks", "tensors", "memory", "threads", "passes", "against", "secrets"}
#: What leaves no process has no transport.
_LOCAL: Final = _WORK - {"transport", "secrets"}
#: Options about work by op; others are refused.
_TAKES: Final = {
    **dict.fromkeys((Op.PULL, Op.PUSH, Op.LATENCY), _WORK),
    **dict.fromkeys((Op.COPY, Op.SWAP), _LOCAL),
    **dict.fromkeys(BESIDE_GPU, _LOCAL - {"memory"}),
    **dict.fromkeys((Op.PLAN, Op.ALLOC), _LOCAL - {"memory", "threads"}),
    Op.LINK: {"transport", "passes", "against", "secrets"},
}
#: By transport the suitable limit, then the usual peers.
_USUAL: Final = {
    "shm": ("memcpy", "nixl"),
    "inproc": ("memcpy",),
    "cma": ("cma", "nixl"),
    "tcp": ("tcp-raw", "nixl-tcp", "mooncake"),
    "nixl": ("tcp-raw", "nixl-tcp"),
    "local": ("memcpy", "torch"),
}
#: The same for memory of a GPU.
_USUAL_GPU: Final = {
    **dict.fromkeys(_USUAL, ("cuda-copy", "nixl-gpu")),
    "tcp": ("tcp-raw", "cuda-copy", "nixl-gpu"),
    "local": ("cuda-copy", "cuda-loop", "cuda-batch", "torch-gpu"),
}
#: The same for encrypted tcp; peers send plain bytes.
_USUAL_ENCRYPTED: Final = ("tcp-raw-encrypted",)
#: Transports that move bytes as between two hosts, which share no memory; so does NIXL beside them.
_BETWEEN_HOSTS: Final = ("tcp", "nixl")
#: Bytes that a later pass moves by repetition, and the most repeats.
_REPEATED_BYTES: Final = 16 << 20
_MOST_REPEATS: Final = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The user's options; None if not given.

    Attributes:
        transport: shm, cma, tcp, nixl or inproc; default shm.
        threads: Copying threads in each process; default: the usable CPUs.
        against: Names of limits and peers; default: the usual ones.
        passes: Passes after the first; default 5.
        secrets: File of secrets of both sides, with which tcp is encrypted.
        set_bytes: Bytes of one transfer without ``blocks``; also bounds single steps.
    """

    op: Op
    transport: str | None = None
    block_bytes: int | None = None
    blocks: int | None = None
    tensors: int | None = None
    memory: BenchMemory | None = None
    threads: int | None = None
    against: tuple[str, ...] | None = None
    passes: int | None = None
    secrets: str | None = None
    set_bytes: int = 512 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One contender of this library beside a limit and peers, on one workload.

    Attributes:
        call: The timed call, as shown to the user.
        transport: The requested transport; "local" if nothing leaves the process.
        peers: Names of the peers, and of limits beside the first.
        samples: Single steps in each pass; 0: everything in one transfer.
        busy: Process in which a thread of pure Python runs.
    """

    contender: str
    call: str
    transport: str
    workload: BenchWorkload
    limit: str | None = None
    peers: tuple[str, ...] = ()
    passes: int = 5
    samples: int = 0
    busy: Role | None = None

    @property
    def contenders(self) -> tuple[str, ...]:
        """All contenders, this library's first."""
        return (self.contender, *([self.limit] if self.limit else []), *self.peers)

    @property
    def bytes_timed(self) -> int:
        """Bytes of one measured time; 0 if nothing moves."""
        if self.workload.op in MOVES:
            return self.workload.nbytes
        return self.workload.block_bytes * self.workload.tensors if self.workload.op is Op.LATENCY else 0

    @property
    def bytes_per_pass(self) -> int:
        """Bytes of one later pass."""
        return self.bytes_timed * (self.samples or self.repeats)

    @property
    def repeats(self) -> int:
        """Transfers in a later pass."""
        if self.workload.op not in MOVES:
            return 1
        return max(1, min(_MOST_REPEATS, _REPEATED_BYTES // self.workload.nbytes))

    @property
    def title(self) -> str:
        """One line for the user."""
        work = self.workload
        busy = f", {self.busy} busy" if self.busy else ""
        shape = f"{work.blocks} x {size_text(work.block_bytes)} x {work.tensors}"
        return f"{self.what}, {shape}{busy}"

    @property
    def what(self) -> str:
        """The title without sizes."""
        on_gpu = " of a GPU" if self.workload.memory is BenchMemory.GPU else ""
        encrypted = "encrypted " if self.workload.secrets else ""
        return f"{self.workload.op} {self.call} over {encrypted}{self.transport}{on_gpu}"

    def without(self, contender: str) -> Case:
        """Return the case without this limit or peer."""
        return replace(
            self,
            limit=None if contender == self.limit else self.limit,
            peers=tuple(each for each in self.peers if each != contender),
        )


def size_text(nbytes: int) -> str:
    """Return a size in words: 64 KiB."""
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift and nbytes % (1 << shift) == 0:
            return f"{nbytes >> shift} {unit}"
    return f"{nbytes} B"


def cases_of(request: Request) -> list[Case]:
    """Return the cases of one op; raise BenchError, which names the option, if the op does not take one."""
    check_options(request, request.op, _TAKES[request.op])
    transport = request.transport or "shm"
    if request.secrets and transport != "tcp":
        raise BenchError(f"--secrets: only tcp encrypts its bytes, not {transport}; add --transport tcp")
    match request.op:
        case Op.PULL | Op.PUSH:
            return [_case(request, f"ours-{transport}", f"{request.op}_blocks", transport)]
        case Op.COPY:
            # A copy_cache call copies one row, so its caches have many tensors.
            rows = replace(request, tensors=request.tensors or _COPY_CACHE_TENSORS)
            return [_case(request, "ours-copy-blocks", "copy_blocks"), _case(rows, "ours-copy-cache", "copy_cache")]
        case Op.SWAP:
            return [_case(request, "ours-swap", "swap_blocks")]
        case Op.D2D:
            return [_case(replace(request, memory=BenchMemory.GPU), "ours-copy-blocks", "copy_blocks")]
        case Op.H2D | Op.D2H:
            return [_case(replace(request, memory=BenchMemory.GPU), "ours-swap", "swap_blocks")]
        case Op.LATENCY:
            return list(_latency(request, transport))
        case Op.PLAN:
            counts = (1000,) if request.blocks else _PLANNED
            return [_case(request, "ours-plan", "plan_blocks", blocks=blocks, samples=20) for blocks in counts]
        case Op.ALLOC:
            return [_case(request, "ours-alloc", "allocate_blocks_cache + deallocate", blocks=16, samples=50)]
        case Op.LINK:
            if transport == "inproc":
                raise BenchError("--transport: 'inproc' is one process, bench link needs two: shm, cma, tcp or nixl")
            return [_case(request, f"ours-{transport}-link", "link + unlink", transport, blocks=16, samples=20)]


def check_options(request: Request, name: str, takes: set[str]) -> None:
    """Refuse options that are not in ``takes``, and unknown contenders."""
    given = {each for each in _WORK if getattr(request, each) is not None}
    for each in sorted(given - takes):
        known = ", ".join(_option(one) for one in sorted(takes))
        raise BenchError(f"{_option(each)}: bench {name} does not take it; about the work it takes {known}")
    for contender in request.against or ():
        if contender not in LIMITS and contender not in PEERS:
            raise BenchError(f"--against: {contender!r} is unknown, known: {', '.join([*LIMITS, *PEERS])}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _contenders(request: Request, transport: str) -> tuple[str | None, tuple[str, ...]]:
    """Return the limit that suits the transport, and the peers with all other limits."""
    on_gpu = request.memory is BenchMemory.GPU
    usual = _USUAL_ENCRYPTED if request.secrets else (_USUAL_GPU if on_gpu else _USUAL)[transport]
    names: tuple[str, ...] = ()
    if request.against is not None:
        names = request.against
    elif request.op in MOVES or (request.secrets and request.op is Op.LATENCY):
        names = usual
    elif request.op is Op.LATENCY:
        names = ("tcp-raw", "nixl") if transport in _BETWEEN_HOSTS else ("nixl", "nixl-prepared")
    if transport in _BETWEEN_HOSTS:
        names = tuple("nixl-tcp" if name == "nixl" else name for name in names)
    names = tuple(dict.fromkeys(names))
    limits = [name for name in names if name in LIMITS]
    suitable = usual[0]
    limit = suitable if suitable in limits else next(iter(limits), None)
    return limit, tuple(name for name in names if name != limit)


def _case(
    request: Request,
    contender: str,
    call: str,
    transport: str = "local",
    *,
    blocks: int | None = None,
    samples: int = 0,
) -> Case:
    limit, peers = _contenders(request, transport)
    tensors = request.tensors or _TENSORS.get(request.op, 1)
    block_bytes = request.block_bytes or _BLOCK_BYTES
    fitting = max(1, request.set_bytes // (block_bytes * tensors))
    private = transport == "cma" and request.op is not Op.LINK
    workload = BenchWorkload(
        op=request.op,
        block_bytes=block_bytes,
        blocks=request.blocks or blocks or fitting,
        tensors=tensors,
        memory=request.memory or (BenchMemory.REGISTERED if private else BenchMemory.POOL),
        threads=request.threads or usable_cpus(),
        secrets=request.secrets or "",
    )
    return Case(
        contender=contender,
        call=call,
        transport=transport,
        workload=workload,
        limit=limit,
        peers=peers,
        passes=request.passes or _PASSES,
        samples=workload.blocks if request.op is Op.LATENCY else samples,
    )


def _latency(request: Request, transport: str) -> Iterator[Case]:
    most = max(1, request.set_bytes // (request.block_bytes or _BLOCK_BYTES) // (request.tensors or 1))
    idle = _case(request, f"ours-{transport}", "pull_blocks", transport, blocks=min(_LATENCY_BLOCKS, most))
    yield idle
    if transport == "inproc":
        return
    yield from _beside_python(idle)
    # Only a pull from a pool consumes its key.
    pooled = replace(request, memory=request.memory or BenchMemory.POOL, against=())
    by_key = _case(pooled, f"ours-{transport}-key", "pull_cache by key", transport, blocks=min(_KEY_BLOCKS, most))
    yield by_key
    yield from _beside_python(by_key)


def _beside_python(idle: Case) -> Iterator[Case]:
    """Yield the case beside a busy thread in either process, without peers; with few steps, as one may take 10 ms."""
    work = msgspec.structs.replace(idle.workload, blocks=max(1, idle.workload.blocks // 5))
    for busy in (Role.SOURCE, Role.DESTINATION):
        yield replace(idle, workload=work, samples=work.blocks, busy=busy, limit=None, peers=(), passes=1)
