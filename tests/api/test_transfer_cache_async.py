"""transfer_cache_async: which bytes arrive where, for every data shape of interface §6.14, by key and by raw
addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from faults.gated import open_there, shut_there
from faults.gates import Gate
from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode, TransferConfig
from tests.support.layers import (
    FAILED,
    INVALID,
    OK,
    addresses,
    asked,
    begin,
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
from tests.support.linking import alone
from tests.support.memory import pool
from tests.support.moves import Spec, cache_id, forget, make, nothing_happens, picture, same_bytes, show, wait_until
from tests.support.pairs import pair_of
from tests.support.world import fill, nixl_stands_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.layers import Span
    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

    #: The receiver's cache, the sender's, its row and the receiver's (None: a blocks key, or address), lists of blocks
    #: and the size of a piece, and what arrives.
    Shape = tuple[Spec, Spec, int, int | None, tuple[Any, ...], list[Span]]

pytestmark = pytest.mark.covers(
    "CacheTask", "CacheManager.transfer_cache_async", "CacheTask.errors", "llm: Checksum Transport"
)

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
def route(request: pytest.FixtureRequest) -> Iterator[tuple[Pair, bool]]:
    """A started pair, and whether it has remote cache access; without, what arrived is compared."""
    ends, transport, rca = request.param
    if not rca and nixl_stands_in(transport):
        pytest.skip(NOT_OVER_NIXL)
    for pair in pair_of(request, ends):
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
        same_bytes(pair.decoder.do(show, "kv"), source)
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


def test_r18_r05_dst_layer_range_counts_from_the_start_of_the_source_range_and_no_key_is_consumed(
    shm_pair: Pair,
) -> None:
    shm_pair.start(rca=True)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    before, source = make_both(prompt, decoder, Spec(8, 2, STRIDE, keys=(CacheKey(1, 5),)), Spec(8, 2, STRIDE))
    assert decoder.do(send, "kv", [keyed(prompt, "kv", range(2, 4), range(2), row=1, dst_row=0)]).results == [OK]
    tensors = [(0, 4), (1, 5), (2, 6), (3, 7)]
    same_bytes(received(prompt), spanned(before, source, [(0, STRIDE, STRIDE)], tensors))
    assert decoder.do(send, "kv", [keyed(prompt, "kv", range(4), dst_row=0)]).first is OK
    wait_until(lambda: prompt.do(picture).pins == 0)
    assert len(prompt.do(picture).keys) == 1


# --- raw addresses ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=["inproc", "auto", "tcp"])
def by_address(request: pytest.FixtureRequest) -> Iterator[Pair]:
    if nixl_stands_in(request.param):
        pytest.skip(NOT_OVER_NIXL)
    for pair in pair_of(request, {"auto": "shm"}.get(request.param, request.param)):
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
    return world.dd._require_engine("test").links.get(2).caches.located


def test_memory_that_is_given_up_meanwhile_is_not_written_and_found_again_when_registered_anew(
    by_address: Pair,
) -> None:
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
    return spanned(before, pair.decoder.do(show, "kv"), [(0, 0, STRIDE)], [(0, 0), (1, 1)])


def stop_but_keep(world: World) -> None:
    """Finalize; the user's memory lives on."""
    kept = dict(world.memory)
    world.stop()
    world.memory |= kept


def register_kept(world: World) -> Bytes:
    """Register the user's memory, in which nothing is of before."""
    where = [array.ctypes.data for array in world.memory["kv"]]
    world.caches["kv"] = world.cm.register_cache(SIX.desc, where)
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


@pytest.mark.parametrize("by_address", ["auto"], indirect=True)
@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_r07_by_address_what_the_sender_may_still_write_is_given_to_no_other_cache(
    by_address: Pair, tmp_path: Path, blocks: bool
) -> None:
    """The sender stands before its copy, over cma and without remote cache access, when the owner frees the cache."""
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
