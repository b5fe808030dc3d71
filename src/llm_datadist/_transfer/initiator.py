"""Initiator of pulls and pushes: resolve, plan, copy, compare guards, report.

After a failure the addressed bytes at the destination are undefined, all others are untouched, and no key is consumed.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist._cache.geometry import CacheKind, CachePair, unlike
from llm_datadist._cache.registry import FIRST_PEER_CHOSEN_PIN
from llm_datadist._checks import out_of_memory
from llm_datadist._links.messages import Consumed, Release, RemoteFailure, Resolve, Resolved, SocketsDropped
from llm_datadist._links.versions import READS_BY_KEY
from llm_datadist._log import calls_logger as logger
from llm_datadist._memory.write_intents import AnnouncementRefused
from llm_datadist._native import Waiter, steps
from llm_datadist._native.public_call import elsewhere, whole
from llm_datadist._transfer.access import granted_only
from llm_datadist._transfer.checksum import Comparison
from llm_datadist._transfer.grants import why_ended
from llm_datadist._transfer.resolution import KeyHandle, Resolution, encode_handle, keep, open_answer, with_grant
from llm_datadist._transport.connection import MemoryChanged, MemoryTorn, Transfer
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
    from collections.abc import Hashable

    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link, Peer
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._native import CopyPool, Plan, Timer
    from llm_datadist._transfer.resolution import RemoteName
    from llm_datadist._transport.connection import Recovery
    from llm_datadist.types.grant import Grant

#: One may have an outdated resolution. The others are for sockets that another transfer's timeout breaks.
_ATTEMPTS: Final = 4
_ANSWER_MS: Final = 200  # wait for the reply to a ping sent after a transfer timeout
_MAX_CACHED: Final = 65536  # resolutions per link, predicted ones, and pairs of caches in warnings


class PushDestination(msgspec.Struct, eq=False):
    """Destination of a push: its parts must reach one incarnation and the same caches.

    Between parts, or attempts, the peer may begin another ``init``, or bind a key to another cache. The earlier parts
    would be missing there.
    """

    _peer: Peer | None = None
    _caches: dict[Hashable, int] = {}

    def require(self, peer: Peer, name: Hashable, cache_id: int, what: str) -> None:
        """Raise TransferFailed if an earlier part of ``name`` went to another cache or incarnation."""
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
        """Record that a part may have arrived there."""
        self._peer = peer
        self._caches[name] = cache_id


_LATER: Final[Any] = None  # until the call is under way


class TransferOp(msgspec.Struct, eq=False, kw_only=True):
    """A pull or push as plain data, from its checked arguments to its report. Threads: one."""

    what: str  # name of the call
    name: RemoteName
    push: bool = False
    consumes: bool = False  # if complete, a push consumes the key of the remote row (interface R5)
    deadline: Deadline = _LATER
    local: Entry = _LATER  # in local use
    span: Timer = _LATER  # gets the transport's name
    grant: Grant | None = None  # must be active until the last byte
    destination: PushDestination | None = None  # of a push, shared by its parts

    def plan(self, pair: CachePair) -> Plan:
        """Return the plan between two compared caches. May raise ParamError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Initiator:
    """Execution of pulls and pushes. Threads: any; stateless."""

    links: LinkManager
    pool: CopyPool | None
    checksum: bool
    strict: bool

    def run(self, op: TransferOp) -> int:
        """Execute ``op``; return the bytes moved. Errors as :meth:`CacheManager.pull_cache`."""
        if op.push and op.destination is None:
            op.destination = PushDestination()  # no attempt may continue a broken one elsewhere
        try:
            if steps.watch is not None:
                steps.watch("link", self)
            with self.links.operation(op.name.cluster_id) as link:
                try:
                    return self._run_over(link, op)
                except (TransferFailed, CacheNotFound, DeadlineExceeded) as error:
                    if op.grant is None or (ended := why_ended(link, op.grant, op.what, op.deadline)) is None:
                        raise
                    raise ended from error
        except MemoryError as error:
            if isinstance(error, LLMException):
                raise
            raise out_of_memory(op.what, error) from error

    def _run_over(self, link: Link, op: TransferOp) -> int:
        key = op.name, op.push
        for attempt in range(_ATTEMPTS):
            cached: Resolution | None = link.caches.cached.get(key) or (None if attempt else _predicted(link, op))
            if cached is not None and (
                cached.granted_only if op.grant is None else cached.cache_id != op.grant.cache_id
            ):
                cached = None  # the key may have been bound to another cache since
            if cached is not None:
                plan = self._try(link, op, cached, None)
            else:
                with Waiter(link.requests) as waiter:  # after an exception the control thread ends its answer's pin
                    plan = self._try(link, op, self._resolve(link, op, waiter), waiter)
            if plan is not None:
                return plan.nbytes
            link.caches.cached.pop(key, None)
            link.caches.predicted.pop(op.local.geometry, None)
        raise TransferFailed(
            f"{op.what}: {op.name} changed, or its connection broke, {_ATTEMPTS} times in a row",
            peer=op.name.cluster_id,
            phase="copy",
        )

    def _try(self, link: Link, op: TransferOp, remote: Resolution, waiter: Waiter | None) -> Plan | None:
        """Make an attempt and report its end; return the plan, None to resolve again. Cached: no ``waiter``."""
        plan: Plan | None = None
        try:
            bound = op.grant is not None or op.destination is not None or remote.granted_only
            admitted = _admitted(link, op, remote) if bound else remote
            announced = op.push or link.connection.capabilities.announces_reads
            plan = (self._announced if announced else self._attempt)(link, op, admitted)
        except ParamError:
            # The plan may not fit an outdated resolution. Guards that the owner compares do not show that here.
            if waiter is not None or (remote.guard_set is not None and _current(link, op, remote)):
                raise
        finally:
            if remote.pin or op.consumes:
                _report(link, op, remote, plan)
            if waiter is not None:
                waiter.taken = True
        return plan

    def _resolve(self, link: Link, op: TransferOp, waiter: Waiter) -> Resolution:
        """Ask the target where the cache is; cache the answer unless it is pinned."""
        name, deadline = op.name, op.deadline

        def build(number: int) -> Resolve:
            return Resolve(number, op.push, name.key, name.cache_id, name.row, deadline.remaining_ms(), op.consumes)

        if steps.watch is not None:
            steps.watch("ask", link)
        try:
            answer = link.request(build, deadline, f"{op.what}: resolving {name}", "resolve", waiter=waiter)
        except RemoteFailure as failure:
            raise failure.typed(op.what) from failure
        if not isinstance(answer, Resolved):
            raise ProtocolError(f"{op.what}: {link.peer} answered a Resolve with {type(answer).__name__}")
        remote = open_answer(link, answer, op.what, push=op.push)
        if not remote.pin:
            keep(link.caches.cached, (name, op.push), remote, _MAX_CACHED)
        return remote

    def _announced(self, link: Link, op: TransferOp, remote: Resolution) -> Plan | None:
        """:meth:`_attempt` after an announcement: the owner waits for announced copies only."""
        try:
            intent = remote.tensors.connection.announce(remote.guards[0].slot, op.deadline, write=op.push)
        except LinkError as error:
            raise link.lost_error(op.what, "copy") from error
        try:
            with intent or nullcontext():
                return self._attempt(link, op, remote)
        except AnnouncementRefused as error:
            raise link.lost_error(op.what, "copy") from error

    def _attempt(self, link: Link, op: TransferOp, remote: Resolution) -> Plan | None:
        """Plan, copy and verify; return the plan, None to resolve again."""
        able = link.connection.capabilities
        pair = remote.pair
        if first := pair is None or pair.cache_id != op.local.cache_id:
            comparable = able.same_addresses or not remote.tensors.private
            same_memory = comparable and op.local.storage.tensors.native.same_bases(remote.tensors.native)
            pair = CachePair(remote.geometry, remote.row, op.local.cache_id, same_memory)
        if steps.watch is not None:
            steps.watch("plan", link)
        plan = op.plan(pair)
        if first:
            # A prediction equals a resolution that was compared.
            if not remote.predicted and (difference := unlike(op.local.geometry, remote.geometry)):
                if remote.guard_set is not None and not _current(link, op, remote):
                    return None  # another cache than the one that is there now
                self._find_unlike(link, op, remote, difference)
            remote.pair = pair
        if remote.predicted:
            if not is_one_request(plan):
                return None
            remote.pin = remote.predicted  # the owner may have it from here on
        if not self._copy(link, op, remote, plan):
            return None
        if self.checksum:  # before the report, which ends the pin
            Comparison(link, op.local, remote, op.push, pair.same_memory, op.deadline, op.what, self.pool).verify(plan)
        elif remote.pin and able.remote_guards and not remote.predicted and is_one_request(plan):
            keep(link.caches.predicted, op.local.geometry, remote, _MAX_CACHED)
        return plan

    def _find_unlike(self, link: Link, op: TransferOp, remote: Resolution, difference: str) -> None:
        """Warn once for each pair of caches; CacheMismatch with ``llm.StrictTypes``."""
        text = f"{op.what}: {op.name} and cache {op.local.cache_id} here: {difference}"
        if self.strict:
            raise CacheMismatch(f"{text}; llm.StrictTypes=1 refuses that")
        known, mark = link.caches.unlike, object()
        if len(known) < _MAX_CACHED and known.setdefault((remote.cache_id, op.local.cache_id), mark) is mark:
            whole(logger.warning)("%s; the bytes are moved as they are, llm.StrictTypes=1 would refuse that", text)

    def _copy(self, link: Link, op: TransferOp, remote: Resolution, plan: Plan) -> bool:
        """Copy, between two comparisons of the guards. Return False if the caller must resolve again."""
        connection, local = remote.tensors.connection, op.local.storage.tensors
        recovery = connection.recovery
        op.span.transport = connection.capabilities.name
        if recovery is not None:
            if recovery.suspects:
                _judge_suspects(link, recovery, op.deadline)
            if op.push and recovery.doubts_writes:
                _await_writes_given_up(link, recovery, op)
        done = True
        try:
            if steps.watch is not None:
                steps.watch("copy", link, op.push, op.deadline)
            connection.move(Transfer(plan, local, remote.tensors, self.pool, op.deadline, op.push, remote.guard_set))
            if steps.watch is not None:
                steps.watch("copied", link, op.push)
        except MemoryChanged as error:
            # Refused before the first byte. The next resolve finds the new place, or no cache.
            if remote.predicted and error.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
                remote.pin = 0  # not pinned
            return False
        except BaseException as error:  # noqa: BLE001 (raised again there)
            _judge(link, op, remote, error)
            done = False
        if op.destination is not None:
            op.destination.record(link.peer, op.name, remote.cache_id)
        return done


def _admitted(link: Link, op: TransferOp, remote: Resolution) -> Resolution:
    """Return the resolution if the transfer may use it: with its grant, and at the caches of its earlier parts."""
    if op.destination is not None:
        op.destination.require(link.peer, op.name, remote.cache_id, op.what)
    if op.grant is not None:
        try:
            return with_grant(remote, op.grant, link, op.what)
        except LinkError as error:
            raise link.lost_error(op.what, "copy") from error
    if remote.granted_only:
        text = f"{op.what}: {op.name}: {granted_only(remote.cache_id)}; pull with a grant of it"
        raise CacheMismatch(text, peer=link.peer.cluster_id)
    return remote


@elsewhere
def _judge(link: Link, op: TransferOp, remote: Resolution, error: BaseException) -> None:
    """Raise the error of a transfer that may have moved bytes; return if it shall be tried again."""
    recovery = remote.tensors.connection.recovery
    if op.push and recovery is not None and recovery.doubts_writes:
        _give_up_writes(link, recovery)
    if isinstance(error, DeadlineExceeded):
        if recovery is not None and recovery.suspects:
            link.last_question = link.ping()
    elif isinstance(error, MemoryTorn):
        _current(link, op, remote)  # raises if the peer has gone
        link.caches.cached.clear()
        raise TransferFailed(
            f"{op.what}: cache {remote.cache_id} of {link.peer} was freed, rebound or unregistered during the "
            f"copy; the {'remote' if op.push else 'local'} bytes addressed are undefined",
            peer=link.peer.cluster_id,
            phase="copy",
        ) from error
    elif isinstance(error, (LinkError, TransferAborted)):
        if link.responds(op.deadline):
            return  # sockets beside the link broke, after any number of bytes
        if not link.ended:
            op.deadline.check(f"{op.what} from {link.peer}", "copy", link.peer.cluster_id)
        raise link.lost_error(op.what, "copy") from error
    elif isinstance(error, MemoryError) and not isinstance(error, LLMException):
        raise TransferFailed(f"{op.what}: {error!r}; the bytes addressed are undefined", phase="copy") from error
    if isinstance(error, LLMException):  # of the connection, which knows neither
        error.args = (f"{op.what} {'to' if op.push else 'from'} {link.peer}: {error}",)
        error.peer = link.peer.cluster_id if error.peer is None else error.peer
    try:
        raise error
    finally:
        del error  # or its traceback keeps this frame, which keeps it, and the memory of the call


def _predicted(link: Link, op: TransferOp) -> Resolution | None:
    """Return the prediction for a pull by key, which then takes one request; else None.

    It is a cache like the last one. At the read the owner compares the geometry, finds the row and pins the cache.
    """
    known: Resolution | None = link.caches.predicted.get(op.local.geometry)
    key = op.name.key
    if known is None or key is None or op.push or op.grant is not None or READS_BY_KEY not in link.spoken.features:
        return None
    number = FIRST_PEER_CHOSEN_PIN + link.requests.number()
    handle = KeyHandle(key, known.geometry, number, op.deadline.remaining_ms(), link.requests.reported)
    tensors = replace(known.tensors, handle=encode_handle(handle))
    return msgspec.structs.replace(
        known, cache_id=0, row=0, guards=[], tensors=tensors, pin=0, predicted=number, pair=None
    )


@elsewhere
def _judge_suspects(link: Link, recovery: Recovery, deadline: Deadline) -> None:
    """Drop sockets that a transfer found silent, if the peer answers over the control channel."""
    lives = link.responds(deadline, _ANSWER_MS, number=link.last_question)
    if recovery.drop_suspects(peer_lives=lives) and not link.origin.dialled:
        link.tell(SocketsDropped())


@elsewhere
def _await_writes_given_up(link: Link, recovery: Recovery, op: TransferOp) -> None:
    """Wait until earlier failed pushes can write nothing more over this one's bytes."""
    newest, number = _give_up_writes(link, recovery)
    if not op.deadline.poll(lambda: link.last_pong >= number or link.ended):
        text = f"{op.what}: whether an earlier push that failed has ended there"
        raise op.deadline.error(text, "copy", link.peer.cluster_id)
    if link.ended:
        raise link.lost_error(op.what, "copy")
    recovery.writes_given_up(newest)
    recovery.redial_soon()  # this call dials too, but may end first


def _give_up_writes(link: Link, recovery: Recovery) -> tuple[int, int]:
    """Have the owner drop sockets with bytes of failed pushes; return as ``give_up_writes``."""

    def tell() -> int:
        link.tell(SocketsDropped())
        return link.ping()

    return recovery.give_up_writes(tell)


def _current(link: Link, op: TransferOp, remote: Resolution) -> bool:
    """Return True if every guard shows its generation."""
    assert remote.guard_set is not None
    try:
        return remote.tensors.connection.guards_unchanged(remote.guard_set)
    except LinkError as error:
        raise link.lost_error(op.what, "copy") from error


def _report(link: Link, op: TransferOp, remote: Resolution, plan: Plan | None) -> None:
    """Report the copied tensors (none if ``plan`` is None) and end the pin."""
    first, count = (0, 0) if plan is None else (plan.dst_first if op.push else plan.src_first, plan.count)
    if op.consumes and count and remote.geometry.kind is CacheKind.CACHE:
        link.report(Consumed(remote.cache_id, remote.row, first, count))
    if remote.pin:
        link.report(Release(remote.pin, first, 0 if op.push else count))
