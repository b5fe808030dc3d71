"""What the registry keeps: keys, bindings, entries and pins, and what it tells its caller to do. Values, no rules."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.checks import INVALID_ID
from llm_datadist.native import Turnstile
from llm_datadist.types import BlocksCacheKey, CacheKey

if TYPE_CHECKING:
    from llm_datadist.cache.layout import Geometry
    from llm_datadist.cache.lifecycle import Lifecycle

__all__ = ["NOTHING", "Binding", "Effects", "Entry", "Key", "Namespace", "Pin", "key_of", "show_key"]


class Namespace:
    """The three name spaces of keys; a placeholder is in none of them (R4, R25)."""

    REQUEST: Final = 0
    PREFIX: Final = 1
    BLOCKS: Final = 2


#: (namespace, request or prefix id, model id); a blocks key has id 0.
Key = tuple[int, int, int]


def key_of(key: CacheKey | BlocksCacheKey) -> Key | None:
    """Return the table key of a public key, or None for a placeholder, which binds nothing (R4)."""
    if isinstance(key, BlocksCacheKey):
        return (Namespace.BLOCKS, 0, key.model_id)
    if key.prefix_id != INVALID_ID:
        return (Namespace.PREFIX, key.prefix_id, key.model_id)
    if key.req_id != INVALID_ID:
        return (Namespace.REQUEST, key.req_id, key.model_id)
    return None


@dataclass(slots=True, eq=False)
class Binding:
    """One binding of a key to a row. A later binding of the same key is another object with another id."""

    binding_id: int
    key: Key
    entry: Entry
    row: int
    guard: Any
    remaining: int  # bit t set: tensor t has not been pulled by this binding yet
    since: float = field(default_factory=time.monotonic)
    bound: bool = True
    pins: int = 0


@dataclass(slots=True, eq=False)
class Entry:
    """One cache. ``storage`` and ``guard`` belong to the caller; the registry only keeps and returns them.

    Attributes:
        pins: Peers that need its memory.
        holds: Calls of this process that do. Open while the cache can be found; opened and shut under the lock.
        closing: True while it is being unregistered: nobody finds it, and it may come back.
    """

    cache_id: int
    geometry: Geometry
    storage: Any
    guard: Any
    owned: bool
    remote_accessible: bool
    life: Lifecycle
    owner: bool = True
    bindings: dict[Key, Binding] = field(default_factory=dict)
    pins: int = 0
    holds: Turnstile = field(default_factory=Turnstile)
    closing: bool = False

    def close(self) -> None:
        """Let nobody find it, for as long as it is being unregistered."""
        self.closing = True
        self.holds.shut()

    def reopen(self, guard: object) -> None:
        """Let it be found again, under a newer guard, unless it is gone meanwhile."""
        self.closing = False
        self.guard = guard
        if self.owner or self.bindings:
            self.holds.open()

    def users(self) -> int:
        """Return how many need its memory; where nobody finds it any more no call is let in first."""
        if not self.owner and not self.bindings:
            self.holds.shut()
        return self.pins + self.holds.inside

    def binding_of_row(self, row: int) -> Binding | None:
        """Return the request-key binding of ``row``, if there is one."""
        return next((b for b in self.bindings.values() if b.row == row and b.key[0] == Namespace.REQUEST), None)


@dataclass(slots=True, eq=False)
class Pin:
    """A peer's (or, with ``peer`` None, a local call's) hold on an entry until it is released or expires."""

    pin_id: int
    peer: object
    entry: Entry
    row: int
    binding: Binding | None
    expires: float


@dataclass(slots=True)
class Effects:
    """What the caller must do now that the lock is gone: advance, then retire guards, then free entries' storages."""

    advance: list[Any] = field(default_factory=list)
    retire: list[Any] = field(default_factory=list)
    free: list[Entry] = field(default_factory=list)


#: The effects of what has none: a transfer that lets go of its cache has no other. Not to be changed.
NOTHING: Final = Effects()


def show_key(key: Key) -> str:
    """Return a table key the way a user wrote it, for messages."""
    namespace, number, model = key
    if namespace == Namespace.BLOCKS:
        return f"BlocksCacheKey(model_id={model})"
    name = "prefix_id" if namespace == Namespace.PREFIX else "req_id"
    return f"CacheKey({name}={number}, model_id={model})"
