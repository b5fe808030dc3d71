"""The connectors with vLLM's KV cache in a pool in a GPU, of the fake driver, whose kernels run after their step.

test_requests.py has engines with such pools, too; here kernels are late.
"""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch

from llm_datadist.errors import LLMException, LLMStatusCode, OutOfMemory
from llm_datadist.integrations.vllm import rank
from llm_datadist.integrations.vllm.rank import Rank
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders
from llm_datadist.integrations.vllm.store_worker import StoreWorker
from tests.support import fakecuda
from tests.vllm import fake_torch
from tests.vllm.fake_torch import Event, Stream
from tests.vllm.stored import RemoteStore
from tests.vllm.test_requests import BLOCKS, TOKENS, Engine, configured, register_kv
from tests.vllm.test_staged_store import until_one_ends

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch.install(monkeypatch)
    monkeypatch.setattr(rank, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(rank, "identity_of", lambda _: {"vllm": "1", "weights": "w"})


@pytest.fixture(params=["auto", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    """A prefill and a decode engine."""
    made = [Engine(role, "cuda", pool=True, transport=request.param) for role in ("prefill", "decode")]
    yield made[0], made[1]
    for each in made:
        each.worker.stop()
        each.scheduler.stop()
        del each.kv


def some_kv(blocks: int = 3) -> torch.Tensor:
    return torch.randint(-128, 127, (blocks, 2, TOKENS, 64), dtype=torch.int8)


def write(kv: torch.Tensor, blocks: list[int], content: torch.Tensor | int) -> None:
    """Launch a kernel of a step, which writes these blocks."""
    Stream.current.launch(lambda: kv.__setitem__(blocks, content))


def test_a_prompt_is_granted_once_its_step_has_run(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    Stream.current, content, found = Stream(held=True), some_kv(), list[Any]()
    write(prefill.kv, [1, 2, 3], content)
    step = threading.Thread(target=lambda: found.append(prefill.prefill("one", {"do_remote_decode": True}, [1, 2, 3])))
    step.start()
    assert Stream.current.awaited.wait(60)
    assert "one" in prefill.scheduler.granted, "the step was submitted"
    assert not prefill.worker.given
    Stream.current.go_on()
    step.join(60)
    assert decode.fetched("one", found[0], [6, 4, 5])
    assert decode.kv[[6, 4, 5]].equal(content)
    assert decode.kv.count_nonzero() == content.count_nonzero()


def test_a_fetch_begins_once_earlier_kernels_have_run_and_vllm_goes_on_meanwhile(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    write(prefill.kv, [1, 2, 3], content := some_kv())
    params = prefill.prefill("one", {"do_remote_decode": True}, [1, 2, 3])
    Stream.current = Stream(held=True)
    write(decode.kv, [4, 5, 6], -1)  # of the request that had the blocks before
    assert decode.decode("one", params, [6, 4, 5])
    decode.until(Stream.current.awaited.is_set)
    for _ in range(3):
        decode.step()
    assert not decode.ended
    Stream.current.go_on()
    decode.until(lambda: bool(decode.ended))
    assert decode.ended == {"one": True}
    assert decode.kv[[6, 4, 5]].equal(content)


def test_blocks_are_used_again_at_once_by_late_kernels(pair: tuple[Engine, Engine]) -> None:
    """Each has another request's bytes whenever vLLM may have given it away."""
    prefill, decode = pair
    source, content, params, taken = random.Random(1), dict[str, Any](), dict[str, Any](), dict[str, list[int]]()
    free = {engine: list(range(1, 22)) for engine in pair}  # seven requests
    streams = {engine: Stream() for engine in pair}
    names, ended = [f"r{number}" for number in range(100)], set[str]()

    def blocks_of(engine: Engine, name: str) -> list[int]:
        Stream.current = streams[engine]
        source.shuffle(free[engine])
        taken[name], free[engine] = free[engine][:3], free[engine][3:]
        return taken[name]

    while len(ended) < len(names):
        if names[len(content) :] and len(free[prefill]) >= 3:
            name = names[len(content)]
            write(prefill.kv, blocks_of(prefill, name), content.setdefault(name, some_kv()))
            params[name] = prefill.prefill(name, {"do_remote_decode": True}, taken[name])
        if params and len(free[decode]) >= 3:
            name, offer = params.popitem()
            assert decode.decode(f"{name}'", offer, blocks_of(decode, f"{name}'"))
        for engine, done in ((prefill, prefill.sent), (decode, decode.ended.keys())):
            Stream.current = streams[engine]
            engine.step()
            for name in done & taken.keys():
                if engine is decode:
                    assert decode.ended[name]
                    assert decode.kv[taken[name]].equal(content[name[:-1]])
                    ended.add(name)
                write(engine.kv, taken[name], -1)
                free[engine] += taken.pop(name)


def test_a_store_gets_what_the_step_writes_and_gives_it_after_earlier_kernels() -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    with RemoteStore() as store, ExitStack() as at_end:
        options = {"store": store.address, "store_options": {"lookup_ms": 60_000}, "pool": True}
        one, other = (StoreWorker(*configured("both", **options)) for _ in range(2))
        for worker in (one, other):
            at_end.callback(worker.stop)
        saves, loads = (register_kv(worker, "cuda") for worker in (one, other))
        assert all(worker.client.connect(60) for worker in (one, other))
        saves.random_(-128, 127)
        loads.random_(-128, 127)
        wanted, content = loads.clone(), some_kv()
        wanted[[7, 2, BLOCKS - 1]] = content
        Stream.current = Stream(held=True)
        write(saves, [5, 9, 1], content)
        one.obey(StoreOrders(save=(1, keys, [5, 9, 1], [])), idle=False)
        one.save()
        assert one.take_told()  # its namespace
        assert Stream.current.awaited.wait(60)
        assert not store.figures().get("stored")
        Stream.current.go_on()
        _, told = until_one_ends(one)
        assert (told.ended, told.unsaved) == ({1: 1}, set())
        hit = other.client.lookup(keys)
        Stream.current = Stream(held=True)
        write(loads, [2, 7], -1)
        other.obey(StoreOrders(loads={"a": ([hit.to_bytes()], [7, 2, BLOCKS - 1], [])}), idle=True)
        assert Stream.current.awaited.wait(60)
        assert not other.results().finished_recving
        Stream.current.go_on()
        results, _ = until_one_ends(other)
        assert (results.finished_recving, results.failed_recving) == ({"a"}, set())
        assert loads.equal(wanted)
        other.client.release(hit)
        del saves, loads


def test_a_gpu_that_fails_fails_what_waits_for_it(pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    prefill, decode = pair
    params = prefill.prefill("one", {"do_remote_decode": True}, [1, 2, 3])

    def fail(_: Event) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(Event, "synchronize", fail)
    assert not decode.fetched("one", params, [6, 4, 5])
    prefill.until(lambda: "one" in prefill.sent)
    assert not decode.kv.any()
    with pytest.raises(RuntimeError, match="illegal memory access"):  # as a step that fails
        prefill.prefill("two", {"do_remote_decode": True}, [1, 2, 3])
    assert not prefill.worker.given


def test_a_pool_that_cannot_be_made_says_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = fakecuda.load()
    fake.fail("cuMemCreate", 2)  # out of memory
    with pytest.raises(OutOfMemory, match=r"bytes are wanted, and \d+ of \d+ free; lower gpu_memory_utilization$"):
        Engine("decode", "cuda", pool=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 77)
    said = r'^LLMDataDistConnector does not support KV in a pool here: .*; "staging": true does without one$'
    with pytest.raises(LLMException, match=said) as refused:
        Engine("decode", "cuda", pool=True)
    assert refused.value.status_code is LLMStatusCode.LLM_FEATURE_NOT_ENABLED


@pytest.mark.parametrize("given", [{"device": "cuda:1"}, {"device": "cpu"}, {}, {"dtype": torch.uint8}])
def test_kv_outside_of_the_pool_is_refused(given: dict[str, Any]) -> None:
    worker = Rank(*configured("both", pool=True), None)
    try:
        assert worker.allocation is not None
        with worker.allocation, suppress(AssertionError):  # torch for CPUs
            torch.zeros(BLOCKS * 2 * TOKENS * 64, **{"dtype": torch.int8, "device": "meta"} | given)
        assert worker.allocation.cache is None
        with pytest.raises(LLMException, match=r"does not support KV that vLLM has allocated outside of the pool"):
            getattr(worker, "_register")({"layer": some_kv(BLOCKS)}, None)  # noqa: B009 (both connectors')
    finally:
        worker.datadist.finalize()
