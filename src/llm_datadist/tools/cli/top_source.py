"""Sources of ``llm-datadist top``: the statistics pages of this host, or another host's over ssh."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NoReturn

import msgspec

from llm_datadist._checks import clean, temporary_folder
from llm_datadist._statistics_page import PAGE_VERSION, Instance, cleaned

if TYPE_CHECKING:
    from collections.abc import Callable

    Read = Callable[[float], list[Instance] | None]
    """Returns the instances; None if there is no answer within so many seconds. Raises SourceError."""

_RETRY_SECONDS: Final = 3.0
_END_SECONDS: Final = 5.0
_READ_BYTES: Final = 1 << 20
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
    """This user's instances on another host, from ``llm-datadist top --json`` there, run by ssh."""

    def __init__(self, host: str, command: str) -> None:
        self._host = host
        # "--": a host that begins with "-" is not an option.
        self._command = ["ssh", *_OPTIONS, "--", host, f"{command} top --json"]
        self.ssh: subprocess.Popen[bytes] | None = None
        self._last: list[Instance] | None = None
        self._rest = b""  # of a line
        self._error, self._again = "", 0.0

    def read(self, timeout: float = 0.0) -> list[Instance] | None:
        """Return the newest reading; with a ``timeout``, None if no new one comes within so many seconds.

        Raises SourceError if ssh failed; calls fail for three seconds, then start it again.
        """
        if self.ssh is None:
            if time.monotonic() < self._again:
                raise SourceError(self._error)
            self.ssh = self._begin()
        output, new = self.ssh.stdout, not timeout
        assert output is not None
        while select.select([output], [], [], 0.0 if new else timeout)[0]:
            if not (received := output.read(_READ_BYTES)):
                self._fail(self._why_it_ended())
            *lines, self._rest = (self._rest + received).split(b"\n")
            for line in lines:
                self._last, new = self._decode(line), True
        return self._last if new else None

    def close(self) -> None:
        """End ssh. Idempotent."""
        ssh, self.ssh, self._last = self.ssh, None, None
        if ssh is not None:
            with ssh, self._complaints, suppress(ProcessLookupError):
                os.killpg(ssh.pid, signal.SIGKILL)  # with programs that ssh started

    def _begin(self) -> subprocess.Popen[bytes]:
        self._rest = b""
        try:
            self._complaints = tempfile.TemporaryFile("w+", errors="replace", dir=temporary_folder())  # noqa: SIM115
        except OSError as error:
            self._fail(f"no temporary file: {error.strerror}")
        try:
            ssh = subprocess.Popen(
                self._command,
                bufsize=0,  # select() would not see what has been read but not taken
                stdin=subprocess.DEVNULL,  # the screen reads the keys
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                start_new_session=True,  # Ctrl-C reaches this program, which ends ssh
            )
        except OSError as error:
            self._complaints.close()
            self._fail(f"ssh cannot be run: {error.strerror}")
        return ssh

    def _decode(self, line: bytes) -> list[Instance]:
        try:
            found = _decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            said = f"{line.decode(errors='replace')}\n"[:80]
            self._fail(f"{self._host} printed something else than `llm-datadist top --json` does: {said!r}")
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
