"""Instances of this process by incarnation, and the proof that a peer is one of them.

The proof is a table of this process, where dialer and listener of a link leave their exports under a one-time token.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from llm_datadist._memory.exports import Exports

# Threads: any; each use is one atomic dict operation.
_instances: dict[bytes, Exports] = {}
# By the token of a handshake: exports of its dialer and of its listener.
_offers: dict[bytes, Exports] = {}
_answers: dict[bytes, Exports] = {}
for _table in (_instances, _offers, _answers):  # a forked child holds none of the parent's instances
    os.register_at_fork(after_in_child=_table.clear)


def register(exports: Exports) -> None:
    """Add an instance to the table. Raises ParamError if another one has its incarnation."""
    if _instances.setdefault(exports.incarnation, exports) is not exports:
        raise ParamError(f"register: incarnation {exports.incarnation.hex()} is already registered in this process")


def unregister(incarnation: bytes) -> None:
    _instances.pop(incarnation, None)


def lives_here(incarnation: bytes) -> bool:
    return incarnation in _instances


def is_here(exports: Exports) -> bool:
    return _instances.get(exports.incarnation) is exports


def offer(token: bytes, exports: Exports) -> None:
    """Let a listener of this process find the dialer by its token, until :func:`withdraw`."""
    _offers[token] = exports


def accept(token: bytes, exports: Exports) -> Exports | None:
    """Return the exports of the dialer, and leave it ``exports``; None if it is in another process."""
    offered = _offers.get(token)
    if offered is None or _answers.setdefault(token, exports) is not exports:
        return None
    if token not in _offers:  # withdrawn meanwhile
        _answers.pop(token, None)
        return None
    return offered


def answer(token: bytes) -> Exports | None:
    """Return the exports of the listener; None if it is in another process."""
    return _answers.get(token)


def withdraw(token: bytes) -> None:
    _offers.pop(token, None)
    _answers.pop(token, None)
