"""What `make wheels` has put into dist/, as its users install it: without a compiler, from the sdist, on arm64."""

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import IO, Final, cast

import pytest

import llm_datadist
from scripts import release
from tests.support.cpp_peer import run_roles
from tests.support.source import ROOT, run
from tests.unit import test_native_pool
from tests.wheels.arm64 import Arm64, Impossible, arm64

WISH: Final = os.environ.get("LLM_DATADIST_WHEELS")
pytestmark = [
    pytest.mark.skipif(WISH is None, reason="`make test-wheels` builds the wheels"),
    pytest.mark.timeout(900),  # compiles, and emulates
]

PULLS: Final = Path(__file__).with_name("pulls.py")
#: The sizes of tests/bench/test_contenders.py, where this processor's streaming stores are tested.
STREAMS: Final = """
import numpy as np
from llm_datadist.tools.bench.contenders.limits import RawBlocks, copy_raw, streaming_bits

def right(size):
    src, dst = np.random.default_rng(1).integers(0, 256, (2, 20, size), np.uint8)
    to, of = np.arange(19, 0, -2), np.arange(10)
    wanted = dst.copy()
    wanted[to] = src[of]
    copy_raw(RawBlocks.of([dst], to), RawBlocks.of([src], of), threads=3, streaming=True)
    return bool(np.array_equal(dst, wanted))

print(streaming_bits(), [right(size) for size in (1, 63, 256, 1000, 4096, 70_001)])
"""


def built(pattern: str) -> Path:
    (found,) = (ROOT / "dist").glob(pattern)
    return found


def install(folder: Path, *what: str) -> Path:
    """Return the folder of commands of a new environment with this in it, and pip's own path for programs only."""
    venv.create(folder, with_pip=True)
    commands = folder / "bin"
    pip = [str(commands / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, *what], check=True, cwd=folder, env=bare(commands))
    return commands


def bare(commands: Path) -> dict[str, str]:
    """Return an environment whose path has an interpreter and nothing else."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "CC", "CXX"))}
    return kept | {"PATH": str(commands)}


def typed(commands: str, folder: Path, path: Path) -> subprocess.CompletedProcess[str]:
    """Paste commands into a shell that finds programs in one folder only."""
    shell = ["/bin/sh", "-ec", commands]
    environment = bare(path) | {"PIP_ONLY_BINARY": ":all:"}
    return subprocess.run(shell, check=False, capture_output=True, text=True, cwd=folder, env=environment)


def test_the_recipe_for_a_wheel_works_pasted_where_there_is_no_compiler(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text().partition("## Without a compiler")[2]
    (recipe,) = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    for name in (".venv-wheels", "dist", *run("git", "ls-tree", "--name-only", "HEAD", cwd=ROOT).stdout.split()):
        (tmp_path / name).symlink_to(ROOT / name)
    (programs := tmp_path / "programs").mkdir()
    for name in (
        "make",
        "env",
        "find",
        "nproc",
        "python3",
        "ls",
        "uname",
    ):  # the wheels are there: `make test-wheels` has made them
        program = f"{sys.base_prefix}/bin/python3" if name == "python3" else shutil.which(name)
        (programs / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
        (programs / name).chmod(0o755)
    done = typed(recipe, tmp_path, programs)
    assert (done.returncode, "Tokens equal." in done.stdout) == (0, True), done.stdout + done.stderr


def test_the_installation_of_the_readme_works_pasted_in_a_checkout(tmp_path: Path) -> None:
    """The same commands as in the tutorial and on the front page: tests/test_tutorial.py compares them."""
    with tarfile.open(sdist := built("*.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    (recipe,) = re.findall(
        r"^```\n(python3 -m venv .*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL
    )
    path = f"{sys.base_prefix}/bin{os.pathsep}{os.environ['PATH']}"
    checkout = tmp_path / sdist.name.removesuffix(".tar.gz")
    done = run("bash", "-ec", f"{recipe}llm-datadist demo", cwd=checkout, env=os.environ | {"PATH": path}, timeout=None)
    assert (done.returncode, "Tokens equal." in done.stdout) == (0, True), done.stdout + done.stderr


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands of an environment that has the wheel and none of its extras."""
    return install(tmp_path_factory.mktemp("plain") / "venv", "--only-binary=:all:", str(built("*x86_64.whl")))


def test_threads_in_the_wheels_native_code_do_not_crash_the_exit(plain: Path, tmp_path: Path) -> None:
    """The wheel has a C++ library of its own, so the test of the module that was compiled here says nothing of it."""
    program = [str(plain / "python"), "-c", test_native_pool.EXIT]
    ended = subprocess.run(program, check=False, capture_output=True, text=True, cwd=tmp_path, env=bare(plain))
    assert (ended.returncode, ended.stderr) == (0, "")


def test_without_its_extra_the_command_says_what_installs_it(plain: Path, tmp_path: Path) -> None:
    said = typed("llm-datadist --help", tmp_path, plain)
    assert (said.returncode, said.stdout) == (2, "")
    needs, colon, mend = said.stderr.partition(": ")
    assert (needs.split()[:2], colon) == (["llm-datadist", "needs"], ": ")
    done = typed(f"{mend}llm-datadist --help", tmp_path, plain)
    assert done.returncode == 0, done.stderr


def test_a_program_in_cpp_compiles_and_moves_bytes_with_the_installed_wheel_alone(plain: Path, tmp_path: Path) -> None:
    (folder,) = plain.parent.glob("lib/python3*/site-packages/llm_datadist/cpp")
    options = f"-I{folder}/include -L{folder}/lib -Wl,-rpath,{folder}/lib -lllm_datadist"
    found = run("g++", str(ROOT / "examples/cpp/roles.cpp"), *options.split(), "-o", "roles", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    run_roles(tmp_path / "roles", bare(plain))


def test_a_wheel_builds_from_the_sdist_and_holds_the_same_files(tmp_path: Path) -> None:
    wheel = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
    subprocess.run([*wheel, "--wheel-dir", str(tmp_path), str(built("*.tar.gz"))], check=True, cwd=tmp_path)
    (made,) = tmp_path.glob("*.whl")
    assert files(made) == files(built("*x86_64.whl"))


@pytest.mark.parametrize("pattern", ["*x86_64.whl", "*aarch64.whl", "*.tar.gz"])
def test_the_metadata_is_that_of_this_tree(pattern: str) -> None:
    file = built(pattern)
    if file.suffix == ".whl":
        archive = zipfile.ZipFile(file)
        data = archive.read(next(each for each in archive.namelist() if each.endswith(".dist-info/METADATA")))
    else:
        with tarfile.open(file) as sdist:
            data = cast("IO[bytes]", sdist.extractfile(f"{file.name.removesuffix('.tar.gz')}/PKG-INFO")).read()
    found, project = message_from_bytes(data), tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    version, extras = llm_datadist.__version__, project["optional-dependencies"]
    assert re.split(r"-|\.tar", file.name)[:2] == ["open_datadist", version]
    one = {"Name": "open-datadist", "Version": version, "License-Expression": "Apache-2.0", "License-File": "LICENSE"}
    one |= {"Requires-Python": project["requires-python"], "Summary": project["description"]}
    one |= {"Author": project["authors"][0]["name"], "Description-Content-Type": "text/markdown"}
    assert {name: found.get_all(name) for name in one} == {name: [value] for name, value in one.items()}
    assert found.get_all("Project-URL") is None, "no page of the project is public"
    assert (found.get_all("Classifier"), found["Keywords"].split(",")) == (project["classifiers"], project["keywords"])
    needed = [each.partition(";") for each in found.get_all("Requires-Dist", [])]
    assert ["".join(each) for each in needed if "extra ==" not in each[2]] == project["dependencies"]
    assert sorted(found.get_all("Provides-Extra", [])) == sorted(extras)
    assert sorted(each[0].strip() for each in needed if "extra ==" in each[2]) == sorted(
        each for some in extras.values() for each in some
    )
    assert cast(bytes, found.get_payload(decode=True)).decode().strip() == (ROOT / "README.md").read_text().strip()


@pytest.mark.parametrize("processor", ["x86_64", "aarch64"])
def test_nothing_that_was_made_is_refused_by_the_check_of_a_release(processor: str) -> None:
    path = built(f"*{processor}.whl")
    name = release.WHEEL.fullmatch(path.name)
    assert name is not None
    assert [*release.wheel(path, name, ROOT), *release.sdist(built("*.tar.gz"), ROOT)] == []


def files(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    return {name for name in names if name.startswith("llm_datadist") and not name.endswith("/")}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Arm64:
    try:
        return arm64(built("*aarch64.whl"), tmp_path_factory.mktemp("site"))
    except Impossible as error:
        if WISH == "required":
            pytest.fail(f"wheels are required: {error}")
        pytest.skip(str(error))


def pulled(machine: Arm64, folder: Path, transport: str, memory: str) -> dict[str, object]:
    """Return what a decoder says that pulled from a prompt, each an emulated process (inproc: one for both)."""
    program = str(shutil.copy(PULLS, folder))
    pipe = subprocess.PIPE

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = machine.command("-W", "error", program, *arguments)
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder)

    def end(process: subprocess.Popen[str]) -> str:
        printed, complaints = process.communicate(timeout=300)
        assert (process.returncode, complaints) == (0, "")
        return printed

    if transport == "inproc":
        result = end(start("both", transport, memory))
    else:
        prompt = start("prompt", transport, memory)
        try:
            assert prompt.stdout is not None
            port = prompt.stdout.readline().strip()
            assert port, prompt.communicate()
            result = end(start("decoder", transport, memory, port))
            end(prompt)
        finally:
            prompt.kill()
    found = json.loads(result)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("transport", "memory", "by"),
    [
        ("inproc", "pool", {"transport": "inproc"}),
        ("shm", "pool", {"transport": "shm"}),
        ("tcp", "pool", {"transport": "tcp"}),
        ("auto", "registered", {"transport": "shm", "private_transport": "tcp"}),  # qemu has no cma
    ],
)
def test_aarch64_wheel_pulls_and_every_byte_is_right(
    machine: Arm64, tmp_path: Path, transport: str, memory: str, by: dict[str, str]
) -> None:
    found = pulled(machine, tmp_path, transport, memory)
    assert {name: found[name] for name in by} == by, found["explanation"]
    assert (found["machine"], found["wrong_bytes"]) == ("aarch64", 0)
    assert isinstance(found["moved_bytes"], int)
    assert found["moved_bytes"] > 6_000_000


def test_aarch64_raw_limit_streams_every_byte_and_no_other(machine: Arm64) -> None:
    done = subprocess.run(machine.command("-W", "error", "-c", STREAMS), check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "256 [True, True, True, True, True, True]\n")
