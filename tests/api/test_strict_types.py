"""Caches whose bytes fit and whose elements are unlike: one warning for each pair of caches, and the bytes move; with
llm.StrictTypes=1 an error, and none moves."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, DataType
from llm_datadist.errors import CacheMismatch
from tests.support.layers import INVALID, keyed, send
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, make, moved, refused, same_bytes, show

if TYPE_CHECKING:
    from tests.support.ends import End
    from tests.support.pairs import Pair
    from tests.support.world import World

HALF: Final = Spec(data_type=DataType.DT_FLOAT16, dims=(3, 8))
#: What is like the peer's HALF, and what is not, with the words of the text about it.
TARGETS: Final = {
    "bfloat": (replace(HALF, data_type=DataType.DT_BF16), "DT_BF16 (3, 8)"),
    "turned": (replace(HALF, dims=(8, 3)), "DT_FLOAT16 (8, 3)"),
    "flat": (replace(HALF, dims=()), "DT_FLOAT16 (24,)"),
    "alike": (replace(HALF, rows=6), ""),
}
UNLIKE: Final = tuple(name for name, (_, words) in TARGETS.items() if words)


class Kept(logging.Handler):
    """Keeps the warnings about elements."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "llm.StrictTypes" in record.getMessage():
            self.said.append(record.getMessage())


def hear(world: World) -> None:
    world.memory["log"] = kept = Kept()
    logging.getLogger("LLM_DATADIST").addHandler(kept)


def heard(world: World) -> list[str]:
    kept = world.memory.pop("log")
    logging.getLogger("LLM_DATADIST").removeHandler(kept)
    said: list[str] = kept.said
    return said


def populate(pair: Pair, *, blocks: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """Make "kv" at the prompt, all TARGETS at the decoder; return their bytes by name."""
    keys = () if blocks else tuple(CacheKey(1, number) for number in range(8))
    source = replace(HALF, blocks=blocks, keys=keys, blocks_key=BLOCKS if blocks else None)
    there = {"kv": pair.prompt.do(make, "kv", source, 1)}
    here = {
        name: pair.decoder.do(make, name, replace(spec, blocks=blocks), seed)
        for seed, (name, (spec, _)) in enumerate(TARGETS.items(), 2)
    }
    return there, here


def check(end: End, caches: dict[str, Any]) -> None:
    for name, wanted in caches.items():
        same_bytes(end.do(show, name), wanted)


@pytest.mark.parametrize("case", ["blocks", "keys", "push blocks", "rows by id"])
def test_unlike_elements_are_warned_about_once_for_each_pair_of_caches_and_the_bytes_move(
    pair: Pair, case: str
) -> None:
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
def test_strict_types_refuses_unlike_elements_before_a_byte_moves_and_moves_what_is_alike(
    pair: Pair, blocks: bool
) -> None:
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
        pair.decoder.do(call, "pull_cache", row, Use("alike"), 2)
        here["alike"] = moved(here["alike"], there["kv"], [(2, 5)])
    check(pair.prompt, there)
    check(pair.decoder, here)


def test_strict_types_holds_for_layer_wise_transfers_by_key_and_what_fits_no_row_is_said_first(
    shm_pair: Pair,
) -> None:
    shm_pair.start(rca=True, extra={"llm.StrictTypes": "1"})
    there, here = populate(shm_pair, blocks=False)
    wide = replace(HALF, data_type=DataType.DT_INT8, dims=(96,), stride=96)
    here["wide"] = shm_pair.decoder.do(make, "wide", wide, 9)
    result = shm_pair.decoder.do(send, "bfloat", [keyed(shm_pair.prompt, "kv", range(2), dst_row=0)])
    assert result.results == [INVALID]
    assert "llm.StrictTypes=1 refuses that" in result.errors[0]
    row = CacheKeyByIdAndIndex(1, shm_pair.prompt.do(cache_id, "kv"), 0)
    with pytest.raises(CacheMismatch, match="size=96: 96 bytes"):
        shm_pair.decoder.do(call, "push_cache", row, Use("wide"))
    check(shm_pair.prompt, there)
    check(shm_pair.decoder, here)
