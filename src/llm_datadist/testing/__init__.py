"""Test tools for clients, and for transports; an extension.

- :class:`TransportConformance`: the suite that every transport passes; :class:`Peer`, :class:`LocalPeer` and
  :class:`PeerProcess` are its peers. :class:`Handles` and :class:`MemoryHandler` stand in for the cache layer, where
  the owner moves the bytes.
- :func:`loopback_links` lets a client's unit test link to itself.

The suite and its peers load on first use: ``import llm_datadist.testing`` does not need pytest.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

from llm_datadist.testing.loopback import Loopback, loopback_links

if TYPE_CHECKING:
    from llm_datadist.testing.conformance import TransportConformance
    from llm_datadist.testing.peers import Handles, LocalPeer, MemoryHandler, Peer, PeerProcess

__all__ = [
    "Handles",
    "LocalPeer",
    "Loopback",
    "MemoryHandler",
    "Peer",
    "PeerProcess",
    "TransportConformance",
    "loopback_links",
]

_LATE: Final = dict.fromkeys(("Handles", "LocalPeer", "MemoryHandler", "Peer", "PeerProcess"), "peers") | {
    "TransportConformance": "conformance"
}


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(f"{__name__}.{_LATE[name]}"), name)
