"""The C++-shaped example as its user runs it: one command, both roles as processes, its lines, its exit status."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.source import ROOT


def test_the_cpp_shaped_example_moves_its_bytes_and_says_so() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / "cpp_shaped.py")],
        capture_output=True,
        text=True,
        timeout=90,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *lines, last = done.stdout.splitlines()
    assert last == "cpp_shaped: OK"
    # Each role prints its own lines in order; the two are not ordered against each other.
    assert [line for line in lines if line.startswith("prompt: ")] == [
        "prompt: pushed blocks [5, 6, 7] of 4 layers",
        "prompt: pushed row 0 to row 4, as one layer of 4 tensors",
    ]
    assert [line for line in lines if line.startswith("decoder: ")] == [
        "decoder: pulled blocks [1, 2] and copied them to [2, 3] and [6, 7]",
    ]
