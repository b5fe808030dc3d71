"""Allocating, registering and giving back caches, and the pools they come from, also of huge pages (interface §6.1 to
§6.7, §6.15, §7); what moves between caches of all placements and registered memory, and how a link reaches non-pool
memory of another process (interface R16). Wrong arguments by themselves: test_bad_input_calls.py."""

import ctypes
import itertools
import json
import mmap
import resource
import time
from collections.abc import Iterator
from dataclasses import replace
from errno import EINVAL, EIO, EMFILE, ENOMEM, EPERM
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist._cache import local_caches as stores
from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._cache.local_caches import LocalCaches
from llm_datadist._cache.registry import Effects
from llm_datadist._deadline import Deadline
from llm_datadist._memory.device import HostDevice
from llm_datadist._memory.guards import GuardTable
from llm_datadist.config import Options
from llm_datadist.errors import LLMException, NotLinked, OutOfMemory, ParamError
from llm_datadist.types import LLMRole
from tests.support.ends import ChildEnd
from tests.support.huge import HUGE, given, mapped_huge, without_huge_pages
from tests.support.kinds import Bytes, LocalEnd
from tests.support.linking import explain
from tests.support.memory import FIXED_ADDRS, desc, map_at, refused, state, user_memory
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, forget, make, moved, same_bytes, show
from tests.support.moves import refused as refused_there
from tests.support.pairs import Pair
from tests.support.seccomp import fail, known
from tests.support.world import World, fill, make_config

pytestmark = pytest.mark.covers(
    "Registry",
    "MemInfo",
    "Cache.cache_id",
    "CacheKeyByIdAndIndex.cache_id",
    "CacheManager: allocate_blocks_cache allocate_cache deallocate_blocks_cache deallocate_cache register_blocks_cache",
    "CacheManager: register_cache remap_registered_memory remove_cache_key unregister_cache",
    "LLMDataDist: check_integrity explain",
    "LLMStatusCode: LLM_OUT_OF_MEMORY LLM_FEATURE_NOT_ENABLED",
    "errors: NotLinked OutOfMemory",
    "llm: MemPoolConfig HostMemPoolConfig",
)

PAGE = 4096


# --- registering ------------------------------------------------------------------------------------------------------
def test_only_unregister_ends_what_is_registered_and_no_byte_of_it_changes(world: World) -> None:
    there, nothing = user_memory(world, "there", desc()), state(world)
    numbers: list[Any] = [np.uint64(there[0]), np.int64(there[1])]
    for number, (placement, addrs) in enumerate(itertools.product(Placement, ([there[0]] * 2, numbers))):
        rows = world.cm.register_cache(desc(placement=placement), addrs, [CacheKey(1, 1), CacheKey(1, 2)])
        blocks = world.cm.register_blocks_cache(desc(placement=placement), addrs, BlocksCacheKey(1))
        assert (rows.tensor_addrs, blocks.tensor_addrs) == (addrs, addrs)
        assert all(type(address) is int for address in rows.tensor_addrs)
        kinds = [(each.cache_id, each.is_blocks_cache) for each in (rows, blocks)]
        assert kinds == [(2 * number + 1, False), (2 * number + 2, True)]
        world.cm.deallocate_cache(rows)
        world.cm.deallocate_blocks_cache(blocks)
        assert rows.tensor_addrs == blocks.tensor_addrs == []
        assert world.dd.statistics().caches.registered == 2
        assert len(world.dd.statistics().keys) == 3
        world.cm.unregister_cache(rows.cache_id)
        assert [each.cache_id for each in world.dd.statistics().keys] == [blocks.cache_id]
        world.cm.unregister_cache(blocks.cache_id)
        assert state(world) == nothing
    assert not any(tensor.any() for tensor in world.memory["there"])


@pytest.mark.parametrize("reserved", [False, True])
@pytest.mark.parametrize("call", ["register_cache", "register_blocks_cache"])
def test_memory_that_is_not_there_is_refused_with_its_place(world: World, call: str, reserved: bool) -> None:
    """The address of a device is nothing here, or reserved: mapped, and for the device only."""
    size, (good,) = 128 * PAGE, user_memory(world, "good", desc(1, (128, PAGE), DataType.DT_INT8))
    geometry = desc(shape=(1, size - 6), data_type=DataType.DT_INT8)
    libc = ctypes.CDLL(None)
    for hidden in (0, 127) if reserved else (0, 70, 127):
        where = map_at(3 << 44, size)
        page = ctypes.c_void_p(where + hidden * PAGE), ctypes.c_size_t(PAGE)
        assert (libc.mprotect(*page, 0) if reserved else libc.munmap(*page)) == 0
        with refused(world, ParamError, f"addrs[1]={where + 3:#x}: its {size - 6} bytes must be", "device memory"):
            getattr(world.cm, call)(geometry, [good, where + 3])
        assert libc.munmap(ctypes.c_void_p(where), ctypes.c_size_t(size)) == 0


def test_registering_hundreds_of_gigabytes_takes_no_memory_for_them(world: World) -> None:
    """Reserved without commitment, as a program does that fills it later."""
    nbytes, map_noreserve = 256 << 30, 0x4000
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | map_noreserve) as huge:
        address = np.frombuffer(huge, np.uint8).ctypes.data
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        cache = world.cm.register_cache(desc(1, (1, nbytes), DataType.DT_INT8), [address])
        world.cm.unregister_cache(cache.cache_id)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB


def test_remap_needs_a_link_and_does_nothing(local_pair: Pair) -> None:
    local_pair.start(linked=False)
    world, info = local_pair.prompt.world, MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 64)  # type: ignore[attr-defined]
    with refused(world, NotLinked, "remap_registered_memory", status=LLMStatusCode.LLM_NOT_YET_LINK):
        world.cm.remap_registered_memory(info)
    local_pair.link()
    before = state(world)
    for infos in (info, [info], [info, info]):
        world.cm.remap_registered_memory(infos)
        assert state(world) == before


# --- what is left behind ----------------------------------------------------------------------------------------------
def test_a_full_guard_table_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    # A million slots take half a minute to fill and to look through.
    monkeypatch.setattr(stores, "GuardTable", partial(GuardTable, slots=4))
    options = Options.parse(make_config(), LLMRole.PROMPT)
    store = LocalCaches(options, HostDevice(), HostDevice(), bytes(16))
    small = store.exports.guards
    soon = Deadline(10_000)
    geometry = store.allocate(Geometry.of(desc(), CacheKind.CACHE), [], soon).geometry
    keys = [(CacheKey(1, n), n) for n in range(2)]
    for _ in range(3):
        with pytest.raises(OutOfMemory, match="guard table is full"):
            store.allocate(geometry, keys, soon)
        with pytest.raises(OutOfMemory, match="guard table is full"):
            store.register(geometry, FIXED_ADDRS, keys, remote_accessible=True)
        assert small.live == 1
        assert [each.statistics().live_allocations for each in store.pools] == [2, 0]
    store.allocate(geometry, keys[:1], soon)
    store.check_integrity()
    store.close()


def test_readers_are_told_before_the_memory_goes(world: World) -> None:
    store = world.probe.engine.caches
    guards = store.exports.guards
    advanced, retired = guards.allocate(), guards.allocate()
    told: list[bool] = []

    def free() -> None:
        told.extend(guards.load(guard.slot) != guard.generation for guard in (advanced, retired))

    storage = SimpleNamespace(tag=1, allocation=SimpleNamespace(free=free), non_pool=False)
    freed: Any = SimpleNamespace(storage=storage, guard=retired)
    store.apply(Effects(advance=[advanced], retire=[retired], free=[freed]))
    assert told == [True, True]
    assert guards.live == 1
    guards.release(advanced.slot)


def test_effects_that_are_overtaken_by_those_of_the_last_release_harm_nobody(world: World) -> None:
    """remove_cache_key in one thread, the end of the last pin in another: either may be carried out first.

    Regression: ``remove_cache_key`` raised ValueError, and could have voided the guard of another cache for good.
    """
    store, peer = world.probe.engine.caches, object()
    cache = world.cm.allocate_cache(desc(), [CacheKey(1, 77)])
    pin = store.registry.pin(peer, time.monotonic() + 60, key=(0, 77, 0))
    overtaken = store.registry.remove_key((0, 77, 0))
    store.apply(store.registry.release(peer, pin.pin_id))
    other = world.cm.allocate_cache(desc(), [CacheKey(1, 78)])  # its key's guard has the slot that was given back
    store.apply(overtaken)
    store.check_integrity()
    entry, _, binding = store.registry.find(key=(0, 78, 0))
    assert binding is not None
    for guard in (entry.guard, binding.guard):
        assert store.exports.guards.load(guard.slot) == guard.generation
    world.cm.deallocate_cache(cache)
    world.cm.remove_cache_key(CacheKey(1, 78))
    world.cm.deallocate_cache(other)


# --- no pool ----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("missing", Placement)
@pytest.mark.parametrize("both", [False, True])
def test_r12_without_a_pool_allocation_names_the_missing_option(end: LocalEnd, missing: Placement, both: bool) -> None:
    options = {Placement.DEVICE: "mem_pool_cfg", Placement.HOST: "host_mem_pool_cfg"}
    end.start("PROMPT", 1, **{option: None for place, option in options.items() if both or place is missing})
    cm, words = end.world.cm, (f"cache_desc.placement={missing.name}", options[missing], "llm.")
    with refused(end.world, ParamError, *words):
        cm.allocate_cache(desc(placement=missing), [CacheKey(1, 1)])
    with refused(end.world, ParamError, *words):
        cm.allocate_blocks_cache(desc(placement=missing), BlocksCacheKey(1))
    before = state(end.world)
    cm.deallocate_cache(Cache(1, desc(), [], is_blocks_cache=False))
    cm.deallocate_blocks_cache(Cache(1, desc(), [], is_blocks_cache=True))
    cm.remove_cache_key(CacheKey(1, 1))
    assert state(end.world) == before
    if not both:
        cm.allocate_cache(desc(placement=next(place for place in Placement if place is not missing)))


POOL = json.dumps({"memory_size": 4 * HUGE, "page_shift": 12, "huge_pages": True})
SMALL = json.dumps({"memory_size": 4 * HUGE, "page_shift": 12})
#: Blocks that cross the border of two huge pages.
SPEC = Spec(3, 8, 200_000, blocks=True, blocks_key=BLOCKS)
PAIRS = [(1, 6), (4, 0), (7, 7)]


def huge(world: World) -> tuple[int, int]:
    return mapped_huge("device"), mapped_huge("host")


@pytest.mark.skipif(not given(), reason="this host gives no huge pages to shared memory")
@pytest.mark.parametrize("prefault", ["0", "1"])
def test_blocks_come_and_go_and_peers_map_the_pool_as_huge_pages(pair: Pair, prefault: str) -> None:
    extra = {"llm.PoolPrefault": prefault}
    settings: dict[str, Any] = {"mem_pool_cfg": POOL, "host_mem_pool_cfg": SMALL, "extra": extra}
    pair.start(rca=True, **settings)
    theirs, ours = pair.prompt.do(make, "kv", SPEC, 1), pair.decoder.do(make, "kv", SPEC, 2)
    numbers = [source for _, source in PAIRS], [there for there, _ in PAIRS]
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), *numbers)
    ours = moved(ours, theirs, PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), ours)
    pair.decoder.do(call, "push_blocks", BLOCKS, Use("kv"), *numbers)
    theirs = moved(theirs, ours, PAIRS)
    same_bytes(pair.prompt.do(show, "kv"), theirs)
    own = 4 * HUGE if pair.transport != "inproc" else 8 * HUGE  # two pools in one process
    for end in (pair.prompt, pair.decoder):
        device, host = end.do(huge)
        assert host == 0
        assert device >= own
    if pair.transport == "shm":
        assert pair.decoder.do(huge)[0] > own  # what it has touched of the peer's


def start_in_vain(world: World, options: dict[str, str], code: int) -> tuple[type, str]:
    fail("madvise", code, third=25) if code else without_huge_pages()  # MADV_COLLAPSE
    with pytest.raises(LLMException, match=r"huge[_ ]pages") as failed:
        world.start("DECODER", 2, options)
    world.dd.init(make_config())  # nothing is left of the first: it can be initialised still
    return failed.type, str(failed.value)


COLLAPSING = pytest.mark.skipif(not given() or not known(), reason="no huge pages here, or calls that are not known")


@pytest.mark.parametrize(
    ("option", "code", "expected", "part"),
    [
        ("mem_pool_cfg", 0, ParamError, "'device'"),
        ("host_mem_pool_cfg", 0, ParamError, "'host'"),
        *(
            pytest.param("mem_pool_cfg", code, kind, f"[Errno {code}]", marks=COLLAPSING)
            for kind, some in {ParamError: (EINVAL, EPERM), OutOfMemory: (ENOMEM,), LLMException: (EMFILE, EIO)}.items()
            for code in some
        ),
    ],
)
def test_init_without_huge_pages_fails_with_a_type_and_a_name_and_leaves_nothing(
    option: str, code: int, expected: type, part: str
) -> None:
    end = ChildEnd("without huge pages")  # of its own: the setting stays with the process
    raised, text = end.do(start_in_vain, make_config(**{option: POOL}), code)
    end.stop()
    end.close()
    assert (raised, part in text) == (expected, True), text


BLOCK_PAIRS = [(1, 6), (4, 0)]
RCA = pytest.mark.parametrize("rca", [False, True])


def blocks(world: World, method: str) -> None:
    call(world, method, BLOCKS, Use("kv"), [s for _, s in BLOCK_PAIRS], [d for d, _ in BLOCK_PAIRS])


def exchange(pair: Pair, there: Spec, here: Spec, *, push: bool) -> None:
    """Pull blocks, a row, and a row into blocks, copy, then push, between such caches; compare every byte there is."""
    prompt, decoder = pair.prompt, pair.decoder
    kinds = {"kv": {"blocks": True, "blocks_key": BLOCKS}, "rows": {}, "pieces": {"blocks": True}}
    theirs, ours = (
        {kind: end.do(make, kind, replace(spec, **change), 3) for kind, change in kinds.items()}  # type: ignore[arg-type]
        for end, spec in ((prompt, there), (decoder, here))
    )
    rows = prompt.do(cache_id, "rows")
    decoder.do(blocks, "pull_blocks")
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, rows, 0), Use("rows"), 5)
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, rows, 7), Use("pieces"), [], [3])
    ours["kv"] = moved(ours["kv"], theirs["kv"], BLOCK_PAIRS)
    ours["pieces"] = moved(ours["pieces"], theirs["rows"], [(3, 7)])
    ours["rows"] = moved(ours["rows"], theirs["rows"], [(5, 0)])
    decoder.do(call, "copy_blocks", Use("kv"), {0: [7]})
    decoder.do(call, "copy_cache", Use("rows"), Use("rows"), 7, 5)
    for kind, copied in (("kv", (7, 0)), ("rows", (7, 5))):
        ours[kind] = moved(ours[kind], ours[kind], [copied])
    check(pair, theirs, ours)
    if push:
        decoder.do(blocks, "push_blocks")
        decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, rows, 6), Use("rows"), 3)
        theirs["kv"] = moved(theirs["kv"], ours["kv"], BLOCK_PAIRS)
        theirs["rows"] = moved(theirs["rows"], ours["rows"], [(6, 3)])
        check(pair, theirs, ours)
    for end, kind in itertools.product((prompt, decoder), kinds):
        end.do(forget, kind)


def check(pair: Pair, theirs: dict[str, Bytes], ours: dict[str, Bytes]) -> None:
    for end, caches in ((pair.prompt, theirs), (pair.decoder, ours)):
        for kind, wanted in caches.items():
            same_bytes(end.do(show, kind), wanted)


@pytest.mark.gpu
@RCA
def test_r16_all_placements_and_registered_memory_in_a_pool_move_also_at_odd_places(pair: Pair, rca: bool) -> None:
    pair.start(rca=rca)
    for of, to in itertools.product(Placement, Placement):
        exchange(pair, Spec(placement=of), Spec(placement=to), push=rca)
    # None means accessible for both placements.
    for accessible, placement in itertools.product((None, True), Placement):
        there = Spec(memory="inside", accessible=accessible, placement=placement)
        exchange(pair, there, Spec(memory="private", accessible=False), push=rca)  # what is used here need not be
    if pair.transport == "inproc":
        exchange(pair, Spec(memory="private"), Spec(memory="private"), push=rca)
    src = pair.prompt.do(_shifted)
    dst = pair.decoder.do(make, "kv", Spec(blocks=True, memory="inside", accessible=False), 2)
    pair.decoder.do(blocks, "pull_blocks")
    wanted = moved(dst, src, BLOCK_PAIRS)
    same_bytes(pair.decoder.do(show, "kv"), wanted)
    if rca:
        pair.decoder.do(blocks, "push_blocks")
        same_bytes(pair.prompt.do(show, "kv"), moved(src, wanted, BLOCK_PAIRS))


# --- registered memory ------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@RCA
def test_registered_non_pool_memory_of_another_process_is_refused_with_what_to_do(shm_pair: Pair, rca: bool) -> None:
    pair = shm_pair
    pair.start(rca=rca)
    ends, names = (pair.decoder, pair.prompt), ["kv", "rows"]
    for kinds in (("private", "half"), ("half", "private")):
        pair.prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS, memory=kinds[0]), 1)
        pair.prompt.do(make, "rows", Spec(memory=kinds[1]), 2)
        pair.decoder.do(make, "kv", Spec(blocks=True), 3)
        pair.decoder.do(make, "rows", Spec(), 4)
        rows = CacheKeyByIdAndIndex(1, pair.prompt.do(cache_id, "rows"))
        for verb in ("pull", "push") if rca else ("pull",):
            parts = (f"{verb}_blocks", "outside its pools", "shm cannot reach", "allocate", "inside a pool")
            status = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
            refused_there(ends, names, LLMException, parts, blocks, f"{verb}_blocks", status=status)
            refused_there(ends, names, LLMException, parts[1:], call, f"{verb}_cache", rows, Use("rows"), status=status)
        for end, name in itertools.product(ends, names):
            end.do(forget, name)
    exchange(pair, Spec(), Spec(), push=rca)  # the link is as good as before


def _shifted(world: World) -> Bytes:
    """Register tensors at odd places of one pool tensor, not in the order of their addresses."""
    world.caches["pool"] = pool = world.cm.allocate_blocks_cache(CacheDesc(1, [4000], DataType.DT_UINT8))
    addrs = [pool.tensor_addrs[0] + offset for offset in (3001, 7, 2000, 1111)]
    desc = CacheDesc(4, [8, 48], DataType.DT_UINT8)
    world.caches["kv"] = cache = world.cm.register_blocks_cache(desc, addrs, BLOCKS)
    return fill(cache, 1)


# --- non-pool memory of another process -------------------------------------------------------------------------------
@pytest.fixture(params=["auto", "cma"])
def apart(request: pytest.FixtureRequest, children: tuple[ChildEnd, ChildEnd]) -> Iterator[Pair]:
    """Two ends in two processes, over the best transport of each kind, or over cma alone."""
    yield Pair(*children, request.param)
    for end in reversed(children):
        end.stop()


@RCA
def test_non_pool_memory_of_another_process_moves_by_cma(apart: Pair, rca: bool) -> None:
    apart.start(rca=rca)
    there = apart.decoder.do(explain, 1)
    if apart.transport == "cma":
        assert (there.transport, there.reason) == ("cma", "the kernel lets us into the peer's memory")
    else:
        assert there.transport == "shm"
        assert there.reason.endswith("non-pool memory by cma")
    for memory in ("private", "half", "pool"):
        exchange(apart, Spec(stride=4160, memory=memory), Spec(stride=4160, memory="private"), push=rca)
