"""The tests as scripts/coverage_table.py sees them: which there are, what each of them mentions. Parsed, not run."""

from __future__ import annotations

import ast
import re
from functools import cached_property
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Suite"]

_FUNCTION: Final = ast.FunctionDef | ast.AsyncFunctionDef


class _Module:
    """One file under tests/: what it defines at its top level, and what it takes from other files there."""

    def __init__(self, text: str) -> None:
        self.lines = text.splitlines()
        self.definitions: dict[str, list[ast.AST]] = {}
        self.imports: dict[str, tuple[str, str]] = {}
        for node in ast.parse(text).body:
            self._add(node)

    def _add(self, node: ast.stmt) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests"):
            for alias in node.names:
                self.imports[alias.asname or alias.name] = (node.module or "", alias.name)
        elif isinstance(node, _FUNCTION | ast.ClassDef):
            self.definitions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)):
                self.definitions.setdefault(name, []).append(node)

    def text(self, node: ast.AST) -> str:
        """Return the lines of a definition, its decorators included."""
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])  # type: ignore[attr-defined]
        return "\n".join(self.lines[first - 1 : node.end_lineno])  # type: ignore[attr-defined]


class Suite:
    """Every test function of a checkout.

    Args:
        root: The checkout.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._texts: dict[str, str] = {}

    @cached_property
    def _modules(self) -> dict[str, _Module]:
        paths = sorted((self._root / "tests").rglob("*.py"))
        return {path.relative_to(self._root).as_posix(): _Module(path.read_text()) for path in paths}

    @cached_property
    def names(self) -> list[str]:
        """Every test as ``path::function``; methods of classes as ``path::Class.function``."""
        found = []
        for path, module in self._modules.items():
            if path.rpartition("/")[2].startswith("test_"):
                found += [f"{path}::{name}" for name in module.definitions if name.startswith("test_")]
                found += [f"{path}::{method}" for method in _methods(module)]
        return found

    def exists(self, test: str) -> bool:
        """Return True for a test that there is."""
        return test in self.names

    def numbered(self, number: str) -> list[str]:
        """Return the tests whose name carries a ruling's or invariant's number: "r5" is in ``test_r05_...``."""
        pattern = re.compile(rf"test_(?:[ri]\d+_)*{number[0]}0*{number[1:]}_")
        return [test for test in self.names if pattern.match(test.rpartition("::")[2].rpartition(".")[2])]

    def mentions(self, test: str, name: str) -> bool:
        """Return True if ``name`` is in a test's source, parametrisation, or in what of tests/ it uses."""
        if test not in self._texts:
            path, _, function = test.partition("::")
            self._texts[test] = f"{test}\n" + "\n".join(self._reach(path, function.partition(".")[0], set()))
        return re.search(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", self._texts[test]) is not None

    def mentioning(self, name: str) -> list[str]:
        """Return the tests that mention ``name``, those first that have it in their own name."""
        found = [test for test in self.names if self.mentions(test, name)]
        return sorted(found, key=lambda test: name not in test.rpartition("::")[2])

    def _reach(self, path: str, name: str, seen: set[tuple[str, str]]) -> list[str]:
        """Return the text of a definition and of every definition in tests/ that it names."""
        module = self._modules.get(path)
        if module is None or (path, name) in seen:
            return []
        seen.add((path, name))
        if name in module.imports:
            source, original = module.imports[name]
            return self._reach(f"{source.replace('.', '/')}.py", original, seen)
        texts = []
        for node in module.definitions.get(name, []):
            texts.append(module.text(node))
            used = [each.id for each in ast.walk(node) if isinstance(each, ast.Name)]
            used += [each.arg for each in ast.walk(node) if isinstance(each, ast.arg)]  # fixtures
            for each in used:
                texts += self._reach(path, each, seen)
        return texts


def _methods(module: _Module) -> list[str]:
    classes = [node for nodes in module.definitions.values() for node in nodes if isinstance(node, ast.ClassDef)]
    return [
        f"{node.name}.{each.name}"
        for node in classes
        for each in node.body
        if isinstance(each, _FUNCTION) and each.name.startswith("test_")
    ]
