"""Mutants of a module: what cosmic-ray can change in it, without what only a type checker reads."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator

from tests.mutation import Mutant


def mutants(module: str, source: str, operators: Sequence[str], sample: int | None, seed: int) -> Iterator[Mutant]:
    """Yield mutants of a module in the order of the source, or ``sample`` of them, chosen by the seed alone."""
    places = list(_places(module, source, operators))
    order = list(range(len(places)))
    if sample is not None:
        Random(f"{seed} {module}").shuffle(order)
    found: dict[int, Mutant] = {}
    original = _meaning(source)
    for index in order:
        if sample is not None and len(found) >= sample:
            break
        key, operator, occurrence = places[index]
        code = _mutated(source, operator, occurrence)
        if code is not None and _meaning(code) not in (None, original):
            found[index] = Mutant(module, key, code)
    yield from (found[index] for index in sorted(found))


def _mutated(source: str, operator: str, occurrence: int) -> str | None:
    """Return the changed module, or None where the operator cannot change that place."""
    try:
        code: str | None = mutate_code(source, get_operator(operator)(), occurrence)
    except AttributeError:  # cosmic-ray's ExceptionReplacer knows no exceptions with a dot, as in "except _native.Lost"
        return None
    return code


def _places(module: str, source: str, operators: Sequence[str]) -> Iterator[tuple[str, str, int]]:
    """Yield (key, operator, which of the places of that operator)."""
    lines, nodes = source.splitlines(), list(ast_nodes(get_ast(source)))
    names = _names(source)
    equals: Counter[str] = Counter()
    for operator in operators:
        positions = [start for node in nodes for start, _ in get_operator(operator)().mutation_positions(node)]
        for occurrence, (line, _) in enumerate(positions):
            name = operator.removeprefix("core/").removeprefix("Replace")
            key = f"{module}: {names[line - 1]}: {name}: {lines[line - 1].strip()}"
            equals[key] += 1
            yield f"{key} #{equals[key]}", operator, occurrence


def _names(source: str) -> list[str]:
    """Return for each line the innermost function or class that it belongs to."""
    names = ["module"] * len(source.splitlines())

    def enter(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{path}.{child.name}".lstrip(".")
                first = min((child.lineno, *(each.lineno for each in child.decorator_list)))
                names[first - 1 : child.end_lineno] = [inner] * ((child.end_lineno or first) - first + 1)
            enter(child, inner)

    enter(ast.parse(source), "")
    return names


def _meaning(source: str) -> str | None:
    """Return what runs of a module, to be compared; None if nothing would."""
    try:
        return ast.dump(_Untyped().visit(ast.parse(source)))
    except SyntaxError:
        return None


class _Untyped(ast.NodeTransformer):
    """Takes away annotations, and imports that only a type checker makes."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        return super().generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> ast.AST:
        checked = any(isinstance(each, ast.Name) and each.id == "TYPE_CHECKING" for each in ast.walk(node.test))
        return ast.Pass() if checked else self.generic_visit(node)
