"""Small real runs of the ops that stay in one process, or move nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from llm_datadist.cli.app import app
from tests.bench.test_runs import bench

if TYPE_CHECKING:
    from pathlib import Path


def test_copies(tmp_path: Path) -> None:
    rows = bench(tmp_path / "rows.json", "copy --block-bytes 8192 --blocks 50 --tensors 2 --against ,")
    assert [row["call"] for row in rows] == ["copy_blocks", "copy_cache"]
    assert {row["bytes"] for row in rows} == {8192 * 50 * 2}


def test_copies_of_registered_memory(tmp_path: Path) -> None:
    rows = bench(tmp_path / "rows.json", "copy --memory registered --block-bytes 8192 --blocks 5 --against ,")
    assert [row["tensors"] for row in rows] == [1, 64]


def test_swaps(tmp_path: Path) -> None:
    [row] = bench(tmp_path / "rows.json", "swap --block-bytes 8192 --blocks 50 --against ,")
    assert (row["call"], row["transport"], row["bytes"]) == ("swap_blocks", "local", 8192 * 50)


def test_plans(tmp_path: Path) -> None:
    [row] = bench(tmp_path / "rows.json", "plan --blocks 300 --tensors 5")
    assert (row["blocks"], row["tensors"], row["bytes"]) == (300, 5, 0)


def test_allocations(tmp_path: Path) -> None:
    [row] = bench(tmp_path / "rows.json", "alloc --tensors 7")
    assert (row["tensors"], row["bytes"]) == (7, 0)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_links(tmp_path: Path, transport: str) -> None:
    [row] = bench(tmp_path / "rows.json", f"link --transport {transport}")
    assert (row["transport"], row["bytes"]) == (transport, 0)


def test_registered_caches_are_not_consumed_so_they_are_left_out(tmp_path: Path) -> None:
    rows = bench(tmp_path / "rows.json", "latency --memory registered --transport inproc --blocks 2 --against ,")
    assert [row["memory"] for row in rows] == ["registered"]
    result = CliRunner().invoke(app, ["bench", "alloc", "--tensors", "2", "--passes", "1", "--against", "torch"])
    assert result.exit_code == 0
    assert "torch: " in result.output
