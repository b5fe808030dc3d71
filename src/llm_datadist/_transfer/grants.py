"""Grants at the owner (:class:`Grants`), and claims at readers (:func:`claim_grant`).

A claim names a token. It waits for its grant at most as long as its reader; if the grant has ended, ``ClaimOver`` says
why. ``ClaimEnded`` ends a claim. The end of a link ends every grant claimed and not released over it. A grant for a
peer begins as claimed by it.

    given --Claim of each reader--> claimed --ClaimEnded of all readers--> released
      either, at any time: expired | revoked | its reader was lost | its cache was freed | finalized

Every end advances the guard, so running pulls fail and the owner may reuse the blocks.
"""

from __future__ import annotations

import heapq
import math
import secrets
import threading
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import check_callable, check_rule, check_type, check_uint64, require_intact
from llm_datadist._links.messages import MAX_GRANT, Claim, Claimed, ClaimEnded, ClaimOver, RemoteFailure, failed
from llm_datadist._log import calls_logger as logger
from llm_datadist._native import LentBlocks, parse_blocks
from llm_datadist._native.public_call import elsewhere, put_off
from llm_datadist._transport.connection import guards_of
from llm_datadist.errors import (
    CacheError,
    CacheNotFound,
    DeadlineExceeded,
    GrantEnded,
    LinkError,
    LLMException,
    LLMStatusCode,
    ParamError,
    ProtocolError,
    StateError,
)
from llm_datadist.metrics import GrantStatistics
from llm_datadist.types.grant import EXPIRED, READER_LOST, RELEASED, TOKEN_BYTES, Grant, shown, state_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._links.messages import Message
    from llm_datadist._transfer.access import AccessPolicy
    from llm_datadist.types.grant import OnEnd

#: Reasons of an end, beside those of ``types/grant.py``.
_REVOKED: Final = "revoked"
_FINALIZED: Final = "finalized"

_ENDS_AT_ONCE: Final = 16  # grants of a lost reader
MAX_WAITING: Final = 4096  # waiting claims of one peer; beyond, the answer is LLM_LINK_BUSY
_MAX_WAIT_S: Final = 24 * 3600.0  # longest wait of a claim
_FEW: Final = 64  # expiries of ended and renewed grants that are kept in any case
_CLOCK_STEP: Final = 0.001  # seconds, above the resolution by which asyncio calls early
MAX_ENDED: Final = 1 << 14  # ended grants remembered, 3 MiB, so that their claims do not wait


def check_token(token: object) -> bytes:
    """Return the token; TypeError, ParamError."""
    named = check_type("token", token, bytes)
    check_rule(len(named) == TOKEN_BYTES, f"token: {len(named)} bytes, it must have {TOKEN_BYTES}")
    return named


def _check_ttl(ttl: object) -> float:
    seconds = check_type("ttl", ttl, (int, float))
    check_rule(0 < seconds < math.inf, f"ttl: {seconds} s, it must be above 0 and finite")
    return float(seconds)


class _ActiveGrant(msgspec.Struct, eq=False):
    """Grant that has not ended. Threads: under the lock of :class:`Grants`."""

    grant: Grant
    entry: Entry  # may be freed
    until: float  # monotonic
    readers: int = 0  # number, by the first claim
    claims: set[Link] = msgspec.field(default_factory=set)  # not released yet
    releases: int = 0
    on_end: OnEnd = None


class _Waiting(NamedTuple):
    """Claim before its grant."""

    link: Link
    claim: Claim
    until: float  # monotonic


class Grants:
    """Grants of this instance; ``call_at`` calls on the control thread at a monotonic time.

    Owns: a guard for every active grant, and the waiting claims.
    Threads: control for messages and expiry, any for the rest, lost links too. Guards advance outside the lock.
    """

    def __init__(
        self,
        cluster_id: int,
        caches: LocalCaches,
        policy: AccessPolicy,
        call_at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._cluster_id = cluster_id
        self._caches = caches
        self._policy = policy
        self._call_at = call_at
        self.link_to: Callable[[int], Link]  # of the links, which are made later
        self._lock = threading.Lock()  # guards all below
        self._advanced = threading.Condition(self._lock)  # notified after each end
        self._given: dict[bytes, _ActiveGrant] = {}
        self._expiries: list[tuple[float, bytes]] = []  # a heap, also with times before a renewal
        self._looks: list[float] = []  # a heap: when the control thread will look at it
        self._waiting: dict[bytes, list[_Waiting]] = {}  # by token
        self._waiting_of: Counter[Link] = Counter()
        self._claimed: dict[Link, set[bytes]] = {}  # tokens by claiming link: a lost link costs its own claims only
        self._ended: dict[bytes, tuple[str, float]] = {}  # reason and monotonic time; oldest first
        self._ends: Counter[str] = Counter()
        self._closed = False
        self._refused = ""  # why nothing is granted any more

    def __str__(self) -> str:
        return f"cluster {self._cluster_id} (incarnation {self._caches.exports.incarnation.hex()[:8]})"

    def grant(
        self, cache_id: int, blocks: object, ttl: float | None, token: bytes | None, peer: int | None, on_end: OnEnd
    ) -> Grant:
        """Return a grant for ``blocks``, claimed by ``peer`` if given. Errors as :meth:`Cache.grant`."""
        with self._lock:
            self._require_open()
        numbers = parse_blocks("blocks", blocks)
        if on_end is not None:
            check_callable("on_end", on_end)
        check_rule(len(numbers) > 0, "blocks: empty, a grant is for one block at least")
        if ttl is None:
            check_rule(peer is not None, "ttl: None, only a grant for a peer ends without a lifetime")
        seconds = math.inf if ttl is None else _check_ttl(ttl)
        token = secrets.token_bytes(TOKEN_BYTES) if token is None else check_token(token)
        link = None if peer is None else self.link_to(check_uint64("peer", peer))
        with self._caches.using(cache_id, "grant: cache") as entry:
            entry.geometry.require_kind("grant: cache", CacheKind.BLOCKS)
            rows = entry.geometry.rows
            block = numbers.largest
            check_rule(block < rows, f"blocks: block {block} is outside [0, {rows}) of cache {cache_id}")
            if link is not None:
                self._policy.require(link, "pull")
                self._policy.require_sight(link, entry)
            guard = self._caches.exports.guards.allocate()
            incarnation, key = self._caches.exports.incarnation, (guard.slot, guard.generation)
            try:
                grant = Grant(self._cluster_id, incarnation, cache_id, key, token, numbers.array, self)
                until = time.monotonic() + seconds
                for waiting, answer in self._add(_ActiveGrant(grant, entry, until, on_end=on_end), link):
                    waiting.tell(answer)
            except BaseException:
                added = self._given.get(token)
                if added is not None and added.grant.guard == key:  # cut off, as by a lack of memory
                    added.on_end = None  # the caller gets no grant
                    self._end(_REVOKED, [token])
                else:
                    self._caches.exports.guards.release(guard.slot)
                raise
        if link is not None and link.ended:  # perhaps before it was claimed here
            self._end(READER_LOST, [token])
        return grant

    def _add(self, given: _ActiveGrant, link: Link | None) -> list[tuple[Link, Message]]:
        """Add a grant; return the answers to the claims that waited for it."""
        token, until = given.grant.token, given.until
        with self._lock:
            self._require_open()
            if token in self._given or token in self._ended:
                raise ParamError(f"token: {shown(token)} names another grant of this LLMDataDist; draw a new one")
            self._given[token] = given
            if (lent := given.entry.storage.lent) is not None:
                blocks = LentBlocks(given.grant.block_numbers.tolist(), given.entry.geometry.stride)
                lent[given.grant.guard] = blocks
            if link is not None:
                self._take(given, link, 1)
            earliest = until < math.inf and self._expires(until, token)
            # Under the same lock, so a link's end finds its claims waiting or taken.
            waiting = self._drop_waiting(lambda _: True, [token])
            answers = [(each.link, self._claim(each.link, each.claim)) for each in waiting]
        if earliest:
            self._call_at(until, self._expire)
        return answers

    def _require_open(self) -> None:
        """Under the lock."""
        if self._closed:
            raise StateError(
                f"grant: {self} is finalized; grant with a handle that was made since init",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
            )
        self._refuse_new()

    def _refuse_new(self) -> None:
        """Under the lock."""
        if self._refused:
            raise LinkError(self._refused, status_code=LLMStatusCode.LLM_LINK_BUSY)

    def refuse(self, why: str) -> None:
        """Give no grant any more, and tell those that wait for one; active ones stay."""
        with self._lock:
            self._refused = why
            waiting = self._drop_waiting(lambda _: True, list(self._waiting))
        for each in waiting:
            each.link.tell(failed(each.claim.id, LinkError(why, status_code=LLMStatusCode.LLM_LINK_BUSY)))

    def _expires(self, when: float, token: bytes) -> bool:
        """Under the lock: note when to look at a grant; return True if a look must be scheduled for then."""
        if len(self._expiries) > 2 * len(self._given) + _FEW:  # most are of grants that have ended, or were renewed
            found = [(each.until, token) for token, each in self._given.items() if each.until < math.inf]
            heapq.heapify(found)
            self._expiries = found
        heapq.heappush(self._expiries, (when, token))
        return self._looks_earlier(when)

    def _looks_earlier(self, when: float) -> bool:
        """Under the lock: return True, and note the look, if none is scheduled by then."""
        earlier = not self._looks or when < self._looks[0]
        if earlier:
            heapq.heappush(self._looks, when)
        return earlier

    def renew(self, grant: Grant, ttl: float) -> None:
        until = time.monotonic() + _check_ttl(ttl)
        with self._lock:
            if (given := self._given.get(grant.token)) is None:
                why = self._ended.get(grant.token, (state_of(grant).end,))[0]
                raise StateError(f"renew: {grant!r} has ended: {why}")
            given.until = until
            earliest = self._expires(until, grant.token)
        if earliest:
            self._call_at(until, self._expire)

    def claimed(self, grant: Grant) -> bool:
        with self._lock:
            given = self._given.get(grant.token)
            return given is not None and bool(given.claims)

    def revoke(self, grant: Grant) -> None:
        if not put_off(self._revoke, grant):
            self._revoke(grant)

    def _revoke(self, grant: Grant) -> None:
        self._end(_REVOKED, [grant.token])
        with self._advanced:  # where another thread ends it just now, its guard may not have advanced yet
            self._advanced.wait_for(lambda: state_of(grant).end)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            tokens = list(self._given)
        self._end(_FINALIZED, tokens)

    def statistics(self) -> GrantStatistics:
        with self._lock:
            return GrantStatistics(
                active=len(self._given),
                claimed=sum(map(len, self._claimed.values())),
                waiting=self._waiting_of.total(),
                released=self._ends[RELEASED],
                expired=self._ends[EXPIRED],
                revoked=self._ends[_REVOKED],
                lost=self._ends[READER_LOST],
            )

    @property
    def ended(self) -> int:
        """Number of ended grants whose reason is remembered."""
        return len(self._ended)

    def on_claim(self, link: Link, message: Claim) -> None:
        token = message.token
        try:
            self._policy.require(link, "pull")
            with self._lock:
                if token in self._given or token in self._ended or self._closed:
                    answer = self._claim(link, message)
                else:
                    self._refuse_new()
                    if not message.budget_ms:
                        raise DeadlineExceeded("no such grant is known there yet")
                    if self._waiting_of[link] >= MAX_WAITING:
                        raise LinkError(f"{MAX_WAITING} claims wait already", status_code=LLMStatusCode.LLM_LINK_BUSY)
                    until = time.monotonic() + min(message.budget_ms / 1e3, _MAX_WAIT_S)
                    self._waiting.setdefault(token, []).append(_Waiting(link, message, until))
                    self._waiting_of[link] += 1
                    return
        except LLMException as refusal:
            answer = failed(message.id, refusal)
        link.tell(answer)  # without the lock: its failure may log, or end the link

    def _claim(self, link: Link, claim: Claim) -> Message:
        """Under the lock: answer a claim of an active or ended grant."""
        number, token = claim.id, claim.token
        if (given := self._given.get(token)) is None:
            now = time.monotonic()
            why, when = self._ended.get(token, (_FINALIZED, now))
            return ClaimOver(number, why, int(1e3 * (now - when)))
        if not claim.readers:
            return failed(number, CacheError("the grant has not ended"))
        try:
            self._policy.require_sight(link, given.entry)
        except ParamError as denied:
            return failed(number, denied)
        readers = given.readers or claim.readers
        if readers != claim.readers:
            return failed(number, ParamError(f"the grant is shared by {readers} readers, not by {claim.readers}"))
        if link not in given.claims and len(given.claims) + given.releases >= readers:
            return failed(number, CacheNotFound(f"the grant has all of its readers already: {readers}"))
        data = given.grant.to_bytes()
        if len(data) > MAX_GRANT:
            text = f"the grant has {len(given.grant.block_numbers)} blocks, too many for one message"
            return failed(number, ParamError(text))
        self._take(given, link, readers)
        return Claimed(number, data)

    def _take(self, given: _ActiveGrant, link: Link, readers: int) -> None:
        """Under the lock: let ``link`` claim the grant."""
        given.readers = readers
        given.claims.add(link)
        self._claimed.setdefault(link, set()).add(given.grant.token)

    def on_claim_ended(self, link: Link, message: ClaimEnded) -> None:
        """End a claim, undone or released; the last release ends the grant."""
        with self._lock:
            given = self._given.get(message.token)
            if given is None or link not in given.claims:
                return  # the grant has ended
            self._forget_claim(link, given)
            given.releases += message.released
            over = given.releases >= given.readers > 0
        if over:
            self._end(RELEASED, [message.token])

    def drop_peer(self, link: Link) -> None:
        """End a lost reader's claimed grants and waiting claims."""
        with self._lock:
            if self._waiting_of[link]:
                self._drop_waiting(lambda claim: claim.link is link, list(self._waiting))
            del self._waiting_of[link]
            tokens = list(self._claimed.get(link, ()))
        self._end(READER_LOST, tokens[:_ENDS_AT_ONCE])
        if len(tokens) > _ENDS_AT_ONCE:  # others need the control thread, too
            self._call_at(time.monotonic(), lambda: self.drop_peer(link))

    def drop_cache(self, entry: Entry) -> None:
        with self._lock:
            tokens = [token for token, given in self._given.items() if given.entry is entry]
        self._end("its cache was freed", tokens)

    def expire_claims(self, now: float) -> None:
        with self._lock:
            self._drop_waiting(lambda claim: claim.until <= now, list(self._waiting))

    def check_integrity(self) -> None:
        with self._lock:
            waiting = Counter(claim.link for claims in self._waiting.values() for claim in claims)
            require_intact(waiting == self._waiting_of, f"grants: waiting {waiting} and {self._waiting_of}")
            taken = {(link, token) for token, given in self._given.items() for link in given.claims}
            held = {(link, token) for link, tokens in self._claimed.items() for token in tokens}
            require_intact(taken == held, f"grants: {len(taken)} claims and {len(held)} of links")

    def _drop_waiting(self, over: Callable[[_Waiting], bool], tokens: Iterable[bytes]) -> list[_Waiting]:
        """Under the lock: drop and return claims that are ``over``."""
        dropped = []
        for token in tokens:
            claims = self._waiting.pop(token, [])
            dropped += [each for each in claims if over(each)]
            if left := [each for each in claims if not over(each)]:
                self._waiting[token] = left
        self._waiting_of.subtract(each.link for each in dropped)
        return dropped

    def _forget_claim(self, link: Link, given: _ActiveGrant) -> None:
        """Under the lock."""
        given.claims.discard(link)
        tokens = self._claimed[link]
        tokens.discard(given.grant.token)
        if not tokens:
            del self._claimed[link]

    def _end(self, why: str, tokens: Iterable[bytes]) -> None:
        """End grants. On return their guards have advanced, but for those that another thread is ending."""
        with self._lock:
            over = [given for token in tokens if (given := self._remove(token, why)) is not None]
        self._advance(over, why)

    def _remove(self, token: bytes, why: str) -> _ActiveGrant | None:
        """Under the lock; :meth:`_advance` must follow."""
        if (given := self._given.pop(token, None)) is None:
            return None
        for link in list(given.claims):
            self._forget_claim(link, given)
        self._ended[token] = why, time.monotonic()
        self._ends[why] += 1
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        return given

    def _advance(self, over: Iterable[_ActiveGrant], why: str) -> None:
        for given in over:
            self._caches.exports.guards.release(given.grant.guard[0])
            if (lent := given.entry.storage.lent) is not None:  # after the guard, which tells a reader that it ended
                lent.pop(given.grant.guard, None)
        with self._advanced:
            for given in over:
                state_of(given.grant).end = why
            self._advanced.notify_all()
        for given in over:
            if given.on_end is not None:
                try:
                    given.on_end(given.grant)
                except BaseException as error:  # noqa: BLE001 (of the user; the others must end, too)
                    logger.error("unexpected error of on_end of %r", given.grant, exc_info=error)

    def _expire(self) -> None:
        """End the expired grants; schedule the next look. Threads: control."""
        now = time.monotonic()
        over: list[_ActiveGrant] = []
        with self._lock:
            while self._looks and self._looks[0] <= now + _CLOCK_STEP:  # this one may be called that early
                heapq.heappop(self._looks)
            while self._expiries and self._expiries[0][0] <= now:
                when, token = heapq.heappop(self._expiries)
                given = self._given.get(token)
                if given is not None and given.until == when:
                    self._remove(token, EXPIRED)  # now: renew() finds it until then
                    over.append(given)
            following = self._expiries[0][0] if self._expiries else math.inf
            earlier = following < math.inf and self._looks_earlier(following)
        self._advance(over, EXPIRED)
        if earlier:
            self._call_at(following, self._expire)


def claim_grant(
    links: LinkManager, cluster_id: int, token: bytes, readers: int, deadline: Deadline, *, wait: bool
) -> Grant:
    """Return the peer's grant. Errors as :meth:`CacheManager.claim_grant`. Threads: any."""
    what = f"claim_grant: grant {shown(token)} of cluster {cluster_id}"
    unknown = f"{what}: no such grant is known there yet"

    def ask(of: str, budget_ms: int) -> Message | None:
        """Return None if no such grant exists yet."""
        try:
            return link.request(lambda number: Claim(number, token, readers, budget_ms), deadline, of, "claim")
        except RemoteFailure as failure:
            if failure.status_code is LLMStatusCode.LLM_TIMEOUT:
                return None
            raise failure.typed(what) from failure

    with links.operation(cluster_id) as link:
        if (answer := ask(what, 0)) is None and wait:
            answer = ask(f"{unknown}; waiting for it", deadline.remaining_ms())
    if answer is None:
        raise DeadlineExceeded(unknown, peer=cluster_id, phase="claim")
    if isinstance(answer, ClaimOver):
        raise _over(link, what, answer)
    if not isinstance(answer, Claimed):
        raise ProtocolError(f"{what}: {link.peer} answered a Claim with {type(answer).__name__}")
    grant, peer = _claimed(answer, f"{what}: {link.peer}"), link.peer
    if (grant.token, grant.cluster_id, grant.incarnation) != (token, peer.cluster_id, peer.incarnation):
        raise ProtocolError(f"{what}: {peer} answered with {grant!r}")
    state_of(grant).end_claim = partial(_end_claim, [link], token)
    return grant


def _claimed(answer: Claimed, what: str) -> Grant:
    try:
        return Grant.from_bytes(answer.grant)
    except ParamError as error:
        raise ProtocolError(f"{what}: {error}") from error


def release_grant(links: LinkManager, cluster_id: int, token: bytes) -> None:
    """Tell the owner that this reader has finished; without a link the grant has ended."""
    if (link := links.peek(cluster_id)) is not None:
        _end_claim([link], token, released=True)


def give_back(grant: Grant) -> None:
    """Undo a claim: another reader may have the grant."""
    if (end_claim := state_of(grant).end_claim) is not None:
        end_claim(released=False)


def on_late_claim(link: Link, message: Claimed) -> None:
    """Undo a claim whose answer came after its caller had given up."""
    link.tell(ClaimEnded(_claimed(message, "the peer sent a Claimed without a grant").token, released=False))


@elsewhere
def why_ended(link: Link, grant: Grant, what: str, deadline: Deadline) -> GrantEnded | None:
    """Ask the owner why a grant has ended; None unless it has.

    Without an answer in time the owner's guard decides, if it is mapped here.
    """
    what, over = f"{what}: {grant!r}", link.peer.incarnation != grant.incarnation
    if not over:
        try:
            answer = link.request(lambda number: Claim(number, grant.token, 0, 0), deadline, what, "claim")
            if isinstance(answer, ClaimOver):
                return _over(link, what, answer)
        except RemoteFailure as failure:
            over = failure.status_code is LLMStatusCode.LLM_TIMEOUT  # forgotten since it ended
        except DeadlineExceeded:
            with suppress(LLMException):  # with remote guards none is mapped here
                shared = link.connection.shared
                over = not shared.guards_unchanged(guards_of(shared, [grant.guard]))
        except LLMException:
            return None  # the link has ended, as the next call reports
    return _over(link, what) if over else None


def _over(link: Link, what: str, told: ClaimOver | None = None) -> GrantEnded:
    why = "" if told is None else f": {told.why}, {told.ms / 1e3:.1f} s ago"
    return GrantEnded(f"{what} has ended{why}", peer=link.peer.cluster_id, phase="claim")


def _end_claim(claimed: list[Link], token: bytes, *, released: bool) -> None:
    """Tell the owner, once: not again after an interrupt, because it may have been told."""
    links, claimed[:] = claimed[:], []
    for link in links:
        if not put_off(link.tell, ended := ClaimEnded(token, released=released)):
            link.tell(ended)
