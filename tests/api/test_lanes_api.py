"""Data lanes: when a link has them, how they break and come back, strangers at them; pulls by key over them that ask
for the bytes at once."""

import ctypes
import errno
import hmac
import itertools
import select
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest

from faults.gated import gated_call, stopped
from faults.gates import Gate, count_arrivals
from faults.relay import Relay
from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist._native import Stream
from llm_datadist.errors import CacheMismatch, CacheNotFound, DeadlineExceeded
from llm_datadist.testing import scene
from tests.support import linking, moves, seccomp
from tests.support.authority import Authority
from tests.support.ends import ChildEnd, frozen, one_family
from tests.support.kinds import Bytes, End, LocalEnd, Pair, World
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, explain, info, link, result_there
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

Ends = tuple[End, End, Bytes, Bytes]

pytestmark = [pytest.mark.covers("CacheManager: pull_blocks pull_cache"), pytest.mark.gpu]

PAGED = Spec(blocks=True, blocks_key=BLOCKS)
CAP_SYS_PTRACE, PR_SET_DUMPABLE = 19, 4


@pytest.fixture(params=["both", "prompt", "decoder"])
def strangers(request: pytest.FixtureRequest) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """Two processes of their own, which the kernel does not let into each other; or one of them not into the other."""
    ends = ChildEnd("prompt"), ChildEnd("decoder")
    if request.param == "both":
        for end in ends:
            end.do(_shut_out)
    else:
        ends[request.param == "decoder"].do(_forbid_cma)
    yield ends
    for end in ends:
        end.stop()
        end.close()


def _shut_out(world: World) -> None:
    """Let nobody in, and go into nobody who lets nobody in."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0) == 0
    header = struct.pack("<Ii", 0x20080522, 0)
    sets = ctypes.create_string_buffer(24)
    assert libc.capget(header, sets) == 0
    words = list(struct.unpack("<6I", sets.raw))  # effective, permitted and inheritable; then their high halves
    for word in range(3):
        words[word] &= ~(1 << CAP_SYS_PTRACE)
    assert libc.capset(header, struct.pack("<6I", *words)) == 0


def _forbid_cma(_: World) -> None:
    seccomp.fail("process_vm_readv", errno.EPERM)


def test_where_cma_is_refused_non_pool_memory_goes_over_lanes(strangers: tuple[ChildEnd, ChildEnd]) -> None:
    """Also where it is refused in one direction: the decoder dials, so it makes the lanes that the prompt needs."""
    prompt, decoder = strangers
    linking.start_both(prompt, decoder, "auto", enable_remote_cache_accessible=True)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    for end, peer in ((prompt, 2), (decoder, 1)):
        there = end.do(explain, peer)
        assert (there.transport, there.private_transport) == ("shm", "tcp")
        into, out = "the kernel does not let us into pid", "the kernel does not let the peer into this process"
        assert into in there.reason or out in there.reason
    for spec, (here, there) in itertools.product(
        (PAGED, replace(PAGED, memory="private")), (strangers, strangers[::-1])
    ):
        key = BlocksCacheKey(there.cluster_id, 0)
        src = there.do(make, "kv", replace(spec, blocks_key=key), 1)
        dst = here.do(make, "own", replace(spec, blocks_key=None), 2)
        here.do(call, "pull_blocks", key, Use("own"), [1, 2], [6, 0])
        same_bytes(here.do(show, "own"), dst := moved(dst, src, [(6, 1), (0, 2)]))
        here.do(call, "push_blocks", key, Use("own"), [3], [5])
        same_bytes(there.do(show, "kv"), moved(src, dst, [(5, 3)]))
        there.do(forget, "kv")
        here.do(forget, "own")
    wait_until(lambda: _knows(prompt.do(explain, 2), decoder.do(explain, 1)))
    wait_until(lambda: _knows(decoder.do(explain, 1), prompt.do(explain, 2)))


def _knows(owner: Any, peer: Any) -> bool:
    """Return True if an end knows of all that its peer has read and written, by both transports."""
    return (owner.served_bytes, owner.received_bytes) == (peer.read_bytes, peer.written_bytes)


@pytest.mark.gpu(False)
@pytest.mark.parametrize(
    ("one", "other", "used"),
    [
        ("auto", "tcp", ("tcp", "tcp")),
        ("auto", "cma", ("cma", "cma")),
        ("auto", "shm", ("shm", None)),
        ("shm", "tcp", None),
        ("tcp", "cma", None),
    ],
)
@pytest.mark.parametrize("turned", [False, True])
def test_an_end_that_leaves_the_choice_takes_what_the_other_asks_for(
    shm_pair: Pair, one: str, other: str, turned: bool, used: tuple[str, str | None] | None
) -> None:
    """Regression: a forced transport beside ``auto`` was refused, because both sides had to choose alike."""
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    here, there = (other, one) if turned else (one, other)
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra={"llm.Transport": there})
    decoder.start("DECODER", 2, extra={"llm.Transport": here})
    if used is None:
        failed = LLMStatusCode.LLM_LINK_FAILED
        assert decoder.do(link, [info(1, prompt.port)]) == (failed, [failed])
        return
    shm_pair.link()
    for end, peer in ((prompt, 2), (decoder, 1)):
        explained = end.do(explain, peer)
        assert (explained.transport, explained.private_transport) == used
        # Ends that map each other have no lanes.
        assert (end.do(_lane_threads) > 0) == ("tcp" in used)
    bytes_move_both_ways(prompt, decoder)


def _lane_threads(world: World) -> int:
    return sum(name.startswith("lldd-data") for name in scene.kernel_threads().values())


def _loads(world: World, peer: int) -> list[int]:
    return world.probe.loads(peer)


def _break_lanes(world: World, peer: int, keep: int) -> None:
    world.probe.break_lanes(peer, keep)


def paged(pair: Pair, spec: Spec, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(rca=True, extra={"llm.PeerTimeout": "600"}, **settings)
    return pair.prompt.do(make, "kv", spec, 1), pair.decoder.do(make, "kv", spec, 2)


def test_lanes_that_break_come_back_and_nobody_is_told(tcp_pair: Pair) -> None:
    """Regression: two lanes lost one after the other came back as one, because reconnections ran beside each other."""
    src, dst = paged(tcp_pair, PAGED)
    ends = ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1))
    lanes = len(tcp_pair.decoder.do(_loads, 1))
    assert 2 <= lanes <= 5, "one for all transfers, and those for large ones"
    for (end, peer), keep in itertools.product(ends, (0, 1)):
        for block in range(4):
            end.do(_break_lanes, peer, keep)
            tcp_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [block], [7 - block])
            dst = moved(dst, src, [(7 - block, block)])
            same_bytes(tcp_pair.decoder.do(show, "kv"), dst)
        wait_until(lambda: all(len(end.do(_loads, peer)) == lanes for end, peer in ends))
    # The end that was linked waits for the other to dial again.
    tcp_pair.prompt.do(_break_lanes, 2, 0)
    tcp_pair.prompt.do(call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [3], [1])
    same_bytes(tcp_pair.prompt.do(show, "kv"), moved(src, dst, [(1, 3)]))


def test_the_log_names_the_peer_of_a_lane_that_ends(end: LocalEnd, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra={"llm.Transport": "tcp"})
    with Stranger(end.port) as stranger:
        stranger.link(over="tcp", transport="tcp")
        stranger.lanes[0].close()
        wait_until(lambda: f"a data lane of {end.world.probe.link(66).peer} ended, 1 are left" in caplog.messages[-1])
    linking.alone(end)


def test_r07_after_a_timeout_over_lanes_the_link_goes_on(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    large = Spec(2, 4, 4 << 20, blocks=True, blocks_key=BLOCKS)
    pool = '{"memory_size": 67108864, "page_shift": 12}'
    theirs, ours = paged(tcp_pair, large, mem_pool_cfg=pool, sync_kv_timeout=300)
    for method in ("pull_blocks", "push_blocks"):
        # The answer is known from now on.
        wait_until(partial(moves.in_time, decoder, call, method, BLOCKS, Use("kv"), [0], [0]))
        source, target, sent = (prompt, decoder, theirs) if method == "pull_blocks" else (decoder, prompt, ours)
        named = (
            "pull_blocks from cluster 1 .*: read " if method == "pull_blocks" else "push_blocks to cluster 1 .*: write "
        )
        with frozen(prompt), pytest.raises(DeadlineExceeded, match=f"^{named}") as caught:
            decoder.do(call, method, BLOCKS, Use("kv"), [0, 1, 2, 3], [3, 2, 1, 0])
        assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_TIMEOUT, "copy")
        wait_until(partial(moves.in_time, decoder, call, method, BLOCKS, Use("kv"), [2], [1]))
        ours = decoder.do(show, "kv")
        same_bytes([tensor[1:2] for tensor in target.do(show, "kv")], [tensor[2:3] for tensor in sent])
        same_bytes(source.do(show, "kv"), sent)
        assert prompt.do(picture).pins == 0


def test_a_pull_over_lanes_does_not_mind_another_ones_timeout(tcp_pair: Pair) -> None:
    """A write that is given up half way costs its lane: what else is on that lane is tried again.

    Regression: lanes that broke failed a transfer while its link lived.
    """
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    src, dst = paged(tcp_pair, PAGED)
    decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    with frozen(prompt):
        decoder.do(begin_there, "pull", call, "pull_blocks", BLOCKS, Use("kv"), [1, 2], [6, 5])
        wait_until(lambda: any(decoder.do(_loads, 1)))
        decoder.do(_break_lanes, 1, 0)
    assert decoder.do(result_there, "pull") is None
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0), (6, 1), (5, 2)]))


@pytest.fixture
def relay(tcp_pair: Pair, tmp_path: Path) -> Iterator[Relay]:
    """An authenticated link, and the relay that its connections go through."""
    authority, extra = Authority(tmp_path), {"llm.Transport": "tcp", "llm.PeerTimeout": "600"}
    there, here = (extra | authority.issue(name, [cluster]) for name, cluster in (("prompt", 1), ("decoder", 2)))
    tcp_pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=there)
    tcp_pair.decoder.start("DECODER", 2, extra=here)
    assert tcp_pair.prompt.port is not None
    with Relay(("127.0.0.1", tcp_pair.prompt.port)) as relay:
        assert tcp_pair.decoder.do(link, [info(1, relay.port)]) == SUCCESS
        yield relay


#: Lanes that a peer may have on a link.
MAX_LANES = 10
#: Of the greeting of a lane (docs/protocol.md), which has a token between preamble and nonce.
PREAMBLE_BYTES, NONCE_BYTES = 12, 16
GREETING_BYTES = PREAMBLE_BYTES + 16 + NONCE_BYTES


@pytest.mark.parametrize("proof", ["made up", "recorded", "cut off", "none"])
def test_a_stranger_that_copies_the_greeting_of_a_lane_gets_no_lane(tcp_pair: Pair, relay: Relay, proof: str) -> None:
    """Nor does it keep lanes of the peer away, while its connections say nothing more."""
    ends = ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1))
    said, lanes = relay.carried("lane")[0].said, len(tcp_pair.decoder.do(_loads, 1))
    greeting, recorded = said[:GREETING_BYTES], said[GREETING_BYTES:][:32]
    with ExitStack() as opened:
        for _ in range(2 * MAX_LANES):
            sock = opened.enter_context(socket.create_connection(("127.0.0.1", tcp_pair.prompt.port), 10))
            sock.sendall(greeting)
            assert len(sock.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            if proof != "none":
                sock.sendall({"made up": bytes(32), "recorded": recorded, "cut off": recorded[:31]}[proof])
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b"", "the stranger's lane was accepted"
        assert len(tcp_pair.prompt.do(_loads, 2)) == lanes
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
        tcp_pair.prompt.do(_break_lanes, 2, 0)
        wait_until(lambda: all(len(end.do(_loads, peer)) == lanes for end, peer in ends))
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)


def test_an_authenticated_link_has_no_more_lanes_than_others_when_all_prove_themselves_at_once(
    tcp_pair: Pair, relay: Relay
) -> None:
    lanes, preamble = len(tcp_pair.decoder.do(_loads, 1)), relay.carried("lane")[0].said[:PREAMBLE_BYTES]
    room = MAX_LANES - lanes
    assert tcp_pair.decoder.do(_prove_at_once, preamble, room + 2) == [b"\1"] * room + [b""] * 2
    wait_until(lambda: len(tcp_pair.prompt.do(_loads, 2)) == lanes)
    bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)


def _prove_at_once(world: World, preamble: bytes, lanes: int) -> list[bytes]:
    """Prove the first lane when the last one has its nonce; return the answers, the refusals last."""
    address, token, secret = world.probe.lane_dial(1)
    with ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(lanes)]
        for sock in socks:
            sock.sendall(preamble + token + bytes(NONCE_BYTES))
        nonces = [sock.recv(NONCE_BYTES, socket.MSG_WAITALL) for sock in socks]
        for sock, nonce in zip(socks, nonces, strict=True):
            sock.sendall(hmac.digest(secret, b"proof" + bytes(NONCE_BYTES) + nonce + b"\1", "sha256"))
        return sorted((sock.recv(1) for sock in socks), reverse=True)


KV: Final = Use("kv")
ASKED, AT_ONCE = (1, 1), (0, 1)
REFUSED = (1, 2)


def key(number: int) -> CacheKey:
    return CacheKey(1, req_id=number)


def keys(*numbers: int) -> tuple[CacheKey, ...]:
    return tuple(key(number) for number in numbers)


def pull(world: World, method: str, *args: Any, **kwargs: Any) -> tuple[int, int]:
    """Pull; return how often the peer was asked where the cache is, and how often for bytes."""
    with count_arrivals() as counts:
        call(world, method, *args, **kwargs)
    return counts["ask, tcp"], counts["before copy, tcp"]


def waiting(end: End) -> set[str]:
    """Return the keys that wait, once no pull holds anything any more."""
    wait_until(lambda: end.do(picture).pins == 0)
    return {each.key for each in end.do(picture).keys}


@pytest.fixture
def ends(tcp_pair: Pair) -> Iterator[Ends]:
    """A producer with keys 10 to 15 of one cache, a consumer that has pulled key 10 into its row 7."""
    prompt, decoder = tcp_pair.start(sync_kv_timeout=20_000)
    src = prompt.do(make, "kv", Spec(keys=keys(10, 11, 12, 13, 14, 15)), 1)
    dst = decoder.do(make, "kv", Spec(), 2)
    assert decoder.do(pull, "pull_cache", key(10), KV, 7) == ASKED
    yield prompt, decoder, src, moved(dst, src, [(7, 0)])
    assert prompt.do(picture).unknown_releases == 0


def test_every_pull_by_key_but_the_first_is_one_request_and_brings_the_row_of_its_key(ends: Ends) -> None:
    prompt, decoder, src, dst = ends
    for number, into in ((13, 0), (11, 5)):
        assert decoder.do(pull, "pull_cache", key(number), KV, into) == AT_ONCE
        dst = moved(dst, src, [(into, number - 10)])
    layers: dict[str, Any] = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    assert decoder.do(partial(pull, **layers), "pull_cache", key(14), KV, 6) == AT_ONCE
    for tensor, half in zip(dst[:2], src[2:], strict=True):
        tensor[6] = half[4]
    same_bytes(decoder.do(show, "kv"), dst)
    same_bytes(prompt.do(show, "kv"), src)
    assert waiting(prompt) == {repr((0, number, 0)) for number in (12, 14, 15)}
    assert [each.unconsumed_bytes for each in prompt.do(picture).keys] == [192, 96, 192]
    # Into blocks: the first pull into such a cache asks.
    blocks = decoder.do(make, "blocks", Spec(stride=16, blocks=True), 3)
    for number, blocks_of, ways in ((12, [6, 0, 3], ASKED), (15, [1, 2, 5], AT_ONCE)):
        assert decoder.do(pull, "pull_blocks", key(number), Use("blocks"), [], blocks_of) == ways
        for tensor, rows in zip(blocks, src, strict=True):
            tensor[blocks_of] = rows[number - 10].reshape(3, 16)
    same_bytes(decoder.do(show, "blocks"), blocks)
    same_bytes(decoder.do(show, "kv"), dst)
    # A second pull of a key that was consumed finds nothing, however soon it comes.
    for number in (13, 13, 15):
        with pytest.raises(CacheNotFound, match=f"req_id={number}, model_id=0.* is not bound") as caught:
            decoder.do(call, "pull_cache", key(number), KV, 1)
        assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "resolve")
    same_bytes(decoder.do(show, "kv"), dst)


def test_a_cache_of_another_geometry_is_asked_about_and_then_assumed(ends: Ends) -> None:
    prompt, decoder, src, dst = ends
    wide = prompt.do(make, "wide", Spec(rows=3, stride=80, keys=keys(20, 21, 22)), 4)
    assert decoder.do(pull, "pull_cache", key(21), KV, 1) == REFUSED
    assert decoder.do(pull, "pull_cache", key(22), KV, 2) == AT_ONCE
    assert decoder.do(pull, "pull_cache", key(11), KV, 3) == REFUSED
    for tensor, row, rows in zip(dst, wide, src, strict=True):
        tensor[1], tensor[2], tensor[3] = row[1, :48], row[2, :48], rows[1]
    same_bytes(decoder.do(show, "kv"), dst)
    # The same key, of a cache of another geometry.
    prompt.do(call, "remove_cache_key", key(12))
    again = prompt.do(make, "again", Spec(rows=2, stride=96, keys=keys(30, 12)), 5)
    assert decoder.do(pull, "pull_cache", key(12), KV, 4) == REFUSED
    for tensor, row in zip(dst, again, strict=True):
        tensor[4] = row[1, :48]
    # What does not fit is not pulled, neither by what is assumed nor by what is true.
    prompt.do(make, "short", Spec(rows=12, stride=32, keys=keys(40)), 6)  # tensors of as many bytes as assumed
    assert decoder.do(pull, "pull_cache", key(13), KV, 0) == REFUSED
    with pytest.raises(CacheMismatch, match="a source row has 32 bytes"):
        decoder.do(call, "pull_cache", key(40), KV, 5)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 3)]))
    assert waiting(prompt) == {repr((0, number, 0)) for number in (14, 15, 20, 30, 40)}


def test_what_one_request_is_not_enough_for_is_asked_about_or_refused(ends: Ends) -> None:
    prompt, decoder, rows, kv = ends
    # A blocks cache has no pin; its answer is kept.
    paged = prompt.do(make, "paged", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 0)), 7)
    mine = decoder.do(make, "paged", Spec(blocks=True), 8)
    for into, ways in ((3, ASKED), (4, AT_ONCE)):
        assert decoder.do(pull, "pull_blocks", BlocksCacheKey(1, 0), Use("paged"), [1], [into]) == ways
    same_bytes(decoder.do(show, "paged"), moved(mine, paged, [(3, 1), (4, 1)]))
    # Nor is a large one, whatever is assumed for its parts.
    large = Spec(tensors=2, rows=4, stride=1 << 20, keys=keys(50, 51, 52, 53))
    src, dst = prompt.do(make, "large", large, 9), decoder.do(make, "large", Spec(2, 4, 1 << 20), 10)
    for row, (size, ways) in enumerate(((4096, ASKED), (4096, AT_ONCE), (-1, ASKED), (-1, ASKED))):
        assert decoder.do(pull, "pull_cache", key(50 + row), Use("large"), row, size) == ways
        for tensor, of in zip(dst, src, strict=True):
            tensor[row, : size if size > 0 else None] = of[row, : size if size > 0 else None]
    same_bytes(decoder.do(show, "large"), dst)
    # A request that overtakes the end of a transfer, which may have consumed the key.
    decoder.do(_settle_ahead)
    assert decoder.do(pull, "pull_cache", key(11), KV, 1) == REFUSED
    same_bytes(decoder.do(show, "kv"), moved(kv, rows, [(1, 1)]))


def _settle_ahead(world: World) -> None:
    """What has ended a transfer is counted here, and is on its way for ever."""
    mine, theirs = socket.socketpair()
    with mine, theirs, select.epoll() as epoll:
        Stream(mine.fileno(), epoll.fileno(), [], 1).send(b"", reports=world.probe.link(1).requests)


def test_r05_of_two_pulls_of_one_key_at_once_both_succeed_and_a_later_binding_is_not_consumed(
    ends: Ends, tmp_path: Path
) -> None:
    prompt, decoder, src, dst = ends
    decoder.do(begin_there, "first", gated_call, 1, "after copy", tmp_path, "pull_cache", key(11), KV, 1)
    (gate := Gate(tmp_path)).wait()
    assert prompt.do(picture).pins == 1
    assert decoder.do(pull, "pull_cache", key(11), KV, 2) == AT_ONCE
    wait_until(lambda: repr((0, 11, 0)) not in {each.key for each in prompt.do(picture).keys})
    new = prompt.do(make, "new", Spec(rows=1, keys=keys(11)), 3)
    gate.open()
    decoder.do(result_there, "first")
    same_bytes(decoder.do(show, "kv"), dst := moved(dst, src, [(1, 1), (2, 1)]))
    assert repr((0, 11, 0)) in waiting(prompt)
    assert decoder.do(pull, "pull_cache", key(11), KV, 3) == REFUSED  # of one row: another geometry
    same_bytes(decoder.do(show, "kv"), moved(dst, new, [(3, 0)]))


def test_the_memory_of_a_key_that_is_removed_waits_for_the_pull(ends: Ends, tmp_path: Path) -> None:
    prompt, decoder, _, _ = ends
    prompt.do(make, "one", Spec(keys=keys(60)), 3)
    with stopped(decoder, "after copy", tmp_path, "pull_cache", key(60), KV, 1) as pulling:
        prompt.do(forget, "one")
        prompt.do(call, "remove_cache_key", key(60))
        assert (prompt.do(picture).pins, prompt.do(picture).caches.draining) == (1, 1)
        pulling.finish()
    wait_until(lambda: prompt.do(picture).caches.draining == 0)
    assert prompt.do(picture).pins == 0


def test_r07_a_pull_from_an_owner_that_stands_still_ends_in_time_and_leaves_no_pin(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.start(sync_kv_timeout=400, extra={"llm.PeerTimeout": "600"})
    src, dst = prompt.do(make, "kv", Spec(keys=keys(10, 11, 12)), 1), decoder.do(make, "kv", Spec(), 2)
    decoder.do(call, "pull_cache", key(10), KV, 0)
    with frozen(prompt), pytest.raises(DeadlineExceeded) as caught:
        decoder.do(call, "pull_cache", key(11), KV, 1)
    assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_TIMEOUT, "copy")
    # The request and the release come together, in any order. Longer than that a pin would stay for two seconds.
    wait_until(lambda: prompt.do(picture).pins == 0, 1.0)
    assert waiting(prompt) == {repr((0, 11, 0)), repr((0, 12, 0))}
    wait_until(lambda: moves.in_time(decoder, call, "pull_cache", key(11), KV, 1))
    shown = decoder.do(show, "kv")
    same_bytes(shown, moved(moved(dst, src, [(0, 0)]), shown, [(1, 1)]))  # what was addressed was undefined meanwhile
    same_bytes([tensor[1:2] for tensor in shown], [tensor[1:2] for tensor in src])


@pytest.mark.parametrize("step", ["after copy", "release"])
def test_i5_a_killed_callers_pin_goes_its_key_stays(tmp_path: Path, step: str) -> None:
    with one_family("tcp") as family:
        prompt, victim = family.born("PROMPT", 1), family.born("DECODER", 2)
        assert victim.do(link, [info(1, prompt.port)]) == SUCCESS
        src = prompt.do(make, "kv", Spec(keys=keys(10, 11)), 1)
        victim.do(make, "kv", Spec(), 2)
        victim.do(call, "pull_cache", key(10), KV, 0)
        wait_until(lambda: prompt.do(picture).pins == 0)
        with stopped(victim, step, tmp_path, "pull_cache", key(11), KV, 1):
            assert prompt.do(picture).pins == 1
            family.kill(victim)
        wait_until(lambda: prompt.do(picture).links == ())
        assert waiting(prompt) == {repr((0, 11, 0))}
        same_bytes(prompt.do(show, "kv"), src)
