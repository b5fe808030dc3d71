"""The store connector's half in a worker: staged KV, on a device if there is one, and a store in another process."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch

from llm_datadist.integrations.vllm import rank
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders
from llm_datadist.integrations.vllm.store_worker import StoreWorker
from tests.vllm.stored import RemoteStore
from tests.vllm.test_requests import BLOCKS, configured, register_kv
from tests.vllm.test_staging import WAYS, device_of

if TYPE_CHECKING:
    from collections.abc import Callable


def until(worker: StoreWorker, ended: Callable[[Any], bool]) -> None:
    limit = time.monotonic() + 60
    while not ended(worker.results()):
        assert time.monotonic() < limit


@pytest.mark.parametrize("way", WAYS)
def test_staged_blocks_go_to_a_store_and_come_back_in_another_engine(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps overwrite the blocks while they are saved; the other engine's other blocks stay."""
    monkeypatch.setattr(rank, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(rank, "identity_of", lambda _: {"weights": "w"})
    device, keys = device_of(way, monkeypatch), [bytes([number]) * 32 for number in range(3)]
    with RemoteStore() as store:
        options = {"store": store.address, "store_options": {"lookup_ms": 60_000}, "staging": True}
        workers = [StoreWorker(*configured("both", **options)) for _ in range(2)]
        saves, loads = (register_kv(each, device) for each in workers)
        one, other = workers
        assert all(each.client.connect(60) for each in workers)
        assert one.copier.slots["layer"].is_cuda is (way == "cuda")
        for kv in (saves, loads):
            kv.random_(-128, 127)
        wanted = loads.clone()
        wanted[[7, 2, BLOCKS - 1]] = saves[[5, 9, 1]]
        one.obey(StoreOrders(save=(1, keys, [5, 9, 1], [3, 0, 8])), idle=False)
        one.save()
        saves.fill_(-1)
        until(one, lambda _: bool((told := one.take_told()) and told.ended == {1: 1} and not told.unsaved))
        hit = other.client.lookup(keys)
        assert len(hit) == 3
        other.obey(StoreOrders(loads={"a": ([hit.to_bytes()], [7, 2, BLOCKS - 1], [1, 4, 0])}), idle=True)
        until(other, lambda found: found.finished_recving == {"a"} and not found.failed_recving)
        assert torch.equal(loads, wanted)
        other.client.release(hit)
        for worker in workers:
            worker.stop()
