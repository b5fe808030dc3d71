"""The store's namespaces, messages and hits: what tells them apart, and what is refused."""

import itertools
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from llm_datadist.errors import CacheMismatch, ParamError
from llm_datadist.store import Hit, StoreOptions, namespace
from llm_datadist.store.messages import FORMAT, NOTHING, BlockShape, Found, Lookup, Run, Save, decode
from llm_datadist.types.grant import Grant

pytestmark = pytest.mark.covers("store.*")

WHOLE: Final[dict[str, Any]] = {
    "fingerprint": b"model",
    "tp_size": 2,
    "tp_rank": 0,
    "hash_algorithm": "sha256_cbor",
    "hash_seed": "0",
    "salt": "",
}
OTHERS: Final[dict[str, Any]] = {
    "fingerprint": b"model2",
    "tp_size": 3,
    "tp_rank": 1,
    "hash_algorithm": "sha256",
    "hash_seed": "1",
    "salt": "tenant",
}


def test_every_field_of_an_identity_tells_namespaces_apart() -> None:
    names = {
        namespace(**WHOLE | {name: OTHERS[name] for name in some})
        for n in range(7)
        for some in itertools.combinations(WHOLE, n)
    }
    assert len(names) == 2**6
    assert {len(name) for name in names} == {32}
    moved = [WHOLE | {"hash_seed": "0a", "salt": "b"}, WHOLE | {"hash_seed": "0", "salt": "ab"}]
    assert len({namespace(**each) for each in moved}) == 2, "parts do not run into each other"


def test_an_identity_without_one_of_its_fields_is_refused() -> None:
    for name in WHOLE:
        with pytest.raises(TypeError, match=name):
            namespace(**{key: value for key, value in WHOLE.items() if key != name})
        for wrong in (None, 1.5):
            with pytest.raises(TypeError, match=name):
                namespace(**WHOLE | {name: wrong})
    refused = {"fingerprint": b"", "tp_size": 0, "tp_rank": 2, "hash_algorithm": "", "hash_seed": ""}
    for name, value in refused.items():
        with pytest.raises(ParamError, match=name):
            namespace(**WHOLE | {name: value})
    with pytest.raises(TypeError):
        namespace(b"model", 1, 0, "a", "b", "c")  # type: ignore[call-arg]


def grant() -> Grant:
    return Grant(7, b"i" * 16, 3, (4, 5), b"t" * 16, [1, 2])


def whole() -> Hit:
    slots, digests = np.array([2, 1], "<i8").tobytes(), np.arange(4, dtype="<u8").tobytes()
    found = Found(3, (4, 5), slots, digests, b"k" * 16, BlockShape(2, 1, [4, 8]), (7, b"i" * 16, b"t" * 16))
    return Hit(b"n" * 32, [found], held=True)


def test_a_hit_survives_the_way_to_another_process_and_is_released_by_one() -> None:
    hit = whole()
    copy = Hit.from_bytes(hit.to_bytes())
    assert (len(copy), copy.grants, copy.counts, copy.namespace, copy.nonce, copy.shape) == (
        2,
        (grant(),),
        (2,),
        b"n" * 32,
        b"k" * 16,
        hit.shape,
    )
    np.testing.assert_array_equal(copy.slots, [2, 1])
    np.testing.assert_array_equal(copy.digests, [[0, 1], [2, 3]])
    assert [hit.take(), hit.take(), copy.take()] == [True, False, False]
    assert len(Hit.from_bytes(Hit(b"n" * 32).to_bytes())) == 0
    data = hit.to_bytes()
    for wrong in (b"", b"\2" + data[1:], data[:-1], data + b"\0"):
        with pytest.raises(ParamError, match="data"):
            Hit.from_bytes(wrong)
    incomplete: tuple[dict[str, Any], ...] = (
        {"slots": b"1234567"},
        {"slots": b"12345678"},
        {"slots": b"12345678", "digests": bytes(16)},
        {"owner": (7, b"i" * 16, b"t" * 16)},
    )
    for parts in incomplete:
        with pytest.raises(ParamError, match="hit:"):
            Hit(b"n" * 32, [msgspec.structs.replace(NOTHING, **parts)])


def test_a_body_of_another_format_is_named_and_a_broken_one_refused() -> None:
    body = Lookup([b"n" * 32], [b"key"], [b"t" * 16]).encode()
    assert decode(Lookup, body, "x") == Lookup([b"n" * 32], [b"key"], [b"t" * 16])
    for wrong in (b"", bytes([FORMAT + 1]) + body[1:]):
        with pytest.raises(CacheMismatch, match="x: format"):
            decode(Lookup, wrong, "x")
    for kind, data in ((Lookup, body[:-1]), (Run, body), (Save, body)):
        with pytest.raises(ParamError, match=f"x: not a body of kind {kind.__name__}"):
            decode(kind, data, "x")
    long = Lookup([b"n" * 32], [b"k" * 65], [b"t" * 16]).encode()
    with pytest.raises(ParamError):
        decode(Lookup, long, "x")
    assert msgspec.msgpack.decode(body[1:]) == [[b"n" * 32], [b"key"], [b"t" * 16]]


def test_options_of_a_client_are_checked() -> None:
    given = StoreOptions()
    assert (given.lookup_ms, given.pause_seconds, given.verify) == (250, 1.0, True)
    wrong: dict[str, Any] = {"store_id": -1, "lookup_ms": 0, "save_ms": 2**31, "pause_seconds": -1, "label": "m" * 129}
    for name, value in wrong.items():
        with pytest.raises(ParamError, match=name):
            StoreOptions(**{name: value})
    for name in (*wrong, "verify"):
        bad: dict[str, Any] = {name: b"1"}
        with pytest.raises(TypeError, match=name):
            StoreOptions(**bad)
