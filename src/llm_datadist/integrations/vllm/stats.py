"""Counters, for vLLM's log and its Prometheus metrics. Each rank counts its own, the store's scheduler for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

#: Name and meaning of each counter.
COUNTERS: Final = {
    "fetched_requests": "Requests whose KV came.",
    "fetched_blocks": "Blocks that came.",
    "fetched_bytes": "Bytes that came.",
    "fetch_seconds": "Seconds in pulls.",
    "failed_fetches": "Requests whose KV did not come.",
    "refused_offers": "Requests whose blocks were not offered: too many are kept for readers that have not come.",
    "granted_requests": "Requests whose blocks were granted to readers.",
    "released_grants": "Offers that ended because the reader has released them.",
    "expired_grants": "Offers that ended because no reader has claimed them in time.",
    "lost_grants": "Offers that ended because their reader was lost.",
    "revoked_grants": "Grants of aborted or preempted requests, or that ended with their cache.",
}
#: Of the store connector: what is lost, which its log tells, and all. docs/howto-vllm-store.md has their meaning.
LOST: Final = (
    *("misses_late", "misses_gone", "misses_busy", "failed_loads", "lost_crowded_blocks", "lost_needed_blocks"),
    *("refused_busy", "refused_gone", "refused_late", "refused_failed", "refused_cleared"),
)
_NOT_LOST: Final = (
    *("hits", "misses_absent", "found_tokens", "loaded_tokens", "saved_blocks", "retried_blocks"),
    *("lookup_seconds", "load_seconds", "save_seconds"),
)
STORE_COUNTERS: Final = dict.fromkeys(_NOT_LOST + LOST, "See the page 'A prefix store for vLLM', Metrics.")


@dataclass
class Stats(KVConnectorStats):
    """The numbers of one interval, by counter; what is not there is 0."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def add(self, name: str, number: float = 1) -> None:
        self.data[name] = self.data.get(name, 0) + number

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, number in other.data.items():
            self.add(name, number)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the numbers for the log."""
        found = {name: number for name, number in self.data.items() if number}
        if seconds := self.data.get("fetch_seconds"):
            found["fetch_gb_per_s"] = round(self.data["fetched_bytes"] / seconds / 1e9, 2)
        return found

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def take(self) -> Stats | None:
        """Return the numbers since the last call, None if there are none."""
        if self.is_empty():
            return None
        found = Stats(self.data)
        self.reset()
        return found


class StatsMetrics(KVConnectorPromMetrics):
    """Prometheus counters ``vllm:datadist_<name>_total``."""

    prefix, counters = "vllm:datadist_", COUNTERS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._counters = {
            name: create_metric_per_engine(
                self._counter_cls(name=self.prefix + name, documentation=text, labelnames=self._labelnames),
                self.per_engine_labelvalues,
            )
            for name, text in self.counters.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, number in transfer_stats_data.items():
            if number and name in self._counters:
                self._counters[name][engine_idx].inc(number)


class StoreStatsMetrics(StatsMetrics):
    """Prometheus counters ``vllm:datadist_store_<name>_total``."""

    prefix, counters = "vllm:datadist_store_", STORE_COUNTERS
