"""Wrong frames from right ones: what the targets are fed with.

All of it follows from a seed. A frame begins as a message that could be meant, then a field or two become wild, then
some bytes change. So most of them reach deep into the code, and none of the ways to be wrong is left out: random,
truncated, oversized, out of order, repeated.
"""

from __future__ import annotations

import copy
import random
import ssl
import struct
from collections import deque
from functools import cache
from typing import Any, Final

import msgspec

from llm_datadist._links.messages import FRAME_HEADER, FRAME_LIMIT, PROTOCOL_VERSION
from llm_datadist._links.seal import Seal

_SHARE: Final = 10  # where a greeting has it
_encode: Final = msgspec.msgpack.Encoder().encode
_NUMBERS: Final[list[Any]] = [0, 1, 2, 3, 5, 7, *(2**bits + off for bits in (6, 8, 12, 16, 31, 32) for off in (-1, 0))]
_LARGE: Final[list[Any]] = [2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, -1, -2, -(2**31), -(2**63)]
_TEXTS: Final[list[Any]] = [
    "",
    "x",
    "hello",
    "resolve",
    "\0",
    "a\nb\r\x1b[31m",
    "\ud7ff",
    "é" * 200,
    "x" * 4096,
    "x" * 4097,
]
_BYTES: Final[list[Any]] = [
    b"",
    b"\0",
    b"\xff" * 15,
    b"t" * 16,
    bytes(17),
    bytes(64),
    bytes(65),
    bytes(range(256)),
    bytes(5000),
]
_ODD: Final[list[Any]] = [
    None,
    True,
    False,
    0.0,
    -1.5,
    1e308,
    float("inf"),
    [],
    {},
    [[]],
    {"a": 1},
    [None] * 3,
    [[[[[[]]]]]],
]


def wild(rng: random.Random) -> Any:
    """Return a value of any type, near a limit more often than not."""
    pool = rng.choice((_NUMBERS, _NUMBERS, _LARGE, _LARGE, _TEXTS, _BYTES, _ODD))
    # A copy: a caller may change it, and the next caller must not get the change.
    return copy.deepcopy(rng.choice(pool))


def _flip(data: bytes, at: int, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(1 << rng.randrange(3)):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _cut(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at]


def _insert(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + rng.randbytes(rng.randrange(1, 9)) + data[at:]


def _repeat(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[: at + rng.randrange(1, 17)] + data[at:]


def _overwrite(data: bytes, at: int, rng: random.Random) -> bytes:
    return data[:at] + b"\xff" * rng.randrange(1, 5) + data[at + 4 :]


#: What can happen to bytes; half of the time some bits change.
MUTATIONS: Final = {"flip": _flip, "cut": _cut, "insert": _insert, "repeat": _repeat, "overwrite": _overwrite}
_MUTATIONS: Final = ("flip",) * 4 + ("cut", "insert", "repeat", "overwrite")


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Return the bytes with something changed, cut off, put in, or put there twice."""
    if not data:
        return rng.randbytes(rng.randrange(1, 9))
    return MUTATIONS[rng.choice(_MUTATIONS)](data, rng.randrange(len(data)), rng)


def _id(rng: random.Random) -> int:
    return rng.randrange(1, 64) if rng.random() < 0.9 else rng.choice(_LARGE)


def _key(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return None
    return [rng.randrange(4), rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 2**64 - 1)), rng.randrange(3)]


def _hello(rng: random.Random) -> list[Any]:
    wanted = rng.choice((None, None, 1, rng.randrange(9)))
    token, incarnation = rng.randbytes(16), rng.randbytes(16)
    rca = rng.random() < 0.5
    transport = rng.choice((None, None, "shm", "rdma"))
    greeting = [
        PROTOCOL_VERSION,
        100 + rng.randrange(50),
        incarnation,
        rca,
        4242,
        "fuzz",
        rng.randbytes(16),
        transport,
        *_nonce_and_share(rng),
        rng.choice(("", "", "tcp", "rdma")),
    ]
    return ["hello", *greeting, wanted, rng.random() < 0.2, token, *_communicator(rng)]


def _nonce_and_share(rng: random.Random) -> list[bytes]:
    """Return a nonce and a share."""
    return [rng.randbytes(16), rng.choice((b"", b"", b"", rng.randbytes(9)))]


def _proof(rng: random.Random) -> bytes:
    return rng.choice((b"", rng.randbytes(32)))


def _communicator(rng: random.Random) -> list[Any]:
    """Sometimes a greeting is for a communicator."""
    if rng.random() < 0.7:
        return []
    members = [[1, 0], [100 + rng.randrange(50), 1]][: rng.choice((0, 1, 2, 2, 2))]
    return [[rng.choice(("link", "link", "", "x" * 128, "a\nb")), members, bytes(16), rng.randbytes(16)]]


def _welcome(rng: random.Random) -> list[Any]:
    rendezvous = rng.choice(("@llm-datadist-none", "/tmp/llm-datadist-none.sock", "@x", "", "\0", "/etc/passwd"))
    greeting = [PROTOCOL_VERSION, 1, rng.randbytes(16), False, 4242, "fuzz", rng.randbytes(16)]
    transport = rng.choice((None, "tcp", "x\ny"))
    return ["welcome", *greeting, transport, *_nonce_and_share(rng), "", rendezvous, rng.randbytes(16), _proof(rng)]


def _transport_choice(rng: random.Random) -> list[Any]:
    present = rng.random() < 0.15
    transport = rng.choice(("inproc", "shm", "cma", "tcp", "x\ny"))
    return ["transportchoice", transport, "because", rng.randrange(1, 1 << 40), present, _proof(rng), _proof(rng)]


@cache
def _client_hello() -> bytes:
    """Return the beginning of a handshake that could be meant; another one in each run."""
    return Seal(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), server_side=False).shake()


def _resolve(rng: random.Random) -> list[Any]:
    cache_id = rng.randrange(-1, 12)
    return ["resolve", _id(rng), rng.random() < 0.2, _key(rng), cache_id, rng.randrange(10), rng.randrange(60_000)]


def _release(rng: random.Random) -> list[Any]:
    return ["release", rng.randrange(1 << rng.randrange(1, 20)), rng.randrange(5), rng.randrange(6)]


def _consumed(rng: random.Random) -> list[Any]:
    return ["consumed", rng.randrange(-1, 12), rng.randrange(9), rng.randrange(5), rng.randrange(6)]


def _guards(rng: random.Random) -> list[Any]:
    return [[rng.choice((0, 1, 1, 2, 2, 3, 7)), rng.choice((0, 1, 1, 1, 2, 3))] for _ in range(rng.choice((1, 1, 2)))]


def _verify(rng: random.Random) -> list[Any]:
    spans = [(rng.randrange(8) * 48, 48 * rng.randrange(1, 3)) for _ in range(rng.randrange(4))]
    runs = b"".join(struct.pack("<QQ", *span) for span in spans)
    named = [rng.randrange(1, 9), rng.choice((0, 0, 0, rng.randrange(1 << 12))), _guards(rng), rng.random() < 0.3]
    which = [rng.choice((384, 384, 384, 48, 0)), rng.randrange(4), rng.randrange(1, 5), runs, rng.random() < 0.3]
    return ["verify", _id(rng), *named, *which, rng.randbytes(16), rng.randrange(60_000)]


def _locate(rng: random.Random) -> list[Any]:
    count = rng.choice((1, 2, 2, 8, 4096, 4097))
    near = [rng.choice((0, 1, 2**12, 2**47, 2**64 - 1, rng.randrange(2**48))) for _ in range(min(count, 8))]
    return ["locate", _id(rng), struct.pack(f"<{len(near)}Q", *near) + rng.randbytes(8 * (count - len(near))), _id(rng)]


def located(rng: random.Random, number: int, count: int = 2) -> list[Any]:
    """Return an answer to request ``number``, about ``count`` addresses, that could be meant."""
    ids = struct.pack(f"<{count}Q", *(rng.randrange(9) for _ in range(count)))
    tensors = struct.pack(f"<{count}I", *(rng.randrange(5) for _ in range(count)))
    offsets = struct.pack(f"<{count}Q", *(rng.choice((0, 48, 2**40, 2**63, 2**64 - 1)) for _ in range(count)))
    return ["located", number, ids, tensors, offsets, rng.random() < 0.5]


def geometry(rng: random.Random) -> list[Any]:
    """Return the geometry of a cache as it travels, which is that of a small one."""
    kind, tensors, rows, stride = rng.randrange(2), rng.choice((4, 4, 4, 1, 8)), 8, 48
    return [kind, tensors, rows, stride, rows * stride, [rows, stride], 3, 1]


def resolved(rng: random.Random, number: int, tensors: int = 4) -> list[Any]:
    """Return an answer to request ``number`` that could be meant."""
    regions = b"".join(rng.choice((1, 1, 1, 2, 0, 3)).to_bytes(4, "little") for _ in range(tensors))
    if rng.random() < 0.8:
        regions = regions[:4] * tensors
    offsets = b"".join((rng.randrange(1 << 10) << 12).to_bytes(8, "little") for _ in range(tensors))
    guards = _guards(rng) if rng.random() < 0.9 else []
    shape = geometry(rng) if rng.random() < 0.3 else [rng.randrange(2), tensors, 8, 48, 384, [8, 48], 3, 1]
    return ["resolved", number, rng.randrange(9), shape, rng.randrange(8), regions, offsets, guards, rng.randrange(3)]


def _nixl_request(rng: random.Random) -> bytes:
    """Return a request of the transport nixl that could be meant."""
    if rng.random() < 0.3:
        return _encode([2, _id(rng), rng.random() < 0.8])
    receiver = rng.choice((None, ["0123456789abcdef", 1, rng.randbytes(9), "1.5.1"]))
    places = [rng.randbytes(8 * rng.randrange(3)) for _ in range(2)]
    write, direct = rng.random() < 0.5, rng.random() < 0.5
    return _encode([1, _id(rng), write, direct, rng.randbytes(58), receiver, *places, "", rng.randrange(60_000)])


def _nixl_answer(rng: random.Random) -> bytes:
    """Return an answer of the transport nixl that could be meant."""
    receiver = ["0123456789abcdef", 1, rng.randbytes(9), "1.5.1"]
    return _encode(
        rng.choice(
            (
                [3, _id(rng), receiver, rng.randbytes(8), rng.randbytes(8)],
                [4, "0123456789abcdef/1"],
                [5, rng.randrange(9), "no", rng.random() < 0.5],
            )
        )
    )


def _token(rng: random.Random) -> bytes:
    """Return one of a few tokens, so that messages meet."""
    return bytes([rng.randrange(4)]) * 16 if rng.random() < 0.8 else rng.randbytes(rng.choice((0, 15, 16, 17)))


def _claim(rng: random.Random) -> list[Any]:
    readers, budget_ms = rng.choice((0, 1, 1, 1, 2, 1025)), rng.choice((0, 1, 60_000, 2**63 - 1))
    return ["claim", _id(rng), _token(rng), readers, budget_ms]


def _claimed(rng: random.Random) -> list[Any]:
    numbers = [rng.randrange(9), rng.randbytes(16), *(rng.choice((0, 1, 2, 2**63)) for _ in range(3))]
    grant = msgspec.msgpack.encode([*numbers, _token(rng), [rng.randrange(9) for _ in range(rng.randrange(4))]])
    return ["claimed", _id(rng), grant if rng.random() < 0.8 else rng.randbytes(rng.randrange(80))]


#: What a linked peer says, its weight, and how it is made.
LINK: Final[dict[str, tuple[int, Any]]] = {
    "resolve": (24, _resolve),
    "release": (20, _release),
    "consumed": (8, _consumed),
    "resolved": (4, lambda rng: resolved(rng, _id(rng))),
    "failed": (3, lambda rng: ["failed", _id(rng), rng.choice(_NUMBERS + _LARGE), "no"]),
    "beat": (3, lambda rng: ["beat", _id(rng)]),
    "ping": (3, lambda rng: ["ping", _id(rng)]),
    "pong": (2, lambda rng: ["pong", _id(rng)]),
    "unlinkrequest": (2, lambda rng: ["unlinkrequest", _id(rng)]),
    "unlinkack": (2, lambda rng: ["unlinkack", _id(rng)]),
    "authenticate": (2, lambda rng: ["authenticate", rng.choice((_client_hello(), rng.randbytes(5), b""))]),
    "authenticated": (1, lambda rng: ["authenticated", rng.randbytes(rng.choice((0, 5, 300)))]),
    "laneslost": (2, lambda rng: ["laneslost"]),
    "unlinkcancel": (2, lambda rng: ["unlinkcancel"]),
    "locate": (6, _locate),
    "located": (2, lambda rng: located(rng, _id(rng), rng.randrange(4))),
    "claim": (
        6,
        lambda rng: [
            "claim",
            _id(rng),
            _token(rng),
            rng.choice((0, 1, 1, 1, 2, 1025)),
            rng.choice((0, 1, 60_000, 2**63 - 1)),
        ],
    ),
    "claimed": (2, _claimed),
    "claimended": (4, lambda rng: ["claimended", _token(rng), rng.random() < 0.5]),
    "claimover": (2, lambda rng: ["claimover", _id(rng), rng.choice(("revoked", "no\nway")), _id(rng)]),
    "verify": (6, _verify),
    "nixlask": (3, lambda rng: ["nixlask", _id(rng), _nixl_request(rng)]),
    "nixlsaid": (3, lambda rng: ["nixlsaid", _id(rng), _nixl_answer(rng)]),
    "verified": (2, lambda rng: ["verified", _id(rng), rng.randbytes(16 * rng.randrange(4))]),
}
#: What has its place in a handshake, and none on a link.
HANDSHAKE: Final[dict[str, tuple[int, Any]]] = {
    "hello": (8, _hello),
    "welcome": (2, _welcome),
    "refused": (1, lambda rng: ["refused", rng.choice(_NUMBERS), "no\nway"]),
    "transportchoice": (4, _transport_choice),
    "linked": (1, lambda rng: ["linked", _id(rng), _proof(rng)]),
}
#: The same where both ends are authenticated: each gives its half of the lanes' secret.
SEALED_HANDSHAKE: Final[dict[str, tuple[int, Any]]] = HANDSHAKE | {
    "hello": (8, lambda rng: _sharing(_hello(rng), rng)),
    "welcome": (2, lambda rng: _sharing(_welcome(rng), rng)),
}


def _sharing(fields: list[Any], rng: random.Random) -> list[Any]:
    if rng.random() < 0.9:
        fields[_SHARE] = rng.randbytes(32)
    return fields


class Forge:
    """Makes payloads and frames from a seed, and remembers some of them to say them again.

    Args:
        seed: Everything follows from it.
        messages: What to make, as :data:`LINK`.
        wrong: Which part of the payloads is broken; fields are wild in as many again.
    """

    def __init__(self, seed: int, messages: dict[str, tuple[int, Any]], wrong: float = 0.3) -> None:
        self.rng = random.Random(seed)
        self._makers = [make for _, make in messages.values()]
        self._weights = [weight for weight, _ in messages.values()]
        self._wrong = wrong
        self._said: deque[bytes] = deque(maxlen=64)

    def payload(self) -> bytes:
        """Return the payload of a frame."""
        rng = self.rng
        if self._said and rng.random() < 0.1:
            return rng.choice(self._said)
        fields = rng.choices(self._makers, self._weights)[0](rng)
        if rng.random() < self._wrong:
            self._spoil(fields)
        data = _encode(fields)
        if rng.random() < self._wrong:
            data = mutated(data, rng)
        self._said.append(data)
        return data

    def frame(self) -> bytes:
        """Return a frame; a small part of the headers lies."""
        data = self.payload()
        length = len(data)
        if self.rng.random() < self._wrong / 100:
            length = self.rng.choice((0, length + 1, max(length - 1, 0), FRAME_LIMIT, FRAME_LIMIT + 1, 2**32 - 1))
        return FRAME_HEADER.pack(length) + data

    def _spoil(self, fields: list[Any]) -> None:
        SPOILS[self.rng.choice(_SPOILS)](fields, self.rng)


def _extend(fields: list[Any], rng: random.Random) -> None:
    fields.append(wild(rng))


def _shorten(fields: list[Any], rng: random.Random) -> None:
    if len(fields) > 1:
        fields.pop()


def _rename(fields: list[Any], rng: random.Random) -> None:
    fields[0] = rng.choice(("hello", "beat", "resolved", "nothing", "", 7, None))


def _replace(fields: list[Any], rng: random.Random) -> None:
    fields[rng.randrange(len(fields))] = wild(rng)


#: What can happen to the fields of a message; most often one becomes wild.
SPOILS: Final = {"extend": _extend, "shorten": _shorten, "rename": _rename, "replace": _replace}
_SPOILS: Final = ("extend", "shorten", "rename", *("replace",) * 5)
