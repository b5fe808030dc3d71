"""Print what several runs of the standard suite reached, for README.md, docs/performance.md and docs/notes/floors.md.

    python -m benchmarks.compare_suites quiet=1.json,2.json,3.json,4.json,5.json busy=6.json,...

Each argument is a load of the machine and the files that ``llm-datadist bench --json`` wrote under it. For each floor:
what is wanted; under each load the median, and the lowest and the highest in brackets; in how many of all runs it was
met. Before them, one line for each load: how many runs, and how much the memcpy of the pulls over shm changed; then the
ratios of pulls and pushes by size of a block, the lowest and the highest of all runs.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from llm_datadist.tools.bench.cases import size_text
from llm_datadist.tools.bench.rows import Row
from llm_datadist.tools.bench.suite import Floor, counts_calls, floors
from llm_datadist.tools.bench.workload import BenchMemory, Op

if TYPE_CHECKING:
    from collections.abc import Iterator

_rows_of: Final = msgspec.json.Decoder(list[Row]).decode


def _load(names: str) -> list[list[Row]]:
    return [_rows_of(Path(name).read_bytes()) for name in names.split(",")]


def _show_memcpy(load: str, runs: list[list[Row]]) -> str:
    """Say how even the runs were, by memcpy beside the pull of 1 MiB blocks over shm."""
    limits = [row.limit_gb_per_s for rows in runs for row in rows if _is_memcpy(row) and row.limit_gb_per_s]
    return f"{load}: {len(runs)} runs, memcpy {min(limits, default=0):.1f} to {max(limits, default=0):.1f} GB/s"


def _is_memcpy(row: Row) -> bool:
    return (row.op, row.transport, row.block_bytes) == ("pull", "shm", 1 << 20)


def _cell(found: list[Floor]) -> str:
    values = sorted(floor.measured for floor in found if floor.measured is not None)
    if not values:
        return "not measured"
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def _wanted(every: list[Floor]) -> str:
    """Beside a busy thread a floor depends on what its own run measured without one."""
    bounds = sorted({floor.wanted for floor in every})
    shown = " to ".join(f"{each:.4g}" for each in dict.fromkeys((bounds[0], bounds[-1])))
    return f"at {'most' if every[0].at_most else 'least'} {shown} {every[0].unit}"


def _show_ratios(op: Op, rows: list[Row]) -> Iterator[str]:
    """Yield a table: one row for each transport and limit or peer, one column for each size of a block."""
    found: dict[tuple[str, str], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        twice = row.transport == "tcp" and row.memory == BenchMemory.REGISTERED  # once more, beside the limit only
        if row.op == op and not twice and not counts_calls(row):
            for other, ratio in ((row.limit_name, row.ratio_to_limit), (row.peer, row.ratio_to_peer)):
                if other and ratio:
                    found[row.transport, other][row.block_bytes].append(ratio)
    sizes = sorted({size for each in found.values() for size in each})
    yield f"\n| {op}, times as fast as | {' | '.join(map(size_text, sizes))} |"
    yield "|---|" + "---|" * len(sizes)
    for (transport, other), each in found.items():
        cells = (f"{min(each[size]):.2f} to {max(each[size]):.2f}" if each[size] else "" for size in sizes)
        yield f"| {transport}: {other} | {' | '.join(cells)} |"


def main(arguments: list[str]) -> int:
    """Print the lines and the tables."""
    loads = {load: _load(names) for load, _, names in (each.partition("=") for each in arguments)}
    if not loads:
        print(__doc__)
        return 2
    for load, runs in loads.items():
        print(_show_memcpy(load, runs))
    rows = [row for runs in loads.values() for each in runs for row in each]
    for op in (Op.PULL, Op.PUSH):
        print(*_show_ratios(op, rows), sep="\n")
    asked = {load: list(zip(*map(floors, runs), strict=True)) for load, runs in loads.items()}
    print(f"\n| floor | wanted | {' | '.join(loads)} | met |")
    print("|---|---|" + "---|" * len(loads) + "---|")
    for each in zip(*asked.values(), strict=True):
        every = [floor for found in each for floor in found]
        cells = [every[0].what, _wanted(every), *(_cell(list(found)) for found in each)]
        judged = [floor.met for floor in every if floor.met is not None]
        print(f"| {' | '.join(cells)} | {sum(judged)} of {len(judged)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
