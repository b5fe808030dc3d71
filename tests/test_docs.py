"""What the documentation says is true: files and links exist, examples run, lists are complete.

`make docs` checks citations of headings, that each page is in the index, and that each entry has a test.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest

import llm_datadist
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole, config, cpp_api, errors
from llm_datadist._cache import registry
from llm_datadist._links import link
from llm_datadist.cache_manager import CacheManager
from tests.support.linking import free_port
from tests.support.source import ROOT, SOURCE, modules

if TYPE_CHECKING:
    from collections.abc import Iterator
    from enum import Enum
    from pathlib import Path

DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
PAGES: Final = sorted([README, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
#: Notes tell what was measured once; only their links are checked.
LINKING: Final = [*PAGES, *sorted(DOCS.glob("notes/*.md"))]

#: `file.py`, `folder/`, with `:name` or `:Class.name` behind a module.
_FILE: Final = re.compile(r"^(\.?[\w-][\w./-]*(?:\.(?:py|pyi|cpp|hpp|md|toml)|/))(?::([\w.]+))?$")
_MEMBER: Final = re.compile(r"^([A-Z]\w*)\.(\w+)$")


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
    """Yield the cells of every table row with that many columns, rules left out."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if len(cells) == columns and not set(cells[0]) <= set("-: "):
            yield cells


def _name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# --- names, links, commands ------------------------------------------------------------------------------------------


def _exists(span: str) -> bool:
    """Return False for a code span that names a file, or a member of a public class, that is not there."""
    if (file := _FILE.match(span)) is not None:
        path, name = file.groups()
        found = next((each / path for each in (ROOT, SOURCE) if (each / path).exists()), None)
        last = (name or "").rpartition(".")[2]
        return found is not None and (name is None or bool(re.search(rf"\b{last}\b", found.read_text())))
    cls = _classes().get(member[1]) if (member := _MEMBER.match(span)) else None
    if member is None or cls is None:
        return True
    return hasattr(cls, member[2]) or bool(
        re.search(rf"(self\.|^ +){member[2]}: ", inspect.getsource(cls), re.MULTILINE)
    )


@cache
def _classes() -> dict[str, type]:
    return {name: getattr(llm_datadist, name) for name in llm_datadist.__all__} | {"CacheManager": CacheManager}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_file_and_member_that_a_page_names_exists_and_every_make_command_is_a_target(page: Path) -> None:
    spans = _code_spans(_prose(page))
    assert [span for span in spans if not _exists(span)] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    words = {word for text in [*spans, *_fences(page)] for word in re.findall(r"(?m)^make ([\w-]+)", text)}
    assert words <= targets
    wrong = ["_cache/nowhere.py", "nowhere/", "errors.py:Nothing", "CacheManager.nothing"]
    right = ["_cache/", "_cache/registry.py:TRANSITIONS", "CacheManager.pull_blocks", "llm.Transport", "make test"]
    assert [span for span in wrong + right if not _exists(span)] == wrong


@pytest.mark.parametrize("page", LINKING, ids=_name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", _text(page))
    assert [link for link in links if not (page.parent / link).exists()] == []


def _start(script: Path) -> subprocess.Popen[str]:
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-u", "-W", "error", str(script)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_readme_example_runs_in_two_processes_and_says_what_the_page_says(tmp_path: Path) -> None:
    port = str(free_port())
    for name, text in zip(("prompt.py", "decoder.py"), _fences(README, "python"), strict=True):
        assert text.startswith(f"# {name}\n")
        assert text.count("26000") == 1
        (tmp_path / name).write_text(text.replace("26000", port))
    prompt = _start(tmp_path / "prompt.py")
    processes = [prompt]
    try:
        assert prompt.stdout is not None
        assert prompt.stdout.readline().startswith("published"), prompt.communicate()
        processes.append(_start(tmp_path / "decoder.py"))
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


# --- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("page", "head", "table"),
    [
        ("interface.md", "cache state", registry.TRANSITIONS),
        ("protocol.md", "link state", {pair: frozenset({target}) for pair, target in link.TRANSITIONS.items()}),
    ],
)
def test_the_transition_tables_are_those_of_the_code(
    page: str, head: str, table: dict[tuple[Enum, Enum], frozenset[Enum]]
) -> None:
    text = _text(DOCS / page).partition(f"| {head} |")[2].partition("\n\n")[0]
    shown = {(state, event): set(targets.split(", ")) for state, event, targets in _rows(text, 3) if event != "event"}
    assert shown == {
        (state.name, event.name): {target.name for target in targets} for (state, event), targets in table.items()
    }


# --- options, errors, dependencies, the reference ---------------------------------------------------------------------


def test_every_option_is_documented_and_extensions_lists_ours_those_without_effect_and_the_refused_ones() -> None:
    def options(text: str) -> set[str]:
        return set(re.findall(r"[\"`](llm\.[A-Za-z]+)", text))

    known = options((SOURCE / "config.py").read_text())
    assert set().union(*(options(_text(page)) for page in PAGES)) == known != set()
    page = DOCS / "extensions.md"
    ours = [row for row in _rows(_section(page, "Options"), 4) if "`" in row[0]]
    names = "TRANSPORT SHM_SOCKET_DIR POOL_PREFAULT COPY_THREADS PEER_TIMEOUT CHECKSUM TRACING MAX_LINKS"
    names += " AUTH_SECRET TLS_CERT MAX_LINK_AGE SAME_HOST_USERS INSECURE PEER_POLICY NIXL_FALLBACK NIXL_PLAINTEXT"
    names += " WRITE_BY_ADDRESS STATISTICS_PAGE STRICT_TYPES"
    assert {_code_spans(row[0])[0] for row in ours} == {getattr(config, name) for name in names.split()}
    values = next(row[1] for row in ours if config.TRANSPORT in row[0])
    assert tuple(_code_spans(values)) == config.TRANSPORTS
    ignored = {span for row in _rows(_section(page, "Accepted without effect"), 2) for span in _code_spans(row[0])}
    checked = {config.GLOBAL_RESOURCE, config.BUF_POOL, config.SWITCH_ROLE, config.MEM_UTILIZATION}
    assert ignored == config.NO_EFFECT | checked


def test_errors_page_lists_exactly_the_exceptions_with_bases_and_every_status_that_the_code_uses() -> None:
    rows = list(_rows(_section(DOCS / "errors.md", "The tree"), 6))[1:]
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
    code = "".join(path.read_text() for module, path in modules().items() if not module.endswith("errors"))
    defaults = {each.default_status.name for each in errors.LLMException.__subclasses__()}
    used = set(re.findall(r"LLMStatusCode\.(LLM_\w+)", code)) | defaults
    codes = {_code_spans(row[0])[0] for row in list(_rows(_section(DOCS / "errors.md", "Status codes"), 2))[1:]}
    assert used <= codes <= set(errors.LLMStatusCode.__members__)


def _said() -> list[str]:
    """Return every text of the library's code; what is filled in later is a line feed."""

    def text(node: ast.AST) -> str | None:
        if isinstance(node, ast.JoinedStr):
            return "".join(text(part) or "\n" for part in node.values)
        return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None

    trees = [ast.parse(path.read_text()) for path in modules().values()]
    return [said for tree in trees for node in ast.walk(tree) if (said := text(node))]


def _quotes(fragment: str, said: list[str]) -> bool:
    pattern = re.compile(re.escape(fragment).replace(r"\.\.\.", ".*"), re.DOTALL)
    return any(pattern.search(text) for text in said)


def test_the_page_of_failures_has_every_exception_and_quotes_what_the_code_says() -> None:
    page = DOCS / "when-it-fails.md"
    seen = [span for row in _rows(_text(page), 3) for span in _code_spans(row[0])]
    classes = {name for name, each in vars(errors).items() if isinstance(each, type) and issubclass(each, Exception)}
    assert classes <= set(seen)
    said = _said()
    fragments = [span for span in seen if " " in span]
    assert len(fragments) > 40
    assert [fragment for fragment in fragments if not _quotes(fragment, said)] == []
    assert not _quotes("cluster ... is not bound at all", said)


def test_the_sizes_of_the_page_about_pools_are_those_that_a_pool_gives() -> None:
    code: dict[str, Any] = {}
    exec(next(text for text in _fences(DOCS / "howto-pools.md", "python") if "def pool_bytes" in text), code)
    datadist = LLMDataDist(LLMRole.PROMPT, 1)
    options = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"}
    datadist.init(options | {"llm.MemPoolConfig": '{"memory_size": 67108864}'})
    for shape in ([4, 1024], [64, 16, 8, 128], [3, 40_000]):
        desc = CacheDesc(3, shape, DataType.DT_FLOAT16)
        cache = datadist.cache_manager.allocate_cache(desc)
        (pool,) = datadist.statistics().pools
        assert pool.used_bytes == code["pool_bytes"](desc)
        datadist.cache_manager.deallocate_cache(cache)
    datadist.finalize()


def test_the_page_about_pools_shows_what_the_command_prints() -> None:
    pytest.importorskip("typer", reason="the command needs the extra [cli]")
    from typer.testing import CliRunner

    from llm_datadist.cli.app import app

    [(arguments, printed)] = re.findall(r"^\$ llm-datadist (size .*)\n([^`]*)```", _text(DOCS / "howto-pools.md"), re.M)
    assert CliRunner().invoke(app, arguments.split()).stdout == printed


def test_every_public_class_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    whole = re.findall(r"automodule:: (\S+)", pages)
    single = {name.rpartition(".")[2] for name in re.findall(r"(?:autoclass|py:class):: (\S+)", pages)}
    named = [getattr(module, name) for module in (llm_datadist, cpp_api) for name in module.__all__]
    public = {each for each in [*named, CacheManager] if isinstance(each, type)}
    assert [cls for cls in public if cls.__name__ not in single and cls.__module__ not in whole] == []
