"""Pages of writers: who is found, who is waited for, who may not begin; and the quarantine that rests on them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import _native
from llm_datadist._deadline import Deadline
from llm_datadist._memory.pool import MemoryPool
from llm_datadist._memory.quarantine import Quarantine, writers_named
from llm_datadist._memory.segment import SharedSegment
from llm_datadist._memory.write_intents import IntentWriter, WriteIntents, WriterPage
from llm_datadist._native import WRITER_PAGE_BYTES, WRITER_SLOTS
from llm_datadist.errors import DeadlineExceeded, LinkError, OutOfMemory, ParamError, ProtocolError
from tests.support.world import residue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SOON, NOW = 10_000, 0
GUARD, OTHER = 5, 6
KIB = 1 << 10


def _held() -> tuple[object, object]:
    now = residue()
    return now["fds"], now["memfd mappings"]


@pytest.fixture
def writers() -> Iterator[WriteIntents]:
    """Nothing may be left of it."""
    before = _held()
    writers = WriteIntents()
    yield writers
    writers.check_integrity()
    writers.close()
    assert _held() == before


@pytest.fixture
def page(writers: WriteIntents) -> Iterator[WriterPage]:
    """A page for a peer of this process, which parts at the end."""
    page = writers.open_here()
    yield page
    page.retire()


def mapped(page: WriterPage) -> IntentWriter:
    """Return what a peer process makes of the page."""
    assert page.segment is not None
    with SharedSegment.attach(os.dup(page.segment.fd), WRITER_PAGE_BYTES, writable=True) as theirs:
        return IntentWriter(theirs.view())


class Sleeper:
    """Another process, of which only the end matters."""

    def __init__(self) -> None:
        self.child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        self.pidfd = os.pidfd_open(self.child.pid)

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()
        assert self.child.stdin is not None
        self.child.stdin.close()


@pytest.fixture
def sleeper() -> Iterator[Sleeper]:
    """A living process; its pidfd is the page's in the end."""
    sleeper = Sleeper()
    yield sleeper
    sleeper.kill()


def test_a_writer_is_found_from_its_announcement_to_its_end(writers: WriteIntents, page: WriterPage) -> None:
    intent_writer = page.intent_writer()
    assert writers.busy(GUARD) == ()
    with intent_writer.announce(GUARD, Deadline(SOON)):
        (hazard,) = writers.busy(GUARD)
        assert hazard.page is page
        assert writers.busy(OTHER) == ()
        assert writers.pending([hazard]) == (hazard,)
    assert writers.busy(GUARD) == writers.pending([hazard]) == ()
    assert repr(intent_writer) == "<IntentWriter open: 0 at work>"


def test_a_later_writer_in_the_same_slot_is_not_waited_for(writers: WriteIntents, page: WriterPage) -> None:
    intent_writer = page.intent_writer()
    with intent_writer.announce(GUARD, Deadline(SOON)):
        (first,) = writers.busy(GUARD)
    with intent_writer.announce(GUARD, Deadline(SOON)):
        (second,) = writers.busy(GUARD)
        assert (second.slot, writers.pending([first, second])) == (first.slot, (second,))


def test_an_error_inside_the_block_ends_it_too(writers: WriteIntents, page: WriterPage) -> None:
    with pytest.raises(ZeroDivisionError), page.intent_writer().announce(GUARD, Deadline(SOON)):
        1 / 0  # noqa: B018
    assert writers.busy(GUARD) == ()


def test_an_announcement_that_was_lost_ends_with_its_last_reference(writers: WriteIntents, page: WriterPage) -> None:
    """As a signal's exception between the announcement and its block leaves it."""
    intent_writer = page.intent_writer()
    announced = intent_writer.announce(GUARD, Deadline(SOON))
    assert len(writers.busy(GUARD)) == 1
    del announced
    gc.collect()
    assert writers.busy(GUARD) == ()
    assert repr(intent_writer) == "<IntentWriter open: 0 at work>"


def test_readers_count_only_where_they_are_asked_for(writers: WriteIntents, page: WriterPage) -> None:
    with page.intent_writer().announce(GUARD, Deadline(SOON), reading=True):
        assert writers.busy(GUARD) == ()
        assert len(writers.busy(GUARD, readers=True)) == 1
        assert writers.busy(OTHER, readers=True) == ()


def test_a_closed_page_lets_nobody_begin_and_those_inside_end(writers: WriteIntents, page: WriterPage) -> None:
    intent_writer = page.intent_writer()
    announced = intent_writer.announce(GUARD, Deadline(SOON))
    writers.shut()
    with pytest.raises(LinkError, match="the owner of the memory has closed the link"):
        intent_writer.announce(GUARD, Deadline(SOON))
    (hazard,) = writers.busy(GUARD)
    announced.end()
    announced.end()
    assert writers.pending([hazard]) == ()
    with pytest.raises(LinkError, match="being finalized"):
        writers.open_here()
    with pytest.raises(LinkError, match="being finalized"):
        writers.open()


def test_a_closed_announcer_announces_nobody(page: WriterPage) -> None:
    intent_writer = page.intent_writer()
    intent_writer.close()
    with pytest.raises(LinkError, match="link again"):
        intent_writer.announce(GUARD, Deadline(SOON))


@pytest.mark.parametrize("guard", [0, -1, 1 << 62, 2**64])
def test_impossible_guards_are_refused(page: WriterPage, guard: int) -> None:
    intent_writer = page.intent_writer()
    with pytest.raises(ProtocolError):
        intent_writer.announce(guard, Deadline(SOON))
    assert repr(intent_writer) == "<IntentWriter open: 0 at work>"


def test_when_every_slot_is_taken_the_next_one_waits(writers: WriteIntents, page: WriterPage) -> None:
    intent_writer = page.intent_writer()
    taken = [intent_writer.announce(GUARD, Deadline(SOON)) for _ in range(WRITER_SLOTS)]
    assert sorted(each.slot for each in writers.busy(GUARD)) == list(range(1, WRITER_SLOTS + 1))
    with pytest.raises(DeadlineExceeded, match=f"{WRITER_SLOTS} writes to this peer"):
        intent_writer.announce(GUARD, Deadline(NOW))
    opener = threading.Timer(0, taken.pop().end)
    opener.start()
    intent_writer.announce(GUARD, Deadline(SOON)).end()
    opener.join()
    for each in taken:
        each.end()
    assert writers.busy(GUARD) == ()


def test_a_page_goes_when_its_link_ends_and_nobody_writes(writers: WriteIntents, sleeper: Sleeper) -> None:
    page = writers.open()
    page.belongs_to(sleeper.child.pid, sleeper.pidfd)
    page.retire()
    page.retire()
    assert repr(writers) == "<WriteIntents 0 pages, 0 of lost peers>"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sleeper.pidfd)


def test_a_page_of_a_lost_peer_is_kept_until_its_write_ends(writers: WriteIntents, sleeper: Sleeper) -> None:
    page = writers.open()
    page.belongs_to(sleeper.child.pid, sleeper.pidfd)
    intent_writer = mapped(page)
    announced = intent_writer.announce(GUARD, Deadline(SOON))
    page.retire()
    assert writers.lost == 1
    (hazard,) = writers.busy(GUARD)
    assert writers_named([hazard]) == f"pid {sleeper.child.pid}"
    page.introduce("cluster 2", 2)
    assert (writers_named([hazard, hazard]), page.cluster_id) == ("cluster 2", 2)
    with pytest.raises(LinkError):
        intent_writer.announce(OTHER, Deadline(SOON))
    announced.end()
    assert writers.pending([hazard]) == ()
    assert writers.lost == 0


def test_the_end_of_the_process_ends_its_writes(writers: WriteIntents, sleeper: Sleeper) -> None:
    page = writers.open()
    page.belongs_to(sleeper.child.pid, sleeper.pidfd)
    announced = mapped(page).announce(GUARD, Deadline(SOON))
    (hazard,) = writers.busy(GUARD)
    sleeper.kill()
    assert writers.pending([hazard]) == ()
    page.retire()
    assert writers.lost == 0
    announced.end()


def test_a_page_that_nobody_was_met_with_goes_whatever_it_shows(writers: WriteIntents) -> None:
    page = writers.open()
    announced = mapped(page).announce(GUARD, Deadline(SOON))
    page.retire()
    assert repr(writers) == "<WriteIntents 0 pages, 0 of lost peers>"
    announced.end()


def test_a_page_outlives_the_ledger_that_was_closed_before_it(sleeper: Sleeper) -> None:
    writers = WriteIntents()
    page = writers.open()
    page.belongs_to(sleeper.child.pid, sleeper.pidfd)
    writers.close()
    writers.close()
    os.fstat(sleeper.pidfd)
    page.retire()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(sleeper.pidfd)


def test_a_page_may_be_given_up_while_its_ledger_is_locked(writers: WriteIntents) -> None:
    """As a ``__del__`` does that interrupts whoever holds the lock."""
    page = writers.open()
    with writers._lock:
        page.retire()
    assert writers.lost == 0
    assert repr(writers) == "<WriteIntents 0 pages, 0 of lost peers>"


def test_a_forked_child_gives_nothing_of_its_parent_up(writers: WriteIntents, page: WriterPage) -> None:
    shared = writers.open()
    intent_writer = mapped(shared)
    announced = intent_writer.announce(GUARD, Deadline(SOON))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if child == 0:
        shared.retire()
        announced.__del__()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert len(writers.busy(GUARD)) == 1
    intent_writer.announce(GUARD, Deadline(SOON)).end()
    announced.end()
    shared.retire()


def test_a_peer_can_say_what_it_likes_and_harms_itself_only(writers: WriteIntents) -> None:
    page = writers.open()
    assert page.segment is not None
    page.segment.view()[:] = 0xFF
    found = writers.busy(GUARD)
    assert found == ()
    assert len(_native.find_writers(np.array([page.address], np.uint64), [], True)) == WRITER_SLOTS
    page.retire()
    assert writers.lost == 0


@pytest.mark.parametrize(
    "call",
    [
        lambda: _native.announce_writer(0, 1, 1),
        lambda: _native.announce_writer(4096 + 8, 1, 1),
        lambda: _native.retract_writer(4096, 0),
        lambda: _native.writer_sequence(4096, WRITER_SLOTS + 1),
        lambda: _native.close_writers(1),
        lambda: _native.find_writers(np.array([3], np.uint64), [1], False),
    ],
)
def test_native_calls_refuse_what_is_no_page_or_slot(call: Callable[[], object]) -> None:
    with pytest.raises(ParamError):
        call()


def test_what_is_no_page_is_no_announcer() -> None:
    with pytest.raises(ProtocolError, match="4096 bytes"):
        IntentWriter(np.zeros(4096, np.uint8))


# --- quarantine -------------------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[MemoryPool]:
    """A pool of 64 pages."""
    pool = MemoryPool("device", SharedSegment.create("pool", 256 * KIB, peers_may_write=False), 12)
    yield pool
    pool.check_integrity()
    pool.close()


def test_memory_without_writers_is_free_at_once(writers: WriteIntents, pool: MemoryPool) -> None:
    quarantine = Quarantine(writers)
    quarantine.free(pool.allocate_many(2, 5000), ())
    assert (pool.statistics().used_bytes, quarantine.nbytes) == (0, 0)
    assert repr(quarantine) == "<Quarantine 0 allocations, 0 bytes>"


def test_quarantined_memory_is_used_and_counted_until_its_writers_end(
    writers: WriteIntents, page: WriterPage, pool: MemoryPool
) -> None:
    quarantine = Quarantine(writers)
    allocation = pool.allocate_many(2, 5000)
    with page.intent_writer().announce(GUARD, Deadline(SOON)):
        quarantine.free(allocation, writers.busy(GUARD))
        assert not quarantine.sweep()
        now = pool.statistics()
        assert (now.used_bytes, now.quarantined_bytes, quarantine.nbytes) == (16 * KIB, 16 * KIB, 16 * KIB)
        quarantine.check_integrity()
        pool.check_integrity()
    assert quarantine.sweep()
    now = pool.statistics()
    assert (now.used_bytes, now.quarantined_bytes, quarantine.nbytes, allocation.freed) == (0, 0, 0, True)


def test_an_allocation_waits_or_names_who_it_waited_for(
    writers: WriteIntents, page: WriterPage, pool: MemoryPool
) -> None:
    quarantine = Quarantine(writers)
    announced = page.intent_writer().announce(GUARD, Deadline(SOON))
    quarantine.free(pool.allocate_many(1, 200 * KIB), writers.busy(GUARD))
    with pytest.raises(OutOfMemory) as caught:
        quarantine.allocate(pool, 1, 100 * KIB, Deadline(20))
    assert (caught.value.quarantined, caught.value.free) == (200 * KIB, 56 * KIB)
    assert f"{200 * KIB} bytes were given back but may still be written by {page.who}" in str(caught.value)
    quarantine.allocate(pool, 1, 50 * KIB, Deadline(NOW)).free()
    ender = threading.Timer(0.02, announced.end)
    ender.start()
    quarantine.allocate(pool, 1, 256 * KIB, Deadline(SOON)).free()
    ender.join()


def test_an_allocation_that_nothing_can_help_does_not_wait(
    writers: WriteIntents, page: WriterPage, pool: MemoryPool
) -> None:
    quarantine = Quarantine(writers)
    with page.intent_writer().announce(GUARD, Deadline(SOON)):
        quarantine.free(pool.allocate_many(1, 100 * KIB), writers.busy(GUARD))
        kept = pool.allocate_many(1, 100 * KIB)
        with pytest.raises(OutOfMemory) as caught:
            quarantine.allocate(pool, 1, 200 * KIB, Deadline(3_600_000))
        assert caught.value.quarantined == 100 * KIB
        kept.free()
    quarantine.release_all()
    assert pool.statistics().used_bytes == 0


def test_many_threads_sweep_and_free_and_nothing_is_lost(
    writers: WriteIntents, page: WriterPage, pool: MemoryPool
) -> None:
    quarantine, intent_writer, start = Quarantine(writers), page.intent_writer(), threading.Barrier(4)
    errors: list[BaseException] = []

    def live(guard: int) -> None:
        try:
            start.wait(10)
            for _ in range(200):
                allocation = quarantine.allocate(pool, 3, 4096, Deadline(SOON))
                with intent_writer.announce(guard, Deadline(SOON)):
                    quarantine.free(allocation, writers.busy(guard))
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            errors.append(error)

    threads = [threading.Thread(target=live, args=(guard,)) for guard in (1, 2, 3, 4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(60)
    assert errors == []
    quarantine.sweep()
    assert (quarantine.nbytes, pool.statistics().used_bytes, pool.statistics().live_allocations) == (0, 0, 0)
