"""Compare the pages of docs/ with the code, and count words; print each mistake, and exit with 1 if there is one.

Tables of packages, threads, locks, messages, constants, dependencies and commands must equal the source. Citations in
the source must name a heading (CONTRIBUTING.md defines the forms), and pages for users have a limit of words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
import tomllib
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
SOURCE: Final = ROOT / "src" / "llm_datadist"
#: They have threads and constants of their own.
TOOLS: Final = {"testing", "tools"}

#: Pages, and the most words of each. A word has a letter or a digit, so rules of tables are none.
_USERS: Final = """
index 500, tutorial 850, howto 110, howto-hosts 950, howto-pools 650, howto-grants 680, howto-vllm-store 900,
howto-tensors 700, howto-moving 450, vllm 1170, store 1700, nixl 650, security 1600, when-it-fails 1400, metrics 1200,
commands 150, top 400, doctor 650, interface 6220, options 1800, errors 1200, performance 1500, scaling 1400,
support 400, glossary 730, device 900, howto-service 900, cpp 700
"""
_DEVELOPERS: Final = "architecture 2350, protocol 2930, transports 600, dependencies 650, coverage 100, development 100"
USERS_IN_ALL: Final = 28_630
#: Entries of the navigation, the one for developers left out.
ENTRIES: Final = 16


def main() -> int:
    """Run all checks; return the exit status."""
    checks = (citations, packages, forbidden_imports, names, threads, locks, messages, constants, enums)
    others = (dependencies, pins, commands, navigation, reference, words)
    found = [mistake for check in (*checks, *others) for mistake in check()]
    explained = {path: _explained(path) for path in _files(ROOT / "src")}
    python = sum(count for path, count in explained.items() if path.suffix == ".py")
    print(*found, f"docstrings and comments: {python} words of Python, {sum(explained.values())} of src", sep="\n")
    return bool(found)


# --- pages and sources ------------------------------------------------------------------------------------------------
@cache
def _page(name: str) -> str:
    return (DOCS / f"{name}.md").read_text()


def _table(page: str, *head: str) -> list[list[str]]:
    """Return the cells of each row of the table that has this head."""
    begin = f"| {' | '.join(head)} |\n"
    _, found, rest = _page(page).partition(begin)
    if not found:
        raise LookupError(f"docs/{page}.md has no table {begin.strip()}")
    rows = rest.partition("\n\n")[0].splitlines()[1:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def _files(folder: Path, *, tools: bool = True) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        library = tools or path.relative_to(SOURCE).parts[0] not in TOOLS
        if path.suffix in (".py", ".pyi", ".cpp", ".hpp") and library:
            yield path


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _library() -> Iterator[tuple[Path, Iterator[ast.AST]]]:
    for path in _files(SOURCE, tools=False):
        if path.suffix == ".py":
            yield path, ast.walk(_tree(path))


def _native() -> str:
    return "\n".join(path.read_text() for path in _files(SOURCE, tools=False) if path.suffix in (".cpp", ".hpp"))


@cache
def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _contracts(kind: str) -> list[dict[str, Any]]:
    return [each for each in _pyproject()["tool"]["importlinter"]["contracts"] if each["type"] == kind]


def _differ(where: str, shown: Iterable[object], true: Iterable[object]) -> Iterator[str]:
    """Yield a line for each of two sets that the other one lacks."""
    shown, true = set(shown), set(true)
    yield from (f"{where}: {each} is not in the code" for each in sorted(shown - true, key=str))
    yield from (f"{where}: {each} of the code is missing" for each in sorted(true - shown, key=str))


# --- citations --------------------------------------------------------------------------------------------------------
#: White space, and the beginning of a line of a comment.
_GAP: Final = r"(?:\s|\n[ \t]*(?:#:?|//+|\*)?)+"
_NUMBER: Final = r"(?:§\d+(?:\.\d+)*|[RBI]\d+(?:\.\d+)*)"
_SEPARATOR: Final = rf"(?:,{_GAP}(?:and{_GAP})?|{_GAP}and{_GAP}|{_GAP}to{_GAP})"
_INTERFACE: Final = re.compile(rf"\binterface{_GAP}{_NUMBER}(?:{_SEPARATOR}{_NUMBER})*")
_RULE: Final = re.compile(rf"\barchitecture{_GAP}rules?{_GAP}(\d+(?:{_SEPARATOR}\d+)*)")
_HEADING: Final = re.compile(r"^#{2,4} (?:(\d+(?:\.\d+)*)|([RBI]\d+(?:\.\d+)*))\.?(?= )", re.MULTILINE)
_RULE_HEADING: Final = re.compile(r"^### Rule (\d+)\b", re.MULTILINE)
#: Looks like a citation and is none.
_REFUSED: Final = re.compile(
    r"(?:\b(?:API|BEHAVIOUR|CLIENTS|PEERS|ARCHITECTURE)\s)?§[\d.]*|\bR\d{1,2}\b|\bARCHITECTURE\s+rule|\b[rR]ule \d+"
    r"|\[(?:seed|py|cpp|guide|v1|code|v1code):"
)
#: A page, and the heading that a text names behind it.
_PAGE: Final = re.compile(rf'\bdocs/([\w/-]+)\.md(?:,?{_GAP}\(?"([^"\n]+)")?')


def headings(docs: Path) -> set[str]:
    """Return what may be cited: "§6.11", "B2.3", "R26", "I4" and "rule 8"."""
    found = _HEADING.findall((docs / "interface.md").read_text())
    rules = _RULE_HEADING.findall((docs / "architecture.md").read_text())
    return {f"§{section}" if section else number for section, number in found} | {f"rule {rule}" for rule in rules}


def mistakes(text: str, known: set[str]) -> Iterator[tuple[int, str]]:
    """Yield (line, mistake) for every citation in ``text`` that names no heading or has no valid form."""

    def check(match: re.Match[str]) -> str:
        cited = match[0]
        names = re.findall(_NUMBER, cited) or [f"rule {number}" for number in re.findall(r"\d+", cited)]
        line = text.count("\n", 0, match.start()) + 1
        found.extend((line, f"{name} is no heading of docs/") for name in names if name not in known)
        return re.sub(r"[^\n]", " ", cited)

    found: list[tuple[int, str]] = []
    rest = _RULE.sub(check, _INTERFACE.sub(check, text))
    found += [
        (rest.count("\n", 0, match.start()) + 1, f"{match[0]!r} is no form of a citation")
        for match in _REFUSED.finditer(rest)
    ]
    yield from sorted(found)


def citations() -> Iterator[str]:
    """Compare citations, and the pages that sources name, with the headings and pages that there are."""
    known = headings(DOCS)
    for folder, path in (
        (each, path) for each in ("src", "tests", "faults", "scripts") for path in _files(ROOT / each)
    ):
        source = path.read_text()
        for line, text in mistakes(source, known) if folder != "scripts" else ():  # the scripts have the patterns
            yield f"{path.relative_to(ROOT)}:{line}: {text}"
        for page, heading in _PAGE.findall(source):
            if not (DOCS / f"{page}.md").exists():
                yield f"{path.relative_to(ROOT)}: there is no docs/{page}.md"
            elif heading and not re.search(rf"^#+ {re.escape(heading)}$", _page(page), re.MULTILINE):
                yield f"{path.relative_to(ROOT)}: docs/{page}.md has no heading {heading!r}"


# --- architecture.md --------------------------------------------------------------------------------------------------
def _layers() -> list[set[str]]:
    """Return the layers of the contract, the lowest first."""
    (contract,) = (each for each in _contracts("layers") if each["containers"] == ["llm_datadist"])
    return [set(layer.split(" | ")) for layer in reversed(contract["layers"])]


def packages() -> Iterator[str]:
    """Compare the table of packages with the layers of the contract, and these with the modules."""
    layers = _layers()
    shown = [set(_spans(row[0])) for row in _table("architecture", "packages and modules", "own")]
    modules = {path.stem for path in SOURCE.glob("*") if path.suffix == ".py" or (path / "__init__.py").exists()}
    yield from _differ("contract of the layers", set().union(*layers), modules - {"__init__"})
    yield from _differ("architecture.md, packages", set().union(*shown), set().union(*layers))
    if [sorted(row) for row in shown] != [sorted(layer) for layer in layers]:
        yield "architecture.md, packages: the rows are not the layers of pyproject.toml, the lowest first"


def forbidden_imports() -> Iterator[str]:
    """Compare the table of forbidden imports with the contracts, both ways."""
    height = {name: number for number, layer in enumerate(_layers()) for name in layer}
    contracts = {
        (source.removeprefix("llm_datadist."), target.removeprefix("llm_datadist."))
        for each in _contracts("forbidden")
        for source in each["source_modules"]
        for target in each["forbidden_modules"]
        if source.startswith("llm_datadist.")
    }
    table = _table("architecture", "package", "must not import")
    shown = {(_spans(row[0])[0], target) for row in table for target in _spans(row[1])}
    # The layers forbid the other imports: of the own row, and of those above.
    down = {
        (source, target) for source, target in shown if height.get(target, -1) < height.get(source.partition(".")[0], 0)
    }
    yield from _differ("architecture.md, must not import", down, contracts)


def names() -> Iterator[str]:
    """Find the classes that the pages for developers and the glossary name in the source."""
    text = "\n".join(path.read_text() for path in _files(SOURCE, tools=False))
    known = set(re.findall(r"\b(?:class|struct) (\w+)", text))
    for page in ("architecture", "protocol", "glossary"):
        spans = {span for span in _spans(_page(page)) if re.fullmatch(r"_?[A-Z][A-Za-z0-9]*[a-z][A-Za-z0-9]*", span)}
        yield from (f"{page}.md: there is no class {span}" for span in sorted(spans - known))


#: Begin as threads' names do, and are none: files and memfds.
_NO_THREADS: Final = {"llm-datadist", "llm-datadist-key", "llm-datadist-statistics", "lldd-transit"}


def threads() -> Iterator[str]:
    """Compare the table of threads with the names in the source."""
    found = set(re.findall(r'"(lldd-[a-z-]*[a-z])-?"', _native()))
    for path, nodes in _library():
        for node in nodes:
            if isinstance(node, ast.Constant) and re.fullmatch(r"(?:llm-datadist|lldd)-[a-z-]*", str(node.value)):
                found.add(str(node.value).rstrip("-"))
            called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
            if called == "threading.Thread" and "name=" not in ast.unparse(node):
                yield f"{path.relative_to(ROOT)}: a thread without a name: {ast.unparse(node)}"
    rows = _table("architecture", "thread", "owner", "work")
    shown = {re.sub(r"[_-]<n>$", "", span) for row in rows for span in _spans(row[0])}
    yield from _differ("architecture.md, threads", shown, found - _NO_THREADS)


def locks() -> Iterator[str]:
    """Find the locks that architecture.md names in the source, by their class or module."""
    found = set()
    for path, nodes in _library():
        classes = [(each.name, ast.walk(each)) for each in nodes if isinstance(each, ast.ClassDef)]
        for owner, inside in [(path.stem, iter(_tree(path).body)), *classes]:
            for node in inside:
                text = ast.unparse(node) if isinstance(node, ast.Assign | ast.AnnAssign) else ""
                if re.search(r" = threading\.(R?Lock|Condition)\(", text):
                    found.add(f"{owner}.{re.split('[ :]', text)[0].removeprefix('self.')}")
    rows = _table("architecture", "lock", "is held while")
    shown = {span for row in rows for span in _spans(row[0])}
    shown |= {span for span in _spans(_page("architecture")) if re.fullmatch(r"\w+\._?lock", span)}
    yield from (f"architecture.md: there is no lock {each}" for each in sorted(shown - found))


# --- protocol.md ------------------------------------------------------------------------------------------------------
def messages() -> Iterator[str]:
    """Compare the table of messages with the types of the wire."""
    kinds = get_args(import_module("llm_datadist._links.messages").AnyMessage)
    rows = _table("protocol", "message", "from", "meaning")
    yield from _differ(
        "protocol.md, messages", [span for row in rows for span in _spans(row[0])], {each.__name__ for each in kinds}
    )


def constants() -> Iterator[str]:
    """Compare the table of constants with their values in Python and C++; those of the messages are all there."""
    rows = _table("protocol", "constant", "value", "use")
    wire = vars(import_module("llm_datadist._links.messages")).items()
    true = {name for name, value in wire if isinstance(value, int) and name.isupper() and name[0] != "_"}
    missing = true - {span for row in rows for span in _spans(row[0])}
    yield from (f"protocol.md, constants: {name} is missing" for name in sorted(missing))
    for name_cell, value_cell, _ in rows:
        shown = value_cell.split(", ")
        if len(shown) != len(_spans(name_cell)):
            yield f"protocol.md, constants: {name_cell} has {len(shown)} values"
            continue
        for name, text in zip(_spans(name_cell), shown, strict=True):
            values = {*_python_values(name), *_native_values(name)}
            if values != {_number(text)}:
                yield f"protocol.md, constants: {name} is {text}, in the code {sorted(values) or 'missing'}"


def _number(text: str) -> float:
    number, _, unit = text.partition(" ")
    base, _, power = number.replace(",", "").partition("**")
    return float(base) ** int(power or 1) * {"": 1, "KiB": 1 << 10, "MiB": 1 << 20}[unit]


def _python_values(name: str) -> Iterator[float]:
    for path, _ in _library():
        targets = [
            ast.unparse(target)
            for node in _tree(path).body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        ]
        if name in targets:
            module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts)
            yield float(getattr(import_module(module), name))


def _native_values(name: str) -> Iterator[float]:
    for value in re.findall(rf"\bconstexpr [\w: ]+\b{name} = ([^;]+);", _native()):
        plain = re.sub(r"std::uint64_t\{(\d+)\}|(\d+)u\b", r"\1\2", value.replace("'", ""))
        yield float(_arithmetic(ast.parse(plain, mode="eval").body))


def _arithmetic(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.LShift | ast.Mult):
        left, right = _arithmetic(node.left), _arithmetic(node.right)
        return left << right if isinstance(node.op, ast.LShift) else left * right
    raise ValueError(f"cannot compute {ast.unparse(node)}")


def enums() -> Iterator[str]:
    """Compare the tables of kinds and statuses of lane frames with the enums of the native code."""
    for name, head in (("Kind", ("kind", "value", "carries")), ("Status", ("status", "value", "meaning"))):
        (body,) = re.findall(rf"\benum (?:class )?{name} : std::\w+ \{{(.*?)\}};", _native(), re.DOTALL)
        true = re.findall(r"(\w+) = (\d+)", re.sub(r"//[^\n]*", "", body))
        yield from _differ(f"protocol.md, {head[0]}", [(row[0], row[1]) for row in _table("protocol", *head)], true)


# --- other pages ------------------------------------------------------------------------------------------------------
def _package(requirement: str) -> str:
    return re.split(r"[^\w-]", requirement, maxsplit=1)[0]


def dependencies() -> Iterator[str]:
    """Compare the table of dependencies with pyproject.toml."""
    project = _pyproject()["project"]
    groups = {"required": project["dependencies"], "build": _pyproject()["build-system"]["requires"]}
    true = {
        (_package(each), group) for group, some in (groups | project["optional-dependencies"]).items() for each in some
    }
    rows = _table("dependencies", "package", "extra", "use")
    yield from _differ(
        "dependencies.md", [(_spans(row[0])[0], group) for row in rows for group in row[1].split(", ")], true
    )


def _installed() -> set[str]:
    """Return the packages that the Makefile installs by their names."""
    makefile = re.sub(r"\\\n|^#.*", "", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    variables = dict(re.findall(r"^(\w+) := (.*)$", makefile, re.MULTILINE))
    lines = re.findall(r"^\t.*(?:PIP\)|pip install) ([^;|&<\n]*)", makefile, re.MULTILINE)
    words = re.sub(r"\$\((\w+)\)", lambda name: variables.get(name[1], ""), " ".join(lines)).split()
    return {_package(word.strip("'")) for word in words if word.strip("'")[0].isalpha()} - {"open-datadist"}


def _pinned() -> dict[str, set[str]]:
    """Return the packages in each part of constraints.txt, by its heading."""
    parts = re.findall(r"^# (.*)\n((?:[\w-]+==\S+\n)+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {heading: set(re.findall(r"^([\w-]+)==", lines, re.MULTILINE)) for heading, lines in parts}


def pins() -> Iterator[str]:
    """Compare the packages that the Makefile installs with their table, and with those in constraints.txt."""
    installed, pinned = _installed(), _pinned()
    declared = {row[0].strip("`") for row in _table("dependencies", "package", "extra", "use")} - {"open-datadist"}
    rows = _table("dependencies", "command", "package", "use")
    yield from _differ("dependencies.md, Makefile", [span for row in rows for span in _spans(row[1])], installed)
    yield from _differ("constraints.txt, pyproject.toml", pinned["Named in pyproject.toml"], declared)
    yield from _differ("constraints.txt, Makefile", pinned["Named in the Makefile"], installed - declared)


def commands() -> Iterator[str]:
    """Compare the table of commands with those of the program."""
    app = import_module("llm_datadist.tools.cli.app").app
    true = [each.callback.__name__ for each in app.registered_commands] + [each.name for each in app.registered_groups]
    rows = _table("commands", "command", "does", "page")
    yield from _differ("commands.md", [_spans(row[0])[0].rpartition(" ")[2] for row in rows], true)


def navigation() -> Iterator[str]:
    """Count the entries of the site's navigation."""
    blocks = re.findall(r"^```\{toctree\}\n(.*?)^```", _page("index"), re.MULTILINE | re.DOTALL)
    entries = [line for block in blocks for line in block.splitlines() if line and not line.startswith(":")]
    if "development" not in entries:
        yield "index.md: no entry for developers"
    if len(entries) - 1 > ENTRIES:
        yield f"index.md: {len(entries) - 1} entries for users, at most {ENTRIES}"


def reference() -> Iterator[str]:
    """Compare the signatures and sentences on the pages of docs/api with the source."""
    pages = import_module("scripts.api_pages")
    for page in pages.PAGES:
        if pages.current(text := page.read_text()) != text:
            yield f"api/{page.name}: is not that of the source: python -m scripts.api_pages"
        if "```{eval-rst}" in text:
            yield f"api/{page.name}: directives outside of a comment show nothing in a checkout"


# --- words ------------------------------------------------------------------------------------------------------------
def _words(text: str) -> int:
    return sum(any(character.isalnum() for character in word) for word in text.split())


def words() -> Iterator[str]:
    """Count the words of each page."""
    counted = {path.stem: _words(path.read_text()) for path in DOCS.glob("*.md")}
    users, developers = (
        {page: int(most) for page, most in re.findall(r"([\w-]+) (\d+)", text)} for text in (_USERS, _DEVELOPERS)
    )
    limits = users | developers
    yield from _differ("pages with a limit of words", limits, counted)
    for page, most in limits.items():
        if counted.get(page, 0) > most:
            yield f"{page}.md: {counted[page]} words, at most {most}"
    if (total := sum(counted.get(page, 0) for page in users)) > USERS_IN_ALL:
        yield f"pages for users: {total} words, at most {USERS_IN_ALL}"


def _explained(path: Path) -> int:
    """Return the words of docstrings and comments of a source."""
    text = path.read_text()
    if path.suffix not in (".py", ".pyi"):
        return sum(map(_words, re.findall(r"//[^\n]*|/\*.*?\*/", text, re.DOTALL)))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = (ast.get_docstring(node) or "" for node in ast.walk(ast.parse(text)) if isinstance(node, documented))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return sum(map(_words, docstrings)) + sum(
        _words(token.string) for token in tokens if token.type == tokenize.COMMENT
    )


if __name__ == "__main__":
    sys.exit(main())
