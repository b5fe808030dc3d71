"""What all threads of one worker work with in one epoch."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from faults.campaign.directory import Directory
    from faults.campaign.epochs import Epoch
    from faults.campaign.journal import Journal
    from llm_datadist import LLMDataDist
    from llm_datadist.cache_manager import CacheManager


@dataclass
class Scene:
    """One worker in one epoch; its cluster id is its number plus 1.

    Attributes:
        life: How many times it has been killed so far.
        ports: Where to dial each peer: its listener, or a relay before it.
    """

    dd: LLMDataDist
    cm: CacheManager
    epoch: Epoch
    worker: int
    life: int
    directory: Directory
    journal: Journal
    ports: dict[int, int]
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def resting(self) -> bool:
        return self.directory.resting()

    @property
    def budget(self) -> float:
        """Seconds that a call of the cache manager may take."""
        return self.epoch.sync_ms / 1e3

    @property
    def seed(self) -> str:
        return f"{self.epoch.seed} worker {self.worker} life {self.life}"

    def call(self, kind: str, budget: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.journal.call(kind, budget, function, *args, **kwargs)
