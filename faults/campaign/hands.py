"""The workers as the supervisor sees them: processes that are killed, stopped, and born again at the same address."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any, Final

from faults.campaign import worker as work
from faults.harness import holds_within
from tests.support.ends import ChildEnd

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from faults.campaign.directory import Directory
    from faults.campaign.epochs import Epoch

_ANSWER_SECONDS: Final = 90.0
_LEAVE_SECONDS: Final = 30.0


class Lost(Exception):
    """A worker that should be there is not, or does not answer."""


class Hand:
    """One worker, through all its lives. The supervisor's thread only.

    Attributes:
        state: "up", "stopped", "dead", "rising" while it has not answered yet, or "leaving".
        busy: Its main thread makes calls, and hears nothing.
    """

    def __init__(self, number: int, port: int, folder: Path, directory: Directory) -> None:
        self.number = number
        self.port = port
        self.state = "dead"
        self.busy = False
        self._until = 0.0
        self._folder = folder
        self._directory = directory
        self._child: ChildEnd | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def bear(self) -> None:
        self._child = ChildEnd(f"campaign {self.number}")
        self.do(work.prepare, str(self._folder), self.number)
        self.state = "up"

    def rise(self, epoch: Epoch, ports: dict[int, int]) -> None:
        """Be born again in the middle of an epoch. Returns at once, see :meth:`risen`."""
        self._child = ChildEnd(f"campaign {self.number}")
        self.state = "rising"
        self.send(_rise, str(self._folder), self.number, epoch, self.port, ports)

    def risen(self) -> bool:
        """Return True once it is up, again or still."""
        if self.state == "rising" and self._child is not None and self._child.answered():
            self.collect()
            self.state = "up"
        elif self.busy and self.state == "up" and self._child is not None and self._child.answered():
            self.rest()
        return self.state == "up"

    def roam(self, seconds: float) -> None:
        """Let its main thread make calls of its own for a while. Returns at once; it is busy meanwhile."""
        self.send(work.roam, seconds)
        self.busy = True

    def rest(self) -> None:
        if self.busy:
            self.busy = False
            self.collect()

    def kill(self) -> None:
        assert self._child is not None
        self._child.kill()
        self.state, self.busy = "dead", False
        self._directory.reborn(self.number)

    def depart(self, finalize: bool) -> None:
        """Have it end in good order, in the middle of its calls. Returns at once, see :meth:`departed`."""
        self._directory.reborn(self.number)
        self.send(work.depart, finalize)
        self.state = "leaving"
        self._until = time.monotonic() + _LEAVE_SECONDS

    def departed(self) -> bool:
        assert self._child is not None
        if self._child.code is None and time.monotonic() < self._until:
            return False
        code, self.state = self._child.code, "dead"
        if code:
            raise Lost(f"worker {self.number} was to leave in good order, and ended with {code}")
        if code is None:
            raise Lost(f"worker {self.number} was to leave in good order, and has not answered")
        self._child.kill()
        self._directory.reborn(self.number)
        return True

    def stop(self) -> None:
        assert self._child is not None
        self._child.signal(signal.SIGSTOP)
        self.state = "stopped"

    def go_on(self) -> None:
        if self.state == "stopped" and self._child is not None:
            self._child.signal(signal.SIGCONT)
            self.state = "up"

    def gone(self) -> int | None:
        """Return the exit code of a process that ended without being killed by us."""
        return None if self._child is None or self.state in {"dead", "leaving"} else self._child.code

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.send(function, *args)
        return self.collect()

    def send(self, function: Callable[..., Any], *args: Any) -> None:
        assert self._child is not None
        try:
            self._child.begin(function, *args)
        except OSError as error:
            raise Lost(f"worker {self.number} is gone (exit {self._exit()}) before {function.__name__}") from error

    def collect(self) -> Any:
        assert self._child is not None
        try:
            return self._child.finish(_ANSWER_SECONDS)
        except (EOFError, ConnectionError) as error:
            raise Lost(f"worker {self.number} is gone, exit {self._exit()}") from error
        except TimeoutError as error:
            raise Lost(f"worker {self.number} has not answered for {_ANSWER_SECONDS:g} s") from error

    def close(self) -> None:
        if self._child is not None:
            self.go_on()
            self._child.kill()
            self.state, self.busy = "dead", False

    def _exit(self) -> int | None:
        assert self._child is not None
        child = self._child
        holds_within(lambda: child.code is not None, 5.0)
        return child.code


def _rise(world: Any, folder: str, number: int, epoch: Epoch, port: int, ports: dict[int, int]) -> None:
    work.prepare(world, folder, number)
    work.begin(world, epoch, port, dialled=True)
    work.go(world, ports)
