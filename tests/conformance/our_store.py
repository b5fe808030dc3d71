"""A prefix store and its engines, each a process, and the harm that `test_wrong_kv.py` does to them."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from faults.gates import Gate, watched
from faults.store import server
from faults.store.history import stop_once
from llm_datadist import CacheDesc, DataType
from llm_datadist.errors import LLMException
from llm_datadist.store import StoreClient, StoreOptions, namespace
from llm_datadist.views import tensor_views
from tests.support.ends import Call, ChildEnd, begin_there, frozen, result_there, runs_there
from tests.support.kv import POISON, bytes_of
from tests.support.linking import free_port
from tests.support.moves import wait_until
from tests.support.world import World, small_pool

_PAGE: Final = 1 << 16
#: Blocks in the memory of an engine.
BLOCKS: Final = 16


@dataclass(frozen=True)
class Identity:
    """Whatever, changed, makes other KV bytes for the same tokens, or other keys for them."""

    revision: str = "main"
    weights: str = "weights of May"
    layout: str = "NHD"
    dtype: str = "bfloat16"
    rope: str = "theta 10000"
    tp_size: int = 2
    tp_rank: int = 0
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = "0"
    salt: str = ""

    def other(self, field: str) -> "Identity":
        """Return an identity that differs in this field only."""
        old: Any = getattr(self, field)
        changed: dict[str, Any] = {field: old + 1 if isinstance(old, int) else f"{old}'"}
        return replace(self, **changed)

    @property
    def digest(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


@dataclass(frozen=True)
class Shape:
    """Geometry of an engine's KV: tensors (layers), and bytes of one block in each."""

    tensors: int = 2
    nbytes: int = 8192


USUAL: Final = Shape()


def namespace_of(identity: Identity) -> bytes:
    parts = identity.revision, identity.weights, identity.layout, identity.dtype, identity.rope
    return namespace(
        fingerprint=repr(parts).encode(),
        tp_size=identity.tp_size,
        tp_rank=identity.tp_rank,
        hash_algorithm=identity.hash_algorithm,
        hash_seed=identity.hash_seed,
        salt=identity.salt,
    )


# --- at an engine -----------------------------------------------------------------------------------------------------


def _desc(shape: Shape) -> CacheDesc:
    return CacheDesc(shape.tensors, [BLOCKS, shape.nbytes], DataType.DT_UINT8)


def _open(world: World, address: str, name: bytes, shape: Shape, verify: bool) -> None:
    world.caches["kv"] = world.cm.allocate_blocks_cache(_desc(shape))
    # A busy machine answers late; a lookup that is given up is a miss.
    options = StoreOptions(lookup_ms=5000, save_ms=2000, pause_seconds=0.001, verify=verify)
    world.memory["client"] = client = StoreClient(world.dd, address, name, options)
    assert client.connect(10.0)
    _write(world, range(BLOCKS), np.uint8(POISON))


def _write(world: World, blocks: Sequence[int], data: Any) -> None:
    filled = np.broadcast_to(data, (len(blocks), len(tensor_views(world.caches["kv"])), 1)) if data.ndim == 0 else data
    for tensor, view in enumerate(tensor_views(world.caches["kv"])):
        view[list(blocks)] = filled[:, tensor]


def _read(world: World, blocks: Sequence[int]) -> NDArray[np.uint8]:
    return np.stack([view[list(blocks)] for view in tensor_views(world.caches["kv"])], axis=1)


def _save(world: World, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
    try:
        world.memory["client"].save(keys, world.caches["kv"], list(blocks))
    except LLMException:
        return


def _find(world: World, keys: Sequence[bytes]) -> int:
    world.memory["hit"] = hit = world.memory["client"].lookup(keys)
    return len(hit)


def _load(world: World, blocks: Sequence[int], gate: Path | None = None) -> bool:
    client, hit = world.memory["client"], world.memory["hit"]
    try:
        if gate is None:
            client.load(hit, world.caches["kv"], list(blocks), release=False)
        else:
            with watched(stop_once("copy", Gate(gate))):
                client.load(hit, world.caches["kv"], list(blocks), release=False)
    except LLMException:
        return False
    return True


def _release(world: World) -> None:
    world.memory["client"].release(world.memory["hit"])


def _reuse(world: World, shape: Shape) -> None:
    """Free the cache and have another one in the same memory, with other bytes."""
    views = tensor_views(world.caches["kv"])
    places, other = [view.ctypes.data for view in views], [~view for view in views]
    world.cm.deallocate_blocks_cache(world.caches["kv"])
    world.caches["kv"] = world.cm.allocate_blocks_cache(_desc(shape))
    assert list(world.caches["kv"].tensor_addrs) == places
    for view, data in zip(tensor_views(world.caches["kv"]), other, strict=True):
        view[:] = data


def _close(world: World) -> None:
    world.memory.pop("client").close()
    world.stop()


class StoreEngine:
    """A child process with KV memory and a StoreClient. Its bytes follow from identity, key and place."""

    def __init__(self, end: ChildEnd, identity: Identity, shape: Shape) -> None:
        self.end, self.identity, self.shape = end, identity, shape

    def expected(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """Return the right bytes of these keys, ``(keys, tensors, nbytes)``."""
        numbers = self.shape.tensors, self.shape.nbytes
        return np.stack([bytes_of(self.identity.digest, key, *numbers) for key in keys])

    def compute(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write the right bytes of these keys into the engine's blocks."""
        self.end.do(_write, blocks, self.expected(keys))

    def wrong(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Return how many bytes of the engine's blocks are not those of these keys."""
        return int((self.end.do(_read, blocks) != self.expected(keys)).sum())

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Save blocks. Return if the store refuses them, or the save fails, too: the engine goes on then."""
        self.end.do(_save, keys, blocks)

    def give_up(self) -> None:
        """Wait until the engine has lost patience with the save that is under way."""
        wait_until(lambda: not self.end.do(runs_there, "save"))

    def find(self, keys: Sequence[bytes]) -> int:
        """Look keys up; return how many, from the first on, the store claims to have. The engine keeps the hit."""
        return self.end.do(_find, keys)

    def load(self, blocks: Sequence[int]) -> bool:
        """Load the last hit, and keep it; return whether the store claims that all bytes are right."""
        return self.end.do(_load, blocks)

    def release(self) -> None:
        """Give the last hit back, but remember it, as a caller does that uses it once more."""
        self.end.do(_release)

    def reuse(self) -> None:
        """Free the KV memory, and use the same memory for something else, as an engine that preempts does."""
        self.end.do(_reuse, self.shape)


class HarmedStore:
    """A store process, stopped and killed as the causes ask for. Its readers compare digests if ``verify`` is set."""

    capacity = 8

    def __init__(self, transport: str, *, verify: bool = True) -> None:
        self._transport, self._verify = transport, verify
        self._address = f"127.0.0.1:{free_port()}"
        self._folder = tempfile.TemporaryDirectory(prefix="wrong-kv-")
        self._numbers = count()
        self._ids: dict[str, int] = {}
        self._engines: list[StoreEngine] = []
        self._end = self._start()

    def _start(self) -> ChildEnd:
        end = ChildEnd("store")
        # A namespace's share of the pool: two tensors of eight blocks, and a page for the bookkeeping.
        memory = 4 * (max(_PAGE, self.capacity * USUAL.nbytes) * USUAL.tensors + _PAGE)
        end.do(server.start, self._address, memory, self._transport, self._new("events"), 4, 5000)
        return end

    def _new(self, name: str) -> Path:
        return Path(self._folder.name) / f"{name} {next(self._numbers)}"

    def _gate(self) -> Path:
        folder = self._new("gate")
        folder.mkdir()
        return folder

    def engine(self, identity: Identity, shape: Shape = USUAL, name: str = "") -> StoreEngine:
        number = self._ids.setdefault(name or f"engine {next(self._numbers)}", len(self._ids) + 1)
        end = ChildEnd(f"engine {number}")
        end.start("PROMPT", number, extra={"llm.Transport": self._transport}, sync_kv_timeout=5000, **small_pool())
        end.do(_open, self._address, namespace_of(identity), shape, self._verify)
        self._engines.append(StoreEngine(end, identity, shape))
        return self._engines[-1]

    def during_save(
        self, engine: StoreEngine, keys: Sequence[bytes], blocks: Sequence[int], what: Callable[[], None]
    ) -> None:
        """Have the engine save; call ``what`` once, before the last byte has moved."""
        folder = self._gate()
        self._end.do(server.shut, "copy", folder)
        engine.end.do(begin_there, "save", _save, keys, blocks)
        Gate(folder).wait()
        what()
        Gate(folder).open()
        if engine.end.code is None:
            engine.end.do(result_there, "save")

    def during_load(self, engine: StoreEngine, blocks: Sequence[int], what: Callable[[], None]) -> bool:
        """Have the engine load its last hit; call ``what`` once, before the last byte has moved."""
        folder = self._gate()
        loading = Call(engine.end.do, _load, blocks, folder)
        Gate(folder).wait()
        what()
        Gate(folder).open()
        return bool(loading.result())

    def outlive(self, engine: StoreEngine) -> None:
        """Stop an engine until the store has given it up."""
        with frozen(engine.end):
            self._end.do(server.alone, engine.end.cluster_id)

    def restart(self) -> None:
        """Kill the store, and start it again at the same place."""
        self._end.kill()
        self._end = self._start()

    def flip(self, block: NDArray[np.uint8]) -> None:
        assert self._end.do(server.flip, 0.5, block[0].tobytes())

    def close(self) -> None:
        for engine in self._engines:
            if engine.end.code is None:
                engine.end.do(_close)
                engine.end.close()
        assert self._end.do(server.left_over) == ""
        self._end.do(server.stop)
        self._end.close()
        self._folder.cleanup()
