"""Write signatures and first sentences into the pages of docs/api, for those who read them in a checkout.

A page has Sphinx's directives in a comment, ``<!-- api``, which Markdown does not show. ``python -m scripts.api_pages``
writes what follows, to ``<!-- end -->``, from the source, and scripts/check_pages.py compares it. On the site the
directives take its place (docs/conf.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from enum import Enum
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast, get_overloads

import llm_datadist

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PAGES: Final = sorted((Path(__file__).parent.parent / "docs" / "api").glob("*.md"))
_BLOCK: Final = re.compile(r"<!-- api\n(.*?)-->\n.*?<!-- end -->", re.DOTALL)
_DIRECTIVE: Final = re.compile(r"^\.\. ([\w:]+):: (\S+)\n((?:\n?   .*\n)*)", re.MULTILINE)
_OPTION: Final = re.compile(r"^   :([\w-]+): *(.*)$", re.MULTILINE)
_SOURCE: Final = Path(llm_datadist.__file__).parent
#: Bases that give a class members or arguments of their own.
_OURS: Final = "llm_datadist"


def main() -> None:
    """Write all pages."""
    for page in PAGES:
        page.write_text(current(page.read_text()))


def current(text: str) -> str:
    """Return a page as it must be."""
    return _BLOCK.sub(lambda found: f"<!-- api\n{found[1]}-->\n{_shown(found[1])}<!-- end -->", text)


def for_sphinx(text: str) -> str:
    """Return a page with the directives in the place of what they stand for."""
    return _BLOCK.sub(lambda found: f"```{{eval-rst}}\n{found[1]}```", text)


def _shown(directives: str) -> str:
    """Return the Markdown for some directives."""
    lines: list[str] = []
    for kind, name, body in _DIRECTIVE.findall(directives):
        options = dict(_OPTION.findall(body))
        if kind == "py:class":  # described there, not in the source
            lines += ["", f"**`{name}`**", "", _sentence(body)]
        elif kind == "automodule":
            lines += ["", _sentence(inspect.getdoc(import_module(name)))]
            lines += _members_of_module(name, options) if "members" in options else []
        else:
            lines += _described(name, _found(name), options)
    return "\n".join(lines).lstrip("\n").replace("\n\n\n", "\n\n").join(("\n", "\n\n"))


def _found(name: str) -> object:
    module, _, last = name.rpartition(".")
    found: object = getattr(import_module(module), last)
    return found


def _members_of_module(name: str, options: dict[str, str]) -> Iterator[str]:
    module, left_out = import_module(name), options.get("exclude-members", "").split(", ")
    for each in getattr(module, "__all__", vars(module)):
        member = getattr(module, each)
        if each not in left_out and not each.startswith("_") and getattr(member, "__module__", None) == name:
            yield from _described(f"{name}.{each}", member, options)


def _described(name: str, member: object, options: dict[str, str]) -> Iterator[str]:
    """Yield the lines about a class, with its members, or about a function."""
    prefix = "class " if isinstance(member, type) else ""
    yield from ("", f"**`{prefix}{_call(name, member)}`**")
    if (said := _sentence(inspect.getdoc(member))) and not said.startswith(
        f"{name.rpartition('.')[2]}("
    ):  # a dataclass's own
        yield from ("", said)
    listed = list(_members(member, options)) if isinstance(member, type) else []
    yield from ["", *listed] if listed else []


def _members(cls: type, options: dict[str, str]) -> Iterator[str]:
    """Yield a line for each member that the directive wants and the source describes."""
    if issubclass(cls, Enum) and "members" in options:
        yield "- " + ", ".join(f"`{each.name}` {each.value!r}" for each in cls)
    wanted = [each for key in ("members", "private-members") for each in options.get(key, "").split(", ") if each]
    inherits = "inherited-members" in options or bool(wanted)
    public = "members" in options and not options["members"]
    found: dict[str, Any] = {}
    for each in [each for each in cls.__mro__ if each.__module__.startswith(_OURS)][: None if inherits else 1]:
        found = {**found, **{name: member for name, member in vars(each).items() if name not in found}}
    for name, member in found.items():
        if name in wanted or (public and not name.startswith("_")):
            yield from _member(name, member)


def _member(name: str, member: object) -> Iterator[str]:
    said = _sentence(getattr(member, "__doc__", None))
    inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
    if not said or isinstance(member, type):
        return
    if isinstance(member, property | cached_property):
        yield f"- `{_result(name, inner)}`: {said}"
    elif callable(inner):
        yield f"- `{_call(name, inner)}`: {said}"
    elif hasattr(type(member), "__set__") and member.__doc__ != type(member).__doc__:  # an attribute that is checked
        yield f"- `{name}`: {said}"


def _sentence(doc: str | None) -> str:
    """Return the first sentence of a docstring, as Markdown."""
    first = " ".join(inspect.cleandoc(doc or "").partition("\n\n")[0].split())
    first = re.split(r"(?<=[a-z`)\d]\.) (?=[A-Z`])", first, maxsplit=1)[0]
    first = re.sub(r":[\w:]+:`(?:~[^`]*\.)?([^`]+)`", r"`\1`", first)
    return first.replace("``", "`")


# --- signatures -------------------------------------------------------------------------------------------------------
def _call(name: str, member: object) -> str:
    """Return a name with its arguments, as the source has them."""
    if isinstance(member, type):
        if issubclass(member, Enum):
            return name
        node = _initialiser(member)
        return f"{name}({_arguments(node.args)})" if node is not None else f"{name}({', '.join(_fields(member))})"
    function = _node(member)
    returns = f" -> {_plain(function.returns)}" if function.returns is not None else ""
    return f"{name}({_arguments(function.args)}){returns}"


def _result(name: str, getter: object) -> str:
    returns = _node(getter).returns
    return name if returns is None else f"{name}: {_plain(returns)}"


def _node(function: object) -> ast.FunctionDef | ast.AsyncFunctionDef:
    written: Any = inspect.unwrap(cast("Callable[..., object]", function))
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(written))).body
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    return node


def _initialiser(cls: type) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    """Return what makes an instance, if the source has it: not of dataclasses, structs and protocols."""
    for each in [each for each in cls.__mro__ if "__init__" in vars(each)]:
        made = inspect.unwrap(vars(each)["__init__"])
        if inspect.isfunction(made) and made.__code__.co_filename.startswith(str(_SOURCE)):
            return _node(next(iter(get_overloads(made)), made))
    return None


def _body(cls: type) -> list[ast.stmt]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(node, ast.ClassDef)
    return node.body


def _fields(cls: type) -> Iterator[str]:
    """Yield the annotated fields of a dataclass or struct, those of its bases first."""
    if issubclass(cls, Enum) or not (hasattr(cls, "__dataclass_fields__") or hasattr(cls, "__struct_fields__")):
        return
    for each in reversed([each for each in cls.__mro__ if each.__module__.startswith(_OURS)]):
        for node in _body(each):
            if isinstance(node, ast.AnnAssign) and "ClassVar" not in (kind := _plain(node.annotation)):
                name = _plain(node.target)
                if not name.startswith("_"):
                    yield f"{name}: {kind}" + (" = ..." if node.value is not None else "")


def _arguments(arguments: ast.arguments) -> str:
    """Return arguments without ``self``."""
    first = next(iter(arguments.posonlyargs or arguments.args), None)
    text = _plain(arguments)
    return re.sub(r"^(self|cls)(, /)?(, )?", "", text) if first is not None and first.arg in ("self", "cls") else text


def _plain(node: ast.AST) -> str:
    return ast.unparse(node).replace("`", "")


if __name__ == "__main__":
    main()
