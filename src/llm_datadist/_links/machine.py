"""State machines: a table without I/O, and the story of one object."""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Mapping

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Machine(Generic[S, E]):
    """The state of an object; ``table`` has the next state for each event that is legal in a state."""

    __slots__ = ("_story", "_table", "name", "state")

    def __init__(self, name: str, table: Mapping[S, Mapping[E, S]], state: S) -> None:
        self.name = name
        self._table = table
        self.state = state
        self._story: deque[tuple[E, S]] = deque(maxlen=16)

    def can(self, event: E) -> bool:
        return event in self._table[self.state]

    def fire(self, event: E) -> S:
        """Take the transition. Raises StateError, with the story, if it is illegal."""
        if (target := self._table[self.state].get(event)) is None:
            what = f"{event.name.lower()} is illegal when {self.state.name.lower()}"
            raise StateError(f"{self.name}: {what}; story: {self.story()}")
        self._story.append((event, target))
        self.state = target
        return target

    def story(self) -> str:
        return "; ".join(f"{event.name.lower()} -> {target.name.lower()}" for event, target in self._story) or "made"
