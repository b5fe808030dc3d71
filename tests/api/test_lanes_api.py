"""Data lanes on links: the way for private memory where the kernel refuses cma, lanes that break and come back."""

from __future__ import annotations

import ctypes
import errno
import hmac
import itertools
import socket
import struct
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from faults.relay import Relay
from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._transport.connect import LANES_PER_LINK
from llm_datadist._transport.lanes import LANE_PREAMBLE, MAX_LANES, NONCE_BYTES, TOKEN_BYTES
from llm_datadist.errors import DeadlineExceeded
from llm_datadist.testing import scene
from tests.support import seccomp
from tests.support.authority import Authority
from tests.support.ends import ChildEnd
from tests.support.frozen import frozen
from tests.support.linking import (
    SUCCESS,
    begin_there,
    bytes_move_both_ways,
    explain,
    info,
    link,
    result_there,
    start_both,
)
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.moves import Bytes
    from tests.support.pairs import Pair
    from tests.support.world import World

PAGED = Spec(blocks=True, blocks_key=BLOCKS)
OWN = BlocksCacheKey(2, 0)
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


def test_where_cma_is_refused_private_memory_goes_over_lanes(strangers: tuple[ChildEnd, ChildEnd]) -> None:
    """Also where it is refused in one direction: the decoder dials, so it makes the lanes that the prompt needs."""
    prompt, decoder = strangers
    start_both(prompt, decoder, "auto", enable_remote_cache_accessible=True)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    for end, peer in ((prompt, 2), (decoder, 1)):
        there = end.do(explain, peer)
        assert (there.transport, there.private_transport) == ("shm", "tcp")
        into, out = "the kernel does not let us into pid", "the kernel does not let the peer into this process"
        assert into in there.reason or out in there.reason
    for spec in (PAGED, replace(PAGED, memory="private")):
        src, dst = prompt.do(make, "kv", spec, 1), decoder.do(make, "kv", Spec(blocks=True), 2)
        decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 2], [6, 0])
        same_bytes(decoder.do(show, "kv"), dst := moved(dst, src, [(6, 1), (0, 2)]))
        decoder.do(call, "push_blocks", BLOCKS, Use("kv"), [3], [5])
        same_bytes(prompt.do(show, "kv"), src := moved(src, dst, [(5, 3)]))
        decoder.do(make, "own", replace(spec, blocks_key=OWN), 3)
        own = decoder.do(show, "own")
        prompt.do(call, "pull_blocks", OWN, Use("kv"), [4, 1], [2, 7])
        same_bytes(prompt.do(show, "kv"), src := moved(src, own, [(2, 4), (7, 1)]))
        prompt.do(call, "push_blocks", OWN, Use("kv"), [6], [0])
        same_bytes(decoder.do(show, "own"), moved(own, src, [(0, 6)]))
        prompt.do(forget, "kv")
        decoder.do(forget, "own")


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
    children: tuple[ChildEnd, ChildEnd], one: str, other: str, turned: bool, used: tuple[str, str | None] | None
) -> None:
    prompt, decoder = children
    here, there = (other, one) if turned else (one, other)
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra={"llm.Transport": there})
    decoder.start("DECODER", 2, extra={"llm.Transport": here})
    try:
        if used is None:
            failed = LLMStatusCode.LLM_LINK_FAILED
            assert decoder.do(link, [info(1, prompt.port)]) == (failed, [failed])
            return
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        for end, peer in ((prompt, 2), (decoder, 1)):
            explained = end.do(explain, peer)
            assert (explained.transport, explained.private_transport) == used
            # Ends that map each other have no lanes.
            assert (end.do(_lane_threads) > 0) == ("tcp" in used)
        src, dst = prompt.do(make, "kv", PAGED, 1), decoder.do(make, "kv", Spec(blocks=True), 2)
        decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [6])
        same_bytes(decoder.do(show, "kv"), moved(dst, src, [(6, 1)]))
    finally:
        decoder.stop()
        prompt.stop()


def _lane_threads(world: World) -> int:
    return sum(name.startswith("lldd-data") for name in scene.kernel_threads().values())


def _group(world: World, peer: int) -> Any:
    """Return the lanes of a link."""
    assert world.dd._engine is not None
    return world.dd._engine.links.get(peer).connection.shared._group  # type: ignore[attr-defined]


def _loads(world: World, peer: int) -> list[int]:
    """Return what each lane has to do."""
    return list(_group(world, peer)._loads.values())


def _break_lanes(world: World, peer: int, keep: int) -> None:
    """What a network does that forgets connections: the lanes end, the control connection stays."""
    group = _group(world, peer)
    for lane in list(group._loads)[keep:]:
        world.dd._engine._lanes.engine.drop_lane(lane)  # type: ignore[union-attr]
        group.discard(lane)


def paged(pair: Pair, spec: Spec, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(rca=True, extra={"llm.PeerTimeout": "600"}, **settings)
    return pair.prompt.do(make, "kv", spec, 1), pair.decoder.do(make, "kv", spec, 2)


def test_lanes_that_break_come_back_and_nobody_is_told(tcp_pair: Pair) -> None:
    src, dst = paged(tcp_pair, PAGED)
    ends = ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1))
    for (end, peer), keep in itertools.product(ends, (0, 2)):
        for block in range(4):
            end.do(_break_lanes, peer, keep)
            tcp_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [block], [7 - block])
            dst = moved(dst, src, [(7 - block, block)])
            same_bytes(tcp_pair.decoder.do(show, "kv"), dst)
        wait_until(lambda: all(len(end.do(_loads, peer)) == LANES_PER_LINK for end, peer in ends))
    # The end that was linked waits for the other to dial again.
    tcp_pair.prompt.do(_break_lanes, 2, 0)
    tcp_pair.prompt.do(call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [3], [1])
    same_bytes(tcp_pair.prompt.do(show, "kv"), moved(src, dst, [(1, 3)]))


def test_r07_after_a_timeout_over_lanes_the_link_goes_on(tcp_pair: Pair) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    large = Spec(2, 4, 4 << 20, blocks=True, blocks_key=BLOCKS)
    pool = '{"memory_size": 67108864, "page_shift": 12}'
    theirs, ours = paged(tcp_pair, large, mem_pool_cfg=pool, sync_kv_timeout=300)
    for method in ("pull_blocks", "push_blocks"):
        decoder.do(call, method, BLOCKS, Use("kv"), [0], [0])  # the answer is known from now on
        source, target, sent = (prompt, decoder, theirs) if method == "pull_blocks" else (decoder, prompt, ours)
        with frozen(prompt), pytest.raises(DeadlineExceeded) as caught:
            decoder.do(call, method, BLOCKS, Use("kv"), [0, 1, 2, 3], [3, 2, 1, 0])
        assert (caught.value.status_code, caught.value.phase) == (LLMStatusCode.LLM_TIMEOUT, "copy")
        wait_until(lambda method=method: decoder.do(_tries, method))  # type: ignore[misc]  # bound at once
        ours = decoder.do(show, "kv")
        same_bytes([tensor[1:2] for tensor in target.do(show, "kv")], [tensor[2:3] for tensor in sent])
        same_bytes(source.do(show, "kv"), sent)
        assert prompt.do(picture).pins == 0


def _tries(world: World, method: str) -> bool:
    """One more call; a loaded machine may need several within so short a time."""
    try:
        call(world, method, BLOCKS, Use("kv"), [2], [1])
    except DeadlineExceeded:
        return False
    return True


def test_a_pull_over_lanes_does_not_mind_another_ones_timeout(tcp_pair: Pair) -> None:
    """A write that is given up half way costs its lane: what else is on that lane is tried again."""
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


GREETING_BYTES = len(LANE_PREAMBLE) + TOKEN_BYTES + NONCE_BYTES


@pytest.mark.parametrize("proof", ["made up", "recorded", "cut off", "none"])
def test_a_stranger_that_copies_the_greeting_of_an_authenticated_lane_gets_no_lane(
    tcp_pair: Pair, relay: Relay, proof: str
) -> None:
    """Nor does it keep lanes of the peer away, while its connections say nothing more."""
    ends = ((tcp_pair.prompt, 2), (tcp_pair.decoder, 1))
    said = relay.carried("lane")[0].said
    greeting, recorded = said[:GREETING_BYTES], said[GREETING_BYTES:][:32]
    with ExitStack() as opened:
        for _ in range(2 * MAX_LANES):
            sock = opened.enter_context(socket.create_connection(("127.0.0.1", relay._target[1]), 10))
            sock.sendall(greeting)
            assert len(sock.recv(NONCE_BYTES, socket.MSG_WAITALL)) == NONCE_BYTES
            if proof != "none":
                sock.sendall({"made up": bytes(32), "recorded": recorded, "cut off": recorded[:31]}[proof])
                sock.shutdown(socket.SHUT_WR)
                assert sock.recv(1) == b"", "the stranger's lane was accepted"
        assert len(tcp_pair.prompt.do(_loads, 2)) == LANES_PER_LINK
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)
        tcp_pair.prompt.do(_break_lanes, 2, 0)
        wait_until(lambda: all(len(end.do(_loads, peer)) == LANES_PER_LINK for end, peer in ends))
        bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)


@pytest.mark.usefixtures("relay")
def test_an_authenticated_link_has_no_more_lanes_than_others_when_all_prove_themselves_at_once(tcp_pair: Pair) -> None:
    room = MAX_LANES - LANES_PER_LINK
    assert tcp_pair.decoder.do(_prove_at_once, room + 2) == [b"\1"] * room + [b""] * 2
    wait_until(lambda: len(tcp_pair.prompt.do(_loads, 2)) == LANES_PER_LINK)
    bytes_move_both_ways(tcp_pair.prompt, tcp_pair.decoder)


def _prove_at_once(world: World, lanes: int) -> list[bytes]:
    """Prove the first lane when the last one has its nonce; return the answers, the refusals last."""
    assert world.dd._engine is not None
    dial = world.dd._engine.links.get(1).connection.shared._reconnect  # type: ignore[attr-defined]
    (address, token), secret = dial.args, dial.keywords["secret"]
    with ExitStack() as opened:
        socks = [opened.enter_context(socket.create_connection(address, 10)) for _ in range(lanes)]
        for sock in socks:
            sock.sendall(LANE_PREAMBLE + token + bytes(NONCE_BYTES))
        nonces = [sock.recv(NONCE_BYTES, socket.MSG_WAITALL) for sock in socks]
        for sock, nonce in zip(socks, nonces, strict=True):
            sock.sendall(hmac.digest(secret, b"proof" + bytes(NONCE_BYTES) + nonce + b"\1", "sha256"))
        return sorted((sock.recv(1) for sock in socks), reverse=True)
