"""The API reference: every public docstring names its source, and every public class is on a page (docs/api)."""

from __future__ import annotations

import importlib.util
import inspect
import re
from typing import TYPE_CHECKING, Final

import pytest

import llm_datadist
from llm_datadist.cache_manager import CacheManager
from tests.support.source import PACKAGE, ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS: Final = ROOT / "docs"


def _public() -> list[type]:
    """Return the classes of the interface: what the package exports, its managers, and the C++-shaped calls."""
    found = {getattr(llm_datadist, name) for name in llm_datadist.__all__} | {CacheManager}
    if importlib.util.find_spec("llm_datadist.cpp_api") is not None:
        cpp_api = importlib.import_module("llm_datadist.cpp_api")
        found |= {value for name in cpp_api.__all__ if isinstance(value := getattr(cpp_api, name), type)}
    return sorted(found, key=lambda cls: cls.__name__)


def _functions(cls: type) -> Iterator[tuple[str, str]]:
    """Yield (name, docstring) of every public function of a class that we wrote, inherited ones too."""
    for base in cls.__mro__:
        for name, value in vars(base).items() if base.__module__.startswith(PACKAGE) else ():
            function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
            if not name.startswith("_") and inspect.isfunction(function):
                yield name, inspect.getdoc(function) or ""


@pytest.mark.parametrize("cls", _public(), ids=lambda cls: cls.__name__)
def test_every_public_docstring_names_its_source(cls: type) -> None:
    # Properties, settings and members of an enumeration have the source of their class: docs/conf.py adds it.
    assert "Source:" in (cls.__doc__ or "") or "extension" in (cls.__doc__ or "").lower(), cls.__name__
    assert [name for name, text in _functions(cls) if "Source:" not in text and "xtension" not in text] == []


def test_every_public_class_is_on_a_page_of_the_reference() -> None:
    pages = "".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
    whole = re.findall(r"automodule:: (\S+)", pages)
    single = {name.rpartition(".")[2] for name in re.findall(r"(?:autoclass|py:class):: (\S+)", pages)}
    assert [cls.__name__ for cls in _public() if cls.__name__ not in single and cls.__module__ not in whole] == []


def test_every_page_of_the_reference_and_of_docs_is_in_the_index() -> None:
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```", (DOCS / "index.md").read_text(), re.MULTILINE | re.DOTALL)
    listed = set(re.findall(r"^[\w/]+$", "\n".join(trees), re.MULTILINE))
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    assert listed == pages - {"index"}
