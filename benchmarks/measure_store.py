"""Measure the prefix store: load and save beside memcpy, and a lookup beside a claim of a grant.

    python -m benchmarks.measure_store [--block-kib 64 256 1024] [--set-mib 64] [--turns 15] [--transport shm]

A store, an owner of grants and this client are three processes. A key's block has two tensors; sets of blocks of each
size have as many bytes, as in `make bench`. In each turn the client computes new blocks and saves them, loads them into
other blocks, and copies as many bytes between two caches of its own with memcpy, by as many threads. Every byte of
every load is compared; before it, the destination is poisoned. Each turn has new keys; the store evicts older ones.
Then lookups of at most 64 keys, which find all of them, and claims of grants take turns. All of it is done with
digests, as ever, and once without any: neither the store nor a load takes one. Prints medians, and the ratios with the
floors of the project; ends with 1 below one of them.
"""

from __future__ import annotations

import argparse
import importlib
import secrets
import statistics
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Final

import numpy as np

from benchmarks.two_ends import two_ends
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType
from llm_datadist.cache_manager import CacheManager
from llm_datadist.store import StoreClient, StoreOptions, StoreServer, namespace
from llm_datadist.tools.bench.contenders.limits import RawBlocks, copy_raw
from llm_datadist.views import tensor_views
from tests.support.ends import ChildEnd

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from tests.support.world import World

MIB: Final = 1 << 20
TENSORS: Final = 2
#: Name -> (the least or most of the ratio, whether it is the least).
FLOORS: Final = {
    "load without digest, of memcpy": (0.9, True),
    "save with digest, of memcpy": (0.45, True),
    "save without digest, of memcpy": (0.8, True),
    "lookup, of claim_grant": (3.0, False),
}
NAMESPACE: Final = namespace(
    fingerprint=b"measured", tp_size=1, tp_rank=0, hash_algorithm="sha256_cbor", hash_seed="0", salt=""
)
_CLAIMS: Final = 200
_LOOKED_UP: Final = 64
#: Saves that the store has room for.
_FACTOR: Final = 3
_POISON: Final = 0xA5


def seconds(function: Callable[..., object], *args: object) -> float:
    """Call; return how long that took."""
    since = time.perf_counter()
    function(*args)
    return time.perf_counter() - since


def no_digests(_: CacheManager, cache: Cache, blocks: Sequence[int], nonce: bytes) -> NDArray[np.uint64]:
    """Stand in for ``digest_blocks``."""
    return np.zeros((len(blocks), 2), np.uint64)


def start(world: World, memory: int, options: dict[str, str], digest: bool) -> int:
    """At the store: serve, with or without digests; return the port."""
    if not digest:
        CacheManager.digest_blocks = no_digests  # type: ignore[assignment,method-assign]
    world.memory["server"] = server = StoreServer(memory, namespaces=1, options=options)
    return server.port


def stop(world: World) -> None:
    """At the store: end."""
    world.memory.pop("server").close()


@contextmanager
def one_store(memory: int, options: dict[str, str], *, digest: bool) -> Iterator[str]:
    """Yield the address of a store in a process of its own."""
    end = ChildEnd("store", fresh=True)
    try:
        yield f"127.0.0.1:{end.do(start, memory, options, digest)}"
        end.do(stop)
    finally:
        end.close()


def give(world: World, count: int) -> list[bytes]:
    """At the owner: make so many grants of a block; return their tokens."""
    if "kv" not in world.caches:
        world.caches["kv"] = world.cm.allocate_blocks_cache(
            CacheDesc(1, [1, 4096], DataType.DT_UINT8), BlocksCacheKey(1)
        )
    tokens = [secrets.token_bytes(16) for _ in range(count)]
    world.memory["grants"] = [world.caches["kv"].grant([0], 600.0, token=each) for each in tokens]
    return tokens


@dataclass
class Moves:
    """One size of block: a cache with computed blocks and one for loads, and times by name."""

    world: World
    client: StoreClient
    keys: int
    block_bytes: int
    threads: int
    times: dict[str, list[float]] = field(default_factory=lambda: {"save": [], "load": [], "memcpy": []})

    def __post_init__(self) -> None:
        """Allocate and touch both caches."""
        desc = CacheDesc(TENSORS, [self.keys, self.block_bytes], DataType.DT_UINT8)
        self._source, self._target = (self.world.cm.allocate_blocks_cache(desc) for _ in range(2))
        self._random = np.random.default_rng(self.block_bytes)
        for view in self._views(self._source) + self._views(self._target):
            view[:] = _POISON

    @staticmethod
    def _views(cache: Cache) -> list[NDArray[np.uint8]]:
        return list(tensor_views(cache))

    @property
    def nbytes(self) -> int:
        """Bytes of one save or load."""
        return self.keys * TENSORS * self.block_bytes

    def turn(self, number: int) -> list[bytes]:
        """Save, load, compare and copy; return the keys."""
        keys = [b"%d %d %d" % (self.block_bytes, number, each) for each in range(self.keys)]
        here, there = (self._random.permutation(self.keys) for _ in range(2))
        source, target = self._views(self._source), self._views(self._target)
        for view, into in zip(source, target, strict=True):
            view[:] = self._random.integers(0, 256, view.shape, dtype=np.uint8)
            into[:] = _POISON
        self.times["save"].append(seconds(self._save, keys, here.tolist()))
        hit = self.client.lookup(keys)
        if len(hit) != len(keys):
            raise SystemExit(f"the store has {len(hit)} of {len(keys)} keys that were saved just now")
        self.times["load"].append(seconds(self.client.load, hit, self._target, there.tolist()))
        for view, into in zip(source, target, strict=True):
            if not np.array_equal(view[here], into[there]):
                raise SystemExit("wrong bytes")
            into[:] = _POISON
        raw = RawBlocks.of(target, there), RawBlocks.of(source, here)
        self.times["memcpy"].append(seconds(lambda: copy_raw(*raw, threads=self.threads)))
        return keys

    def _save(self, keys: list[bytes], blocks: list[int]) -> None:
        if (stored := self.client.save(keys, self._source, blocks)) != len(keys):
            raise SystemExit(f"{stored} of {len(keys)} keys were stored")

    def free(self) -> None:
        """Give the memory back."""
        self.world.cm.deallocate_blocks_cache(self._source)
        self.world.cm.deallocate_blocks_cache(self._target)

    def speed(self, name: str) -> float:
        """Bytes per second, by the median."""
        return self.nbytes / statistics.median(self.times[name])


def round_trips(owner: ChildEnd, here: World, client: StoreClient, keys: list[bytes]) -> tuple[float, float]:
    """Return the median seconds of a lookup of all keys and of a claim, in turns."""
    lookups, claims = [], []
    for token in owner.do(give, _CLAIMS):
        since = time.perf_counter()
        hit = client.lookup(keys)
        lookups.append(time.perf_counter() - since)
        if len(hit) != len(keys):
            raise SystemExit("a lookup missed")
        client.release(hit)
        since = time.perf_counter()
        grant = here.cm.claim_grant(1, token)
        claims.append(time.perf_counter() - since)
        grant.release()
    return statistics.median(lookups), statistics.median(claims)


def judged(name: str, ratio: float) -> bool:
    """Print a ratio beside its floor, if it has one; return whether it is met."""
    if name not in FLOORS:
        print(f"  {name}: {ratio:.2f}")
        return True
    limit, least = FLOORS[name]
    met = ratio >= limit if least else ratio <= limit
    print(f"  {name}: {ratio:.2f}, {'at least' if least else 'at most'} {limit}: {'met' if met else 'MISSED'}")
    return met


def main() -> int:
    """Measure, print, return 0 when all floors are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--set-mib", type=int, default=64, help="of one save or load")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--transport", choices=["shm", "tcp"], default="shm")
    parser.add_argument("--copy-threads", type=int, default=1)
    options = parser.parse_args()
    extra = {"llm.CopyThreads": str(options.copy_threads)}
    served = extra | {"llm.Transport": options.transport}
    good = True
    for kib, digest in product(options.block_kib, (True, False)):
        nbytes = options.set_mib << 20
        pool = f'{{"memory_size": {2 * nbytes + 16 * MIB}}}'
        patient = StoreOptions(lookup_ms=1000, verify=digest)
        with (
            one_store(_FACTOR * nbytes, served, digest=digest) as address,
            two_ends(options.transport, extra=extra, mem_pool_cfg=pool) as (owner, here),
            StoreClient(here.dd, address, NAMESPACE, patient) as client,
        ):
            if not client.connect(10.0):
                raise SystemExit("the store is not linked")
            good &= _measured(owner, here, client, kib << 10, options, digest=digest)
    return 0 if good else 1


def _measured(
    owner: ChildEnd, here: World, client: StoreClient, block_bytes: int, options: argparse.Namespace, *, digest: bool
) -> bool:
    count = (options.set_mib << 20) // (TENSORS * block_bytes)
    moves = Moves(here, client, count, block_bytes, options.copy_threads)
    for number in range(_FACTOR + 1):  # map and touch every slot
        moves.turn(-1 - number)
    for times in moves.times.values():
        times.clear()
    for number in range(options.turns):
        keys = moves.turn(number)
    moves.free()
    said = ", ".join(f"{name} {moves.speed(name) / 1e9:.1f} GB/s" for name in moves.times)
    how = "with digest" if digest else "without digest"
    print(f"{count} keys of {TENSORS} x {block_bytes >> 10} KiB over {options.transport}, {how}: {said}")
    good = True
    for name in ("load", "save"):
        good &= judged(f"{name} {how}, of memcpy", moves.speed(name) / moves.speed("memcpy"))
    if digest:
        lookup, claim = round_trips(owner, here, client, keys[:_LOOKED_UP])
        print(f"  p50: lookup of {len(keys[:_LOOKED_UP])} keys {lookup * 1e6:.0f} us, claim_grant {claim * 1e6:.0f} us")
        good &= judged("lookup, of claim_grant", lookup / claim)
    return good


if __name__ == "__main__":
    # By its own name: functions go to the other process by theirs.
    sys.exit(importlib.import_module("benchmarks.measure_store").main())
