"""Calls that an end makes in a thread of its own, so that a test can do something else meanwhile, also at that end."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.ends import End
    from tests.support.world import World

_SECONDS = 60.0


class Call:
    """One call in a thread of its own, and what came of it."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._error: BaseException | None = None
        self._result: Any = None

        def run() -> None:
            try:
                self._result = function(*args)
            except BaseException as error:  # noqa: BLE001 (carried to the test)
                self._error = error

        self.thread = threading.Thread(target=run, name="in background")
        self.thread.start()

    def outcome(self) -> Any:
        """Return what the call returns, or its exception; it must end in time."""
        self.thread.join(_SECONDS)
        assert not self.thread.is_alive()
        return self._result if self._error is None else self._error

    def result(self) -> Any:
        """Return what the call returns, or raise what it raises; it must end in time."""
        self.outcome()
        if self._error is not None:
            raise self._error
        return self._result


def begin_there(world: World, name: str, function: Callable[..., Any], *args: Any) -> None:
    """Call ``function(world, *args)`` in a thread of the end; :func:`result_there` waits for it."""
    world.memory[name] = Call(function, world, *args)


def runs_there(world: World, name: str) -> bool:
    """Return True while the call has not ended."""
    call: Call = world.memory[name]
    return call.thread.is_alive()


def result_there(world: World, name: str) -> Any:
    """Return the result, or the exception."""
    return world.memory.pop(name).outcome()


def ended(world: World) -> bool:
    """Return True when the call of :func:`in_background` is over."""
    return not runs_there(world, "background")


@contextmanager
def in_background(end: End, function: Callable[..., Any], *args: Any) -> Iterator[None]:
    """Run ``function(world, *args)`` at the end meanwhile.

    The block begins once it has made a guard void; its exception, if it has one, is raised at the end of the block.
    """
    before = end.do(_advances)
    end.do(begin_there, "background", function, *args)
    try:
        wait_until(lambda: end.do(_advances) > before)
        yield
    finally:
        if isinstance(error := end.do(result_there, "background"), BaseException):
            raise error


def _advances(world: World) -> int:
    """Return the sum of all generations: it grows when a guard is allocated, advanced or released."""
    assert world.dd._engine is not None
    guards = world.dd._engine.store.exports.guards
    return sum(guards.load(slot) for slot in range(1, guards._next_fresh))
