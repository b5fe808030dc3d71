"""transfer_cache_async: which bytes arrive where, for every data shape of interface §6.14, by key and by raw
addresses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, TransferConfig
from llm_datadist._cache.geometry import LayerPlan
from llm_datadist._deadline import Deadline
from llm_datadist._transfer.initiator import TransferOp
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.errors import ParamError
from tests.conftest import _pair
from tests.support.layers import (
    FAILED,
    INVALID,
    OK,
    addresses,
    asked,
    begin,
    cache_id,
    finish,
    keyed,
    make_both,
    raw,
    ready,
    received,
    send,
    spanned,
    wait_asked,
)
from tests.support.moves import Spec, forget, make, nothing_happens, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist._cache.geometry import CachePair
    from llm_datadist._native import Plan
    from tests.conftest import Pair
    from tests.support.layers import Span

pytestmark = pytest.mark.covers(
    "CacheTask", "CacheManager.transfer_cache_async", "CacheTask.errors", "llm: Checksum Transport"
)

ROWS, STRIDE, LAYERS = 8, 48, 2
CACHE = Spec(2 * LAYERS, ROWS, STRIDE)
BLOCKS = Spec(2 * LAYERS, ROWS, STRIDE, blocks=True, blocks_key=BlocksCacheKey(1, 0))
PAGED = Spec(2 * LAYERS, ROWS, STRIDE, blocks=True)

#: (ends that the fixture makes, llm.Transport, RCA): by key, and by address, over everything that can move the bytes.
ROUTES = [
    ("inproc", "inproc", True),
    ("shm", "shm", True),
    ("tcp", "tcp", True),
    ("inproc", "inproc", False),
    ("shm", "auto", False),  # pools over shm, sealed against writing: by address it is cma
    ("shm", "cma", False),
    ("tcp", "tcp", False),
]


@dataclass
class Route:
    """A started pair: the decoder sends to the prompt, by key with RCA, by raw addresses without."""

    pair: Pair
    rca: bool

    def config(self, row: int = 0, dst_row: int | None = None, layers: range = range(LAYERS), **more: Any) -> Any:
        if self.rca:
            return keyed(self.pair.prompt, "kv", layers, row=row, dst_row=dst_row, **more)
        return raw(self.pair.prompt, "kv", layers, row=row, offset=(dst_row or 0) * STRIDE)

    def sent(self, dst: Spec, src: Spec, spans: list[Span], config: dict[str, Any], *blocks: Any) -> None:
        before, source = make_both(self.pair.prompt, self.pair.decoder, dst, src)
        result = self.pair.decoder.do(send, "kv", [self.config(**config)], *blocks)
        assert (result.results, result.first) == ([OK], OK), result.errors
        same_bytes(received(self.pair.prompt), spanned(before, source, spans))
        same_bytes(self.pair.decoder.do(show, "kv"), source)


@pytest.fixture(params=ROUTES, ids=["-".join([t, "key" if rca else "address"]) for _, t, rca in ROUTES])
def route(request: pytest.FixtureRequest) -> Iterator[Route]:
    ends, transport, rca = request.param
    for pair in _pair(request, ends):
        pair.start(rca=rca, extra={"llm.Transport": transport})
        yield Route(pair, rca)


# --- data shapes -----------------------------------------------------------------------------------------------------


def test_a_row_goes_to_a_row(route: Route) -> None:
    route.sent(CACHE, CACHE, [(5 * STRIDE, 2 * STRIDE, STRIDE)], {"row": 2, "dst_row": 5})


def test_a_row_goes_into_a_longer_row(route: Route) -> None:
    longer = Spec(2 * LAYERS, 3, 2 * STRIDE)
    route.sent(longer, CACHE, [(0, 7 * STRIDE, STRIDE)], {"row": 7, "dst_row": 0})


def test_of_a_blocks_cache_block_0_goes_to_block_0(route: Route) -> None:
    route.sent(BLOCKS, PAGED, [(0, 0, STRIDE)], {})


def test_a_row_goes_to_block_0(route: Route) -> None:
    route.sent(BLOCKS, CACHE, [(0, 0, STRIDE)], {})


@pytest.mark.parametrize(("unit", "targets"), [(96, [6, 0, 3, 2]), (100, [7, 0, 1, 3]), (96, [5]), (96, [4, 3, 2])])
def test_a_whole_tensor_goes_in_pieces_the_last_may_be_short(route: Route, unit: int, targets: list[int]) -> None:
    total = ROWS * STRIDE
    spans = [(block * unit, i * unit, min(unit, total - i * unit)) for i, block in enumerate(targets)]
    paged = Spec(2 * LAYERS, ROWS, unit, blocks=True, blocks_key=BlocksCacheKey(1, 0))
    route.sent(paged, CACHE, spans, {}, None, targets, unit)


def test_a_blocks_cache_goes_in_pieces_too(route: Route) -> None:
    spans = [(block * 96, i * 96, 96) for i, block in enumerate([1, 0, 5])]
    paged = Spec(2 * LAYERS, ROWS, 96, blocks=True, blocks_key=BlocksCacheKey(1, 0))
    route.sent(paged, PAGED, spans, {}, None, (1, 0, 5), 96)


@pytest.mark.parametrize("source", [PAGED, CACHE], ids=["blocks", "rows"])
@pytest.mark.parametrize("size", [None, 0, STRIDE])
def test_blocks_go_to_blocks_pair_by_pair(route: Route, source: Spec, size: int | None) -> None:
    spans = [(to * STRIDE, block * STRIDE, STRIDE) for block, to in zip([1, 2, 3, 7], [4, 5, 0, 1], strict=True)]
    route.sent(BLOCKS, source, spans, {}, [1, 2, 3, 7], [4, 5, 0, 1], size)


def test_r26_a_block_that_is_named_twice_holds_the_last_one(route: Route) -> None:
    spans = [(3 * STRIDE, block * STRIDE, STRIDE) for block in (1, 2, 6)]
    route.sent(BLOCKS, PAGED, spans, {}, [1, 2, 6], [3, 3, 3])


def test_large_layers_go_whole(route: Route) -> None:
    large, mib = Spec(4, 4, 1 << 20), 1 << 20
    before, source = make_both(route.pair.prompt, route.pair.decoder, large, large)
    if route.rca:
        config: Any = keyed(route.pair.prompt, "kv", range(2), row=3, dst_row=2)
    else:
        config = raw(route.pair.prompt, "kv", None, 3, offset=2 * mib)
    assert route.pair.decoder.do(send, "kv", [config]).results == [OK]
    same_bytes(received(route.pair.prompt), spanned(before, source, [(2 * mib, 3 * mib, mib)]))


# --- layers ----------------------------------------------------------------------------------------------------------


def test_only_the_layers_of_the_config_are_sent_and_asked_for(route: Route) -> None:
    four = Spec(8, 2, STRIDE)
    before, source = make_both(route.pair.prompt, route.pair.decoder, four, four)
    configs = [
        route.config(row=1, dst_row=0, layers=range(1, 2)),
        route.config(row=0, dst_row=1, layers=range(3, 4)),
    ]
    route.pair.decoder.do(begin, "kv", configs)
    route.pair.decoder.do(ready, 0, 1, 2, 3)
    assert route.pair.decoder.do(finish).results == [OK, OK]
    assert route.pair.decoder.do(asked) == [1, 3]
    middle = spanned(before, source, [(0, STRIDE, STRIDE)], [(2, 2), (3, 3)])
    same_bytes(received(route.pair.prompt), spanned(middle, source, [(STRIDE, 0, STRIDE)], [(6, 6), (7, 7)]))


def test_layer_k_is_there_before_layer_k_plus_1_is_ready(route: Route) -> None:
    """The order, by what the receiver holds: layer 0 has arrived whole while layer 1 is still computed."""
    before, source = make_both(route.pair.prompt, route.pair.decoder, CACHE, CACHE)
    route.pair.decoder.do(begin, "kv", [route.config(row=1, dst_row=2)])
    route.pair.decoder.do(wait_asked, 0)
    same_bytes(received(route.pair.prompt), before)
    route.pair.decoder.do(ready, 0)
    route.pair.decoder.do(wait_asked, 1)
    first = spanned(before, source, [(2 * STRIDE, STRIDE, STRIDE)], [(0, 0), (1, 1)])
    same_bytes(received(route.pair.prompt), first)
    route.pair.decoder.do(ready, 1)
    assert route.pair.decoder.do(finish).first is OK
    same_bytes(received(route.pair.prompt), spanned(before, source, [(2 * STRIDE, STRIDE, STRIDE)]))


def test_r18_dst_layer_range_counts_from_the_start_of_the_source_range(shm_pair: Pair) -> None:
    shm_pair.start(rca=True)
    four = Spec(8, 2, STRIDE)
    before, source = make_both(shm_pair.prompt, shm_pair.decoder, four, four)
    config = keyed(shm_pair.prompt, "kv", range(2, 4), range(2), row=0, dst_row=1)
    assert shm_pair.decoder.do(send, "kv", [config]).results == [OK]
    tensors = [(0, 4), (1, 5), (2, 6), (3, 7)]
    same_bytes(received(shm_pair.prompt), spanned(before, source, [(STRIDE, 0, STRIDE)], tensors))


def test_r05_a_transfer_consumes_no_key(shm_pair: Pair) -> None:
    shm_pair.start(rca=True)
    shm_pair.prompt.do(make, "kv", Spec(4, 2, STRIDE, keys=(CacheKey(1, 5, 0),)), 1)
    shm_pair.decoder.do(make, "kv", Spec(4, 2, STRIDE), 2)
    assert shm_pair.decoder.do(send, "kv", [keyed(shm_pair.prompt, "kv", range(2), dst_row=0)]).first is OK
    wait_until(lambda: shm_pair.prompt.do(picture).pins == 0)
    assert len(shm_pair.prompt.do(picture).keys) == 1


# --- raw addresses ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["inproc", "auto", "tcp"])
def by_address(request: pytest.FixtureRequest) -> Iterator[Pair]:
    for pair in _pair(request, {"auto": "shm"}.get(request.param, request.param)):
        pair.start(extra={"llm.Transport": request.param})
        yield pair


@pytest.mark.parametrize("memory", ["pool", "inside", "private"])
def test_k_and_v_may_lie_in_different_caches_anywhere_in_them(by_address: Pair, memory: str) -> None:
    keys, values = Spec(3, 4, STRIDE, memory=memory), Spec(2, 6, 64, blocks=True, memory=memory)
    ks, vs = by_address.prompt.do(make, "k", keys, 1), by_address.prompt.do(make, "v", values, 2)
    source = by_address.decoder.do(make, "kv", Spec(4, 2, STRIDE), 3)
    k_at, v_at = by_address.prompt.do(addresses, "k"), by_address.prompt.do(addresses, "v")
    config = TransferConfig(1, [k_at[2] + 7, v_at[1] + 200, k_at[0] + 96, v_at[0]], None, 1)
    result = by_address.decoder.do(send, "kv", [config])
    assert result.results == [OK], result.errors
    want_k = spanned(ks, source, [(7, STRIDE, STRIDE)], [(2, 0)])
    same_bytes(received(by_address.prompt, "k"), spanned(want_k, source, [(96, STRIDE, STRIDE)], [(0, 2)]))
    want_v = spanned(vs, source, [(200, STRIDE, STRIDE)], [(1, 1)])
    same_bytes(received(by_address.prompt, "v"), spanned(want_v, source, [(0, STRIDE, STRIDE)], [(0, 3)]))


@pytest.mark.parametrize("wrong", ["nowhere", "before", "past the end", "just past", "largest", "zero"])
def test_r18_an_address_that_is_in_no_cache_is_invalid_and_nothing_moves(by_address: Pair, wrong: str) -> None:
    by_address.prompt.do(make, "kv", CACHE, 1)
    by_address.decoder.do(make, "kv", CACHE, 2)
    where = by_address.prompt.do(addresses, "kv")
    where[3] = {
        "nowhere": 4096,
        "before": where[0] - 1,
        "past the end": where[3] + ROWS * STRIDE,
        "just past": where[3] + (ROWS - 1) * STRIDE + 1,
        "largest": 2**64 - 1,
        "zero": 0,
    }[wrong]
    ends = (by_address.prompt, by_address.decoder)

    def attempt() -> None:
        result = by_address.decoder.do(send, "kv", [TransferConfig(1, where)])
        assert (result.results, result.first) == ([INVALID], INVALID)
        assert f"{where[3]:#x}" in result.errors[0]
        assert "dst_addrs" in result.errors[0]

    nothing_happens(ends, ["kv"], attempt)
    assert by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv")]).first is OK, "the link is as usable"


def test_a_block_that_leaves_the_tensor_is_invalid(by_address: Pair) -> None:
    by_address.prompt.do(make, "kv", BLOCKS, 1)
    by_address.decoder.do(make, "kv", PAGED, 2)
    before = received(by_address.prompt)
    result = by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv")], [0, 1], [0, ROWS])
    assert result.results == [INVALID]
    same_bytes(received(by_address.prompt), before)
    assert by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv")], [0, 1], [0, ROWS - 1]).results == [OK]


def test_r16_memory_that_is_not_remote_accessible_is_refused(by_address: Pair) -> None:
    by_address.prompt.do(make, "kv", Spec(4, ROWS, STRIDE, memory="private", accessible=False), 1)
    by_address.decoder.do(make, "kv", CACHE, 2)
    before = received(by_address.prompt)
    result = by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv")])
    assert result.results == [INVALID]
    assert "remote_accessible=False" in result.errors[0]
    same_bytes(received(by_address.prompt), before)


@pytest.mark.parametrize("spec", [CACHE, BLOCKS, Spec(4, ROWS, STRIDE, memory="private")])
def test_memory_that_is_given_up_meanwhile_is_not_written(by_address: Pair, spec: Spec) -> None:
    by_address.prompt.do(make, "kv", spec, 1)
    by_address.decoder.do(make, "kv", CACHE, 2)
    by_address.decoder.do(begin, "kv", [raw(by_address.prompt, "kv")])
    by_address.decoder.do(ready, 0)
    by_address.decoder.do(wait_asked, 1)
    kept = by_address.prompt.do(_forget_keeping, "kv")
    by_address.decoder.do(ready, 1)
    result = by_address.decoder.do(finish)
    assert (result.results, result.first) == ([INVALID], INVALID), result.errors
    assert "in none of the" in result.errors[0]
    if kept is not None:
        assert by_address.prompt.do(_unchanged), "what had been unregistered was written"


def _forget_keeping(world: Any, name: str) -> object:
    """Give a cache up; memory of the user stays, to be looked at."""
    arrays = world.memory.get(name)
    forget(world, name)
    if arrays is not None:
        world.memory["was"] = [array.copy() for array in arrays]
    return None if arrays is None else True


def _unchanged(world: Any) -> bool:
    return all((a == b).all() for a, b in zip(world.memory["was"], world.memory["kv"], strict=True))


def test_memory_that_is_registered_anew_meanwhile_is_found_again(by_address: Pair) -> None:
    by_address.prompt.do(make, "kv", Spec(4, ROWS, STRIDE, memory="private"), 1)
    source = by_address.decoder.do(make, "kv", CACHE, 2)
    by_address.decoder.do(begin, "kv", [raw(by_address.prompt, "kv")])
    by_address.decoder.do(ready, 0)
    by_address.decoder.do(wait_asked, 1)
    by_address.prompt.do(_register_again, "kv")
    before = received(by_address.prompt)
    by_address.decoder.do(ready, 1)
    assert by_address.decoder.do(finish).first is OK
    same_bytes(received(by_address.prompt), spanned(before, source, [(0, 0, STRIDE)], [(2, 2), (3, 3)]))


def _register_again(world: Any, name: str) -> None:
    cache, arrays = world.caches[name], world.memory[name]
    world.cm.unregister_cache(cache.cache_id)
    world.caches[name] = world.cm.register_cache(cache.cache_desc, [array.ctypes.data for array in arrays])


def test_shm_alone_cannot_write_sealed_pools_and_says_what_to_set(shm_pair: Pair) -> None:
    shm_pair.start()
    before, _ = make_both(shm_pair.prompt, shm_pair.decoder, CACHE, CACHE)
    result = shm_pair.decoder.do(send, "kv", [raw(shm_pair.prompt, "kv")])
    assert result.results == [LLMStatusCode.LLM_FEATURE_NOT_ENABLED]
    assert "llm.Transport" in result.errors[0]
    assert "EnableRemoteCacheAccessible" in result.errors[0]
    same_bytes(received(shm_pair.prompt), before)


def test_by_address_checksums_compare_what_arrived(by_address: Pair) -> None:
    for end in (by_address.decoder, by_address.prompt):
        end.stop()
    by_address.start(extra={"llm.Checksum": "1"} | _transport_of(by_address))
    before, source = make_both(by_address.prompt, by_address.decoder, BLOCKS, PAGED)
    result = by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv")], [1, 2], [3, 0])
    assert result.results == [OK], result.errors
    spans = [(3 * STRIDE, STRIDE, STRIDE), (0, 2 * STRIDE, STRIDE)]
    same_bytes(received(by_address.prompt), spanned(before, source, spans))
    assert by_address.decoder.do(picture).links[0].verified_bytes == 2 * STRIDE * 4


def _transport_of(pair: Pair) -> dict[str, str]:
    return {"llm.Transport": {"shm": "auto"}.get(pair.transport, pair.transport)}


# --- several configs -------------------------------------------------------------------------------------------------


def test_r18_two_configs_to_one_cluster_each_have_their_own_result(shm_pair: Pair) -> None:
    shm_pair.start(rca=True)
    before, source = make_both(shm_pair.prompt, shm_pair.decoder, CACHE, CACHE)
    good = keyed(shm_pair.prompt, "kv", range(1), row=1, dst_row=3)
    bad = keyed(shm_pair.prompt, "kv", range(1), range(7, 8), dst_row=4)
    later = keyed(shm_pair.prompt, "kv", range(1, 2), dst_row=5)
    result = shm_pair.decoder.do(send, "kv", [good, later, bad])
    assert (result.results, result.first) == ([OK, FAILED, INVALID], INVALID)
    assert "layer 7" in result.errors[2]
    assert "layer 7" in result.errors[1], "the unfinished config says why it is unfinished"
    assert result.errors[0] == ""
    same_bytes(received(shm_pair.prompt), spanned(before, source, [(3 * STRIDE, STRIDE, STRIDE)], [(0, 0), (1, 1)]))


def test_r18_an_unlinked_cluster_fails_its_config_and_stops_the_others(shm_pair: Pair) -> None:
    shm_pair.start(rca=True)
    make_both(shm_pair.prompt, shm_pair.decoder, CACHE, CACHE)
    nobody = keyed(shm_pair.prompt, "kv", range(2), dst_row=0)
    nobody.cache_key = CacheKeyByIdAndIndex(99, 1, 0)
    result = shm_pair.decoder.do(send, "kv", [keyed(shm_pair.prompt, "kv", range(2), dst_row=0), nobody])
    assert (result.results, result.first) == ([FAILED, LLMStatusCode.LLM_NOT_YET_LINK], LLMStatusCode.LLM_NOT_YET_LINK)


@pytest.mark.parametrize(
    ("dst", "blocks", "text"),
    [
        (Spec(4, ROWS, STRIDE - 1), (), "do not fit"),
        (Spec(4, ROWS, 2 * STRIDE, blocks=True, blocks_key=BlocksCacheKey(1, 0)), ([0], [0]), "block sizes differ"),
        (Spec(4, 2, STRIDE, blocks=True, blocks_key=BlocksCacheKey(1, 0)), ([0], [2]), "2 blocks"),
        (Spec(4, ROWS, STRIDE), ([0], [0]), "no blocks"),
        (BLOCKS, (None, [0], 96), "block sizes differ"),
    ],
)
def test_r17_what_does_not_fit_the_destination_is_invalid_and_nothing_moves(
    shm_pair: Pair, dst: Spec, blocks: tuple[Any, ...], text: str
) -> None:
    shm_pair.start(rca=True)
    shm_pair.prompt.do(make, "kv", dst, 1)
    shm_pair.decoder.do(make, "kv", PAGED, 2)
    config = keyed(shm_pair.prompt, "kv", range(2), dst_row=None if dst.blocks else 0)

    def attempt() -> None:
        result = shm_pair.decoder.do(send, "kv", [config], *blocks)
        assert (result.results, result.first) == ([INVALID], INVALID), result.errors
        assert text in result.errors[0]

    nothing_happens((shm_pair.prompt, shm_pair.decoder), ["kv"], attempt)


def test_no_config_is_a_task_that_is_over(shm_pair: Pair) -> None:
    shm_pair.start(rca=True)
    shm_pair.decoder.do(make, "kv", CACHE, 2)
    result = shm_pair.decoder.do(send, "kv", [])
    assert (result.results, result.first) == ([], OK)


# --- leave to write --------------------------------------------------------------------------------------------------


def test_r16_without_rca_only_what_was_located_may_be_pushed_to(by_address: Pair) -> None:
    """A peer that skips the question, or that asks about one cache and writes another, is refused by the owner."""
    by_address.prompt.do(make, "kv", BLOCKS, 1)
    by_address.prompt.do(make, "other", PAGED, 2)
    by_address.decoder.do(make, "kv", PAGED, 3)
    before = {name: received(by_address.prompt, name) for name in ("kv", "other")}
    ids = {name: by_address.prompt.do(cache_id, name) for name in before}
    for name in ("kv", "other"):
        with pytest.raises(ParamError, match="remote cache access"):
            by_address.decoder.do(_push, "kv", ids[name])
    assert by_address.decoder.do(send, "kv", [raw(by_address.prompt, "kv", range(1))]).first is OK
    by_address.decoder.do(_push, "kv", ids["kv"])
    with pytest.raises(ParamError, match="remote cache access"):
        by_address.decoder.do(_push, "kv", ids["other"])
    same_bytes(received(by_address.prompt, "other"), before["other"])


def test_r16_over_lanes_the_leave_is_asked_for_at_each_write(tcp_pair: Pair) -> None:
    tcp_pair.start()
    tcp_pair.prompt.do(make, "kv", BLOCKS, 1)
    tcp_pair.decoder.do(make, "kv", PAGED, 3)
    assert tcp_pair.decoder.do(send, "kv", [raw(tcp_pair.prompt, "kv")]).first is OK
    after = received(tcp_pair.prompt)
    number = tcp_pair.prompt.do(cache_id, "kv")
    tcp_pair.decoder.do(_push, "kv", number)  # the answer was kept: nothing is resolved any more
    tcp_pair.prompt.do(_take_back)
    with pytest.raises(ParamError, match="remote cache access"):
        tcp_pair.decoder.do(_push, "kv", number)
    same_bytes(received(tcp_pair.prompt), after)


def _push(world: Any, name: str, number: int) -> None:
    """Push block 0 by cache id, as an initiator that does not keep to the rules."""
    engine = world.dd._require_engine("test")
    entry = engine.store.registry.lookup(world.caches[name].cache_id)
    cut = LayerPlan.of_row(entry.geometry, 0)

    def plan(pair: CachePair) -> Plan:
        return cut.plan(0, 0, 4, offset=0, alias=pair.same_memory)

    engine.initiator.run(TransferOp(RemoteName(1, cache_id=number), entry, plan, Deadline(5000), "a push", push=True))


def _take_back(world: Any) -> None:
    world.dd._require_engine("test").links.get(2).caches.located.clear()
