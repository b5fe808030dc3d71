"""The demo's processes, seen from the runner."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Final

import msgspec

from llm_datadist.demo.messages import Event, Order, Said

if TYPE_CHECKING:
    from llm_datadist.demo.workload import Setup

# One thread each: equal inputs give equal bits, and two processes fit a small machine. MKL_CBWR makes MKL's results
# independent of the alignment of arrays.
_ENVIRONMENT: Final = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "BLIS_NUM_THREADS": "1",
    "MKL_CBWR": "AUTO",
}
_KILL_WAIT_S: Final = 10.0
_decode: Final = msgspec.json.Decoder(Event).decode


@dataclass(frozen=True, slots=True)
class Exited:
    """The process has ended, with an exit status or minus a signal's number."""

    returncode: int


Inbox = queue.SimpleQueue[tuple[str, Event | Exited]]
"""(role, event) of all children, in the order of arrival."""


class DemoChild:
    """One process of the demo.

    Threads: ``demo-<role>`` and ``demo-<role>-log`` fill the inbox; the runner uses everything else.
    """

    def __init__(self, role: str, setup: Setup, inbox: Inbox) -> None:
        self.role = role
        self._inbox = inbox
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-m", "llm_datadist.demo", role, setup.transport.value, setup.memory.value),
                *(() if setup.secrets is None else ("--secrets", str(setup.secrets))),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | _ENVIRONMENT,
            # Ctrl-C reaches only the runner, which ends the others in order.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._stderr: IO[bytes] = self._process.stderr
        self._log = threading.Thread(target=self._read_log, name=f"demo-{role}-log")
        self._events = threading.Thread(target=self._read_events, name=f"demo-{role}")
        self._log.start()
        self._events.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def send(self, order: Order) -> None:
        """Give an order. If the process has ended, the inbox has an :class:`Exited`."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(order) + b"\n")
            self._stdin.flush()

    def stop(self) -> None:
        """Kill the process if it lives; free threads and pipes. Idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(_KILL_WAIT_S)
        self._events.join(_KILL_WAIT_S)
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()
        self._stdout.close()
        self._stderr.close()

    def _read_events(self) -> None:
        for line in self._stdout:
            try:
                event = _decode(line)
            except msgspec.MsgspecError:
                event = Said(line.decode(errors="replace").rstrip())
            self._inbox.put((self.role, event))
        self._log.join()
        self._inbox.put((self.role, Exited(self._process.wait())))

    def _read_log(self) -> None:
        for line in self._stderr:
            self._inbox.put((self.role, Said(line.decode(errors="replace").rstrip())))
