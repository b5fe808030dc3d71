"""The awaited calls: what the blocking ones do, argument errors at once, cancellation that leaves memory safe
(interface R7)."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, NoneArgument, ParamError, StateError
from tests.faults.gates import Gate, shut
from tests.faults.stalls import stall
from tests.support.frozen import frozen
from tests.support.linking import bytes_move_both_ways
from tests.support.moves import (
    BLOCKS,
    Spec,
    Use,
    cache_id,
    make,
    moved,
    nothing_happens,
    picture,
    same_bytes,
    show,
    wait_until,
)
from tests.support.source import ROOT
from tests.support.world import cluster_info

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    from llm_datadist._transport.lanes import LaneGroup
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "CacheManager: copy_blocks_async copy_cache_async pull_blocks_async pull_cache_async push_blocks_async",
    "CacheManager: push_cache_async swap_blocks_async",
    "LLMDataDist: link_clusters_async unlink_clusters_async",
)

OK = LLMStatusCode.LLM_SUCCESS
PAGED = Spec(blocks=True)
SOURCE = Spec(blocks=True, blocks_key=BLOCKS)
BOUND_S = 20.0


def awaited(world: World, method: str, *args: Any, **kwargs: Any) -> Any:
    """Await a call of the manager; :class:`Use` arguments become caches of this end."""
    real = [world.caches[each.name] if isinstance(each, Use) else each for each in args]
    return asyncio.run(asyncio.wait_for(getattr(world.cm, method)(*real, **kwargs), BOUND_S))


# --- what they do ----------------------------------------------------------------------------------------------------


def test_pull_blocks_and_pull_cache_are_awaited(pair: Pair) -> None:
    pair.start()
    source, before = pair.prompt.do(make, "kv", SOURCE, 1), pair.decoder.do(make, "kv", PAGED, 2)
    pair.decoder.do(awaited, "pull_blocks_async", BLOCKS, Use("kv"), [1, 6], [0, 3])
    same_bytes(pair.decoder.do(show, "kv"), moved(before, source, [(0, 1), (3, 6)]))
    rows, into = pair.prompt.do(make, "row", Spec(), 3), pair.decoder.do(make, "row", Spec(), 4)
    key = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "row"), 2)
    pair.decoder.do(awaited, "pull_cache_async", key, Use("row"), 5)
    same_bytes(pair.decoder.do(show, "row"), moved(into, rows, [(5, 2)]))


def test_push_blocks_and_push_cache_are_awaited(pair: Pair) -> None:
    pair.start(rca=True)
    before, source = pair.prompt.do(make, "kv", SOURCE, 1), pair.decoder.do(make, "kv", PAGED, 2)
    pair.decoder.do(awaited, "push_blocks_async", BLOCKS, Use("kv"), [1, 6], [0, 3])
    same_bytes(pair.prompt.do(show, "kv"), moved(before, source, [(0, 1), (3, 6)]))
    into, rows = pair.prompt.do(make, "row", Spec(), 3), pair.decoder.do(make, "row", Spec(), 4)
    key = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "row"), 2)
    pair.decoder.do(awaited, "push_cache_async", key, Use("row"), 5)
    same_bytes(pair.prompt.do(show, "row"), moved(into, rows, [(2, 5)]))


def test_copies_and_swaps_are_awaited(end: LocalEnd) -> None:
    end.start("MIX", 1)
    device, host = end.do(make, "d", PAGED, 1), end.do(make, "h", Spec(blocks=True, placement=Placement.HOST), 2)
    rows = end.do(make, "r", Spec(), 3)
    end.do(awaited, "copy_blocks_async", Use("d"), {1: [2, 3]})
    device = moved(device, device, [(2, 1), (3, 1)])
    same_bytes(end.do(show, "d"), device)
    end.do(awaited, "swap_blocks_async", Use("d"), Use("h"), {2: 7})
    same_bytes(end.do(show, "h"), moved(host, device, [(7, 2)]))
    end.do(awaited, "copy_cache_async", Use("r"), Use("r"), 4, 1)
    same_bytes(end.do(show, "r"), moved(rows, rows, [(4, 1)]))


def test_links_are_awaited(local_pair: Pair) -> None:
    local_pair.start(linked=False)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    port = local_pair.prompt.port
    assert port is not None
    clusters = [cluster_info(1, port)]
    assert asyncio.run(world.dd.link_clusters_async(clusters, 5000)) == (OK, [OK])
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)
    again = LLMStatusCode.LLM_ALREADY_LINK
    assert asyncio.run(world.dd.link_clusters_async(clusters, 5000)) == (again, [again])
    assert asyncio.run(world.dd.unlink_clusters_async(clusters, 5000)) == (OK, [OK])
    assert local_pair.decoder.do(picture).links == ()
    for call in (world.dd.link_clusters_async, world.dd.unlink_clusters_async):
        with pytest.raises(ParamError, match="timeout"):
            _ = call(clusters, 0)
        with pytest.raises(TypeError, match="clusters"):
            _ = call([1])  # type: ignore[list-item]


def test_hundred_calls_at_once_use_a_bounded_number_of_threads(local_pair: Pair) -> None:
    local_pair.start()
    source, before = local_pair.prompt.do(make, "kv", SOURCE, 1), local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]

    async def all_at_once() -> int:
        calls = [world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [3], [5]) for _ in range(100)]
        await asyncio.gather(*calls)
        return sum(thread.name.startswith("llm-datadist-async_") for thread in threading.enumerate())

    assert 1 <= asyncio.run(all_at_once()) <= 32
    same_bytes(local_pair.decoder.do(show, "kv"), moved(before, source, [(5, 3)]))


# --- errors ----------------------------------------------------------------------------------------------------------

BAD: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    ("pull_cache_async", (1, Use("row")), TypeError),
    ("pull_cache_async", (None, Use("row")), NoneArgument),
    ("pull_cache_async", (CacheKeyByIdAndIndex(1, 1), Use("row"), -1), ParamError),
    ("pull_cache_async", (CacheKeyByIdAndIndex(1, 1), Use("kv")), ParamError),
    ("pull_blocks_async", (BLOCKS, Use("kv"), [1], [1, 2]), ParamError),
    ("pull_blocks_async", (BLOCKS, Use("kv"), ["1"], [1]), TypeError),
    ("push_cache_async", (CacheKeyByIdAndIndex(1, 1), Use("row")), ParamError),
    ("push_blocks_async", (BLOCKS, Use("kv"), [1], [1]), ParamError),
    ("copy_cache_async", (None, Use("row")), NoneArgument),
    ("copy_blocks_async", (Use("row"), {1: [2]}), ParamError),
    ("swap_blocks_async", (Use("kv"), Use("kv"), None), NoneArgument),
]


@pytest.mark.parametrize(("method", "args", "kind"), BAD, ids=lambda value: value if isinstance(value, str) else "")
def test_argument_errors_are_raised_at_once_and_nothing_happens(
    local_pair: Pair, method: str, args: tuple[Any, ...], kind: type[Exception]
) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    local_pair.decoder.do(make, "kv", PAGED, 2)
    local_pair.decoder.do(make, "row", Spec(), 3)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    real = [world.caches[each.name] if isinstance(each, Use) else each for each in args]

    def attempt() -> None:
        with pytest.raises(kind):
            getattr(world.cm, method)(*real)  # not awaited: there is nothing to await

    nothing_happens((local_pair.decoder, local_pair.prompt), ["kv", "row"], attempt)


def test_errors_of_the_call_are_raised_where_it_is_awaited(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.decoder.do(make, "kv", PAGED, 2)
    with pytest.raises(CacheNotFound):
        local_pair.decoder.do(awaited, "pull_blocks_async", BlocksCacheKey(1, 5), Use("kv"), [1], [1])


def test_r21_after_finalize_they_are_refused_at_once(end: LocalEnd) -> None:
    end.start("MIX", 1)
    end.do(make, "kv", PAGED, 1)
    manager, cache = end.world.cm, end.world.caches["kv"]
    end.world.dd.finalize()
    with pytest.raises(StateError) as caught:
        _ = manager.copy_blocks_async(cache, {1: [2]})
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


# --- cancellation ----------------------------------------------------------------------------------------------------


async def _cancelled(coroutine: Coroutine[Any, Any, None], when: Callable[[], None], then: Callable[[], None]) -> None:
    """Cancel the call when ``when`` returns, do ``then`` once it has been told, and wait for its end."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(when)
    task.cancel()
    await asyncio.sleep(0)
    await asyncio.to_thread(then)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()


def test_r07_a_call_that_is_cancelled_before_it_begins_does_nothing(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    before = local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]

    async def cancel_one_that_queues() -> None:
        with stall(world.dd, "registry"):
            first = [asyncio.ensure_future(world.cm.copy_blocks_async(world.caches["kv"], {1: [1]})) for _ in range(32)]
            queued = asyncio.ensure_future(world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0]))
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued  # at once: every thread is taken
        await asyncio.gather(*first)

    asyncio.run(asyncio.wait_for(cancel_one_that_queues(), BOUND_S))
    same_bytes(local_pair.decoder.do(show, "kv"), before)


def test_r07_a_call_that_waits_for_the_peer_ends_long_before_its_time(local_pair: Pair) -> None:
    local_pair.start(sync_kv_timeout=600_000)  # nothing but the cancellation ends it
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    before = local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    peer: World = local_pair.prompt.world  # type: ignore[attr-defined]
    pull = world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0])
    with stall(peer.dd, "control"):  # the peer does not answer
        asyncio.run(_cancelled(pull, lambda: _asked(world), lambda: None))
        same_bytes(local_pair.decoder.do(show, "kv"), before)
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)


def _asked(world: World) -> None:
    """Return when somebody waits for the peer's answer."""
    link = world.dd._require_engine("test").links.get(1)
    gate = threading.Event()
    for _ in range(10_000):
        if link.requests.waiters:
            return
        gate.wait(0.001)
    raise AssertionError("nobody asked the peer")


@pytest.mark.parametrize("step", ["hold", "ask", "answer", "plan", "before copy", "after copy"])
def test_r07_once_cancelled_error_is_raised_nothing_writes_any_more(
    local_pair: Pair, tmp_path: Path, step: str
) -> None:
    """The call stands at a step when it is cancelled; the error comes only after it has gone on to its end."""
    local_pair.start()
    source, before = local_pair.prompt.do(make, "kv", SOURCE, 1), local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    gate = Gate(tmp_path)
    with shut(world.dd, step, tmp_path, peer=1):
        pull = world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1, 6], [0, 3])
        asyncio.run(_cancelled(pull, gate.wait, gate.open))
    after = local_pair.decoder.do(show, "kv")
    complete = step == "after copy"  # the bytes had moved: cancelled all the same
    same_bytes(after, moved(before, source, [(0, 1), (3, 6)]) if complete else before)
    same_bytes(local_pair.decoder.do(make, "other", PAGED, 7), local_pair.decoder.do(show, "other"))
    same_bytes(local_pair.decoder.do(show, "kv"), after)
    assert [link.state for link in local_pair.decoder.do(picture).links] == ["ready"]
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)


def test_r07_cancelled_twice_it_still_waits_for_the_end(local_pair: Pair, tmp_path: Path) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    before = local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    gate = Gate(tmp_path)

    async def impatient() -> None:
        task = asyncio.ensure_future(world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0]))
        await asyncio.to_thread(gate.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done(), "the copy has not ended: its destination is not the caller's yet"
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task

    with shut(world.dd, "before copy", tmp_path, peer=1):
        asyncio.run(asyncio.wait_for(impatient(), BOUND_S))
    same_bytes(local_pair.decoder.do(show, "kv"), before)


@pytest.mark.parametrize("method", ["pull_blocks_async", "push_blocks_async"])
def test_r07_a_call_that_waits_for_bytes_over_tcp_ends_long_before_its_time(tcp_pair: Pair, method: str) -> None:
    """As often as it likes: that it had no time left says nothing about the data lanes."""
    ends = tcp_pair.prompt, tcp_pair.decoder
    tcp_pair.start(rca=True, sync_kv_timeout=600_000, extra={"llm.PeerTimeout": "600"})
    source, before = tcp_pair.prompt.do(make, "kv", SOURCE, 1), tcp_pair.decoder.do(make, "kv", PAGED, 2)
    for each in ("pull_blocks_async", "push_blocks_async"):  # afterwards nothing needs an answer but the bytes
        tcp_pair.decoder.do(awaited, each, BLOCKS, Use("kv"), [2], [5])
    lanes, kept = tcp_pair.decoder.do(_lanes), moved(before, source, [(5, 2)])
    with frozen(tcp_pair.prompt):
        for _ in range(3):
            tcp_pair.decoder.do(_cancelled_on_the_way, method)
            same_bytes(tcp_pair.decoder.do(show, "kv"), kept)
        if method == "pull_blocks_async":
            assert tcp_pair.decoder.do(_lanes) == lanes
    bytes_move_both_ways(*ends)
    same_bytes(tcp_pair.decoder.do(show, "kv"), kept)
    assert [link.state for link in tcp_pair.decoder.do(picture).links] == ["ready"]


def _cancelled_on_the_way(world: World, method: str) -> None:
    """Cancel a call once a data lane has something to do."""

    def on_its_way() -> None:
        wait_until(lambda: any(any(group._loads.values()) for group in _groups(world)))

    call = getattr(world.cm, method)(BLOCKS, world.caches["kv"], [1, 6], [0, 3])
    asyncio.run(_cancelled(call, on_its_way, lambda: None))


def _groups(world: World) -> list[LaneGroup]:
    return list(world.dd._require_engine("test")._lanes._groups.values())


def _lanes(world: World) -> int:
    return len(_groups(world))


def test_a_call_that_has_ended_is_not_cancelled_any_more(local_pair: Pair) -> None:
    local_pair.start()
    source, before = local_pair.prompt.do(make, "kv", SOURCE, 1), local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]

    async def too_late() -> None:
        task = asyncio.ensure_future(world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0]))
        await task
        assert not task.cancel()

    asyncio.run(too_late())
    same_bytes(local_pair.decoder.do(show, "kv"), moved(before, source, [(0, 1)]))


def test_finalize_ends_calls_that_are_awaited(local_pair: Pair) -> None:
    local_pair.start(sync_kv_timeout=600_000)
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    peer: World = local_pair.prompt.world  # type: ignore[attr-defined]

    async def finalized_meanwhile() -> list[BaseException | None]:
        calls = [world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0]) for _ in range(40)]
        tasks = [asyncio.ensure_future(call) for call in calls]
        await asyncio.to_thread(_asked, world)
        await asyncio.to_thread(world.dd.finalize)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with stall(peer.dd, "control"):
        errors = asyncio.run(asyncio.wait_for(finalized_meanwhile(), BOUND_S))
    codes = {getattr(error, "status_code", error) for error in errors}
    assert codes <= {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_ENGINE_FINALIZED}
    assert LLMStatusCode.LLM_ENGINE_FINALIZED in codes, "eight of forty waited for a thread"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llm-datadist-async_")]


def test_r07_a_coroutine_that_is_closed_tells_its_call_to_end(local_pair: Pair) -> None:
    """No loop is left to wait in: the call ends by itself, long before its time."""
    local_pair.start(sync_kv_timeout=600_000)
    local_pair.prompt.do(make, "kv", SOURCE, 1)
    before = local_pair.decoder.do(make, "kv", PAGED, 2)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    peer: World = local_pair.prompt.world  # type: ignore[attr-defined]
    waiters = world.dd._require_engine("test").links.get(1).requests.waiters

    async def begun_and_closed() -> None:
        pull = world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], [1], [0])
        pull.send(None)
        await asyncio.to_thread(_asked, world)
        pull.close()
        await asyncio.to_thread(wait_until, lambda: not waiters)

    with stall(peer.dd, "control"):
        asyncio.run(asyncio.wait_for(begun_and_closed(), BOUND_S))
    same_bytes(local_pair.decoder.do(show, "kv"), before)
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)


_FORK = """
import asyncio, os
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole
from llm_datadist.errors import StateError
from tests.support.world import make_config

dd = LLMDataDist(LLMRole.MIX, 1)
dd.init(make_config())
cache = dd.cache_manager.allocate_blocks_cache(CacheDesc(2, [4, 64], DataType.DT_UINT8))

async def bounded(call):
    await asyncio.wait_for(call, 20)

asyncio.run(bounded(dd.cache_manager.copy_blocks_async(cache, {0: [1]})))  # there is a worker thread by now
ahead = bounded(dd.cache_manager.copy_blocks_async(cache, {0: [2]}))
child = os.fork()
if child == 0:
    try:
        asyncio.run(ahead)
    except StateError as error:
        os._exit(0 if "fork" in str(error) else 4)
    os._exit(3)
asyncio.run(ahead)
dd.finalize()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_call_that_was_made_before_a_fork_is_refused_in_the_child() -> None:
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", "-c", _FORK]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=env)
    assert (done.returncode, done.stderr) == (0, "")
