"""Prometheus metrics of LLMDataDists, from the extra ``open-datadist[metrics]``. An extension.

    from llm_datadist.prometheus import register
    register(datadist)                      # into prometheus_client's default registry

Each scrape reads ``statistics()`` of every registered instance that is initialised.
"""

from __future__ import annotations

import os
import threading
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary, WeakSet

from llm_datadist.errors import LLMException, LLMStatusCode, NotInitialized
from llm_datadist.metrics import DURATION_BOUNDS

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import REGISTRY, Collector
except ImportError as error:
    raise LLMException(
        "llm_datadist.prometheus needs prometheus-client: pip install 'open-datadist[metrics]'",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from prometheus_client.metrics_core import Metric
    from prometheus_client.registry import CollectorRegistry

    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.metrics import Statistics

    Kind = type[CounterMetricFamily] | type[GaugeMetricFamily]
    Samples = Iterable[tuple[Sequence[str], float]]

__all__ = ["StatisticsCollector", "register"]

_PREFIX = "llm_datadist_"

#: Metric name, its text, and its field of the statistics.
_OPERATION_COUNTERS = (
    ("operations", "Operations, failed ones included.", "count"),
    ("operation_errors", "Operations that raised.", "errors"),
    ("operation_bytes", "Bytes moved.", "nbytes"),
    ("operation_seconds", "Time inside operations.", "seconds"),
)
_POOL_GAUGES = (
    ("pool_capacity_bytes", "Size of a pool.", "capacity_bytes"),
    ("pool_used_bytes", "Allocated, in whole pages.", "used_bytes"),
    ("pool_largest_hole_bytes", "Largest free range.", "largest_hole_bytes"),
)
_DEVICE_COUNTERS = (
    ("device_window_bytes", "Bytes of a GPU through host memory, of the whole process: max, not sum.", "window_bytes"),
    (
        "device_wait_seconds",
        "Time that transfers between processes have waited for a GPU, of the whole process: max, not sum.",
        "wait_seconds",
    ),
)
_LINK_COUNTERS = (
    ("link_read_bytes", "Bytes read from the peer.", "read_bytes"),
    ("link_written_bytes", "Bytes written to the peer.", "written_bytes"),
    ("link_served_bytes", "Bytes that the peer has read here.", "served_bytes"),
    ("link_received_bytes", "Bytes that the peer has written here.", "received_bytes"),
    ("link_verified_bytes", "Bytes whose checksums agreed.", "verified_bytes"),
)
_ABOUT = ["release", "role", "protocol"]
#: Exported from 0 on: a rate ignores the first value of a series.
_LOSSES = ("connection", "process_ended", "silent", "unauthenticated", "replaced")


class StatisticsCollector(Collector):
    """Collector of ``statistics()`` of LLMDataDists, labelled with the cluster id. Threads: any."""

    def __init__(self, *datadists: LLMDataDist) -> None:
        self._datadists = WeakSet(datadists)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metric families."""
        families: dict[str, Metric] = {}
        for datadist in self._datadists:
            try:
                now = datadist.statistics()
            except NotInitialized:
                continue
            for family in _families(now, str(datadist.cluster_id)):
                if (first := families.setdefault(family.name, family)) is not family:
                    first.samples += family.samples
        yield from families.values()


class _Registered(StatisticsCollector):
    """The one collector of a registry."""

    def add(self, datadist: LLMDataDist, *, anew: bool) -> None:
        """Export one more instance; with ``anew`` only this one. A scrape may iterate over the old set."""
        self._datadists = (WeakSet() if anew else self._datadists) | {datadist}


_registering = threading.Lock()
os.register_at_fork(after_in_child=lambda: globals().update(_registering=threading.Lock()))
_collectors: WeakKeyDictionary[CollectorRegistry, _Registered] = WeakKeyDictionary()


def register(datadist: LLMDataDist, registry: CollectorRegistry = REGISTRY) -> StatisticsCollector:
    """Export ``datadist`` while it is initialised; return the registry's only collector.

    ``registry.unregister`` of it ends all exports.
    """
    with _registering:
        collector, anew = _collectors.setdefault(registry, _Registered()), False
        try:
            registry.unregister(collector)  # the registry reads names only at a registration
        except KeyError:
            anew = True
        collector.add(datadist, anew=anew)
        registry.register(collector)
        return collector


def _family(kind: Kind, cluster: str, name: str, text: str, labels: list[str], samples: Samples) -> Metric:
    made = kind(_PREFIX + name, text, labels=["cluster", *labels])
    for values, number in samples:
        made.add_metric([cluster, *values], number)
    return made


def _families(now: Statistics, cluster: str) -> Iterator[Metric]:
    counter, gauge = partial(_family, CounterMetricFamily, cluster), partial(_family, GaugeMetricFamily, cluster)
    yield gauge("info", "1; the labels tell who this is.", _ABOUT, [([now.release, now.role, str(now.protocol)], 1)])
    for name, text, field in _OPERATION_COUNTERS:
        yield counter(name, text, ["operation"], [([each.name], getattr(each, field)) for each in now.operations])
    yield _durations(now, cluster)
    moved = [([each.name, by.transport], by.nbytes) for each in now.operations for by in each.transports]
    yield counter("transport_bytes", "Bytes moved by operation and transport.", ["operation", "transport"], moved)
    failures = [([each.name, kind], count) for each in now.operations for kind, count in each.failures.items()]
    yield counter("operation_failures", "Operations that raised, by exception.", ["operation", "kind"], failures)
    for name, text, field in _POOL_GAUGES:
        yield gauge(name, text, ["pool"], [([pool.name], getattr(pool, field)) for pool in now.pools])
    caches = [([state], getattr(now.caches, state)) for state in ("live", "deferred", "draining")]
    yield gauge("caches", "Caches with memory behind them.", ["state"], caches)
    waiting = sum(key.unconsumed_bytes for key in now.keys)
    yield gauge("unconsumed_bytes", "Bytes behind keys that wait for a pull.", [], [([], waiting)])
    oldest = max((key.age_seconds for key in now.keys if key.unconsumed_bytes), default=0.0)
    yield gauge("oldest_key_seconds", "Age of the oldest key that waits for a pull.", [], [([], oldest)])
    yield gauge("lost_writers", "Peers without a link that have not ended a write.", [], [([], now.lost_writers)])
    yield gauge("pins", "Pins of peers on caches.", [], [([], now.pins)])
    grants = [([state], getattr(now.grants, state)) for state in ("active", "claimed", "waiting")]
    yield gauge("grants", "Grants given, claims of readers, and claims that wait for a grant.", ["state"], grants)
    ends = [([end], getattr(now.grants, end)) for end in ("released", "expired", "revoked", "lost")]
    yield counter("grants_ended", "Grants that have ended.", ["end"], ends)
    tables = [([name], entries) for name, entries in now.tables.items()]
    yield gauge("table_entries", "Entries of bounded tables that fill for hours.", ["table"], tables)
    # Dicts: a link to itself is there twice, once for each side.
    links = [((str(link.remote_cluster_id), link.transport), link) for link in now.links]
    up = {values: float(link.state in ("ready", "suspect")) for values, link in links}
    yield gauge("link_up", "1 while the link is up.", ["peer", "transport"], up.items())
    said = {(values[0], link.peer_release, link.peer_role, str(link.protocol)): 1.0 for values, link in links}
    yield gauge("peer_info", "1; the labels tell who the peer is.", ["peer", *_ABOUT], said.items())
    for name, text, field in _LINK_COUNTERS:
        known: dict[tuple[str, str], float] = {}
        for values, link in links:
            if (number := getattr(link, field)) is not None:
                known[values] = known.get(values, 0) + number
        yield counter(name, text, ["peer", "transport"], known.items())
    lost = (dict.fromkeys(_LOSSES, 0) | now.links_lost).items()
    yield counter("links_lost", "Links that were not unlinked.", ["kind"], [([kind], n) for kind, n in lost])
    peers = [([str(peer), kind], 1.0) for peer, kind in now.lost_peers]
    yield gauge("link_lost", "1 until a lost link is back or unlinked.", ["peer", "kind"], peers)
    yield counter("reconnects", "Lost links dialled again with success.", [], [([], now.reconnects)])
    yield gauge("quarantined_bytes", "Given back, but may still be written.", [], [([], now.quarantined_bytes)])
    for name, text, field in _DEVICE_COUNTERS:
        yield counter(name, text, ["device"], [([each.name], getattr(each, field)) for each in now.devices])
    redials = [([str(each.remote_cluster_id)], each.attempts) for each in now.redials]
    yield gauge("redial_attempts", "Tries to get a lost link back.", ["peer"], redials)
    refused = [([str(each.remote_cluster_id)], float(each.refused)) for each in now.redials]
    yield gauge("redial_refused", "1 while nothing listens at the peer's address.", ["peer"], refused)


def _durations(now: Statistics, cluster: str) -> HistogramMetricFamily:
    """Return the duration histogram; Prometheus buckets are cumulative."""
    bounds = [*map(repr, DURATION_BOUNDS), "+Inf"]
    text, labels = "Durations of operations, failed ones included.", ["cluster", "operation", "transport"]
    made = HistogramMetricFamily(_PREFIX + "operation_duration_seconds", text, labels=labels)
    for each in now.operations:
        for by in each.transports:
            buckets = list(zip(bounds, map(float, accumulate(by.buckets)), strict=True))
            made.add_metric([cluster, each.name, by.transport], buckets, by.seconds)
    return made
