"""One process of a contender: ``python -m llm_datadist.bench.worker CONTENDER ROLE``.

A line of standard input is an order, ``{"do": command, ...}``; a line of standard output its answer,
``{"value": ...}`` or ``{"error": text}``. The process exits when its input ends. If the driver dies, the kernel kills
the process, even a stopped one.
"""

from __future__ import annotations

import ctypes
import io
import os
import queue
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist.bench.contenders import find
from llm_datadist.bench.contenders.base import Contender, Role
from llm_datadist.bench.workload import BenchWorkload

if TYPE_CHECKING:
    from collections.abc import Callable

_ORPHANED: Final = 3
_PR_SET_PDEATHSIG: Final = 1
_OF_THE_CONTENDER: Final = {"connect", "fill", "poison", "timed", "sample", "verify"}

Order = dict[str, Any]
_decode_order: Final = msgspec.json.Decoder(Order).decode


class BenchWorker:
    """Executor of orders: own commands, and methods of its contender with the order's fields as keyword arguments."""

    def __init__(self, contender: str, role: Role) -> None:
        self._name = contender
        self._role = role
        self._side: Contender | None = None
        self._busy: Busy | None = None
        self._own: Final[dict[str, Callable[..., object]]] = {
            "start": self._start,
            "cpu": time.process_time,
            "busy": self._be_busy,
            "stop": self.stop,
        }

    def execute(self, order: Order) -> Order:
        """Execute one order; return the answer."""
        name = order.pop("do", None)
        try:
            return {"value": self._command(name)(**order)}
        except Exception as error:  # noqa: BLE001  the driver shows it
            return {"error": f"{type(error).__name__}: {error}"}

    def stop(self) -> None:
        """Free everything. Idempotent."""
        self._be_busy(on=False)
        contender, self._side = self._side, None
        if contender is not None:
            contender.stop()

    def _command(self, name: str) -> Callable[..., object]:
        if name in self._own:
            return self._own[name]
        if self._side is None or name not in _OF_THE_CONTENDER:
            raise ValueError(f"{name}: no such command, or not started")
        command: Callable[..., object] = getattr(self._side, name)
        return command

    def _start(self, workload: object) -> object:
        work = msgspec.convert(workload, BenchWorkload)  # noqa: TID251 (in the only thread)
        self._side = find(self._name)(self._role, work)
        return self._side.start()

    def _be_busy(self, *, on: bool) -> None:
        if self._busy is not None:
            self._busy.end()
        self._busy = Busy() if on else None


class Busy:
    """A thread ``bench-busy`` that counts in pure Python until :meth:`end`."""

    def __init__(self) -> None:
        self._ended = False
        self._thread = threading.Thread(target=self._count, name="bench-busy", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop and join the thread."""
        self._ended = True
        self._thread.join()

    def _count(self) -> None:
        count = 0
        while not self._ended:
            count += 1


def _read_orders(orders: queue.SimpleQueue[bytes], stopping: threading.Event) -> None:
    # Unbuffered: a daemon thread that holds the lock of sys.stdin makes the interpreter's exit fail.
    with io.FileIO(0, closefd=False) as stdin:
        while line := stdin.readline():
            orders.put(line)
    os._exit(0 if stopping.is_set() else _ORPHANED)


def _take_stdout() -> io.FileIO:
    """Return the real standard output; redirect other code's to standard error."""
    answers = io.FileIO(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def main(arguments: list[str]) -> int:
    """Execute orders until the driver sends ``stop``."""
    name, role = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    answers = _take_stdout()
    orders: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    stopping = threading.Event()
    threading.Thread(target=_read_orders, args=(orders, stopping), name="bench-orders", daemon=True).start()
    worker = BenchWorker(name, Role(role))
    while True:
        order = _decode_order(orders.get())
        last = order.get("do") == "stop"
        answer = worker.execute(order)
        if last:
            stopping.set()
        answers.write(msgspec.json.encode(answer) + b"\n")
        if last:
            # A peer's library may hang the interpreter's shutdown.
            os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
