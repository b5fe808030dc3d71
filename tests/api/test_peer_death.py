"""Peers that are killed, frozen, restarted or finalized, links that are lost, and what comes back by itself (interface
R22, I3): how a death is noticed, also where the sockets do not tell, and what must not pass for one."""

import ctypes
import os
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from faults.strangers import silent_port
from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._links.link import Link
from llm_datadist._native.public_call import for_main_thread
from llm_datadist.errors import CacheNotFound, NotLinked, PeerLost
from tests.support import linking
from tests.support.ends import Family, begin_there, freeze, frozen, one_family, result_there
from tests.support.grants import in_child
from tests.support.kinds import Bytes, ChildEnd, End, Pair
from tests.support.linking import (
    SUCCESS,
    alone,
    bytes_move_both_ways,
    info,
    link,
    link_number,
    links,
    lose,
    redials,
    statistics,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.ranks import finalize_and_init
from tests.support.world import World, make_config, residue_of

pytestmark = pytest.mark.covers("llm: ShmSocketDir PeerTimeout", "errors.NotLinked")

KEY = CacheKey(1, 10)
ROWS, PAGED = Spec(keys=(KEY,)), Spec(blocks=True, blocks_key=BLOCKS)
LONG_MS = 600_000  # what ends earlier than that was not ended by the call's own time
PATIENT = {"llm.PeerTimeout": "600"}  # ... nor by missed beats
ALREADY, TIMEOUT = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_TIMEOUT
KILLED = "the connection broke|closed the connection|its process has ended"  # whichever the kernel shows first
BOTH_TRANSPORTS = pytest.mark.parametrize("family", ["shm", "tcp"], indirect=True)


@pytest.fixture
def family(request: pytest.FixtureRequest, gpu: bool) -> Iterator[Family]:
    with one_family(getattr(request, "param", "shm"), gpu=gpu) as family:
        yield family


def two(family: Family, there: dict[str, str] | None = None, **settings: Any) -> tuple[ChildEnd, ChildEnd]:
    """Start a prompt with these options, and a decoder with its own, which links to it."""
    prompt, decoder = family.born("PROMPT", 1, extra=there or {}), family.born("DECODER", 2, **settings)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    return prompt, decoder


def caches(prompt: End, decoder: End) -> tuple[list[Bytes], list[Bytes]]:
    """Make a published and an addressed cache of either kind; return their bytes, rows first."""
    source = [prompt.do(make, "rows", ROWS, 1), prompt.do(make, "kv", PAGED, 2)]
    return source, [decoder.do(make, "rows", Spec(), 3), decoder.do(make, "kv", Spec(blocks=True), 4)]


def unchanged(end: End, was: list[Bytes]) -> None:
    for name, old in zip(("rows", "kv"), was, strict=True):
        same_bytes(end.do(show, name), old)


def unlinked(end: End, peer: int = 1) -> None:
    """Every further call says at once that there is no link."""
    linking.not_linked(end, peer)
    with pytest.raises(NotLinked, match=f"cluster {peer}"):
        end.do(call, "pull_cache", CacheKey(peer, 10), Use("rows"), 5)


def pulls_arrive(prompt: End, decoder: End, source: list[Bytes], target: list[Bytes]) -> None:
    """Both pulls move the right bytes, and the key is consumed."""
    decoder.do(call, "pull_cache", KEY, Use("rows"), 5)
    decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
    unchanged(decoder, [moved(target[0], source[0], [(5, 0)]), moved(target[1], source[1], [(0, 1), (3, 6)])])
    unchanged(prompt, source)
    wait_until(lambda: prompt.do(picture).pins == 0 and len(prompt.do(picture).keys) == 1)
    with pytest.raises(CacheNotFound):
        decoder.do(call, "pull_cache", KEY, Use("rows"), 5)


def waiting(world: World, peer: int) -> int:
    """Return how many calls of this end wait for an answer of the peer."""
    return int(linking.links_of(world).get(peer).requests.waiting)


def pull_in_vain(decoder: End, prompt: ChildEnd) -> None:
    """Freeze the prompt, and begin two pulls that wait for its answer."""
    freeze(prompt)
    decoder.do(begin_there, "row pull", call, "pull_cache", KEY, Use("rows"), 5)
    decoder.do(begin_there, "paged pull", call, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
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


@pytest.mark.gpu
@BOTH_TRANSPORTS
def test_r22_i15_pulls_that_wait_for_a_killed_prompt_fail_and_hold_up_no_other_link(family: Family) -> None:
    prompt, third = family.born("PROMPT", 1), family.born("PROMPT", 3)
    decoder = family.born("DECODER", 2, sync_kv_timeout=LONG_MS, extra=PATIENT)
    _, target = caches(prompt, decoder)
    # What a process makes at its first link and keeps is there from now on; data lanes close a bit later.
    sockets = decoder.do(residue_of)["fds"]["socket"]
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    assert decoder.do(linking.unlink, [info(1, prompt.port)]) == SUCCESS
    wait_until(lambda: decoder.do(residue_of)["fds"]["socket"] == sockets)
    assert decoder.do(link, [info(3, third.port)]) == SUCCESS
    bytes_move_both_ways(third, decoder)
    tables, held, number = decoder.do(picture), decoder.do(residue_of), decoder.do(link_number, 3)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pull_in_vain(decoder, prompt)
    bytes_move_both_ways(third, decoder)
    family.kill(prompt)
    bytes_move_both_ways(third, decoder)
    both_pulls_lost(decoder, prompt, KILLED)
    unlinked(decoder)
    # Over tcp no descriptor of its process tells that it will not come back: it is dialled again until it is unlinked.
    for force in (False, True):
        assert decoder.do(linking.unlink, [info(1, prompt.port)], 1000, force) == SUCCESS
        assert (decoder.do(links), decoder.do(redials)) == ({3: "ready"}, ())
    unchanged(decoder, target)
    # What was mapped of the dead is given back at once, not at finalize. The worker that mends lanes stays.
    kept = ("fds", "memfd mappings") if family.transport == "tcp" else tuple(held)
    wait_until(lambda: {kind: held[kind] for kind in kept}.items() <= decoder.do(residue_of).items())
    assert replace(decoder.do(picture), links=()) == replace(tables, links=())
    assert decoder.do(link_number, 3) == number, "the same link all along"


def forked(world: World, properly: bool) -> int:
    """Fork a child that outlives its parent: by Python, or by a library that knows nothing of Python."""
    child: int = os.fork() if properly else ctypes.CDLL(None).fork()
    if child == 0:
        # Nothing but system calls: a raw fork has told Python nothing.
        while True:
            signal.pause()
    return child


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("family", "properly", "timeout"),
    [("shm", True, "600"), ("shm", False, "600"), ("tcp", False, "1.5")],
    indirect=["family"],
)
def test_r22_a_killed_peer_is_noticed_although_its_child_lives_on(family: Family, properly: bool, timeout: str) -> None:
    """The child holds the link, the lanes and the listener: over tcp only missed beats tell."""
    prompt, decoder = two(family, extra={"llm.PeerTimeout": timeout})
    child = prompt.do(forked, properly)
    try:
        bytes_move_both_ways(prompt, decoder)  # the child disturbs nothing
        family.kill(prompt)
        alone(decoder)
        if not properly:  # the child holds the connection: only the process tells of its end, or its silence
            kind = "process_ended" if family.transport == "shm" else "silent"
            wait_until(lambda: decoder.do(losses) == ({kind: 1}, 0))  # counted once the link has gone
        if family.transport == "tcp":
            # The listener's port still takes connections; it is dialled again, and hears nothing.
            wait_until(lambda: redialling(decoder))
            assert decoder.do(linking.unlink, [info(1, prompt.port)]) == SUCCESS
            assert decoder.do(redials) == ()
    finally:
        os.kill(child, signal.SIGKILL)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "same_port"), [("shm", False), ("tcp", True), ("tcp", False)], indirect=["family"])
def test_i3_a_restarted_prompt_links_without_an_unlink(socket_folder: Path, family: Family, same_port: bool) -> None:
    extra = PATIENT | ({"llm.ShmSocketDir": str(socket_folder)} if family.transport == "shm" else {})
    prompt, decoder = two(family, extra, extra=extra)
    _, target = caches(prompt, decoder)
    decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 7], [2, 3])  # its answer is kept
    target[1] = decoder.do(show, "kv")
    family.kill(prompt)
    prompt = family.born("PROMPT", 1, port=prompt.port if same_port else 0, extra=extra)
    alone(decoder)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    for method, *args in (("pull_cache", KEY, Use("rows"), 5), ("pull_blocks", BLOCKS, Use("kv"), [0], [1])):
        with pytest.raises(CacheNotFound):  # nothing the dead one said counts any more
            decoder.do(call, method, *args)
    unchanged(decoder, target)
    source = [prompt.do(make, "rows", ROWS, 11), prompt.do(make, "kv", PAGED, 12)]
    pulls_arrive(prompt, decoder, source, target)
    assert len(list(socket_folder.iterdir())) == (2 if family.transport == "shm" else 0)  # the killed one leaves one
    family.kill(decoder)
    alone(prompt)


@pytest.mark.gpu
@BOTH_TRANSPORTS
def test_r22_i3_a_restarted_peer_takes_the_place_of_one_whose_end_has_not_been_seen(family: Family) -> None:
    """The old process is only stopped: no end of stream, no pidfd tells anything."""
    prompt, old = two(family, PATIENT, extra=PATIENT)
    caches(prompt, old)
    with frozen(old):
        decoder = family.born("DECODER", 2, extra=PATIENT)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        bytes_move_both_ways(prompt, decoder)
    assert prompt.do(losses) == ({"replaced": 1}, 0)
    alone(old)
    unlinked(old)
    wait_until(lambda: old.do(redials) == ())  # refused: else it would be heard once the prompt has lost the decoder
    assert [each.peer_pid for each in prompt.do(picture).links] == [decoder.pid]
    for wanted in (1, None):  # the one that listens is restarted
        with frozen(prompt):
            second = family.born("PROMPT", 1, extra=PATIENT)
            assert decoder.do(link, [info(wanted, second.port)]) == SUCCESS
            bytes_move_both_ways(second, decoder)
        alone(prompt)
        prompt = second


@pytest.mark.gpu
@BOTH_TRANSPORTS
def test_r22_a_process_that_comes_back_late_takes_the_place_of_no_other_even_of_one_that_is_silent(
    family: Family,
) -> None:
    first, second, old, decoder = (
        family.born(role, number, extra=PATIENT)
        for role, number in (("PROMPT", 1), ("PROMPT", 1), ("DECODER", 2), ("DECODER", 2))
    )
    assert old.do(link, [info(1, first.port)]) == SUCCESS
    with frozen(old):
        assert decoder.do(link, [info(1, first.port)]) == SUCCESS
        freeze(decoder)
    alone(old)  # and dials again
    wait_until(lambda: old.do(redials) == ())
    decoder.signal(signal.SIGCONT)
    assert [each.peer_pid for each in first.do(picture).links] == [decoder.pid]
    with frozen(first):
        decoder.do(lose, 1)
        wait_until(lambda: [each.attempts for each in decoder.do(redials)] == [1])  # waits for an answer
        assert decoder.do(link, [info(1, second.port)]) == SUCCESS
        freeze(second)
    wait_until(lambda: redials_no_more(decoder))
    second.signal(signal.SIGCONT)
    assert [each.peer_pid for each in decoder.do(picture).links] == [second.pid]
    bytes_move_both_ways(second, decoder)
    alone(first)


def kill_and_link_again(world: World, pid: int, port: int) -> Any:
    """The news of the end may not have been read when the other process is dialled."""
    os.kill(pid, signal.SIGKILL)
    return link(world, [info(1, port)])


@pytest.mark.gpu
def test_r22_a_link_in_the_moment_of_the_kill_is_never_already_link(family: Family) -> None:
    first, decoder = two(family, extra=PATIENT)
    for _ in range(4):
        second = family.born("PROMPT", 1)
        assert decoder.do(kill_and_link_again, first.pid, second.port) == SUCCESS
        family.kill(first)
        bytes_move_both_ways(second, decoder)
        first = second


@pytest.mark.gpu
@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
def test_r22_i14_a_peer_that_finalizes_ends_the_link_and_links_again_after_its_next_init(pair: Pair) -> None:
    pair.start(extra=PATIENT)
    extra = PATIENT | {"llm.Transport": pair.transport}
    for gone, stays in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        kept = [stays.do(make, "rows", Spec(), 1), stays.do(make, "kv", Spec(blocks=True), 2)]
        gone.do(linking.finalize)
        alone(stays)
        unlinked(stays, gone.cluster_id)
        listen = f"127.0.0.1:{gone.port}" if gone is pair.prompt else None  # the same port again
        gone.do(finalize_and_init, make_config(gpu=gone.gpu, listen_ip_info=listen, extra=extra))
        unlinked(stays, gone.cluster_id)
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)
        unchanged(stays, kept)


@pytest.mark.parametrize("cluster_id", [1, 9])
def test_an_address_is_tried_on_until_another_incarnation_listens_there(family: Family, cluster_id: int) -> None:
    prompt, decoder = two(family, extra=PATIENT)
    prompt.do(linking.vanish)  # the process goes on: nothing but its silence tells
    wait_until(lambda: [each.attempts >= 2 for each in decoder.do(redials)] == [True])
    assert "refused" in decoder.do(redials)[0].reason
    assert (decoder.do(redials)[0].refused, set(dict(decoder.do(statistics).lost_peers))) == (True, {1})
    linking.not_linked(decoder, 1, "attempts, the last attempt: link to 127.0.0.1", "refused")
    other = family.born("PROMPT", cluster_id, port=prompt.port)
    wait_until(lambda: decoder.do(redials) == (), 20)
    # Nothing has asked for a link to the new one.
    assert (decoder.do(links), other.do(links)) == ({}, {})
    linking.not_linked(decoder, 1, "link_clusters makes the link")
    assert decoder.do(link, [info(cluster_id, prompt.port)]) == SUCCESS


@pytest.mark.gpu
def test_r22_a_silent_peer_is_suspect_and_usable_until_it_is_heard_again(family: Family) -> None:
    prompt, decoder = two(family, sync_kv_timeout=LONG_MS, extra={"llm.PeerTimeout": "30"})
    source, target = caches(prompt, decoder)
    decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [0])
    freeze(prompt)
    wait_until(lambda: decoder.do(links) == {1: "suspect"}, 20)
    # The answer is known, so no question is sent; the other pull waits for the peer to come back.
    decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
    unchanged(decoder, [target[0], moved(target[1], source[1], [(0, 1), (3, 6)])])
    decoder.do(begin_there, "row pull", call, "pull_cache", KEY, Use("rows"), 5)
    wait_until(lambda: decoder.do(waiting, 1) == 1)
    assert decoder.do(links) == {1: "suspect"}
    prompt.signal(signal.SIGCONT)
    assert decoder.do(result_there, "row pull") is None
    wait_until(lambda: linking.linked(prompt, decoder))
    unchanged(decoder, [moved(target[0], source[0], [(5, 0)]), moved(target[1], source[1], [(0, 1), (3, 6)])])
    unchanged(prompt, source)


@pytest.mark.gpu
@BOTH_TRANSPORTS
def test_r22_a_peer_that_misses_its_beats_counts_as_dead_and_can_be_linked_when_it_goes_on(family: Family) -> None:
    prompt, decoder = two(family, sync_kv_timeout=LONG_MS, extra={"llm.PeerTimeout": "2"})
    source, target = caches(prompt, decoder)
    pull_in_vain(decoder, prompt)
    both_pulls_lost(decoder, prompt, "silent for")
    unlinked(decoder)
    unchanged(decoder, target)
    assert decoder.do(link, [info(1, prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
    assert decoder.do(links) == {}
    prompt.signal(signal.SIGCONT)
    # At once: the prompt may not yet know that its end of the old link is dead.
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    pulls_arrive(prompt, decoder, source, target)
    assert linking.linked(prompt, decoder)


def beats(world: World) -> int:
    return world.probe.engine.links.heartbeat.count


def test_a_small_peer_timeout_at_one_end_invents_no_death(family: Family) -> None:
    _, decoder = two(family, PATIENT, extra={"llm.PeerTimeout": "0.6"})
    # A peer that is not heard in time for want of a processor is one such: not every time.
    for _ in range(5):
        wait_until(lambda: decoder.do(links) == {1: "ready"})
        number, begun = decoder.do(link_number, 1), decoder.do(beats)
        wait_until(lambda begun=begun: decoder.do(beats) > begun + 10)  # type: ignore[misc]  # longer than from beat to beat
        if decoder.do(link_number, 1) == number:
            return
    raise AssertionError("the link was another one each time")


def losses(world: World) -> tuple[dict[str, int], int]:
    now = world.dd.statistics()
    return now.links_lost, now.reconnects


def redials_no_more(end: End) -> bool:
    return not any(each.startswith("llm-datadist-redial") for each in end.do(residue_of)["threads"])


def comes_back(pair: Pair, was: int) -> None:
    """Wait for another link than ``was`` at the decoder, and for the end of the redial."""
    wait_until(lambda: pair.decoder.do(link_number, 1) > was)
    wait_until(lambda: linking.linked(pair.prompt, pair.decoder))
    assert pair.decoder.do(redials) == ()
    wait_until(lambda: redials_no_more(pair.decoder))


@pytest.mark.gpu
def test_a_lost_link_comes_back_by_itself_and_an_explicit_link_after_that_succeeds_once(pair: Pair) -> None:
    linking.start_both(pair.prompt, pair.decoder, pair.transport)
    prompt, decoder = pair.prompt, pair.decoder
    pair.link()  # the decoder dials
    for loser, peer in ((prompt, 2), (decoder, 1), (prompt, 2)):
        was = decoder.do(link_number, 1)
        loser.do(linking.lose, peer)
        comes_back(pair, was)
        bytes_move_both_ways(prompt, decoder)
    assert (decoder.do(losses), prompt.do(losses)) == (({"connection": 3}, 3), ({"connection": 3}, 0))
    for here, there in ((decoder, prompt), (prompt, decoder)):
        mended = here.do(link_number, there.cluster_id)
        assert here.do(link, [info(there.cluster_id, there.port)]) == SUCCESS
        assert here.do(link_number, there.cluster_id) == mended, "the link that was there is the one"
        assert here.do(link, [info(there.cluster_id, there.port)]) == (ALREADY, [ALREADY])
    bytes_move_both_ways(prompt, decoder)


@pytest.mark.parametrize("pair", ["shm", "tcp"], indirect=True)
@pytest.mark.parametrize("goes", ["prompt", "decoder"])
@pytest.mark.parametrize("unlinks", [True, False])
def test_a_peer_that_finalizes_or_unlinks_by_force_is_neither_lost_nor_dialled(
    pair: Pair, goes: str, unlinks: bool
) -> None:
    pair.start(extra=PATIENT)
    gone, stays = (pair.prompt, pair.decoder) if goes == "prompt" else (pair.decoder, pair.prompt)
    if unlinks:
        assert gone.do(linking.unlink, [info(stays.cluster_id)], 5000, True) == SUCCESS
    else:
        gone.do(linking.finalize)
    alone(stays)
    assert (stays.do(losses), stays.do(redials)) == (({}, 0), ())


def dial_gone(world: World, ports: list[int]) -> None:
    """Lose as many links as ports, whose peers are at these from now on."""
    link = world.probe.link(1)
    for number, port in enumerate(ports):
        origin = replace(link.origin, address=("127.0.0.1", port))
        gone = Link(replace(link.peer, cluster_id=100 + number), link.connection, link.choice, origin, link.spoken)
        assert world.probe.reconnector.begin(gone) is not None


def dials(world: World) -> dict[int, int]:
    """Return the number of attempts, by cluster id."""
    return {each.remote_cluster_id: each.attempts for each in world.dd.statistics().redials}


def test_24_gone_peers_do_not_delay_the_return_of_a_link(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.start()
    with ExitStack() as stack:
        silent = [stack.enter_context(silent_port()) for _ in range(20)]
        decoder.do(dial_gone, silent + [linking.free_port() for _ in range(4)])
        wait_until(lambda: min(decoder.do(dials).values()) > 0, 60)
        before, was = decoder.do(dials), decoder.do(link_number, 1)
        prompt.do(linking.lose, 2)
        wait_until(lambda: decoder.do(link_number, 1) > was, 60)
        after = decoder.do(dials)
        assert sum(after[each] - before[each] for each in range(100, 120)) <= 12, "the silent ones were first"
    bytes_move_both_ways(prompt, decoder)


def redialling(end: End) -> bool:
    return [(each.remote_cluster_id, each.attempts > 0) for each in end.do(redials)] == [(1, True)]


@contextmanager
def redial_without_answer(pair: Pair) -> Iterator[None]:
    """The decoder has lost its link and dials the prompt, which is stopped meanwhile."""
    with frozen(pair.prompt):
        pair.decoder.do(linking.lose, 1)
        wait_until(lambda: redialling(pair.decoder))
        yield


def test_a_redial_is_told_of_and_goes_on_until_an_unlink_an_explicit_link_or_finalize_ends_it(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start(extra=PATIENT)
    with frozen(prompt), silent_port() as silent:
        for port in (prompt.port, silent):  # silent, but linked
            assert decoder.do(link, [info(1, port)], 500) == (ALREADY, [ALREADY])
    with redial_without_answer(shm_pair):
        again = f"; 127.0.0.1:{prompt.port} is being dialled again"
        linking.not_linked(decoder, 1, "; the link was lost ", " s ago: ", again)
        assert decoder.do(links) == {}
        assert [each.address for each in decoder.do(redials)] == [f"127.0.0.1:{prompt.port}"]
        assert decoder.do(link, [info(1, prompt.port)], 200) == (TIMEOUT, [TIMEOUT])
        wait_until(lambda: redialling(decoder))  # it goes on: the user wants the link, too
    wait_until(lambda: linking.linked(prompt, decoder))
    wait_until(lambda: decoder.do(redials) == ())
    bytes_move_both_ways(prompt, decoder)
    for force in (False, True):
        with redial_without_answer(shm_pair):
            for _ in range(2):
                assert decoder.do(linking.unlink, [info(1, prompt.port)], 5000, force) == SUCCESS
                assert decoder.do(redials) == ()
            wait_until(lambda: redials_no_more(decoder))
        # Whatever the frozen one finds in its backlog when it goes on, no link comes of it.
        alone(prompt)
        assert decoder.do(links) == {}
        shm_pair.link()
        bytes_move_both_ways(prompt, decoder)
    with redial_without_answer(shm_pair):
        pass
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    assert decoder.do(redials) == ()
    with redial_without_answer(shm_pair):
        decoder.stop()
        assert redials_no_more(decoder)


def unlink_in_the_moment_of_a_loss(world: World, peer: int, port: int) -> Any:
    """Unlink, and lose the link after the unlink has looked for redials and before it looks for the link."""
    table: Any = world.probe.link_table
    original = table.get

    def get(cluster_id: int) -> Any:
        if for_main_thread() and "get" in table.__dict__:
            del table.__dict__["get"]
            linking.lose(world, peer)
            wait_until(lambda: original(peer) is None)
        return original(cluster_id)

    table.get = get
    return linking.unlink(world, [info(peer, port)])


def test_a_loss_in_the_moment_of_an_unlink_is_not_dialled_again(shm_pair: Pair) -> None:
    """Regression: the link came back: it was dialled although this side had given it up."""
    shm_pair.start()
    with frozen(shm_pair.prompt):
        assert shm_pair.decoder.do(unlink_in_the_moment_of_a_loss, 1, shm_pair.prompt.port) == SUCCESS
        assert shm_pair.decoder.do(redials) == ()
    alone(shm_pair.prompt, shm_pair.decoder)
    shm_pair.link()


def texts_in_the_moment_of_a_loss(world: World, peer: int) -> list[str]:
    table = world.probe.link_table
    really, texts = table.remove, list[str]()

    def remove(link: Any, *lost: str) -> None:
        really(link, *lost)
        with pytest.raises(NotLinked) as caught:
            world.probe.link(peer)
        texts.append(str(caught.value))

    # Who calls in that moment cannot be chosen from outside.
    with mock.patch.object(table, "remove", remove):
        linking.lose(world, peer)
        wait_until(lambda: bool(texts))
    return texts


def test_who_finds_no_link_is_told_at_once_what_became_of_it(shm_pair: Pair) -> None:
    """Regression: the reason was noted after the link had gone."""
    shm_pair.start()
    assert "; the link was lost 0." in shm_pair.decoder.do(texts_in_the_moment_of_a_loss, 1)[0]


def test_a_link_that_the_peer_gave_up_does_not_come_back_by_itself(shm_pair: Pair) -> None:
    """By force, or when it had lost the link already: the redial is refused."""
    prompt, decoder = shm_pair.start()
    assert prompt.do(linking.unlink, [info(2)], 5000, True) == SUCCESS
    wait_until(lambda: prompt.do(links) == decoder.do(links) == {} and decoder.do(redials) == ())
    shm_pair.link()
    was = decoder.do(link_number, 1)
    decoder.do(linking.lose, 1)  # linked explicitly since: forgiven
    comes_back(shm_pair, was)
    with frozen(decoder):
        prompt.do(linking.lose, 2)
        wait_until(lambda: prompt.do(links) == {})
        assert prompt.do(linking.unlink, [info(2, 1)]) == SUCCESS
    wait_until(lambda: decoder.do(links) == {} and decoder.do(redials) == ())
    assert prompt.do(links) == decoder.do(links) == {}
    shm_pair.link()


@pytest.mark.gpu
def test_a_redial_in_a_storm_of_losses_links_and_unlinks_leaves_one_truth(tcp_pair: Pair) -> None:
    pair = tcp_pair
    pair.start()
    for number in range(15):
        loser, peer = (pair.decoder, 1) if number % 2 else (pair.prompt, 2)
        with suppress(NotLinked):
            loser.do(linking.lose, peer)
        if number % 3 == 1:
            assert pair.decoder.do(link, [info(1, pair.prompt.port)]) in (SUCCESS, (ALREADY, [ALREADY]))
            wait_until(lambda: linking.linked(pair.prompt, pair.decoder))
        elif number % 3 == 2:
            assert pair.decoder.do(linking.unlink, [info(1, pair.prompt.port)]) == SUCCESS
            assert (pair.decoder.do(links), pair.decoder.do(redials)) == ({}, ())
            alone(pair.prompt)
            pair.link()
    wait_until(lambda: linking.linked(pair.prompt, pair.decoder))
    bytes_move_both_ways(pair.prompt, pair.decoder)


@pytest.mark.gpu
def test_a_forked_child_redials_nothing_and_its_parent_goes_on(family: Family) -> None:
    prompt, forker = two(family)
    with frozen(prompt):
        forker.do(linking.lose, 1)
        wait_until(lambda: redialling(forker))
        assert forker.do(in_child, attrgetter("probe"))[0] == "StateError", "something is initialised there"
    wait_until(lambda: linking.linked(prompt, forker))
    bytes_move_both_ways(prompt, forker)
    family.kill(forker)  # a fork ends threads of other libraries, too
