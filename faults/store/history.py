"""History of all processes of a campaign, and its judgement: no hit before its publish or after its removal.

Each process appends records of a fixed size to a file of its own, so that ``kill -9`` loses none that is complete.
All times are CLOCK_MONOTONIC, which the processes of a host share.
"""

import logging
import math
import os
import struct
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from faults.gates import Gate

_RECORD: Final = struct.Struct("<8s32s32sdd")


@dataclass(frozen=True, slots=True)
class Record:
    """``what`` of clients: "save", begun at ``begin``; "hit", of a lookup from ``begin`` to ``end``; "mismatch" for
    each key of a load that found wrong bytes.

    Of the store: "stored", "removed"; "flip", a bit of its memory; "cleared" without a key for a namespace that left,
    and without a namespace when its process begins.
    """

    what: str
    namespace: bytes
    key: bytes
    begin: float
    end: float

    @property
    def name(self) -> tuple[bytes, bytes]:
        return self.namespace, self.key

    def __str__(self) -> str:
        times = f"{self.begin:.6f}" + (f" to {self.end:.6f}" if self.end != self.begin else "")
        return f"{self.what} {self.namespace[:4].hex()} {self.key[:4].hex()} at {times}"


class Journal:
    """Writes records of one process. A context manager. Threads: any."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, records: Iterable[Record]) -> None:
        """Append all of them by one call of the kernel."""
        packed = (_RECORD.pack(each.what.encode(), each.namespace, each.key, each.begin, each.end) for each in records)
        os.write(self._fd, b"".join(packed))

    def close(self) -> None:
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def records_of(path: Path) -> Iterator[Record]:
    """Yield the complete records of a file."""
    data = path.read_bytes()
    for what, *rest in _RECORD.iter_unpack(data[: len(data) // _RECORD.size * _RECORD.size]):
        yield Record(what.rstrip(b"\0").decode(), *rest)


@dataclass(slots=True)
class _Span:
    begin: float
    end: float = math.inf


class Published:
    """Replay of the store's events: when which key was published, and what is published now."""

    def __init__(self, events: Iterable[Record]) -> None:
        self.faults: list[str] = []
        self.index: set[tuple[bytes, bytes]] = set()
        self._flipped: set[tuple[bytes, bytes]] = set()
        self._spans: defaultdict[tuple[bytes, bytes], list[_Span]] = defaultdict(list)
        for each in events:
            self._replay(each)

    def _replay(self, event: Record) -> None:
        if event.what == "cleared":
            gone = {name for name in self.index if event.namespace in (name[0], bytes(32))}
            for name in gone:
                self._spans[name][-1].end = event.begin
            self.index -= gone
        elif event.what == "stored":
            if event.name in self.index:
                self.faults.append(f"event of a key that was there: {event}")
            self.index.add(event.name)
            self._spans[event.name].append(_Span(event.begin))
        elif event.what == "flip":
            self._flipped.add(event.name)
        elif event.name in self.index:
            self.index.remove(event.name)
            self._spans[event.name][-1].end = event.begin
        else:
            self.faults.append(f"event of a key that was not there: {event}")

    def judge(self, records: Iterable[Record]) -> Iterator[str]:
        """Yield hits of keys that were published at no moment of their lookup, publishes without a save, and loads that
        found wrong bytes although no bit of theirs was flipped."""
        saves: dict[tuple[bytes, bytes], float] = {}
        hits, mismatches = [], defaultdict(set)
        for each in records:
            if each.what == "save":
                saves[each.name] = min(each.begin, saves.get(each.name, math.inf))
            elif each.what == "hit":
                hits.append(each)
            elif each.what == "mismatch":
                mismatches[each.begin].add(each.name)
        yield from self.faults
        for name, spans in self._spans.items():
            if spans[0].begin < saves.get(name, math.inf):
                yield f"published before any save: {Record('stored', *name, spans[0].begin, spans[0].begin)}"
        for when, names in mismatches.items():
            if not names & self._flipped:
                yield f"wrong bytes were found at {when:.6f} where no bit was flipped: {len(names)} keys"
        for hit in hits:
            if not any(span.begin <= hit.end and hit.begin <= span.end for span in self._spans.get(hit.name, ())):
                yield f"not published then: {hit}"


class _Errors(logging.Handler):
    """Keeps the texts of errors."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))


def errors_logged() -> list[str]:
    """Return a list to which the library's errors of this process are added from now on; warnings go nowhere."""
    log, handler = logging.getLogger("LLM_DATADIST"), _Errors()
    log.setLevel(logging.ERROR)
    log.addHandler(handler)
    return handler.texts


def stop_once(step: str, gate: Gate) -> Callable[[str, object, tuple[Any, ...]], None]:
    """Return a watcher that stops the first thread that comes to a step of this name."""
    taken = threading.Lock()

    def arrive(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name == step and taken.acquire(blocking=False):
            gate.pass_through()

    return arrive
