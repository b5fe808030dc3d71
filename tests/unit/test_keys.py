"""The keys: frozen values that refuse everything else (interface §4)."""

from __future__ import annotations

import copy
import pickle
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.errors import NoneArgument, ParamError
from llm_datadist.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers(
    "BlocksCacheKey",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "BlocksCacheKey: cluster_id model_id prompt_cluster_id",
    "CacheKey: *",
    "CacheKeyByIdAndIndex: batch_index cache_id",
)

MAX64 = 2**64 - 1


def test_cache_key_positional_keyword_and_older_name_are_the_same() -> None:
    key = CacheKey(1, 2, 3, 4)
    assert key == CacheKey(cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(1, 2, prefix_id=4, model_id=3)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)


def test_cache_key_defaults() -> None:
    key = CacheKey(1, 2)
    assert (key.model_id, key.prefix_id) == (0, MAX64)
    assert not key.is_prefix
    assert not key.is_placeholder


def test_r4_placeholder_has_neither_request_nor_prefix() -> None:
    assert CacheKey(1, MAX64).is_placeholder
    assert not CacheKey(1, MAX64, prefix_id=5).is_placeholder
    assert CacheKey(1, MAX64, prefix_id=5).is_prefix
    assert not CacheKey(1, 5).is_placeholder


def test_blocks_key_positional_keyword_and_older_name_are_the_same() -> None:
    assert BlocksCacheKey(1) == BlocksCacheKey(cluster_id=1, model_id=0) == BlocksCacheKey(prompt_cluster_id=1)
    assert BlocksCacheKey(1, 2).prompt_cluster_id == 1


def test_keys_hold_the_whole_uint64() -> None:
    key = CacheKey(MAX64, MAX64, MAX64, MAX64)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (MAX64,) * 4
    assert BlocksCacheKey(MAX64, MAX64).model_id == MAX64
    assert CacheKeyByIdAndIndex(MAX64, 2**63 - 1, 2**32 - 1).batch_index == 2**32 - 1
    assert CacheKeyByIdAndIndex(1, -1).batch_index == 0


def test_keys_of_numpy_integers_equal_keys_of_ints() -> None:
    assert CacheKey(np.uint64(1), np.int64(2)) == CacheKey(1, 2)  # type: ignore[call-overload]
    assert type(CacheKeyByIdAndIndex(np.int32(1), 2).cluster_id) is int  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "call", "parts"),
    [
        (ParamError, lambda c: c(1, 2, 3, 4, 5), ("CacheKey", "5 arguments", "at most 4")),
        (ParamError, lambda c: c(req_id=1), ("cluster_id is required",)),
        (ParamError, lambda c: c(1), ("req_id is required",)),
        (ParamError, lambda c: c(cluster_id=1), ("req_id is required",)),
        (ParamError, lambda c: c(1, 2, modelid=3), ("Unsupported", "modelid=3")),
        (ParamError, lambda c: c(1, 2, cluster_id=3), ("cluster_id=3", "already 1")),
        (ParamError, lambda c: c(cluster_id=1, prompt_cluster_id=1, req_id=2), ("prompt_cluster_id=1", "already 1")),
        (ParamError, lambda c: c(-1, 2), ("cluster_id", "-1", "uint64")),
        (ParamError, lambda c: c(1, 2**64), ("req_id", str(2**64))),
        (ParamError, lambda c: c(1, 2, model_id=-3), ("model_id", "-3")),
        (ParamError, lambda c: c(1, 2, prefix_id=2**64), ("prefix_id", str(2**64))),
        (TypeError, lambda c: c("1", 2), ("cluster_id", "only support", "'1'")),
        (TypeError, lambda c: c(1, 2.0), ("req_id", "2.0")),
        (NoneArgument, lambda c: c(1, None), ("req_id",)),
        (NoneArgument, lambda c: c(1, 2, prefix_id=None), ("prefix_id",)),
        (NoneArgument, lambda c: c(None, 2), ("cluster_id",)),
        (TypeError, lambda c: c(1, 2, "3"), ("model_id", "'3'")),
        (TypeError, lambda c: c(1, 2, prefix_id=[4]), ("prefix_id", "list")),
        (ParamError, lambda c: c(2**64, 2), ("cluster_id", str(2**64))),
        (ParamError, lambda c: c(1, -1), ("req_id", "-1")),
        (ParamError, lambda c: c(1, 2, 2**64), ("model_id", str(2**64))),
        (ParamError, lambda c: c(1, 2, prefix_id=-1), ("prefix_id", "-1")),
        (ParamError, lambda c: c(), ("cluster_id is required",)),
    ],
)
def test_r1_cache_key_refuses(
    refused: Callable[..., None], kind: type[Exception], call: Callable[[Any], object], parts: tuple[str, ...]
) -> None:
    refused(kind, lambda: call(CacheKey), *parts)


@pytest.mark.parametrize(
    ("kind", "call", "parts"),
    [
        (ParamError, lambda c: c(1, 2, 3), ("BlocksCacheKey", "3 arguments", "at most 2")),
        (ParamError, lambda c: c(), ("cluster_id is required",)),
        (ParamError, lambda c: c(1, req_id=3), ("Unsupported", "req_id=3")),
        (ParamError, lambda c: c(-1), ("cluster_id", "-1", "uint64")),
        (ParamError, lambda c: c(1, 2**64), ("model_id", str(2**64))),
        (TypeError, lambda c: c("1"), ("cluster_id", "only support", "'1'")),
        (NoneArgument, lambda c: c(1, None), ("model_id",)),
        (NoneArgument, lambda c: c(None), ("cluster_id",)),
        (TypeError, lambda c: c(1, 2.0), ("model_id", "2.0")),
        (ParamError, lambda c: c(2**64), ("cluster_id", str(2**64))),
        (ParamError, lambda c: c(1, -1), ("model_id", "-1")),
        (ParamError, lambda c: c(cluster_id=1, prompt_cluster_id=1), ("prompt_cluster_id=1", "already 1")),
    ],
)
def test_r1_blocks_key_refuses(
    refused: Callable[..., None], kind: type[Exception], call: Callable[[Any], object], parts: tuple[str, ...]
) -> None:
    refused(kind, lambda: call(BlocksCacheKey), *parts)


@pytest.mark.parametrize(
    ("kind", "call", "parts"),
    [
        (ParamError, lambda c: c(2**64, 1), ("cluster_id", str(2**64), "uint64")),
        (ParamError, lambda c: c(1, 2**63), ("cache_id", str(2**63), "int64")),
        (ParamError, lambda c: c(1, 1, 2**32), ("batch_index", str(2**32), "uint32")),
        (ParamError, lambda c: c(1, 1, -1), ("batch_index", "-1")),
        (TypeError, lambda c: c(1, "1"), ("cache_id", "'1'")),
        (NoneArgument, lambda c: c(1, 1, None), ("batch_index",)),
        (NoneArgument, lambda c: c(None, 1), ("cluster_id",)),
        (NoneArgument, lambda c: c(1, None), ("cache_id",)),
        (TypeError, lambda c: c("1", 1), ("cluster_id", "'1'")),
        (TypeError, lambda c: c(1, 1, 0.0), ("batch_index", "0.0")),
        (TypeError, lambda c: c(1), ("cache_id",)),
        (ParamError, lambda c: c(-1, 1), ("cluster_id", "-1")),
        (ParamError, lambda c: c(1, -(2**63) - 1), ("cache_id", str(-(2**63) - 1))),
    ],
)
def test_r1_key_by_id_refuses(
    refused: Callable[..., None], kind: type[Exception], call: Callable[[Any], object], parts: tuple[str, ...]
) -> None:
    refused(kind, lambda: call(CacheKeyByIdAndIndex), *parts)


@pytest.mark.parametrize(
    ("key", "other", "text"),
    [
        (CacheKey(1, 2), CacheKey(1, 3), f"CacheKey(cluster_id=1, req_id=2, model_id=0, prefix_id={MAX64})"),
        (BlocksCacheKey(1), BlocksCacheKey(1, 1), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        (
            CacheKeyByIdAndIndex(1, 2),
            CacheKeyByIdAndIndex(1, 2, 1),
            "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)",
        ),
    ],
)
def test_keys_are_frozen_hashable_values(key: Any, other: Any, text: str) -> None:
    again = copy.deepcopy(pickle.loads(pickle.dumps(key)))
    assert again == key
    assert hash(again) == hash(key)
    assert key != other
    assert len({key, again, other}) == 2
    assert repr(key) == text
    with pytest.raises(AttributeError):
        key.cluster_id = 5


def test_keys_of_different_kinds_are_never_equal() -> None:
    assert len({BlocksCacheKey(1, 2), CacheKeyByIdAndIndex(1, 2), CacheKey(1, 2)}) == 3
