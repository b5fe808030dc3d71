"""What a process offers to a peer: exported regions, guards, and pages to announce writes in. Values only; any thread.

A region id names memory of one process: ids from 1 are exported segments, addressed by offset; :data:`PRIVATE` is all
other memory, addressed by absolute address.
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

PRIVATE: Final = 0
"""Region id of memory that is not exported; its "offset" is an absolute address in the owner."""

ADDRESS_SPACE: Final = (1 << 63) - 1
"""Bound of every tensor's end, so that offset arithmetic cannot wrap."""


class RegionDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Describe one exported segment to a peer. Decoding checks the limits; ``name`` is for messages only."""

    region: Annotated[int, msgspec.Meta(ge=1, lt=1 << 32)]
    nbytes: Annotated[int, msgspec.Meta(ge=1, le=ADDRESS_SPACE)]
    name: Annotated[str, msgspec.Meta(max_length=64)]
    writable: bool


@dataclass(frozen=True, slots=True)
class Exports:
    """What this process offers to peers, or to one of them. Its maker owns, and closes, segments and guard table.

    Attributes:
        incarnation: Random id of this process incarnation: a peer that restarts under the same address has another.
        regions: Exported segments by region id, from 1.
        writable: True if peers may map regions for writing (remote cache access).
        private: True if peers may be told addresses, by which cma reaches memory outside the regions.
        users: Users of this host, beside this process's own, whose processes may map what is offered.
        writers: Where peers announce writes. Without remote cache access too: addresses may be granted to them.
    """

    incarnation: bytes
    regions: Mapping[int, Segment]
    guards: GuardTable
    writable: bool
    writers: WriteIntents = field(default_factory=WriteIntents)
    private: bool = True
    users: frozenset[int] = frozenset()

    def descriptors(self) -> list[RegionDescriptor]:
        return [
            RegionDescriptor(region, segment.nbytes, segment.name[:64], self.writable)
            for region, segment in self.regions.items()
        ]
