"""Prometheus metrics of a store, from the extra ``open-datadist[metrics]``; docs/store.md lists them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from llm_datadist.prometheus import register

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric

    from llm_datadist.store.server import StoreServer

#: Fields of a namespace, each with the rest of its metric's name.
_GAUGES: Final = {"slots": "", "published": "_slots", "filling": "_slots", "loads": "", "block_bytes": ""}
_COUNTERS: Final = {
    **dict.fromkeys(("asked", "found", "stored", "removed"), "_keys"),
    "lookups": "",
    "cleared": "",
    "refused": "_lookups",
    "failed": "_pulls",
}
_LABELS: Final = ("tenant", "namespace", "rank", "label")
_PREFIX: Final = "llm_datadist_store_"


class StoreCollector(Collector):
    """Collector of a store's statistics, labelled with tenant, namespace, rank and label. Threads: any."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield the present metric families."""
        now = self._server.statistics()
        for kind, fields in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for field, rest in fields.items():
                family = kind(_PREFIX + field + rest, f"{field} of NamespaceStatistics.", labels=_LABELS)
                for space in now.namespaces:
                    family.add_metric([getattr(space, label) for label in _LABELS], getattr(space, field))
                yield family
        yield CounterMetricFamily(_PREFIX + "cleared_namespaces", "Namespaces displaced.", now.cleared)
        yield GaugeMetricFamily(_PREFIX + "waiting_saves", "Saves that wait for a thread.", now.waiting)


def serve(server: StoreServer, port: int) -> int:
    """Serve the metrics of a store, and of its LLMDataDist, at a port of 127.0.0.1 (0 picks one); return it."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(server))
    register(server.datadist, registry)
    httpd, _ = start_http_server(port, "127.0.0.1", registry)
    return int(httpd.server_port)
