"""Where memory may be: placements (interface R16), remote_accessible, registered memory inside and outside a pool, and
how a link reaches private memory of another process: by cma beside shm (auto), or by cma alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, LLMException, ParamError
from tests.conftest import Pair
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, forget, make, moved, refused, same_bytes, show
from tests.support.world import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import ChildEnd, End
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_FEATURE_NOT_ENABLED", "LLMDataDist.explain")

ROW = CacheKey(1, 10)
PAIRS = [(1, 6), (4, 0)]
DISABLED = LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def pull_blocks(world: World, key: Any = BLOCKS) -> None:
    call(world, "pull_blocks", key, Use("kv"), [s for _, s in PAIRS], [d for d, _ in PAIRS])


def push_blocks(world: World, key: Any = BLOCKS) -> None:
    call(world, "push_blocks", key, Use("kv"), [s for _, s in PAIRS], [d for d, _ in PAIRS])


def exchange(pair: Pair, there: Spec, here: Spec, *, push: bool) -> None:
    """Pull blocks, a row, and a row into blocks, then push, between such caches; compare every byte at both ends."""
    kinds = {"kv": {"blocks": True, "blocks_key": BLOCKS}, "rows": {}, "pieces": {"blocks": True}}
    ends: dict[str, tuple[End, Spec]] = {"prompt": (pair.prompt, there), "decoder": (pair.decoder, here)}
    bytes_at: dict[str, dict[str, Bytes]] = {
        name: {kind: end.do(make, kind, replace(spec, **change), 3) for kind, change in kinds.items()}  # type: ignore[arg-type]
        for name, (end, spec) in ends.items()
    }
    theirs, ours = bytes_at["prompt"], bytes_at["decoder"]
    rows = pair.prompt.do(cache_id, "rows")
    pair.decoder.do(pull_blocks)
    pair.decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, rows, 0), Use("rows"), 5)
    pair.decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, rows, 7), Use("pieces"), [], [3])
    ours["kv"] = moved(ours["kv"], theirs["kv"], PAIRS)
    ours["rows"] = moved(ours["rows"], theirs["rows"], [(5, 0)])
    ours["pieces"] = moved(ours["pieces"], theirs["rows"], [(3, 7)])
    check(ends, bytes_at)
    if push:
        pair.decoder.do(push_blocks)
        pair.decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, rows, 6), Use("rows"), 3)
        theirs["kv"] = moved(theirs["kv"], ours["kv"], PAIRS)
        theirs["rows"] = moved(theirs["rows"], ours["rows"], [(6, 3)])
        check(ends, bytes_at)
    for end, _ in ends.values():
        for kind in kinds:
            end.do(forget, kind)


def check(ends: dict[str, tuple[End, Spec]], bytes_at: dict[str, dict[str, Bytes]]) -> None:
    for name, caches in bytes_at.items():
        for kind, wanted in caches.items():
            same_bytes(ends[name][0].do(show, kind), wanted)


@pytest.mark.parametrize("rca", [False, True])
def test_r16_pulls_and_pushes_work_between_all_placements(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    for there, here in itertools.product(Placement, Placement):
        exchange(pair, Spec(placement=there), Spec(placement=here), push=rca)


@pytest.mark.parametrize("rca", [False, True])
def test_r16_registered_memory_moves_private_only_here_and_in_a_pool_at_either_end(pair: Pair, rca: bool) -> None:
    """None means accessible for both placements."""
    pair.start(rca=rca)
    for accessible, placement in itertools.product((None, True), Placement):
        there = Spec(memory="inside", accessible=accessible, placement=placement)
        exchange(pair, there, Spec(memory="private"), push=rca)
    if pair.transport == "inproc":
        exchange(pair, Spec(memory="private"), Spec(memory="private"), push=rca)


# --- remote_accessible (interface R16) --------------------------------------------------------------------------------


@pytest.mark.parametrize("rca", [False, True])
def test_r16_false_refuses_pulls_and_pushes_of_that_cache(tcp_pair: Pair, rca: bool) -> None:
    pair = tcp_pair
    pair.start(rca=rca)
    closed = Spec(memory="inside", accessible=False)
    pair.prompt.do(make, "kv", replace(closed, blocks=True, blocks_key=BLOCKS), 1)
    pair.prompt.do(make, "rows", replace(closed, keys=(ROW,)), 2)
    pair.decoder.do(make, "kv", Spec(blocks=True), 3)
    pair.decoder.do(make, "rows", Spec(), 4)
    ends, names = (pair.decoder, pair.prompt), ["kv", "rows"]
    kv, rows = (CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, name)) for name in names)
    refuse: Any = (ParamError, ("remote_accessible=False",))
    refused(ends, names, *refuse, pull_blocks)
    refused(ends, names, *refuse, call, "pull_cache", rows, Use("rows"))
    if rca:
        refused(ends, names, *refuse, push_blocks)
        refused(ends, names, *refuse, push_blocks, kv)
        refused(ends, names, *refuse, call, "push_cache", rows, Use("rows"))
    else:
        refused(ends, names, *refuse, call, "pull_cache", ROW, Use("rows"))


def test_r16_false_refuses_nothing_else(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.start(rca=True)
    exchange(pair, Spec(), Spec(memory="inside", accessible=False), push=True)
    wanted = pair.decoder.do(make, "kv", Spec(blocks=True, memory="inside", accessible=False), 1)
    pair.decoder.do(call, "copy_blocks", Use("kv"), {0: [7]})
    same_bytes(pair.decoder.do(show, "kv"), moved(wanted, wanted, [(7, 0)]))


# --- registered memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rca", [False, True])
@pytest.mark.parametrize("memory", ["private", "half"])
def test_registered_private_memory_of_another_process_is_refused_with_what_to_do(
    shm_pair: Pair, memory: str, rca: bool
) -> None:
    pair = shm_pair
    pair.start(rca=rca)
    pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory=memory), 1)
    pair.prompt.do(make, "rows", Spec(memory=memory), 2)
    pair.decoder.do(make, "kv", Spec(blocks=True), 3)
    pair.decoder.do(make, "rows", Spec(), 4)
    ends, names = (pair.decoder, pair.prompt), ["kv", "rows"]
    rows = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "rows"))
    parts = ("outside its pools", "shm cannot reach", "allocate", "inside a pool")
    refused(ends, names, LLMException, ("pull_blocks", *parts), pull_blocks, status=DISABLED)
    refused(ends, names, LLMException, parts, call, "pull_cache", rows, Use("rows"), status=DISABLED)
    if rca:
        refused(ends, names, LLMException, ("push_blocks", *parts), push_blocks, status=DISABLED)
        refused(ends, names, LLMException, parts, call, "push_cache", rows, Use("rows"), status=DISABLED)
    for end in ends:
        for name in names:
            end.do(forget, name)
    exchange(pair, Spec(), Spec(), push=rca)  # the link is as good as before


@pytest.mark.parametrize("rca", [False, True])
def test_registered_tensors_at_odd_places_of_a_pool_are_a_remote_end(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    src = pair.prompt.do(_shifted)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    pair.decoder.do(pull_blocks)
    wanted = moved(dst, src, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    if rca:
        pair.decoder.do(push_blocks)
        same_bytes(pair.prompt.do(show, "kv"), moved(src, wanted, PAIRS))


def _shifted(world: World) -> Bytes:
    """Register tensors at odd places of one pool tensor, not in the order of their addresses."""
    world.caches["pool"] = pool = world.cm.allocate_blocks_cache(CacheDesc(1, [4000], DataType.DT_UINT8))
    start = pool.tensor_addrs[0]
    desc = CacheDesc(4, [8, 48], DataType.DT_UINT8)
    addrs = [start + offset for offset in (3001, 7, 2000, 1111)]
    world.caches["kv"] = cache = world.cm.register_blocks_cache(desc, addrs, BLOCKS)
    return fill(cache, 1)


def test_i10_a_registered_cache_ends_with_unregister_only(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.start()
    src = pair.prompt.do(make, "kv", Spec(keys=(ROW,), memory="inside"), 1)
    dst = pair.decoder.do(make, "kv", Spec(), 2)
    for row in range(3):  # pulling consumes no key of a registered cache
        pair.decoder.do(call, "pull_cache", ROW, Use("kv"), row)
    pair.prompt.do(_deallocate_handle)
    pair.decoder.do(call, "pull_cache", ROW, Use("kv"), 3)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(row, 0) for row in range(4)]))
    pair.prompt.do(forget, "kv")
    with pytest.raises(CacheNotFound) as caught:
        pair.decoder.do(call, "pull_cache", ROW, Use("kv"), 4)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def _deallocate_handle(world: World) -> None:
    world.cm.deallocate_cache(world.caches["kv"])


# --- private memory of another process --------------------------------------------------------------------------------


@pytest.fixture(params=["auto", "cma"])
def apart(request: pytest.FixtureRequest, children: tuple[ChildEnd, ChildEnd]) -> Iterator[Pair]:
    """Two ends in two processes, over the best transport of each kind, or over cma alone."""
    yield Pair(*children, request.param)
    for end in reversed(children):
        end.stop()


@pytest.mark.parametrize("rca", [False, True])
def test_private_memory_of_another_process_moves_by_cma(apart: Pair, rca: bool) -> None:
    apart.start(rca=rca)
    there = apart.decoder.do(_explain)
    if apart.transport == "cma":
        assert (there.transport, there.reason) == ("cma", "the kernel lets us into the peer's memory")
    else:
        assert there.transport == "shm"
        assert there.reason.endswith("private memory by cma")
    for memory in ("private", "half", "pool"):
        exchange(apart, Spec(stride=4160, memory=memory), Spec(stride=4160, memory="private"), push=rca)


def _explain(world: World) -> Any:
    return world.dd.explain(1)


def test_what_was_unregistered_or_consumed_is_not_read_again(apart: Pair) -> None:
    apart.start()
    apart.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory="private"), 1)
    apart.decoder.do(make, "kv", Spec(blocks=True, memory="private"), 2)
    apart.decoder.do(pull_blocks)
    before = apart.decoder.do(show, "kv")
    apart.prompt.do(forget, "kv")
    with pytest.raises(CacheNotFound) as caught:
        apart.decoder.do(pull_blocks)
    assert caught.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    same_bytes(apart.decoder.do(show, "kv"), before)
    rows = apart.prompt.do(make, "rows", Spec(keys=(CacheKey(1, 5), CacheKey(1, 6))), 3)
    to = apart.decoder.do(make, "rows", Spec(memory="private"), 4)
    apart.decoder.do(call, "pull_cache", CacheKey(1, 6), Use("rows"), 2)
    with pytest.raises(CacheNotFound):
        apart.decoder.do(call, "pull_cache", CacheKey(1, 6), Use("rows"), 3)
    same_bytes(apart.decoder.do(show, "rows"), moved(to, rows, [(2, 1)]))
