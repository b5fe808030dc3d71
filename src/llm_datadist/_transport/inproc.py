"""The reference transport: both peers live in this process. Read this one first.

The peers of this process are in one table by their incarnation; a peer that leaves it is lost to its connections. That
a peer lives here is proven by a second table, which only this process can read and write: the initiator of a link
offers what it exports under a one-time token, and the target leaves what it exports itself. What a peer says is no
proof.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llm_datadist._memory.exports import ADDRESS_SPACE, PRIVATE, Exports
from llm_datadist._transport.connection import Capabilities, Connection, Transfer, Window, move_mapped
from llm_datadist.errors import LinkError, ParamError, PeerLost

if TYPE_CHECKING:
    from llm_datadist._memory.write_intents import IntentWriter

# Any thread; each use is one atomic dict operation. Cleared in a forked child: the parent's peers are not in it.
_peers: dict[bytes, Exports] = {}
os.register_at_fork(after_in_child=_peers.clear)

# By the token of a handshake: what its initiator exports, and what its target does. As above.
_offers: dict[bytes, Exports] = {}
_answers: dict[bytes, Exports] = {}
os.register_at_fork(after_in_child=_offers.clear)
os.register_at_fork(after_in_child=_answers.clear)


def register(exports: Exports) -> None:
    """Announce that the peer ``exports.incarnation`` lives in this process; ``ParamError`` when it already does."""
    if _peers.setdefault(exports.incarnation, exports) is not exports:
        raise ParamError(f"register: incarnation {exports.incarnation.hex()} is already registered in this process")


def unregister(incarnation: bytes) -> None:
    """Take the peer out of the table; its connections raise ``PeerLost`` from now on. Unknown ones are ignored."""
    _peers.pop(incarnation, None)


def lives_here(incarnation: bytes) -> bool:
    return incarnation in _peers


def offer(token: bytes, exports: Exports) -> None:
    """Let a target in this process find the initiator by its token, until :func:`withdraw`."""
    _offers[token] = exports


def accept(token: bytes, exports: Exports) -> Exports | None:
    """Return what the initiator with this token exports, and show it ``exports``; None if it is in another process."""
    offered = _offers.get(token)
    if offered is None or _answers.setdefault(token, exports) is not exports:
        return None
    return offered


def answer(token: bytes) -> Exports | None:
    """Return what the target that has found the token exports; None if none of this process has."""
    return _answers.get(token)


def withdraw(token: bytes) -> None:
    _offers.pop(token, None)
    _answers.pop(token, None)


def connect(exports: Exports) -> InprocConnection:
    """Return a connection to a peer of this process; ``LinkError`` when it is not here (any more)."""
    if _peers.get(exports.incarnation) is not exports:
        raise LinkError(f"inproc: incarnation {exports.incarnation.hex()} does not live in this process")
    return InprocConnection(exports)


class InprocConnection(Connection):
    """A connection to a peer of this process.

    Owns views of the peer's segments, so that they stay mapped until it is closed, whatever the peer does. Reads are
    announced like writes: private memory that its user frees under a read would end the process.
    """

    capabilities = Capabilities(
        "inproc", shared_regions=True, private_memory=True, same_addresses=True, announces_reads=True
    )

    def __init__(self, exports: Exports) -> None:
        self._exports = exports
        self._views = {region: segment.view() for region, segment in exports.regions.items()}
        guards = exports.guards.segment.view()
        self._guard_window: Window | None = Window(guards.ctypes.data, guards.nbytes, writable=False, memory=guards)
        self._page = exports.writers.open_here()
        self._announces = self._page.intent_writer()
        super().__init__()

    def intent_writer(self, *, write: bool) -> IntentWriter | None:
        self._check_peer()
        return self._announces

    def _window(self, region: int) -> Window | None:
        self._check_peer()
        if region == PRIVATE:
            return Window(0, ADDRESS_SPACE, self._exports.writable)
        view = self._views.get(region)
        return None if view is None else Window(view.ctypes.data, view.nbytes, self._exports.writable)

    def _guards(self) -> Window:
        self._check_peer()
        window = self._guard_window
        if window is None:
            raise LinkError("inproc: the connection is closed; link again", phase="copy")
        return window

    def _move(self, transfer: Transfer) -> None:
        self._check_peer()
        move_mapped(transfer)

    def _check_peer(self) -> None:
        if _peers.get(self._exports.incarnation) is not self._exports:
            raise PeerLost(f"inproc: the peer {self._exports.incarnation.hex()} in this process is finalised")

    def _release(self) -> None:
        self._announces.close()
        self._page.retire()
        del self._views
        self._guard_window = None
