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
    from llm_datadist.store.statistics import NamespaceStatistics

#: Metric name, its text, and its field of a namespace.
_GAUGES: Final = (
    ("slots", "Slots of a namespace.", "slots"),
    ("published_slots", "Slots whose key is found.", "published"),
    ("filling_slots", "Slots that a pull fills.", "filling"),
    ("loads", "Hits that were not released.", "loads"),
    ("block_bytes", "Bytes of a slot.", "block_bytes"),
)
_COUNTERS: Final = (
    ("lookups", "Lookups.", "lookups"),
    ("asked_keys", "Keys of lookups.", "asked"),
    ("found_keys", "Keys found.", "found"),
    ("stored_keys", "Keys stored.", "stored"),
    ("removed_keys", "Keys evicted or found wrong.", "removed"),
    ("failed_pulls", "Pulls that failed.", "failed"),
)
_PREFIX: Final = "llm_datadist_store_"


class StoreCollector(Collector):
    """Collector of a store's statistics, labelled with the first 8 digits of the namespace. Threads: any."""

    def __init__(self, server: StoreServer) -> None:
        self._server = server

    def collect(self) -> Iterator[Metric]:
        """Yield the present metric families."""
        now = self._server.statistics()
        for name, text, field in _GAUGES:
            yield _family(GaugeMetricFamily(_PREFIX + name, text, labels=["namespace"]), field, now.namespaces)
        for name, text, field in _COUNTERS:
            yield _family(CounterMetricFamily(_PREFIX + name, text, labels=["namespace"]), field, now.namespaces)
        yield CounterMetricFamily(_PREFIX + "cleared_namespaces", "Namespaces displaced.", now.cleared)
        yield GaugeMetricFamily(_PREFIX + "waiting_saves", "Saves that wait for a thread.", now.waiting)


def _family(
    family: GaugeMetricFamily | CounterMetricFamily, field: str, spaces: tuple[NamespaceStatistics, ...]
) -> Metric:
    for space in spaces:
        family.add_metric([space.namespace[:8]], getattr(space, field))
    return family


def serve(server: StoreServer, port: int) -> int:
    """Serve the metrics of a store, and of its LLMDataDist, at a port of 127.0.0.1 (0 picks one); return it."""
    registry = CollectorRegistry()
    registry.register(StoreCollector(server))
    register(server.datadist, registry)
    httpd, _ = start_http_server(port, "127.0.0.1", registry)
    return int(httpd.server_port)
