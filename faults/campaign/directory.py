"""What there is to pull from and to push into, in a file that all workers map: written by owners, read by everybody."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from faults.campaign.memory import GENERATIONS, Shape, Stamp

SLOTS: Final = 24
WORKERS: Final = 8
_REMEMBERED: Final = 32
_RECORD: Final = np.dtype(
    [
        ("turn", "u8"),
        ("kind", "u8"),
        ("incarnation", "u8"),
        ("generation", "u8"),
        ("cache_id", "i8"),
        ("tensors", "u8"),
        ("rows", "u8"),
        ("words", "u8"),
        ("length", "u8"),
        ("extra", "u1", (256,)),
        # When the owner began to take a generation back, and when nobody could find it any more: monotonic ns, or 0.
        ("ending", "u8", (_REMEMBERED,)),
        ("ended", "u8", (_REMEMBERED,)),
    ]
)


class Kind(IntEnum):
    NOTHING = 0
    BLOCKS = 1  # by a key of its own, or by id
    REBOUND = 2  # by a key that is bound again and again
    KEYED = 3  # continuous, a key for each row, consumed by pulls
    ROWS = 4  # continuous, by id
    INBOX = 5  # blocks that peers push into
    INROWS = 6  # rows that peers push into
    PROOF = 7  # blocks, after the faults
    GRANTED = 8  # blocks under a grant, used again and again
    PREFIX = 9  # continuous, a prefix key for each row, consumed by nobody
    MAILBOX = 10  # blocks that peers write by their addresses, there for a whole epoch


@dataclass(frozen=True)
class Found:
    """A cache of another worker as its owner published it."""

    worker: int
    slot: int
    kind: Kind
    incarnation: int
    generation: int
    cache_id: int
    shape: Shape
    extra: bytes = b""  # a grant, or addresses

    @property
    def cluster_id(self) -> int:
        return self.worker + 1

    @property
    def stamp(self) -> Stamp:
        return Stamp(self.worker, self.incarnation, self.slot, self.generation)

    def at(self, generation: int) -> Stamp:
        return Stamp(self.worker, self.incarnation, self.slot, generation)


class Directory:
    """A table of slots, one row of it for each worker. One writer for each slot; any process reads."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        mode: Any = "w+" if create else "r+"
        self._table = np.memmap(path, _RECORD, mode, shape=(WORKERS, SLOTS))
        self._lives = np.memmap(path.with_suffix(".lives"), np.uint64, mode, shape=(WORKERS,))
        #: What each worker is doing, see faults.campaign.journal.
        self.doing = np.memmap(path.with_suffix(".doing"), np.uint64, mode, shape=(WORKERS,))
        #: [puller, owner]: when the last good pull began.
        self.good = np.memmap(path.with_suffix(".good"), np.uint64, mode, shape=(WORKERS, WORKERS))
        #: Until when everybody rests, and whether without links.
        self._rest = np.memmap(path.with_suffix(".rest"), np.uint64, mode, shape=(2,))

    def life(self, worker: int) -> int:
        return int(self._lives[worker])

    def reborn(self, worker: int) -> None:
        """A worker has been killed; nothing that it had is there any more."""
        self._lives[worker] += 1
        self._table[worker] = np.zeros((), _RECORD)
        self.doing[worker] = 0

    def rest(self, seconds: float, *, apart: bool) -> int:
        """Let all workers rest for so long, without links or as they are; return until when."""
        self._rest[:] = time.monotonic_ns() + int(seconds * 1e9), apart
        return int(self._rest[0])

    def resting(self) -> bool:
        return int(self._rest[0]) > time.monotonic_ns()

    def apart(self) -> bool:
        return bool(self._rest[1]) and self.resting()

    def clear(self) -> None:
        self._table[:] = np.zeros((), _RECORD)
        self._rest[:] = 0

    # The owner

    def publish(self, found: Found) -> None:
        record = self._table[found.worker, found.slot]
        record["turn"] += 1
        # First: who sees the new generation must not take the end of one long ago for its own.
        self.unmark(found.worker, found.slot, found.generation)
        for name in ("kind", "incarnation", "generation", "cache_id"):
            record[name] = getattr(found, name)
        for name in ("tensors", "rows", "words"):
            record[name] = getattr(found.shape, name)
        record["length"] = len(found.extra)
        record["extra"][: len(found.extra)] = np.frombuffer(found.extra, np.uint8)
        record["turn"] += 1

    def withdraw(self, worker: int, slot: int) -> None:
        record = self._table[worker, slot]
        record["turn"] += 1
        record["kind"] = Kind.NOTHING
        record["turn"] += 1

    def mark(self, worker: int, slot: int, generation: int, what: str) -> None:
        """Say that the end of a generation begins (``ending``), or is over (``ended``)."""
        self._table[worker, slot][what][generation % _REMEMBERED] = time.monotonic_ns()

    def unmark(self, worker: int, slot: int, generation: int) -> None:
        """The end of a generation did not take place."""
        for what in ("ending", "ended"):
            self._table[worker, slot][what][generation % _REMEMBERED] = 0

    # Everybody

    def look(self, worker: int, slot: int) -> Found | None:
        record = self._table[worker, slot]
        before = int(record["turn"])
        copy = record.copy()
        if before % 2 or int(record["turn"]) != before or not copy["kind"]:
            return None
        shape = Shape(int(copy["tensors"]), int(copy["rows"]), int(copy["words"]))
        incarnation, generation, cache_id = (int(copy[name]) for name in ("incarnation", "generation", "cache_id"))
        extra = copy["extra"][: int(copy["length"])].tobytes()
        return Found(worker, slot, Kind(int(copy["kind"])), incarnation, generation, cache_id, shape, extra)

    def pick(self, rng: Random, workers: list[int], *kinds: Kind) -> Found | None:
        found = [self.look(worker, slot) for worker in workers for slot in range(SLOTS)]
        fit = [each for each in found if each is not None and each.kind in kinds]
        return rng.choice(fit) if fit else None

    def generations(self) -> frozenset[tuple[int, int, int, int]]:
        """Return (worker, life, slot, generation) of all that is there now."""
        return frozenset(
            (worker, int(record["incarnation"]), slot, int(record["generation"]))
            for worker in range(WORKERS)
            for slot, record in enumerate(self._table[worker].copy())
        )

    def moment(self, found: Found, generation: int, what: str) -> int:
        """Return when the end of a generation began or was over; 0: not yet, or too long ago to be known."""
        distance = (self.newest(found) - generation) % GENERATIONS
        if self.life(found.worker) != found.incarnation or not distance < _REMEMBERED - 2:
            return 0
        return int(self._table[found.worker, found.slot][what][generation % _REMEMBERED])

    def newest(self, found: Found) -> int:
        return int(self._table[found.worker, found.slot]["generation"])

    def close(self) -> None:
        each: Any
        for each in (self._table, self._lives, self.doing, self.good, self._rest):
            each._mmap.close()
