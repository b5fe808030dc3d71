"""A store and engines in processes: every byte of a hit, evictions, namespaces, releases, events."""

from collections.abc import Callable

import pytest

from llm_datadist.errors import CacheMismatch, ChecksumMismatch, GrantEnded, ParamError, StateError
from llm_datadist.store import StoreClient, StoreServer
from llm_datadist.store.messages import FORMAT
from tests.store import engines as e
from tests.store.engines import NS, family_of, keys_of
from tests.support.kinds import World
from tests.support.moves import Spec, make, show, wait_until
from tests.support.tensors import Tensor

pytestmark = pytest.mark.covers("store.*")

ROWS = e.BLOCKS
TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp", "auto"])


@TRANSPORTS
@pytest.mark.parametrize("memory", ["pool", "private"])
def test_what_one_engine_saves_another_loads_byte_for_byte(transport: str, memory: str) -> None:
    if (transport, memory) == ("shm", "private"):
        pytest.skip("shm moves pools only")
    spec = Spec(tensors=e.TENSORS, rows=ROWS, stride=e.BLOCK, blocks=True, memory=memory)
    with family_of(transport) as family:
        store = family.store()
        saver, reader = family.engine(store, spec=spec), family.engine(store, spec=spec)
        keys = keys_of(*range(8))
        assert reader.do(e.look_up, keys) == 0
        assert saver.do(e.save, keys[:5], [7, 0, 3, 11, 2]) == 5
        assert saver.do(e.save, keys[:7], [1, 2, 3, 4, 5, 6, 7]) == 2, "what is there is not moved again"
        assert reader.do(e.save, keys[:7], range(7)) == 0
        assert reader.do(e.look_up, keys) == 7
        reader.do(e.loads_right, keys[:7], [9, 8, 0, 1, 2, 11, 4])
        for some, run in (([0, 99, 1], 1), ([99, 0], 0), ([3, 3, 1], 3), ([6, 7], 1)):
            assert saver.do(e.look_up, keys_of(*some)) == run
            saver.do(e.loads_right, keys_of(*some)[:run], range(run))
        wait_until(lambda: e.idle(store))
        (space,) = store.do(e.statistics).namespaces
        assert (space.stored, space.published, space.removed, space.failed) == (7, 7, 0, 0)
        assert store.do(e.index) == {NS: keys[:7]}
        assert e.replayed(store.do(e.all_events)) == {NS: set(keys[:7])}


def test_an_evicted_key_is_a_miss_and_a_held_hit_is_not_evicted() -> None:
    with family_of() as family:
        store = family.store(1)
        saver, reader = family.engine(store), family.engine(store)
        first = keys_of(*range(4))
        saver.do(e.save, first, range(4))
        assert reader.do(e.look_up, first) == 4
        others = keys_of(*range(100, 148))
        assert saver.do(e.save_all, others) == 48, "three times the pool"
        reader.do(e.loads_right, first, range(4))
        assert reader.do(e.look_up, first) == 4
        reader.do(e.release)
        wait_until(lambda: e.idle(store))
        assert saver.do(e.save_all, keys_of(*range(200, 248))) == 48
        assert reader.do(e.look_up, first) == 0
        assert reader.do(e.hits, keys_of(*range(247, 240, -1))) == 7
        wait_until(lambda: e.idle(store))
        (space,) = store.do(e.statistics).namespaces
        assert (space.slots, space.published, space.stored, space.removed) == (16, 16, 100, 84)
        found = {name: set(keys) for name, keys in store.do(e.index).items()}
        assert e.replayed(store.do(e.all_events)) == found


def test_with_every_slot_lent_nothing_is_stored_and_no_reader_loses_its_hit() -> None:
    with family_of() as family:
        store = family.store(1)
        saver, reader, other = (family.engine(store) for _ in range(3))
        keys = keys_of(*range(16))
        assert saver.do(e.save_all, keys) == 16
        assert reader.do(e.look_up, keys[:8], "a") == 8
        assert other.do(e.look_up, keys[8:12], "b") == other.do(e.look_up, keys[12:], "c") == 4
        assert saver.do(e.save, keys_of(50, 51), [0, 1]) == 0
        other.do(e.loads_right, keys[12:], range(4), NS, "c")
        wait_until(lambda: store.do(e.statistics).namespaces[0].loads == 2)
        assert saver.do(e.save, keys_of(*range(50, 56)), range(6)) == 4, "as many as have room"
        reader.do(e.loads_right, keys[:8], range(8), NS, "a")


@TRANSPORTS
def test_a_hit_that_was_released_is_never_read_again(transport: str) -> None:
    with family_of(transport) as family:
        store = family.store(1)
        saver, reader = family.engine(store), family.engine(store)
        keys = keys_of(*range(3))
        saver.do(e.save, keys, range(3))
        reader.do(e.look_up, keys)
        reader.do(e.release)
        reader.do(e.release)
        wait_until(lambda: e.idle(store))
        saver.do(e.save_all, keys_of(*range(100, 148)))
        with pytest.raises(GrantEnded, match="released by its readers"):
            reader.do(e.load, [0, 1, 2])
        assert reader.do(e.hits, keys_of(147)) == 1


def test_a_hit_is_loaded_by_another_process_and_in_parts() -> None:
    with family_of() as family:
        store = family.store()
        scheduler, worker = family.engine(store), family.engine(store)
        keys = keys_of(*range(4))
        scheduler.do(e.save, keys, range(4))
        assert scheduler.do(e.look_up, keys) == 4
        worker.do(e.take_hit, scheduler.do(e.hit_bytes))
        worker.do(e.loads_right, keys[:2], [5, 4])
        worker.do(e.loads_right, keys, [8, 9, 10, 11])  # a copy releases nothing
        assert not e.idle(store)
        scheduler.do(e.release)
        wait_until(lambda: e.idle(store))
        with pytest.raises(GrantEnded):
            worker.do(e.load, [0, 1])


# --- namespaces -------------------------------------------------------------------------------------------------------
def test_namespaces_share_no_key_and_one_too_many_displaces_the_one_used_least_recently() -> None:
    names = [e.named("a"), e.named("b"), e.named("c")]
    with family_of() as family:
        store = family.store(2)
        a, b, c = (family.engine(store, name) for name in names)
        keys = keys_of(0, 1)
        for end, name in ((a, names[0]), (b, names[1])):
            assert end.do(e.look_up, keys) == 0
            assert end.do(e.save, keys, [3, 4], name) == 2
        assert a.do(e.hits, keys, names[0]) == b.do(e.hits, keys, names[1]) == 2
        assert a.do(e.look_up, keys) == 2  # held
        assert c.do(e.save, keys, [3, 4], names[2]) == 2
        assert set(store.do(e.index)) == {names[0], names[2]}, "b was idle"
        assert b.do(e.look_up, keys) == 0
        c.do(e.look_up, keys)
        assert b.do(e.save, keys, [3, 4], names[1]) == 0, "both are in use"
        a.do(e.loads_right, keys, [0, 1], names[0])
        wait_until(lambda: b.do(e.save, keys, [3, 4], names[1]) == 2)
        assert a.do(e.look_up, keys) == 0
        c.do(e.loads_right, keys, [0, 1], names[2])
        found = {name: set(keys) for name, keys in store.do(e.index).items()}
        assert e.replayed(store.do(e.all_events)) == found == {names[1]: set(keys), names[2]: set(keys)}
        assert store.do(e.statistics).cleared == 2


def test_a_namespace_that_fits_into_no_hole_displaces_another_one() -> None:
    """What the first one leaves, and what it has left unused, do not adjoin."""
    with family_of() as family:
        store = family.store(4, space=16 << 16)
        for name, pages in (("a", 10), ("b", 16), ("c", 16), ("d", 16), ("e", 16), ("f", 16)):
            spec = Spec(tensors=1, rows=1, stride=(pages if name == "a" else 1) << 16, blocks=True)
            engine = family.engine(store, e.named(name), spec)
            assert engine.do(e.save_as_is, keys_of(0)) == 1, name
        assert set(store.do(e.index)) >= {e.named(name) for name in "def"}


@pytest.mark.parametrize(
    "other",
    [
        Spec(tensors=e.TENSORS, rows=e.BLOCKS, stride=e.BLOCK, blocks=True, dims=(2, e.BLOCK // 2)),
        Spec(tensors=e.TENSORS, rows=e.BLOCKS, stride=e.BLOCK // 2, blocks=True),
        Spec(tensors=e.TENSORS + 1, rows=e.BLOCKS, stride=e.BLOCK, blocks=True),
    ],
    ids=["dimensions", "bytes", "tensors"],
)
def test_blocks_of_another_shape_are_named_and_no_byte_moves(other: Spec) -> None:
    with family_of() as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store, spec=other)
        keys = keys_of(0)
        saver.do(e.save, keys, [0])
        before = reader.do(show, "kv")
        assert reader.do(e.look_up, keys) == 1
        with pytest.raises(CacheMismatch, match=r"load: the store has 4 tensors of blocks \[4096\].*, cache has"):
            reader.do(e.load, [0])
        for was, now in zip(before, reader.do(show, "kv"), strict=True):
            assert (was == now).all()

        with pytest.raises(CacheMismatch, match=r"has 4 tensors of blocks \[4096\].*; the saved cache has"):
            reader.do(e.save_as_is, keys_of(1))
        assert store.do(e.index) == {NS: keys}
        wait_until(lambda: e.idle(store))


def test_a_block_larger_than_a_namespace_is_refused_readably() -> None:
    with family_of() as family:
        store = family.store(1, space=1 << 18)
        saver = family.engine(store, spec=Spec(tensors=4, rows=2, stride=1 << 17, blocks=True))
        with pytest.raises(CacheMismatch, match=r"needs more than the 262144 bytes of a namespace"):
            saver.do(e.save_as_is, keys_of(0))
        assert store.do(e.index) == {}


# --- memory that goes bad, releases of another format, bad input ------------------------------------------------------
def test_a_flipped_bit_in_a_slot_is_an_error_then_a_miss_and_can_be_saved_again() -> None:
    with family_of() as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store)
        keys = keys_of(*range(3))
        saver.do(e.save, keys, range(3))
        reader.do(e.look_up, keys, "other")
        for tensor in range(e.TENSORS):
            store.do(e.flip, NS, keys[1], tensor)
            assert reader.do(e.look_up, keys) == 3
            with pytest.raises(ChecksumMismatch, match=r"1 of 3 blocks are not what the store at .* published"):
                reader.do(e.load, [0, 1, 2])
            assert reader.do(e.look_up, keys) == 1
            reader.do(e.loads_right, keys[:1], [5])
            assert saver.do(e.save, keys, range(3)) == 1
            assert reader.do(e.hits, keys) == 3
        reader.do(e.release, "other")
        wait_until(lambda: e.idle(store))
        (space,) = store.do(e.statistics).namespaces
        assert (space.published, space.removed) == (3, e.TENSORS)
        assert e.replayed(store.do(e.all_events)) == {NS: set(keys)}


def test_without_verify_a_flipped_bit_is_loaded() -> None:
    """The control: the digests find it, nothing else."""
    with family_of() as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store, verify=False)
        saver.do(e.save, keys_of(0), [0])
        store.do(e.flip, NS, keys_of(0)[0], 2)
        reader.do(e.look_up, keys_of(0))
        reader.do(e.load, [0])
        loaded = reader.do(show, "kv")
        wrong = [int((loaded[t][0] != e.content(NS, keys_of(0)[0], t)).sum()) for t in range(e.TENSORS)]
        assert wrong == [0, 0, 1, 0]


def speak(world: World, version: int) -> None:
    from llm_datadist.store import messages

    vars(messages)["FORMAT"] = version


def test_a_client_of_another_format_misses_and_its_save_names_both() -> None:
    with family_of() as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store)
        saver.do(e.save, keys_of(0), [0])
        reader.do(speak, FORMAT + 1)
        try:
            assert reader.do(e.look_up, keys_of(0)) == 0
            wait_until(lambda: reader.do(save_error, keys_of(1), [1]) != "")
            text = reader.do(save_error, keys_of(1), [1])
            assert f": format {FORMAT + 1} of the store, this release has format {FORMAT}" in text
        finally:
            reader.do(speak, FORMAT)
        wait_until(lambda: reader.do(e.look_up, keys_of(0)) == 1)
        reader.do(e.loads_right, keys_of(0), [0])


def save_error(world: World, keys: list[bytes], blocks: list[int]) -> str:
    try:
        world.memory["client"].save(keys, world.caches["kv"], blocks)
    except CacheMismatch as error:
        return str(error)
    return ""


def bad_calls(world: World) -> list[str]:
    """Make bad calls of a client; return those that did not raise what they should."""
    client, cache, wrong = world.memory["client"], world.caches["kv"], []
    hit = client.lookup(keys_of(0))
    row = world.cm.allocate_cache(e.other_desc())
    calls: dict[str, tuple[type[Exception], Callable[[], object]]] = {
        "no list": (TypeError, lambda: client.lookup(b"key")),
        "no bytes": (TypeError, lambda: client.lookup(["key"])),
        "empty key": (ParamError, lambda: client.lookup([b""])),
        "long key": (ParamError, lambda: client.lookup([b"x" * 65])),
        "no hit": (TypeError, lambda: client.load(b"hit", cache, [0])),
        "no cache": (TypeError, lambda: client.load(hit, "kv", [0])),
        "more blocks": (ParamError, lambda: client.load(hit, cache, [0, 1])),
        "outside": (ParamError, lambda: client.load(hit, cache, [99], release=False)),
        "no blocks cache": (ParamError, lambda: client.load(hit, row, [0], release=False)),
        "fewer blocks": (ParamError, lambda: client.save(keys_of(1, 2), cache, [0])),
        "save outside": (ParamError, lambda: client.save(keys_of(1), cache, [99])),
        "save set": (TypeError, lambda: client.save(keys_of(1), cache, {1})),
        "save row": (ParamError, lambda: client.save(keys_of(1), row, [0])),
        "no release": (TypeError, lambda: client.release(None)),
        "address": (ParamError, lambda: StoreClient(world.dd, "nowhere", NS)),
        "namespace": (ParamError, lambda: StoreClient(world.dd, "127.0.0.1:1", b"short")),
        "options": (TypeError, lambda: StoreClient(world.dd, "127.0.0.1:1", NS, {"lookup_ms": 1})),  # type: ignore[arg-type]
    }
    for name, (kind, call) in calls.items():
        try:
            call()
        except kind:
            continue
        wrong.append(name)
    client.load(client.lookup(keys_of(0)), cache, range(0))
    assert client.save(keys_of(0), cache, (0,)) == 0  # the store has it
    client.load(client.lookup(keys_of(0)), cache, Tensor([0]))
    client.release(hit)
    client.close()
    with pytest.raises(StateError, match="closed"):
        client.lookup(keys_of(0))
    with pytest.raises(StateError, match="closed"):
        client.save(keys_of(0), cache, [0])
    world.cm.deallocate_cache(row)
    return wrong


def test_bad_input_is_refused_before_anything_happens() -> None:
    with family_of() as family:
        store = family.store()
        saver, other = family.engine(store), family.engine(store, e.named("other"))
        saver.do(e.save, keys_of(0), [0])
        assert saver.do(e.look_up, keys_of(0)) == 1
        other.do(e.take_hit, saver.do(e.hit_bytes))
        with pytest.raises(ParamError, match="another namespace"):
            other.do(e.load, [0])
        saver.do(e.release)
        before = store.do(e.index)
        assert saver.do(bad_calls) == []
        assert store.do(e.index) == before
        wait_until(lambda: e.idle(store))


@pytest.mark.parametrize(("arguments", "text"), [((1000,), "memory"), ((1 << 20, "nowhere"), "listen")])
def test_a_store_with_bad_arguments_does_not_start(arguments: tuple[object, ...], text: str) -> None:
    with pytest.raises(ParamError, match=text):
        StoreServer(*arguments)  # type: ignore[arg-type]
    with pytest.raises(ParamError, match="namespaces"):
        StoreServer(1 << 20, namespaces=0)
    for name in ("llm.EnableRemoteCacheAccessible", "llm.WriteByAddress"):
        with pytest.raises(ParamError, match=f"{name}=1, a store needs 0"):
            StoreServer(1 << 20, options={name: "1"})


def test_one_engine_may_save_from_several_caches() -> None:
    with family_of() as family:
        store = family.store()
        end = family.engine(store)
        end.do(e.save, keys_of(0), [0])
        end.do(make, "other", e.SPEC, 77)
        other = end.do(show, "other")
        end.do(save_other, keys_of(1))
        assert end.do(e.look_up, keys_of(0, 1)) == 2
        end.do(e.load, [4, 5])
        loaded = end.do(show, "kv")
        for tensor in range(e.TENSORS):
            assert (loaded[tensor][4] == e.content(NS, keys_of(0)[0], tensor)).all()
            assert (loaded[tensor][5] == other[tensor][2]).all()


def save_other(world: World, keys: list[bytes]) -> None:
    assert world.memory["client"].save(keys, world.caches["other"], [2]) == 1
