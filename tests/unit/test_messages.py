"""What goes over the control connection: every message survives the trip, nothing else gets in."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import Any, Final, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._links import messages
from llm_datadist._links.messages import (
    CONTROL_PREAMBLE,
    FRAME_HEADER,
    FRAME_LIMIT,
    PREAMBLE_BYTES,
    Beat,
    CommunicatorId,
    Greeting,
    Guarded,
    Hello,
    Message,
    Resolved,
    decode,
    encode,
    frame,
)
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist.errors import ProtocolError

#: Everything that may be a frame.
KINDS: Final = sorted(get_args(messages._ANY), key=lambda kind: kind.__name__)

_U64 = st.integers(0, 2**64 - 1)
_ID = st.integers(0, 2**63 - 1)
_INT = st.integers(-(2**63), 2**64 - 1)
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=60)
_FIXED = st.binary(min_size=16, max_size=16)
_RAW = st.recursive(
    st.none() | st.integers(0, 2**40) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3),
    max_leaves=6,
).map(lambda value: msgspec.Raw(msgspec.msgpack.encode(value)))
_BY_NAME: Final[dict[str, st.SearchStrategy[Any]]] = {
    "incarnation": _FIXED,
    "token": _FIXED,
    "lane_token": _FIXED,
    "exports": st.lists(
        st.builds(
            RegionDescriptor, st.integers(1, 2**32 - 1), st.integers(1, 2**63 - 1), st.text(max_size=8), st.booleans()
        ),
        max_size=3,
    ),
    "cookie": _FIXED,
    "remote_accessible": st.booleans(),
    "reconnects": st.booleans(),
    "push": st.booleans(),
    "each_run": st.booleans(),
    "nonce": _FIXED,
    "runs": st.binary(max_size=64),
    "digests": st.binary(max_size=64),
    "addresses": st.binary(min_size=8, max_size=64),
    "cache_ids": st.binary(max_size=64),
    "tensors": st.binary(max_size=64),
    "version": _INT,
    "code": _INT,
    "cluster_id": _U64,
    "wanted": st.none() | _U64,
    "host": _TEXT,
    "text": _TEXT,
    "transport": _TEXT,
    "reason": _TEXT,
    "rendezvous": _TEXT,
    "key": st.none() | st.tuples(_INT, _U64, _U64),
    "geometry": _RAW,
    "regions": st.binary(max_size=64),
    "offsets": st.binary(max_size=64),
    "guards": st.lists(st.builds(Guarded, _ID, _U64), max_size=4),
    "communicator": st.none()
    | st.builds(
        CommunicatorId,
        _TEXT.filter(bool),
        st.lists(st.tuples(_U64, st.integers(0, 2**32 - 1)), max_size=4),
        _FIXED,
        _FIXED,
    ),
    "present": st.booleans(),
    "allocated": st.booleans(),
}


def some(kind: type[Message]) -> st.SearchStrategy[Any]:
    fields = {
        field: _BY_NAME.get(field, _INT if _is_plain_int(kind, field) else _ID) for field in kind.__struct_fields__
    }
    return st.builds(kind, **fields)


def _is_plain_int(kind: type[Message], field: str) -> bool:
    return get_type_hints(kind, include_extras=True)[field] is int


ANY: Final = st.one_of([some(kind) for kind in KINDS])


def plain(message: Message) -> Any:
    """Return what can be compared: Raw compares by identity of its buffer."""
    return [bytes(value) if isinstance(value, msgspec.Raw) else value for value in msgspec.structs.astuple(message)]


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_the_trip(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(some(kind))
    again = decode(encode(message))
    assert type(again) is kind
    assert plain(again) == plain(message)


def subclasses(kind: type[Message]) -> set[type[Message]]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_all_kinds_are_decoded() -> None:
    assert set(KINDS) == subclasses(Message) - {Message, Greeting}
    tags = [kind.__struct_config__.tag for kind in KINDS]
    assert len(set(tags)) == len(tags)
    assert all(isinstance(tag, str) for tag in tags)


def only_protocol_error(payload: bytes) -> None:
    with suppress(ProtocolError):
        assert isinstance(decode(payload), Message)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_a_message_or_a_protocol_error(payload: bytes) -> None:
    only_protocol_error(payload)


@settings(max_examples=200, deadline=None)
@given(ANY, st.data())
def test_a_truncated_message_is_a_protocol_error(message: Message, data: st.DataObject) -> None:
    payload = encode(message)
    with pytest.raises(ProtocolError):
        decode(payload[: data.draw(st.integers(0, len(payload) - 1))])


@settings(max_examples=200, deadline=None)
@given(ANY, st.binary(min_size=1, max_size=8))
def test_bytes_after_the_message_are_a_protocol_error(message: Message, more: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(encode(message) + more)


@settings(max_examples=400, deadline=None)
@given(ANY, st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6))
def test_a_mutated_message_is_a_message_or_a_protocol_error(message: Message, changes: list[tuple[int, int]]) -> None:
    payload = bytearray(encode(message))
    for at, value in changes:
        payload[at % len(payload)] = value
    only_protocol_error(bytes(payload))


_ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.floats(allow_nan=False),
    st.just(-1),
    st.just(2**64 - 1),
    st.just(""),
    st.just("x" * 5000),
    st.just(b"x" * 17),
    st.just([1, 2]),
    st.just({"a": 1}),
)


@settings(max_examples=400, deadline=None)
@given(ANY, _ODD, st.data())
def test_a_field_of_another_type_never_gets_past_its_annotation(
    message: Message, odd: Any, data: st.DataObject
) -> None:
    kind = type(message)
    values: list[Any] = plain(message)
    if isinstance(message, Resolved):
        values[2] = None  # opaque to this layer: anything is right there
    at = data.draw(st.integers(0, len(values) - 1)) if values else 0
    if not values or (kind is Resolved and at == 2):
        return
    values[at] = odd
    try:
        again = decode(msgspec.msgpack.encode([kind.__struct_config__.tag, *values]))
    except ProtocolError:
        return
    field = kind.__struct_fields__[at]
    value = getattr(again, field)
    assert msgspec.convert(value, get_type_hints(kind, include_extras=True)[field]) == value


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode(["nothing", 1]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["beat"]),
        msgspec.msgpack.encode({"type": "beat", "count": 1}),
        msgspec.msgpack.encode([1, 2]),
        msgspec.msgpack.encode(["release", -1, 0, 0]),
        msgspec.msgpack.encode(["release", 2**63, 0, 0]),
        msgspec.msgpack.encode(["failed", 1, 2, "x" * 4097]),
        msgspec.msgpack.encode(["resolve", 1, False, [0, -1, 0], 1, 0, 0]),
        b"\x92\xa4beat\xc7\xff\x01",
        b"\x91" * 200_000,
        pickle.dumps(Beat),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_frame_is_length_and_payload() -> None:
    message = Beat(7)
    assert frame(message) == FRAME_HEADER.pack(len(encode(message))) + encode(message)


def test_a_message_larger_than_a_frame_is_refused_by_its_sender() -> None:
    large = Resolved(1, 1, msgspec.Raw(b"\xc0"), 0, b"x" * FRAME_LIMIT, b"", [], 0)
    with pytest.raises(ProtocolError, match=f"Resolved of .* at most {FRAME_LIMIT}"):
        frame(large)


def test_the_preamble_tells_a_version() -> None:
    assert len(CONTROL_PREAMBLE) == PREAMBLE_BYTES == 12
    assert CONTROL_PREAMBLE[:8].isascii()
    assert int.from_bytes(CONTROL_PREAMBLE[8:10], "big") == messages.PROTOCOL_VERSION
    # Read as a frame header by a peer that expects one, it announces more than a frame may have.
    assert FRAME_HEADER.unpack(CONTROL_PREAMBLE[:4])[0] > FRAME_LIMIT


def test_a_hello_holds_nothing_that_is_not_announced() -> None:
    assert Hello.__struct_fields__ == (
        "version",
        "cluster_id",
        "incarnation",
        "remote_accessible",
        "pid",
        "host",
        "cookie",
        "cookie_address",
        "exports",
        "transport",
        "wanted",
        "reconnects",
        "token",
        "communicator",
    )
