"""Layer 8, testing: what authors of transports, devices and engines need to show that theirs keeps the contract.

Loaded on first use: ``import llm_datadist.testing`` needs neither pytest nor the parts under test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tests.faults.gates import Gate, shut
    from tests.faults.relay import Relay
    from tests.faults.stalls import stall
    from tests.faults.streams import Fault

    from llm_datadist.testing.conformance import TransportConformance
    from llm_datadist.testing.loopback import Loopback, loopback_links
    from llm_datadist.testing.midcopy import PageTrap
    from llm_datadist.testing.peers import LocalPeer, Peer, PeerProcess
    from llm_datadist.testing.staged_device import StagedDevice

__all__ = [
    "Fault",
    "Gate",
    "LocalPeer",
    "Loopback",
    "PageTrap",
    "Peer",
    "PeerProcess",
    "Relay",
    "StagedDevice",
    "TransportConformance",
    "loopback_links",
    "shut",
    "stall",
]

_MODULES: Final = {
    "Fault": "streams",
    "Gate": "gates",
    "LocalPeer": "peers",
    "Loopback": "loopback",
    "Peer": "peers",
    "PeerProcess": "peers",
    "PageTrap": "midcopy",
    "Relay": "relay",
    "StagedDevice": "staged_device",
    "TransportConformance": "conformance",
    "loopback_links": "loopback",
    "shut": "gates",
    "stall": "stalls",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
