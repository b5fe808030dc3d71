"""Stands for a prefix store and its client, where a test decides what is in it and when it answers."""

from __future__ import annotations

import threading
from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence


class DoubleHit(list[int]):
    owner: Double

    def to_bytes(self) -> bytes:
        return bytes(self)


class Double:
    """What an engine sees of a store. Keys are in it by rank, and hits are counted."""

    made: ClassVar[list[Double]] = []

    def __init__(self, _: Any = None, address: str = "", space: bytes = b"", options: Any = None, **more: Any) -> None:
        self.space, self.ranks, self.options = space, list(more.get("ranks", [space])), options
        self.keys: list[set[bytes]] = [set() for _ in self.ranks]
        self.open: Counter[int] = Counter()
        self.asked: list[list[bytes]] = []
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.clears = True
        self.closed = False
        self.misses: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.reason = "absent"  # of misses
        self.made.append(self)

    def has(self, keys: Sequence[bytes], *, shorter: int = 0) -> None:
        """Have keys in all ranks, ``shorter`` fewer in the last."""
        self.keys = [set(keys) for _ in self.ranks]
        self.keys[-1] = set(keys[: len(keys) - shorter])

    def lookup_ranks(self, keys: Sequence[bytes]) -> list[DoubleHit]:
        self.asked.append(list(keys))
        assert self.may_answer.wait(60)
        run = next((number for number, key in enumerate(keys) if any(key not in rank for rank in self.keys)), len(keys))
        hits = [DoubleHit(range(run)) for _ in self.ranks if run]
        for hit in hits:
            hit.owner = self
        self.open.update(map(id, hits))
        self.misses[self.reason] += not hits
        return hits

    def release(self, hit: DoubleHit) -> None:
        """Release a hit of this client, or of another one of the same LLMDataDist."""
        hit.owner.open[id(hit)] -= 1
        assert hit.owner.open[id(hit)] == 0

    def statistics(self) -> Any:
        misses = {why: self.misses[why] for why in ("absent", "late", "gone", "busy")}
        refused = {why: self.refused[why] for why in ("busy", "gone", "late", "failed", "cleared")}
        return SimpleNamespace(misses=misses, refused=refused)

    def clear(self) -> bool:
        self.keys = [set() for _ in self.ranks]
        return self.clears

    def close(self) -> None:
        self.closed = True

    @property
    def held(self) -> int:
        """Number of hits that are not released, of each rank."""
        return sum(self.open.values()) // len(self.ranks)
