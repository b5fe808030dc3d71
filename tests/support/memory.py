"""For the tests of calls inside one process: caches over plain memory, and proof that a refused call did nothing."""

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final

import pytest

from llm_datadist import Cache, CacheDesc, DataType, LLMException, LLMStatusCode, Placement
from tests.support.world import World, read


def map_at(address: int, nbytes: int) -> int:
    """Map zero bytes at this address, where nothing is, and return it. Sanitizers take those below 1 << 44."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    where = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), mmap.PROT_READ | mmap.PROT_WRITE
    fixed_noreplace = 0x100000
    found = libc.mmap(*where, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace, -1, ctypes.c_long(0))
    assert found == address
    return address


#: Two pages that have these addresses in each process that imports this: a table of calls names them beforehand.
FIXED_ADDRS: Final = [map_at(1 << 45, 2 * mmap.PAGESIZE), (1 << 45) + mmap.PAGESIZE]


def desc(
    num_tensors: int = 2,
    shape: Sequence[int] = (4, 16),
    data_type: DataType = DataType.DT_FLOAT,
    placement: Placement = Placement.DEVICE,
) -> CacheDesc:
    """Return a descriptor; by default 2 tensors of 4 rows (or blocks) of 64 bytes on the device."""
    return CacheDesc(num_tensors, list(shape), data_type, placement)


def user_memory(world: World, name: str, cache_desc: CacheDesc) -> list[int]:
    """Return the addresses of fresh memory of the user for a cache; it lives as long as the world's initialisation."""
    size, placement = cache_desc.size, cache_desc.placement
    made = [world.user_memory(size, placement) for _ in range(cache_desc.num_tensors)]
    world.memory[name] = [memory for _, memory in made]
    return [address for address, _ in made]


def cpu_cache(world: World, name: str, cache_desc: CacheDesc) -> Cache:
    cache = Cache.create_cpu_cache(cache_desc, user_memory(world, name, cache_desc))
    world.caches[name] = cache
    return cache


def pool(world: World, name: str = "device") -> Any:
    return next(each for each in world.dd.statistics().pools if each.name == name)


def state(world: World) -> tuple[Any, dict[str, Any]]:
    """Return all that a refused call must leave alone: statistics (but operations and ages) and every byte there is."""
    statistics = world.dd.statistics()
    keys = tuple(replace(key, age_seconds=0.0) for key in statistics.keys)
    caches = {
        name: (list(cache.tensor_addrs), [tensor.tobytes() for tensor in read(cache)])
        for name, cache in world.caches.items()
        if cache.tensor_addrs
    }
    return replace(statistics, operations=(), keys=keys), caches


@contextmanager
def refused(
    world: World, kind: type[Exception], *parts: str, status: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """The block raises ``kind`` with ``status``, in one line that holds all ``parts``; and nothing has happened."""
    before = state(world)
    with pytest.raises(kind) as caught:
        yield caught
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is status
    text = str(caught.value)
    assert "\n" not in text
    assert [part for part in parts if part not in text] == [], text
    assert state(world) == before
    world.dd.check_integrity()
