"""Ranks of one engine in a store: they count, fit and are displaced as one namespace, and are looked up at once."""

import logging
import re
from typing import Any

import pytest

from llm_datadist.store import Hit, StoreClient, StoreOptions, StoreServer
from llm_datadist.store.messages import MAX_LOOKUP_KEYS
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.moves import Spec, wait_until
from tests.support.source import ROOT
from tests.support.world import World, make_config, small_pool

pytestmark = pytest.mark.covers("store.*")

KEYS = keys_of(*range(4))
EIGHT = [e.named("tp", rank, 8) for rank in range(8)]
SMALL = Spec(tensors=1, rows=1024, stride=64, blocks=True)


def rank(world: World, of: str, port: int, ranks: list[bytes], number: int) -> None:
    e.open_client(world, of, port, ranks[number], {}, ranks)


def save_ranks(world: World, ranks: list[bytes], keys: list[bytes] = KEYS) -> list[int]:
    """Save keys of all ranks, whose clients have their names."""
    return [e.save(world, keys, range(len(keys)), name, str(n)) for n, name in enumerate(ranks)]


def look_up_ranks(world: World, keys: list[bytes], of: str = "client") -> list[int]:
    world.memory["hits"] = hits = world.memory[of].lookup_ranks(keys)
    return [len(each) for each in hits]


def load_rank(world: World, number: int, name: bytes, keys: list[bytes]) -> None:
    world.memory["hit"] = world.memory["hits"][number]
    e.loads_right(world, keys, range(len(keys)), name, "hit")


def release_all(world: World) -> None:
    for hit in world.memory["hits"]:
        world.memory["client"].release(hit)


def test_eight_ranks_on_a_store_of_four_namespaces_find_all_that_they_saved() -> None:
    with family_of() as family:
        store = family.store(4, space=8 * e.SPACE)
        engine = family.engine(store)
        for number in range(8):
            engine.do(rank, str(number), store.port, EIGHT, number)
        assert engine.do(save_ranks, EIGHT) == [4] * 8
        assert engine.do(look_up_ranks, KEYS, "0") == [4] * 8
        for number in range(8):
            engine.do(open_reader, number, store.port)
            engine.do(load_rank, number, EIGHT[number], KEYS)
        now = store.do(e.statistics)
        assert (now.cleared, {each.slots for each in now.namespaces}) == (0, {16})
        wait_until(lambda: e.idle(store))


def open_reader(world: World, number: int, port: int) -> None:
    """Loads are of the rank's own client."""
    rank(world, "client", port, EIGHT, number)


def test_ranks_are_displaced_together_and_make_room_for_one_namespace() -> None:
    with family_of() as family:
        store = family.store(2, space=2 * e.SPACE)
        engine, others = family.engine(store), [family.engine(store, e.named(name)) for name in "ab"]
        for number in range(2):
            engine.do(rank, str(number), store.port, EIGHT[:2], number)
        assert engine.do(save_ranks, EIGHT[:2]) == [4, 4]
        assert others[0].do(e.save, KEYS, range(4), e.named("a")) == 4
        assert set(store.do(e.index)) == {*EIGHT[:2], e.named("a")}
        assert others[1].do(e.save, KEYS, range(4), e.named("b")) == 4
        assert set(store.do(e.index)) == {e.named("a"), e.named("b")}
        assert engine.do(look_up_ranks, KEYS, "0") == []
        assert store.do(e.statistics).cleared == 2


def test_the_shortest_run_of_all_ranks_counts_and_a_rank_without_a_key_is_a_miss() -> None:
    names = EIGHT[:3]
    with family_of() as family:
        store = family.store(4, space=3 * e.SPACE)
        ends = [family.engine(store, name, ranks=names) for name in names]
        for end, name, count in zip(ends, names, (4, 2, 3), strict=True):
            assert end.do(look_up_ranks, KEYS) == []
            assert end.do(e.save, KEYS[:count], range(count), name) == count
        assert ends[1].do(look_up_ranks, KEYS) == [2, 2, 2]
        assert [space.loads for space in store.do(e.statistics).namespaces] == [1, 1, 1]
        ends[1].do(load_rank, 1, names[1], KEYS[:2])
        assert not e.idle(store), "each rank has a hit"
        ends[1].do(release_all)
        wait_until(lambda: e.idle(store))
        assert ends[0].do(look_up_ranks, keys_of(99)) == []
        now = ends[1].do(e.figures)
        assert (now.lookups, now.hits, now.misses["absent"]) == (2, 1, 1)


def test_a_run_longer_than_one_question_is_asked_on_for_all_ranks() -> None:
    names, keys = EIGHT[:4], keys_of(*range(2100))
    assert len(names) * len(keys) > 2 * MAX_LOOKUP_KEYS
    spec = Spec(tensors=1, rows=2100, stride=64, blocks=True)
    with family_of() as family:
        store = family.store(1, space=16 << 20)
        ends = [family.engine(store, name, spec, ranks=names) for name in names]
        for end, count in zip(ends, (2100, 2100, 1900, 2100), strict=True):
            assert end.do(e.save_as_is, keys[:count]) == count
        assert ends[0].do(look_up_ranks, keys) == [1900] * 4
        assert ends[0].do(grants) == [2] * 4
        ends[0].do(release_all)
        wait_until(lambda: e.idle(store))
        assert ends[0].do(look_up_ranks, keys[:64]) == [64] * 4


def grants(world: World) -> list[int]:
    hits: list[Hit] = world.memory["hits"]
    return [len(hit.grants) for hit in hits]


def test_a_store_too_small_for_the_ranks_says_so_at_each_link_and_has_nothing(caplog: pytest.LogCaptureFixture) -> None:
    text = "8 ranks need 524288 bytes, a namespace of this store has 262144; start it with more memory"
    world = World("engine")
    world.start("MIX", 7, make_config(**small_pool()))
    with StoreServer(1 << 20, cluster_id=1, namespaces=4) as server, caplog.at_level(logging.WARNING):
        options = StoreOptions(store_id=1, lookup_ms=5000)
        for links in (1, 2):
            client = StoreClient(world.dd, f"127.0.0.1:{server.port}", EIGHT[0], options, ranks=EIGHT)
            with client:
                assert client.lookup_ranks(KEYS) == []
            assert caplog.text.count(text) == links
    world.stop()


def test_a_namespace_used_in_the_last_minute_is_not_displaced_by_a_new_one() -> None:
    with family_of() as family:
        store = family.store(1, kept=60.0)
        old, new = family.engine(store), family.engine(store, e.named("new"))
        assert old.do(e.save, KEYS, range(4)) == 4
        assert new.do(e.save, KEYS, range(4), e.named("new")) == 0
        assert new.do(e.look_up, KEYS) == 0
        assert new.do(e.figures).refused["busy"] == 4
        assert old.do(e.hits, KEYS) == 4
        store.do(keep, 0.0)
        assert new.do(e.save, KEYS, range(4), e.named("new")) == 4
        assert old.do(e.look_up, KEYS) == 0


def keep(world: World, seconds: float) -> None:
    StoreServer._KEPT_SECONDS = seconds  # noqa: SLF001 (a minute is no time of a test)


def test_a_client_counts_its_lookups_and_keys_by_what_became_of_them() -> None:
    with family_of() as family:
        store = family.store(1)
        engine = family.engine(store)
        assert engine.do(e.look_up, KEYS) == 0
        assert engine.do(e.save, KEYS, range(4)) == 4
        assert engine.do(e.save, KEYS, range(4)) == 0, "it has them"
        assert engine.do(e.save_all, keys_of(*range(4, 16))) == 12
        assert engine.do(e.look_up, keys_of(*range(8))) == 8
        assert engine.do(e.save_all, keys_of(*range(20, 32))) == 8, "the others are lent"
        family.kill(store)
        wait_until(lambda: engine.do(e.look_up, KEYS, "late") == 0)
        assert engine.do(e.save, KEYS, range(4)) == 0
        now: Any = engine.do(e.figures)
        assert (now.lookups, now.hits, now.keys, now.stored) == (3, 1, 36, 24)
        assert now.misses == {"absent": 1, "late": 0, "gone": 1, "busy": 0}
        assert now.refused == {"busy": 4, "gone": 4, "late": 0, "failed": 0, "cleared": 0}


def test_the_snippet_of_the_page_saves_and_hits_as_pasted() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "store.md").read_text(), re.DOTALL)
    world = World("engine")
    world.start("MIX", 7, make_config(**small_pool()))
    with StoreServer(1 << 20) as server:
        cache = world.cm.allocate_blocks_cache(e.other_desc())
        known = {"datadist": world.dd, "digest": b"d", "keys": KEYS, "cache": cache, "blocks": [3, 2, 1, 0]}
        exec(compile(snippet.replace("26100", str(server.port)), "docs/store.md", "exec"), known)
        assert len(known["hit"]) == 4  # type: ignore[arg-type]
        assert server.statistics().namespaces[0].stored == 4
        world.cm.deallocate_blocks_cache(cache)
    world.stop()


@pytest.mark.parametrize("ranks", [[b"x" * 32], [NS, NS], [NS, b"short"], [NS, *(b"%032d" % n for n in range(16))]])
def test_ranks_that_cannot_be_those_of_an_engine_are_refused(ranks: list[bytes]) -> None:
    world = World("engine")
    world.start("MIX", 7, make_config(**small_pool()))
    with pytest.raises(ValueError, match=r"ranks|namespace"):
        StoreClient(world.dd, "127.0.0.1:9", NS, ranks=ranks)
    world.stop()
