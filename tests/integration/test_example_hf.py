"""The example with transformers, in the environment of `make example-hf`: its output, and that it can fail."""

import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.support.source import ROOT, run

EXAMPLE: Final = ROOT / "examples/transformers/prefill_decode.py"
ENVIRONMENT: Final = ROOT / ".venv-full"


def _is_set_up() -> bool:
    """Ask make, which also knows whether the native code has changed since."""
    stamp = (ENVIRONMENT / ".installed").relative_to(ROOT)
    return run("make", "--question", stamp, cwd=ROOT).returncode == 0


pytestmark = [
    pytest.mark.covers("examples/transformers/prefill_decode.py"),
    pytest.mark.skipif(not _is_set_up(), reason="needs transformers in .venv-full: `make example-hf` sets it up"),
]


def _run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(ENVIRONMENT / "bin/python", script, *arguments)


def test_two_processes_make_the_tokens_of_one_over_both_transports() -> None:
    done = _run(EXAMPLE)
    assert (done.returncode, done.stderr) == (0, "")
    first, *lines, last = done.stdout.splitlines()
    assert re.fullmatch(r"one process: 24 tokens after 48: \[(\d+, ){23}\d+\]", first)
    nbytes = 2 * 4 * 4 * 48 * 16 * 4  # K and V, layers, heads, tokens, head size, float32
    for transport, said in zip(("shm", "tcp"), (lines[:3], lines[3:]), strict=True):
        assert said[:2] == [
            f"{transport}: linked over {transport}, pulled {nbytes} bytes of keys and values",
            f"{transport}: two processes make the same 24 tokens",
        ]
        assert re.fullmatch(rf"{transport}: control: from a zeroed cache, [1-9]\d* of them are others", said[2])
    assert (len(lines), last) == (6, "prefill_decode: OK")


@pytest.mark.parametrize(
    ("right", "wrong", "complaint"),
    [
        pytest.param("initializer_range=0.1,", "initializer_range=1e-4,", "FAILED: control: ", id="control"),
        pytest.param("view.copy_(tensor)", "view.copy_(-tensor)", "FAILED: two processes make other", id="bytes"),
        pytest.param(
            "dd.cache_manager.pull_cache(KEY, cache)",
            "raise RuntimeError('no pull')",
            "FAILED: the decode process ended without an answer",
            id="process",
        ),
    ],
)
def test_it_fails_where_something_is_wrong(tmp_path: Path, right: str, wrong: str, complaint: str) -> None:
    text = EXAMPLE.read_text()
    assert text.count(right) == 1
    script = tmp_path / EXAMPLE.name
    script.write_text(text.replace(right, wrong))
    done = _run(script, "--transport", "shm")
    assert (done.returncode, "OK" in done.stdout) == (1, False), done.stdout
    assert done.stderr.splitlines()[-1].startswith(complaint), done.stderr
