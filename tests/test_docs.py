"""What the documentation says is true: files and links exist, examples run, lists are complete.

`make docs` compares more (scripts/check_pages.py), checks that each page is in the index and each entry has a test.
"""

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from enum import Enum
from functools import cache
from pathlib import Path
from textwrap import indent
from typing import Any, Final

import msgspec
import numpy as np
import pytest

import llm_datadist
from llm_datadist import (
    CacheDesc,
    DataType,
    LLMDataDist,
    LLMRole,
    Memtype,
    Placement,
    RegisterMemStatus,
    config,
    cpp_api,
    errors,
)
from llm_datadist._cache import registry
from llm_datadist._links import link
from llm_datadist._links.messages import MAX_READERS
from llm_datadist._memory.guards import GuardTable
from llm_datadist.cache_manager import CacheManager
from llm_datadist.tools.bench.cases import size_text
from llm_datadist.tools.bench.rows import Row
from llm_datadist.tools.bench.suite import floors
from scripts import api_pages
from tests.support.linking import free_port
from tests.support.source import ROOT, SOURCE, modules, run

DOCS: Final = ROOT / "docs"
README: Final = ROOT / "README.md"
PAGES: Final = sorted([README, ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")])
#: Notes and the changelog tell what was once; only their links are checked.
LINKING: Final = [*PAGES, ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *sorted(DOCS.glob("notes/*.md"))]

#: `file.py`, `folder/`, with `:name` or `:Class.name` behind a module.
_FILE: Final = re.compile(r"^(\.?[\w-][\w./-]*(?:\.(?:py|pyi|cpp|hpp|ptx|md|toml)|/))(?::([\w.]+))?$")
CLASSES: Final = {name: getattr(llm_datadist, name) for name in llm_datadist.__all__} | {"CacheManager": CacheManager}
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
    cls = CLASSES.get(member[1]) if (member := _MEMBER.match(span)) else None
    if member is None or cls is None:
        return True
    annotated = rf"(?m)(self\.|^ +){member[2]}: "
    return hasattr(cls, member[2]) or bool(re.search(annotated, inspect.getsource(cls)))


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


def test_links_of_the_readme_into_pages_lead_to_a_heading() -> None:
    links = re.findall(r"\]\((docs/[^)#]+)#([^)]+)\)", _text(README))
    assert links
    for page, anchor in links:
        headings = re.findall(r"^#+ (.+)", _text(ROOT / page), flags=re.MULTILINE)
        assert anchor in [re.sub(r"[^\w -]", "", each).lower().replace(" ", "-") for each in headings]


def test_the_readme_is_short_and_says_what_it_is_not_before_the_picture() -> None:
    assert len(_text(README).split()) <= 900
    first = _text(README).partition("![")[0]
    assert "has never run on a GPU" in first
    assert "RDMA" in first


#: Limits and peers of the bench, and their names in the two tables of docs/performance.md.
_BESIDE: Final = {
    "memcpy": ("memcpy", "memcpy on two threads"),
    "cma": ("process_vm_readv", "process_vm_readv on two threads"),
    "tcp-raw": ("raw stream", "the best raw stream"),
    "nixl": ("NIXL", "NIXL"),
    "nixl-tcp": ("NIXL over TCP", "NIXL over TCP"),
    "mooncake": ("Mooncake", "Mooncake"),
}


def _measured() -> list[dict[tuple[str, str], str]]:
    """Return the cells of the tables of docs/performance.md by contender and size: of the kept run, then of all ten."""
    tables = [list(_rows(part, 6)) for part in _text(DOCS / "performance.md").split("## Results")]
    return [{(row[0], at): x for row in each for at, x in zip(each[0], row, strict=True)} for each in tables]


def _kept_run() -> list[Row]:
    return msgspec.json.decode((ROOT / "benchmarks" / "results" / "latest.json").read_bytes(), type=list[Row])


def test_ratios_of_the_readme_are_the_lowest_measured_with_their_range() -> None:
    measured = _measured()[1]
    shown = list(_rows(_section(README, "How fast"), 3))[1:]
    assert len(shown) == 3
    for what, lowest, both in shown:
        transport, size = what.removeprefix("plain ").split(", blocks of ")
        peer = "NIXL over TCP" if transport == "tcp" else "NIXL"
        least, most = (f"{float(each):.1f}" for each in measured[f"{transport}: {peer}", size].split(" to "))
        assert (lowest, both) == (least, f"{least} to {most}")


def test_rates_and_ratios_of_the_page_about_performance_are_those_of_the_kept_run() -> None:
    """The first table shows that run; the ranges of the second have its ratios, because it is one of the ten."""
    rates, ranges = _measured()
    shown = {}
    for row in _kept_run():
        if row.op != "pull" or row.peer is None:
            continue
        size, over = size_text(row.block_bytes), row.transport
        shown[f"**{over}**", size] = row.gb_per_s
        limit = (row.limit_name, row.limit_gb_per_s, row.ratio_to_limit)
        for contender, rate, ratio in (limit, (row.peer, row.peer_gb_per_s, row.ratio_to_peer)):
            first, second = _BESIDE[contender or ""]
            shown[f"{over}: {first}", size] = rate
            least, most = map(float, ranges[f"{over}: {second}", size].split(" to "))
            assert least <= round(ratio or 0, 2) <= most
    assert len(shown) == 50
    assert {at: rates[at] for at in shown} == {at: f"{rate:.1f}" for at, rate in shown.items()}


def test_floors_that_a_run_missed_are_in_the_note_and_counted_on_the_page() -> None:
    page = " ".join(_section(DOCS / "performance.md", "Results").split())
    missed = {row[0]: row[1:] for row in list(_rows(_text(DOCS / "notes" / "floors.md"), 5))[1:]}
    every = {floor.what: floor.met for floor in floors(_kept_run())}
    assert {what for what, met in every.items() if not met} < missed.keys() < every.keys()
    unmet: list[set[str]] = [set(), set()]  # by the quiet medians, and by those beside a busy core
    for what, (wanted, *medians, _) in missed.items():
        sign = -1 if "at least" in wanted else 1
        bound = max(sign * float(each) for each in re.findall(r"[\d.]+", wanted))
        for load, median in zip(unmet, medians, strict=True):
            if sign * float(median.split()[0]) > bound:
                load.add(what)
    counts = [len(every) - len(each) for each in (missed, unmet[0], unmet[0] | unmet[1])]
    assert f"Of {len(every)} floors" in page
    assert "{} are met in all ten runs, {} by the quiet medians, {} by both".format(*counts) in page


def test_the_five_references_are_the_same_on_every_page() -> None:
    tables = [list(_rows(text, 3)) for text in (_section(README, "Five references"), _text(DOCS / "index.md"))]
    long = list(_rows(_section(DOCS / "vllm.md", "Correctness"), 3))
    assert tables[0] == tables[1]
    assert len(long) == 6
    for short, whole in zip(tables[0][1:], long[1:], strict=True):
        assert [cell.startswith(part) for cell, part in zip(whole, short, strict=True)] == [True] * 3


def test_the_two_processes_of_the_readme_work_here_in_one() -> None:
    owner, reader = re.findall(r"^```python\n(.*?)^```", _text(README), re.MULTILINE | re.DOTALL)
    kv = [[np.full((64, 8), number, np.float16) for _ in range(2)] for number in (1, 0)]
    reader = re.sub(r"\bcache\b", "mine", reader).replace("kv_tensors", "target")
    program = owner + indent(reader, "    ")
    program = program.replace("26000", str(free_port())).replace("kv_tensors", "source")
    exec(f"from llm_datadist import *\nfrom llm_datadist import Grant\n{program}", {"source": kv[0], "target": kv[1]})
    for tensor in kv[1]:
        assert (tensor[:2] == 1).all()
        assert not tensor[2:].any()


def test_the_three_commands_of_the_readme_print_what_it_says() -> None:
    blocks = _fences(README, "console")
    assert len(blocks) == 3
    for block in blocks:
        command, promised = block.removeprefix("$ ").split("\n", 1)
        done = _typed(command, ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.fullmatch(re.escape(promised).replace(r"\.\.\.", ".*"), done.stdout, re.DOTALL), done.stdout


def _typed(commands: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what a reader pastes into a shell, in the environment of this test."""
    programs = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = os.environ | {"PATH": programs, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return run("bash", "-euxc", commands, cwd=folder, env=environment, timeout=None)


def _start(script: Path) -> subprocess.Popen[str]:
    pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": str(SOURCE.parent)}
    command = [sys.executable, "-u", "-W", "error", str(script)]
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment)


def test_programs_of_the_front_page_run_in_two_processes_and_print_what_it_says(tmp_path: Path) -> None:
    front, port = DOCS / "index.md", str(free_port())
    for name, text in zip(("prompt.py", "decoder.py"), _fences(front, "python"), strict=True):
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
        promised = re.search(r"It prints `([^`]+)`", _text(front))
        assert promised
        assert printed == f"{promised[1]}\n"
        _, complaints = prompt.communicate("\n", timeout=60)
        assert (prompt.returncode, complaints) == (0, "")
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_the_commands_of_the_page_about_security_run_pasted(tmp_path: Path) -> None:
    blocks = _fences(DOCS / "security.md")
    assert blocks[0].startswith("mkdir -m 700 datadist\npip install 'open-datadist[auth,cli]'\n")
    done = _typed("".join(blocks), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Tokens equal." in done.stdout


def test_every_test_that_is_listed_as_brittle_exists() -> None:
    lines = _text(ROOT / "tests" / "brittle.txt").splitlines()
    named = [line.partition("::") for line in lines if not line.startswith("#")]
    assert named
    assert [line for line in named if not re.search(rf"def {line[2] or 'test_'}", _text(ROOT / line[0]))] == []


# --- tables -----------------------------------------------------------------------------------------------------------
LINKS: Final = {(state, event): frozenset({to}) for state, row in link.TRANSITIONS.items() for event, to in row.items()}


@pytest.mark.parametrize(
    ("page", "head", "table"),
    [
        ("interface.md", "cache state", registry.TRANSITIONS),
        ("protocol.md", "link state", LINKS),
    ],
)
def test_the_transition_tables_are_those_of_the_code(
    page: str, head: str, table: dict[tuple[Enum, Enum], frozenset[Enum]]
) -> None:
    text = _text(DOCS / page).partition(f"| {head} |")[2].partition("\n\n")[0]
    shown = {(state, event): set(targets.split(", ")) for state, event, targets in _rows(text, 3) if event != "event"}
    names = {(state.name, event.name): {each.name for each in targets} for (state, event), targets in table.items()}
    assert shown == names


def test_the_values_of_enumerations_on_the_page_of_the_interface_are_those_of_the_code() -> None:
    text = " ".join(_text(DOCS / "interface.md").partition("### 1.2")[2].partition("### 1.3")[0].split())
    types, single, codes = (
        part.partition(end)[0]
        for part, end in (
            (text.partition("`DataType`, value and bytes")[2], "`data_type.py`"),
            (text.partition("`LLMStatusCode`")[2], "The others are"),
            (text.partition("The others are 0x5010B000 plus, in hex:")[2], "`Status` wraps"),
        )
    )
    values = {name: (int(value), int(size)) for name, value, size in re.findall(r"(DT_\w+) (\d+), (\d+)", types)}
    assert values == {each.name: (each.value, each.itemsize) for each in DataType}
    statuses = {name: int(value, 0) for name, value in re.findall(r"([A-Z_]+) (-?\d\w*)", single)}
    statuses |= {name: 0x5010B000 + int(value, 16) for name, value in re.findall(r"([A-Z_]+) ([\dA-F]+)[,.]", codes)}
    assert {f"LLM_{name}": value for name, value in statuses.items()} == dict(errors.LLMStatusCode.__members__)
    shown = dict(re.findall(r"`(\w+)`[^`:]*: ((?:\w+ \d+,? ?)+)", text))
    for cls in (LLMRole, Placement, RegisterMemStatus, Memtype, cpp_api.CachePlacement, cpp_api.LlmRole):
        found = {name: int(value) for name, value in re.findall(r"(\w+) (\d+)", shown[cls.__name__])}
        assert found == {each.name: each.value for each in cls}


# --- options, errors, dependencies, the reference ---------------------------------------------------------------------
def _option_rows() -> Iterator[tuple[str, list[str]]]:
    """Yield each option with the section of docs/options.md that has it, and the other cells of its row there."""
    settings = {each.key: f"`{name}`" for name, each in vars(config.LLMConfig).items() if hasattr(each, "key")}
    settings[config.GRAPH_MEMORY] = "`ge_options`"
    for name, row in config.OPTIONS.items():
        values, default, meaning = (text.replace("``", "`") for text in (row.values, row.default, row.meaning))
        if not row.effect:
            yield name, ["Accepted without effect", settings.get(name, ""), values, meaning]
        elif name in settings:
            yield name, ["Options of the interface", settings[name], values, default, meaning]
        else:
            yield name, ["Options of this library", values, default, meaning]


def test_the_page_about_options_has_the_rows_of_the_code_and_no_page_names_an_unknown_option() -> None:
    page, columns = DOCS / "options.md", {"Options of the interface": 5, "Options of this library": 4}
    shown = [
        (_code_spans(name)[0], [title, *cells])
        for title in [*columns, "Accepted without effect"]
        for name, *cells in list(_rows(_section(page, title), columns.get(title, 4)))[1:]
    ]
    assert dict(shown) == dict(_option_rows())
    assert len(shown) == len(config.OPTIONS), "one row for one option"
    known = {name.rstrip("*") for name in [*config.OPTIONS, *config.CPP_NAMES] if name.startswith("llm.")}
    named = {name for each in PAGES for name in re.findall(r"[\"`](llm\.[A-Za-z]+)", _text(each))}
    assert named == known


def test_the_sentence_and_the_parser_of_an_option_keep_to_the_form_of_a_row() -> None:
    for row in config.OPTIONS.values():
        assert row.meaning.endswith("."), row
        assert len(row.meaning.split()) <= 20, row
        if row.field and row.default in ("0", "1"):
            assert row.parse(row.name, row.default) == config.Options.__dataclass_fields__[row.field].default


def test_errors_page_lists_exactly_the_exceptions_with_bases_and_every_status_that_the_code_uses() -> None:
    rows = list(_rows(_section(DOCS / "errors.md", "The tree"), 5))[1:]
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
    assert all(row[4] for row in rows), "every row says what to do"
    code = "".join(path.read_text() for module, path in modules().items() if not module.endswith("errors"))
    defaults = {each.default_status.name for each in errors.LLMException.__subclasses__()}
    used = set(re.findall(r"LLMStatusCode\.(LLM_\w+)", code)) | defaults
    codes = {_code_spans(row[0])[0] for row in list(_rows(_section(DOCS / "errors.md", "Status codes"), 2))[1:]}
    assert used <= codes <= set(errors.LLMStatusCode.__members__)


def test_the_limits_of_the_page_about_scaling_are_those_of_the_code() -> None:
    shown = {row[0]: re.findall(r"\d[\d,]*", row[1]) for row in _rows(_section(DOCS / "scaling.md", "Limits"), 3)}
    with closing(GuardTable()) as guards:
        limits = {
            "links that peers dial to one instance": config.Options(role=LLMRole.PROMPT, device_id=0).max_links,
            "pins of one peer": registry.MAX_PINS_PER_PEER,
            "readers of a grant": MAX_READERS,
            "caches, bound keys and grants together": guards.capacity,
        }
    assert [what for what, number in limits.items() if f"{number:,}" not in shown[what]] == []


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


def test_what_the_original_will_deprecate_is_said_to_be_kept_wherever_that_stands() -> None:
    trees = [ast.parse(path.read_text()) for path in modules().values()]
    documented = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module)
    texts = [ast.get_docstring(node) or "" for tree in trees for node in ast.walk(tree) if isinstance(node, documented)]
    texts += [part for page in PAGES for part in re.split(r"^#+ ", _text(page), flags=re.MULTILINE)]
    marked = [text for text in texts if re.search(r"\bdeprecated\b", text, re.IGNORECASE)]
    assert len(marked) >= 7
    assert [each for each in marked if not re.search(r"to be deprecated;\s+this\s+library\s+keeps", each)] == []


def test_the_page_about_pools_shows_what_the_command_prints() -> None:
    pytest.importorskip("typer", reason="the command needs the extra [cli]")
    from typer.testing import CliRunner

    from llm_datadist.tools.cli.app import app

    example = re.compile(r"^\$ llm-datadist (size .*)\n([^`]*)```", re.MULTILINE)
    [(arguments, printed)] = example.findall(_text(DOCS / "howto-pools.md"))
    assert CliRunner().invoke(app, arguments.split()).stdout == printed


def test_every_public_class_is_in_the_reference() -> None:
    pages = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    whole = re.findall(r"automodule:: (\S+)", pages)
    single = {name.rpartition(".")[2] for name in re.findall(r"(?:autoclass|py:class):: (\S+)", pages)}
    named = [getattr(module, name) for module in (llm_datadist, cpp_api) for name in module.__all__]
    public = {each for each in [*named, CacheManager] if isinstance(each, type)}
    assert [cls for cls in public if cls.__name__ not in single and cls.__module__ not in whole] == []


def test_the_reference_is_text_in_a_checkout_and_a_line_that_is_not_the_sources_is_found() -> None:
    text = _text(DOCS / "api" / "cache_manager.md")
    shown = re.sub(r"<!-- api.*?-->", "", text, flags=re.DOTALL)
    calls = {name for name, member in inspect.getmembers(CacheManager, callable) if name[0] != "_"}
    assert calls == {name for name in re.findall(r"^- `(\w+)\(", shown, re.MULTILINE) if hasattr(CacheManager, name)}
    line = "- `remove_cache_key(cache_key: CacheKey) -> None`: Unbind a key; running and later pulls by it fail.\n"
    for wrong in (text.replace(line, ""), text.replace(line, line.replace("cache_key:", "key:"))):
        assert wrong != text
        assert api_pages.current(wrong) == api_pages.current(text)
    assert line in api_pages.current(text)
    built = api_pages.for_sphinx(text)
    assert ("```{eval-rst}\n.. autoclass:: llm_datadist.cache_manager.CacheManager" in built, line in built) == (
        True,
        False,
    )
