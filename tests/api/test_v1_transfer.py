"""v1: transfer_cache_async from a PROMPT to addresses of a DECODER (interface §8, §6.14, R18)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.errors import NoneArgument, ParamError
from tests.support.layers import Always, Gated
from tests.support.moves import Use, moved, refused, same_bytes, show
from tests.support.v1 import DIRECT, POOL, desc, kv_call, kv_make, kv_properties, start_v1

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("KvCacheManager.transfer_cache_async")

OK, WAITED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


def both(pair: Pair, blocks: bool, **settings: Any) -> tuple[Bytes, Bytes, list[int]]:
    """Start, link, make "kv" at each end; return the bytes, and the decoder's addresses."""
    if pair.transport == "shm":
        pair.transport = "auto"  # raw addresses are written by cma
    start_v1(pair, **settings)
    src = pair.prompt.do(kv_make, "kv", desc(), 1, (), blocks)
    dst = pair.decoder.do(kv_make, "kv", desc(), 2, (), blocks)
    return src, dst, pair.decoder.do(kv_properties, "kv")[1][0]


def send(world: World, addrs: list[int], layers: range | None, row: int, lists: tuple[Any, ...]) -> Any:
    """Send layers, wait for the end, return (status, results)."""
    config = TransferConfig(2, addrs, layers, row)
    task = kv_call(world, "transfer_cache_async", Use("kv"), Always(), [config], *lists)
    return task.synchronize(20_000), task.get_results()


@pytest.mark.parametrize("memory", ["pool", "direct"])
def test_r12_a_row_goes_to_addresses_of_the_decoder(pair: Pair, memory: str) -> None:
    src, dst, addrs = both(pair, False, **(POOL if memory == "pool" else DIRECT))
    at_row_5 = [address + 5 * 48 for address in addrs]
    assert pair.prompt.do(send, at_row_5, None, 2, ()) == (OK, [OK])
    dst = moved(dst, src, [(5, 2)])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    assert pair.prompt.do(send, addrs[2:], range(1, 2), 7, ()) == (OK, [OK])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(0, 7)], [(2, 2), (3, 3)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


@pytest.mark.parametrize("memory", ["pool", "direct"])
def test_blocks_go_pair_by_pair(pair: Pair, memory: str) -> None:
    src, dst, addrs = both(pair, True, **(POOL if memory == "pool" else DIRECT))
    assert pair.prompt.do(send, addrs, None, 0, ([0, 1, 2, 3], [3, 2, 1, 0])) == (OK, [OK])
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 0), (2, 1), (1, 2), (0, 3)]))
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_an_address_that_is_no_cache_of_the_decoder_is_refused_and_nothing_is_written(pair: Pair) -> None:
    src, dst, addrs = both(pair, False, **DIRECT)
    beyond = [address + 8 * 48 for address in addrs]
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    assert pair.prompt.do(send, beyond, None, 0, ()) == (invalid, [invalid])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    same_bytes(pair.prompt.do(show, "kv"), src)


def wait_too_short(world: World, addrs: list[int]) -> Any:
    """Ask before the only layer is ready, then let the transfer end."""
    gated = Gated()
    config = TransferConfig(2, addrs[:2], range(1))
    task = kv_call(world, "transfer_cache_async", Use("kv"), gated, [config])
    early = task.synchronize(1), task.get_results(1)
    gated.open(0)
    return early, (task.synchronize(20_000), task.get_results())


def test_r06_a_task_that_is_not_over_yet_has_v1s_code(local_pair: Pair) -> None:
    src, dst, addrs = both(local_pair, False, **DIRECT)
    early, late = local_pair.prompt.do(wait_too_short, addrs)
    assert early == (WAITED, [WAITED])
    assert late == (OK, [OK])
    same_bytes(local_pair.decoder.do(show, "kv"), moved(dst, src, [(0, 0)], [(0, 0), (1, 1)]))


def test_r01_a_wrong_argument_is_a_typed_error_and_nothing_happens(local_pair: Pair) -> None:
    _, _, addrs = both(local_pair, False, **DIRECT)
    prompt, decoder = local_pair.prompt, local_pair.decoder
    config = TransferConfig(2, addrs)
    keyed = [
        TransferWithCacheKeyConfig(key, range(2), range(2)) for key in (CacheKeyByIdAndIndex(2, 1), BlocksCacheKey(2))
    ]
    cases: list[tuple[Any, type[Exception], tuple[Any, ...], str]] = [
        (decoder, ParamError, (Use("kv"), Always(), [config]), "only a PROMPT"),
        (prompt, NoneArgument, (None, Always(), [config]), "src_cache"),
        (prompt, TypeError, (1, Always(), [config]), "src_cache"),
        (prompt, NoneArgument, (Use("kv"), None, [config]), "layer_synchronizer"),
        (prompt, TypeError, (Use("kv"), Always(), config), "transfer_configs"),
        (prompt, TypeError, (Use("kv"), Always(), [None]), "transfer_configs[0]"),
        *((prompt, TypeError, (Use("kv"), Always(), [each]), "transfer_configs[0]") for each in keyed),
        (prompt, ParamError, (Use("kv"), Always(), [TransferConfig(2, addrs[:3])]), "dst_addrs has 3"),
        (prompt, ParamError, (Use("kv"), Always(), [config], [0], None), "src_block_indices"),
        (prompt, ParamError, (Use("kv"), Always(), [config], None, [0]), "dst_block_memory_size is None"),
        (prompt, ParamError, (Use("kv"), Always(), [config], [0, 1], [0]), "equal lengths"),
    ]
    for end, kind, args, part in cases:
        other = decoder if end is prompt else prompt
        refused((end, other), ["kv"], kind, (part,), kv_call, "transfer_cache_async", *args)
