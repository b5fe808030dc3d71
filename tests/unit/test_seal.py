"""One TLS session without a socket: what is changed on its way never comes out as something else."""

from __future__ import annotations

import random
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from faults.sealing import ALERT, RecordWriter, logged_secret
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.seal import MAX_HANDSHAKE_BYTES, Context, Seal
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TRIALS = 200
CLOSE_NOTIFY = b"\1\0"


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))


def shaken(credentials: Credentials, change: Callable[[bytes], bytes] = bytes) -> tuple[Seal, Seal]:
    """Return both ends after their handshake, in which the bytes of both were changed."""
    ours, theirs = (credentials.session(server_side=side) for side in (False, True))
    flight = ours.shake()
    while not theirs.authenticated:
        flight = ours.shake(change(theirs.shake(change(flight))))
    return ours, theirs


def test_both_ends_are_authenticated_and_bytes_come_out_as_they_went_in(credentials: Credentials) -> None:
    ours, theirs = shaken(credentials)
    said = [random.Random(n).randbytes(n) for n in (1, 100, 16_384, 16_385, 1 << 20)]
    for one, other in ((ours, theirs), (theirs, ours)):
        sealed = b"".join(map(one.seal, said))
        assert b"".join(said)[:50] not in sealed
        parts = [sealed[at : at + 1000] for at in range(0, len(sealed), 1000)]
        assert b"".join(map(other.open, parts)) == b"".join(said)


def _changed(records: list[bytes], rng: random.Random) -> tuple[str, bytes]:
    """Return records of which one was changed, left out, repeated or moved."""
    kind, at = rng.choice(("flip", "drop", "repeat", "swap", "cut", "insert")), rng.randrange(len(records) - 1)
    records = list(records)
    if kind == "flip":
        place = rng.randrange(len(records[at]))
        record = bytearray(records[at])
        record[place] ^= 1 << rng.randrange(8)
        records[at] = bytes(record)
    elif kind == "drop":
        del records[at]
    elif kind == "repeat":
        records.insert(at, records[at])
    elif kind == "swap":
        records[at], records[at + 1] = records[at + 1], records[at]
    elif kind == "cut":
        records[at] = records[at][: rng.randrange(1, len(records[at]))]
    else:
        records.insert(at, rng.randbytes(rng.randrange(1, 60)))
    return kind, b"".join(records)


def test_what_is_tampered_with_never_comes_out(credentials: Credentials) -> None:
    found: dict[str, int] = {}
    for seed in range(TRIALS):
        rng = random.Random(seed)
        ours, theirs = shaken(credentials)
        said = [rng.randbytes(rng.randrange(1, 200)) for _ in range(rng.randrange(2, 6))]
        kind, bytes_on_wire = _changed([ours.seal(each) for each in said], rng)
        came, failed = b"", False
        try:
            for at in range(0, len(bytes_on_wire), step := rng.randrange(1, 300)):
                came += theirs.open(bytes_on_wire[at : at + step])
        except AuthFailed:
            failed = True
        assert b"".join(said).startswith(came), f"seed {seed}, {kind}"
        assert failed or len(came) < len(b"".join(said)), f"seed {seed}, {kind}: nothing was lost"
        found[kind] = found.get(kind, 0) + failed
    assert min(found.values()) > 0, found


def test_after_tampering_nothing_more_is_sealed_and_what_an_end_has_sent_is_not_believed_when_it_comes_back(
    credentials: Credentials,
) -> None:
    ours, theirs = shaken(credentials)
    with pytest.raises(AuthFailed):
        theirs.open(ours.seal(b"an order")[:-1] + b"\0")
    with pytest.raises(AuthFailed):
        theirs.seal(b"an answer, of another thread")
    with pytest.raises(AuthFailed):
        ours.open(ours.seal(b"an order"))


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordWriter, Seal]:
    """Return what writes any record in the session of an authenticated peer, and the other end of that session."""
    log = tmp_path / "keys"

    def logging(protocol: int) -> Context:
        context = Context(protocol)
        context.keylog_filename = str(log)
        return context

    monkeypatch.setattr("llm_datadist._links.credentials.Context", logging)
    _, theirs = shaken(Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a"))))
    return RecordWriter(logged_secret(log, "CLIENT_TRAFFIC_SECRET_0")), theirs


def test_a_peer_that_ends_its_session_and_goes_on_fills_no_memory(odd: tuple[RecordWriter, Seal]) -> None:
    writer, theirs = odd
    assert theirs.open(writer.record(b"before")) == b"before"
    with pytest.raises(AuthFailed, match="ended the session"):
        theirs.open(writer.record(CLOSE_NOTIFY, ALERT))
    with pytest.raises(AuthFailed, match="ended the session"):
        theirs.open(writer.record(b"behind it"))


def test_a_peer_may_change_its_key_and_ask_for_another_but_not_without_end(odd: tuple[RecordWriter, Seal]) -> None:
    writer, theirs = odd
    for number in range(100):
        assert theirs.open(writer.update(asks=1) + writer.record(b"%d" % number)) == b"%d" % number
        theirs.seal(b"an answer")
    with pytest.raises(AuthFailed, match="new keys without end"):
        theirs.open(b"".join(writer.update(asks=1) for _ in range(100)))


def test_a_recorded_session_cannot_be_played_again(credentials: Credentials) -> None:
    recorded: list[bytes] = []

    def record(flight: bytes) -> bytes:
        recorded.append(flight)
        return flight

    ours, _ = shaken(credentials, record)
    again = credentials.session(server_side=True)
    again.shake(recorded[0])
    with pytest.raises(AuthFailed):
        again.shake(recorded[2] + ours.seal(b"an order"))
    assert not again.authenticated


@pytest.mark.parametrize("seed", range(30))
def test_a_listener_believes_no_end_of_a_handshake_that_was_tampered_with(credentials: Credentials, seed: int) -> None:
    rng = random.Random(seed)
    victim = rng.randrange(3)
    flights = iter(range(10))

    def flip(flight: bytes) -> bytes:
        if next(flights) != victim or not flight:
            return flight
        changed = bytearray(flight)
        changed[rng.randrange(5, len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)

    ours, theirs = (credentials.session(server_side=side) for side in (False, True))

    def talk() -> None:
        flight = ours.shake()
        for _ in range(4):
            flight = ours.shake(flip(theirs.shake(flip(flight))))

    with suppress(AuthFailed):  # else an end waits for the rest of a record
        talk()
    assert not theirs.authenticated


def test_a_stranger_may_not_send_more_than_a_handshake_nor_an_older_tls(credentials: Credentials) -> None:
    end = credentials.session(server_side=True)
    end.shake(b"\x16\x03\x01\x40\x00" + bytes(MAX_HANDSHAKE_BYTES - 5))
    with pytest.raises(AuthFailed, match=f"more than {MAX_HANDSHAKE_BYTES} bytes"):
        end.shake(b"\x00")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    end = credentials.session(server_side=True)
    with pytest.raises(AuthFailed, match="unsupported protocol"):
        end.shake(Seal(context, server_side=False).shake())
    assert end.alert()
