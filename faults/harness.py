"""What all runs of harm share: the campaign, the trials and the stuck readers.

Processes at both ends that end with the run, threads whose errors come out, calls whose outcome is judged, words that
differ, waiting in bounds, and a command that prints one line for each report.
"""

import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import Cache
from llm_datadist.errors import LLMException
from llm_datadist.views import tensor_views
from tests.support.ends import Call, ChildEnd, LocalEnd
from tests.support.linking import SUCCESS, info, link
from tests.support.world import World

Words = NDArray[np.uint64]
_SHOWN_FAULTS: Final = 20


class Processes(ExitStack):
    """An owner and its readers, each a process of its own but over inproc. A context manager: ends all of them."""

    def __init__(self, transport: str, pool_bytes: int, *, page_shift: int = 12, **settings: Any) -> None:
        super().__init__()
        self._local = transport == "inproc"
        self.settings: dict[str, Any] = {
            "mem_pool_cfg": f'{{"memory_size": {pool_bytes}, "page_shift": {page_shift}}}',
            "host_mem_pool_cfg": None,
            **settings,
            "extra": {"llm.Transport": transport} | settings.get("extra", {}),
        }

    def process(self, name: str) -> Any:
        end = LocalEnd(name) if self._local else ChildEnd(name)
        self.callback(_end, end)
        return end

    def owner(self, **settings: Any) -> Any:
        """Return a prompt, cluster 1, that listens. ``settings`` are its own."""
        owner = self.process("owner")
        owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **(self.settings | settings))
        return owner

    def reader(self, owner: Any, name: str = "reader", first: Callable[[World], None] | None = None) -> Any:
        """Return a decoder, cluster 2, that has linked to the owner; it has called ``first`` before all else."""
        reader = self.process(name)
        if first is not None:
            reader.do(first)
        reader.start("DECODER", 2, **self.settings)
        assert reader.do(link, [info(1, owner.port)]) == SUCCESS
        return reader


def _end(end: LocalEnd | ChildEnd) -> None:
    if isinstance(end, LocalEnd):
        end.stop()
        return
    end.signal(signal.SIGCONT)
    end.close()


class Threads:
    """Threads of one end that go on until ``stop`` is set."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self._calls: list[Call] = []

    def start(self, function: Callable[..., object], *args: Any) -> None:
        self._calls.append(Call(function, *args))

    def join(self) -> None:
        self.stop.set()
        for call in self._calls:
            call.thread.join()
        while self._calls:
            self._calls.pop(0).result()


@dataclass(frozen=True)
class Outcome:
    """What a call came to: "success", or the class of its error; typed if that is one of the library."""

    name: str = "success"
    typed: bool = True
    text: str = ""

    @property
    def good(self) -> bool:
        return self.name == "success"


def outcome_of(function: Callable[..., object], *args: Any) -> Outcome:
    try:
        function(*args)
    except Exception as error:  # noqa: BLE001 (all of them are judged)
        return Outcome(type(error).__name__, isinstance(error, LLMException), str(error))
    return Outcome()


def timed(function: Callable[..., object], *args: Any) -> float:
    """Call; return how many milliseconds that took."""
    since = time.perf_counter()
    function(*args)
    return (time.perf_counter() - since) * 1e3


def words_of(cache: Cache) -> list[Words]:
    return [view.reshape(-1).view(np.uint64) for view in tensor_views(cache)]


def numbered(base: int, count: int) -> Words:
    """Return words that say where they come from: ``base``, and the place of each behind it."""
    return np.arange(count, dtype=np.uint64) + np.uint64(base)


def differing(found: Iterable[Words], expected: Iterable[Words]) -> int:
    return sum(
        int((words.view(np.uint8) != right.view(np.uint8)).sum())
        for words, right in zip(found, expected, strict=True)
        if not np.array_equal(words, right)
    )


def holds_within(condition: Callable[[], object], seconds: float, every: float = 0.01) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(every)
    return True


@dataclass
class Report:
    """What came of one run. Subclasses count and judge more, and say it in :meth:`line`."""

    name: str  # its transport, as a rule
    asked: int  # how many were asked for, or its seed
    began: float = field(default_factory=time.monotonic)
    wrong_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)  # what must not be

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def good(self) -> bool:
        return not self.wrong_bytes and not self.faults

    def line(self) -> str:
        return ", ".join(f"{count} {name}" for name, count in sorted(self.outcomes.items()))

    def told(self) -> tuple[str, bool]:
        return "\n    ".join([self.line(), *self.faults[:_SHOWN_FAULTS]]), self.good
