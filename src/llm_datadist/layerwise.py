"""The destinations of a layer-wise transfer: how one layer gets to a cache named by key, or to raw addresses.

Both are pushes (``transfer.py``) of the two tensors of a layer. By key the target finds the cache at each push, as
always. By address the places are asked for once (``locate.py``), and again when the target does not know them any more:
the link may be another one, or the memory have been registered anew. All layers of a destination must go to the same
process and, by key, to the same cache (:class:`~llm_datadist.recipient.Recipient`). A push consumes no key here: a
transfer is not among what does (R5).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_datadist.deadline import Deadline
from llm_datadist.errors import CacheMismatch, CacheNotFound, ParamError, ProtocolError, TransferFailed
from llm_datadist.recipient import Recipient
from llm_datadist.transfer import RemoteName

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.cache.cut import Cut
    from llm_datadist.cache.layout import Ends
    from llm_datadist.cache.registry import Entry
    from llm_datadist.engine import Engine
    from llm_datadist.locate import Locations, Place
    from llm_datadist.native import Plan

__all__ = ["TENSORS_PER_LAYER", "AddressDelivery", "KeyDelivery", "Source"]

TENSORS_PER_LAYER: Final = 2
"""K and V: the layer-wise transfer knows no other number (API §6.14)."""

_WHAT: Final = "transfer_cache_async"


@dataclass(frozen=True, slots=True)
class Source:
    """What is sent: a cache of this process, held by whoever started the transfer, and what of each tensor."""

    engine: Engine
    entry: Entry
    cut: Cut

    def deadline(self) -> Deadline:
        """Return the deadline of one layer to one destination."""
        return Deadline(self.engine.options.sync_kv_timeout_ms)


@dataclass(frozen=True, slots=True)
class KeyDelivery:
    """To a cache of the peer by key, or by id and row; ``layers`` become ``dst_layers`` there, one for one."""

    source: Source
    name: RemoteName
    layers: range
    dst_layers: range
    recipient: Recipient = field(default_factory=Recipient)

    def send(self, layer: int) -> None:
        """Send one layer."""
        engine, cut = self.source.engine, self.source.cut
        target = self.dst_layers[layer - self.layers.start]
        first = target * TENSORS_PER_LAYER

        def plan(ends: Ends) -> Plan:
            dst = ends.remote
            if first + TENSORS_PER_LAYER > dst.num_tensors:
                raise ParamError(
                    f"dst_layer_range: layer {target}, the destination has {dst.num_tensors // TENSORS_PER_LAYER} "
                    f"layers of {TENSORS_PER_LAYER} tensors"
                )
            offset = cut.offset_in(dst, ends.row)
            return cut.plan(first, layer * TENSORS_PER_LAYER, TENSORS_PER_LAYER, offset=offset, alias=ends.same_memory)

        with engine.meters.span(_WHAT, "layer %d -> layer %d of %s", layer, target, self.name) as span:
            deadline = self.source.deadline()
            span.nbytes = engine.initiator.push(
                self.name, self.source.entry, plan, deadline, _WHAT, consumes=False, recipient=self.recipient
            )


class AddressDelivery:
    """To raw addresses of the peer, two for each layer. Used by the job's thread.

    Args:
        source: What is sent.
        cluster_id: The peer.
        addresses: K and V of each layer of ``layers``, in order.
        layers: Layers to send.
    """

    def __init__(self, source: Source, cluster_id: int, addresses: Sequence[int], layers: range) -> None:
        self.layers = layers
        self._source = source
        self._cluster_id = cluster_id
        self._addresses = addresses
        self._located: Locations | None = None
        self._recipient = Recipient()

    def send(self, layer: int) -> None:
        """Send one layer."""
        at = (layer - self.layers.start) * TENSORS_PER_LAYER
        deadline = self._source.deadline()
        addresses = self._addresses[at : at + TENSORS_PER_LAYER]
        shown = ", ".join(f"{address:#x}" for address in addresses)
        with self._source.engine.meters.span(_WHAT, "layer %d -> %s of %d", layer, shown, self._cluster_id) as span:
            if self._located is not None:
                try:
                    span.nbytes = self._push(layer, self._located.places[at : at + TENSORS_PER_LAYER], deadline)
                    return
                except (CacheNotFound, CacheMismatch):
                    pass  # what was true at an earlier layer is not any more: ask again, and believe that
            self._located = self._locate(deadline)
            span.nbytes = self._push(layer, self._located.places[at : at + TENSORS_PER_LAYER], deadline)

    def _locate(self, deadline: Deadline) -> Locations:
        """Ask what lies at the addresses.

        Raises:
            TransferFailed: Not what lay there at an earlier layer, and one of the two is memory of the peer's pools,
                which is somebody else's by now.
        """
        locator, before = self._source.engine.locator, self._located
        now = locator.locate(self._cluster_id, self._addresses, self._source.cut.extent, deadline, _WHAT)
        if before is not None and before.places != now.places and (before.allocated or now.allocated):
            raise TransferFailed(
                f"{_WHAT}: the memory at dst_addrs of cluster {self._cluster_id} has been freed and allocated anew "
                f"meanwhile: cache {now.places[0].cache_id} is there now, and what was sent before went to cache "
                f"{before.places[0].cache_id}; send all of it again",
                peer=self._cluster_id,
                phase="locate",
            )
        return now

    def _push(self, layer: int, places: Sequence[Place], deadline: Deadline) -> int:
        """Push K and V; together where they lie in the same way in neighbouring tensors of one cache."""
        first = layer * TENSORS_PER_LAYER
        key, value = places
        if (value.cache_id, value.tensor, value.offset) == (key.cache_id, key.tensor + 1, key.offset):
            return self._push_tensors(first, TENSORS_PER_LAYER, key, deadline)
        return self._push_tensors(first, 1, key, deadline) + self._push_tensors(first + 1, 1, value, deadline)

    def _push_tensors(self, first: int, count: int, place: Place, deadline: Deadline) -> int:
        cut = self._source.cut

        def plan(ends: Ends) -> Plan:
            dst = ends.remote
            if place.tensor + count > dst.num_tensors or place.offset + cut.extent > dst.tensor_bytes:
                raise ProtocolError(f"{_WHAT}: {name} has no such place as it was said to have: {place}")
            return cut.plan(place.tensor, first, count, offset=place.offset, alias=ends.same_memory)

        name = RemoteName(self._cluster_id, cache_id=place.cache_id)
        return self._source.engine.initiator.push(
            name, self._source.entry, plan, deadline, _WHAT, consumes=False, recipient=self._recipient
        )
