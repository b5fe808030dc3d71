"""How `make docs` builds the pages of this folder and the reference in api/, with Sphinx; the output is build/docs."""

from __future__ import annotations

import inspect
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from llm_datadist import __version__

sys.path.insert(0, str(Path(__file__).parent.parent))  # for scripts/

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project: Final = "open-datadist"
release: Final = __version__
author: Final = "the open-datadist contributors"
project_copyright: Final = author
html_title: Final = f"open-datadist {release}"
html_theme: Final = "furo"
html_favicon: Final = "pictures/icon.svg"
html_static_path: Final = ["_static"]
html_css_files: Final = ["site.css"]
extensions: Final = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser"]
exclude_patterns: Final = ["_build"]
highlight_language: Final = "none"  # of fences that name no language

# Links such as errors.md#the-tree need the headings' anchors.
myst_heading_anchors: Final = 3
# A page outside of this folder is no page of the site; tests/test_docs.py checks every link.
# Two classes are called Cache, and two CacheDesc: the interface has one of each in Python and in C++.
suppress_warnings: Final = ["myst.xref_missing", "ref.python"]

autodoc_member_order: Final = "bysource"
autodoc_typehints: Final = "signature"
python_use_unqualified_type_names: Final = True
napoleon_google_docstring: Final = True
napoleon_numpy_docstring: Final = False
napoleon_use_rtype: Final = False


def _add_source(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Give what has no source of its own that of its class or module; make sources links to docs/interface.md."""
    text = "\n".join(lines)
    if "Source:" not in text and "extension" not in text.lower():
        if what in ("attribute", "property", "method", "function"):
            owner = inspect.getdoc(_owner(name)) or ""
            lines += ["", *[line.strip() for line in owner.splitlines() if "Source:" in line], ""]
        elif what == "exception":
            lines += ["", "An extension: the interface has LLMException and its status codes.", ""]
    lines[:] = [line.replace("Source: interface ", "Source: :doc:`interface </interface>` ") for line in lines]
    if what in ("attribute", "property"):
        lines[:0] = ["..", ""]  # an empty comment: napoleon takes what is before a colon in the first line for a type


def _owner(name: str) -> object:
    """Return the class or module of a documented member, by the member's dotted name."""
    module, _, cls = name.rpartition(".")[0].rpartition(".")
    return getattr(import_module(module), cls, None)


def _add_reference(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the directives of a page of api/ in the place of the text that is for readers of a checkout."""
    if page.startswith("api/"):
        text[0] = import_module("scripts.api_pages").for_sphinx(text[0])


def _add_coverage(app: Sphinx, page: str, text: list[str]) -> None:
    """Put the tables of scripts/coverage.py below the text of docs/coverage.md."""
    if page == "coverage":
        text[0] += f"\n{import_module('scripts.coverage').render()}"


def setup(app: Sphinx) -> None:
    """Connect the hooks, the first before napoleon's."""
    app.connect("autodoc-process-docstring", _add_source, priority=100)
    app.connect("source-read", _add_reference)
    app.connect("source-read", _add_coverage)
