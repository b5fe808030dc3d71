"""Each block of commands on a page for users runs as a reader pastes it: here, or in a test that the table names.

What runs here has a network of its own that ends at loopback, /etc/datadist in the test's folder, and stand-ins for
ssh, scp and vLLM.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pytest

from llm_datadist.config import INSECURE_VARIABLE
from tests.doctor.hosts import needs
from tests.support.source import ROOT, SOURCE, run

_FOLDERS: Final = ("docs", "deploy")
PAGES: Final = [
    *("README.md", "CONTRIBUTING.md", "examples/README.md"),
    *sorted(each.relative_to(ROOT).as_posix() for folder in _FOLDERS for each in ROOT.glob(f"{folder}/*.md")),
]
_FENCE: Final = re.compile(r"^( *)```(.*)\n((?s:.*?))^\1```$", re.MULTILINE)
#: Fences of these languages, or of none, hold commands.
_SHELLS: Final = ("", "console", "sh", "bash", "shell")


@dataclass(frozen=True)
class Paste:
    """A block that runs here, in the order of its lines, after ``before``.

    A command that begins as a key of ``serving`` runs until the block's end; the next one begins once it has said the
    value. With None it ends by itself. ``screen`` is the key that gets a terminal.
    """

    serving: Mapping[str, str | None] = field(default_factory=dict)
    before: str = ":"
    screen: str = ""


_ADDRESSES: Final = "for each in 1 2 7; do ip address add 10.0.0.$each/32 dev lo; done"
_SERVICE: Final = f"""{_ADDRESSES}
llm-datadist keys new /etc/datadist/secrets
llm-datadist store --memory 1MiB --listen 10.0.0.7:26000 --cluster-id 7 --secrets /etc/datadist/secrets >service 2>&1 &
until grep -q 'store at' service; do sleep 0.1; done"""
_PROMPT: Final = "LLM_DATADIST_INSECURE=1 python examples/pull_blocks.py --role prompt"
_STORE: Final = {"llm-datadist store": "store at 127.0.0.1:26100"}
_VLLM: Final = {"vllm serve": "serving"}
_TERMINAL: Final = "python -c 'import pty, sys; pty.spawn(sys.argv[1:])' "
_TOP: Final = {
    "llm-datadist top --once": None,
    "llm-datadist top --json": '"instances"',
    "llm-datadist top": "of this user",
}

_INSTALLED: Final = "tests/wheels/test_wheels.py::test_the_installation_of_the_readme_works_pasted_in_a_checkout"
_THREE: Final = "tests/test_docs.py::test_the_three_commands_of_the_readme_print_what_it_says"
_SECURITY: Final = "tests/test_docs.py::test_the_commands_of_the_page_about_security_run_pasted"
_TUTORIAL: Final = "tests/test_tutorial.py::test_every_file_and_command_of_the_tutorial_works_in_two_terminals"

#: What runs each block of a page, in their order: this file, a test, or nothing, for one of the reasons.
PLACES: Final[dict[str, list[Paste | str]]] = {
    "README.md": [_INSTALLED, _THREE, _THREE, _THREE],
    "examples/README.md": [Paste({_PROMPT: ""}, _ADDRESSES)],
    "docs/cpp.md": ["tests/cpp_library/test_examples.py::test_roles_pull_copy_push_and_change_places_in_two_processes"],
    "docs/dependencies.md": [
        "tests/wheels/test_wheels.py::test_the_recipe_for_a_wheel_works_pasted_where_there_is_no_compiler"
    ],
    "docs/doctor.md": [Paste({"llm-datadist doctor --serve": "serving at"}, _SERVICE)],
    "docs/howto-hosts.md": [Paste(), "needs docker, and root", "needs kubectl"],
    "docs/howto-pools.md": ["tests/test_docs.py::test_the_page_about_pools_shows_what_the_command_prints"],
    "docs/howto-vllm-store.md": [Paste(_STORE | _VLLM)],
    "docs/index.md": [_INSTALLED],
    "docs/nixl.md": ["needs a network: NIXL is no dependency of the tests (make test-nixl runs them with it)"],
    "docs/security.md": [_SECURITY, _SECURITY],
    "docs/store.md": [Paste(_STORE)],
    "docs/top.md": [Paste(_TOP, screen="llm-datadist top")],
    "docs/tutorial.md": [_INSTALLED, *[_TUTORIAL] * 7],
    "docs/vllm.md": [Paste(_VLLM | {"python examples/vllm/proxy.py": "http://127.0.0.1:8000"})],
}
_REASONS: Final = r"needs (root|an engine|a network|docker|kubectl|a GPU)\b"

_STAND_INS: Final = {
    "ssh": """#!/bin/sh
case "$1" in -*) while [ "$1" != -- ]; do shift; done; shift;; esac
shift
exec sh -c "$*"
""",
    "scp": """#!/bin/sh
there="${3#other-host:}"
test "$1 $3" = "-p other-host:$2" && cp -p "$2" "$(dirname "$there")/copied"
""",
    "vllm": """#!/bin/sh
printf '%s\\0' "$@" >> asked
echo serving
exec sleep 60
""",
}


def blocks(page: str) -> list[str]:
    return [body for _, language, body in _FENCE.findall((ROOT / page).read_text()) if language in _SHELLS]


def commands(block: str) -> Iterator[str]:
    """Yield the commands of a block, without prompts, comments and a last "&"."""
    command = ""
    for line in block.splitlines():
        command += ("\n" if command else "") + re.sub(r"^(?:\w+)?\$ +", "", line)
        try:
            shlex.split(command, comments=True)
        except ValueError:  # a quotation goes on
            continue
        yield re.sub(r"\s+#\s.*$|\s+&$", "", command)
        command = ""


def script(block: str, paste: Paste) -> str:
    """Return Bash that runs a block, and fails with the first command that does."""
    lines = ["set -eu", "trap 'cat said*' EXIT", "touch said", "ip link set lo up", paste.before]
    for number, command in enumerate(commands(block)):
        begin = next((each for each in paste.serving if command.startswith(each)), None)
        says = None if begin is None else paste.serving[begin]
        if says is None:
            # A warning of this host has status 1, and is none about the command.
            lines.append(command + (" || test $? = 1" if command.startswith("llm-datadist doctor") else ""))
            continue
        lines.append(f"{_TERMINAL if begin == paste.screen else ''}{command} >said{number} 2>&1 & last=$!")
        lines += [f"until grep -aq {shlex.quote(says)} said{number}; do kill -0 $last; sleep 0.1; done"] * bool(says)
    return "\n".join(lines)


@pytest.mark.parametrize("page", PAGES)
def test_each_block_of_commands_runs_here_or_in_a_test_or_there_is_a_reason_why_not(page: str) -> None:
    places = PLACES.get(page, [])
    assert len(places) == len(blocks(page))
    for place in [each for each in places if isinstance(each, str) and not re.match(_REASONS, each)]:
        file, _, test = place.partition("::")
        assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), place


def test_the_table_names_no_page_that_is_not_there() -> None:
    assert PLACES.keys() <= set(PAGES)


_RUN: Final = [
    (page, at) for page, places in PLACES.items() for at, each in enumerate(places) if isinstance(each, Paste)
]


@pytest.mark.parametrize(("page", "at"), _RUN, ids=lambda each: each if isinstance(each, str) else "")
def test_a_block_of_commands_runs_pasted(page: str, at: int, tmp_path: Path) -> None:
    place = PLACES[page][at]
    assert isinstance(place, Paste)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (programs := tmp_path / "programs").mkdir()
    for name, text in _STAND_INS.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), os.path.dirname(sys.executable), os.environ["PATH"], "/usr/sbin"])
    environment = {name: value for name, value in os.environ.items() if name != INSECURE_VARIABLE}
    environment |= {"PATH": path, "TERM": "xterm", "PYTHONUNBUFFERED": "1"}  # what is printed is waited for in files
    environment |= {
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
    }  # what is installed suffices; without a network pip retries
    text = script(blocks(page)[at], place).replace("/etc/datadist", f"{tmp_path}/etc/datadist")
    # Any machine has the smaller one.
    text = text.replace("/opt/venv/bin", os.path.dirname(sys.executable)).replace("16GiB", "64MiB")
    # What runs in the background ends with the shell, however that ends: it is the first of its pid namespace.
    alone = needs("unshare", "-n" if os.geteuid() == 0 else "-rn", "--pid", "--mount-proc", "--fork", "--kill-child")
    done = run(*alone, "bash", "-c", text, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL)
    assert done.returncode == 0, f"{text}\n{done.stdout}{done.stderr}"
    asked = (tmp_path / "asked").read_text().split("\0") if "vllm serve" in text else []
    connectors = [json.loads(word) for word in asked if word.startswith("{")]
    assert len(connectors) == text.count("vllm serve")
    for each in connectors:
        package = (SOURCE.parent / each["kv_connector_module_path"].replace(".", "/") / "__init__.py").read_text()
        assert f'"{each["kv_connector"]}"' in package


def test_make_demo_installs_what_the_demo_of_a_page_needs() -> None:
    """Regression: the demo with --secure had no package for it."""
    assert 'demo DEMO="--transport tcp --secure"' in (ROOT / "docs" / "howto-hosts.md").read_text()
    (program,) = re.findall(r"^NEEDS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = [
        *project["dependencies"],
        *(each for name in ("auth", "cli") for each in project["optional-dependencies"][name]),
    ]
    assert run(sys.executable, "-c", program.replace("\\\n\t", ""), cwd=ROOT).stdout.split() == needed
