"""A namespace that is emptied: nothing of before is found again, however a save was under way."""

import logging
import signal
from pathlib import Path
from typing import Any

import pytest

from llm_datadist.errors import LLMException, StateError
from llm_datadist.store import StoreClient, StoreOptions, StoreServer, messages
from llm_datadist.store.client import shape_of
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.ends import begin_there, freeze, result_there
from tests.support.linking import SUCCESS, info, unlink
from tests.support.moves import Spec, wait_until
from tests.support.world import World, make_config, small_pool

pytestmark = pytest.mark.covers("store.*")

KEYS = keys_of(*range(5))


def clear(world: World, timeout_ms: int = 20_000, of: str = "client") -> bool:
    done: bool = world.memory[of].clear(timeout_ms)
    return done


def follows(world: World) -> tuple[bool, list[bytes]]:
    """Follow the namespace's events from the last place; return the keys told."""
    last = (world.memory["place"],) if "place" in world.memory else ()
    world.memory["place"] = told = world.memory["client"].events(*last)
    return told.follows, [key for each in told.events for key in each.keys]


def test_what_was_saved_before_a_clear_is_found_by_nobody_and_can_be_saved_again() -> None:
    with family_of() as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store)
        other = family.engine(store, e.named("other"))
        assert saver.do(e.save, KEYS, range(5)) == 5
        assert other.do(e.save, KEYS, range(5), e.named("other")) == 5
        assert reader.do(follows) == (True, KEYS)
        assert saver.do(clear)
        assert saver.do(e.look_up, KEYS) == reader.do(e.look_up, KEYS) == 0
        assert reader.do(follows) == (True, KEYS), "removed"
        assert other.do(e.hits, KEYS, e.named("other")) == 5, "one namespace only"
        space = next(each for each in store.do(e.statistics).namespaces if each.cleared)
        assert (space.published, space.free, space.removed, space.cleared) == (0, space.slots, 5, 1)
        assert saver.do(e.save, KEYS, range(5)) == 5
        assert reader.do(e.hits, KEYS) == 5
        assert reader.do(follows) == (True, KEYS)


def test_slots_with_readers_are_dropped_at_once_and_free_when_the_readers_end() -> None:
    with family_of() as family:
        store = family.store(1)
        saver, reader = family.engine(store), family.engine(store)
        assert saver.do(e.save, KEYS, range(5)) == 5
        assert reader.do(e.look_up, KEYS[:2]) == 2
        assert saver.do(clear)
        assert saver.do(e.look_up, KEYS) == 0
        (space,) = store.do(e.statistics).namespaces
        assert (space.published, space.free) == (0, space.slots - 2)
        reader.do(e.loads_right, KEYS[:2], [7, 8])
        wait_until(lambda: e.idle(store))
        assert store.do(e.statistics).namespaces[0].free == space.slots


def test_a_namespace_of_many_parts_is_emptied_whole() -> None:
    keys = keys_of(*range(2600))
    with family_of() as family:
        store = family.store(1, space=4 << 20)
        engine = family.engine(store, spec=Spec(tensors=1, rows=2600, stride=64, blocks=True))
        assert engine.do(e.save_as_is, keys) == 2600
        assert engine.do(clear)
        assert store.do(e.index) == {NS: []}
        assert e.replayed(store.do(e.all_events)) == {NS: set()}
        assert engine.do(e.save_as_is, keys) == 2600


@pytest.mark.parametrize("step", ["before copy", "after copy"])
def test_a_save_whose_pull_runs_or_waits_during_a_clear_publishes_nothing(step: str, tmp_path: Path) -> None:
    with family_of() as family:
        store = family.store()
        saver, other = family.engine(store), family.engine(store)
        assert other.do(e.save, KEYS[:1], [0]) == 1
        with e.pull_stopped(store, saver, tmp_path, step) as gate:
            saver.do(begin_there, "running", e.save, KEYS[1:3], [3, 4])
            gate.wait()
            saver.do(begin_there, "waiting", e.save, KEYS[3:], [5, 6])
            wait_until(lambda: store.do(e.statistics).waiting == 1)
            assert other.do(clear)
            gate.open()
            assert saver.do(result_there, "running") == saver.do(result_there, "waiting") == 0
        assert store.do(e.index) == {NS: []}
        assert saver.do(e.figures).refused["cleared"] == 4
        assert saver.do(e.save, KEYS, range(5)) == 5, "it was told"
        assert other.do(e.hits, KEYS) == 5


def save_beside_a_clear(world: World) -> int:
    """Clear after a save has begun, before its question is sent."""
    client, send = world.memory["client"], world.memory["client"]._save  # noqa: SLF001 (of this test)

    def late(*arguments: Any) -> Any:
        assert clear(world, of="other client")
        return send(*arguments)

    client._save = late  # noqa: SLF001
    try:
        return e.save(world, KEYS, range(5))
    finally:
        del client._save  # noqa: SLF001


@pytest.mark.parametrize("there", [True, False], ids=["there", "not there yet"])
def test_a_save_that_began_before_a_clear_stores_nothing_though_the_store_hears_of_it_afterwards(there: bool) -> None:
    with family_of() as family:
        store = family.store()
        engine, reader = family.engine(store), family.engine(store)
        engine.do(e.open_client, "other client", store.port, NS, {})
        if there:
            assert reader.do(e.save, keys_of(9), [9]) == 1
        assert engine.do(save_beside_a_clear) == 0
        assert reader.do(e.look_up, KEYS) == 0
        assert engine.do(e.save, KEYS, range(5)) == 5


def save_as_of(world: World, generation: bytes, name: bytes = NS) -> int:
    cache = world.caches["kv"]
    grant = cache.grant([0], None, peer=1)
    body = messages.Save([name], 0, generation, shape_of(cache), KEYS[:1], [0], grant.to_bytes()).encode()
    saved = messages.decode(messages.Done, world.dd.ask(1, messages.SAVE, body), "the store")
    grant.revoke()
    return saved.count


def test_a_generation_never_comes_back_also_after_the_namespace_was_displaced() -> None:
    with family_of() as family:
        store = family.store(1)
        old, other = family.engine(store), family.engine(store, e.named("other"))
        known = old.do(e.generation)
        assert old.do(e.save, KEYS[:1], [0]) == 1
        assert (old.do(e.generation), old.do(save_as_of, known)) == (known, 0), "the key is there"
        assert old.do(clear)
        assert old.do(save_as_of, known) == 0
        other.do(e.save, KEYS, range(5), e.named("other"))
        assert other.do(e.save, KEYS, range(5), e.named("other")) == 5, "it was told of the clear"
        assert NS not in store.do(e.index)
        assert old.do(save_as_of, known) == 0
        assert NS not in store.do(e.index)


def test_a_clear_is_false_without_an_answer_and_raises_only_for_a_closed_client() -> None:
    with family_of() as family:
        store = family.store()
        engine = family.engine(store)
        assert engine.do(e.save, KEYS, range(5)) == 5
        freeze(store)
        assert not engine.do(clear, 100)
        store.signal(signal.SIGCONT)
        wait_until(lambda: engine.do(e.look_up, KEYS) == 0)  # done after all
        family.kill(store)
        assert not engine.do(clear)
        with pytest.raises(LLMException, match="timeout"):
            engine.do(clear, 0)
        engine.do(e.close_ours)
        with pytest.raises(StateError, match="closed"):
            engine.do(clear)


def test_a_clear_empties_all_ranks() -> None:
    names = [e.named("tp", rank, 2) for rank in (0, 1)]
    with family_of() as family:
        store = family.store(space=2 * e.SPACE)
        ends = [family.engine(store, name, ranks=names) for name in names]
        for end, name in zip(ends, names, strict=True):
            assert end.do(e.save, KEYS, range(5), name) == 5
        assert ends[0].do(clear)
        assert store.do(e.index) == {name: [] for name in names}


def test_a_store_that_is_not_linked_is_said_once_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    world = World("alone")
    world.start("MIX", 7, make_config(**small_pool()))
    with caplog.at_level(logging.WARNING), StoreClient(world.dd, "127.0.0.1:9", NS) as client:
        for _ in range(3):
            assert len(client.lookup(KEYS)) == 0
        now = client.statistics()
    world.stop()
    assert caplog.text.count("not linked; until it is, lookups are misses") == 1
    assert (now.lookups, now.hits, now.misses) == (3, 0, {"absent": 0, "late": 0, "gone": 3, "busy": 0})


@pytest.mark.parametrize("how", ["closed, then unlinked", "unlinked, then closed", "finalized"])
def test_the_normal_end_of_a_client_is_no_warning_at_either_side(caplog: pytest.LogCaptureFixture, how: str) -> None:
    world = World("alone")
    world.start("MIX", 7, make_config(**small_pool()))
    with StoreServer(1 << 20, "127.0.0.1:0", cluster_id=1, namespaces=4) as server, caplog.at_level(logging.INFO):
        client = StoreClient(world.dd, f"127.0.0.1:{server.port}", NS, StoreOptions(store_id=1))
        assert client.connect(20)
        caplog.clear()
        if how.startswith("closed"):
            client.close()
        if how != "finalized":
            assert unlink(world, [info(1, server.port)]) == SUCCESS
        else:
            world.dd.finalize()
        client.close()
        wait_until(lambda: "ended: the peer unlinked" in caplog.text)
    assert [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING] == []
    world.stop()
