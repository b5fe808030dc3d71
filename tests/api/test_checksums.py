"""llm.Checksum=1: what moved right is confirmed and counted, and nothing is when nobody looked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.errors import ChecksumMismatch, DeadlineExceeded, PeerLost, TransferFailed
from llm_datadist.views import tensor_views
from tests.support.checksums import (
    KEY,
    ON,
    PAGED,
    ROWS,
    STRIDE,
    TENSORS,
    block_answers,
    both,
    flipping,
    is_named,
    questions,
    unconsumed,
    verified,
)
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.gates import begin
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.world import World

BY_ID = CacheKeyByIdAndIndex(1, 1, 2)


# --- what is right is confirmed ---------------------------------------------------------------------------------------


def test_pulls_of_every_kind_are_confirmed_and_counted(pair: Pair) -> None:
    src, dst = both(pair, Spec(keys=(KEY, CacheKey(1, 11), CacheKey(1, 12))), Spec())
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)
    assert verified(pair.decoder) == TENSORS * STRIDE
    pair.decoder.do(call, "pull_cache", CacheKey(1, 11), Use("kv"), 1, 31)  # a short row
    assert verified(pair.decoder) == TENSORS * (STRIDE + 31)
    expected = moved(dst, src, [(5, 0)])
    for tensor, source in zip(expected, src, strict=True):
        tensor[1, :31] = source[1, :31]
    same_bytes(pair.decoder.do(show, "kv"), expected)
    assert verified(pair.prompt) == 0  # it only answered
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert [key.key for key in pair.prompt.do(picture).keys] == ["(0, 12, 0)"]


def test_pulls_of_blocks_and_pieces_are_confirmed_and_counted(pair: Pair) -> None:
    src, dst = both(pair, PAGED, Spec(blocks=True))
    row = pair.prompt.do(make, "rows", Spec(rows=2, stride=5 * STRIDE - 7, keys=(KEY,)), 3)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 2, 6], [3, 4, 0])
    assert verified(pair.decoder) == TENSORS * 3 * STRIDE
    pair.decoder.do(call, "pull_blocks", KEY, Use("kv"), [], [7, 6, 5, 2, 1])  # the last piece is short
    assert verified(pair.decoder) == TENSORS * (8 * STRIDE - 7)
    expected = moved(dst, src, [(3, 1), (4, 2), (0, 6)])
    for tensor, source in zip(expected, row, strict=True):
        for piece, block in enumerate([7, 6, 5, 2, 1]):
            data = source[0, piece * STRIDE : (piece + 1) * STRIDE]
            tensor[block, : data.size] = data
    same_bytes(pair.decoder.do(show, "kv"), expected)


def test_layer_ranges_are_confirmed_and_counted(pair: Pair) -> None:
    src, dst = both(pair, PAGED, Spec(tensors=6, blocks=True))
    pair.decoder.do(pull_layers, range(1, 2), range(2, 3))
    assert verified(pair.decoder) == 2 * 2 * STRIDE
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 7), (1, 3)], [(4, 2), (5, 3)]))


def pull_layers(world: World, src: range, dst: range) -> None:
    call(world, "pull_blocks", BLOCKS, Use("kv"), [7, 3], [0, 1], src_layer_range=src, dst_layer_range=dst)


def test_pushes_are_confirmed_and_counted(pair: Pair) -> None:
    rows, mine = both(pair, Spec(keys=(CacheKey(1, 9), CacheKey(1, 10), CacheKey(1, 11))), Spec(), rca=True)
    paged = pair.prompt.do(make, "paged", PAGED, 3)
    blocks = pair.decoder.do(make, "paged", Spec(blocks=True), 4)
    pair.decoder.do(call, "push_cache", BY_ID, Use("kv"), 4)
    pair.decoder.do(call, "push_blocks", BLOCKS, Use("paged"), [0, 1, 5], [6, 7, 2])
    assert verified(pair.decoder) == TENSORS * 4 * STRIDE
    same_bytes(pair.prompt.do(show, "kv"), moved(rows, mine, [(2, 4)]))
    same_bytes(pair.prompt.do(show, "paged"), moved(paged, blocks, [(6, 0), (7, 1), (2, 5)]))
    wait_until(lambda: "(0, 11, 0)" not in [key.key for key in pair.prompt.do(picture).keys])  # consumed (interface R5)


def test_r26_of_blocks_written_twice_the_last_is_confirmed(pair: Pair) -> None:
    src, dst = both(pair, PAGED, Spec(blocks=True))
    pair.prompt.do(make, "rows", Spec(rows=1, stride=3 * STRIDE - 20, keys=(KEY,)), 3)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 2, 3], [5, 5, 0])
    assert verified(pair.decoder) == TENSORS * 2 * STRIDE
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 1), (5, 2), (0, 3)]))
    pair.decoder.do(call, "pull_blocks", KEY, Use("kv"), [], [4, 6, 6])  # the short last piece covers a part of block 6
    assert verified(pair.decoder) == TENSORS * 4 * STRIDE


def test_r26_of_a_chain_inside_one_memory_the_rest_is_confirmed(local_pair: Pair) -> None:
    local_pair.start(extra=ON)
    memory = [np.random.default_rng(t).integers(0, 256, 8 * STRIDE, dtype=np.uint8) for t in range(2)]
    before = [tensor.reshape(8, STRIDE).copy() for tensor in memory]
    for end, key in ((local_pair.prompt, BLOCKS), (local_pair.decoder, None)):
        end.do(register, [tensor.ctypes.data for tensor in memory], key)
    # Block 2 is read, and then written over: its first copy can no longer be compared.
    local_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [2, 1, 7], [3, 2, 5])
    assert verified(local_pair.decoder) == 2 * 2 * STRIDE
    same_bytes([t.reshape(8, STRIDE) for t in memory], moved(before, before, [(3, 2), (2, 1), (5, 7)]))


def register(world: World, addrs: list[int], key: BlocksCacheKey | None) -> None:
    desc = CacheDesc(len(addrs), [8, STRIDE], DataType.DT_UINT8)
    world.caches["kv"] = world.cm.register_blocks_cache(desc, addrs, key)


def test_each_end_asks_by_its_own_option(pair: Pair) -> None:
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    pair.decoder.start("DECODER", 2, extra=extra | ON)
    pair.link()
    for end, spec in ((pair.prompt, PAGED), (pair.decoder, Spec(blocks=True, blocks_key=BlocksCacheKey(2, 0)))):
        end.do(make, "kv", spec, 1)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
    pair.prompt.do(call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [3], [4])
    assert (verified(pair.decoder), verified(pair.prompt)) == (TENSORS * STRIDE, 0)


def test_large_transfers_are_asked_about_in_parts(shm_pair: Pair) -> None:
    # One tensor is more than one question may be about, and there are more scattered blocks than one may name.
    shm_pair.start(extra=ON, mem_pool_cfg='{"memory_size": 160432128, "page_shift": 12}', sync_kv_timeout=60_000)
    for end, key in ((shm_pair.prompt, BLOCKS), (shm_pair.decoder, None)):
        end.do(make_large, key)
    there, here = list(range(9000)), list(range(9000))[::-1]
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), there, there)
    assert shm_pair.decoder.do(block_numbers) == [there] * 2
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), there, here)
    assert shm_pair.decoder.do(block_numbers) == [here] * 2
    assert verified(shm_pair.decoder) == 2 * 2 * 9000 * 8192
    for tensor, block in ((1, 8999), (1, 8200), (0, 3)):
        at = block * 8192 + 8191
        with pytest.raises(ChecksumMismatch) as caught:
            shm_pair.decoder.do(flipping, "read", "kv", tensor, at, "pull_blocks", BLOCKS, Use("kv"), there, here)
        is_named(caught.value, "1 of 2 tensors", cache_id=1, local=(tensor, block), remote=(tensor, 8999 - block))


def make_large(world: World, key: BlocksCacheKey | None) -> None:
    """Make a cache of 9000 blocks of 8 KiB; each block of a published one begins with its number."""
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(2, [9000, 8192], DataType.DT_UINT8), key)
    for view in tensor_views(world.caches["kv"]):
        view.reshape(-1).view(np.uint8)[:] = 7
        if key is not None:
            view.view(np.uint32).reshape(9000, -1)[:, 0] = np.arange(9000)


def block_numbers(world: World) -> list[list[int]]:
    return [view.view(np.uint32).reshape(9000, -1)[:, 0].tolist() for view in tensor_views(world.caches["kv"])]


# --- when nobody looks ------------------------------------------------------------------------------------------------


def test_r06_no_answer_in_time_is_no_success(pair: Pair, tmp_path: Path) -> None:
    both(pair, ROWS, Spec(), sync_kv_timeout=300)
    pair.prompt.do(block_answers, tmp_path / "go")
    with pytest.raises(DeadlineExceeded) as caught:
        pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)
    assert (caught.value.phase, caught.value.peer) == ("verify", 1)
    (tmp_path / "go").touch()
    unconsumed(pair, 1)
    assert verified(pair.decoder) == 0
    wait_until(lambda: pair.prompt.do(questions) == 0)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)  # a late answer is nobody's
    assert verified(pair.decoder) == TENSORS * STRIDE


def take_key_away(world: World) -> None:
    world.cm.remove_cache_key(KEY)


def give_cache_back(world: World) -> None:
    forget(world, "kv")


@pytest.mark.parametrize(
    ("source", "args", "change"),
    [
        (ROWS, ("pull_cache", KEY, Use("kv"), 5), take_key_away),
        (PAGED, ("pull_blocks", BLOCKS, Use("kv"), [1], [2]), give_cache_back),
        (
            Spec(blocks=True, blocks_key=BLOCKS, memory="inside"),
            ("pull_blocks", BLOCKS, Use("kv"), [1], [2]),
            give_cache_back,
        ),
    ],
)
def test_a_source_that_is_withdrawn_before_the_answer_fails_the_pull(
    pair: Pair, tmp_path: Path, source: Spec, args: tuple[Any, ...], change: Callable[[World], None]
) -> None:
    both(pair, source, Spec(blocks=source.blocks))
    pair.prompt.do(block_answers, tmp_path / "go")
    finish = begin(pair.decoder, call, *args)
    wait_until(lambda: pair.prompt.do(questions) == 1)
    pair.prompt.do(change)
    (tmp_path / "go").touch()
    with pytest.raises(TransferFailed, match="could not confirm the bytes") as caught:
        finish()
    assert not isinstance(caught.value, ChecksumMismatch)
    assert (caught.value.phase, caught.value.peer, caught.value.status_code) == ("verify", 1, LLMStatusCode.LLM_FAILED)
    wait_until(lambda: pair.prompt.do(picture).pins == 0)


def test_a_cache_given_back_before_the_answer_is_kept_by_the_pin(pair: Pair, tmp_path: Path) -> None:
    src, dst = both(pair, ROWS, Spec())
    pair.prompt.do(block_answers, tmp_path / "go")
    finish = begin(pair.decoder, call, "pull_cache", KEY, Use("kv"), 5)
    wait_until(lambda: pair.prompt.do(questions) == 1)
    pair.prompt.do(give_cache_back)  # its key is not consumed yet, so the memory stays
    (tmp_path / "go").touch()
    finish()
    assert verified(pair.decoder) == TENSORS * STRIDE
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))
    wait_until(lambda: pair.prompt.do(picture).caches.nbytes == 0)  # whoever digested it holds it no more


def linked_ends(prompt: End, decoder: End) -> None:
    for end, role, cluster_id in ((prompt, "PROMPT", 1), (decoder, "DECODER", 2)):
        end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", extra=ON | {"llm.Transport": "shm"})
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS


@pytest.fixture
def mortal() -> Iterator[tuple[LocalEnd, ChildEnd]]:
    """An end in this process, which must have nothing left, and one in a child that may be killed."""
    before = residue()
    survivor, child = LocalEnd("survivor"), ChildEnd("mortal")
    yield survivor, child
    survivor.stop()
    child.kill()
    del survivor, child
    assert settled(before) == before


def test_r22_a_peer_killed_before_its_answer_is_lost(mortal: tuple[LocalEnd, ChildEnd], tmp_path: Path) -> None:
    decoder, prompt = mortal
    linked_ends(prompt, decoder)
    prompt.do(make, "kv", PAGED, 1)
    decoder.do(make, "kv", Spec(blocks=True), 2)
    prompt.do(block_answers, tmp_path / "never")
    finish = begin(decoder, call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
    wait_until(lambda: prompt.do(questions) == 1)
    prompt.kill()
    with pytest.raises(PeerLost) as caught:
        finish()
    assert (caught.value.phase, caught.value.peer) == ("verify", 1)


def test_r22_a_killed_initiator_leaves_no_question_and_no_pin(
    mortal: tuple[LocalEnd, ChildEnd], tmp_path: Path
) -> None:
    prompt, decoder = mortal
    linked_ends(prompt, decoder)
    prompt.do(make, "kv", ROWS, 1)
    decoder.do(make, "kv", Spec(), 2)
    prompt.do(block_answers, tmp_path / "go")
    try:
        decoder.begin(call, "pull_cache", KEY, Use("kv"), 5)
        wait_until(lambda: prompt.do(questions) == 1)
        decoder.kill()
        wait_until(lambda: prompt.do(picture).pins == 0 and prompt.do(questions) == 0)
        assert len(prompt.do(picture).keys) == 1
    finally:
        (tmp_path / "go").touch()
