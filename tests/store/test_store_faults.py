"""What a store and its clients survive: kill -9, SIGSTOP, restarts, liars, interrupts, at gates of its pulls."""

import os
import signal
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMDataDist, TransferConfig
from llm_datadist.errors import GrantEnded, LLMException, StateError
from llm_datadist.store import messages
from llm_datadist.store.messages import Lookup, Save
from tests.store import engines as e
from tests.store.engines import NS, StoreFamily, family_of, keys_of
from tests.support.ends import freeze, frozen
from tests.support.kinds import ChildEnd, World
from tests.support.layers import Always
from tests.support.linking import free_port
from tests.support.moves import make, show, wait_until
from tests.unit.holder import in_a_forked_child

pytestmark = pytest.mark.covers("store.*")

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "tcp"])
STEPS: Final = ("before copy", "after copy")


def saved_later(family: StoreFamily, store: ChildEnd, keys: list[bytes]) -> None:
    """Another engine saves and loads these keys: the store goes on."""
    end = family.engine(store)
    assert end.do(e.save, keys, range(len(keys))) == len(keys)
    assert end.do(e.hits, keys) == len(keys)


@TRANSPORTS
@pytest.mark.parametrize("step", STEPS)
def test_a_saver_killed_during_the_pull_costs_its_own_keys_only(transport: str, step: str, tmp_path: Path) -> None:
    """What was granted until its death may be published: then it is right."""
    with family_of(transport) as family:
        store = family.store()
        saver, reader = family.engine(store), family.engine(store)
        keys = keys_of(*range(4))
        with e.pull_stopped(store, saver, tmp_path, step) as gate:
            saver.begin(e.save, keys, range(4))
            gate.wait()
            assert reader.do(e.look_up, keys) == 0, "nothing is found before its last byte"
            family.kill(saver)
        wait_until(lambda: e.idle(store))
        assert reader.do(e.hits, keys) in (0, 4)
        saved_later(family, store, keys_of(10, 11))
        reader.do(e.save, keys, range(4))
        assert reader.do(e.hits, keys) == 4


@TRANSPORTS
@pytest.mark.parametrize("step", STEPS)
def test_a_revoke_during_the_pull_publishes_nothing(transport: str, step: str, tmp_path: Path) -> None:
    """Ctrl-C in a save: when it has ended, the blocks may be written, and the store does not have them."""
    with family_of(transport) as family:
        store = family.store()
        saver = family.engine(store)
        keys = keys_of(*range(3))
        saver.do(e.put, keys, range(3))
        with e.pull_stopped(store, saver, tmp_path, step) as gate:
            saver.begin(interrupted_save, keys)
            gate.wait()
            saver.signal(signal.SIGUSR1)
            assert saver.finish() == "interrupted"
            assert saver.do(active_grants) == 0
            saver.do(e.put, keys_of(7, 8, 9), range(3))  # the next request
        wait_until(lambda: e.idle(store))
        # The guard was compared after the last byte: the store has what was granted.
        told = step == "after copy"
        assert store.do(e.index) == {NS: keys if told else []}
        assert store.do(e.statistics).namespaces[0].failed == (not told)
        assert saver.do(e.save, keys, range(3)) == (0 if told else 3)
        assert saver.do(e.hits, keys) == 3


class Interrupted(Exception):
    pass


def interrupted_save(world: World, keys: list[bytes]) -> str:
    def handler(*_: object) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        world.memory["client"].save(keys, world.caches["kv"], [0, 1, 2])
    except Interrupted:
        return "interrupted"
    finally:
        signal.signal(signal.SIGUSR1, before)
    return "saved"


def active_grants(world: World) -> int:
    return world.dd.statistics().grants.active


def test_a_stopped_reader_keeps_its_slots_and_holds_up_nobody() -> None:
    with family_of() as family:
        store = family.store(1)
        saver, reader = family.engine(store), family.engine(store)
        keys = keys_of(*range(8))
        saver.do(e.save, keys, range(8))
        assert reader.do(e.look_up, keys) == 8
        with frozen(reader):
            for first in (20, 30, 40):
                assert saver.do(e.save, keys_of(*range(first, first + 8)), range(8)) == 8
            assert saver.do(e.hits, keys) == 8
        reader.do(e.loads_right, keys, range(8))


@TRANSPORTS
def test_stopped_savers_hold_up_no_other_save(transport: str, tmp_path: Path) -> None:
    with family_of(transport) as family:
        store = family.store()
        stopped = [family.engine(store) for _ in range(2)]
        other = family.engine(store)
        for number, end in enumerate(stopped):
            folder = tmp_path / str(number)
            folder.mkdir()
            with e.pull_stopped(store, end, folder) as gate:
                end.begin(e.save, keys_of(number), [0])
                gate.wait()
                freeze(end)
        assert other.do(e.save, keys_of(10, 11), [0, 1]) == 2
        assert other.do(e.hits, keys_of(10, 11)) == 2
        for end in stopped:
            end.signal(signal.SIGCONT)
            end.finish()
        for number in range(2):
            other.do(e.save, keys_of(number), [0])
            assert other.do(e.hits, keys_of(number)) == 1


def test_while_the_store_is_stopped_lookups_are_misses_and_afterwards_hits() -> None:
    with family_of() as family:
        store = family.store()
        end = family.engine(store, lookup_ms=5)
        keys = keys_of(0, 1)
        end.do(e.save, keys, [0, 1])
        with frozen(store):
            assert [end.do(e.look_up, keys) for _ in range(5)] == [0] * 5
            assert end.do(e.save, keys_of(5), [0]) == 0
        wait_until(lambda: end.do(e.hits, keys) == 2)
        wait_until(lambda: e.idle(store))


def test_a_killed_store_is_a_miss_and_one_that_is_started_again_is_found() -> None:
    port = free_port()
    with family_of() as family:
        store = family.store(port=port)
        end = family.engine(store)
        keys = keys_of(0, 1)
        end.do(e.save, keys, [0, 1])
        assert end.do(e.look_up, keys) == 2
        family.kill(store)
        assert end.do(e.look_up, keys, "miss") == 0
        assert end.do(e.save, keys_of(7), [0]) == 0
        with pytest.raises(LLMException):
            end.do(e.load, [3, 4], "hit", "client", False)
        again = family.store(port=port)
        assert end.do(connected)
        assert end.do(e.look_up, keys, "miss") == 0
        with pytest.raises(GrantEnded, match="of an earlier process of the store at"):
            end.do(e.load, [3, 4])
        assert end.do(e.save, keys, [0, 1]) == 2
        assert end.do(e.hits, keys) == 2
        wait_until(lambda: e.idle(again))


def connected(world: World) -> bool:
    wait_until(lambda: world.memory["client"].connect(20) and _linked(world))
    return True


def _linked(world: World) -> bool:
    return any(link.state == "ready" for link in world.dd.statistics().links)


def test_a_forked_child_has_nothing_of_its_parents_client() -> None:
    with family_of() as family:
        store = family.store()
        end = family.engine(store)
        keys = keys_of(0, 1)
        end.do(e.save, keys, [0, 1])
        assert end.do(e.look_up, keys) == 2
        end.do(use_in_a_fork, keys_of(0, 7))
        assert not e.idle(store), "the child has released the hit"
        end.do(e.load, [3, 4])
        assert end.do(e.look_up, keys_of(7), "miss") == 0
        assert end.do(e.hits, keys) == 2


def use_in_a_fork(world: World, keys: list[bytes]) -> None:
    client, cache, hit = world.memory["client"], world.caches["kv"], world.memory["hit"]

    def refused() -> None:
        with pytest.raises(StateError):
            client.lookup(keys)
        with pytest.raises(StateError):
            client.save(keys, cache, [0, 1])
        with pytest.raises(StateError):
            client.load(hit, cache, [5, 6], release=False)
        with pytest.raises(StateError):
            client.release(hit)
        with pytest.raises(StateError):
            client.close()

    in_a_forked_child(refused)


def test_a_liar_that_changes_what_it_lends_spoils_its_own_keys_only() -> None:
    """The digest is of the store's copy: readers agree on what they get, whatever it is."""
    with family_of() as family:
        store = family.store()
        liar, honest = family.engine(store), family.engine(store)
        readers = [family.engine(store) for _ in range(2)]
        good, bad = keys_of(0, 1), keys_of(50, 51, 52)
        honest.do(e.save, good, [0, 1])
        liar.do(e.scribble, [0, 1, 2])
        try:
            for _ in range(5):
                liar.do(e.save_as_is, bad)
            assert liar.do(e.save_as_is, good) == 0, "who comes first has the key"
        finally:
            liar.do(e.stop_scribbling)
        got = []
        for reader in readers:
            assert reader.do(e.hits, good) == 2
            assert reader.do(e.look_up, bad) == 3
            reader.do(e.load, [4, 5, 6])  # the digests fit
            got.append([view[4:7] for view in reader.do(show, "kv")])
        for one, other in zip(*got, strict=True):
            np.testing.assert_array_equal(one, other)


def raw_questions(world: World, rounds: int) -> int:
    """Ask what no sound client asks; return the number of answers that were no refusal."""
    dd: LLMDataDist = world.dd
    grant = world.caches["kv"].grant([0, 1], None, peer=1)
    shape, generation = world.memory["client"].lookup(keys_of(0)).shape, e.generation(world)
    rng = np.random.default_rng(3)
    good = [
        (messages.SAVE, Save([NS], 0, generation, shape, keys_of(60, 61), [0, 1], grant.to_bytes()).encode()),
        (messages.LOOKUP, Lookup([NS], keys_of(0), [os.urandom(16)]).encode()),
    ]
    odd = [
        (
            messages.SAVE,
            Save([NS], 0, generation, shape, keys_of(62, 63), [0, 5], grant.to_bytes()).encode(),
        ),  # 5 is not granted
        (messages.SAVE, Save([NS], 0, generation, shape, keys_of(62), [0, 1], grant.to_bytes()).encode()),
        (messages.SAVE, Save([NS], 0, generation, shape, keys_of(62), [0], b"no grant").encode()),
        (messages.SUSPECT, messages.Suspect(NS, [2**40, 0, 0, 1]).encode()),
        (messages.SUSPECT, messages.Suspect(b"x" * 32, [0]).encode()),
        (messages.EVENTS, messages.EventsAfter(NS, b"", 2**63 - 1).encode()),
    ]
    answered = 0
    for _ in range(rounds):
        for name, body in [*good, *odd]:
            cut = bytearray(body)
            cut[int(rng.integers(len(cut)))] ^= 1 << int(rng.integers(8))
            for data in (body, bytes(cut), body[: int(rng.integers(len(body) + 1))]):
                try:
                    dd.ask(1, name, data, 5000)
                    answered += 1
                except LLMException:
                    continue
    grant.revoke()
    return answered


def test_questions_of_a_hostile_client_cost_nobody_else() -> None:
    with family_of() as family:
        store = family.store(4)
        hostile, honest = family.engine(store), family.engine(store)
        assert honest.do(e.save, keys_of(0, 1), [0, 1]) == 2
        assert hostile.do(raw_questions, 10) > 0
        assert honest.do(e.hits, keys_of(0, 1)) == 2
        assert store.do(e.statistics).namespaces
        hostile.do(e.leave)
        wait_until(lambda: e.idle(store))
        found = {name: set(keys) for name, keys in store.do(e.index).items()}
        assert {n: k for n, k in e.replayed(store.do(e.all_events)).items() if k} == {
            n: k for n, k in found.items() if k
        }


def test_a_second_engine_of_the_same_cluster_id_is_kept_out_and_follows_a_dead_one() -> None:
    with family_of() as family:
        store = family.store()
        first = family.engine(store)
        keys = keys_of(0, 1)
        assert first.do(e.save, keys, [0, 1]) == 2
        assert first.do(e.look_up, keys) == 2
        second = family.child("second")
        second.start("MIX", first.cluster_id)
        second.do(make, "kv", e.SPEC, 5)
        assert not second.do(e.begin_client, store.port, NS)
        assert second.do(e.look_up, keys) == second.do(e.save, keys_of(9), [0]) == 0
        first.do(e.loads_right, keys, [4, 5])
        assert first.do(e.look_up, keys) == 2
        family.kill(first)
        wait_until(lambda: e.idle(store))
        assert second.do(connected)
        assert second.do(e.hits, keys) == 2
        assert second.do(e.save, keys_of(9), [0]) == 1


def slots_address(world: World) -> list[int]:
    return list(world.memory["server"]._spaces["", NS].cache.tensor_addrs)  # noqa: SLF001 (what a hostile client guesses)


def write_there(world: World, addresses: list[int]) -> list[str]:
    """Try every call that writes at a peer; return the errors."""
    world.memory["client"].lookup(keys_of(0))
    pushed = world.cm.transfer_cache_async(
        world.caches["kv"], Always(), [TransferConfig(1, addresses, range(2))], [0], [0]
    )
    errors = [str(pushed.synchronize(20_000))]
    for key in (BlocksCacheKey(1, 0), CacheKeyByIdAndIndex(1, 1, 0)):
        try:
            world.cm.push_blocks(key, world.caches["kv"], [0], [0])
        except LLMException as error:
            errors.append(type(error).__name__)
    return errors


@TRANSPORTS
def test_no_client_writes_a_slot_by_its_address_or_by_a_push(transport: str) -> None:
    with family_of(transport) as family:
        store = family.store()
        saver, hostile = family.engine(store), family.engine(store)
        keys = keys_of(*range(8))
        saver.do(e.save, keys, range(8))
        errors = hostile.do(write_there, store.do(slots_address))
        assert errors == ["LLMStatusCode.LLM_FEATURE_NOT_ENABLED", "ParamError", "ParamError"]
        assert saver.do(e.hits, keys) == 8
