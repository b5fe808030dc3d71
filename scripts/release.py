"""Check what `make release` has made, wheels, sdist and site, and print what is left to do by hand.

Publishes nothing and needs no network. Exits with 1 and the mistakes if there are any.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from markdown_it import MarkdownIt  # the extra [cli] brings it

if TYPE_CHECKING:
    from collections.abc import Iterator
    from email.message import Message

ROOT: Final = Path(__file__).parent.parent
PROCESSORS: Final = ("aarch64", "x86_64")
#: Interpreter and ABI of a wheel; the stable ABI from 3.12 on, with modules of one name.
WHEEL: Final = re.compile(
    r"open_datadist-(?P<version>[^-]+)-(?P<tag>(?P<python>cp311-cp311|cp312-abi3)-manylinux_2_\d\d_(?P<processor>\w+))\.whl"
)
_PACKAGES: Final = ("llm_datadist", "llm_datadist_v1", "llm_datadist_wrapper")
#: What a wheel leaves out of the packages: it is compiled, or notes for the compiler.
_SOURCES: Final = {".c", ".cpp", ".h", ".hpp", ".ptx"}
#: For C++ programs, in llm_datadist/cpp.
CPP_FILES: Final = (
    *(f"include/llm_datadist/{each}" for each in ("call.h", "llm_datadist.h")),
    "lib/libllm_datadist.so",
    "lib/pkgconfig/llm_datadist.pc",
    *(f"lib/cmake/llm_datadist/llm_datadist-config{each}.cmake" for each in ("", "-version")),
)

_LEFT: Final = """
Made and checked: {count} files in dist/, {pages} pages in build/docs/. What is left is yours:

1. Sign them: `for each in dist/*.whl dist/*.tar.gz; do gpg --armor --detach-sign $each; done`, or as your index asks.
2. Tag the commit: `git tag --sign v{version}`, then push the tag.
3. Upload dist/*.whl and dist/*.tar.gz with the client of your index.
4. Copy build/docs/ to your web server. It is static, and works below any path.
5. Once repository and site have addresses, name them in [project.urls] of pyproject.toml: until then the links of
   README.md into the repository lead nowhere on an index's page ({links} of them).
"""


def main(root: Path = ROOT) -> int:
    """Print all mistakes, or what is left to do; return the exit status."""
    version = version_of(root)
    mistakes = [*tree(root, version), *files(root, version), *site(root / "build" / "docs", version)]
    if mistakes:
        print(*mistakes, sep="\n")
        return 1
    count, pages = len([*(root / "dist").glob("open_datadist-*")]), len([*(root / "build" / "docs").rglob("*.html")])
    links = len(re.findall(r"\]\((?!https?:)", (root / "README.md").read_text()))
    print(_LEFT.format(count=count, pages=pages, version=version, links=links))
    return 0


def version_of(root: Path) -> str:
    """Return the version that the source names."""
    (version,) = re.findall(
        r'^__version__ = "([^"]+)"$', (root / "src/llm_datadist/__init__.py").read_text(), re.MULTILINE
    )
    return str(version)


def tree(root: Path, version: str) -> Iterator[str]:
    """Yield what the working tree is not ready for."""
    first = re.findall(r"^## (.*)$", (root / "CHANGELOG.md").read_text(), re.MULTILINE)[0]
    if first != version:
        yield f"CHANGELOG.md: the first entry is {first!r}: must be {version}, the version of the source"
    if f"| {version.rpartition('.')[0]}.x |" not in (root / "SECURITY.md").read_text():
        yield f"SECURITY.md: has no row of {version.rpartition('.')[0]}.x"
    if _git(root, "status", "--porcelain"):
        yield "git: the working tree has changes: commit them, then make the files again"
    if _git(root, "tag", "--list", f"v{version}"):
        yield f"git: there is a tag v{version} already: set a new __version__"


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout


# --- wheels and the sdist ---------------------------------------------------------------------------------------------
def files(root: Path, version: str) -> Iterator[str]:
    """Yield mistakes of the files in dist/: which there are, their metadata, what is in them."""
    found = sorted((root / "dist").glob("open_datadist-*"))
    wheels = {each: name for each in found if (name := WHEEL.fullmatch(each.name))}
    sdists = [each for each in found if each.name == f"open_datadist-{version}.tar.gz"]
    for processor in PROCESSORS:
        if not [name for name in wheels.values() if (name["version"], name["processor"]) == (version, processor)]:
            yield f"dist/: no wheel of {version} for {processor}"
    if not sdists:
        yield f"dist/: no open_datadist-{version}.tar.gz"
    yield from (
        f"dist/{each.name}: is neither a wheel nor the sdist of {version}"
        for each in found
        if each not in sdists and (each not in wheels or wheels[each]["version"] != version)
    )
    for path, name in wheels.items():
        yield from (f"{path.name}: {mistake}" for mistake in wheel(path, name, root))
    for path in sdists:
        yield from (f"{path.name}: {mistake}" for mistake in sdist(path, root))


def wheel(path: Path, name: re.Match[str], root: Path) -> Iterator[str]:
    """Yield mistakes of one wheel."""
    with zipfile.ZipFile(path) as archive:
        data = {each: archive.read(each) for each in archive.namelist() if not each.endswith("/")}
    info = f"open_datadist-{name['version']}.dist-info"
    yield from metadata(data.get(f"{info}/METADATA", b""), root, name["version"])
    tags = message_from_bytes(data.get(f"{info}/WHEEL", b"")).get_all("Tag", [])
    if name["tag"] not in tags:
        yield f"WHEEL has the tags {tags}: must have {name['tag']}"
    yield from _recorded(data, f"{info}/RECORD")
    suffix = ".abi3.so" if "abi3" in name["python"] else f".cpython-311-{name['processor']}-linux-gnu.so"
    source = {
        each.relative_to(root / "src").as_posix(): each
        for package in _PACKAGES
        for each in (root / "src" / package).rglob("*")
        if each.is_file() and each.suffix not in _SOURCES | {".so", ".pyc"}
    }
    wanted = {*source, *(f"llm_datadist/_native/{each}{suffix}" for each in ("_limits", "_native"))}
    wanted |= {f"llm_datadist/cpp/{each}" for each in CPP_FILES}
    packed = {each for each in data if not each.startswith(info)}
    yield from (f"lacks {each}" for each in sorted(wanted - packed))
    yield from (f"has {each}, which is not of the packages" for each in sorted(packed - wanted))
    yield from (
        f"{each} is not that of the source"
        for each in sorted(packed & source.keys())
        if data[each] != source[each].read_bytes()
    )


def _recorded(data: dict[str, bytes], record: str) -> Iterator[str]:
    """Yield files whose digest the record lacks."""
    lines = {line.split(",")[0]: line.split(",")[1] for line in data.get(record, b"").decode().splitlines()}
    for name, content in data.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != record and lines.get(name) != f"sha256={digest}":
            yield f"RECORD has no right digest of {name}"


def sdist(path: Path, root: Path) -> Iterator[str]:
    """Yield mistakes of the sdist: metadata, and files of the tree that are not in it."""
    top = path.name.removesuffix(".tar.gz")
    with tarfile.open(path) as archive:
        names = {each.name.removeprefix(f"{top}/") for each in archive.getmembers() if each.isfile()}
        info = archive.extractfile(f"{top}/PKG-INFO") if "PKG-INFO" in names else None
        yield from metadata(b"" if info is None else info.read(), root, path.name.split("-")[1].removesuffix(".tar.gz"))
    yield from (f"lacks {each}" for each in sorted(set(_git(root, "ls-files").split("\n")) - names - {""}))


def metadata(data: bytes, root: Path, version: str) -> Iterator[str]:
    """Yield mistakes of a METADATA or PKG-INFO: what an index refuses, and what is not that of pyproject.toml."""
    found: Message[str, str] = message_from_bytes(data)
    project: dict[str, Any] = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    wanted = {
        "Name": project["name"],
        "Version": version,
        "Summary": project["description"],
        "Requires-Python": project["requires-python"],
        "License-Expression": project["license"],
        "Description-Content-Type": "text/markdown",
    }
    for name, value in wanted.items():
        if found.get_all(name) != [value]:
            yield f"{name} is {found.get_all(name)}: must be {value!r}"
    if not re.fullmatch(r"\d+(\.\d+)*((a|b|rc)\d+)?(\.post\d+)?", version):
        yield f"Version {version} is none that an index takes"
    if len(project["description"]) > 512 or "\n" in project["description"]:
        yield "Summary is longer than 512 characters or a line"
    if found.get_all("Classifier") != project["classifiers"]:
        yield "Classifier: not those of pyproject.toml"
    body = found.get_payload(decode=True)
    text = body.decode() if isinstance(body, bytes) else ""
    if text.strip() != (root / "README.md").read_text().strip():
        yield "the description is not README.md"
    yield from (f"the description does not render: {each}" for each in unrendered(text))


def unrendered(text: str) -> Iterator[str]:
    """Yield lines of Markdown that CommonMark with tables shows as they are written, or leaves out."""
    html = MarkdownIt("commonmark", {"html": False}).enable("table").render(text)
    if "<h1>" not in html:
        yield "no heading"
    outside = re.sub(r"<(code|pre)[^>]*>.*?</\1>", "", html, flags=re.DOTALL)
    yield from re.findall(r"^.*(?:```|\|---|\{[\w-]+\}|&lt;\w|\]\().*$", outside, re.MULTILINE)


# --- the site ---------------------------------------------------------------------------------------------------------
class _Page(HTMLParser):
    """Anchors and links of a page, and its title."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.ids |= {each for each in (given.get("id"), given.get("name") if tag == "a" else None) if each}
        wanted = {"a": "href", "link": "href", "img": "src", "script": "src"}.get(tag)
        if wanted is not None and (link := given.get(wanted)):
            self.links.append(link)


def site(folder: Path, version: str) -> Iterator[str]:
    """Yield mistakes of the site: files that are missing, another version, links within it that lead nowhere."""
    pages = {path: _Page(path) for path in sorted(folder.rglob("*.html")) if "_static" not in path.parts}
    for name in ("index.html", "search.html", "searchindex.js", "objects.inv", "api/index.html"):
        if not (folder / name).exists():
            yield f"site: {name} is missing"
    if (folder / "index.html").exists() and f"open-datadist {version}" not in (folder / "index.html").read_text():
        yield f"site: is not of {version}"
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or not (parts.path or parts.fragment):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            known = pages.get(target)
            if not target.is_file() or (known and parts.fragment and unquote(parts.fragment) not in known.ids):
                yield f"site: {path.relative_to(folder)}: {link} leads nowhere"


if __name__ == "__main__":
    sys.exit(main())
