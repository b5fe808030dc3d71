"""The source tree as the tests about it see it: modules, their imports, and the names they define. Parsed, not run."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PACKAGE", "ROOT", "SOURCE", "Import", "defined_names", "imports_of", "modules", "path_of"]

ROOT: Final = Path(__file__).parent.parent.parent
PACKAGE: Final = "llm_datadist"
SOURCE: Final = ROOT / "src" / PACKAGE


@dataclass(frozen=True, slots=True)
class Import:
    """One import of one module.

    Attributes:
        module: Dotted name of what is imported, as far as it can be a module: ``from a import b`` is ``a.b`` where
            that is a module of the package, else ``a``.
        line: Where.
        at_import_time: False inside a function and under ``TYPE_CHECKING``: it cannot take part in a cycle.
    """

    module: str
    line: int
    at_import_time: bool


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


def path_of(module: str) -> str:
    """Return the path of a module relative to the package's folder: ``_cache/geometry.py``."""
    return modules()[module].relative_to(SOURCE).as_posix()


def imports_of(module: str, source: str, known: set[str]) -> list[Import]:
    """Return every import in ``source``, also inside functions and under ``TYPE_CHECKING``.

    Args:
        module: Dotted name of the module, for nothing but the error text.
        source: Its text.
        known: Modules of the package, to tell ``from package import module`` from ``from module import name``.

    Raises:
        ValueError: A relative import, which the project does not use.
    """
    return list(_walk(module, ast.parse(source), known, at_import_time=True))


def _walk(module: str, node: ast.AST, known: set[str], *, at_import_time: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_import_time) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            if child.level or child.module is None:
                raise ValueError(f"{module}, line {child.lineno}: relative import; write the whole name")
            for name in dict.fromkeys(_resolve(child.module, alias.name, known) for alias in child.names):
                yield Import(name, child.lineno, at_import_time)
        else:
            yield from _walk(module, child, known, at_import_time=at_import_time and not _waits(child))


def _waits(node: ast.AST) -> bool:
    """Return True where what is inside does not run when the module is imported."""
    if isinstance(node, ast.If):
        return ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)


def _resolve(source: str, name: str, known: set[str]) -> str:
    return f"{source}.{name}" if f"{source}.{name}" in known else source


@cache
def defined_names() -> dict[str, frozenset[str]]:
    """Return, by module path, every name defined there: ``name``, and ``Class.name`` for members and attributes.

    Inherited members are listed under the class that inherits too.
    """
    trees = {path_of(module): ast.parse(path.read_text()) for module, path in modules().items()}
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
