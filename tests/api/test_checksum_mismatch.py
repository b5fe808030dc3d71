"""llm.Checksum=1: bytes that differ after a transfer are found, by the tensor and the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import ChecksumMismatch
from tests.support.checksums import (
    KEY,
    PAGED,
    ROWS,
    STRIDE,
    TENSORS,
    both,
    flip,
    flipping,
    is_named,
    unconsumed,
    verified,
)
from tests.support.gates import stopped
from tests.support.moves import BLOCKS, Spec, Use, call, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("errors.ChecksumMismatch")

BY_ID = CacheKeyByIdAndIndex(1, 1, 2)


BLOCKS_CASES = [
    # what changes here: (tensor, block, byte), and which block of the peer should be there
    ((0, 3, 0), 1),
    ((0, 4, 47), 2),
    ((2, 0, 20), 6),
    ((3, 7, 47), 7),
]


@pytest.mark.parametrize(("place", "source"), BLOCKS_CASES)
def test_a_wrong_block_here_is_named(pair: Pair, place: tuple[int, int, int], source: int) -> None:
    src, dst = both(pair, PAGED, Spec(blocks=True))
    tensor, block, byte = place
    args = ("pull_blocks", BLOCKS, Use("kv"), [1, 2, 6, 7], [3, 4, 0, 7])
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flipping, "read", "kv", tensor, block * STRIDE + byte, *args)
    here, there = block * STRIDE, source * STRIDE
    is_named(
        caught.value,
        f"block {block} (bytes {here} to {here + STRIDE} of",
        f"block {source} (bytes {there} to {there + STRIDE} of",
        "1 of 4 tensors differ",
        "local bytes addressed are undefined",
        cache_id=1,
        local=(tensor, block),
        remote=(tensor, source),
    )
    assert verified(pair.decoder) == 0
    pair.decoder.do(call, *args)  # the link is as good as before
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 1), (4, 2), (0, 6), (7, 7)]))
    assert verified(pair.decoder) == TENSORS * 4 * STRIDE


def test_a_bit_outside_the_addressed_blocks_is_no_mismatch(pair: Pair) -> None:
    both(pair, PAGED, Spec(blocks=True))
    pair.decoder.do(flipping, "read", "kv", 1, 5 * STRIDE, "pull_blocks", BLOCKS, Use("kv"), [1, 2], [4, 6])
    assert verified(pair.decoder) == TENSORS * 2 * STRIDE


def test_a_source_that_changed_after_the_copy_is_a_mismatch(pair: Pair, tmp_path: Path) -> None:
    both(pair, PAGED, Spec(blocks=True))
    with stopped(pair.decoder, "after copy", tmp_path, "pull_blocks", BLOCKS, Use("kv"), [1, 2, 6], [3, 4, 0]) as pull:
        pair.prompt.do(flip, "kv", 1, 2 * STRIDE + 5)
        pair.prompt.do(flip, "kv", 3, 6 * STRIDE)
        with pytest.raises(ChecksumMismatch) as caught:
            pull.finish()
    is_named(caught.value, "2 of 4 tensors differ", cache_id=1, local=(1, 4), remote=(1, 2))
    assert caught.value.tensors == 2


def test_layer_ranges_name_the_tensors_of_both_ends(pair: Pair) -> None:
    both(pair, PAGED, Spec(tensors=6, blocks=True))
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flip_in_layers, 5, 1 * STRIDE + 3)
    is_named(caught.value, "1 of 2 tensors", cache_id=1, local=(5, 1), remote=(3, 3))


def flip_in_layers(world: World, tensor: int, at: int) -> None:
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(2, 3)}
    flipping(world, "read", "kv", tensor, at, "pull_blocks", BLOCKS, Use("kv"), [7, 3], [0, 1], **layers)


@pytest.mark.parametrize(("piece", "byte"), [(0, 0), (1, 30), (4, 40)])
def test_a_wrong_piece_of_a_row_is_named_and_nothing_is_consumed(pair: Pair, piece: int, byte: int) -> None:
    stride, blocks = 5 * STRIDE - 7, [7, 6, 5, 2, 1]
    src, dst = both(pair, Spec(rows=2, stride=stride, keys=(CacheKey(1, 9), KEY)), Spec(blocks=True))
    args: tuple[Any, ...] = ("pull_blocks", KEY, Use("kv"), [], blocks)
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flipping, "read", "kv", 2, blocks[piece] * STRIDE + byte, *args)
    begin, end = stride + piece * STRIDE, min(stride + (piece + 1) * STRIDE, 2 * stride)
    is_named(caught.value, f"row 1 (bytes {begin} to {end} of", cache_id=1, local=(2, blocks[piece]), remote=(2, 1))
    unconsumed(pair, 2)
    pair.decoder.do(call, *args)
    for got, was, source in zip(pair.decoder.do(show, "kv"), dst, src, strict=True):
        for number, block in enumerate(blocks):
            data = source[1, number * STRIDE : (number + 1) * STRIDE]
            was[block, : data.size] = data
        same_bytes([got], [was])
    wait_until(lambda: len(pair.prompt.do(picture).keys) == 1)


def test_r05_a_row_that_differs_is_not_consumed(pair: Pair) -> None:
    both(pair, ROWS, Spec())
    args = ("pull_cache", KEY, Use("kv"), 5, 31)
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flipping, "read", "kv", 3, 5 * STRIDE + 30, *args)
    is_named(
        caught.value, "row 5 (bytes 240 to 271 of", "row 0 (bytes 0 to 31 of", cache_id=1, local=(3, 5), remote=(3, 0)
    )
    unconsumed(pair, 1)
    pair.decoder.do(flipping, "read", "kv", 3, 5 * STRIDE + 31, *args)  # the byte behind it is not part of it
    wait_until(lambda: pair.prompt.do(picture).keys == ())


def test_r05_a_push_that_differs_consumes_nothing(pair: Pair, tmp_path: Path) -> None:
    both(pair, Spec(keys=(CacheKey(1, 9), CacheKey(1, 10), CacheKey(1, 11))), Spec(), rca=True)
    with stopped(pair.decoder, "after write", tmp_path, "push_cache", BY_ID, Use("kv"), 4) as push:
        pair.prompt.do(flip, "kv", 1, 2 * STRIDE + 17)
        with pytest.raises(ChecksumMismatch) as caught:
            push.finish()
    is_named(
        caught.value,
        "row 4 (bytes 192 to 240",
        "row 2 (bytes 96 to 144",
        "remote bytes addressed are undefined",
        cache_id=1,
        local=(1, 4),
        remote=(1, 2),
    )
    unconsumed(pair, 3)
    pair.decoder.do(call, "push_cache", BY_ID, Use("kv"), 4)
    wait_until(lambda: len(pair.prompt.do(picture).keys) == 2)


@pytest.mark.parametrize(("tensor", "block", "source"), [(0, 6, 0), (3, 2, 5)])
def test_a_wrong_pushed_block_is_named(pair: Pair, tensor: int, block: int, source: int) -> None:
    both(pair, PAGED, Spec(blocks=True), rca=True)
    args = ("push_blocks", BLOCKS, Use("kv"), [0, 1, 5], [6, 7, 2])
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flipping, "write", "kv", tensor, source * STRIDE + 47, *args)
    is_named(caught.value, cache_id=1, local=(tensor, source), remote=(tensor, block))


@pytest.mark.parametrize("at", [0, 5_000_000, 9_999_999])
def test_a_wrong_byte_of_a_long_row_is_found_to_a_few_thousand_bytes(pair: Pair, at: int) -> None:
    both(pair, Spec(1, 1, 10_000_000, keys=(KEY,)), Spec(1, 2, 10_000_000))
    with pytest.raises(ChecksumMismatch) as caught:
        pair.decoder.do(flipping, "read", "kv", 0, 10_000_000 + at, "pull_cache", KEY, Use("kv"), 1)
    is_named(caught.value, cache_id=1, local=(0, 1), remote=(0, 0))
    grid = (10_000_000 + at) // 4096 * 4096
    begin, end = max(grid, 10_000_000), min(grid + 4096, 20_000_000)
    assert f"tensor 0 row 1 (bytes {begin} to {end} of" in str(caught.value)
