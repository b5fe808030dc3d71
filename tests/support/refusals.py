"""Tables of bad input: a call that is good, and rows that each spoil it; nothing may have happened afterwards.

A table is made with :func:`bad`, :func:`integers` and the like; :func:`rows` turns tables into parameters of one test;
:func:`refuse` runs a row at an end and compares all there is at every end: tables, counters, handles, every byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.errors import CacheNotFound, KeyInUse, NoneArgument, NotLinked, OutOfMemory, ParamError
from tests.support.moves import Use, asked, picture, wait_until
from tests.support.world import World, read

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.support.ends import End

__all__ = [
    "FULL",
    "GONE",
    "IN_USE",
    "NONE",
    "RULE",
    "TYPE",
    "UNLINKED",
    "Row",
    "Table",
    "bad",
    "integers",
    "no_op",
    "refuse",
    "rows",
    "state",
    "types",
]


@dataclass(frozen=True)
class Kind:
    """What is raised: the class, the status (None: it has none), and what it is as well (interface R1)."""

    error: type[Exception]
    status: LLMStatusCode | None
    also: tuple[type[Exception], ...] = ()
    never: tuple[type[Exception], ...] = ()


TYPE = Kind(TypeError, None, never=(LLMException, ValueError))
NONE = Kind(NoneArgument, LLMStatusCode.LLM_PARAM_INVALID, (LLMException, TypeError, AttributeError), (ValueError,))
RULE = Kind(ParamError, LLMStatusCode.LLM_PARAM_INVALID, (LLMException, ValueError), (TypeError,))
IN_USE = Kind(KeyInUse, LLMStatusCode.LLM_PARAM_INVALID, (LLMException,))
GONE = Kind(CacheNotFound, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, (LLMException,))
UNLINKED = Kind(NotLinked, LLMStatusCode.LLM_NOT_YET_LINK, (LLMException,))
FULL = Kind(OutOfMemory, LLMStatusCode.LLM_OUT_OF_MEMORY, (LLMException,))


@dataclass(frozen=True)
class Row:
    """What is changed of the good call, and what comes of it: None means that it returns and does nothing."""

    changes: dict[str, Any]
    kind: Kind | None
    text: str

    @property
    def name(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self.changes.items())
        return shown if len(shown) < 70 else shown[:66] + "..."


@dataclass(frozen=True)
class Table:
    """One call of the cache manager, or of LLMDataDist where ``of_instance`` says so, with its rows."""

    call: str
    good: dict[str, Any]
    rows: tuple[Row, ...]
    of_instance: bool = False


def bad(kind: Kind, text: str | None = None, /, **changes: Any) -> list[Row]:
    """One row; the error has to hold ``text``, or the name of the first argument that is changed."""
    return [Row(changes, kind, next(iter(changes)) if text is None else text)]


def no_op(**changes: Any) -> list[Row]:
    """One row of a call that returns and changes nothing."""
    return [Row(changes, None, "")]


def types(name: str, *values: Any, none_ok: bool = False) -> list[Row]:
    """Rows of values of a wrong type, and None unless it is allowed."""
    wrong = [row for value in values for row in bad(TYPE, **{name: value})]
    return wrong if none_ok else [*bad(NONE, **{name: None}), *wrong]


def integers(name: str, low: int, high: int, *, none_ok: bool = False) -> list[Row]:
    """Rows of what is no integer, and of those one below and one above what it can be."""
    outside = [row for value in (low - 1, high + 1) for row in bad(RULE, **{name: value})]
    return [*types(name, "1", 1.0, [1], none_ok=none_ok), *outside]


def rows(tables: Iterable[Table]) -> pytest.MarkDecorator:
    """Return the parameters ``table`` and ``row`` of a test: every row of every table."""
    return pytest.mark.parametrize(
        ("table", "row"),
        [pytest.param(table, row, id=f"{table.call}({row.name})") for table in tables for row in table.rows],
    )


def refuse(ends: Sequence[End], table: Table, row: Row) -> None:
    """Run a row at the first end: it raises what it should, in one line, and nothing has happened at any end."""
    before = [end.do(state) for end in ends]
    error = ends[0].do(attempt, table, row.changes)
    if row.kind is None:
        assert error is None, repr(error)
        for was in before:
            del was["successes"]  # it is one
    else:
        _is(error, row.kind, row.text)
    _nothing_happened(ends, before)


def attempt(world: World, table: Table, changes: dict[str, Any]) -> BaseException | None:
    """Call; return what was raised."""
    owner = world.dd if table.of_instance else world.cm
    arguments = {name: _real(world, value) for name, value in (table.good | changes).items()}
    try:
        getattr(owner, table.call)(**arguments)
    except Exception as error:  # noqa: BLE001 (looked at by the test)
        return error
    return None


def _real(world: World, value: Any) -> Any:
    if isinstance(value, Use):
        return world.caches[value.name]
    return [_real(world, each) for each in value] if isinstance(value, list) else value


def _is(error: BaseException | None, kind: Kind, text: str) -> None:
    assert isinstance(error, kind.error), repr(error)
    assert all(isinstance(error, each) for each in kind.also), repr(error)
    assert not any(isinstance(error, each) for each in kind.never), repr(error)
    if isinstance(error, LLMException):
        assert error.status_code is kind.status
    assert text in str(error)
    assert "\n" not in str(error)


def state(world: World) -> dict[str, Any]:
    """Return all that a refused call must leave alone, after checking that the tables agree with each other.

    Statistics without ages and without the answers that are kept of peers; what calls have done, by their bytes and
    successes; the addresses in every handle; every byte of every cache that has memory.
    """
    operations = world.dd.statistics().operations
    return {
        "statistics": asked(picture(world)),
        "bytes moved": {each.name: each.nbytes for each in operations if each.nbytes},
        "successes": {each.name: each.count - each.errors for each in operations if each.count > each.errors},
        "handles": {name: list(cache.tensor_addrs) for name, cache in world.caches.items()},
        "bytes": {
            name: [tensor.tobytes() for tensor in read(cache)]
            for name, cache in world.caches.items()
            if cache.tensor_addrs
        },
    }


def _nothing_happened(ends: Sequence[End], before: list[dict[str, Any]]) -> None:
    """What was pinned for a question is released when its answer was of no use: that is waited for."""
    wait_until(lambda: all(end.do(_pins) == was["statistics"].pins for end, was in zip(ends, before, strict=True)))
    for end, was in zip(ends, before, strict=True):
        now = end.do(state)
        for part in was:
            assert now[part] == was[part], f"{part} of {end.cluster_id}"


def _pins(world: World) -> Any:
    return world.dd.statistics().pins
