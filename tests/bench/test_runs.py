"""Small real runs of every op, as a user starts them: what the rows say is consistent and complete. And bad input."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from signal import SIGINT, SIGKILL, Signals
from typing import Any, Final

import msgspec
import pytest
from typer.testing import CliRunner

from llm_datadist._links.credentials import new_secret
from llm_datadist.tools.bench import cuda
from llm_datadist.tools.bench.rows import Row
from llm_datadist.tools.cli.app import app
from tests.bench.test_results import shows
from tests.support import fakecuda
from tests.support.ends import has_ended
from tests.support.moves import wait_until
from tests.support.source import ROOT, run
from tests.support.tables import on_terminal, tables


def check(row: dict[str, Any]) -> None:
    assert set(row) == set(Row.__struct_fields__)
    msgspec.convert(row, Row)
    assert row["verified"] is True
    assert row["first_seconds"] > 0
    assert 0 < row["seconds_min"] <= row["seconds_median"] <= row["seconds_max"]
    assert row["seconds_median"] <= row["seconds_p90"] <= row["seconds_p99"] <= row["seconds_max"]
    if row["bytes"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["seconds_median"] / 1e9)
        assert row["cpu_seconds_per_gib"] > 0
    else:
        assert row["gb_per_s"] is row["cpu_seconds_per_gib"] is None
    for other in ("limit", "peer"):
        parts = ("gb_per_s", "seconds_median", "cpu_seconds_per_gib")
        if row[other] is None:
            assert all(row[f"{other}_{part}"] is None for part in parts)
            assert row[f"ratio_to_{other}"] is None
        else:
            assert row[f"ratio_to_{other}"] == pytest.approx(row["gb_per_s"] / row[f"{other}_gb_per_s"])


def test_the_documentation_lists_the_fields_of_a_row() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    listed = [name for line in table for name in re.findall(r"`(\w+)`", line)]
    assert sorted(listed) == sorted(Row.__struct_fields__)


SHAPE = "--block-bytes 8192 --blocks 64 --tensors 3 --threads 1"
SHAPED = {"block_bytes": 8192, "blocks": 64, "tensors": 3, "threads": 1, "bytes": 8192 * 64 * 3, "passes": 2}
SINGLE = [
    {"call": call, "busy": busy, "bytes": 65536, "blocks": 2 if busy else 10}
    for call in ("pull_blocks", "pull_cache by key")
    for busy in (None, "source", "destination")
]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (f"pull {SHAPE}", [SHAPED | {"transport": "shm", "memory": "pool"}]),
        (f"pull --transport cma {SHAPE}", [SHAPED | {"transport": "cma", "memory": "registered"}]),
        (f"pull --transport tcp --memory registered {SHAPE}", [SHAPED | {"transport": "tcp", "memory": "registered"}]),
        (f"push --transport tcp {SHAPE}", [SHAPED | {"transport": "tcp", "memory": "pool"}]),
        (
            "pull --transport inproc --set-mib 2 --tensors 2",
            [{"transport": "inproc", "memory": "pool", "blocks": 16, "block_bytes": 65536, "bytes": 2 << 20}],
        ),
        (f"copy {SHAPE}", [SHAPED | {"call": "copy_blocks"}, SHAPED | {"call": "copy_cache"}]),
        (
            "copy --memory registered --block-bytes 8192 --blocks 5",
            [
                {"call": "copy_blocks", "tensors": 1, "bytes": 8192 * 5},
                {"call": "copy_cache", "tensors": 64, "bytes": 8192 * 5 * 64},
            ],
        ),
        ("swap --block-bytes 8192 --blocks 50", [{"call": "swap_blocks", "transport": "local", "bytes": 8192 * 50}]),
        ("plan --blocks 300 --tensors 5", [{"blocks": 300, "tensors": 5, "bytes": 0}]),
        ("alloc --tensors 7 --against torch", [{"tensors": 7, "bytes": 0}]),
        ("link --transport shm", [{"transport": "shm", "bytes": 0}]),
        ("latency --transport shm --blocks 10", [each | {"transport": "shm"} for each in SINGLE]),
        # Registered caches are not consumed by pull_cache, which is left out.
        (
            "latency --memory registered --transport inproc --blocks 2",
            [{"call": "pull_blocks", "transport": "inproc", "busy": None, "memory": "registered"}],
        ),
    ],
)
def test_a_run_gives_complete_rows(tmp_path: Path, arguments: str, wanted: list[dict[str, Any]]) -> None:
    _run(tmp_path, arguments, "" if arguments.startswith(("plan", "alloc", "link")) else ",", wanted)


_SEALED = {"transport": "tcp", "sealed": True}
_SIZES = [_SEALED | {"block_bytes": size, "blocks": 20} for size in (8192, 4096)]


@pytest.mark.parametrize(
    ("arguments", "wanted", "limit"),
    [
        ("pull --block-bytes 8192,4096,8192 --blocks 20", _SIZES, "tcp-raw-encrypted"),
        ("push --block-bytes 8192,4096 --blocks 20", _SIZES, "tcp-raw-encrypted"),
        ("latency --blocks 5", [_SEALED] * 6, "tcp-raw-encrypted"),
        ("link", [_SEALED], None),
    ],
)
def test_with_secrets_links_are_encrypted_beside_an_encrypted_limit(
    tmp_path: Path, arguments: str, wanted: list[dict[str, Any]], limit: str | None
) -> None:
    _run(tmp_path, f"{arguments} --transport tcp --secrets {new_secret(tmp_path / 'secrets', '1')}", "", wanted)
    first, *_ = msgspec.json.decode((tmp_path / "rows.json").read_bytes(), type=list[Row])
    assert (first.limit_name, first.peer) == (limit, None)


@pytest.mark.usefixtures("gpu")
@pytest.mark.gpu(True)
@pytest.mark.parametrize(
    ("arguments", "transport"),
    [
        *((each, "local") for each in ("d2d", "h2d", "d2h", "swap --memory gpu")),
        *((f"pull --memory gpu --transport {each}", each) for each in ("shm", "tcp", "inproc")),
    ],
)
def test_a_run_in_a_gpu_gives_complete_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, transport: str
) -> None:
    fakecuda.load()
    for name, value in fakecuda.environment(delay_us=100).items():
        monkeypatch.setenv(name, value)
    rows = [SHAPED | {"memory": "gpu", "limit": "cuda-copy", "transport": transport}]
    [why] = [each["why"] for each in _run(tmp_path, f"{arguments} {SHAPE}", "cuda-copy,memcpy", rows)]
    assert why.endswith(f"not for {arguments[:3] if arguments[1] == '2' else 'gpu'}")


@pytest.mark.gpu(True)
@pytest.mark.parametrize(("op", "fits"), [("d2d", False), ("h2d", True), ("pull --memory gpu", False)])
def test_a_set_that_the_gpu_cannot_hold_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu: bool, op: str, fits: bool
) -> None:
    fakecuda.load()
    for name, value in fakecuda.environment(delay_us=100, memory=64 << 20).items():
        monkeypatch.setenv(name, value)
    words = f"bench {op} --against {'cuda-copy' if op == 'd2d' else ','} --block-bytes 65536 --blocks 320 --passes 1"
    result = CliRunner().invoke(app, [*words.split(), "--json", str(tmp_path / "rows.json")])
    assert result.exit_code == (0 if fits else 2), result.output
    assert ("GiB are available (in the GPU)" in result.output) is not fits
    assert "\nnothing is left to run" in result.output or fits


@pytest.mark.skipif(cuda.why_not() is None, reason="this host has an NVIDIA driver")
def test_without_a_driver_a_gpu_is_left_out_and_the_reason_said() -> None:
    done = run(sys.executable, "-m", "llm_datadist", "bench", "d2d", "--against", ",", cwd=ROOT)
    assert done.returncode == 2
    assert "ours-copy-blocks: no NVIDIA driver: libcuda.so.1: cannot open shared object file" in done.stderr
    assert "\nleft out: d2d copy_blocks over local of a GPU" in done.stderr


def _run(tmp_path: Path, arguments: str, against: str, wanted: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Run the bench; return what it says it left out."""
    path, words = tmp_path / "rows.json", arguments.split()
    peers = ["--against", against] if against else []
    result = CliRunner().invoke(app, ["bench", *words, *peers, "--passes", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    shown, *left = tables(result.stdout, None).values()
    for row, cells in zip(rows, shown, strict=True):
        check(row)
        shows(cells, msgspec.convert(row, Row))
    assert {row["op"] for row in rows} == {words[0]}
    assert [{key: row[key] for key in each} for row, each in zip(rows, wanted, strict=True)] == wanted
    return [cells for each in left for cells in each]


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for each in tasks for child in each.read_text().split()]


@pytest.mark.parametrize(("number", "to"), [(SIGINT, os.kill), (SIGKILL, os.kill), (SIGINT, os.killpg)])
def test_a_signal_ends_the_workers_too(number: Signals, to: Callable[[int, int], None]) -> None:
    """A terminal interrupts the workers as well.

    Regression: the workers lived on; and children inherited an ignored SIGINT under ``make test &``.
    """
    options = ["--blocks", "200", "--passes", "1000", "--against", ","]
    command = [sys.executable, "-m", "llm_datadist", "bench", "pull", *options]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as driver:
        assert driver.stderr is not None
        # Nothing is said after this line before the first pass, for which the workers are there.
        while not driver.stderr.readline().startswith("1 of 1"):
            assert driver.poll() is None
        workers = _children(driver.pid)
        assert len(workers) == 2
        to(driver.pid, number)
        said = driver.communicate(timeout=60)
        if number is SIGINT:
            assert (driver.returncode, said) == (130, ("", "llm-datadist: interrupted\n"))
        wait_until(lambda: all(has_ended(pid) for pid in workers), 60)


# --- bad input: refused by naming the option, the value and the range, before anything has happened -------------------
HUGE = "--blocks 10000000 --block-bytes 1073741824 --against"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("fly", ["'fly'", "pull", "latency"]),
        ("pull --transport rdma", ["--transport", "'rdma'", "shm", "inproc"]),
        ("pull --secrets s", ["--secrets", "only tcp encrypts its bytes, not shm", "--transport tcp"]),
        ("copy --secrets s", ["--secrets", "bench copy does not take it"]),
        ("standard --secrets s", ["--secrets", "bench standard does not take it"]),
        ("standard --block-bytes 1,2", ["--block-bytes", "bench standard does not take it"]),
        ("pull --block-bytes 4096,x", ["--block-bytes", "'4096,x' is not a list of numbers of bytes"]),
        ("pull --block-bytes 4096,0", ["--block-bytes", "0 is outside [1, 1073741824]"]),
        (f"pull --block-bytes {'9' * 5000}", ["--block-bytes", "is not a list of numbers of bytes"]),
        ("pull --block-bytes ,", ["--block-bytes", "',' is not a list of numbers of bytes"]),
        ("pull --blocks -1", ["--blocks", "-1 is outside [1, 10000000]"]),
        ("pull --threads 0 --json a.json --plot .", ["--threads", "0 is outside [1, 1024]"]),
        ("pull --against memcpy,ucx", ["--against", "'ucx' is unknown", "memcpy", "nixl", "mooncake", "torch"]),
        ("link --transport inproc", ["--transport", "'inproc' is one process", "shm, cma, tcp or nixl"]),
        ("copy --transport shm", ["--transport", "bench copy does not take it", "--block-bytes"]),
        ("standard --blocks 3", ["--blocks", "bench standard does not take it", "--against, --threads"]),
        ("pull --json /nowhere/rows.json", ["--json", "/nowhere/rows.json cannot be written"]),
        ("pull --plot /nowhere", ["--plot", "/nowhere", "does not exist"]),
        (f"pull {HUGE} ,", ["40000000 GiB", "are available", "nothing is left to run"]),
        (f"alloc {HUGE} torch", ["torch: is for copy, swap, not for alloc", "nothing is left to run"]),
    ],
)
def test_a_bad_value_is_refused_and_leaves_no_file(
    arguments: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["bench", *arguments.split()])
    output = " ".join(result.output.replace("│", " ").split())  # words may be cut into lines and framed
    assert result.exit_code == 2
    for each in said:
        assert each in output
    assert "trying" not in output
    assert list(tmp_path.iterdir()) == []


# --- progress: a bar on a terminal, and plain lines elsewhere ---------------------------------------------------------
_BAR: Final = "\N{BOX DRAWINGS HEAVY HORIZONTAL}" * 4


def test_a_bar_on_a_terminal_and_only_lines_on_pipes() -> None:
    options = ["--blocks", "20", "--passes", "2", "--against", ","]
    command = [sys.executable, "-m", "llm_datadist", "bench", "pull", *options]
    done = run(*command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "\n1 of 1: pull" in done.stderr
    assert _BAR not in done.stderr
    assert "\x1b" not in done.stdout + done.stderr
    status, shown = on_terminal(command, 120)
    assert status == 0, shown
    assert re.search(rf"{_BAR}.* \d+/\d+ cases", re.sub(r"\x1b\[[\d;?]*\w", "", shown)), shown
