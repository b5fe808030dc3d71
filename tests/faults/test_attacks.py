"""Attacks that once worked: valid messages with false claims. docs/notes/faults.md has the table."""

import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from faults.strangers import Stranger, lane_token_of, listener, read_hello, welcome_of
from llm_datadist import CacheKey, LLMStatusCode
from llm_datadist._cache.registry import Namespace
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._links.dial import Dial
from llm_datadist._native import Plan, plan_row
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.resolution import Handle, encode_handle
from llm_datadist._transfer.target import Target
from llm_datadist._transport.moves import MoveReply, MoveRequest
from llm_datadist._transport.tcp.lanes import MAX_LANES, dial_lanes
from llm_datadist.errors import CacheNotFound, LinkRefused
from tests.support.ends import LocalEnd
from tests.support.linking import bytes_move_both_ways, info, link, links
from tests.support.moves import BLOCKS, Spec, make, picture, wait_until
from tests.support.pairs import Pair
from tests.support.world import World, residue_of


def _incarnation(world: World) -> bytes:
    return world.probe.engine.caches.exports.incarnation


def _answering(incarnation: bytes | None) -> Callable[[socket.socket], None]:
    """Welcome whoever dials, with that incarnation; None: with its own."""

    def behave(sock: socket.socket) -> None:
        hello = read_hello(sock)
        who = {"pid": 1, "host": "evil", "remote_accessible": hello.remote_accessible, "proof": secrets.token_bytes(32)}
        sock.sendall(wire.frame(welcome_of(1, incarnation or hello.incarnation, bytes(16), **who)))

    return behave


@pytest.mark.parametrize("transport", [None, "inproc", "tcp"])
def test_attack_poc1_a_listener_that_echoes_our_incarnation_is_no_peer_of_this_process(
    end: LocalEnd, transport: str | None
) -> None:
    end.start("DECODER", 2, extra={} if transport is None else {"llm.Transport": transport})
    with listener(_answering(None)) as port:
        code, codes = end.do(link, [info(1, port)])
    assert (code, codes) == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])
    assert end.do(links) == {}


def test_attack_poc1_a_dialler_that_echoes_our_incarnation_is_no_peer_of_this_process(shm_pair: Pair) -> None:
    shm_pair.start()
    with Stranger(shm_pair.prompt.port, incarnation=shm_pair.prompt.do(_incarnation)) as stranger:
        stranger.say(wire.CONTROL_PREAMBLE, stranger.hello())
        assert "lives in this process, the peer does not" in stranger.hear(wire.Refused).text
        assert stranger.is_hung_up_on()
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


@pytest.mark.parametrize("proof", [b"", bytes(32), None], ids=["no proof", "wrong proof", "joins"])
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_attack_poc5_a_stranger_with_a_peers_incarnation_does_not_replace_its_link_or_join_it(
    request: pytest.FixtureRequest, transport: str, proof: bytes | None
) -> None:
    pair: Pair = request.getfixturevalue(f"{transport}_pair")
    pair.start()
    assert pair.prompt.port is not None
    with Stranger(pair.prompt.port, 2, pair.decoder.do(_incarnation)) as stranger:
        stranger.say(wire.CONTROL_PREAMBLE, stranger.hello())
        welcome = stranger.hear(wire.Welcome)
        if proof is None:
            choice: dict[str, Any] = {"sequence": 1, "present": True, "proof": bytes(32)}
        else:
            for lane in dial_lanes(("127.0.0.1", pair.prompt.port), lane_token_of(welcome), 2, Deadline(5_000)):
                lane.socket.close()
            choice = {"sequence": 1 << 40, "proof": proof, "share": bytes(32)}
        stranger.choose(transport, **choice)
        refused = stranger.hear(wire.Refused)
        assert refused.code == LLMStatusCode.LLM_LINK_BUSY
        assert proof is None or "cannot prove" in refused.text
    assert pair.prompt.do(links) == {2: "ready"}
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_attack_poc5_a_stranger_at_the_address_of_a_lost_peer_does_not_get_its_link(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    lost = secrets.token_bytes(16)
    endpoint = end.world.probe.engine.links.endpoint
    with (
        listener(_answering(lost)) as port,
        Dial(endpoint, ("127.0.0.1", port), Deadline(5_000), incarnation=lost) as dial,
        pytest.raises(LinkRefused, match="cannot prove that it is the process of the lost link"),
    ):
        dial.greet(None)


class _Visitor(Stranger):
    """A stranger that links over tcp with as many lanes as it gets."""

    def join(self) -> str:
        """Become linked; return the text of the refusal, or nothing."""
        self.say(wire.CONTROL_PREAMBLE, self.hello(transport="tcp"))
        answer = self.hear(wire.Message)
        if isinstance(answer, wire.Welcome):
            address = self.sock.getpeername()[:2]
            dialled = dial_lanes(address, lane_token_of(answer), MAX_LANES, Deadline(10_000))
            self.lanes = [lane.socket for lane in dialled]
            self.choose("tcp", 1, share=bytes(32))
            answer = self.hear(wire.Message)
        return answer.text if isinstance(answer, wire.Refused) else ""


def _pins_end_within(world: World) -> float:
    return max(pin.expires for pin in world.probe.pins()) - time.monotonic()


def test_attack_poc8_strangers_use_up_no_more_links_and_descriptors_than_they_may(tcp_pair: Pair) -> None:
    tcp_pair.start(extra={"llm.MaxLinks": "8", "llm.PeerTimeout": "600"})  # the strangers send no beats
    prompt, port = tcp_pair.prompt, tcp_pair.prompt.port
    before = prompt.do(residue_of)["fds"].total()
    with ExitStack() as stack:
        refusals = [stack.enter_context(_Visitor(port, 1000 + number)).join() for number in range(40)]
        # One of the four that may come from one address is the decoder's.
        assert len(prompt.do(links)) == 4
        assert [text.partition(" already")[0] for text in refusals if text] == ["there are 4 links from 127.0.0.1"] * 37
        # The last of those that were refused may be leaving.
        wait_until(lambda: prompt.do(residue_of)["fds"].total() - before <= 3 * (2 + MAX_LANES))
        bytes_move_both_ways(prompt, tcp_pair.decoder)
    wait_until(lambda: prompt.do(links) == {2: "ready"})


def test_attack_poc8_a_release_over_lanes_consumes_nothing_that_was_not_sent(tcp_pair: Pair) -> None:
    tcp_pair.start()
    prompt, port = tcp_pair.prompt, tcp_pair.prompt.port
    prompt.do(make, "kv", Spec(keys=(CacheKey(1, 7, 0),)), 1)
    keys = prompt.do(picture).keys
    with _Visitor(port, 1000) as visitor:
        assert not visitor.join()
        visitor.say(wire.Resolve(1, False, (Namespace.REQUEST, 7, 0), 0, 0, 2**62))
        answer = visitor.hear(wire.Resolved)
        assert (answer.regions, answer.offsets) == (b"", b""), "no address leaves the owner"
        assert prompt.do(_pins_end_within) <= 24 * 3600 + 2
        visitor.say(wire.Release(answer.pin, 0, 4), wire.Ping(2))
        visitor.hear(wire.Pong)
        assert len(keys) == 1
        assert prompt.do(picture).keys == keys
    assert prompt.do(picture).pins == 0


@pytest.mark.gpu
@pytest.mark.parametrize("allowed", [False, True])
def test_attack_t1_a_guessed_address_is_written_only_where_the_owner_allows_it_and_the_log_says_so_once(
    end: LocalEnd, caplog: pytest.LogCaptureFixture, allowed: bool
) -> None:
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra={} if allowed else {"llm.WriteByAddress": "0"})
    end.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    cache = end.world.caches["kv"]
    with _Visitor(end.port, 1000) as visitor:
        assert not visitor.join()
        for _ in range(2):
            visitor.say(wire.Locate(1, np.array([cache.tensor_addrs[0] + 4], "<u8").tobytes(), 8))
            answer: wire.Message = visitor.hear(wire.Located | wire.Failed)  # type: ignore[arg-type]
            assert isinstance(answer, wire.Located if allowed else wire.Failed)
            if isinstance(answer, wire.Failed):
                assert answer.code == LLMStatusCode.LLM_FEATURE_NOT_ENABLED
                assert "llm.WriteByAddress=0 of the owner" in answer.text
        if not allowed:
            visitor.say(wire.Resolve(2, True, None, cache.cache_id, 0, 1000))
            assert "remote cache access" in visitor.hear(wire.Failed).text
    said = [each.getMessage() for each in caplog.records if "can be written" in each.getMessage()]
    assert len(said) == allowed
    assert all(f"cache {cache.cache_id} can be written by it" in text for text in said)
    assert all("llm.WriteByAddress=0" in text for text in said)
    wait_until(lambda: end.do(links) == {})


@pytest.mark.parametrize("ahead", [-1, 1, 3])
def test_attack_poc7_a_handle_with_another_generation_than_the_cache_is_refused(end: LocalEnd, ahead: int) -> None:
    end.start("PROMPT", 1)
    end.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    engine, cache = end.world.probe.engine, end.world.caches["kv"]
    guard = engine.caches.registry.lookup(cache.cache_id, "cache").guard
    target = Target(engine.caches, AccessPolicy(engine.caches))
    plan = Plan(0, 0, 1, plan_row(0, 0, 8), False, 8)

    def ask(generation: int) -> MoveReply:
        handle = encode_handle(Handle(cache.cache_id, 0, [wire.Guarded(guard.slot, generation)]))
        return target.on_move(object(), MoveRequest(handle, 48, plan, write=False))

    assert ask(guard.generation).guards[0][1] == guard.generation
    with pytest.raises(CacheNotFound, match="has changed since it was resolved"):
        ask(guard.generation + ahead)
