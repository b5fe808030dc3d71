"""The source tree as the tests about it see it: modules and the names that they define. Parsed, not run."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path
from typing import Final

__all__ = ["PACKAGE", "ROOT", "SOURCE", "defined_names", "modules"]

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "llm_datadist"
SOURCE: Final = ROOT / "src" / PACKAGE


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name; a package's name stands for its ``__init__``.

    A compiled module is there as its stub.
    """
    found = {}
    for path in sorted([*SOURCE.rglob("*.py"), *SOURCE.rglob("*.pyi")]):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def defined_names() -> dict[str, frozenset[str]]:
    """Return, by module path, every name defined there: ``name``, and ``Class.name`` for members and attributes.

    Inherited members are listed under the class that inherits too.
    """
    trees = {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in modules().values()}
    members = {node.name: _members(node) for tree in trees.values() for node in _classes(tree)}
    bases = {
        node.name: [base.id for base in node.bases if isinstance(base, ast.Name)]
        for tree in trees.values()
        for node in _classes(tree)
    }

    def all_members(name: str) -> set[str]:
        return members.get(name, set()).union(*(all_members(base) for base in bases.get(name, [])))

    return {
        path: frozenset(
            _plain_names(tree.body)
            | {f"{node.name}.{name}" for node in _classes(tree) for name in all_members(node.name)}
        )
        for path, tree in trees.items()
    }


def _classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def _plain_names(body: list[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, class attributes, and what methods assign to ``self``."""
    names = _plain_names(node.body)
    for each in ast.walk(node):
        if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store) and isinstance(each.value, ast.Name):
            names |= {each.attr} if each.value.id == "self" else set()
    return names
