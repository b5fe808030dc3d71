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
GIB = 2**30
MIB2 = 2 * 2**20


def parse(options: dict[str, str]) -> Options:
    return Options.parse(options, LLMRole.DECODER)


def _pool(**fields: object) -> str:
    return json.dumps(fields)


@pytest.mark.parametrize("key", POOLS)
@pytest.mark.parametrize(
    ("text", "size", "shift"),
    [
        ('{"memory_size": 18737418240, "page_shift": 16}', 18737418240, 16),  # the page's own example
        (_pool(memory_size=65536), 65536, 16),  # a single page of the default size
        (_pool(memory_size=2**30, page_shift=10), 2**30, 10),
        (_pool(memory_size=2**30, page_shift=30), 2**30, 30),
        (_pool(memory_size=20 * GIB), 20 * GIB, 16),
    ],
)
def test_r11_pool_text_is_parsed(key: str, text: str, size: int, shift: int) -> None:
    options = parse(V2 | {key: text})
    assert {field: getattr(options, field) for field in POOLS.values()} == dict.fromkeys(POOLS.values()) | {
        POOLS[key]: PoolOptions(size, shift)
    }
    assert PoolOptions(size, shift).page_bytes == 1 << shift


@pytest.mark.parametrize("key", POOLS)
@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ("''", "JSON")),
        ("{", ("'{'", "JSON")),
        ("[" * 100_000, ("JSON",)),
        ('[{"memory_size": 65536}]', ("JSON object",)),
        ("65536", ("JSON object",)),
        ("null", ("JSON object",)),
        ("{}", ("memory_size", "missing")),
        (_pool(page_shift=16), ("memory_size", "missing")),
        (_pool(memory_size=None), ("memory_size", "None")),
        (_pool(memory_size="65536"), ("memory_size", "'65536'")),
        (_pool(memory_size=65536.0), ("memory_size", "65536.0")),
        (_pool(memory_size=True), ("memory_size", "True")),
        (_pool(memory_size=0), ("memory_size", "0")),
        (_pool(memory_size=-65536), ("memory_size", "-65536")),
        (_pool(memory_size=65535), ("memory_size", "65535", "65536")),
        (_pool(memory_size=65536, page_shift=17), ("memory_size", "131072")),
        (_pool(memory_size=2**30, page_shift=9), ("page_shift", "9", "[10, 31)")),
        (_pool(memory_size=2**32, page_shift=31), ("page_shift", "31")),
        (_pool(memory_size=2**30, page_shift=-1), ("page_shift", "-1")),
        (_pool(memory_size=2**30, page_shift=16.0), ("page_shift", "16.0")),
        (_pool(memory_size=2**30, page_shift=False), ("page_shift", "False")),
        (_pool(memory_size=2**30, page_shift=None), ("page_shift", "None")),
        (_pool(memory_size=(2**32 - 1) << 10, page_shift=10), ("memory_size", "pages")),
    ],
)
def test_r11_pool_text_is_refused_naming_option_and_field(
    refused: Callable[..., None], key: str, text: str, parts: tuple[str, ...]
) -> None:
    refused(ParamError, lambda: parse(V2 | {key: text}), key, *parts)


def test_r11_unknown_fields_are_one_warning_naming_them(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        parsed = parse(V2 | {"llm.MemPoolConfig": _pool(memory_size=65536, zone="a", Page_shift=1)})
    assert parsed.mem_pool == PoolOptions(65536, 16)
    assert [record.name for record in caplog.records] == ["LLM_DATADIST"]
    assert all(part in caplog.text for part in ("llm.MemPoolConfig", "Page_shift", "zone"))


def test_r11_host_pool_has_a_limit_the_device_pool_has_not(refused: Callable[..., None]) -> None:
    over, host = _pool(memory_size=20 * GIB + 1), "llm.HostMemPoolConfig"
    refused(ParamError, lambda: parse(V2 | {host: over}), host, str(20 * GIB + 1), str(20 * GIB))
    assert parse(V2 | {"llm.MemPoolConfig": over}).mem_pool is not None


def test_r12_pool_of_v1_is_its_own_text_else_a_share_of_the_graph_memory(refused: Callable[..., None]) -> None:
    name = "ge.flowGraphMemMaxSize"
    graph = DEVICE | {name: "2000000"}
    assert parse(graph).mem_pool == PoolOptions(1900000, 16)
    assert parse(graph | {"llm.MemoryUtilization": "0.5"}).mem_pool == PoolOptions(1000000, 16)
    assert parse(graph | {"llm.MemPoolConfig": _pool(memory_size=65536)}).mem_pool == PoolOptions(65536, 16)
    assert parse(graph | {"llm.MemoryUtilization": "0.0"}).mem_pool is None
    assert parse(DEVICE | {name: "0"}).mem_pool is None
    assert parse(DEVICE).mem_pool is None
    assert parse(V2 | {name: "2000000"}).mem_pool is None
    refused(ParamError, lambda: parse(DEVICE | {name: "65536"}), name, "62259")
    for base in (DEVICE, V2):
        for value in ("1,2", "-1", "1.23", "", "1e9", "9" * 30):
            refused(ParamError, lambda: parse(base | {name: value}), name, repr(value))  # noqa: B023


BUF = {"total_size": MIB2, "blk_size": 256, "max_buf_size": 256}


def _buf(**changes: object) -> str:
    return json.dumps({"buf_cfg": [BUF | changes], "buf_pool_size": MIB2})


def test_buffer_pool_text_is_checked_and_has_no_effect() -> None:
    two = [BUF, {"total_size": 2 * MIB2, "blk_size": 8192, "max_buf_size": 8192}]
    for text in (json.dumps({"buf_cfg": two}), _buf()):
        assert parse(DEVICE | {"llm.BufPoolCfg": text}) == parse(DEVICE)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("{", ("JSON",)),
        ("[]", ("buf_cfg",)),
        ('{"buf_cfg": 1}', ("buf_cfg",)),
        ('{"buf_cfg": [1]}', ("buf_cfg",)),
        ('{"buf_cfg": [{"total_size": 2097152}]}', ("buf_cfg[0]", "blk_size", "missing")),
        (_buf(total_size=MIB2 + 1), ("total_size", str(MIB2 + 1))),
        (_buf(total_size=0), ("total_size", "0")),
        (_buf(total_size=2**32), ("total_size", str(2**32))),
        (_buf(blk_size=100), ("blk_size", "100")),
        (_buf(blk_size=2 * MIB2), ("blk_size", str(2 * MIB2))),
        (_buf(blk_size=0), ("blk_size", "0")),
        (_buf(max_buf_size=128), ("max_buf_size", "128")),
        (_buf(max_buf_size=MIB2), ("max_buf_size", str(MIB2))),
        (_buf(max_buf_size=256.0), ("max_buf_size", "256.0")),
        (json.dumps({"buf_cfg": [BUF] * 2}), ("buf_cfg[1]", "max_buf_size", "256")),
    ],
)
def test_buffer_pool_text_is_refused_naming_the_field(
    refused: Callable[..., None], text: str, parts: tuple[str, ...]
) -> None:
    refused(ParamError, lambda: parse(DEVICE | {"llm.BufPoolCfg": text}), "llm.BufPoolCfg", *parts)
