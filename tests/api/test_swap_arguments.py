"""What swap_blocks refuses, both ways, on a device that needs staging and hears nothing of it (interface R1, R16,
§6.9).

Without a device that counts, and each argument by itself: test_swap_blocks.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import Cache, CacheDesc, DataType, LLMException, LLMStatusCode, Placement
from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.testing import StagedDevice
from tests.support.memory import cpu_cache, refused
from tests.support.world import fill, make_config, read

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("CacheManager.swap_blocks", "LLMStatusCode.LLM_ENGINE_FINALIZED")

BLOCKS, HOST_BLOCKS = 8, 12
GOOD = {0: 0}


def desc(blocks: int, *, tensors: int = 2, block: int = 64, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, [blocks, block], DataType.DT_UINT8, placement)


@pytest.fixture
def staged() -> StagedDevice:
    """A device that counts."""
    return StagedDevice()


@pytest.fixture
def world(end: LocalEnd, staged: StagedDevice) -> World:
    """A device blocks cache, a CPU cache, and others that do not fit them; all filled."""
    end.start("PROMPT", 1, device=staged)
    world = end.world
    for name, each in {
        "device": desc(BLOCKS),
        "other device": desc(BLOCKS),
        "wider": desc(BLOCKS, block=128),
        "more tensors": desc(BLOCKS, tensors=3),
        "pooled host": desc(HOST_BLOCKS, placement=Placement.HOST),
    }.items():
        world.caches[name] = world.cm.allocate_blocks_cache(each)
    world.caches["continuous"] = world.cm.allocate_cache(desc(BLOCKS))
    cpu_cache(world, "host", desc(HOST_BLOCKS, placement=Placement.HOST))
    for seed, cache in enumerate(world.caches.values()):
        fill(cache, seed)
    return world


def refuse(
    world: World, staged: StagedDevice, kind: type[Exception], parts: tuple[str, ...], src: Any, dst: Any, pairs: Any
) -> None:
    """The call is refused, and neither tables nor bytes nor the device have seen anything of it."""
    src, dst = (world.caches.get(each, each) if isinstance(each, str) else each for each in (src, dst))
    taken = staged.allocated_bytes
    with refused(world, kind, *parts):
        world.cm.swap_blocks(src, dst, pairs)
    assert staged.allocated_bytes == taken
    assert [staged.count(way).copies for way in ("to_device", "from_device", "on_device")] == [0, 0, 0]


@pytest.mark.parametrize(
    ("kind", "parts", "src", "dst", "pairs"),
    [
        (NoneArgument, ("src_cache", "None"), None, "host", GOOD),
        (NoneArgument, ("dst_cache", "None"), "device", None, GOOD),
        (NoneArgument, ("src_to_dst", "None"), "device", "host", None),
        (TypeError, ("src_cache", "Cache", "no cache"), "no cache", "host", GOOD),
        (TypeError, ("src_cache", "Cache", "int"), 1, "host", GOOD),
        (TypeError, ("dst_cache", "Cache", "list"), "device", [], GOOD),
        (ParamError, ("src_cache", "not a blocks cache"), "continuous", "host", GOOD),
        (ParamError, ("dst_cache", "not a blocks cache"), "host", "continuous", GOOD),
    ],
)
def test_r01_swap_refuses_what_is_no_blocks_cache(
    world: World,
    staged: StagedDevice,
    kind: type[Exception],
    parts: tuple[str, ...],
    src: Any,
    dst: Any,
    pairs: Any,
) -> None:
    refuse(world, staged, kind, parts, src, dst, pairs)


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize(
    ("kind", "parts", "pairs"),
    [
        (TypeError, ("src_to_dst", "dict", "list"), [(0, 0)]),
        (TypeError, ("src_to_dst", "dict", "tuple"), (0, 0)),
        (TypeError, ("src_to_dst", "dict", "str"), "{0: 0}"),
        (TypeError, ("key of src_to_dst", "int", "'1'"), {0: 0, "1": 1}),
        (TypeError, ("key of src_to_dst", "int", "1.0"), {0: 0, 1.0: 1}),
        (TypeError, ("key of src_to_dst", "int", "(1, 2)"), {0: 0, (1, 2): 1}),
        (NoneArgument, ("key of src_to_dst", "None"), {0: 0, None: 1}),
        (TypeError, ("src_to_dst[1]", "int", "'1'"), {0: 0, 1: "1"}),
        (TypeError, ("src_to_dst[1]", "int", "1.5"), {0: 0, 1: 1.5}),
        (TypeError, ("src_to_dst[1]", "int", "list"), {0: 0, 1: [1]}),
        (NoneArgument, ("src_to_dst[1]", "None"), {0: 0, 1: None}),
        (ParamError, ("key of src_to_dst", "-1"), {0: 0, -1: 1}),
        (ParamError, ("src_to_dst[1]", "-1"), {0: 0, 1: -1}),
        (ParamError, ("key of src_to_dst", str(2**63)), {0: 0, 2**63: 1}),
        (ParamError, ("src_to_dst[1]", str(2**64)), {0: 0, 1: 2**64}),
        (ParamError, ("sources of src_to_dst", str(2**62)), {0: 0, 2**62: 1}),
        (ParamError, ("destinations of src_to_dst", str(2**62)), {0: 0, 1: 2**62}),
    ],
)
def test_r01_swap_refuses_a_bad_dict(
    world: World, staged: StagedDevice, kind: type[Exception], parts: tuple[str, ...], pairs: Any, out: bool
) -> None:
    src, dst = ("device", "host") if out else ("host", "device")
    refuse(world, staged, kind, parts, src, dst, pairs)


@pytest.mark.parametrize("host", ["host", "pooled host"])
@pytest.mark.parametrize("good", [{}, {0: 0, 1: 1}])
def test_r01_swap_refuses_indices_outside_their_own_side(
    world: World, staged: StagedDevice, host: str, good: dict[int, int]
) -> None:
    for src, dst, rows, targets in (("device", host, BLOCKS, HOST_BLOCKS), (host, "device", HOST_BLOCKS, BLOCKS)):
        refuse(world, staged, ParamError, ("sources of src_to_dst", str(rows)), src, dst, good | {rows: 2})
        refuse(world, staged, ParamError, ("destinations of src_to_dst", str(targets)), src, dst, good | {2: targets})


@pytest.mark.parametrize(
    ("other", "parts"),
    [
        ("wider", ("block sizes differ", "128", "64")),
        ("more tensors", ("num_tensors differ", "3", "2")),
    ],
)
def test_r17_swap_refuses_caches_of_unequal_geometry(
    world: World, staged: StagedDevice, other: str, parts: tuple[str, ...]
) -> None:
    refuse(world, staged, ParamError, parts, other, "host", GOOD)
    refuse(world, staged, ParamError, parts, "host", other, GOOD)


@pytest.mark.parametrize(
    ("src", "dst", "placement"),
    [
        ("host", "host", "HOST"),
        ("host", "pooled host", "HOST"),
        ("pooled host", "host", "HOST"),
        ("device", "other device", "DEVICE"),
        ("device", "device", "DEVICE"),
    ],
)
@pytest.mark.parametrize("pairs", [GOOD, {}, {1: 5, 2: 5}])
def test_r16_swap_refuses_two_caches_of_one_placement(
    world: World, staged: StagedDevice, src: str, dst: str, placement: str, pairs: dict[int, int]
) -> None:
    refuse(world, staged, ParamError, ("src_cache", "dst_cache", f"both on {placement}"), src, dst, pairs)


@pytest.mark.parametrize("gone", ["device", "host", "pooled host"])
def test_swap_refuses_a_deallocated_cache(world: World, staged: StagedDevice, gone: str) -> None:
    cache = world.caches.pop(gone)
    world.cm.deallocate_blocks_cache(cache)
    other = "host" if gone == "device" else "device"
    for pairs in (GOOD, {}):
        refuse(world, staged, ParamError, ("src_cache", "deallocated"), cache, other, pairs)
        refuse(world, staged, ParamError, ("dst_cache", "deallocated"), other, cache, pairs)


@pytest.mark.parametrize("at", [0, 1])
def test_swap_refuses_a_zero_address(world: World, staged: StagedDevice, at: int) -> None:
    addrs = list(world.caches["host"].tensor_addrs)
    addrs[at] = 0
    bad = Cache.create_cpu_cache(world.caches["host"].cache_desc, addrs)
    parts = (f"tensor_addrs[{at}]=0", "zero")
    refuse(world, staged, ParamError, ("src_cache", *parts), bad, "device", GOOD)
    refuse(world, staged, ParamError, ("dst_cache", *parts), "device", bad, GOOD)


@pytest.mark.parametrize(("dim", "value"), [(0, 100), (1, 8)])
def test_swap_goes_by_the_memory_that_was_allocated_not_by_a_shape_that_changed_since(
    world: World, dim: int, value: int
) -> None:
    shape = world.caches["device"].cache_desc
    before = {name: read(cache) for name, cache in world.caches.items()}
    was = shape.shape[dim]
    shape.update_dim(dim, value)
    with pytest.raises(ParamError, match=f"sources of src_to_dst.*{BLOCKS}"):
        world.cm.swap_blocks(world.caches["device"], world.caches["host"], {BLOCKS: 0})
    with pytest.raises(ParamError, match=f"destinations of src_to_dst.*{BLOCKS}"):
        world.cm.swap_blocks(world.caches["host"], world.caches["device"], {0: BLOCKS})
    shape.update_dim(dim, was)
    for name, cache in world.caches.items():
        np.testing.assert_array_equal(read(cache), before[name])


@pytest.mark.parametrize("end_of_life", ["finalize", "init again"])
def test_r21_swap_of_a_stale_manager_is_refused(end: LocalEnd, world: World, end_of_life: str) -> None:
    stale, caches = world.cm, dict(world.caches)
    world.caches.clear()
    world.dd.finalize()
    if end_of_life == "init again":
        world.dd.init(make_config())
    with pytest.raises(LLMException) as caught:
        stale.swap_blocks(caches["device"], caches["host"], GOOD)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED


@pytest.mark.parametrize("out", [True, False])
@pytest.mark.parametrize("shift", [-64, 64, 63, -(BLOCKS - 1) * 64, (BLOCKS - 1) * 64])
def test_r26_operands_that_overlap_without_being_the_same_are_refused(
    world: World, staged: StagedDevice, shift: int, out: bool
) -> None:
    device = world.caches["device"]
    host = Cache.create_cpu_cache(
        desc(BLOCKS, placement=Placement.HOST), [address + shift for address in device.tensor_addrs]
    )
    src, dst = (device, host) if out else (host, device)
    refuse(world, staged, ParamError, ("src_cache", "dst_cache", "overlap"), src, dst, {0: 0, 1: 1})
