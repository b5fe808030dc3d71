"""``llm-datadist bench`` refuses by naming the option, the value and the range, and before anything has happened."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from llm_datadist.cli.app import app

if TYPE_CHECKING:
    from pathlib import Path


def bench(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["bench", *arguments])
    # Words may be cut into lines and framed.
    return result.exit_code, " ".join(result.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("fly", ["'fly'", "pull", "latency"]),
        ("pull --transport rdma", ["--transport", "'rdma'", "shm", "inproc"]),
        ("pull --memory gpu", ["--memory", "'gpu'", "registered"]),
        ("pull --block-bytes 0", ["--block-bytes", "0 is outside [1, 1073741824]"]),
        ("pull --block-bytes 1073741825", ["--block-bytes", "[1, 1073741824]"]),
        ("pull --block-bytes many", ["--block-bytes", "integer"]),
        ("pull --blocks -1", ["--blocks", "-1 is outside [1, 10000000]"]),
        ("pull --tensors 4097", ["--tensors", "4097 is outside [1, 4096]"]),
        ("pull --threads 0 --json a.json --plot .", ["--threads", "0 is outside [1, 1024]"]),
        ("pull --passes 0", ["--passes", "0 is outside [1, 1000]"]),
        ("pull --set-mib 0", ["--set-mib", "0 is outside [1, 1048576]"]),
        ("pull --timeout 3601", ["--timeout", "3601 is outside [1, 3600]"]),
        ("pull --against memcpy,ucx", ["--against", "'ucx' is unknown", "memcpy", "nixl", "mooncake", "torch"]),
        ("pull --against ours-shm", ["--against", "'ours-shm' is unknown"]),
        ("link --transport inproc", ["--transport", "'inproc' is one process", "shm, cma or tcp"]),
        ("copy --transport shm", ["--transport", "bench copy does not take it", "--block-bytes"]),
        ("plan --threads 2", ["--threads", "bench plan does not take it"]),
        ("link --blocks 3", ["--blocks", "bench link does not take it", "--transport"]),
        ("standard --blocks 3", ["--blocks", "bench standard does not take it", "--against, --threads"]),
        ("--passes 3", ["--passes", "bench standard does not take it"]),
        ("pull --json /nowhere/rows.json", ["--json", "/nowhere/rows.json cannot be written"]),
        ("pull --json /", ["--json", "is a folder"]),
        ("pull --plot /nowhere", ["--plot", "/nowhere", "does not exist"]),
        ("pull --plot /etc/hosts", ["--plot", "/etc/hosts", "is a file"]),
        ("pull --speed", ["--speed"]),
    ],
)
def test_a_bad_value_is_refused_and_leaves_no_file(
    arguments: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = bench(*arguments.split())
    assert status == 2
    for each in said:
        assert each in output
    assert "trying" not in output
    assert list(tmp_path.iterdir()) == []


def test_what_does_not_fit_leaves_nothing_to_run() -> None:
    size = ("--blocks", "10000000", "--block-bytes", str(1 << 30), "--against", "")
    for bench_, said in (("pull", ("40000000 GiB", "are available")), ("alloc", ())):
        status, output = bench(bench_, *size)
        assert status == 2
        for each in (*said, "nothing is left to run"):
            assert each in output
