"""Random steps of grants: given, renewed, claimed too early and too late, pulled, released, expired, revoked, lost.

    python -m faults grants [--steps 100000] [--seed 1] [--transport shm]

The owner has a few places of some blocks each. Grant ``n`` is for place ``n % _PLACES``; its token and the words in its
blocks follow from ``n``: readers need no other channel. As soon as a grant has ended, the owner writes the next words
into the blocks. Each reader claims grants about as old as the newest that it knows of, pulls, and compares every word
that a successful pull brought, and that no other was written. It releases, lets the claim lapse, or gives its link up;
one reader is killed at times and born again. At the end nothing may be left at the owner: no claim, no guard, no pin.
"""

import argparse
import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from faults.harness import Processes, Report, Threads, Words, differing, numbered, words_of
from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.bench.progress import steps
from llm_datadist.errors import LLMException, StateError
from llm_datadist.types.grant import Grant
from tests.support.linking import SUCCESS, info, link, unlink
from tests.support.world import World

TRANSPORTS: Final = ("shm", "tcp")
HEAD: Final = "transport     steps  seconds  wrong  what came of the owner's steps and the readers'"
_KEY: Final = BlocksCacheKey(1, 0)
_PLACES: Final = 8
_BLOCKS: Final = 4
_TENSORS: Final = 2
_BLOCK_WORDS: Final = 512
_ROWS: Final = _PLACES * _BLOCKS
#: Words of one grant, all of them different from those of any other.
_WORDS: Final = _ROWS * _TENSORS * _BLOCK_WORDS
_POISON: Final = np.uint64(0xA5A5A5A5A5A5A5A5)
_LONG: Final = 600.0
_READERS: Final = (2, 3)
#: A claim that comes too early is given up after that.
_PATIENCE_MS: Final = 20
_KILL_EVERY_S: Final = 1.5


def token_of(number: int, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed} {number}".encode(), digest_size=16).digest()


def blocks_of(number: int) -> list[int]:
    first = number % _PLACES * _BLOCKS
    return list(range(first, first + _BLOCKS))


def words_in(number: int, tensor: int, block: int) -> Words:
    return numbered(number * _WORDS + (tensor * _ROWS + block) * _BLOCK_WORDS, _BLOCK_WORDS)


def make_cache(world: World, key: BlocksCacheKey | None) -> None:
    desc = CacheDesc(_TENSORS, [_ROWS, _BLOCK_WORDS], DataType.DT_UINT64)
    world.caches["kv"] = world.cm.allocate_blocks_cache(desc, key)
    for words in words_of(world.caches["kv"]):
        words[:] = _POISON


#: So many times as many steps without what must come, a wrong byte or a kind of steps, are no bad luck.
_UNLUCKY: Final = 12
_MUST_COME: Final = {"owner": ("given", "renewed"), "reader": ("pulled", "released", "ended")}
#: Among the counts of what an end did: bytes.
_WRONG: Final = "wrong bytes"


class _Owner(Threads):
    def __init__(self, world: World, seed: int) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._world, self._seed = world, seed
        self._chance = random.Random(seed)
        self._views = [words.reshape(_ROWS, _BLOCK_WORDS) for words in words_of(world.caches["kv"])]
        self._last: list[Grant | None] = [None] * _PLACES
        self._number = 0
        self.start(self._run)

    def _run(self) -> None:
        actions = (self._give, self._renew, self._revoke, self._pause)
        while not self.stop.is_set():
            self._chance.choices(actions, (6, 2, 1, 3))[0]()
        for grant in self._last:
            if grant is not None:
                grant.revoke()

    def _give(self) -> None:
        """Take the next place if its grant has ended, or end it at times; write, and grant."""
        place = self._number % _PLACES
        last = self._last[place]
        if last is not None and last.active:
            if self._chance.random() < 0.9:
                self.counts["waits"] += 1
                time.sleep(0)
                return
            last.revoke()
        blocks = blocks_of(self._number)
        for tensor, rows in enumerate(self._views):
            for block in blocks:
                rows[block] = words_in(self._number, tensor, block)
        ttl = self._chance.choice((0.001, 0.005, 0.02, _LONG))
        cache, token = self._world.caches["kv"], token_of(self._number, self._seed)
        self._last[place] = cache.grant(blocks, ttl, token=token)
        self._number += 1
        self.counts["given"] += 1

    def _renew(self) -> None:
        grant = self._chance.choice(self._last)
        if grant is not None:
            try:
                grant.renew(self._chance.choice((0.001, 0.01, _LONG)))
                self.counts["renewed"] += 1
            except StateError:
                self.counts["renewed too late"] += 1

    def _revoke(self) -> None:
        grant = self._chance.choice(self._last)
        if grant is not None and grant.active:
            grant.revoke()
            self.counts["revoked"] += 1

    def _pause(self) -> None:
        time.sleep(self._chance.choice((0, 0, 0.0005)))
        self.counts["pauses"] += 1


class _Reader(Threads):
    def __init__(self, world: World, seed: int, port: int, guarded: bool) -> None:
        super().__init__()
        self._guarded = guarded
        self.counts: Counter[str] = Counter()
        self._world, self._seed = world, seed
        self._owner = info(1, port)
        self._chance = random.Random(seed * 1000 + world.dd.cluster_id)
        self._views = [words.reshape(_ROWS, _BLOCK_WORDS) for words in words_of(world.caches["kv"])]
        self._number = 0
        self.start(self._run)

    def _run(self) -> None:
        while not self.stop.is_set():
            self._step(max(0, self._number + self._chance.choice((-9, -1, 0, 0, 1, 1, 2))))

    def _step(self, number: int) -> None:
        try:
            grant = self._world.cm.claim_grant(1, token_of(number, self._seed))
        except LLMException as error:
            over, taken = "has ended" in str(error), "readers already" in str(error)
            self.counts["ended" if over else "taken" if taken else type(error).__name__] += 1
            if over:
                self._number = max(self._number, number + 1)
            self._relink()
            return
        self._number = max(self._number, number)
        self.counts["claimed"] += 1
        for _ in range(self._chance.randrange(3)):
            self._pull(grant, number)
        if self._chance.random() < 0.8:
            with suppress(LLMException):
                grant.release()
            self.counts["released"] += 1
        elif self._chance.random() < 0.1:
            unlink(self._world, [self._owner], 5_000, force=True)
            self.counts["link given up"] += 1
            self._relink()

    def _pull(self, grant: Grant, number: int) -> None:
        sources = self._chance.sample(blocks_of(number), self._chance.randrange(1, _BLOCKS + 1))
        targets = self._chance.sample(range(_ROWS), len(sources))
        try:
            checked = grant if self._guarded else None
            self._world.cm.pull_blocks(_KEY, self._world.caches["kv"], sources, targets, grant=checked)
        except LLMException:
            self.counts["pull failed"] += 1
        else:
            self.counts["pulled"] += 1
            for tensor, rows in enumerate(self._views):
                wanted = (words_in(number, tensor, block) for block in sources)
                self.counts[_WRONG] += differing((rows[block] for block in targets), wanted)
        for rows in self._views:
            rows[targets] = _POISON
            self.counts[_WRONG] += 8 * int((rows != _POISON).sum())

    def _relink(self) -> None:
        if not any(each.state == "ready" for each in self._world.dd.statistics().links):
            self.counts["linked" if link(self._world, [self._owner], 5_000) == SUCCESS else "not linked"] += 1


def begin_owner(world: World, seed: int) -> None:
    make_cache(world, _KEY)
    world.memory["guards"] = _live_guards(world)
    world.memory["churn"] = _Owner(world, seed)


def begin_reader(world: World, seed: int, port: int, guarded: bool) -> None:
    make_cache(world, None)
    world.memory["churn"] = _Reader(world, seed, port, guarded)


def counts(world: World, end: bool = False) -> Counter[str]:
    """Return what an end did so far; ``end`` it before."""
    churn: _Owner | _Reader = world.memory["churn"]
    if end:
        churn.join()
        world.dd.check_integrity()
    return churn.counts


def left_over(world: World) -> str:
    world.dd.check_integrity()
    now = world.dd.statistics()
    guards = _live_guards(world) - world.memory["guards"]
    found = (now.grants.active, now.grants.claimed, now.grants.waiting, now.pins, guards)
    return "" if not any(found) else f"active, claimed, waiting, pins, guards: {found}"


def _live_guards(world: World) -> int:
    return world.probe.engine.store.exports.guards.live


@dataclass
class Churn(Report):
    steps: int = 0

    def add(self, found: Counter[str], who: str) -> None:
        self.wrong_bytes += found.pop(_WRONG, 0)
        self.steps += found.total()
        self.outcomes.update({f"{who} {name}": count for name, count in found.items()})

    def missing(self) -> list[str]:
        kinds = (f"{who} {what}" for who, each in _MUST_COME.items() for what in each)
        return [kind for kind in kinds if not self.outcomes[kind]]

    def line(self) -> str:
        return f"{self.name:9}  {self.steps:8}  {self.seconds:7.1f}  {self.wrong_bytes:5}  {super().line()}"


def run(transport: str, asked: int, seed: int = 1, *, guarded: bool = True) -> Churn:
    """Run until all ends together have done so many steps, or more, until each kind has come that must.

    Without ``guarded`` the readers pull as if there were no grants: that must find wrong bytes.
    """
    report = Churn(transport, asked)
    pool = 2 * _TENSORS * _ROWS * _BLOCK_WORDS * 8
    with Processes(transport, pool, sync_kv_timeout=_PATIENCE_MS) as processes:
        owner = processes.owner()
        owner.do(begin_owner, seed)
        first = (seed, owner.port, guarded)
        readers = {number: _born(processes, transport, number, *first) for number in _READERS}
        killed = time.monotonic()
        while True:
            now = replace(report, outcomes=report.outcomes.copy())
            now.add(owner.do(counts), "owner")
            for each in readers.values():
                now.add(each.do(counts), "reader")
            come = not now.missing() if guarded else now.wrong_bytes > 0
            if now.steps >= (asked if come else _UNLUCKY * asked):
                break
            time.sleep(0.05)
            if time.monotonic() - killed > _KILL_EVERY_S:
                victim = _READERS[-1]
                report.add(readers[victim].do(counts), "reader")
                readers[victim].kill()
                report.outcomes["readers killed"] += 1
                readers[victim] = _born(processes, transport, victim, *first)
                killed = time.monotonic()
        for each in readers.values():
            report.add(each.do(counts, True), "reader")
        report.add(owner.do(counts, True), "owner")
        limit = time.monotonic() + 20
        while (left := owner.do(left_over)) and time.monotonic() < limit:
            time.sleep(0.05)
        if left:
            report.faults.append(f"left at the owner: {left}")
        report.faults += [f"never: {kind}" for kind in report.missing()]
    return report


def _born(processes: Processes, transport: str, number: int, seed: int, port: int, guarded: bool) -> Any:
    reader = processes.process(f"reader {number}")
    reader.start("DECODER", number, **(processes.settings | {"extra": {"llm.Transport": transport}}))
    assert reader.do(link, [info(1, port)]) == SUCCESS
    reader.do(begin_reader, seed, port, guarded)
    return reader


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    return (run(each, options.steps, options.seed).told() for each in steps(options.transport))


OPTIONS: Final = {"steps": (100_000, "of all ends together"), "seed": (1, ""), "transport": (TRANSPORTS, "")}
