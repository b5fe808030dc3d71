"""transfer_cache_async with wrong arguments: each has its typed error, and nothing has happened (interface §6.14,
§4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheTask, Placement, TransferConfig, TransferWithCacheKeyConfig
from tests.support.layers import Always, keyed, raw, send
from tests.support.moves import Spec as Cache
from tests.support.moves import Use, make, same_bytes, show
from tests.support.refusals import NONE, RULE, TYPE, Row, Spec, Table, bad, integer, refuse

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

ROWS, STRIDE = 4, 48
KV = Cache(4, ROWS, STRIDE)
BY_KEY = TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(2), range(2))
BY_ADDRESS = TransferConfig(1, [4096] * 4)
SIZE = ROWS * STRIDE

BLOCKS = Spec(
    (1, {0}),
    (TYPE, "{}", [0.5]),
    (NONE, "{}", [None]),
    (RULE, "{}", [-1], [2**64]),
    (RULE, "{} is empty", []),
    none_ok=True,
)
SPECS = {
    "src_cache": Spec((1,), (RULE, "HOST", Use("host")), (RULE, "even", Use("odd"))),
    "layer_synchronizer": Spec((print,)),
    "transfer_configs": Spec(("x",), (NONE, "{}[0]", [None]), (TYPE, "{}[0]", [1])),
    "dst_block_indices": BLOCKS,
}
TO_BLOCKS = {
    "src_block_indices": BLOCKS,
    "dst_block_memory_size": integer(0, 2**64 - 1, 0, SIZE, none_ok=True),
}
ONE = {"dst_block_indices": [0]}
FROM_BLOCKS = ONE | {"src_block_indices": [0]}
BLOCK_ROWS: list[Row] = [
    *(Row(ONE | row.changes, row.kind, row.texts) for name, spec in TO_BLOCKS.items() for row in spec.rows(name)),
    bad(RULE, "src_block_indices[0]", **ONE, src_block_indices=[ROWS]),
    bad(RULE, "equal lengths", **ONE, src_block_indices=[0, 1]),
    bad(RULE, "blocks to cache", src_block_indices=[0]),
    bad(RULE, "dst_block_memory_size", **ONE),
    bad(RULE, "2 pieces", dst_block_indices=[0, 1, 2], dst_block_memory_size=SIZE // 2),
    bad(RULE, dst_block_memory_size=48),
    bad(RULE, "block size 48", **FROM_BLOCKS, dst_block_memory_size=47),
]


def rows_by_key(good: TransferWithCacheKeyConfig) -> list[Row]:
    def config(layers: range = range(2), row: int = 0) -> list[TransferWithCacheKeyConfig]:
        return [TransferWithCacheKeyConfig(good.cache_key, layers, layers, row)]

    unequal = config()
    unequal[0].src_layer_range = range(1)
    return [
        bad(TYPE, "TransferWithCacheKeyConfig", transfer_configs=[BY_ADDRESS]),
        bad(TYPE, "transfer_configs[1]", transfer_configs=[BY_KEY, BY_ADDRESS]),
        bad(RULE, "2 layers", transfer_configs=config(range(3))),
        bad(RULE, "length", transfer_configs=unequal),
        bad(RULE, "src_batch_index", transfer_configs=config(row=ROWS)),
        bad(RULE, "src_batch_index", transfer_configs=config(row=1), **FROM_BLOCKS),
    ]


def rows_by_address(good: TransferConfig) -> list[Row]:
    def config(addrs: list[int], layers: range | None = None, row: int = 0) -> list[TransferConfig]:
        return [TransferConfig(good.dst_cluster_id, addrs, layers, row)]

    real = list(good.dst_addrs)
    return [
        bad(TYPE, "TransferConfig", transfer_configs=[BY_KEY]),
        bad(RULE, "dst_addrs has 0", transfer_configs=config([])),
        bad(RULE, "dst_addrs has 3", transfer_configs=config([4096] * 3)),
        bad(RULE, "dst_addrs has 4", transfer_configs=config([4096] * 4, range(1))),
        bad(RULE, "2 layers", transfer_configs=config([4096] * 6, range(3))),
        bad(RULE, "src_batch_index", transfer_configs=config(real, row=ROWS)),
        bad(RULE, "src_batch_index", transfer_configs=config(real, row=1), **FROM_BLOCKS),
    ]


@pytest.mark.parametrize("rca", [True, False], ids=["by key", "by address"])
def test_r01_a_wrong_argument_is_refused_and_nothing_happens(local_pair: Pair, rca: bool) -> None:
    local_pair.start(rca=rca)
    local_pair.prompt.do(make, "kv", KV, 1)
    odd, host = Cache(3, ROWS, STRIDE), Cache(4, ROWS, STRIDE, placement=Placement.HOST)
    for name, cache in (("kv", KV), ("odd", odd), ("host", host)):
        local_pair.decoder.do(make, name, cache, 2)
    good: Any = keyed(local_pair.prompt, "kv", range(2), dst_row=0) if rca else raw(local_pair.prompt, "kv")
    special = rows_by_key(good) if rca else rows_by_address(good)
    always = Always()
    arguments = {"src_cache": Use("kv"), "layer_synchronizer": always, "transfer_configs": [good]}
    table = Table("cm.transfer_cache_async", arguments, SPECS, *BLOCK_ROWS, *special)
    refuse((local_pair.decoder, local_pair.prompt), table)
    assert always.asked == []
    if not rca:
        configs = [good, *(each for row in special[1:] for each in row.changes["transfer_configs"])]
        ranges = [None, None, None, range(1), range(3), None, None]
        assert [config.src_layer_range for config in configs] == ranges, "written back by a refused call"
    assert local_pair.decoder.do(send, "kv", [good]).results[0] is not None, "and a good call is taken after all that"


def test_src_layer_range_none_becomes_all_layers_in_the_object_and_is_not_read_again(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", KV, 1)
    sent = local_pair.decoder.do(make, "kv", KV, 2)
    config = raw(local_pair.prompt, "kv")
    assert config.src_layer_range is None
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]
    seen = []

    class Changing(Always):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            seen.append(config.src_layer_range)
            config.dst_addrs = [1, 2, 3, 4]
            config.src_layer_range = range(1)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = world.cm.transfer_cache_async(world.caches["kv"], Changing(), [config])
    assert isinstance(task, CacheTask)
    assert task.synchronize() == 0
    assert seen == [range(2), range(1)]
    received = local_pair.prompt.do(show, "kv")
    same_bytes([tensor[:1] for tensor in received], [tensor[:1] for tensor in sent])
