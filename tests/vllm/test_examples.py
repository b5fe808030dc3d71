"""The examples with vLLM as their user starts them, with vLLM's own connector: what ours is compared with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.support.moves import wait_until
from tests.vllm.conftest import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

    from servers import Servers

pytestmark = pytest.mark.timeout(900)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
        check=False,
        capture_output=True,
        text=True,
        timeout=880,
    )


def test_a_checkpoint_of_the_usual_scale_is_found_unfit(tmp_path: Path) -> None:
    script = "; ".join(
        (
            f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})",
            "from pathlib import Path",
            "from model import build, depends_on_early_tokens",
            f"folder = build(Path({str(tmp_path)!r}), initializer_range=0.02)",
            "print(depends_on_early_tokens(folder))",
        )
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=100)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_chat_completion_is_streamed_through_the_proxy() -> None:
    done = _run("chat.py", "nixl")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "as a single server answers; 5" in done.stdout.splitlines()[-1]


def test_five_cases_find_the_wrong_answers_of_nixl(tmp_path: Path) -> None:
    """A table that shows none for a connector says something only if it shows those that there are."""
    done = _run("five_cases.py", "nixl", "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads((tmp_path / "rows.json").read_text())["nixl"]
    verdicts = [row["verdict"] for row in rows]
    assert verdicts == ["ok", "ok", "WRONG ANSWER", "WRONG ANSWER", "clean error"]
    assert [row["status"] for row in rows] == [200, 200, 200, 200, 500]
    assert max(row["right"] for row in rows[2:]) <= 4


# --- the launcher: what it starts answers, what it ends is gone -------------------------------------------------------


def _group_lives(group: int) -> bool:
    """Return True while a process of the group runs; one that has only to be reaped by its parent has ended."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_a_killed_server_is_gone_with_all_its_processes_and_another_takes_its_port(servers: Servers) -> None:
    first = servers.start("ordinary").wait()
    assert _group_lives(first.process.pid)
    first.kill()
    assert not first.healthy()
    wait_until(lambda: not _group_lives(first.process.pid), 60)  # its memory is freed first
    second = servers.start("ordinary", name="second", port=first.port).wait()
    assert second.get("/v1/models")[0] == 200
    second.stop()
    wait_until(lambda: not _group_lives(second.process.pid), 60)


def test_a_server_that_cannot_start_says_why(servers: Servers) -> None:
    server = servers.start("ordinary", options=["--max-model-len", "nonsense"])
    with pytest.raises(RuntimeError, match=r"(?s)ordinary ended with \d+:.*nonsense"):
        server.wait()
