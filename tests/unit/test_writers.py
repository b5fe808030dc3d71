"""Pages of writers: which are found, which are waited for, which may not begin; and the quarantine on top of them.

What waits for the quarantine, and what it says: tests/api/test_guards_api.py."""

import os
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from llm_datadist import _native
from llm_datadist._deadline import Deadline
from llm_datadist._memory.pool import MemoryPool
from llm_datadist._memory.quarantine import Quarantine, writers_named
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentPage, IntentWriter, WriteIntents
from llm_datadist._native import WRITER_PAGE_BYTES, WRITER_SLOTS
from llm_datadist.errors import DeadlineExceeded, LinkError, ParamError, ProtocolError, StateError
from tests.unit.holder import in_a_forked_child

SOON, NOW = 10_000, 0
GUARD, OTHER, KIB = 5, 6, 1 << 10


@pytest.fixture
def writers(nothing_left: None) -> Iterator[WriteIntents]:
    writers = WriteIntents()
    yield writers
    writers.close()


@pytest.fixture
def page(writers: WriteIntents) -> Iterator[IntentPage]:
    """A page for a peer of this process, which parts at the end."""
    page = writers.open_here()
    yield page
    page.retire()


def at_work(intent_writer: IntentWriter) -> int:
    return WRITER_SLOTS - len(intent_writer.free)


def announce(intent_writer: IntentWriter, guard: int = GUARD) -> ExitStack:
    """Announce a write that lasts until the stack is closed."""
    with ExitStack() as announced:
        announced.enter_context(intent_writer.announce(guard, Deadline(SOON)))
        return announced.pop_all()


def mapped(page: IntentPage) -> IntentWriter:
    """Return what a peer process makes of the page."""
    assert page.segment is not None
    with SharedSegment.attach(os.dup(page.segment.fd), WRITER_PAGE_BYTES, writable=True) as theirs:
        return IntentWriter(theirs.view())


@dataclass
class Sleeper:
    """Another process, of which only the end matters; its pidfd is the page's in the end."""

    child: subprocess.Popen[bytes]
    pidfd: int

    def page(self, writers: WriteIntents) -> IntentPage:
        page = writers.open()
        page.belongs_to(self.child.pid, self.pidfd)
        return page

    def pidfd_is_closed(self) -> bool:
        return not Path(f"/proc/self/fd/{self.pidfd}").is_symlink()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    with subprocess.Popen(["sleep", "600"]) as child:
        yield Sleeper(child, os.pidfd_open(child.pid))
        child.kill()


def test_a_writer_is_found_from_its_announcement_to_its_end(writers: WriteIntents, page: IntentPage) -> None:
    intent_writer = page.intent_writer()
    assert writers.busy(GUARD) == ()
    with announce(intent_writer):
        (first,) = writers.busy(GUARD)
        assert first.page is page
        assert writers.busy(OTHER) == ()
        assert writers.pending({first}) == (first,)
        assert at_work(intent_writer) == 1
    assert writers.busy(GUARD) == writers.pending([first]) == ()
    with announce(intent_writer):  # a later writer in the same slot is not waited for
        (second,) = writers.busy(GUARD)
        assert (second.slot, writers.pending([first, second])) == (first.slot, (second,))
    with pytest.raises(ZeroDivisionError), announce(intent_writer):
        1 / 0  # noqa: B018
    assert writers.busy(GUARD) == ()
    with intent_writer.announce(GUARD, Deadline(SOON), reading=True):  # readers count only if asked for
        assert writers.busy(GUARD) == writers.busy(OTHER, readers=True) == ()
        assert len(writers.busy(GUARD, readers=True)) == 1
    assert writers.busy(GUARD, readers=True) == ()
    assert at_work(intent_writer) == 0


def test_impossible_guards_and_what_is_closed_announce_nothing(writers: WriteIntents, page: IntentPage) -> None:
    intent_writer = page.intent_writer()
    announced = announce(intent_writer)
    for guard in (0, -1, 1 << 62, 2**64):
        with pytest.raises(ProtocolError, match=f"guard slot {guard} cannot be announced"):
            announce(intent_writer, guard)
    announce(intent_writer, (1 << 62) - 1).close()
    writers.shut()
    with pytest.raises(LinkError, match="the owner of the memory has closed the link") as caught:
        announce(intent_writer)
    assert caught.value.phase == "copy"
    (write,) = writers.busy(GUARD)
    announced.close()
    announced.close()
    assert writers.pending([write]) == ()
    assert at_work(intent_writer) == 0
    for make in (writers.open_here, writers.open):
        with pytest.raises(LinkError, match="being finalized"):
            make()
    intent_writer.close()
    with pytest.raises(LinkError, match="link again"):
        announce(intent_writer)
    assert at_work(intent_writer) == 0


def test_when_every_slot_is_taken_the_next_one_waits(writers: WriteIntents, page: IntentPage) -> None:
    intent_writer = page.intent_writer()
    taken = [announce(intent_writer) for _ in range(WRITER_SLOTS)]
    assert sorted(each.slot for each in writers.busy(GUARD)) == list(range(1, WRITER_SLOTS + 1))
    with pytest.raises(DeadlineExceeded, match=f"{WRITER_SLOTS} writes to this peer"):
        intent_writer.announce(GUARD, Deadline(NOW)).__enter__()
    opener = threading.Timer(0, taken.pop().close)
    opener.start()
    announce(intent_writer).close()
    opener.join()
    for each in taken:
        each.close()
    assert writers.busy(GUARD) == ()


def test_a_page_of_a_lost_peer_stays_until_its_write_or_process_ends(writers: WriteIntents, sleeper: Sleeper) -> None:
    page = sleeper.page(writers)
    intent_writer = mapped(page)
    announced = announce(intent_writer)
    assert writers.lost == 0
    page.retire()
    assert writers.lost == 1
    (write,) = writers.busy(GUARD)
    assert writers_named([write]) == f"pid {sleeper.child.pid}"
    page.introduce("cluster 2", 2)
    assert (writers_named([write, write]), page.cluster_id) == ("cluster 2", 2)
    assert (page.who, page.retired) == ("cluster 2", True)
    with pytest.raises(LinkError):
        announce(intent_writer, OTHER)
    announced.close()
    assert writers.pending([write]) == ()
    assert writers.lost == 0
    assert sleeper.pidfd_is_closed()
    sleeper.pidfd = os.pidfd_open(sleeper.child.pid)
    announced = announce(mapped(page := sleeper.page(writers)))
    (write,) = writers.busy(GUARD)
    sleeper.child.kill()
    sleeper.child.wait()
    assert writers.pending([write]) == ()
    page.retire()
    assert writers.lost == 0
    announced.close()


def test_a_page_goes_when_its_link_ends_without_a_write_or_a_peer(writers: WriteIntents, sleeper: Sleeper) -> None:
    page = sleeper.page(writers)
    page.retire()
    page.retire()
    assert writers._pages == []
    assert sleeper.pidfd_is_closed()
    page = writers.open()  # no process was ever met: it goes whatever it shows
    announced = announce(mapped(page))
    page.retire()
    assert writers._pages == []
    announced.close()
    page = writers.open()
    with writers._lock:  # as a __del__ does that interrupts the holder of the lock
        page.retire()
    assert writers.lost == 0
    assert writers._pages == []
    page = writers.open()  # a peer can say what it likes, and harms itself only
    assert page.segment is not None
    page.segment.view()[:] = 0xFF
    assert writers.busy(GUARD) == ()
    assert len(_native.find_writers(np.array([page.address], np.uint64), [], True)) == WRITER_SLOTS
    page.retire()
    assert writers.lost == 0


def test_close_takes_retired_pages_and_leaves_the_pidfds_of_others_to_their_links(sleeper: Sleeper) -> None:
    writers = WriteIntents()
    page = sleeper.page(writers)
    lost = writers.open()
    lost.belongs_to(sleeper.child.pid, os.dup(sleeper.pidfd))
    announced = announce(mapped(lost))
    lost.retire()
    assert (len(writers._pages), writers.lost) == (2, 1)
    writers.close()
    writers.close()
    for each in (page, lost):
        assert each.segment is not None
        assert each.segment.closed
    assert (lost._pidfd, sleeper.pidfd_is_closed()) == (-1, False)
    page.retire()
    assert sleeper.pidfd_is_closed()
    announced.close()


def test_a_forked_child_gives_nothing_of_its_parent_up(writers: WriteIntents, page: IntentPage) -> None:
    shared = writers.open()
    intent_writer = mapped(shared)
    announced = announce(intent_writer)

    def give_up() -> None:
        for write in (lambda: announce(intent_writer), writers.shut, writers.close):
            with pytest.raises(StateError, match="fork"):
                write()
        shared.retire()
        announced.close()  # as where a handler of a signal forks inside of a push

    in_a_forked_child(give_up)
    assert len(writers.busy(GUARD)) == 1
    announce(intent_writer).close()
    announced.close()
    shared.retire()


def test_what_is_no_page_or_slot_is_refused() -> None:
    for call in (
        lambda: _native.writer_sequence(4096, WRITER_SLOTS + 1),
        lambda: _native.close_writers(1),
        lambda: _native.find_writers(np.array([3], np.uint64), [1], False),
    ):
        with pytest.raises(ParamError):
            call()


def test_many_threads_sweep_and_free_and_nothing_is_lost_nor_kept(writers: WriteIntents, page: IntentPage) -> None:
    pool = MemoryPool("device", SharedSegment.create("pool", 64 << 12, peers_may_write=False), 12)
    quarantine, intent_writer, start = Quarantine(writers), page.intent_writer(), threading.Barrier(4)
    quarantine.free(pool.allocate_many(2, 5000), ())  # without writers it is free at once
    assert (pool.statistics().used_bytes, quarantine.nbytes) == (0, 0)

    def live(guard: int) -> None:
        start.wait(10)
        for _ in range(200):
            allocation = quarantine.allocate(pool, 3, 4096, Deadline(SOON))
            with announce(intent_writer, guard):
                quarantine.free(allocation, writers.busy(guard))

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(live, (1, 2, 3, 4), timeout=60))
    quarantine.sweep()
    with announce(intent_writer):
        quarantine.free(pool.allocate_many(2, 5000), writers.busy(GUARD))
        quarantine.sweep()
        assert (quarantine.nbytes, pool.statistics().used_bytes) == (16 * KIB, 16 * KIB)
        quarantine.release_all()
    pool.check_integrity()
    assert (pool.statistics().used_bytes, pool.statistics().live_allocations, quarantine.nbytes) == (0, 0, 0)
    pool.close()
