"""Gates: stop an end at a step of a transfer until a test lets it go on, from this process or from another one.

The steps are those of walk 1 of docs/architecture.md, by number: :data:`STEPS`. The library names its steps in its code
(`llm_datadist._native.steps`) and calls this module at each of them while a gate is shut or arrivals are counted; a
pull_cache or another public method is wrapped instead. A gate is two files in a folder: ``reached`` appears when the
end is there, and it goes on when ``go`` appears. An end that stands at a gate can be killed or stopped by a signal. See
docs/notes/faults.md.

Each gate stops one call, the first that comes. At a step of the target its control thread stops: such an end sends no
heartbeat and answers nothing meanwhile.
"""

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from llm_datadist._deadline import Deadline
from llm_datadist._links.link import Link
from llm_datadist._links.messages import Consumed, Message, Release, Resolve
from llm_datadist._native import steps
from llm_datadist.cache_manager import CacheManager
from llm_datadist.datadist import LLMDataDist
from tests.support.probe import Probe

_POLL_SECONDS: Final = 0.001
_PATIENCE_SECONDS: Final = 30.0
_CALLS: Final = ("pull_cache", "pull_blocks", "push_cache", "push_blocks")


@dataclass(frozen=True, slots=True)
class Step:
    number: int  # of the row of walk 1
    end: str
    name: str  # what the library calls it, see ``steps.watch``; "call": a public method is about to be called
    text: str  # what is true there
    # first detail of the step: a class it is an instance of, or True for a push
    detail: type[Message] | bool | None = None
    expire: bool = False  # wait there until the call's own time has passed as well

    def meets(self, details: tuple[Any, ...]) -> bool:
        if self.detail is None:
            return True
        return details[0] is self.detail if isinstance(self.detail, bool) else isinstance(details[0], self.detail)


#: Every gate there is. A pull comes to "copy", a push to "write".
STEPS: Final[dict[str, Step]] = {
    "call": Step(1, "initiator", "call", "nothing has been looked at"),
    "hold": Step(2, "initiator", "use", "the arguments were fine, nothing is held"),
    "link": Step(3, "initiator", "link", "the destination is held, no link has been looked for"),
    "ask": Step(4, "initiator", "ask", "the question has not been sent"),
    "asked": Step(4, "initiator", "sent", "the question is on its way", Resolve),
    "target asked": Step(5, "target", "handle", "the question has come, nothing has been looked up", Resolve),
    "target answered": Step(5, "target", "handled", "what had to be pinned is, and the answer is on its way", Resolve),
    "answer": Step(6, "initiator", "answer", "the answer has come, nothing of it has been mapped"),
    "resolved": Step(6, "initiator", "resolved", "the answer is mapped, nothing has been compared"),
    "plan": Step(7, "initiator", "plan", "there is no plan yet"),
    "before copy": Step(8, "initiator", "copy", "there is a plan, the guards have not been compared", False),
    "before write": Step(8, "initiator", "copy", "as before copy", True),
    "deadline": Step(8, "initiator", "copy", "as before copy, and the call's time passes there", False, expire=True),
    "write deadline": Step(8, "initiator", "copy", "as deadline", True, expire=True),
    "after copy": Step(10, "initiator", "copied", "every byte has moved, and the guards were the same", False),
    "after write": Step(10, "initiator", "copied", "as after copy", True),
    "release": Step(11, "initiator", "send", "all is done, no release has been sent", Release),
    "consumed": Step(11, "initiator", "send", "a push is done, the target does not know it", Consumed),
    "released": Step(11, "initiator", "sent", "the release is on its way", Release),
    "target release": Step(12, "target", "handle", "the release has come, the pin is there", Release),
    "target released": Step(12, "target", "handled", "the pin is gone, and whatever waited for it", Release),
    "target consumed": Step(
        12, "target", "handle", "a push is known to be done, its row is not consumed yet", Consumed
    ),
}


class Gate:
    """The deciding side of a gate. Any process that sees the folder, which must exist and be empty at first."""

    def __init__(self, folder: Path) -> None:
        self._reached = folder / "reached"
        self._go = folder / "go"

    @property
    def reached(self) -> bool:
        return self._reached.exists()

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> None:
        _poll(self._reached.exists, seconds, f"nobody came to the gate {self._reached.parent}")

    def open(self) -> None:
        _make(self._go)

    def pass_through(self, seconds: float = _PATIENCE_SECONDS) -> None:
        _make(self._reached)
        _poll(self._go.exists, seconds, f"nobody opened the gate {self._reached.parent}")


def _make(path: Path) -> None:
    """Make the file without a descriptor, which an interrupt would leave open."""
    with suppress(FileExistsError):
        os.mknod(path)


@contextmanager
def shut(datadist: LLMDataDist, step: str, folder: Path, *, peer: int | None = None) -> Iterator[Gate]:
    """Stop the first call that comes to ``step``, for the length of the block.

    ``peer`` is the linked peer whose link is meant; the initiator's steps after "link" need it.
    """
    chosen, gate = STEPS[step], Gate(folder)
    stop = _Stop(chosen, gate, _subject(datadist, chosen, peer))
    with ExitStack() as undo:
        undo.enter_context(watched(stop))
        if chosen.name == "call":
            for method in _CALLS:
                undo.callback(_announce_call(datadist.cache_manager, method))
        yield gate


@contextmanager
def count_arrivals() -> Iterator[Counter[str]]:
    """Count how often a call of this process comes to each step, by "step, transport of the link" if it has one."""
    counts: Counter[str] = Counter()

    def count(name: str, subject: object, details: tuple[Any, ...]) -> None:
        link = next((each for each in (subject, *details) if isinstance(each, Link)), None)
        transport = "" if link is None else f", {link.connection.capabilities.name}"
        with _lock:
            counts.update(f"{key}{transport}" for key in _STEPS_OF.get(name, ()) if STEPS[key].meets(details))

    with watched(count):
        yield counts


#: The steps to count, by the library's name for them: a gate that waits for the call's time is no step of its own.
_STEPS_OF: Final = {
    name: [key for key, step in STEPS.items() if step.name == name and not step.expire]
    for name in {step.name for step in STEPS.values()}
}


class _Stop:
    """Stops the first arrival at one step. The subject says at which end, and on which link."""

    def __init__(self, step: Step, gate: Gate, subject: object) -> None:
        self._step, self._gate, self._subject = step, gate, subject
        self._taken = threading.Lock()

    def __call__(self, name: str, subject: object, details: tuple[Any, ...]) -> None:
        here = name == self._step.name and subject is self._subject and self._step.meets(details)
        if here and self._taken.acquire(blocking=False):
            self._gate.pass_through()
            if self._step.expire:
                deadline: Deadline = details[1]
                _poll(deadline.expired, _PATIENCE_SECONDS, "the time of the call at the gate did not pass")


def _subject(datadist: LLMDataDist, step: Step, peer: int | None) -> object:
    """Return the object that the library passes along with a step of this end."""
    engine = Probe(datadist).engine
    if step.end == "target":
        return engine.links
    if step.name == "call":
        return datadist.cache_manager
    if step.name in ("use", "link"):
        return engine.caches if step.name == "use" else engine.initiator
    if peer is None:
        raise ValueError("a gate at a step of a link needs the peer's cluster id")
    return engine.links.get(peer)


Watcher = Callable[[str, object, tuple[Any, ...]], None]
#: Replaced, never changed: threads of the library go through it without the lock.
_watchers: tuple[Watcher, ...] = ()
_lock: Final = threading.Lock()


@contextmanager
def watched(watcher: Watcher) -> Iterator[None]:
    """Have every step of this process passed to ``watcher`` meanwhile: its name, its subject, its details."""
    global _watchers  # noqa: PLW0603 (there is one hook in the library)
    with _lock:
        _watchers = (*_watchers, watcher)
        steps.watch = _arrive
    try:
        yield
    finally:
        with _lock:
            _watchers = tuple(each for each in _watchers if each is not watcher)
            if not _watchers:
                steps.watch = None


def _arrive(name: str, subject: object, *details: Any) -> None:
    for watcher in _watchers:
        watcher(name, subject, details)


def _announce_call(manager: CacheManager, method: str) -> Callable[[], None]:
    """Have calls of a public method announced before they begin; return what ends that."""
    before, original = vars(manager).get(method), getattr(manager, method)

    def announced(*args: Any, **kwargs: Any) -> Any:
        _arrive("call", manager)
        return original(*args, **kwargs)

    def restore() -> None:
        if before is None:
            delattr(manager, method)  # the method of its class is visible again
        else:
            setattr(manager, method, before)

    setattr(manager, method, announced)
    return restore


def _poll(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{failure} within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
