"""Another process with private memory, for the tests of copies by the kernel's hand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist._native import Tensors

if TYPE_CHECKING:
    from . import twin

MEMORY = 24 << 20  # private memory of the other process
PAGE = os.sysconf("SC_PAGESIZE")

HOLDER = f"""
import ctypes, mmap, sys
from multiprocessing.connection import Connection
import numpy as np

memory = np.zeros({MEMORY}, np.uint8)
libc = ctypes.CDLL(None)
pages = mmap.mmap(-1, {2 * PAGE})
edge = np.frombuffer(pages, np.uint8).ctypes.data + {PAGE}
assert libc.munmap(ctypes.c_void_p(edge), ctypes.c_size_t({PAGE})) == 0
pipe = Connection(int(sys.argv[1]))
pipe.send((memory.ctypes.data, edge))
while True:
    try:
        verb, data = pipe.recv()
    except EOFError:
        break
    if verb == "fill":
        memory[: len(data)] = np.frombuffer(data, np.uint8)
    elif verb == "hide":  # as a process that may not be traced, whoever asks
        assert libc.prctl(4, 0, 0, 0, 0) == 0
    pipe.send_bytes(memory[:data] if verb == "show" else b"")
"""


class Holder:
    """Another process: private memory at ``address``; from ``edge`` on nothing is mapped, with a page before it."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen([sys.executable, "-c", HOLDER, str(fd)], pass_fds=[fd])
        self.pid = self.process.pid
        self._pipe = Connection(ours.detach())
        self.address, self.edge = self._pipe.recv()

    def fill(self, data: twin.Bytes) -> None:
        self._ask("fill", data.tobytes())

    def show(self, nbytes: int) -> twin.Bytes:
        return np.frombuffer(self._ask("show", nbytes), np.uint8)

    def hide(self) -> None:
        self._ask("hide", None)

    def tensors(self, count: int, extent: int) -> Tensors:
        return Tensors(np.array([self.address + i * extent for i in range(count)], np.uint64), extent)

    def close(self) -> None:
        self._pipe.close()
        self.process.kill()
        self.process.wait()

    def _ask(self, verb: str, data: object) -> bytes:
        self._pipe.send((verb, data))
        return self._pipe.recv_bytes()
