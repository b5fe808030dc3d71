"""Layer 8, testing: what an author of a transport or a device needs to show that it keeps the contract.

Loaded on first use: ``import llm_datadist.testing`` needs neither pytest nor the parts under test.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from llm_datadist.testing.conformance import TransportConformance
    from llm_datadist.testing.peers import LocalPeer, Peer, PeerProcess
    from llm_datadist.testing.staged_device import StagedDevice

__all__ = ["LocalPeer", "Peer", "PeerProcess", "StagedDevice", "TransportConformance"]

_MODULES: Final = {
    "LocalPeer": "peers",
    "Peer": "peers",
    "PeerProcess": "peers",
    "StagedDevice": "staged_device",
    "TransportConformance": "conformance",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
