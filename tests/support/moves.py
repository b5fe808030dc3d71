"""What the transfer tests share: caches from a short description, calls by name, oracles, pictures of an end."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement
from llm_datadist.errors import DeadlineExceeded, LLMException, LLMStatusCode
from tests.support.world import World, fill, read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from tests.support.ends import End

Bytes = list[NDArray[np.uint8]]
BLOCKS = BlocksCacheKey(1, 0)


@dataclass(frozen=True)
class Spec:
    """A cache to make: ``rows`` blocks or batch rows of ``stride`` bytes in each of ``tensors`` tensors.

    ``memory``: "pool"; "inside" registers memory that lies in a pool; "private" registers memory of the process's own,
    "half" the first half of the tensors in a pool and the others the process's own.
    """

    tensors: int = 4
    rows: int = 8
    stride: int = 48
    keys: tuple[CacheKey, ...] = ()
    blocks: bool = False
    blocks_key: BlocksCacheKey | None = None
    placement: Placement = Placement.DEVICE
    memory: str = "pool"
    accessible: bool | None = None
    granted_only: bool = False  # of a blocks cache
    data_type: DataType = DataType.DT_UINT8
    dims: tuple[int, ...] = ()  # of a block or row; left out: one

    @property
    def desc(self) -> CacheDesc:
        dims = self.dims or (self.stride // self.data_type.itemsize,)
        return CacheDesc(self.tensors, [self.rows, *dims], self.data_type, self.placement)


@dataclass(frozen=True)
class Use:
    """Stands for a cache of the end where a call arrives."""

    name: str


def make(world: World, name: str, spec: Spec, seed: int) -> Bytes:
    """Make a cache and fill every byte of it; return the bytes."""
    cm, desc, access = world.cm, spec.desc, {"granted_only": True} if spec.granted_only else {}
    world.memory.pop(name, None)
    if spec.memory == "pool":
        if spec.blocks:
            cache = cm.allocate_blocks_cache(desc, spec.blocks_key, **access)
        else:
            cache = cm.allocate_cache(desc, list(spec.keys))
    else:
        in_pool = {"inside": spec.tensors, "half": spec.tensors // 2, "private": 0}[spec.memory]
        addrs = []
        if in_pool:
            world.caches[f"memory of {name}"] = under = cm.allocate_blocks_cache(replace(spec, tensors=in_pool).desc)
            addrs = list(under.tensor_addrs)
        own = [world.user_memory(spec.rows * spec.stride, spec.placement) for _ in range(spec.tensors - in_pool)]
        world.memory[name] = [memory for _, memory in own]
        addrs += [address for address, _ in own]
        if spec.blocks:
            cache = cm.register_blocks_cache(desc, addrs, spec.blocks_key, spec.accessible, **access)
        else:
            cache = cm.register_cache(desc, addrs, list(spec.keys), spec.accessible)
    world.caches[name] = cache
    return fill(cache, seed)


def refill(world: World, name: str, seed: int) -> Bytes:
    """Fill every byte of a cache anew; return the bytes."""
    return fill(world.caches[name], seed)


def show(world: World, name: str) -> Bytes:
    return read(world.caches[name])


def cache_id(world: World, name: str) -> int:
    return world.caches[name].cache_id


def call(world: World, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method of the cache manager; :class:`Use` arguments become caches of this end."""
    real = [world.caches[a.name] if isinstance(a, Use) else a for a in args]
    return getattr(world.cm, method)(*real, **kwargs)


def forget(world: World, name: str) -> None:
    """Give a cache back, whatever it is."""
    cache = world.caches[name]
    if name in world.memory:
        world.cm.unregister_cache(cache.cache_id)
    elif cache.is_blocks_cache:
        world.cm.deallocate_blocks_cache(cache)
    else:
        world.cm.deallocate_cache(cache)


def picture(world: World) -> Any:
    """Return ``statistics()`` without what changes by itself or is meant to, checked.

    By itself: ages, lost links, UCX's CPU, bytes that peers report later.
    """
    world.dd.check_integrity()
    statistics = world.dd.statistics()
    keys = tuple(replace(key, age_seconds=0.0) for key in statistics.keys)
    later: dict[str, Any] = {"progress_seconds": 0.0, "served_bytes": None, "received_bytes": None}
    links = tuple(replace(link, **later) for link in statistics.links)
    return replace(
        statistics,
        keys=keys,
        links=links,
        operations=(),
        devices=(),
        redials=(),
        links_lost={},
        lost_peers=(),
        reconnects=0,
    )


def asked(before: Any) -> Any:
    """Return a picture without the number of kept answers: a refused call may have asked the peer where a cache is."""
    return replace(before, links=tuple(replace(link, resolved=0) for link in before.links))


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Poll until the condition holds; more seldom, the longer it takes: most conditions ask another process."""
    since = time.monotonic()
    while not condition():
        waited = time.monotonic() - since
        assert waited < seconds, f"not within {seconds} s"
        time.sleep(min(0.002 + waited / 50, 0.01))


def in_time(end: End, function: Callable[..., object], *args: Any) -> bool:
    """Make a call whose time is short; return False if that was over: a loaded machine may need several."""
    try:
        end.do(function, *args)
    except DeadlineExceeded:
        return False
    return True


def nothing_happens(ends: Sequence[End], names: Iterable[str], action: Callable[[], None]) -> None:
    """Run the action; afterwards tables and every byte of the named caches are as before, at all ends."""
    # The end that was linked learns that the handshake is over a little after the one that linked.
    wait_until(lambda: not any(link.state == "handshake" for end in ends for link in end.do(picture).links))
    before = [asked(end.do(picture)) for end in ends]
    bytes_before = [end.do(_all_bytes, tuple(names)) for end in ends]
    action()
    # A release is on its way when the call returns: what must come is waited for, what must not never shows.
    wait_until(lambda: [end.do(picture).pins for end in ends] == [each.pins for each in before])
    for end, was in zip(ends, before, strict=True):
        assert asked(end.do(picture)) == was
    for end, old in zip(ends, bytes_before, strict=True):
        new = end.do(_all_bytes, tuple(names))
        assert new.keys() == old.keys()
        for name in old:
            same_bytes(new[name], old[name])


def _all_bytes(world: World, names: tuple[str, ...]) -> dict[str, Bytes]:
    return {name: show(world, name) for name in names if name in world.caches}


def refused(
    ends: Sequence[End],
    names: Iterable[str],
    kind: type[Exception],
    parts: Sequence[str],
    function: Callable[..., object],
    *args: Any,
    status: LLMStatusCode = LLMStatusCode.LLM_PARAM_INVALID,
    **kwargs: Any,
) -> None:
    """``function(*args)`` at the first end raises ``kind``, in one line that holds ``parts``, and nothing happens."""

    def attempt() -> None:
        with pytest.raises(kind) as caught:
            ends[0].do(partial(function, **kwargs), *args)
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code is status
        assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)
        assert "\n" not in str(caught.value)

    try:
        nothing_happens(ends, names, attempt)
    except BaseException as error:
        error.add_note(f"{function.__name__} with {args} {kwargs}")
        raise


def moved(
    dst: Bytes,
    src: Bytes,
    pairs: Iterable[tuple[int, int]],
    tensors: Iterable[tuple[int, int]] | None = None,
    nbytes: int | None = None,
) -> Bytes:
    """The oracle: (dst block, src block) pairs take effect one after the other, for every (dst, src) tensor pair.

    ``nbytes`` of each block move; None: as many as both ends have.
    """
    result = [tensor.copy() for tensor in dst]
    pairs = list(pairs)
    for to, from_ in [(t, t) for t in range(len(dst))] if tensors is None else tensors:
        for to_row, from_row in pairs:
            length = min(result[to].shape[1], src[from_].shape[1]) if nbytes is None else nbytes
            result[to][to_row, :length] = src[from_][from_row, :length]
    return result


def same_bytes(actual: Bytes, expected: Bytes) -> None:
    assert len(actual) == len(expected)
    for tensor, (got, wanted) in enumerate(zip(actual, expected, strict=True)):
        np.testing.assert_array_equal(got, wanted, err_msg=f"tensor {tensor}")
