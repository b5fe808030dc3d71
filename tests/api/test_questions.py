"""Questions of users' own over a link, callbacks of lost peers, grants for one peer, digests of blocks."""

import os
import secrets
import socket
import sys
import threading
from typing import Any, Final

import numpy as np
import pytest

from faults.strangers import Stranger
from llm_datadist import CacheKeyByIdAndIndex, LLMException, LLMStatusCode
from llm_datadist.errors import (
    CacheMismatch,
    DeadlineExceeded,
    GrantEnded,
    LinkError,
    NotLinked,
    ParamError,
)
from llm_datadist.types.grant import Grant
from llm_datadist.types.question import PeerQuestion
from tests.support.ends import frozen, one_family
from tests.support.kinds import LocalEnd, Pair, World
from tests.support.linking import SUCCESS, info, link, speaking, unlink
from tests.support.moves import BLOCKS, Spec, make, show, wait_until
from tests.support.wire import messages
from tests.support.world import byte_views

pytestmark = [
    pytest.mark.covers(
        "LLMDataDist: answer_questions ask on_peer_lost",
        "PeerQuestion: answer may origin refuse tenant",
        "CacheManager: digest_blocks release_grant",
        "Cache.grant",
    ),
    pytest.mark.gpu,
]

PAGED: Final = Spec(blocks=True, blocks_key=BLOCKS)
TOKEN: Final = b"one peer's grant"


def serve(world: World) -> None:
    """Echo; with a first word refuse, fail, or keep the question."""
    kept: list[PeerQuestion] = world.memory.setdefault("kept", [])

    def handler(question: PeerQuestion) -> bytes | None:
        word, _, rest = question.body.partition(b" ")
        if word == b"refuse":
            raise CacheMismatch(f"no {rest.decode()}")
        if word == b"fail":
            raise ZeroDivisionError("of the handler")
        if word == b"exit":
            sys.exit("of the handler")
        if word == b"keep":
            kept.append(question)
            return None
        if word == b"late":
            threading.Thread(target=question.answer, args=(rest,), name="late").start()
            return None
        return b"%d %s %s" % (question.cluster_id, question.incarnation.encode(), question.body)

    world.dd.answer_questions("echo", handler)


def ask(world: World, body: bytes, timeout: int = 5000, name: str = "echo") -> bytes:
    return world.dd.ask(1, name, body, timeout)


def incarnation(world: World) -> str:
    return world.dd.incarnation


def kept(world: World) -> int:
    return len(world.memory["kept"])


def answer_kept(world: World) -> None:
    for question in world.memory["kept"]:
        question.answer(b"at last")
        question.answer(b"again")


def started(pair: Pair) -> Pair:
    pair.start()
    pair.prompt.do(serve)
    return pair


@pytest.mark.parametrize("pair", ["shm", "tcp", "inproc"], indirect=True)
def test_a_question_is_answered_with_the_peers_own_id(pair: Pair) -> None:
    decoder = started(pair).decoder
    name = decoder.do(incarnation).encode()
    for body in (b"", b"\0\xff", secrets.token_bytes(messages.MAX_BODY - 64)):
        assert decoder.do(ask, body) == b"2 " + name + b" " + body
    assert decoder.do(ask, b"late one") == b"one"


def origins(world: World) -> list[str]:
    """Return where the peers that asked run, in the order of their questions."""
    kept: list[PeerQuestion] = world.memory["kept"]
    return [question.origin for question in kept]


def tells_where(world: World) -> None:
    world.memory["kept"] = kept = list[PeerQuestion]()
    world.dd.answer_questions("where", kept.append)


@pytest.mark.parametrize("pair", ["shm", "tcp", "inproc"], indirect=True)
def test_a_question_says_where_the_kernel_sees_its_peer(pair: Pair) -> None:
    prompt, decoder = pair.start()
    for asker, owner, peer in ((decoder, prompt, 1), (prompt, decoder, 2)):
        owner.do(tells_where)
        with pytest.raises(DeadlineExceeded):
            asker.do(ask_where, peer)
        pid = asker.do(own_pid)
        over_tcp = f"uid {os.geteuid()}" if owner is prompt else "127.0.0.1"  # dialled
        wait_until(lambda: len(owner.do(origins)) == 1)  # noqa: B023 (called here)
        assert owner.do(origins) == [over_tcp if pair.transport == "tcp" else f"pid {pid}"]


def own_pid(world: World) -> int:
    return os.getpid()


def ask_where(world: World, peer: int) -> None:
    world.dd.ask(peer, "where", b"", 1)


@pytest.mark.parametrize("over", ["shm", "tcp"])
def test_links_of_one_process_have_one_origin_whatever_they_say(end: LocalEnd, over: str) -> None:
    """Other cluster ids, incarnations, pids and loopback addresses are words of the peer."""
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    end.do(tells_where)
    for cluster_id in (66, 67):
        with Stranger(end.port, cluster_id) as stranger:
            stranger.sock.close()
            source = f"127.0.0.{cluster_id}", 0
            stranger.sock = socket.create_connection(("127.0.0.1", end.port or 0), 60, source_address=source)
            stranger.link(over=over, pid=cluster_id, host=f"host {cluster_id}")
            stranger.say(messages.Question(1, "where", b"", 1000))
            stranger.is_served()
    assert set(end.do(origins)) == {f"pid {os.getpid()}" if over == "shm" else f"uid {os.geteuid()}"}
    assert end.do(kept) == 2


def test_a_refused_question_has_status_and_text_and_the_link_stays(shm_pair: Pair) -> None:
    decoder = started(shm_pair).decoder
    with pytest.raises(CacheMismatch, match="ask 'echo' of cluster 1: no reason") as caught:
        decoder.do(ask, b"refuse reason")
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    with pytest.raises(LLMException, match="internal error: ZeroDivisionError") as other:
        decoder.do(ask, b"fail")
    assert (type(other.value), other.value.status_code) == (LLMException, LLMStatusCode.LLM_FAILED)
    with pytest.raises(LLMException, match="internal error: SystemExit"):
        decoder.do(ask, b"exit")
    with pytest.raises(LLMException, match="no handler answers") as none:
        decoder.do(ask, b"", 5000, "other")
    assert none.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for arguments, text in (
        ((b"x" * (messages.MAX_BODY + 1),), "body: .* bytes, at most"),
        ((b"", 5000, ""), "name: 0 characters"),
        ((b"", 5000, "x" * 65), "name: 65 characters"),
        ((b"", 0), "timeout=0"),
    ):
        with pytest.raises(ParamError, match=text):
            decoder.do(ask, *arguments)
    assert decoder.do(ask, b"late yes") == b"yes"


def test_a_question_without_answer_ends_in_time_and_too_many_are_refused(shm_pair: Pair) -> None:
    prompt, decoder = started(shm_pair).prompt, shm_pair.decoder

    for _ in range(256):
        with pytest.raises(DeadlineExceeded):
            decoder.do(ask, b"keep", 1)
    wait_until(lambda: prompt.do(kept) == 256)
    with pytest.raises(LinkError, match="256 questions of this peer wait") as caught:
        decoder.do(ask, b"keep")
    assert caught.value.status_code is LLMStatusCode.LLM_LINK_BUSY
    prompt.do(answer_kept)
    assert decoder.do(ask, b"late yes") == b"yes"
    with frozen(prompt), pytest.raises(DeadlineExceeded, match="ask 'echo' of cluster 1"):
        decoder.do(ask, b"", 20)
    assert decoder.do(ask, b"late yes") == b"yes"


def bad_callables(world: World) -> None:
    for bad in (5, "print"):
        with pytest.raises(TypeError, match=r"handler only support \[function\]"):
            world.dd.answer_questions("x", bad)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"callback only support \[function\]"):
            world.dd.on_peer_lost(bad)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="callback"):
        world.dd.on_peer_lost(None)  # type: ignore[arg-type]
    world.dd.answer_questions("x", None)


def test_handlers_that_cannot_be_called_are_type_errors(shm_pair: Pair) -> None:
    started(shm_pair).prompt.do(bad_callables)


def test_a_peer_of_a_release_without_questions_is_named(shm_pair: Pair) -> None:
    with speaking(shm_pair.prompt, features=["reads-by-key"]):
        started(shm_pair)
    with pytest.raises(LLMException, match="knows no questions") as caught:
        shm_pair.decoder.do(ask, b"")
    assert caught.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


# --- lost peers, and grants for one -----------------------------------------------------------------------------------
def note_lost(world: World) -> None:
    lost: set[tuple[int, str]] = world.memory.setdefault("lost", set())
    world.dd.on_peer_lost(lambda cluster, incarnation: lost.add((cluster, incarnation)))


def lost_peers(world: World) -> set[tuple[int, str]]:
    return set(world.memory["lost"])


def lend(world: World, peer: int | None = 2, ttl: float | None = None, token: bytes = TOKEN) -> bytes:
    world.memory["grant"] = grant = world.caches["kv"].grant([1, 3], ttl, token=token, peer=peer)
    return grant.to_bytes()


def state(world: World) -> tuple[bool, bool, str]:
    grant: Grant = world.memory["grant"]
    return grant.active, grant.claimed(), grant.end


def pull_by_id(world: World, data: bytes, row: int = 0) -> None:
    grant = Grant.from_bytes(data)
    key = CacheKeyByIdAndIndex(1, grant.cache_id, row)
    world.cm.pull_blocks(key, world.caches["kv"], [3, 1], [0, 5], grant=grant)


def release(world: World, token: bytes = TOKEN) -> None:
    world.cm.release_grant(1, token)


@pytest.mark.parametrize("pair", ["shm", "tcp", "inproc"], indirect=True)
def test_a_grant_for_a_peer_lasts_until_its_release_and_is_pulled_by_cache_id(pair: Pair) -> None:
    pair.start()
    prompt, decoder = pair.prompt, pair.decoder
    src, dst = prompt.do(make, "kv", Spec(blocks=True), 1), decoder.do(make, "kv", Spec(blocks=True), 2)
    data = prompt.do(lend)
    assert prompt.do(state) == (True, True, "")
    decoder.do(pull_by_id, data)
    for before, after, source in zip(dst, decoder.do(show, "kv"), src, strict=True):
        expected = before.copy()
        expected[[0, 5]] = source[[3, 1]]
        np.testing.assert_array_equal(after, expected)
    with pytest.raises(ParamError, match="the key names"):
        decoder.do(pull_by_id, data, 1)
    decoder.do(release)
    wait_until(lambda: not prompt.do(state)[0])
    assert prompt.do(state) == (False, False, "released by its readers")
    with pytest.raises(GrantEnded, match="released by its readers"):
        decoder.do(pull_by_id, data)
    decoder.do(release)  # again, and an unknown one
    decoder.do(release, b"x" * 16)


@pytest.mark.parametrize("how", ["unlinked", "killed"])
def test_a_grant_for_a_peer_ends_with_its_link_before_the_callback(how: str) -> None:
    with one_family("shm") as family:
        prompt, decoder = family.born("PROMPT", 1), family.born("DECODER", 2)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        prompt.do(make, "kv", PAGED, 1)
        prompt.do(note_lost)
        name = decoder.do(incarnation)
        prompt.do(lend)
        assert prompt.do(lost_peers) == set()
        if how == "killed":
            family.kill(decoder)
        else:
            assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
        wait_until(lambda: prompt.do(lost_peers) == {(2, name)})
        assert prompt.do(state) == (False, False, "a reader was lost")
        with pytest.raises(NotLinked):
            prompt.do(lend, 2, None, b"another token 16")


def test_a_grant_without_lifetime_needs_a_peer(shm_pair: Pair) -> None:
    shm_pair.start()
    shm_pair.prompt.do(make, "kv", PAGED, 1)
    with pytest.raises(ParamError, match="ttl: None"):
        shm_pair.prompt.do(lend, None)
    shm_pair.prompt.do(lend, 2, 0.05)
    wait_until(lambda: shm_pair.prompt.do(state) == (False, False, "its time was over"))


# --- digests ----------------------------------------------------------------------------------------------------------
def digests(world: World, blocks: list[int], nonce: bytes = b"n" * 16) -> Any:
    return world.cm.digest_blocks(world.caches["kv"], blocks, nonce)


def flip(world: World, tensor: int, block: int) -> None:
    cache = world.caches["kv"]
    byte_views(cache)[tensor].reshape(cache.cache_desc.shape[0], -1)[block, -1] ^= 1


def test_a_digest_of_a_block_changes_with_any_of_its_tensors_and_with_the_nonce(shm_pair: Pair) -> None:
    shm_pair.start()
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    for end in (prompt, decoder):
        end.do(make, "kv", Spec(blocks=True), 1)
    before = prompt.do(digests, [2, 0, 2, 1])
    assert before.shape == (4, 2)
    np.testing.assert_array_equal(before, decoder.do(digests, [2, 0, 2, 1]))
    np.testing.assert_array_equal(before[0], before[2])
    assert len({tuple(each) for each in before.tolist()}) == 3
    assert not (before == prompt.do(digests, [2, 0, 2, 1], b"m" * 16)).any()
    for tensor in range(len(prompt.do(show, "kv"))):
        prompt.do(flip, tensor, 0)
        changed = (prompt.do(digests, [2, 0, 2, 1]) != before).any(axis=1)
        assert changed.tolist() == [False, True, False, False]
        prompt.do(flip, tensor, 0)
    assert prompt.do(digests, []).shape == (0, 2)
    with pytest.raises(ParamError, match="blocks"):
        prompt.do(digests, [99])
    with pytest.raises(ParamError, match="nonce"):
        prompt.do(digests, [0], b"short")
