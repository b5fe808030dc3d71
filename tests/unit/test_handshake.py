"""The core of handshakes: both sides without a socket, their bytes cut anywhere, and the stored frames."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.handshake import ORDER, DialerSide, Endpoint, Handshake, ListenerSide
from llm_datadist._links.identity import DIALER, LISTENER, Transcript
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES
from llm_datadist._transport.choose import Choice
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, LinkRefused, LLMException, LLMStatusCode, ProtocolError, StateError
from tests.golden.__main__ import load
from tests.golden.encodings import groups
from tests.support.wire import messages, preamble

FRAMES: Final = load()["protocol"]["frames"]
PREAMBLES: Final = load()["wire major"]["frames"]
KINDS: Final = (*(kind for _, kind in ORDER), messages.Refused)
#: Frames of a handshake by name.
VALUES: Final[dict[str, Any]] = {
    name: frame.value
    for name, frame in groups()["protocol"].frames.items()
    if isinstance(frame.value, KINDS) and not name.endswith("later release")
}


def endpoint(cluster_id: int, credentials: Credentials | None = None) -> Endpoint:
    transports: Any = SimpleNamespace(exports=SimpleNamespace(incarnation=bytes([cluster_id]) * 16), asked=None)
    return Endpoint(
        cluster_id,
        True,
        transports,
        credentials,
        check_reach=lambda host: None,
        require_link=lambda cluster_id: None,
        offered_to=lambda cluster_id: LinkRefused("nothing"),
    )


def meeting(side: Handshake) -> Any:
    """Return what transports would make of it; they agree."""
    chosen = Choice("tcp", None, "test")
    said = {"tcp": side.role}
    return SimpleNamespace(
        here=None,
        token=bytes(16),
        secret=b"",
        choice=chosen,
        offers=lambda: said,
        hear=lambda *heard: None,
        choose=lambda: chosen,
        yield_to=lambda theirs: None,
    )


class Talk:
    """A dialer and a listener; every call of :meth:`carry` takes bytes to one, and its answers to the other."""

    def __init__(self, dialer: Endpoint, listener: Endpoint, cut: int) -> None:
        self.dialer, self.listener, self.cut = DialerSide(dialer, "link to it"), ListenerSide(listener), cut
        for side in (self.dialer, self.listener):
            side.meeting = meeting(side)

    def carry(self, data: bytes, to: Handshake) -> None:
        other = self.listener if to is self.dialer else self.dialer
        while data:
            parts = (data[at : at + self.cut] for at in range(0, len(data), self.cut))
            data, to, other = b"".join(map(to.feed, parts)), other, to

    def greet(self, wanted: int | None = None) -> messages.Welcome:
        """Do all steps up to Welcome."""
        first = self.dialer.begin(wanted, None, reconnects=False)
        self.listener.open(first[: messages.PREAMBLE_BYTES])
        self.carry(first[messages.PREAMBLE_BYTES :], self.listener)
        hello = self.listener.hear(messages.Hello)
        assert hello is not None
        self.listener.identify(hello, "")
        self.listener.check("here", None)
        self.carry(self.listener.greet(), self.dialer)
        welcome = self.dialer.hear(messages.Welcome)
        assert welcome is not None
        return welcome

    def finish(self) -> None:
        self.dialer.welcomed(self.greet(), "", None)
        self.carry(self.dialer.choose(7, present=False), self.listener)
        choice = self.listener.hear(messages.TransportChoice)
        assert choice is not None
        self.listener.chosen(choice)
        self.listener.choose()
        self.carry(self.listener.say(self.listener.linked(8)) + b"rest"[: 4 * (self.dialer.tls is None)], self.dialer)
        linked = self.dialer.hear(messages.Linked)
        assert linked is not None
        self.dialer.linked(linked)
        assert (choice.sequence, linked.sequence) == (7, 8)


@pytest.fixture(params=["plain", "encrypted"])
def credentials(request: pytest.FixtureRequest, tmp_path: Path) -> Credentials | None:
    if request.param == "plain":
        return None
    return Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))


@pytest.mark.parametrize("cut", [1, 7, 1 << 20])
def test_two_sides_come_to_the_same_and_recognise_each_other_later(credentials: Credentials | None, cut: int) -> None:
    ours, theirs = endpoint(1, credentials), endpoint(2, credentials)
    for again in (False, True):
        talk = Talk(ours, theirs, cut)
        talk.finish()
        dialer, listener = talk.dialer, talk.listener
        assert (dialer.step, listener.step) == (len(ORDER), len(ORDER))
        assert (dialer.theirs.cluster_id, listener.theirs.cluster_id) == (2, 1)
        assert (dialer.theirs.offers, listener.theirs.offers) == ({"tcp": LISTENER}, {"tcp": DIALER})
        assert (dialer.transcript, dialer.spoken) == (listener.transcript, listener.spoken)
        assert dialer.meeting.secret == listener.meeting.secret
        assert len(dialer.meeting.secret) == (0 if credentials is None else 32)
        assert (dialer.proven, listener.proven) == (again, again)
        assert bool(listener.choice.share) is not again, "a proof replaces a new secret"
        assert dialer.parser.rest() == (b"rest" if credentials is None else b"")


@pytest.mark.parametrize("name", VALUES)
def test_the_stored_frames_are_said_and_heard(name: str) -> None:
    value, stored = VALUES[name], bytes.fromhex(FRAMES[name])
    said_by_dialer = isinstance(value, messages.Hello | messages.TransportChoice)
    sides: list[Handshake] = [DialerSide(endpoint(1), "link to it"), ListenerSide(endpoint(2))]
    speaker, hearer = sides if said_by_dialer else reversed(sides)
    for side in (speaker, hearer):
        side.step = 1 if isinstance(value, messages.Refused) else [kind for _, kind in ORDER].index(type(value))
    assert speaker.say(value) == stored
    for byte in stored[:-1]:
        assert hearer.feed(bytes([byte])) == b""
        assert hearer.hear(type(value)) is None
    hearer.feed(stored[-1:])
    if isinstance(value, messages.Refused):
        with pytest.raises(LLMException) as caught:
            hearer.hear(messages.Welcome)
        assert isinstance(caught.value, AuthFailed if value.authentication else LinkRefused)
        assert str(caught.value) == f"link to it: refused: {value.text}"
    else:
        assert hearer.hear(type(value)) == value


def test_the_first_bytes_are_the_stored_preambles(credentials: Credentials | None) -> None:
    dialer = Talk(endpoint(1, credentials), endpoint(2), 1).dialer
    first = dialer.begin(None, None, reconnects=False)
    name = "preamble, plain" if credentials is None else "preamble, TLS"
    assert first.startswith(bytes.fromhex(PREAMBLES[name]))


@pytest.mark.parametrize("step", range(len(ORDER) + 1))
@pytest.mark.parametrize("kind", [kind for _, kind in ORDER])
@pytest.mark.parametrize("side", [partial(DialerSide, what="link to it"), ListenerSide])
def test_each_message_has_an_answer_in_each_step(side: Any, step: int, kind: Any) -> None:
    value = next(each for each in VALUES.values() if type(each) is kind)
    due = ORDER[step : step + 1]
    for speak in (True, False):
        one: Handshake = side(endpoint(1))
        one.step = step
        one.feed(messages.frame(value))
        legal = (one.role if speak else one.other, kind) in due
        with nullcontext() if legal else pytest.raises(StateError, match=f"{kind.__name__} is illegal"):
            assert one.say(value) if speak else one.hear(kind)
        assert one.step == step + legal
    other = next(each for _, each in ORDER if each is not kind)
    one = side(endpoint(1))
    one.step = step
    one.feed(messages.frame(value))
    with pytest.raises(ProtocolError, match=f"^expected {other.__name__}, the peer sent {kind.__name__}$"):
        one.hear(other)
    assert one.step == step


def told(listener: ListenerSide, error: LLMException) -> messages.Message | None:
    """Return the listener's last words."""
    data = listener.last_words(error)
    return messages.decode(data[messages.FRAME_HEADER.size :]) if data else None


@pytest.mark.parametrize(
    ("first", "kind", "answer"),
    [
        (b"HTTP/1.1 GET", ProtocolError, None),
        (b"ODATDIST\0\1\0\0", ProtocolError, "wire major is 1"),
        (b"ODATDIST\0\1\0\2", ProtocolError, None),
        (preamble(1), ProtocolError, None),
        (preamble(2), AuthFailed, None),
    ],
)
def test_a_listener_tells_strangers_no_more_than_their_build_can_read(
    first: bytes, kind: type[LLMException], answer: str | None
) -> None:
    listener = ListenerSide(endpoint(1))
    with pytest.raises(kind) as caught:
        listener.open(first)
    words = told(listener, caught.value)
    assert (words is None) == (answer is None)
    assert answer is None or (isinstance(words, messages.Refused) and answer in words.text)


def test_a_rejected_dialer_learns_that_it_is_rejected_and_an_identified_one_why() -> None:
    hello = next(value for value in VALUES.values() if isinstance(value, messages.Hello))

    def forbid(cluster_id: int) -> None:
        raise AuthFailed("a reason for the log")

    listener = ListenerSide(endpoint(1))
    object.__setattr__(listener.endpoint, "require_link", forbid)
    with pytest.raises(AuthFailed, match="for the log") as caught:
        listener.identify(hello, "")
    code = int(LLMStatusCode.LLM_LINK_FAILED)
    rejected = messages.Refused(code, "this listener asks for authentication", authentication=True)
    assert told(listener, caught.value) == rejected
    with pytest.raises(AuthFailed, match=r"^uid 7$") as caught:
        listener.identify(hello, "uid 7")
    assert told(listener, caught.value) == messages.Refused(code, "the listener says: uid 7", authentication=True)
    listener = ListenerSide(endpoint(1))
    listener.identify(hello, "")
    long = LinkRefused("x" * 5000, status_code=LLMStatusCode.LLM_LINK_BUSY)
    assert told(listener, long) == messages.Refused(int(LLMStatusCode.LLM_LINK_BUSY), "x" * messages.MAX_REASON)


def test_sides_with_different_secrets_reject_each_other_by_an_alert(tmp_path: Path) -> None:
    ours, theirs = (Credentials(CredentialFiles(secrets=new_secret(tmp_path / name, name))) for name in ("a", "b"))
    talk = Talk(endpoint(1, ours), endpoint(2, theirs), 100)
    with pytest.raises(AuthFailed):
        talk.greet()
    alert = talk.dialer.alert()
    assert alert
    with pytest.raises(AuthFailed) as caught:
        talk.listener.feed(alert)
    assert talk.listener.last_words(caught.value) == b"", "it has been rejected first"
    assert (talk.dialer.step, talk.listener.step) == (0, 0), "no Hello was said"


def test_a_listener_takes_few_bytes_before_authentication(tmp_path: Path) -> None:
    listener = ListenerSide(endpoint(1, Credentials(CredentialFiles(secrets=new_secret(tmp_path / "secrets", "a")))))
    listener.open(preamble(2))
    record = b"\x16\3\1\x3f\xff" + bytes(MAX_HANDSHAKE_BYTES - 5)  # the beginning of a long one
    for byte in record:
        assert listener.feed(bytes([byte])) == b""
    with pytest.raises(AuthFailed, match=f"more than {MAX_HANDSHAKE_BYTES} bytes"):
        listener.feed(b"x")
    assert listener.hear(messages.Hello) is None


def test_greetings_that_were_changed_on_the_way_are_noticed_by_both() -> None:
    talk = Talk(endpoint(1), endpoint(2), 100)
    talk.dialer.welcomed(talk.greet(), "", None)
    talk.listener.transcript = Transcript(talk.listener.transcript + b"others")
    talk.carry(talk.dialer.choose(1, present=False), talk.listener)
    choice = talk.listener.hear(messages.TransportChoice)
    assert choice is not None
    with pytest.raises(LinkRefused, match="the greetings were changed on the way"):
        talk.listener.chosen(choice)
    with pytest.raises(LinkRefused, match="the greetings were changed on the way"):
        talk.dialer.linked(talk.listener.linked(1))
