"""What ``llm-datadist top`` shows of an instance, as rows of text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.metrics import quantile

if TYPE_CHECKING:
    from collections.abc import Hashable

    from llm_datadist._statistics_page import Instance

NOTHING: Final = "no LLMDataDist of this user runs on this host"


class Rates:
    """What counters of the instances grow by each second, from the last two pages of each."""

    def __init__(self) -> None:
        self._before: dict[Hashable, tuple[float, tuple[int, ...]]] = {}
        self._rates: dict[Hashable, list[float]] = {}

    def of(self, key: Hashable, published_at: float, *counters: int) -> list[float]:
        """Return the growth of each counter of ``key`` per second; nothing before the second page."""
        when, before = self._before.get(key, (published_at, counters))
        if (seconds := published_at - when) > 0:
            self._rates[key] = [(now - then) / seconds for now, then in zip(counters, before, strict=True)]
        self._before[key] = published_at, counters
        return self._rates.get(key, [])


def link_rows(instance: Instance) -> list[list[str]]:
    """Return a row for each link: peer, state, transport, bytes read and written."""
    return [
        [str(each[name]) for name in ("remote_cluster_id", "state", "transport", "read_bytes", "written_bytes")]
        for each in instance["statistics"]["links"]
    ]


def operation_rows(instance: Instance) -> list[list[str]]:
    """Return a row for each operation and transport: calls, bytes, p50 and p99 in microseconds, failures by kind."""
    rows = []
    for each in instance["statistics"]["operations"]:
        failures = ", ".join(f"{kind}: {count}" for kind, count in each["failures"].items())
        for by in each["transports"]:
            times = [f"{quantile(by['buckets'], share) * 1e6:.0f}" for share in (0.5, 0.99)]
            rows.append([each["name"], by["transport"], str(by["count"]), str(by["nbytes"]), *times, failures])
    return rows


LINK_COLUMNS = ("peer", "state", "transport", "bytes read", "bytes written")
OPERATION_COLUMNS = ("operation", "transport", "calls", "bytes", "p50 µs", "p99 µs", "failures of all transports")


def title(instance: Instance) -> str:
    """Return one line about an instance: who it is, the age of its page, pools, grants, quarantine."""
    now = instance["statistics"]
    pools = ", ".join(f"{each['name']} {each['used_bytes']} of {each['capacity_bytes']} B" for each in now["pools"])
    parts = [
        f"cluster {instance['cluster_id']} {instance['role']} (pid {instance['pid']})",
        f"{instance['age_seconds']:.1f} s old",
        f"pools: {pools or 'none'}",
        f"grants: {now['grants']['active']}",
        f"quarantine: {now['quarantined_bytes']} B",
    ]
    return "; ".join(parts + ["truncated"] * instance["truncated"])
