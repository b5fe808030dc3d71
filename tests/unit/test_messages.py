"""What goes over the control connection: every message survives the trip, nothing else gets in."""

from __future__ import annotations

import pickle
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
_MEMBERS = st.lists(st.tuples(_U64, st.integers(0, 2**32 - 1)), max_size=4)
_FLAGS = ("remote_accessible", "reconnects", "push", "each_run", "present", "allocated")
_BY_NAME: Final[dict[str, st.SearchStrategy[Any]]] = {
    **dict.fromkeys(_FLAGS, st.booleans()),
    **dict.fromkeys(("incarnation", "token", "lane_token", "cookie", "nonce"), _FIXED),
    **dict.fromkeys(("host", "text", "transport", "reason", "rendezvous"), _TEXT),
    **dict.fromkeys(("runs", "digests", "cache_ids", "tensors", "regions", "offsets"), st.binary(max_size=64)),
    **dict.fromkeys(("version", "code"), _INT),
    "addresses": st.binary(min_size=8, max_size=64),
    "cluster_id": _U64,
    "wanted": st.none() | _U64,
    "key": st.none() | st.tuples(_INT, _U64, _U64),
    "geometry": _RAW,
    "guards": st.lists(st.builds(Guarded, _ID, _U64), max_size=4),
    **dict.fromkeys(("proof", "share"), st.sampled_from((b"", bytes(32)))),
    "credentials": st.binary(max_size=64),
    "communicator": st.none() | st.builds(CommunicatorId, _TEXT.filter(bool), _MEMBERS, _FIXED, _FIXED),
}


def some(kind: type[Message]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind, include_extras=True)
    return st.builds(
        kind, **{name: _BY_NAME.get(name, _INT if hints[name] is int else _ID) for name in kind.__struct_fields__}
    )


def plain(message: Message) -> Any:
    """Return what can be compared: Raw compares by identity of its buffer."""
    return [bytes(value) if isinstance(value, msgspec.Raw) else value for value in msgspec.structs.astuple(message)]


@settings(max_examples=40)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(data=st.data())
def test_every_message_survives_the_trip(kind: type[Message], data: st.DataObject) -> None:
    message = data.draw(some(kind))
    again = decode(encode(message))
    assert type(again) is kind
    assert plain(again) == plain(message)


def test_all_kinds_are_decoded() -> None:
    assert set(KINDS) == {*Message.__subclasses__(), *Greeting.__subclasses__()} - {Greeting}
    tags = {kind.__struct_config__.tag for kind in KINDS}
    assert len({tag for tag in tags if isinstance(tag, str)}) == len(KINDS)


@settings(max_examples=200)
@given(st.one_of([some(kind) for kind in KINDS]), st.binary(min_size=1, max_size=8), st.data())
def test_a_message_cut_short_or_with_more_behind_it_is_a_protocol_error(
    message: Message, more: bytes, data: st.DataObject
) -> None:
    """tests/faults/fuzz feeds what is random or changed."""
    payload = encode(message)
    for wrong in (payload[: data.draw(st.integers(0, len(payload) - 1))], payload + more):
        with pytest.raises(ProtocolError):
            decode(wrong)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode(["nothing", 1]),
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode(["beat"]),
        msgspec.msgpack.encode({"type": "beat", "count": 1}),
        msgspec.msgpack.encode(["release", -1, 0, 0]),
        msgspec.msgpack.encode(["release", 2**63, 0, 0]),
        msgspec.msgpack.encode(["failed", 1, 2, "x" * 4097]),
        msgspec.msgpack.encode(["failed", 1, 2, b"x"]),
        msgspec.msgpack.encode(["beat", True]),
        msgspec.msgpack.encode(["resolve", 1, False, [0, -1, 0], 1, 0, 0]),
        b"\x92\xa4beat\xc7\xff\x01",
        b"\x91" * 200_000,
        b"\x99\xa8resolved\x01\x01" + b"\x91" * 200_000,
        pickle.dumps(Beat),
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
    ],
)
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_frame_is_length_and_payload_and_its_sender_refuses_one_that_is_too_large() -> None:
    message = Beat(7)
    assert frame(message) == FRAME_HEADER.pack(len(encode(message))) + encode(message)
    large = Resolved(1, 1, msgspec.Raw(b"\xc0"), 0, b"x" * FRAME_LIMIT, b"", [], 0)
    with pytest.raises(ProtocolError, match=f"Resolved of .* at most {FRAME_LIMIT}"):
        frame(large)


def test_the_preamble_tells_a_version_and_a_hello_holds_nothing_that_is_not_announced() -> None:
    assert len(CONTROL_PREAMBLE) == PREAMBLE_BYTES == 12
    assert CONTROL_PREAMBLE[:8].isascii()
    assert int.from_bytes(CONTROL_PREAMBLE[8:10], "big") == messages.PROTOCOL_VERSION
    # Read as a frame header by a peer that expects one, it announces more than a frame may have.
    assert FRAME_HEADER.unpack(CONTROL_PREAMBLE[:4])[0] > FRAME_LIMIT
    assert " ".join(Hello.__struct_fields__) == (
        "version cluster_id incarnation remote_accessible pid host cookie transport nonce credentials wanted "
        "reconnects token communicator"
    )
