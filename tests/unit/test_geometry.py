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


def test_geometry_counts_rows_by_the_first_dimension_whatever_the_batch_dimension() -> None:
    desc = CacheDesc(3, [4, 5, 6], DataType.DT_FLOAT16, Placement.HOST, batch_dim_index=1)
    for kind in CacheKind:
        assert Geometry.of(desc, kind) == Geometry(kind, 3, 4, 60, 240, (4, 5, 6), 1, 0)
    with pytest.raises(ParamError, match="num_tensors=0"):
        Geometry.of(CacheDesc(0, [4], DataType.DT_INT8), CacheKind.CACHE)


@given(*[st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 40), st.integers(2**62, 2**63 + 2))] * 4)
def test_a_wire_geometry_that_passes_keeps_every_row_inside_its_tensor(
    num_tensors: int, rows: int, stride: int, tensor_bytes: int
) -> None:
    sent = Geometry(CacheKind.BLOCKS, num_tensors, rows, stride, tensor_bytes, (), -5, 99)
    sound = 1 <= num_tensors <= 2**20 and rows >= 1 and stride >= 1 and rows * stride <= tensor_bytes < 2**63
    if sound:
        assert decode_geometry(msgspec.msgpack.encode(sent)) == sent
    else:
        with pytest.raises(ProtocolError):
            decode_geometry(msgspec.msgpack.encode(sent))


@pytest.mark.parametrize("shape", [(8, 12), (8, 12) + (1,) * 298])  # one whose text is kept, one whose is too long
def test_a_geometry_travels_unchanged_and_one_that_lies_is_refused_however_often(shape: tuple[int, ...]) -> None:
    honest = msgspec.structs.replace(HONEST, shape=shape)
    largest = msgspec.structs.replace(honest, num_tensors=2**20, tensor_bytes=2**63 - 1)
    lies = [
        *[{"num_tensors": count} for count in (0, -1, 2**20 + 1)],
        *[{"tensor_bytes": nbytes} for nbytes in (0, 8 * 12 - 1, 2**63)],
        *[{"rows": rows} for rows in (0, -1)],
        *[{"stride": stride} for stride in (0, -12)],
        *[{"rows": rows, "stride": stride} for rows, stride in ((2**63, 2**63), (-8, -12))],
    ]
    for change in lies * 2:
        for sound in (honest, largest):
            assert decode_geometry(msgspec.msgpack.encode(sound)) == sound
        with pytest.raises(ProtocolError, match="impossible cache geometry") as caught:
            decode_geometry(msgspec.msgpack.encode(msgspec.structs.replace(honest, **change)))
        assert caught.value.status_code is LLMStatusCode.LLM_FAILED
        assert "\n" not in str(caught.value)


def test_what_is_no_wire_geometry_is_a_protocol_error() -> None:
    values = [[7, 4, 8, 12, 96, [8, 12], 4, 1]]  # no such kind
    values += [[0, 4, 8, 12, 96, ["8"], 4, 1], [0, 4.0, 8, 12, 96, [8, 12], 4, 1], [0, 4, None, 12, 96, [8, 12], 4, 1]]
    for wire in [b"", b"\x90", b"\xc0", *map(msgspec.msgpack.encode, values)]:
        with pytest.raises(ProtocolError, match="no cache geometry"):
            decode_geometry(wire)


def test_require_row_and_require_kind_name_the_argument_and_what_would_do() -> None:
    for rows in (1, 8):
        geometry = msgspec.structs.replace(HONEST, rows=rows)
        geometry.require_row("batch_index", rows - 1)
        with pytest.raises(ParamError, match=f"batch_index={rows}: the cache has {rows} rows, so at most {rows - 1}"):
            geometry.require_row("batch_index", rows)
    HONEST.require_kind("cache", CacheKind.CACHE)
    with pytest.raises(ParamError, match="cache: a blocks cache is needed here, this is a continuous one"):
        HONEST.require_kind("cache", CacheKind.BLOCKS)
