"""llm.Checksum: what differs is named, what is right is counted, nothing is confirmed when the peer does not look; and
the questions themselves: fair ones, unfair ones, many of them, answers that lie."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from faults.gated import begin, stopped
from faults.gates import watched
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links.link import Link
from llm_datadist._links.messages import (
    MAX_VERIFY_RUNS,
    Beat,
    Failed,
    Guarded,
    Message,
    RemoteFailure,
    UnlinkAck,
    Verified,
    Verify,
)
from llm_datadist._native import NO_DEADLINE, Plan
from llm_datadist._native.plan import PlanSide, digest
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.checksum import MAX_QUESTION_BYTES, MAX_QUESTION_TENSORS, ChecksumTarget
from llm_datadist.errors import ChecksumMismatch, DeadlineExceeded, PeerLost, ProtocolError, TransferFailed
from tests.support import moves
from tests.support.kinds import Bytes, ChildEnd, End, Pair, World
from tests.support.layers import Span, spanned
from tests.support.linking import SUCCESS, info, link, start_both
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import byte_views, residue, settled

Place = tuple[int, int]

pytestmark = [
    pytest.mark.covers("errors: ChecksumMismatch DeadlineExceeded", "LLMStatusCode.LLM_SUCCESS"),
    pytest.mark.gpu,
]

ON = {"llm.Checksum": "1"}
KEY = CacheKey(1, 10)
ROWS = Spec(keys=(KEY,))
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
TENSORS, STRIDE = 4, 48


def both(pair: Pair, source: Spec, target: Spec, *, rca: bool = False, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start both, link, and make a cache at each. Only the decoder has the option: it asks, the prompt only answers."""
    settings |= {"enable_remote_cache_accessible": rca or None}
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
    pair.decoder.start("DECODER", 2, extra=extra | ON, **settings)
    pair.link()
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def verified(end: End) -> int:
    (only,) = end.do(picture).links
    total: int = only.verified_bytes
    return total


def kept(pair: Pair) -> int:
    """Return how many keys the prompt has (interface R5), once every pin is given back."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    return len(pair.prompt.do(picture).keys)


def block_answers(world: World, go: Path) -> None:
    """Keep this end from answering until a file is there."""
    world.probe.engine.checksums.thread.submit(wait_until, go.exists, 60)


def questions(world: World) -> int:
    """Return how many questions wait for an answer of this end."""
    return sum(len(queue) for queue in world.probe.engine.checksums.queues.values())


KV: Final = Use("kv")
TARGET: Final = Spec(blocks=True)


def flip(world: World, name: str, tensor: int, at: int) -> None:
    """Change one bit of a cache."""
    byte_views(world.caches[name])[tensor][at] ^= 4


def flipping(world: World, tensor: int, at: int, method: str, *args: Any, **kwargs: Any) -> None:
    """Make a call; once its bytes have moved, one bit of "kv" of this end changes."""

    def flip_once_copied(name: str, *_: object) -> None:
        if name == "copied":
            flip(world, "kv", tensor, at)

    with watched(flip_once_copied):
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
    for view in byte_views(world.caches["kv"]):
        view[:] = 7
        if key is not None:
            view.view(np.uint32).reshape(9000, -1)[:, 0] = np.arange(9000)


def block_numbers(world: World) -> list[list[int]]:
    return [view.view(np.uint32).reshape(9000, -1)[:, 0].tolist() for view in byte_views(world.caches["kv"])]


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
    # A late answer is taken for no other.
    wait_until(lambda: moves.in_time(shm_pair.decoder, call, "pull_cache", KEY, KV, 5))
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
    """Regression: a digest pinned its cache, and was not counted among its uses."""
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
def test_r22_a_peer_killed_before_the_answer_leaves_nothing(four: list[ChildEnd], tmp_path: Path, killed: str) -> None:
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


INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
BUSY = int(LLMStatusCode.LLM_LINK_BUSY)
EXTENT = 8 * STRIDE
FIRST_ID = 10**6


def engine(end: Any) -> Any:
    """Return the engine of an end of this process."""
    return end.world.probe.engine


def spans(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, dtype="<u8").tobytes()


def question(pair: Pair, **change: Any) -> Verify:
    """Return a fair question about all of block 2 of the first cache of the prompt, but for the changes."""
    guard = engine(pair.prompt).caches.registry.lookup(1).guard
    fields: dict[str, Any] = {
        "id": 0,
        "cache_id": 1,
        "pin": 0,
        "guards": [Guarded(guard.slot, guard.generation)],
        "push": False,
        "extent": EXTENT,
        "first": 0,
        "count": TENSORS,
        "runs": spans((2 * STRIDE, STRIDE)),
        "each_run": False,
        "nonce": bytes(range(16)),
        "budget_ms": 10_000,
    }
    return Verify(**(fields | change))


def asked(pair: Pair, **change: Any) -> Message:
    """Ask the prompt, and return its answer."""
    fair, link = question(pair, **change), engine(pair.decoder).links.get(1)
    build = lambda number: msgspec.structs.replace(fair, id=number)  # noqa: E731
    answer: Message = link.request(build, Deadline(10_000), "a question", "verify")
    return answer


def digests(pair: Pair, **change: Any) -> bytes:
    answer = asked(pair, **change)
    assert isinstance(answer, Verified)
    return answer.digests


def expected(pair: Pair, *pairs: tuple[int, int], each_run: bool = False) -> bytes:
    tensors = engine(pair.prompt).caches.registry.lookup(1).storage.tensors
    runs = np.array([(0, *each) for each in pairs], np.uint64)
    plan = Plan(0, 0, 1 if each_run else TENSORS, runs, ordered=False, nbytes=0)
    found = digest(PlanSide(plan, tensors, is_dst=False), None, NO_DEADLINE, question(pair).nonce, each_run=each_run)
    assert found is not None
    return found.tobytes()


def test_rule_10_a_fair_question_is_answered_again_and_again_a_too_long_one_ends_the_link(local_pair: Pair) -> None:
    both(local_pair, PAGED, Spec(blocks=True))
    for _ in range(3):  # a replay is one more question
        assert digests(local_pair) == expected(local_pair, (2 * STRIDE, STRIDE))
    pieces = [(0, 5), (7, 0), (EXTENT, 0), (1, EXTENT - 1)]
    each = digests(local_pair, count=1, each_run=True, runs=spans(*pieces))
    assert each == expected(local_pair, *pieces, each_run=True)
    assert len(digests(local_pair, runs=b"")) == TENSORS * 16
    # More runs than a question may have cost the connection.
    digests(local_pair, runs=spans((0, 1)) * MAX_VERIFY_RUNS)
    with pytest.raises(Exception, match=r"lost cluster 1|given up"):
        asked(local_pair, runs=spans((0, 1)) * (MAX_VERIFY_RUNS + 1))
    wait_until(lambda: local_pair.prompt.do(picture).links == ())


UNFAIR: list[tuple[dict[str, Any], LLMStatusCode, str]] = [
    ({"cache_id": 7}, GONE, "no cache with id 7"),
    ({"cache_id": -1}, GONE, "no cache with id -1"),
    ({"cache_id": 2}, INVALID, "read under a pin"),
    ({"cache_id": 4}, INVALID, "remote_accessible=False"),
    ({"pin": 5}, GONE, "no pin 5 of this peer"),
    ({"pin": 2**63 - 1}, GONE, "no pin"),
    ({"push": True}, INVALID, "remote cache access"),
    ({"extent": EXTENT + 1}, INVALID, f"the tensors have {EXTENT} bytes"),
    ({"extent": 0}, INVALID, f"the tensors have {EXTENT} bytes"),
    ({"count": 0}, INVALID, "count=0"),
    ({"count": TENSORS + 1}, INVALID, f"{TENSORS} tensors"),
    ({"count": MAX_QUESTION_TENSORS + 1}, INVALID, f"count={MAX_QUESTION_TENSORS + 1}"),
    ({"count": 2**63 - 1}, INVALID, "count="),
    ({"count": 2, "each_run": True}, INVALID, "count=2"),
    ({"first": 1}, INVALID, f"{TENSORS} tensors"),
    ({"first": 2**63 - 1}, INVALID, f"{TENSORS} tensors"),
    ({"runs": bytes(15)}, INVALID, "runs of 15 bytes"),
    ({"runs": spans((0, STRIDE), (EXTENT - 4, 5))}, INVALID, "runs[1] is 5 bytes"),
    ({"runs": spans((EXTENT + 1, 0))}, INVALID, "ends outside"),
    ({"runs": spans((2**64 - 1, 2))}, INVALID, "ends outside"),
    ({"runs": spans((0, 2**64 - 1))}, INVALID, "one question is about at most"),
    ({"runs": spans(*[(0, 2**63)] * 2)}, INVALID, "one question is about at most"),  # the sum would be 0
    ({"runs": spans(*[(0, MAX_QUESTION_BYTES // 8)] * 3)}, INVALID, "one question is about at most"),
    ({"guards": [Guarded(2**40, 1)]}, LLMStatusCode.LLM_FAILED, "guard slot"),
    ({"guards": [Guarded(0, 1)]}, LLMStatusCode.LLM_FAILED, "guard slot 0"),
    ({"guards": [Guarded(1, 2**64 - 1)]}, LLMStatusCode.LLM_FAILED, "freed, rebound or unregistered"),
    ({"budget_ms": 0}, LLMStatusCode.LLM_TIMEOUT, "no time"),
]


def test_rule_10_an_unfair_question_is_refused_and_costs_nothing(local_pair: Pair) -> None:
    """Pins of others and of other caches: tests/unit/test_access_matrix.py and test_registry_machine.py."""
    src, dst = both(local_pair, PAGED, Spec(blocks=True))
    local_pair.prompt.do(make, "rows", Spec(), 3)
    local_pair.prompt.do(make, "hidden", Spec(blocks=True, memory="inside", accessible=False), 4)
    for number, (change, status, text) in enumerate(UNFAIR):
        with pytest.raises(RemoteFailure) as caught:
            asked(local_pair, **change)
        assert caught.value.status_code is status, change
        assert text in str(caught.value), change
        local_pair.prompt.do(picture)  # checks every table
        block = number % 8
        local_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [block])  # the link is as good as before
        dst = moved(dst, src, [(block, 1)])
    same_bytes(local_pair.decoder.do(show, "kv"), dst)
    same_bytes(local_pair.prompt.do(show, "kv"), src)


# --- many questions ---------------------------------------------------------------------------------------------------
@contextmanager
def full(
    pair: Pair, room: int, timeout: int, **change: Any
) -> Iterator[tuple[threading.Event, list[Message], list[Message]]]:
    """The prompt, which answers nothing until the event is set, has been asked as often as it has room, and 3 times
    more. The lists have the answers to that, and what the decoder's calls ask."""
    both(pair, PAGED, Spec(blocks=True), sync_kv_timeout=timeout)
    go, seen, asked = threading.Event(), list[Message](), list[Message]()
    engine(pair.prompt).checksums.thread.submit(go.wait, 60)
    link = engine(pair.decoder).links.get(1)
    handle, send = link.channel.on_message, link.send

    def note(message: Message) -> None:
        if not isinstance(message, Beat):
            seen.append(message)
        handle(message)

    def noted(message: Message, *args: Any, **named: Any) -> Any:
        asked.append(message)
        return send(message, *args, **named)

    link.channel.on_message = note
    try:
        for number in range(room + 3):  # no call waits for the answers
            link.send(question(pair, id=FIRST_ID + number, **change))
        wait_until(lambda: len(seen) == 3)
        refused = [(answer.id, answer.code) for answer in seen if isinstance(answer, Failed)]
        assert refused == [(FIRST_ID + room + n, BUSY) for n in range(3)]
        assert pair.prompt.do(questions) == room
        link.send = noted
        yield go, seen, asked
    finally:
        go.set()


def test_rule_10_a_peer_has_room_for_so_many_questions_and_a_pull_waits_until_there_is_room(local_pair: Pair) -> None:
    with full(local_pair, 256, 30_000) as (go, seen, asked):
        finish = begin(local_pair.decoder, call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
        # Its question was refused at least twice, so it was asked again.
        wait_until(lambda: sum(isinstance(each, Verify) for each in asked) >= 3)
        go.set()
        finish()
        assert verified(local_pair.decoder) == TENSORS * STRIDE
        answered = {answer.id for answer in seen if isinstance(answer, Verified)}
        assert answered == set(range(FIRST_ID, FIRST_ID + 256))


def test_rule_10_large_questions_take_more_room_and_a_lost_link_gives_it_back(local_pair: Pair) -> None:
    """To a peer that stays busy a pull is no success (interface R6)."""
    with full(local_pair, 32, 200, runs=spans((0, 1)) * MAX_VERIFY_RUNS):
        with pytest.raises(DeadlineExceeded) as caught:
            local_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
        assert caught.value.phase == "verify"
        assert local_pair.prompt.do(questions) == 32
        engine(local_pair.decoder).links.stop("the test ends it")
        wait_until(lambda: local_pair.prompt.do(questions) == 0)


def test_one_peer_after_the_other_is_answered() -> None:
    served: list[str] = []
    before = residue()
    no_caches: Any = None  # every answer is a failure
    target = ChecksumTarget(no_caches, AccessPolicy(no_caches), None)
    go = threading.Event()
    target.thread.submit(go.wait, 60)
    fair = Verify(0, 1, 0, [], False, 1, 0, 1, b"", False, bytes(16), 10_000)
    for name, count in (("greedy", 4), ("modest", 2)):
        link = Mock(peer=name)  # all that the queues ask of a link is that it can be a key
        link.tell.side_effect = lambda message, name=name: served.append(f"{name}{message.id}")
        for number in range(count):
            target.on_verify(link, msgspec.structs.replace(fair, id=number))
    go.set()
    wait_until(lambda: len(served) == 6)
    target.close()
    assert served == ["greedy0", "modest0", "greedy1", "modest1", "greedy2", "greedy3"]
    target.on_verify(link, fair)
    assert served[-1] == "modest0"
    target.close()
    assert settled(before) == before


# --- answers that lie -------------------------------------------------------------------------------------------------
LIES: list[tuple[Callable[[Verify], Message], type[Exception], str]] = [
    (lambda asked: Verified(asked.id, b""), ProtocolError, "sent 0 bytes of digests, 64 were asked for"),
    (lambda asked: Verified(asked.id, bytes(63)), ProtocolError, "sent 63 bytes"),
    (lambda asked: Verified(asked.id, bytes(80)), ProtocolError, "sent 80 bytes"),
    (lambda asked: UnlinkAck(asked.id), ProtocolError, "answered a Verify with UnlinkAck"),
    (lambda asked: Verified(asked.id, bytes(64)), TransferFailed, "4 of 4 tensors differ"),
    (lambda asked: Failed(asked.id, 0, "two\nlines"), TransferFailed, "two lines"),
    (lambda asked: Failed(asked.id, 77, "any"), TransferFailed, "could not confirm the bytes: any"),
]


def test_rule_10_an_answer_that_lies_is_no_success_and_every_question_has_its_own_nonce(local_pair: Pair) -> None:
    src, dst = both(local_pair, ROWS, Spec())
    nonces: list[bytes] = []

    def pull(answer: Callable[[Link, Verify], None] | None = None) -> None:
        def note(link: Link, message: Verify, honest: Callable[[Link, Verify], None]) -> None:
            nonces.append(message.nonce)
            (answer or honest)(link, message)

        with local_pair.prompt.world.probe.answered(Verify, note):  # type: ignore[attr-defined]  # both ends are here
            local_pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)

    for lie, kind, text in LIES:
        with pytest.raises(kind, match=text) as caught:
            pull(lambda link, message, lie=lie: link.send(lie(message)))  # type: ignore[misc]
        assert "\n" not in str(caught.value)
        assert getattr(caught.value, "status_code", None) is not LLMStatusCode.LLM_SUCCESS
        assert (verified(local_pair.decoder), kept(local_pair)) == (0, 1)
    pull()
    same_bytes(local_pair.decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))
    assert len(set(nonces)) == len(nonces) > len(LIES)
