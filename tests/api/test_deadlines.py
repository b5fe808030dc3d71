"""Every public call against everything that can stall: typed and within its time, and nothing is broken after
(interface R6, R7): the link stays usable, no pin is left, no key is consumed.

What a call may wait for, and what ends the wait: a transfer for the peer's answer, ``sync_kv_timeout``; linking for the
listener and for this process's own other calls, its timeout; unlinking for running operations, for the peer's answer
and for a redial's attempt, its timeout; finalize for its own threads. Nothing else waits for a peer.

No time is asserted: a call that hangs is one whose end gives no answer at all (:class:`ChildEnd`).
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, Placement
from llm_datadist._cache.registry import Namespace
from llm_datadist._links.messages import Failed, Ping, Pong, Resolve, Resolved, frame
from llm_datadist.errors import DeadlineExceeded
from tests.support.frozen import frozen
from tests.support.gates import count_messages, releases, resolves, stopped
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.strangers import Stranger

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.moves import Bytes
    from tests.support.world import World

    Stall = Callable[[Pair, Path], Any]

TIMEOUT, ALREADY = LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_ALREADY_LINK
BUDGET_MS = 150
PATIENT = {"llm.PeerTimeout": "600"}  # the calls end by their own time, not because the peer counts as dead
KEY = CacheKey(1, 10)
ROWS, PAGED = Spec(keys=(KEY,)), Spec(blocks=True, blocks_key=BLOCKS)

#: Every transfer: its arguments, and which (destination, source) rows it moves. Cache 1 is the prompt's "rows".
TRANSFERS: Final[dict[str, tuple[tuple[Any, ...], list[tuple[int, int]]]]] = {
    "pull_cache": ((CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 3), [(3, 0)]),
    "pull_blocks": ((BLOCKS, Use("paged"), [1, 6], [0, 3]), [(0, 1), (3, 6)]),
    "push_cache": ((CacheKeyByIdAndIndex(1, 1, 2), Use("rows"), 1), [(2, 1)]),
    "push_blocks": ((BLOCKS, Use("paged"), [5], [7]), [(7, 5)]),
}


# --- what can stall ---------------------------------------------------------------------------------------------------


@contextmanager
def stopped_process(pair: Pair, folder: Path) -> Iterator[None]:
    """The peer's process does nothing at all."""
    with frozen(pair.prompt):
        yield


@contextmanager
def deaf_control_thread(pair: Pair, folder: Path) -> Iterator[None]:
    """The peer runs, but its control thread serves no link."""
    pair.prompt.do(stall_control, folder)
    wait_until((folder / "stalled").exists)
    try:
        yield
    finally:
        (folder / "go on").touch()


def stall_control(world: World, folder: Path) -> None:
    assert world.dd._engine is not None

    def stall() -> None:
        (folder / "stalled").touch()
        wait_until((folder / "go on").exists, 60)

    world.dd._engine._control.post(stall)


@contextmanager
def full_socket(pair: Pair, folder: Path) -> Iterator[None]:
    """The peer reads nothing, and its socket holds no more: what is sent waits here."""
    with stopped_process(pair, folder):
        pair.decoder.do(fill_socket, 1)
        yield


def fill_socket(world: World, peer: int) -> None:
    assert world.dd._engine is not None
    link_ = world.dd._engine.links.get(peer)
    assert link_.channel is not None
    while not link_.channel._backlog:
        link_.send(Failed(0, 0, "x" * 4000))  # answers no question: dropped when it is read


def wait_for_answer(world: World, peer: int) -> None:
    """Wait until the peer has worked off all that was said to it meanwhile."""
    assert world.dd._engine is not None
    link_ = world.dd._engine.links.get(peer)
    number = link_.ping()
    wait_until(lambda: link_.last_pong >= number, 30)


STALLS: Final[dict[str, Stall]] = {
    "stopped process": stopped_process,
    "deaf control thread": deaf_control_thread,
    "full socket": full_socket,
}


# --- every call -------------------------------------------------------------------------------------------------------


def both_kinds(pair: Pair) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    specs = {"rows": ROWS, "paged": PAGED}, {"rows": Spec(), "paged": Spec(blocks=True)}
    ends = (pair.prompt, pair.decoder)
    source, target = (
        {name: end.do(make, name, spec, seed) for seed, (name, spec) in enumerate(mine.items())}
        for end, mine in zip(ends, specs, strict=True)
    )
    return source, target


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
    keyed, paged = Spec(keys=(CacheKey(2, 99),)), Spec(blocks=True)
    a, b = make(world, "a", keyed, 50), make(world, "b", paged, 51)
    h = make(world, "h", Spec(placement=Placement.HOST, blocks=True), 52)
    r = make(world, "r", Spec(memory="private"), 53)
    make(world, "rb", Spec(memory="private", blocks=True), 54)
    call(world, "copy_cache", Use("r"), Use("a"), 4, 5)
    same_bytes(show(world, "r"), moved(r, a, [(4, 5)]))
    call(world, "copy_blocks", Use("b"), {0: [6]})
    same_bytes(show(world, "b"), moved(b, b, [(6, 0)]))
    call(world, "swap_blocks", Use("b"), Use("h"), {1: 2})
    same_bytes(show(world, "h"), moved(h, b, [(2, 1)]))
    call(world, "remove_cache_key", CacheKey(2, 99))
    world.dd.check_integrity()
    assert world.dd.explain(1).remote_cluster_id == 1
    for name in ("a", "b", "h", "r", "rb"):
        forget(world, name)
        del world.caches[name]


@pytest.mark.parametrize("stall", STALLS)
def test_r06_r07_i12_every_call_ends_in_time_and_the_link_is_good_afterwards(
    shm_pair: Pair, tmp_path: Path, stall: str
) -> None:
    shm_pair.start(rca=True, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    source, target = both_kinds(shm_pair)
    before, keys = decoder.do(picture), prompt.do(picture).keys
    prompt.do(count_messages)
    with STALLS[stall](shm_pair, tmp_path):
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
    decoder.do(wait_for_answer, 1)
    wait_until(lambda: (prompt.do(links), decoder.do(links)) == ({2: "ready"}, {1: "ready"}))
    # The peer answers late: the pins of those answers, of rows, are given back.
    wait_until(lambda: (prompt.do(resolves), prompt.do(releases)) == (4, 2))
    assert (prompt.do(picture).pins, prompt.do(picture).keys) == (0, keys)
    for method, (args, pairs) in TRANSFERS.items():
        name = args[1].name
        decoder.do(call, method, *args)
        if method.startswith("pull"):
            target[name] = moved(target[name], source[name], pairs)
        else:
            source[name] = moved(source[name], target[name], pairs)
        same_bytes(decoder.do(show, name), target[name])
        same_bytes(prompt.do(show, name), source[name])
    wait_until(lambda: prompt.do(picture).pins == 0)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS


def test_r06_of_a_stopped_process_only_what_was_resolved_is_pulled_and_no_key_is_consumed(shm_pair: Pair) -> None:
    shm_pair.start(sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    source, target = both_kinds(shm_pair)
    decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [0], [0])
    before = prompt.do(picture)
    prompt.do(count_messages)
    with frozen(prompt):
        decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [1, 2], [5, 6])  # one-sided: no message
        same_bytes(decoder.do(show, "paged"), moved(target["paged"], source["paged"], [(0, 0), (5, 1), (6, 2)]))
        times_out(decoder, "pull_cache", KEY, Use("rows"))
        same_bytes(decoder.do(show, "rows"), target["rows"])
    wait_until(lambda: (prompt.do(resolves), prompt.do(releases)) == (1, 1))
    assert (prompt.do(picture).pins, prompt.do(picture).keys) == (0, before.keys)
    decoder.do(call, "pull_cache", KEY, Use("rows"), 3)
    same_bytes(decoder.do(show, "rows"), moved(target["rows"], source["rows"], [(3, 0)]))
    wait_until(lambda: [key.key for key in prompt.do(picture).keys] == ["(2, 0, 0)"])


def test_r06_no_time_left_before_the_bytes_is_a_timeout_in_copy_that_consumes_nothing(
    pair: Pair, tmp_path: Path
) -> None:
    pair.start(rca=True, sync_kv_timeout=500)
    rows = {"prompt": pair.prompt.do(make, "rows", ROWS, 1), "decoder": pair.decoder.do(make, "rows", Spec(), 2)}
    keys = pair.prompt.do(picture).keys
    for number, (step, method) in enumerate((("deadline", "pull_cache"), ("write deadline", "push_cache"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        args, pairs = TRANSFERS[method]
        with stopped(pair.decoder, step, folder, method, *args) as move, pytest.raises(DeadlineExceeded) as caught:
            move.finish()
        assert (caught.value.status_code, caught.value.phase) == (TIMEOUT, "copy")
        wait_until(lambda: pair.prompt.do(picture).pins == 0)
        assert pair.prompt.do(picture).keys == keys
        for end, name in ((pair.prompt, "prompt"), (pair.decoder, "decoder")):
            same_bytes(end.do(show, "rows"), rows[name])
        pair.decoder.do(call, method, *args)
        to, from_ = ("decoder", "prompt") if method == "pull_cache" else ("prompt", "decoder")
        rows[to] = moved(rows[to], rows[from_], pairs)
        same_bytes((pair.decoder if to == "decoder" else pair.prompt).do(show, "rows"), rows[to])


@pytest.mark.parametrize("stall", STALLS)
def test_r06_parting_from_a_peer_that_stalls_ends_in_time(shm_pair: Pair, tmp_path: Path, stall: str) -> None:
    """By a forced unlink, after which the link can be made again; by finalize."""
    shm_pair.start(sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    (later := tmp_path / "later").mkdir()
    with STALLS[stall](shm_pair, tmp_path):
        assert decoder.do(unlink, [info(1)], BUDGET_MS, True) == SUCCESS
        assert decoder.do(links) == {}
        assert decoder.do(link, [info(1, prompt.port)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
    alone(prompt)
    shm_pair.link()
    bytes_move_both_ways(prompt, decoder)
    with STALLS[stall](shm_pair, later):
        decoder.do(finalize)
    alone(prompt)


def finalize(world: World) -> None:
    world.dd.finalize()


def test_r06_a_peer_in_the_middle_of_a_frame_or_of_a_pull_is_waited_for_no_longer(shm_pair: Pair) -> None:
    """It has begun to answer and stops inside: each call ends by itself, and goes well once the rest has come. It holds
    a pin and stops: its source is given back, removed and replaced all the same."""
    shm_pair.start(linked=False, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt = shm_pair.prompt
    before = prompt.do(make, "rows", ROWS, 1)
    assert prompt.port is not None
    with Stranger(prompt.port) as stranger:
        stranger.link()
        whole = frame(Pong(1))
        stranger.say(whole[:5])
        for _ in range(2):
            times_out(prompt, "pull_cache", CacheKey(66, 1), Use("rows"), 1)
        assert prompt.do(unlink, [info(66, 1)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
        stranger.say(whole[5:], Ping(77))
        while stranger.hear(Pong).id != 77:
            pass
        assert prompt.do(links) == {66: "ready"}
        same_bytes(prompt.do(show, "rows"), before)
        stranger.say(Resolve(1, False, (int(Namespace.REQUEST), KEY.req_id, KEY.model_id), 0, 0, 600_000))
        stranger.hear(Resolved)
        assert prompt.do(picture).pins == 1
        prompt.do(call, "deallocate_cache", Use("rows"))
        prompt.do(call, "remove_cache_key", KEY)
        prompt.do(make, "again", ROWS, 2)
        prompt.do(call, "deallocate_cache", Use("again"))
        prompt.do(call, "remove_cache_key", KEY)
        # The memory of the first waits for its pin, and for nothing longer.
        assert prompt.do(picture).caches.draining == 1
    wait_until(lambda: prompt.do(picture).caches.draining == 0)
    assert prompt.do(picture).pins == 0
