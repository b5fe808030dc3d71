"""Two ends of a link authenticate each other again, without a socket, and others that pass handshakes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.liveness import Heartbeat
from llm_datadist._links.messages import Authenticate, Authenticated, Beat
from llm_datadist._links.renewal import Renewal
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed
from tests.support.authority import secret_file

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llm_datadist._links.loop import ControlLoop
    from llm_datadist._links.seal import Seal

SECRET, OTHER = b"s" * 32, b"o" * 32


@pytest.fixture
def credentials(tmp_path: Path) -> Credentials:
    return Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))


def of_link(
    credentials: Credentials, *, dialled: bool, secret: bytes = SECRET, check: Callable[[Seal], None] = lambda _: None
) -> Renewal:
    renewal = Renewal(credentials.session, check, secret, dialled=dialled)
    renewal.last = 0.0
    return renewal


def talk(ours: Renewal, theirs: Renewal) -> None:
    """Let ours ask, and carry all messages to the end."""
    question: Authenticate | None = ours.ask(1.0)
    while question is not None:
        question = ours.take(theirs.answer(question))


@pytest.mark.parametrize("dialled", [True, False], ids=["the initiator asks", "the target asks"])
def test_both_ends_are_authenticated_whichever_asks(credentials: Credentials, dialled: bool) -> None:
    ours, theirs = of_link(credentials, dialled=dialled), of_link(credentials, dialled=not dialled)
    for _ in range(2):
        ours.last = theirs.last = 0.0
        talk(ours, theirs)
        assert ours.last > 0
        assert theirs.last > 0
        assert ours.asked is None


def test_both_ends_may_ask_at_once(credentials: Credentials) -> None:
    ours, theirs = of_link(credentials, dialled=True), of_link(credentials, dialled=False)
    mine, other = ours.ask(1.0), theirs.ask(1.0)
    to_me, to_other = theirs.answer(mine), ours.answer(other)
    for asking, asked, reply in ((ours, theirs, to_me), (theirs, ours, to_other)):
        question = asking.take(reply)
        assert question is not None
        assert asking.take(asked.answer(question)) is None
    assert ours.asked is theirs.asked is None


def test_an_end_without_the_credentials_of_now_is_not_believed(credentials: Credentials, tmp_path: Path) -> None:
    secret_file(tmp_path / "old", a=OTHER)
    old = Credentials(CredentialFiles(secrets=tmp_path / "old"))
    for ours, theirs in ((credentials, old), (old, credentials)):
        with pytest.raises(AuthFailed, match="the secrets of the two ends differ"):
            talk(of_link(ours, dialled=True), of_link(theirs, dialled=False))


def test_a_handshake_with_another_process_or_with_itself_is_none_of_this_link(credentials: Credentials) -> None:
    """A peer whose credentials are gone passes our messages on to a process that has some, or asks us with our own."""
    ours, elsewhere = of_link(credentials, dialled=True), of_link(credentials, dialled=False, secret=OTHER)
    for theirs in (elsewhere, ours):
        with pytest.raises(AuthFailed, match="another end than that of this link"):
            talk(ours, theirs)
        assert ours.last == elsewhere.last == 0.0


@pytest.mark.parametrize("asked", [True, False])
def test_the_other_end_must_be_the_cluster_of_this_link(credentials: Credentials, asked: bool) -> None:
    def no(_: Seal) -> None:
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


class OldLink:
    """As much of a link as the heartbeat asks for; its peer answers nothing."""

    def __init__(self, renewal: Renewal) -> None:
        self.renewal = renewal
        self.peer = "a peer"
        self.last_heard = 0.0
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)


def test_a_peer_is_asked_once_and_lost_if_it_does_not_answer(credentials: Credentials) -> None:
    lost: list[str] = []
    control = cast("ControlLoop", None)
    beat = Heartbeat(control, list, lambda _, why, kind: lost.append(f"{kind}: {why}"), 5.0, 60.0, lambda _: None)
    link = OldLink(of_link(credentials, dialled=True))
    renewal = link.renewal
    renewal.last = 1000.0
    for now, asked in ((1059.9, 0), (1060.0, 1), (1061.0, 1), (1065.0, 1)):
        beat.renew(link, renewal, 60.0, now)  # type: ignore[arg-type]
        assert len(link.sent) == asked
    assert not isinstance(link.sent[0], Beat)
    assert not lost
    beat.renew(link, renewal, 60.0, 1065.1)  # type: ignore[arg-type]
    assert lost == ["unauthenticated: not authenticated again within 5.0 s"]
