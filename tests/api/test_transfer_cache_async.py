"""transfer_cache_async: shapes by key and by address, places that change, failures, results, finalize, wrong arguments
(interface §6.14, §4, R18)."""

import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from faults.gated import open_there, shut_there
from faults.gates import Gate, shut
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    LayerSynchronizer,
    LLMDataDist,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, StateError
from tests.support import moves
from tests.support.kinds import Bytes, Pair, World
from tests.support.layers import (
    BOUND_MS,
    FAILED,
    INVALID,
    OK,
    Always,
    Gated,
    Span,
    addresses,
    answer,
    asked,
    begin,
    finish,
    keyed,
    make_both,
    outcome,
    raw,
    ready,
    received,
    send,
    spanned,
    transfer,
    wait_asked,
)
from tests.support.linking import alone, bytes_move_both_ways, info, unlink
from tests.support.memory import pool
from tests.support.moves import Spec, Use, cache_id, forget, make, nothing_happens, picture, same_bytes, wait_until
from tests.support.pairs import pair_of
from tests.support.refusals import NONE, RULE, TYPE, Row, Table, bad, integer, refuse, refuse_each
from tests.support.refusals import Spec as Kind
from tests.support.source import run
from tests.support.world import fill, nixl_stands_in

#: The receiver's cache, the sender's, its row and the receiver's (None: a blocks key, or address), lists of blocks
#: and the size of a piece, and what arrives.
Shape = tuple[Spec, Spec, int, int | None, tuple[Any, ...], list[Span]]

pytestmark = [
    pytest.mark.covers(
        "CacheTask",
        "CacheManager.transfer_cache_async",
        "CacheTask: errors get_results synchronize",
        "llm: Checksum Transport",
        "LayerSynchronizer.synchronize_layer",
        "errors.StateError",
    ),
    pytest.mark.gpu,
]

ROWS, STRIDE, LAYERS = 8, 48, 2
TOTAL = ROWS * STRIDE
KEY = BlocksCacheKey(1, 0)
CACHE = Spec(2 * LAYERS, ROWS, STRIDE)
BLOCKS = Spec(2 * LAYERS, ROWS, STRIDE, blocks=True, blocks_key=KEY)
PAGED = Spec(2 * LAYERS, ROWS, STRIDE, blocks=True)
MIB = 1 << 20
LARGE = Spec(2 * LAYERS, 2, MIB)


def in_pieces(source: Spec, unit: int, targets: list[int]) -> Shape:
    """A whole tensor goes in pieces; the last may be short."""
    spans = [(block * unit, i * unit, min(unit, TOTAL - i * unit)) for i, block in enumerate(targets)]
    return Spec(2 * LAYERS, ROWS, unit, blocks=True, blocks_key=KEY), source, 0, None, (None, targets, unit), spans


def block_by_block(source: Spec, *size: int | None) -> Shape:
    spans = [(to * STRIDE, block * STRIDE, STRIDE) for block, to in zip([1, 2, 3, 7], [4, 5, 0, 1], strict=True)]
    return BLOCKS, source, 0, None, ([1, 2, 3, 7], [4, 5, 0, 1], *size), spans


SHAPES: list[Shape] = [
    (CACHE, CACHE, 2, 5, (), [(5 * STRIDE, 2 * STRIDE, STRIDE)]),
    (Spec(2 * LAYERS, 3, 2 * STRIDE), CACHE, 7, 0, (), [(0, 7 * STRIDE, STRIDE)]),  # into a longer row
    (LARGE, LARGE, 0, 1, (), [(MIB, 0, MIB)]),
    (BLOCKS, PAGED, 0, None, (), [(0, 0, STRIDE)]),  # of a blocks cache, and to one, block 0
    (BLOCKS, CACHE, 0, None, (), [(0, 0, STRIDE)]),
    in_pieces(CACHE, 96, [6, 0, 3, 2]),
    in_pieces(CACHE, 100, [7, 0, 1, 3]),
    in_pieces(CACHE, 96, [5]),
    in_pieces(CACHE, 96, [4, 3, 2]),
    in_pieces(PAGED, 96, [1, 0, 5]),
    *[block_by_block(source, *size) for source in (PAGED, CACHE) for size in ((), (None,), (0,), (STRIDE,))],
    # A block that is named twice holds the last one (interface R26).
    (BLOCKS, PAGED, 0, None, ([1, 2, 6], [3, 3, 3]), [(3 * STRIDE, block * STRIDE, STRIDE) for block in (1, 2, 6)]),
]

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


def to(pair: Pair, rca: bool, row: int, dst_row: int | None, stride: int, layers: range = range(LAYERS)) -> Any:
    """Return a config to "kv" of the prompt: by key with remote cache access, by address without."""
    if rca:
        return keyed(pair.prompt, "kv", layers, row=row, dst_row=dst_row)
    return raw(pair.prompt, "kv", layers, row=row, offset=(dst_row or 0) * stride)


@pytest.fixture(params=ROUTES, ids=["-".join([t, "key" if rca else "address"]) for _, t, rca in ROUTES])
def route(request: pytest.FixtureRequest, gpu: bool) -> Iterator[tuple[Pair, bool]]:
    """A started pair, and whether it has remote cache access; without, what arrived is compared."""
    ends, transport, rca = request.param
    if not rca and nixl_stands_in(transport):
        pytest.skip(NOT_OVER_NIXL)
    for pair in pair_of(request, ends, gpu=gpu):
        pair.transport = transport
        pair.start(rca=rca, extra={} if rca else {"llm.Checksum": "1"})
        yield pair, rca


def test_r26_every_shape_arrives_and_each_layer_before_the_next_is_asked_for(route: tuple[Pair, bool]) -> None:
    pair, rca = route
    verified = 0
    for dst, src, row, dst_row, blocks, spans in SHAPES:
        before, source = make_both(pair.prompt, pair.decoder, dst, src)
        result = pair.decoder.do(send, "kv", [to(pair, rca, row, dst_row, dst.stride)], *blocks)
        assert (result.results, result.first) == ([OK], OK), (dst, src, blocks, result.errors)
        same_bytes(received(pair.prompt), spanned(before, source, spans))
        same_bytes(pair.decoder.do(moves.show, "kv"), source)
        if not rca:  # bytes that were written over are compared no more
            verified += 2 * LAYERS * sum(length for _, length in {(at, length) for at, _, length in spans})
        assert pair.decoder.do(picture).links[0].verified_bytes == verified
        for end in (pair.prompt, pair.decoder):
            end.do(forget, "kv")
    layers_arrive_in_order(pair, rca)


def layers_arrive_in_order(pair: Pair, rca: bool) -> None:
    """By what the receiver holds: layer 1 has arrived whole while layer 3 is still computed; 0 and 2 go nowhere."""
    four = Spec(8, 2, STRIDE)
    before, source = make_both(pair.prompt, pair.decoder, four, four)
    configs = [to(pair, rca, 1, 0, STRIDE, range(1, 2)), to(pair, rca, 0, 1, STRIDE, range(3, 4))]
    pair.decoder.do(begin, "kv", configs)
    pair.decoder.do(wait_asked, 1)
    same_bytes(received(pair.prompt), before)
    pair.decoder.do(ready, 0, 1, 2)
    pair.decoder.do(wait_asked, 3)
    middle = spanned(before, source, [(0, STRIDE, STRIDE)], [(2, 2), (3, 3)])
    same_bytes(received(pair.prompt), middle)
    pair.decoder.do(ready, 3)
    assert pair.decoder.do(finish).results == [OK, OK]
    assert pair.decoder.do(asked) == [1, 3]
    same_bytes(received(pair.prompt), spanned(middle, source, [(STRIDE, 0, STRIDE)], [(6, 6), (7, 7)]))


def test_r18_r05_dst_layer_range_counts_from_the_source_range_and_no_key_is_consumed(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(rca=True)
    before, source = make_both(prompt, decoder, Spec(8, 2, STRIDE, keys=(CacheKey(1, 5),)), Spec(8, 2, STRIDE))
    assert decoder.do(send, "kv", [keyed(prompt, "kv", range(2, 4), range(2), row=1, dst_row=0)]).results == [OK]
    tensors = [(0, 4), (1, 5), (2, 6), (3, 7)]
    same_bytes(received(prompt), spanned(before, source, [(0, STRIDE, STRIDE)], tensors))
    assert decoder.do(send, "kv", [keyed(prompt, "kv", range(4), dst_row=0)]).first is OK
    wait_until(lambda: prompt.do(picture).pins == 0)
    assert len(prompt.do(picture).keys) == 1
    # Many transfers at once each end for themselves.
    before, source = make_both(prompt, decoder, KV, KV)
    decoder.do(_many, [keyed(shm_pair.prompt, "kv", range(3), row=row, dst_row=row) for row in range(4)])
    same_bytes(received(prompt), spanned(before, source, [(0, 0, 4 * STRIDE)]))


# --- raw addresses ---------------------------------------------------------------------------------------------------
@pytest.fixture(params=["inproc", "auto", "tcp"])
def by_address(request: pytest.FixtureRequest, gpu: bool) -> Iterator[Pair]:
    if nixl_stands_in(request.param):
        pytest.skip(NOT_OVER_NIXL)
    for pair in pair_of(request, {"auto": "shm"}.get(request.param, request.param), gpu=gpu):
        pair.transport = request.param
        pair.start()
        yield pair


def test_k_and_v_may_lie_in_different_caches_anywhere_in_them(by_address: Pair) -> None:
    prompt, decoder = by_address.prompt, by_address.decoder
    source = decoder.do(make, "kv", Spec(4, 2, STRIDE), 3)
    for memory in ("pool", "inside", "private"):
        ks = prompt.do(make, "k", Spec(3, 4, STRIDE, memory=memory), 1)
        vs = prompt.do(make, "v", Spec(2, 6, 64, blocks=True, memory=memory), 2)
        k_at, v_at = prompt.do(addresses, "k"), prompt.do(addresses, "v")
        config = TransferConfig(1, [k_at[2] + 7, v_at[1] + 200, k_at[0] + 96, k_at[1] + 5], None, 1)
        result = decoder.do(send, "kv", [config])
        assert result.results == [OK], result.errors
        for offset, pair in ((7, (2, 0)), (96, (0, 2)), (5, (1, 3))):
            ks = spanned(ks, source, [(offset, STRIDE, STRIDE)], [pair])
        same_bytes(received(prompt, "k"), ks)
        same_bytes(received(prompt, "v"), spanned(vs, source, [(200, STRIDE, STRIDE)], [(1, 1)]))


def test_r18_r16_an_address_in_no_cache_that_a_peer_may_write_is_invalid_and_nothing_moves(by_address: Pair) -> None:
    prompt, decoder = by_address.prompt, by_address.decoder
    prompt.do(make, "other", PAGED, 1)
    prompt.do(make, "kv", BLOCKS, 1)
    prompt.do(make, "hidden", Spec(4, ROWS, STRIDE, memory="private", accessible=False), 1)
    decoder.do(make, "kv", PAGED, 2)
    where, hidden = prompt.do(addresses, "kv"), prompt.do(addresses, "hidden")

    def refused(last: int, *blocks: list[int], text: str = "dst_addrs") -> None:
        result = decoder.do(send, "kv", [TransferConfig(1, [*where[:3], last])], *blocks)
        assert (result.results, result.first) == ([INVALID], INVALID), hex(last)
        assert text in result.errors[0]
        assert f"{last:#x}" in result.errors[0] or blocks

    def attempt() -> None:
        for wrong in (4096, min(where) - 1, where[3] + TOTAL, where[3] + TOTAL - STRIDE + 1, 2**64 - 1, 0):
            refused(wrong)
        refused(hidden[3], text="remote_accessible=False")
        refused(where[3], [0, 1], [0, ROWS], text="")

    nothing_happens((prompt, decoder), ["kv", "other", "hidden"], attempt)
    assert decoder.do(send, "kv", [raw(prompt, "kv")]).first is OK, "the link is as usable"
    assert decoder.do(send, "kv", [raw(prompt, "kv")], [0, 1], [0, ROWS - 1]).results == [OK]
    assert prompt.do(_may_be_written) == {prompt.do(cache_id, "kv")}


def _may_be_written(world: World) -> set[int]:
    """Return to which caches the peer has leave; what it may do without: tests/unit/test_access_matrix.py."""
    return world.probe.link(2).caches.located


def test_memory_given_up_meanwhile_is_not_written_and_found_when_registered_anew(by_address: Pair) -> None:
    prompt, decoder = by_address.prompt, by_address.decoder
    source = decoder.do(make, "kv", CACHE, 2)
    private = Spec(4, ROWS, STRIDE, memory="private")
    for spec, change in ((CACHE, forget), (BLOCKS, forget), (private, forget), (private, register_again)):
        prompt.do(make, "kv", spec, 1)
        decoder.do(begin, "kv", [raw(prompt, "kv")])
        decoder.do(ready, 0)
        decoder.do(wait_asked, 1)
        prompt.do(change, "kv")
        before = received(prompt) if spec is private else []
        decoder.do(ready, 1)
        result = decoder.do(finish)
        if change is forget:
            assert (result.results, result.first) == ([INVALID], INVALID), result.errors
            assert "in none of the" in result.errors[0]
        else:
            assert result.first is OK
            before = spanned(before, source, [(0, 0, STRIDE)], [(2, 2), (3, 3)])
        if spec is private:  # what was unregistered is the user's, and the view of it still there
            same_bytes(received(prompt), before)


def register_again(world: World, name: str) -> None:
    cache = world.caches[name]
    where = list(cache.tensor_addrs)
    world.cm.unregister_cache(cache.cache_id)
    world.caches[name] = world.cm.register_cache(cache.cache_desc, where)


def test_shm_alone_cannot_write_sealed_pools_and_says_what_to_set(shm_pair: Pair) -> None:
    shm_pair.start()
    before, _ = make_both(shm_pair.prompt, shm_pair.decoder, CACHE, CACHE)
    result = shm_pair.decoder.do(send, "kv", [raw(shm_pair.prompt, "kv")])
    assert result.results == [LLMStatusCode.LLM_FEATURE_NOT_ENABLED]
    assert "llm.Transport" in result.errors[0]
    assert "EnableRemoteCacheAccessible" in result.errors[0]
    same_bytes(received(shm_pair.prompt), before)


# --- layers of one destination go to one place ------------------------------------------------------------------------
SIX = Spec(6, 4, STRIDE)
NOT_OVER_NIXL = "over nixl nothing is written without remote cache access"

SIX_BLOCKS = Spec(6, 4, STRIDE, blocks=True, blocks_key=KEY)
SIX_PAGED = Spec(6, 4, STRIDE, blocks=True)


def initialised_anew(pair: Pair, by: str) -> Bytes:
    """Finalize the prompt, initialise it again with a cache like the one before, and link."""
    prompt, rca = pair.prompt, by != "private"
    prompt.do(stop_but_keep)
    alone(pair.decoder)
    extra = {"llm.Transport": pair.transport}
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, enable_remote_cache_accessible=rca)
    before = prompt.do(make, "kv", SIX_BLOCKS, 7) if rca else prompt.do(register_kept)
    pair.link()
    assert by != "id" or prompt.do(cache_id, "kv") == 1, "the same name means the new one"
    if rca:
        return before
    # Another transfer has been told where its addresses lie: the leave to write is there.
    assert pair.decoder.do(send, "kv", [raw(prompt, "kv", range(1))]).first is OK
    return spanned(before, pair.decoder.do(moves.show, "kv"), [(0, 0, STRIDE)], [(0, 0), (1, 1)])


def stop_but_keep(world: World) -> None:
    """Finalize; the user's memory lives on."""
    kept = world.memory | {"where": list(world.caches["kv"].tensor_addrs)}
    world.stop()
    world.memory |= kept


def register_kept(world: World) -> Bytes:
    """Register the user's memory, in which nothing is of before."""
    world.caches["kv"] = world.cm.register_cache(SIX.desc, world.memory["where"])
    return fill(world.caches["kv"], 7)


def bound_anew(pair: Pair, by: str) -> Bytes:
    pair.prompt.do(forget, "kv")
    return pair.prompt.do(make, "kv", SIX_BLOCKS, 7)


def allocated_anew(pair: Pair, by: str) -> Bytes:
    """The addresses are those of another cache now, of another request."""
    where = pair.prompt.do(addresses, "kv")
    pair.prompt.do(give_back)
    wait_until(lambda: pair.prompt.do(pool).used_bytes == 0)  # the pin of the first layer may still be on its way
    before = pair.prompt.do(make, "kv", SIX, 7)
    assert pair.prompt.do(addresses, "kv") == where
    return before


def give_back(world: World) -> None:
    """Give "kv" back, and what it was registered in."""
    under = world.caches.get("memory of kv")
    forget(world, "kv")
    if under is not None:
        world.cm.deallocate_blocks_cache(under)


@pytest.mark.parametrize(
    ("route", "by", "change"),
    [
        *[(ROUTES[n], "key", initialised_anew) for n in range(3)],
        (ROUTES[1], "id", initialised_anew),
        *[(ROUTES[n], "key", bound_anew) for n in range(3)],
        *[(ROUTES[n], memory, allocated_anew) for n in (4, 6) for memory in ("pool", "inside")],
        *[(ROUTES[n], "private", initialised_anew) for n in (4, 6)],
    ],
    indirect=["route"],
)
def test_r07_a_place_that_changed_midway_does_not_get_the_rest(
    route: tuple[Pair, bool], by: str, change: Callable[[Pair, str], Bytes]
) -> None:
    """Regression: layers of one destination went to two places, and the transfer succeeded."""
    pair, rca = route
    prompt, decoder = pair.prompt, pair.decoder
    prompt.do(make, "kv", SIX_BLOCKS if rca else Spec(6, 4, STRIDE, memory=by), 1)
    decoder.do(make, "kv", SIX_PAGED, 2)
    config: Any = keyed(prompt, "kv", range(3), dst_row=0 if by == "id" else None) if rca else raw(prompt, "kv")
    decoder.do(begin, "kv", [config])
    decoder.do(ready, 0)
    decoder.do(wait_asked, 1)
    before = change(pair, by)
    decoder.do(ready, 1, 2)
    result = decoder.do(finish)
    assert (result.results, result.first) == ([FAILED], FAILED), result
    assert change.__name__.replace("_", " ") in result.errors[0]
    assert "send all of it again" in result.errors[0]
    same_bytes(received(prompt), before)
    assert decoder.do(send, "kv", [config]).first is OK, "a transfer that begins now may go there"


@pytest.mark.gpu(False)
@pytest.mark.parametrize("by_address", ["auto"], indirect=True)
@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_r07_by_address_what_may_be_written_is_not_given_away(by_address: Pair, tmp_path: Path, blocks: bool) -> None:
    """The sender stands before its copy, over cma and without remote cache access, when the owner frees the cache.

    Regression: memory that a sender might still write was given to another cache.
    """
    prompt, decoder = by_address.prompt, by_address.decoder
    prompt.do(make, "kv", Spec(6, 4, STRIDE, blocks=blocks), 1)
    decoder.do(make, "kv", SIX_PAGED, 2)
    where = prompt.do(addresses, "kv")
    decoder.do(shut_there, "before write", tmp_path, 1)
    decoder.do(begin, "kv", [raw(prompt, "kv")])
    decoder.do(ready, 0, 1, 2)
    Gate(tmp_path).wait()
    prompt.do(forget, "kv")
    kept = prompt.do(picture)
    assert (kept.quarantined_bytes > 0, kept.pins > 0) == (blocks, not blocks)
    before = prompt.do(make, "kv", SIX, 7)
    assert not set(where) & set(prompt.do(addresses, "kv"))
    Gate(tmp_path).open()
    assert decoder.do(finish).first is not OK
    decoder.do(open_there)
    same_bytes(received(prompt), before)
    wait_until(lambda: (prompt.do(picture).quarantined_bytes, prompt.do(picture).pins) == (0, 0))


KV = Spec(6, 4, STRIDE)
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
NOT_LINKED, MISSING = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
FINALIZED = LLMStatusCode.LLM_ENGINE_FINALIZED
ROW = [(STRIDE, 0, STRIDE)]


def by_key(pair: Pair, layers: range, **more: Any) -> Any:
    return keyed(pair.prompt, "kv", layers, dst_row=1, **more)


def here(pair: Pair) -> World:
    """Return the sender's world, which is in this process."""
    world: World = pair.decoder.world  # type: ignore[attr-defined]
    return world


def started(pair: Pair, *configs: range, **settings: Any) -> Any:
    """Begin a transfer with a config for each range, if any; return (bytes before, source)."""
    pair.start(rca=True, **settings)
    both = make_both(pair.prompt, pair.decoder, KV, KV)
    if configs:
        pair.decoder.do(begin, "kv", [by_key(pair, each) for each in configs])
    return both


def sent(pair: Pair, synchronizer: LayerSynchronizer, *configs: range) -> CacheTask:
    world = here(pair)
    return world.cm.transfer_cache_async(world.caches["kv"], synchronizer, [by_key(pair, each) for each in configs])


# --- what fails, and what must be reported ---------------------------------------------------------------------------
def test_r18_r17_the_first_failure_is_what_stopped_the_transfer_wherever_its_config_is(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(rca=True)
    before, source = make_both(prompt, decoder, KV, KV)
    good, later, last, whole = (by_key(shm_pair, each) for each in (range(1), range(1, 2), range(2, 3), range(3)))
    # A synchronizer that says no or dies; what else it may raise: tests/unit/test_transfer_threads.py.
    for value, code, text in ((False, INVALID, "returned False"), (SystemExit(3), FAILED, "SystemExit")):
        decoder.do(begin, "kv", [by_key(shm_pair, each) for each in (range(1), range(2), range(1, 3), range(2, 3))])
        decoder.do(ready, 0)
        decoder.do(answer, 1, value)
        result = decoder.do(finish)
        assert (result.results, result.first) == ([OK, code, code, FAILED], code)
        assert [text in error for error in result.errors] == [False, True, True, True]
        assert decoder.do(asked) == [0, 1]
        before = spanned(before, source, ROW, [(0, 0), (1, 1)])
        same_bytes(received(prompt), before)
    #: Configs, results, what all errors say, and how many layers have arrived afterwards.
    cases: list[tuple[list[Any], list[LLMStatusCode], str, int]] = [
        ([good, later, by_key(shm_pair, range(1), dst_layers=range(7, 8))], [OK, FAILED, INVALID], "layer 7", 1),
        ([whole, to_cache(whole, 99, 1)], [FAILED, NOT_LINKED], "cluster 99", 1),
        ([whole, last, to_cache(later, 1, 77)], [FAILED, FAILED, MISSING], "id 77", 2),
    ]
    for configs, results, text, layers in cases:
        result = decoder.do(send, "kv", configs)
        assert (result.results, result.first) == (results, results[-1])
        assert [text in error for error in result.errors] == [each is not OK for each in results]
        same_bytes(received(prompt), spanned(before, source, ROW, [(t, t) for t in range(2 * layers)]))
    bytes_move_both_ways(decoder, prompt)


def to_cache(config: Any, cluster_id: int, cache_id: int) -> Any:
    """Return a copy of a config that names another cluster and cache."""
    return type(config)(CacheKeyByIdAndIndex(cluster_id, cache_id, 1), config.src_layer_range, config.dst_layer_range)


def test_r17_what_does_not_fit_the_destination_is_invalid_and_nothing_moves(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(rca=True)
    decoder.do(make, "kv", Spec(6, 4, STRIDE, blocks=True), 2)

    def attempt(config: Any, blocks: tuple[Any, ...], text: str) -> None:
        result = decoder.do(send, "kv", [config], *blocks)
        assert (result.results, result.first) == ([INVALID], INVALID), result.errors
        assert text in result.errors[0]

    misfits: list[tuple[Spec, tuple[Any, ...], str]] = [
        (Spec(6, 4, STRIDE - 1), (), "do not fit"),
        (Spec(6, 4, STRIDE), ([0], [0]), "no blocks"),
        (Spec(6, 4, 2 * STRIDE, blocks=True, blocks_key=KEY), ([0], [0]), "block sizes differ"),
        (Spec(6, 2, STRIDE, blocks=True, blocks_key=KEY), ([0], [2]), "2 blocks"),
        (Spec(6, 4, STRIDE, blocks=True, blocks_key=KEY), (None, [0], 96), "block sizes differ"),
    ]
    for dst, blocks, text in misfits:
        prompt.do(make, "kv", dst, 1)
        config = keyed(prompt, "kv", range(2), dst_row=None if dst.blocks else 0)
        nothing_happens((prompt, decoder), ["kv"], partial(attempt, config, blocks, text))
        prompt.do(forget, "kv")


class Acting(Always):
    """Does something for each layer, and remembers what that raised."""

    def __init__(self, action: Callable[[], object]) -> None:
        super().__init__()
        self.action = action
        self.errors: list[BaseException] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        try:
            self.action()
        except BaseException as error:  # noqa: BLE001 (looked at by the test)
            self.errors.append(error)
        return super().synchronize_layer(layer_index, timeout_in_millis)


# --- asking for results ----------------------------------------------------------------------------------------------
def test_a_time_out_of_the_question_ends_nothing_and_a_wrong_one_is_refused(local_pair: Pair) -> None:
    before, source = started(local_pair, range(3), range(2))
    task = transfer(here(local_pair)).task
    for question in (task.synchronize, task.get_results):
        refuse_each(question, {}, {"timeout_in_millis": integer(0, 2**32 - 1, none_ok=True)})
    for milliseconds in (0, 1):
        assert task.synchronize(milliseconds) is TIMEOUT
        assert task.get_results(milliseconds) == [TIMEOUT, TIMEOUT]
    assert "running" in repr(task)
    local_pair.decoder.do(ready, 0, 1, 2)
    for _ in range(2):
        assert task.synchronize() is OK
        assert task.get_results(0) == [OK, OK]
    assert "over" in repr(task)
    same_bytes(received(local_pair.prompt), spanned(before, source, ROW))
    # Layers that go nowhere are not asked for, and each is asked for once.
    always = Always()
    assert outcome(sent(local_pair, always, range(2, 3), range(1), range(2, 3))).first is OK
    assert always.asked == [(0, None), (2, None)]
    # A synchronizer that waits for its own task is told.
    there = threading.Event()
    waiting = Acting(lambda: there.wait(BOUND_MS / 1e3) and own.synchronize())
    own = sent(local_pair, waiting, range(1))
    there.set()
    assert own.synchronize(BOUND_MS) is OK
    assert [type(error) for error in waiting.errors] == [StateError]


# --- the source ------------------------------------------------------------------------------------------------------
def test_a_source_that_is_given_back_meanwhile_is_sent_whole_and_unregister_waits_in_bounds(shm_pair: Pair) -> None:
    before, source = started(shm_pair, range(3), sync_kv_timeout=300)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    decoder.do(forget, "kv")
    assert decoder.do(picture).caches.draining == 1
    decoder.do(ready, 0, 1, 2)
    assert decoder.do(finish).first is OK
    same_bytes(received(prompt), spanned(before, source, ROW))
    assert (decoder.do(picture).caches.draining, decoder.do(picture).pools[0].used_bytes) == (0, 0)
    wait_until(lambda: not prompt.do(picture).pins)  # the last release is on its way

    def attempt() -> None:
        with pytest.raises(CacheNotFound, match="src_cache"):
            decoder.do(send, "kv", [by_key(shm_pair, range(3))])

    nothing_happens((decoder, prompt), [], attempt)
    decoder.do(make, "kv", Spec(6, 4, STRIDE, memory="private"), 3)
    decoder.do(begin, "kv", [by_key(shm_pair, range(3))])
    with pytest.raises(DeadlineExceeded, match="unregister_cache"):
        decoder.do(forget, "kv")
    decoder.do(ready, 0, 1, 2)
    assert decoder.do(finish).first is OK
    decoder.do(forget, "kv")
    assert decoder.do(picture).caches.registered == 0


# --- links and peers that end ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rca", [True, False], ids=["key", "address"])
def test_a_link_given_up_midway_fails_what_is_unfinished_unless_it_goes_by_address(shm_pair: Pair, rca: bool) -> None:
    prompt, decoder = shm_pair.start(rca=rca, extra={"llm.Transport": "shm" if rca else "auto"})
    before, source = make_both(prompt, decoder, KV, KV)
    layers = (range(1), range(3))
    decoder.do(begin, "kv", [by_key(shm_pair, each) if rca else raw(prompt, "kv", each) for each in layers])
    decoder.do(ready, 0)
    decoder.do(wait_asked, 1)
    decoder.do(unlink, [info(1)], 5000, True)
    if rca:
        decoder.do(ready, 1, 2)
        assert decoder.do(finish).results == [OK, NOT_LINKED]
    prompt.do(unlink, [info(2)], 5000, True)
    shm_pair.link()
    if rca:
        decoder.do(begin, "kv", [by_key(shm_pair, range(3))])
    decoder.do(ready, 0, 1, 2)
    assert decoder.do(finish).first is OK
    same_bytes(received(prompt), spanned(before, source, ROW if rca else [(0, 0, STRIDE)]))


# --- finalize --------------------------------------------------------------------------------------------------------
def task_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name.startswith("llm-datadist-task-")]


def test_finalize_ends_a_transfer_that_waits_for_its_synchronizer_and_later_ones_are_refused(local_pair: Pair) -> None:
    started(local_pair, range(1), range(3), sync_kv_timeout=100)
    local_pair.decoder.do(ready, 0)
    local_pair.decoder.do(wait_asked, 1)
    world = here(local_pair)
    running, manager, cache = transfer(world), world.cm, world.caches["kv"]
    before = received(local_pair.prompt)
    world.dd.finalize()  # its synchronizer blocks: the thread is left behind
    result = outcome(running.task, 0)
    assert (result.results, result.first) == ([OK, FINALIZED], FINALIZED)
    assert "finalize" in result.errors[1]
    (left,) = task_threads()
    assert left.daemon
    running.open(1, 2)  # it returns after all: the thread ends without a further step
    left.join(BOUND_MS / 1e3)
    assert not left.is_alive()
    assert outcome(running.task, 0) == result
    same_bytes(received(local_pair.prompt), before)
    with pytest.raises(StateError) as caught:
        manager.transfer_cache_async(cache, Gated(), [])
    assert caught.value.status_code is FINALIZED


def test_a_synchronizer_may_finalize(local_pair: Pair) -> None:
    """The one thing finalize cannot wait for is the thread that called it.

    Regression: finalize joined its own thread and raised.
    """
    started(local_pair)
    dd = here(local_pair).dd
    finalizing = Acting(dd.finalize)
    task = sent(local_pair, finalizing, range(3))
    result = outcome(task)
    assert (result.results, result.first) == ([FINALIZED], FINALIZED)
    for thread in task_threads():
        thread.join(BOUND_MS / 1e3)
    assert (task_threads(), finalizing.errors) == ([], [])
    assert LLMDataDist.llm_engine_instance not in (dd, None), "the one that was initialised before"


@pytest.mark.parametrize("step", ["ask", "before write", "after write"])
def test_finalize_ends_a_transfer_in_the_middle_of_a_layer(local_pair: Pair, tmp_path: Path, step: str) -> None:
    started(local_pair, sync_kv_timeout=2000)
    dd, gate, probe = here(local_pair).dd, Gate(tmp_path), here(local_pair).probe
    with shut(dd, step, tmp_path, peer=1):
        task = sent(local_pair, Always(), range(3))
        gate.wait()
        ending = threading.Thread(target=dd.finalize)
        ending.start()
        wait_until(lambda: probe.ended(task))  # from then on no layer may succeed
        gate.open()
        ending.join(BOUND_MS / 1e3)
    assert not ending.is_alive()
    assert task.get_results(0) == [FINALIZED]
    assert task_threads() == []


def test_an_interpreter_that_ends_lets_a_moving_transfer_come_to_its_end() -> None:
    """As a thread that is no daemon would: a script that starts a transfer last and ends has sent it.

    Regression: jobs of one LLMDataDist were taken down while another one's still sent to it.
    """
    done = run(sys.executable, "-W", "error", "-c", _SENDS_LAST)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["[<LLMStatusCode.LLM_SUCCESS:", "0>]"], (done.stdout, done.stderr)


_SENDS_LAST = """
import atexit, threading
task = None
atexit.register(lambda: print(task.get_results(0)))  # runs after the library's own: it was there first
from llm_datadist import LayerSynchronizer
from tests.support.pairs import Pair
from tests.support.ends import LocalEnd
from tests.support.layers import keyed, make_both
from tests.support.moves import Spec

pair = Pair(LocalEnd("prompt"), LocalEnd("decoder"), "auto")
pair.start(rca=True)
make_both(pair.prompt, pair.decoder, Spec(64, 2, 64), Spec(64, 2, 64))
gone = threading.Event()

class Late(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        gone.wait()  # nothing is sent before the script is at its end
        return True

world = pair.decoder.world
task = world.cm.transfer_cache_async(world.caches["kv"], Late(), [keyed(pair.prompt, "kv", range(32), dst_row=1)])
atexit.register(gone.set)  # runs first of all
"""


def _many(world: World, configs: list[Any]) -> None:
    tasks = [world.cm.transfer_cache_async(world.caches["kv"], Always(), [each]) for each in configs * 4]
    assert [task.synchronize(BOUND_MS) for task in tasks] == [OK] * 16


# --- wrong arguments --------------------------------------------------------------------------------------------------
FOUR, TWO_LAYERS = 4, Spec(4, 4, STRIDE)
SIZE = FOUR * STRIDE
_RULES: Any = (RULE, "{}", [-1], [2**64]), (RULE, "{} is empty", [])
NUMBERS = Kind((1, {0}), (TYPE, "{}", [0.5]), (NONE, "{}", [None]), *_RULES, none_ok=True)
SPECS = {
    "src_cache": Kind((1,), (RULE, "HOST", Use("host")), (RULE, "even", Use("odd"))),
    "layer_synchronizer": Kind((print,)),
    "transfer_configs": Kind(
        ("x",), (NONE, "{}[0]", [None]), (TYPE, "{}[0]", [1]), (RULE, "{} is empty: at least", [], ())
    ),
    "dst_block_indices": NUMBERS,
}
TO_BLOCKS = {"src_block_indices": NUMBERS, "dst_block_memory_size": integer(0, 2**64 - 1, 0, SIZE, none_ok=True)}
ONE = {"dst_block_indices": [0]}
FROM_BLOCKS = ONE | {"src_block_indices": [0]}
BLOCK_ROWS: list[Row] = [
    *(Row(ONE | row.changes, row.kind, row.texts) for name, spec in TO_BLOCKS.items() for row in spec.rows(name)),
    bad(RULE, "src_block_indices[0]", **ONE, src_block_indices=[FOUR]),
    bad(RULE, "equal lengths", **ONE, src_block_indices=[0, 1]),
    bad(RULE, "blocks to cache", src_block_indices=[0]),
    bad(RULE, "dst_block_memory_size", **ONE),
    bad(RULE, "2 pieces", dst_block_indices=[0, 1, 2], dst_block_memory_size=SIZE // 2),
    bad(RULE, dst_block_memory_size=48),
    bad(RULE, "block size 48", **FROM_BLOCKS, dst_block_memory_size=47),
]


def config_rows(good: Any, other: Any, rca: bool) -> list[Row]:
    """Rows of wrong configs, by key or by address; ``other`` is one of the other kind."""

    def config(layers: range | None = None, row: int = 0, addrs: list[int] | None = None) -> list[Any]:
        if rca:
            return [TransferWithCacheKeyConfig(good.cache_key, layers or range(2), layers or range(2), row)]
        return [TransferConfig(1, list(good.dst_addrs) if addrs is None else addrs, layers, row)]

    rows = [
        bad(TYPE, type(good).__name__, transfer_configs=[other]),
        bad(TYPE, "transfer_configs[1]", transfer_configs=[good, other]),
        bad(RULE, "2 layers", transfer_configs=config(range(3), addrs=[4096] * 6)),
        bad(RULE, "src_batch_index", transfer_configs=config(row=FOUR)),
        bad(RULE, "src_batch_index", transfer_configs=config(row=1), **FROM_BLOCKS),
    ]
    if rca:
        unequal = config()
        unequal[0].src_layer_range = range(1)
        return [*rows, bad(RULE, "length", transfer_configs=unequal)]
    wrong = [bad(RULE, f"dst_addrs has {n}", transfer_configs=config(addrs=[4096] * n)) for n in (0, 3)]
    return [*rows, *wrong, bad(RULE, "dst_addrs has 4", transfer_configs=config(range(1), addrs=[4096] * 4))]


@pytest.mark.parametrize("rca", [True, False], ids=["by key", "by address"])
def test_r01_a_wrong_argument_is_refused_and_nothing_happens(local_pair: Pair, rca: bool) -> None:
    local_pair.start(rca=rca)
    local_pair.prompt.do(make, "kv", TWO_LAYERS, 1)
    odd, host = Spec(3, FOUR, STRIDE), Spec(4, FOUR, STRIDE, placement=Placement.HOST)
    for name, cache in (("kv", TWO_LAYERS), ("odd", odd), ("host", host)):
        local_pair.decoder.do(make, name, cache, 2)
    by_key = keyed(local_pair.prompt, "kv", range(2), dst_row=0)
    both = (by_key, raw(local_pair.prompt, "kv"))
    good, other = both if rca else both[::-1]
    always, rows = Always(), config_rows(good, other, rca)
    arguments = {"src_cache": Use("kv"), "layer_synchronizer": always, "transfer_configs": [good]}
    configs = [config for row in rows for config in row.changes["transfer_configs"]]
    ranges = [config.src_layer_range for config in configs]
    table = Table("cm.transfer_cache_async", arguments, SPECS, *BLOCK_ROWS, *rows)
    refuse((local_pair.decoder, local_pair.prompt), table)
    assert always.asked == []
    assert [config.src_layer_range for config in configs] == ranges, "written back by a refused call"
    assert local_pair.decoder.do(send, "kv", [good]).results[0] is not None, "and a good call is taken after all that"


def test_src_layer_range_none_becomes_all_layers_in_the_object_and_is_not_read_again(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", TWO_LAYERS, 1)
    source = local_pair.decoder.do(make, "kv", TWO_LAYERS, 2)
    config = raw(local_pair.prompt, "kv")
    assert config.src_layer_range is None
    seen = []

    def change() -> None:
        seen.append(config.src_layer_range)
        config.dst_addrs, config.src_layer_range = [1, 2, 3, 4], range(1)

    world = here(local_pair)
    task = world.cm.transfer_cache_async(world.caches["kv"], Acting(change), [config])
    assert isinstance(task, CacheTask)
    assert task.synchronize() is OK
    assert seen == [range(2), range(1)]
    same_bytes([each[:1] for each in received(local_pair.prompt)], [each[:1] for each in source])
