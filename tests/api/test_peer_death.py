"""Peers that are killed, frozen, restarted or finalized, and what their survivors see (interface R22, I3): how a
death is noticed, also where the sockets do not tell, and what must not pass for one."""

from __future__ import annotations

import ctypes
import os
import re
import signal
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound, NotLinked, PeerLost
from tests.support.family import Family, one_family
from tests.support.frozen import freeze
from tests.support.gates import stopped
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    finalize,
    info,
    link,
    link_number,
    links,
    redials,
    result_there,
    runs_there,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World, fill, make_config, residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import ChildEnd, End
    from tests.support.moves import Bytes

pytestmark = pytest.mark.covers("llm.ShmSocketDir", "llm.PeerTimeout")

KEY = CacheKey(1, 10)
ROWS, PAGED = Spec(keys=(KEY,)), Spec(blocks=True, blocks_key=BLOCKS)
LONG_MS = 600_000  # what ends earlier than that was not ended by the call's own time
PATIENT = {"llm.PeerTimeout": "600"}  # ... nor by missed beats
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
KILLED = "the connection broke|closed the connection|its process has ended"  # whichever the kernel shows first


@pytest.fixture
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    with one_family(getattr(request, "param", "shm")) as family:
        yield family


def waiting(world: World, peer: int) -> int:
    """Return how many calls of this end wait for an answer of the peer."""
    assert world.dd._engine is not None
    return len(world.dd._engine.links.get(peer).requests.waiters)


def pull_in_vain(decoder: End, prompt: ChildEnd) -> None:
    """Freeze the prompt, and begin two pulls that wait for its answer."""
    freeze(prompt)
    decoder.do(begin_there, "row pull", call, "pull_cache", KEY, Use("rows"), 5)
    decoder.do(begin_there, "paged pull", call, "pull_blocks", BLOCKS, Use("paged"), [1, 6], [0, 3])
    wait_until(lambda: decoder.do(waiting, 1) == 2)


def both_pulls_lost(decoder: End, prompt: ChildEnd, reason: str) -> None:
    """Both end with PeerLost, which says which peer, where and why."""
    for name in ("row pull", "paged pull"):
        error = decoder.do(result_there, name)
        assert isinstance(error, PeerLost), error
        assert error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR
        assert (error.peer, error.phase) == (1, "resolve")
        for part in (rf"cluster 1 \(pid {prompt.pid} ", "phase resolve", reason):
            assert re.search(part, str(error)), error


def not_linked(end: End, peer: int = 1) -> None:
    """Every further call says at once that there is no link."""
    rows, paged = (CacheKey(peer, 10), Use("rows"), 5), (BlocksCacheKey(peer, 0), Use("paged"), [1], [0])
    for method, args in (("pull_cache", rows), ("pull_blocks", paged)):
        with pytest.raises(NotLinked) as caught:
            end.do(call, method, *args)
        assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
        assert f"cluster {peer}" in str(caught.value)


def caches(prompt: End, decoder: End) -> tuple[list[Bytes], list[Bytes]]:
    """Make a published and an addressed cache of either kind; return their bytes, rows first."""
    source = [prompt.do(make, "rows", ROWS, 1), prompt.do(make, "paged", PAGED, 2)]
    return source, [decoder.do(make, "rows", Spec(), 3), decoder.do(make, "paged", Spec(blocks=True), 4)]


def warmed_up(prompt: End, decoder: End) -> None:
    """Link and part once: what a process makes at its first link and keeps is there from now on."""
    ends = (prompt, decoder)
    sockets = [end.do(residue_of)["fds"]["socket"] for end in ends]
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    alone(*ends)
    wait_until(lambda: [end.do(residue_of)["fds"]["socket"] for end in ends] == sockets)  # data lanes close a bit later


def unchanged(end: End, was: list[Bytes]) -> None:
    for name, old in zip(("rows", "paged"), was, strict=True):
        same_bytes(end.do(show, name), old)


def pulls_arrive(prompt: End, decoder: End, source: list[Bytes], target: list[Bytes]) -> None:
    """Both pulls move the right bytes, and the key is consumed."""
    decoder.do(call, "pull_cache", KEY, Use("rows"), 5)
    decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [1, 6], [0, 3])
    unchanged(decoder, [moved(target[0], source[0], [(5, 0)]), moved(target[1], source[1], [(0, 1), (3, 6)])])
    unchanged(prompt, source)
    wait_until(lambda: prompt.do(picture).pins == 0 and len(prompt.do(picture).keys) == 1)
    with pytest.raises(CacheNotFound):
        decoder.do(call, "pull_cache", KEY, Use("rows"), 5)


BOTH_TRANSPORTS = pytest.mark.parametrize("family", ["shm", "tcp"], indirect=True)


def keep_pulling(world: World, peer: int, stop: Path, rows: Bytes, paged: Bytes) -> int:
    """Pull a row and two blocks again and again, and compare every byte each time; return how often."""
    count = 0
    while not stop.exists():
        before = [fill(world.caches[name], 2 * count + i) for i, name in enumerate(("other rows", "other paged"))]
        to, from_ = count % 8, 3 * count % 8
        call(world, "pull_cache", CacheKeyByIdAndIndex(peer, 1, from_), Use("other rows"), to)  # consumes no key
        call(world, "pull_blocks", BlocksCacheKey(peer, 0), Use("other paged"), [from_, 7 - from_], [to, 7 - to])
        same_bytes(show(world, "other rows"), moved(before[0], rows, [(to, from_)]))
        same_bytes(show(world, "other paged"), moved(before[1], paged, [(to, from_), (7 - to, 7 - from_)]))
        world.memory["pulls"] = count = count + 1
    return count


def pulls(world: World) -> int:
    """Return how often so far; raise what ended it."""
    if not runs_there(world, "puller"):
        world.memory["puller"].result()
    return int(world.memory.get("pulls", 0))


def many_more_pulls(end: End) -> None:
    count = end.do(pulls)
    wait_until(lambda: end.do(pulls) > count + 20)


# --- killed -----------------------------------------------------------------------------------------------------------


@BOTH_TRANSPORTS
def test_r22_i15_pulls_that_wait_for_a_killed_prompt_fail_leave_nothing_and_hold_up_no_other_link(
    family: Family, tmp_path: Path
) -> None:
    prompt, third = family.born("PROMPT", 1), family.born("PROMPT", 3)
    decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS, extra=PATIENT)
    _, target = caches(prompt, decoder)
    rows = third.do(make, "rows", Spec(), 5)
    paged = third.do(make, "paged", Spec(blocks=True, blocks_key=BlocksCacheKey(3, 0)), 6)
    decoder.do(make, "other rows", Spec(), 7)
    decoder.do(make, "other paged", Spec(blocks=True), 8)
    warmed_up(prompt, decoder)
    assert decoder.do(link, [info(3, third.port)]) == SUCCESS
    decoder.do(begin_there, "puller", keep_pulling, 3, tmp_path / "stop", rows, paged)
    many_more_pulls(decoder)
    tables, held = decoder.do(picture), decoder.do(residue_of)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pull_in_vain(decoder, prompt)
    many_more_pulls(decoder)
    family.kill(prompt)
    both_pulls_lost(decoder, prompt, KILLED)
    not_linked(decoder)
    many_more_pulls(decoder)
    if family.transport == "tcp":
        # No descriptor of its process tells that it will not come back: it is dialled again until it is unlinked.
        assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
        wait_until(lambda: "llm-datadist-redial" not in decoder.do(residue_of)["threads"])
    unchanged(decoder, target)
    # What was mapped of the dead is given back at once, not at finalize. The worker that mends lanes stays.
    kept = ("fds", "memfd mappings") if family.transport == "tcp" else tuple(held)
    wait_until(
        lambda: [held[kind] for kind in kept] == [now[kind] for now in [decoder.do(residue_of)] for kind in kept]
    )
    (tmp_path / "stop").touch()
    total = decoder.do(result_there, "puller")
    assert isinstance(total, int), total
    after = decoder.do(picture)
    assert replace(after, links=()) == replace(tables, links=())
    (left,) = after.links
    assert (left.remote_cluster_id, left.peer_pid, left.state) == (3, third.pid, "ready")
    assert left.read_bytes == total * 4 * 3 * 48  # tensors, a row and two blocks: the same link all along
    unchanged(third, [rows, paged])
    assert decoder.do(redials) == ()


@BOTH_TRANSPORTS
def test_r22_a_decoder_killed_anywhere_in_a_pull_gives_its_pin_back_and_consumes_nothing(
    family: Family, tmp_path: Path
) -> None:
    prompt = family.born("PROMPT", 1, extra=PATIENT)
    decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS)
    source, target = caches(prompt, decoder)
    warmed_up(prompt, decoder)
    tables, held = prompt.do(picture), prompt.do(residue_of)
    for step in ("resolved", "release"):
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        (folder := tmp_path / step).mkdir()
        with stopped(decoder, step, folder, "pull_cache", KEY, Use("rows"), 5):
            assert prompt.do(picture).pins == 1
            family.kill(decoder)
            wait_until(lambda: prompt.do(picture) == tables)
            wait_until(lambda: prompt.do(settled_of, held) == held)
        unchanged(prompt, source)
        decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS)
        target = [decoder.do(make, "rows", Spec(), 3), decoder.do(make, "paged", Spec(blocks=True), 4)]
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pulls_arrive(prompt, decoder, source, target)


@BOTH_TRANSPORTS
def test_a_killed_peer_is_unlinked_with_and_without_force(family: Family) -> None:
    prompt, decoder = family.born("PROMPT", 1), family.born("DECODER", 2)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    family.kill(prompt)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    assert decoder.do(unlink, [info(1)], 1000, True) == SUCCESS
    assert (decoder.do(links), decoder.do(redials)) == ({}, ())


def forked(world: World, properly: bool) -> int:
    """Fork a child that outlives its parent: by Python, or by a library that knows nothing of Python."""
    child: int = os.fork() if properly else ctypes.CDLL(None).fork()
    if child == 0:
        # Nothing but system calls: a raw fork has told Python nothing.
        while True:
            signal.pause()
    return child


@pytest.mark.parametrize(
    ("family", "properly", "timeout"),
    [("shm", True, "600"), ("shm", False, "600"), ("tcp", False, "1.5")],
    indirect=["family"],
)
def test_r22_a_killed_peer_is_noticed_although_a_child_of_it_lives_on(
    family: Family, properly: bool, timeout: str
) -> None:
    """The child holds the link, the lanes and the listener: over tcp only missed beats tell."""
    prompt, decoder = family.born("PROMPT", 1), family.born("DECODER", 2, extra={"llm.PeerTimeout": timeout})
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    child = prompt.do(forked, properly)
    try:
        bytes_move_both_ways(prompt, decoder)  # the child disturbs nothing
        family.kill(prompt)
        alone(decoder)
        if family.transport == "tcp":
            # The listener's port still takes connections; it is dialled again, and hears nothing.
            wait_until(lambda: [each.attempts > 0 for each in decoder.do(redials)] == [True])
            assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
            assert decoder.do(redials) == ()
    finally:
        os.kill(child, signal.SIGKILL)


# --- restarted --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "same_address"), [("shm", False), ("tcp", True), ("tcp", False)], indirect=["family"]
)
def test_i3_a_restarted_prompt_is_linked_again_without_any_unlink(
    socket_folder: Path, family: Family, same_address: bool
) -> None:
    extra = {"llm.ShmSocketDir": str(socket_folder)} if family.transport == "shm" else {}
    prompt = family.born("PROMPT", 1, extra=extra)
    decoder = family.born("DECODER", 2, extra=extra)
    _, target = caches(prompt, decoder)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [0, 7], [2, 3])  # its answer is kept
    target[1] = decoder.do(show, "paged")
    family.kill(prompt)
    prompt = family.born("PROMPT", 1, port=prompt.port if same_address else 0, extra=extra)
    alone(decoder)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    for method, *args in (("pull_cache", KEY, Use("rows"), 5), ("pull_blocks", BLOCKS, Use("paged"), [0], [1])):
        with pytest.raises(CacheNotFound):  # nothing the dead one said counts any more
            decoder.do(call, method, *args)
    unchanged(decoder, target)
    source = [prompt.do(make, "rows", ROWS, 11), prompt.do(make, "paged", PAGED, 12)]
    pulls_arrive(prompt, decoder, source, target)
    bytes_move_both_ways(prompt, decoder)
    assert len(list(socket_folder.iterdir())) == (2 if family.transport == "shm" else 0)  # the killed one leaves one


@pytest.mark.parametrize("family", ["tcp"], indirect=True)
def test_i3_a_restarted_decoder_takes_the_place_of_one_that_is_frozen(family: Family) -> None:
    prompt, old = family.born("PROMPT", 1, extra=PATIENT), family.born("DECODER", 2, extra=PATIENT)
    caches(prompt, old)
    assert old.do(link, [info(1, prompt.port)]) == SUCCESS
    freeze(old)
    decoder = family.born("DECODER", 2)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    bytes_move_both_ways(prompt, decoder)
    old.signal(signal.SIGCONT)
    alone(old)
    not_linked(old)
    assert [each.peer_pid for each in prompt.do(picture).links] == [decoder.pid]
    bytes_move_both_ways(prompt, decoder)


# --- finalized --------------------------------------------------------------------------------------------------------


def init_again(world: World, options: dict[str, str]) -> int | None:
    """Initialise the same object."""
    world.dd.init(options)
    return world.dd.listen_port


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
def test_r22_i14_a_peer_that_finalizes_ends_the_link_and_links_again_after_its_next_init(pair: Pair) -> None:
    pair.start(extra=PATIENT)
    extra = PATIENT | {"llm.Transport": pair.transport}
    for gone, stays in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        kept = [stays.do(make, "rows", Spec(), 1), stays.do(make, "paged", Spec(blocks=True), 2)]
        gone.do(finalize)
        alone(stays)
        not_linked(stays, gone.cluster_id)
        listen = "127.0.0.1:0" if gone is pair.prompt else None
        gone.port = gone.do(init_again, make_config(listen_ip_info=listen, extra=extra))
        not_linked(stays, gone.cluster_id)
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)
        unchanged(stays, kept)


# --- frozen -----------------------------------------------------------------------------------------------------------


def test_r22_a_silent_peer_is_suspect_and_usable_until_it_is_heard_again(family: Family) -> None:
    prompt = family.born("PROMPT", 1)
    decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS, extra={"llm.PeerTimeout": "30"})
    source, target = caches(prompt, decoder)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [1], [0])
    freeze(prompt)
    wait_until(lambda: decoder.do(links) == {1: "suspect"}, 20)
    # The answer is known, so no question is sent; the other pull waits for the peer to come back.
    decoder.do(call, "pull_blocks", BLOCKS, Use("paged"), [1, 6], [0, 3])
    unchanged(decoder, [target[0], moved(target[1], source[1], [(0, 1), (3, 6)])])
    decoder.do(begin_there, "row pull", call, "pull_cache", KEY, Use("rows"), 5)
    wait_until(lambda: decoder.do(waiting, 1) == 1)
    assert decoder.do(links) == {1: "suspect"}
    prompt.signal(signal.SIGCONT)
    assert decoder.do(result_there, "row pull") is None
    wait_until(lambda: (prompt.do(links), decoder.do(links)) == ({2: "ready"}, {1: "ready"}))
    unchanged(decoder, [moved(target[0], source[0], [(5, 0)]), moved(target[1], source[1], [(0, 1), (3, 6)])])
    unchanged(prompt, source)
    bytes_move_both_ways(prompt, decoder)


@BOTH_TRANSPORTS
def test_r22_a_peer_that_misses_its_beats_counts_as_dead_and_can_be_linked_when_it_goes_on(family: Family) -> None:
    prompt = family.born("PROMPT", 1)
    decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS, extra={"llm.PeerTimeout": "2"})
    source, target = caches(prompt, decoder)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pull_in_vain(decoder, prompt)
    both_pulls_lost(decoder, prompt, "silent for")
    not_linked(decoder)
    unchanged(decoder, target)
    assert decoder.do(link, [info(1, prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
    assert decoder.do(links) == {}
    prompt.signal(signal.SIGCONT)
    # At once: the prompt may not yet know that its end of the old link is dead.
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pulls_arrive(prompt, decoder, source, target)
    assert (prompt.do(links), decoder.do(links)) == ({2: "ready"}, {1: "ready"})


def test_a_small_peer_timeout_at_one_end_invents_no_death(family: Family) -> None:
    prompt, decoder = (
        family.born("PROMPT", 1, extra=PATIENT),
        family.born("DECODER", 2, extra={"llm.PeerTimeout": "0.6"}),
    )
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    number, begun = decoder.do(link_number, 1), decoder.do(beats)
    wait_until(lambda: decoder.do(beats) > begun + 10)  # longer than the time between two beats of the prompt
    assert decoder.do(links) == {1: "ready"}
    assert decoder.do(link_number, 1) == number, "the same link all along"
    bytes_move_both_ways(prompt, decoder)


def beats(world: World) -> int:
    assert world.dd._engine is not None
    return world.dd._engine.links._heartbeat._count
