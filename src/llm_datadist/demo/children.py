"""Processes of the demo, seen from the runner."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
from typing import IO, TYPE_CHECKING, Final

import msgspec

from llm_datadist.demo.messages import DemoOffer, Event, Said

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


Inbox = queue.SimpleQueue[tuple[str, Event | int]]
"""(role, event) of all children, in the order of arrival; last its exit status, or minus a signal's number."""


class DemoChild:
    """One process of the demo.

    Thread ``demo-<role>`` fills the inbox, from events and from lines of other code; the runner uses everything else.
    """

    def __init__(self, role: str, setup: Setup, inbox: Inbox) -> None:
        self.role = role
        self._inbox = inbox
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llm_datadist.demo", role, msgspec.json.encode(setup).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | _ENVIRONMENT,
            # Ctrl-C reaches only the runner, which ends the others in order.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.pid: Final = self._process.pid
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self._events = threading.Thread(target=self._read, name=f"demo-{role}")
        self._events.start()

    def send(self, order: DemoOffer) -> None:
        """Give the order. If the process has ended, the inbox has its status."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(order) + b"\n")
            self._stdin.flush()

    def end_input(self) -> None:
        """Tell the process that no order follows. Idempotent."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.close()

    def stop(self) -> None:
        """Kill the process if it lives; free thread and pipes. Idempotent."""
        self._process.kill()
        self._process.wait(_KILL_WAIT_S)
        self._events.join(_KILL_WAIT_S)
        self.end_input()
        self._stdout.close()

    def _read(self) -> None:
        for line in self._stdout:
            try:
                event = _decode(line)
            except msgspec.MsgspecError:
                event = Said(line.decode(errors="replace").rstrip())
            self._inbox.put((self.role, event))
        self._inbox.put((self.role, self._process.wait()))
