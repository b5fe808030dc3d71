"""Target of transfers: resolves, pins, reports and move requests of peers, on the control thread.

:class:`~llm_datadist._transfer.access.AccessPolicy` decides on permissions. A refusal is an answer; the link goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import msgspec
import numpy as np

from llm_datadist._cache.registry import Namespace
from llm_datadist._links.link import Link
from llm_datadist._links.messages import Consumed, Failed, GrantedOnly, Guarded, Release, Resolve, Resolved, failed
from llm_datadist._log import calls_logger as logger
from llm_datadist._transfer.resolution import Handle, KeyHandle, decode_handle
from llm_datadist._transport.moves import MoveReply
from llm_datadist.errors import CacheNotFound, LLMException, LLMStatusCode, ParamError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._cache.registry import Binding, Entry, Key, Pin
    from llm_datadist._links.messages import Message
    from llm_datadist._native import Plan
    from llm_datadist._transfer.access import AccessPolicy
    from llm_datadist._transport.moves import MoveRequest

_PIN_GRACE_SECONDS: Final = 2.0  # life of a pin after its initiator's deadline, while the release is on its way
_MAX_PIN_SECONDS: Final = 24 * 3600.0  # longest deadline of a pin


class Target:
    """Handlers of resolves, reports and move requests (``_transport/moves.py``: MoveOwner).

    Threads: control; any for :meth:`drop_peer`.
    """

    def __init__(self, caches: LocalCaches, policy: AccessPolicy, expect: Callable[[], None] = lambda: None) -> None:
        """``expect`` is called when a peer's next message will follow within microseconds."""
        self._caches = caches
        self._policy = policy
        self._expect = expect

    def _found(
        self,
        link: object,
        key: Key | None,
        place: tuple[int, int],
        budget_ms: int,
        like: KeyHandle | None = None,
        *,
        consumes: bool,
    ) -> tuple[Pin | None, Entry, int, Binding | None]:
        """Return (pin if needed, entry, row, binding) by key, or by ``place`` (cache id, row), if permitted.

        ``like`` has the pin's number and the predicted geometry. With ``consumes`` a complete transfer consumes the
        key.
        """
        if key is not None:
            self._policy.require_key(link, key)
        registry, pin, (cache_id, row) = self._caches.registry, None, place
        entry, row, binding = registry.find(key=key, cache_id=cache_id, row=row)
        if self._policy.needs_pin(entry):
            expires = time.monotonic() + min(budget_ms / 1e3, _MAX_PIN_SECONDS) + _PIN_GRACE_SECONDS
            pin_id = 0 if like is None else like.pin
            pin = registry.pin(link, expires, key=key, cache_id=cache_id, row=row, pin_id=pin_id)
            entry, row, binding = pin.entry, pin.row, pin.binding
        try:
            # After the pin, because the key may move before it.
            if key is None:
                self._policy.require_sight(link, entry)
            if consumes:
                self._policy.require_consume(link, binding)
            self._policy.require_use(link, entry, 0 if pin is None else pin.pin_id)
            if like is not None and (pin is None or entry.geometry != like.geometry):
                raise CacheNotFound(f"cache {entry.cache_id} is not what the peer takes it to be")
        except BaseException:
            if pin is not None:
                self._caches.apply(registry.release(link, pin.pin_id))
            raise
        return pin, entry, row, binding

    def on_resolve(self, link: Link, message: Resolve) -> None:
        try:
            answer: Message = self._resolved(link, message)
        except LLMException as error:
            answer = failed(message.id, error)
        except MemoryError as error:
            answer = Failed(message.id, int(LLMStatusCode.LLM_FAILED), f"no memory is left there: {error!r}")
        try:
            link.tell(answer)
            if isinstance(answer, Resolved) and answer.pin:
                self._expect()  # the Release
        except ProtocolError as error:
            # More tensors than fit a frame.
            if isinstance(answer, Resolved) and answer.pin:
                self._caches.apply(self._caches.registry.release(link, answer.pin))
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_PARAM_INVALID), f"too many tensors: {error}"))

    def on_release(self, link: Link, message: Release) -> None:
        """End a pin. With remote cache access a pull consumes nothing (interface R5)."""
        link.peer_reported += 1
        consume = message.count > 0 and not self._caches.remote_accessible and self._policy.may_consume(link)
        registry = self._caches.registry
        self._caches.apply(registry.release(link, message.pin, message.first, message.count, consume=consume))

    def on_consumed(self, link: Link, message: Consumed) -> None:
        """Consume the key of a pushed row, with remote cache access (interface R5)."""
        link.peer_reported += 1
        if not self._caches.remote_accessible:
            return
        try:  # no answer: the Resolve of an honest peer was refused already
            self._policy.require_consumed(link, message.cache_id)
        except LLMException as error:
            logger.info("%s says that it has pushed: %s", link.peer, error)
            return
        effects = self._caches.registry.consume_row(message.cache_id, message.row, message.first, message.count)
        self._caches.apply(effects)

    def on_late_answer(self, link: Link, message: Resolved) -> None:
        """Release the pin of an answer whose caller had given up."""
        if message.pin:
            link.report(Release(message.pin, 0, 0))

    def drop_peer(self, link: Link) -> None:
        self._caches.apply(self._caches.registry.drop_peer(link))

    def _resolved(self, link: Link, message: Resolve) -> Resolved:
        caches, key = self._caches, message.key
        # With remote cache access pushes consume the key of a row, without it pulls do.
        consumes = message.consumes and caches.remote_accessible if message.push else not caches.remote_accessible
        if not message.push:
            self._policy.require(link, "pull")
        else:
            self._policy.require_push(link, message.cache_id if key is None else None)
            if key is None and message.cache_id <= 0:
                # A push to an id below 1 means CacheKey(req 0, model 0) (interface B3).
                key = (Namespace.REQUEST, 0, 0)
            if key is None:
                # A push to a missing row is a ParamError; a pull's row may be published later (interface §6.12).
                entry = caches.registry.lookup(message.cache_id, "cache_id")
                self._policy.require_sight(link, entry)
                entry.geometry.require_row("batch_index of dst_cache_key", message.row)
        place = message.cache_id, message.row
        pin, entry, row, binding = self._found(link, key, place, message.budget_ms, consumes=consumes)
        try:
            self._policy.require_lent(link, entry, push=message.push)
            return self._answer(link, message, pin, entry, row, None if key is None else binding)
        except BaseException:
            if pin is not None:
                caches.apply(caches.registry.release(link, pin.pin_id))
            raise

    def _answer(
        self, link: Link, message: Resolve, pin: Pin | None, entry: Entry, row: int, binding: Binding | None
    ) -> Resolved:
        # Without remote cache access pools are sealed against peers' writes, so absolute addresses are needed.
        sealed = message.push and not self._caches.remote_accessible
        mapped = link.connection.capabilities.shared_regions and not sealed
        if entry.storage.tensors.place.device >= 0:
            mapped = mapped and link.connection.devices
        regions, offsets = entry.storage.names(mapped=mapped)
        if link.connection.for_ours(non_pool=not any(regions)).capabilities.remote_guards:
            regions = offsets = b""  # the handle suffices, and the peer learns no address
            if pin is not None:
                pin.served = 0
        kind = Resolved if entry.storage.lent is None else GrantedOnly
        return kind(
            id=message.id,
            cache_id=entry.cache_id,
            geometry=msgspec.Raw(msgspec.msgpack.encode(entry.geometry)),
            row=row,
            regions=regions,
            offsets=offsets,
            guards=_promised(entry, binding),
            pin=0 if pin is None else pin.pin_id,
        )

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        write = request.write
        handle, plan = decode_handle(request.handle), request.plan
        if not write:
            self._policy.require(link, "pull")
        if isinstance(handle, KeyHandle):
            if write:
                raise ParamError("by its key a cache is read, not written")
            handle, plan = self._pinned(link, handle, plan)
        if write:
            self._policy.require_push(link, handle.cache_id)
        serve = None if write else (plan.src_first, plan.count)
        entry = self._caches.registry.reach(link, handle.cache_id, handle.pin, serve=serve)
        self._policy.require_use(link, entry, handle.pin)
        # The cache's own guard is the first of every answer; without it the peer could read reused memory.
        if handle.guards[0].slot != entry.guard.slot:
            raise ProtocolError(f"a request for cache {entry.cache_id} leaves its guard out")
        # The entry's own generation, because the slot may have advanced and the peer may guess.
        if handle.guards[0].generation != entry.guard.generation:
            raise CacheNotFound(f"cache {entry.cache_id} has changed since it was resolved")
        self._policy.require_lent(link, entry, push=write)
        lent = self._policy.require_grant(entry, handle.guards, plan)
        address_of = self._caches.exports.guards.address_of
        guards = [(address_of(guard.slot), guard.generation) for guard in handle.guards]
        # With a pin not cacheable: the reply ends without a guard, and counts the tensors sent. Nor for a peer of some
        # models only: the cache may lose its keys of these, which changes no guard of an answer by cache id.
        cacheable = not handle.pin and not self._policy.limits_models(link)
        return MoveReply(entry.storage.tensors, guards, entry.storage.tag, cacheable=cacheable, plan=plan, lent=lent)

    def _pinned(self, link: object, asked: KeyHandle, plan: Plan) -> tuple[Handle, Plan]:
        """Pin the cache of a key; return the handle and the plan of a Resolved.

        Every failure is CacheNotFound without a pin; the initiator's Resolve then gets the reason.
        """
        if isinstance(link, Link) and link.peer_reported < asked.reported:
            raise CacheNotFound("an earlier report of the peer has not arrived yet")
        try:
            _, entry, row, binding = self._found(
                link, asked.key, (0, 0), asked.budget_ms, asked, consumes=not self._caches.remote_accessible
            )
        except LLMException as error:
            raise CacheNotFound(str(error)) from error
        begin = row * entry.geometry.stride
        runs = plan.runs + np.array([begin, begin, 0], np.uint64)
        return Handle(entry.cache_id, asked.pin, _promised(entry, binding)), plan.replace(runs=runs)


def _promised(entry: Entry, binding: Binding | None) -> list[Guarded]:
    return [Guarded(each.guard.slot, each.guard.generation) for each in (entry, binding) if each is not None]
