"""What is made of measurements: rows, floors, pictures; and two builds compared."""

import io
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.compare_builds import build_of, interval, is_slower, main
from llm_datadist.tools.bench.cases import Case, Request, cases_of, size_text
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.report import show_floors, show_rows, show_summary
from llm_datadist.tools.bench.rows import Measured, Row, make_rows
from llm_datadist.tools.bench.suite import counts_calls, floors, standard
from llm_datadist.tools.bench.workload import BESIDE_GPU, MOVES, BenchMemory, BenchWorkload, Op
from tests.support.tables import WIDTHS, tables, uncoloured

OURS = "open-datadist"
WORK = BenchWorkload(op=Op.PULL, block_bytes=4096, blocks=256)
CASE = Case(contender="ours-shm", call="pull_blocks", transport="shm", workload=WORK, limit="memcpy", peers=("nixl",))


def measured(*seconds: float, cpu: float = 0.5) -> Measured:
    result = Measured()
    for number, each in enumerate(seconds):
        result.add(number, [each], cpu)
    return result


def rows() -> list[Row]:
    ours, limit, peer = measured(9.0, 2.0, 4.0, 3.0), measured(5.0, 1.5), measured(9.0, 30.0)
    return make_rows(CASE, "shm", ours, limit, {"nixl": peer})


def test_a_row_is_computed_from_the_steady_state_each_peer_has_one_and_none_has_one_too() -> None:
    [row] = rows()
    assert (row.first_seconds, row.seconds_median, row.seconds_min, row.seconds_max) == (9.0, 3.0, 2.0, 4.0)
    assert row.gb_per_s == pytest.approx((1 << 20) / 3.0 / 1e9)
    assert (row.ratio_to_limit, row.ratio_to_peer) == (0.5, 10.0)
    # Half a second for each pass, in which the transfer of one MiB is repeated 16 times.
    assert CASE.repeats == 16
    assert row.cpu_seconds_per_gib == pytest.approx(512.0 / 16)
    encrypted = replace(CASE, workload=msgspec.structs.replace(CASE.workload, secrets="secrets"))
    [sealed] = make_rows(encrypted, "tcp", measured(1, 1), None, {})
    assert (row.sealed, row.over, sealed.sealed, sealed.over) == (False, "shm", True, "encrypted tcp")
    two = make_rows(CASE, "shm", measured(1, 1), None, {"nixl": measured(1, 2), "torch": measured(1, 3)})
    assert [(row.peer, row.ratio_to_peer, row.limit) for row in two] == [("nixl", 2, None), ("torch", 3, None)]
    assert [row.peer for row in make_rows(CASE, "shm", measured(1, 1), None, {})] == [None]


def test_what_a_floor_asks_for_decides_and_floors_of_time_are_upper_bounds() -> None:
    found = {floor.what: floor for floor in floors(rows())}
    limit = found["pull over shm, 4 KiB, of the limit"]
    assert (limit.measured, limit.wanted, limit.met) == (0.5, 0.9, False)
    peer = found["pull over shm, 4 KiB, of nixl"]
    assert (peer.measured, peer.wanted, peer.met, peer.limit) == (10.0, 10.0, True, 20.0)
    assert found["planning 122 tensors x 1000 blocks"].met is None
    large = replace(CASE, workload=BenchWorkload(op=Op.PULL, block_bytes=1 << 20, blocks=1000))
    found = {floor.what: floor for floor in floors(make_rows(large, "shm", measured(1, 1), measured(1, 2), {}))}
    assert found["pull over shm, 1024 KiB, of the limit"].measured == pytest.approx(2)
    assert found["4 KiB blocks, 10^2 to 10^6, time in memcpy's"].measured is None
    work = BenchWorkload(op=Op.LATENCY, block_bytes=65536, blocks=10)
    case = replace(CASE, workload=work, samples=10, limit=None)
    latency = make_rows(case, "shm", measured(1, 3), None, {"nixl": measured(1, 1)})
    found = {floor.what: floor for floor in floors(latency)}
    single = found["pull of one 64 KiB block over shm, p50, in that of nixl"]
    assert single.measured == pytest.approx(3.0)
    assert (single.wanted, single.met) == (0.95, False)
    slow = replace(case, call="pull_cache by key")
    beside = [
        *make_rows(slow, "shm", measured(1, 1), None, {}),
        *make_rows(replace(slow, busy=Role.SOURCE), "shm", measured(1, 2), None, {}),
    ]
    once = {floor.what: floor for floor in floors(beside)}["pull_cache by key over shm, source busy, p50"]
    assert once.measured == pytest.approx(2e6)
    assert once.wanted == pytest.approx(1.2 * (1e6 + 5000))


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


#: What the column of a table shows of a row; rows without it leave the cell empty.
MOVES_SHOW: dict[str, Callable[[Row], Any]] = {
    "first GB/s": lambda row: row.bytes / row.first_seconds / 1e9,
    "GB/s": lambda row: row.gb_per_s,
    "limit GB/s": lambda row: row.limit_gb_per_s,
    "x limit": lambda row: row.ratio_to_limit,
    "peer GB/s": lambda row: row.peer_gb_per_s,
    "x peer": lambda row: row.ratio_to_peer,
    "CPU s/GiB": lambda row: row.cpu_seconds_per_gib,
}
OTHERS_SHOW: dict[str, Callable[[Row], Any]] = {
    "first us": lambda row: row.first_seconds * 1e6,
    "p50 us": lambda row: row.seconds_median * 1e6,
    "p90 us": lambda row: row.seconds_p90 * 1e6,
    "p99 us": lambda row: row.seconds_p99 * 1e6,
    "a tensor us": lambda row: row.seconds_median / row.tensors * 1e6 if row.op == "alloc" else None,
    "limit p50 us": lambda row: row.limit_seconds_median and row.limit_seconds_median * 1e6,
    "x limit": lambda row: row.ratio_to_limit,
    "peer p50 us": lambda row: row.peer_seconds_median and row.peer_seconds_median * 1e6,
    "x peer": lambda row: row.ratio_to_peer,
}


def shows(cells: dict[str, str], row: Row) -> None:
    """Check that the cells of a table are what the row says, none more or less."""
    figures = MOVES_SHOW if row.op in MOVES else OTHERS_SHOW
    expected = {name: value for name, of in figures.items() if (value := of(row)) is not None}
    assert {name: float(cells[name]) for name in cells if name in figures} == pytest.approx(expected, rel=0.05)
    assert cells["blocks"] == f"{row.blocks} x {size_text(row.block_bytes)} x {row.tensors}"
    assert (cells["call"], cells["over"]) == (row.call, row.over)


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_of_every_width_have_the_figures_of_the_rows(width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows, with and without peers; no figure is 0.00."""
    monkeypatch.setenv("COLUMNS", str(width))
    alone = make_rows(CASE, "shm", measured(9e-3, 2e-4, 4e-2), None, {})
    beside = make_rows(CASE, "tcp", measured(0.2, 0.1), measured(0.2, 0.03), {"nixl-prepared": measured(1, 2)})
    for op in Op:
        for some in (alone, alone + beside):
            made = [msgspec.structs.replace(row, op=op, tensors=4) for row in some]
            stream = io.StringIO() if width is None else Screen()
            show_rows(made, stream)
            [shown] = tables(uncoloured(stream.getvalue()), width).values()
            for cells, row in zip(shown, made, strict=True):
                shows(cells, row)
    stream = io.StringIO() if width is None else Screen()
    asked = floors(rows())
    show_floors(asked, stream)
    shown = tables(uncoloured(stream.getvalue()), width)["floors"]
    for cells, floor in zip(shown, asked, strict=True):
        values = {"measured": floor.measured, "floor": floor.wanted, "the limit itself": floor.limit}
        for name, value in values.items():
            if value is not None:
                number = re.findall(r"[\d.]+", cells[name])[0]
                assert float(number) == pytest.approx(value, rel=0.05)


def _some() -> Measured:
    seconds = random.random() * 1e-2 + 1e-4
    return measured(1, seconds, 2 * seconds, cpu=seconds)


def _check_screen(suite: list[Row]) -> None:
    """Check that the summary fits a terminal of 80 x 50, and has every figure that it should, and the right ones."""
    stream = io.StringIO()
    show_summary(suite, floors(suite), stream)
    *screen, line = stream.getvalue().rstrip().split("\n")
    assert len(screen) < 50
    shown = tables("\n".join(screen[:-2]), 80)  # without the words below
    by_name: dict[tuple[str, str], dict[str, str]] = {}
    for cells in shown["rates"]:
        if "_" in cells["GB/s"]:
            ours = cells["GB/s"]
        by_name[ours, cells["GB/s"]] = cells
    for row in [each for each in suite if each.memory != "gpu"]:
        local = row.transport == "local"
        if row.op not in MOVES or counts_calls(row) or (row.transport, row.memory) == ("tcp", "registered"):
            continue
        ours, size = row.call if local else f"{row.call} over {row.transport}", size_text(row.block_bytes)
        figures = [(ours, row.gb_per_s, row.cpu_seconds_per_gib)]
        figures.append(((row.limit or "").split(" ")[0], row.limit_gb_per_s, row.limit_cpu_seconds_per_gib))
        figures.append((row.peer or "", row.peer_gb_per_s, row.peer_cpu_seconds_per_gib))
        for name, rate, cpu in figures:
            if rate is not None:
                cells = by_name[ours, name]
                assert float(cells[size]) == pytest.approx(rate, rel=0.01, abs=0.006)
                if row.block_bytes == 64 << 10:
                    assert float(cells["CPU s/GiB"]) == pytest.approx(cpu, rel=0.01, abs=0.006)
        if (size, row.op) == ("64 KiB", Op.PULL):
            assert f"{row.ratio_to_limit:.2f} x {figures[1][0]}, " in line
            assert f"{row.ratio_to_peer:.2f} x {row.peer}" in line
    alone = [row for row in suite if row.op == Op.LATENCY and row.busy is None and row.peer != "nixl-prepared"]
    for cells, row in zip(shown["times"], alone, strict=True):
        assert cells["us"] == f"{row.call} over {row.transport}"
        expected = [row.seconds_median, row.seconds_p99, row.limit_seconds_median, row.peer_seconds_median]
        values = [float(cells[name]) / 1e6 for name in ("p50", "p99", "limit p50", "peer p50") if name in cells]
        assert values == pytest.approx([each for each in expected if each is not None], rel=0.01)
    assert line.endswith(f"of {len(floors(suite))} floors met")


def test_the_suite_has_every_path_and_answers_every_floor() -> None:
    cases = standard(Request(op=Op.PULL, set_bytes=512 << 20))
    assert {case.workload.op for case in cases} == set(Op)
    for transport in ("shm", "cma", "tcp"):
        sizes = {c.workload.block_bytes for c in cases if c.workload.op is Op.PULL and c.transport == transport}
        assert sizes >= {4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
    answered: list[Row] = []
    for case in cases:
        peers = {name: _some() for name in case.peers}
        answered += make_rows(case, case.transport, _some(), _some() if case.limit else None, peers)
    on_gpu = {(c.workload.op, c.transport, c.limit) for c in cases if c.workload.memory is BenchMemory.GPU}
    between = {(Op.PULL, "shm", "cuda-copy"), (Op.PULL, "tcp", "tcp-raw")}
    assert on_gpu == {(op, "local", "cuda-copy") for op in (*BESIDE_GPU, Op.SWAP)} | between
    unanswered = [floor.what for floor in floors(answered) if floor.measured is None]
    assert unanswered == []
    _check_screen(answered)


@pytest.mark.parametrize(
    ("transport", "against", "limit", "peers"),
    [
        ("shm", None, "memcpy", ("nixl",)),
        ("tcp", None, "tcp-raw", ("nixl-tcp", "mooncake")),
        ("tcp", ("nixl", "memcpy", "tcp-raw"), "tcp-raw", ("nixl-tcp", "memcpy")),
        ("cma", ("memcpy",), "memcpy", ()),
        ("shm", (), None, ()),
    ],
)
def test_one_limit_and_the_others_are_peers(
    transport: str, against: tuple[str, ...] | None, limit: str | None, peers: tuple[str, ...]
) -> None:
    [case] = cases_of(Request(op=Op.PULL, transport=transport, against=against))
    assert (case.limit, case.peers) == (limit, peers)


# --- two builds compared: the arithmetic of the verdict, and one run --------------------------------------------------
def test_the_interval_is_that_of_the_tables_and_needs_six_ratios() -> None:
    """Of the order statistics of the 95 % interval of a median, from 1."""
    table = {6: (1, 6), 8: (1, 8), 9: (2, 8), 10: (2, 9), 12: (3, 10), 15: (4, 12), 20: (6, 15), 25: (8, 18)}
    for count, positions in table.items():
        ratios = [float(number) for number in range(1, count + 1)]
        random.Random(count).shuffle(ratios)
        assert interval(ratios) == positions
    with pytest.raises(ValueError, match="at least 6"):
        interval([1.0] * 5)


def test_a_build_is_slower_when_the_whole_interval_is() -> None:
    # The upper end is the twelfth: three fast pairs of fifteen are taken for noise, four are not.
    slower = [[0.9] * 15, [0.9] * 12 + [1.2] * 3]
    not_slower = [[0.95] * 15, [1.1] * 15, [0.9] * 11 + [1.2] * 4]
    assert [is_slower(ratios) for ratios in slower + not_slower] == [True] * 2 + [False] * 3


def test_each_build_is_run_by_its_own_interpreter_and_one_that_cannot_run_fails_the_comparison(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (build_of(tmp_path).environment or {})["PYTHONPATH"] == str(tmp_path / "src")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").touch()
    assert build_of(tmp_path).python == str(tmp_path / ".venv/bin/python")
    assert main(["--before", "/bin/false", "--cases", "plan"]) == 1
    assert "FAILED: ours-plan" in capsys.readouterr().out
