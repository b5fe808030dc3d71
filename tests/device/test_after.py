"""Order with an engine's kernels: copies in a block of ``after`` begin once a stream has done what it was given before.

The stream of these tests first moves bytes slowly, then writes a cache or looks at it. So a call that does not wait is
seen by its bytes, as the controls are.
"""

import asyncio
import ctypes
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from llm_datadist import Placement
from llm_datadist.devices import after
from llm_datadist.errors import DeadlineExceeded, DeviceError, LLMException, ParamError
from tests.support import fakecuda
from tests.support.ends import LocalEnd
from tests.support.kinds import Pair, World
from tests.support.layers import keyed, send
from tests.support.linking import SUCCESS
from tests.support.moves import BLOCKS, Bytes, Spec, Use, call, make, moved, same_bytes, show
from tests.support.source import ROOT

PAGED = Spec(blocks=True)
SOURCE = Spec(blocks=True, blocks_key=BLOCKS)
HOST = Spec(blocks=True, placement=Placement.HOST)
SLOW, BEFORE = 1 << 20, 1 << 19  # bytes a second, and bytes: half a second

pytestmark = [pytest.mark.covers("devices: after"), pytest.mark.gpu(True)]


@pytest.fixture(autouse=True)
def full_speed(gpu: bool) -> Iterator[None]:
    yield
    fakecuda.load().set_rate(0)


@contextmanager
def driver() -> Iterator[Any]:
    """The driver's functions, with a context that is current in a block only: the library must see to its own."""
    from tests.device import cu  # which finds the fake only once it is loaded

    cu.start()
    try:
        yield cu
    finally:
        cu.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Engine:
    """A stream whose work takes half a second, in this process; then it writes a cache, or keeps what it has seen."""

    def __init__(self, world: World, name: str, seed: int | None, *, default: bool = False) -> None:
        tensors, size = world.caches[name].tensor_addrs, world.caches[name].cache_desc.size
        fakecuda.load().set_rate(SLOW)
        random = np.random.default_rng(seed)
        with driver() as cu:
            self.stream = ctypes.c_void_p() if default else cu.stream()
            self._slow = cu.allocated(2 * BEFORE)
            cu.copy(self._slow, self._slow + BEFORE, BEFORE, self.stream)
            self._pinned = [cu.pinned(size, random.bytes(size)) for _ in tensors]
            for mine, tensor in zip(self._pinned, tensors, strict=True):
                cu.copy(*((mine, tensor) if seed is None else (tensor, mine)), size, self.stream)

    def held(self, like: Bytes) -> Bytes:
        """Return the bytes that the stream writes, or has seen."""
        return [
            np.frombuffer(mine, np.uint8).reshape(each.shape).copy()
            for mine, each in zip(self._pinned, like, strict=True)
        ]

    def finish(self, like: Bytes) -> Bytes:
        with driver() as cu:
            cu.wait(self.stream)
            held = self.held(like)
            cu.call("cuMemFree_v2", cu.U64(self._slow))
            for each in self._pinned:
                cu.call("cuMemFreeHost", each)
            if self.stream:
                cu.call("cuStreamDestroy_v2", self.stream)
        return held


def begin(world: World, name: str, seed: int | None, like: Bytes) -> Bytes:
    """Give the stream its work; return the bytes that it will write."""
    world.memory["engine"] = engine = Engine(world, name, seed)
    return engine.held(like)


def finish(world: World, like: Bytes) -> Bytes:
    """Wait for the stream; return the bytes that it has written or seen."""
    engine: Engine = world.memory.pop("engine")
    return engine.finish(like)


def stream(world: World) -> SimpleNamespace:
    """Return the stream as torch shows one."""
    return SimpleNamespace(cuda_stream=world.memory["engine"].stream.value or 0, device_index=0)


def in_order(world: World, method: str, *args: Any) -> Any:
    """Make a call of the manager after the work of the stream."""
    with after(stream(world)):
        return call(world, method, *args)


def awaited(world: World, method: str, *args: Any) -> None:
    async def run() -> None:
        with after(stream(world)):
            await call(world, method, *args)

    asyncio.run(run())


def layer_wise(world: World, *args: Any) -> Any:
    with after(stream(world)):
        return send(world, *args)


def at_once(world: World, method: str, *args: Any) -> Any:
    return call(world, method, *args)


def test_calls_read_what_the_stream_has_written_and_without_it_do_not(pair: Pair) -> None:
    prompt, decoder = pair.start(rca=True)
    there, kv = prompt.do(make, "kv", SOURCE, 1), decoder.do(make, "kv", PAGED, 2)
    host = decoder.do(make, "host", HOST, 4)
    for seed, (make_call, method) in enumerate(
        [(in_order, "push_blocks"), (at_once, "push_blocks"), (awaited, "push_blocks_async")], 10
    ):
        new = decoder.do(begin, "kv", seed, kv)
        decoder.do(make_call, method, BLOCKS, Use("kv"), [3, 7], [5, 2])
        there = moved(there, kv if make_call is at_once else new, [(5, 3), (2, 7)])
        same_bytes(prompt.do(show, "kv"), there)
        kv = decoder.do(finish, kv)
    new = decoder.do(begin, "kv", 20, kv)
    decoder.do(in_order, "copy_blocks", Use("kv"), {1: [2, 4]})
    decoder.do(in_order, "swap_blocks", Use("kv"), Use("host"), {3: 6})
    decoder.do(finish, kv)
    same_bytes(decoder.do(show, "kv"), moved(new, new, [(2, 1), (4, 1)]))
    same_bytes(decoder.do(show, "host"), moved(host, new, [(6, 3)]))
    new = decoder.do(begin, "kv", 21, kv)
    assert decoder.do(layer_wise, "kv", [keyed(prompt, "kv", range(2))], [3], [5]).results == SUCCESS[1]
    same_bytes(prompt.do(show, "kv"), moved(there, new, [(5, 3)]))
    decoder.do(finish, kv)
    decoder.do(begin, "kv", 22, kv)
    found = decoder.do(in_order, "digest_blocks", Use("kv"), [1, 2], bytes(16))
    decoder.do(finish, kv)
    assert (found == decoder.do(at_once, "digest_blocks", Use("kv"), [1, 2], bytes(16))).all()
    new = decoder.do(begin, "kv", 23, kv)
    decoder.do(in_order, "push_blocks", BLOCKS, Use("host"), [3], [5])  # memory of the host, too
    same_bytes(decoder.do(show, "kv"), new)
    decoder.do(finish, kv)


def test_a_pull_does_not_overwrite_what_the_stream_still_reads(pair: Pair) -> None:
    prompt, decoder = pair.start()
    there, kv = prompt.do(make, "kv", SOURCE, 1), decoder.do(make, "kv", PAGED, 2)
    for make_call in (in_order, at_once):
        decoder.do(begin, "kv", None, kv)
        decoder.do(make_call, "pull_blocks", BLOCKS, Use("kv"), [1, 6], [0, 3])
        pulled = moved(kv, there, [(0, 1), (3, 6)])
        same_bytes(decoder.do(show, "kv"), pulled)
        same_bytes(decoder.do(finish, kv), kv if make_call is in_order else pulled)
        kv = decoder.do(make, "kv", PAGED, 3)


def test_a_call_whose_time_ends_before_the_work_has_moved_nothing(pair: Pair) -> None:
    prompt, decoder = pair.start(rca=True, sync_kv_timeout=100)
    there, kv = prompt.do(make, "kv", SOURCE, 1), decoder.do(make, "kv", PAGED, 2)
    for method in ("push_blocks", "pull_blocks"):
        decoder.do(begin, "kv", None, kv)
        with pytest.raises(DeadlineExceeded):
            decoder.do(in_order, method, BLOCKS, Use("kv"), [1, 2], [3, 4])
        decoder.do(finish, kv)
        same_bytes(decoder.do(show, "kv"), kv)
        same_bytes(prompt.do(show, "kv"), there)
    decoder.do(at_once, "push_blocks", BLOCKS, Use("kv"), [3], [5])  # nothing stays behind
    same_bytes(prompt.do(show, "kv"), moved(there, kv, [(5, 3)]))


def test_nested_blocks_wait_for_both_streams_and_other_threads_for_none(end: LocalEnd) -> None:
    end.start("PROMPT", 1)
    world, kv = end.world, end.do(make, "kv", PAGED, 1)
    new = begin(world, "kv", 5, kv)
    with driver() as cu:
        quick = cu.stream()
    with after(stream(world)), after(SimpleNamespace(cuda_stream=quick.value, device_index=0)):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(call, world, "copy_blocks", Use("kv"), {1: [2]}).result()
        same_bytes(show(world, "kv"), kv := moved(kv, kv, [(2, 1)]))
        call(world, "copy_blocks", Use("kv"), {1: [3]})
    finish(world, kv)
    same_bytes(show(world, "kv"), moved(new, new, [(3, 1)]))
    with driver() as cu:
        cu.call("cuStreamDestroy_v2", quick)


@pytest.mark.parametrize(
    ("stream", "device", "error", "text"),
    [
        ("0", 0, TypeError, "stream"),
        (-1, 0, ParamError, "stream"),
        (0, 2**31, ParamError, "device"),
        (0, 9, LLMException, "no device 9"),
        (0, None, ParamError, "device"),
        (1 << 40, 0, DeviceError, "INVALID_HANDLE"),
    ],
)
def test_what_is_no_stream_is_refused(stream: Any, device: int | None, error: type[Exception], text: str) -> None:
    fakecuda.load()
    with pytest.raises(error, match=text), after(stream, device):
        raise AssertionError


def test_the_lines_of_the_page_for_torch(end: LocalEnd) -> None:
    """Its block of code, with the stream of a fake GPU as the current one."""
    text = (ROOT / "docs" / "device.md").read_text()
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "after(" in block]
    end.start("PROMPT", 1)
    world, kv = end.world, end.do(make, "kv", PAGED, 1)
    host = end.do(make, "host", HOST, 2)
    world.memory["engine"] = engine = Engine(world, "kv", 5, default=True)
    torch = SimpleNamespace(cuda=SimpleNamespace(current_stream=lambda: stream(world)))
    names = {"torch": torch, "cache_manager": world.cm, "kv": world.caches["kv"], "host": world.caches["host"]}
    exec(code.replace("import torch\n", ""), names)
    same_bytes(show(world, "host"), moved(host, engine.held(kv), [(7, 3)]))
    finish(world, kv)


def test_a_stream_that_is_captured_is_refused_and_holds_up_no_copy(end: LocalEnd) -> None:
    """Regression: while torch captured a graph, answers about events were errors, and the GPU was given up."""
    end.start("PROMPT", 1)
    world, kv, host = end.world, end.do(make, "kv", PAGED, 1), end.do(make, "host", HOST, 2)
    begin(world, "kv", None, kv)
    fakecuda.load().capture(stream(world).cuda_stream)
    with pytest.raises(DeviceError, match="captured"), after(stream(world)):
        raise AssertionError
    call(world, "swap_blocks", Use("kv"), Use("host"), {1: 2})
    fakecuda.load().capture(0)
    same_bytes(show(world, "host"), moved(host, kv, [(2, 1)]))
    finish(world, kv)


def test_memory_stays_mapped_while_a_call_waits_for_the_stream(end: LocalEnd) -> None:
    """Regression: `finalize` in another thread unmapped the pool, and the copy began then."""
    end.start("PROMPT", 1)
    world, kv = end.world, end.do(make, "kv", PAGED, 1)
    begin(world, "kv", None, kv)
    with ThreadPoolExecutor(1) as pool, suppress(LLMException):
        running = pool.submit(in_order, world, "copy_blocks", Use("kv"), {1: [2, 4]})
        time.sleep(0.2)  # it waits
        world.dd.finalize()
        running.result()
    finish(world, kv)
    assert fakecuda.load().state().violations == []
