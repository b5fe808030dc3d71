"""The target of transfers over data lanes: what a handle names, whether the peer may have it, under which guards.

Over lanes the owner moves its own bytes, so it is the owner who checks: the initiator only repeats what a Resolved told
it. Everything runs on the control thread and is short.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from llm_datadist.control.link import Link
from llm_datadist.control.messages import Guarded, Id  # noqa: TC001 (msgspec reads the annotations)
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMException, ParamError, ProtocolError
from llm_datadist.log import logger
from llm_datadist.transport.lanes import LaneGrant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.caches import CacheStore
    from llm_datadist.transport.lanerequest import LaneRequest

__all__ = ["LaneMender", "LaneTarget", "encode_handle"]

#: For all lanes of one link; finalize may wait for it.
_MEND_MS: Final = 1000
_MAX_GUARDS: Final = 8


class _Handle(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What the initiator was told in a Resolved: the cache, its pin or 0, the guards that hold the answer."""

    cache_id: Id
    pin: Id
    guards: Annotated[list[Guarded], msgspec.Meta(min_length=1, max_length=_MAX_GUARDS)]


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(_Handle)


def encode_handle(cache_id: int, pin: int, guards: Sequence[Guarded]) -> bytes:
    """Return what :class:`LaneTarget` of the peer needs to find its cache again. Runs on the initiator."""
    return _encoder.encode(_Handle(cache_id, pin, list(guards)))


class LaneTarget:
    """Answers what peers ask over data lanes. Implements :class:`llm_datadist.transport.lanes.LaneHandler`.

    Args:
        store: The caches.
        mender: Brings lost lanes back.
    """

    def __init__(self, store: CacheStore, mender: LaneMender) -> None:
        self._store = store
        self._mender = mender

    def on_read(self, link: object, request: LaneRequest) -> LaneGrant:
        """Return what the peer may read."""
        return self._grant(link, request)

    def on_write(self, link: object, request: LaneRequest) -> LaneGrant:
        """Return what the peer may write: with remote cache access, or what it was told to lie at an address."""
        return self._grant(link, request, write=True)

    def on_served(self, link: object, nbytes: int) -> None:
        """Nothing is held for a request: its guards and ``quiesce`` protect the memory."""

    def on_lane_lost(self, link: object, left: int, reason: str) -> None:
        """A lane ended: with the link, or by a transfer that was given up half way."""
        logger.info("a data lane of %s ended, %d are left: %s", link, left, reason)
        if isinstance(link, Link):
            self._mender.lost(link)

    def _grant(self, link: object, request: LaneRequest, *, write: bool = False) -> LaneGrant:
        try:
            handle = _decoder.decode(request.handle)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise ProtocolError(f"a lane request names nothing: {error}") from error
        located = isinstance(link, Link) and handle.cache_id in link.located
        if write and not (self._store.remote_accessible or located):
            raise ParamError("push needs remote cache access (llm.EnableRemoteCacheAccessible=1) at both ends")
        entry = self._store.registry.reach(link, handle.cache_id, handle.pin)
        if not entry.remote_accessible:
            raise ParamError(f"cache {entry.cache_id} was registered with remote_accessible=False")
        if not handle.pin and not self._store.keepable(entry):
            raise ParamError(f"cache {entry.cache_id} is read under a pin")
        # The cache's own guard comes first in every answer; without it the peer could read what it is reused for.
        if handle.guards[0].slot != entry.guard.slot:
            raise ProtocolError(f"a lane request for cache {entry.cache_id} leaves its guard out")
        address_of = self._store.exports.guards.address_of
        guards = [(address_of(guard.slot), guard.generation) for guard in handle.guards]
        return LaneGrant(entry.storage.tensors, guards, entry.storage.tag)


class LaneMender:
    """Brings lost lanes back, at the end that dialled. Owns its one thread, which is there after the first loss."""

    def __init__(self) -> None:
        self._worker = ThreadPoolExecutor(1, "llm-datadist-lanes")

    def lost(self, link: Link) -> None:
        """A lane of ``link`` ended. Any thread; returns at once."""
        if link.dialled and not link.ended:
            with suppress(RuntimeError):  # closed
                self._worker.submit(self._mend, link)

    def close(self) -> None:
        """Join the thread; a dial in progress ends within its bound. Idempotent."""
        self._worker.shutdown(cancel_futures=True)

    def _mend(self, link: Link) -> None:
        try:
            link.connection.mend(Deadline(_MEND_MS))
        except LLMException as error:
            # The end of the link is on its way, or the next transfer tries again.
            logger.info("data lanes to %s were not brought back: %s", link.peer, error)
