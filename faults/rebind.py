"""The rebind race: a key is bound to a new cache while a pull of the old one runs, again and again.

    python -m faults rebind --races 10000

The owner binds one key of each kind to one cache after the other; the other end pulls by these keys from several
threads all the while. Every word of a cache says of which binding it is, so that each pull knows what it got.

Every pull that succeeds must have brought the bytes of exactly one binding, one that was there while it ran; and a
binding may only have been consumed by a pull that brought its bytes. A pull counts as a race when the key left its
binding, for certain, after the pull had begun and before it ended, and the pull had found the key.
"""

import argparse
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, product
from typing import Any, Final

import numpy as np

from faults.harness import Outcome, Processes, Report, Threads, Words, differing, numbered, outcome_of, words_of
from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType
from llm_datadist._cache.registry import key_of
from llm_datadist._memory.pool import Allocation
from llm_datadist._memory.segment import AddressRange
from llm_datadist.bench.progress import steps
from tests.support.moves import wait_until
from tests.support.world import World

KINDS: Final = ("row", "blocks")
TENSORS: Final = 2
ROWS, STRIDE = 8, 64 << 10
ROW_KEY: Final = CacheKey(1, 7)
BLOCKS_KEY: Final = BlocksCacheKey(1, 3)
#: Every word is its binding's number times this, and its place.
_NUMBER: Final = 1 << 32
#: Of so many row bindings one is left until a pull has consumed it.
_PATIENT: Final = 4
#: The longest that any other binding stays, in seconds: about two pulls.
_STAYS: Final = 0.0005


@dataclass
class Binding:
    """One life of a key, as its owner knows it. Times are of ``time.monotonic_ns()``, one clock for all processes."""

    kind: str
    number: int  # what its bytes say
    gone: int = 0  # not bound any more from then on, for certain; 0 while it is
    leaving: int = 0  # bound until then, for certain, unless it was consumed
    consumed: bool = False  # a pull took it away, not the owner


@dataclass(frozen=True)
class Pull:
    kind: str
    began: int
    ended: int
    outcome: Outcome
    number: int = 0  # by its first word, whose bytes came; 0 where it failed
    wrong: int = 0  # bytes that are not that binding's


_COUNT: Final = ROWS * STRIDE // 8
_PLACES: Final = [numbered(tensor * _COUNT, _COUNT) for tensor in range(TENSORS)]
_BLOCKS: Final = CacheDesc(TENSORS, [ROWS, STRIDE], DataType.DT_UINT8)


def _held(tensor: int, number: int) -> Words:
    """Return what a tensor of that binding holds."""
    return _PLACES[tensor] + np.uint64(number * _NUMBER)


# --- the owner --------------------------------------------------------------------------------------------------------


class _Binder(Threads):
    """Binds keys anew until it is told to stop. One thread for each kind of key."""

    def __init__(self, world: World, seed: int) -> None:
        super().__init__()
        self.world = world
        self.bindings: list[Binding] = []
        self.start(self._rows, random.Random(seed))
        self.start(self._blocks, random.Random(seed))

    def _next(self, kind: str) -> Binding:
        binding = Binding(kind, next(self.world.memory["numbers"]))
        self.bindings.append(binding)
        return binding

    def _rows(self, chance: random.Random) -> None:
        """Allocated caches: the key goes by a pull or by its owner's hand, before or after the cache is given back."""
        cm, desc = self.world.cm, CacheDesc(TENSORS, [1, ROWS * STRIDE], DataType.DT_UINT8)
        while not self.stop.is_set():
            binding = self._next("row")
            self.world.memory["filling"] = binding.number
            cache = cm.allocate_cache(desc, [ROW_KEY])
            if binding.number % _PATIENT == 0:
                while self._bound() and not self.stop.is_set():
                    time.sleep(0)
            else:
                time.sleep(chance.random() * _STAYS)
            if deallocate_first := chance.random() < 0.5:
                cm.deallocate_cache(cache)
            binding.consumed = not self._bound()
            binding.leaving = time.monotonic_ns()
            cm.remove_cache_key(ROW_KEY)
            binding.gone = time.monotonic_ns()
            if not deallocate_first:
                cm.deallocate_cache(cache)

    def _bound(self) -> bool:
        return any(binding.key == key_of(ROW_KEY) for binding in self.world.probe.engine.store.registry.snapshot()[1])

    def _blocks(self, chance: random.Random) -> None:
        """Registered caches over two memories in turns: the newest binding wins, and the old memory is used again."""
        cm = self.world.cm
        old: tuple[Binding, int] | None = None
        for arena in cycle(self.world.memory["arenas"]):
            if self.stop.is_set():
                break
            binding = self._next("blocks")
            for tensor, words in enumerate(arena):
                words[:] = _held(tensor, binding.number)
            if old is not None:
                old[0].leaving = time.monotonic_ns()
            cache = cm.register_blocks_cache(_BLOCKS, [words.ctypes.data for words in arena], BLOCKS_KEY)
            if old is not None:
                old[0].gone = time.monotonic_ns()
                cm.unregister_cache(old[1])
            old = binding, cache.cache_id
            time.sleep(chance.random() * _STAYS)
        if old is not None:
            old[0].leaving = time.monotonic_ns()
            cm.unregister_cache(old[1])
            old[0].gone = time.monotonic_ns()


def prepare_owner(world: World, transport: str) -> None:
    """Make the memories that are registered in turns, and have the pool hand out memory that is filled already.

    Otherwise a key would be bound to a cache before anybody could have filled it.
    """
    world.memory["numbers"] = iter(range(1, 1 << 31))
    if transport == "shm":
        world.memory["arenas"] = [words_of(world.cm.allocate_blocks_cache(_BLOCKS)) for _ in range(2)]
    else:
        world.memory["arenas"] = [[np.zeros(_COUNT, np.uint64) for _ in range(TENSORS)] for _ in range(2)]
    (pool,) = world.probe.engine.store.pools
    really = pool.allocate_many

    def filled(count: int, nbytes: int) -> Allocation:
        allocation = really(count, nbytes)
        for tensor, address in enumerate(allocation.addresses):
            words = AddressRange(address, nbytes, writable=True).array().view(np.uint64)
            words[:] = _held(tensor, world.memory["filling"])
        return allocation

    pool.allocate_many = filled  # type: ignore[method-assign]
    world.memory["used"] = pool.statistics().used_bytes


def begin_binding(world: World, seed: int) -> None:
    world.memory["binder"] = _Binder(world, seed)


def end_binding(world: World) -> list[Binding]:
    """Stop; everything is given back, and nothing may be left. Return all bindings since the beginning."""
    binder: _Binder = world.memory.pop("binder")
    binder.join()

    def nothing_left() -> bool:
        statistics = world.dd.statistics()
        (pool,) = statistics.pools
        return statistics.pins == 0 and not statistics.keys and pool.used_bytes == world.memory["used"]

    wait_until(nothing_left)
    world.dd.check_integrity()
    return binder.bindings


# --- the other end ----------------------------------------------------------------------------------------------------


def pull_many(world: World, count: int, threads: int) -> list[Pull]:
    """Pull by both keys from ``threads`` threads each, until about ``count`` pulls were made."""
    pulls: list[Pull] = []
    runners = Threads()
    for kind, thread in product(KINDS, range(threads)):
        runners.start(_pull, world, kind, f"{kind} {thread}", -(-count // (threads * len(KINDS))), pulls)
    runners.join()
    return pulls


def _pull(world: World, kind: str, name: str, count: int, pulls: list[Pull]) -> None:
    if name not in world.caches:
        world.caches[name] = world.cm.allocate_blocks_cache(_BLOCKS)
    mine, blocks = world.caches[name], list(range(ROWS))
    source: tuple[Any, ...] = (ROW_KEY, mine, []) if kind == "row" else (BLOCKS_KEY, mine, blocks)
    for _ in range(count):
        began = time.monotonic_ns()
        outcome = outcome_of(world.cm.pull_blocks, *source, blocks)
        pull = Pull(kind, began, time.monotonic_ns(), outcome)
        if outcome.good:
            found = words_of(mine)
            number = int(found[0][0]) // _NUMBER
            pull = replace(
                pull, number=number, wrong=differing(found, (_held(each, number) for each in range(TENSORS)))
            )
        pulls.append(pull)


# --- the race ---------------------------------------------------------------------------------------------------------

TRANSPORTS: Final = ("inproc", "shm", "tcp")
THREADS: Final = 2
#: Pulls between two looks at what came of them.
BATCH: Final = 1000
#: A pull that was no race is made again, but not for ever.
TRIES: Final = 50
_POOL_BYTES: Final = 16 << 20


@dataclass
class Race(Report):
    pulls: int = 0
    races: int = 0
    torn: int = 0
    bindings: int = 0
    consumed: int = 0

    @property
    def good(self) -> bool:
        return super().good and self.races >= self.asked

    def add(self, bindings: list[Binding], pulls: list[Pull]) -> None:
        self.bindings += len(bindings)
        self.pulls += len(pulls)
        self.consumed += sum(binding.consumed for binding in bindings)
        self.wrong_bytes += sum(pull.wrong for pull in pulls)
        self.outcomes.update(f"{pull.kind} {pull.outcome.name}" for pull in pulls)
        left = list(races(bindings, pulls))
        self.races += sum(number > 0 for number in left)
        # It had the old one in its hands: it failed for that, or brought it and ended just in time.
        self.torn += sum(
            number > 0 and (pull.outcome.name == "TransferFailed" or pull.number == number)
            for number, pull in zip(left, pulls, strict=True)
        )
        self.faults += judged(bindings, pulls)

    def line(self) -> str:
        numbers = (self.asked, self.pulls, self.races, self.torn, self.bindings, self.consumed, self.wrong_bytes)
        cells = "".join(f"{number:>10}" for number in (*numbers, len(self.faults)))
        return f"{self.name:<7}{cells}{self.seconds:>8.0f}  {super().line()}"


HEAD: Final = (
    "            asked     pulls     races    of old  bindings  consumed     wrong    faults       s  outcomes of pulls"
)


def races(bindings: Iterable[Binding], pulls: Iterable[Pull]) -> Iterator[int]:
    """Yield for every pull which binding its key left while it ran, if it had found the key; else 0."""
    changes = {kind: sorted((b.leaving, b.gone, b.number) for b in bindings if b.kind == kind) for kind in KINDS}
    for pull in pulls:
        of_kind = changes[pull.kind]
        at = bisect_right(of_kind, (pull.began,))
        found = pull.outcome.name in ("success", "TransferFailed")
        yield of_kind[at][2] if found and at < len(of_kind) and of_kind[at][1] < pull.ended else 0


def judged(bindings: Sequence[Binding], pulls: Sequence[Pull]) -> Iterator[str]:
    of_number = {binding.number: binding for binding in bindings}
    brought = {pull.number for pull in pulls if pull.outcome.good}
    for pull in pulls:
        if not pull.outcome.typed:
            yield f"a pull ended with {pull.outcome}, which is no error of the library"
        if not pull.outcome.good:
            continue
        binding = of_number.get(pull.number)
        if pull.wrong:
            yield f"a pull brought {pull.wrong} bytes beside those of binding {pull.number}"
        if binding is None or binding.kind != pull.kind:
            yield f"a pull of a {pull.kind} brought bytes of {pull.number}, which is no such binding of its time"
        elif pull.began > binding.gone:
            yield f"a pull brought the bytes of binding {pull.number}, which had gone before it began"
    for binding in bindings:
        if binding.consumed and binding.number not in brought:
            yield f"binding {binding.number} was consumed, and no pull brought its bytes"


def run(transport: str, asked: int, seed: int = 1, seen: Callable[[Race], bool] = lambda race: True) -> Race:
    """Run until there were ``asked`` races and ``seen`` says so, at most ``TRIES`` times as many pulls."""
    race = Race(transport, asked)
    with Processes(transport, _POOL_BYTES) as processes:
        owner = processes.owner()
        puller = processes.reader(owner)
        owner.do(prepare_owner, transport)
        while (race.races < asked or not seen(race)) and race.pulls < asked * TRIES:
            owner.do(begin_binding, seed + race.pulls)
            pulls = puller.do(pull_many, min(BATCH, asked), THREADS)
            race.add(owner.do(end_binding), pulls)
    return race


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    return (run(each, options.races, options.seed).told() for each in steps(options.transport))


OPTIONS: Final = {"races": (10_000, "over each transport"), "seed": (1, ""), "transport": (TRANSPORTS, "")}
