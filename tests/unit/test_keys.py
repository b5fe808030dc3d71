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


def test_positional_keyword_and_older_name_are_the_same() -> None:
    key = CacheKey(1, 2, 3, 4)
    assert key == CacheKey(cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4)
    assert key == CacheKey(1, 2, prefix_id=4, model_id=3)
    assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
    assert BlocksCacheKey(1) == BlocksCacheKey(cluster_id=1, model_id=0) == BlocksCacheKey(prompt_cluster_id=1)
    assert BlocksCacheKey(1, 2).prompt_cluster_id == 1


def test_r4_placeholder_has_neither_request_nor_prefix() -> None:
    assert (CacheKey(1, 2).model_id, CacheKey(1, 2).prefix_id) == (0, MAX64)
    for key, is_prefix, is_placeholder in (
        (CacheKey(1, 2), False, False),
        (CacheKey(1, MAX64), False, True),
        (CacheKey(1, MAX64, prefix_id=5), True, False),
    ):
        assert (key.is_prefix, key.is_placeholder) == (is_prefix, is_placeholder)


def test_keys_hold_the_whole_uint64_and_take_numpy_integers() -> None:
    key = CacheKey(MAX64, MAX64, MAX64, MAX64)
    assert (key.cluster_id, key.req_id, key.model_id, key.prefix_id) == (MAX64,) * 4
    assert BlocksCacheKey(MAX64, MAX64).model_id == MAX64
    assert CacheKeyByIdAndIndex(MAX64, 2**63 - 1, 2**32 - 1).batch_index == 2**32 - 1
    assert CacheKeyByIdAndIndex(1, -1).batch_index == 0
    assert CacheKey(np.uint64(1), np.int64(2)) == CacheKey(1, 2)  # type: ignore[call-overload]
    assert type(CacheKeyByIdAndIndex(np.int32(1), 2).cluster_id) is int  # type: ignore[arg-type]


TWICE = ("prompt_cluster_id=1", "already 1")
WRONG_CALLS: list[tuple[type, tuple[int, ...], dict[str, int], tuple[str, ...]]] = [
    (CacheKey, (1, 2, 3, 4, 5), {}, ("CacheKey", "5 arguments", "at most 4")),
    (CacheKey, (), {"req_id": 1}, ("cluster_id is required",)),
    (CacheKey, (1,), {}, ("req_id is required",)),
    (CacheKey, (), {"cluster_id": 1}, ("req_id is required",)),
    (CacheKey, (1, 2), {"modelid": 3}, ("Unsupported", "modelid=3")),
    (CacheKey, (1, 2), {"cluster_id": 3}, ("cluster_id=3", "already 1")),
    (CacheKey, (1, 2), {"prompt_cluster_id": 1}, TWICE),
    (CacheKey, (), {"cluster_id": 1, "prompt_cluster_id": 1, "req_id": 2}, TWICE),
    (BlocksCacheKey, (1, 2, 3), {}, ("BlocksCacheKey", "3 arguments", "at most 2")),
    (BlocksCacheKey, (), {}, ("cluster_id is required",)),
    (BlocksCacheKey, (1,), {"req_id": 3}, ("Unsupported", "req_id=3")),
    (BlocksCacheKey, (), {"cluster_id": 1, "prompt_cluster_id": 1}, TWICE),
]


def test_r1_wrong_names_and_numbers_of_arguments_are_refused(refused: Callable[..., None]) -> None:
    for cls, args, kwargs, parts in WRONG_CALLS:
        refused(ParamError, lambda: cls(*args, **kwargs), *parts)  # noqa: B023
    refused(TypeError, lambda: CacheKeyByIdAndIndex(1), "cache_id")  # type: ignore[call-arg]


def test_r1_every_field_refuses_what_is_no_such_integer(refused: Callable[..., None]) -> None:
    uint64 = (-1, 2**64, "uint64")
    ints = {"cluster_id": uint64, "cache_id": (-(2**63) - 1, 2**63, "int64"), "batch_index": (-1, 2**32, "uint32")}
    # For each field in its place: the first numbers that are too small and too large, and their type.
    all_limits: list[tuple[type, dict[str, tuple[int, int, str]]]] = [
        (CacheKey, dict.fromkeys(("cluster_id", "req_id", "model_id", "prefix_id"), uint64)),
        (BlocksCacheKey, dict.fromkeys(("cluster_id", "model_id"), uint64)),
        (CacheKeyByIdAndIndex, ints),
    ]
    for cls, limits in all_limits:
        for place, (name, (low, high, integer)) in enumerate(limits.items()):
            wrong_values: list[tuple[object, type[Exception], tuple[str, ...]]] = [
                (low, ParamError, (str(low), integer)),
                (high, ParamError, (str(high), integer)),
                ("1", TypeError, ("only support", "'1'")),
                (2.0, TypeError, ("2.0",)),
                (None, NoneArgument, ()),
            ]
            for wrong, kind, parts in wrong_values:
                args: list[Any] = [1] * len(limits)
                args[place] = wrong
                refused(kind, lambda: cls(*args), name, *parts)  # noqa: B023


def test_keys_are_frozen_hashable_values() -> None:
    by_id = CacheKeyByIdAndIndex(1, 2)
    cases: list[tuple[Any, Any, str]] = [
        (CacheKey(1, 2), CacheKey(1, 3), f"CacheKey(cluster_id=1, req_id=2, model_id=0, prefix_id={MAX64})"),
        (BlocksCacheKey(1), BlocksCacheKey(1, 1), "BlocksCacheKey(cluster_id=1, model_id=0)"),
        (by_id, CacheKeyByIdAndIndex(1, 2, 1), "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)"),
    ]
    for key, other, text in cases:
        again = copy.deepcopy(pickle.loads(pickle.dumps(key)))
        assert again == key
        assert hash(again) == hash(key)
        assert key != other
        assert len({key, again, other, BlocksCacheKey(1, 2), CacheKeyByIdAndIndex(1, 2, 3), CacheKey(1, 2, 3)}) == 5
        assert repr(key) == text
        with pytest.raises(AttributeError):
            key.cluster_id = 5
