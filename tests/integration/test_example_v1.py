"""The example of the older interface runs as its text says: one command, two processes, every byte checked."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.source import ROOT, SOURCE

EXAMPLE = ROOT / "examples" / "v1_prompt_decoder.py"


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLE), *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent), "PYTHONWARNINGS": "error"},
    )


def test_one_command_runs_prompt_and_decoder_and_checks_every_byte() -> None:
    done = run()
    assert done.returncode == 0, done.stderr
    for line in (
        "prompt: listening on ",
        "decoder: pull_blocks: ok",
        "decoder: copy_blocks: ok",
        "decoder: swap_blocks: ok",
        "decoder: pull_cache, copy_cache: ok",
        "decoder: every byte is right",
        "prompt: done",
    ):
        assert line in done.stdout


def test_a_decoder_that_finds_nobody_fails_with_the_reason() -> None:
    done = run("--role", "decoder", "--remote", "127.0.0.1:1")
    assert done.returncode != 0
    assert "LLM_LINK_FAILED" in done.stderr
