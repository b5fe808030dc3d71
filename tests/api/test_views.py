"""tensor_views and torch_views: arrays over a cache's own memory, and how long they live."""

from __future__ import annotations

import itertools
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_datadist import Cache, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist.errors import LLMException, NoneArgument, ParamError
from llm_datadist.views import tensor_views, torch_views
from tests.support import fakecuda
from tests.support.kinds import LocalEnd, World
from tests.support.moves import Spec, forget, make
from tests.support.world import read, residue

pytestmark = pytest.mark.covers("tensor_views", "torch_views", "LLMStatusCode.LLM_FEATURE_NOT_ENABLED")


def test_views_are_the_memory_itself_in_the_descriptors_shape_and_type(world: World) -> None:
    odd = {"FLOAT": "float32", "DOUBLE": "float64", "BF16": "uint16"}
    own = np.zeros((3, 24 * 8), np.uint8)  # of the user
    addrs = [row.ctypes.data for row in own]
    for data_type, placement in itertools.product(set(DataType) - {DataType.DT_STRING}, Placement):
        name = data_type.name.removeprefix("DT_")
        desc = CacheDesc(3, [2, 3, 4], data_type, placement)
        caches = [world.cm.allocate_cache(desc), world.cm.allocate_blocks_cache(desc)]
        caches.append(world.cm.register_cache(desc, addrs))
        if placement is Placement.HOST:
            caches.append(Cache.create_cpu_cache(desc, addrs))
        for cache in caches:
            views = tensor_views(cache)
            assert [view.shape for view in views] == [(2, 3, 4)] * 3
            assert {view.dtype for view in views} == {np.dtype(odd.get(name, name.lower()))}
            assert [view.ctypes.data for view in views] == cache.tensor_addrs
            assert all(view.flags.writeable and view.flags.c_contiguous for view in views)
            views[1][1, 2, 3] = 1
            assert tensor_views(cache)[1][1, 2, 3] == 1
    assert own[1].any()
    assert not own[[0, 2]].any()


def test_a_descriptor_that_grew_since_shows_no_neighbour(world: World) -> None:
    """Regression: views showed the memory of a neighbour."""
    desc = CacheDesc(1, [2, 3], DataType.DT_FLOAT)
    cache = world.cm.allocate_cache(desc)
    desc.update_dim(0, 4000)
    with pytest.raises(ParamError, match=r"cache_desc.shape=\[4000, 3\]: changed .* 24 bytes"):
        tensor_views(cache)
    desc.update_dim(0, 1)
    assert tensor_views(cache)[0].shape == (1, 3)


def test_only_a_cache_that_is_there_and_of_a_known_type_has_views(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    for wrong, kind in ((None, NoneArgument), (1, TypeError), ("cache", TypeError)):
        with pytest.raises(kind, match="cache"):
            tensor_views(wrong)  # type: ignore[arg-type]
    text = world.cm.allocate_cache(CacheDesc(1, [2, 3], DataType.DT_STRING))
    with pytest.raises(ParamError, match=r"cache_desc.data_type=DT_STRING") as caught:
        tensor_views(text)
    assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    world.cm.deallocate_cache(text)
    with pytest.raises(ParamError, match="deallocated"):
        tensor_views(text)
    # Without torch.
    cache = world.cm.allocate_cache(CacheDesc(1, [2, 3], DataType.DT_FLOAT))
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    with pytest.raises(LLMException, match=r"torch_views needs torch.*tensor_views") as without:
        torch_views(cache)
    assert without.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


def test_views_outlive_deallocate_and_finalize_and_the_pool_is_unmapped_with_the_last_one(end: LocalEnd) -> None:
    before = residue()["memfd mappings"]
    end.start("PROMPT", 1)
    cache = end.world.cm.allocate_cache(CacheDesc(1, [4, 1000], DataType.DT_INT32))
    view = tensor_views(cache)[0]
    part = view[1:2]
    end.world.cm.deallocate_cache(cache)
    view[:] = 8
    end.world.dd.finalize()
    assert int(view.sum()) == 8 * 4000
    watch = weakref.ref(view)
    del view
    part[:] = 3  # a slice of a view holds the mapping as well
    assert int(part.sum()) == 3000
    assert residue()["memfd mappings"] == before + 1
    del part
    assert watch() is None
    assert residue()["memfd mappings"] == before


class Shown:
    """What torch would make of an object: a tensor that keeps it."""

    def __init__(self, given: Any, device: str) -> None:
        self.given, self.device = given, device

    def view(self, kind: object) -> Shown:
        self.kind = kind
        return self

    def reshape(self, shape: list[int]) -> Shown:
        self.shape = shape
        return self


@pytest.mark.gpu(True)
@pytest.mark.parametrize("memory", ["pool", "private"])
@pytest.mark.parametrize(("name", "kind"), [("DT_BF16", "bf16"), ("DT_FLOAT16", "half")])
def test_torch_gets_address_bytes_and_type_of_memory_in_a_gpu_which_stays_mapped_as_long_as_a_tensor(
    end: LocalEnd, memory: str, name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(as_tensor=Shown, bfloat16="bf16", float16="half", dtype=str)
    monkeypatch.setitem(sys.modules, "torch", torch)
    end.start("PROMPT", 1)
    filled = make(end.world, "kv", Spec(2, 4, 24, memory=memory, data_type=DataType[name], dims=(3, 4)), 1)
    cache, fake = end.world.caches["kv"], fakecuda.load()
    with pytest.raises(ParamError, match="torch_views has CUDA tensors"):
        tensor_views(cache)
    tensors: Any = torch_views(cache)
    wanted = [("cuda:0", kind, [4, 3, 4])] * 2
    assert [(each.device, each.kind, each.shape) for each in tensors] == wanted
    assert [each.given.__cuda_array_interface__ for each in tensors] == [
        {"shape": (96,), "typestr": "|u1", "data": (address, False), "version": 3} for address in cache.tensor_addrs
    ]
    last, address = tensors.pop(), cache.tensor_addrs[1]
    del tensors, cache
    forget(end.world, "kv")
    end.stop()
    assert fake.has(address) is (memory == "pool")
    if memory == "pool":
        assert (fake.view(address, 96) == filled[1].reshape(-1)).all()
    del last
    assert not fake.has(address)


# --- torch --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["DT_FLOAT", "DT_FLOAT16", "DT_BF16", "DT_INT8", "DT_INT64", "DT_UINT8", "DT_BOOL"])
def test_torch_views_are_the_memory_itself_and_outlive_finalize(world: World, name: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is optional: torch_views is all that uses it")
    kind = {"DT_FLOAT": torch.float32, "DT_BF16": torch.bfloat16}.get(name) or getattr(torch, name[3:].lower())
    cache = world.cm.allocate_cache(CacheDesc(2, [4, 6], DataType[name]))
    tensors = torch_views(cache)
    assert [tuple(tensor.shape) for tensor in tensors] == [(4, 6)] * 2
    assert {tensor.dtype for tensor in tensors} == {kind}
    assert [tensor.data_ptr() for tensor in tensors] == cache.tensor_addrs
    tensors[1][3] = 1
    np.testing.assert_array_equal(read(cache)[1][3], torch.ones(6, dtype=kind).view(torch.uint8).numpy())
    world.dd.finalize()
    tensors[0][:] = 1
    assert tensors[0].sum(dtype=torch.float32).item() == 24


def test_calls_take_block_numbers_as_tensors_of_torch(world: World) -> None:
    torch = pytest.importorskip("torch", reason="torch is optional: what it gives is looked at, it is not imported")
    cache = world.cm.allocate_blocks_cache(CacheDesc(2, [8, 16], DataType.DT_INT8))
    for number, block in enumerate(tensor_views(cache)[0]):
        block[:] = number
    wanted = world.cm.digest_blocks(cache, [1, 4], bytes(16))
    given = [torch.tensor([1, 4]), torch.tensor([1, 4], dtype=torch.uint8), torch.arange(1, 7)[::3]]
    for blocks in (*given, list(given[0]), torch.nn.Parameter(given[0], requires_grad=False)):
        np.testing.assert_array_equal(world.cm.digest_blocks(cache, blocks, bytes(16)), wanted)
    refused = {
        "float32 array": torch.ones(2),
        "torch.float32 tensor on cpu": torch.ones(2, requires_grad=True),
        "1-D bool array": torch.ones(2, dtype=torch.bool),
        "2-D int64 array": torch.zeros((1, 2), dtype=torch.int64),
        "0-D int64 array": torch.tensor(1),
        "torch.int64 tensor on meta": torch.arange(2, device="meta"),
        "(torch.sparse_coo): must be a dense": torch.arange(2).to_sparse(),
    }
    for text, blocks in refused.items():
        with pytest.raises(TypeError) as caught:
            world.cm.digest_blocks(cache, blocks, bytes(16))
        assert str(caught.value).startswith("blocks is a ")
        assert text in str(caught.value)
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [8, 16], DataType.DT_INT8))
    world.cm.copy_blocks(cache, {torch.tensor(1): torch.arange(2, 4), 0: (torch.tensor(5),)})
