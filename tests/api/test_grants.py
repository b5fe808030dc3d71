"""Grants: exactly these blocks, until revoked or out of time; never wrong bytes of a block that was used again."""

from __future__ import annotations

import asyncio
import pickle
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from faults.gated import stopped
from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import (
    CacheError,
    CacheNotFound,
    DeadlineExceeded,
    GrantEnded,
    ParamError,
    StateError,
    TransferFailed,
)
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views
from tests.support.frozen import frozen
from tests.support.moves import (
    BLOCKS,
    Spec,
    Use,
    call,
    forget,
    make,
    moved,
    picture,
    refill,
    same_bytes,
    show,
    wait_until,
)

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "Cache.grant", "Grant: active from_bytes revoke to_bytes", "errors: CacheNotFound GrantEnded StateError"
)

PAGED = Spec(blocks=True, blocks_key=BLOCKS)
REGISTERED = Spec(blocks=True, blocks_key=BLOCKS, memory="inside")
LONG = 600.0
OTHER = BlocksCacheKey(1, 1)


def both(pair: Pair, source: Spec = REGISTERED) -> tuple[Bytes, Bytes]:
    pair.start()
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def grant(world: World, blocks: list[int], ttl: float = LONG, of: str = "kv") -> bytes:
    world.memory["grant"] = granted = world.caches[of].grant(blocks, ttl)
    return granted.to_bytes()


def active(world: World) -> bool:
    return bool(world.memory["grant"].active)


def reuse(world: World) -> None:
    """What a scheduler does with a block that it gives to another request."""
    world.memory["grant"].revoke()
    for view in tensor_views(world.caches["kv"]):
        view.reshape(-1).view(np.uint8)[:] = 0xEE


def pull(world: World, data: bytes, src: list[int], dst: list[int], key: Any = BLOCKS) -> None:
    world.cm.pull_blocks(key, world.caches["kv"], src, dst, grant=Grant.from_bytes(data))


def pull_async(world: World, data: bytes, src: list[int], dst: list[int]) -> None:
    asyncio.run(world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], src, dst, grant=Grant.from_bytes(data)))


def claim(world: World, data: bytes, *_: list[int]) -> None:
    world.cm.claim_grant(1, Grant.from_bytes(data).token)


@pytest.mark.parametrize("source", [PAGED, REGISTERED], ids=["allocated", "registered"])
def test_exactly_the_granted_blocks_are_pulled_until_the_grant_ends(pair: Pair, source: Spec) -> None:
    src, dst = both(pair, source)
    prompt, decoder = pair.prompt, pair.decoder

    def refused(data: bytes, blocks: list[int], why: str) -> None:
        with pytest.raises(
            GrantEnded, match=rf"<Grant [0-9a-f]{{8}} of .*> has ended: {why}, \d+\.\d s ago$"
        ) as caught:
            decoder.do(pull, data, blocks, [4 + n for n in range(len(blocks))])
        error = caught.value
        assert (error.status_code, error.retryable, error.peer) == (LLMStatusCode.LLM_FAILED, False, 1)
        same_bytes(decoder.do(show, "kv"), dst)

    other, short, later = (prompt.do(grant, [3], ttl) for ttl in (LONG, 0.05, 0.1))
    wait_until(lambda: not prompt.do(active))
    for over in (short, later):
        refused(over, [3], "its time was over")
    data = prompt.do(grant, [1, 2, 5])
    for wrong, arguments, kind, text in (  # the last one is of another incarnation
        (data, ([1, 3], [0, 1]), ParamError, r"src_blocks: block 3 is not among the 3 blocks of the grant"),
        (data, ([1], [0], BlocksCacheKey(9, 0)), ParamError, r"grant: .* of cluster 1, .* names cluster 9"),
        (data, ([], [0], CacheKeyByIdAndIndex(1, 1, 0)), ParamError, "grant: only with a BlocksCacheKey"),
        (
            Grant(1, b"x" * 16, 1, (1, 1), b"y" * 16, (1,)).to_bytes(),
            ([1], [0]),
            GrantEnded,
            "has ended",
        ),  # another incarnation's
    ):
        with pytest.raises(kind, match=text):
            decoder.do(pull, wrong, *arguments)
    with pytest.raises(TypeError):
        decoder.do(partial(call, grant=data), "pull_blocks", BLOCKS, Use("kv"), [1], [0])
    same_bytes(decoder.do(show, "kv"), dst)
    for granted, pairs in ((data, [(6, 1), (0, 2)]), (data, [(3, 5)]), (other, [(7, 3)])):
        decoder.do(pull, granted, [s for _, s in pairs], [d for d, _ in pairs])
        dst = moved(dst, src, pairs)
        same_bytes(decoder.do(show, "kv"), dst)
    assert prompt.do(active)
    prompt.do(reuse)
    assert not prompt.do(active)
    refused(data, [1], "revoked")
    assert prompt.do(picture).pins == 0
    prompt.do(forget, "kv")
    prompt.do(make, "later", source, 9)
    refused(other, [3], "its cache was freed")


@pytest.mark.parametrize("step", ["before copy", "after copy"])
def test_blocks_used_again_under_a_stopped_reader_are_never_a_success(
    mapped_pair: Pair, tmp_path: Path, step: str
) -> None:
    _, dst = both(mapped_pair)
    granted = Grant.from_bytes(mapped_pair.prompt.do(grant, [1, 2]))
    arguments = ("pull_blocks", BLOCKS, Use("kv"), [1, 2], [6, 0])
    with stopped(mapped_pair.decoder, step, tmp_path, *arguments, grant=granted) as pulling:
        mapped_pair.prompt.do(reuse)
        with pytest.raises(GrantEnded, match="has ended: revoked"):
            pulling.finish()
    for got, was in zip(mapped_pair.decoder.do(show, "kv"), dst, strict=True):
        got[[6, 0]] = was[[6, 0]]
        same_bytes([got], [was])


@pytest.mark.parametrize("name", ["local_pair", "shm_pair", "cma", "tcp_pair"])
def test_every_form_of_a_call_says_why_a_grant_has_ended_and_shows_little_of_its_token(
    request: pytest.FixtureRequest, name: str
) -> None:
    pair: Pair = request.getfixturevalue("shm_pair" if name == "cma" else name)
    pair.start(extra={"llm.Transport": "cma"} if name == "cma" else {})
    pair.prompt.do(make, "kv", PAGED, 1)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    for end, why in (("revoked", "revoked"), ("freed", "its cache was freed")):
        data = pair.prompt.do(grant, [1, 2])
        token = Grant.from_bytes(data).token.hex()
        pair.decoder.do(pull_async, data, [1], [1])
        pair.decoder.do(refill, "kv", 2)
        pair.prompt.do(reuse) if end == "revoked" else pair.prompt.do(forget, "kv")
        assert not pair.prompt.do(active)
        for call_again in (pull, pull_async, claim):
            with pytest.raises(GrantEnded, match=rf"{token[:8]}.* has ended: {why}, \d+\.\d s ago$") as caught:
                pair.decoder.do(call_again, data, [1], [1])
            assert token[:9] not in str(caught.value)
            assert isinstance(caught.value, CacheError)
            assert (caught.value.retryable, caught.value.peer) == (False, 1)
            same_bytes(pair.decoder.do(show, "kv"), dst)


def test_a_grant_of_an_owner_that_does_not_answer_has_ended_where_its_guard_says_so(shm_pair: Pair) -> None:
    shm_pair.start(sync_kv_timeout=300)
    shm_pair.prompt.do(make, "kv", PAGED, 1)
    dst = shm_pair.decoder.do(make, "kv", Spec(blocks=True), 2)
    data = shm_pair.prompt.do(grant, [1])
    shm_pair.decoder.do(pull, data, [1], [1])  # so that the place is known
    shm_pair.decoder.do(refill, "kv", 2)
    shm_pair.prompt.do(reuse)
    with frozen(shm_pair.prompt):
        with pytest.raises(GrantEnded, match=r"has ended$"):
            shm_pair.decoder.do(pull, data, [1], [1])
        with pytest.raises(DeadlineExceeded, match=r"claim_grant: grant [0-9a-f]{8} of cluster 1 from .*: no answer"):
            shm_pair.decoder.do(claim, data)
    same_bytes(shm_pair.decoder.do(show, "kv"), dst)


def test_a_transfer_that_fails_while_its_grant_lasts_says_what_failed(local_pair: Pair) -> None:
    both(local_pair, PAGED)
    data = local_pair.prompt.do(grant, [1])
    local_pair.prompt.do(make, "another", Spec(blocks=True, blocks_key=OTHER), 3)
    with pytest.raises(TransferFailed, match="is not of what the key names"):
        local_pair.decoder.do(pull, data, [1], [1], OTHER)
    local_pair.decoder.do(pull, data, [1], [1])


def test_grants_are_small_values_that_only_their_process_may_end_and_bad_ones_are_refused(local_pair: Pair) -> None:
    both(local_pair)
    prompt = local_pair.prompt
    data = prompt.do(grant, [2, 1, 2])
    copy = Grant.from_bytes(data)
    again = pickle.loads(pickle.dumps(copy))
    assert (again, hash(again)) == (copy, hash(copy))
    assert (copy.blocks, copy.cluster_id, copy.cache_id, len(data) < 96) == (frozenset({1, 2}), 1, 2, True)
    for verb in (
        copy.revoke,
        lambda: copy.active,
        copy.released,
        copy.claimed,
        lambda: copy.end,
        lambda: copy.renew(1.0),
    ):
        with pytest.raises(StateError, match="only the process of cluster 1"):
            verb()
    with pytest.raises(StateError, match="was not claimed here"):
        copy.release()
    for broken in (b"", b"\xc0", data + b"x", b"\x90"):
        with pytest.raises(ParamError, match="no grant"):
            Grant.from_bytes(broken)
    prompt.do(make, "rows", Spec(), 3)
    before = prompt.do(picture)
    for blocks, ttl, kind, text in (
        ([], 1.0, ParamError, "blocks"),
        ([8], 1.0, ParamError, r"block 8 is outside \[0, 8\)"),
        ([-1], 1.0, ParamError, "blocks"),
        ([1], 0.0, ParamError, "ttl"),
        ([1], -1.0, ParamError, "ttl"),
        ([1], float("nan"), ParamError, "ttl"),
        ([1], "1", TypeError, "ttl"),
        (None, 1.0, TypeError, "blocks"),
    ):
        with pytest.raises(kind, match=text):
            prompt.do(grant, blocks, ttl)
    with pytest.raises(ParamError, match="blocks cache"):
        prompt.do(grant, [0], 1.0, "rows")
    assert prompt.do(picture) == before
    prompt.do(forget, "kv")
    with pytest.raises((CacheNotFound, StateError)):
        prompt.do(grant, [1])
