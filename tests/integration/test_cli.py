"""``llm-datadist`` as a user types it: help, version, completion, mistakes, Ctrl-C."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import pytest

typer = pytest.importorskip("typer")

from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole  # noqa: E402  (after the skip)
from llm_datadist.cli.app import app  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-m", "llm_datadist.cli")
APP = typer.main.get_command(app)


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments], check=False, capture_output=True, text=True, timeout=60, env=os.environ | environment
    )


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


@pytest.mark.parametrize(("path", "command"), [("", APP), *commands(APP)])
def test_each_help_has_examples_that_the_command_would_take(path: str, command: Any) -> None:
    done = run(*path.split(), "--help")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.partition("Examples:\n")[2].splitlines()
    assert lines, f"llm-datadist {path} --help has no examples (cli/usage.py)"
    for line in lines:
        assert line.startswith("    ")
        assert f"llm-datadist {path}".strip() in line
        parse(line)
    with pytest.raises(Exception, match="No such option"):
        parse(f"llm-datadist {path or 'demo'} x --nonsense")


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("path", ["", "keys", *(path for path, _ in commands(APP))])
def test_no_line_of_a_help_is_cut(path: str, columns: str) -> None:
    usage, *lines = run(*path.split(), "--help", COLUMNS=columns).stdout.splitlines()
    assert usage.startswith(f"Usage: llm-datadist {path}".rstrip())
    assert lines[0] == "", "the usage is one line"
    assert not [line for line in lines if line.endswith(("...", "…"))]


def test_version_is_that_of_the_distribution() -> None:
    for module in ("llm_datadist.cli", "llm_datadist"):
        done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True)
        assert (done.stdout, done.stderr) == (f"llm-datadist {version('open-datadist')}\n", "")


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
        ("--layers 5 --kv-heads 1 --head-dim 576 --dtype fp8 --tokens 7 --tensors-per-layer 1", 16, "1525.4%"),
    ],
)
def test_the_size_that_is_printed_is_what_the_cache_takes(line: str, tokens: int, rounding: str) -> None:
    done = run("size", *line.split())
    assert (done.returncode, done.stderr) == (0, "")
    *figures, desc, pool = done.stdout.splitlines()
    assert f"{rounding} by rounding" in figures[3]
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
        ("demo --transport pigeon", "llm-datadist demo: Invalid value for '--transport'"),
        ("demo --speed", "llm-datadist demo: No such option: --speed"),
        ("size --layers 1 --kv-heads 1 --head-dim 1 --tokens 1 --dtype f", "--dtype 'f' is none of bf16, fp16"),
        ("size --layers 1", "llm-datadist size: Missing option '--kv-heads'"),
        ("bench --passes 0", "--passes: 0 is outside [1, 1000] (try 'llm-datadist bench --help')"),
        ("keys new", "llm-datadist keys new: Missing argument"),
        ("keys show /nowhere", "No such file or directory: '/nowhere'"),
        ("keys show {folder}", "Is a directory"),
        ("keys new {folder}", "Is a directory"),
        ("keys new {folder}/ca --ca --cluster seven", "--cluster 'seven' is neither a cluster id nor *"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(line: str, said: str, tmp_path: Path) -> None:
    done = run(*line.format(folder=tmp_path).split())
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_without_the_package_for_keys_one_line_says_what_to_install(tmp_path: Path) -> None:
    script = "import sys; sys.modules['cryptography'] = None; from llm_datadist.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", script, "keys", "new", "--ca", str(tmp_path / "ca")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.endswith("pip install 'open-datadist[auth]'\n")
    assert len(done.stderr.splitlines()) == 1


def test_ctrl_c_is_one_line_and_status_130() -> None:
    command = [*COMMAND, "bench", "pull", "--blocks", "200", "--passes", "1000", "--against", ","]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, start_new_session=True) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("1 of 1"):
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to its workers as well
        said = process.communicate(timeout=60)
        assert (process.returncode, said) == (130, ("", "llm-datadist: interrupted\n"))


def test_a_reader_that_has_ended_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "bench", "--help"], check=False, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
