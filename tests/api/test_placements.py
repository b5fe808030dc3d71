"""Where memory may be: placements (interface R16), remote_accessible, registered memory inside and outside a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode, Placement
from llm_datadist.errors import LLMException, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, refused, same_bytes, show
from tests.support.world import fill

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_FEATURE_NOT_ENABLED")

PLACEMENTS = [(source, target) for source in Placement for target in Placement]
ROW = CacheKey(1, 10)
PAIRS = [(1, 6), (4, 0)]


def pull_blocks(world: World, key: Any = BLOCKS) -> None:
    call(world, "pull_blocks", key, Use("kv"), [s for _, s in PAIRS], [d for d, _ in PAIRS])


def push_blocks(world: World, key: Any = BLOCKS) -> None:
    call(world, "push_blocks", key, Use("kv"), [s for _, s in PAIRS], [d for d, _ in PAIRS])


@pytest.mark.parametrize(("source", "target"), PLACEMENTS)
@pytest.mark.parametrize("rca", [False, True])
def test_r16_pulls_work_between_all_placements(pair: Pair, rca: bool, source: Placement, target: Placement) -> None:
    pair.start(rca=rca)
    src = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, placement=source), 1)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True, placement=target), 2)
    rows = pair.prompt.do(make, "rows", Spec(stride=40, keys=(ROW,), placement=source), 3)
    to = pair.decoder.do(make, "rows", Spec(stride=40, placement=target), 4)
    pair.decoder.do(pull_blocks)
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 2, 0), Use("rows"), 5)
    pieces = pair.decoder.do(make, "pieces", Spec(stride=40, blocks=True, placement=target), 5)
    pair.decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 2, 7), Use("pieces"), [], [3])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))
    same_bytes(pair.decoder.do(show, "rows"), moved(to, rows, [(5, 0)]))
    same_bytes(pair.decoder.do(show, "pieces"), moved(pieces, rows, [(3, 7)]))
    same_bytes(pair.prompt.do(show, "kv"), src)
    same_bytes(pair.prompt.do(show, "rows"), rows)


@pytest.mark.parametrize(("source", "target"), PLACEMENTS)
def test_r16_pushes_work_between_all_placements(pair: Pair, source: Placement, target: Placement) -> None:
    pair.start(rca=True)
    src = pair.decoder.do(make, "kv", Spec(blocks=True, placement=source), 1)
    dst = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, placement=target), 2)
    rows = pair.decoder.do(make, "rows", Spec(placement=source), 3)
    to = pair.prompt.do(make, "rows", Spec(placement=target), 4)
    pair.decoder.do(push_blocks)
    pair.decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 2, 5), Use("rows"), 3)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, PAIRS))
    same_bytes(pair.prompt.do(show, "rows"), moved(to, rows, [(5, 3)]))
    same_bytes(pair.decoder.do(show, "kv"), src)
    same_bytes(pair.decoder.do(show, "rows"), rows)


# --- remote_accessible (interface R16) --------------------------------------------------------------------------------

CLOSED = "remote_accessible=False"


@pytest.mark.parametrize("rca", [False, True])
@pytest.mark.parametrize("placement", Placement)
@pytest.mark.parametrize("accessible", [None, True])
def test_r16_none_means_accessible_for_both_placements(
    pair: Pair, accessible: bool | None, placement: Placement, rca: bool
) -> None:
    pair.start(rca=rca)
    spec = Spec(blocks=True, blocks_key=BLOCKS, placement=placement, memory="inside", accessible=accessible)
    src = pair.prompt.do(make, "kv", spec, 1)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    pair.decoder.do(pull_blocks)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))


@pytest.mark.parametrize("rca", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_r16_false_refuses_pulls_of_that_cache(pair: Pair, rca: bool, blocks: bool) -> None:
    pair.start(rca=rca)
    keys: Any = {"blocks_key": BLOCKS} if blocks else {"keys": (ROW,)}
    pair.prompt.do(make, "kv", Spec(blocks=blocks, memory="inside", accessible=False, **keys), 1)
    pair.decoder.do(make, "kv", Spec(blocks=blocks), 2)
    ends, names, by_id = (pair.decoder, pair.prompt), ["kv"], CacheKeyByIdAndIndex(1, 2)
    if blocks:
        refused(ends, names, ParamError, (CLOSED, "cache 2"), pull_blocks)
        return
    refused(ends, names, ParamError, (CLOSED, "cache 2"), call, "pull_cache", by_id, Use("kv"))
    if not rca:
        refused(ends, names, ParamError, (CLOSED, "cache 2"), call, "pull_cache", ROW, Use("kv"))


def test_r16_false_refuses_pushes_into_that_cache(pair: Pair) -> None:
    pair.start(rca=True)
    pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory="inside", accessible=False), 1)
    pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    ends = (pair.decoder, pair.prompt)
    refused(ends, ["kv"], ParamError, (CLOSED, "cache 2"), push_blocks)
    refused(ends, ["kv"], ParamError, (CLOSED, "cache 2"), push_blocks, CacheKeyByIdAndIndex(1, 2))


def test_r16_false_refuses_nothing_else(pair: Pair) -> None:
    pair.start(rca=True)
    closed = Spec(blocks=True, memory="inside", accessible=False)
    src = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    dst = pair.decoder.do(make, "kv", closed, 2)
    # As the local end of a pull and of a push, and of a local copy.
    pair.decoder.do(pull_blocks)
    wanted = moved(dst, src, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    pair.decoder.do(push_blocks)
    same_bytes(pair.prompt.do(show, "kv"), moved(src, wanted, PAIRS))
    pair.decoder.do(call, "copy_blocks", Use("kv"), {0: [7]})
    same_bytes(pair.decoder.do(show, "kv"), moved(wanted, wanted, [(7, 0)]))


# --- registered memory --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rca", [False, True])
def test_registered_private_memory_is_a_destination(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    src = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    rows = pair.prompt.do(make, "rows", Spec(keys=(ROW,)), 3)
    to = pair.decoder.do(make, "rows", Spec(memory="private"), 4)
    pair.decoder.do(pull_blocks)
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 2, 6), Use("rows"), 5)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))
    same_bytes(pair.decoder.do(show, "rows"), moved(to, rows, [(5, 6)]))


def test_registered_private_memory_is_a_source_of_pushes(pair: Pair) -> None:
    pair.start(rca=True)
    src = pair.decoder.do(make, "kv", Spec(blocks=True, memory="private"), 1)
    dst = pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 2)
    pair.decoder.do(push_blocks)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, PAIRS))


def test_registered_private_memory_is_a_remote_end_within_one_process(local_pair: Pair) -> None:
    local_pair.start(rca=True)
    src = local_pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory="private"), 1)
    dst = local_pair.decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    local_pair.decoder.do(pull_blocks)
    wanted = moved(dst, src, PAIRS)
    same_bytes(local_pair.decoder.do(show, "kv"), wanted)
    local_pair.decoder.do(push_blocks)
    same_bytes(local_pair.prompt.do(show, "kv"), moved(src, wanted, PAIRS))


def test_registered_private_memory_of_another_process_is_refused_with_what_to_do(shm_pair: Pair) -> None:
    pair = shm_pair
    pair.start(rca=True)
    pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory="private"), 1)
    pair.prompt.do(make, "rows", Spec(keys=(ROW,), memory="private"), 2)
    pair.decoder.do(make, "kv", Spec(blocks=True), 3)
    pair.decoder.do(make, "rows", Spec(), 4)
    ends, names = (pair.decoder, pair.prompt), ["kv", "rows"]
    parts = ("outside its pools", "shm cannot reach", "allocate", "inside a pool")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    by_id = CacheKeyByIdAndIndex(1, 2)
    refused(ends, names, LLMException, ("pull_blocks", "cache 1", *parts), pull_blocks, status=code)
    refused(ends, names, LLMException, ("push_blocks", "cache 1", *parts), push_blocks, status=code)
    refused(ends, names, LLMException, ("cache 2", *parts), call, "pull_cache", by_id, Use("rows"), status=code)
    refused(ends, names, LLMException, ("cache 2", *parts), call, "push_cache", by_id, Use("rows"), status=code)
    # The link is as good as before.
    src = pair.prompt.do(make, "open", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 5)), 5)
    dst = pair.decoder.do(show, "kv")
    pair.decoder.do(pull_blocks, BlocksCacheKey(1, 5))
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, PAIRS))


@pytest.mark.parametrize("rca", [False, True])
def test_registered_private_rows_without_rca_release_their_pin_when_refused(shm_pair: Pair, rca: bool) -> None:
    shm_pair.start(rca=rca)
    shm_pair.prompt.do(make, "rows", Spec(memory="private"), 1)
    shm_pair.decoder.do(make, "rows", Spec(), 2)
    key = CacheKeyByIdAndIndex(1, 1)
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    ends = (shm_pair.decoder, shm_pair.prompt)
    refused(ends, ["rows"], LLMException, ("cache 1",), call, "pull_cache", key, Use("rows"), status=code)


def test_a_cache_half_inside_a_pool_is_refused_as_well(shm_pair: Pair) -> None:
    shm_pair.start()
    shm_pair.prompt.do(_half)
    shm_pair.decoder.do(make, "kv", Spec(2, blocks=True), 2)
    ends, code = (shm_pair.decoder, shm_pair.prompt), LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    refused(ends, ["kv"], LLMException, ("outside its pools",), pull_blocks, status=code)


def _half(world: World) -> None:
    desc = CacheDesc(2, [8, 48], DataType.DT_UINT8)
    world.caches["pool"] = pool = world.cm.allocate_blocks_cache(desc)
    world.memory["own"] = own = np.zeros(8 * 48, np.uint8)
    world.caches["half"] = world.cm.register_blocks_cache(desc, [pool.tensor_addrs[0], own.ctypes.data], BLOCKS)


@pytest.mark.parametrize("rca", [False, True])
def test_registered_memory_inside_a_pool_is_a_remote_end_over_every_transport(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    src = pair.prompt.do(_shifted)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    pair.decoder.do(pull_blocks)
    wanted = moved(dst, src, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    if rca:
        pair.decoder.do(push_blocks)
        same_bytes(pair.prompt.do(show, "kv"), moved(src, wanted, PAIRS))


def _shifted(world: World) -> Any:
    """Register tensors at odd places of one pool tensor, not in the order of their addresses."""
    world.caches["pool"] = pool = world.cm.allocate_blocks_cache(CacheDesc(1, [4000], DataType.DT_UINT8))
    start = pool.tensor_addrs[0]
    desc = CacheDesc(4, [8, 48], DataType.DT_UINT8)
    addrs = [start + offset for offset in (3001, 7, 2000, 1111)]
    world.caches["kv"] = cache = world.cm.register_blocks_cache(desc, addrs, BLOCKS)
    return fill(cache, 1)


def test_i10_a_registered_cache_ends_with_unregister_only(pair: Pair) -> None:
    pair.start()
    src = pair.prompt.do(make, "kv", Spec(keys=(ROW,), memory="inside"), 1)
    dst = pair.decoder.do(make, "kv", Spec(), 2)
    for row in range(3):
        pair.decoder.do(call, "pull_cache", ROW, Use("kv"), row)
    pair.prompt.do(_deallocate_handle)
    pair.decoder.do(call, "pull_cache", ROW, Use("kv"), 3)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(row, 0) for row in range(4)]))
    pair.prompt.do(forget, "kv")
    with pytest.raises(LLMException) as caught:
        pair.decoder.do(call, "pull_cache", ROW, Use("kv"), 4)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def _deallocate_handle(world: World) -> None:
    world.cm.deallocate_cache(world.caches["kv"])
