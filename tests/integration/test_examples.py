"""The examples as their user runs them: one command each, the bytes checked by the example, the exit status."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.linking import free_port
from tests.support.source import ROOT, run

pytestmark = pytest.mark.covers(
    "examples/both_sides_listen.py",
    "examples/cpp_shaped.py",
    "examples/grants.py",
    "examples/pull_blocks.py",
    "examples/pull_cache.py",
    "examples/pull_from_cache_to_blocks.py",
    "examples/push_blocks.py",
    "examples/push_cache.py",
    "examples/service.py",
    "examples/store.py",
    "examples/switch_role.py",
    "examples/transfer_cache_async.py",
    "examples/v1_prompt_decoder.py",
    "examples/xpyd.py",
)

EXAMPLES: Final = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("_"))

#: What some print that no example checks by itself.
PRINTED: Final = {
    "both_sides_listen": ("prompt: linked to cluster 2: ready", "decoder: linked to cluster 1: ready"),
    "grants": (
        "prompt: the first grant has ended: released by its readers; its blocks are free",
        "decoder: GrantEnded: released",
        "decoder: GrantEnded: revoked",
    ),
    "pull_blocks": (r"decoder: pulled blocks \[2, 3\] over (shm|cma|tcp)",),
    "pull_cache": ("decoder: a second pull of request 0: LLM_KV_CACHE_NOT_EXIST", "prompt: 0 bytes of caches are left"),
    "service": (
        "prefill-0: drained, nothing is left",
        "client: 120 right answers; prefill-0 was replaced meanwhile",
    ),
    "store": (
        "first: saved 4 blocks",
        "second: found 4 of 5 blocks",
        "store: 4 blocks, of 1 lookups' keys 4 found",
    ),
    "switch_role": ("first: a decoder now; it listens at None",),
    "v1_prompt_decoder": (
        r"decoder: pulled blocks \[0, 1\] to \[2, 3\] over (shm|tcp)",
        "prompt: 0 bytes of rows are left",
    ),
    "xpyd": (r"decoder-1: pulled from clusters \d+, \d+", r"decoder-2: pulled from clusters \d+, \d+"),
}
_ENVIRONMENT: Final = os.environ | {"PYTHONPATH": str(ROOT / "src"), "PYTHONUNBUFFERED": "1"}


def _run(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(sys.executable, "-W", "error", script, *arguments, env=_ENVIRONMENT)


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_every_example_ends_well_and_says_what_it_did(script: Path) -> None:
    done = _run(script)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    *lines, last = done.stdout.splitlines()
    assert last == f"{script.stem}: OK"
    missing = [text for text in PRINTED.get(script.stem, ()) if not any(re.fullmatch(text, line) for line in lines)]
    assert missing == [], done.stdout
    assert 0 < len(lines) <= 12, "a few lines"


def test_the_page_lists_every_example_and_no_other() -> None:
    listed = re.findall(r"^\| `python examples/(\w+)\.py", (ROOT / "examples/README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [script.stem for script in EXAMPLES]
    assert PRINTED.keys() <= {script.stem for script in EXAMPLES}


def test_the_roles_start_one_by_one_as_on_two_machines() -> None:
    meet = ["--meet", f"127.0.0.1:{free_port()}", "--role"]
    command = [sys.executable, "-W", "error", str(ROOT / "examples/push_blocks.py"), *meet]
    # The decoder first: it has to wait for the prompt.
    pipe = subprocess.PIPE
    ends = [
        subprocess.Popen([*command, role], stdout=pipe, stderr=pipe, text=True, env=_ENVIRONMENT)
        for role in ("decoder", "prompt")
    ]
    try:
        said = [end.communicate(timeout=60) for end in ends]
    finally:
        for end in ends:
            end.kill()
            end.communicate()
    assert [(end.returncode, error) for end, (_, error) in zip(ends, said, strict=True)] == [(0, "")] * 2
    assert said[0][0].startswith("decoder: pushed")
    assert said[1][0].startswith("prompt: blocks 0 and 2")
    alone = _run(EXAMPLES[0], "--role", "prompt")
    assert (alone.returncode, "--role needs --meet" in alone.stderr) == (2, True)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("raise SystemExit('nothing came')", "nothing came"),
        ("same('block 3', [1, 2, 3], [1, 2, 4])", "block 3: wrong bytes arrived"),
        ("import os; os.kill(os.getpid(), 9)", ""),
    ],
)
def test_a_role_that_fails_fails_the_example_and_ends_the_others(tmp_path: Path, body: str, complaint: str) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT / 'examples')!r})\n"
        "from _common import run_roles, same\n"
        "def waits(end):\n"
        "    end.exchange()\n"
        "def fails(end):\n"
        f"    {body}\n"
        "run_roles(__file__, {'waits': waits, 'fails': fails})\n"
    )
    done = _run(script)
    assert done.returncode == 1
    assert re.search(r"^wrong: FAILED: (waits|fails) ended with -?\d+$", done.stdout, re.MULTILINE), done.stdout
    assert complaint in done.stderr
