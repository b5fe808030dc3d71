"""A store and engines in processes of their own, and what tests send to them."""

from __future__ import annotations

import hashlib
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from faults.gated import open_there, shut_there
from llm_datadist import CacheDesc, DataType
from llm_datadist.store import (
    Hit,
    StoreClient,
    StoreClientStatistics,
    StoreOptions,
    StoreServer,
    StoreStatistics,
    namespace,
)
from llm_datadist.views import tensor_views
from tests.support.ends import ChildEnd, Processes
from tests.support.linking import info, unlink
from tests.support.moves import Spec, make, show, wait_until
from tests.support.world import World

TENSORS: Final = 4
BLOCKS: Final = 12
BLOCK: Final = 4096  # bytes of a block in one tensor
SPEC: Final = Spec(tensors=TENSORS, rows=BLOCKS, stride=BLOCK, blocks=True)
#: A namespace of so many bytes has 16 slots: whole pages of 64 KiB for each tensor, and one for the bookkeeping.
SPACE: Final = TENSORS * 16 * BLOCK + (1 << 16)
NS: Final = namespace(fingerprint=b"model", tp_size=1, tp_rank=0, hash_algorithm="sha256_cbor", hash_seed="0", salt="")


def named(text: str, rank: int = 0, size: int = 1) -> bytes:
    """Return another namespace."""
    return namespace(
        fingerprint=text.encode(), tp_size=size, tp_rank=rank, hash_algorithm="sha256", hash_seed="0", salt=""
    )


def keys_of(*numbers: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in numbers]


def content(name: bytes, key: bytes, tensor: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a key in one tensor: an oracle that every process computes."""
    return np.frombuffer(hashlib.shake_128(b"%b %b %d" % (name, key, tensor)).digest(BLOCK), np.uint8)


class StoreFamily(Processes):
    """A store and engines; what is left at the end has nothing open."""

    def __init__(self, transport: str = "auto") -> None:
        super().__init__()
        self.transport = transport
        self._engines = 10

    def store(
        self, spaces: int = 2, *, space: int = SPACE, port: int = 0, kept: float = 0.0, **options: str
    ) -> ChildEnd:
        end = self.child("store")
        end.cluster_id = 1
        end.port = end.do(open_store, spaces * space, spaces, port, options, kept)
        return end

    def engine(
        self, store: ChildEnd, name: bytes = NS, spec: Spec = SPEC, *, ranks: Sequence[bytes] = (), **options: Any
    ) -> ChildEnd:
        """Return an engine with a cache of its own, linked to the store."""
        self._engines += 1
        end = self.child(f"engine {self._engines}")
        end.start("MIX", self._engines, extra={"llm.Transport": self.transport})
        end.do(make, "kv", spec, self._engines)
        end.do(open_client, "client", store.port, name, options, ranks)
        return end

    def part(self) -> None:
        for end in list(self._newborn):
            if end.code != -signal.SIGKILL:
                end.signal(signal.SIGCONT)
                end.do(close_ours)
        super().part()


@contextmanager
def family_of(transport: str = "auto") -> Iterator[StoreFamily]:
    family = StoreFamily(transport)
    try:
        yield family
    except BaseException:
        for end in list(family._newborn):  # noqa: SLF001 (of this class)
            end.kill()
        raise
    family.part()


def open_store(world: World, memory: int, spaces: int, port: int, options: dict[str, str], kept: float = 0.0) -> int:
    """Open a store that displaces namespaces ``kept`` seconds after their last use."""
    StoreServer._KEPT_SECONDS = kept  # noqa: SLF001 (a minute is no time of a test)
    server = StoreServer(memory, f"127.0.0.1:{port}", cluster_id=1, namespaces=spaces, options=options)
    world.memory["server"], world.dd = server, server.datadist
    return server.port


def open_client(
    world: World, of: str, port: int, name: bytes, options: dict[str, Any], ranks: Sequence[bytes] = ()
) -> None:
    given = StoreOptions(**{"store_id": 1, "lookup_ms": 5000, "pause_seconds": 0.2} | options)
    client = StoreClient(world.dd, f"127.0.0.1:{port}", name, given, ranks=ranks)
    world.memory[of] = client
    assert client.connect(20)


def begin_client(world: World, port: int, name: bytes) -> bool:
    """Make a client; return whether it is linked within half a second."""
    given = StoreOptions(store_id=1, lookup_ms=5000, pause_seconds=0.2)
    world.memory["client"] = client = StoreClient(world.dd, f"127.0.0.1:{port}", name, given)
    return client.connect(0.5)


def close_ours(world: World) -> None:
    for each in [each for each in world.memory.values() if isinstance(each, (StoreClient, StoreServer))]:
        if isinstance(each, StoreServer):
            each.statistics()
            each.check_integrity()
        each.close()
    if any(isinstance(each, StoreServer) for each in world.memory.values()):
        del world.dd


def put(world: World, keys: Sequence[bytes], blocks: Sequence[int], name: bytes = NS) -> None:
    """Write what belongs to the keys into blocks of "kv"."""
    for tensor, view in enumerate(tensor_views(world.caches["kv"])):
        for key, block in zip(keys, blocks, strict=True):
            view[block].reshape(-1).view(np.uint8)[:] = content(name, key, tensor)


def save(world: World, keys: Sequence[bytes], blocks: Sequence[int], name: bytes = NS, of: str = "client") -> int:
    """Save keys from blocks that hold what belongs to them; return the number stored."""
    put(world, keys, blocks, name)
    stored: int = world.memory[of].save(list(keys), world.caches["kv"], list(blocks))
    return stored


def save_as_is(world: World, keys: list[bytes]) -> int:
    """Save keys from the first blocks, whatever they hold; return the number stored."""
    stored: int = world.memory["client"].save(keys, world.caches["kv"], list(range(len(keys))))
    return stored


def figures(world: World, of: str = "client") -> StoreClientStatistics:
    now: StoreClientStatistics = world.memory[of].statistics()
    return now


def leave(world: World) -> None:
    """Close the client, and cut its link to the store."""
    world.memory["client"].close()
    unlink(world, [info(1, 1)], 10_000, True)


def generation(world: World) -> bytes:
    """Return the generation that a client has learnt, for saves made by hand."""
    known: bytes = world.memory["client"]._generation  # noqa: SLF001 (a hostile client says any)
    return known


def save_all(world: World, keys: Sequence[bytes], name: bytes = NS) -> int:
    """Save any number of keys."""
    stored = 0
    for at in range(0, len(keys), BLOCKS):
        part = keys[at : at + BLOCKS]
        stored += save(world, part, range(len(part)), name)
    return stored


def look_up(world: World, keys: Sequence[bytes], as_name: str = "hit", of: str = "client") -> int:
    world.memory[as_name] = hit = world.memory[of].lookup(list(keys))
    return len(hit)


def load(world: World, blocks: Sequence[int], hit: str = "hit", of: str = "client", release: bool = True) -> None:
    world.memory[of].load(world.memory[hit], world.caches["kv"], list(blocks), release=release)


def release(world: World, hit: str = "hit") -> None:
    world.memory["client"].release(world.memory[hit])


def hit_bytes(world: World, hit: str = "hit") -> bytes:
    data: bytes = world.memory[hit].to_bytes()
    return data


def take_hit(world: World, data: bytes) -> None:
    world.memory["hit"] = Hit.from_bytes(data)


def loads_right(world: World, keys: Sequence[bytes], blocks: Sequence[int], name: bytes = NS, hit: str = "hit") -> None:
    """Load a hit; compare every byte of the cache, outside of the blocks too."""
    before = show(world, "kv")
    load(world, blocks, hit)
    for tensor, (was, now) in enumerate(zip(before, show(world, "kv"), strict=True)):
        expected = was.copy()
        for key, block in zip(keys, blocks, strict=True):
            expected[block] = content(name, key, tensor)
        np.testing.assert_array_equal(now, expected)


def hits(world: World, keys: Sequence[bytes], name: bytes = NS) -> int:
    """Look keys up and load what is found, in parts that fit the cache; return the number found, all bytes right."""
    found = 0
    for at in range(0, len(keys), BLOCKS):
        part = keys[at : at + BLOCKS]
        count = look_up(world, part)
        loads_right(world, part[:count], range(count), name)
        found += count
        if count < len(part):
            break
    return found


def statistics(world: World) -> StoreStatistics:
    server: StoreServer = world.memory["server"]
    server.check_integrity()
    return server.statistics()


def index(world: World) -> dict[bytes, list[bytes]]:
    server: StoreServer = world.memory["server"]
    return server.index()


def all_events(world: World) -> dict[bytes, list[Any]]:
    """Return all events of each namespace. ``world`` is a store."""
    server: StoreServer = world.memory["server"]
    found: dict[bytes, list[Any]] = {}
    for name in server.index():
        of_name, told = found.setdefault(name, []), server.events(name)
        while told.events:
            assert told.follows
            of_name += [(each.number, each.kind, each.keys) for each in told.events]
            told = server.events(name, told)
    return found


def replayed(events: dict[bytes, list[Any]]) -> dict[bytes, set[bytes]]:
    """Return the index that the events give."""
    found: dict[bytes, set[bytes]] = {}
    for name, of_name in events.items():
        assert [number for number, *_ in of_name] == list(range(1, len(of_name) + 1))
        index = found[name] = set()
        for _, kind, keys in of_name:
            if kind == "stored":
                assert not index & set(keys)
                index |= set(keys)
            else:
                assert (kind, index >= set(keys)) == ("removed", True)
                index -= set(keys)
    return found


def idle(store: ChildEnd) -> bool:
    """Return True once no slot is lent or filled."""
    now = store.do(statistics)
    return not any(space.loads or space.filling for space in now.namespaces) and not now.waiting


@contextmanager
def pull_stopped(store: ChildEnd, saver: ChildEnd, folder: Path, step: str = "before copy") -> Iterator[Any]:
    """Stop the store's next pull from a saver at a step; yield the gate."""
    from faults.gates import Gate

    store.do(shut_there, step, folder, saver.cluster_id)
    gate = Gate(folder)
    try:
        yield gate
    finally:
        gate.open()
        store.do(open_there)


def scribble(world: World, blocks: Sequence[int]) -> None:
    """Keep changing blocks in a thread, until :func:`stop_scribbling`."""
    world.memory["stop"] = stop = threading.Event()
    views = tensor_views(world.caches["kv"])

    def run() -> None:
        while not stop.is_set():
            for view in views:
                for block in blocks:
                    view[block].reshape(-1).view(np.uint8)[:] += 1

    world.memory["scribbler"] = thread = threading.Thread(target=run, name="scribbler")
    thread.start()


def stop_scribbling(world: World) -> None:
    world.memory["stop"].set()
    world.memory.pop("scribbler").join()


def flip(world: World, name: bytes, key: bytes, tensor: int) -> None:
    """Flip a bit of a published block in the store's own memory; ``world`` is a store."""
    server = world.memory["server"]
    space = server._spaces["", name]  # noqa: SLF001 (memory that goes bad)
    (slot,) = space.slots.run(msgspec.msgpack.encode([key])).tolist()
    tensor_views(space.cache)[tensor][slot].reshape(-1).view(np.uint8)[BLOCK // 2] ^= 8


def other_desc(tensors: int = TENSORS, block: int = BLOCK) -> CacheDesc:
    return CacheDesc(tensors, [BLOCKS, block], DataType.DT_UINT8)


__all__ = [name for name in globals() if name[0] != "_"] + ["wait_until"]
