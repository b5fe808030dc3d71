"""Limits that are reached in calls on links that are there: no descriptor, no thread, no memory is left."""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import pytest

from faults.gates import watched
from faults.limits import few_descriptors, few_threads, give, little_memory, take
from llm_datadist import CacheKey, LLMException, LLMStatusCode, Placement, TransferConfig
from llm_datadist.errors import OutOfMemory, TransferFailed
from llm_datadist.testing import StagedDevice
from tests.support.layers import Always
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ends import End, LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

TRANSPORTS = ["shm", "cma", "tcp"]
ROWS = range(8)
_fresh = itertools.count(1000)


@pytest.fixture
def linked(request: pytest.FixtureRequest) -> Pair:
    """Two linked ends, which have a source by blocks and a target; nothing may be left afterwards."""
    pair: Pair = request.getfixturevalue("tcp_pair" if request.param == "tcp" else "shm_pair")
    pair.start(extra={"llm.Transport": request.param}, sync_kv_timeout=2_000)
    pair.prompt.do(names)  # which imports this module: that takes descriptors
    pair.decoder.do(names)
    pair.prompt.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 1)
    pair.decoder.do(make, "target", Spec(blocks=True), 2)
    pair.decoder.do(make, "row", Spec(rows=2), 3)
    pulls_well(pair, 0)
    return pair


def failure(function: Callable[..., object], *args: Any) -> LLMException | None:
    """Return the typed error of a call that may fail now, or None."""
    try:
        function(*args)
    except LLMException as error:
        return error
    return None


def offer(pair: Pair, number: int) -> CacheKey:
    """Have the prompt publish a row under a key of its own."""
    key = CacheKey(1, 100 + number, 0)
    pair.prompt.do(make, f"row {number}", Spec(rows=1, keys=(key,)), number)
    return key


def pull_both(pair: Pair, key: CacheKey) -> None:
    """Pull by blocks, which asks nobody, and by key, which asks the owner."""
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("target"), list(ROWS), list(ROWS))
    pair.decoder.do(call, "pull_cache", key, Use("row"), 1)


def compare(pair: Pair, number: int) -> None:
    """Every byte that was pulled is right."""
    same_bytes(pair.decoder.do(show, "target"), pair.prompt.do(show, "source"))
    target, source = pair.decoder.do(show, "row"), pair.prompt.do(show, f"row {number}")
    same_bytes(target, moved(target, source, [(1, 0)]))


def pulls_well(pair: Pair, number: int) -> None:
    pull_both(pair, offer(pair, number))
    compare(pair, number)
    pair.prompt.do(forget, f"row {number}")


def lose_lanes(world: World, peer: int) -> None:
    """Drop every data lane of a link."""
    assert world.dd._engine is not None
    for each in world.dd._engine.links.get(peer).connection.connections:
        each.drop_lanes()


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("side", ["prompt", "decoder"])
def test_pulls_need_no_descriptor(linked: Pair, side: str) -> None:
    end: End = getattr(linked, side)
    before = [each.do(residue_of) for each in (linked.prompt, linked.decoder)]
    key = offer(linked, 1)
    end.do(take, few_descriptors, 0)
    pull_both(linked, key)
    end.do(give)
    compare(linked, 1)
    bytes_move_both_ways(linked.prompt, linked.decoder)
    ends = linked.prompt, linked.decoder
    assert [each.do(settled_of, was) for each, was in zip(ends, before, strict=True)] == before


@pytest.mark.parametrize("linked", ["tcp"], indirect=True)
@pytest.mark.parametrize("side", ["prompt", "decoder"])
@pytest.mark.parametrize("free", [0, 1, 2])
def test_lost_lanes_without_descriptors_fail_calls_with_a_code_and_come_back(
    linked: Pair, side: str, free: int
) -> None:
    end: End = getattr(linked, side)
    before = [each.do(residue_of) for each in (linked.prompt, linked.decoder)]
    target, key = linked.decoder.do(show, "target"), offer(linked, 1)
    end.do(take, few_descriptors, free)
    # What the loss frees is taken, too.
    for each, peer in ((linked.prompt, 2), (linked.decoder, 1)):
        each.do(lose_lanes, peer)
    end.do(take_more, free)
    for _ in range(2):
        error = failure(pull_both, linked, key)
        if error is None:
            compare(linked, 1)
            break
        assert error.status_code is not LLMStatusCode.LLM_SUCCESS
        assert [tensor.shape for tensor in linked.decoder.do(show, "target")] == [each.shape for each in target]
    end.do(give)
    wait_until(lambda: _pulled(linked), 20)
    assert linked.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(linked.prompt, linked.decoder)
    linked.prompt.do(forget, "row 1")
    wait_until(lambda: linked.prompt.do(picture).pins == 0)
    ends = linked.prompt, linked.decoder
    wait_until(lambda: _kinds(end.do(residue_of)) == _kinds(before[ends.index(end)]))


def _kinds(residue: dict[str, Any]) -> dict[str, int]:
    """Return the descriptors; the thread that dials lanes stays from the first loss on."""
    fds: dict[str, int] = residue["fds"]
    return fds


def take_more(world: World, free: int) -> None:
    """Take the descriptors that have come free, but so many."""
    world.memory["few"].__exit__(None, None, None)
    take(world, few_descriptors, free)


def _pulled(pair: Pair) -> bool:
    """Return True if pulls succeed; a key is not used again, because one that was not pulled stays bound."""
    try:
        pulls_well(pair, next(_fresh))
    except LLMException:
        return False
    return True


def names(world: World) -> set[str]:
    return set(world.caches)


# Threads.


def without_threads(world: World, function: Callable[..., Any], *args: Any) -> Any:
    with few_threads(0, ""):
        return function(world, *args)


def send_layers(world: World) -> None:
    config = TransferConfig(1, [1 << 20] * 4)
    world.cm.transfer_cache_async(world.caches["target"], Always(), [config], [0, 1], [2, 3])


def await_pull(world: World) -> None:
    asyncio.run(world.cm.pull_blocks_async(BLOCKS, world.caches["target"], list(ROWS), list(ROWS)))


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
def test_without_threads_calls_that_need_one_fail_and_are_never_done_later(linked: Pair) -> None:
    decoder = linked.decoder
    decoder.do(make, "target", Spec(blocks=True), 9)
    target, before = decoder.do(show, "target"), decoder.do(picture)
    for function in (send_layers, await_pull):
        with pytest.raises(LLMException, match="start new thread") as caught:
            decoder.do(without_threads, function)
        assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    assert decoder.do(picture) == before
    # A thread that can start now must not do what was refused.
    decoder.do(await_nothing)
    same_bytes(decoder.do(show, "target"), target)
    decoder.do(without_threads, call, "pull_blocks", BLOCKS, Use("target"), list(ROWS), list(ROWS))
    same_bytes(decoder.do(show, "target"), linked.prompt.do(show, "source"))
    decoder.do(await_pull)
    pulls_well(linked, 1)
    bytes_move_both_ways(linked.prompt, decoder)


def await_nothing(world: World) -> None:
    """Await a copy of a row onto itself."""
    row = world.caches["row"]
    asyncio.run(world.cm.copy_cache_async(row, row, 0, 0))


@pytest.mark.parametrize("linked", ["shm", "tcp"], indirect=True)
def test_without_threads_ends_link_to_several_clusters(linked: Pair) -> None:
    decoder, clusters = linked.decoder, [info(1, linked.prompt.port), info(7, 1)]
    assert decoder.do(unlink, clusters[:1]) == SUCCESS
    _, codes = decoder.do(without_threads, link, clusters)
    assert codes == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED]
    pulls_well(linked, 1)
    bytes_move_both_ways(linked.prompt, decoder)


def test_without_a_thread_that_digests_the_pull_fails_and_the_next_succeeds(shm_pair: Pair) -> None:
    shm_pair.start(extra={"llm.Checksum": "1"})
    source = shm_pair.prompt.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 1)
    shm_pair.decoder.do(make, "target", Spec(blocks=True), 2)
    shm_pair.prompt.do(take, few_threads, 0, "")
    with pytest.raises(TransferFailed, match="no thread can be started") as caught:
        shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("target"), list(ROWS), list(ROWS))
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    shm_pair.prompt.do(give)
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("target"), list(ROWS), list(ROWS))
    same_bytes(shm_pair.decoder.do(show, "target"), source)
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


@pytest.mark.parametrize("free", range(6))
def test_swaps_with_few_threads_succeed_or_have_copied_nothing(end: LocalEnd, free: int) -> None:
    end.start("DECODER", 2, device=StagedDevice())
    world, pairs = end.world, {each: 7 - each for each in ROWS}
    for out in (False, True):
        here, there = ("host", "device") if out else ("device", "host")
        source = end.do(make, there, Spec(blocks=True, placement=Placement[there.upper()]), 1)
        target = end.do(make, here, Spec(blocks=True, placement=Placement[here.upper()]), 2)
        with few_threads(free, ""):
            error = failure(world.cm.swap_blocks, world.caches[there], world.caches[here], pairs)
        if error is not None:
            assert error.status_code is LLMStatusCode.LLM_FAILED
            same_bytes(end.do(show, here), target)
        world.cm.swap_blocks(world.caches[there], world.caches[here], pairs)
        same_bytes(end.do(show, here), moved(target, source, [(to, at) for at, to in pairs.items()]))
        for name in (here, there):
            end.do(forget, name)


# Memory.


def with_memory_error(world: World, at: int, function: Callable[..., Any], *args: Any) -> None:
    """Call with a MemoryError at the ``at``-th step of any thread."""
    passed: list[str] = []

    def fail(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name != "use":
            passed.append(name)
            if len(passed) == at:
                raise MemoryError(name)

    with watched(fail):
        function(world, *args)


def arm_memory_error(world: World, step: str) -> None:
    """Have the next arrival at a step fail, in whichever thread."""
    left = [step]

    def fail(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name in left:
            left.remove(name)
            raise MemoryError(name)

    world.memory["armed"] = watched(fail)
    world.memory["armed"].__enter__()


def disarm(world: World) -> None:
    world.memory.pop("armed").__exit__(None, None, None)


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
def test_a_caller_without_memory_at_any_step_gets_a_code_and_the_next_call_succeeds(linked: Pair) -> None:
    kinds: list[type[BaseException]] = []
    for at in range(1, 20):
        key = offer(linked, at)
        error = failure(linked.decoder.do, with_memory_error, at, call, "pull_cache", key, Use("row"), 1)
        if error is None:
            break
        kinds.append(type(error))
        assert "MemoryError(" in str(error)
        code = LLMStatusCode.LLM_OUT_OF_MEMORY if isinstance(error, OutOfMemory) else LLMStatusCode.LLM_FAILED
        assert error.status_code is code
        linked.decoder.do(picture)
        pulls_well(linked, 100 + at)
        linked.prompt.do(forget, f"row {at}")
    assert set(kinds) == {OutOfMemory, TransferFailed}
    assert len(kinds) > 6
    wait_until(lambda: linked.prompt.do(picture).pins == 0)
    assert linked.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(linked.prompt, linked.decoder)


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("step", ["handle", "handled", "sent"])
def test_an_owner_without_memory_costs_the_link_at_most(linked: Pair, step: str) -> None:
    key = offer(linked, 1)
    linked.prompt.do(arm_memory_error, step)
    error = failure(linked.decoder.do, call, "pull_cache", key, Use("row"), 1)
    linked.prompt.do(disarm)
    if error is None:
        target, source = linked.decoder.do(show, "row"), linked.prompt.do(show, "row 1")
        same_bytes(target, moved(target, source, [(1, 0)]))
    wait_until(lambda: _pulled(linked), 20)
    bytes_move_both_ways(linked.prompt, linked.decoder)


def take_memory(world: World, free: int) -> None:
    world.memory["little"] = little_memory(free)
    world.memory["little"].__enter__()


def give_memory(world: World) -> None:
    world.memory.pop("little").__exit__(None, None, None)


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("side", ["prompt", "decoder"])
def test_a_link_without_address_space_fails_with_a_code_and_leaves_nothing_half_made(linked: Pair, side: str) -> None:
    prompt, decoder = linked.prompt, linked.decoder
    end: End = getattr(linked, side)
    peers = [info(1, prompt.port)]
    outcomes = []
    for free in (0, 1 << 20, 9 << 20, 33 << 20, 65 << 20, 512 << 20):
        assert decoder.do(unlink, peers) == SUCCESS
        wait_until(lambda: prompt.do(links) == {})
        end.do(take_memory, free)
        outcome = decoder.do(link, peers, 2_000)
        end.do(give_memory)
        outcomes.append(outcome)
        if outcome != SUCCESS:
            codes = {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_OUT_OF_MEMORY}
            assert outcome[0] in codes
            assert decoder.do(links) == {}
            wait_until(lambda: prompt.do(links) == {})
            assert decoder.do(link, peers) == SUCCESS
        wait_until(lambda: prompt.do(links) == {2: "ready"})
        pulls_well(linked, 1)
    assert outcomes[-1] == SUCCESS
    bytes_move_both_ways(prompt, decoder)


@pytest.mark.parametrize("linked", TRANSPORTS, indirect=True)
@pytest.mark.parametrize("side", ["prompt", "decoder"])
def test_pulls_without_address_space_succeed_or_fail_with_a_code(linked: Pair, side: str) -> None:
    end: End = getattr(linked, side)
    for free in (0, 64 << 10, 1 << 20):
        key = offer(linked, 1)
        end.do(take_memory, free)
        error = failure(pull_both, linked, key)
        end.do(give_memory)
        if error is None:
            compare(linked, 1)
        linked.prompt.do(forget, "row 1")
        pulls_well(linked, 2)
    bytes_move_both_ways(linked.prompt, linked.decoder)
