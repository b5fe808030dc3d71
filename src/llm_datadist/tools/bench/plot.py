"""Pictures of results: GB/s over the block size, or microseconds; one question each. Needs matplotlib."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.tools.bench.workload import MOVES, BenchMemory, Op

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from llm_datadist.tools.bench.rows import Row

_OURS: Final = "open-datadist"
#: Inches; readable at a phone's 350 pixels.
_WIDTH: Final = 4.6
#: Colours of text, grid, paper, own curve, limit and peers.
_INK, _GRID, _PAPER, *_COLOURS = "#1f2328", "#d8dee4", "#ffffff", "#0969da", "#6e7781", "#bc4c00", "#1a7f37"
_IN_THE_DARK: Final = ("#e6edf3", "#3d444d", "#131416", "#4493f8", "#9198a1", "#f0883e", "#3fb950")
_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "llm-datadist",  # the same rows give the same file
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": _PAPER,
    "axes.facecolor": _PAPER,
    "grid.color": _GRID,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
}

Points = dict[str, dict[int, float]]
"""Contender -> block size in bytes -> GB/s."""


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Write a picture for each question that the rows answer, in colours for light and dark.

    A missing matplotlib is a ModuleNotFoundError, a file that cannot be written an OSError.
    """
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        for what, points in _rates(rows).items():
            figure, axis = _figure(f"How fast is {what}?", 3.8)
            _draw_rates(axis, points)
            figure.legend(loc="outside lower left", ncols=2 + len(points) % 2, frameon=False)
            _save(figure, folder / f"{what.replace(' over ', '-').replace(' ', '-')}.svg")
        for name, (question, bars) in _times(rows).items():
            figure, axis = _figure(question, 1 + 0.5 * len(bars))
            _draw_times(axis, bars)
            _save(figure, folder / f"{name}.svg")


def _rates(rows: Sequence[Row]) -> dict[str, Points]:
    """Return the points of ops that move many blocks."""
    found: dict[str, Points] = {}
    for row in rows:
        if row.op not in MOVES or row.gb_per_s is None:
            continue
        where = "" if row.transport == "local" else f" over {row.over}"
        what = f"{row.op} of a GPU" if row.memory == BenchMemory.GPU else row.call
        contenders = found.setdefault(f"{what}{where}", {})
        for name, rate in ((_OURS, row.gb_per_s), (row.limit_name, row.limit_gb_per_s), (row.peer, row.peer_gb_per_s)):
            if name is not None and rate is not None:
                # Of several sets of one block size the first counts.
                contenders.setdefault(name, {}).setdefault(row.block_bytes, rate)
    return found


def _times(rows: Sequence[Row]) -> dict[str, tuple[str, dict[str, float]]]:
    """Return the questions by name, with medians: label -> microseconds."""
    asked: dict[str, tuple[str, dict[str, float]]] = {
        "latency": ("How long does one block take?", {}),
        "busy": ("How long, beside a busy Python thread?", {}),
        "calls": ("How long do other calls take?", {}),
    }
    for row in rows:
        if row.op in MOVES:
            continue
        bars = asked["calls" if row.op != Op.LATENCY else "busy" if row.busy else "latency"][1]
        where = row.over if row.op in (Op.LATENCY, Op.LINK) else f"{row.blocks} blocks"
        bars.setdefault(f"{row.call}, {where}{f', {row.busy} busy' if row.busy else ''}", row.seconds_median * 1e6)
        if row.peer is not None and row.peer_seconds_median is not None:
            bars.setdefault(f"{row.peer}, beside {row.over}", row.peer_seconds_median * 1e6)
    return {name: (question, bars) for name, (question, bars) in asked.items() if bars}


# matplotlib has no complete types.
def _figure(question: str, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure((_WIDTH, height), layout="constrained")
    axis = figure.subplots()
    axis.set_title(question)
    axis.set_axisbelow(True)
    return figure, axis


def _draw_rates(axis: Any, points: Points) -> None:  # noqa: ANN401
    for number, (name, rates) in enumerate(points.items()):
        sizes = sorted(rates)
        look = {"color": _COLOURS[number % len(_COLOURS)], "linewidth": 2.5 if name == _OURS else 1.5}
        axis.plot(sizes, [rates[size] for size in sizes], f"{'os^D'[number % 4]}-", label=name, **look)
    axis.set_xscale("log", base=2)
    ticks = sorted({size for rates in points.values() for size in rates})
    axis.set_xticks(ticks, [f"{size / 1024:g}" for size in ticks])
    axis.set_ylim(bottom=0)
    axis.set_xlabel("KiB in a block")
    axis.set_ylabel("GB/s")
    axis.grid(visible=True)


def _draw_times(axis: Any, bars: dict[str, float]) -> None:  # noqa: ANN401
    places = range(len(bars))[::-1]
    colours = [_COLOURS[2 if ", beside " in label else 0] for label in bars]
    drawn = axis.barh(places, list(bars.values()), 0.4, color=colours)
    axis.bar_label(drawn, [f"{float(f'{each:.3g}'):,g}" for each in bars.values()], padding=3)
    for place, label in zip(places, bars, strict=True):
        axis.text(0, place + 0.33, label, transform=axis.get_yaxis_transform(), fontsize="small")
    axis.set_xscale("log")
    axis.margins(x=0.2)
    axis.set_yticks([])
    axis.set_xlabel("microseconds, median")
    axis.grid(visible=True, axis="x")


def _save(figure: Any, path: Path) -> None:  # noqa: ANN401
    """Write a figure, with a style sheet for dark pages."""
    text = StringIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    pairs = zip((_INK, _GRID, _PAPER, *_COLOURS), _IN_THE_DARK, strict=True)
    rules = [f'[style*="{part}: {a}"]{{{part}:{b}!important}}' for a, b in pairs for part in ("fill", "stroke")]
    style = f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style>\n <defs>"
    path.write_text(text.getvalue().replace("<defs>", style, 1))
