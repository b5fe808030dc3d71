"""Who gets what is sent in parts: once a part has arrived somewhere, the rest must go there too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from llm_datadist.errors import TransferFailed

if TYPE_CHECKING:
    from collections.abc import Hashable

    from llm_datadist.control.link import Peer

__all__ = ["Recipient"]


class Recipient(msgspec.Struct, eq=False):
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
