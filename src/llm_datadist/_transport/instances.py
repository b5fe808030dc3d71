"""The instances of this process by their incarnations, and the proof that a peer is one of them.

A second table, which only this process can read and write, holds the proof: the dialer of a link leaves what it
exports under a one-time token, and the listener that finds it leaves its own. What a peer says is no proof.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from llm_datadist._memory.exports import Exports

# Any thread; each use is one atomic dict operation. Cleared in a forked child: the parent's instances are not in it.
_instances: dict[bytes, Exports] = {}
os.register_at_fork(after_in_child=_instances.clear)

# By the token of a handshake: what its dialer exports, and what its listener does. As above.
_offers: dict[bytes, Exports] = {}
_answers: dict[bytes, Exports] = {}
os.register_at_fork(after_in_child=_offers.clear)
os.register_at_fork(after_in_child=_answers.clear)


def register(exports: Exports) -> None:
    """Announce that ``exports.incarnation`` lives in this process; ``ParamError`` if it already does."""
    if _instances.setdefault(exports.incarnation, exports) is not exports:
        raise ParamError(f"register: incarnation {exports.incarnation.hex()} is already registered in this process")


def unregister(incarnation: bytes) -> None:
    """Take an instance out of the table. Unknown ones are ignored."""
    _instances.pop(incarnation, None)


def lives_here(incarnation: bytes) -> bool:
    return incarnation in _instances


def is_here(exports: Exports) -> bool:
    """Return True while this very instance is registered."""
    return _instances.get(exports.incarnation) is exports


def offer(token: bytes, exports: Exports) -> None:
    """Let a listener in this process find the dialer by its token, until :func:`withdraw`."""
    _offers[token] = exports


def accept(token: bytes, exports: Exports) -> Exports | None:
    """Return what the dialer with this token exports, and show it ``exports``; None if it is in another process."""
    offered = _offers.get(token)
    if offered is None or _answers.setdefault(token, exports) is not exports:
        return None
    return offered


def answer(token: bytes) -> Exports | None:
    """Return what the listener that has found the token exports; None if none of this process has."""
    return _answers.get(token)


def withdraw(token: bytes) -> None:
    _offers.pop(token, None)
    _answers.pop(token, None)
