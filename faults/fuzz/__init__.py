"""Fuzzing: everything that reads what a peer says, against what no peer should say.

A target feeds one reader with frames made from a seed (:mod:`faults.fuzz.forge`) and returns :class:`Verdicts`:
how many it accepted and how many it refused, by kind. Any error that is not a typed one, and anything that the library
logs as its own fault, is raised as :class:`Finding`, with the seed. ``python -m faults fuzz`` runs all targets:
``make faults`` does so for longer than the tests.
"""

import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final, Self

from llm_datadist._log import logger

#: What the library logs when it is itself to blame; an alert is the peer's word.
_FAULT: Final = re.compile(r"unexpected error|(?<!alert )internal error|a handler failed|never retrieved|Traceback")


class Finding(AssertionError):
    """A reader did what it must not do with something a peer said."""


@dataclass
class Verdicts:
    """What became of the frames of one target, which were made from ``seed``, by kind of message or error."""

    target: str
    seed: int
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def judged(self) -> int:
        return self.accepted.total() + self.refused.total()

    def take(self, what: object) -> None:
        self.accepted[type(what).__name__] += 1

    def refuse(self, error: BaseException | str) -> None:
        self.refused[error if isinstance(error, str) else type(error).__name__] += 1

    def __str__(self) -> str:
        pace = self.judged / self.seconds if self.seconds else 0.0
        kinds = ", ".join(f"{name} {count}" for name, count in (self.accepted + self.refused).most_common(12))
        return (
            f"{self.target}, seed {self.seed}: {self.judged} frames, {self.accepted.total()} accepted, "
            f"{self.refused.total()} refused, {pace:.0f}/s ({kinds})"
        )


Targets = dict[str, tuple[float, Callable[[int, int], Verdicts]]]
"""Name -> its part of all frames, so that all take about as long on one machine; function(frames, seed)."""


@contextmanager
def trial(target: str, seed: int) -> Iterator[Verdicts]:
    """Yield the verdicts of one run; what it raises, and what the library logs against itself, becomes a Finding."""
    verdicts, start = Verdicts(target, seed), time.monotonic()
    with _Watch() as watch:
        try:
            yield verdicts
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{target}, seed {seed}, after {verdicts.judged} frames: {error!r}") from error
    verdicts.seconds = time.monotonic() - start
    if watch.faults:
        raise Finding(f"{target}, seed {seed}: the library logged {watch.faults[:3]}")


class _Watch(logging.Handler):
    """Keeps the log of thousands of bad peers out of sight, and what the library says against itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR or record.exc_info or _FAULT.search(text):
            self.faults.append(f"{record.levelname}: {text} {record.exc_info[1]!r}" if record.exc_info else text)

    def __enter__(self) -> Self:
        self._loggers = [logger, logging.getLogger("asyncio"), logging.getLogger("llm_datadist")]
        self._before = [(each.propagate, each.level) for each in self._loggers]
        for each in self._loggers:
            each.addHandler(self)
            each.propagate = False
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each, (propagate, level) in zip(self._loggers, self._before, strict=True):
            each.removeHandler(self)
            each.propagate = propagate
            each.setLevel(level)
