"""Records by hand: of sealed lanes, as a peer that shares no code with them writes them, and of TLS 1.3.

The ciphers are those of `cryptography`, whose OpenSSL is its own.
"""

import hmac
import random
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

LENGTH: Final = struct.Struct("<I")
HEADER: Final = struct.Struct(">BHH")
TAG_BYTES: Final = 16
MAX_RECORD: Final = 64 << 10
OVERHEAD: Final = LENGTH.size + TAG_BYTES
Keys = tuple[bytes, bytes]
NEAR_KEYS: Final[Keys] = (bytes(range(32)), bytes(range(100, 132)))
FAR_KEYS: Final[Keys] = (NEAR_KEYS[1], NEAR_KEYS[0])
CHANGE_CIPHER, ALERT, HANDSHAKE, DATA = 20, 21, 22, 23
_VERSION: Final = 0x0303


@dataclass(frozen=True)
class Framing:
    """How a stream is cut into records: the last field of ``head`` counts all of a record but ``overhead`` bytes."""

    head: struct.Struct
    overhead: int

    def nbytes_of(self, stream: bytes | bytearray, at: int = 0) -> int:
        return int(self.head.unpack_from(stream, at)[-1]) + self.overhead

    def records_of(self, stream: bytes) -> list[bytes]:
        """Return the records of a stream, cut by their lengths; the last one may be cut off."""
        found, at = [], 0
        while at < len(stream):
            size = self.nbytes_of(stream, at) if at + self.head.size <= len(stream) else self.overhead
            found.append(stream[at : at + size])
            at += size
        return found

    def shortened(self, record: bytes) -> bytes:
        """Return a record without its last byte, and saying so."""
        *fields, nbytes = self.head.unpack_from(record)
        return self.head.pack(*fields, nbytes - 1) + record[self.head.size : -1]


LANE_RECORDS: Final = Framing(LENGTH, OVERHEAD)
TLS_RECORDS: Final = Framing(HEADER, HEADER.size)
records_of: Final = LANE_RECORDS.records_of


class BadRecord(Exception):
    """The tag of a record is wrong."""


class _Direction:
    def __init__(self, key: bytes) -> None:
        self._cipher, self._next = AESGCM(key), 0

    def _nonce(self) -> bytes:
        self._next += 1
        return (self._next - 1).to_bytes(12, "little")

    def close(self) -> None:
        """Use no more of it."""


class Sealer(_Direction):
    def record(self, plain: bytes | bytearray) -> bytes:
        """Return one record, also of a length that none may have."""
        head = LENGTH.pack(len(plain))
        return head + self._cipher.encrypt(self._nonce(), bytes(plain), head)

    def seal(self, data: bytes | bytearray, size: int = MAX_RECORD) -> bytes:
        """Return the records of all bytes, ``size`` in each."""
        return b"".join(self.record(data[at : at + size]) for at in range(0, len(data), size))


class Opener(_Direction):
    """Takes records in any pieces; ``plain`` has what was found right in them."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key)
        self.plain = bytearray()
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        """Open what is whole by now; ``BadRecord`` when it is not what was sealed."""
        self._pending += data
        while len(self._pending) >= LENGTH.size:
            if len(self._pending) < (size := LANE_RECORDS.nbytes_of(self._pending)):
                return
            head, body = bytes(self._pending[: LENGTH.size]), bytes(self._pending[LENGTH.size : size])
            del self._pending[:size]
            try:
                self.plain += self._cipher.decrypt(self._nonce(), body, head)
            except InvalidTag:
                raise BadRecord from None


def meaning(stream: bytes) -> bytes:
    """Return the stream without what TLS 1.3 tells every end to ignore, and authenticates nowhere."""
    found = b""
    for record in TLS_RECORDS.records_of(stream):
        if record[:1] == bytes([HANDSHAKE]):
            found += record[HEADER.size :]
        elif record[:1] != bytes([CHANGE_CIPHER]) or record[HEADER.size :] != b"\1":
            found += record
    return found


def logged_secret(log: Path, label: str) -> bytes:
    """Return the last secret of that label in a key log, as ``SSLContext.keylog_filename`` writes it."""
    lines = [line.split() for line in log.read_text("ascii").splitlines()]
    return bytes.fromhex(next(line[2] for line in reversed(lines) if line[0] == label))


class RecordWriter:
    """Writes one direction of a session with TLS_AES_256_GCM_SHA384, from its traffic secret; checks nothing."""

    def __init__(self, secret: bytes) -> None:
        self._begin(secret)

    def record(self, content: bytes, kind: int = DATA, padding: int = 0) -> bytes:
        """Return one record, also of a kind or a length that none may have."""
        inner = content + bytes([kind]) + bytes(padding)
        header = HEADER.pack(DATA, _VERSION, (len(inner) + TAG_BYTES) & 0xFFFF)
        nonce = (self._iv ^ self._count).to_bytes(12, "big")
        self._count += 1
        return header + self._cipher.encrypt(nonce, inner, header)

    def update(self, asks: int) -> bytes:
        said = self.record(bytes([24, 0, 0, 1, asks]), HANDSHAKE)
        self._begin(_derived(self._secret, b"traffic upd", 48))
        return said

    def odd(self, frames: bytes, rng: random.Random) -> bytes:
        """Return records of all kinds around frames, which they may or may not let through."""
        said = b"".join(self._one(frames, rng) for _ in range(rng.randrange(1, 7)))
        return said + self.record(frames)

    def _one(self, frames: bytes, rng: random.Random) -> bytes:
        match rng.randrange(10):
            case 0:
                return b"".join(self.update(rng.choice((0, 1, 1))) for _ in range(rng.choice((1, 1, 2, 40, 3000))))
            case 1:
                return self.record(bytes([24, 0, 0, 1, rng.choice((0, 1, 2, 255))]), HANDSHAKE)
            case 2:  # a message of a handshake that is over, sometimes cut off
                message = bytes([rng.choice((0, 1, 2, 4, 8, 11, 13, 20, 24, 254))])
                body = rng.randbytes(rng.choice((0, 1, 40, 300)))
                length = len(body) if rng.random() < 0.7 else rng.randrange(1 << 24)
                return self.record(message + length.to_bytes(3, "big") + body, HANDSHAKE)
            case 3:  # an alert: one that is ignored, or any
                return self.record(rng.choice((b"\1\x5a", rng.randbytes(2), rng.randbytes(3))), ALERT)
            case 8:  # the end of the session, and more
                return self.record(b"\1\0", ALERT) + b"".join(self.record(bytes(1 << 14)) for _ in range(8))
            case 4:
                return b"".join(self.record(b"") for _ in range(rng.choice((1, 31, 64))))
            case 5:
                return self.record(frames[:1000], DATA, padding=rng.choice((1, 1000, 15_000)))
            case 6:
                return self.record(rng.randbytes(rng.choice((1 << 14, (1 << 14) + 1, 17_000))))
            case 7:
                return self.record(rng.randbytes(rng.randrange(40)), rng.choice((0, 20, 24, 255)))
        return b"".join(self.record(bytes(1 << 14)) for _ in range(rng.choice((1, 16))))

    def _begin(self, secret: bytes) -> None:
        self._secret, self._count = secret, 0
        self._cipher = AESGCM(_derived(secret, b"key", 32))
        self._iv = int.from_bytes(_derived(secret, b"iv", 12), "big")


def _derived(secret: bytes, label: bytes, size: int) -> bytes:
    """HKDF-Expand-Label of RFC 8446 with SHA-384, for one block."""
    label = b"tls13 " + label
    info = struct.pack(">HB", size, len(label)) + label + b"\0"
    return hmac.digest(secret, info + b"\1", "sha384")[:size]
