"""The pools in the option strings (interface §7, R11, R12)."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING

import pytest

from llm_datadist.config import Options, PoolOptions
from llm_datadist.errors import ParamError
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.covers("check_buf_pool", "PoolOptions.parse", "ge.flowGraphMemMaxSize")

DEVICE = {"ge.exec.deviceId": "0"}
V2 = DEVICE | {"llm.EnableCacheManager": "1"}
POOLS = {"llm.MemPoolConfig": "mem_pool", "llm.HostMemPoolConfig": "host_mem_pool"}
GIB, MIB2 = 2**30, 2 * 2**20


def parse(options: dict[str, str]) -> Options:
    return Options.parse(options, LLMRole.DECODER)


@pytest.mark.parametrize("key", POOLS)
def test_r11_pool_text_is_parsed(key: str) -> None:
    for text, size, shift in (
        ('{"memory_size": 18737418240, "page_shift": 16}', 18737418240, 16),  # the page's own example
        ('{"memory_size": 65536}', 65536, 16),  # a single page of the default size
        (f'{{"memory_size": {GIB}, "page_shift": 10}}', GIB, 10),
        (f'{{"memory_size": {GIB}, "page_shift": 30}}', GIB, 30),
        (f'{{"memory_size": {20 * GIB}}}', 20 * GIB, 16),
    ):
        options = parse(V2 | {key: text})
        parsed = {field: getattr(options, field) for field in POOLS.values()}
        assert parsed == dict.fromkeys(POOLS.values()) | {POOLS[key]: PoolOptions(size, shift)}
        assert PoolOptions(size, shift).page_bytes == 1 << shift


SIZE = {"memory_size": 65536}
BAD_POOLS: list[tuple[object, tuple[str, ...]]] = [
    ([SIZE], ("JSON object",)),
    (65536, ("JSON object",)),
    (None, ("JSON object",)),
    ({}, ("memory_size", "missing")),
    ({"page_shift": 16}, ("memory_size", "missing")),
    *[({"memory_size": n}, ("memory_size", repr(n))) for n in (None, "65536", 65536.0, True, 0, -65536, 65535)],
    (SIZE | {"page_shift": 17}, ("memory_size", "131072")),
    *[({"memory_size": 2**32, "page_shift": n}, ("page_shift", repr(n))) for n in (31, -1, 16.0, False, None)],
    ({"memory_size": GIB, "page_shift": 9}, ("page_shift", "9", "[10, 31)")),
    ({"memory_size": (2**32 - 1) << 10, "page_shift": 10}, ("memory_size", "pages")),
]


@pytest.mark.parametrize("key", POOLS)
def test_r11_pool_text_is_refused_naming_option_and_field(refused: Callable[..., None], key: str) -> None:
    rows = [("", ("''", "JSON")), ("{", ("'{'", "JSON")), ("[" * 100_000, ("JSON",))]
    for text, parts in rows + [(json.dumps(value), parts) for value, parts in BAD_POOLS]:
        refused(ParamError, lambda: parse(V2 | {key: text}), key, *parts)  # noqa: B023


def test_r11_unknown_fields_are_one_warning_naming_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        parsed = parse(V2 | {"llm.MemPoolConfig": json.dumps(SIZE | {"zone": "a", "Page_shift": 1})})
    assert parsed.mem_pool == PoolOptions(65536, 16)
    assert [record.name for record in caplog.records] == ["LLM_DATADIST"]
    assert all(part in caplog.text for part in ("llm.MemPoolConfig", "Page_shift", "zone"))


def test_r11_host_pool_has_a_limit_the_device_pool_has_not(refused: Callable[..., None]) -> None:
    over, host = json.dumps({"memory_size": 20 * GIB + 1}), "llm.HostMemPoolConfig"
    refused(ParamError, lambda: parse(V2 | {host: over}), host, str(20 * GIB + 1), str(20 * GIB))
    assert parse(V2 | {"llm.MemPoolConfig": over}).mem_pool is not None


def test_r12_pool_of_v1_is_its_own_text_else_a_share_of_the_graph_memory(refused: Callable[..., None]) -> None:
    name = "ge.flowGraphMemMaxSize"
    graph = DEVICE | {name: "2000000"}
    assert parse(graph).mem_pool == PoolOptions(1900000, 16)
    assert parse(graph | {"llm.MemoryUtilization": "0.5"}).mem_pool == PoolOptions(1000000, 16)
    assert parse(graph | {"llm.MemPoolConfig": json.dumps(SIZE)}).mem_pool == PoolOptions(65536, 16)
    for options in (graph | {"llm.MemoryUtilization": "0.0"}, DEVICE | {name: "0"}, DEVICE, V2 | {name: "2000000"}):
        assert parse(options).mem_pool is None
    refused(ParamError, lambda: parse(DEVICE | {name: "65536"}), name, "62259")
    for base in (DEVICE, V2):
        for value in ("1,2", "-1", "1.23", "", "1e9", "9" * 30):
            refused(ParamError, lambda: parse(base | {name: value}), name, repr(value))  # noqa: B023


def test_buffer_pool_text_is_checked_and_has_no_effect(refused: Callable[..., None]) -> None:
    key, buf = "llm.BufPoolCfg", {"total_size": MIB2, "blk_size": 256, "max_buf_size": 256}
    two = [buf, {"total_size": 2 * MIB2, "blk_size": 8192, "max_buf_size": 8192}]
    for good in ({"buf_cfg": two}, {"buf_cfg": [buf], "buf_pool_size": MIB2}):
        assert parse(DEVICE | {key: json.dumps(good)}) == parse(DEVICE)
    bad: list[tuple[object, tuple[str, ...]]] = [
        ([], ("buf_cfg",)),
        ({"buf_cfg": 1}, ("buf_cfg",)),
        ({"buf_cfg": [1]}, ("buf_cfg",)),
        ({"buf_cfg": [{"total_size": 2097152}]}, ("buf_cfg[0]", "blk_size", "missing")),
        ({"buf_cfg": [buf] * 2}, ("buf_cfg[1]", "max_buf_size", "256")),
    ]
    for field, values in (
        ("total_size", (MIB2 + 1, 0, 2**32)),
        ("blk_size", (100, 2 * MIB2, 0)),
        ("max_buf_size", (128, MIB2, 256.0)),
    ):
        bad += [({"buf_cfg": [buf | {field: value}]}, (field, repr(value))) for value in values]
    refused(ParamError, lambda: parse(DEVICE | {key: "{"}), key, "JSON")
    for wrong, parts in bad:
        refused(ParamError, lambda: parse(DEVICE | {key: json.dumps(wrong)}), key, *parts)  # noqa: B023
