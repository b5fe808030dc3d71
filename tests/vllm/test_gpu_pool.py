"""The connectors with vLLM's KV cache in a pool in a GPU, of the fake driver, whose kernels run late."""

from __future__ import annotations

import random
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch

from llm_datadist.errors import LLMException, OutOfMemory, ParamError
from llm_datadist.integrations.request_states import Offer
from llm_datadist.integrations.vllm.store_scheduler import StoreOrders
from llm_datadist.integrations.vllm.store_worker import StoreWorker
from tests.support import fakecuda
from tests.vllm.fake_torch import Event, Stream
from tests.vllm.stored import RemoteStore
from tests.vllm.test_requests import BLOCKS, TOKENS, Engine, configured, register_kv
from tests.vllm.test_staged_store import until_one_ends

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.usefixtures("one_rank", "gpu_of_torch")


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


def test_grants_wait_for_their_step_and_fetches_for_earlier_ones_without_vllm(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    Stream.current, content, found = Stream(held=True), some_kv(), list[Any]()
    write(prefill.kv, [1, 2, 3], content)
    step = threading.Thread(target=lambda: found.append(prefill.prefill("one", {"do_remote_decode": True}, [1, 2, 3])))
    step.start()
    assert Stream.current.awaited.wait(60)
    assert prefill.scheduler.requests["one"].offer is Offer.GRANTED, "the step was submitted"
    assert not prefill.worker.given
    Stream.current.go_on()
    step.join(60)
    Stream.current = Stream(held=True)
    write(decode.kv, [4, 5, 6], -1)  # of the request that had the blocks before
    assert decode.decode("one", found[0], [6, 4, 5])
    decode.until(Stream.current.awaited.is_set)
    decode.step()
    assert not decode.ended
    Stream.current.go_on()
    decode.until(lambda: decode.ended == {"one": True})
    assert decode.kv[[6, 4, 5]].equal(content)
    assert decode.kv.count_nonzero() == content.count_nonzero()


def test_blocks_have_the_bytes_of_their_request_while_kernels_are_late(pair: tuple[Engine, Engine]) -> None:
    """Each was another request's before, whose last kernel has not run when vLLM gives it away."""
    prefill, decode = pair
    streams, source = {each: Stream() for each in pair}, random.Random(1)
    for turn in range(15):
        names = [f"{turn}.{number}" for number in range(7)]
        there, here = ({name: source.sample(range(3 * i, 3 * i + 3), 3) for i, name in enumerate(names)} for _ in pair)
        content, Stream.current = {name: some_kv() for name in names}, streams[prefill]
        for name in names:
            write(prefill.kv, there[name], content[name])
        offers = {name: prefill.prefill(name, {"do_remote_decode": True}, there[name]) for name in names}
        Stream.current = streams[decode]
        for name in names:
            write(decode.kv, here[name], -1)
            assert decode.decode(name, offers[name], here[name])
        decode.until(lambda names=names: decode.ended.keys() >= {*names})  # type: ignore[misc]
        assert all(decode.kv[here[name]].equal(content[name]) for name in names)
        Stream.current = streams[prefill]
        prefill.until(lambda names=names: prefill.sent >= {*names})  # type: ignore[misc]


def test_a_store_gets_what_the_step_writes_and_gives_it_after_earlier_kernels() -> None:
    keys = [bytes([number]) * 32 for number in range(3)]
    with RemoteStore() as store, ExitStack() as at_end:
        options = {"store": store.address, "store_options": {"lookup_ms": 60_000}, "pool": True}
        workers = one, other = [StoreWorker(*configured("both", **options)) for _ in range(2)]
        for worker in workers:
            at_end.callback(worker.stop)
        saves, loads = (register_kv(worker, "cuda").random_(-128, 127) for worker in workers)
        assert all(worker.client.connect(60) for worker in workers)
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
        assert not until_one_ends(one)[1].unsaved
        hit = other.client.lookup(keys)
        Stream.current = Stream(held=True)
        write(loads, [2, 7], -1)
        other.obey(StoreOrders(loads={"a": ([hit.to_bytes()], [7, 2, BLOCKS - 1], [])}), idle=True)
        assert Stream.current.awaited.wait(60)
        assert not other.results().finished_recving
        Stream.current.go_on()
        assert not until_one_ends(other)[0].failed_recving
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
    with pytest.raises(ParamError, match=r"^options: llm.DeviceMemory=host: pool and staging decide that"):
        Engine("decode", "cuda", pool=True, options={"llm.DeviceMemory": "host"})
    fakecuda.load().fail("cuMemCreate", 2)  # out of memory
    with pytest.raises(OutOfMemory, match=r"bytes are wanted, and \d+ of \d+ free; lower gpu_memory_utilization$"):
        Engine("decode", "cuda", pool=True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 77)
    said = r'^LLMDataDistConnector does not support KV in a pool here: .*; "staging": true does without one$'
    with pytest.raises(LLMException, match=said):
        Engine("decode", "cuda", pool=True)


@pytest.mark.parametrize("given", [{"device": "cuda:1"}, {"device": "cpu"}, {"dtype": torch.uint8}])
def test_kv_outside_of_the_pool_is_refused(given: dict[str, Any]) -> None:
    worker = StoreWorker(*configured("both", pool=True))
    assert worker.allocation is not None
    with worker.allocation, suppress(AssertionError):  # torch for CPUs
        torch.zeros(BLOCKS * 2 * TOKENS * 64, **{"dtype": torch.int8, "device": "meta"} | given)
    assert worker.allocation.cache is None
    with pytest.raises(LLMException, match=r"does not support KV that vLLM has allocated outside of the pool"):
        worker.register({"layer": some_kv(BLOCKS)})
    worker.stop()
