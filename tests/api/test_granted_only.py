"""Caches that peers read under grants only: what a reader without one gets, and one that keeps to no rule."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links.messages import Guarded, Verify
from llm_datadist._memory.exports import NON_POOL
from llm_datadist._native import Plan
from llm_datadist._transfer.resolution import Handle, encode_handle
from llm_datadist._transport.connection import Transfer
from llm_datadist.errors import CacheMismatch, GrantEnded, LLMException
from llm_datadist.types.grant import Grant
from tests.support import moves
from tests.support.grants import LONG, grant, pull, tell
from tests.support.kinds import Bytes, Pair, World
from tests.support.layers import raw, send
from tests.support.linking import speaking
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, make, moved, refill, refused, same_bytes, show
from tests.support.pairs import TRANSPORTS
from tests.support.wire import FEATURES
from tests.support.world import byte_views

pytestmark = [
    pytest.mark.covers("CacheManager: allocate_blocks_cache pull_blocks push_blocks register_blocks_cache"),
    pytest.mark.gpu,
]

STRIDE: Final = Spec().stride
OPEN: Final = Spec(blocks=True, blocks_key=BLOCKS)
LENT: Final = replace(OPEN, granted_only=True)
#: What every refusal names.
NAMES: Final = ("is read under grants only", "granted_only=True", "llm.GrantedReads=1")
EVERYWHERE: Final = pytest.mark.parametrize("pair", [*TRANSPORTS, "cma"], indirect=True)


def both(pair: Pair, source: Spec = LENT, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(**settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def not_without_a_grant(pair: Pair) -> None:
    """No form of a pull without a grant moves a byte."""
    by_id = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "kv"), 1)
    pair.decoder.do(make, "row", Spec(rows=2), 3)
    forms: list[tuple[Any, ...]] = [
        ("pull_blocks", BLOCKS, Use("kv"), [1], [4]),
        ("pull_blocks", by_id, Use("kv"), [], [4]),
        ("pull_cache", by_id, Use("row"), 1),
    ]
    for arguments in forms:
        refused([pair.decoder, pair.prompt], ("kv", "row"), CacheMismatch, NAMES, call, *arguments)
    pair.decoder.do(moves.forget, "row")


@EVERYWHERE
@pytest.mark.parametrize("source", [LENT, replace(LENT, memory="inside")], ids=["allocated", "registered"])
def test_a_pull_without_a_grant_is_refused_before_the_first_byte_and_one_with_it_is_not(
    pair: Pair, source: Spec
) -> None:
    src, dst = both(pair, source)
    not_without_a_grant(pair)
    data = pair.prompt.do(grant, [1, 2, 5])
    for _ in range(2):  # the place is known then
        pair.decoder.do(pull, data, [5, 1], [0, 6])
        same_bytes(pair.decoder.do(show, "kv"), dst := moved(dst, src, [(0, 5), (6, 1)]))
        not_without_a_grant(pair)
        dst = pair.decoder.do(refill, "kv", 2)
    pair.prompt.do(call, "copy_blocks", Use("kv"), {1: [3]})  # the owner's own
    same_bytes(pair.prompt.do(show, "kv"), moved(src, src, [(3, 1)]))


def reuse(world: World) -> None:
    """Revoke the grant; give its blocks to the next request."""
    world.memory["grant"].revoke()
    for view in byte_views(world.caches["kv"]):
        view[:] = 0xEE


@EVERYWHERE
def test_after_lend_revoke_and_reuse_no_pull_returns_the_bytes_of_the_next_request(pair: Pair) -> None:
    _, dst = both(pair)
    data = pair.prompt.do(grant, [1, 2])
    pair.decoder.do(pull, data, [1], [1])
    dst = pair.decoder.do(refill, "kv", 2)
    pair.prompt.do(reuse)
    with pytest.raises(GrantEnded, match="has ended: revoked, "):
        pair.decoder.do(pull, data, [1], [1])
    not_without_a_grant(pair)
    same_bytes(pair.decoder.do(show, "kv"), dst)


@pytest.mark.parametrize("rca", [False, True])
def test_a_push_into_it_is_refused_also_by_address(pair: Pair, rca: bool) -> None:
    both(pair, rca=rca)
    ends, by_id = [pair.decoder, pair.prompt], CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "kv"), 1)
    pair.decoder.do(make, "row", Spec(rows=2), 3)
    if rca:
        parts = (*NAMES, "grants permit no push")
        refused(ends, ("kv",), CacheMismatch, parts, call, "push_blocks", BLOCKS, Use("kv"), [1], [2])
        refused(ends, ("kv",), CacheMismatch, parts, call, "push_cache", by_id, Use("row"), 1)
        return
    before = pair.prompt.do(show, "kv")
    sent = pair.decoder.do(send, "kv", [raw(pair.prompt, "kv")], [0, 1], [0, 2])
    assert sent.first is LLMStatusCode.LLM_PARAM_INVALID
    assert "granted_only=True" in sent.errors[0]
    same_bytes(pair.prompt.do(show, "kv"), before)


def test_the_option_stands_for_all_blocks_caches_of_its_instance_and_for_no_other(pair: Pair) -> None:
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra={"llm.GrantedReads": "1"})
    pair.decoder.start("DECODER", 2, extra={"llm.Transport": pair.transport})
    pair.link()
    sources = pair.prompt.do(make, "kv", OPEN, 1), pair.prompt.do(make, "rows", Spec(keys=(CacheKey(1, 7),)), 3)
    own, row = pair.decoder.do(make, "kv", OPEN, 2), pair.decoder.do(make, "mine", Spec(), 4)
    not_without_a_grant(pair)
    pair.decoder.do(pull, pair.prompt.do(grant, [3]), [3], [0])
    same_bytes(pair.decoder.do(show, "kv"), moved(own, sources[0], [(0, 3)]))
    pair.decoder.do(call, "pull_cache", CacheKey(1, 7), Use("mine"), 5)
    same_bytes(pair.decoder.do(show, "mine"), moved(row, sources[1], [(5, 0)]))


def test_a_reader_of_a_release_that_knows_no_such_caches_is_refused(pair: Pair) -> None:
    older = [each for each in FEATURES if each != "granted-only"]
    with speaking(pair.decoder, features=older):
        _, dst = both(pair)
    data, parts = pair.prompt.do(grant, [1]), (*NAMES, "the reader's release does not know that; update it")
    refused([pair.decoder, pair.prompt], ("kv",), CacheMismatch, parts, pull, data, [1], [2])
    refused(
        [pair.decoder, pair.prompt], ("kv",), CacheMismatch, parts, call, "pull_blocks", BLOCKS, Use("kv"), [1], [2]
    )
    pair.prompt.do(moves.forget, "kv")
    src = pair.prompt.do(make, "kv", OPEN, 5)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(2, 1)]))


def test_a_key_that_names_another_cache_now_needs_a_grant_only_if_that_one_does(pair: Pair) -> None:
    """The reader has kept the place of the cache that the key named before."""
    both(pair)
    pair.decoder.do(pull, pair.prompt.do(grant, [1]), [1], [1])
    pair.prompt.do(moves.forget, "kv")
    src, dst = pair.prompt.do(make, "kv", OPEN, 8), pair.decoder.do(refill, "kv", 2)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [2], [3])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 2)]))
    pair.prompt.do(moves.forget, "kv")
    pair.prompt.do(make, "kv", LENT, 9)
    not_without_a_grant(pair)


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_granted_only_is_a_bool(local_pair: Pair, wrong: Any) -> None:
    local_pair.start()
    for method, more in (("allocate_blocks_cache", []), ("register_blocks_cache", [[4096]])):
        with pytest.raises(TypeError, match="granted_only"):
            local_pair.prompt.do(partial(call, granted_only=wrong), method, OPEN.desc, *more)


def lend_many(world: World, count: int) -> list[bytes]:
    """Grant a block often; a thread keeps the interpreter busy until :func:`rest`."""
    world.memory["rest"] = event = threading.Event()

    def busy() -> None:
        while not event.is_set():
            sum(range(10_000))

    threading.Thread(target=busy, daemon=True).start()
    return [world.caches["kv"].grant([1], LONG).token for _ in range(count)]


def rest(world: World) -> None:
    world.memory["rest"].set()


def read_and_release(world: World, tokens: list[bytes]) -> None:
    def read(mine: list[bytes]) -> None:
        for token in mine:
            claimed = world.cm.claim_grant(1, token)
            for _ in range(3):
                world.cm.pull_blocks(BLOCKS, world.caches["kv"], [1], [1], grant=claimed)
            claimed.release()
            with suppress(GrantEnded):  # or the release is on its way
                world.cm.pull_blocks(BLOCKS, world.caches["kv"], [1], [1], grant=claimed)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, [tokens[first::8] for first in range(8)]))


@pytest.mark.parametrize("pair", ["tcp"], indirect=True)
def test_grants_that_end_under_readers_do_not_stop_their_owner(pair: Pair) -> None:
    src, dst = both(pair)
    tokens = pair.prompt.do(lend_many, 400)
    try:
        pair.decoder.do(read_and_release, tokens)
    finally:
        pair.prompt.do(rest)
    pair.decoder.do(pull, pair.prompt.do(grant, [1]), [1], [1])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(1, 1)]))


# --- a reader that keeps to no rule -----------------------------------------------------------------------------------


def guard_of(world: World, name: str) -> tuple[int, int]:
    guard = world.probe.engine.caches.registry.lookup(world.caches[name].cache_id).guard
    return guard.slot, guard.generation


def read_raw(
    world: World, cache: int, guards: list[tuple[int, int]], span: tuple[int, int], write: bool = False
) -> str:
    """Move bytes of a cache of cluster 1 over data lanes under these guards; return the refusal."""
    engine, tensors = world.probe.engine, Spec().tensors
    local = engine.caches.registry.lookup(world.caches["kv"].cache_id).storage.tensors
    with engine.links.operation(1) as link:
        lanes = next(each for each in link.connection.connections if each.capabilities.remote_guards)
        regions, offsets = np.full(tensors, NON_POOL, np.uint32), np.zeros(tensors, np.uint64)
        remote = lanes.map(regions, offsets, local.extent, writable=True, located=True)
        remote = replace(remote, handle=encode_handle(Handle(cache, 0, [Guarded(*each) for each in guards])))
        runs = np.array([(span[0], span[0], span[1])], np.uint64)
        plan = Plan(0, 0, tensors, runs, ordered=False, nbytes=tensors * span[1])
        try:
            lanes.move(Transfer(plan, local, remote, None, Deadline(10_000), write))
        except LLMException as error:
            return f"{error.status_code.name}: {error}"
    return ""


def verify_raw(
    world: World, cache: int, guards: list[tuple[int, int]], span: tuple[int, int], push: bool = False
) -> str:
    """Ask cluster 1 for a digest of bytes under these guards; return the refusal."""
    named, extent = [Guarded(*each) for each in guards], Spec().rows * STRIDE
    runs = np.array(span, "<u8").tobytes()
    with world.probe.engine.links.operation(1) as link:
        fair = Verify(0, cache, 0, named, push, extent, 0, 1, runs, False, bytes(16), 10_000)
        build = lambda number: msgspec.structs.replace(fair, id=number)  # noqa: E731
        try:
            link.request(build, Deadline(10_000), "a digest", "verify")
        except LLMException as error:
            return f"{error.status_code.name}: {error}"
    return ""


def block(first: int, count: int = 1) -> tuple[int, int]:
    return first * STRIDE, count * STRIDE


@pytest.mark.parametrize("ask", [read_raw, verify_raw])
def test_a_reader_over_tcp_that_keeps_to_no_rule_gets_nothing_that_is_not_lent_now(tcp_pair: Pair, ask: Any) -> None:
    """Nor a digest of it. The answer is typed, the link goes on, and no byte is sent."""
    src, dst = both(tcp_pair)
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    prompt.do(make, "other", replace(LENT, blocks_key=None), 5)
    cache, own = prompt.do(cache_id, "kv"), prompt.do(guard_of, "kv")
    given = [Grant.from_bytes(prompt.do(grant, *each)) for each in (([1, 2, 5],), ([1], 600.0, "other"), ([7],))]
    mine, others, ended = (each.guard for each in given)
    prompt.do(tell, "grant", "revoke")  # the last one
    gone, invalid = "LLM_KV_CACHE_NOT_EXIST", "LLM_PARAM_INVALID"
    cases: list[tuple[list[tuple[int, int]], tuple[int, int], str]] = [
        ([own], block(1), invalid),  # no grant
        ([own, own], block(1), invalid),
        ([own, others], block(1), invalid),  # of another cache
        ([own, ended], block(7), gone),
        ([own, (ended[0], ended[1] + 1)], block(7), invalid),  # as the slot shows now
        ([own, (ended[0], ended[1] + 2)], block(7), gone),  # as it may be soon
        ([own, mine], block(3), invalid),  # outside
        ([own, mine], block(0), invalid),
        ([own, mine], block(7), invalid),
        ([own, mine], block(2, 2), invalid),  # partly outside
        ([own, mine], block(0, 2), invalid),
        ([own, mine], block(1, 5), invalid),  # its ends are inside
        ([own, mine], (3 * STRIDE - 1, 2), invalid),
        ([own, mine], (6 * STRIDE, 1), invalid),
    ]
    for turn in range(2):  # then the owner keeps a reply for the grant's blocks
        for guards, span, status in cases:
            answer = decoder.do(ask, cache, guards, span)
            assert answer.startswith(status), (turn, guards, span, answer)
            if status == invalid:
                assert [name for name in NAMES if name not in answer] == [], answer
            same_bytes(decoder.do(show, "kv"), dst)
        for span in (block(1, 2), block(5), (STRIDE + 1, 2 * STRIDE - 2), (5 * STRIDE + 7, 1)):
            assert decoder.do(ask, cache, [own, mine], span) == ""
        assert decoder.do(ask, cache, [own, mine], block(1), True).startswith(invalid)  # a push
        if ask is read_raw:
            same_bytes(decoder.do(show, "kv"), moved(dst, src, [(1, 1), (2, 2), (5, 5)]) if turn == 0 else dst)
            dst = decoder.do(show, "kv")
    same_bytes(prompt.do(show, "kv"), src)
