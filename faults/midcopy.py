"""Stops a process inside a copy by luck, and looks at its threads and memory from outside.

:func:`stop_inside_copy` watches the destination until the first byte has changed, then sends SIGSTOP, and says whether
it was in time. Callers that need a number of trials repeat those that it missed, and set ``llm.CopyThreads`` to 1: of
several copy threads the last byte is not the last to arrive. It needs no right, while
:class:`~faults.page_trap.PageTrap` is exact, but the kernel may deny it.
"""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from faults.page_trap import PageTrap
from tests.support import fakecuda
from tests.support.ends import state_of
from tests.support.world import World


def stop_inside_copy(pid: int, begun: Callable[[], bool], ended: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Stop a process as soon as a copy of it has begun; return True when that was before its end.

    ``begun`` and ``ended`` look at the first and last byte of the destination. SIGCONT is the caller's in any case.
    TimeoutError: it did not begin, or does not stop.
    """
    limit = time.monotonic() + seconds
    while not begun():
        if time.monotonic() > limit:
            raise TimeoutError(f"no copy of process {pid} began within {seconds:g} s")
    os.kill(pid, signal.SIGSTOP)
    while not frozen(pid):
        if time.monotonic() > limit:
            raise TimeoutError(f"process {pid} is not stopped {seconds:g} s after it was watched first")
        time.sleep(0)
    return not ended()


def frozen(pid: int) -> bool:
    """Return True when no thread of a process runs, as after SIGSTOP; also when it has ended."""
    try:
        return all(state_of(int(thread)) in "TtZX" for thread in os.listdir(f"/proc/{pid}/task"))
    except FileNotFoundError:
        return not Path(f"/proc/{pid}").exists()


def peek(pid: int, address: int, nbytes: int) -> bytes:
    fd = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(fd, nbytes, address)
    finally:
        os.close(fd)


def set_trap(world: World, name: str, tensor: int, offset: int) -> bool:
    """Trap the page of a byte of a cache; return True if system calls stop there, too. In a GPU no copy ends."""
    if world.gpu:
        world.memory["trap"] = fakecuda.Hang()
        return False
    world.memory["trap"] = trap = PageTrap(world.caches[name].tensor_addrs[tensor] + offset)
    return trap.kernel_too


def trapped(world: World) -> bool:
    return bool(world.memory["trap"].wait(0))


def release(world: World) -> None:
    world.memory.pop("trap").release()
