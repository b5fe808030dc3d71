"""Wrong KV: a hit is exactly the bytes that were saved under that key and that complete identity, or it is a miss.

Each cause is one way in which stores of KV blocks are known to give wrong bytes without an error. Our store must give
the right ones or miss. The control is a store without digests: the judge sees its flipped bit.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Final

import pytest

from tests.conformance.our_store import HarmedStore, Identity, Shape, StoreEngine
from tests.support.kv import key_of

IDENTITY: Final = Identity()


def keys(count: int, space: str = "prompt") -> list[bytes]:
    return [key_of(space, number) for number in range(count)]


@dataclass(frozen=True)
class Verdict:
    """``hits``: keys that a store claims to have given. ``wrong``: bytes of theirs that are not right."""

    hits: int
    wrong: int


MISS: Final = Verdict(0, 0)


def judged(engine: StoreEngine, wanted: Sequence[bytes], blocks: Sequence[int], loaded: bool) -> Verdict:
    return Verdict(len(wanted), engine.wrong(wanted, blocks)) if loaded and wanted else MISS


def fetched(engine: StoreEngine, wanted: Sequence[bytes]) -> Verdict:
    """Look keys up and load what is found, into blocks in falling order."""
    found = engine.find(wanted)
    blocks = range(found, 0, -1)
    return judged(engine, wanted[:found], blocks, bool(found) and engine.load(blocks))


def saved(engine: StoreEngine, wanted: Sequence[bytes], first: int = 0) -> None:
    blocks = range(first, first + len(wanted))
    engine.compute(wanted, blocks)
    engine.save(wanted, blocks)


def crowded_out(store: HarmedStore, engine: StoreEngine, space: str = "others") -> None:
    """Save as many other keys as the store holds, twice."""
    for number in range(2):
        saved(engine, keys(store.capacity, f"{space} {number}"))


# --- causes -----------------------------------------------------------------------------------------------------------
# Each returns what a reader was given. The comment says what is right.


def _another_identity(field: str) -> Callable[[HarmedStore], Verdict]:
    def cause(store: HarmedStore) -> Verdict:
        """An engine that differs in one point computes other bytes for the same tokens, or other tokens of a key."""
        saved(store.engine(IDENTITY), keys(2))
        return fetched(store.engine(IDENTITY.other(field)), keys(2))

    return cause


def other_groups(store: HarmedStore) -> Verdict:
    """A group of layers has another shape, but the same keys."""
    saved(store.engine(IDENTITY), keys(2))
    windowed = store.engine(IDENTITY, Shape(tensors=3, nbytes=4096))
    return fetched(windowed, keys(2))


def other_groups_saved(store: HarmedStore) -> Verdict:
    """As before, and both groups save."""
    full, windowed = store.engine(IDENTITY), store.engine(IDENTITY, Shape(tensors=3, nbytes=4096))
    saved(full, keys(2))
    saved(windowed, keys(2))
    return fetched(full, keys(2))


def source_reused_during_a_save(store: HarmedStore) -> Verdict:
    """The engine preempts the request while its blocks are being saved."""
    engine = store.engine(IDENTITY)
    engine.compute(keys(1), [3])
    store.during_save(engine, keys(1), [3], engine.reuse)
    return fetched(store.engine(IDENTITY), keys(1))


def blocks_reused_after_a_save_was_given_up(store: HarmedStore) -> Verdict:
    """The engine waits no longer for a slow save, and computes something else in the blocks."""
    engine = store.engine(IDENTITY)
    engine.compute(keys(1), [3])

    def impatient() -> None:
        engine.give_up()
        engine.compute(keys(1, "others"), [3])

    store.during_save(engine, keys(1), [3], impatient)
    return fetched(store.engine(IDENTITY), keys(1))


def found_during_a_save(store: HarmedStore) -> Verdict:
    """A reader asks before the last byte has come."""
    engine, reader, verdicts = store.engine(IDENTITY), store.engine(IDENTITY), []
    engine.compute(keys(1), [3])
    store.during_save(engine, keys(1), [3], lambda: verdicts.append(fetched(reader, keys(1))))
    return verdicts[0]


def saver_killed_during_a_save(store: HarmedStore) -> Verdict:
    """A torn write: a part of the bytes has come, and no more will. Another engine takes the dead one's name."""
    engine = store.engine(IDENTITY, name="first")
    engine.compute(keys(1), [3])

    def replaced() -> None:
        engine.end.kill()
        saved(store.engine(IDENTITY, name="first"), keys(1, "of the next"), first=3)

    store.during_save(engine, keys(1), [3], replaced)
    return fetched(store.engine(IDENTITY), keys(1))


def failed_in_the_middle_of_a_run(store: HarmedStore) -> Verdict:
    """The third of four blocks was never saved."""
    engine = store.engine(IDENTITY)
    one, two, _, four = keys(4)
    saved(engine, [one, two, four])
    return fetched(store.engine(IDENTITY), keys(4))


def slots_reused_between_lookup_and_load(store: HarmedStore) -> Verdict:
    """The store evicts what a reader has looked up."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    found = reader.find(keys(4))
    crowded_out(store, saver)
    return judged(reader, keys(found), range(found), reader.load(range(found)))


def slots_reused_during_a_load(store: HarmedStore) -> Verdict:
    """The store evicts what a reader is copying."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    found = reader.find(keys(4))
    loaded = store.during_load(reader, range(found), lambda: crowded_out(store, saver))
    return judged(reader, keys(found), range(found), loaded)


def permission_ended_during_a_load(store: HarmedStore) -> Verdict:
    """The reader is stopped for so long that the store gives it up and uses the slots again. Then it goes on."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    found = reader.find(keys(4))

    def given_up() -> None:
        store.outlive(reader)
        crowded_out(store, saver)

    return judged(reader, keys(found), range(found), store.during_load(reader, range(found), given_up))


def loaded_after_the_release(store: HarmedStore) -> Verdict:
    """A reader uses a hit once more that it has given back."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    found = reader.find(keys(4))
    reader.release()
    crowded_out(store, saver)
    return judged(reader, keys(found), range(found), reader.load(range(found)))


def store_restarted_between_lookup_and_load(store: HarmedStore) -> Verdict:
    """The new store has other blocks in the same slots."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    found = reader.find(keys(4))
    store.restart()
    crowded_out(store, store.engine(IDENTITY))
    return judged(reader, keys(found), range(found), reader.load(range(found)))


def flipped_bit(store: HarmedStore) -> Verdict:
    """Memory is not perfect."""
    saver, reader = store.engine(IDENTITY), store.engine(IDENTITY)
    saved(saver, keys(4))
    store.flip(saver.expected(keys(4))[2])
    return fetched(reader, keys(4))


#: Cause -> hits of our store.
CAUSES: Final[dict[Callable[[HarmedStore], Verdict], int]] = {
    other_groups: 0,
    other_groups_saved: 2,
    source_reused_during_a_save: 0,
    blocks_reused_after_a_save_was_given_up: 0,
    found_during_a_save: 0,
    saver_killed_during_a_save: 0,
    failed_in_the_middle_of_a_run: 2,
    slots_reused_between_lookup_and_load: 4,
    slots_reused_during_a_load: 4,
    permission_ended_during_a_load: 0,
    loaded_after_the_release: 0,
    store_restarted_between_lookup_and_load: 0,
    flipped_bit: 0,
}
EVERY: Final = {cause.__name__: (cause, hits) for cause, hits in CAUSES.items()} | {
    f"another {field.name}": (_another_identity(field.name), 0) for field in fields(Identity)
}


@pytest.fixture(params=["shm", "tcp"])
def ours(request: pytest.FixtureRequest) -> Iterator[HarmedStore]:
    store = HarmedStore(request.param)
    yield store
    store.close()


@pytest.fixture
def unverified() -> Iterator[HarmedStore]:
    store = HarmedStore("shm", verify=False)
    yield store
    store.close()


def judge(cause: str, store: HarmedStore) -> None:
    what, hits = EVERY[cause]
    assert what(store) == Verdict(hits, 0)


@pytest.mark.parametrize("cause", [cause.__name__ for cause in CAUSES])
def test_our_store_gives_the_saved_bytes_or_misses(cause: str, ours: HarmedStore) -> None:
    judge(cause, ours)


@pytest.mark.parametrize("cause", sorted(EVERY.keys() - {flipped_bit.__name__}))
def test_our_store_needs_no_digests_for_that(cause: str, unverified: HarmedStore) -> None:
    judge(cause, unverified)


def test_without_digests_a_flipped_bit_is_a_wrong_byte(unverified: HarmedStore) -> None:
    assert flipped_bit(unverified) == Verdict(4, 1)


def test_our_store_hits_where_there_is_no_cause(ours: HarmedStore) -> None:
    saved(ours.engine(IDENTITY), keys(4))
    assert fetched(ours.engine(IDENTITY), keys(6)) == Verdict(4, 0)
