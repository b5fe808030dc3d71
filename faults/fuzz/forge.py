"""Wrong frames from right ones: what the targets are fed with.

All of it follows from a seed. A frame begins as a message that could be meant, made from the types of its fields and
from what :data:`FIELDS` knows of their meaning; then a field or two become wild, then some bytes change. So most of
them reach deep into the code, and none of the ways to be wrong is left out: random, truncated, oversized, out of order,
repeated.
"""

import copy
import random
import ssl
import struct
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any, Final, get_args

import msgspec
from msgspec.inspect import BoolType, BytesType, IntType, StrType, UnionType, type_info

from llm_datadist._links import messages
from llm_datadist._links.messages import FRAME_HEADER, FRAME_LIMIT
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._links.versions import FEATURES, VERSIONS
from llm_datadist.types.grant import GRANT_VERSION

_encode: Final = msgspec.msgpack.Encoder().encode
_NUMBERS: Final[list[Any]] = [0, 1, 2, 3, 5, 7, *(2**bits + off for bits in (6, 8, 12, 16, 31, 32) for off in (-1, 0))]
_LARGE: Final[list[Any]] = [2**48, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1, -1, -2, -(2**31), -(2**63)]
_TEXTS: Final[list[Any]] = [
    *"\0x",
    "",
    "hello",
    "resolve",
    "a\nb\r\x1b[31m",
    "\ud7ff",
    "é" * 200,
    "x" * 4096,
    "x" * 4097,
]
_LENGTHS: Final = (17, 64, 65, 5000)
_BYTES: Final[list[Any]] = [b"", b"\0", b"\xff" * 15, b"t" * 16, bytes(range(256)), *map(bytes, _LENGTHS)]
_NESTED: Final[list[Any]] = [[], {}, [[]], {"a": 1}, [None] * 3, [[[[[[]]]]]]]
_ODD: Final[list[Any]] = [None, True, False, 0.0, -1.5, 1e308, float("inf"), *_NESTED]


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


# --- messages that could be meant -------------------------------------------------------------------------------------


def _id(rng: random.Random) -> int:
    return rng.randrange(1, 64) if rng.random() < 0.9 else rng.choice(_LARGE)


def _one_of(*values: Any) -> Callable[[random.Random], Any]:
    return lambda rng: rng.choice(values)


def _below(stop: int, start: int = 0) -> Callable[[random.Random], int]:
    return lambda rng: rng.randrange(start, stop)


def _member(rng: random.Random) -> int:
    return 100 + rng.randrange(50)


def _key(rng: random.Random) -> Any:
    if rng.random() < 0.3:
        return None
    return [rng.randrange(4), rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 2**64 - 1)), rng.randrange(3)]


def _communicator(rng: random.Random) -> list[Any] | None:
    if rng.random() < 0.7:
        return None
    members = [[1, 0], [_member(rng), 1]][: rng.choice((0, 1, 2, 2, 2))]
    return [rng.choice(("link", "link", "", "x" * 128, "a\nb")), members, bytes(16), rng.randbytes(16)]


@cache
def _client_hello() -> bytes:
    """Return the beginning of a handshake that could be meant; another one in each run."""
    return TlsSession(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), server_side=False).shake()


def _guards(rng: random.Random) -> list[Any]:
    return [[rng.choice((0, 1, 1, 2, 2, 3, 7)), rng.choice((0, 1, 1, 1, 2, 3))] for _ in range(rng.choice((1, 1, 2)))]


def _runs(rng: random.Random) -> bytes:
    spans = [(rng.randrange(8) * 48, 48 * rng.randrange(1, 3)) for _ in range(rng.randrange(4))]
    return b"".join(struct.pack("<QQ", *span) for span in spans)


def _addresses(rng: random.Random) -> bytes:
    count = rng.choice((1, 2, 2, 8, 4096, 4097))
    near = [rng.choice((0, 1, 2**12, 2**47, 2**64 - 1, rng.randrange(2**48))) for _ in range(min(count, 8))]
    return struct.pack(f"<{len(near)}Q", *near) + rng.randbytes(8 * (count - len(near)))


def located(rng: random.Random, number: int, count: int = 2) -> list[Any]:
    """Return an answer to request ``number``, about ``count`` addresses, that could be meant."""
    ids = struct.pack(f"<{count}Q", *(rng.randrange(9) for _ in range(count)))
    tensors = struct.pack(f"<{count}I", *(rng.randrange(5) for _ in range(count)))
    offsets = struct.pack(f"<{count}Q", *(rng.choice((0, 48, 2**40, 2**63, 2**64 - 1)) for _ in range(count)))
    return ["located", number, ids, tensors, offsets, rng.random() < 0.5]


def resolved(rng: random.Random, number: int, tensors: int = 4) -> list[Any]:
    """Return an answer to request ``number`` that could be meant."""
    regions = b"".join(rng.choice((1, 1, 1, 2, 0, 3)).to_bytes(4, "little") for _ in range(tensors))
    if rng.random() < 0.8:
        regions = regions[:4] * tensors
    offsets = b"".join((rng.randrange(1 << 10) << 12).to_bytes(8, "little") for _ in range(tensors))
    guards = _guards(rng) if rng.random() < 0.9 else []
    said = rng.choice((4, 4, 4, 1, 8)) if rng.random() < 0.3 else tensors
    shape = [rng.randrange(2), said, 8, 48, 384, [8, 48], 3, 1]
    return ["resolved", number, rng.randrange(9), shape, rng.randrange(8), regions, offsets, guards, rng.randrange(3)]


def _nixl_request(rng: random.Random) -> bytes:
    if rng.random() < 0.3:
        return _encode([2, _id(rng), rng.random() < 0.8])
    receiver = rng.choice((None, ["0123456789abcdef", 1, rng.randbytes(9), "1.5.1"]))
    places = [rng.randbytes(8 * rng.randrange(3)) for _ in range(2)]
    write, direct = rng.random() < 0.5, rng.random() < 0.5
    return _encode([1, _id(rng), write, direct, rng.randbytes(58), receiver, *places, "", rng.randrange(60_000)])


def _nixl_answer(rng: random.Random) -> bytes:
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


def _grant(rng: random.Random) -> bytes:
    numbers = [rng.randrange(9), rng.randbytes(16), *(rng.choice((0, 1, 2, 2**63)) for _ in range(3))]
    grant = msgspec.msgpack.encode([*numbers, _token(rng), [rng.randrange(9) for _ in range(rng.randrange(4))]])
    version = GRANT_VERSION if rng.random() < 0.9 else rng.randrange(256)
    return bytes([version]) + grant if rng.random() < 0.8 else rng.randbytes(rng.randrange(80))


def _offers(rng: random.Random) -> dict[str, bytes]:
    """Return what transports offer: a cookie and where the rendezvous is, the token of lanes, a fabric; or nonsense."""
    name = rng.choice(
        (b"@llm-datadist-none", b"/tmp/llm-datadist-none.sock", b"@x", b"", b"\0", b"/etc/passwd", b"\xff")
    )
    offers = {"shm": rng.randbytes(16) + name, "tcp": rng.randbytes(16), "nixl": rng.choice((b"", b"tcp", b"rdma"))}
    if rng.random() < 0.2:
        offers[rng.choice(("shm", "tcp", "nixl", "cma", "x" * 64))] = rng.randbytes(rng.choice((0, 1, 16, 300)))
    if rng.random() < 0.1:
        del offers[rng.choice(("shm", "tcp", "nixl"))]
    return offers


#: How a field is made whose type does not say enough, by its name, or by that of its message too.
FIELDS: Final[dict[str, Callable[[random.Random], Any]]] = {
    "versions": _one_of(VERSIONS, VERSIONS, VERSIONS, (VERSIONS[0], VERSIONS[1] + 1), (0, 1), (2**32 - 1, 0)),
    "features": _one_of(FEATURES, FEATURES, [], [*FEATURES, "unknown"], ["x" * 64] * 64),
    "cluster_id": _member,
    "welcome.cluster_id": _one_of(1),
    "transport": _one_of(None, None, "shm", "rdma"),
    "welcome.transport": _one_of(None, "tcp", "x\ny"),
    "transportchoice.transport": _one_of("inproc", "shm", "cma", "tcp", "x\ny"),
    "hello.share": lambda rng: rng.choice((b"", b"", b"", rng.randbytes(9))),
    "welcome.share": lambda rng: rng.choice((b"", b"", b"", rng.randbytes(9))),
    "offers": _offers,
    "wanted": lambda rng: rng.choice((None, None, 1, rng.randrange(9))),
    "reconnects": lambda rng: rng.random() < 0.2,
    "communicator": _communicator,
    "code": _one_of(*_NUMBERS),
    "failed.code": _one_of(*_NUMBERS, *_LARGE),
    "sequence": _below(1 << 40, 1),
    "linked.sequence": _id,
    "present": lambda rng: rng.random() < 0.15,
    "authenticate.data": lambda rng: rng.choice((_client_hello(), rng.randbytes(5), b"")),
    "authenticated.data": lambda rng: rng.randbytes(rng.choice((0, 5, 300))),
    "push": lambda rng: rng.random() < 0.2,
    "key": _key,
    "cache_id": _below(12, -1),
    "row": _below(10),
    "budget_ms": _below(60_000),
    "pin": lambda rng: rng.randrange(1 << rng.randrange(1, 20)),
    "first": _below(5),
    "count": _below(6),
    "addresses": _addresses,
    "verify.cache_id": _below(9, 1),
    "verify.pin": lambda rng: rng.choice((0, 0, 0, rng.randrange(1 << 12))),
    "guards": _guards,
    "extent": _one_of(384, 384, 384, 48, 0),
    "verify.first": _below(4),
    "verify.count": _below(5, 1),
    "runs": _runs,
    "nixlask.data": _nixl_request,
    "nixlsaid.data": _nixl_answer,
    "claim.token": _token,
    "claimended.token": _token,
    "readers": _one_of(0, 1, 1, 1, 2, 1025),
    "name": _one_of("echo", "echo", "", "x" * 64, "x" * 65),
    "claim.budget_ms": _one_of(0, 1, 60_000, 2**63 - 1),
    "grant": _grant,
}


def _of_type(rng: random.Random, type_: Any) -> Any:
    """Return a value of a field of which only the type is known."""
    match type_info(type_):
        case BoolType():
            return rng.random() < 0.5
        case IntType():
            return _id(rng)
        case StrType():
            return rng.choice(("because", "no\nway", ""))
        case BytesType(min_length=16, max_length=16):
            return rng.randbytes(16)
        case BytesType(max_length=32):
            return rng.choice((b"", rng.randbytes(32)))
        case BytesType():
            return rng.randbytes(16 * rng.randrange(4))
        case UnionType():
            return None
    raise TypeError(f"nothing is known of {type_}")


_TYPES: Final = {
    str(kind.__struct_config__.tag): msgspec.structs.fields(kind) for kind in get_args(messages.AnyMessage)
}


def _message(rng: random.Random, name: str, *, sealed: bool) -> list[Any]:
    """Return the fields of a message that could be meant. ``sealed``: each end gives its half of the lanes' secret."""
    if name in ("resolved", "grantedonly"):
        return [name, *resolved(rng, _id(rng))[1:]]
    if name == "located":
        return located(rng, _id(rng), rng.randrange(4))
    said: list[Any] = [name]
    for field in _TYPES[name]:
        make = FIELDS.get(f"{name}.{field.name}") or FIELDS.get(field.name)
        if sealed and field.name == "share" and name in ("hello", "welcome") and rng.random() < 0.9:
            said.append(rng.randbytes(32))
        else:
            said.append(make(rng) if make else _of_type(rng, field.type))
    return said


_WEIGHTS: Final = {
    22: "resolve",
    20: "release",
    8: "consumed",
    6: "locate claim verify",
    4: "resolved claimended",
    3: "failed beat ping nixlask nixlsaid",
    2: "pong unlinkrequest unlinkack unlinkcancel authenticate laneslost located claimed claimover verified",
    1: "authenticated question answer grantedonly",
}
#: What a linked peer says, and how often.
LINK: Final = {name: weight for weight, names in _WEIGHTS.items() for name in names.split()}
#: What has its place in a handshake, and none on a link.
HANDSHAKE: Final = {"hello": 8, "welcome": 2, "refused": 1, "transportchoice": 4, "linked": 1}


class Forge:
    """Makes payloads and frames from a seed, and remembers some of them to say them again.

    ``wrong`` is the part of the payloads that is broken; fields are wild in as many again. ``sealed``: greetings are
    those of ends that are authenticated.
    """

    def __init__(self, seed: int, weights: dict[str, int], wrong: float = 0.3, *, sealed: bool = False) -> None:
        self.rng = random.Random(seed)
        self._names, self._weights = list(weights), list(weights.values())
        self._wrong, self._sealed = wrong, sealed
        self._said: deque[bytes] = deque(maxlen=64)

    def payload(self) -> bytes:
        rng = self.rng
        if self._said and rng.random() < 0.1:
            return rng.choice(self._said)
        fields = _message(rng, rng.choices(self._names, self._weights)[0], sealed=self._sealed)
        if rng.random() < self._wrong:
            SPOILS[rng.choice(_SPOILS)](fields, rng)
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
