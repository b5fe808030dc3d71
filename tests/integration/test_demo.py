"""The demo as its user runs it: a command, its output, its exit status, and nothing left running afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.demo.workload import Workload
from tests.support.ends import has_ended
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytest.importorskip("typer")

COMMAND = (sys.executable, "-m", "llm_datadist.cli")
# A forgotten close in the parent or in a role shows up on standard error.
ENVIRONMENT = os.environ | {"PYTHONWARNINGS": "always::ResourceWarning"}
STARTED = re.compile(r" (\w+) +process (\d+) started")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=100, env=ENVIRONMENT
    )


def processes(text: str) -> dict[str, int]:
    """Role -> process id, as the progress lines tell."""
    return {role: int(pid) for role, pid in STARTED.findall(text)}


def last_object(output: str) -> dict[str, Any]:
    result = json.loads(output.splitlines()[-1])
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize(("transport", "memory"), [("inproc", "pool"), ("tcp", "pool"), ("cma", "registered")])
def test_demo_moves_the_cache_and_the_tokens_are_equal(transport: str, memory: str) -> None:
    done = run("demo", "--json", "--transport", transport, "--memory", memory)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1
    result = last_object(done.stdout)
    workload = Workload()
    assert [result[each] for each in ("ok", "tokens_equal", "kv_equal", "error")] == [True, True, True, None]
    assert len(result["tokens"]) == workload.generate == 32
    assert result["blocks"] == workload.prompt_blocks
    assert result["bytes"] == workload.prompt_blocks * workload.num_tensors * workload.block_bytes
    assert result["seconds"] > 0
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)
    assert result["reason"]
    assert result["transport"] == transport
    roles = {"inproc": {"both"}}.get(transport, {"prompt", "decoder"})
    assert result["processes"] == len(roles)
    ran_and_ended(done.stderr, roles)
    assert "Warning" not in done.stderr


def test_demo_without_options_tells_a_human_what_moved_between_two_processes() -> None:
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    ran_and_ended(done.stdout, {"prompt", "decoder"})
    lines = done.stdout.splitlines()
    assert "Tokens equal." in lines
    summary = "\n".join(lines[lines.index("Tokens equal.") :])
    own = "prompt and decoder, each with its own LLMDataDist"
    for expected in ("all 32 equal", "63 blocks", "16 tensors", "shm: ", "GB/s", own):
        assert expected in summary


def ran_and_ended(progress: str, roles: set[str]) -> None:
    """The progress lines tell of the reference and the roles, and none of their processes is left."""
    started = processes(progress)
    assert set(started) == roles | {"reference"}
    assert all(has_ended(pid) for pid in started.values())
    for step in ("prefill", "published", "linked", "pulled", "generate"):
        assert step in progress


def test_unknown_transport_is_refused_with_the_known_ones_and_the_version_is_told() -> None:
    done = run("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("llm-datadist")
    done = run("demo", "--json", "--transport", "pigeon")
    assert done.returncode == 2
    assert done.stdout == ""
    for text in ("pigeon", "auto", "shm", "inproc"):
        assert text in done.stderr
    assert not processes(done.stderr)


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_without_the_extra_the_command_says_how_to_install_it(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from llm_datadist.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "demo"], check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "pip install 'open-datadist[cli]'" in done.stderr
    assert "Traceback" not in done.stderr


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A demo with --json whose roles have all started, in a process group of its own, and the processes by role."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        start_new_session=True,
    ) as demo:
        assert demo.stderr is not None
        text = ""
        while "decoder" not in (started := processes(text)):
            line = demo.stderr.readline()
            assert line, f"the decoder never started:\n{text}"
            text += line
        yield demo, started
        demo.kill()


@pytest.mark.parametrize("victim", ["prompt", "decoder", None])
def test_a_role_that_dies_and_an_interrupt_end_the_demo_and_leave_no_process(victim: str | None) -> None:
    with running() as (demo, started):
        if victim is None:
            os.killpg(demo.pid, signal.SIGINT)
        else:
            os.kill(started[victim], signal.SIGKILL)
        output, errors = demo.communicate(timeout=60)
    result = last_object(output)
    if victim is None:
        assert (demo.returncode, result["error"]) == (130, "interrupted"), errors
        assert "Traceback" not in errors
    else:
        assert (demo.returncode, result["ok"], result["tokens_equal"]) == (1, False, None), errors
        assert result["error"].startswith(f"{victim}: the process ended with status -9")
        assert result["error"] in errors
    assert all(has_ended(pid) for pid in started.values())


def test_killed_demo_takes_its_processes_with_it() -> None:
    with running() as (demo, started):
        demo.kill()
        demo.wait(60)
    wait_until(lambda: all(has_ended(pid) for pid in started.values()), 30)
