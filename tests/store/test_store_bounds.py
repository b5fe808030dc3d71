"""What one client can hold of a store, and what others get meanwhile and afterwards."""

import secrets
import threading
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist.errors import DeadlineExceeded, LinkError, LLMException, LLMStatusCode
from llm_datadist.store import StoreClient, StoreOptions, StoreServer, messages
from llm_datadist.store.events import KEY_BYTES, EventLog
from llm_datadist.store.savers import Savers
from llm_datadist.store.slots import SLOT_BYTES, Slots
from llm_datadist.types.question import Asker, PeerQuestion
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.ends import Call
from tests.support.moves import Spec, wait_until
from tests.support.world import World, make_config, small_pool

pytestmark = pytest.mark.covers("store.*")

#: So many slots of 64 bytes that bytes bound a reader's hits, not slots.
SMALL: Final = Spec(tensors=1, rows=1024, stride=64, blocks=True)
ROOM: Final = 4 << 20


def hoard(world: World, keys: list[bytes], most: int) -> tuple[int, str]:
    """Look keys up until the store refuses; return the number of hits, and the refusal."""
    held = world.memory.setdefault("hoard", [])
    while len(held) < most:
        token = secrets.token_bytes(16)
        try:
            world.dd.ask(1, messages.LOOKUP, messages.Lookup([NS], keys, [token]).encode())
        except LLMException as error:
            return len(held), f"{error.status_code.name}: {error}"
        held.append(token)
    return len(held), ""


def give_back(world: World, count: int) -> None:
    for _ in range(count):
        world.cm.release_grant(1, world.memory["hoard"].pop())


def test_a_reader_that_holds_all_that_it_may_is_told_busy_until_it_releases_and_others_find_everything() -> None:
    keys = keys_of(*range(1024))
    with family_of() as family:
        store = family.store(1, space=ROOM)
        saver, hoarder = family.engine(store, spec=SMALL), family.engine(store, spec=SMALL)
        assert saver.do(e.save_as_is, keys) == 1024
        held, why = hoarder.do(hoard, keys, 10_000)
        (space,) = store.do(e.statistics).namespaces
        assert (held, why[:12]) == (((16 << 20) - 2 * space.slots) // (4096 + 16 * 1024), "LLM_LINK_BUS")
        assert "it gets more once it has released some" in why
        (space,) = store.do(e.statistics).namespaces
        assert (space.loads, space.refused) == (held, 1)
        assert saver.do(e.look_up, keys) == 1024
        assert hoarder.do(e.look_up, keys) == 0, "a client takes that for a miss"
        hoarder.do(give_back, 3)
        wait_until(lambda: store.do(e.statistics).namespaces[0].loads == held - 2)
        assert hoarder.do(hoard, keys, held) == (held, "")


@pytest.mark.parametrize("end", ["killed", "unlinked"])
def test_a_client_that_leaves_its_hits_behind_costs_no_later_lookup_or_save(end: str) -> None:
    """The store was once full of what had ended, and refused before it looked."""
    keys = keys_of(*range(1024))
    with family_of() as family:
        store = family.store(1, space=ROOM)
        saver, hoarder = family.engine(store, spec=SMALL), family.engine(store, spec=SMALL)
        assert saver.do(e.save_as_is, keys) == 1024
        assert hoarder.do(hoard, keys[:1], 10_000)[1] != ""
        if end == "killed":
            family.kill(hoarder)
        else:
            hoarder.do(e.leave)
        wait_until(lambda: e.idle(store))
        assert saver.do(e.look_up, keys) == 1024
        assert saver.do(e.save_as_is, keys_of(*range(5000, 6000))) == 1000
        saver.do(e.release)
        wait_until(lambda: e.idle(store))
        assert store.do(active_grants) == 0
        fresh = family.engine(store, spec=SMALL)
        assert fresh.do(e.look_up, keys) == 1024


def active_grants(world: World) -> int:
    return world.dd.statistics().grants.active


def test_a_reader_holds_half_of_the_slots_however_often_it_asks_for_the_same() -> None:
    with family_of() as family:
        store = family.store(1)
        saver, reader = family.engine(store), family.engine(store)
        keys = keys_of(*range(16))
        assert saver.do(e.save_all, keys) == 16
        for name in "abc":
            assert reader.do(e.look_up, keys, name) == 8, "the leading ones"
        assert reader.do(e.look_up, keys[8:], "d") == 0
        assert saver.do(e.save_all, keys_of(*range(20, 28))) == 8, "the others are free for new keys"
        for name in "abc":
            reader.do(e.loads_right, keys[:8], range(8), NS, name)


def test_a_lookup_of_thousands_of_keys_is_one_hit_of_several_grants() -> None:
    keys = keys_of(*range(6000))
    with family_of() as family:
        store = family.store(1, space=16 << 20)
        spec = Spec(tensors=1, rows=6000, stride=64, blocks=True)
        saver, reader = family.engine(store, spec=spec), family.engine(store, spec=spec)
        assert saver.do(e.save_as_is, keys) == 6000
        assert reader.do(e.look_up, keys) == 6000
        assert store.do(active_grants) == 2
        reader.do(loads_what_was_saved, saver.do(contents), 5500)
        wait_until(lambda: e.idle(store))
        assert reader.do(e.look_up, [*keys[:5000], *keys_of(9999), *keys[5000:]]) == 5000
        saver.do(e.take_hit, reader.do(e.hit_bytes))
        saver.do(loads_what_was_saved, saver.do(contents), 5000)  # a copy
        assert store.do(active_grants) == 2
        reader.do(e.release)
        wait_until(lambda: e.idle(store))


def contents(world: World) -> Any:
    from tests.support.moves import show

    return show(world, "kv")


def loads_what_was_saved(world: World, saved: Any, count: int) -> None:
    """Load the hit into the last blocks in reverse; every byte is right, also of the other blocks."""
    before = contents(world)
    blocks = list(range(5999, 5999 - count, -1))
    e.load(world, blocks)
    for was, now, right in zip(before, contents(world), saved, strict=True):
        was[blocks] = right[:count]
        np.testing.assert_array_equal(now, was)


def test_beside_clients_that_flood_hold_and_die_every_key_that_is_there_is_found() -> None:
    keys = keys_of(*range(1024))
    with family_of() as family:
        store = family.store(1, space=ROOM)
        assert family.engine(store, spec=SMALL).do(e.save_as_is, keys) == 1024
        crowds = [family.child("one crowd"), family.child("another crowd")]
        for number, each in enumerate(crowds):
            each.begin(be_a_crowd, store.port, 100 * (number + 1), keys)
        for each in crowds:
            assert each.finish() == (15 * LOOKUPS, 15 * LOOKUPS)
        wait_until(lambda: e.idle(store))


#: Of each honest client.
LOOKUPS: Final = 20


def be_a_crowd(world: World, port: int, first: int, keys: list[bytes]) -> tuple[int, int]:
    """Be thirty clients: five flood, five hold what they can, five die one after the other, fifteen look keys up.

    Return how many lookups these made, and how many found all keys.
    """
    over, found = threading.Event(), deque[bool]()

    def flood(client: StoreClient) -> None:
        while not over.is_set():
            client.lookup(keys_of(-1))

    def hold(client: StoreClient) -> None:
        held = deque[Any](maxlen=10_000)
        while not over.is_set():
            held.append(client.lookup(keys))

    def die(client: StoreClient) -> None:
        client.lookup(keys)

    def honest(client: StoreClient) -> None:
        for at in range(LOOKUPS):
            hit = client.lookup(keys[at : at + 100])
            found.append(len(hit) == 100)
            client.release(hit)

    def run(number: int, of: Callable[[StoreClient], None]) -> None:
        own = World(f"client {number}")
        own.start("MIX", number, make_config(**small_pool()))
        options = StoreOptions(store_id=1, lookup_ms=3000)
        with StoreClient(own.dd, f"127.0.0.1:{port}", NS, options) as client:
            assert client.connect(30)
            of(client)
        own.dd.finalize()

    roles = [flood] * 5 + [hold] * 5 + [die] * 5 + [honest] * 15
    calls = [Call(run, first + number, of) for number, of in enumerate(roles)]
    for call in calls[10:]:
        call.result()
    over.set()
    for call in calls[:10]:
        call.result()
    return len(found), sum(found)


# --- memory -----------------------------------------------------------------------------------------------------------
def test_bookkeeping_of_blocks_of_one_byte_fits_into_the_memory_of_the_store() -> None:
    with family_of() as family:
        store = family.store(4, space=2 << 20)
        engine = family.engine(store, spec=Spec(tensors=1, rows=16, stride=1, blocks=True))
        assert engine.do(e.save_as_is, keys_of(0)) == 1
        (space,) = store.do(e.statistics).namespaces
        assert 0 < space.slots * (SLOT_BYTES + 2 * KEY_BYTES) <= 2 << 20


def test_a_slot_with_the_longest_key_takes_no_more_memory_than_is_counted() -> None:
    count = 4096
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        slots = Slots(count)
        for first in range(0, 2 * count, 512):
            filling = slots.fill([b"%064d" % n for n in range(first, first + 512)])
            slots.publish(filling.slots, np.zeros((512, 2), np.uint64))
            del filling
        table = 65 + 4 + 16  # bytes of the native table: a key, the next of its chain, at most four firsts
        assert (tracemalloc.get_traced_memory()[0] - before) / count + table <= SLOT_BYTES
        before = tracemalloc.get_traced_memory()[0]
        log = EventLog(2 * count)
        for n in range(4 * count):
            log.add("stored", [b"%064d" % n])
        assert log.keys <= 2 * count
        assert (tracemalloc.get_traced_memory()[0] - before) / (2 * count) <= 2 * KEY_BYTES
    finally:
        tracemalloc.stop()


# --- events -----------------------------------------------------------------------------------------------------------
def test_a_reader_of_events_learns_that_the_store_has_restarted_and_reads_only_its_own_namespace() -> None:
    with family_of() as family:
        store = family.store(2)
        reader, other = family.engine(store), family.engine(store, e.named("other"))
        reader.do(e.save, keys_of(1, 2), [0, 1])
        other.do(e.save, keys_of(7), [0], e.named("other"))
        assert reader.do(follow) == (True, [("stored", keys_of(1, 2))])
        assert reader.do(follow) == (True, [])
        port = store.port or 0
        family.kill(store)
        again = family.store(2, port=port)
        wait_until(lambda: reader.do(e.save, keys_of(3), [0]) == 1)
        assert reader.do(follow) == (False, [("stored", keys_of(3))]), "an index begins anew"
        assert again.do(e.index) == {NS: keys_of(3)}
        assert reader.do(follow) == (True, [])


def follow(world: World) -> tuple[bool, list[Any]]:
    last = (world.memory["place"],) if "place" in world.memory else ()
    world.memory["place"] = told = world.memory["client"].events(*last)
    return told.follows, [(each.kind, each.keys) for each in told.events]


def test_a_reader_learns_that_a_log_has_forgotten_events_or_is_another_one() -> None:
    log = EventLog(6)
    for n in range(5):
        log.add("stored", [b"%d" % n])
    log.add("removed", [])
    first = log.after(b"", 0)
    assert (first.follows, first.oldest, first.last, [each.number for each in first.events]) == (False, 3, 5, [3, 4, 5])
    assert log.after(first.incarnation, 2).follows
    assert not log.after(first.incarnation, 1).follows, "event 2 is missing"
    ahead = log.after(first.incarnation, 6)
    assert (ahead.follows, ahead.last) == (False, 5)
    assert not log.after(b"x" * 16, 4).follows
    assert log.after(first.incarnation, 5) == messages.Events(log.incarnation, 3, 5, True, [])


# --- savers -----------------------------------------------------------------------------------------------------------
class Crowd:
    """Saves of clients, in a real crew of threads; what stands still waits until the end of the test."""

    def __init__(self) -> None:
        self.savers = Savers()
        self.done: deque[int] = deque()
        self.refused: deque[LLMException] = deque()
        self.go_on = threading.Event()
        self.begun = threading.Semaphore(0)

    def ask(self, client: int, origin: str, job: Callable[[], bytes]) -> None:
        def send(answer: bytes | BaseException) -> None:
            if isinstance(answer, LLMException):
                self.refused.append(answer)
            else:
                self.done.append(client)

        question = PeerQuestion(Asker(client, "incarnation", origin, "", frozenset()), b"", 1000, send)
        self.savers.submit(question, job)

    def stand_still(self) -> bytes:
        self.begun.release()
        self.go_on.wait()
        raise DeadlineExceeded("the client did not answer")


@pytest.fixture
def crowd() -> Iterator[Crowd]:
    crowd = Crowd()
    yield crowd
    crowd.go_on.set()
    crowd.savers.close()


def test_clients_that_stand_still_leave_threads_to_those_that_were_prompt(crowd: Crowd) -> None:
    crowd.ask(1, "honest", lambda: b"")
    wait_until(lambda: 1 in crowd.done)
    for client in range(100, 164):
        crowd.ask(client, f"evil {client}", crowd.stand_still)
    for _ in range(4):
        assert crowd.begun.acquire(timeout=20)
    for _ in range(10):
        crowd.ask(1, "honest", lambda: b"")
    wait_until(lambda: len(crowd.done) == 11)
    assert crowd.savers.waiting() == 60
    assert not crowd.begun.acquire(blocking=False), "half of the threads, not one more"


def test_links_of_one_process_leave_threads_to_other_processes(crowd: Crowd) -> None:
    for client in range(100, 164):
        crowd.ask(client, "evil", crowd.stand_still)
    assert crowd.begun.acquire(timeout=20)
    for client in (1, 2, 3):  # new ones, too
        crowd.ask(client, f"honest {client}", lambda: b"")
    wait_until(lambda: len(crowd.done) == 3)
    assert not crowd.begun.acquire(blocking=False), "one thread for all that were not prompt"


def test_waiting_saves_of_a_client_that_met_its_deadline_are_refused_at_once(crowd: Crowd) -> None:
    for _ in range(5):
        crowd.ask(1, "one", crowd.stand_still)
    assert crowd.begun.acquire(timeout=20)
    crowd.go_on.set()
    wait_until(lambda: len(crowd.refused) == 5)
    assert [type(each) for each in crowd.refused] == [DeadlineExceeded, *[LinkError] * 4]
    assert {each.status_code for each in list(crowd.refused)[1:]} == {LLMStatusCode.LLM_LINK_BUSY}
    crowd.ask(1, "one", lambda: b"")
    wait_until(lambda: 1 in crowd.done)


def test_a_thread_goes_on_whose_refusal_raises(crowd: Crowd, caplog: pytest.LogCaptureFixture) -> None:
    def send(answer: object) -> None:
        raise MemoryError

    for client in range(16):
        crowd.savers.submit(PeerQuestion(Asker(client, "x", "one", "", frozenset()), b"", 1, send), lambda: b"")
    wait_until(lambda: not crowd.savers.waiting())
    crowd.ask(1, "one", lambda: b"")
    wait_until(lambda: 1 in crowd.done)
    assert "unexpected error while a save is answered" in caplog.text


# --- arguments --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "settings", "kind"),
    [
        (("x",), {}, TypeError),
        ((float("nan"),), {}, TypeError),
        ((-1,), {}, ValueError),
        ((2**70,), {}, ValueError),
        ((1 << 20, 5), {}, TypeError),
        ((1 << 20,), {"namespaces": 1.5}, TypeError),
        ((1 << 20,), {"options": [("a", "b")]}, TypeError),
        ((1 << 20,), {"options": 5}, TypeError),
        ((1 << 20,), {"options": {1: 2}}, TypeError),
    ],
)
def test_a_store_with_odd_arguments_raises_typed_errors(arguments: Any, settings: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind) as raised:
        StoreServer(*arguments, **settings)
    assert kind is TypeError or isinstance(raised.value, LLMException)
