"""register_tensors: what of torch and NumPy becomes a cache, what is refused, and how long the memory lives."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex, DataType, Placement
from llm_datadist.errors import DeadlineExceeded, NoneArgument, ParamError, StateError
from llm_datadist.types.data_type import data_type_of, numpy_type, torch_type
from llm_datadist.views import tensor_views
from tests.support import fakecuda
from tests.support.kinds import LocalEnd, Pair, World
from tests.support.memory import refused
from tests.support.moves import BLOCKS
from tests.support.probe import kept_mapped
from tests.support.source import ROOT, run
from tests.support.world import read

pytestmark = pytest.mark.covers("CacheManager: register_tensors unregister_cache", "CacheDesc.data_type")


@dataclass(frozen=True)
class Row:
    """What a user passes, and what comes of it: every byte at a peer, or an error.

    ``make`` gets torch or NumPy. ``then`` is done to the tensors after they were registered.
    """

    name: str
    make: Callable[[Any], Any]
    error: type[Exception] | None = None
    text: str = ""
    data_type: str = "DT_FLOAT16"
    then: Callable[[Any, Any], object] = lambda _lib, _tensors: None


def no(name: str, make: Callable[[Any], Any], text: str, error: type[Exception] = ParamError) -> Row:
    return Row(name, make, error, text)


# --- torch ------------------------------------------------------------------------------------------------------------
def torch_here() -> Any:
    """Return torch, or skip the test; torch starts no threads, which would seem to be left behind."""
    torch = pytest.importorskip("torch", reason="torch is optional, and not installed; make test-torch has it")
    torch.set_num_threads(1)
    return torch


def some(torch: Any, *shape: int, dtype: str = "float16") -> Any:
    """Return a tensor of torch's own memory; every byte is random."""
    shape, kind = shape or (4, 8), getattr(torch, dtype)
    nbytes = int(np.prod(shape)) * kind.itemsize
    raw = torch.frombuffer(bytearray(np.random.default_rng(7).bytes(nbytes)), dtype=torch.uint8)
    return raw.view(kind).reshape(shape).clone()  # not a view, which would keep its base


def two(torch: Any, change: Callable[[Any], Any], *shape: int, dtype: str = "float16") -> list[Any]:
    return [change(some(torch, *shape, dtype=dtype)) for _ in range(2)]


def quietly(make: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker whose warnings, of torch about itself, fail no test."""

    def made(torch: Any) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return make(torch)

    return made


def in_a_cycle(torch: Any) -> list[Any]:
    tensors = two(torch, lambda each: each)
    for each in tensors:
        each.cycle = [each]
    return tensors


def resized(nbytes: int) -> Callable[[Any], Any]:
    def make(torch: Any) -> Any:
        tensor = some(torch)
        tensor.untyped_storage().resize_(nbytes)
        return [tensor]

    return make


def in_inference_mode(torch: Any) -> list[Any]:
    with torch.inference_mode():
        return two(torch, lambda each: each)


def fake(torch: Any) -> list[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return [torch.empty(4, 8)]


def seen_inside(transform: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a maker of the tensor that a function sees under a transform of torch.func."""

    def make(torch: Any) -> list[Any]:
        seen: list[Any] = []

        def look(each: Any) -> Any:
            seen.append(each)
            return each

        transform(torch)(look)(some(torch, 2, 4, 8))
        return seen

    return make


def subclass(torch: Any, **members: Any) -> Any:
    return some(torch).as_subclass(type("Own", (torch.Tensor,), members))


def dispatching(torch: Any) -> list[Any]:
    return [subclass(torch, __torch_dispatch__=classmethod(lambda cls, f, types, args=(), kwargs=None: f(*args)))]


def of_another_process(torch: Any) -> list[Any]:
    """Return a tensor over shared memory that another process has made and filled."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm", prefix="tensor-") as file:
        program = "import sys; open(sys.argv[1], 'wb').write(bytes(range(64)))"
        subprocess.run([sys.executable, "-c", program, file.name], check=True)
        return [torch.from_file(file.name, shared=True, size=32, dtype=torch.float16).reshape(4, 8)]


def pinned(torch: Any) -> list[Any]:
    if not torch.cuda.is_available():
        pytest.skip("memory is pinned by CUDA, which is not here")
    return two(torch, lambda each: each.pin_memory())


def read_only(shape: tuple[int, ...] = (4, 8)) -> np.ndarray[Any, Any]:
    array = np.ones(shape, np.float16)
    array.flags.writeable = False
    return array


def typed(names: str, data_type: str) -> list[Row]:
    return [
        Row(name, lambda t, name=name: two(t, lambda each: each, dtype=name), data_type=data_type)  # type: ignore[misc]
        for name in names.split()
    ]


NOT_CONTIGUOUS, SHARES = "tensors[0]: not contiguous", "tensors[1]: it shares memory with tensors[0]"
ELEMENTS = "torch.Tensor, numpy.ndarray"

TORCH: Final = [
    # layouts
    Row("contiguous", lambda t: two(t, lambda each: each)),
    Row("tuple", lambda t: tuple(two(t, lambda each: each))),
    Row("halves of a layer", lambda t: [half for _ in range(2) for half in some(t, 2, 4, 3, 8)]),
    Row("sliced along dim 0", lambda t: two(t, lambda each: each[2:6], 8, 8)),
    Row("narrow", lambda t: two(t, lambda each: each.narrow(0, 1, 4), 8, 8)),
    Row("view", lambda t: two(t, lambda each: each.view(4, 8), 32)),
    Row("one dimension", lambda t: two(t, lambda each: each, 32)),
    Row("neighbours", lambda t: list(some(t, 3, 4, 8))),
    Row("expanded along one row", lambda t: two(t, lambda each: each.expand(1, 32), 1, 32)),
    no("transposed", lambda t: two(t, lambda each: each.t()), NOT_CONTIGUOUS),
    no("sliced along dim 1", lambda t: two(t, lambda each: each[:, :4]), NOT_CONTIGUOUS),
    no("expanded", lambda t: two(t, lambda each: each.expand(4, 8), 1, 8), NOT_CONTIGUOUS),
    no("strided", lambda t: two(t, lambda each: each[::2]), NOT_CONTIGUOUS),
    no("permuted", lambda t: two(t, lambda each: each.permute(1, 0, 2), 2, 4, 8), NOT_CONTIGUOUS),
    no("channels last", lambda t: [some(t, 2, 3, 4, 4).to(memory_format=t.channels_last)], NOT_CONTIGUOUS),
    no("the second one strided", lambda t: [some(t), some(t, 8, 8)[::2]], "tensors[1]: not contiguous"),
    no("zero size", lambda t: [t.empty(0, 8)], "tensors[0].shape=(0, 8): at least one"),
    no("no dimension", lambda t: [t.tensor(1.0)], "tensors[0].shape=(): at least one"),
    # states
    Row("requires grad", lambda t: two(t, lambda each: each.requires_grad_())),
    Row("computed with grad", lambda t: two(t, lambda each: each.requires_grad_() * 1)),
    Row("parameter", lambda t: two(t, t.nn.Parameter)),
    Row("inference", in_inference_mode),
    Row("subclass", lambda t: [subclass(t), subclass(t)]),
    Row("lazy clone", lambda t: two(t, lambda each: each._lazy_clone())),  # noqa: SLF001 (no public name)
    Row("shared memory", lambda t: two(t, lambda each: each.share_memory_())),
    Row("pinned", pinned),
    Row("of another process", of_another_process),
    Row("from NumPy", lambda t: [t.from_numpy(np.ones((4, 8), np.float16))]),
    Row("from read-only NumPy, which torch forgets", quietly(lambda t: [t.from_numpy(read_only())])),
    Row("in a cycle", in_a_cycle),
    Row("part of a tensor that is dropped", lambda t: [some(t, 64, 8)[60:]]),
    Row(
        "another storage later",
        lambda t: two(t, lambda each: each),
        then=lambda t, some: some[0].set_(t.ones(1).half()),
    ),
    Row(
        "other data later",
        lambda t: two(t, lambda each: each),
        then=lambda t, some: setattr(some[1], "data", t.ones(1)),
    ),
    no("sparse", lambda t: [t.eye(4).to_sparse()], "tensors[0].layout=torch.sparse_coo: only torch.strided"),
    no("sparse rows", quietly(lambda t: [t.eye(4).to_sparse_csr()]), "tensors[0].layout=torch.sparse_csr"),
    no("meta", lambda t: [t.empty(4, 8, device="meta")], "tensors[0].device=meta: only memory of the host"),
    no("fake", fake, "tensors[0]: FakeTensor has no memory"),
    no("subclass that dispatches", dispatching, "tensors[0]: Own has no memory"),
    no("under vmap", seen_inside(lambda t: t.vmap), "tensors[0]: torch does not tell its memory"),
    no("functional", seen_inside(lambda t: t.func.functionalize), "tensors[0]: it has no memory"),
    no(
        "nested", quietly(lambda t: [t.nested.nested_tensor([t.ones(2), t.ones(3)])]), "tensors[0]: torch does not tell"
    ),
    no("neg", lambda t: [t.ones(4, 8, dtype=t.complex64).conj().imag], "tensors[0]: its bytes are not its values"),
    no("zeros without memory", lambda t: [t._efficientzerotensor(4, 8)], "tensors[0]: it has no"),  # noqa: SLF001 (as above)
    no("freed", resized(0), "tensors[0]: it ends at byte 64 of a storage of 0"),
    no("storage too short", resized(63), "tensors[0]: it ends at byte 64 of a storage of 63"),
    # types
    *typed("float32", "DT_FLOAT"),
    *typed("float64", "DT_DOUBLE"),
    *typed("bfloat16", "DT_BF16"),
    *typed("bool", "DT_BOOL"),
    *typed("uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu", "DT_UINT8"),
    *(each for n in (8, 16, 32, 64) for each in typed(f"int{n}", f"DT_INT{n}")),
    *(each for n in (16, 32, 64) for each in typed(f"uint{n}", f"DT_UINT{n}")),
    no("complex", lambda t: [t.ones(4, 8, dtype=t.complex64)], "tensors[0].dtype=torch.complex64: not an element type"),
    no("conj", lambda t: [t.ones(4, 8, dtype=t.complex64).conj()], "tensors[0].dtype=torch.complex64"),
    no(
        "quantized",
        quietly(lambda t: [t.quantize_per_tensor(t.ones(4, 8), 0.1, 0, t.quint8)]),
        "tensors[0].dtype=torch.quint8",
    ),
    no("pairs of 4 bits", lambda t: [some(t, dtype="uint8").view(t.float4_e2m1fn_x2)], "dtype=torch.float4_e2m1fn_x2"),
    # the list
    no("empty list", lambda t: [], "tensors is empty"),
    no(
        "mixed types", lambda t: [some(t), some(t, dtype="bfloat16")], "tensors[1].dtype=torch.bfloat16: tensors[0] has"
    ),
    no("mixed 8-bit types", lambda t: [some(t, dtype="uint8"), some(t, dtype="float8_e5m2")], "tensors[1].dtype="),
    no("mixed shapes", lambda t: [some(t), some(t, 8, 4)], "tensors[1].shape=(8, 4): tensors[0] has (4, 8)"),
    no("mixed devices", lambda t: [some(t), t.empty(4, 8, device="meta")], "tensors[1].device=meta"),
    no("torch and NumPy", lambda t: [some(t), np.ones((4, 8), np.float16)], "tensors[1].dtype=float16: tensors[0] has"),
    no("the same twice", lambda t: [some(t)] * 2, SHARES),
    no("overlapping slices", lambda t: [each for base in [some(t, 8, 8)] for each in (base[0:4], base[3:7])], SHARES),
    no("overlapping, the lower one last", lambda t: [(base := some(t, 8, 8))[3:7], base[0:4]], "tensors[0]: it shares"),
    no("a bare tensor", some, "tensors only support [list, tuple] but got Tensor", TypeError),
    no("a bare tensor that was freed", lambda t: resized(0)(t)[0], "[list, tuple] but got Tensor", TypeError),
    no(
        "nested list",
        lambda t: [two(t, lambda each: each)],
        f"tensors[0] only support [{ELEMENTS}] but got list",
        TypeError,
    ),
    no("None", lambda t: None, "tensors only support [list, tuple] but got NoneType", NoneArgument),
    no("None in the list", lambda t: [some(t), None], f"tensors[1] only support [{ELEMENTS}]", NoneArgument),
    no("generator", lambda t: (some(t) for _ in range(2)), "but got generator", TypeError),
    no("dict", lambda t: {"k": some(t)}, "but got dict", TypeError),
    no("string", lambda t: "kv", "but got str", TypeError),
    no("storage", lambda t: [some(t).untyped_storage()], "tensors[0] only support", TypeError),
]


# --- NumPy ------------------------------------------------------------------------------------------------------------
def array(*shape: int, dtype: Any = np.float16) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    raw = np.random.default_rng(7).integers(0, 256, int(np.prod(shape or (4, 8))) * kind.itemsize, np.uint8)
    array: np.ndarray[Any, Any] = raw.view(kind).reshape(shape or (4, 8))
    return array


def mapped(_: Any) -> list[Any]:
    with tempfile.NamedTemporaryFile() as file:
        return [np.memmap(file.name, np.float16, "w+", shape=(4, 8))]


def of_ml_dtypes(name: str) -> Callable[[Any], Any]:
    return lambda _: [array(dtype=getattr(pytest.importorskip("ml_dtypes"), name)) for _ in range(2)]


NUMPY: Final = [
    Row("contiguous", lambda _: [array(), array()]),
    Row("sliced along dim 0", lambda _: [array(8, 8)[2:6]]),
    Row("rows of one array", lambda _: list(array(3, 4, 8))),
    Row("not aligned", lambda _: [np.frombuffer(bytearray(range(65)), np.float16, 32, 1).reshape(4, 8)]),
    Row("memmap", mapped),
    Row("bool", lambda _: [array(dtype=bool)], data_type="DT_BOOL"),
    Row("long long", lambda _: [array(dtype=np.longlong), array(dtype=np.int64)], data_type="DT_INT64"),
    Row("bfloat16", of_ml_dtypes("bfloat16"), data_type="DT_BF16"),
    Row("8-bit floats", of_ml_dtypes("float8_e4m3fn"), data_type="DT_UINT8"),
    no("Fortran order", lambda _: [np.asfortranarray(array())], NOT_CONTIGUOUS),
    no("sliced along dim 1", lambda _: [array()[:, :4]], NOT_CONTIGUOUS),
    no("reversed", lambda _: [array()[::-1]], NOT_CONTIGUOUS),
    no("read-only", lambda _: [array(), read_only()], "tensors[1]: read-only"),
    no("broadcast", lambda _: [np.broadcast_to(array(1, 8), (4, 8))], "tensors[0]: read-only"),
    no(
        "byte order", lambda _: [array().astype(">f2")], "tensors[0].dtype=>f2: not an element type of caches in native"
    ),
    no("objects", lambda _: [np.array([[None]])], "tensors[0].dtype=object"),
    no("text", lambda _: [np.array(["kv"])], "tensors[0].dtype=<U2"),
    no("bytes", lambda _: [np.array([b"kv"])], "tensors[0].dtype=|S2"),
    no("complex", lambda _: [np.ones(4, np.complex64)], "tensors[0].dtype=complex64"),
    no("long double", lambda _: [np.ones(4, np.longdouble)], "tensors[0].dtype=float128"),
    no("structured", lambda _: [np.ones(4, [("k", "f4")])], "tensors[0].dtype=[('k', '<f4')]"),
    no("zero size", lambda _: [np.empty((4, 0))], "tensors[0].shape=(4, 0)"),
    no("no dimension", lambda _: [np.array(1.0)], "tensors[0].shape=()"),
    no("40 dimensions", lambda _: [np.ones([1] * 40)], "40 dimensions, 1 to 31"),
    no("mixed types", lambda _: [array(), array(dtype=np.uint16)], "tensors[1].dtype=uint16: tensors[0] has float16"),
    no("the same twice", lambda _: [array()] * 2, SHARES),
    no("a scalar", lambda _: [np.float16(1)], "tensors[0] only support", TypeError),
    no("a bare array", lambda _: array(2, 4, 8), "tensors only support [list, tuple] but got ndarray", TypeError),
    no("addresses", lambda _: [4096], "tensors[0] only support", TypeError),
]


def bytes_of(tensor: Any) -> bytes:
    if isinstance(tensor, np.ndarray):
        return tensor.tobytes()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def alive(watches: list[weakref.ref[Any]]) -> list[bool]:
    gc.collect()
    return [each() is not None for each in watches]


def judge(pair: Pair, row: Row, lib: Any) -> None:
    """Register what a row makes, drop it, and compare what a peer pulls; or see the error, and that nothing is done."""
    pair.start()
    owner, reader = pair.prompt.world, pair.decoder.world  # type: ignore[attr-defined]
    given = row.make(lib)
    if row.error is not None:
        with refused(owner, row.error, row.text):
            owner.cm.register_tensors(given, BLOCKS)
        return
    expected = [bytes_of(each) for each in given]
    memory = [weakref.ref(each if lib is np else each.untyped_storage()) for each in given]
    cache = owner.cm.register_tensors(given, BLOCKS)
    row.then(lib, given)
    del given
    assert all(alive(memory))
    desc = cache.cache_desc
    assert (cache.is_blocks_cache, desc.data_type.name, desc.placement) == (True, row.data_type, Placement.DEVICE)
    mine = reader.cm.allocate_blocks_cache(CacheDesc(desc.num_tensors, desc.shape, desc.data_type))
    every = list(range(desc.shape[0]))
    reader.cm.pull_blocks(BLOCKS, mine, every, every)
    assert [each.tobytes() for each in tensor_views(mine)] == expected
    owner.cm.unregister_cache(cache.cache_id)
    assert not any(alive(memory))


@pytest.mark.parametrize("row", TORCH, ids=lambda row: row.name)
def test_a_torch_tensor_becomes_a_cache_that_outlives_it_or_is_refused_by_name(local_pair: Pair, row: Row) -> None:
    judge(local_pair, row, torch_here())


@pytest.mark.parametrize("row", NUMPY, ids=lambda row: row.name)
def test_an_array_becomes_a_cache_that_outlives_it_or_is_refused_by_name(local_pair: Pair, row: Row) -> None:
    judge(local_pair, row, np)


def test_the_program_of_the_page_runs_and_prints_what_it_says() -> None:
    torch_here()
    page = (ROOT / "docs" / "howto-tensors.md").read_text()
    program, promised = page.partition("```python\n")[2].partition("```")[0], page.partition("It prints `")[2]
    done = run(sys.executable, "-W", "error", "-c", f"{program}prompt.finalize()\n")
    assert (done.stdout, done.stderr) == (promised.partition("`")[0] + "\n", "")


# --- keys, kinds, places ----------------------------------------------------------------------------------------------
def test_the_key_says_the_kind_and_rows_are_pulled_by_it(local_pair: Pair) -> None:
    local_pair.start()
    owner, reader = local_pair.prompt.world, local_pair.decoder.world  # type: ignore[attr-defined]
    made: dict[str, tuple[Any, ...]] = {
        "no key": (None, {}, True),
        "blocks": (None, {"blocks": True}, True),
        "rows": (None, {"blocks": False}, False),
        "an empty list": ([], {}, False),
        "a blocks key": (BlocksCacheKey(1, 5), {"blocks": True}, True),
        "a row key": (CacheKey(1, 70), {"blocks": False}, False),
        "row keys": ((CacheKey(1, 80), CacheKey(1, 81)), {}, False),
    }
    arrays = {name: [array(), array() + 1] for name in made}
    caches = {name: owner.cm.register_tensors(arrays[name], key, **how) for name, (key, how, _) in made.items()}
    assert {name: each.is_blocks_cache for name, each in caches.items()} == {
        name: each[2] for name, each in made.items()
    }
    mine = reader.cm.allocate_cache(CacheDesc(2, [4, 8], np.float16))
    for key, name, row in (
        (CacheKey(1, 70), "a row key", 0),
        (CacheKey(1, 81), "row keys", 1),
        (CacheKeyByIdAndIndex(1, caches["rows"].cache_id, 3), "rows", 3),
    ):
        reader.cm.pull_cache(key, mine, 2)
        assert [each[2].tobytes() for each in tensor_views(mine)] == [each[row].tobytes() for each in arrays[name]]
    owner.cm.unregister_cache(caches["a blocks key"].cache_id)
    granted = owner.cm.register_tensors([array()], BlocksCacheKey(1, 5), granted_only=True, remote_accessible=False)
    assert granted.is_blocks_cache


def test_arguments_that_do_not_suit_are_refused(world: World) -> None:
    good, register = [array()], world.cm.register_tensors
    rows = [CacheKey(1, n) for n in range(5)]
    wrong: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ParamError, "blocks=False: the key means the other kind", BLOCKS, {"blocks": False}),
        (ParamError, "blocks=True: the key means the other kind", rows[:1], {"blocks": True}),
        (ParamError, "blocks=True", [], {"blocks": True}),
        (TypeError, "blocks only support [bool]", None, {"blocks": 1}),
        (ParamError, "key has 5 keys: at most one per batch row, and there are 4", rows, {}),
        (TypeError, "key[1] inner type only support [CacheKey]", [rows[0], BLOCKS], {}),
        (NoneArgument, "key[0]", [None], {}),
        (TypeError, "key only support", "model", {}),
        (TypeError, "key only support [list, tuple] but got ndarray", array(), {}),  # K and V as two arguments
        (TypeError, "key only support", "", {}),
        (TypeError, "blocks only support [bool] but got ndarray", None, {"blocks": array()}),
        (TypeError, "key only support", CacheKeyByIdAndIndex(1, 1), {}),
        (ParamError, "granted_only=True: only for a blocks cache", rows[0], {"granted_only": True}),
        (TypeError, "granted_only only support [bool]", None, {"granted_only": 1}),
        (TypeError, "granted_only", rows[0], {"granted_only": None}),
        (TypeError, "placement only support [Placement]", None, {"placement": 1}),
        (TypeError, "remote_accessible", None, {"remote_accessible": "no"}),
    ]
    for error, text, key, how in wrong:
        with refused(world, error, text):
            register(good, key, **how)


class Cuda:
    """What torch shows of a tensor in a GPU, over memory of the fake driver; it is the only instance of its class."""

    __torch_dispatch__, layout, dtype, nbytes, shape = "plain", "strided", np.dtype(np.float16), 64, (4, 8)
    is_quantized = False

    def __init__(self, address: int) -> None:
        self.address = address

    @property
    def device(self) -> Any:
        return type("Device", (), {"type": "cuda", "__str__": lambda _: "cuda:0"})()

    def data_ptr(self) -> int:
        return self.address

    def is_contiguous(self) -> bool:
        return True

    def is_neg(self) -> bool:
        return False

    def storage_offset(self) -> int:
        return 0

    def element_size(self) -> int:
        return 2

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: 64)


@pytest.mark.gpu
def test_tensors_of_a_gpu_need_an_instance_with_it_and_others_go_to_the_host_there(
    end: LocalEnd, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(Tensor=Cuda, strided="strided"))
    end.start("PROMPT", 1)
    world, on_host = end.world, array()
    for placement in (None, Placement.HOST):
        cache = world.cm.register_tensors([on_host], placement=placement)
        assert cache.cache_desc.placement is (Placement.HOST if gpu or placement is not None else Placement.DEVICE)
    if not gpu:
        with refused(world, ParamError, "tensors[0].device=cuda:0: no GPU here; set llm.DeviceMemory=cuda"):
            world.cm.register_tensors([Cuda(4096)])
        return
    address, memory = world.user_memory(64)
    fakecuda.load().view(address, 64)[:] = range(64)
    with refused(world, ParamError, "tensors[0]=", "placement DEVICE means"):
        world.cm.register_tensors([on_host], placement=Placement.DEVICE)
    with refused(world, ParamError, "tensors[0]=", "memory of device 0, placement HOST means the host"):
        world.cm.register_tensors([Cuda(address)], placement=Placement.HOST)
    in_gpu = world.cm.register_tensors([Cuda(address)])
    assert in_gpu.cache_desc.placement is Placement.DEVICE
    world.cm.swap_blocks(in_gpu, cache, {3: 0})
    assert on_host[0].tobytes() == bytes(range(48, 64))
    assert read(in_gpu)[0].tobytes() == bytes(range(64))
    world.cm.unregister_cache(in_gpu.cache_id)
    del memory


# --- life -------------------------------------------------------------------------------------------------------------
def watched(world: World, **settings: Any) -> tuple[Cache, list[weakref.ref[Any]]]:
    arrays = [array(), array()]
    return world.cm.register_tensors(arrays, BLOCKS, **settings), [weakref.ref(each) for each in arrays]


def test_tensors_live_until_unregister_has_ended_their_use_although_the_handle_lives_on(end: LocalEnd) -> None:
    end.start("PROMPT", 1, sync_kv_timeout=50)
    (cache, watches), caches = watched(end.world), end.world.probe.engine.caches
    assert alive(watches) == [True, True]
    with caches.using(cache.cache_id, "a call of another thread"):
        with pytest.raises(DeadlineExceeded, match="stays registered"):
            end.world.cm.unregister_cache(cache.cache_id)
        assert alive(watches) == [True, True]
    assert [each.dtype for each in tensor_views(cache)] == [np.float16] * 2
    caches.registry.pin(peer := object(), time.monotonic() + 60, cache_id=cache.cache_id)
    end.world.cm.unregister_cache(cache.cache_id)
    assert (alive(watches), len(cache.tensor_addrs)) == ([False, False], 2)
    caches.apply(caches.registry.drop_peer(peer))


def test_a_refused_registration_keeps_nothing(world: World) -> None:
    arrays = [array(), array()]
    watches = [weakref.ref(each) for each in arrays]
    for wrong in ([*arrays, read_only()], [*arrays, arrays[0]]):
        with pytest.raises(ParamError, match=r"tensors\[2\]"):
            world.cm.register_tensors(wrong)
    with pytest.raises(ParamError, match="key has 5 keys"):
        world.cm.register_tensors(arrays, [CacheKey(1, n) for n in range(5)])
    del arrays, wrong
    assert alive(watches) == [False, False]


@pytest.mark.parametrize("used", [False, True])
def test_finalize_ends_the_use_of_tensors_or_keeps_them_for_good(
    end: LocalEnd, used: bool, caplog: pytest.LogCaptureFixture
) -> None:
    end.start("PROMPT", 1, sync_kv_timeout=50)
    (cache, watches), caches = watched(end.world), end.world.probe.engine.caches
    if not used:
        end.world.dd.finalize()
        assert alive(watches) == [False, False]
        return
    with suppress(StateError), caches.using(cache.cache_id, "a call that does not end in time"):
        end.world.dd.finalize()
    assert "registered memory is still in use by 1 calls of this process" in caplog.text
    assert alive(watches) == [True, True]
    kept_mapped.clear()
    del caches
    assert alive(watches) == [False, False]


# --- two processes ----------------------------------------------------------------------------------------------------
def own(world: World, library: str) -> list[bytes]:
    """Register K and V of four layers, of which this process keeps none; return their bytes."""
    random = np.random.default_rng(3)
    layers: list[Any] = [random.integers(0, 256, (2, 6, 4096), np.uint8) for _ in range(4)]
    if library == "torch":
        torch = torch_here()
        layers = [torch.from_numpy(each).clone() for each in layers]
    tensors = [half for kv in layers for half in kv]
    expected = [bytes_of(each) for each in tensors]
    memory = [each.base if library == "numpy" else each.untyped_storage() for each in tensors]
    world.memory["watches"] = [weakref.ref(each) for each in (*tensors, *memory)]
    world.caches["kv"] = world.cm.register_tensors(tensors, BLOCKS)
    del layers, tensors, memory
    gc.collect()
    world.memory["taken"] = [np.full(len(each), 0xA5, np.uint8) for each in expected * 4]
    return expected


def living(world: World) -> list[bool]:
    return alive(world.memory["watches"])


def forget_kv(world: World) -> list[bool]:
    world.cm.unregister_cache(world.caches["kv"].cache_id)
    return living(world)


def pulled(world: World, tensors: int) -> list[bytes]:
    cache = world.cm.allocate_blocks_cache(CacheDesc(tensors, [6, 4096], np.uint8))
    world.cm.pull_blocks(BLOCKS, cache, [5, 4, 3, 2, 1, 0], [5, 4, 3, 2, 1, 0])
    return [each.tobytes() for each in tensor_views(cache)]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_process_without_references_serves_the_right_bytes_until_it_unregisters(tcp_pair: Pair, library: str) -> None:
    if library == "torch":
        torch_here()
    prompt, decoder = tcp_pair.start()
    expected = prompt.do(own, library)
    assert len(expected) == 8
    assert decoder.do(pulled, 8) == expected
    assert prompt.do(living) == [True] * 16
    assert prompt.do(forget_kv) == [False] * 16


# --- element types ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("data_type", [each for each in DataType if each is not DataType.DT_STRING])
def test_element_types_and_torch_dtypes_map_both_ways(data_type: DataType) -> None:
    torch_here()
    dtype = torch_type("data_type", data_type)
    assert data_type_of("dtype", dtype) is CacheDesc(1, [2], dtype).data_type is data_type
    assert dtype.itemsize == data_type.itemsize == np.dtype(numpy_type("data_type", data_type)).itemsize


def test_what_torch_has_no_type_for_is_refused() -> None:
    torch = torch_here()
    with pytest.raises(ParamError, match="data_type=DT_STRING"):
        torch_type("data_type", DataType.DT_STRING)
    for wrong in (torch.complex64, torch.quint8, torch.bits8, torch.int4):
        with pytest.raises(ParamError, match=f"data_type={wrong}: not an element type"):
            CacheDesc(1, [2], wrong)
    with pytest.raises(TypeError, match="data_type only support"):
        CacheDesc(1, [2], "torch.float16")  # type: ignore[arg-type]
