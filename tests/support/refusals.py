"""Tables of bad input: a call that is good, and rows that each spoil it; nothing may have happened afterwards.

A :class:`Table` is one call. A kind of argument (:class:`Spec`) says what is wrong for every argument of it.
:func:`refuse` runs all rows of a table at an end and then compares all there is at every end: tables, counters,
handles, every byte. Only if something differs the rows are run one by one, to name the one that did it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import CacheMismatch, CacheNotFound, KeyInUse, NoneArgument, NotLinked, OutOfMemory, ParamError
from tests.support.cpp import failed_with
from tests.support.ends import End
from tests.support.memory import FIXED_ADDRS  # noqa: F401 (maps them in a child that runs a table)
from tests.support.moves import Use, asked, picture, wait_until
from tests.support.v1 import kv_of
from tests.support.world import World, read

#: What is raised. What each class is beside itself: tests/unit/test_errors.py.
Kind = type[Exception]
TYPE: Final = TypeError
NONE: Final = NoneArgument
RULE: Final = ParamError
MISMATCH: Final = CacheMismatch
IN_USE: Final = KeyInUse
GONE: Final = CacheNotFound
UNLINKED: Final = NotLinked
FULL: Final = OutOfMemory


@dataclass(frozen=True)
class Row:
    """What is changed of the good call, and what comes of it: no kind means that it returns and does nothing."""

    changes: dict[str, Any]
    kind: Kind | None
    texts: tuple[str, ...]


def bad(kind: Kind, /, *texts: str, **changes: Any) -> Row:
    """One row; the error has to hold the texts, or the name of the first argument that is changed."""
    return Row(changes, kind, texts or (next(iter(changes)),))


def each(kind: Kind, text: str, /, **values: Sequence[Any]) -> list[Row]:
    """One row for every value of every argument; {} in the text stands for the argument's name."""
    return [Row({name: value}, kind, (text.format(name),)) for name, some in values.items() for value in some]


def no_op(**changes: Any) -> Row:
    """One row of a call that returns and changes nothing."""
    return Row(changes, None, ())


class Spec:
    """A kind of argument: values of a wrong type, and values with an error that may name a part of the argument.

    ``inner`` is kind of error, its text, where {} stands for the argument's name, and the values with that error.
    """

    def __init__(
        self, wrong: tuple[Any, ...], *inner: tuple[Kind, str, *tuple[Any, ...]], none_ok: bool = False
    ) -> None:
        self.wrong, self.inner, self._none_ok = wrong, inner, none_ok

    def rows(self, name: str) -> list[Row]:
        none = [] if self._none_ok else [Row({name: None}, NONE, (name, "None"))]
        wrong = [Row({name: value}, TYPE, (name, type(value).__name__)) for value in self.wrong]
        inner = [row for kind, text, *values in self.inner for row in each(kind, text, **{name: values})]
        return [*none, *wrong, *inner]


class Table:
    """One call, such as "cm.pull_cache": a good call, the kinds of its arguments, and rows that only it has.

    "cm" is the cache manager, "dd" the LLMDataDist, "v1" the KvCacheManager, "cpp" the LlmDataDist, "cache" that
    argument.
    """

    def __init__(self, call: str, good: dict[str, Any], specs: Mapping[str, Spec], *special: Row) -> None:
        self.call = call
        self.good = good
        self.rows = [*(row for name, spec in specs.items() for row in spec.rows(name)), *special]


# --- kinds of arguments -----------------------------------------------------------------------------------------------
def integer(low: int, high: int, *broken: int, none_ok: bool = False) -> Spec:
    """The kind of an integer: no other type, none that is out of its width by one, none that breaks a rule."""
    outside = [(RULE, f"{value}", value) for value in (low - 1, high + 1)]
    return Spec(("1", 1.0, [1]), *outside, (RULE, "{}", *broken), none_ok=none_ok)


UINT32: Final = integer(0, 2**32 - 1)
UINT64: Final = integer(0, 2**64 - 1)
INT64: Final = integer(-(2**63), 2**63 - 1)

#: Two blocks are wanted, and there are 6.
BLOCK_LIST: Final = Spec(
    (0, "01", {0, 5}, {0: 5}),
    (NONE, "{}[1]", [0, None]),
    (TYPE, "{}[1]", [0, "5"]),
    (TYPE, "{}[0]", [3.0, 1], [[3], 1]),
    (RULE, "{}[1]", [0, -1]),
    (RULE, "{}[0]", [2**64, 1]),
    (RULE, "{}", [0, 2**63], []),
    (RULE, "_blocks", [2**40, 0], [0, 6]),
)
COPY_PAIRS: Final = Spec(
    ([(0, [1])], "0", 1, {0}),
    (NONE, "{}[0]", {0: None}),
    (TYPE, "{}[0]", {0: 1}, {0: {1, 2}}, {0: "1"}),
    (NONE, "{}[0][1]", {0: [1, None]}),
    (TYPE, "{}[0][0]", {0: ["1"]}, {0: [1.0]}),
    (NONE, "key of {}", {None: [1]}),
    (TYPE, "key of {}", {"0": [1]}, {0.0: [1]}),
    (RULE, "key of {}: -1", {-1: [1]}),
    (RULE, "{}[0][1]: -1", {0: [1, -1]}),
    (RULE, f"{{}}[0][0]: {2**64}", {0: [2**64]}),
    (RULE, "key of {}: 6: cache has 6 blocks", {6: [1]}),
    (RULE, "{}[1][1]=6: cache has 6 blocks", {0: [1], 1: [2, 6]}, {0: range(2), 1: (2, 6)}),
    (RULE, str(2**62), {2**62: [1]}),
)
#: Caches of 6 and of 8 blocks.
SWAP_PAIRS: Final = Spec(
    ([(0, 1)], (0, 0), "{0: 0}", 1, {0, 1}),
    (TYPE, "key of {}", {0: 0, "1": 1}, {0: 0, 1.0: 1}, {0: 0, (1, 2): 1}),
    (NONE, "key of {}", {0: 0, None: 1}),
    (NONE, "{}[1]", {0: 0, 1: None}),
    (TYPE, "{}[1]", {0: 0, 1: "1"}, {0: 0, 1: 1.5}, {0: 0, 1: [1]}),
    (RULE, "key of {}: -1", {0: 0, -1: 1}),
    (RULE, "{}[1]: -1", {0: 0, 1: -1}),
    (RULE, f"key of {{}}: {2**63}", {0: 0, 2**63: 1}),
    (RULE, f"{{}}[1]: {2**64}", {0: 0, 1: 2**64}),
    (RULE, f"key of {{}}: {2**62}: src", {0: 0, 2**62: 1}),
    (RULE, "key of {}: 8: src", {8: 1}),
    (RULE, f"{{}}[1]={2**62}: dst", {0: 0, 1: 2**62}),
    (RULE, "{}[0]=8: dst", {1: 0, 0: 8}),
)
_LAYER_RANGE: Final = Spec(
    ([0], (0, 1), 1, "0", slice(0, 1)),
    (RULE, "step 2", range(0, 2, 2)),
    (RULE, "step -1", range(1, -1, -1)),
    (RULE, "below layer 0", range(-1, 1)),
    (RULE, "range(0, 1)", range(1)),  # the other one stands for all layers (interface R14)
    (RULE, "{}", range(3)),
    none_ok=True,
)
#: The two ranges of layers and the tensors of each, of caches of 2 layers of 2 tensors; and rows beside those.
LAYERS: Final = dict.fromkeys(("src_layer_range", "dst_layer_range"), _LAYER_RANGE)
LAYERS["tensor_num_per_layer"] = integer(1, 2**32 - 1, -1)
ONE_LAYER: Final = {"src_layer_range": range(1), "dst_layer_range": range(1)}
UNEQUAL_LAYERS: Final = (
    bad(RULE, "equal lengths", src_layer_range=range(1), dst_layer_range=range(2)),
    bad(RULE, "src_layer_range", "range(2, 3)", src_layer_range=range(2, 3), dst_layer_range=range(1)),
    bad(RULE, "dst_layer_range", "range(2, 3)", src_layer_range=range(1), dst_layer_range=range(2, 3)),
    bad(RULE, "tensor_num_per_layer=3", **ONE_LAYER, tensor_num_per_layer=3),
    bad(RULE, "tensor_num_per_layer=5", **ONE_LAYER, tensor_num_per_layer=5),
    bad(RULE, "_layer_range", src_layer_range=range(2**70), dst_layer_range=range(2**70)),
)


# --- running them -----------------------------------------------------------------------------------------------------
def refuse(ends: Sequence[End], table: Table) -> None:
    """Run all rows at the first end: each raises what it should, in one line, and nothing has happened at any end."""
    assert table.rows
    for no_ops in (False, True):
        rows = [row for row in table.rows if (row.kind is None) is no_ops]
        try:
            _run(ends, table, rows, no_ops)
        except AssertionError:
            for row in rows:
                _run(ends, table, [row], no_ops)
            raise


def _run(ends: Sequence[End], table: Table, rows: list[Row], no_ops: bool) -> None:
    # The end that was linked learns that the handshake is over a little after the one that linked.
    wait_until(lambda: not any(link.state == "handshake" for end in ends for link in end.do(picture).links))
    before = [end.do(state) for end in ends]
    errors = ends[0].do(attempt, table, [row.changes for row in rows])
    for row, error in zip(rows, errors, strict=True):
        try:
            assert (error is None) is no_ops, repr(error)
            if row.kind is not None:
                raises(error, row.kind, row.texts)
        except AssertionError as wrong:
            wrong.add_note(f"{table.call} with {row.changes}")
            raise
    # What was pinned for a question is released when its answer was of no use: that is waited for.
    wait_until(
        lambda: all(end.do(picture).pins == was["statistics"].pins for end, was in zip(ends, before, strict=True))
    )
    for end, was in zip(ends, before, strict=True):
        now = end.do(state)
        if no_ops:
            del now["successes"], was["successes"]  # each is one
        changed = [part for part in was if now[part] != was[part]]
        assert not changed, f"{changed} of {end.cluster_id} after {table.call} with {[row.changes for row in rows]}"


def raises(error: BaseException | None, kind: Kind, texts: Iterable[str]) -> None:
    """The error is of this class, with its own status, and its one line holds the texts."""
    assert isinstance(error, kind), repr(error)
    assert getattr(error, "status_code", None) is getattr(kind, "default_status", None)
    assert [text for text in texts if text not in str(error)] == [], str(error)
    assert "\n" not in str(error)


def refuse_each(call: Callable[..., object], good: dict[str, Any], specs: Mapping[str, Spec], *special: Row) -> None:
    """Run all rows of a call that needs no end: each raises what it should."""
    for row in Table("", good, specs, *special).rows:
        assert row.kind is not None
        with pytest.raises(row.kind) as caught:
            call(**good | row.changes)
        raises(caught.value, row.kind, row.texts)


def assign(target: object, **fields: Any) -> None:
    for name, value in fields.items():
        setattr(target, name, value)


def attempt(world: World, table: Table, every: list[dict[str, Any]]) -> list[BaseException | None]:
    """Call with each of the changes; return what was raised, or what a call of the C++ interface failed with."""
    return [_attempt(world, table, changes) for changes in every]


def _attempt(world: World, table: Table, changes: dict[str, Any]) -> BaseException | None:
    of, call = table.call.split(".")
    arguments = {name: _real(world, of, value) for name, value in (table.good | changes).items()}
    try:
        if of == "cpp":
            status, failure = failed_with(world, call, **arguments)
            assert getattr(failure, "status_code", LLMStatusCode.LLM_SUCCESS) is status
            return failure
        owner = {"cm": "cache_manager", "v1": "kv_cache_manager"}.get(of)
        of_dd = getattr(world.dd, owner) if owner else world.dd
        getattr(arguments.pop("cache") if of == "cache" else of_dd, call)(**arguments)
    except Exception as error:  # noqa: BLE001 (looked at by the test)
        return error
    return None


def _real(world: World, of: str, value: Any) -> Any:
    """:class:`Use` arguments become caches of this end."""
    if isinstance(value, list):
        return [_real(world, of, each) for each in value]
    if not isinstance(value, Use):
        return value
    if of == "cpp":
        return world.memory[f"cache {value.name}"]
    return kv_of(world, value.name) if of == "v1" else world.caches[value.name]


def state(world: World) -> dict[str, Any]:
    """Return all that a refused call must leave alone, after checking that the tables agree with each other.

    Statistics without ages and without the answers that are kept of peers; what calls have done, by their bytes and
    successes; the addresses in every handle; every byte of every cache that has memory.
    """
    operations = world.dd.statistics().operations
    seen = {name: read(cache) for name, cache in world.caches.items() if cache.tensor_addrs}
    return {
        "statistics": asked(picture(world)),
        "bytes moved": {each.name: each.nbytes for each in operations if each.nbytes},
        "successes": {each.name: each.count - each.errors for each in operations if each.count > each.errors},
        "handles": {name: list(cache.tensor_addrs) for name, cache in world.caches.items()},
        "bytes": {name: [tensor.tobytes() for tensor in tensors] for name, tensors in seen.items()},
    }
