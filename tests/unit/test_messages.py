"""What goes over the control connection: every message survives the trip, nothing else gets in."""

from __future__ import annotations

import pickle
from contextlib import suppress
from typing import get_args

import msgspec
import pytest

from faults.fuzz.forge import HANDSHAKE, LINK, Forge
from llm_datadist._links import messages
from llm_datadist._links.messages import CONTROL_PREAMBLE, FRAME_HEADER, FRAME_LIMIT, Beat, Hello, decode, encode, frame
from llm_datadist.errors import ProtocolError

KINDS = {kind.__name__.lower(): kind for kind in get_args(messages.AnyMessage)}


@pytest.mark.parametrize("tag", sorted(KINDS))
def test_every_message_survives_the_trip_and_none_is_one_cut_short_or_with_more_behind_it(tag: str) -> None:
    """faults/fuzz feeds what is random or changed."""
    forge, tripped = Forge(1, {tag: (LINK | HANDSHAKE)[tag]}, wrong=0), 0
    for _ in range(60):
        payload = forge.payload()
        with suppress(ProtocolError):
            message = decode(payload)
            assert type(message) is KINDS[tag]
            assert decode(encode(message)) == message
            tripped += 1
        for wrong in (payload[: forge.rng.randrange(len(payload))], payload + forge.rng.randbytes(3)):
            with pytest.raises(ProtocolError):
                decode(wrong)
    assert tripped > 10


def test_all_kinds_are_decoded_and_every_field_up_to_its_limit() -> None:
    assert set(KINDS.values()) == {*messages.Message.__subclasses__(), *messages.Greeting.__subclasses__()} - {
        messages.Greeting
    }
    id, u64, same = 2**63 - 1, 2**64 - 1, bytes(16)
    communicator = messages.CommunicatorId("x" * 127, [(u64, 2**32 - 1)] * 4, same, same)
    greeting = u64, u64, same, True, id, "x" * 4096, same, "x" * 64, same, b"x" * 32, "x" * 64
    for message in (
        Hello(*greeting, u64, True, same, communicator),
        messages.Resolve(id, True, (-id, u64, u64), -id, id, id),
    ):
        assert decode(encode(message)) == message


VALUES = [["nothing", 1], [], ["beat"], {"type": "beat", "count": 1}, ["beat", True], ["failed", 1, 2, b"x"]]
VALUES += [["release", -1, 0, 0], ["release", 2**63, 0, 0], ["failed", 1, 2, "x" * 4097]]
VALUES += [["resolve", 1, False, [0, -1, 0], 1, 0, 0]]
DEEP = b"\x91" * 200_000
BYTES = [b"", b"\x92\xa4beat\xc7\xff\x01", DEEP, b"\x99\xa8resolved\x01\x01" + DEEP, pickle.dumps(Beat)]
BYTES += [b"HTTP/1.1 400 Bad Request\r\n\r\n"]


@pytest.mark.parametrize("payload", [*BYTES, *map(msgspec.msgpack.encode, VALUES)], ids=lambda value: repr(value[:30]))
def test_what_is_no_message_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_a_frame_is_length_and_payload_and_its_sender_refuses_one_that_is_too_large() -> None:
    message = Beat(7)
    assert frame(message) == FRAME_HEADER.pack(len(encode(message))) + encode(message)
    large = messages.Resolved(1, 1, msgspec.Raw(b"\xc0"), 0, b"x" * FRAME_LIMIT, b"", [], 0)
    with pytest.raises(ProtocolError, match=f"Resolved of .* at most {FRAME_LIMIT}"):
        frame(large)


def test_the_preamble_tells_a_version_and_a_hello_holds_nothing_that_is_not_announced() -> None:
    assert len(CONTROL_PREAMBLE) == messages.PREAMBLE_BYTES == 12
    assert CONTROL_PREAMBLE[:8].isascii()
    assert int.from_bytes(CONTROL_PREAMBLE[8:10], "big") == messages.PROTOCOL_VERSION
    # Read as a frame header by a peer that expects one, it announces more than a frame may have.
    assert FRAME_HEADER.unpack(CONTROL_PREAMBLE[:4])[0] > FRAME_LIMIT
    assert " ".join(Hello.__struct_fields__) == (
        "version cluster_id incarnation remote_accessible pid host cookie transport nonce lane_share fabric "
        "wanted reconnects token communicator"
    )
