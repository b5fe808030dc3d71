"""Sealed records by hand: OpenSSL through ctypes, as a peer that shares no code with the lanes would write them."""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from typing import Any, Final

LENGTH: Final = struct.Struct("<I")
TAG_BYTES: Final = 16
MAX_RECORD: Final = 64 << 10
OVERHEAD: Final = LENGTH.size + TAG_BYTES

Keys = tuple[bytes, bytes]

NEAR_KEYS: Final[Keys] = (bytes(range(32)), bytes(range(100, 132)))
FAR_KEYS: Final[Keys] = (NEAR_KEYS[1], NEAR_KEYS[0])

_GET_TAG, _SET_TAG = 0x10, 0x11


@cache
def _crypto() -> Any:
    library = ctypes.CDLL("libcrypto.so.3")
    library.EVP_CIPHER_CTX_new.restype = library.EVP_aes_256_gcm.restype = ctypes.c_void_p
    return library


class BadRecord(Exception):
    """The tag of a record is wrong."""


class _Direction:
    """The cipher of one direction; owns its context until :meth:`close`."""

    def __init__(self, key: bytes, *, seals: bool) -> None:
        self._crypto = _crypto()
        self._context = ctypes.c_void_p(self._crypto.EVP_CIPHER_CTX_new())
        cipher = ctypes.c_void_p(self._crypto.EVP_aes_256_gcm())
        assert self._crypto.EVP_CipherInit_ex(self._context, cipher, None, key, None, int(seals)) == 1
        self._next = 0

    def close(self) -> None:
        self._crypto.EVP_CIPHER_CTX_free(self._context)
        self._context = ctypes.c_void_p()

    def _run(self, head: bytes, body: bytes) -> bytes:
        nonce = self._next.to_bytes(12, "little")
        self._next += 1
        out, count = ctypes.create_string_buffer(max(len(body), 1)), ctypes.c_int()
        assert self._crypto.EVP_CipherInit_ex(self._context, None, None, None, nonce, -1) == 1
        assert self._crypto.EVP_CipherUpdate(self._context, None, ctypes.byref(count), head, len(head)) == 1
        if body:
            assert self._crypto.EVP_CipherUpdate(self._context, out, ctypes.byref(count), body, len(body)) == 1
        return out.raw[: len(body)]


class Sealer(_Direction):
    """Makes records of bytes."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key, seals=True)

    def record(self, plain: bytes | bytearray) -> bytes:
        """Return one record, also of a length that none may have."""
        head = LENGTH.pack(len(plain))
        body, tag, count = self._run(head, bytes(plain)), ctypes.create_string_buffer(TAG_BYTES), ctypes.c_int()
        assert self._crypto.EVP_CipherFinal_ex(self._context, tag, ctypes.byref(count)) == 1
        assert self._crypto.EVP_CIPHER_CTX_ctrl(self._context, _GET_TAG, TAG_BYTES, tag) == 1
        return head + body + tag.raw

    def seal(self, data: bytes | bytearray, size: int = MAX_RECORD) -> bytes:
        """Return the records of all bytes, ``size`` in each."""
        return b"".join(self.record(data[at : at + size]) for at in range(0, len(data), size))


class Opener(_Direction):
    """Takes records in any pieces; ``plain`` has what was found right in them."""

    def __init__(self, key: bytes) -> None:
        super().__init__(key, seals=False)
        self.plain = bytearray()
        self._pending = bytearray()

    def feed(self, data: bytes) -> None:
        """Open what is whole by now; ``BadRecord`` when it is not what was sealed."""
        self._pending += data
        while (record := self._whole()) is not None:
            plain, count = self._run(record[: LENGTH.size], record[LENGTH.size : -TAG_BYTES]), ctypes.c_int()
            assert self._crypto.EVP_CIPHER_CTX_ctrl(self._context, _SET_TAG, TAG_BYTES, record[-TAG_BYTES:]) == 1
            nothing = ctypes.create_string_buffer(TAG_BYTES)
            if self._crypto.EVP_CipherFinal_ex(self._context, nothing, ctypes.byref(count)) != 1:
                raise BadRecord
            self.plain += plain

    def _whole(self) -> bytes | None:
        if len(self._pending) < LENGTH.size:
            return None
        size = LENGTH.unpack_from(self._pending)[0] + OVERHEAD
        if len(self._pending) < size:
            return None
        record = bytes(self._pending[:size])
        del self._pending[:size]
        return record


def records_of(stream: bytes) -> list[bytes]:
    """Return the records of a stream, cut by their lengths; the last one may be cut off."""
    found, at = [], 0
    while at < len(stream):
        size = LENGTH.unpack_from(stream, at)[0] + OVERHEAD if at + LENGTH.size <= len(stream) else OVERHEAD
        found.append(stream[at : at + size])
        at += size
    return found
