"""The bytes of the bench: whatever is wrong with a destination is found."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from llm_datadist.bench import WrongBytes
from llm_datadist.bench.workload import POISON, Bytes, Op, Workload, fill, poison, poison_blocks, verify

WORK = Workload(op=Op.PULL, block_bytes=24, blocks=6, tensors=2)


def tensors(work: Workload) -> list[Bytes]:
    return [np.zeros((work.rows, work.block_bytes), np.uint8) for _ in range(work.tensors)]


def moved(work: Workload, seed: int, *, in_place: bool = False) -> list[Bytes]:
    source, destination = tensors(work), tensors(work)
    fill(source, seed)
    poison(destination)
    if in_place:
        destination = source
        poison_blocks(source, work)
    for there, here in zip(source, destination, strict=True):
        here[work.dst_blocks] = there[work.src_blocks]
    return destination


def test_blocks_are_random_not_adjacent_and_the_same_for_every_side() -> None:
    work = Workload(op=Op.PULL, block_bytes=8, blocks=1000)
    src, dst = work.src_blocks, work.dst_blocks
    assert src.dtype == dst.dtype == np.int64
    assert sorted(src) == list(range(0, 2000, 2))
    assert sorted(dst) == list(range(1, 2000, 2))
    assert (np.abs(np.diff(src)) > 2).mean() > 0.9
    assert np.array_equal(src, work.src_blocks)
    assert not np.array_equal(src + 1, dst)


def test_every_block_has_bytes_of_its_own_each_seed_others_and_poison_is_where_something_is_to_come() -> None:
    views, second = tensors(WORK), tensors(WORK)
    poison(views)
    assert all((view == POISON).all() for view in views)
    fill(views, 1)
    fill(second, 2)
    rows = {bytes(row) for view in (*views, *second) for row in view}
    assert len(rows) == 2 * WORK.tensors * WORK.rows
    kept = [view.copy() for view in views]
    poison_blocks(views, WORK)
    for view, old in zip(views, kept, strict=True):
        assert (view[1::2] == POISON).all()
        assert np.array_equal(view[::2], old[::2])


@pytest.mark.parametrize("block_bytes", [24, 7])
@pytest.mark.parametrize("in_place", [False, True])
def test_every_single_wrong_byte_is_found(block_bytes: int, in_place: bool) -> None:
    work = Workload(op=Op.PULL, block_bytes=block_bytes, blocks=6, tensors=2)
    views = moved(work, 3, in_place=in_place)
    for (tensor, view), row, byte in product(enumerate(views), range(work.rows), range(work.block_bytes)):
        view[row, byte] ^= 0x10
        where = "inside" if row % 2 else "outside"
        with pytest.raises(WrongBytes, match=rf"{where} .* 1 or more of tensor {tensor}, first in block {row}$"):
            verify(views, work, 3, in_place=in_place)
        view[row, byte] ^= 0x10
    verify(views, work, 3, in_place=in_place)
    with pytest.raises(WrongBytes):  # the bytes of another pass
        verify(views, work, 4, in_place=in_place)


def test_blocks_larger_than_a_part_are_compared_whole() -> None:
    work = Workload(op=Op.PULL, block_bytes=(1 << 20) + 8, blocks=2)
    views = moved(work, 1)
    verify(views, work, 1)
    views[0][work.dst_blocks[1], -1] ^= 1
    with pytest.raises(WrongBytes, match=f"first in block {work.dst_blocks[1]}"):
        verify(views, work, 1)
