"""The store connector's half in a worker: staged KV, on a device if there is one, and a store in another process."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch

from llm_datadist.integrations.vllm.store_scheduler import StoreOrders
from llm_datadist.integrations.vllm.store_worker import StoreWorker
from tests.support.moves import wait_until
from tests.vllm.stored import RemoteStore
from tests.vllm.test_requests import BLOCKS, configured, register_kv
from tests.vllm.test_staging import WAYS, device_of


def until_one_ends(worker: StoreWorker) -> tuple[Any, Any]:
    """Return a worker's results, and what it tells the scheduler, once a load or a save has ended."""
    found: list[Any] = []

    def ends() -> bool:
        found[:] = worker.results(), worker.take_told()
        return bool(found[0].finished_recving or (found[1] and found[1].ended))

    wait_until(ends, 60)
    return found[0], found[1]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("way", WAYS)
def test_staged_blocks_go_to_a_store_and_come_back_in_another_engine(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Later steps overwrite the blocks while they are saved; the other engine's other blocks stay."""
    device, keys = device_of(way, monkeypatch), [bytes([number]) * 32 for number in range(3)]
    with RemoteStore() as store, ExitStack() as at_end:
        options = {"store": store.address, "store_options": {"lookup_ms": 60_000}, "staging": True}
        workers = one, other = [StoreWorker(*configured("both", **options)) for _ in range(2)]
        for worker in workers:
            at_end.callback(worker.stop)
        saves, loads = (register_kv(worker, device) for worker in workers)
        assert all(worker.client.connect(60) for worker in workers)
        assert one.copier.slots["layer"].is_cuda is (way == "cuda")
        for kv in (saves, loads):
            kv.random_(-128, 127)
        wanted = loads.clone()
        wanted[[7, 2, BLOCKS - 1]] = saves[[5, 9, 1]]
        one.obey(StoreOrders(save=(1, keys, [5, 9, 1], [3, 0, 8])), idle=False)
        one.save()
        saves.fill_(-1)
        _, told = until_one_ends(one)
        assert (told.ended, told.unsaved) == ({1: 1}, set())
        hit = other.client.lookup(keys)
        assert len(hit) == 3
        other.obey(StoreOrders(loads={"a": ([hit.to_bytes()], [7, 2, BLOCKS - 1], [1, 4, 0])}), idle=True)
        results, _ = until_one_ends(other)
        assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
        assert torch.equal(loads, wanted)
        other.client.release(hit)
