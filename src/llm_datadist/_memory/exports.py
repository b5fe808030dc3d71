"""Exports: regions, guards and pages of write intents that an instance offers to a peer. Values; any thread."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from llm_datadist._memory.write_intents import WriteIntents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist._memory.device import Device
    from llm_datadist._memory.guards import GuardTable
    from llm_datadist._memory.segment import Segment

NON_POOL: Final = 0  # region id of non-pool memory; its "offset" is an absolute address in the owner
ADDRESS_SPACE: Final = (1 << 63) - 1  # bound of a tensor's end, so that offset arithmetic cannot wrap


class RegionDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Exported segment, as a peer learns it; ``name`` is for messages only. ``device``: UUID of its GPU, if any."""

    region: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_SPACE)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    writable: bool
    device: Annotated[bytes, msgspec.Meta(max_length=16)] = b""


@dataclass(frozen=True, slots=True)
class Exports:
    """Offer of an instance, which owns segments and guards, to its peers or to one of them."""

    incarnation: bytes  # random id of one ``init``
    regions: Mapping[int, Segment]  # by region id, from 1; peers address them by offset
    guards: GuardTable
    writable: bool  # True if peers may map regions for writing (RCA)
    writers: WriteIntents = field(default_factory=WriteIntents)  # without RCA too, for located caches
    private: bool = True  # True if peers may learn the addresses by which cma verifies this process
    device: Device | None = None  # of caches with Placement.DEVICE, if that is a GPU
    users: frozenset[int] = frozenset()  # further ones of this host whose processes may map the regions

    def on_host(self) -> Exports:
        """Return this without memory of a GPU."""
        regions = {number: each for number, each in self.regions.items() if not each.uuid}
        return replace(self, regions=regions)

    def descriptors(self) -> list[RegionDescriptor]:
        return [
            RegionDescriptor(region, segment.nbytes, segment.name[:64], self.writable, segment.uuid)
            for region, segment in self.regions.items()
        ]
