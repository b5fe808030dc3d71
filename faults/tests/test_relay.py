"""A stream of the relay suffers exactly what its fault says; tests/faults/test_cuts.py sends links through relays."""

import pytest

from faults.relay import Fault, Stream

DATA = bytes(range(1, 101))
FLIPPED = bytes(byte ^ 0xFF for byte in DATA)


def through(*faults: Fault, cuts: int = 1, data: bytes = DATA) -> Stream:
    stream = Stream(faults)
    for first in range(0, len(data), cuts):
        stream.feed(data[first : first + cuts], 0.0)
    return stream


@pytest.mark.parametrize("cuts", [1, 7, 100])
@pytest.mark.parametrize(
    ("fault", "expected", "end"),
    [
        (Fault("drop", at=10, count=5), DATA[:10] + DATA[15:], ""),
        (Fault("drop", at=10), DATA[:10], ""),
        (Fault("drop"), b"", ""),
        (Fault("corrupt", at=0), FLIPPED[:1] + DATA[1:], ""),
        (Fault("corrupt", at=98, count=9), DATA[:98] + FLIPPED[98:], ""),
        (Fault("duplicate", at=3, count=4), DATA[:7] + DATA[3:], ""),
        (Fault("duplicate", at=99), DATA + DATA[99:], ""),
        (Fault("truncate", at=42), DATA[:42], "truncate"),
        (Fault("reset", at=0), b"", "reset"),
        (Fault("half_close", at=100), DATA, "half_close"),
    ],
)
def test_a_stream_suffers_exactly_its_fault(fault: Fault, expected: bytes, end: str, cuts: int) -> None:
    stream = through(fault, cuts=cuts)
    assert stream.due(0.0) == expected
    assert (stream.end, stream.waiting) == (end, 0)
