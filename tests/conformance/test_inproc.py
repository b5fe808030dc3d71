"""The inproc transport keeps the contract of all transports."""

from contextlib import AbstractContextManager

import numpy as np
import pytest

from llm_datadist._transport import inproc
from llm_datadist.errors import LinkError, ParamError, PeerLost
from llm_datadist.testing import LocalPeer, Peer, TransportConformance
from llm_datadist.testing.scene import unchanged


class TestInproc(TransportConformance):
    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return LocalPeer(writable=writable)


def test_a_finalised_peer_is_lost_and_its_memory_stays_until_the_connection_closes() -> None:
    with LocalPeer(writable=True) as peer, peer.connect() as connection:
        peer.close()
        with pytest.raises(PeerLost, match="finalised"):
            connection.map(np.array([1], np.uint32), np.array([0], np.uint64), 64, writable=False)
        with pytest.raises(PeerLost, match="finalised"):
            unchanged(connection, 1, 0)


def test_peers_are_found_by_incarnation_only_while_registered() -> None:
    with LocalPeer(writable=True) as peer:
        assert inproc.lives_here(peer.exports.incarnation)
        inproc.register(peer.exports)  # again, the same: nothing
        with LocalPeer(writable=True) as other, pytest.raises(ParamError, match="already registered"):
            inproc.register(type(other.exports)(peer.exports.incarnation, {}, other.exports.guards, True))
    assert not inproc.lives_here(peer.exports.incarnation)
    with pytest.raises(LinkError, match="does not live"):
        inproc.connect(peer.exports)
