"""Imports only go down: every import of every module, also inside functions, against one table.

The table is the law; docs/architecture.md shows it with the reasons, and tests/test_docs.py holds the two together.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import pytest

from tests.support.source import PACKAGE, Import, imports_of, modules

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Modules by layer; a package stands for everything in it, unless a longer name is listed.
LAYERS: Final[dict[int, str]] = {
    0: "errors deadline log checks enums data_type keys grant descriptors cluster transfer_types types "
    "config options pool_options metrics kv_cache v1codes",
    1: "native",
    2: "memory",
    3: "cache",
    4: "transport",
    5: "control",
    6: "caches local swap transfer target lane_target withdrawal verify witness grants "
    "recipient locate layerwise tasks workers meters engine",
    # "" is the package itself: __init__.py holds the public names and nothing else.
    7: "managers cache_manager kv_managers kv_cache_manager tensor views instance datadist cpp_api",
    8: "bench cli demo testing prometheus compat configs status utils v2",
}
_PUBLIC_LAYER: Final = 7

#: Layers that see less than everything below them: what the word in front may import besides its own.
ONLY: Final[dict[str, tuple[str, ...]]] = {
    # Geometry and references, without bytes: the planner and counts are all it may take from native.
    "cache": ("0", "native"),
    # A transport moves plans between regions and never knows what is in them.
    "transport": ("0", "native", "memory"),
    # Links and messages, counts from native: what a cache is reaches them only as opaque bytes and through registered
    # handlers.
    "control": ("0", "transport", "native"),
}

#: What is not of the standard library and may be imported, by the first word of the module that does; "": everybody.
THIRD_PARTY: Final[dict[str, str]] = {
    "": "numpy msgspec",
    "views": "torch",  # optional, inside one function
    "cli": "typer rich",
    "demo": "rich",  # optional, inside one function
    "bench": "rich matplotlib torch nixl mooncake",  # of the command only; peers inside their sides
    "testing": "pytest",
    "prometheus": "prometheus_client",
}

_LAYER_OF: Final = {word: layer for layer, words in LAYERS.items() for word in words.split()}


def layer_of(module: str) -> int | None:
    """Return the layer of a module of the package, or None when the table does not know it."""
    name = module.removeprefix(PACKAGE).removeprefix(".")
    if not name:
        return _PUBLIC_LAYER
    while name not in _LAYER_OF and "." in name:
        name = name.rpartition(".")[0]
    return _LAYER_OF.get(name)


def _word(module: str) -> str:
    return module.removeprefix(PACKAGE).removeprefix(".").partition(".")[0]


def violations(sources: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for every import that the tables forbid."""
    for module, imports in _graph(sources).items():
        if layer_of(module) is None:
            yield f"{module} is in no layer: add it to LAYERS in tests/test_layers.py and to docs/architecture.md"
            continue
        for each in imports:
            reason = _against(module, each.module)
            if reason is not None:
                yield f"{module}, line {each.line}: imports {each.module}: {reason}"


def _against(module: str, imported: str) -> str | None:
    """Return what is wrong with the import, or None."""
    if imported.partition(".")[0] != PACKAGE:
        return _against_third_party(module, imported.partition(".")[0])
    mine, other = layer_of(module), layer_of(imported)
    if other is None:
        return None  # reported for the module itself, if it exists
    if mine is None or other > mine:
        return f"layer {mine} must not know layer {other}"
    own, word = _word(module), _word(imported)
    if own in ONLY and word != own and word not in ONLY[own] and str(other) not in ONLY[own]:
        return f"{own} may import only {', '.join(ONLY[own])} (0: that layer)"
    return None


def _against_third_party(module: str, name: str) -> str | None:
    allowed = [*THIRD_PARTY[""].split(), *THIRD_PARTY.get(_word(module), "").split()]
    if name in sys.stdlib_module_names or name in allowed:
        return None
    return f"neither of the standard library nor one of {', '.join(allowed)}"


def cycles(sources: Mapping[str, str]) -> list[list[str]]:
    """Return the cycles among imports that run when a module is imported."""
    graph = {
        module: {each.module for each in imports if each.at_import_time and each.module in sources}
        for module, imports in _graph(sources).items()
    }
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> None:
        if module in path:
            found.append([*path[path.index(module) :], module])
        elif module not in done:
            for imported in sorted(graph[module]):
                visit(imported, [*path, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def _graph(sources: Mapping[str, str]) -> dict[str, list[Import]]:
    return {module: imports_of(module, source, set(sources)) for module, source in sources.items()}


def _sources() -> dict[str, str]:
    return {module: path.read_text() for module, path in modules().items()}


def test_imports_only_go_down() -> None:
    assert list(violations(_sources())) == []


def test_no_cycle_at_import_time() -> None:
    assert cycles(_sources()) == []


def test_every_word_of_the_tables_is_a_module() -> None:
    words = {_word(module) for module in modules()}
    named = {*_LAYER_OF, *ONLY, *(word for word in THIRD_PARTY if word)}
    assert named <= words
    assert sum(len(line.split()) for line in LAYERS.values()) == len(_LAYER_OF), "a module is in two layers"


# The checker itself: a test about imports is worth nothing if it does not see them.


@pytest.mark.parametrize(
    ("module", "source", "expected"),
    [
        ("errors", "import llm_datadist._native", "layer 0 must not know layer 1"),
        ("memory.pool", "def f():\n    from llm_datadist._cache import layout", "layer 2 must not know layer 3"),
        ("transfer", "if TYPE_CHECKING:\n    from llm_datadist import datadist", "layer 6 must not know layer 7"),
        ("transfer", "from llm_datadist import LLMDataDist", "layer 6 must not know layer 7"),
        ("datadist", "async def f():\n    import llm_datadist.testing.peers", "layer 7 must not know layer 8"),
        ("cache.layout", "from llm_datadist._memory import pool", "cache may import only"),
        ("transport.shm", "from llm_datadist._cache import layout", "transport may import only"),
        ("control.link", "from llm_datadist._memory.guards import Guard", "control may import only"),
        ("control.link", "from llm_datadist import caches", "layer 5 must not know layer 6"),
        ("native", "class A:\n    def f(self):\n        import torch", "neither of the standard library"),
        ("views", "import rich", "neither of the standard library"),
        ("nowhere", "import sys", "llm_datadist.nowhere is in no layer"),
    ],
)
def test_a_forbidden_import_is_seen(module: str, source: str, expected: str) -> None:
    found = list(violations(dict.fromkeys(modules(), "") | {f"{PACKAGE}.{module}": source}))
    assert len(found) == 1
    assert expected in found[0]


def test_a_cycle_is_seen_and_late_imports_make_none() -> None:
    first, second = f"{PACKAGE}.keys", f"{PACKAGE}.types"
    assert cycles({first: f"import {second}", second: f"from {PACKAGE} import keys"}) == [[first, second, first]]
    assert cycles({first: f"import {second}", second: f"def f():\n    from {PACKAGE} import keys"}) == []
    assert cycles({first: f"import {second}", second: f"if TYPE_CHECKING:\n    from {PACKAGE} import keys"}) == []
