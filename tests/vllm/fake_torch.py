"""What the connectors need of torch on a GPU, over the fake driver: torch for CPUs has none of it.

vLLM's tensors in the pool have two forms: one with the address on the device, at which the host must not look, and one
of the same bytes for the host. A kernel is a call that runs later.
"""

from __future__ import annotations

import ctypes
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from llm_datadist.integrations.vllm import kinds, rank
from tests.support import fakecuda
from tests.support.world import byte_views

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from llm_datadist import Cache


class Stream:
    """A stream: its kernels run a little later, in order; if ``held``, none before :meth:`go_on`."""

    current: Stream

    def __init__(self, *, held: bool = False) -> None:
        self._thread, self._gate = ThreadPoolExecutor(1, "fakecuda-stream"), threading.Event()
        self.awaited = threading.Event()  # somebody waits for an event of it
        if held:
            self.launch(lambda: self._gate.wait(60))

    def launch(self, kernel: Callable[[], object]) -> Future[Any]:
        self._thread.submit(time.sleep, random.random() * 0.003)
        return self._thread.submit(kernel)

    def go_on(self) -> None:
        """Let the kernels run, once somebody waits for them."""
        assert self.awaited.wait(60), "nobody waits"
        self._gate.set()


class Event:
    """An event of the current stream, as torch's."""

    def __init__(self, *, blocking: bool) -> None:
        assert blocking, "a thread that waits must not spin"

    def record(self) -> None:
        self._stream, self._reached = Stream.current, Stream.current.launch(int)

    def synchronize(self) -> None:
        self._stream.awaited.set()
        self._reached.result(60)


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let vLLM's platform be CUDA, and torch have the fake GPU."""
    fakecuda.load()
    Stream.current = Stream()
    monkeypatch.setattr(kinds, "current_platform", SimpleNamespace(device_type="cuda"))
    monkeypatch.setattr(
        rank, "torch_views", lambda of: [torch.from_numpy(each).view(torch.int8) for each in byte_views(of)]
    )
    for name, value in (("current_device", lambda: 0), ("empty_cache", lambda: None), ("Event", Event)):
        monkeypatch.setattr(torch.cuda, name, value)


def tensor_of(cache: Cache) -> torch.Tensor:
    """Return the cache's first tensor with its address on the device."""
    memory = (ctypes.c_int8 * cache.cache_desc.size).from_address(cache.tensor_addrs[0])
    return torch.frombuffer(memory, dtype=torch.int8)
