"""transfer_cache_async with wrong arguments: each has its typed error, and nothing has happened (interface §6.14,
§4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    CacheTask,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.errors import NoneArgument, ParamError
from tests.support.layers import INVALID, Always, addresses, keyed, raw, send
from tests.support.moves import Spec, make, nothing_happens, picture

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

ROWS, STRIDE = 4, 48
KV = Spec(4, ROWS, STRIDE)
BY_KEY = TransferWithCacheKeyConfig(BlocksCacheKey(1, 0), range(2), range(2))
BY_ADDRESS = TransferConfig(1, [4096] * 4)
SIZE = ROWS * STRIDE

#: (RCA, what replaces or follows the arguments of a good call, exception, part of its text)
Case = tuple[bool, dict[str, Any], type[Exception], str]
BLOCKS_ONLY = {"dst_block_indices": [0], "dst_block_memory_size": 48}
COMMON: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"src_cache": None}, NoneArgument, "src_cache"),
    ({"src_cache": 1}, TypeError, "src_cache"),
    ({"src_cache": "host"}, ParamError, "HOST"),
    ({"src_cache": "odd"}, ParamError, "even"),
    ({"dst_block_indices": 1}, TypeError, "dst_block_indices"),
    ({"dst_block_indices": {0}}, TypeError, "dst_block_indices"),
    ({"dst_block_indices": [0.5]}, TypeError, "dst_block_indices"),
    ({"dst_block_indices": [None]}, TypeError, "dst_block_indices"),
    ({"dst_block_indices": [-1]}, ParamError, "dst_block_indices"),
    ({"dst_block_indices": [2**64]}, ParamError, "dst_block_indices"),
    ({"dst_block_indices": []}, ParamError, "dst_block_indices is empty"),
    ({"dst_block_indices": [0], "src_block_indices": ["0"]}, TypeError, "src_block_indices"),
    ({"dst_block_indices": [0], "src_block_indices": [-1]}, ParamError, "src_block_indices"),
    ({"dst_block_indices": [0], "src_block_indices": []}, ParamError, "src_block_indices is empty"),
    ({"dst_block_indices": [0], "src_block_indices": [ROWS]}, ParamError, "src_block_indices[0]"),
    ({"dst_block_indices": [0], "src_block_indices": [0, 1]}, ParamError, "equal lengths"),
    ({"src_block_indices": [0]}, ParamError, "blocks to cache"),
    ({"dst_block_indices": [0]}, ParamError, "dst_block_memory_size"),
    ({"dst_block_indices": [0], "dst_block_memory_size": "48"}, TypeError, "dst_block_memory_size"),
    ({"dst_block_indices": [0], "dst_block_memory_size": -1}, ParamError, "dst_block_memory_size"),
    ({"dst_block_indices": [0], "dst_block_memory_size": 2**64}, ParamError, "dst_block_memory_size"),
    ({"dst_block_indices": [0], "dst_block_memory_size": 0}, ParamError, "dst_block_memory_size"),
    ({"dst_block_indices": [0], "dst_block_memory_size": SIZE}, ParamError, "dst_block_memory_size"),
    ({"dst_block_indices": [0, 1, 2], "dst_block_memory_size": SIZE // 2}, ParamError, "2 pieces"),
    ({"dst_block_memory_size": 48}, ParamError, "dst_block_memory_size"),
    ({"src_block_indices": [0], "dst_block_indices": [0], "dst_block_memory_size": 47}, ParamError, "block size 48"),
    ({"layer_synchronizer": None}, NoneArgument, "layer_synchronizer"),
    ({"layer_synchronizer": print}, TypeError, "layer_synchronizer"),
    ({"transfer_configs": None}, NoneArgument, "transfer_configs"),
    ({"transfer_configs": "x"}, TypeError, "transfer_configs"),
    ({"transfer_configs": [None]}, TypeError, "transfer_configs[0]"),
    ({"transfer_configs": [1]}, TypeError, "transfer_configs[0]"),
]
WITH_KEYS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transfer_configs": [BY_ADDRESS]}, TypeError, "TransferWithCacheKeyConfig"),
    ({"transfer_configs": [BY_KEY, BY_ADDRESS]}, TypeError, "transfer_configs[1]"),
    ({"src_layer_range": range(3), "dst_layer_range": range(3)}, ParamError, "2 layers"),
    ({"src_layer_range": range(1), "dst_layer_range": range(2)}, ParamError, "length"),
    ({"row": ROWS}, ParamError, "src_batch_index"),
    ({"row": 1, "src_block_indices": [0], "dst_block_indices": [0]}, ParamError, "src_batch_index"),
]
WITH_ADDRESSES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transfer_configs": [BY_KEY]}, TypeError, "TransferConfig"),
    ({"addresses": []}, ParamError, "dst_addrs has 0"),
    ({"addresses": [4096] * 3}, ParamError, "dst_addrs has 3"),
    ({"addresses": [4096] * 4, "src_layer_range": range(1)}, ParamError, "dst_addrs has 4"),
    ({"addresses": [4096] * 6, "src_layer_range": range(3)}, ParamError, "2 layers"),
    ({"row": ROWS}, ParamError, "src_batch_index"),
    ({"row": 1, "src_block_indices": [0], "dst_block_indices": [0]}, ParamError, "src_batch_index"),
]
CASES: list[Case] = [
    *((rca, *case) for rca in (True, False) for case in COMMON),
    *((True, *case) for case in WITH_KEYS),
    *((False, *case) for case in WITH_ADDRESSES),
]


def attempt_with(world: World, rca: bool, good: Any, changed: dict[str, Any]) -> tuple[int, range | None]:
    """Call with some arguments changed; return how often the synchronizer was asked, and the config's range."""
    changed = dict(changed)
    for name, real in (("addresses", "dst_addrs"), ("row", "src_batch_index")):
        if name in changed:
            setattr(good, real, changed.pop(name))
    for name in ("src_layer_range", "dst_layer_range"):
        if name in changed:
            setattr(good, name, changed.pop(name))
    source = changed.pop("src_cache", "kv")
    always = Always()
    arguments: dict[str, Any] = {
        "src_cache": world.caches[source] if isinstance(source, str) else source,
        "layer_synchronizer": always,
        "transfer_configs": [good],
    }
    try:
        world.cm.transfer_cache_async(**arguments | changed)
    finally:
        assert always.asked == []
        if not rca and "src_layer_range" not in changed:
            assert good.src_layer_range is None or good.src_layer_range.stop != 2, "written back by a refused call"
    raise AssertionError("it was accepted")


@pytest.mark.parametrize("rca", [True, False], ids=["by key", "by address"])
def test_r01_a_wrong_argument_is_refused_and_nothing_happens(local_pair: Pair, rca: bool) -> None:
    local_pair.start(rca=rca)
    local_pair.prompt.do(make, "kv", KV, 1)
    for name, spec in (
        ("kv", KV),
        ("odd", Spec(3, ROWS, STRIDE)),
        ("host", Spec(4, ROWS, 48, placement=Placement.HOST)),
    ):
        local_pair.decoder.do(make, name, spec, 2)
    ends = (local_pair.decoder, local_pair.prompt)
    for wanted, changed, kind, text in CASES:
        if wanted is not rca:
            continue
        good: Any = keyed(local_pair.prompt, "kv", range(2), dst_row=0) if rca else raw(local_pair.prompt, "kv")

        def attempt(good: Any = good, changed: Any = changed, kind: Any = kind, text: str = text) -> None:
            with pytest.raises(kind) as caught:
                local_pair.decoder.do(attempt_with, rca, good, changed)
            assert text in str(caught.value), changed
            assert "\n" not in str(caught.value)
            if isinstance(caught.value, ParamError):
                assert caught.value.status_code is INVALID

        try:
            nothing_happens(ends, ["kv"], attempt)
        except BaseException as error:
            error.add_note(f"with {changed}")
            raise
    assert local_pair.decoder.do(send, "kv", [good]).results[0] is not None, "and a good call is taken after all that"


def test_the_matrix_is_whole() -> None:
    assert {"src_cache", "layer_synchronizer", "transfer_configs", "src_block_indices", "dst_block_indices"} <= {
        name for _, changed, _, _ in CASES for name in changed
    }


def test_src_layer_range_none_becomes_all_layers_in_the_object(local_pair: Pair) -> None:
    local_pair.start()
    local_pair.prompt.do(make, "kv", KV, 1)
    local_pair.decoder.do(make, "kv", KV, 2)
    config = raw(local_pair.prompt, "kv")
    assert config.src_layer_range is None
    local_pair.decoder.do(send, "kv", [config])
    assert config.src_layer_range == range(2)


def test_configs_are_read_once_at_the_call(local_pair: Pair) -> None:
    local_pair.start()
    before = local_pair.prompt.do(make, "kv", KV, 1)
    local_pair.decoder.do(make, "kv", KV, 2)
    config = raw(local_pair.prompt, "kv")
    world: World = local_pair.decoder.world  # type: ignore[attr-defined]

    class Changing(Always):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            config.dst_addrs = [1, 2, 3, 4]
            config.src_layer_range = range(1)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = world.cm.transfer_cache_async(world.caches["kv"], Changing(), [config])
    assert isinstance(task, CacheTask)
    assert task.synchronize() == 0
    after = local_pair.prompt.do(addresses, "kv")
    assert len(after) == len(before)
    assert local_pair.decoder.do(picture).caches.live == 1


@pytest.mark.parametrize(
    ("build", "kind"),
    [
        (lambda: TransferConfig(None, []), NoneArgument),  # type: ignore[arg-type]
        (lambda: TransferConfig("1", []), TypeError),  # type: ignore[arg-type]
        (lambda: TransferConfig(2**64, []), ParamError),
        (lambda: TransferConfig(1, None), NoneArgument),  # type: ignore[arg-type]
        (lambda: TransferConfig(1, 5), TypeError),  # type: ignore[arg-type]
        (lambda: TransferConfig(1, [-1]), ParamError),
        (lambda: TransferConfig(1, [1.0]), TypeError),  # type: ignore[list-item]
        (lambda: TransferConfig(1, [1], [0]), TypeError),  # type: ignore[arg-type]
        (lambda: TransferConfig(1, [1], range(0, 4, 2)), ParamError),
        (lambda: TransferConfig(1, [1], range(3, 3)), ParamError),
        (lambda: TransferConfig(1, [1], range(-1, 3)), ParamError),
        (lambda: TransferConfig(1, [1], range(1), -1), ParamError),
        (lambda: TransferConfig(1, [1], range(1), 2**32), ParamError),
        (lambda: TransferWithCacheKeyConfig(1, range(1), range(1)), TypeError),  # type: ignore[arg-type]
        (lambda: TransferWithCacheKeyConfig(None, range(1), range(1)), NoneArgument),  # type: ignore[arg-type]
        (lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), None, range(1)), NoneArgument),  # type: ignore[arg-type]
        (lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), None), NoneArgument),  # type: ignore[arg-type]
        (lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(2)), ParamError),
        (lambda: TransferWithCacheKeyConfig(BlocksCacheKey(1), range(1), range(1), 1), ParamError),
        (lambda: TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), range(1), range(1), -1), ParamError),
    ],
)
def test_configs_refuse_what_they_cannot_hold(build: Any, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        build()
