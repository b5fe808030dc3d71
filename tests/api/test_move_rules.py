"""Pulls and pushes: what the peer's cache must be, one's own cluster, many threads, unlike elements (interface §6.10 to
§6.13, R26, R28). Arguments, and the order of their checks: test_bad_input_calls.py."""

import logging
import threading
from dataclasses import replace
from functools import partial
from logging.handlers import BufferingHandler
from typing import Any, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import CacheMismatch, ParamError
from tests.support import moves
from tests.support.ends import Call
from tests.support.kinds import Bytes, End, LocalEnd, Pair, World
from tests.support.layers import INVALID, keyed, send
from tests.support.linking import SUCCESS, alone, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, make, moved, picture, refused, same_bytes, show

pytestmark = [pytest.mark.covers("errors: CacheMismatch CacheNotFound", "LLMStatusCode.LLM_SUCCESS"), pytest.mark.gpu]


def _publish_too_many_tensors(world: World) -> None:
    pool = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 64], DataType.DT_UINT8))
    count = 90_000
    desc = CacheDesc(count, [1, 16], DataType.DT_UINT8)
    world.cm.register_blocks_cache(desc, [pool.tensor_addrs[0]] * count, BlocksCacheKey(1, 77))


def _pull_too_many_tensors(world: World) -> None:
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [1, 16], DataType.DT_UINT8))
    world.cm.pull_blocks(BlocksCacheKey(1, 77), cache, [0], [0])


def test_a_cache_with_more_tensors_than_a_frame_can_name_is_refused_and_not_waited_for(shm_pair: Pair) -> None:
    """Regression: the owner sent no refusal, and the caller waited."""
    shm_pair.start()
    shm_pair.prompt.do(_publish_too_many_tensors)
    with pytest.raises(ParamError, match="too many tensors"):
        shm_pair.decoder.do(_pull_too_many_tensors)


def test_r26_r28_a_link_to_oneself_pushes_in_the_order_given_but_does_not_pull(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    assert end.do(link, [info(1, end.port)]) == SUCCESS
    assert end.do(links) == {1: "ready"}
    wanted = end.do(make, "there", Spec(blocks=True, blocks_key=BLOCKS), 1)
    src = end.do(make, "kv", Spec(rows=6, blocks=True), 2)
    end.do(make, "rows", Spec(), 3)
    end.do(call, "push_blocks", BLOCKS, Use("kv"), [0, 5], [7, 3])
    wanted = moved(wanted, src, [(7, 0), (3, 5)])
    same_bytes(end.do(show, "there"), wanted)
    same_bytes(end.do(show, "kv"), src)
    names, rows = ("kv", "there", "rows"), CacheKeyByIdAndIndex(1, 3)
    refused([end], names, ParamError, ("our own",), call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    refused([end], names, ParamError, ("our own",), call, "pull_cache", rows, Use("rows"))
    for pairs in (
        [(1, 0), (2, 1), (3, 2), (4, 3)],  # a chain: block 0 arrives everywhere
        [(0, 5), (5, 6), (6, 7)],  # a shift
        [(0, 0), (1, 1)],  # nothing
        [(1, 0), (0, 1), (2, 2)],
    ):
        end.do(call, "push_blocks", BLOCKS, Use("there"), [s for _, s in pairs], [d for d, _ in pairs])
        for to, from_ in pairs:
            wanted = moved(wanted, wanted, [(to, from_)])
        same_bytes(end.do(show, "there"), wanted)
    one_layer = partial(call, src_layer_range=range(1), dst_layer_range=range(1, 2))
    end.do(one_layer, "push_blocks", BLOCKS, Use("there"), [6, 3], [6, 3])
    same_bytes(end.do(show, "there"), moved(wanted, wanted, [(6, 6), (3, 3)], [(2, 0), (3, 1)]))
    assert end.do(unlink, [info(1, end.port)]) == SUCCESS
    alone(end)
    assert end.do(link, [info(1, end.port)]) == SUCCESS


THREADS = 12


def _pull_all(world: World, peer: int) -> None:
    """Pull from many threads at once: blocks into a cache of each thread's own, and every row by its key, once."""
    start = threading.Barrier(THREADS)

    def work(thread: int) -> None:
        start.wait(30)
        for turn in range(THREADS):
            mine = Use(f"blocks {thread}")
            call(world, "pull_blocks", BlocksCacheKey(peer, 0), mine, [thread, turn, 3], [turn, 1, 1])
            call(world, "pull_cache", CacheKey(peer, thread * THREADS + turn), Use(f"row {thread}"), turn)

    for each in [Call(work, thread) for thread in range(THREADS)]:
        each.result()


def test_both_ends_pull_with_twelve_threads_at_the_same_time(pair: Pair) -> None:
    """Pushes by as many: tests/clients/test_sglang.py; over several links: faults/tests/test_campaign.py."""
    pair.start()
    ends = (pair.prompt, pair.decoder)
    held: list[dict[str, Bytes]] = []
    for own, end in enumerate(ends, 1):
        keys = tuple(CacheKey(own, number) for number in range(THREADS * THREADS))
        specs = {"source": Spec(2, THREADS, 8000, blocks=True, blocks_key=BlocksCacheKey(own, 0))}
        specs["rows"] = Spec(2, len(keys), 1000, keys=keys)
        for thread in range(THREADS):
            specs |= {f"blocks {thread}": Spec(2, THREADS, 8000, blocks=True), f"row {thread}": Spec(2, THREADS, 1000)}
        held.append({name: end.do(make, name, spec, 100 * own + n) for n, (name, spec) in enumerate(specs.items())})
    for each in [Call(end.do, _pull_all, peer) for end, peer in zip(ends, (2, 1), strict=True)]:
        each.result()
    for end, expected, source in zip(ends, held, held[::-1], strict=True):
        for thread in range(THREADS):
            pairs = [each for turn in range(THREADS) for each in ((turn, thread), (1, turn), (1, 3))]
            expected[f"blocks {thread}"] = moved(expected[f"blocks {thread}"], source["source"], pairs)
            rows = [(turn, thread * THREADS + turn) for turn in range(THREADS)]
            expected[f"row {thread}"] = moved(expected[f"row {thread}"], source["rows"], rows)
        for name, content in expected.items():
            same_bytes(end.do(show, name), content)
        moves.wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]  # bound at once
        assert len(end.do(picture).keys) == 1, "every key of a row was pulled, once"


HALF: Final = Spec(data_type=DataType.DT_FLOAT16, dims=(3, 8))
#: What is like the peer's HALF, and what is not, with the words of the text about it.
TARGETS: Final = {
    "bfloat": (replace(HALF, data_type=DataType.DT_BF16), "DT_BF16 (3, 8)"),
    "turned": (replace(HALF, dims=(8, 3)), "DT_FLOAT16 (8, 3)"),
    "flat": (replace(HALF, dims=()), "DT_FLOAT16 (24,)"),
    "alike": (replace(HALF, rows=6), ""),
}
UNLIKE: Final = tuple(name for name, (_, words) in TARGETS.items() if words)


def hear(world: World) -> None:
    world.memory["log"] = kept = BufferingHandler(1000)
    kept.setLevel(logging.WARNING)
    logging.getLogger("LLM_DATADIST").addHandler(kept)


def heard(world: World) -> list[str]:
    """Return the warnings about elements since then."""
    kept = world.memory.pop("log")
    logging.getLogger("LLM_DATADIST").removeHandler(kept)
    return [text for text in (record.getMessage() for record in kept.buffer) if "llm.StrictTypes" in text]


def populate(pair: Pair, *, blocks: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make "kv" at the prompt, all TARGETS at the decoder; return their bytes by name."""
    keys = () if blocks else tuple(CacheKey(1, number) for number in range(8))
    source = replace(HALF, blocks=blocks, keys=keys, blocks_key=BLOCKS if blocks else None)
    there = {"kv": pair.prompt.do(make, "kv", source, 1)}
    specs = [(name, replace(spec, blocks=blocks)) for name, (spec, _) in TARGETS.items()]
    here = {name: pair.decoder.do(make, name, spec, seed) for seed, (name, spec) in enumerate(specs, 2)}
    return there, here


def check(end: End, caches: dict[str, Any]) -> None:
    for name, wanted in caches.items():
        same_bytes(end.do(show, name), wanted)


@pytest.mark.parametrize("case", ["blocks", "keys", "push blocks", "rows by id"])
def test_unlike_elements_are_warned_about_once_for_each_pair_and_the_bytes_move(pair: Pair, case: str) -> None:
    blocks = case.endswith("blocks")
    pair.start(rca=case in ("push blocks", "rows by id"))
    there, here = populate(pair, blocks=blocks)
    row = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "kv"), 5)
    pair.decoder.do(hear)
    for turn in (0, 1):  # the answers of the first turn are kept, or assumed, in the second
        for number, name in enumerate(TARGETS):
            kv = Use(name)
            if case == "blocks":
                pair.decoder.do(call, "pull_blocks", BLOCKS, kv, [7, number], [turn, 5])
                here[name] = moved(here[name], there["kv"], [(turn, 7), (5, number)])
            elif case == "push blocks":
                pair.decoder.do(call, "push_blocks", BLOCKS, kv, [turn, 5], [number, 7])
                there["kv"] = moved(there["kv"], here[name], [(number, turn), (7, 5)])
            elif case == "keys":
                key = 4 * turn + number
                pair.decoder.do(call, "pull_cache", CacheKey(1, key), kv, 3)
                here[name] = moved(here[name], there["kv"], [(3, key)])
            else:
                pair.decoder.do(call, "pull_cache", row, kv, turn)
                here[name] = moved(here[name], there["kv"], [(turn, 5)])
                pair.decoder.do(call, "push_cache", row, kv, 4)
                there["kv"] = moved(there["kv"], here[name], [(5, 4)])
    check(pair.prompt, there)
    check(pair.decoder, here)
    said = pair.decoder.do(heard)
    assert len(said) == len(UNLIKE), said
    for name, text in zip(UNLIKE, said, strict=True):
        number = pair.decoder.do(cache_id, name)
        assert f"cache {number} here: rows or blocks are {TARGETS[name][1]} here, DT_FLOAT16 (3, 8) at" in text


@pytest.mark.parametrize("blocks", [False, True], ids=["rows", "blocks"])
def test_strict_types_refuses_unlike_elements_and_moves_what_is_alike(pair: Pair, blocks: bool) -> None:
    pair.start(rca=True, extra={"llm.StrictTypes": "1"})
    there, here = populate(pair, blocks=blocks)
    row = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "kv"), 5)
    ends, names = [pair.decoder, pair.prompt], ["kv", *TARGETS]
    for name in [*UNLIKE, *UNLIKE]:  # an answer that is kept was not compared for good
        parts, kv = ("DT_FLOAT16 (3, 8)", TARGETS[name][1], "llm.StrictTypes=1"), Use(name)
        if blocks:
            refused(ends, names, CacheMismatch, parts, call, "pull_blocks", BLOCKS, kv, [1], [2])
            refused(ends, names, CacheMismatch, parts, call, "push_blocks", BLOCKS, kv, [1], [2])
        else:
            refused(ends, names, CacheMismatch, parts, call, "pull_cache", row, kv)
            refused(ends, names, CacheMismatch, parts, call, "push_cache", row, kv)
    if blocks:
        pair.decoder.do(call, "pull_blocks", BLOCKS, Use("alike"), [1, 6], [2, 0])
        here["alike"] = moved(here["alike"], there["kv"], [(2, 1), (0, 6)])
    else:
        # What fits no row is said first; layer-wise transfers by key are held to it, too.
        wide = replace(HALF, data_type=DataType.DT_INT8, dims=(96,), stride=96)
        here["wide"] = pair.decoder.do(make, "wide", wide, 9)
        with pytest.raises(CacheMismatch, match="size=96: 96 bytes"):
            pair.decoder.do(call, "push_cache", row, Use("wide"))
        result = pair.decoder.do(send, "bfloat", [keyed(pair.prompt, "kv", range(2), dst_row=0)])
        assert (result.results, "llm.StrictTypes=1 refuses that" in result.errors[0]) == ([INVALID], True)
        pair.decoder.do(call, "pull_cache", row, Use("alike"), 2)
        here["alike"] = moved(here["alike"], there["kv"], [(2, 5)])
    check(pair.prompt, there)
    check(pair.decoder, here)
