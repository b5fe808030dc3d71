"""v1: every argument of KvCacheManager wrong in every way; a typed error each, and nothing happened (interface §8,
R1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMException,
    LLMStatusCode,
    Placement,
)
from llm_datadist.errors import CacheMismatch, CacheNotFound, NoneArgument, ParamError
from tests.support.moves import Use, refused
from tests.support.v1 import desc, kv_call, kv_make, start_end, start_v1

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

    #: Role of the end that calls, method, arguments, keyword arguments, exception class, parts of its text.
    Case = tuple[str, str, tuple[Any, ...], dict[str, Any], type[Exception], tuple[str, ...]]

pytestmark = pytest.mark.covers(
    "KvCacheManager",
    "KvCache: cache_desc create_cpu_cache",
    "KvCacheManager: check_cache_key deallocate_cache is_initialized remove_cache_key",
)

KEY, BLOCKS = CacheKey(1, 10), BlocksCacheKey(1, 3)
BY_ID = CacheKeyByIdAndIndex(1, 1, 0)
HOST = CacheDesc(4, [8, 48], DataType.DT_UINT8, Placement.HOST)
KV, PAGED, CPU = Use("kv"), Use("paged"), Use("cpu")
V2_CACHE = Cache(1, desc(), [1, 2, 3, 4])
P, D = "PROMPT", "DECODER"


def wrong_types(*wrong: Any, broken: tuple[Any, ...] = ()) -> list[tuple[Any, type[Exception]]]:
    """Return each value with TypeError, None with NoneArgument, and what breaks a rule with ParamError."""
    kinds: list[tuple[Any, type[Exception]]] = [(value, TypeError) for value in wrong]
    return [*kinds, (None, NoneArgument), *((value, ParamError) for value in broken)]


def _allocations() -> list[Case]:
    cases: list[Case] = []
    for method in ("allocate_cache", "allocate_blocks_cache"):
        for value, kind in wrong_types("desc", 1, KEY):
            cases.append((P, method, (value,), {}, kind, ("cache_desc",)))
        cases.append((P, method, (HOST,), {}, ParamError, ("cache_desc", "HOST", "DEVICE")))
        cases += [
            (P, method, (CacheDesc(1, dims, DataType.DT_UINT8),), {}, ParamError, ("shape",))
            for dims in ([0, 8], [-1, 8], [2**40, 2**40], [1] * 32)
        ]
        cases.append((P, method, (CacheDesc(0, [8], DataType.DT_UINT8),), {}, ParamError, ("num_tensors=0",)))
    for value, kind in wrong_types(KEY, {KEY}, "keys"):
        cases.append((P, "allocate_cache", (desc(), value), {}, kind, ("cache_keys",)))
    for value, kind in wrong_types(BLOCKS, 7):
        cases.append((P, "allocate_cache", (desc(), [KEY, value]), {}, kind, ("cache_keys[1]",)))
    cases += [
        (P, "allocate_blocks_cache", (desc(), wrong), {}, TypeError, ("blocks_cache_key",)) for wrong in (KEY, BY_ID, 7)
    ]
    cases += [
        (P, "allocate_cache", (desc(rows=1), [CacheKey(1, 20), CacheKey(1, 21)]), {}, ParamError, ("2 keys", "1")),
        (D, "allocate_cache", (desc(), [CacheKey(1, 20)]), {}, ParamError, ("cache_keys", "PROMPT", "DECODER")),
        (D, "allocate_cache", (desc(), [CacheKey(1, 2**64 - 1)]), {}, ParamError, ("cache_keys", "PROMPT")),
        (D, "allocate_blocks_cache", (desc(), BlocksCacheKey(1)), {}, ParamError, ("blocks_cache_key", "DECODER")),
    ]
    return cases


def _ends_of_caches() -> list[Case]:
    cases: list[Case] = []
    for value, kind in wrong_types(1, desc(), V2_CACHE):
        cases.append((P, "deallocate_cache", (value,), {}, kind, ("cache",)))
    cases.append((P, "deallocate_cache", (CPU,), {}, ParamError, ("cache", "HOST")))
    for value, kind in wrong_types(7, BLOCKS, BY_ID):
        cases.append((P, "remove_cache_key", (value,), {}, kind, ("cache_key",)))
    cases.append((D, "remove_cache_key", (KEY,), {}, ParamError, ("remove_cache_key", "PROMPT", "DECODER")))
    for value, kind in wrong_types(7, BLOCKS, BY_ID):
        cases.append((P, "check_cache_key", (value,), {}, kind, ("cache_key",)))
    none, both = CacheKey(1, 2**64 - 1), CacheKey(1, 5, 0, 6)
    cases += [(P, "check_cache_key", (key,), {}, ParamError, ("exactly one",)) for key in (none, both)]
    return cases


def _pull_cache() -> list[Case]:
    def case(args: tuple[Any, ...], kind: type[Exception], *parts: str, **keywords: Any) -> Case:
        return D, "pull_cache", args, keywords, kind, parts

    cases: list[Case] = [(P, "pull_cache", (KEY, KV), {}, ParamError, ("pull_cache", "DECODER", "PROMPT"))]
    for value, kind in wrong_types(10, BLOCKS, "key"):
        cases.append(case((value, KV), kind, "cache_key"))
    for value, kind in wrong_types(10, V2_CACHE, desc()):
        cases.append(case((KEY, value), kind, "kv_cache"))
    for value, kind in wrong_types(
        "0",
        1.0,
        broken=(
            -1,
            2**32,
            8,
        ),
    ):
        cases.append(case((KEY, KV, value), kind, "batch_index"))
    sizes = wrong_types(
        "8",
        8.0,
        broken=(
            0,
            -2,
            49,
            2**63,
        ),
    )
    for value, kind in sizes:
        cases.append(case((KEY, KV, 0, value), kind, "size"))
    for name in ("src_cache_offset", "dst_cache_offset"):
        for value, kind in (("0", TypeError), (1.0, TypeError), (-1, ParamError), (2**64, ParamError)):
            cases.append(case((KEY, KV), kind, name, **{name: value}))
    cases += [
        case((KEY, KV), ParamError, "dst_cache_offset=48", dst_cache_offset=48),
        case((KEY, KV, 0, 8), ParamError, "dst_cache_offset=41", dst_cache_offset=41),
        case((KEY, KV, 0, 8), CacheMismatch, "41", src_cache_offset=41),
        case((KEY, KV), CacheMismatch, "1", src_cache_offset=1),  # size -1 is the whole destination row
        case((KEY, PAGED), ParamError, "blocks cache"),
        case((KEY, CPU), ParamError, "kv_cache", "HOST"),
        case((CacheKey(1, 2**64 - 1), KV), ParamError, "exactly one"),
        case((CacheKey(1, 1, 0, 1), KV), ParamError, "exactly one"),
    ]
    return cases + _layers("pull_cache", (KEY, KV))


def _layers(method: str, args: tuple[Any, ...]) -> list[Case]:
    cases: list[Case] = []
    for name in ("src_layer_range", "dst_layer_range"):
        cases += [(D, method, args, {name: value}, TypeError, (name,)) for value in (1, (0, 1), slice(1))]
        ranges = (range(0, 2, 2), range(-1, 1), range(3))
        cases += [(D, method, args, {name: value}, ParamError, ("layer",)) for value in ranges]
    for value, kind in wrong_types(
        "2",
        2.0,
        broken=(
            -1,
            0,
            2**32,
        ),
    ):
        cases.append((D, method, args, {"tensor_num_per_layer": value}, kind, ("tensor_num_per_layer",)))
    layers = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    unequal = {"src_layer_range": range(1), "dst_layer_range": range(2)}
    cases.append((D, method, args, layers | {"tensor_num_per_layer": 3}, ParamError, ("tensor_num_per_layer=3",)))
    cases.append((D, method, args, unequal, ParamError, ("equal lengths",)))
    return cases


def _pull_blocks() -> list[Case]:
    def case(args: tuple[Any, ...], kind: type[Exception], *parts: str) -> Case:
        return D, "pull_blocks", args, {}, kind, parts

    whole = (BLOCKS, PAGED, [0], [0])
    cases: list[Case] = [(P, "pull_blocks", whole, {}, ParamError, ("pull_blocks", "DECODER", "PROMPT"))]
    for value, kind in wrong_types(3, KEY, BY_ID):
        cases.append(case((value, *whole[1:]), kind, "prompt_cache_key"))
    for value, kind in wrong_types(3, V2_CACHE):
        cases.append(case((BLOCKS, value, [0], [0]), kind, "decoder_kv_cache"))
    for position, name in ((2, "prompt_blocks"), (3, "decoder_blocks")):
        broken: tuple[Any, ...] = ([-1], [2**64], [8], [], [0, 1])
        lists = wrong_types((0,), 0, np.zeros(1, np.int64), ["0"], [0.0], [[0]], [None], broken=broken)
        for value, kind in lists:
            args = (*whole[:position], value, *whole[position + 1 :])
            cases.append(case(args, kind, "block" if isinstance(value, list) else name))
    cases += [
        case((BLOCKS, PAGED, [], []), ParamError, "prompt_blocks is empty"),
        case((BLOCKS, KV, [0], [0]), ParamError, "decoder_kv_cache", "not a blocks cache"),
        case((BLOCKS, CPU, [0], [0]), ParamError, "decoder_kv_cache", "HOST"),
        case((BLOCKS, Use("other size"), [0], [0]), CacheMismatch, "block sizes differ"),
    ]
    return cases + _layers("pull_blocks", whole)


def _copies() -> list[Case]:
    def case(method: str, args: tuple[Any, ...], kind: type[Exception], *parts: str) -> Case:
        return D, method, args, {}, kind, parts

    cases: list[Case] = []
    for value, kind in wrong_types(1, V2_CACHE):
        cases.append(case("copy_cache", (value, KV), kind, "dst"))
        cases.append(case("copy_cache", (KV, value), kind, "src"))
        cases.append(case("copy_blocks", (value, {0: [1]}), kind, "cache"))
        cases.append(case("swap_blocks", (value, CPU, {0: 1}), kind, "src"))
        cases.append(case("swap_blocks", (CPU, value, {0: 1}), kind, "dst"))
    for position, name in ((2, "dst_batch_index"), (3, "src_batch_index")):
        for value, kind in wrong_types(
            "0",
            0.0,
            broken=(
                -1,
                2**32,
                8,
            ),
        ):
            rows = [0, 0]
            rows[position - 2] = value
            cases.append(case("copy_cache", (KV, KV, *rows), kind, name))
    for value, kind in wrong_types(
        "0",
        0.0,
        broken=(
            -1,
            2**64,
            48,
        ),
    ):
        cases.append(case("copy_cache", (KV, KV, 0, 1, value), kind, "offset"))
    for value, kind in wrong_types(
        "8",
        8.0,
        broken=(
            0,
            -2,
            49,
        ),
    ):
        cases.append(case("copy_cache", (KV, KV, 0, 1, 0, value), kind, "size"))
    for req_id, kind in wrong_types("7", 7.5, broken=(-1, 2**64)):
        if req_id is not None:  # which says that there is none
            cases.append(case("copy_cache", (KV, KV, 0, 1, 0, -1, req_id), kind, "req_id"))
    cases += [
        case("copy_cache", (PAGED, KV), ParamError, "dst", "blocks cache"),
        case("copy_cache", (KV, PAGED), ParamError, "src", "blocks cache"),
        case("copy_cache", (CPU, KV), ParamError, "dst", "HOST"),
        case("copy_cache", (KV, CPU), ParamError, "src", "HOST"),
        case("copy_blocks", (KV, {0: [1]}), ParamError, "blocks cache"),
        case("copy_blocks", (CPU, {0: [1]}), ParamError, "HOST"),
    ]
    wrong: tuple[Any, ...] = ([(0, [1])], "x", {0: 1}, {0: (1,)}, {"0": [1]}, {0: ["1"]}, {0.0: [1]})
    broken: tuple[Any, ...] = ({-1: [1]}, {0: [-1]}, {0: [2**64]}, {8: [1]}, {0: [8]})
    for pairs, kind in wrong_types(*wrong, broken=broken):
        cases.append(case("copy_blocks", (PAGED, pairs), kind, "copy_block_info"))
    wrong, broken = ([(0, 1)], {0: [1]}, {"0": 1}, {0: 1.0}), ({-1: 1}, {0: -1}, {8: 1}, {0: 8})
    for pairs, kind in wrong_types(*wrong, broken=broken):
        cases.append(case("swap_blocks", (PAGED, CPU, pairs), kind, "src_to_dst"))
    cases += [
        case(
            "swap_blocks",
            (PAGED, Use("other size"), {0: 1}),
            CacheMismatch,
            "block sizes differ: blocks of src have",
            "of dst",
        ),
        case("swap_blocks", (PAGED, KV, {0: 1}), ParamError, "src and dst are both on DEVICE"),
        case("swap_blocks", (CPU, CPU, {0: 1}), ParamError, "src and dst are both on HOST"),
        case("swap_blocks", (PAGED, Use("cpu of 3"), {0: 1}), CacheMismatch, "num_tensors differ: src has 4, dst 3"),
        case("swap_blocks", (PAGED, Use("cpu at 0"), {0: 1}), ParamError, "dst: tensor_addrs[0]=0"),
        case("swap_blocks", (Use("freed"), CPU, {0: 1}), ParamError, "src: it has no memory any more (deallocated)"),
        case("get_cache_tensors", (Use("freed"), 0), ParamError, "deallocated"),
    ]
    for value, kind in wrong_types(1, V2_CACHE):
        cases.append(case("get_cache_tensors", (value,), kind, "cache"))
    for value, kind in wrong_types(
        "0",
        0.0,
        broken=(
            -1,
            4,
            2**31,
        ),
    ):
        cases.append(case("get_cache_tensors", (KV, value), kind, "tensor_index"))
    return cases


CASES: Final = [*_allocations(), *_ends_of_caches(), *_pull_cache(), *_pull_blocks(), *_copies()]


def _host(world: World) -> None:
    """Make the CPU caches that the cases name."""
    memory = world.memory["host memory"] = np.zeros(8 * 48, np.uint8)
    address = memory.ctypes.data
    three = CacheDesc(3, [8, 48], DataType.DT_UINT8, Placement.HOST)
    world.memory["kv cpu"] = KvCache.create_cpu_cache(HOST, [address] * 4)
    world.memory["kv cpu of 3"] = KvCache.create_cpu_cache(three, [address] * 3)
    world.memory["kv cpu at 0"] = KvCache.create_cpu_cache(HOST, [0] * 4)


@pytest.fixture
def ready(local_pair: Pair) -> Pair:
    """A linked pair; the prompt has "kv" and "paged", both with a key, the decoder one of each, and more."""
    start_v1(local_pair)
    local_pair.prompt.do(kv_make, "kv", desc(), 1, (KEY,))
    local_pair.prompt.do(kv_make, "paged", desc(), 2, (), True, BLOCKS)
    local_pair.decoder.do(kv_make, "kv", desc(), 3)
    local_pair.decoder.do(kv_make, "paged", desc(), 4, (), True)
    local_pair.decoder.do(kv_make, "other size", desc(stride=32), 5, (), True)
    local_pair.decoder.do(kv_make, "freed", desc(), 6, (), True)
    local_pair.decoder.do(kv_call, "deallocate_cache", Use("freed"))
    for end in (local_pair.prompt, local_pair.decoder):
        end.do(_host)
    return local_pair


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[1]}-{case[4].__name__}")
def test_r01_a_wrong_argument_is_a_typed_error_and_nothing_happens(ready: Pair, case: Case) -> None:
    role, method, args, keywords, kind, parts = case
    ends = (ready.prompt, ready.decoder) if role == P else (ready.decoder, ready.prompt)
    refused(ends, ["kv", "paged", "other size"], kind, parts, kv_call, method, *args, **keywords)


def test_r01_a_none_argument_is_both_errors_that_the_pages_name(ready: Pair) -> None:
    for method, args in (("deallocate_cache", (None,)), ("swap_blocks", (None, None, None))):
        for kind in (TypeError, AttributeError, LLMException):
            with pytest.raises(kind):
                ready.decoder.do(kv_call, method, *args)


def test_the_tables_cover_every_method() -> None:
    methods = {name for name in dir(KvCacheManager) if not name.startswith("_")} - {"is_initialized"}
    assert {case[1] for case in CASES} == methods - {"transfer_cache_async"}  # in test_v1_transfer.py


def test_what_may_be_left_out_is_left_out_and_nothing_is_no_error(ready: Pair) -> None:
    """The other side of the matrix: None where it is allowed, empty where that means nothing to do."""
    end = ready.decoder
    end.do(kv_call, "copy_blocks", PAGED, {})
    end.do(kv_call, "copy_blocks", PAGED, {1: []})
    end.do(kv_call, "swap_blocks", PAGED, CPU, {})
    end.do(kv_call, "copy_cache", KV, KV, 0, 1, 0, -1, None)
    end.do(_pull_with_nones)
    ready.prompt.do(kv_call, "allocate_blocks_cache", desc(), None)
    for key in (CacheKey(1, 5), CacheKey(1, 2**64 - 1, 0, 5)):
        KvCacheManager.check_cache_key(key)


def _pull_with_nones(world: World) -> None:
    nothing = dict.fromkeys(("src_layer_range", "dst_layer_range", "src_cache_offset", "dst_cache_offset"))
    kv_call(world, "pull_cache", KEY, KV, 0, -1, **nothing)


def test_a_mix_neither_serves_rows_nor_pulls(end: LocalEnd) -> None:
    start_end(end, "MIX")
    manager = end.world.dd.kv_cache_manager
    cache, paged = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    calls: list[tuple[str, tuple[Any, ...]]] = [
        ("allocate_cache", (desc(), [KEY])),
        ("remove_cache_key", (KEY,)),
        ("pull_cache", (KEY, cache)),
        ("pull_blocks", (BLOCKS, paged, [0], [0])),
    ]
    for method, args in calls:
        with pytest.raises(ParamError, match="MIX") as caught:
            getattr(manager, method)(*args)
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID


@pytest.mark.parametrize(
    ("cache_desc", "addrs", "kind", "parts"),
    [
        (None, [1], NoneArgument, ("cache_desc",)),
        ("desc", [1], TypeError, ("cache_desc",)),
        (HOST, None, NoneArgument, ("addrs",)),
        (HOST, (1, 2, 3, 4), TypeError, ("addrs",)),
        (HOST, ["1", 2, 3, 4], TypeError, ("addrs",)),
        (HOST, [[1, 2, 3, "4"]], TypeError, ("addrs",)),
        (HOST, [(1, 2, 3, 4)], TypeError, ("addrs",)),
        (HOST, [1, 2, 3, -4], ParamError, ("addrs",)),
        (HOST, [], ParamError, ("addrs is empty",)),
        (HOST, [[]], ParamError, ("0 addresses", "num_tensors=4")),
        (HOST, [[1, 2], 3, 4], ParamError, ("should be consistent",)),
        (HOST, [3, [1, 2]], ParamError, ("should be consistent",)),
        (HOST, [[1, 2, 3, 4], [1, 2, 3, 4]], ParamError, ("2 lists", "one per device")),
        (HOST, [1, 2, 3], ParamError, ("3 addresses", "num_tensors=4")),
        (HOST, [[1, 2, 3, 4, 5]], ParamError, ("5 addresses", "num_tensors=4")),
        (desc(), [1, 2, 3, 4], ParamError, ("HOST",)),
    ],
)
def test_create_cpu_cache_refuses(cache_desc: Any, addrs: Any, kind: type[Exception], parts: tuple[str, ...]) -> None:
    with pytest.raises(kind) as caught:
        KvCache.create_cpu_cache(cache_desc, addrs)
    assert [part for part in parts if part not in str(caught.value)] == []


def test_a_freed_cache_is_not_found_by_its_handle(ready: Pair) -> None:
    ends, missing = (ready.decoder, ready.prompt), LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    for method, args in (
        ("pull_blocks", (BLOCKS, Use("freed"), [0], [0])),
        ("copy_blocks", (Use("freed"), {0: [1]})),
    ):
        refused(ends, ["kv"], CacheNotFound, ("id",), kv_call, method, *args, status=missing)
