"""Rows of ``llm-datadist top``: name of column -> cell."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from llm_datadist.metrics import quantile

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from llm_datadist._statistics_page import Instance

    Rows = list[dict[str, str]]

_IDS: Final = {"cluster", "of", "peer"}  # columns
_DIGITS: Final = 4
_MOVED: Final = ("read", "written", "served", "received")
NOTHING: Final = "no LLMDataDist of this user runs on this host"


class Rates:
    """Growth of counters per second, from an instance's last two pages."""

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


def busy(found: list[Instance]) -> list[Instance]:
    """Leave out instances without a link that have moved nothing; reads by peers over shm do not count."""
    return [
        each for each in found if (now := each["statistics"])["links"] or any(o["nbytes"] for o in now["operations"])
    ]


def instance_rows(found: list[Instance]) -> Rows:
    """Return a row for each instance."""
    rows = []
    for each in found:
        now = each["statistics"]
        row = {"cluster": str(each["cluster_id"]), "role": each["role"]}
        row |= {"release": now["release"], "pid": str(each["pid"])}
        row |= {"age": f"{each['age_seconds']:.1f} s", "grants": str(now["grants"]["active"])}
        row["quarantine"] = _size(now["quarantined_bytes"]) if now["quarantined_bytes"] else ""
        row["page"] = "truncated" * each["truncated"]
        for pool in now["pools"]:
            used, capacity = _size(pool["used_bytes"]), _size(pool["capacity_bytes"])
            row |= {"device": device} if (device := pool.get("device", "host")) != "host" else {}
            row[f"{pool['name']} pool"] = f"{used.removesuffix(capacity[-4:])}/{capacity}"
        rows.append(row)
    return rows


def link_rows(found: list[Instance], rates: Rates) -> Rows:
    """Return a row for each link."""
    rows = []
    for instance, each in _each(found, "links"):
        peer, moved = each["remote_cluster_id"], {name: each.get(f"{name}_bytes") for name in _MOVED}
        row = {"of": str(instance["cluster_id"]), "peer": str(peer)}
        key, totals = (instance["pid"], instance["cluster_id"], peer), (nbytes or 0 for nbytes in moved.values())
        grown = zip(moved, rates.of(key, instance["published_at"], *totals), strict=False)
        speeds = [(f"GB/s {name}", "-" if moved[name] is None else _gigabytes(rate)) for name, rate in grown]
        row |= speeds[:3]  # the fourth is beyond 80 columns
        row |= {"state": each["state"], "over": each["transport"], "release": each["peer_release"]} | dict(speeds[3:])
        row |= {name: "-" if nbytes is None else _size(nbytes) for name, nbytes in moved.items()}
        rows.append(row | {"pid": str(instance["pid"]), "role": each["peer_role"]})
    return rows


def operation_rows(found: list[Instance], rates: Rates) -> Rows:
    """Return a row for each operation and transport."""
    rows = []
    for instance, each in _each(found, "operations"):
        failed = sum(each["failures"].values())
        kinds = ", ".join(f"{kind}: {count}" for kind, count in each["failures"].items())
        for by in each["transports"]:
            row = {
                "of": str(instance["cluster_id"]),
                "operation": each["name"],
                "failed": str(failed) if failed else "",
            }
            row |= {"p50 µs": _bound(by, 0.5), "p99 µs": _bound(by, 0.99)}
            key = instance["pid"], instance["cluster_id"], each["name"], by["transport"]
            grown = rates.of(key, instance["published_at"], by["count"], by["nbytes"])
            row |= {"GB/s": _gigabytes(grown[1]), "calls/s": f"{grown[0]:.1f}"} if grown else {}
            row |= {"over": by["transport"], "calls": str(by["count"]), "moved": _size(by["nbytes"])}
            rows.append(row | {"pid": str(instance["pid"]), "failures": kinds})
            failed, kinds = 0, ""  # counted for all transports together
    return rows


def _each(found: list[Instance], part: str) -> Iterator[tuple[Instance, dict[str, Any]]]:
    return ((instance, each) for instance in found for each in instance["statistics"][part])


def shortened(rows: Rows, found: list[Instance]) -> Rows:
    """Return the rows with long cluster ids cut to their last digits: four, or as many as tell all ids apart."""
    ids = {each["cluster_id"] for each in found} | {link["remote_cluster_id"] for _, link in _each(found, "links")}
    digits = next(n for n in range(_DIGITS, 21) if len({each % 10**n for each in ids}) == len(ids))
    short = {whole: f"..{whole[-digits:]}" for each in ids if len(whole := str(each)) > digits + 2}
    return [row | {name: short.get(row[name], row[name]) for name in _IDS & row.keys()} for row in rows]


def _gigabytes(rate: float) -> str:
    return f"{max(rate, 0.0) / 1e9:.3f}"


def _size(nbytes: int) -> str:
    for unit, shift in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << shift:
            return f"{nbytes / (1 << shift):.1f} {unit}"
    return f"{nbytes} B"


def _bound(by: dict[str, Any], share: float) -> str:
    return f"<= {quantile(by['buckets'], share) * 1e6 + 0.5:.0f}"  # rounded up
