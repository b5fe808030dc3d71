"""Show where the microseconds of a ``pull_cache`` by key go, at both ends, on one clock.

    python -m benchmarks.timeline_by_key [--kib 64] [--pulls 50] [--rounds 20] [--pause-ms 0]

Two processes over shm. The functions between a pull's call and its return are wrapped to note ``time.monotonic_ns()``,
which is one clock for all processes of a host; nothing is printed before the end. For each step: the median of when it
is reached after the call began, and of how long after the step before it at the same end, in microseconds. The stamps
themselves take about a microsecond each, and so does what is not wrapped. "release" is that of the pull before.
With a pause between pulls both ends sleep, and others use the processors and their caches, as in serving. The first
line is of pulls without stamps, with the CPU time of both processes.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from benchmarks.two_ends import two_ends
from llm_datadist import CacheDesc, CacheKey, DataType
from llm_datadist._links import channel as channels
from llm_datadist._links.link import Link
from llm_datadist._links.messages import Release, Resolve
from llm_datadist._transfer import initiator as initiators
from llm_datadist._transfer.initiator import Initiator
from llm_datadist._transport.connection import Connection
from llm_datadist.datadist import life_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ends import ChildEnd
    from tests.support.world import World

P = ParamSpec("P")
R = TypeVar("R")
Stamps = list[tuple[str, int]]
_stamps: Stamps = []


def _note(what: str) -> None:
    _stamps.append((what, time.monotonic_ns()))


def _wrap(function: Callable[P, R], before: str | None, after: str | None) -> Callable[P, R]:
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if before is not None:
            _note(before)
        try:
            return function(*args, **kwargs)
        finally:
            if after is not None:
                _note(after)

    return wrapped


class _Pollable(Protocol):
    def poll(self, timeout: float | None) -> object: ...


class _Poll:
    """A poll or epoll object that notes when it wakes."""

    def __init__(self, inner: _Pollable, end: str) -> None:
        self._inner = inner
        self._end = end

    def poll(self, timeout: float | None) -> object:
        """Note both ends of the sleep."""
        _note(f"{self._end}: sleeps")
        found = self._inner.poll(timeout)
        _note(f"{self._end}: awake")
        return found

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


def watch_target(world: World) -> None:
    """Note the steps of the target."""
    engine: Any = life_of(world.dd).require_engine("watch_target")
    selector = engine._control.loop._selector
    selector._outer = _Poll(selector._outer, "target")
    handlers: dict[type, Callable[..., None]] = engine.links._handlers
    handlers[Resolve] = _wrap(handlers[Resolve], "target: resolve is decoded", "target: resolve is done")
    handlers[Release] = _wrap(handlers[Release], "target: release is decoded", "target: release is done")
    _replace(channels, "send_now", "target: answer is encoded", "target: answer is sent")


def watch_initiator(world: World) -> None:
    """Note the steps of the initiator."""
    _replace(Initiator, "run", "initiator: arguments are checked, the cache is held", None)
    _replace(channels, "send_now", "initiator: message is encoded", "initiator: message is sent")
    _replace(channels.Channel, "_receive", "initiator: waits", "initiator: answer is received")
    _replace(Link, "request", None, "initiator: answer is decoded")
    _replace(initiators, "open_answer", None, "initiator: answer is opened and mapped")
    _replace(Connection, "read", "initiator: guards are compared, the copy is planned", "initiator: bytes are copied")


def _replace(owner: object, name: str, before: str | None, after: str | None) -> None:
    setattr(owner, name, _wrap(getattr(owner, name), before, after))


def publish(world: World, pulls: int, nbytes: int, seed: int) -> None:
    """Make and deallocate a cache for each pull, at the target.

    The pull that consumes its key frees it.
    """
    for number in range(pulls):
        cache = world.cm.allocate_cache(
            CacheDesc(1, [1, nbytes], DataType.DT_UINT8), [CacheKey(1, seed * pulls + number)]
        )
        world.cm.deallocate_cache(cache)


def take(world: World) -> tuple[Stamps, float]:
    """Return the stamps since the last time, and the CPU seconds of this process."""
    taken = list(_stamps)
    _stamps.clear()
    return taken, time.process_time()


def _round(target: ChildEnd, here: World, options: argparse.Namespace, seed: int) -> tuple[list[float], Any, Stamps]:
    """Pull ``options.pulls`` caches; return their seconds, CPU seconds, and the stamps of both ends."""
    target.do(publish, options.pulls, options.kib << 10, seed)
    (_, theirs), (_, ours) = target.do(take), take(here)
    times = []
    for number in range(options.pulls):
        key = CacheKey(1, seed * options.pulls + number)
        _note("initiator: pull_cache is called")
        began = time.perf_counter()
        here.cm.pull_cache(key, here.caches["dst"], number)
        times.append(time.perf_counter() - began)
        _note("initiator: pull_cache returns")
        time.sleep(options.pause_ms / 1e3)
    (stamps, ours_after), (others, theirs_after) = take(here), target.do(take)
    return times, (ours_after - ours, theirs_after - theirs), sorted(stamps + others, key=lambda each: each[1])


def _steps(stamps: Stamps, found: dict[str, list[tuple[float, float]]]) -> None:
    """Add the times of every step: since the call, and since the last step there."""
    pulls: list[Stamps] = []
    for stamp in stamps:
        if stamp[0] == "initiator: pull_cache is called":
            pulls.append([])
        if pulls:
            pulls[-1].append(stamp)
    last: dict[str, int] = {}
    for pull in pulls[1:-1]:
        seen: dict[str, int] = defaultdict(int)
        for what, when in pull:
            end = what.partition(":")[0]
            seen[what] += 1
            step = what if seen[what] == 1 else f"{what} ({seen[what]})"
            found[step].append(((when - pull[0][1]) / 1e3, (when - last.get(end, when)) / 1e3))
            last[end] = when


def _print_steps(found: dict[str, list[tuple[float, float]]], pulls: int) -> None:
    rows = [
        (statistics.median(since for since, _ in each), statistics.median(after for _, after in each), step)
        for step, each in found.items()
        if len(each) > pulls // 2
    ]
    for since, after, step in sorted(rows):
        print(f"{since:8.1f}{after:8.1f}  {step}")


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, default=64)
    parser.add_argument("--pulls", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--pause-ms", type=float, default=0)
    options = parser.parse_args()
    with two_ends() as (target, here):
        desc = CacheDesc(1, [options.pulls, options.kib << 10], DataType.DT_UINT8)
        here.caches["dst"] = here.cm.allocate_cache(desc)
        plain = [_round(target, here, options, seed) for seed in range(options.rounds)]
        target.do(watch_target)
        watch_initiator(here)
        found: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for seed in range(options.rounds, 2 * options.rounds):
            _steps(_round(target, here, options, seed)[2], found)
    times = sorted(each * 1e6 for round_ in plain for each in round_[0])
    ours, theirs = (sum(round_[1][end] for round_ in plain) / len(times) * 1e6 for end in (0, 1))
    print(f"{options.kib} KiB over shm, microseconds: p50 {statistics.median(times):.0f}, ", end="")
    print(f"p90 {times[len(times) * 9 // 10]:.0f}; CPU of the initiator {ours:.0f}, of the target {theirs:.0f} a pull")
    print("   since   after  step (times: since the call, after the step before it at that end)")
    _print_steps(found, len(times))
    return 0


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.timeline_by_key").main())
