"""The transport inproc: both instances share this process. Read :mod:`.connection` first.

:mod:`.instances` proves that a peer lives here. A peer that leaves its table is lost to its connections.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist._memory.exports import ADDRESS_SPACE, NON_POOL, Exports
from llm_datadist._transport import instances
from llm_datadist._transport.choose import Verdict
from llm_datadist._transport.connection import Capabilities, Connection, PeerRange, Transfer, Watch, move_mapped
from llm_datadist._transport.transport import DEVICE, Meeting, Transport
from llm_datadist.errors import LinkError, PeerLost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._memory.write_intents import IntentWriter
    from llm_datadist._native import Place

_CAPABILITIES = Capabilities(
    "inproc", shared_regions=True, non_pool_memory=True, same_addresses=True, announces_reads=True
)


class InprocTransport(Transport):
    """The transport; it offers nothing, because the handshake's token is enough."""

    name = "inproc"
    capabilities = _CAPABILITIES

    def judge(self, meeting: Meeting) -> Verdict:
        here = meeting.here is not None
        mine = meeting.exports.device
        if here and mine is not None and meeting.theirs.get(DEVICE, mine.uuid) != mine.uuid:
            return Verdict(False, "the peer is in this process, and its caches lie in another GPU")
        return Verdict(here, f"the peer is in {'this' if here else 'another'} process")

    def connect(self, meeting: Meeting) -> Connection:
        assert meeting.here is not None, "it is chosen for a peer of this process only"
        return InprocConnection(meeting.here)


class InprocConnection(Connection):
    """Connection to a peer of this process. Raises LinkError unless the peer lives here.

    Owns: views of the peer's segments, which keep them mapped until it is closed.
    Reads are announced as writes are: non-pool memory that its user frees during a read would end the process.
    """

    capabilities = _CAPABILITIES

    def __init__(self, exports: Exports) -> None:
        if not instances.is_here(exports):
            raise LinkError(f"inproc: incarnation {exports.incarnation.hex()} does not live in this process")
        self._exports = exports
        self._ranges = {
            region: PeerRange(segment.address, segment.nbytes, exports.writable, segment.keep(), segment.place)
            for region, segment in exports.regions.items()
        }
        self._ranges[NON_POOL] = PeerRange(0, ADDRESS_SPACE, exports.writable)
        guards = exports.guards.segment
        self._guard_range = PeerRange(guards.address, guards.nbytes, False, guards.view())
        self._page = exports.writers.open_here()
        self.intent_writer: IntentWriter = self._page.intent_writer()
        super().__init__()

    def _place(self, found: PeerRange, bases: NDArray[np.uint64]) -> Place:
        """Ask the driver about non-pool memory, of which only the address is known."""
        device = self._exports.device
        if found is self._ranges[NON_POOL] and device is not None and device.has(int(bases[0])):
            return device.place
        return super()._place(found, bases)

    def watch(self) -> Watch:
        incarnation = self._exports.incarnation
        return Watch(lambda: not instances.lives_here(incarnation), lambda: None)

    def _range(self, region: int) -> PeerRange | None:
        self._check_peer()
        return super()._range(region)

    def _guards(self) -> PeerRange:
        self._check_peer()
        return super()._guards()

    def _move(self, transfer: Transfer) -> None:
        self._check_peer()
        move_mapped(transfer)

    def _check_peer(self) -> None:
        if not instances.is_here(self._exports):
            raise PeerLost(f"inproc: the peer {self._exports.incarnation.hex()} in this process is finalised")

    def _release(self) -> None:
        self.intent_writer.close()
        self._page.retire()
        self._ranges.clear()
        self._guard_range = None
