"""Grants: what a reader may pull with one, how it ends, and claims of it by one reader or several."""

import asyncio
import pickle
import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Final
from unittest.mock import Mock

import pytest

from faults.gated import watch_there
from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode, errors
from llm_datadist._links.messages import Claim, Claimed, ClaimEnded, Failed
from llm_datadist._transfer import grants
from llm_datadist.errors import CacheMismatch, CacheNotFound, DeadlineExceeded, GrantEnded, ParamError, StateError
from llm_datadist.metrics import GrantStatistics
from llm_datadist.types.grant import Grant
from tests.support import linking, moves
from tests.support.ends import Call, Family, frozen, one_family
from tests.support.grants import AT_OWNER, LONG, at_owner, claim, grant, in_child, pull, pull_claimed, tell, totals
from tests.support.kinds import Bytes, LocalEnd, Pair, World
from tests.support.linking import SUCCESS, explain, info, link, statistics, unlink
from tests.support.moves import BLOCKS, Spec, Use, forget, make, moved, picture, refill, same_bytes, show, wait_until
from tests.support.pairs import TRANSPORTS
from tests.support.source import run
from tests.support.world import byte_views

pytestmark = [
    pytest.mark.covers(
        "GrantStatistics",
        "Cache.grant",
        "Grant: active from_bytes revoke to_bytes claimed end release released renew",
        "errors: CacheNotFound GrantEnded StateError",
        "CacheManager.claim_grant",
        "LLMDataDist.incarnation",
    ),
    pytest.mark.gpu,
]

PAGED = Spec(blocks=True, blocks_key=BLOCKS)
REGISTERED = Spec(blocks=True, blocks_key=BLOCKS, memory="inside")
OTHER = BlocksCacheKey(1, 1)


TOKEN = b"forked reader 16"


def claim_data(world: World, data: bytes, *_: list[int]) -> None:
    claim(world, Grant.from_bytes(data).token)


def give(world: World, blocks: list[int], token: bytes | None = None, ttl: float = LONG) -> bytes:
    """Grant blocks of "kv"; return the token."""
    return Grant.from_bytes(grant(world, blocks, ttl, token=token)).token


def both(pair: Pair, source: Spec = REGISTERED, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(**settings)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", Spec(blocks=True), 2)


def reuse(world: World) -> None:
    """What a scheduler does with a block that it gives to another request."""
    world.memory["grant"].revoke()
    for view in byte_views(world.caches["kv"]):
        view[:] = 0xEE


def pull_async(world: World, data: bytes, src: list[int], dst: list[int]) -> None:
    asyncio.run(world.cm.pull_blocks_async(BLOCKS, world.caches["kv"], src, dst, grant=Grant.from_bytes(data)))


@pytest.mark.parametrize("pair", [*TRANSPORTS, "cma"], indirect=True)
@pytest.mark.parametrize("source", [PAGED, REGISTERED], ids=["allocated", "registered"])
def test_exactly_the_granted_blocks_are_pulled_until_the_grant_ends(pair: Pair, source: Spec) -> None:
    """Whatever the form of the call, it says why a grant has ended."""
    src, dst = both(pair, source)
    prompt, decoder = pair.prompt, pair.decoder

    def refused(data: bytes, blocks: list[int], why: str) -> None:
        token = Grant.from_bytes(data).token.hex()
        for form in (pull, pull_async, claim_data):
            with pytest.raises(GrantEnded, match=rf"rant {token[:8]} of .* has ended: {why}, \d+\.\d s ago$") as caught:
                decoder.do(form, data, blocks, [4 + n for n in range(len(blocks))])
            error = caught.value
            assert (error.status_code, error.retryable, error.peer) == (LLMStatusCode.LLM_FAILED, False, 1)
            assert (isinstance(error, errors.CacheError), token[:9] in str(error)) == (True, False)
            same_bytes(decoder.do(show, "kv"), dst)

    other, short, later = (prompt.do(grant, [3], ttl) for ttl in (LONG, 0.05, 0.1))
    wait_until(lambda: not prompt.do(tell, "grant", "active"))
    for over in (short, later):
        refused(over, [3], "its time was over")
    data = prompt.do(grant, [1, 2, 5])
    for wrong, arguments, kind, text in (  # the last one is of another incarnation
        (data, ([1, 3], [0, 1]), ParamError, r"src_blocks: block 3 is not among the 3 blocks of the grant"),
        (data, ([1], [0], BlocksCacheKey(9, 0)), ParamError, r"grant: .* of cluster 1, .* names cluster 9"),
        (data, ([], [0], CacheKeyByIdAndIndex(1, 1, 0)), ParamError, "src_blocks is empty: .* a grant"),
        (Grant(1, b"x" * 16, 1, (1, 1), b"y" * 16, (1,)).to_bytes(), ([1], [0]), GrantEnded, "has ended"),
    ):
        with pytest.raises(kind, match=text):
            decoder.do(pull, wrong, *arguments)
    with pytest.raises(TypeError):
        decoder.do(partial(moves.call, grant=data), "pull_blocks", BLOCKS, Use("kv"), [1], [0])
    same_bytes(decoder.do(show, "kv"), dst)
    for granted, pairs in ((data, [(6, 1), (0, 2)]), (data, [(3, 5)]), (other, [(7, 3)])):
        for form in (pull, pull_async):
            decoder.do(form, granted, [s for _, s in pairs], [d for d, _ in pairs])
            dst = moved(dst, src, pairs)
            same_bytes(decoder.do(show, "kv"), dst)
            dst = decoder.do(refill, "kv", 2)
    assert prompt.do(tell, "grant", "active")
    prompt.do(reuse)
    assert not prompt.do(tell, "grant", "active")
    refused(data, [1], "revoked")
    assert prompt.do(picture).pins == 0
    prompt.do(forget, "kv")
    prompt.do(make, "later", source, 9)
    refused(other, [3], "its cache was freed")


def test_a_grant_finds_the_cache_to_which_its_key_is_bound_now(pair: Pair) -> None:
    """The reader has kept the place of the cache that the key named before."""
    both(pair, PAGED)
    pair.decoder.do(pull, pair.prompt.do(grant, [1]), [1], [1])
    pair.prompt.do(forget, "kv")
    src, dst = pair.prompt.do(make, "kv", PAGED, 8), pair.decoder.do(refill, "kv", 2)
    pair.decoder.do(pull, pair.prompt.do(grant, [2]), [2], [3])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 2)]))


def test_a_grant_of_an_owner_that_does_not_answer_has_ended_where_its_guard_says_so(shm_pair: Pair) -> None:
    _, dst = both(shm_pair, PAGED, sync_kv_timeout=300)
    data = shm_pair.prompt.do(grant, [1])
    wait_until(lambda: moves.in_time(shm_pair.decoder, pull, data, [1], [1]))  # so that the place is known
    shm_pair.decoder.do(refill, "kv", 2)
    shm_pair.prompt.do(reuse)
    with frozen(shm_pair.prompt):
        with pytest.raises(GrantEnded, match=r"has ended$"):
            shm_pair.decoder.do(pull, data, [1], [1])
        with pytest.raises(DeadlineExceeded, match=r"claim_grant: grant [0-9a-f]{8} of cluster 1 from .*: no answer"):
            shm_pair.decoder.do(claim_data, data)
    same_bytes(shm_pair.decoder.do(show, "kv"), dst)


#: What a process does that reads its first grant; prints the functions of others that ran meanwhile.
_READS: Final = """
import sys
from llm_datadist.types.grant import Grant

ran = []
sys.setprofile(lambda frame, event, _: ran.append(frame.f_code) if event == "call" else None)
Grant.from_bytes(bytes.fromhex(sys.argv[1]))
sys.setprofile(None)
print([code.co_qualname for code in ran if "llm_datadist" not in code.co_filename])
"""


def test_the_first_grants_of_a_process_may_be_read_by_two_threads(local_pair: Pair) -> None:
    """A decoder that msgspec puts together then, in Python, ends the process while another thread uses it."""
    both(local_pair)
    done = run(sys.executable, "-c", _READS, local_pair.prompt.do(grant, [1]).hex())
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_grants_are_small_values_that_only_their_process_may_end_and_bad_ones_are_refused(local_pair: Pair) -> None:
    both(local_pair)
    prompt = local_pair.prompt
    data = prompt.do(grant, [2, 1, 2])
    copy = Grant.from_bytes(data)
    again = pickle.loads(pickle.dumps(copy))
    assert (again, hash(again)) == (copy, hash(copy))
    assert (copy.blocks, copy.cluster_id, copy.cache_id, len(data) < 96) == (frozenset({1, 2}), 1, 2, True)
    for verb, *args in (("revoke",), ("active",), ("released",), ("claimed",), ("end",), ("renew", 1.0)):
        with pytest.raises(StateError, match="only the process of cluster 1"):
            getattr(copy, str(verb))(*args)  # a property is refused when it is read
    with pytest.raises(StateError, match="was not claimed here"):
        copy.release()
    for broken in (b"", b"\x01", b"\x01\xc0", data + b"x", b"\x01\x90"):
        with pytest.raises(ParamError, match="not a grant"):
            Grant.from_bytes(broken)
    with pytest.raises(ParamError, match="a grant of version 2; this release reads version 1"):
        Grant.from_bytes(b"\x02" + data[1:])
    prompt.do(make, "rows", Spec(), 3)
    before = prompt.do(picture)
    for blocks, ttl, kind, text in (
        ([], 1.0, ParamError, "blocks"),
        ([8], 1.0, ParamError, r"block 8 is outside \[0, 8\)"),
        ([-1], 1.0, ParamError, "blocks"),
        ([1], 0.0, ParamError, "ttl"),
        ([1], -1.0, ParamError, "ttl"),
        ([1], float("nan"), ParamError, "ttl"),
        ([1], "1", TypeError, "ttl"),
        (None, 1.0, TypeError, "blocks"),
    ):
        with pytest.raises(kind, match=text):
            prompt.do(grant, blocks, ttl)
    with pytest.raises(ParamError, match="blocks cache"):
        prompt.do(grant, [0], 1.0, "rows")
    assert prompt.do(picture) == before
    prompt.do(forget, "kv")
    with pytest.raises((CacheNotFound, StateError)):
        prompt.do(grant, [1])


@pytest.fixture(params=["shm", "tcp"])
def family(request: pytest.FixtureRequest) -> Iterator[Family]:
    with one_family(request.param) as family:
        yield family


def state(world: World, token: bytes) -> tuple[bool, bool]:
    """Return (active, released)."""
    grant = world.memory[token.hex()]
    assert (grant.end == "") is grant.active
    return grant.active, grant.released()


def incarnation(world: World) -> str:
    return world.dd.incarnation


def test_a_claimed_grant_pulls_its_blocks_and_ends_when_it_is_released(pair: Pair) -> None:
    src, dst = both(pair, PAGED)
    prompt, decoder = pair.prompt, pair.decoder
    assert decoder.do(explain, 1).peer_incarnation == prompt.do(incarnation) != decoder.do(incarnation)
    token = prompt.do(give, [1, 2])
    decoder.do(claim, token)
    decoder.do(claim, token)  # again, by the same reader
    assert prompt.do(totals).claimed == 1
    decoder.do(pull_claimed, [2, 1], [0, 5])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 2), (5, 1)]))
    assert prompt.do(state, token) == (True, False)
    decoder.do(tell, "claimed", "release")
    decoder.do(tell, "claimed", "release")
    wait_until(lambda: prompt.do(state, token) == (False, True))
    with pytest.raises(GrantEnded, match="has ended: released by its readers, "):
        decoder.do(pull_claimed, [1], [3])
    with pytest.raises(GrantEnded, match="has ended: released by its readers, "):
        decoder.do(claim, token)
    with pytest.raises(ParamError, match=rf"token: {token[:4].hex()} names another grant"):
        prompt.do(give, [1], token)
    assert prompt.do(totals) == GrantStatistics(0, 0, 0, released=1, expired=0, revoked=0, lost=0)
    # A claim waits for its grant.
    token = secrets.token_bytes(16)
    claiming = Call(decoder.do, claim, token)
    wait_until(lambda: prompt.do(totals).waiting == 1)
    prompt.do(give, [4], token)
    claiming.result()
    decoder.do(pull_claimed, [4], [4])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 2), (5, 1), (4, 4)]))
    assert (prompt.do(totals).waiting, prompt.do(totals).claimed) == (0, 1)


@pytest.mark.parametrize(("wait", "budget_ms"), [(True, 100), (False, 0)])
def test_a_claim_that_its_grant_does_not_meet_in_time_can_be_repeated(pair: Pair, wait: bool, budget_ms: int) -> None:
    both(pair, PAGED, sync_kv_timeout=100 if wait else 60_000)
    prompt, decoder = pair.prompt, pair.decoder
    token = secrets.token_bytes(16)
    unknown = f"{token[:4].hex()} of cluster 1: no such grant is known there yet"
    with pytest.raises(DeadlineExceeded, match=unknown) as caught:
        decoder.do(claim, token, 1, 1, wait)
    error, text = caught.value, str(caught.value)
    assert (error.retryable, error.peer, error.budget_ms, token.hex() in text) == (True, 1, budget_ms, False)
    assert ("; waiting for it from cluster 1 " in text) is wait
    wait_until(lambda: prompt.do(totals).waiting == 0)  # of one that waited, a heartbeat later
    prompt.do(give, [4], token)
    assert (prompt.do(totals).claimed, prompt.do(tell, token.hex(), "claimed")) == (0, False)
    decoder.do(claim, token, 1, 1, wait)
    assert prompt.do(tell, token.hex(), "claimed")


def test_a_grant_lasts_as_long_as_it_is_renewed(local_pair: Pair) -> None:
    both(local_pair, PAGED)
    prompt = local_pair.prompt
    short = b""
    while not short:  # a loaded machine may need several within so short a time
        token = prompt.do(give, [1], None, 0.1)
        with suppress(StateError):
            prompt.do(tell, token.hex(), "renew", LONG)
            short = token
    expired = prompt.do(totals).expired
    other = prompt.do(give, [2], None, 0.2)
    wait_until(lambda: prompt.do(state, other) == (False, False))
    assert prompt.do(state, short) == (True, False)
    prompt.do(tell, short.hex(), "renew", 0.05)
    wait_until(lambda: prompt.do(state, short) == (False, False))
    with pytest.raises(StateError, match="has ended: its time was over"):
        prompt.do(tell, short.hex(), "renew", LONG)
    third = prompt.do(give, [3])
    for ttl, kind in ((0, ParamError), (-1.0, ParamError), (float("inf"), ParamError), ("1", TypeError)):
        with pytest.raises(kind, match="ttl"):
            prompt.do(tell, third.hex(), "renew", ttl)
    prompt.do(tell, third.hex(), "revoke")
    prompt.do(tell, third.hex(), "revoke")
    assert prompt.do(totals) == GrantStatistics(0, 0, 0, released=0, expired=expired + 2, revoked=1, lost=0)


def give_and_end(world: World) -> tuple[int, int]:
    kept = world.caches["kv"].grant([0], LONG)
    for _ in range(500):
        world.caches["kv"].grant([1], LONG).revoke()
    for _ in range(20):
        short = world.caches["kv"].grant([1], 0.001)
        while short.active:
            time.sleep(0.0005)
    kept.revoke()
    return world.probe.grant_looks()


def test_the_newest_ended_grants_are_remembered_and_counted(local_pair: Pair) -> None:
    both(local_pair)
    tokens = local_pair.prompt.do(give_and_revoke, grants.MAX_ENDED + 2)
    assert local_pair.prompt.do(statistics).tables == {"ended_grants": grants.MAX_ENDED, "peer_secrets": 1}
    for token in (tokens[2], tokens[-1]):
        with pytest.raises(errors.GrantEnded, match="revoked"):
            local_pair.decoder.do(claim, token)


def give_and_revoke(world: World, count: int) -> list[bytes]:
    given = [world.caches["kv"].grant([1], LONG) for _ in range(count)]
    for each in given:
        each.revoke()
    return [each.token for each in given]


def test_grants_that_have_ended_leave_little_to_look_at(local_pair: Pair) -> None:
    both(local_pair)
    expiries, looks = local_pair.prompt.do(give_and_end)
    assert expiries < 100
    assert looks <= 2


def test_a_grant_for_several_readers_ends_when_all_have_released_it_and_admits_no_more(family: Family) -> None:
    prompt = family.born("PROMPT", 1)
    prompt.do(make, "kv", PAGED, 1)
    decoders = [family.born("DECODER", number) for number in (2, 3, 4)]
    for decoder in decoders:
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    first, second, third = decoders
    token = prompt.do(give, [1])
    for decoder in (first, second):
        decoder.do(claim, token, 2)
    with pytest.raises(CacheNotFound, match="has all of its readers already: 2"):
        third.do(claim, token, 2)
    with pytest.raises(CacheMismatch, match="is shared by 2 readers, not by 1"):
        third.do(claim, token, 1)
    assert prompt.do(tell, token.hex(), "claimed")
    first.do(tell, "claimed", "release")
    with pytest.raises(CacheNotFound, match="has all of its readers"):
        third.do(claim, token, 2)
    assert prompt.do(state, token) == (True, False)
    second.do(tell, "claimed", "release")
    wait_until(lambda: prompt.do(state, token) == (False, True))
    # Who renews what is claimed must not keep it for a reader that never comes.
    token = prompt.do(give, [1])
    first.do(claim, token, 2)
    assert prompt.do(tell, token.hex(), "claimed")
    first.do(tell, "claimed", "release")
    wait_until(lambda: not prompt.do(tell, token.hex(), "claimed"))
    assert prompt.do(state, token) == (True, False)


@pytest.mark.parametrize("how", ["killed", "unlinked"])
def test_a_reader_that_is_lost_ends_the_grants_that_it_has_claimed_only(family: Family, how: str) -> None:
    prompt, decoder = family.born("PROMPT", 1), family.born("DECODER", 2)
    prompt.do(make, "kv", PAGED, 1)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    mine, released, unclaimed = (prompt.do(give, [block]) for block in (1, 2, 3))
    for token in (released, mine):
        decoder.do(claim, token)
        if token == released:
            decoder.do(tell, "claimed", "release")
    decoder.begin(claim, secrets.token_bytes(16))
    wait_until(lambda: prompt.do(totals).waiting == 1)
    if how == "killed":
        family.kill(decoder)
    else:
        assert prompt.do(unlink, [info(2)], 10_000, True) == SUCCESS
        with pytest.raises(errors.LLMException):
            decoder.finish()
        decoder.do(tell, "claimed", "release")  # there is nobody to tell
    wait_until(lambda: not prompt.do(state, mine)[0])
    states = [prompt.do(state, token) for token in (mine, released, unclaimed)]
    assert states == [(False, False), (False, True), (True, False)]
    assert prompt.do(totals) == GrantStatistics(1, 0, 0, released=1, expired=0, revoked=0, lost=1)


def unlink_before_a_claim(world: World, peer: int, waits: bool) -> None:
    """Have another thread give the link up, by force, when the control thread has a claim, or one that waits."""
    manager = world.probe.engine.links

    def give_up(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if (name, subject) == ("handle", manager) and isinstance(details[0], Claim) and details[0].budget_ms >= waits:
            assert Call(unlink, world, [info(peer)], 10_000, True).result() == SUCCESS

    watch_there(world, give_up)


@pytest.mark.parametrize("waits", [False, True], ids=["of a grant", "before its grant"])
def test_a_claim_in_hand_while_another_thread_ends_the_link_is_not_kept(family: Family, waits: bool) -> None:
    """Regression: the control thread had the claim in hand while another thread dropped all that the peer had."""
    prompt, decoder = family.born("PROMPT", 1), family.born("DECODER", 2, sync_kv_timeout=600_000)
    prompt.do(make, "kv", PAGED, 1)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    token = secrets.token_bytes(16) if waits else prompt.do(give, [1])
    prompt.do(unlink_before_a_claim, 2, waits)
    with suppress(errors.LLMException):  # its answer may have come first
        decoder.do(claim, token)
    linking.alone(prompt, decoder)
    wait_until(lambda: (prompt.do(totals).claimed, prompt.do(totals).waiting) == (0, 0))


def test_what_a_peer_says_after_the_end_of_its_link_is_not_heard(end: LocalEnd) -> None:
    """Regression: a grant stayed claimed for a link that had ended."""
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    end.do(make, "kv", PAGED, 1)
    first, second = (end.do(give, [block]) for block in (1, 2))
    with Stranger(end.port) as stranger:
        stranger.link()
        end.do(unlink_before_a_claim, 66, False)
        stranger.say(Claim(1, first, 1, 0), Claim(2, second, 1, 0))  # another thread ends the link at the first one
        assert stranger.is_hung_up_on()
    wait_until(lambda: end.do(state, first) == (False, False))
    assert end.do(state, second) == (True, False)


def test_what_is_wrong_with_a_claim_or_a_pull_is_said(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    both(local_pair, PAGED)
    prompt, decoder = local_pair.prompt, local_pair.decoder
    token = prompt.do(give, [1])
    wrong: Any = (
        (decoder, claim, (b"x" * 15,), ParamError, "token: 15 bytes, it must have 16"),
        (decoder, claim, ("x" * 16,), TypeError, "token"),
        (decoder, claim, (None,), TypeError, "token"),
        (decoder, claim, (token, 1, 9), errors.NotLinked, "cluster 9"),
        (decoder, claim, (token, 1, -1), ParamError, "cluster_id"),
        (decoder, claim, (token, 0), ParamError, "readers: 0, it must be in"),
        (decoder, claim, (token, 1025), ParamError, "readers: 1025, it must be in"),
        (decoder, claim, (token, "1"), TypeError, "readers"),
        (prompt, give, ([1], b"x"), ParamError, "token: 1 bytes"),
        (prompt, give, ([1], token), ParamError, "names another grant"),
    )
    for end, verb, arguments, kind, text in wrong:
        with pytest.raises(kind, match=text):
            end.do(verb, *arguments)
    assert prompt.do(totals).active == 1
    monkeypatch.setattr(grants, "MAX_GRANT", 32)  # a message has room for more blocks than a pool here
    token = prompt.do(give, [1, 2])
    with pytest.raises(CacheMismatch, match="2 blocks, too many for one message"):
        decoder.do(claim, token)
    assert prompt.do(totals).claimed == 0
    data = prompt.do(grant, [1])
    prompt.do(make, "another", Spec(blocks=True, blocks_key=OTHER), 3)
    with pytest.raises(errors.TransferFailed, match="is not of what the key names"):
        decoder.do(pull, data, [1], [1], OTHER)
    decoder.do(pull, data, [1], [1])


def told(link: Mock) -> list[Any]:
    return [call.args[0] for call in link.tell.call_args_list]


def _watch_answers(world: World) -> None:
    """Keep whether the lock of the grants was free while a claim was answered: sending may log, or end the link."""
    free = world.memory.setdefault("free", [])
    lock = world.probe.engine.grants._lock  # noqa: SLF001 (who holds it is what is asked)

    def watch(name: str, _: object, details: tuple[Any, ...]) -> None:
        if name == "send" and isinstance(details[0], (Claimed, Failed)):
            free.append(lock.acquire(blocking=False))
            if free[-1]:
                lock.release()

    watch_there(world, watch)


def _was_free(world: World) -> list[bool]:
    return list(world.memory["free"])


def test_claims_are_answered_without_a_lock(shm_pair: Pair) -> None:
    both(shm_pair)
    token = shm_pair.prompt.do(give, [1, 2])
    shm_pair.prompt.do(_watch_answers)
    shm_pair.decoder.do(claim, token)
    with pytest.raises(DeadlineExceeded, match="no such grant is known there yet"):
        shm_pair.decoder.do(claim, TOKEN, 1, 1, False)
    assert shm_pair.prompt.do(_was_free) == [True, True]


def test_waiting_claims_are_bounded_late_ones_given_back(local_pair: Pair) -> None:
    both(local_pair, PAGED)
    given = local_pair.prompt.do(lambda world: world.probe.engine).grants
    peer, other, late = Mock(), Mock(), Mock()
    tokens = [secrets.token_bytes(16) for _ in range(3)]
    for number in range(grants.MAX_WAITING):
        given.on_claim(peer, Claim(number, tokens[number in (1, 2)], 1, 60_000))
    peer.tell.assert_not_called()
    given.on_claim(peer, Claim(7, tokens[2], 1, 60_000))
    assert [(each.id, each.code) for each in told(peer)] == [(7, int(LLMStatusCode.LLM_LINK_BUSY))]
    given.on_claim(other, Claim(1, tokens[0], 1, 1))
    given.check_integrity()
    given.expire_claims(time.monotonic() + 1)
    assert given.statistics().waiting == grants.MAX_WAITING
    local_pair.prompt.do(give, [1], tokens[1])
    assert ([each.id for each in told(peer)[1:]], given.statistics().claimed, told(other)) == ([1, 2], 1, [])
    grants.on_late_claim(late, told(peer)[-1])
    assert told(late) == [ClaimEnded(tokens[1], released=False)]
    given.on_claim_ended(other, ClaimEnded(tokens[1], released=True))  # not its claim
    assert given.statistics().claimed == 1
    given.on_claim_ended(peer, told(late)[0])
    assert (given.statistics().claimed, given.statistics().active) == (0, 1)
    given.drop_peer(peer)
    given.drop_peer(other)
    assert given.statistics().waiting == 0
    with pytest.raises(errors.ProtocolError):
        grants.on_late_claim(late, Claimed(1, b"x"))


@pytest.mark.parametrize("name", AT_OWNER)
def test_a_forked_child_of_the_owner_gives_renews_and_ends_no_grant(shm_pair: Pair, name: str) -> None:
    (src, dst), prompt, decoder = both(shm_pair, PAGED), shm_pair.prompt, shm_pair.decoder
    data, before = prompt.do(grant, [1, 2]), prompt.do(picture)
    kind, text = prompt.do(at_owner, name)
    assert (kind, "fork" in text, text.startswith(name.partition(",")[0])) == ("StateError", True, True), text
    assert prompt.do(picture) == before  # which checks the guards in the shared table, too
    # In the slot that a child would have taken.
    prompt.do(make, "later", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 7)), 3)
    decoder.do(pull, data, [1], [4])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(4, 1)]))
    prompt.do(tell, "grant", "revoke")
    assert prompt.do(picture).grants.revoked == 1


def test_a_forked_child_of_the_reader_releases_nothing_and_what_it_has_is_a_copy(shm_pair: Pair) -> None:
    (src, dst), prompt, decoder = both(shm_pair, PAGED), shm_pair.prompt, shm_pair.decoder
    prompt.do(grant, [1, 2], LONG, "kv", TOKEN)
    decoder.do(claim, TOKEN)
    kind, text = decoder.do(release_in_child)
    assert (kind, "fork" in text, text.startswith("release")) == ("StateError", True, True), text
    assert [prompt.do(tell, "grant", each) for each in ("active", "claimed", "end")] == [True, True, ""]
    decoder.do(pull_claimed, [2], [6])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(6, 2)]))
    decoder.do(tell, "claimed", "release")
    data = prompt.do(grant, [1, 2])
    assert prompt.do(copied) == ("returned", repr((data.hex(), [1, 2])))


def copied(world: World) -> tuple[str, str]:
    def look(world: World) -> tuple[str, list[int]]:
        held: Grant = world.memory["grant"]
        assert byte_views(world.caches["kv"])[0].any()
        return held.to_bytes().hex(), sorted(Grant.from_bytes(held.to_bytes()).blocks)

    return in_child(world, look)


def release_in_child(world: World) -> tuple[str, str]:
    return in_child(world, lambda world: tell(world, "claimed", "release"))
