"""Small real runs of every op, as a user starts them: what the rows say is consistent and complete."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from typer.testing import CliRunner

from llm_datadist.bench.rows import Row
from llm_datadist.cli.app import app
from tests.support.source import ROOT

if TYPE_CHECKING:
    from pathlib import Path

ISSUE_FIELDS = (
    *("op", "transport", "memory", "block_bytes", "blocks", "tensors", "threads", "bytes", "seconds_median"),
    *("gb_per_s", "limit", "limit_gb_per_s", "ratio_to_limit", "peer", "peer_gb_per_s", "ratio_to_peer"),
    *("cpu_seconds_per_gib", "verified"),
)


def bench(path: Path, arguments: str) -> list[dict[str, Any]]:
    """Run the bench; return its rows, each of which is what the documentation says a row is."""
    result = CliRunner().invoke(app, ["bench", *arguments.split(), "--passes", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    for row in rows:
        check(row)
    return rows


def check(row: dict[str, Any]) -> None:
    assert set(row) == set(Row.__struct_fields__)
    msgspec.convert(row, Row)
    assert row["verified"] is True
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


def test_rows_have_the_fields_that_were_agreed_on_and_the_documentation_lists_them_all() -> None:
    assert set(ISSUE_FIELDS) <= set(Row.__struct_fields__)
    page = (ROOT / "docs" / "performance.md").read_text()
    table = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    listed = [name for line in table for name in re.findall(r"`(\w+)`", line)]
    assert sorted(listed) == sorted(Row.__struct_fields__)


@pytest.mark.parametrize(
    ("arguments", "transport", "memory"),
    [
        ("pull", "shm", "pool"),
        ("pull --transport cma", "cma", "registered"),
        ("pull --transport tcp --memory registered", "tcp", "registered"),
        ("pull --transport inproc", "inproc", "pool"),
        ("push --transport shm --memory pool", "shm", "pool"),
        ("push --transport tcp", "tcp", "pool"),
    ],
)
def test_blocks_between_processes(tmp_path: Path, arguments: str, transport: str, memory: str) -> None:
    shape = "--block-bytes 8192 --blocks 64 --tensors 3 --threads 1"
    [row] = bench(tmp_path / "rows.json", f"{arguments} {shape} --against ,")
    assert (row["op"], row["transport"], row["memory"]) == (arguments.split(maxsplit=1)[0], transport, memory)
    assert (row["block_bytes"], row["blocks"], row["tensors"], row["threads"]) == (8192, 64, 3, 1)
    assert row["bytes"] == 8192 * 64 * 3
    assert row["passes"] == 2
    assert row["first_seconds"] > 0


def test_the_set_says_how_many_blocks(tmp_path: Path) -> None:
    [row] = bench(tmp_path / "rows.json", "pull --set-mib 2 --tensors 2 --against ,")
    assert (row["blocks"], row["block_bytes"], row["bytes"]) == (16, 65536, 2 << 20)
