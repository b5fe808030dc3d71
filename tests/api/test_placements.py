"""Where memory may be: placements (interface R16), remote_accessible, registered memory inside and outside a pool, and
how a link reaches private memory of another process: by cma beside shm (auto), or by cma alone."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMStatusCode, Placement
from llm_datadist.errors import LLMException
from tests.support.linking import explain
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, forget, make, moved, refused, same_bytes, show
from tests.support.pairs import Pair
from tests.support.world import fill

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import ChildEnd
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_FEATURE_NOT_ENABLED", "LLMDataDist.explain")

PAIRS = [(1, 6), (4, 0)]
RCA = pytest.mark.parametrize("rca", [False, True])


def blocks(world: World, method: str) -> None:
    call(world, method, BLOCKS, Use("kv"), [s for _, s in PAIRS], [d for d, _ in PAIRS])


def exchange(pair: Pair, there: Spec, here: Spec, *, push: bool) -> None:
    """Pull blocks, a row, and a row into blocks, then push, between such caches; compare every byte at both ends."""
    prompt, decoder = pair.prompt, pair.decoder
    kinds = {"kv": {"blocks": True, "blocks_key": BLOCKS}, "rows": {}, "pieces": {"blocks": True}}
    theirs, ours = (
        {kind: end.do(make, kind, replace(spec, **change), 3) for kind, change in kinds.items()}  # type: ignore[arg-type]
        for end, spec in ((prompt, there), (decoder, here))
    )
    rows = prompt.do(cache_id, "rows")
    decoder.do(blocks, "pull_blocks")
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, rows, 0), Use("rows"), 5)
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, rows, 7), Use("pieces"), [], [3])
    ours["kv"] = moved(ours["kv"], theirs["kv"], PAIRS)
    ours["pieces"] = moved(ours["pieces"], theirs["rows"], [(3, 7)])
    ours["rows"] = moved(ours["rows"], theirs["rows"], [(5, 0)])
    check(pair, theirs, ours)
    if push:
        decoder.do(blocks, "push_blocks")
        decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, rows, 6), Use("rows"), 3)
        theirs["kv"] = moved(theirs["kv"], ours["kv"], PAIRS)
        theirs["rows"] = moved(theirs["rows"], ours["rows"], [(6, 3)])
        check(pair, theirs, ours)
    for end, kind in itertools.product((prompt, decoder), kinds):
        end.do(forget, kind)


def check(pair: Pair, theirs: dict[str, Bytes], ours: dict[str, Bytes]) -> None:
    for end, caches in ((pair.prompt, theirs), (pair.decoder, ours)):
        for kind, wanted in caches.items():
            same_bytes(end.do(show, kind), wanted)


@RCA
def test_r16_pulls_and_pushes_work_between_all_placements(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    for there, here in itertools.product(Placement, Placement):
        exchange(pair, Spec(placement=there), Spec(placement=here), push=rca)


@RCA
def test_r16_registered_memory_moves_private_only_here_and_in_a_pool_at_either_end(pair: Pair, rca: bool) -> None:
    """None means accessible for both placements."""
    pair.start(rca=rca)
    for accessible, placement in itertools.product((None, True), Placement):
        there = Spec(memory="inside", accessible=accessible, placement=placement)
        exchange(pair, there, Spec(memory="private"), push=rca)
    if pair.transport == "inproc":
        exchange(pair, Spec(memory="private"), Spec(memory="private"), push=rca)


def test_r16_remote_accessible_false_refuses_nothing_that_is_done_here(tcp_pair: Pair) -> None:
    """What it refuses: test_bad_input_calls.py and tests/unit/test_access_matrix.py."""
    pair = tcp_pair
    pair.start(rca=True)
    exchange(pair, Spec(), Spec(memory="inside", accessible=False), push=True)
    wanted = pair.decoder.do(make, "kv", Spec(blocks=True, memory="inside", accessible=False), 1)
    pair.decoder.do(call, "copy_blocks", Use("kv"), {0: [7]})
    same_bytes(pair.decoder.do(show, "kv"), moved(wanted, wanted, [(7, 0)]))


# --- registered memory ------------------------------------------------------------------------------------------------
@RCA
def test_registered_private_memory_of_another_process_is_refused_with_what_to_do(shm_pair: Pair, rca: bool) -> None:
    pair = shm_pair
    pair.start(rca=rca)
    ends, names = (pair.decoder, pair.prompt), ["kv", "rows"]
    for kinds in (("private", "half"), ("half", "private")):
        pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory=kinds[0]), 1)
        pair.prompt.do(make, "rows", Spec(memory=kinds[1]), 2)
        pair.decoder.do(make, "kv", Spec(blocks=True), 3)
        pair.decoder.do(make, "rows", Spec(), 4)
        rows = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "rows"))
        for verb in ("pull", "push") if rca else ("pull",):
            parts = (f"{verb}_blocks", "outside its pools", "shm cannot reach", "allocate", "inside a pool")
            status = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            refused(ends, names, LLMException, parts, blocks, f"{verb}_blocks", status=status)
            refused(ends, names, LLMException, parts[1:], call, f"{verb}_cache", rows, Use("rows"), status=status)
        for end, name in itertools.product(ends, names):
            end.do(forget, name)
    exchange(pair, Spec(), Spec(), push=rca)  # the link is as good as before


@RCA
def test_registered_tensors_at_odd_places_of_a_pool_are_a_remote_end(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    src = pair.prompt.do(_shifted)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    pair.decoder.do(blocks, "pull_blocks")
    wanted = moved(dst, src, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    if rca:
        pair.decoder.do(blocks, "push_blocks")
        same_bytes(pair.prompt.do(show, "kv"), moved(src, wanted, PAIRS))


def _shifted(world: World) -> Bytes:
    """Register tensors at odd places of one pool tensor, not in the order of their addresses."""
    world.caches["pool"] = pool = world.cm.allocate_blocks_cache(CacheDesc(1, [4000], DataType.DT_UINT8))
    addrs = [pool.tensor_addrs[0] + offset for offset in (3001, 7, 2000, 1111)]
    desc = CacheDesc(4, [8, 48], DataType.DT_UINT8)
    world.caches["kv"] = cache = world.cm.register_blocks_cache(desc, addrs, BLOCKS)
    return fill(cache, 1)


# --- private memory of another process --------------------------------------------------------------------------------
@pytest.fixture(params=["auto", "cma"])
def apart(request: pytest.FixtureRequest, children: tuple[ChildEnd, ChildEnd]) -> Iterator[Pair]:
    """Two ends in two processes, over the best transport of each kind, or over cma alone."""
    yield Pair(*children, request.param)
    for end in reversed(children):
        end.stop()


@RCA
def test_private_memory_of_another_process_moves_by_cma(apart: Pair, rca: bool) -> None:
    apart.start(rca=rca)
    there = apart.decoder.do(explain, 1)
    if apart.transport == "cma":
        assert (there.transport, there.reason) == ("cma", "the kernel lets us into the peer's memory")
    else:
        assert there.transport == "shm"
        assert there.reason.endswith("private memory by cma")
    for memory in ("private", "half", "pool"):
        exchange(apart, Spec(stride=4160, memory=memory), Spec(stride=4160, memory="private"), push=rca)
