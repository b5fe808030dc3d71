"""TLS sessions without a socket, and ends of a link that authenticate each other again, also through others."""

import random
import ssl
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from faults.sealing import ALERT, TLS_RECORDS, RecordWriter, logged_secret
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.liveness import Heartbeat
from llm_datadist._links.messages import Authenticate, Authenticated
from llm_datadist._links.renewal import Renewal
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES, Context, TlsSession
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed
from tests.support.authority import secret_file

CLOSE_NOTIFY = b"\1\0"


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))


def shaken(credentials: Credentials, change: Callable[[bytes], bytes] = bytes) -> tuple[TlsSession, TlsSession]:
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
        encrypted = b"".join(map(one.encrypt, said))
        assert b"".join(said)[:50] not in encrypted
        parts = [encrypted[at : at + 1000] for at in range(0, len(encrypted), 1000)]
        assert b"".join(map(other.decrypt, parts)) == b"".join(said)


def test_after_tampering_nothing_is_sealed_and_what_comes_back_is_not_believed(credentials: Credentials) -> None:
    ours, theirs = shaken(credentials)
    sealed = ours.encrypt(b"an order")
    with pytest.raises(AuthFailed):
        theirs.decrypt(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    with pytest.raises(AuthFailed):
        theirs.encrypt(b"an answer, of another thread")
    with pytest.raises(AuthFailed):
        ours.decrypt(ours.encrypt(b"an order"))


HARM: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "one bit is flipped": lambda said: [said[0], said[1][:-20] + bytes([said[1][-20] ^ 1]) + said[1][-19:]],
    "one is missing": lambda said: [said[0], said[2]],
    "one comes twice": lambda said: [said[0], said[0]],
    "two change places": lambda said: [said[1], said[0]],
    "one is a byte shorter": lambda said: [TLS_RECORDS.shortened(said[0])],
}


@pytest.mark.parametrize("harm", [*HARM, "the other end's own comes back"])
def test_records_that_are_not_as_they_were_sent_end_the_session(credentials: Credentials, harm: str) -> None:
    ours, theirs = shaken(credentials)
    said = [ours.encrypt(bytes([number]) * 100) for number in range(3)]
    came, taken = HARM[harm](said) if harm in HARM else [theirs.encrypt(b"x")], list[bytes]()
    with pytest.raises(AuthFailed):
        taken.extend(map(theirs.decrypt, came))
    assert taken in ([], [bytes(100)])


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[RecordWriter, TlsSession]:
    """Return what writes any record in the session of an authenticated peer, and the other end of that session."""
    log = tmp_path / "keys"

    def logging(protocol: int) -> Context:
        context = Context(protocol)
        context.keylog_filename = str(log)
        return context

    monkeypatch.setattr("llm_datadist._links.credentials.Context", logging)
    _, theirs = shaken(Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a"))))
    return RecordWriter(logged_secret(log, "CLIENT_TRAFFIC_SECRET_0")), theirs


def test_a_peer_that_ends_its_session_and_goes_on_fills_no_memory(odd: tuple[RecordWriter, TlsSession]) -> None:
    writer, theirs = odd
    assert theirs.decrypt(writer.record(b"before")) == b"before"
    with pytest.raises(AuthFailed, match="ended the session"):
        theirs.decrypt(writer.record(CLOSE_NOTIFY, ALERT))
    with pytest.raises(AuthFailed, match="ended the session"):
        theirs.decrypt(writer.record(b"behind it"))


def test_a_peer_may_change_its_key_and_ask_for_another_but_not_without_end(
    odd: tuple[RecordWriter, TlsSession],
) -> None:
    writer, theirs = odd
    for number in range(100):
        assert theirs.decrypt(writer.update(asks=1) + writer.record(b"%d" % number)) == b"%d" % number
        theirs.encrypt(b"an answer")
    with pytest.raises(AuthFailed, match="new keys without end"):
        theirs.decrypt(b"".join(writer.update(asks=1) for _ in range(100)))


def test_a_recorded_session_cannot_be_played_again(credentials: Credentials) -> None:
    recorded: list[bytes] = []

    def record(flight: bytes) -> bytes:
        recorded.append(flight)
        return flight

    ours, _ = shaken(credentials, record)
    again = credentials.session(server_side=True)
    again.shake(recorded[0])
    with pytest.raises(AuthFailed):
        again.shake(recorded[2] + ours.encrypt(b"an order"))
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

    with suppress(AuthFailed):  # else an end waits for the rest of a record
        flight = ours.shake()
        for _ in range(4):
            flight = ours.shake(flip(theirs.shake(flip(flight))))
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
        end.shake(TlsSession(context, server_side=False).shake())
    assert end.alert()


# Renewal

SECRET, OTHER = b"s" * 32, b"o" * 32


def of_link(
    credentials: Credentials,
    *,
    dialled: bool,
    secret: bytes = SECRET,
    check: Callable[[TlsSession], None] = lambda _: None,
) -> Renewal:
    renewal = Renewal(credentials.session, check, secret, dialled=dialled)
    renewal.last = 0.0
    return renewal


def talk(ours: Renewal, theirs: Renewal) -> None:
    """Let ours ask, and carry all messages to the end."""
    question: Authenticate | None = ours.ask(1.0)
    while question is not None:
        question = ours.take(theirs.answer(question))


def test_both_ends_may_ask_at_once_again_and_again(credentials: Credentials) -> None:
    ours, theirs = of_link(credentials, dialled=True), of_link(credentials, dialled=False)
    for _ in range(2):
        ours.last = theirs.last = 0.0
        mine, other = ours.ask(1.0), theirs.ask(1.0)
        to_me, to_other = theirs.answer(mine), ours.answer(other)
        for asking, asked, reply in ((ours, theirs, to_me), (theirs, ours, to_other)):
            question = asking.take(reply)
            assert question is not None
            asking.last = asked.last = 0.0
            assert asking.take(asked.answer(question)) is None
            assert min(asking.last, asked.last) > 0
        assert ours.asked is theirs.asked is None


def test_an_end_without_the_credentials_of_now_is_not_believed(credentials: Credentials, tmp_path: Path) -> None:
    secret_file(tmp_path / "old", a=OTHER)
    old = Credentials(CredentialFiles(secrets=tmp_path / "old"))
    for ours, theirs in ((credentials, old), (old, credentials)):
        with pytest.raises(AuthFailed, match="the secrets of the two sides differ"):
            talk(of_link(ours, dialled=True), of_link(theirs, dialled=False))


def test_a_handshake_with_another_process_or_with_itself_is_none_of_this_link(credentials: Credentials) -> None:
    """A peer whose credentials are gone passes our messages on to a process that has some, or asks us with our own."""
    ours, elsewhere = of_link(credentials, dialled=True), of_link(credentials, dialled=False, secret=OTHER)
    for theirs in (elsewhere, ours):
        with pytest.raises(AuthFailed, match="the renewal proof belongs to another link or side"):
            talk(ours, theirs)
        assert ours.last == elsewhere.last == 0.0


@pytest.mark.parametrize("asked", [True, False])
def test_the_other_end_must_be_the_cluster_of_this_link(credentials: Credentials, asked: bool) -> None:
    def no(_: TlsSession) -> None:
        raise AuthFailed("another cluster")

    ours, theirs = of_link(credentials, dialled=True, check=no), of_link(credentials, dialled=False)
    with pytest.raises(AuthFailed, match="another cluster"):
        talk(*((theirs, ours) if asked else (ours, theirs)))
    assert ours.last == 0.0


def test_words_that_are_no_handshake(credentials: Credentials) -> None:
    ours = of_link(credentials, dialled=True)
    with pytest.raises(AuthFailed, match="what was not asked"):
        ours.take(Authenticated(b""))
    with pytest.raises(AuthFailed):
        ours.answer(Authenticate(b"GET / HTTP/1.1\r\n\r\n"))
    ours.ask(1.0)
    with pytest.raises(AuthFailed):
        ours.take(Authenticated(b"HTTP/1.1 400 Bad Request\r\n\r\n"))


def test_a_peer_is_asked_once_and_lost_if_it_does_not_answer(credentials: Credentials) -> None:
    lost: list[str] = []
    beat = Heartbeat(Mock(), list, lambda _, why, kind: lost.append(f"{kind}: {why}"), 5.0, 60.0, lambda _: None)
    link, renewal = Mock(), of_link(credentials, dialled=True)
    renewal.last = 1000.0
    for now, asked in ((1059.9, 0), (1060.0, 1), (1061.0, 1), (1065.0, 1)):
        beat.renew(link, renewal, 60.0, now)
        assert link.send.call_count == asked
    assert isinstance(link.send.call_args[0][0], Authenticate)
    assert not lost
    beat.renew(link, renewal, 60.0, 1065.1)
    assert lost == ["unauthenticated: not authenticated again within 5.0 s"]
