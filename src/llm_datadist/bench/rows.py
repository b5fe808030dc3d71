"""Rows of results, computed from measurements."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.bench.cases import Case

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
    limit: str | None
    limit_seconds_median: float | None
    limit_gb_per_s: float | None
    ratio_to_limit: float | None
    peer: str | None
    peer_seconds_median: float | None
    peer_gb_per_s: float | None
    ratio_to_peer: float | None
    cpu_seconds_per_gib: float | None
    limit_cpu_seconds_per_gib: float | None
    peer_cpu_seconds_per_gib: float | None
    verified: bool


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
    passes: int = 0
    way: str = ""

    def add(self, number: int, seconds: list[float], cpu_seconds: float) -> None:
        """Add one pass; number 0 is the first."""
        if number == 0:
            self.first = statistics.median(seconds)
            return
        self.steady += seconds
        self.cpu_seconds.append(cpu_seconds)
        self.passes += 1

    @property
    def median(self) -> float:
        """Median of ``steady``."""
        return statistics.median(self.steady)

    def cpu_per_gib(self, nbytes: int) -> float | None:
        """Return CPU seconds for each GiB that later passes of ``nbytes`` bytes moved."""
        return sum(self.cpu_seconds) * _GIB / (self.passes * nbytes) if nbytes else None


def make_rows(
    case: Case, transport: str, ours: Measured, limit: Measured | None, peers: dict[str, Measured]
) -> list[Row]:
    """Return one row for each peer, or one without a peer."""
    named: Sequence[tuple[str | None, Measured | None]] = list(peers.items()) or [(None, None)]
    return [_row(case, transport, ours, limit, name, peer) for name, peer in named]


def _row(
    case: Case, transport: str, ours: Measured, limit: Measured | None, name: str | None, peer: Measured | None
) -> Row:
    work, nbytes, moved = case.workload, case.bytes_timed, case.bytes_per_pass
    p90, p99 = np.percentile(ours.steady, [90, 99]).tolist()
    return Row(
        op=work.op,
        call=case.call,
        transport=transport,
        memory=work.memory,
        busy=case.busy,
        block_bytes=work.block_bytes,
        blocks=work.blocks,
        tensors=work.tensors,
        threads=work.threads,
        bytes=nbytes,
        passes=ours.passes,
        first_seconds=ours.first,
        seconds_median=ours.median,
        seconds_min=min(ours.steady),
        seconds_max=max(ours.steady),
        seconds_p90=p90,
        seconds_p99=p99,
        gb_per_s=_rate(nbytes, ours),
        limit=_limit_name(case, limit),
        limit_seconds_median=limit.median if limit else None,
        limit_gb_per_s=_rate(nbytes, limit),
        ratio_to_limit=limit.median / ours.median if limit else None,
        peer=name,
        peer_seconds_median=peer.median if peer else None,
        peer_gb_per_s=_rate(nbytes, peer),
        ratio_to_peer=peer.median / ours.median if peer else None,
        cpu_seconds_per_gib=ours.cpu_per_gib(moved),
        limit_cpu_seconds_per_gib=limit.cpu_per_gib(moved) if limit else None,
        peer_cpu_seconds_per_gib=peer.cpu_per_gib(moved) if peer else None,
        verified=True,
    )


def _limit_name(case: Case, limit: Measured | None) -> str | None:
    if limit is None:
        return None
    return f"{case.limit} ({limit.way})" if limit.way else case.limit


def _rate(nbytes: int, measured: Measured | None) -> float | None:
    return nbytes / measured.median / 1e9 if measured and nbytes else None
