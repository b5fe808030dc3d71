"""copy_cache and copy_blocks: rows and blocks inside this process, every byte compared with a NumPy twin (interface
§6.5, §6.8, R8, R9, R26). Wrong arguments by themselves: test_bad_input_*.py; ranges: tests/unit/test_layout.py."""

import itertools
import logging
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llm_datadist import CacheKey, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, NoneArgument, ParamError
from tests.support.memory import desc, refused
from tests.support.moves import moved, same_bytes
from tests.support.world import World, fill, read

pytestmark = [
    pytest.mark.covers("CacheDesc: batch_size placement", "CacheManager: copy_blocks copy_cache"),
    pytest.mark.gpu,
]

ROW = 64  # bytes of a row of desc()
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


@pytest.fixture
def world(world: World) -> World:
    """Continuous caches "src" and "dst", a blocks cache "kv" and its neighbour, of 4 rows or 10 blocks of 64 bytes."""
    for name in ("src", "dst"):
        allocate(world, name)
    for name in ("kv", "neighbour"):
        allocate(world, name, blocks=True, shape=(10, 16))
    return world


def allocate(world: World, name: str, *, blocks: bool = False, **geometry: Any) -> None:
    make = world.cm.allocate_blocks_cache if blocks else world.cm.allocate_cache
    if old := world.caches.pop(name, None):
        (world.cm.deallocate_blocks_cache if blocks else world.cm.deallocate_cache)(old)
    world.caches[name] = make(desc(**geometry))
    fill(world.caches[name], len(world.caches))


# --- copy_cache -------------------------------------------------------------------------------------------------------
def check_row(world: World, rows: tuple[int, int], part: tuple[int, int], *args: Any, **kwargs: Any) -> None:
    """``copy_cache(dst, src, *args)`` copies bytes of one row (dst, src) in every tensor, and not one byte else."""
    dst, src = world.caches["dst"], world.caches["src"]
    source, expected, (start, stop) = read(src), read(dst), part
    for s, e in zip(source, expected, strict=True):
        e[rows[0], start:stop] = s[rows[1], start:stop]
    world.cm.copy_cache(dst, src, *args, **kwargs)
    same_bytes(read(dst), expected)
    if src is not dst:
        same_bytes(read(src), source)
    assert world.dd.statistics().pins == 0


def test_r08_copy_cache_copies_bytes_offset_to_offset_plus_size_of_one_row(world: World) -> None:
    check_row(world, (0, 0), (0, ROW))
    for args in ((3, 1, 8, 16, 77), (1, 2, 63, -1), (1, 2, 60, 4), (1, 2, 0, ROW)):
        dst, src, offset, size = args[:4]
        check_row(world, (dst, src), (offset, ROW if size == -1 else offset + size), *args)
    check_row(world, (2, 3), (4, 5), req_id=1, size=1, offset=4, src_batch_index=3, dst_batch_index=2)
    own = world.caches["dst"]
    world.caches["dst"] = world.caches["src"]
    for rows in ((0, 0), (0, 1), (1, 0)):
        check_row(world, rows, (0, ROW), *rows)
    world.caches["dst"] = own
    # Placement, batch size and, with a size, the shape of a row may differ.
    for dst_at, src_at in itertools.product(Placement, Placement):
        allocate(world, "src", shape=(5, 16), placement=src_at)
        allocate(world, "dst", shape=(2, 16), placement=dst_at)
        check_row(world, (1, 4), (0, ROW), 1, 4)
    for shape in ((4, 8), (4, 4, 4), (2, 32)):
        allocate(world, "dst", shape=shape)
        check_row(world, (1, 0), (4, 32), 1, 0, 4, 28)
    allocate(world, "src", num_tensors=3, shape=(2, 2**18))
    allocate(world, "dst", num_tensors=3, shape=(2, 2**18), placement=Placement.HOST)
    check_row(world, (0, 1), (1, 2**20), 0, 1, 1)


def test_a_deallocated_cache_is_there_until_its_keys_are_gone(world: World) -> None:
    source = world.cm.allocate_cache(desc(), [CacheKey(1, 1)])
    content = fill(source, 5)
    world.cm.deallocate_cache(source)
    before = read(world.caches["dst"])
    world.cm.copy_cache(world.caches["dst"], source, 1, 0)
    same_bytes(read(world.caches["dst"]), moved(before, content, [(1, 0)]))
    world.cm.remove_cache_key(CacheKey(1, 1))
    with refused(world, CacheNotFound, "src", f"id {source.cache_id}", status=GONE):
        world.cm.copy_cache(world.caches["dst"], source)
    with refused(world, CacheNotFound, "dst", f"id {source.cache_id}", status=GONE):
        world.cm.copy_cache(source, world.caches["src"])


def test_r09_every_record_and_error_text_carries_req_id(world: World, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "LLM_DATADIST")
    for req_id in (0, 2**64 - 1):
        caplog.clear()
        world.cm.copy_cache(world.caches["dst"], world.caches["src"], req_id=req_id)
        with pytest.raises(ParamError):
            world.cm.copy_cache(world.caches["dst"], world.caches["src"], 0, 9, req_id=req_id)
        records = [record.getMessage() for record in caplog.records]
        assert [text for text in records if f"req_id={req_id}" not in text] == []
        assert [text.split()[1] for text in records] == ["started", "succeeded", "started", "failed"]
    gone = world.cm.allocate_cache(desc())
    world.cm.deallocate_cache(gone)
    good = {"dst": world.caches["dst"], "src": world.caches["src"]}
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"dst_batch_index": -1}, ParamError),
        ({"size": 65}, ParamError),
        ({"offset": "0"}, TypeError),
        ({"src": None}, NoneArgument),
        ({"dst": world.caches["kv"]}, ParamError),
        ({"src": gone}, CacheNotFound),
    ]
    for change, kind in wrong:
        status = GONE if kind is CacheNotFound else LLMStatusCode.LLM_PARAM_INVALID
        for number in (4711, None):
            with refused(world, kind, status=status) as caught:
                world.cm.copy_cache(**(good | change), req_id=number)
            assert str(caught.value).count("req_id") == str(caught.value).count("req_id=4711") == (number is not None)


# --- copy_blocks ------------------------------------------------------------------------------------------------------
def check_blocks(world: World, info: Any) -> None:
    """The pairs take effect one after the other, in the order given, and not one byte else changes."""
    cache, neighbour = world.caches["kv"], world.caches["neighbour"]
    expected, beside = read(cache), read(neighbour)
    for source, targets in info.items():
        for target in targets:
            for tensor in expected:
                tensor[int(target)] = tensor[int(source)]
    world.cm.copy_blocks(cache, info)
    same_bytes(read(cache), expected)
    same_bytes(read(neighbour), beside)
    assert world.dd.statistics().pins == 0


def test_r26_copy_blocks_takes_effect_in_the_order_given(world: World) -> None:
    fixed: list[dict[int, list[int]]] = [
        {2: [0, 1]},  # the example of the page
        {True: [0, 2]},
        {np.int64(1): [np.int32(3), 4], 2: [np.uint8(9), 7, 8]},  # type: ignore[dict-item, list-item]
    ]
    for info in fixed:
        check_blocks(world, info)
    _any_dict(world)
    allocate(world, "kv", blocks=True, num_tensors=3, shape=(32, 2**14))  # large enough for many copies at once
    check_blocks(world, {n: [n + 1] for n in range(15)})
    check_blocks(world, {n: [n + 16] for n in range(16)})


@settings(max_examples=150)
@example({4: list(range(10))})
@example({1: [2], 2: [3]})  # a chain: 3 gets block 1
@example({1: [5], 2: [5]})  # a duplicate: the last one wins
@given(info=st.dictionaries(st.integers(0, 9), st.lists(st.integers(0, 9), max_size=5), max_size=6))
def _any_dict(world: World, info: dict[int, list[int]]) -> None:
    fill(world.caches["kv"], 1)
    check_blocks(world, info)
