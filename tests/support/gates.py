"""Gates: stop an end at a step of a transfer until the test says go, in this process or in another one.

A gate is two files in a folder: ``reached`` appears when the end is there, and it goes on when ``go`` appears.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from llm_datadist.control.messages import Release, Resolve
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.moves import call, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.ends import End
    from tests.support.world import World

__all__ = ["STEPS", "Stopped", "begin", "count_messages", "releases", "resolves", "stopped"]

#: step -> (object that has it, its method, stop after it rather than before)
STEPS = {
    "resolved": ("connection", "map", True),  # the answer has come, nothing has been compared
    "before copy": ("connection", "read", False),  # the guards were fine, no byte has moved
    "before write": ("connection", "write", False),
    "after copy": ("connection", "read", True),  # every byte has moved, the guards are still to be looked at again
    "after write": ("connection", "write", True),
    "deadline": ("connection", "read", False),  # as "before copy", and the call's time passes there
    "write deadline": ("connection", "write", False),
    "release": ("link", "send", False),  # all is done, the release has not been sent
}


def gated_call(world: World, cluster_id: int, step: str, folder: Path, method: str, *args: Any, **kwargs: Any) -> Any:
    """Make a call that stops at ``step``."""
    assert world.dd._engine is not None
    link = world.dd._engine.links.get(cluster_id)
    owner, name, after = STEPS[step]
    target: Any = link if owner == "link" else link.connection
    original = getattr(target, name)

    def stop() -> None:
        (folder / "reached").touch()
        wait_until((folder / "go").exists, 30)

    def stepped(*step_args: Any, **step_kwargs: Any) -> Any:
        if name == "send" and not isinstance(step_args[0], Release):
            return original(*step_args, **step_kwargs)
        target.__dict__.pop(name, None)
        if not after:
            stop()
        if "deadline" in step:
            wait_until(step_args[-1].expired)
        result = original(*step_args, **step_kwargs)
        if after:
            stop()
        return result

    setattr(target, name, stepped)
    try:
        return call(world, method, *args, **kwargs)
    finally:
        target.__dict__.pop(name, None)


class Stopped:
    """A call that is stopped at a step. The test's side of the gate."""

    def __init__(self, folder: Path, collect: Callable[[], Any]) -> None:
        self._folder = folder
        self._collect: Callable[[], Any] | None = collect

    def finish(self) -> Any:
        """Let the call go on; return its result or raise what it raised."""
        (self._folder / "go").touch()
        collect, self._collect = self._collect, None
        assert collect is not None, "finished already"
        return collect()

    def collect_anyway(self) -> None:
        """End the call after a test that failed before it did."""
        if self._collect is not None:
            with suppress(Exception):
                self.finish()


@contextmanager
def stopped(end: End, step: str, folder: Path, method: str, *args: Any, peer: int = 1) -> Iterator[Stopped]:
    """Begin a call of the cache manager of ``end`` and wait until it stops at ``step`` of its way to ``peer``."""
    call = Stopped(folder, begin(end, gated_call, peer, step, folder, method, *args))
    try:
        wait_until((folder / "reached").exists, 30)
        yield call
    finally:
        call.collect_anyway()


def begin(end: End, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Start a call at an end, whichever kind it is; the function returned waits for its result."""
    if isinstance(end, ChildEnd):
        end.begin(function, *args)
        return end.finish
    assert isinstance(end, LocalEnd)
    outcome: list[tuple[bool, Any]] = []

    def run() -> None:
        try:
            outcome.append((True, end.do(function, *args)))
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            outcome.append((False, error))

    thread = threading.Thread(target=run, name="begun call")
    thread.start()

    def finish() -> Any:
        thread.join(60)
        assert not thread.is_alive()
        ((ok, value),) = outcome
        if ok:
            return value
        raise value

    return finish


def count_messages(world: World) -> None:
    """Count from now on how often a peer asks this end where a cache is, and how often it gives a pin back."""
    assert world.dd._engine is not None
    handlers: Any = world.dd._engine.links._handlers
    resolve, release = handlers[Resolve], handlers[Release]
    world.memory["resolves"] = world.memory["releases"] = 0

    def on_resolve(link: Any, message: Any) -> None:
        world.memory["resolves"] += 1  # before the answer leaves
        resolve(link, message)

    def on_release(link: Any, message: Any) -> None:
        release(link, message)
        world.memory["releases"] += 1  # after its effects

    handlers[Resolve], handlers[Release] = on_resolve, on_release


def resolves(world: World) -> int:
    """Return how often a peer asked."""
    return int(world.memory["resolves"])


def releases(world: World) -> int:
    """Return how often a peer gave a pin back."""
    return int(world.memory["releases"])
