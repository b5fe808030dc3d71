"""Ends: a World in this process (LocalEnd) or in a child process (ChildEnd), driven by the same calls; processes of a
test of its own; calls in a thread of their own."""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from tests.support.moves import wait_until
from tests.support.nursery import Forked, Nursery
from tests.support.source import PATHS, ROOT
from tests.support.world import World, make_config, residue_of, settled_of

_ANSWER_SECONDS = 60.0
NURSERY = Nursery()
R = TypeVar("R")


@cache
def _nursery_of(build: Path) -> Nursery:
    return NURSERY if build == ROOT else Nursery(build)


class End:
    """What a test sees of one end."""

    cluster_id: int
    port: int | None
    gpu = False  # True: caches with Placement.DEVICE lie in a GPU

    def do(self, function: Callable[..., R], *args: Any) -> R:
        """Call ``function(world, *args)`` at the end and return its result."""
        raise NotImplementedError

    def start(self, role: str, cluster_id: int, **settings: Any) -> None:
        """Initialise an LLMDataDist there; ``settings`` as :func:`tests.support.world.make_config`."""
        device = settings.pop("device", None)
        self.cluster_id = cluster_id
        self.port = self.do(World.start, role, cluster_id, make_config(**{"gpu": self.gpu} | settings), device)

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
    ``inside``: the beginning of a command that runs the interpreter. ``build``: the folder of another build.
    """

    def __init__(self, name: str, *, fresh: bool = False, inside: Sequence[str] = (), build: Path = ROOT) -> None:
        environment = os.environ | (PATHS if build == ROOT else {"PYTHONPATH": str(build)})
        ours, theirs = socket.socketpair()
        with theirs:
            forked = None if fresh or inside else _nursery_of(build).fork(name, theirs, environment)
            self.process: subprocess.Popen[bytes] | Forked = forked or subprocess.Popen(
                [*inside, sys.executable, "-W", "error", "-m", "tests.support.nursery", name, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                cwd=build,
                env=environment,
            )
        self._pipe = Connection(ours.detach())

    @property
    def pid(self) -> int:
        return self.process.pid

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
        return self.process.poll()

    def do(self, function: Callable[..., R], *args: Any) -> R:
        self.begin(function, *args)
        result: R = self.finish()
        return result

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self.process.kill()
        self.process.wait()
        self._pipe.close()

    def close(self) -> None:
        """End the child; it must have nothing left to complain about."""
        if self.process.poll() is None:
            self._pipe.close()
            code = self.process.wait(30)
            assert code == 0, f"the child ended with {code}"


# --- processes of a test of its own, to be killed, stopped and born again ---
class Processes:
    """The processes of one test. Survivors must have nothing left when they have finalized."""

    def __init__(self) -> None:
        self._newborn: dict[ChildEnd, Any] = {}

    def child(self, name: str) -> ChildEnd:
        end = ChildEnd(name)
        self._newborn[end] = end.do(residue_of)
        return end

    def kill(self, end: ChildEnd) -> None:
        end.kill()

    def part(self) -> None:
        """Finalize and end those that were not killed, the last one first: it is the one that linked."""
        alive = [end for end in self._newborn if end.code != -signal.SIGKILL]
        for end in alive:
            end.signal(signal.SIGCONT)  # after a test that failed while it was frozen
        try:
            for end in reversed(alive):
                end.stop()
                assert end.do(settled_of, self._newborn[end]) == self._newborn[end]
                end.close()
        finally:
            for end in alive:
                end.kill()


class Family(Processes):
    """Ends over one transport."""

    def __init__(self, transport: str, *, gpu: bool = False) -> None:
        super().__init__()
        self.transport = transport
        self.gpu = gpu

    def born(self, role: str, cluster_id: int, *, port: int | None = 0, **settings: Any) -> ChildEnd:
        end = self.child(f"{role.lower()} {cluster_id}")
        end.gpu = self.gpu
        extra = {"llm.Transport": self.transport} | settings.pop("extra", {})
        end.start(role, cluster_id, listen_ip_info=f"127.0.0.1:{port}", extra=extra, **settings)
        return end


@contextmanager
def one_family(transport: str, *, gpu: bool = False) -> Iterator[Family]:
    """Yield a family; afterwards nothing of the library's may be left in the file system either."""
    before = _files_of_ours()
    family = Family(transport, gpu=gpu)
    yield family
    family.part()
    assert _files_of_ours() == before


def _files_of_ours() -> list[str]:
    names = [name for folder in ("/dev/shm", tempfile.gettempdir()) for name in os.listdir(folder)]
    return sorted(name for name in names if name.lstrip(".").startswith(("llm-datadist", "llm_datadist")))


def state_of(task: int) -> str:
    """Return the letter of the state of a process or thread; empty once there is none."""
    try:
        return Path(f"/proc/{task}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def has_ended(pid: int) -> bool:
    """Return whether a process is at most an entry that its parent, who may not be ours, has not collected yet."""
    return state_of(pid) in ("", "Z")


def freeze(end: End) -> None:
    """SIGSTOP, and wait until no thread of it runs any more: until then it may still answer."""
    assert isinstance(end, ChildEnd), "it is in this process"
    end.signal(signal.SIGSTOP)
    wait_until(lambda: {state_of(int(thread)) for thread in os.listdir(f"/proc/{end.pid}/task")} == {"T"})


@contextmanager
def frozen(end: End) -> Iterator[None]:
    """The process answers nothing meanwhile."""
    assert isinstance(end, ChildEnd), "it is in this process"
    try:
        freeze(end)
        yield
    finally:
        end.signal(signal.SIGCONT)


# --- calls in a thread of their own, so that a test can do something else meanwhile, also at that end ---
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
        self.thread.join(_ANSWER_SECONDS)
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
    return sum(world.probe.generations())
