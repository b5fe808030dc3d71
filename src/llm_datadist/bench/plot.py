"""Results as a picture: one panel for each path, GB/s over the block size, or microseconds. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from llm_datadist.bench.workload import MOVES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llm_datadist.bench.rows import Row

_COLUMNS: Final = 3
_PANEL_INCHES: Final = (4.6, 3.4)
_OURS: Final = "open-datadist"

Points = dict[str, dict[int, float]]
"""Side -> block size -> GB/s."""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the picture, in the format of the suffix of ``path``: png or svg.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: The file cannot be written.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    # The same rows give the same file.
    mpl.rcParams["svg.hashsalt"] = "llm-datadist"
    import matplotlib.pyplot as plt

    rates, times = _rates(rows), _times(rows)
    panels = len(rates) + bool(times)
    columns = max(1, min(_COLUMNS, panels))
    lines = max(1, -(-panels // columns))
    size = (_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * lines)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False, layout="constrained")
    spare = list(axes.flat)
    for title, points in rates.items():
        _draw_rates(spare.pop(0), title, points)
    if times:
        _draw_times(spare.pop(0), times)
    for axis in spare:
        axis.set_axis_off()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=120)
    plt.close(figure)


def _rates(rows: Sequence[Row]) -> dict[str, Points]:
    """Return the panels of ops that move many blocks: title -> points."""
    panels: dict[str, Points] = {}
    for row in rows:
        if row.op not in MOVES or row.gb_per_s is None:
            continue
        where = "" if row.transport == "local" else f" over {row.transport}"
        sides = panels.setdefault(f"{row.call}{where}", {})
        for name, rate in ((_OURS, row.gb_per_s), (row.limit, row.limit_gb_per_s), (row.peer, row.peer_gb_per_s)):
            if name is not None and rate is not None:
                # Where blocks of one size were moved in several numbers the largest set counts, and comes first.
                sides.setdefault(name, {}).setdefault(row.block_bytes, rate)
    return panels


def _times(rows: Sequence[Row]) -> dict[str, float]:
    """Return the median of each op that is timed step by step: label -> microseconds."""
    bars: dict[str, float] = {}
    for row in rows:
        if row.op in MOVES:
            continue
        busy = f", {row.busy} busy" if row.busy else ""
        bars.setdefault(f"{row.call}, {row.transport}, {row.blocks} blocks{busy}", row.seconds_median * 1e6)
        if row.peer is not None and row.peer_seconds_median is not None:
            bars.setdefault(f"{row.peer}, beside {row.transport}", row.peer_seconds_median * 1e6)
    return bars


# matplotlib has no complete types.
def _draw_rates(axis: Any, title: str, points: Points) -> None:  # noqa: ANN401
    for name, rates in points.items():
        sizes = sorted(rates)
        width = 2.2 if name == _OURS else 1.2
        axis.plot([size / 1024 for size in sizes], [rates[size] for size in sizes], "o-", label=name, linewidth=width)
    axis.set_xscale("log", base=2)
    ticks = sorted({size for rates in points.values() for size in rates})
    axis.set_xticks([size / 1024 for size in ticks], [f"{size / 1024:g}" for size in ticks])
    axis.set_ylim(bottom=0)
    axis.set_title(title)
    axis.set_xlabel("block, KiB")
    axis.set_ylabel("GB/s")
    axis.grid(visible=True, alpha=0.3)
    axis.legend(fontsize="small")


def _draw_times(axis: Any, bars: dict[str, float]) -> None:  # noqa: ANN401
    names = list(bars)[::-1]
    axis.barh(names, [bars[name] for name in names])
    axis.set_xscale("log")
    axis.set_xlabel("microseconds, median")
    axis.tick_params(axis="y", labelsize=6)
    axis.grid(visible=True, axis="x", alpha=0.3)
