"""The documentation is held to the code: what it names exists, what it lists is complete, its example runs."""

from __future__ import annotations

import builtins
import os
import re
import socket
import subprocess
import sys
import tomllib
from functools import cache
from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import config, errors
from llm_datadist._cache import registry
from llm_datadist._links import link
from tests.support.source import PACKAGE, ROOT, SOURCE, defined_names, modules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from enum import Enum
    from pathlib import Path

PAGES: Final = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
README: Final = ROOT / "README.md"
COVERAGE: Final = ROOT / "docs" / "coverage.md"
ARCHITECTURE: Final = ROOT / "docs" / "architecture.md"

_PATH: Final = r"\.?[\w-][\w./-]*"
#: `file.py`, `folder/`, with `:name` or `:Class.name` behind a module.
_FILE: Final = re.compile(rf"^({_PATH}(?:\.(?:py|pyi|cpp|hpp|md|toml)|/))(?::([\w.]+))?$")
_MEMBER: Final = re.compile(r"^([A-Z]\w*)\.(\w+)$")
_CLASS: Final = re.compile(r"^[A-Z]\w*[a-z]\w*$")
_SNAKE: Final = re.compile(r"^[a-z][a-z0-9]*(?:_[a-z0-9]+)+$")
#: What the pages say does not exist yet.
_NOT_YET: Final = {"KvCacheManager", "transfer_cache_async"}


@cache
def _text(page: Path) -> str:
    return page.read_text()


def _prose(page: Path) -> str:
    """Return a page without its fenced blocks."""
    return re.sub(r"^```.*?^```", "", _text(page), flags=re.MULTILINE | re.DOTALL)


def _fences(page: Path, language: str = "") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", _text(page), flags=re.MULTILINE | re.DOTALL)


def _code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def _section(page: Path, title: str) -> str:
    """Return what is under a heading of the second level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", _text(page), flags=re.MULTILINE | re.DOTALL)
    assert found, f"{page.name} has no section {title!r}"
    return found[1]


def _rows(text: str, columns: int) -> Iterator[list[str]]:
    """Yield the cells of every table row with that many columns, heads and rules left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == columns and not set(cells[0]) <= set("-: "):
            yield cells


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- names -----------------------------------------------------------------------------------------------------------


def missing(span: str) -> str | None:
    """Return what is wrong with a code span that names something of ours; None where it exists or is no such name."""
    file = _FILE.match(span)
    if file is not None:
        return _missing_file(file[1], file[2])
    if (member := _MEMBER.match(span)) is not None:
        return _missing_member(member[1], member[2])
    known = span in _NOT_YET or span in _known_names() or hasattr(builtins, span)
    return "there is no such name" if (_CLASS.match(span) or _SNAKE.match(span)) and not known else None


def _missing_file(path: str, name: str | None) -> str | None:
    if not (ROOT / path).exists() and not (SOURCE / path).exists():
        return "there is no such file"
    if name is not None and name not in defined_names().get(path, ()):
        return f"{path} defines no {name}"
    return None


def _missing_member(owner: str, member: str) -> str | None:
    homes = [names for names in defined_names().values() if owner in names]
    if not homes:
        return f"there is no class {owner}"
    return None if any(f"{owner}.{member}" in names for names in homes) else f"{owner} has no {member}"


@cache
def _known_names() -> frozenset[str]:
    """Return every name of the source without the class in front of it, and the package's."""
    names = {name.rpartition(".")[2] for names in defined_names().values() for name in names}
    return frozenset(names | {PACKAGE})


# The names in the coverage table are looked up, and more, by tests/test_coverage_table.py.
@pytest.mark.parametrize("page", [page for page in PAGES if page != COVERAGE], ids=_name)
def test_every_file_class_and_function_that_a_page_names_exists(page: Path) -> None:
    wrong = {span: text for span in _code_spans(_prose(page)) if (text := missing(span)) is not None}
    assert wrong == {}


def test_architecture_names_enough_for_the_check_to_mean_something() -> None:
    spans = set(_code_spans(_prose(ARCHITECTURE)))
    functions = {span for span in spans if _MEMBER.match(span) or ((file := _FILE.match(span)) and file[2])}
    walks = {*_code_spans(_section(ARCHITECTURE, "Walk 1: `pull_blocks`, from the public method to bytes and back"))}
    assert len(functions) > 60
    assert {"cache_manager.py:RemoteCalls.pull_blocks", "Target.on_resolve", "Registry.release"} <= walks


@pytest.mark.parametrize(
    ("span", "text"),
    [
        ("cache/nowhere.py", "there is no such file"),
        ("nowhere/", "there is no such file"),
        ("transfer.py:nothing", "transfer.py defines no nothing"),
        ("transfer.py:Initiator.nothing", "transfer.py defines no Initiator.nothing"),
        ("Nowhere.nothing", "there is no class Nowhere"),
        ("Target.nothing", "Target has no nothing"),
        ("Nowhere", "there is no such name"),
        ("no_where", "there is no such name"),
    ],
)
def test_a_name_that_does_not_exist_is_seen(span: str, text: str) -> None:
    assert missing(span) == text


@pytest.mark.parametrize(
    "span",
    [
        "transfer.py",
        "cache/",
        "target.py:Target.on_resolve",
        "native/__init__.py:execute",
        "_cache/registry.py:TRANSITIONS",
        "CacheManager.pull_blocks",  # inherited
        "Link.kept",  # an attribute that a method assigns
        "ResourceWarning",
        "llm.Transport",
        "make test",
    ],
)
def test_a_name_that_exists_is_accepted(span: str) -> None:
    assert missing(span) is None


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", _text(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_make_command_is_a_target(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    in_spans = [word for span in _code_spans(_prose(page)) for word in re.findall(r"^make ([\w-]+)", span)]
    in_fences = [word for fence in _fences(page) for word in re.findall(r"^make ([\w-]+)", fence, re.MULTILINE)]
    assert set(in_spans + in_fences) <= targets


def test_contributing_has_every_word_and_says_what_continuous_integration_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    page = ROOT / "CONTRIBUTING.md"
    words = {_code_spans(row[0])[0].removeprefix("make ") for row in list(_rows(_section(page, "The words"), 2))[1:]}
    assert words == set(phony[1].split()) - {"help"}
    sentence = re.search(r"Continuous integration .*?\.\s", _section(page, "The words").replace(".ci", ""), re.DOTALL)
    assert sentence
    runs = re.findall(r"^make ([\w-]+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert re.findall(r"`make ([\w-]+)`", sentence[0]) == runs


# --- the README ------------------------------------------------------------------------------------------------------


def test_readme_shows_the_two_commands_first() -> None:
    assert re.findall(r"^make (\w+)", _fences(README)[0], re.MULTILINE) == ["demo", "test"]


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """Write the README's Python blocks to the files that they name, with a free port in place of the printed one."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    for name, text in zip(("prompt.py", "decoder.py"), _fences(README, "python"), strict=True):
        assert text.startswith(f"# {name}\n")
        assert text.count("26000") == 1
        assert len([line for line in text.splitlines() if line.strip()]) <= 18, "too long for the first screen"
        (tmp_path / name).write_text(text.replace("26000", port))
    return tmp_path


def _start(script: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", "-W", "error", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(SOURCE.parent)},
    )


def test_readme_example_runs_in_two_processes_and_says_what_the_page_says(example: Path) -> None:
    prompt = _start(example / "prompt.py")
    processes = [prompt]
    try:
        assert prompt.stdout is not None
        assert prompt.stdout.readline().startswith("published"), prompt.communicate()
        processes.append(_start(example / "decoder.py"))
        printed, complaints = processes[1].communicate(timeout=60)
        assert (processes[1].returncode, complaints) == (0, "")
        promised = re.search(r"It prints `([^`]+)`", _text(README))
        assert promised
        assert printed == f"{promised[1]} shm\n"
        _, complaints = prompt.communicate("\n", timeout=60)
        assert (prompt.returncode, complaints) == (0, "")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


# --- architecture ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("head", "table"),
    [
        ("cache state", registry.TRANSITIONS),
        ("link state", {pair: frozenset({target}) for pair, target in link.TRANSITIONS.items()}),
    ],
)
def test_architecture_shows_the_transition_tables_as_they_are(
    head: str, table: dict[tuple[Enum, Enum], frozenset[Enum]]
) -> None:
    text = _section(ARCHITECTURE, "States").partition(f"| {head} |")[2].partition("\n\n")[0]
    shown = {(state, event): set(targets.split(", ")) for state, event, targets in _rows(text, 3) if state != head}
    assert shown == {
        (state.name, event.name): {target.name for target in targets} for (state, event), targets in table.items()
    }


def test_architecture_names_the_threads_as_the_code_does() -> None:
    native = "".join(path.read_text() for path in (SOURCE / "native").glob("*.hpp"))
    source = native + "".join(path.read_text() for path in modules().values())
    names = re.findall(r"^\| `((?:llm-datadist|lldd)-[a-z]+)", _section(ARCHITECTURE, "Threads"), flags=re.MULTILINE)
    assert len(names) >= 4
    assert [name for name in names if f'"{name}' not in source] == []


# --- options, errors, dependencies -----------------------------------------------------------------------------------


def _option_strings(text: str) -> set[str]:
    return set(re.findall(r"[\"`](llm\.[A-Za-z]+)", text))


def test_every_option_is_documented_and_every_documented_option_exists() -> None:
    known = _option_strings((SOURCE / "config.py").read_text())
    documented = set().union(*(_option_strings(_text(page)) for page in PAGES))
    assert documented == known
    assert {config.TRANSPORT, config.PEER_TIMEOUT} <= known


def test_extensions_lists_the_options_that_are_ours_without_effect_and_refused() -> None:
    page = ROOT / "docs" / "extensions.md"
    ours = {_code_spans(row[0])[0] for row in _rows(_section(page, "Options"), 4) if "`" in row[0]}
    assert ours == {
        config.TRANSPORT,
        config.SHM_SOCKET_DIR,
        config.POOL_PREFAULT,
        config.COPY_THREADS,
        config.PEER_TIMEOUT,
        config.CHECKSUM,
    }
    values = next(row[1] for row in _rows(_section(page, "Options"), 4) if config.TRANSPORT in row[0])
    assert tuple(_code_spans(values)) == config.TRANSPORTS
    ignored = {span for row in _rows(_section(page, "Accepted without effect"), 2) for span in _code_spans(row[0])}
    for_later = {
        config.GLOBAL_RESOURCE,
        config.BUF_POOL,
        config.SWITCH_ROLE,
        config.MEM_UTILIZATION,
    }
    assert ignored == config.NO_EFFECT | for_later
    refused = {span for row in _rows(_section(page, "Refused"), 2) for span in _code_spans(row[0])}
    assert refused == set(config._UNBUILT)


def test_errors_page_lists_exactly_the_exceptions_with_bases_and_status() -> None:
    rows = list(_rows(_section(ROOT / "docs" / "errors.md", "The tree"), 6))[1:]
    shown = {_code_spans(row[0])[0]: (_code_spans(row[1]), _code_spans(row[2]), row[3]) for row in rows}
    classes = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Exception)]
    assert shown == {
        each.__name__: (
            [base.__name__ for base in each.__bases__],
            [each.default_status.name],
            "yes" if each.retryable else "no",
        )
        for each in classes
        if issubclass(each, errors.LLMException)
    }
    assert all(row[5] for row in rows), "every row says what to do"


def test_errors_page_names_every_status_that_the_code_uses() -> None:
    code = "".join(path.read_text() for module, path in modules().items() if not module.endswith("errors"))
    defaults = {each.default_status.name for each in errors.LLMException.__subclasses__()}
    used = set(re.findall(r"LLMStatusCode\.(LLM_\w+)", code)) | defaults
    shown = {_code_spans(row[0])[0] for row in list(_rows(_section(ROOT / "docs/errors.md", "Status codes"), 2))[1:]}
    assert used <= shown
    assert shown <= set(errors.LLMStatusCode.__members__)


def test_every_dependency_has_its_reason_and_every_reason_its_dependency() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)
    groups = {
        "required": project["project"]["dependencies"],
        "build": project["build-system"]["requires"],
        **project["project"]["optional-dependencies"],
    }
    declared = {(_distribution(entry), group) for group, entries in groups.items() for entry in entries}
    rows = list(_rows(_text(ROOT / "docs" / "dependencies.md"), 3))[1:]
    assert {(_code_spans(name)[0], where) for name, where, _ in rows} == declared
    assert all(reason for _, _, reason in rows)


def _distribution(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return match[0]
