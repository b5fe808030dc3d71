"""What the tests of the layer-wise transfer share: synchronizers, configs at an end, waiting for a task, oracles."""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from tests.support.ends import End
from tests.support.moves import Bytes, Spec, cache_id, make, show
from tests.support.world import World

#: (destination offset, source offset, length)
Span = tuple[int, int, int]
OK = LLMStatusCode.LLM_SUCCESS
FAILED = LLMStatusCode.LLM_FAILED
INVALID = LLMStatusCode.LLM_PARAM_INVALID
BOUND_MS = 20_000


class Always(LayerSynchronizer):
    """Every layer is ready; remembers what was asked, and with which time limit."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        return True


class Gated(LayerSynchronizer):
    """Layer by layer the test says when it is ready, and what the synchronizer then does: return, or raise."""

    task: Any

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._answers: dict[int, object] = {}
        self.asked: list[int] = []

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        with self._changed:
            self.asked.append(layer_index)
            self._changed.notify_all()
            self._changed.wait_for(lambda: layer_index in self._answers)
            answer = self._answers[layer_index]
        if isinstance(answer, BaseException):
            raise answer
        return bool(answer)

    def open(self, *layers: int, answer: object = True) -> None:
        with self._changed:
            self._answers.update(dict.fromkeys(layers, answer))
            self._changed.notify_all()

    def wait_asked(self, layer: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: layer in self.asked, BOUND_MS / 1e3), f"layer {layer} not asked for"


@dataclass(frozen=True)
class Outcome:
    """What became of a task: results, first failure, and one text per config ("" for none)."""

    results: list[LLMStatusCode | None]
    first: LLMStatusCode
    errors: list[str]


def outcome(task: Any, timeout_ms: int | None = BOUND_MS) -> Outcome:
    results, first = task.get_results(timeout_ms), task.synchronize(timeout_ms)
    return Outcome(results, first, ["" if error is None else f"{error!r}" for error in task.errors])


def send(world: World, name: str, configs: Sequence[Any], *blocks: Any) -> Outcome:
    """Transfer a cache of this end whose layers are all ready, and wait."""
    return outcome(world.cm.transfer_cache_async(world.caches[name], Always(), list(configs), *blocks))


def begin(world: World, name: str, configs: Sequence[Any], *blocks: Any) -> None:
    """Begin a transfer that waits for :func:`ready`."""
    world.memory["transfer"] = gates = Gated()
    gates.task = world.cm.transfer_cache_async(world.caches[name], gates, list(configs), *blocks)


def transfer(world: World) -> Gated:
    """Return the synchronizer of the transfer that was begun, with its task."""
    gates: Gated = world.memory["transfer"]
    return gates


def ready(world: World, *layers: int) -> None:
    transfer(world).open(*layers)


def answer(world: World, layer: int, value: object) -> None:
    transfer(world).open(layer, answer=value)


def wait_asked(world: World, layer: int) -> None:
    transfer(world).wait_asked(layer)


def finish(world: World) -> Outcome:
    return outcome(transfer(world).task)


def asked(world: World) -> list[int]:
    return transfer(world).asked


def addresses(world: World, name: str) -> list[int]:
    return list(world.caches[name].tensor_addrs)


def raw(end: End, name: str, layers: range | None = None, row: int = 0, offset: int = 0) -> TransferConfig:
    """Return a config to the addresses of cache ``name`` of an end, for all its layers or some."""
    where = end.do(addresses, name)
    if layers is not None:
        where = where[2 * layers.start : 2 * layers.stop]
    return TransferConfig(end.cluster_id, [address + offset for address in where], layers, row)


def keyed(
    end: End, name: str, layers: range, dst_layers: range | None = None, row: int = 0, dst_row: int | None = None
) -> TransferWithCacheKeyConfig:
    """Return a config to cache ``name`` of an end by id and row, or to its blocks key without a row."""
    if dst_row is None:
        return TransferWithCacheKeyConfig(BlocksCacheKey(end.cluster_id, 0), layers, dst_layers or layers, row)
    key = CacheKeyByIdAndIndex(end.cluster_id, end.do(cache_id, name), dst_row)
    return TransferWithCacheKeyConfig(key, layers, dst_layers or layers, row)


def make_both(receiver: End, sender: End, dst: Spec, src: Spec) -> tuple[Bytes, Bytes]:
    """Make ``kv`` at both ends; return the bytes of (receiver, sender)."""
    return receiver.do(make, "kv", dst, 11), sender.do(make, "kv", src, 22)


def received(end: End, name: str = "kv") -> Bytes:
    return end.do(show, name)


def spanned(dst: Bytes, src: Bytes, spans: Iterable[Span], tensors: Iterable[tuple[int, int]] | None = None) -> Bytes:
    """The oracle: (dst offset, src offset, length) take effect one after the other, in every tensor pair."""
    result = [tensor.copy() for tensor in dst]
    spans = list(spans)
    for to, from_ in [(t, t) for t in range(len(dst))] if tensors is None else tensors:
        flat, source = result[to].reshape(-1), src[from_].reshape(-1)
        assert np.shares_memory(flat, result[to])
        for at, begin_, length in spans:
            flat[at : at + length] = source[begin_ : begin_ + length]
    return result
