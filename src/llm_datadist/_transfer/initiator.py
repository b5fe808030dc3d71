"""The initiator of transfers: resolves, plans, copies, checks guards and settles, in the caller's thread.

Nothing here knows the public classes. The bytes addressed at the destination are undefined after a failure, all others
are untouched; a failed transfer consumes no key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Final, Protocol

import msgspec

from llm_datadist._cache.geometry import CacheKind, CachePair, unlike
from llm_datadist._checks import out_of_memory
from llm_datadist._links.messages import Consumed, Release, RemoteFailure, Resolve, Resolved, SocketsDropped
from llm_datadist._log import logger
from llm_datadist._native import CopyPool, Plan, steps
from llm_datadist._transfer.checksum import Comparison
from llm_datadist._transfer.grants import why_ended
from llm_datadist._transfer.resolution import RemoteName, Resolution, assume, keep, open_answer, with_grant
from llm_datadist._transport.connection import MemoryChanged
from llm_datadist._transport.moves import is_one_request
from llm_datadist.errors import (
    CacheMismatch,
    CacheNotFound,
    DeadlineExceeded,
    LinkError,
    LLMException,
    LLMStatusCode,
    ParamError,
    ProtocolError,
    TransferAborted,
    TransferFailed,
)

if TYPE_CHECKING:
    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._memory.write_intents import WriteIntent
    from llm_datadist._transport.connection import Recovery
    from llm_datadist.types.grant import Grant

#: Both caches -> what to copy.
MakePlan = Callable[[CachePair], Plan]

#: The first answer may be kept or assumed, the second is what the target says now. The other attempts are for sockets
#: beside the control connection, which the timeout of another transfer may break.
_ATTEMPTS: Final = 4
#: Time for the answer to a ping that was sent when a transfer had timed out, before.
_ANSWER_MS: Final = 200
#: Answers kept per link, and pairs of caches that the log has named.
_MAX_KEPT: Final = 65536


class Span(Protocol):
    """What measures an operation, see :meth:`Meters.span`."""

    transport: str


class DestinationPin(msgspec.Struct, eq=False):
    """Where the parts of one push went: the peer's incarnation, and its caches by name. Used by one thread.

    Between two parts, or two attempts, the peer may be initialised anew, and a key may move to another cache. The next
    part would fit there as well, and nothing would show that the parts before it are missing.
    """

    _peer: Peer | None = None
    _caches: dict[Hashable, int] = {}

    def require(self, peer: Peer, name: Hashable, cache_id: int, what: str) -> None:
        """Raise TransferFailed if an earlier part went elsewhere than to ``cache_id``, which ``name`` resolved to."""
        before = self._caches.get(name, cache_id)
        if self._peer is not None and self._peer.incarnation != peer.incarnation:
            moved = (
                f"{peer} has been initialised anew; what was sent before went to {self._peer} and is not there any more"
            )
        elif before != cache_id:
            moved = (
                f"{name} has been bound anew meanwhile: it is cache {cache_id} of {peer} now, and cache {before} there "
                "may hold a part of what was pushed"
            )
        else:
            return
        raise TransferFailed(f"{what}: {moved}; send all of it again", peer=peer.cluster_id, phase="resolve")

    def record(self, peer: Peer, name: Hashable, cache_id: int) -> None:
        """Note that a part has arrived there, or may have."""
        self._peer = peer
        self._caches[name] = cache_id


class TransferOp(msgspec.Struct, eq=False):
    """One pull or push. Used by one thread. As text it is what errors call its resolve."""

    name: RemoteName  # the remote cache; a push without remote cache access reaches only caches located before
    local: Entry  # the cache of this end; the caller holds it
    make_plan: MakePlan  # returns what to copy, once both caches are known; may raise ParamError
    deadline: Deadline
    what: str
    push: bool = False
    consumes: bool = False  # True if a complete push consumes the key of the remote row (interface R5)
    grant: Grant | None = None  # a pull succeeds only while this grant holds too
    destination_pin: DestinationPin | None = None  # where the earlier parts of a push in parts went
    span: Span | None = None  # learns which transport moves the bytes

    def __str__(self) -> str:
        return f"{self.what}: resolving {self.name}"


class Initiator:
    """Carries out pulls and pushes. Threads: any; all state is in the operation and in the links."""

    def __init__(
        self,
        links: LinkManager,
        pool: CopyPool | None,
        *,
        checksum: bool,
        strict: bool,
    ) -> None:
        self._links = links
        self._pool = pool
        self._checksum = checksum
        self._strict = strict

    def run(self, op: TransferOp) -> int:
        """Resolve, copy and settle; return the bytes moved. Errors as :meth:`CacheManager.pull_cache`."""
        try:
            return self._run(op)
        except MemoryError as error:
            if isinstance(error, LLMException):
                raise
            raise out_of_memory(op.what, error) from error

    def _run(self, op: TransferOp) -> int:
        if steps.watch is not None:
            steps.watch("link", self)
        link = self._links.get(op.name.cluster_id)
        if op.push and op.destination_pin is None:
            op.destination_pin = DestinationPin()  # an attempt that broke must not be continued elsewhere
        with link:
            try:
                return self._run_over(link, op)
            except (TransferFailed, CacheNotFound, DeadlineExceeded) as error:
                if op.grant is None or (ended := why_ended(link, op.grant, op.what, op.deadline)) is None:
                    raise
                raise ended from error

    def _run_over(self, link: Link, op: TransferOp) -> int:
        key = op.name, op.push
        for attempt in range(_ATTEMPTS):
            kept: Resolution | None = link.caches.kept.get(key) or (None if attempt else _assumed(link, op))
            remote = kept or self._resolve(link, op)
            plan: Plan | None = None
            try:
                plan = self._attempt(link, op, remote)
                if plan is not None:
                    return plan.nbytes
            except ParamError:
                # With remote guards an outdated answer looks like a current one: it may be what does not fit.
                if kept is None or not remote.tensors.remote_guards:
                    raise
            finally:
                if remote.pin or op.consumes:
                    _settle(link, op, remote, plan)
            link.caches.kept.pop(key, None)
            link.caches.assumed.pop(op.local.geometry, None)
        raise TransferFailed(
            f"{op.what}: {op.name} changed, or its connection broke, {_ATTEMPTS} times in a row",
            peer=op.name.cluster_id,
            phase="copy",
        )

    def _resolve(self, link: Link, op: TransferOp) -> Resolution:
        """Ask the target where the cache is; keep the answer unless it is pinned."""
        name, deadline = op.name, op.deadline

        def build(number: int) -> Resolve:
            return Resolve(number, op.push, name.key, name.cache_id, name.row, deadline.remaining_ms(), op.consumes)

        if steps.watch is not None:
            steps.watch("ask", link)
        try:
            answer = link.request(build, deadline, op, "resolve")
        except RemoteFailure as failure:
            raise failure.typed(op.what) from failure
        if not isinstance(answer, Resolved):
            raise ProtocolError(f"{op.what}: {link.peer} answered a Resolve with {type(answer).__name__}")
        remote = open_answer(link, answer, op.what, push=op.push)
        if not remote.pin:
            keep(link.caches.kept, (name, op.push), remote, _MAX_KEPT)
        return remote

    def _attempt(self, link: Link, op: TransferOp, remote: Resolution) -> Plan | None:
        """Plan, copy and verify under one answer; return the plan, None to resolve again."""
        if op.destination_pin is not None:
            op.destination_pin.require(link.peer, op.name, remote.cache_id, op.what)
        if op.grant is not None:
            remote = with_grant(remote, op.grant, link, op.what)
        # Announced before the guards are compared: from then on the owner waits for the end of the copy.
        intent = _announce(link, op, remote) if op.push or link.connection.capabilities.announces_reads else None
        try:
            # Compared before the plan: what does not fit an outdated answer may fit the true one.
            if not _current(link, op, remote):
                return None
            pair = remote.pair
            if first := pair is None or pair.cache_id != op.local.cache_id:
                comparable = link.connection.capabilities.same_addresses or not remote.tensors.private
                same_memory = comparable and op.local.storage.tensors.native.same_bases(remote.tensors.native)
                pair = CachePair(remote.geometry, remote.row, op.local.cache_id, same_memory)
            if steps.watch is not None:
                steps.watch("plan", link)
            plan = op.make_plan(pair)
            if first:
                # What is assumed is like an answer that was compared.
                if not remote.assumed and (difference := unlike(op.local.geometry, remote.geometry)):
                    self._find_unlike(link, op, remote, difference)
                remote.pair = pair
            if remote.assumed:
                if not is_one_request(plan):
                    return None
                remote.pin = remote.assumed  # from here on the owner may have it
            if not self._copy(link, op, remote, plan):
                return None
        finally:
            if intent is not None:
                intent.end()
        if self._checksum:  # while the pin keeps what the peer is asked about
            same_memory = pair.same_memory
            comparison = Comparison(link, op.local, remote, op.push, same_memory, op.deadline, op.what, self._pool)
            comparison.verify(plan)
        elif remote.pin and link.connection.capabilities.remote_guards and not remote.assumed and is_one_request(plan):
            keep(link.caches.assumed, op.local.geometry, remote, _MAX_KEPT)
        return plan

    def _find_unlike(self, link: Link, op: TransferOp, remote: Resolution, difference: str) -> None:
        """Warn, once for each pair of caches, that bytes would mean something else; raise with ``llm.StrictTypes``."""
        text = f"{op.what}: {op.name} and cache {op.local.cache_id} here: {difference}"
        if self._strict:
            raise CacheMismatch(f"{text}; llm.StrictTypes=1 refuses that")
        known, mark = link.caches.unlike, object()
        if len(known) < _MAX_KEPT and known.setdefault((remote.cache_id, op.local.cache_id), mark) is mark:
            logger.warning("%s; the bytes are moved as they are, llm.StrictTypes=1 would refuse that", text)

    def _copy(self, link: Link, op: TransferOp, remote: Resolution, plan: Plan) -> bool:
        """Copy, then re-check guards. Return False unless all bytes arrived: the caller resolves again."""
        connection = remote.tensors.connection
        recovery = connection.recovery
        move = connection.write if op.push else connection.read
        if op.span is not None:
            op.span.transport = connection.capabilities.name
        if recovery is not None:
            if recovery.suspects:
                _judge_suspects(link, recovery, op.deadline)
            if op.push and recovery.doubts_writes:
                _settle_writes(link, recovery, op)
        try:
            if steps.watch is not None:
                steps.watch("copy", link, op.push, op.deadline)
            try:
                move(plan, op.local.storage.tensors, remote.tensors, self._pool, op.deadline)
            except BaseException:
                if op.push and recovery is not None and recovery.doubts_writes:
                    _give_up_writes(link, recovery)
                raise
            if steps.watch is not None:
                steps.watch("copied", link, op.push)
        except DeadlineExceeded:
            if recovery is not None and recovery.suspects:
                link.last_question = link.ping()
            raise
        except MemoryChanged as error:
            # Refused before the first byte. The next resolve finds the new place, or says that the cache is gone.
            if remote.assumed and error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                remote.pin = 0  # refused before it was pinned
            return False
        except (LinkError, TransferAborted) as error:
            if not link.responds(op.deadline):
                if not link.ended:
                    op.deadline.check(f"{op.what} from {link.peer}", "copy", link.peer.cluster_id)
                raise link.lost_error(op.what, "copy") from error
            whole = False  # only sockets beside the link broke, after any number of bytes
        except MemoryError as error:
            if isinstance(error, LLMException):
                raise
            raise TransferFailed(f"{op.what}: {error!r}; the bytes addressed are undefined", phase="copy") from error
        else:
            whole = True
            if not _current(link, op, remote):
                link.caches.kept.clear()
                raise TransferFailed(
                    f"{op.what}: cache {remote.cache_id} of {link.peer} was freed, rebound or unregistered during the "
                    f"copy; the {'remote' if op.push else 'local'} bytes addressed are undefined",
                    peer=link.peer.cluster_id,
                    phase="copy",
                )
        if op.destination_pin is not None:
            op.destination_pin.record(link.peer, op.name, remote.cache_id)
        return whole


def _assumed(link: Link, op: TransferOp) -> Resolution | None:
    """Return what a pull by key assumes, so that it is resolved and read by one request; None where it cannot."""
    known: Resolution | None = link.caches.assumed.get(op.local.geometry)
    if known is None or op.name.key is None or op.push or op.grant is not None:
        return None
    return assume(link, known, op.name.key, op.deadline.remaining_ms())


def _judge_suspects(link: Link, recovery: Recovery, deadline: Deadline) -> None:
    """Drop the sockets that a transfer has found silent, if the peer answers over the control connection."""
    lives = link.responds(deadline, _ANSWER_MS, number=link.last_question)
    if recovery.drop_suspects(peer_lives=lives) and not link.origin.dialled:
        link.tell(SocketsDropped())


def _settle_writes(link: Link, recovery: Recovery, op: TransferOp) -> None:
    """Wait until earlier pushes that failed write nothing more: it would overwrite what this one brings."""
    newest, number = _give_up_writes(link, recovery)
    if not op.deadline.poll(lambda: link.last_pong >= number or link.ended):
        text = f"{op.what}: whether an earlier push that failed has ended there"
        raise op.deadline.error(text, "copy", link.peer.cluster_id)
    if link.ended:
        raise link.lost_error(op.what, "copy")
    recovery.writes_given_up(newest)
    recovery.redial_soon()  # this call dials too, but may end before


def _give_up_writes(link: Link, recovery: Recovery) -> tuple[int, int]:
    """Tell the owner to drop the sockets that may still carry bytes of failed pushes. Return as ``give_up_writes``."""

    def tell() -> int:
        link.tell(SocketsDropped())
        return link.ping()

    return recovery.give_up_writes(tell)


def _announce(link: Link, op: TransferOp, remote: Resolution) -> WriteIntent | None:
    """Announce the copy to the owner of the remote memory."""
    try:
        return remote.tensors.connection.announce(remote.guards[0].slot, op.deadline, write=op.push)
    except LinkError as error:
        raise link.lost_error(op.what, "copy") from error


def _current(link: Link, op: TransferOp, remote: Resolution) -> bool:
    """Return True while every guard shows its generation; the target checks remote guards by itself."""
    if remote.tensors.remote_guards:
        return True
    if steps.watch is not None:
        steps.watch("guards", link)
    try:
        return remote.tensors.connection.guards_unchanged(remote.guard_set)
    except LinkError as error:
        raise link.lost_error(op.what, "copy") from error


def _settle(link: Link, op: TransferOp, remote: Resolution, plan: Plan | None) -> None:
    """Tell the target what was copied, None for nothing, and give the pin back."""
    first, count = (0, 0) if plan is None else (plan.dst_first if op.push else plan.src_first, plan.count)
    if op.consumes and count and remote.geometry.kind is CacheKind.CACHE:
        link.report(Consumed(remote.cache_id, remote.row, first, count))
    if remote.pin:
        link.report(Release(remote.pin, first, 0 if op.push else count))
