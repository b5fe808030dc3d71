"""A contender's worker processes, seen from the driver.

A process that dies, hangs or reports an error raises :class:`ContenderFailed` with the end of its standard error.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist._checks import temporary_folder
from llm_datadist.tools.bench import ContenderFailed
from llm_datadist.tools.bench.contenders import find
from llm_datadist.tools.bench.contenders.base import Role

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llm_datadist.tools.bench.workload import BenchWorkload

_STOP_S: Final = 5.0
_KILL_S: Final = 10.0
_TAIL_BYTES: Final = 600
_decode: Final = msgspec.json.Decoder(dict[str, Any]).decode
# Contenders set their number of threads; NumPy and peers must start no others.
_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# On one host UCX must use one device; it would spread messages over all.
_LOOPBACK: Final = {"UCX_NET_DEVICES": "lo"}


@dataclass(frozen=True, slots=True)
class Build:
    """An installation of llm_datadist that runs workers; by default this one.

    Attributes:
        environment: Environment of its workers; None: this process's.
        within: By role, a command prefix, for example for a network namespace.
    """

    python: str = sys.executable
    environment: Mapping[str, str] | None = None
    within: Mapping[Role, Sequence[str]] = field(default_factory=dict)


class Process:
    """One worker process."""

    def __init__(self, contender: str, role: Role, build: Build) -> None:
        self.name = contender if role is Role.ALONE else f"{contender} ({role})"
        self._log = tempfile.TemporaryFile(dir=temporary_folder())  # noqa: SIM115  closed by kill
        self._process = subprocess.Popen(
            # By the name that builds of every age have.
            [*build.within.get(role, ()), build.python, "-P", "-m", "llm_datadist.bench.worker", contender, role],
            bufsize=0,  # what has been read of an answer but not taken would not be seen by select()
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={
                **(os.environ if build.environment is None else build.environment),
                **_ENVIRONMENT,
                **({} if build.within else _LOOPBACK),
                **find(contender).env,
            },
            # Ctrl-C reaches only the driver, which ends the workers in order.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin: IO[bytes] = self._process.stdin
        self._stdout: IO[bytes] = self._process.stdout
        self.pid: Final = self._process.pid
        self.signal: Final = self._process.send_signal
        """Sends a signal, unless the process has ended."""

    def send(self, do: str, **fields: object) -> None:
        """Give an order. If the process has ended, :meth:`answer` raises."""
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode({"do": do, **fields}) + b"\n")

    def answer(self, what: str, timeout_s: float) -> Any:  # noqa: ANN401  a JSON value
        """Return the value of the next answer.

        A process that reports an error, ends, or says nothing for ``timeout_s`` seconds, is a ContenderFailed.
        """
        if not select.select([self._stdout], [], [], max(0.0, timeout_s))[0]:
            raise ContenderFailed(f"{self.name}: no answer to {what} in time{self._tail()}")
        line = self._stdout.readline()  # a worker writes it at once
        if not line:
            raise ContenderFailed(f"{self.name}: ended with status {self._process.wait()} during {what}{self._tail()}")
        try:
            answer = _decode(line)
        except msgspec.DecodeError:
            raise ContenderFailed(f"{self.name}: {what}: not an answer: {line[:_TAIL_BYTES]!r}") from None
        if "error" in answer:
            raise ContenderFailed(f"{self.name}: {what}: {answer['error']}")
        return answer["value"]

    def end(self) -> None:
        """Ask the process to stop, or kill it after 5 s. Idempotent."""
        self.send("stop")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self.kill()

    def kill(self) -> None:
        """Kill the process if it lives; free its pipes. Idempotent."""
        self._process.kill()
        self._process.wait(_KILL_S)
        self._stdin.close()
        self._stdout.close()
        self._log.close()

    def _tail(self) -> str:
        """Return the last 600 bytes of its standard error."""
        size = os.fstat(self._log.fileno()).st_size
        text = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES)).decode(errors="replace").strip()
        return f"; it wrote: {text}" if text else ""


class RunningContender(contextlib.AbstractContextManager["RunningContender"]):
    """A contender's processes. Leaving the context ends them; ``facts``: results of ``start`` and ``connect``."""

    def __init__(self, contender: str, timeout_s: float, build: Build | None = None) -> None:
        self.contender = contender
        self.facts: dict[str, Any] = {}
        self._timeout_s = timeout_s
        self._failed = False
        self.processes: list[Process] = []
        try:
            for role in find(contender).roles:
                self.processes.append(Process(contender, role, build or Build()))
        except BaseException:
            self.kill()
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None or self._failed:
            self.kill()
        else:
            self._send(signal.SIGCONT)
            # The initiator ends first, so it unlinks while its peer lives.
            for process in reversed(self.processes):
                process.end()

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Let the processes run during a ``with`` block; stopped ones cost others nothing."""
        self._send(signal.SIGCONT)
        try:
            yield
        finally:
            self._send(signal.SIGSTOP)

    def _send(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.signal(number)

    def kill(self) -> None:
        """Kill all processes. Idempotent."""
        self._failed = True
        for process in self.processes:
            process.kill()

    def prepare(self, seed: int) -> None:
        """Give the source new bytes and poison the destination."""
        self.ask_all("fill", seed=seed)
        self.ask_all("poison")

    def run(self, what: str, count: int) -> tuple[list[float], float]:
        """Run ``count`` transfers ("timed") or steps ("sample"); return the seconds of each, and CPU seconds in all."""
        before = sum(self.ask_all("cpu"))
        initiator = self.processes[-1]
        seconds = self.ask(initiator, what, count=count)
        return seconds, sum(self.ask_all("cpu")) - before

    def verify(self, seed: int) -> None:
        """Compare all bytes; raise ContenderFailed if some are wrong, or no process had any."""
        if not any(self.ask_all("verify", seed=seed)):
            raise ContenderFailed(f"{self.contender}: no process verified anything")

    def ask_all(self, what: str, **fields: object) -> list[Any]:
        """Give every process an order; return the answers."""
        deadline = time.monotonic() + self._timeout_s
        for process in self.processes:
            process.send(what, **fields)
        return [self._answer(process, what, deadline) for process in self.processes]

    def start(self, workload: BenchWorkload) -> None:
        """Set up memory, and connect the processes."""
        told = self.ask_all("start", workload=msgspec.to_builtins(workload))
        self.facts.update(told[-1])
        if len(self.processes) > 1:
            _, destination = self.processes
            self.facts.update(self.ask(destination, "connect", facts=told[0]))

    def ask(self, process: Process, what: str, **fields: object) -> Any:  # noqa: ANN401  a JSON value
        """Give one process an order; return the answer."""
        process.send(what, **fields)
        return self._answer(process, what, time.monotonic() + self._timeout_s)

    def _answer(self, process: Process, what: str, deadline: float) -> Any:  # noqa: ANN401  a JSON value
        try:
            return process.answer(what, deadline - time.monotonic())
        except ContenderFailed:
            # The other process may wait for this one for ever: kill both.
            self._failed = True
            raise
