"""Gates: stop an end at a step of a transfer until the gate is opened, by this process or by another one.

The steps are those of walk 1 of docs/architecture.md, by number: :data:`STEPS`. A gate is two files in a folder:
``reached`` appears when the end has arrived, and the end goes on when ``go`` appears. Meanwhile its process may also be
killed, or stopped by a signal. Methods of single objects are wrapped while the gate is shut: the library itself has no
hooks for gates.

In the process to be stopped::

    with shut(datadist, "before copy", folder, peer=1):
        datadist.cache_manager.pull_blocks(...)

and in the one that decides::

    gate = Gate(folder)
    gate.wait()  # the end has arrived
    gate.open()

Each gate stops one thread once, the first that arrives. A step of the target stops its control thread: meanwhile that
end sends no heartbeats and no answers.
"""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._links.messages import Consumed, Release, Resolve

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from llm_datadist._links.messages import Message
    from llm_datadist._transfer.initiator import TransferOp
    from llm_datadist.datadist import LLMDataDist

__all__ = ["STEPS", "Gate", "Step", "shut"]

_POLL_SECONDS: Final = 0.001
_PATIENCE_SECONDS: Final = 30.0
_PLANNING: Final = "run"


@dataclass(frozen=True, slots=True)
class Step:
    """A place where an end can be stopped.

    Attributes:
        number: Of the row of walk 1.
        end: "initiator" or "target".
        owner: What has the method: the manager, a part of the engine, the link or its connection; for a target the
            handlers of messages.
        method: The method, or several, or the message whose handler is meant.
        after: Stop after the call rather than before it.
        messages: Stop only where the first argument is one of these.
        expire: Wait there until the call's own time has passed as well.
        text: What is true there.
    """

    number: int
    end: str
    owner: str
    method: str
    text: str
    after: bool = False
    messages: tuple[type[Message], ...] = ()
    expire: bool = False


def _initiator(number: int, owner: str, method: str, text: str, **more: Any) -> Step:
    return Step(number, "initiator", owner, method, text, **more)


def _target(number: int, message: type[Message], text: str, **more: Any) -> Step:
    return Step(number, "target", "handlers", message.__name__, text, **more)


#: Every gate there is. "read" and "write" are the two ways of step 9: a pull copies by the first, a push by the second.
STEPS: Final[dict[str, Step]] = {
    "call": _initiator(1, "manager", "pull_cache pull_blocks push_cache push_blocks", "nothing has been looked at"),
    "hold": _initiator(2, "store", "using", "the arguments were fine, nothing is held"),
    "link": _initiator(3, "links", "get", "the destination is held, no link has been looked for"),
    "ask": _initiator(4, "link", "request", "the question has not been sent"),
    "asked": _initiator(4, "link", "send", "the question is on its way", after=True, messages=(Resolve,)),
    "target asked": _target(5, Resolve, "the question has come, nothing has been looked up"),
    "target answered": _target(5, Resolve, "what had to be pinned is, and the answer is on its way", after=True),
    "answer": _initiator(6, "connection", "map", "the answer has come, nothing of it has been believed"),
    "resolved": _initiator(6, "connection", "map", "the answer is mapped, nothing has been compared", after=True),
    "plan": _initiator(7, "initiator", _PLANNING, "the guards were fine, there is no plan yet"),
    "guards": _initiator(8, "connection", "guards_unchanged", "the guards have not been compared"),
    "before copy": _initiator(9, "connection", "read", "there is a plan, no byte has moved"),
    "before write": _initiator(9, "connection", "write", "as before copy"),
    "deadline": _initiator(9, "connection", "read", "as before copy, and the call's time passes there", expire=True),
    "write deadline": _initiator(9, "connection", "write", "as deadline", expire=True),
    "after copy": _initiator(10, "connection", "read", "every byte has moved, the guards are not compared", after=True),
    "after write": _initiator(10, "connection", "write", "as after copy", after=True),
    "release": _initiator(11, "link", "send", "all is done, no release has been sent", messages=(Release,)),
    "consumed": _initiator(11, "link", "send", "a push is done, the target does not know it", messages=(Consumed,)),
    "released": _initiator(11, "link", "send", "the release is on its way", after=True, messages=(Release,)),
    "target release": _target(12, Release, "the release has come, the pin is there"),
    "target released": _target(12, Release, "the pin is gone, and what waited for it is done", after=True),
    "target consumed": _target(12, Consumed, "a push is known to be done, its row is not consumed yet"),
}


class Gate:
    """The deciding side of a gate. Any process that sees the folder, which must exist and be empty at first."""

    def __init__(self, folder: Path) -> None:
        self._reached = folder / "reached"
        self._go = folder / "go"

    @property
    def reached(self) -> bool:
        """True once a thread has arrived."""
        return self._reached.exists()

    def wait(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Return when a thread has arrived.

        Raises:
            TimeoutError: None arrived in time.
        """
        _poll(self._reached.exists, seconds, f"nobody came to the gate {self._reached.parent}")

    def open(self) -> None:
        """Let the thread go on, also one that has not arrived yet. Idempotent."""
        self._go.touch()

    def pass_through(self, seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait at the gate: called in the process that is stopped.

        Raises:
            TimeoutError: The gate was not opened in time.
        """
        self._reached.touch()
        _poll(self._go.exists, seconds, f"nobody opened the gate {self._reached.parent}")


@contextmanager
def shut(datadist: LLMDataDist, step: str, folder: Path, *, peer: int | None = None) -> Iterator[Gate]:
    """Stop the first thread that arrives at ``step``, for the length of the block.

    Args:
        datadist: The end to be stopped, initialised, in this process.
        step: A key of :data:`STEPS`.
        folder: Where the two files of the gate are.
        peer: Cluster id of the linked peer whose link is meant; steps of link and connection need it.

    Raises:
        KeyError: There is no such step.
        ValueError: Not initialised, or the step needs ``peer``.
        NotLinked: There is no link to ``peer``.
    """
    chosen, gate = STEPS[step], Gate(folder)
    restore = _wrap(datadist, chosen, peer, _Stop(chosen, gate))
    try:
        yield gate
    finally:
        restore()


class _Stop:
    """Makes functions that stop at one gate; the first call of any of them does."""

    def __init__(self, step: Step, gate: Gate) -> None:
        self._step = step
        self._gate = gate
        self._taken = threading.Lock()

    def around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return what takes the place of ``original``."""
        if self._step.method == _PLANNING:
            return self._planning(original)
        step, gate = self._step, self._gate

        def stepped(*args: Any, **kwargs: Any) -> Any:
            if (step.messages and not isinstance(args[0], step.messages)) or not self._taken.acquire(blocking=False):
                return original(*args, **kwargs)
            if not step.after:
                gate.pass_through()
            if step.expire:
                _poll(args[-1].expired, _PATIENCE_SECONDS, "the time of the call at the gate did not pass")
            result = original(*args, **kwargs)
            if step.after:
                gate.pass_through()
            return result

        return stepped

    def _planning(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The planner is no method but travels with the operation: stop where it is called."""

        def running(op: TransferOp) -> Any:
            make_plan = op.make_plan

            def planning(*args: Any) -> Any:
                if self._taken.acquire(blocking=False):
                    self._gate.pass_through()
                return make_plan(*args)

            op.make_plan = planning
            return run(op)

        return running


def _wrap(datadist: LLMDataDist, step: Step, peer: int | None, stop: _Stop) -> Callable[[], None]:
    """Put ``stop`` around what the step is about; return what takes it away again."""
    engine = datadist._engine
    if engine is None:
        raise ValueError("gates need an LLMDataDist that is initialised")
    if step.end == "target":
        return _wrap_handler(engine.links._handlers, step.method, stop)
    owners: list[object]
    if step.owner in ("link", "connection"):
        if peer is None:
            raise ValueError(f"a gate at a step of the {step.owner} needs the peer's cluster id")
        link = engine.links.get(peer)
        owners = [link] if step.owner == "link" else list(link.connection.connections)
    else:
        owners = [datadist.cache_manager if step.owner == "manager" else getattr(engine, step.owner)]
    before = [(owner, name, vars(owner).get(name)) for owner in owners for name in step.method.split()]
    for owner, name, _ in before:
        setattr(owner, name, stop.around(getattr(owner, name)))

    def restore() -> None:
        for owner, name, wrapped in before:
            if wrapped is None:
                delattr(owner, name)  # the method of its class is visible again
            else:
                setattr(owner, name, wrapped)

    return restore


def _wrap_handler(handlers: dict[Any, Callable[..., Any]], message: str, stop: _Stop) -> Callable[[], None]:
    kind = next(kind for kind in handlers if kind.__name__ == message)
    original = handlers[kind]
    handlers[kind] = stop.around(original)
    return lambda: handlers.update({kind: original})


def _poll(condition: Callable[[], bool], seconds: float, failure: str) -> None:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            raise TimeoutError(f"{failure} within {seconds:g} s")
        time.sleep(_POLL_SECONDS)
