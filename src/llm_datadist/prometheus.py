"""Prometheus metrics of an LLMDataDist, through the extra ``open-datadist[metrics]``. An extension.

    from llm_datadist.prometheus import register
    register(datadist)                      # into prometheus_client's default registry

Every scrape reads ``datadist.statistics()``; between scrapes it costs nothing. An LLMDataDist that is not initialised
exports nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import LLMException, LLMStatusCode, NotInitialized

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.registry import REGISTRY, Collector
except ImportError as error:
    raise LLMException(
        "llm_datadist.prometheus needs prometheus-client: pip install 'open-datadist[metrics]'",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.metrics import Statistics

__all__ = ["StatisticsCollector", "register"]

_PREFIX = "llm_datadist_"


class StatisticsCollector(Collector):
    """Turns ``statistics()`` into metric families, labelled with the cluster id.

    Threads: any.
    """

    def __init__(self, datadist: LLMDataDist) -> None:
        self._datadist = datadist

    def collect(self) -> Iterator[Metric]:
        """Yield the metric families of this moment."""
        try:
            now = self._datadist.statistics()
        except NotInitialized:
            return
        cluster = str(self._datadist.cluster_id)
        yield from _operations(now, cluster)
        yield from _memory(now, cluster)
        yield from _links(now, cluster)


def register(datadist: LLMDataDist, registry: CollectorRegistry = REGISTRY) -> StatisticsCollector:
    """Register a collector for ``datadist`` and return it, for ``registry.unregister`` later."""
    collector = StatisticsCollector(datadist)
    registry.register(collector)
    return collector


def _operations(now: Statistics, cluster: str) -> Iterator[Metric]:
    labels = ["cluster", "operation"]
    count = CounterMetricFamily(_PREFIX + "operations", "Operations, failed ones included.", labels=labels)
    errors = CounterMetricFamily(_PREFIX + "operation_errors", "Operations that raised.", labels=labels)
    nbytes = CounterMetricFamily(_PREFIX + "operation_bytes", "Bytes moved.", labels=labels)
    seconds = CounterMetricFamily(_PREFIX + "operation_seconds", "Time inside operations.", labels=labels)
    for each in now.operations:
        values = [cluster, each.name]
        count.add_metric(values, each.count)
        errors.add_metric(values, each.errors)
        nbytes.add_metric(values, each.nbytes)
        seconds.add_metric(values, each.seconds)
    yield from (count, errors, nbytes, seconds)


def _memory(now: Statistics, cluster: str) -> Iterator[Metric]:
    capacity = GaugeMetricFamily(_PREFIX + "pool_capacity_bytes", "Size of a pool.", labels=["cluster", "pool"])
    used = GaugeMetricFamily(_PREFIX + "pool_used_bytes", "Allocated, in whole pages.", labels=["cluster", "pool"])
    hole = GaugeMetricFamily(_PREFIX + "pool_largest_hole_bytes", "Largest free range.", labels=["cluster", "pool"])
    for pool in now.pools:
        capacity.add_metric([cluster, pool.name], pool.capacity_bytes)
        used.add_metric([cluster, pool.name], pool.used_bytes)
        hole.add_metric([cluster, pool.name], pool.largest_hole_bytes)
    yield from (capacity, used, hole)
    caches = GaugeMetricFamily(_PREFIX + "caches", "Caches with memory behind them.", labels=["cluster", "state"])
    for state in ("live", "deferred", "draining"):
        caches.add_metric([cluster, state], getattr(now.caches, state))
    yield caches
    waiting = GaugeMetricFamily(_PREFIX + "unconsumed_bytes", "Bytes behind keys not pulled yet.", labels=["cluster"])
    waiting.add_metric([cluster], sum(key.unconsumed_bytes for key in now.keys))
    oldest = GaugeMetricFamily(_PREFIX + "oldest_key_seconds", "Age of the oldest key.", labels=["cluster"])
    oldest.add_metric([cluster], max((key.age_seconds for key in now.keys), default=0.0))
    pins = GaugeMetricFamily(_PREFIX + "pins", "Holds of peers on caches.", labels=["cluster"])
    pins.add_metric([cluster], now.pins)
    yield from (waiting, oldest, pins)


def _links(now: Statistics, cluster: str) -> Iterator[Metric]:
    labels = ["cluster", "peer", "transport"]
    up = GaugeMetricFamily(_PREFIX + "link_up", "1 while operations may use the link.", labels=labels)
    read = CounterMetricFamily(_PREFIX + "link_read_bytes", "Bytes read from the peer.", labels=labels)
    written = CounterMetricFamily(_PREFIX + "link_written_bytes", "Bytes written to the peer.", labels=labels)
    verified = CounterMetricFamily(_PREFIX + "link_verified_bytes", "Bytes whose checksums agreed.", labels=labels)
    for link in now.links:
        values = [cluster, str(link.remote_cluster_id), link.transport]
        up.add_metric(values, float(link.state in ("ready", "suspect")))
        read.add_metric(values, link.read_bytes)
        written.add_metric(values, link.written_bytes)
        verified.add_metric(values, link.verified_bytes)
    yield from (up, read, written, verified)
    redials = GaugeMetricFamily(_PREFIX + "redial_attempts", "Tries to get a lost link back.", labels=labels[:2])
    for reconnect in now.redials:
        redials.add_metric([cluster, str(reconnect.remote_cluster_id)], reconnect.attempts)
    yield redials
