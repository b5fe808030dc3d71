"""Ends: a World in this process (LocalEnd) or in a child process (ChildEnd), driven by the same calls."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeVar

from tests.support.nursery import Forked, Nursery
from tests.support.source import ROOT
from tests.support.world import World, make_config

if TYPE_CHECKING:
    import signal
    from collections.abc import Callable, Sequence

_ANSWER_SECONDS = 60.0
NURSERY = Nursery()
R = TypeVar("R")


class End:
    """What a test sees of one end."""

    cluster_id: int
    port: int | None

    def do(self, function: Callable[..., R], *args: Any) -> R:
        """Call ``function(world, *args)`` at the end and return its result."""
        raise NotImplementedError

    def start(self, role: str, cluster_id: int, **settings: Any) -> None:
        """Initialise an LLMDataDist there; ``settings`` as :func:`tests.support.world.make_config`."""
        device = settings.pop("device", None)
        self.cluster_id = cluster_id
        self.port = self.do(World.start, role, cluster_id, make_config(**settings), device)

    def stop(self) -> None:
        """Finalize it, after checking every table."""
        self.do(World.stop)


class LocalEnd(End):
    """A world in the test's own process."""

    def __init__(self, name: str) -> None:
        self.world = World(name)

    def do(self, function: Callable[..., R], *args: Any) -> R:
        return function(self.world, *args)


class ChildEnd(End):
    """A world in a child process, which dies with this one (its pipe ends).

    ``fresh``: an interpreter of its own; otherwise a child of the nursery, which is there a hundred times faster.
    ``inside``: the beginning of a command that runs the interpreter.
    """

    def __init__(self, name: str, *, fresh: bool = False, inside: Sequence[str] = ()) -> None:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
        ours, theirs = socket.socketpair()
        with theirs:
            forked = None if fresh or inside else NURSERY.fork(name, theirs, environment)
            self._process: subprocess.Popen[bytes] | Forked = forked or subprocess.Popen(
                [*inside, sys.executable, "-W", "error", "-m", "tests.support.nursery", name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment,
            )
        self._pipe = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self._process.pid

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Start a call and return at once; :meth:`finish` waits for it."""
        NURSERY.modules.add(function.__module__)
        self._pipe.send((function, args))

    def finish(self, seconds: float = _ANSWER_SECONDS) -> Any:
        """Return the result of the call that was begun, or raise what it raised."""
        if not self._pipe.poll(seconds):
            # A late answer would be taken for that of the next call.
            self.kill()
            raise TimeoutError(f"the child gave no answer within {seconds} s")
        ok, value = self._pipe.recv()
        if ok:
            return value
        raise value

    def answered(self) -> bool:
        """Return True when there is an answer, or will never be one."""
        return self._pipe.poll(0) or self.code is not None

    @property
    def code(self) -> int | None:
        """The exit status, or None while it runs."""
        return self._process.poll()

    def do(self, function: Callable[..., R], *args: Any) -> R:
        self.begin(function, *args)
        result: R = self.finish()
        return result

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        """End the child; it must have nothing left to complain about."""
        if self._process.poll() is None:
            self._pipe.close()
            code = self._process.wait(30)
            assert code == 0, f"the child ended with {code}"
