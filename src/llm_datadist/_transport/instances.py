"""Instances of this process by incarnation, and the proof that a peer is one of them.

The proof is a table of this process, where dialer and listener of a link leave their exports under a one-time token.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from llm_datadist._memory.exports import Exports

# Threads: any; each use is atomic operations of dicts and lists.
_instances: dict[bytes, Exports] = {}
# By the token of a handshake: exports of its dialer, then of each listener that has accepted it.
_offers: dict[bytes, list[Exports]] = {}
for _table in (_instances, _offers):  # a forked child holds none of the parent's instances
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
    _offers[token] = [exports]


def accept(token: bytes, exports: Exports) -> Exports | None:
    """Return the exports of the dialer, and leave it ``exports``; None if it is elsewhere, or took another answer."""
    if (met := _offers.get(token)) is None:
        return None
    if len(met) == 1:
        met.append(exports)
    return met[0] if met[1] is exports else None


def answer(token: bytes) -> Exports | None:
    """Return the exports of the listener; None if it is in another process."""
    met = _offers.get(token, [])
    return met[1] if len(met) > 1 else None


def withdraw(token: bytes) -> None:
    _offers.pop(token, None)
