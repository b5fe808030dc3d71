"""copy_cache: one batch row to another, inside this process (seed copy_cache, interface §6.5, R8, R9)."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, DataType, LLMException, LLMStatusCode, Placement
from llm_datadist._deadline import Deadline
from llm_datadist._transfer.local_copy import CacheRow
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, NoneArgument, ParamError
from tests.support.memory import desc, equal, refused, user_memory
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers(
    "CacheDesc: batch_size placement", "CacheKey.req_id", "CacheManager.copy_cache", "LLMStatusCode.LLM_TIMEOUT"
)

D, H = Placement.DEVICE, Placement.HOST
ROW = 64  # bytes of a row of desc()


@pytest.fixture
def world(end: LocalEnd) -> World:
    """Two filled caches "src" and "dst" of 2 tensors, 4 rows of 64 bytes."""
    end.start("PROMPT", 1)
    allocate(end.world, "src")
    allocate(end.world, "dst")
    end.world.caches["blocks"] = end.world.cm.allocate_blocks_cache(desc())
    return end.world


def allocate(world: World, name: str, **geometry: Any) -> None:
    world.caches[name] = world.cm.allocate_cache(desc(**geometry))
    fill(world.caches[name], len(world.caches))


def check(world: World, dst_row: int, src_row: int, start: int, stop: int, *args: Any, **kwargs: Any) -> None:
    """``copy_cache(dst, src, *args)`` copies bytes [start, stop) of the row in every tensor, and not one byte else."""
    dst, src = world.caches["dst"], world.caches["src"]
    source, expected = read(src), read(dst)
    for s, e in zip(source, expected, strict=True):
        e[dst_row, start:stop] = s[src_row, start:stop]
    world.cm.copy_cache(dst, src, *args, **kwargs)
    equal(read(dst), expected)
    if src is not dst:
        equal(read(src), source)
    assert world.dd.statistics().pins == 0


# --- what is copied ---------------------------------------------------------------------------------------------------


def test_seed_copy_cache_defaults_copy_row_0_to_row_0(world: World) -> None:
    check(world, 0, 0, 0, ROW)


def test_seed_copy_cache_arguments_by_position(world: World) -> None:
    check(world, 3, 1, 8, 24, 3, 1, 8, 16, 77)


def test_seed_copy_cache_arguments_by_name(world: World) -> None:
    check(world, 2, 3, 4, 5, req_id=1, size=1, offset=4, src_batch_index=3, dst_batch_index=2)


@pytest.mark.parametrize(
    ("offset", "size", "start", "stop"),
    [(0, -1, 0, ROW), (16, -1, 16, ROW), (63, -1, 63, ROW), (0, ROW, 0, ROW), (60, 4, 60, ROW), (0, 1, 0, 1)],
)
def test_seed_copy_cache_copies_bytes_offset_to_offset_plus_size(
    world: World, offset: int, size: int, start: int, stop: int
) -> None:
    check(world, 1, 2, start, stop, 1, 2, offset, size)


@pytest.mark.parametrize(("dst", "src"), list(itertools.product(Placement, Placement)))
def test_r08_placement_and_batch_size_may_differ(world: World, dst: Placement, src: Placement) -> None:
    allocate(world, "src", shape=(5, 16), placement=src)
    allocate(world, "dst", shape=(2, 16), placement=dst)
    check(world, 1, 4, 0, ROW, 1, 4)


@pytest.mark.parametrize("rows", list(itertools.product(range(2), range(2))))
def test_rows_of_one_cache(world: World, rows: tuple[int, int]) -> None:
    world.caches["dst"] = world.caches["src"]
    check(world, rows[0], rows[1], 0, ROW, *rows)


def test_many_tensors_of_many_megabytes(world: World) -> None:
    allocate(world, "src", num_tensors=3, shape=(2, 2**18))
    allocate(world, "dst", num_tensors=3, shape=(2, 2**18), placement=H)
    check(world, 0, 1, 1, 2**20, 0, 1, 1)


def test_registered_memory_is_copied_too(world: World) -> None:
    for name in ("src", "dst"):
        world.caches[name] = world.cm.register_cache(desc(), user_memory(world, name, desc()))
        fill(world.caches[name], 9)
    check(world, 0, 3, 0, ROW, 0, 3)


# --- interface R8: descriptors must match -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ({"num_tensors": 3}, ["2 tensors", "3"]),
        ({"data_type": DataType.DT_INT32}, ["data type"]),
        ({"shape": (4, 8)}, ["[16]", "[8]", "size"]),
        ({"shape": (4, 4, 4)}, ["[16]", "[4, 4]", "size"]),
        ({"shape": (4, 32)}, ["[16]", "[32]", "size"]),
    ],
)
def test_r08_descriptors_that_do_not_match_are_refused(world: World, other: dict[str, Any], parts: list[str]) -> None:
    allocate(world, "other", **other)
    with refused(world, ParamError, *parts):
        world.cm.copy_cache(world.caches["other"], world.caches["src"])
    with refused(world, ParamError):
        world.cm.copy_cache(world.caches["src"], world.caches["other"])


@pytest.mark.parametrize("shape", [(4, 8), (4, 4, 4), (2, 32)])
def test_r08_with_a_size_row_shapes_may_differ(world: World, shape: tuple[int, ...]) -> None:
    allocate(world, "dst", shape=shape)
    check(world, 1, 0, 4, 32, 1, 0, 4, 28)


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 65), (1, 64), (64, 1), (64, -1), (65, -1), (2**64 - 1, -1), (2**64 - 1, 1), (0, 2**63 - 1)]
)
def test_r08_a_range_outside_a_row_is_refused(world: World, offset: int, size: int) -> None:
    with refused(world, ParamError, f"offset={offset}", f"size={size}", "64"):
        world.cm.copy_cache(world.caches["dst"], world.caches["src"], 0, 0, offset, size)


def test_r08_a_range_outside_the_shorter_row_is_refused(world: World) -> None:
    allocate(world, "short", shape=(4, 8))
    for dst, src in (("short", "src"), ("src", "short")):
        with refused(world, ParamError, "offset=1", "size=32"):
            world.cm.copy_cache(world.caches[dst], world.caches[src], 0, 0, 1, 32)


# --- caches that are gone ---------------------------------------------------------------------------------------------


def test_a_deallocated_cache_is_there_until_its_keys_are_gone(world: World) -> None:
    source = world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    content = fill(source, 5)
    world.cm.deallocate_cache(source)
    expected = read(world.caches["dst"])
    for e, s in zip(expected, content, strict=True):
        e[1] = s[0]
    world.cm.copy_cache(world.caches["dst"], source, 1, 0)
    equal(read(world.caches["dst"]), expected)
    world.cm.remove_cache_key(CacheKey(1, 1))
    status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    with refused(world, CacheNotFound, "src", f"id {source.cache_id}", status=status):
        world.cm.copy_cache(world.caches["dst"], source)
    with refused(world, CacheNotFound, "dst", f"id {source.cache_id}", status=status):
        world.cm.copy_cache(source, world.caches["src"])


def test_a_copy_whose_time_is_up_is_llm_timeout_and_touches_nothing_outside(world: World) -> None:
    allocate(world, "src", shape=(3, 2**19))
    allocate(world, "dst", shape=(3, 2**19))
    dst, src = world.caches["dst"], world.caches["src"]
    before, source = read(dst), read(src)
    local = world.cm._engine.local
    to, of = CacheRow(dst.cache_id, 1), CacheRow(src.cache_id, 0)
    with pytest.raises(DeadlineExceeded, match="copy_cache") as caught:
        local.copy_cache(to, of, offset=0, size=-1, deadline=Deadline(0), what="copy_cache")
    assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_TIMEOUT, "copy")
    for b, a in zip(before, read(dst), strict=True):
        a[1] = b[1]
        assert (a == b).all()
    equal(read(src), source)


# --- interface R9 -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("req_id", [0, 5, 2**64 - 1])
def test_r09_every_log_record_of_the_call_carries_req_id(
    world: World, caplog: pytest.LogCaptureFixture, req_id: int
) -> None:
    caplog.set_level(logging.INFO, "LLM_DATADIST")
    world.cm.copy_cache(world.caches["dst"], world.caches["src"], req_id=req_id)
    with pytest.raises(ParamError):
        world.cm.copy_cache(world.caches["dst"], world.caches["src"], 0, 9, req_id=req_id)
    records = [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO]
    assert len(records) == 4
    assert [text for text in records if f"req_id={req_id}" not in text] == []
    assert [text.split()[1] for text in records] == ["started", "succeeded", "started", "failed"]


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"src_batch_index": 9}, ParamError),
        ({"dst_batch_index": 9}, ParamError),
        ({"dst_batch_index": -1}, ParamError),
        ({"size": 0}, ParamError),
        ({"size": 65}, ParamError),
        ({"offset": "0"}, TypeError),
        ({"src": None}, NoneArgument),
        ({"dst": 3}, TypeError),
        ({"dst": "blocks"}, ParamError),
        ({"src": "gone"}, CacheNotFound),
    ],
)
def test_r09_every_error_text_of_the_call_carries_req_id_once(
    world: World, change: dict[str, Any], kind: type[Exception]
) -> None:
    world.caches["gone"] = world.cm.allocate_cache(desc())
    world.cm.deallocate_cache(world.caches["gone"])
    arguments = {"dst": world.caches["dst"], "src": world.caches["src"]} | change
    arguments = {name: world.caches.get(value, value) if name in change else value for name, value in arguments.items()}
    status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST if kind is CacheNotFound else LLMStatusCode.LLM_PARAM_INVALID
    with refused(world, kind, "req_id=4711", status=status):
        world.cm.copy_cache(**arguments, req_id=4711)
    with pytest.raises(kind) as caught:
        world.cm.copy_cache(**arguments, req_id=4711)
    assert str(caught.value).count("req_id=4711") == 1
    with pytest.raises(kind) as caught:
        world.cm.copy_cache(**arguments)
    assert "req_id" not in str(caught.value)


# --- wrong arguments --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "parts"),
    [
        ({"dst": None}, NoneArgument, ["dst", "None"]),
        ({"src": None}, NoneArgument, ["src", "None"]),
        ({"dst": 1}, TypeError, ["dst", "int"]),
        ({"src": [1]}, TypeError, ["src", "list"]),
        ({"src": "blocks"}, ParamError, ["src", "blocks cache"]),
        ({"dst": "blocks"}, ParamError, ["dst", "blocks cache"]),
        *(
            ({name: value}, kind, [name, repr(value)])
            for name in ("dst_batch_index", "src_batch_index", "offset", "size", "req_id")
            for value, kind in (("1", TypeError), (1.0, TypeError), ([1], TypeError))
        ),
        *(
            ({name: None}, NoneArgument, [name, "None"])
            for name in ("dst_batch_index", "src_batch_index", "offset", "size")
        ),
        *(
            ({name: -1}, ParamError, [name, "-1"])
            for name in ("dst_batch_index", "src_batch_index", "offset", "req_id")
        ),
        *(({name: 2**32}, ParamError, [name, str(2**32)]) for name in ("dst_batch_index", "src_batch_index")),
        *(({name: 4}, ParamError, [f"{name}=4", "4 rows"]) for name in ("dst_batch_index", "src_batch_index")),
        *(({name: 2**64}, ParamError, [name, str(2**64)]) for name in ("offset", "req_id")),
        *(({"size": value}, ParamError, ["size", str(value)]) for value in (0, -2, 2**63, -(2**63) - 1)),
    ],
)
def test_r01_wrong_arguments_are_refused_and_nothing_happens(
    world: World, change: dict[str, Any], kind: type[Exception], parts: list[str]
) -> None:
    arguments = {"dst": world.caches["dst"], "src": world.caches["src"]} | change
    if "blocks" in change.values():
        arguments |= dict.fromkeys(change, world.caches["blocks"])
    with refused(world, kind, *parts):
        world.cm.copy_cache(**arguments)


def test_r01_checks_come_in_the_documented_order(world: World) -> None:
    wrong: list[Any] = [None, None, "d", "s", "o", "z", "r"]
    names = ["dst", "src", "dst_batch_index", "src_batch_index", "offset", "size"]
    good: list[Any] = [world.caches["dst"], world.caches["src"], 0, 0, 0, 0]
    for position, name in enumerate(names):
        with pytest.raises((TypeError, LLMException), match=rf"^{name}\b"):
            world.cm.copy_cache(*good[:position], *wrong[position:])
    full: list[Any] = [*good, "r"]
    with pytest.raises(ParamError, match=r"^size=0"):
        world.cm.copy_cache(*full)
