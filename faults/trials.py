"""Trials: an end is stopped inside a copy (SIGSTOP) while the owner of the memory takes it back and uses it again.

    python -m faults trials --trials 1000

A reader that goes on later must fail or have every byte right; a writer that goes on must not have written, nor write,
a byte into the memory in its new use. Only trials count whose end was found stopped after the first byte of its copy
and before the last: by a look at every byte of the destination while nothing moved. What was stopped earlier or later
is judged too, and done again.

Two processes, the owner and the other end, beside this one, which signals and looks. Every 64-bit word of a cache says
whose it is: a version, the tensor, its place. So each byte that moved, and each that should not have, is known by
looking at it.
"""

import argparse
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any, Final

import numpy as np

from faults.harness import Outcome, Processes, Report, Words, differing, numbered, outcome_of, words_of
from faults.midcopy import peek, stop_inside_copy
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, DataType
from llm_datadist.errors import DeadlineExceeded, OutOfMemory
from llm_datadist.tools.bench.progress import steps
from tests.support.ends import ChildEnd
from tests.support.linking import links
from tests.support.moves import wait_until
from tests.support.world import World

TENSORS: Final = 4
BLOCK: Final = 64 << 10
KEY: Final = BlocksCacheKey(1, 0)
ROW: Final = CacheKey(1, 7)
#: Versions of one trial, by what their words are.
VERSIONS: Final = 4
SOURCE, REUSED, UNTOUCHED, WRITTEN = range(VERSIONS)
ANYTHING: Final = -1
_VERSION_BIT, _TENSOR_BIT = 40, 32


@dataclass(frozen=True)
class Shape:
    """How much moves: ``moved`` blocks of each tensor, between one block before and one behind that stay."""

    mib: int

    @property
    def moved(self) -> int:
        return (self.mib << 20) // (TENSORS * BLOCK)

    @property
    def blocks(self) -> list[int]:
        return list(range(1, 1 + self.moved))

    @property
    def nbytes(self) -> int:
        return TENSORS * (self.moved + 2) * BLOCK

    @property
    def desc(self) -> CacheDesc:
        return CacheDesc(TENSORS, [self.moved + 2, BLOCK], DataType.DT_UINT8)


@dataclass(frozen=True)
class Taken:
    """What came of the owner's taking its memory back while the other end was stopped."""

    reused: bool  # it has the very memory again, and has filled it
    refused: str = ""  # the class of the error, or "" where it got other memory
    named: bool = False  # that error named the process that stands in the way
    quarantined: int = 0  # bytes that were kept from it
    incomplete: bool = True  # when it had taken its memory back, not everything had been written there


@dataclass(frozen=True)
class Ended:
    """What the call at the other end came to, and how many bytes there are not what they should be, by that."""

    outcome: Outcome
    wrong: int = 0


# --- contents ---------------------------------------------------------------------------------------------------------


def word(number: int, kind: int, tensor: int, index: int = 0) -> int:
    return (number * VERSIONS + kind) << _VERSION_BIT | tensor << _TENSOR_BIT | index


def _fill(tensors: list[Words], number: int, kind: int) -> None:
    for tensor, words in enumerate(tensors):
        words[:] = numbered(word(number, kind, tensor), words.size)


def _wrong(tensors: list[Words], number: int, kind: int, within: int | None = None) -> int:
    """Return how many bytes are not of a kind; those of the addressed blocks are of kind ``within``, or ANYTHING."""
    inside = slice(BLOCK // 8, -BLOCK // 8)
    expected = [numbered(word(number, kind, tensor), words.size) for tensor, words in enumerate(tensors)]
    if within is not None:
        for tensor, words in enumerate(expected):
            other = tensors[tensor] if within == ANYTHING else numbered(word(number, within, tensor), words.size)
            words[inside] = other[inside]
    return differing(tensors, expected)


# --- the other end ----------------------------------------------------------------------------------------------------


def give_way(world: World) -> None:
    """Take a processor only where nobody else wants it: whoever is to stop us sees us begin before we have ended."""
    os.nice(10)


def poison(world: World, shape: Shape, number: int, kind: int) -> list[int]:
    if "mine" not in world.caches:
        world.caches["mine"] = world.cm.allocate_blocks_cache(shape.desc)
    _fill(words_of(world.caches["mine"]), number, kind)
    return list(world.caches["mine"].tensor_addrs)


def move(world: World, shape: Shape, number: int, way: str, reading: bool) -> Ended:
    """Pull the owner's blocks, and judge every byte that is here then; or push to the owner, who judges."""
    mine, blocks = world.caches["mine"], shape.blocks
    if not reading:
        return Ended(outcome_of(world.cm.push_blocks, KEY, mine, blocks, blocks))
    source: tuple[Any, ...] = (ROW, mine, []) if way == "remove" else (KEY, mine, blocks)
    outcome = outcome_of(world.cm.pull_blocks, *source, blocks)
    return Ended(outcome, _wrong(words_of(mine), number, UNTOUCHED, SOURCE if outcome.good else ANYTHING))


# --- the owner --------------------------------------------------------------------------------------------------------

READER_WAYS: Final = ("deallocate", "unregister", "rebind", "remove", "keep")
WRITER_WAYS: Final = ("deallocate", "full", "unregister", "rebind")


def arena(world: World, shape: Shape, inside: bool) -> None:
    """Make the memory of the user that trials register: of this process's own, or inside the pool."""
    for name in ("arena", "second arena"):
        if inside:
            world.caches[name] = world.cm.allocate_blocks_cache(shape.desc)
            world.memory[name] = words_of(world.caches[name])
        else:
            world.memory[name] = [np.zeros((shape.moved + 2) * BLOCK // 8, np.uint64) for _ in range(TENSORS)]
    world.memory["used"] = _used(world)


def _register(world: World, shape: Shape, name: str) -> Cache:
    addresses = [words.ctypes.data for words in world.memory[name]]
    return world.cm.register_blocks_cache(shape.desc, addresses, KEY)


def offer(world: World, shape: Shape, number: int, way: str, kind: int) -> list[int]:
    """Make the cache of a trial, filled; return the addresses of its tensors' first addressed bytes."""
    edge = BLOCK
    if way == "remove":
        # One row with a key: the addressed bytes are all of it.
        desc = CacheDesc(TENSORS, [1, shape.moved * BLOCK], DataType.DT_UINT8)
        theirs, edge = world.cm.allocate_cache(desc, [ROW]), 0
    elif way in ("unregister", "rebind"):
        theirs = _register(world, shape, "arena")
    else:
        theirs = world.cm.allocate_blocks_cache(shape.desc, KEY)
    world.caches["theirs"] = theirs
    _fill(words_of(theirs), number, kind)
    if way == "remove":
        # What arrives lies one block further in at the other end, and is counted from there.
        for words in words_of(theirs):
            np.add(words, np.uint64(BLOCK // 8), out=words)
    if way == "full":  # takes all that is left of the pool as well
        (pool,) = world.dd.statistics().pools
        rest = CacheDesc(1, [int(pool.free_bytes) // BLOCK, BLOCK], DataType.DT_UINT8)
        world.caches["rest"] = world.cm.allocate_blocks_cache(rest)
    return [address + edge for address in theirs.tensor_addrs]


def take_back(world: World, shape: Shape, number: int, way: str, pid: int, reading: bool) -> Taken:
    """Take the memory back and use it again, as far as the library lets us, while the other end is stopped."""
    if way == "keep":
        return Taken(reused=False)
    cm, theirs, kept = world.cm, world.caches["theirs"], 0
    before, at = list(theirs.tensor_addrs), words_of(theirs)
    version, step = word(number, WRITTEN, 0) >> _VERSION_BIT, BLOCK // 8

    def incomplete() -> bool:
        """Return True when what a writer writes is not all there: by the last words of its blocks."""
        lasts = (words[2 * step - 1 : -step : step] >> _VERSION_BIT for words in at)
        return reading or any((last != version).any() for last in lasts)

    try:
        match way:
            case "rebind":
                # A writer who was promised the old memory must not write the new one. The old one is registered still,
                # without a key: a reader's is put to another use by its user, a writer's cannot.
                world.caches["rebound"] = _register(world, shape, "second arena")
                missing = incomplete()
                _fill(world.memory["second arena"], number, REUSED)
                if reading:
                    _fill(world.memory["arena"], number, REUSED)
                return Taken(reading, incomplete=missing)
            case "unregister":  # only where that is done is the memory the user's again
                cm.unregister_cache(theirs.cache_id)
                del world.caches["theirs"]
                missing = incomplete()
                _fill(world.memory["arena"], number, REUSED)
                return Taken(True, incomplete=missing)
            case "remove":  # its reader's pin keeps the memory, so that we get another
                cm.remove_cache_key(ROW)
                cm.deallocate_cache(theirs)
            case _:
                cm.deallocate_blocks_cache(theirs)
        missing, kept = incomplete(), world.dd.statistics().quarantined_bytes
        again = (cm.allocate_cache if way == "remove" else cm.allocate_blocks_cache)(theirs.cache_desc)
    except (DeadlineExceeded, OutOfMemory) as error:
        return Taken(False, type(error).__name__, f"pid {pid} " in str(error), kept, incomplete())
    world.caches["again"] = again
    _fill(words_of(again), number, REUSED)
    return Taken(again.tensor_addrs == before, quarantined=kept, incomplete=missing)


def use_again(world: World, shape: Shape, number: int, way: str) -> float:
    """The other end has ended: what was kept from us must come back, and is used. Return the seconds that took."""
    since = time.monotonic()
    wait_until(lambda: world.dd.statistics().quarantined_bytes == 0)
    if way == "full" and "again" not in world.caches:
        world.caches["again"] = world.cm.allocate_blocks_cache(shape.desc)
        _fill(words_of(world.caches["again"]), number, REUSED)
    if way == "unregister" and "theirs" in world.caches:
        world.cm.unregister_cache(world.caches.pop("theirs").cache_id)
        _fill(world.memory["arena"], number, REUSED)
    return time.monotonic() - since


def look_back(world: World, number: int, way: str, pushed: bool) -> int:
    """Return how many bytes of the memory in its new use are not what the owner put there; then give all back.

    ``pushed``: A push by the key has succeeded, so that the cache that has the key now may show all of it, or nothing.
    """
    strange = 0
    if "again" in world.caches:
        strange += _wrong(words_of(world.caches["again"]), number, REUSED)
    if way == "unregister":
        strange += _wrong(world.memory["arena"], number, REUSED)
    if way == "rebind":
        arena = world.memory["second arena"]
        untouched = _wrong(arena, number, REUSED)
        strange += min(untouched, _wrong(arena, number, REUSED, WRITTEN)) if pushed else untouched
    for name in ("again", "rest", "theirs", "rebound"):
        if (cache := world.caches.pop(name, None)) is not None:
            world.cm.remove_cache_key(ROW)
            (world.cm.deallocate_blocks_cache if cache.is_blocks_cache else world.cm.deallocate_cache)(cache)
            world.cm.unregister_cache(cache.cache_id)
    wait_until(lambda: world.dd.statistics().pins == 0 and _used(world) == world.memory["used"])
    world.dd.check_integrity()
    return strange


def _used(world: World) -> int:
    return sum(pool.used_bytes for pool in world.dd.statistics().pools)


# --- the trials -------------------------------------------------------------------------------------------------------

TRANSPORTS: Final = ("shm", "cma", "tcp")
#: MiB a copy: so long that a signal finds it in the middle, also where all share one CPU. Of cma the kernel moves 4 MiB
#: before it looks at signals; of tcp what the sockets hold arrives although its sender is stopped.
SIZES: Final = {"shm": 32, "cma": 32, "tcp": 24}
KILL_EVERY: Final = 10
#: Milliseconds the owner waits for memory that does not come back meanwhile.
SHORT_MS: Final = 40
#: A trial that is not caught is done again, but not for ever.
TRIES: Final = 40


@dataclass
class TrialReport(Report):
    what: str = ""
    tried: int = 0
    caught: int = 0
    reused: int = 0
    quarantines: int = 0
    killed: int = 0
    foreign_bytes: int = 0
    slowest_return: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)

    @property
    def good(self) -> bool:
        return super().good and self.caught >= self.asked and not self.foreign_bytes

    def line(self) -> str:
        numbers = (self.asked, self.tried, self.caught, self.reused, self.quarantines, self.killed)
        cells = "".join(f"{number:>8}" for number in numbers)
        return (
            f"{self.name:<5}{self.what:<8}{cells}{self.wrong_bytes:>8}{self.foreign_bytes:>9}"
            f"{self.slowest_return * 1e3:>9.0f}{self.seconds:>8.0f}  {super().line()}"
            + "".join(f"; {count} times {name} to the owner" for name, count in sorted(self.refused.items()))
        )


HEAD: Final = (
    "                 asked   tried  caught  reused quarant.  killed   wrong  foreign  back ms       s  outcomes caught"
)


class Trials:
    def __init__(self, processes: Processes, transport: str, what: str, shape: Shape) -> None:
        self.transport, self.what = transport, what
        self.reading = what == "reader"
        self.shape = shape
        self.number = 0
        self._processes = processes
        self.owner: ChildEnd = processes.owner(sync_kv_timeout=SHORT_MS)
        self.owner.do(arena, shape, transport == "shm")
        self.other = self._born()

    def run(self, count: int, seen: Callable[[TrialReport], bool]) -> TrialReport:
        report = TrialReport(self.transport, count, what=self.what)
        ways = cycle(READER_WAYS[: None if self.transport == "tcp" else -1] if self.reading else WRITER_WAYS)
        while (report.caught < count or not seen(report)) and report.tried < count * TRIES:
            killed = not self.reading and report.caught % KILL_EVERY == KILL_EVERY // 2
            self.trial(report, next(ways), kill=killed)
        return report

    def trial(self, report: TrialReport, way: str, *, kill: bool) -> None:
        self.number += 1
        report.tried += 1
        inside = self._stopped_inside(way)
        taken = self.owner.do(take_back, self.shape, self.number, way, self.other.pid, self.reading)
        ended = Ended(Outcome("killed"))
        if kill:
            self.other.kill()
        else:
            self.other.signal(signal.SIGCONT)
            ended = self.other.finish()
        returned = self.owner.do(use_again, self.shape, self.number, way)
        pushed = not self.reading and ended.outcome.good and self.transport == "tcp"
        foreign = self.owner.do(look_back, self.number, way, pushed)
        if kill:
            wait_until(lambda: self.owner.do(links) == {})
            self.other = self._born()
        caught = inside and taken.incomplete
        report.slowest_return = max(report.slowest_return, returned)
        report.foreign_bytes += foreign
        report.wrong_bytes += ended.wrong
        faults = list(self._faults(way, taken, ended)) if caught else []
        if not ended.outcome.typed:
            faults.append(f"ended with what is no error of the library: {ended.outcome}")
        report.faults += [f"trial {self.number}, {way}: {fault}" for fault in faults]
        if caught and way != "keep":
            report.caught += 1
            report.reused += taken.reused
            report.quarantines += taken.quarantined > 0
            report.killed += kill
            report.outcomes[ended.outcome.name] += 1
            if taken.refused:
                report.refused[taken.refused] += 1

    def _stopped_inside(self, way: str) -> bool:
        shape, number, reading = self.shape, self.number, self.reading
        sink = self.other if reading else self.owner
        offered = self.owner.do(offer, shape, number, way, SOURCE if reading else UNTOUCHED)
        mine = self.other.do(poison, shape, number, UNTOUCHED if reading else WRITTEN)
        watched = [address + BLOCK for address in mine] if reading else offered
        kind = SOURCE if reading else WRITTEN
        first = watched[0], word(number, kind, 0, BLOCK // 8)
        # The last word of every block: while one of them is missing, the copy is not over.
        lasts = [
            (address + block * BLOCK - 8, word(number, kind, tensor, (block + 1) * BLOCK // 8 - 1))
            for tensor, address in enumerate(watched)
            for block in range(shape.moved, 0, -1)
        ]

        def there(*expected: tuple[int, int]) -> bool:
            return all(peek(sink.pid, address, 8) == value.to_bytes(8, "little") for address, value in expected)

        self.other.begin(move, shape, number, way, reading)
        return stop_inside_copy(self.other.pid, lambda: there(first), lambda: there(*lasts))

    def _faults(self, way: str, taken: Taken, ended: Ended) -> Iterator[str]:
        by_lanes = self.transport == "tcp"
        if way == "keep":
            if not ended.outcome.good:
                yield f"nothing happened to its source, and it ended with {ended.outcome}"
            return
        # Over lanes a reader may have got all that it still lacked from its own socket.
        if ended.outcome.good and not (by_lanes and self.reading):
            yield "it was inside the copy when its memory was taken back, and succeeded"
        if self.reading:
            if taken.reused != (way != "remove"):
                yield f"the owner {'got' if taken.reused else 'did not get'} the memory"
        elif by_lanes:
            if taken.refused or taken.quarantined or taken.reused != (way != "rebind"):
                yield f"its own lanes write, yet the owner got {taken}"
        elif taken != EXPECTED[way](self.shape.nbytes):
            yield f"the owner got {taken}"

    def _born(self) -> ChildEnd:
        other: ChildEnd = self._processes.reader(self.owner, first=give_way)
        return other


#: What the owner gets while a writer that is not its own lanes is stopped.
EXPECTED: Final[dict[str, Callable[[int], Taken]]] = {
    "deallocate": lambda nbytes: Taken(reused=False, quarantined=nbytes),
    "full": lambda nbytes: Taken(reused=False, refused="OutOfMemory", named=True, quarantined=nbytes),
    "unregister": lambda nbytes: Taken(reused=False, refused="DeadlineExceeded", named=True),
    "rebind": lambda nbytes: Taken(reused=False),
}


def run(
    transport: str,
    what: str,
    count: int,
    mib: int | None = None,
    seen: Callable[[TrialReport], bool] = lambda report: True,
) -> TrialReport:
    """Run until ``count`` trials were caught and ``seen`` says so, at most ``TRIES`` times as many."""
    shape = Shape(mib or SIZES[transport])
    with Processes(
        transport,
        4 * shape.nbytes + 16 * BLOCK,
        page_shift=16,
        # One copying thread, so that the last byte is the last one.
        extra={"llm.PeerTimeout": "600", "llm.CopyThreads": "1"},
        enable_remote_cache_accessible=what == "writer",
    ) as processes:
        return Trials(processes, transport, what, shape).run(count, seen)


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    for transport, what in steps([(each, what) for each in options.transport for what in options.what]):
        yield run(transport, what, options.trials, options.mib or None).told()


OPTIONS: Final = {
    "trials": (1000, "that count, of each kind"),
    "what": (("reader", "writer"), "who is stopped"),
    "mib": (0, "MiB a copy"),
    "transport": (TRANSPORTS, ""),
}
