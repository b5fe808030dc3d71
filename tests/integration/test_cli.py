"""``llm-datadist`` as a user types it: help, version, completion, mistakes; the demo, which leaves nothing running."""

import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

typer = pytest.importorskip("typer")

from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole  # noqa: E402  (after the skip)
from llm_datadist.tools.cli.app import app  # noqa: E402
from llm_datadist.tools.demo.model import DemoWorkload  # noqa: E402
from tests.support import fakecuda, source  # noqa: E402
from tests.support.authority import secret_file  # noqa: E402
from tests.support.ends import has_ended  # noqa: E402
from tests.support.moves import wait_until  # noqa: E402
from tests.support.source import run_here  # noqa: E402

COMMAND = (sys.executable, "-m", "llm_datadist")
APP = typer.main.get_command(app)
LEAKS = "always::ResourceWarning"  # a forgotten close in the parent or in a role shows up on standard error


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return source.run(*COMMAND, *arguments, env=os.environ | environment)


def commands(command: Any, *path: str) -> Iterator[tuple[str, Any]]:
    """Yield every command that does something by itself, with what is typed for it."""
    if not hasattr(command, "commands"):
        yield " ".join(path), command
        return
    for name, each in command.commands.items():
        yield from commands(each, *path, name)


def parse(line: str) -> None:
    """Parse a command line as the command would, and run nothing."""
    program, *words = [word for word in shlex.split(line) if not word.startswith("LLM_DATADIST_")]
    assert program == "llm-datadist"
    command: Any = APP
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    command.make_context(program, words, resilient_parsing=words == ["--help"])


@pytest.mark.parametrize("path", ["", "keys", *(path for path, _ in commands(APP))])
def test_no_line_of_a_help_is_cut_and_its_examples_are_what_the_command_would_take(path: str) -> None:
    for columns in ("80", "200"):
        done = run_here(*path.split(), "--help", COLUMNS=columns)
        assert (done.returncode, done.stderr) == (0, "")
        usage, *lines = done.stdout.splitlines()
        assert usage.startswith(f"Usage: llm-datadist {path}".rstrip())
        assert lines[0] == "", "the usage is one line"
        assert not [line for line in lines if line.endswith(("...", "…"))]
    if path == "keys":  # it does nothing by itself
        return
    lines = run_here(*path.split(), "--help").stdout.partition("Examples:\n")[2].splitlines()
    assert lines, f"llm-datadist {path} --help has no examples (tools/cli/usage.py)"
    for line in lines:
        assert line.startswith("    ")
        assert f"llm-datadist {path}".strip() in line
        parse(line)
    with pytest.raises(Exception, match="No such option"):
        parse(f"llm-datadist {path or 'demo'} x --nonsense")


def test_version_is_that_of_the_distribution() -> None:
    done = source.run(*COMMAND, "--version")
    printed = f"llm-datadist {version('open-datadist')}\n"
    assert (done.returncode, done.stdout, done.stderr) == (0, printed, "")


@pytest.mark.parametrize(
    ("line", "tokens", "rounding"),
    [
        ("--layers 4 --kv-heads 8 --head-dim 128 --dtype bf16 --tokens 1024", 1024, "0.0%"),
        ("--layers 3 --kv-heads 8 --head-dim 128 --dtype fp16 --tokens 100", 112, "28.0%"),
        (
            "--layers 3 --kv-heads 8 --head-dim 128 --dtype fp32 --tokens 100 --page-shift 10 --block-size 25",
            100,
            "0.0%",
        ),
        ("--layers 4 --kv-heads 10 --head-dim 128 --tokens 1024 --devices 4", 1024, "0.0%"),
        ("--layers 5 --kv-heads 1 --head-dim 576 --dtype fp8 --tokens 7 --tensors-per-layer 1", 16, "1525.4%"),
    ],
)
def test_the_size_that_is_printed_is_what_the_cache_takes(line: str, tokens: int, rounding: str) -> None:
    done = run_here("size", *line.split())
    assert (done.returncode, done.stderr) == (0, "")
    *figures, desc, pool = done.stdout.splitlines()
    assert f"{rounding} by rounding" in figures[3]
    all_devices = "in all     25165824 bytes on 4 devices; all else here is for one"
    assert (all_devices in figures) is ("--devices" in line)
    config = LLMConfig()
    config.device_id, config.enable_cache_manager = 0, True
    known: dict[str, Any] = {"CacheDesc": CacheDesc, "DataType": DataType, "config": config}
    exec("\n".join([desc, pool]), known)
    assert known["desc"].shape[0] * known["desc"].shape[1] == tokens
    end = LLMDataDist(LLMRole.PROMPT, 1)
    end.init(config.generate_options())
    try:
        (empty,) = end.statistics().pools
        cache = end.cache_manager.allocate_blocks_cache(known["desc"])
        (full,) = end.statistics().pools
        assert (empty.capacity_bytes, full.free_bytes) == (full.used_bytes, 0)
        end.cache_manager.deallocate_blocks_cache(cache)
    finally:
        end.finalize()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_for_shells(shell: str) -> None:
    script = run(_LLM_DATADIST_COMPLETE=f"source_{shell}")
    assert script.returncode == 0
    assert "_LLM_DATADIST_COMPLETE" in script.stdout
    words = {"COMP_WORDS": "llm-datadist be", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "llm-datadist be"}
    action = {"_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = run(**words, **action, _LLM_DATADIST_COMPLETE=f"complete_{shell}")
    assert "bench" in done.stdout
    assert "demo" not in done.stdout


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fly", "llm-datadist: No such command 'fly' (try 'llm-datadist --help')"),
        ("demo --transport pigeon", "'pigeon' is not one of 'auto', 'shm', 'cma', 'tcp', 'nixl', 'inproc'"),
        ("demo --speed", "llm-datadist demo: No such option: --speed"),
        ("size --layers 1 --kv-heads 1 --head-dim 1 --tokens 1 --dtype f", "--dtype 'f' is none of bf16, fp16"),
        ("size --layers 1", "llm-datadist size: Missing option '--kv-heads'"),
        ("doctor --peer [fe80::1%lo]:26000", "'[fe80::1%lo]:26000' is not of the form HOST:PORT; a scope (%) is not"),
        ("bench --passes 0", "--passes: 0 is outside [1, 1000] (try 'llm-datadist bench --help')"),
        ("keys new", "llm-datadist keys new: Missing argument"),
        ("keys show /nowhere", "No such file or directory: '/nowhere'"),
        ("keys show {folder}", "Is a directory"),
        ("keys new {folder}", "Is a directory"),
        (
            "keys new {folder}/two --id today",
            "/two has a secret 'today' already, or that is not one word in ASCII: choose",
        ),
        ("keys new {folder}/two --id \xe4", "that is not one word in ASCII"),
        ("keys new {folder}/ca --ca --cluster seven", "--cluster 'seven' is neither a cluster id nor *"),
        ("keys new {folder}/ca --ca --cluster 1 --cluster 01", "--cluster '01' is neither a cluster id nor *"),
        ("keys new {folder}/ca --cluster 1", "--cluster is of certificates: give --ca, too"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(line: str, said: str, tmp_path: Path) -> None:
    secret_file(tmp_path / "two", today=b"s" * 32)
    done = (run if line == "fly" else run_here)(*line.format(folder=tmp_path).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert [each.name for each in tmp_path.iterdir()] == ["two"]


@pytest.mark.parametrize(
    "line", ["demo --transport inproc", "bench pull --blocks 8 --against , --passes 1", "top --connect far --once"]
)
def test_without_a_temporary_folder_one_line_says_which_and_what_to_set(line: str, tmp_path: Path) -> None:
    nowhere = f"import sys, tempfile; tempfile._candidate_tempdir_list = lambda: [{str(tmp_path / 'none')!r}]; "
    script = nowhere + "from llm_datadist.tools.cli import main; sys.exit(main())"
    done = source.run(sys.executable, "-c", script, *line.split())
    assert done.returncode in (1, 2)
    wrong = f"No usable temporary directory found in [{str(tmp_path / 'none')!r}]; set TMPDIR to a folder that this "
    assert wrong in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("missing", "line", "extra"),
    [
        ("typer", "demo", "cli"),
        ("rich", "demo", "cli"),
        ("cryptography", "keys new --ca {folder}/ca", "auth"),
        ("prometheus_client", "store --memory 1MiB --listen 127.0.0.1:0 --metrics 0", "metrics"),
    ],
)
def test_without_a_package_one_line_says_what_to_install(missing: str, line: str, extra: str, tmp_path: Path) -> None:
    script = f"import sys; sys.modules[{missing!r}] = None; from llm_datadist.tools.cli import main; sys.exit(main())"
    done = source.run(sys.executable, "-c", script, *line.format(folder=tmp_path).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith(f"pip install 'open-datadist[{extra}]'\n")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("line", ["doctor", "demo", "bench pull --blocks 8 --against , --passes 1"])
def test_a_module_in_the_current_folder_is_not_run(line: str, tmp_path: Path) -> None:
    """Regression: children that began with -m found it."""
    (tmp_path / "msgspec.py").write_text("open('run', 'w')\nraise SystemExit(3)\n")
    done = source.run(sys.executable, "-P", "-m", "llm_datadist", *line.split(), cwd=tmp_path)
    assert done.returncode in ((0, 1, 2) if line == "doctor" else (0,)), done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["msgspec.py"]


def test_a_reader_that_has_ended_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "bench", "--help"], check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# --- the demo ---------------------------------------------------------------------------------------------------------
def processes(text: str) -> dict[str, int]:
    """Role -> process id, as the progress lines tell."""
    return {role: int(pid) for role, pid in re.findall(r" (\w+) +process (\d+) started", text)}


@pytest.mark.parametrize(
    ("transport", "memory", "gpu"),
    [("inproc", "pool", False), ("cma", "registered", False), ("shm", "pool", True)],
    indirect=["gpu"],
)
def test_demo_moves_the_cache_and_the_tokens_are_equal(transport: str, memory: str, gpu: bool) -> None:
    device = ("cuda", "cuda:0 (Fake GPU 0)") if gpu else ("host", "host")
    settings = {"PYTHONWARNINGS": LEAKS} | (fakecuda.environment() if gpu else {})
    options = ("--transport", transport, "--memory", memory, "--device", device[0])
    done = run("demo", "--json", *options, **settings)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    workload = DemoWorkload()
    assert [result[each] for each in ("ok", "tokens_equal", "kv_equal", "error")] == [True, True, True, None]
    assert len(result["tokens"]) == workload.generate == 32
    assert result["blocks"] == (blocks := -(-workload.prompt_tokens // workload.block_tokens))
    tensors, _, *block = workload.shape
    assert result["bytes"] == blocks * tensors * math.prod(block) * 4
    assert result["seconds"] > 0
    assert result["gb_per_s"] == pytest.approx(result["bytes"] / result["seconds"] / 1e9)
    assert result["reason"]
    assert (result["transport"], result["device"]) == (transport, device[1])
    roles = {"inproc": {"both"}}.get(transport, {"prompt", "decoder"})
    assert result["processes"] == len(roles)
    ran_and_ended(done.stderr, roles)
    assert "Warning" not in done.stderr


def test_demo_without_options_tells_a_human_what_moved_between_two_processes() -> None:
    done = run("demo", PYTHONWARNINGS=LEAKS)
    assert (done.returncode, done.stderr) == (0, "")
    ran_and_ended(done.stdout, {"prompt", "decoder"})
    lines = done.stdout.splitlines()
    assert "Tokens equal." in lines
    summary = "\n".join(lines[lines.index("Tokens equal.") :])
    own = "prompt and decoder, each with its own LLMDataDist"
    for expected in ("all 32 equal", "63 blocks", "16 tensors", "shm: ", "GB/s", own):
        assert expected in summary
    assert max(map(len, summary.splitlines())) <= 80


def test_demo_in_a_gpu_says_that_there_is_no_driver_and_refuses_registered_memory() -> None:
    done = run("demo", "--json", "--device", "cuda", LD_LIBRARY_PATH="")
    assert done.returncode == 1
    assert "libcuda.so.1: cannot open shared object file" in json.loads(done.stdout)["error"]
    done = run_here("demo", "--device", "cuda", "--memory", "registered")
    assert (done.returncode, "--memory registered is host memory" in done.stderr) == (2, True)


def ran_and_ended(progress: str, roles: set[str]) -> None:
    """The progress lines tell of the reference and the roles, and none of their processes is left."""
    started = processes(progress)
    assert set(started) == roles | {"reference"}
    assert all(has_ended(pid) for pid in started.values())
    for step in ("prefill", "published", "linked", "pulled", "generated"):
        assert step in progress


@contextmanager
def running() -> Iterator[tuple[subprocess.Popen[str], dict[str, int]]]:
    """A demo with --json whose roles have all started, in a process group of its own, and the processes by role."""
    with subprocess.Popen(
        [*COMMAND, "demo", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": LEAKS},
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


@pytest.mark.parametrize("victim", ["prompt", "demo", None])
def test_a_role_that_dies_and_an_interrupt_end_the_demo_and_leave_no_process(victim: str | None) -> None:
    """Regression: children inherited an ignored SIGINT under ``make test &``."""
    with running() as (demo, started):
        if victim is None:
            os.killpg(demo.pid, signal.SIGINT)
        else:
            os.kill((started | {"demo": demo.pid})[victim], signal.SIGKILL)
        output, errors = demo.communicate(timeout=60)
    if victim == "demo":
        wait_until(lambda: all(has_ended(pid) for pid in started.values()), 30)
        return
    result = json.loads(output.splitlines()[-1])
    if victim is None:
        assert (demo.returncode, result["error"]) == (130, "interrupted"), errors
        assert "Traceback" not in errors
    else:
        assert (demo.returncode, result["ok"], result["tokens_equal"]) == (1, False, None), errors
        assert result["error"].startswith(f"{victim}: the process ended with status -9")
        assert result["error"] in errors
    assert all(has_ended(pid) for pid in started.values())
