"""One process of a contender: ``python -m llm_datadist.bench.worker CONTENDER ROLE``.

A line of standard input is an order, ``{"do": command, ...}``; a line of standard output its answer,
``{"value": ...}`` or ``{"error": text}``. The process exits when its input ends. If the driver dies, the kernel kills
the process, even a stopped one.
"""

from __future__ import annotations

import ctypes
import io
import os
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final, NoReturn

import msgspec

from llm_datadist.tools.bench import cuda
from llm_datadist.tools.bench.contenders import find
from llm_datadist.tools.bench.contenders.base import Role
from llm_datadist.tools.bench.workload import BenchWorkload

if TYPE_CHECKING:
    from collections.abc import Callable

_ORPHANED: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_OF_THE_CONTENDER: Final = ("connect", "fill", "poison", "timed", "sample", "verify", "stop")

Order = dict[str, Any]
_decode_order: Final = msgspec.json.Decoder(Order).decode


class BenchWorker:
    """Executor of orders: own commands, and methods of its contender with the order's fields as keyword arguments."""

    def __init__(self, contender: str, role: Role) -> None:
        self._name = contender
        self._role = role
        self._commands: Final[dict[str, Callable[..., object]]] = {
            "start": self._start,
            "cpu": time.process_time,
            "free_on_gpu": cuda.free_bytes,
            "busy": _be_busy,
            "stop": lambda: None,  # until there is a contender to stop
        }

    def execute(self, order: Order) -> Order:
        """Execute one order; return the answer."""
        name = order.pop("do", None)
        try:
            if name not in self._commands:
                raise ValueError(f"{name}: no such command, or not started")
            return {"value": self._commands[name](**order)}
        except Exception as error:  # noqa: BLE001  the driver shows it
            return {"error": f"{type(error).__name__}: {error}"}

    def _start(self, workload: object) -> object:
        work = msgspec.convert(workload, BenchWorkload)  # noqa: TID251 (in the only thread)
        side = find(self._name)(self._role, work)
        self._commands.update((name, getattr(side, name)) for name in _OF_THE_CONTENDER)
        return side.start()


def _be_busy(*, on: bool) -> None:
    """Count in pure Python, in a thread of its own, until the process ends."""
    if on:
        threading.Thread(target=_count, name="bench-busy", daemon=True).start()


def _count() -> None:
    count = 0
    while True:
        count += 1


def main(name: str, role: str) -> NoReturn:
    """Execute orders until the driver sends ``stop``, or ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = io.FileIO(os.dup(1), "w")
    os.dup2(2, 1)  # what other code writes there goes to standard error
    worker = BenchWorker(name, Role(role))
    for line in sys.stdin.buffer:
        order = _decode_order(line)
        last = order.get("do") == "stop"
        answers.write(msgspec.json.encode(worker.execute(order)) + b"\n")
        if last:
            # A peer's library may hang the interpreter's shutdown.
            os._exit(0)
    os._exit(_ORPHANED)
