"""The awaited calls: what the blocking ones do, argument errors at once, cancellation that leaves memory safe
(interface R7); and every public call against everything that can stall: typed and within its time, and nothing is
broken after (interface R6, R7): the link stays usable, no pin is left, no key is consumed.

What a call may wait for, and what ends the wait: a transfer for the peer's answer, ``sync_kv_timeout``; linking for the
listener and for this process's own other calls, its timeout; unlinking for running operations, for the peer's answer
and for a redial's attempt, its timeout; finalize for its own threads. Nothing else waits for a peer.

No time is asserted: a call that hangs is one whose end gives no answer at all (:class:`ChildEnd`).
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from faults.gated import count_messages, releases, resolves, stopped
from faults.gates import Gate, shut
from faults.stalls import go_on, stall, stall_there
from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, Placement
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, NoneArgument, ParamError, StateError
from tests.support import linking, moves
from tests.support.ends import frozen
from tests.support.grants import in_child
from tests.support.kinds import Bytes, ChildEnd, End, Pair, World
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, links_of, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, in_time, make, moved, picture, same_bytes, show, wait_until
from tests.support.wire import messages

pytestmark = [
    pytest.mark.covers(
        "CacheManager: copy_blocks_async copy_cache_async pull_blocks_async pull_cache_async push_blocks_async",
        "CacheManager: push_cache_async swap_blocks_async",
        "LLMDataDist: link_clusters_async unlink_clusters_async",
    ),
    pytest.mark.gpu,
]

OK = LLMStatusCode.LLM_SUCCESS
PAGED = Spec(blocks=True)
SOURCE = Spec(blocks=True, blocks_key=BLOCKS)
BOUND_S = 20.0


def awaited(world: World, method: str, *args: Any, **kwargs: Any) -> Any:
    """Await a call of the manager; :class:`Use` arguments become caches of this end."""
    return asyncio.run(asyncio.wait_for(call(world, method, *args, **kwargs), BOUND_S))


@dataclass
class Scene:
    """Two ends in this process, the prompt's "kv" and the decoder's; nothing but the test ends a call that waits."""

    pair: Pair
    world: World
    peer: World
    source: Bytes
    before: Bytes

    def pull(self, blocks: dict[int, int]) -> Coroutine[Any, Any, None]:
        """Begin to pull blocks (source block -> destination block)."""
        return self.world.cm.pull_blocks_async(BLOCKS, self.world.caches["kv"], list(blocks), list(blocks.values()))

    def holds(self, blocks: dict[int, int]) -> None:
        """Compare every byte of the destination: these blocks have been pulled, and no other."""
        same_bytes(show(self.world, "kv"), moved(self.before, self.source, [(to, at) for at, to in blocks.items()]))

    def asked(self) -> None:
        """Return when a call waits for the peer's answer."""
        link = links_of(self.world).get(1)
        wait_until(lambda: link.requests.waiting > 0)


@pytest.fixture
def scene(local_pair: Pair) -> Scene:
    local_pair.start(sync_kv_timeout=600_000)
    world, peer = local_pair.decoder.world, local_pair.prompt.world  # type: ignore[attr-defined]
    return Scene(local_pair, world, peer, make(peer, "kv", SOURCE, 1), make(world, "kv", PAGED, 2))


def test_pulls_pushes_copies_and_swaps_are_awaited(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.start(rca=True)
    there = {"kv": prompt.do(make, "kv", SOURCE, 1), "row": prompt.do(make, "row", Spec(), 2)}
    here = {"kv": decoder.do(make, "kv", PAGED, 3), "row": decoder.do(make, "row", Spec(), 4)}
    here["host"] = decoder.do(make, "host", Spec(blocks=True, placement=Placement.HOST), 5)
    key = CacheKeyByIdAndIndex(1, prompt.do(moves.cache_id, "row"), 2)
    rows: list[tuple[str, tuple[Any, ...], dict[str, Bytes], dict[str, Bytes], list[tuple[int, int]]]] = [
        ("pull_blocks", (BLOCKS, Use("kv"), [1, 6], [0, 3]), here, there, [(0, 1), (3, 6)]),
        ("pull_cache", (key, Use("row"), 5), here, there, [(5, 2)]),
        ("copy_blocks", (Use("kv"), {1: [2, 4]}), here, here, [(2, 1), (4, 1)]),
        ("copy_cache", (Use("row"), Use("row"), 4, 1), here, here, [(4, 1)]),
        ("push_blocks", (BLOCKS, Use("kv"), [3, 7], [5, 2]), there, here, [(5, 3), (2, 7)]),
        ("push_cache", (key, Use("row"), 1), there, here, [(2, 1)]),
    ]
    for method, args, target, source, pairs in rows:
        name = "row" if method.endswith("cache") else "kv"
        decoder.do(awaited, f"{method}_async", *args)
        target[name] = moved(target[name], source[name], pairs)
    decoder.do(awaited, "swap_blocks_async", Use("kv"), Use("host"), {2: 7})
    here["host"] = moved(here["host"], here["kv"], [(7, 2)])
    for end, expected in ((prompt, there), (decoder, here)):
        for name, held in expected.items():
            same_bytes(end.do(show, name), held)


def test_i1_links_are_awaited_and_work_both_ways(local_pair: Pair) -> None:
    local_pair.start(linked=False)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    clusters = [info(1, local_pair.prompt.port)]
    assert asyncio.run(world.dd.link_clusters_async(clusters, 5000)) == (OK, [OK])
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)
    again = LLMStatusCode.LLM_ALREADY_LINK
    assert asyncio.run(world.dd.link_clusters_async(clusters, 5000)) == (again, [again])
    assert asyncio.run(world.dd.unlink_clusters_async(clusters, 5000)) == (OK, [OK])
    assert picture(world).links == ()
    for either in (world.dd.link_clusters_async, world.dd.unlink_clusters_async):
        with pytest.raises(ParamError, match="timeout"):
            _ = either(clusters, 0)
        with pytest.raises(TypeError, match="clusters"):
            _ = either([1])  # type: ignore[list-item]


def test_each_task_reads_the_error_of_its_own_status(local_pair: Pair) -> None:
    local_pair.start(linked=False)
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    ports = [linking.free_port() for _ in range(2)]

    async def fail() -> list[str]:
        both = asyncio.Barrier(2)  # both have failed before either of them asks

        async def reason(port: int) -> str:
            status, _ = await world.dd.link_clusters_async([info(1, port)], 5000)
            await both.wait()
            return str(status.error)

        return await asyncio.gather(*(reason(port) for port in ports))

    for port, told in zip(ports, asyncio.run(fail()), strict=True):
        assert f":{port}: cannot connect" in told


#: One of each: the checks are those of the blocking form.
BAD: list[tuple[str, tuple[Any, ...], type[Exception]]] = [
    ("pull_cache_async", (1, Use("row")), TypeError),
    ("pull_blocks_async", (BLOCKS, Use("kv"), [1], [1, 2]), ParamError),
    ("push_cache_async", (CacheKeyByIdAndIndex(1, 1), Use("row")), ParamError),
    ("push_blocks_async", (BLOCKS, Use("kv"), [1], [1]), ParamError),
    ("copy_cache_async", (None, Use("row")), NoneArgument),
    ("copy_blocks_async", (Use("row"), {1: [2]}), ParamError),
    ("swap_blocks_async", (Use("kv"), Use("kv"), None), NoneArgument),
]


def test_argument_errors_are_raised_at_once_and_nothing_happens_others_where_the_call_is_awaited(scene: Scene) -> None:
    make(scene.world, "row", Spec(), 3)

    def attempt() -> None:
        for method, args, kind in BAD:
            with pytest.raises(kind):
                call(scene.world, method, *args)  # not awaited: there is nothing to await

    moves.nothing_happens((scene.pair.decoder, scene.pair.prompt), ["kv", "row"], attempt)
    with pytest.raises(CacheNotFound):
        awaited(scene.world, "pull_blocks_async", BlocksCacheKey(1, 5), Use("kv"), [1], [1])


async def _cancelled(coroutine: Coroutine[Any, Any, None], when: Callable[[], None]) -> None:
    """Cancel the call when ``when`` returns, and wait for its end."""
    task = asyncio.ensure_future(coroutine)
    await asyncio.to_thread(when)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, BOUND_S)
    assert task.cancelled()


def test_r07_a_call_cancelled_before_a_thread_is_free_does_nothing_after_its_end_it_cannot_be(scene: Scene) -> None:
    async def cancel_one_that_queues() -> None:
        with stall(scene.world.dd, "registry"):
            cache = scene.world.caches["kv"]
            first = [asyncio.ensure_future(scene.world.cm.copy_blocks_async(cache, {1: [1]})) for _ in range(99)]
            queued = asyncio.ensure_future(scene.pull({1: 0}))
            await asyncio.sleep(0)
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued  # at once: every thread is taken
            threads = sum(thread.name.startswith("llm-datadist-async_") for thread in threading.enumerate())
            assert threads == 32
        await asyncio.gather(*first)
        scene.holds({})
        over = asyncio.ensure_future(scene.pull({1: 0}))
        await over
        assert not over.cancel()

    asyncio.run(asyncio.wait_for(cancel_one_that_queues(), BOUND_S))
    scene.holds({1: 0})


def test_r07_a_call_that_waits_for_the_peer_ends_long_before_its_time(scene: Scene) -> None:
    """Cancelled, or closed: then no loop is left to wait in, and the call ends by itself.

    Regression: a closed coroutine did not end its call, because only cancellation was looked at.
    """
    requests = links_of(scene.world).get(1).requests

    async def begun_and_closed() -> None:
        pull = scene.pull({1: 0})
        pull.send(None)
        await asyncio.to_thread(scene.asked)
        pull.close()
        await asyncio.to_thread(wait_until, lambda: requests.waiting == 0)

    with stall(scene.peer.dd, "control"):  # the peer does not answer
        asyncio.run(_cancelled(scene.pull({1: 0}), scene.asked))
        asyncio.run(asyncio.wait_for(begun_and_closed(), BOUND_S))
        scene.holds({})
    bytes_move_both_ways(scene.pair.prompt, scene.pair.decoder)
    scene.holds({})


@pytest.mark.parametrize("step", ["hold", "ask", "answer", "plan", "before copy", "after copy"])
def test_r07_once_cancelled_error_is_raised_nothing_writes_any_more(scene: Scene, tmp_path: Path, step: str) -> None:
    """The call stands at a step when it is cancelled, again and again; the error comes only when it has ended."""
    gate = Gate(tmp_path)

    async def impatient() -> None:
        task = asyncio.ensure_future(scene.pull({1: 0, 6: 3}))
        await asyncio.to_thread(gate.wait)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not task.done(), "it has not ended: its destination is not the caller's yet"
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await task

    with shut(scene.world.dd, step, tmp_path, peer=1):
        asyncio.run(asyncio.wait_for(impatient(), BOUND_S))
    complete = step == "after copy"  # the bytes had moved: cancelled all the same
    scene.holds({1: 0, 6: 3} if complete else {})
    same_bytes(make(scene.world, "other", PAGED, 7), show(scene.world, "other"))
    assert [link.state for link in picture(scene.world).links] == ["ready"]
    bytes_move_both_ways(scene.pair.prompt, scene.pair.decoder)
    scene.holds({1: 0, 6: 3} if complete else {})


@pytest.mark.parametrize("method", ["pull_blocks_async", "push_blocks_async"])
def test_r07_a_call_that_waits_for_bytes_on_lanes_ends_long_before_its_time(tcp_pair: Pair, method: str) -> None:
    """As often as it likes: that it had no time left says nothing about the data lanes.

    Regression: lanes, their dialling and digests did not look at a cancellation.
    """
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
    bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
    same_bytes(tcp_pair.decoder.do(show, "kv"), kept)
    assert [link.state for link in tcp_pair.decoder.do(picture).links] == ["ready"]


def _cancelled_on_the_way(world: World, method: str) -> None:
    """Cancel a call once a data lane has something to do."""

    def on_its_way() -> None:
        connections = links_of(world).get(1).connection.connections
        # A push that comes after a cancelled one waits until the owner has given that up.
        waits = any(each.recovery is not None and each.recovery.doubts_writes for each in connections)
        wait_until(lambda: waits or any(world.probe.loads(1)))

    moving = call(world, method, BLOCKS, Use("kv"), [1, 6], [0, 3])
    asyncio.run(_cancelled(moving, on_its_way))


def _lanes(world: World) -> int:
    return len(world.probe.loads(1))


def test_r21_finalize_ends_calls_that_are_awaited_and_later_ones_are_refused_at_once(scene: Scene) -> None:
    manager, cache = scene.world.cm, scene.world.caches["kv"]

    async def finalized_meanwhile() -> list[BaseException | None]:
        tasks = [asyncio.ensure_future(scene.pull({1: 0})) for _ in range(40)]
        await asyncio.to_thread(scene.asked)
        await asyncio.to_thread(scene.world.dd.finalize)
        return await asyncio.gather(*tasks, return_exceptions=True)

    with stall(scene.peer.dd, "control"):
        errors = asyncio.run(asyncio.wait_for(finalized_meanwhile(), BOUND_S))
    codes = {getattr(error, "status_code", error) for error in errors}
    assert codes <= {LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_ENGINE_FINALIZED}
    assert LLMStatusCode.LLM_ENGINE_FINALIZED in codes, "eight of forty waited for a thread"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("llm-datadist-async_")]
    with pytest.raises(StateError) as caught:
        _ = manager.copy_blocks_async(cache, {1: [2]})
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


def test_a_call_that_was_made_before_a_fork_is_refused_in_the_child(four: list[ChildEnd]) -> None:
    """Regression: a coroutine awaited in a forked child waited for ever, because its thread was the parent's."""
    forker = four.pop()
    forker.start("MIX", 1)
    forker.do(make, "kv", PAGED, 1)
    kind, text = forker.do(_await_in_a_fork)
    assert (kind, "fork" in text) == ("StateError", True), text
    forker.kill()  # a fork ends threads of other libraries, too


def _await_in_a_fork(world: World) -> tuple[str, str]:
    """Return what a forked child gets that awaits a call that was made before; its parent may."""
    awaited(world, "copy_blocks_async", Use("kv"), {0: [1]})  # there is a worker thread by now
    ahead = asyncio.wait_for(call(world, "copy_blocks_async", Use("kv"), {0: [2]}), BOUND_S)
    outcome = in_child(world, lambda _: asyncio.run(ahead))
    asyncio.run(ahead)
    return outcome


TIMEOUT, ALREADY = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_ALREADY_LINK
BUDGET_MS = 150
PATIENT = {"llm.PeerTimeout": "600"}  # the calls end by their own time, not because the peer counts as dead
ROWS, KEYED = Spec(keys=(CacheKey(1, 10),)), Spec(blocks=True, blocks_key=BLOCKS)

#: Every transfer: its arguments, and which (destination, source) rows it moves. Cache 1 is the prompt's "rows".
TRANSFERS: Final[dict[str, tuple[tuple[Any, ...], list[tuple[int, int]]]]] = {
    "pull_cache": ((CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 3), [(3, 0)]),
    "pull_blocks": ((BLOCKS, Use("paged"), [1, 6], [0, 3]), [(0, 1), (3, 6)]),
    "push_cache": ((CacheKeyByIdAndIndex(1, 1, 2), Use("rows"), 1), [(2, 1)]),
    "push_blocks": ((BLOCKS, Use("paged"), [5], [7]), [(7, 5)]),
}


def carried(method: str, theirs: Bytes, ours: Bytes) -> tuple[Bytes, Bytes]:
    """Return what the peer and the caller hold after a transfer."""
    pairs = TRANSFERS[method][1]
    if method.startswith("pull"):
        return theirs, moved(ours, theirs, pairs)
    return moved(theirs, ours, pairs), ours


@contextmanager
def stalled(pair: Pair, what: str) -> Iterator[None]:
    """The peer's process does nothing at all; what is sent to it waits here. Or only its control thread is deaf."""
    with ExitStack() as stalling:
        if what == "deaf control thread":
            pair.prompt.do(stall_there, "control")
            stalling.callback(pair.prompt.do, go_on)
        else:
            stalling.enter_context(frozen(pair.prompt))
        if what == "full socket":
            pair.decoder.do(fill_socket)
        yield


def fill_socket(world: World) -> None:
    link_ = linking.links_of(world).get(1)
    while not world.probe.unsent(1):
        link_.send(messages.Failed(0, 0, "x" * 4000))  # answers no question: dropped when it is read


def wait_for_answer(world: World) -> None:
    """Wait until the peer has worked off all that was said to it meanwhile."""
    link_ = linking.links_of(world).get(1)
    number = link_.ping()
    wait_until(lambda: link_.last_pong >= number, 30)


def times_out(end: End, method: str, *args: Any) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        end.do(call, method, *args)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert (error.status_code, error.phase, error.budget_ms, error.retryable) == (TIMEOUT, "resolve", BUDGET_MS, True)
    assert error.elapsed_ms >= BUDGET_MS
    assert [part for part in (method, f"{BUDGET_MS} ms") if part not in str(error)] == []
    assert "\n" not in str(error)


def every_local_call(world: World) -> None:
    """Make each call that needs no peer, and prove what it says with bytes."""
    specs = {
        "a": Spec(keys=(CacheKey(2, 99),)),
        "b": Spec(blocks=True),
        "host": Spec(placement=Placement.HOST, blocks=True),
        "r": Spec(memory="private"),
        "registered blocks": Spec(memory="private", blocks=True),
    }
    held = {name: make(world, name, spec, 50 + seed) for seed, (name, spec) in enumerate(specs.items())}
    call(world, "copy_cache", Use("r"), Use("a"), 4, 5)
    held["r"] = moved(held["r"], held["a"], [(4, 5)])
    call(world, "copy_blocks", Use("b"), {0: [6]})
    held["b"] = moved(held["b"], held["b"], [(6, 0)])
    call(world, "swap_blocks", Use("b"), Use("host"), {1: 2})
    held["host"] = moved(held["host"], held["b"], [(2, 1)])
    call(world, "remove_cache_key", CacheKey(2, 99))
    assert world.dd.explain(1).remote_cluster_id == 1
    for name, expected in held.items():
        same_bytes(show(world, name), expected)
        moves.forget(world, name)
        del world.caches[name]


@pytest.mark.parametrize("what", ["stopped process", "deaf control thread", "full socket"])
def test_r06_r07_i12_every_call_ends_in_time_and_the_link_is_good_afterwards(shm_pair: Pair, what: str) -> None:
    prompt, decoder = shm_pair.start(rca=True, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    source = {"rows": prompt.do(make, "rows", ROWS, 0), "paged": prompt.do(make, "paged", KEYED, 1)}
    target = {"rows": decoder.do(make, "rows", Spec(), 2), "paged": decoder.do(make, "paged", Spec(blocks=True), 3)}
    before, keys = decoder.do(picture), prompt.do(picture).keys
    prompt.do(count_messages)
    with stalled(shm_pair, what):
        for method, (args, _) in TRANSFERS.items():
            times_out(decoder, method, *args)
        decoder.do(every_local_call)
        assert decoder.do(picture).caches == before.caches
        assert decoder.do(link, [info(1, prompt.port)], BUDGET_MS) == (ALREADY, [ALREADY])
        assert decoder.do(link, [info(None, prompt.port)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
        assert decoder.do(unlink, [info(1, prompt.port)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
    for name in ("rows", "paged"):
        same_bytes(decoder.do(show, name), target[name])
        same_bytes(prompt.do(show, name), source[name])
    decoder.do(wait_for_answer)
    wait_until(lambda: linking.linked(prompt, decoder))
    # The peer answers late: the pins of those answers, of rows, are given back.
    wait_until(lambda: (prompt.do(resolves), prompt.do(releases)) == (4, 2))
    assert (prompt.do(picture).pins, prompt.do(picture).keys) == (0, keys)
    for method, (args, _) in TRANSFERS.items():
        name = args[1].name
        wait_until(partial(in_time, decoder, call, method, *args))
        source[name], target[name] = carried(method, source[name], target[name])
        same_bytes(decoder.do(show, name), target[name])
        same_bytes(prompt.do(show, name), source[name])
    wait_until(lambda: prompt.do(picture).pins == 0)
    # Parting: by a forced unlink, after which the link can be made again; by finalize.
    with stalled(shm_pair, what):
        assert decoder.do(unlink, [info(1)], BUDGET_MS, True) == SUCCESS
        assert decoder.do(links) == {}
        assert decoder.do(link, [info(1, prompt.port)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
    alone(prompt)
    shm_pair.link()
    bytes_move_both_ways(prompt, decoder)
    with stalled(shm_pair, what):
        decoder.do(linking.finalize)
    alone(prompt)


def test_r06_no_time_left_before_the_bytes_is_a_timeout_that_consumes_nothing(pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = pair.start(rca=True, sync_kv_timeout=500)
    theirs, ours = prompt.do(make, "rows", ROWS, 1), decoder.do(make, "rows", Spec(), 2)
    keys = prompt.do(picture).keys
    for step, method in (("deadline", "pull_cache"), ("write deadline", "push_cache")):
        (folder := tmp_path / method).mkdir()
        args, _ = TRANSFERS[method]
        with stopped(decoder, step, folder, method, *args) as move, pytest.raises(DeadlineExceeded) as caught:
            move.finish()
        assert (caught.value.status_code, caught.value.phase) == (TIMEOUT, "copy")
        wait_until(lambda: prompt.do(picture).pins == 0)
        assert prompt.do(picture).keys == keys
        same_bytes(prompt.do(show, "rows"), theirs)
        same_bytes(decoder.do(show, "rows"), ours)
        wait_until(lambda: in_time(decoder, call, method, *args), 60)  # noqa: B023 (called at once)
        theirs, ours = carried(method, theirs, ours)
    same_bytes(prompt.do(show, "rows"), theirs)
    same_bytes(decoder.do(show, "rows"), ours)


def test_r06_an_interrupt_between_the_answer_and_its_use_leaves_no_pin(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pin would last as long as the call's time: ten minutes.

    Regression: nobody took an answer that came between the last look and the interrupt.
    """
    channels = type(links_of(scene.world).get(1).channel)
    real: Any = channels.wait

    def interrupted(*args: object) -> None:
        real(*args)
        raise KeyboardInterrupt

    make(scene.peer, "rows", ROWS, 3)
    before = make(scene.world, "rows", Spec(), 4)
    with monkeypatch.context() as patch:
        patch.setattr(channels, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scene.world.cm.pull_cache(CacheKey(1, 10), scene.world.caches["rows"], 1)
    wait_until(lambda: picture(scene.peer).pins == 0)
    same_bytes(show(scene.world, "rows"), before)


def test_r06_a_peer_in_the_middle_of_a_frame_is_waited_for_no_longer(shm_pair: Pair) -> None:
    """It has begun to answer and stops inside: each call ends by itself, and goes well once the rest has come."""
    shm_pair.start(linked=False, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt = shm_pair.prompt
    before = prompt.do(make, "rows", ROWS, 1)
    with Stranger(prompt.port) as stranger:
        stranger.link()
        whole = messages.frame(messages.Pong(1))
        stranger.say(whole[:5])
        for _ in range(2):
            times_out(prompt, "pull_cache", CacheKey(66, 1), Use("rows"), 1)
        assert prompt.do(unlink, [info(66, 1)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
        stranger.say(whole[5:])
        stranger.is_served()
        assert prompt.do(links) == {66: "ready"}
        same_bytes(prompt.do(show, "rows"), before)
