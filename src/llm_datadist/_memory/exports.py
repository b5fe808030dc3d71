"""What a process offers to a peer: regions with their ids, and its guards.

A region id names memory of one process: :data:`PRIVATE` is its own, not exported memory, addressed by absolute
address; ids from 1 are exported segments, addressed by offset.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Final

import msgspec

from llm_datadist._memory.write_intents import WriteIntents

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist._memory.guards import GuardTable
    from llm_datadist._memory.segment import Segment

__all__ = ["ADDRESS_SPACE", "PRIVATE", "Exports", "RegionDescriptor"]

PRIVATE: Final = 0
"""Region id of a process's own memory that is not exported; its "offset" is an absolute address in the owner."""

# The address space of a process: above it no tensor can end, so offset arithmetic cannot wrap.
ADDRESS_SPACE: Final = (1 << 63) - 1


class RegionDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One exported segment as announced to a peer; the limits are checked whenever one is decoded.

    Attributes:
        region: Id of the region in its owner, from 1.
        nbytes: Size in bytes.
        name: Pool name, for messages only.
        writable: True when the peer may map it for writing (RCA).
    """

    region: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_SPACE)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    writable: bool


@dataclass(frozen=True, slots=True)
class Exports:
    """What this process offers to a peer. The segments and the guard table stay owned by whoever built this value.

    Attributes:
        incarnation: Random id of this process incarnation (rule 8).
        regions: Exported segments by region id, from 1.
        guards: The guard slots; never writable for a peer.
        writable: True when peers may write (remote cache access).
        writers: Where they announce it.
    """

    incarnation: bytes
    regions: Mapping[int, Segment]
    guards: GuardTable
    writable: bool
    writers: WriteIntents = field(default_factory=WriteIntents)

    def descriptors(self) -> list[RegionDescriptor]:
        """Return one descriptor per exported region, in the order of the mapping."""
        return [
            RegionDescriptor(region, segment.nbytes, segment.name[:64], self.writable)
            for region, segment in self.regions.items()
        ]
