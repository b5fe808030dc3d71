"""llm.Checksum=1: what moved right is confirmed and counted, what differs is found, by the tensor and the block, and
nothing is confirmed when the peer does not look."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from faults.gated import begin, stopped
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
    kept,
    questions,
    verified,
)
from tests.support.layers import spanned
from tests.support.linking import SUCCESS, info, link, start_both
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.support.ends import ChildEnd, End
    from tests.support.layers import Span
    from tests.support.pairs import Pair
    from tests.support.world import World

    Place = tuple[int, int]

pytestmark = pytest.mark.covers("errors.ChecksumMismatch")

KV: Final = Use("kv")
TARGET: Final = Spec(blocks=True)


def flip(world: World, name: str, tensor: int, at: int) -> None:
    """Change one bit of a cache."""
    tensor_views(world.caches[name])[tensor].reshape(-1).view(np.uint8)[at] ^= 4


def flipping(world: World, tensor: int, at: int, method: str, *args: Any, **kwargs: Any) -> None:
    """Make a call; once its bytes have moved, one bit of "kv" of this end changes."""
    connections = world.dd._require_engine("test").links.get(1).connection.connections
    verb = "read" if method.startswith("pull") else "write"

    def corrupted(original: Any, *args: Any) -> Any:
        result = original(*args)
        flip(world, "kv", tensor, at)
        return result

    with ExitStack() as undo:
        for connection in connections:
            setattr(connection, verb, partial(corrupted, getattr(connection, verb)))
            undo.callback(delattr, connection, verb)
        call(world, method, *args, **kwargs)


def is_named(error: ChecksumMismatch, *parts: str, local: Place, remote: Place) -> None:
    """The error says where: (tensor, block) at this end and the other."""
    assert (error.local_tensor, error.local_block) == local
    assert (error.remote_tensor, error.remote_block) == remote
    assert (error.cache_id, error.peer, error.phase) == (1, 1, "verify")
    assert error.status_code is LLMStatusCode.LLM_FAILED
    assert error.retryable
    text = str(error)
    named = (f"tensor {local[0]} ", f" {local[1]} (", f"tensor {remote[0]} ", f" {remote[1]} (", "cache 1 ")
    assert [part for part in ("cluster 1", *named, *parts) if part not in text] == [], text
    assert "\n" not in text


# --- every call: what differs, what is right --------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A call, and what it moves: (to, from, length) in each pair (to, from) of tensors.

    ``wrong``: (tensor, byte here that changes, what is named here, what is named there, parts of the text).
    ``besides``: (tensor, byte here) that the call does not address.
    """

    method: str
    args: tuple[Any, ...]
    spans: list[Span]
    wrong: list[tuple[int, int, Place, Place, tuple[str, ...]]] = field(default_factory=list)
    source: Spec = PAGED
    target: Spec = TARGET
    kwargs: dict[str, Any] = field(default_factory=dict)
    tensors: list[Place] | None = None
    besides: Place | None = None


PIECES = 5 * STRIDE - 7  # the last piece is short
TO, CUTS = [7, 6, 5, 2, 1], range(0, PIECES, STRIDE)
CASES: Final = {
    "blocks": Case(
        "pull_blocks",
        (BLOCKS, KV, [1, 2, 6, 7], [3, 4, 0, 7]),
        [(3 * STRIDE, STRIDE, 2 * STRIDE), (0, 6 * STRIDE, STRIDE), (7 * STRIDE, 7 * STRIDE, STRIDE)],
        [
            (0, 144, (0, 3), (0, 1), ("block 3 (bytes 144 to 192 of", "block 1 (bytes 48 to 96 of", "1 of 4 tensors")),
            (0, 239, (0, 4), (0, 2), ("block 4 (bytes 192 to 240 of", "local bytes addressed are undefined")),
            (2, 20, (2, 0), (2, 6), ("block 0 (bytes 0 to 48 of", "block 6 (bytes 288 to 336 of")),
            (3, 383, (3, 7), (3, 7), ("block 7 (bytes 336 to 384 of",)),
        ],
        besides=(1, 5 * STRIDE),
    ),
    "layers": Case(
        "pull_blocks",
        (BLOCKS, KV, [7, 3], [0, 1]),
        [(0, 7 * STRIDE, STRIDE), (STRIDE, 3 * STRIDE, STRIDE)],
        [(5, STRIDE + 3, (5, 1), (3, 3), ("1 of 2 tensors",))],
        target=Spec(tensors=6, blocks=True),
        kwargs={"src_layer_range": range(1, 2), "dst_layer_range": range(2, 3)},
        tensors=[(4, 2), (5, 3)],
        besides=(3, STRIDE + 3),
    ),
    "short row": Case(
        "pull_cache",
        (KEY, KV, 5, 31),
        [(5 * STRIDE, 0, 31)],
        [(3, 270, (3, 5), (3, 0), ("row 5 (bytes 240 to 271 of", "row 0 (bytes 0 to 31 of"))],
        source=ROWS,
        target=Spec(),
        besides=(3, 271),
    ),
    "pieces": Case(
        "pull_blocks",
        (KEY, KV, [], TO),
        [(to * STRIDE, PIECES + at, min(STRIDE, PIECES - at)) for to, at in zip(TO, CUTS, strict=True)],
        [
            (2, 7 * STRIDE, (2, 7), (2, 1), ("row 1 (bytes 233 to 281 of",)),
            (2, 6 * STRIDE + 30, (2, 6), (2, 1), ("row 1 (bytes 281 to 329 of",)),
            (2, STRIDE + 40, (2, 1), (2, 1), ("row 1 (bytes 425 to 466 of",)),
        ],
        source=Spec(rows=2, stride=PIECES, keys=(CacheKey(1, 9), KEY)),
        besides=(2, STRIDE + 41),
    ),
    # Of blocks written twice (interface R26) the last is confirmed; a short last piece covers a part of a block.
    "twice": Case(
        "pull_blocks",
        (BLOCKS, KV, [1, 2, 3], [5, 5, 0]),
        [(5 * STRIDE, STRIDE, STRIDE), (5 * STRIDE, 2 * STRIDE, STRIDE), (0, 3 * STRIDE, STRIDE)],
    ),
    "pieces twice": Case(
        "pull_blocks",
        (KEY, KV, [], [4, 6, 6]),
        [(4 * STRIDE, 0, STRIDE), (6 * STRIDE, STRIDE, STRIDE), (6 * STRIDE, 2 * STRIDE, STRIDE - 20)],
        source=Spec(rows=1, stride=3 * STRIDE - 20, keys=(KEY,)),
    ),
    "pushed blocks": Case(
        "push_blocks",
        (BLOCKS, KV, [0, 1, 5], [6, 7, 2]),
        [(6 * STRIDE, 0, 2 * STRIDE), (2 * STRIDE, 5 * STRIDE, STRIDE)],
        [(0, 47, (0, 0), (0, 6), ()), (3, 5 * STRIDE + 47, (3, 5), (3, 2), ())],
        besides=(0, 2 * STRIDE),
    ),
    "pushed row": Case(
        "push_cache",
        (CacheKeyByIdAndIndex(1, 1, 2), KV, 4),
        [(2 * STRIDE, 4 * STRIDE, STRIDE)],
        [(1, 209, (1, 4), (1, 2), ("row 4 (bytes 192 to 240", "row 2 (bytes 96 to 144", "remote bytes addressed are"))],
        source=Spec(keys=(CacheKey(1, 9), KEY, CacheKey(1, 11))),
        target=Spec(),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_r05_r26_what_differs_is_named_and_consumes_nothing_and_what_is_right_is_counted(pair: Pair, name: str) -> None:
    case = CASES[name]
    pushes = case.method.startswith("push")
    remote, local = both(pair, case.source, case.target, rca=pushes)
    keys = kept(pair)
    for tensor, at, here, there, parts in case.wrong:
        with pytest.raises(ChecksumMismatch) as caught:
            pair.decoder.do(partial(flipping, **case.kwargs), tensor, at, case.method, *case.args)
        is_named(caught.value, *parts, local=here, remote=there)
        assert (verified(pair.decoder), kept(pair)) == (0, keys)
        if pushes:  # what is pushed again has changed
            local[tensor].reshape(-1)[at] ^= 4
    tensors = case.tensors or [(t, t) for t in range(TENSORS)]
    if case.besides is None:
        pair.decoder.do(partial(call, **case.kwargs), case.method, *case.args)
    else:
        pair.decoder.do(partial(flipping, **case.kwargs), *case.besides, case.method, *case.args)
        local[case.besides[0]].reshape(-1)[case.besides[1]] ^= 4
    confirmed = len({byte for at, _, length in case.spans for byte in range(at, at + length)}) * len(tensors)
    assert (verified(pair.decoder), verified(pair.prompt)) == (confirmed, 0)  # the prompt only answered
    wait_until(lambda: kept(pair) == keys - bool(case.source.keys))  # of rows the key is consumed
    dst, src = (remote, local) if pushes else (local, remote)
    same_bytes((pair.prompt if pushes else pair.decoder).do(show, "kv"), spanned(dst, src, case.spans, tensors))
    same_bytes((pair.decoder if pushes else pair.prompt).do(show, "kv"), src)


def test_a_peer_whose_bytes_changed_after_the_copy_is_a_mismatch(pair: Pair, tmp_path: Path) -> None:
    both(pair, PAGED, Spec(blocks=True), rca=True)
    for step, method, block, there in (("after copy", "pull_blocks", 4, 2), ("after write", "push_blocks", 2, 4)):
        (folder := tmp_path / method).mkdir()
        with stopped(pair.decoder, step, folder, method, BLOCKS, KV, [1, 2, 6], [3, 4, 0]) as move:
            pair.prompt.do(flip, "kv", 1, there * STRIDE + 5)
            pair.prompt.do(flip, "kv", 3, there * STRIDE)
            with pytest.raises(ChecksumMismatch) as caught:
                move.finish()
        is_named(caught.value, "2 of 4 tensors differ", local=(1, block), remote=(1, there))
        assert caught.value.tensors == 2


def test_a_wrong_byte_of_a_long_row_is_found_to_a_few_thousand_bytes(shm_pair: Pair) -> None:
    both(shm_pair, Spec(1, 1, 10_000_000, keys=(KEY,)), Spec(1, 2, 10_000_000))
    for at in (10_000_000, 15_000_000, 19_999_999):
        with pytest.raises(ChecksumMismatch) as caught:
            shm_pair.decoder.do(flipping, 0, at, "pull_cache", KEY, KV, 1)
        begin_, end = max(at // 4096 * 4096, 10_000_000), min(at // 4096 * 4096 + 4096, 20_000_000)
        is_named(caught.value, f"tensor 0 row 1 (bytes {begin_} to {end} of", local=(0, 1), remote=(0, 0))


def test_r26_of_a_chain_inside_one_memory_the_rest_is_confirmed(local_pair: Pair) -> None:
    local_pair.start(extra=ON)
    before = local_pair.prompt.do(make, "kv", Spec(2, blocks=True, blocks_key=BLOCKS, memory="private"), 1)
    theirs, ours = local_pair.prompt.world, local_pair.decoder.world  # type: ignore[attr-defined]
    ours.caches["kv"] = ours.cm.register_blocks_cache(Spec(2).desc, theirs.caches["kv"].tensor_addrs)
    # Block 2 is read, and then written over: its first copy can no longer be compared.
    call(ours, "pull_blocks", BLOCKS, KV, [2, 1, 7], [3, 2, 5])
    assert verified(local_pair.decoder) == 2 * 2 * STRIDE
    for world in (theirs, ours):
        same_bytes(show(world, "kv"), moved(before, before, [(3, 2), (2, 1), (5, 7)]))


def test_each_end_asks_by_its_own_option(shm_pair: Pair) -> None:
    extra = {"llm.Transport": "shm"}
    shm_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra)
    shm_pair.decoder.start("DECODER", 2, extra=extra | ON)
    shm_pair.link()
    for end, spec in ((shm_pair.prompt, PAGED), (shm_pair.decoder, Spec(blocks=True, blocks_key=BlocksCacheKey(2, 0)))):
        end.do(make, "kv", spec, 1)
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, KV, [1], [2])
    shm_pair.prompt.do(call, "pull_blocks", BlocksCacheKey(2, 0), KV, [3], [4])
    assert (verified(shm_pair.decoder), verified(shm_pair.prompt)) == (TENSORS * STRIDE, 0)


def test_large_transfers_are_asked_about_in_parts(shm_pair: Pair) -> None:
    # One tensor is more than one question may be about, and there are more scattered blocks than one may name.
    shm_pair.start(extra=ON, mem_pool_cfg='{"memory_size": 160432128, "page_shift": 12}', sync_kv_timeout=60_000)
    for end, key in ((shm_pair.prompt, BLOCKS), (shm_pair.decoder, None)):
        end.do(make_large, key)
    there, here = list(range(9000)), list(range(9000))[::-1]
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, KV, there, there)
    assert shm_pair.decoder.do(block_numbers) == [there] * 2
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, KV, there, here)
    assert shm_pair.decoder.do(block_numbers) == [here] * 2
    assert verified(shm_pair.decoder) == 2 * 2 * 9000 * 8192
    for tensor, block in ((1, 8999), (1, 8200), (0, 3)):
        with pytest.raises(ChecksumMismatch) as caught:
            shm_pair.decoder.do(flipping, tensor, block * 8192 + 8191, "pull_blocks", BLOCKS, KV, there, here)
        is_named(caught.value, "1 of 2 tensors", local=(tensor, block), remote=(tensor, 8999 - block))


def make_large(world: World, key: BlocksCacheKey | None) -> None:
    """Make a cache of 9000 blocks of 8 KiB; each block of a published one begins with its number."""
    world.caches["kv"] = world.cm.allocate_blocks_cache(CacheDesc(2, [9000, 8192], DataType.DT_UINT8), key)
    for view in tensor_views(world.caches["kv"]):
        view.reshape(-1).view(np.uint8)[:] = 7
        if key is not None:
            view.view(np.uint32).reshape(9000, -1)[:, 0] = np.arange(9000)


def block_numbers(world: World) -> list[list[int]]:
    return [view.view(np.uint32).reshape(9000, -1)[:, 0].tolist() for view in tensor_views(world.caches["kv"])]


# --- when the peer does not look --------------------------------------------------------------------------------------


def test_r06_no_answer_in_time_is_no_success(shm_pair: Pair, tmp_path: Path) -> None:
    both(shm_pair, ROWS, Spec(), sync_kv_timeout=300)
    shm_pair.prompt.do(block_answers, tmp_path / "go")
    with pytest.raises(DeadlineExceeded) as caught:
        shm_pair.decoder.do(call, "pull_cache", KEY, KV, 5)
    assert (caught.value.phase, caught.value.peer) == ("verify", 1)
    (tmp_path / "go").touch()
    assert (kept(shm_pair), verified(shm_pair.decoder)) == (1, 0)
    wait_until(lambda: shm_pair.prompt.do(questions) == 0)
    shm_pair.decoder.do(call, "pull_cache", KEY, KV, 5)  # a late answer is taken for no other
    assert verified(shm_pair.decoder) == TENSORS * STRIDE


def begun(prompt: End, decoder: End, folder: Path, *args: Any) -> Callable[[], Any]:
    """Begin a call whose question the prompt does not answer before there is ``go`` in the folder."""
    prompt.do(block_answers, folder / "go")
    finish = begin(decoder, call, *args)
    wait_until(lambda: prompt.do(questions) == 1)
    return finish


PULL_BLOCK: Final = ("pull_blocks", BLOCKS, KV, [1], [2])
PULL_ROW: Final = ("pull_cache", KEY, KV, 5)


@pytest.mark.parametrize(
    ("source", "change", "fails"),
    [
        (ROWS, (call, "remove_cache_key", KEY), True),
        (ROWS, (forget, "kv"), False),  # its key is not consumed yet, so the memory stays
        (PAGED, (forget, "kv"), True),
        (replace(PAGED, memory="inside"), (forget, "kv"), True),
    ],
)
def test_a_source_that_is_withdrawn_before_the_answer_fails_the_pull_unless_its_pin_keeps_it(
    shm_pair: Pair, tmp_path: Path, source: Spec, change: Any, fails: bool
) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    src, dst = both(shm_pair, source, Spec(blocks=source.blocks))
    finish = begun(prompt, decoder, tmp_path, *(PULL_BLOCK if source.blocks else PULL_ROW))
    prompt.do(*change)
    (tmp_path / "go").touch()
    if not fails:
        finish()
        assert verified(decoder) == TENSORS * STRIDE
        same_bytes(decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))
        wait_until(lambda: prompt.do(picture).caches.nbytes == 0)  # the digest holds it no more
        return
    with pytest.raises(TransferFailed, match="could not confirm the bytes") as caught:
        finish()
    error = caught.value
    assert not isinstance(error, ChecksumMismatch)
    assert (error.phase, error.peer, error.status_code) == ("verify", 1, LLMStatusCode.LLM_FAILED)
    kept(shm_pair)


@pytest.mark.parametrize("killed", ["prompt", "decoder"])
def test_r22_of_a_peer_killed_before_the_answer_no_question_and_no_pin_is_left(
    four: list[ChildEnd], tmp_path: Path, killed: str
) -> None:
    survivor, child = four[0], four.pop()
    prompt, decoder = (child, survivor) if killed == "prompt" else (survivor, child)
    start_both(prompt, decoder, "shm", extra=ON)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    prompt.do(make, "kv", ROWS, 1)
    decoder.do(make, "kv", Spec(), 2)
    finish = begun(prompt, decoder, tmp_path, *PULL_ROW)
    child.kill()
    if killed == "prompt":
        with pytest.raises(PeerLost) as caught:
            finish()
        assert (caught.value.phase, caught.value.peer) == ("verify", 1)
    else:
        wait_until(lambda: prompt.do(picture).pins == 0 and prompt.do(questions) == 0)
        assert len(prompt.do(picture).keys) == 1
    (tmp_path / "go").touch()
