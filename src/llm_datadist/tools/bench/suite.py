"""The standard suite: cases for every path of the library, and floors that it must reach."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from llm_datadist._memory.host import available_memory
from llm_datadist.tools.bench.cases import Case, Request, cases_of, check_options
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.workload import BESIDE_GPU, BenchMemory, Op

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist.tools.bench.rows import Row

_KIB: Final = 1024
_SIZES: Final = tuple(size * _KIB for size in (4, 16, 64, 256, 1024))
_FEW_SIZES: Final = tuple(size * _KIB for size in (4, 64, 1024))
#: Blocks of the pulls of 4 KiB that show what a call costs.
_COUNTS: Final = (100, 1000, 10_000, 100_000, 1_000_000)
_SMALLEST_SET: Final = 1 << 20
#: Bytes for each moved byte: three contenders, source and destination, twice the moved blocks.
_MEMORY_PER_SET: Final = 3 * 2 * 2
_SHARE: Final = 0.8
#: Smallest block that tcp moves at the speed of a stream.
_TCP_LARGE: Final = 64 * _KIB
_BY_KEY: Final = "pull_cache by key"
#: Wait for the interpreter beside a busy thread (sys.getswitchinterval()).
_SWITCH_US: Final = 5000.0
#: Few: setup and first touch of memory take longer.
_PASSES: Final = 3


def standard(request: Request) -> list[Case]:
    """Return the cases of the standard suite, in the order of the table.

    The suite takes ``threads``, ``against`` and ``set_bytes`` of ``request``. It halves ``set_bytes`` until the sets
    fit into memory, down to 1 MiB. Raises BenchError if ``request`` has another option, or an unknown contender.
    """
    check_options(request, "standard", {"threads", "against"})
    request = replace(request, set_bytes=_fitting(request.set_bytes))
    return [_against(each, request.against) for each in _all(request)]


def _all(request: Request) -> Iterator[Case]:
    whole = replace(request, against=None, passes=_PASSES)
    half = replace(whole, set_bytes=max(_SMALLEST_SET, request.set_bytes // 2))
    for transport in ("shm", "cma", "tcp"):
        asked = half if transport == "tcp" else whole
        for size in _SIZES:
            yield from cases_of(replace(asked, op=Op.PULL, transport=transport, block_bytes=size))
    for transport in ("shm", "cma", "tcp"):
        for size in _FEW_SIZES:
            yield from cases_of(replace(half, op=Op.PUSH, transport=transport, block_bytes=size))
    registered = replace(half, transport="tcp", memory=BenchMemory.REGISTERED, against=("tcp-raw",))
    for op in (Op.PULL, Op.PUSH):
        yield from cases_of(replace(registered, op=op))
    for op in (Op.COPY, Op.SWAP):
        for size in _FEW_SIZES:
            cases = cases_of(replace(half, op=op, block_bytes=size))
            # A row of a continuous cache is a whole sequence, never 4 KiB.
            yield from (each for each in cases if each.call != "copy_cache" or size > _FEW_SIZES[0])
    for size in _FEW_SIZES:
        asked = replace(half, block_bytes=size)
        for op in BESIDE_GPU:
            yield from cases_of(replace(asked, op=op))
        yield from cases_of(replace(asked, op=Op.SWAP, memory=BenchMemory.GPU))
        for transport in ("shm", "tcp"):
            yield from cases_of(replace(asked, op=Op.PULL, transport=transport, memory=BenchMemory.GPU))
    for blocks in _COUNTS:
        last = blocks == _COUNTS[-1]
        if last or blocks * _SIZES[0] <= request.set_bytes:
            asked = replace(whole, transport="shm", block_bytes=_SIZES[0], blocks=blocks, against=("memcpy",))
            yield from cases_of(replace(asked, op=Op.PULL, passes=1 if last else _PASSES))
    for transport in ("shm", "cma", "tcp"):
        asked = replace(whole, op=Op.LATENCY, transport=transport, passes=2)
        # Busy Python matters differently where the owner answers (tcp) and where it does not (shm).
        yield from (case for case in cases_of(asked) if transport != "cma" or case.busy is None)
    yield from cases_of(Request(op=Op.PLAN, passes=2))
    yield from cases_of(Request(op=Op.ALLOC, passes=2))
    for transport in ("shm", "tcp"):
        yield from cases_of(Request(op=Op.LINK, transport=transport, passes=2))


def _fitting(nbytes: int) -> int:
    """Return ``nbytes``, halved until three contenders fit into memory, at least 1 MiB."""
    available, _ = available_memory()
    while nbytes * _MEMORY_PER_SET > available * _SHARE and nbytes > _SMALLEST_SET:
        nbytes //= 2
    return nbytes


def _against(case: Case, names: tuple[str, ...] | None) -> Case:
    """Return the case without limits and peers that are not named; ``nixl`` names its variants, too."""
    if names is None:
        return case
    for contender in case.contenders[1:]:
        if contender not in names and contender.removesuffix("-tcp").removesuffix("-prepared") not in names:
            case = case.without(contender)
    return case


@dataclass(frozen=True, slots=True)
class Floor:
    """A bound that this library must reach.

    Attributes:
        measured: The worst value that counts; None if nothing was measured.
        at_most: True if smaller is better.
        limit: For a bound beside a peer: the raw limit's ratio to that peer.
    """

    what: str
    measured: float | None
    wanted: float
    unit: str = "x"
    at_most: bool = False
    limit: float | None = None

    @property
    def met(self) -> bool | None:
        """True if the bound is reached; None if nothing was measured."""
        if self.measured is None:
            return None
        return self.measured <= self.wanted if self.at_most else self.measured >= self.wanted


def counts_calls(row: Row) -> bool:
    """Return True for a pull that shows what a call costs, not what bytes cost."""
    return row.block_bytes == _SIZES[0] and row.blocks in _COUNTS


def floors(rows: Sequence[Row]) -> list[Floor]:
    """Return all floors; the worst row counts. None is asked of a GPU, on which nothing was ever measured."""
    rows = [row for row in rows if row.memory != BenchMemory.GPU]
    return [*_floors_between(rows), *_floors_inside(rows), *_floors_of_time(rows)]


def _floors_between(rows: Sequence[Row]) -> Iterator[Floor]:
    for transport in ("shm", "cma", "tcp"):
        for op in (Op.PULL, Op.PUSH):
            for size in _SIZES if op is Op.PULL else _FEW_SIZES:
                ratios = [row.ratio_to_limit for row in _of(rows, op, transport, size)]
                wanted = 0.9 if transport != "tcp" else 0.85 if size >= _TCP_LARGE else 0.75
                yield Floor(f"{op} over {transport}, {size // _KIB} KiB, of the limit", _worst(ratios), wanted)
    for transport, peer, size, wanted in (
        ("shm", "nixl", 4, 10.0),
        ("shm", "nixl", 1024, 2.0),
        ("cma", "nixl", 4, 8.0),
        ("cma", "nixl", 1024, 1.0),
        *(("tcp", "nixl-tcp", size // _KIB, 2.0) for size in _SIZES[:-1]),
        ("tcp", "nixl-tcp", 1024, 1.5),
        *(("tcp", "mooncake", size // _KIB, 1.5) for size in _SIZES),
    ):
        yield _beside(rows, Op.PULL, transport, size, peer, wanted)
    yield _beside(rows, Op.PUSH, "tcp", 1024, "nixl-tcp", 1.0)
    for op in (Op.PULL, Op.PUSH):
        for size in _SIZES if op is Op.PULL else _FEW_SIZES:
            cpu = [_cpu_ratio(row) for row in _of(rows, op, "tcp", size)]
            worst = max((each for each in cpu if each is not None), default=None)
            what = f"{op} over tcp, {size // _KIB} KiB, CPU time in that of the limit"
            yield Floor(what, worst, 1.15, at_most=True)
    yield from (_beside(rows, Op.PUSH, "tcp", size // _KIB, "mooncake", 1.5) for size in _FEW_SIZES)


def _cpu_ratio(row: Row) -> float | None:
    ours, limit = row.cpu_seconds_per_gib, row.limit_cpu_seconds_per_gib
    return ours / limit if ours and limit else None


def _beside(rows: Sequence[Row], op: Op, transport: str, size: int, peer: str, wanted: float) -> Floor:
    found = [row for row in _of(rows, op, transport, size * _KIB) if row.peer == peer]
    what = f"{op} over {transport}, {size} KiB, of {peer}"
    raw = [row.ratio_to_peer / row.ratio_to_limit for row in found if row.ratio_to_peer and row.ratio_to_limit]
    return Floor(what, _worst([row.ratio_to_peer for row in found]), wanted, limit=min(raw, default=None))


def _floors_inside(rows: Sequence[Row]) -> Iterator[Floor]:
    for call in ("copy_blocks", "copy_cache", "swap_blocks"):
        found = [row for row in rows if row.call == call]
        yield Floor(f"{call}, of memcpy", _worst([row.ratio_to_limit for row in found]), 0.9)
        against = [row.ratio_to_peer for row in found if row.peer == "torch"]
        yield Floor(f"{call}, of torch index_copy_", _worst(against), 2.0)


def _floors_of_time(rows: Sequence[Row]) -> Iterator[Floor]:
    for transport, peer, wanted in (("shm", "nixl", 0.95), ("cma", "nixl", 1.2), ("tcp", "nixl-tcp", 1.5)):
        idle = [row for row in rows if row.op == Op.LATENCY and row.busy is None and row.transport == transport]
        single = [1 / row.ratio_to_peer for row in idle if row.peer == peer and row.ratio_to_peer]
        what = f"pull of one 64 KiB block over {transport}, p50"
        yield Floor(f"{what}, in that of {peer}", max(single, default=None), wanted, at_most=True)
        if transport == "tcp":
            raw = [1 / row.ratio_to_limit for row in idle if row.ratio_to_limit]
            asked = max(raw, default=None)
            yield Floor(f"{what}, in that of a raw request and answer", asked, 1.25, at_most=True)
            spread = [row.seconds_p90 / row.seconds_median for row in idle if row.call == "pull_blocks"]
            yield Floor("the same, p90 in p50", max(spread, default=None), 2.0, at_most=True)
    for transport, micros in (("shm", 100.0), ("tcp", 200.0)):
        keyed = _micros(rows, transport, _BY_KEY, None)
        yield Floor(f"pull_cache by key over {transport}, 64 KiB, p50", keyed, micros, "us", at_most=True)
        for busy in (Role.SOURCE, Role.DESTINATION):
            for call in ("pull_blocks", _BY_KEY):
                yield _beside_python(rows, transport, call, busy)
    planned = [row.seconds_median * 1e6 for row in rows if row.op == Op.PLAN and row.blocks == 1000]
    yield Floor("planning 122 tensors x 1000 blocks", max(planned, default=None), 100.0, "us", at_most=True)
    counted = [1 / row.ratio_to_limit for row in rows if row.op == Op.PULL and counts_calls(row) and row.ratio_to_limit]
    yield Floor("4 KiB blocks, 10^2 to 10^6, time in memcpy's", max(counted, default=None), 1.5, at_most=True)
    allocated = [row.seconds_median * 1e6 / row.tensors for row in rows if row.op == Op.ALLOC]
    yield Floor("allocate and free, for each tensor", max(allocated, default=None), 20.0, "us", at_most=True)


def _beside_python(rows: Sequence[Row], transport: str, call: str, busy: Role) -> Floor:
    """Return the floor of a call beside busy Python: at most one wait for the interpreter."""
    quiet, found = _micros(rows, transport, call, None), _micros(rows, transport, call, busy)
    once = call == _BY_KEY or busy is Role.DESTINATION
    wanted = ((_SWITCH_US + quiet) * 1.2 if once else quiet * 2) if quiet else 0.0
    return Floor(f"{call} over {transport}, {busy} busy, p50", found, wanted, "us", at_most=True)


def _micros(rows: Sequence[Row], transport: str, call: str, busy: Role | None) -> float | None:
    chosen = (Op.LATENCY, transport, call, busy)
    found = (row for row in rows if (row.op, row.transport, row.call, row.busy) == chosen)
    return max((row.seconds_median * 1e6 for row in found), default=None)


def _of(rows: Sequence[Row], op: Op, transport: str, size: int) -> list[Row]:
    return [
        row
        for row in rows
        if (row.op, row.transport, row.block_bytes) == (op, transport, size) and not counts_calls(row)
    ]


def _worst(ratios: Sequence[float | None]) -> float | None:
    return min((each for each in ratios if each is not None), default=None)
