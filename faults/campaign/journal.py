"""What all threads of one worker work with in an epoch, and what they have seen.

Calls are counted by kind and result, and judged; so are verified bytes, arrivals at
steps, and what must not be. The counts are written to a file every second and each violation at once, so that a kill
loses little.
"""

import gc
import json
import logging
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from faults.campaign.memory import Directory
from faults.campaign.schedule import Epoch
from faults.gates import count_arrivals
from llm_datadist import LLMDataDist
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import LLMException, LLMStatusCode, ProtocolError, StateError

#: A call may return this much after its deadline, plus the time for which its whole process did not run.
SLACK_SECONDS: Final = 5.0
_TICK_SECONDS: Final = 0.02
_FLUSH_SECONDS: Final = 1.0


class Interrupted(Exception):
    """What the handler of a signal raises inside of a call."""


class Cancelled(Exception):
    """The task of an awaited call was cancelled."""


@dataclass
class _Running:
    kind: str
    started: float
    budget: float
    lost: float  # of this process so far, when the call began
    thread: int
    told: bool = False


class Journal:
    """Any thread of one worker writes into it: counts and violations go to files beside ``path``."""

    def __init__(self, path: Path, name: str, *, harmed: bool) -> None:
        self._path, self._name, self._harmed = path, name, harmed
        self.leaving = False
        # Open from the start: there may be no descriptors left when it is needed.
        self._violations = path.with_suffix(".jsonl").open("a", buffering=1)
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self._counting = count_arrivals()
        self._arrivals: Counter[str] = Counter()
        self._worst = self._slowest = self._lost = 0.0
        self._running: dict[int, _Running] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="campaign-watch", daemon=True)
        self._handler = _Alarm(self)

    def __enter__(self) -> Self:
        logging.getLogger("LLM_DATADIST").addHandler(self._handler)
        threading.excepthook = lambda args: self._forgotten("thread", args.exc_value)
        sys.unraisablehook = lambda args: self._forgotten("unraisable", args.exc_value)
        self._arrivals = self._counting.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()
        self._counting.__exit__(None, None, None)
        logging.getLogger("LLM_DATADIST").removeHandler(self._handler)
        gc.collect()  # what it finds comes to the hook below, not to standard error
        threading.excepthook = threading.__excepthook__
        sys.unraisablehook = sys.__unraisablehook__
        self.flush()
        self._violations.close()

    # What is written

    def call(self, kind: str, budget: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        mine = _Running(kind, time.monotonic(), budget, self._lost, threading.get_ident())
        self._running[mine.thread] = mine
        outcome: Any
        try:
            outcome = function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 (all of them are judged)
            outcome = error
        finally:
            del self._running[mine.thread]
        late = self._late(mine)
        with self._lock:
            self.calls[f"{kind}|{_result(outcome)}"] += 1
            self._worst = max(self._worst, late)
        if late > SLACK_SECONDS:
            self.violation("hangs", f"{kind} returned {late:.1f} s after its {budget:.1f} s: {outcome!r}")
        if isinstance(outcome, Exception) and not isinstance(outcome, (Interrupted, Cancelled)):
            self._judge(kind, outcome)
        return outcome

    def _late(self, call: _Running) -> float:
        return time.monotonic() - call.started - call.budget - (self._lost - call.lost)

    def ended_after_interrupt(self, seconds: float) -> None:
        """A call has ended so long after a handler raised in it; it may have been waiting for others to stop."""
        with self._lock:
            self._slowest = max(self._slowest, seconds)

    def verified(self, nbytes: int) -> None:
        self.note("verified bytes", nbytes)

    def note(self, what: str, number: int = 1) -> None:
        with self._lock:
            self.counts[what] += number

    def violation(self, what: str, text: str) -> None:
        """Something is as it must never be. ``what``: wrong bytes, hangs, untyped errors, internal errors, leaks..."""
        self.note(f"violation: {what}")
        line = json.dumps({"what": what, "who": self._name, "at": time.monotonic(), "text": text})
        with self._lock:
            if self._violations.closed:  # what is found after the end of an epoch
                self._violations = self._path.with_suffix(".jsonl").open("a", buffering=1)
            self._violations.write(line + "\n")

    def flush(self) -> None:
        with self._lock:
            seen = {"calls": self.calls, "counts": self.counts, "arrivals": dict(self._arrivals), "worst": self._worst}
            text = json.dumps(seen | {"slowest": self._slowest})
        draft = self._path.with_suffix(".draft")
        draft.write_text(text)
        draft.replace(self._path.with_suffix(".json"))

    # The judge of calls

    def _judge(self, kind: str, error: Exception) -> None:
        text = "".join(traceback.format_exception(error))
        if not isinstance(error, LLMException):
            self.violation("untyped errors", f"{kind}: {text}")
        elif isinstance(error, StateError) and self.leaving:
            return
        elif isinstance(error, StateError) or error.status_code is LLMStatusCode.LLM_SUCCESS:
            self.violation("internal errors", f"{kind}: {text}")
        elif "\n" in str(error):
            self.violation("internal errors", f"{kind}: more than one line: {error}")
        elif isinstance(error, ProtocolError) and not self._harmed and " on stranger)" not in text:  # but a liar may
            self.violation("internal errors", f"{kind}: a peer of ours breaks the protocol: {text}")

    def _forgotten(self, where: str, error: BaseException | None) -> None:
        self.violation("untyped errors", f"{where}: {''.join(traceback.format_exception(error))}")

    # The thread that looks on

    def _tick(self) -> None:
        last = flushed = time.monotonic()
        while not self._stop.wait(_TICK_SECONDS):
            now = time.monotonic()
            if now - last > 4 * _TICK_SECONDS:  # this process did not run
                self._lost += now - last - _TICK_SECONDS
            last = now
            for call in list(self._running.values()):
                late = self._late(call)
                if late > 3 * SLACK_SECONDS and not call.told:
                    call.told = True
                    text = f"{call.kind} is {late:.1f} s over its {call.budget:.1f} s:\n{stack(call.thread)}"
                    self.violation("hangs", text)
            if now - flushed > _FLUSH_SECONDS:
                flushed = now
                with suppress(OSError):  # no descriptors: later
                    self.flush()


class _Alarm(logging.Handler):
    def __init__(self, journal: Journal) -> None:
        super().__init__(logging.WARNING)
        self._journal = journal

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.ERROR or "unexpected error" in text or "internal error" in text:
            cause = "".join(traceback.format_exception(record.exc_info[1])) if record.exc_info else ""
            self._journal.violation("internal errors", f"logged: {text}\n{cause}")


def stack(thread: int) -> str:
    frame = sys._current_frames().get(thread)  # noqa: SLF001 (no public name)
    return "".join(traceback.format_stack(frame)) if frame is not None else "gone"


def _result(outcome: Any) -> str:
    if isinstance(outcome, LLMException):
        phase = f" in {outcome.phase}" if outcome.phase else ""
        return f"{type(outcome).__name__} {outcome.status_code.name}{phase}"
    if isinstance(outcome, Exception):
        return type(outcome).__name__
    if isinstance(outcome, tuple) and outcome and isinstance(outcome[0], LLMStatusCode):
        return "ok" if outcome[0] is LLMStatusCode.LLM_SUCCESS else f"returned {outcome[0].name}"
    return "ok"


@dataclass
class Scene:
    """One worker in one epoch; its cluster id is its number plus 1."""

    dd: LLMDataDist
    cm: CacheManager
    epoch: Epoch
    worker: int
    life: int  # how many times it has been killed so far
    directory: Directory
    journal: Journal
    ports: dict[int, int]  # where to dial each peer: its listener, or a relay before it
    stop: threading.Event = field(default_factory=threading.Event)

    @property
    def resting(self) -> bool:
        return self.directory.resting()

    @property
    def budget(self) -> float:
        return self.epoch.sync_ms / 1e3

    @property
    def seed(self) -> str:
        return f"{self.epoch.seed} worker {self.worker} life {self.life}"

    def call(self, kind: str, budget: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self.journal.call(kind, budget, function, *args, **kwargs)
