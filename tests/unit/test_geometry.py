"""The geometry of a cache: off a descriptor, and off the wire, where a stranger may have written it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_datadist import CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist._cache.geometry import CacheKind, Geometry, decode_geometry
from llm_datadist.errors import ParamError, ProtocolError

pytestmark = pytest.mark.covers("CacheKind", "CacheDesc.batch_dim", "Geometry.stride")

HONEST = Geometry(CacheKind.CACHE, 4, 8, 12, 96, (8, 12), 4, 1)


@pytest.mark.parametrize("kind", CacheKind)
def test_geometry_counts_rows_by_the_first_dimension_whatever_the_batch_dimension(kind: CacheKind) -> None:
    desc = CacheDesc(3, [4, 5, 6], DataType.DT_FLOAT16, Placement.HOST, batch_dim_index=1)
    assert Geometry.of(desc, kind) == Geometry(kind, 3, 4, 60, 240, (4, 5, 6), 1, 0)


def test_geometry_refuses_a_cache_without_tensors() -> None:
    with pytest.raises(ParamError, match="num_tensors=0"):
        Geometry.of(CacheDesc(0, [4], DataType.DT_INT8), CacheKind.CACHE)


@given(*[st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 40), st.integers(2**62, 2**63 + 2))] * 4)
def test_a_wire_geometry_that_passes_keeps_every_row_inside_its_tensor(
    num_tensors: int, rows: int, stride: int, tensor_bytes: int
) -> None:
    sent = Geometry(CacheKind.BLOCKS, num_tensors, rows, stride, tensor_bytes, (), -5, 99)
    try:
        got = decode_geometry(msgspec.msgpack.encode(sent))
    except ProtocolError as error:
        assert "\n" not in str(error)  # noqa: PT017 (the other outcome is as good)
        return
    assert got == sent
    assert 1 <= got.num_tensors <= 2**20
    assert got.rows >= 1
    assert got.stride >= 1
    assert got.rows * got.stride <= got.tensor_bytes < 2**63


@pytest.mark.parametrize(
    "change",
    [
        {"num_tensors": 0},
        {"num_tensors": -1},
        {"num_tensors": 2**20 + 1},
        {"rows": 0},
        {"rows": -1},
        {"stride": 0},
        {"stride": -12},
        {"tensor_bytes": 0},
        {"tensor_bytes": 8 * 12 - 1},
        {"tensor_bytes": 2**63},
        {"rows": 2**63, "stride": 2**63},
        {"rows": -8, "stride": -12},
    ],
)
def test_a_wire_geometry_that_lies_is_a_protocol_error(change: dict[str, int]) -> None:
    hostile = msgspec.structs.replace(HONEST, **change)
    with pytest.raises(ProtocolError, match="impossible cache geometry") as caught:
        decode_geometry(msgspec.msgpack.encode(hostile))
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED


@pytest.mark.parametrize(
    "wire",
    [
        b"",
        b"\x90",
        b"\xc0",
        msgspec.msgpack.encode([7, 4, 8, 12, 96, [8, 12], 4, 1]),  # no such kind
        msgspec.msgpack.encode([0, 4, 8, 12, 96, ["8"], 4, 1]),
        msgspec.msgpack.encode([0, 4.0, 8, 12, 96, [8, 12], 4, 1]),
        msgspec.msgpack.encode([0, 4, None, 12, 96, [8, 12], 4, 1]),
    ],
)
def test_what_is_no_wire_geometry_is_a_protocol_error(wire: bytes) -> None:
    with pytest.raises(ProtocolError, match="no cache geometry"):
        decode_geometry(wire)


@pytest.mark.parametrize("dimensions", [2, 300])  # one whose text is kept, one whose is too long
def test_a_geometry_travels_unchanged_however_often(dimensions: int) -> None:
    sent = msgspec.structs.replace(HONEST, shape=(8, 12) + (1,) * (dimensions - 2))
    assert [decode_geometry(msgspec.msgpack.encode(sent)) for _ in range(2)] == [sent, sent]
    hostile = msgspec.structs.replace(sent, rows=0)
    for _ in range(2):
        with pytest.raises(ProtocolError, match="impossible"):
            decode_geometry(msgspec.msgpack.encode(hostile))


@pytest.mark.parametrize("rows", [1, 8])
def test_require_row_names_the_argument_and_the_limit(rows: int) -> None:
    geometry = msgspec.structs.replace(HONEST, rows=rows)
    geometry.require_row("batch_index", rows - 1)
    with pytest.raises(ParamError, match=f"batch_index={rows}: the cache has {rows} rows, so at most {rows - 1}"):
        geometry.require_row("batch_index", rows)


def test_require_kind_names_both_kinds() -> None:
    HONEST.require_kind("cache", CacheKind.CACHE)
    with pytest.raises(ParamError, match="cache: a blocks cache is needed here, this is a continuous one"):
        HONEST.require_kind("cache", CacheKind.BLOCKS)
