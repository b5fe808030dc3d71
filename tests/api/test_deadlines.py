"""Every public call against everything that can stall: typed and within its time, and nothing is broken after
(interface R6, R7): the link stays usable, no pin is left, no key is consumed.

What a call may wait for, and what ends the wait: a transfer for the peer's answer, ``sync_kv_timeout``; linking for the
listener and for this process's own other calls, its timeout; unlinking for running operations, for the peer's answer
and for a redial's attempt, its timeout; finalize for its own threads. Nothing else waits for a peer.

No time is asserted: a call that hangs is one whose end gives no answer at all (:class:`ChildEnd`).
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import pytest

from faults.gated import count_messages, releases, resolves, stopped
from faults.stalls import go_on, stall_there
from faults.strangers import Stranger
from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode, Placement
from llm_datadist._links.messages import Failed, Pong, frame
from llm_datadist.errors import DeadlineExceeded
from tests.support import linking
from tests.support.frozen import frozen
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.ends import End
    from tests.support.pairs import Pair
    from tests.support.world import World

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


STALLS = pytest.mark.parametrize("what", ["stopped process", "deaf control thread", "full socket"])


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
    while not link_.channel._backlog:
        link_.send(Failed(0, 0, "x" * 4000))  # answers no question: dropped when it is read


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
        forget(world, name)
        del world.caches[name]


@STALLS
def test_r06_r07_i12_every_call_ends_in_time_and_the_link_is_good_afterwards(shm_pair: Pair, what: str) -> None:
    shm_pair.start(rca=True, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    source = {"rows": prompt.do(make, "rows", ROWS, 0), "paged": prompt.do(make, "paged", PAGED, 1)}
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
    pair.start(rca=True, sync_kv_timeout=500)
    prompt, decoder = pair.prompt, pair.decoder
    theirs, ours = prompt.do(make, "rows", ROWS, 1), decoder.do(make, "rows", Spec(), 2)
    keys = prompt.do(picture).keys
    for step, method in (("deadline", "pull_cache"), ("write deadline", "push_cache")):
        (folder := tmp_path / method).mkdir()
        args, pairs = TRANSFERS[method]
        with stopped(decoder, step, folder, method, *args) as move, pytest.raises(DeadlineExceeded) as caught:
            move.finish()
        assert (caught.value.status_code, caught.value.phase) == (TIMEOUT, "copy")
        wait_until(lambda: prompt.do(picture).pins == 0)
        assert prompt.do(picture).keys == keys
        same_bytes(prompt.do(show, "rows"), theirs)
        same_bytes(decoder.do(show, "rows"), ours)
        decoder.do(call, method, *args)
        if method == "pull_cache":
            ours = moved(ours, theirs, pairs)
        else:
            theirs = moved(theirs, ours, pairs)
    same_bytes(prompt.do(show, "rows"), theirs)
    same_bytes(decoder.do(show, "rows"), ours)


def test_r06_a_peer_in_the_middle_of_a_frame_is_waited_for_no_longer(shm_pair: Pair) -> None:
    """It has begun to answer and stops inside: each call ends by itself, and goes well once the rest has come."""
    shm_pair.start(linked=False, sync_kv_timeout=BUDGET_MS, extra=PATIENT)
    prompt = shm_pair.prompt
    before = prompt.do(make, "rows", ROWS, 1)
    with Stranger(prompt.port) as stranger:
        stranger.link()
        whole = frame(Pong(1))
        stranger.say(whole[:5])
        for _ in range(2):
            times_out(prompt, "pull_cache", CacheKey(66, 1), Use("rows"), 1)
        assert prompt.do(unlink, [info(66, 1)], BUDGET_MS) == (TIMEOUT, [TIMEOUT])
        stranger.say(whole[5:])
        stranger.is_served()
        assert prompt.do(links) == {66: "ready"}
        same_bytes(prompt.do(show, "rows"), before)
