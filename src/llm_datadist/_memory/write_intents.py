"""Writers: pages in which peers announce what they write, so that memory is not used again under their hands.

Foreign readers are never waited for, they fail by a generation. A foreign writer cannot fail once it has begun: it
announces itself, looks at the generation, writes, and says that it is done. The owner who wants the memory back
advances the generation first; whoever announces after that sees it and writes nothing, so the owner waits for those
only whom it finds then, until each of them is done or its process has ended. A lost link proves neither.

In one process a reader needs the same: memory of the user that is freed under it is a segmentation fault.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._memory.segment import SharedSegment
from llm_datadist._native import (
    WRITER_PAGE_BYTES,
    WRITER_SLOTS,
    announce_writer,
    close_writers,
    find_writers,
    readable,
    retract_writer,
    writer_sequence,
)
from llm_datadist.errors import LinkError, ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline

__all__ = ["WRITER_PAGE_BYTES", "Hazard", "IntentWriter", "WriteIntent", "WriteIntents", "WriterPage"]

#: How often somebody who found every slot of a page taken looks again, if nobody wakes it.
_FULL_PAUSE_S: Final = 0.05
_MAX_GUARD: Final = 1 << 62


def _what(guard: int, *, reading: bool) -> int:
    """Return the word that a slot shows for a guard slot number."""
    return guard * 2 + reading


# --- the owner's side -------------------------------------------------------------------------------------------------


class WriterPage:
    """One page, of the owner of the memory: who may write there announces it here. Made by :class:`WriteIntents`.

    Its fields are guarded by the lock of its :class:`WriteIntents`.

    Attributes:
        who: The peer, for messages.
        cluster_id: The peer's, once it is known.
        retired: True once no new writer is expected.
    """

    __slots__ = ("_memory", "_owner", "_pidfd", "_writers", "address", "cluster_id", "retired", "segment", "who")

    def __init__(self, writers: WriteIntents, segment: SharedSegment | None, who: str) -> None:
        self.segment = segment
        # Keeps the memory until the page is let go, whatever became of the segment.
        self._memory: NDArray[np.uint8] | None = segment.view() if segment is not None else _private_page()
        self.address: int = self._memory.ctypes.data
        self.who = who
        self.cluster_id: int | None = None
        self.retired = False
        self._writers = writers
        self._owner = os.getpid()
        self._pidfd = -1

    def belongs_to(self, pid: int, pidfd: int) -> None:
        """The peer is process ``pid``; its pidfd stays the caller's until :meth:`retire`."""
        self.who = f"pid {pid}"
        self._pidfd = pidfd

    def introduce(self, who: str, cluster_id: int) -> None:
        """Learn the peer's name, for messages."""
        self.who, self.cluster_id = who, cluster_id

    def intent_writer(self) -> IntentWriter:
        """Return the writer's side, for a peer in this process. Before :meth:`retire`."""
        assert self._memory is not None
        return IntentWriter(self._memory)

    def retire(self) -> None:
        """The link is over: nobody may begin any more; takes the pidfd over. The page goes when nobody writes.

        Takes no lock that it would have to wait for, so that a ``__del__`` may call it.
        """
        if self._memory is None:
            return
        if os.getpid() == self._owner:
            close_writers(self.address)
            self._writers._retire(self)
        else:
            # A forked child: the page, and who writes there, are the parent's.
            self._release()

    def _ended(self) -> bool:
        """Return True when the peer's process cannot write any more, or no peer was ever met. Under the lock."""
        if self.segment is None:
            return False
        return self._pidfd < 0 or readable(self._pidfd)

    def _release(self) -> None:
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
        if self.segment is not None:
            self.segment.close()
        self._memory = None

    def __repr__(self) -> str:
        return f"<WriterPage of {self.who}: {'retired' if self.retired else 'in use'}>"


@dataclass(frozen=True, slots=True)
class Hazard:
    """A piece of work that was going on when the owner looked: over when its slot shows another sequence."""

    page: WriterPage
    slot: int
    sequence: int


class WriteIntents:
    """All pages of one process, as the owner of the memory. Any thread.

    One lock; under it memory is looked at and a pidfd is asked whether it is readable, neither of which blocks.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards the three below and the fields of every page
        self._pages: list[WriterPage] = []
        self._addresses: NDArray[np.uint64] = np.empty(0, np.uint64)
        self._closed = False
        self._retiring: deque[WriterPage] = deque()

    def open(self) -> WriterPage:
        """Return a page to be given to a peer process.

        Raises:
            OutOfMemory: No memory or descriptor is left.
            LinkError: This process is being finalised.
        """
        segment = SharedSegment.create("writers", WRITER_PAGE_BYTES, peers_may_write=True)
        try:
            return self._add(WriterPage(self, segment, "a peer"))
        except BaseException:
            segment.close()
            raise

    def open_here(self) -> WriterPage:
        """Return a page for a peer in this process.

        Raises:
            LinkError: The owner is being finalised.
        """
        return self._add(WriterPage(self, None, f"a thread of this process (pid {os.getpid()})"))

    def busy(self, guard: int, *, readers: bool = False) -> tuple[Hazard, ...]:
        """Return who writes (or ``readers``: reads, in this process) under a guard that was advanced just now."""
        if not self._pages:
            return ()  # nobody may write: a page made after this was asked for meets the advanced guard
        wanted = [_what(guard, reading=False)] + ([_what(guard, reading=True)] if readers else [])
        with self._lock:
            self._tidy()
            found = find_writers(self._addresses, wanted, False)
            return tuple([Hazard(self._pages[page], slot, sequence) for page, slot, sequence in found])

    def pending(self, hazards: Iterable[Hazard]) -> tuple[Hazard, ...]:
        """Return those that are not over yet."""
        with self._lock:
            self._tidy()
            return tuple(
                [
                    each
                    for each in hazards
                    if each.page in self._pages
                    and writer_sequence(each.page.address, each.slot) == each.sequence
                    and not each.page._ended()
                ]
            )

    def tidy(self) -> None:
        """Let retired pages go in which nobody writes any more."""
        if self._retiring or any(page.retired for page in self._pages):
            with self._lock:
                self._tidy()

    @property
    def lost(self) -> int:
        """Number of pages kept for peers that are no longer linked and have not ended a write."""
        self.tidy()
        return sum(page.retired for page in list(self._pages))

    def shut(self) -> None:
        """Let nobody begin any more, on any page, and make no new ones: finalize."""
        with self._lock:
            self._closed = True
            for page in self._pages:
                close_writers(page.address)

    def close(self) -> None:
        """Give up every page. Idempotent; whoever still writes is not seen any more."""
        self.shut()
        with self._lock:
            self._tidy()
            pages, self._pages = self._pages, []
            self._index()
            for page in pages:
                # One that is not retired yet borrows its pidfd, whose owner still closes it.
                if page.retired:
                    page._release()
                elif page.segment is not None:
                    page.segment.close()

    def check_integrity(self) -> None:
        """Raise AssertionError when the list of pages and what is scanned differ."""
        with self._lock:
            if [page.address for page in self._pages] != self._addresses.tolist():
                raise AssertionError("pages of writers: the scanned addresses are not those of the pages")

    def _add(self, page: WriterPage) -> WriterPage:
        with self._lock:
            self._tidy()
            if self._closed:
                raise LinkError("this process is being finalized: no peer may begin to write")
            self._pages.append(page)
            self._index()
        return page

    def _retire(self, page: WriterPage) -> None:
        self._retiring.append(page)
        # A __del__ may interrupt whoever holds the lock in this very thread; then the next call does it.
        if self._lock.acquire(blocking=False):
            try:
                self._tidy()
            finally:
                self._lock.release()

    def _tidy(self) -> None:
        """Under the lock."""
        while self._retiring:
            page = self._retiring.popleft()
            page.retired = True
            if page not in self._pages:
                page._release()  # closed already
        idle = [page for page in self._pages if page.retired and (page._ended() or not _at_work(page))]
        for page in idle:
            self._pages.remove(page)
            page._release()
        if idle:
            self._index()

    def _index(self) -> None:
        self._addresses = np.array([page.address for page in self._pages], np.uint64)

    def __repr__(self) -> str:
        return f"<Writers {len(self._pages)} pages, {sum(page.retired for page in list(self._pages))} of lost peers>"


def _at_work(page: WriterPage) -> bool:
    return bool(find_writers(np.array([page.address], np.uint64), [], True))


def _private_page() -> NDArray[np.uint8]:
    memory = np.zeros(WRITER_PAGE_BYTES + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + WRITER_PAGE_BYTES]


# --- the writer's side ------------------------------------------------------------------------------------------------


class IntentWriter:
    """The writer's side of one page: its slots, each one call's at a time. Any thread.

    Args:
        page: The page, mapped here; kept mapped for as long as somebody is announced.

    Attributes:
        pid: The process whose slots these are; a forked child's are not.

    Raises:
        ProtocolError: It is no page.
    """

    def __init__(self, page: NDArray[np.uint8]) -> None:
        if page.nbytes != WRITER_PAGE_BYTES or page.ctypes.data % 64:
            raise ProtocolError(f"a page of writers has {page.nbytes} bytes, must have {WRITER_PAGE_BYTES}")
        self.pid = os.getpid()
        self._page: NDArray[np.uint8] | None = page
        self._address: int = page.ctypes.data
        # The last one back is the next one out: the owner looks no further than the highest that was ever used.
        self._free = deque(range(WRITER_SLOTS, 0, -1))
        self._someone_waits = 0
        self._came_back = threading.Condition()

    def announce(self, guard: int, deadline: Deadline, *, reading: bool = False) -> WriteIntent:
        """Say that memory under the guard slot ``guard`` is being written from now on, or read.

        Generations must be looked at after this, and are decisive.

        Raises:
            LinkError: The owner has closed the page, or this side has.
            DeadlineExceeded: Every slot stayed taken (phase ``copy``).
            ProtocolError: No such guard slot.
        """
        page = self._page
        if page is None:
            raise LinkError("the link is closed; link again", phase="copy")
        if not 0 < guard < _MAX_GUARD:
            raise ProtocolError(f"guard slot {guard} cannot be announced")
        try:
            slot = self._free.pop()
        except IndexError:
            slot = self._wait(deadline)
        announced = WriteIntent(self, page, self._address, slot)
        if not announce_writer(self._address, slot, _what(guard, reading=reading)):
            announced.end()
            raise LinkError("the owner of the memory has closed the link: nothing may be written", phase="copy")
        return announced

    def close(self) -> None:
        """Announce nobody any more. The page stays mapped for those who are. Idempotent."""
        self._page = None

    def _wait(self, deadline: Deadline) -> int:
        with self._came_back:
            self._someone_waits += 1
            try:
                while True:
                    try:
                        return self._free.pop()
                    except IndexError:
                        deadline.check(f"{WRITER_SLOTS} writes to this peer are going on already", "copy")
                        self._came_back.wait(min(_FULL_PAUSE_S, deadline.remaining()))
            finally:
                self._someone_waits -= 1

    def _give_back(self, slot: int) -> None:
        self._free.append(slot)
        if self._someone_waits:
            with self._came_back:
                self._came_back.notify()

    def __repr__(self) -> str:
        state = "closed" if self._page is None else "open"
        return f"<Announcer {state}: {WRITER_SLOTS - len(self._free)} at work>"


class WriteIntent:
    """One announcement, from its making to :meth:`end`. Used by one thread."""

    __slots__ = ("_address", "_intent_writer", "_page", "_slot")

    def __init__(self, intent_writer: IntentWriter, page: NDArray[np.uint8], address: int, slot: int) -> None:
        self._intent_writer = intent_writer
        self._page: NDArray[np.uint8] | None = page  # keeps it mapped
        self._address = address
        self._slot = slot

    def end(self) -> None:
        """The work is over, whatever came of it. Idempotent."""
        if self._page is not None:
            retract_writer(self._address, self._slot)
            self._page = None
            self._intent_writer._give_back(self._slot)

    def __enter__(self) -> None:
        pass

    def __exit__(self, *exc_info: object) -> None:
        self.end()

    def __del__(self) -> None:
        # A signal's exception may come between announcing and the work, or on the way out of it. In a forked child
        # the work is the parent's, and goes on.
        if self._page is not None and os.getpid() == self._intent_writer.pid:
            retract_writer(self._address, self._slot)
            self._intent_writer._free.append(self._slot)
