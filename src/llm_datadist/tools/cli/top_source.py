"""Sources of ``llm-datadist top``: the statistics pages of this host, or another host's over ssh."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import threading
import time
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import IO, TYPE_CHECKING, Final, NoReturn

import msgspec

from llm_datadist._checks import clean
from llm_datadist._statistics_page import PAGE_VERSION, Instance, cleaned

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[float], list[Instance] | None]
    """Returns the instances; None if there is no answer within so many seconds. Raises SourceError."""

_RETRY_SECONDS: Final = 3.0
_END_SECONDS: Final = 5.0
#: No password prompt; ends after 15 s if the network is cut.
_OPTIONS: Final = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")


class SourceError(Exception):
    """The other host cannot be read; the text is for the user."""


class _Reading(msgspec.Struct):
    page_version: int
    instances: list[Instance]


_decoder: Final = msgspec.json.Decoder(_Reading)


def encode(found: list[Instance]) -> str:
    """Return one line of JSON."""
    return msgspec.json.encode(_Reading(PAGE_VERSION, found)).decode()


class Remote:
    """This user's instances on another host, from ``llm-datadist top --json`` there, run by ssh.

    Threads: one takes lines from ssh, the caller's does the rest.
    """

    def __init__(self, host: str, command: str) -> None:
        self._host = host
        # "--": a host that begins with "-" is not an option.
        self._command = ["ssh", *_OPTIONS, "--", host, f"{command} top --json"]
        self.ssh: subprocess.Popen[str] | None = None
        self._lines: SimpleQueue[str | None] = SimpleQueue()
        self._last: list[Instance] | None = None
        self._error, self._again = "", 0.0

    def read(self, timeout: float = 0.0) -> list[Instance] | None:
        """Return the newest reading; with a ``timeout``, None if no new one comes within so many seconds.

        Raises SourceError if ssh failed; calls fail for three seconds, then start it again.
        """
        if self.ssh is None:
            if time.monotonic() < self._again:
                raise SourceError(self._error)
            self.ssh = self._begin()
        try:
            line = self._lines.get(timeout=timeout) if timeout else self._lines.get_nowait()
        except Empty:
            return None if timeout else self._last
        with suppress(Empty):
            while True:
                self._last = self._decode(line)
                line = self._lines.get_nowait()
        return self._last

    def close(self) -> None:
        """End ssh. Idempotent."""
        ssh, self.ssh, self._last = self.ssh, None, None
        if ssh is not None:
            with self._complaints, suppress(ProcessLookupError):
                os.killpg(ssh.pid, signal.SIGKILL)  # with programs that ssh started
            ssh.wait()

    def _begin(self) -> subprocess.Popen[str]:
        self._lines = SimpleQueue()
        self._complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  lives as long as ssh
        try:
            ssh = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,  # the screen reads the keys
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
                errors="replace",
                start_new_session=True,  # Ctrl-C reaches this program, which ends ssh
            )
        except OSError as error:
            self._complaints.close()
            self._fail(f"ssh cannot be run: {error.strerror}")
        threading.Thread(target=_copy, args=(ssh.stdout, self._lines), daemon=True).start()
        return ssh

    def _decode(self, line: str | None) -> list[Instance]:
        if line is None:
            self._fail(self._why_it_ended())
        try:
            found = _decoder.decode(line)
        except msgspec.MsgspecError:
            self._fail(f"{self._host} printed something else than `llm-datadist top --json` does: {line[:80]!r}")
        if found.page_version != PAGE_VERSION:
            self._fail(
                f"{self._host} has another version of open-datadist: its statistics have version "
                f"{found.page_version}, here {PAGE_VERSION}"
            )
        return [cleaned(each) for each in found.instances]

    def _why_it_ended(self) -> str:
        assert self.ssh is not None
        try:
            status = self.ssh.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            return f"ssh to {self._host} has closed its output"
        self._complaints.seek(0)
        said = self._complaints.read().strip().rsplit("\n", 1)[-1]
        return f"ssh to {self._host} ended with status {status}: {clean(said) or 'it said nothing'}"

    def _fail(self, why: str) -> NoReturn:
        self.close()
        self._error, self._again = why, time.monotonic() + _RETRY_SECONDS
        raise SourceError(why)


def _copy(stream: IO[str], lines: SimpleQueue[str | None]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put(None)
