"""Write intents: peers' announcements in pages of the owner, so that memory is not reused under a writer.

Both sides act in the order of architecture rule 5. A lost link does not prove that a writer has ended.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from llm_datadist import _native
from llm_datadist._checks import HERE, require_process
from llm_datadist._memory.segment import SharedSegment
from llm_datadist.errors import LinkError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline

_MAX_GUARD: Final = 1 << 62


class IntentPage:
    """Owner's side of a page in which one peer announces writes; :class:`WriteIntents` makes it.

    Owns: the memory and, from :meth:`retire` on, the pidfd, until the last writer has ended.
    Threads: any; the lock of :class:`WriteIntents` protects ``retired`` and the release.
    """

    def __init__(self, writers: WriteIntents, segment: SharedSegment | None, who: str) -> None:
        self.segment = segment
        # Keeps the memory mapped when the segment is closed.
        self._memory: NDArray[np.uint8] | None = segment.view() if segment is not None else _local_page()
        self.address: int = self._memory.ctypes.data
        self.who = who
        self.cluster_id: int | None = None  # the peer's, once known
        self.retired = False  # True once the link is over
        self._writers = writers
        self._pidfd = -1

    def belongs_to(self, pid: int, pidfd: int) -> None:
        """Set the peer's process. The caller owns the pidfd until :meth:`retire`."""
        self.who = f"pid {pid}"
        self._pidfd = pidfd

    def introduce(self, who: str, cluster_id: int) -> None:
        self.who, self.cluster_id = who, cluster_id

    def intent_writer(self) -> IntentWriter:
        """Return the writer's side for a peer in this process, before :meth:`retire`."""
        assert self._memory is not None
        return IntentWriter(self._memory)

    def retire(self) -> None:
        """Refuse new writers, take the pidfd, and release the page after its last writer.

        Waits for no lock, so a ``__del__`` may call it.
        """
        if self._memory is not None:
            self._writers.retire(self)

    def ended(self) -> bool:
        """Return True if the peer's process has ended or is unknown. Under the lock."""
        return self.segment is not None and (self._pidfd < 0 or _native.readable(self._pidfd))

    def release(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self.segment is not None:
            self.segment.close()
        self._memory = None


@dataclass(frozen=True, slots=True)
class ActiveWrite:
    """Write, or local read, that the owner found: over once the slot's sequence differs or the process has ended."""

    page: IntentPage
    slot: int
    sequence: int


class WriteIntents:
    """Pages of one instance, the owner of the memory. Threads: any; nothing blocks under the lock."""

    def __init__(self) -> None:
        self._owner = HERE["pid"]
        self._lock = threading.Lock()  # protects the two below and pages
        self._pages: list[IntentPage] = []
        self._closed = False
        self._retiring: deque[IntentPage] = deque()

    def open(self) -> IntentPage:
        """Return a page for a peer process. LinkError during finalize."""
        segment = SharedSegment.create("writers", _native.WRITER_PAGE_BYTES, peers_may_write=True)
        try:
            return self._add(IntentPage(self, segment, "a peer"))
        except BaseException:
            segment.close()
            raise

    def open_here(self) -> IntentPage:
        """Return a page for a peer in this process. LinkError during finalize."""
        return self._add(IntentPage(self, None, f"a thread of this process (pid {os.getpid()})"))

    def busy(self, guard: int, *, readers: bool = False) -> tuple[ActiveWrite, ...]:
        """Return the writes, with ``readers`` also local reads, under a just advanced guard."""
        if not self._pages:
            return ()  # writers in a later page meet the advanced guard
        wanted = [2 * guard]  # word of writes
        if readers:
            wanted.append(2 * guard + 1)
        with self._lock:
            self._tidy()
            found = _native.find_writers(np.array([page.address for page in self._pages], np.uint64), wanted, False)
            return tuple([ActiveWrite(self._pages[page], slot, sequence) for page, slot, sequence in found])

    def pending(self, writes: Iterable[ActiveWrite]) -> tuple[ActiveWrite, ...]:
        """Return the writes that are not over."""
        with self._lock:
            self._tidy()
            return tuple(filter(self._lasts, writes))

    def _lasts(self, write: ActiveWrite) -> bool:
        page = write.page
        same = page in self._pages and _native.writer_sequence(page.address, write.slot) == write.sequence
        return same and not page.ended()

    def tidy(self) -> None:
        if self._retiring or any(page.retired for page in self._pages):
            with self._lock:
                self._tidy()

    @property
    def lost(self) -> int:
        """Number of pages whose link ended before a write did."""
        self.tidy()
        return sum(page.retired for page in list(self._pages))

    def shut(self) -> None:
        """Refuse new writers and new pages, for finalize."""
        require_process(self._owner, "write intents")
        with self._lock:
            self._closed = True
            for page in self._pages:
                _native.close_writers(page.address)

    def close(self) -> None:
        """Release the pages of ended links, even under writers; the other links release theirs. Idempotent."""
        self.shut()
        with self._lock:
            self._tidy()
            pages, self._pages = self._pages, []
            for page in pages:
                if page.retired:
                    page.release()
                elif page.segment is not None:  # its caller still owns the pidfd
                    page.segment.close()

    def _add(self, page: IntentPage) -> IntentPage:
        with self._lock:
            self._tidy()
            if self._closed:
                raise LinkError("this instance is being finalized: no peer may begin to write")
            self._pages.append(page)
        return page

    def retire(self, page: IntentPage) -> None:
        if HERE["pid"] != self._owner:  # in a forked child the writers are the parent's
            page.release()
            return
        _native.close_writers(page.address)
        self._retiring.append(page)
        # A __del__ may interrupt the holder; then the next call tidies.
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        """Retire the pages of ended links; release idle ones. Under the lock."""
        while self._retiring:
            page = self._retiring.popleft()
            page.retired = True
            if page not in self._pages:
                page.release()  # closed already
        for page in [page for page in self._pages if page.retired]:
            if page.ended() or not _native.find_writers(np.array([page.address], np.uint64), [], True):
                self._pages.remove(page)
                page.release()


def _local_page() -> NDArray[np.uint8]:
    memory = np.zeros(_native.WRITER_PAGE_BYTES + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + _native.WRITER_PAGE_BYTES]


class IntentWriter:
    """Writer's side of one page: a slot for each announcement. Any thread of process ``pid``, not of its forks."""

    def __init__(self, page: NDArray[np.uint8]) -> None:
        self.pid = HERE["pid"]
        self._page: NDArray[np.uint8] | None = page
        self._address: int = page.ctypes.data
        # A stack, because the owner scans up to the highest slot ever used.
        self.free = list(range(_native.WRITER_SLOTS, 0, -1))

    def announce(self, guard: int, deadline: Deadline, *, reading: bool = False) -> _native.WriteIntent:
        """Return a context manager that announces a write, or a read, under guard slot ``guard``.

        Its block compares the generation first. LinkError: the link is closed, here or by the owner. DeadlineExceeded:
        all 255 slots of the page were in use. StateError: this is a forked child.
        """
        require_process(self.pid, "announce")
        if (page := self._page) is None:
            raise LinkError("the link is closed; link again", phase="copy")
        if not 0 < guard < _MAX_GUARD:
            raise ProtocolError(f"guard slot {guard} cannot be announced")
        full = partial(self._wait_for_slot, deadline)
        return _native.WriteIntent(self.free, page, self._address, 2 * guard + reading, full, _refuse)

    def close(self) -> None:
        """Refuse announcements; present ones keep the page mapped. Idempotent."""
        self._page = None

    def _wait_for_slot(self, deadline: Deadline) -> None:
        if not deadline.poll(lambda: bool(self.free)):
            raise deadline.error(f"{_native.WRITER_SLOTS} writes to this peer are already active", "copy")


class AnnouncementRefused(LinkError):
    """Refusal by the owner of the memory."""


def _refuse() -> NoReturn:
    raise AnnouncementRefused("the owner of the memory has closed the link: nothing may be written", phase="copy")
