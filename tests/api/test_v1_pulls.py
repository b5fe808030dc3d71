"""What only v1's transfers have: keys that are consumed, offsets, memory without a pool, and transfers to addresses
(interface §6.14, §8, R5, R6, R12, R18, R22).

Equal cluster ids and memory that comes back: vllm-ascend's first connectors in tests/clients. The rest:
test_dialects.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.errors import CacheMismatch, CacheNotFound, LLMException, NoneArgument, NotLinked, ParamError
from tests.support.layers import Always, Gated
from tests.support.linking import begin_there, result_there
from tests.support.moves import Use, moved, picture, refused, same_bytes, show, wait_until
from tests.support.v1 import DIRECT, POOL, desc, kv_call, kv_make, kv_properties, start_v1

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.moves import Bytes
    from tests.support.world import World

pytestmark = pytest.mark.covers("KvCacheManager: is_initialized pull_blocks pull_cache transfer_cache_async")

KEYS = (CacheKey(1, 10, 1), CacheKey(1, 11, 1))
BLOCKS = BlocksCacheKey(1, 3)
OK, WAITED = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT


def both(pair: Pair, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start, link, and make a cache "kv" at each end, the prompt's with KEYS on rows 0 and 1."""
    if pair.transport == "shm":
        pair.transport = "auto"  # shm maps pools; what has none, and raw addresses, are reached by cma, beside it
    start_v1(pair, **settings)
    return pair.prompt.do(kv_make, "kv", desc(), 1, KEYS), pair.decoder.do(kv_make, "kv", desc(), 2)


def consumed(pair: Pair, left: int) -> None:
    """Wait until the prompt has so many keys left, and no pin."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0 and len(pair.prompt.do(picture).keys) == left)


def pull(world: World, key: CacheKey, row: int, size: int, keywords: dict[str, Any]) -> None:
    kv_call(world, "pull_cache", key, Use("kv"), row, size, **keywords)


@pytest.mark.parametrize("memory", ["pool", "direct"])
def test_r12_a_row_is_pulled_by_key_which_is_consumed_and_by_id(pair: Pair, memory: str) -> None:
    src, dst = both(pair, **(DIRECT if memory == "direct" else POOL))
    prompt, decoder = pair.prompt, pair.decoder
    decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"), 5)
    dst = moved(dst, src, [(5, 1)])
    same_bytes(decoder.do(show, "kv"), dst)
    consumed(pair, 1)
    with pytest.raises(CacheNotFound):
        decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"))
    for row in (0, 7):  # by id and row: row 0 carries the other key, row 7 none
        decoder.do(kv_call, "pull_cache", CacheKeyByIdAndIndex(1, 1, row), Use("kv"), row)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0), (7, 7)]))
    same_bytes(prompt.do(show, "kv"), src)
    consumed(pair, 0)
    src = prompt.do(kv_make, "paged", desc(), 3, (), True, BLOCKS)
    dst = decoder.do(kv_make, "paged", desc(rows=6), 4, (), True)
    for _ in range(2):  # a blocks key is never consumed
        decoder.do(kv_call, "pull_blocks", BLOCKS, Use("paged"), [1, 7], [3, 0])
    same_bytes(decoder.do(show, "paged"), moved(dst, src, [(3, 1), (0, 7)]))
    consumed(pair, 1)


#: Offsets into the rows of source and destination, size, and how many bytes move.
OFFSETS = [
    (0, 0, 48, 48),
    (7, 0, 16, 16),
    (0, 9, 16, 16),
    (31, 13, 17, 17),
    (8, 40, -1, 8),
    (None, 47, -1, 1),
    (47, None, 1, 1),
]


def test_offsets_are_bytes_inside_the_row_of_either_end_and_go_with_layer_ranges(pair: Pair) -> None:
    src, dst = both(pair)
    # Outside of the row, at either end: one wrong argument at a time is in test_v1_bad_input.py.
    for kind, name, end in ((ParamError, "dst_cache_offset", "48 bytes"), (CacheMismatch, "src_cache_offset", "48")):
        outside = {name: 2**64 - 1}
        parts = (f"{name}={2**64 - 1}", end)
        refused((pair.decoder, pair.prompt), ["kv"], kind, parts, pull, KEYS[0], 0, 1, outside)
    for row, (src_at, dst_at, size, length) in enumerate(OFFSETS):
        offsets = {"src_cache_offset": src_at, "dst_cache_offset": dst_at, "tensor_num_per_layer": 1}
        pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, row), 7 - row, size, offsets)
        at, of = dst_at or 0, src_at or 0
        for tensor, source in zip(dst, src, strict=True):
            tensor[7 - row, at : at + length] = source[row, of : of + length]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 0)  # interface R5: neither offsets nor size make a pull incomplete

    # Rows of unequal length, and a third of the layers: the key stays until the union covers it.
    src = pair.prompt.do(kv_make, "kv", desc(6, 2, 100), 3, KEYS)
    dst = pair.decoder.do(kv_make, "kv", desc(4, 3, 40), 4)
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    pair.decoder.do(pull, KEYS[1], 2, 30, layers | {"src_cache_offset": 70})
    for to, from_ in ((0, 2), (1, 3)):
        dst[to][2, :30] = src[from_][1, 70:]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 2)
    for layer in (0, 2):
        pair.decoder.do(pull, KEYS[1], 0, 40, layers | {"src_layer_range": range(layer, layer + 1)})
    consumed(pair, 1)


def _pull_until_unlinked(world: World) -> list[str]:
    """Pull again and again until the link is gone; return what the errors said."""
    texts: list[str] = []
    while True:
        try:
            kv_call(world, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
        except NotLinked as error:
            return [*texts, str(error)]
        except LLMException as error:
            texts.append(str(error))


def test_r22_whatever_a_lost_prompt_interrupts_the_error_names_the_call(shm_pair: Pair) -> None:
    start_v1(shm_pair)
    shm_pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    shm_pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    names = [f"pull {i}" for i in range(4)]
    for name in names:
        shm_pair.decoder.do(begin_there, name, _pull_until_unlinked)
    shm_pair.prompt.stop()
    for name in names:
        *during, after = shm_pair.decoder.do(result_there, name)
        assert [text for text in during if not text.startswith("pull_blocks: ")] == []
        assert "cluster 1" in after


# --- transfers to addresses -------------------------------------------------------------------------------------------


def send(world: World, addrs: list[int], layers: range | None, row: int) -> Any:
    """Send layers, wait for the end, return (status, results)."""
    task = kv_call(world, "transfer_cache_async", Use("kv"), Always(), [TransferConfig(2, addrs, layers, row)])
    return task.synchronize(20_000), task.get_results()


def test_r12_rows_and_layers_without_a_pool_go_to_addresses_and_no_others(pair: Pair) -> None:
    src, dst = both(pair, **DIRECT)
    addrs = pair.decoder.do(kv_properties, "kv")[1][0]
    at_row_5 = [address + 5 * 48 for address in addrs]
    assert pair.prompt.do(send, at_row_5, None, 2) == (OK, [OK])
    assert pair.prompt.do(send, addrs[2:], range(1, 2), 7) == (OK, [OK])
    dst = moved(moved(dst, src, [(5, 2)]), src, [(0, 7)], [(2, 2), (3, 3)])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    beyond = [address + 8 * 48 for address in addrs]  # no cache of the decoder
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    assert pair.prompt.do(send, beyond, None, 0) == (invalid, [invalid])
    same_bytes(pair.decoder.do(show, "kv"), dst)
    same_bytes(pair.prompt.do(show, "kv"), src)


def test_r01_r06_a_task_that_is_not_over_has_v1s_code_and_a_wrong_argument_a_typed_error(local_pair: Pair) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    src, dst = both(local_pair, **DIRECT)
    addrs = decoder.do(kv_properties, "kv")[1][0]
    gated = Gated()
    args = (Use("kv"), gated, [TransferConfig(2, addrs[:2], range(1))])
    task = prompt.do(kv_call, "transfer_cache_async", *args)
    assert (task.synchronize(1), task.get_results(1)) == (WAITED, [WAITED])
    gated.open(0)
    assert (task.synchronize(20_000), task.get_results()) == (OK, [OK])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0)], [(0, 0), (1, 1)]))

    config = TransferConfig(2, addrs)
    by_key = [TransferWithCacheKeyConfig(key, range(2), range(2)) for key in (CacheKeyByIdAndIndex(2, 1), BLOCKS)]
    cases: list[tuple[Any, type[Exception], tuple[Any, ...], str]] = [
        (decoder, ParamError, (Use("kv"), Always(), [config]), "only a PROMPT"),
        (prompt, NoneArgument, (None, Always(), [config]), "src_cache"),
        (prompt, TypeError, (1, Always(), [config]), "src_cache"),
        (prompt, NoneArgument, (Use("kv"), None, [config]), "layer_synchronizer"),
        (prompt, TypeError, (Use("kv"), Always(), config), "transfer_configs"),
        (prompt, TypeError, (Use("kv"), Always(), [None]), "transfer_configs[0]"),
        *((prompt, TypeError, (Use("kv"), Always(), [each]), "transfer_configs[0]") for each in by_key),
        (prompt, ParamError, (Use("kv"), Always(), [TransferConfig(2, addrs[:3])]), "dst_addrs has 3"),
        (prompt, ParamError, (Use("kv"), Always(), [config], [0], None), "src_block_indices"),
        (prompt, ParamError, (Use("kv"), Always(), [config], None, [0]), "dst_block_memory_size is None"),
        (prompt, ParamError, (Use("kv"), Always(), [config], [0, 1], [0]), "equal lengths"),
    ]
    for end, kind, case, part in cases:
        other = decoder if end is prompt else prompt
        refused((end, other), ["kv"], kind, (part,), kv_call, "transfer_cache_async", *case)
