"""Small real runs of single pulls: idle, and beside a busy thread."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.bench.test_runs import bench

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_single_pulls_by_key_and_without(tmp_path: Path, transport: str) -> None:
    rows = bench(tmp_path / "rows.json", f"latency --transport {transport} --blocks 10 --against ,")
    assert [(row["call"], row["busy"]) for row in rows] == [
        (call, busy) for call in ("pull_blocks", "pull_cache by key") for busy in (None, "source", "destination")
    ]
    assert {row["transport"] for row in rows} == {transport}
    assert {row["bytes"] for row in rows} == {65536}
    assert {row["blocks"] for row in rows} == {10, 2}


def test_single_pulls_in_one_process(tmp_path: Path) -> None:
    rows = bench(tmp_path / "rows.json", "latency --transport inproc --blocks 10 --against ,")
    assert [(row["call"], row["transport"], row["busy"]) for row in rows] == [("pull_blocks", "inproc", None)]
