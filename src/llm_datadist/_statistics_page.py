"""Statistics page: a memfd in which an LLMDataDist publishes ``statistics()`` for ``llm-datadist top``.

The control thread writes it each second under a sequence lock: an odd number marks a half-written page. Readers find it
as ``/proc/<pid>/fd/<n>``, which the kernel opens for the same user and root.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from llm_datadist._checks import clean
from llm_datadist._log import logger
from llm_datadist._memory.segment import new_memfd

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterator

    from llm_datadist.metrics import Statistics

_NAME: Final = "llm-datadist-statistics"
_MAGIC: Final = b"lldd-sta"
PAGE_VERSION: Final = 4
Instance = dict[str, Any]
"""Content of one page: ``pid``, ``cluster_id``, ``role``, ``published_at`` (s, Unix time), ``age_seconds``,
``truncated`` and ``statistics``."""
_decode: Final = msgspec.json.Decoder(Instance).decode
_HEADER: Final = struct.Struct("<8sIIQdQQ")  # magic, version, pid, sequence, time, cluster id, body bytes
_CAPACITY: Final = 1 << 20  # bytes; untouched ones take no memory
_PERIOD: Final = 1.0
#: Entries of each long part, if all do not fit.
_KEPT: Final = 100
_TRIES: Final = 200
_TRY_SECONDS: Final = 0.001


class PageError(Exception):
    """Unreadable page: another version, half written for too long, or invalid."""


def cleaned(value: Any) -> Any:  # noqa: ANN401 (of JSON)
    """Return a part of a page whose texts may be printed."""
    if isinstance(value, dict):
        return {clean(name): cleaned(each) for name, each in value.items()}
    if isinstance(value, list):
        return [cleaned(each) for each in value]
    return clean(value, len(value)) if isinstance(value, str) else value


class StatisticsPage:
    """Page of one LLMDataDist. ``start`` and ``write`` run on the control thread."""

    def __init__(self, cluster_id: int, content: Callable[[], tuple[str, Statistics]]) -> None:
        self._cluster_id, self._content = cluster_id, content
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self.fd = new_memfd(_NAME)
        try:
            os.fchmod(self.fd, 0o600)
            os.ftruncate(self.fd, _CAPACITY)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        except BaseException:
            self.close()
            raise

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Write now and each second."""
        self._timer = loop.call_later(_PERIOD, self.start, loop)
        try:
            self.write()
        except Exception as error:  # noqa: BLE001 (the page must not break its instance)
            logger.warning("the page of statistics was not written: %r", error)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def write(self) -> None:
        role, now = self._content()
        body = _encode(role, now, truncated=False)
        if len(body) > _CAPACITY - _HEADER.size:
            cut = {name: getattr(now, name)[:_KEPT] for name in ("keys", "links", "redials", "communicators")}
            body = _encode(role, replace(now, **cut), truncated=True)
        self._sequence |= 1  # odd: being written, also if an earlier write has failed
        self._write_header(0)
        if os.pwrite(self.fd, body, _HEADER.size) < len(body):
            raise OSError(errno.ENOSPC, "no memory for the whole page")
        self._sequence += 1
        self._write_header(len(body))

    def _write_header(self, length: int) -> None:
        fields = _MAGIC, PAGE_VERSION, os.getpid(), self._sequence, time.time(), self._cluster_id, length
        os.pwrite(self.fd, _HEADER.pack(*fields), 0)

    def close(self) -> None:
        """Close the descriptor, also in a forked child. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def _encode(role: str, now: Statistics, *, truncated: bool) -> bytes:
    return msgspec.json.encode({"role": role, "truncated": truncated, "statistics": now})


def instances() -> list[Instance]:
    """Return this user's readable pages on this host, by process and cluster id."""
    seen: set[int] = set()
    found = []
    for fd in _pages():
        try:
            # Omitted: new, unreadable, or another version.
            with suppress(PageError, OSError):
                about = os.fstat(fd)
                # Root can open other users' pages, which it must not trust.
                if stat.S_ISREG(about.st_mode) and about.st_uid == os.geteuid() and about.st_ino not in seen:
                    seen.add(about.st_ino)
                    with open(f"/proc/self/fd/{fd}", "rb", buffering=0) as page:
                        found.append(read_page(page.fileno()))
        finally:
            os.close(fd)
    return sorted(found, key=lambda each: (each["pid"], each["cluster_id"]))


def _pages() -> Iterator[int]:
    """Yield an O_PATH descriptor of each page; the caller closes it."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended, or of another user
            for entry in os.listdir(process / "fd"):
                path = process / "fd" / entry
                with suppress(OSError):
                    if os.readlink(path).startswith(f"/memfd:{_NAME} "):
                        # O_PATH: a FIFO or device may have this name.
                        yield os.open(path, os.O_PATH | os.O_CLOEXEC)


def read_page(fd: int) -> Instance:
    """Return a page; retry a half-written one up to 200 times, 1 ms apart. Raises PageError."""
    for _ in range(_TRIES):
        header = os.pread(fd, _HEADER.size, 0).ljust(_HEADER.size, b"\0")
        magic, version, pid, sequence, when, cluster_id, length = _HEADER.unpack(header)
        if (magic, version) != (_MAGIC, PAGE_VERSION) and any(header):
            raise PageError(f"version {version} of the page is not {PAGE_VERSION}")
        body = os.pread(fd, min(length, _CAPACITY), _HEADER.size)
        if length and sequence % 2 == 0 and os.pread(fd, _HEADER.size, 0) == header:
            age = max(0.0, time.time() - when)
            about = {"pid": pid, "cluster_id": cluster_id, "published_at": when, "age_seconds": age}
            try:
                return {**about, **cleaned(_decode(body))}
            except msgspec.MsgspecError as error:
                raise PageError(f"the page holds no statistics: {error}") from error
        time.sleep(_TRY_SECONDS)
    raise PageError("the page is half written")
