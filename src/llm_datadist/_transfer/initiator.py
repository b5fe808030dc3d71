"""The initiator of transfers: resolves, plans, copies, checks guards and settles. Walk 1 of docs/architecture.md, step
by step; the target's half is in ``_transfer/target.py``. Nothing here knows the public classes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
import numpy as np

from llm_datadist._cache.geometry import CacheKind, CachePair, Geometry, decode_geometry
from llm_datadist._cache.registry import Key  # noqa: TC001 (a field of a NamedTuple)
from llm_datadist._links.link import Link, RemoteFailure
from llm_datadist._links.liveness import peer_responds
from llm_datadist._links.messages import Consumed, Guarded, Release, Resolve, Resolved
from llm_datadist._memory.exports import PRIVATE
from llm_datadist._memory.guards import SLOT_BYTES
from llm_datadist._native import GuardSet, Plan, steps
from llm_datadist._transfer.checksum import CompletedTransfer
from llm_datadist._transfer.target import encode_handle
from llm_datadist._transport.connection import MemoryChanged
from llm_datadist.errors import (
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
    from llm_datadist._links.link import Peer
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._memory.write_intents import WriteIntent
    from llm_datadist._native import CopyPool, Tensors
    from llm_datadist._transfer.checksum import ChecksumClient
    from llm_datadist._transport.connection import RemoteTensors
    from llm_datadist.types.grant import Grant

__all__ = ["Initiator", "RemoteName"]

#: The two ends -> what to copy.
MakePlan = Callable[[CachePair], Plan]

#: A pin outlives its initiator's deadline by this much: the release is on its way.
_PIN_GRACE_SECONDS: Final = 2.0
#: The first answer may be an old one that was kept, the second one is the target's word of just now. The rest is for
#: data lanes, which another transfer's timeout may break.
_ATTEMPTS: Final = 4
#: Answers kept per link; beyond, all are dropped and asked for again. Then places that were mapped, and their names.
_MAX_KEPT: Final = 65536
_MAX_MAPPED: Final = 1024
_MAX_MAPPED_BYTES: Final = 4096


class RemoteName(msgspec.Struct, frozen=True):
    """How the initiator names a cache of the peer: by key, or by id and row."""

    cluster_id: int
    key: Key | None = None
    cache_id: int = 0
    row: int = 0

    def __str__(self) -> str:
        if self.key is not None:
            return f"key {self.key} of cluster {self.cluster_id}"
        return f"cache {self.cache_id} row {self.row} of cluster {self.cluster_id}"


class _Resolving(NamedTuple):
    """What an error calls the question where a cache is; put into words only then."""

    what: str
    name: RemoteName

    def __str__(self) -> str:
        return f"{self.what}: resolving {self.name}"


class _Resolution(msgspec.Struct, eq=False):
    """The target's answer, mapped and ready to use for as long as its guards show what they showed."""

    cache_id: int
    geometry: Geometry
    row: int
    tensors: RemoteTensors
    guards: tuple[Guarded, ...]
    guard_set: GuardSet
    pin: int
    ends: CachePair | None = None  # the answer beside the local cache that was used with it last


class _Copied(Enum):
    """What became of one attempt to move the bytes."""

    WHOLE = "whole"
    REFUSED = "refused"  # before the first byte
    CUT = "cut"  # somewhere, when its data lanes broke


class DestinationPin(msgspec.Struct, eq=False):
    """The process, and the caches in it, that hold parts of what one destination is to get. Used by one thread.

    Between two parts a link may break and be made again, to a peer that has been initialised anew, and a key may move
    to another cache. The rest would fit there just as well; but what came before is missing, and nobody would know.
    """

    _peer: Peer | None = None
    _caches: dict[Hashable, int] = {}

    def require(self, peer: Peer, name: Hashable, cache_id: int, what: str) -> None:
        """Allow the next part to go to that cache of ``peer``, which ``name`` was found to mean.

        Raises:
            TransferFailed: An earlier part went elsewhere.
        """
        if self._peer is not None and self._peer.incarnation != peer.incarnation:
            raise TransferFailed(
                f"{what}: {peer} has been initialised anew; what was sent before went to {self._peer} and is not there "
                "any more; send all of it again",
                peer=peer.cluster_id,
                phase="resolve",
            )
        before = self._caches.get(name, cache_id)
        if before != cache_id:
            raise TransferFailed(
                f"{what}: {name} has been bound anew meanwhile: it is cache {cache_id} of {peer} now, and cache "
                f"{before} there may hold a part of what was pushed; send all of it again",
                peer=peer.cluster_id,
                phase="resolve",
            )

    def took(self, peer: Peer, name: Hashable, cache_id: int) -> None:
        """A part has arrived, or may have."""
        self._peer = peer
        self._caches[name] = cache_id


class Initiator:
    """Pulls and pushes. Runs in the caller's thread; keeps nothing but what is in the links."""

    def __init__(self, links: LinkManager, pool: CopyPool | None, verifier: ChecksumClient | None = None) -> None:
        self._links = links
        self._pool = pool
        self._verifier = verifier

    def pull(
        self,
        name: RemoteName,
        local: Entry,
        make_plan: MakePlan,
        deadline: Deadline,
        what: str,
        grant: Grant | None = None,
    ) -> int:
        """Move the remote cache ``name`` into the ``local`` one; return the bytes moved.

        A complete pull consumes the key at the target (R5); a failed one consumes nothing and leaves the addressed
        destination undefined, the rest untouched. With a grant it succeeds only while that holds too.

        Raises:
            NotLinked: No link to the cluster.
            CacheNotFound: The target has no such key, id or row.
            ParamError: Geometry or indices do not fit.
            LLMException: The transport cannot reach that memory (``LLM_FEATURE_NOT_ENABLED``).
            DeadlineExceeded: In phase ``resolve``, ``copy`` or ``verify``.
            TransferFailed: The source changed during the copy. ``ChecksumMismatch``: the two ends differ after it.
            PeerLost: The link broke.
        """
        return self._move(name, local, make_plan, deadline, what, push=False, grant=grant)

    def push(
        self,
        name: RemoteName,
        local: Entry,
        make_plan: MakePlan,
        deadline: Deadline,
        what: str,
        *,
        consumes: bool = True,
        destination_pin: DestinationPin | None = None,
    ) -> int:
        """Move the ``local`` cache into the remote one ``name``; return the bytes moved. Errors as :meth:`pull`.

        Without remote cache access the target answers only for caches that were located before (:mod:`addresses`).
        ``consumes``: a complete one consumes the key of the row at the target (R5). With a ``destination_pin`` this is
        a part: TransferFailed unless it goes to where the parts before it went.
        """
        return self._move(
            name,
            local,
            make_plan,
            deadline,
            what,
            push=True,
            consumes=consumes,
            destination_pin=destination_pin or DestinationPin(),
        )

    def _move(
        self,
        name: RemoteName,
        local: Entry,
        make_plan: MakePlan,
        deadline: Deadline,
        what: str,
        *,
        push: bool,
        grant: Grant | None = None,
        consumes: bool = False,
        destination_pin: DestinationPin | None = None,
    ) -> int:
        if steps.watch is not None:
            steps.watch("link", self)
        link = self._links.get(name.cluster_id)
        tensors: Tensors = local.storage.tensors
        announces = push or link.connection.capabilities.announces_reads
        with link.operation():
            for _ in range(_ATTEMPTS):
                kept: _Resolution | None = link.kept.get((name, push))
                remote = kept or self._resolve(link, name, deadline, what, push=push)
                moved: Plan | None = None
                try:
                    if destination_pin is not None:  # repeated, or continued, elsewhere it would leave a part behind
                        destination_pin.require(link.peer, name, remote.cache_id, what)
                    if grant is not None:
                        remote = _under(grant, link, remote, what)
                    announced = _announced(link, remote, deadline, what, push=push) if announces else None
                    try:
                        # Before the plan: what does not fit an answer that is no longer true may fit the true one.
                        current = self._current(link, remote, what)
                        if current:
                            ends = remote.ends
                            if ends is None or ends.cache_id != local.cache_id:
                                ends = remote.ends = self._compare(link, local, remote)
                            if steps.watch is not None:
                                steps.watch("plan", link)
                            same, plan = ends.same_memory, make_plan(ends)
                            copied = self._copy(link, plan, tensors, remote, deadline, what, push=push)
                            current = copied is _Copied.WHOLE
                            if destination_pin is not None and copied is not _Copied.REFUSED:
                                destination_pin.took(link.peer, name, remote.cache_id)
                    finally:
                        if announced is not None:
                            announced.end()
                    if current:
                        if self._verifier is not None:  # while the pin keeps what the peer is asked about
                            self._verifier.verify(
                                CompletedTransfer(link, local, remote, push, same, deadline, what), plan
                            )
                        moved = plan
                        return plan.nbytes
                except ParamError:
                    # Whether a kept answer is still true is not to be seen from here, so it may be that which is wrong.
                    if not (kept is not None and remote.tensors.remote_guards):
                        raise
                finally:
                    if remote.pin or consumes:
                        self._settle(link, remote, moved, push=push, consumes=consumes)
                link.kept.pop((name, push), None)
        raise TransferFailed(
            f"{what}: {name} changed, or its data lanes broke, {_ATTEMPTS} times in a row"
            + ("" if grant is None else f"; or {grant!r} was revoked, or its time is over"),
            peer=name.cluster_id,
            phase="copy",
        )

    @staticmethod
    def _compare(link: Link, local: Entry, remote: _Resolution) -> CachePair:
        """Compare the memory of both ends: it is one where a link leads to ourselves, or both are the same tensors."""
        ours: Tensors = local.storage.tensors
        theirs = remote.tensors
        comparable = link.connection.capabilities.same_addresses or not theirs.private
        same_memory = comparable and ours.native.same_bases(theirs.native)
        return CachePair(remote.geometry, remote.row, local.cache_id, same_memory)

    # --- steps 3 and 4: resolve ------------------------------------------------------------------------------------

    def _resolve(self, link: Link, name: RemoteName, deadline: Deadline, what: str, *, push: bool) -> _Resolution:
        def build(number: int) -> Resolve:
            return Resolve(number, push, name.key, name.cache_id, name.row, deadline.remaining_ms())

        if steps.watch is not None:
            steps.watch("ask", link)
        try:
            answer = link.request(build, deadline, _Resolving(what, name), "resolve")
        except RemoteFailure as failure:
            raise failure.typed(what) from failure
        if not isinstance(answer, Resolved):
            raise ProtocolError(f"{what}: {link.peer} answered a Resolve with {type(answer).__name__}")
        remote = self._open(link, answer, what, push=push)
        if not remote.pin:
            _keep(link.kept, (name, push), remote, _MAX_KEPT)
        return remote

    def _open(self, link: Link, answer: Resolved, what: str, *, push: bool) -> _Resolution:
        """Check the answer as a stranger's and map its tensors; an answer that does not hold releases its pin."""
        try:
            geometry = decode_geometry(bytes(answer.geometry))
            if answer.row >= geometry.rows:
                raise _misfit(link, answer, geometry)
            if not answer.guards:
                raise ProtocolError(f"{link.peer} sent no guard: nothing would tell that its cache has changed")
            if steps.watch is not None:
                steps.watch("answer", link)
            known = answer.regions, answer.offsets, geometry.num_tensors, geometry.tensor_bytes, push
            tensors = link.mapped.get(known) or _map(link, answer, geometry, what, push=push)
            if len(answer.offsets) <= _MAX_MAPPED_BYTES:  # pool memory is used again and again
                _keep(link.mapped, known, tensors, _MAX_MAPPED)
            if steps.watch is not None:
                steps.watch("resolved", link)
            if tensors.remote_guards:
                tensors = replace(tensors, handle=encode_handle(answer.cache_id, answer.pin, answer.guards))
        except (LLMException, ValueError) as error:
            if answer.pin:
                link.tell(Release(answer.pin, 0, 0))
            if isinstance(error, LinkError) and link.ended:
                raise link.lost_error(what, "resolve") from error
            if isinstance(error, LLMException):
                raise
            raise ProtocolError(f"{link.peer} sent a broken answer: {error}") from error
        guards = tuple(answer.guards)
        return _Resolution(answer.cache_id, geometry, answer.row, tensors, guards, _guard_set(guards), answer.pin)

    # --- steps 6 to 8: guards, copy, guards ------------------------------------------------------------------------

    def _copy(
        self,
        link: Link,
        plan: Plan,
        local: Tensors,
        remote: _Resolution,
        deadline: Deadline,
        what: str,
        *,
        push: bool,
    ) -> _Copied:
        """Move the bytes and judge them; unless they are whole it is worth asking again where the cache is."""
        move = link.connection.write if push else link.connection.read
        try:
            if steps.watch is not None:
                steps.watch("copy", link, push, deadline)
            move(plan, local, remote.tensors, self._pool, deadline).wait(deadline)
            if steps.watch is not None:
                steps.watch("copied", link, push)
        except MemoryChanged:
            # The owner has refused before the first byte. Even an answer of just now is worth one more look: a cache
            # that is not there any more should be named so.
            return _Copied.REFUSED
        except (LinkError, TransferAborted) as error:
            if peer_responds(link, deadline):
                return _Copied.CUT
            if not link.ended:
                deadline.check(f"{what} from {link.peer}", "copy", link.peer.cluster_id)
            raise link.lost_error(what, "copy") from error
        if not self._current(link, remote, what):
            link.kept.clear()
            raise TransferFailed(
                f"{what}: cache {remote.cache_id} of {link.peer} was freed, rebound or unregistered during the copy, "
                f"or its grant ended; the {'remote' if push else 'local'} bytes addressed are undefined",
                peer=link.peer.cluster_id,
                phase="copy",
            )
        return _Copied.WHOLE

    def _current(self, link: Link, remote: _Resolution, what: str) -> bool:
        """Return True while every guard of the answer shows the generation it came with, as far as we can see."""
        if remote.tensors.remote_guards:
            return True
        if steps.watch is not None:
            steps.watch("guards", link)
        try:
            return link.connection.guards_unchanged(remote.guard_set)
        except LinkError as error:
            raise link.lost_error(what, "copy") from error

    # --- step 9: settle --------------------------------------------------------------------------------------------

    def _settle(self, link: Link, remote: _Resolution, moved: Plan | None, *, push: bool, consumes: bool) -> None:
        first, count = (0, 0) if moved is None else (moved.dst_first if push else moved.src_first, moved.count)
        if consumes and count and remote.geometry.kind is CacheKind.CACHE:
            link.tell(Consumed(remote.cache_id, remote.row, first, count))
        if remote.pin:
            link.tell(Release(remote.pin, first, 0 if push else count))


def _under(grant: Grant, link: Link, remote: _Resolution, what: str) -> _Resolution:
    """Return the answer under the guard of a grant too; whether that holds is for those to see who look at guards."""
    if (link.peer.incarnation, remote.cache_id) != (grant.incarnation, grant.cache_id):
        raise TransferFailed(
            f"{what}: {grant!r} has ended: {link.peer} has been initialised again, or the key is bound to cache "
            f"{remote.cache_id} now",
            peer=link.peer.cluster_id,
            phase="resolve",
        )
    guards = (*remote.guards, Guarded(*grant.guard))
    handle = encode_handle(remote.cache_id, remote.pin, guards)
    tensors = replace(remote.tensors, handle=handle)
    return msgspec.structs.replace(remote, guards=guards, guard_set=_guard_set(guards), tensors=tensors)


def _guard_set(guards: tuple[Guarded, ...]) -> GuardSet:
    return GuardSet([(guard.slot, guard.generation) for guard in guards], SLOT_BYTES)


def _announced(link: Link, remote: _Resolution, deadline: Deadline, what: str, *, push: bool) -> WriteIntent | None:
    """Announce the copy to the owner of the remote memory; its generations are compared after that."""
    try:
        return link.connection.announced(remote.tensors, remote.guards[0].slot, deadline, write=push)
    except LinkError as error:
        raise link.lost_error(what, "copy") from error


def _map(link: Link, answer: Resolved, geometry: Geometry, what: str, *, push: bool) -> RemoteTensors:
    regions = np.frombuffer(answer.regions, dtype="<u4")
    offsets = np.frombuffer(answer.offsets, dtype="<u8")
    if not len(regions) == len(offsets) == geometry.num_tensors:
        raise _misfit(link, answer, geometry)
    if not link.connection.capabilities.private_memory and PRIVATE in regions.tolist():
        raise _unreachable(link, answer.cache_id, what, push=push)
    # Located for a push: it is for the target to say what may be written, and it has said so.
    return link.connection.map(regions, offsets, geometry.tensor_bytes, writable=push, located=push)


def _keep(known: dict[Any, Any], key: object, value: object, most: int) -> None:
    if len(known) >= most and key not in known:
        known.clear()
    known[key] = value


def _misfit(link: Link, answer: Resolved, geometry: Geometry) -> ProtocolError:
    return ProtocolError(f"{link.peer} sent {len(answer.regions) // 4} tensors, row {answer.row} for {geometry}")


def _unreachable(link: Link, cache_id: int, what: str, *, push: bool) -> LLMException:
    pools = ", or in pools that are sealed for want of remote cache access (RCA)," if push else ","
    return LLMException(
        f"{what}: cache {cache_id} of {link.peer} is memory outside its pools{pools} which "
        f"{link.connection.capabilities.name} cannot reach; leave llm.Transport at auto, or give that end a pool "
        "(mem_pool_cfg) and allocate the cache there, or register memory that lies inside a pool"
        + (", with llm.EnableRemoteCacheAccessible=1 at both ends" if push else ""),
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        peer=link.peer.cluster_id,
        phase="resolve",
    )
