"""The examples with vLLM as their user starts them, with vLLM's own connector: what ours is compared with."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.vllm.conftest import EXAMPLES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(300)


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / command[0]), *command[1:]],
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
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
