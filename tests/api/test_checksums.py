"""llm.Checksum=1: what moved right is confirmed and counted; what did not is found, by the tensor and the block."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist.errors import ChecksumMismatch, DeadlineExceeded, PeerLost, TransferFailed
from llm_datadist.views import tensor_views
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.gates import begin, stopped
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

ON = {"llm.Checksum": "1"}
KEY = CacheKey(1, 10)
ROWS = Spec(keys=(KEY,))
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
BY_ID = CacheKeyByIdAndIndex(1, 1, 2)
TENSORS, STRIDE = 4, 48


def both(pair: Pair, source: Spec, target: Spec, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(extra=ON | settings.pop("extra", {}), **settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def verified(end: End) -> int:
    (only,) = end.do(picture).links
    total: int = only.verified_bytes
    return total


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
    wait_until(lambda: "(0, 11, 0)" not in [key.key for key in pair.prompt.do(picture).keys])  # consumed (R5)


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


# --- what is wrong is found -------------------------------------------------------------------------------------------


def flip(world: World, name: str, tensor: int, at: int) -> None:
    """Change one bit of a cache."""
    tensor_views(world.caches[name])[tensor].reshape(-1).view(np.uint8)[at] ^= 4


def flipping(world: World, verb: str, name: str, tensor: int, at: int, method: str, *args: Any, **kwargs: Any) -> None:
    """Make a call; once its bytes have moved (``verb`` is read or write), one bit of a cache of this end changes."""
    assert world.dd._engine is not None
    connection: Any = world.dd._engine.links.get(1).connection
    original = getattr(connection, verb)

    def corrupted(*move: Any) -> Any:
        result = original(*move)
        flip(world, name, tensor, at)
        return result

    setattr(connection, verb, corrupted)
    try:
        call(world, method, *args, **kwargs)
    finally:
        del connection.__dict__[verb]


def is_named(
    error: ChecksumMismatch, *parts: str, cache_id: int, local: tuple[int, int], remote: tuple[int, int]
) -> None:
    """The error says where: (tensor, block) at this end and the other."""
    assert (error.local_tensor, error.local_block) == local
    assert (error.remote_tensor, error.remote_block) == remote
    assert (error.cache_id, error.peer, error.phase) == (cache_id, 1, "verify")
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert error.retryable
    text = str(error)
    named = (f"tensor {local[0]} ", f" {local[1]} (", f"tensor {remote[0]} ", f" {remote[1]} (", f"cache {cache_id} ")
    assert [part for part in ("cluster 1", *named, *parts) if part not in text] == [], text
    assert "\n" not in text


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
    args = ("pull_blocks", KEY, Use("kv"), [], blocks)
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


def unconsumed(pair: Pair, keys: int) -> None:
    """The pin is given back, and every key is still there (R5)."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert len(pair.prompt.do(picture).keys) == keys


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


# --- when nobody looks ------------------------------------------------------------------------------------------------


def block_answers(world: World, go: Path) -> None:
    """Keep this end from answering until a file is there."""
    assert world.dd._engine is not None
    world.dd._engine._witness._thread.submit(wait_until, go.exists, 60)


def questions(world: World) -> int:
    """Return how many questions wait for an answer of this end."""
    assert world.dd._engine is not None
    return sum(len(queue.questions) for queue in world.dd._engine._witness._queues.values())


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
    wait_until(lambda: pair.prompt.do(picture).caches.live + pair.prompt.do(picture).caches.deferred == 0)


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
