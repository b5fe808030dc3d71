"""Rows of results, computed from measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from llm_datadist.tools.bench.cases import Case

_GIB: Final = 1 << 30


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One case beside its limit and at most one peer; docs/performance.md has the fields."""

    op: str
    call: str
    transport: str
    memory: str
    busy: str | None
    block_bytes: int
    blocks: int
    tensors: int
    threads: int
    bytes: int
    passes: int
    first_seconds: float
    seconds_median: float
    seconds_min: float
    seconds_max: float
    seconds_p90: float
    seconds_p99: float
    gb_per_s: float | None
    limit: str | None = None
    limit_seconds_median: float | None = None
    limit_gb_per_s: float | None = None
    ratio_to_limit: float | None = None
    peer: str | None = None
    peer_seconds_median: float | None = None
    peer_gb_per_s: float | None = None
    ratio_to_peer: float | None = None
    cpu_seconds_per_gib: float | None
    limit_cpu_seconds_per_gib: float | None = None
    peer_cpu_seconds_per_gib: float | None = None
    verified: bool = True
    sealed: bool = False

    @property
    def over(self) -> str:
        """The transport, and whether it was encrypted, in words."""
        return f"encrypted {self.transport}" if self.sealed else self.transport

    @property
    def limit_name(self) -> str | None:
        """The limit without its fastest way, which differs from size to size."""
        return self.limit and self.limit.partition(" (")[0]


@dataclass(slots=True)
class Measured:
    """Times of one contender, from verified passes.

    Attributes:
        first: Seconds of the first pass, which touches memory first; of single steps their median.
        steady: Seconds of the later passes, or of all their single steps.
        cpu_seconds: CPU seconds of all its processes, for each later pass.
        way: The contender's fastest way, or empty.
    """

    first: float = 0.0
    steady: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    way: str = ""

    def add(self, number: int, seconds: list[float], cpu_seconds: float) -> None:
        """Add one pass; number 0 is the first."""
        if number == 0:
            self.first = statistics.median(seconds)
        else:
            self.steady += seconds
            self.cpu_seconds.append(cpu_seconds)

    @property
    def median(self) -> float:
        """Median of ``steady``."""
        return statistics.median(self.steady)

    def gb_per_s(self, nbytes: int) -> float | None:
        """Return the rate of ``nbytes`` bytes in the median time; None without bytes."""
        return nbytes / self.median / 1e9 if nbytes else None

    def cpu_per_gib(self, nbytes: int) -> float | None:
        """Return CPU seconds for each GiB that later passes of ``nbytes`` bytes moved; None without bytes."""
        return statistics.fmean(self.cpu_seconds) * _GIB / nbytes if nbytes else None


def make_rows(
    case: Case, transport: str, ours: Measured, limit: Measured | None, peers: dict[str, Measured]
) -> list[Row]:
    """Return one row for each peer, or one without a peer."""
    work, nbytes, moved = case.workload, case.bytes_timed, case.bytes_per_pass
    p90, p99 = np.percentile(ours.steady, [90, 99]).tolist()
    row = Row(
        op=work.op,
        call=case.call,
        transport=transport,
        sealed=bool(work.secrets),
        memory=work.memory,
        busy=case.busy,
        block_bytes=work.block_bytes,
        blocks=work.blocks,
        tensors=work.tensors,
        threads=work.threads,
        bytes=nbytes,
        passes=len(ours.cpu_seconds),
        first_seconds=ours.first,
        seconds_median=ours.median,
        seconds_min=min(ours.steady),
        seconds_max=max(ours.steady),
        seconds_p90=p90,
        seconds_p99=p99,
        gb_per_s=ours.gb_per_s(nbytes),
        cpu_seconds_per_gib=ours.cpu_per_gib(moved),
    )

    def beside(who: str, name: str | None, other: Measured) -> dict[str, Any]:
        return {
            who: name,
            f"{who}_seconds_median": other.median,
            f"{who}_gb_per_s": other.gb_per_s(nbytes),
            f"ratio_to_{who}": other.median / ours.median,
            f"{who}_cpu_seconds_per_gib": other.cpu_per_gib(moved),
        }

    if limit is not None:
        name = f"{case.limit} ({limit.way})" if limit.way else case.limit
        row = msgspec.structs.replace(row, **beside("limit", name, limit))
    return [msgspec.structs.replace(row, **beside("peer", *each)) for each in peers.items()] or [row]
