"""The nursery: a process that has imported what an end needs, and forks one when asked.

An interpreter that imports all of it takes half a second of a processor, a fork five milliseconds; hundreds of tests
kill an end and need another one. It has one thread and never an LLMDataDist of its own. The pools of two of its
children lie at different addresses, as in any two processes: each child begins with a gap of a random size.

``python -m tests.support.nursery FD`` is the nursery itself, with a name before FD a child end of its own.
"""

import atexit
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap
from multiprocessing.connection import Connection
from pathlib import Path
from secrets import randbelow
from typing import Final, NoReturn

from tests.support.moves import wait_until
from tests.support.source import ROOT
from tests.support.world import World, residue

_REQUEST_BYTES: Final = 1 << 16
_GAP_PAGES: Final = 1 << 20  # the C library aligns arenas, between which pools find room, to 64 MiB
_ANSWER_SECONDS: Final = 60.0
#: Among them what the library imports late.
_FIRST: Final = (
    "llm_datadist._transfer.engine",
    "llm_datadist.cache_manager",
    "tests.support.linking",
    "tests.support.moves",
)


class Forked:
    """A child of the nursery, with the methods of a Popen that ends use."""

    def __init__(self, pid: int, status: socket.socket) -> None:
        self.pid = pid
        self._status = status  # the nursery writes how the process ended
        self._handle = os.pidfd_open(pid)  # the pid may be another's as soon as the nursery has waited for it
        self.returncode: int | None = None

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(f"forked child {self.pid}", timeout or 0)
            text = self._status.recv(64)
            self._status.close()
            os.close(self._handle)
            assert text, "the nursery has ended"
            self.returncode = int(text)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Nursery:
    """The test's side of it. The process starts when the first child is asked for, and ends with this one.

    Nor does it have sockets before, but where :meth:`open` is called: an end that imports this in the middle of a test
    must not have more descriptors afterwards.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._environment: dict[str, str] = {}
        #: Modules whose functions ends were sent: imported before the next fork, for all later children.
        self.modules: set[str] = set()
        self._imported: set[str] = set()
        atexit.register(self.close)

    def open(self) -> tuple[socket.socket, socket.socket]:
        """Have the sockets from now on: a test that counts descriptors must not see the process start."""
        if self._sockets is None:
            self._sockets = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._sockets[0].settimeout(_ANSWER_SECONDS)
        return self._sockets

    def fork(self, name: str, pipe: socket.socket, environment: Mapping[str, str]) -> Forked | None:
        """Return a process that serves an end on ``pipe``; None if it cannot be had in this environment."""
        here, there = self.open()
        wanted = {key: value for key, value in environment.items() if key != "PYTEST_CURRENT_TEST"}
        if self._process is None:
            self._environment = wanted
            command = [sys.executable, "-W", "error", "-m", "tests.support.nursery", str(there.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[there.fileno()], cwd=self._root, env=wanted)
        if wanted != self._environment:
            return None  # some of it is read when modules are imported
        ours, theirs = socket.socketpair()
        with theirs:
            new = sorted(self.modules - self._imported - {"__main__"})
            self._imported |= self.modules
            socket.send_fds(here, ["\n".join([name, *new]).encode()], [pipe.fileno(), theirs.fileno()])
        return Forked(int(here.recv(64)), ours)

    def close(self) -> None:
        """End the process. Its children end with their own pipes."""
        for each in self._sockets or ():
            each.close()
        if self._process is not None:
            self._process.wait()


def _serve(name: str, fd: int) -> None:
    """A child's main loop: call what comes, until the pipe ends."""
    world = World(name)
    pipe = Connection(fd)
    gc.collect()
    gc.freeze()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(world, *args))
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            answer = (False, error)
        pipe.send(answer)
        del answer, args  # a test may measure this process
    world.stop()
    # What the control thread dropped may still be on its way, see llm_datadist._memory.unmap.
    with suppress(AssertionError):
        wait_until(lambda: residue()["memfd mappings"] == 0, 5.0)
    left = residue()
    assert left["memfd mappings"] == len(left["gpu"]) == 0, left


def _main(control: socket.socket) -> None:
    """Fork what is asked for, and say how each ended, until the test's side is gone."""
    _import(_FIRST)
    waiting: dict[int, tuple[int, socket.socket]] = {}  # by pidfd: (pid, where to say how it ended)
    poll = select.poll()
    poll.register(control, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd != control.fileno():
                poll.unregister(fd)
                _report(fd, *waiting.pop(fd))
                continue
            request, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
            if not request:
                return
            pipe, status = fds[0], socket.socket(fileno=fds[1])
            name, *modules = request.decode().split("\n")
            _import(modules)
            pid = _fork()
            if pid == 0:
                for each in (control, status, *(other for _, other in waiting.values())):
                    each.close()
                for handle in waiting:
                    os.close(handle)
                _serve(name, pipe)
                _end()
            os.close(pipe)
            handle = os.pidfd_open(pid)
            waiting[handle] = pid, status
            poll.register(handle, select.POLLIN)
            control.send(str(pid).encode())


def _end() -> NoReturn:
    """End as an interpreter does, but without its teardown: that writes to all pages of the nursery, for 30 ms."""
    atexit._run_exitfuncs()  # noqa: SLF001 (there is no public way)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _fork() -> int:
    """Fork; the child's mappings begin a random number of pages below those of its parent."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads, of which it has none
        pid = os.fork()
    if pid == 0:
        global _gap  # noqa: PLW0603 (it has to stay mapped)
        _gap = mmap(-1, PAGESIZE * (1 + randbelow(_GAP_PAGES)), MAP_PRIVATE | MAP_ANONYMOUS, prot=0)
    return pid


_gap: mmap | None = None


def _report(handle: int, pid: int, status: socket.socket) -> None:
    _, code = os.waitpid(pid, 0)
    os.close(handle)
    with status, suppress(BrokenPipeError):  # nobody asks any more
        status.send(str(os.waitstatus_to_exitcode(code)).encode())


def _import(modules: Sequence[str]) -> None:
    """Import modules, and keep the children's collectors from looking through them."""
    for module in modules:
        importlib.import_module(module)
    if modules:
        gc.collect()
        gc.freeze()


if __name__ == "__main__":
    if len(sys.argv) == 3:
        _serve(sys.argv[1], int(sys.argv[2]))
    else:
        with socket.socket(fileno=int(sys.argv[1])) as from_the_test:
            _main(from_the_test)
