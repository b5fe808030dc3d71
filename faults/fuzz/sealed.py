"""Fuzz targets behind TLS: peers that have the secret and lie, and strangers that have not and meddle with records.

A handshake takes as long as five greetings. So most connections go on with a session whose ends are still in step after
the connection before; the others do their own handshake. Everything else is as for any peer: the real listener, the
real dialling end, real sockets.
"""

from __future__ import annotations

import queue
import random
import socket
import ssl
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec

from faults.fuzz import Finding, Target, Verdicts, trial
from faults.fuzz.forge import SEALED_HANDSHAKE, Forge, mutated
from faults.fuzz.greetings import good_welcome
from faults.fuzz.links import Session, fuzz_handlers, join, judge, say
from faults.fuzz.stage import PATIENCE_SECONDS, Stage, drain
from faults.sealing import HANDSHAKE, HEADER, RecordWriter, logged_secret, meaning
from llm_datadist._deadline import Deadline
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.handshake import Dial
from llm_datadist._links.messages import PREAMBLE_BYTES, SEALED_PREAMBLE, Hello, Linked, Refused, decode, frame
from llm_datadist._links.seal import MAX_HANDSHAKE_BYTES, Seal
from llm_datadist._transport import inproc
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, DeadlineExceeded, LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from llm_datadist._links.messages import Message

#: What a seal may keep of what it was given, or has to send: a record, and a few answers.
_MOST_PENDING: Final = 1 << 16
#: What a connection is, and how many of a hundred: in a session of before, after a handshake, with odd records, by one
#: that is not believed.
_KINDS: Final = {"kept": 84, "fresh": 4, "odd": 4, "stranger": 8}
_LABELS: Final = {False: "CLIENT_TRAFFIC_SECRET_0", True: "SERVER_TRAFFIC_SECRET_0"}


class Sessions(Credentials):
    """The credentials of victim and fuzzer, which gives the victim the session that the fuzzer wants it to have.

    Args:
        folder: For the secret; ``options`` are those of ends that have it.
    """

    def __init__(self, folder: Path) -> None:
        files = CredentialFiles(secrets=new_secret(folder / "secrets", "fuzz"))
        self.options = {"llm.AuthSecretFile": str(files.secrets)}
        super().__init__(files)
        self.foreign = Credentials(CredentialFiles(secrets=new_secret(folder / "foreign", "fuzz")))
        self._logging = Credentials(files)
        self._log = folder / "keys"
        self._kept: tuple[Seal, Seal] | None = None
        self.planned: Seal | None = None  # what the victim gets next
        self.given: Seal | None = None  # what it got last

    def session(self, *, server_side: bool) -> Seal:
        """Return the session that was planned, or a new one."""
        planned, self.planned = self.planned, None
        self.given = planned or super().session(server_side=server_side)
        return self.given

    def own(self, *, server_side: bool) -> Seal:
        """Return a new session of the fuzzer."""
        return super().session(server_side=server_side)

    def fresh_pair(self) -> tuple[Seal, Seal]:
        """Return both ends of a new authenticated session, the dialling one first."""
        return _shaken(self)

    def kept_pair(self, *, server_side: bool) -> tuple[Seal, Seal]:
        """Return both ends of an authenticated session, the fuzzer's first. ``server_side``: which one that is."""
        if self._kept is None or not _in_step(*self._kept):
            client, server = _shaken(self)
            self._kept = (server, client) if server_side else (client, server)
        return self._kept

    def odd_pair(self, *, server_side: bool) -> tuple[Seal, Seal, RecordWriter]:
        """Return the same of a session of its own, and what writes odd records in place of the fuzzer's end."""
        self._log.unlink(missing_ok=True)
        for context in self._logging._current():
            context.keylog_filename = str(self._log)
        client, server = _shaken(self._logging)
        writer = RecordWriter(logged_secret(self._log, _LABELS[server_side]))
        return (server, client, writer) if server_side else (client, server, writer)


def _shaken(credentials: Credentials) -> tuple[Seal, Seal]:
    """Return both ends of a session, the dialling one first, which have authenticated each other."""
    client, server = (Credentials.session(credentials, server_side=side) for side in (False, True))
    flight = client.shake()
    while not server.authenticated:
        flight = client.shake(server.shake(flight))
    return client, server


def _in_step(one: Seal, other: Seal) -> bool:
    try:
        return other.open(one.seal(b"ping")) == one.open(other.seal(b"ping")) == b"ping"
    except AuthFailed:
        return False


@contextmanager
def secured() -> Iterator[Sessions]:
    """Yield sessions of a secret of their own."""
    with tempfile.TemporaryDirectory() as folder:
        yield Sessions(Path(folder))


def check_bounded(seal: Seal) -> None:
    """Raise Finding for a seal that keeps more than it must."""
    kept, unsent = seal._incoming.pending, seal._outgoing.pending
    if kept > _MOST_PENDING or unsent > _MOST_PENDING:
        raise Finding(f"a seal keeps {kept} bytes unopened and {unsent} unsent")


# --- a hostile initiator ---------------------------------------------------------------------------------------------


def fuzz_sealed_greetings(frames: int, seed: int) -> Verdicts:
    """Greet a listener that wants authentication: with the secret and bad frames, or without it. Counts greetings."""
    forge = Forge(seed, SEALED_HANDSHAKE, wrong=0.15)
    with secured() as sessions, Stage(extra=sessions.options) as stage, trial("sealed greetings", seed) as verdicts:
        credentials: Any = stage.engine.links._endpoint.credentials
        credentials.session = sessions.session
        while verdicts.judged < frames:
            if verdicts.judged % 500 == 0:
                stage.settled()
            _greet(stage.port, sessions, forge, verdicts)
        stage.settled()
    return verdicts


def _greet(port: int, sessions: Sessions, forge: Forge, verdicts: Verdicts) -> None:
    kind = _kind(forge.rng)
    sessions.given = None
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as sock:
        if kind == "stranger":
            _intrude(sock, sessions, forge.rng)
            drain(sock)
            _check_stranger(sessions.given)
            verdicts.refuse("hung up")
            return
        peer = Hostile(sessions, forge, kind, server_side=False)
        with suppress(OSError):  # it may have hung up before it has heard all of this
            sock.sendall(SEALED_PREAMBLE)
            peer.shake(sock)
            sock.sendall(peer.lie())
            sock.shutdown(socket.SHUT_WR)
        messages = peer.heard(drain(sock))
    if sessions.given is not None:
        check_bounded(sessions.given)
    if not messages:
        verdicts.refuse("hung up")
    elif isinstance(messages[0], Refused):
        verdicts.refuse("Refused")
    else:
        verdicts.take(messages[0])


def _kind(rng: random.Random) -> str:
    return rng.choices(list(_KINDS), list(_KINDS.values()))[0]


class Hostile:
    """A peer that has the secret, in one connection.

    Args:
        sessions: Of it and its victim.
        forge: Makes what it says.
        kind: "kept": in a session that was there before; "fresh": after a handshake; "odd": records of all kinds.
        server_side: Whether it listens.
    """

    def __init__(self, sessions: Sessions, forge: Forge, kind: str, *, server_side: bool) -> None:
        self._forge = forge
        self._writer: RecordWriter | None = None
        if kind == "fresh":
            self.seal = sessions.own(server_side=server_side)
        elif kind == "odd":
            self.seal, sessions.planned, self._writer = sessions.odd_pair(server_side=server_side)
        else:
            self.seal, sessions.planned = sessions.kept_pair(server_side=server_side)

    def shake(self, sock: socket.socket) -> None:
        """Authenticate both ends, unless they are."""
        sock.settimeout(PATIENCE_SECONDS)
        if self.seal.authenticated:
            return
        sock.sendall(self.seal.shake())
        while not self.seal.authenticated:
            if not (data := sock.recv(1 << 16)):
                raise Finding("a peer with the secret was not authenticated")
            sock.sendall(self.seal.shake(data))

    def lie(self, first: Sequence[bytes] = ()) -> bytes:
        """Return a few frames, sealed; ``first`` are said before them."""
        rng = self._forge.rng
        said = [*first, *(self._forge.frame() for _ in range(rng.randrange(1, 4)))]
        if self._writer is not None:
            return self._writer.odd(b"".join(said), rng)
        return sealed(self.seal, said, rng)

    def hear_hello(self, sock: socket.socket) -> Hello:
        """Return the first message of a victim that dials."""
        parser = FrameParser()
        parser.feed(self.seal.open(b""))  # it may have come with the end of the handshake
        while (payload := parser.take()) is None:
            parser.feed(self.seal.open(sock.recv(1 << 16)))
        hello = decode(payload)
        assert isinstance(hello, Hello)
        return hello

    def heard(self, data: bytes) -> list[Message]:
        """Return the messages of the victim, as :func:`hear`."""
        return hear(self.seal, data)


def hear(seal: Seal, data: bytes) -> list[Message]:
    """Return the messages of a victim, which must be right."""
    parser, messages = FrameParser(), []
    with suppress(AuthFailed):  # the victim may refuse the session itself
        parser.feed(seal.open(data))
    while (payload := parser.take()) is not None:
        messages.append(decode(payload))
    return messages


def sealed(seal: Seal, frames: list[bytes], rng: random.Random) -> bytes:
    """Return frames sealed each, or all together; sometimes somebody changes them on their way."""
    data = b"".join(map(seal.seal, frames)) if rng.random() < 0.3 else seal.seal(b"".join(frames))
    return mutated(data, rng) if rng.random() < 0.1 else data


def _intrude(sock: socket.socket, sessions: Sessions, rng: random.Random) -> None:
    """Be one that has no secret, or whose records somebody changes in the handshake."""
    seal = Credentials.session(rng.choice((sessions, sessions.foreign)), server_side=False)
    with suppress(OSError, AuthFailed):
        hello = seal.shake()
        match rng.randrange(5):
            case 0:
                sock.sendall(mutated(SEALED_PREAMBLE, rng) + hello)
            case 1:
                sock.sendall(SEALED_PREAMBLE + garbage(rng))
            case 2:
                sock.sendall(SEALED_PREAMBLE + changed(hello, rng))
            case 3:
                sock.sendall(SEALED_PREAMBLE + hello)
                sock.sendall(changed(seal.shake(sock.recv(1 << 16)) or b"\0", rng))
            case 4:
                _show(sock, sessions.foreign)
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def _show(sock: socket.socket, foreign: Credentials) -> None:
    """Do a handshake with another secret, and believe the other end whatever it shows."""
    context = foreign._current()[0]
    context.verify_mode = ssl.CERT_NONE
    seal = Seal(context, server_side=False)
    sock.sendall(SEALED_PREAMBLE + seal.shake())
    sock.sendall(seal.shake(sock.recv(1 << 16)))


def garbage(rng: random.Random) -> bytes:
    """Return bytes that are no handshake; some begin as if they were."""
    data = rng.randbytes(rng.choice((0, 1, 5, 300, MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES + 1, 40_000)))
    if rng.random() < 0.6:
        return HEADER.pack(HANDSHAKE, 0x0301, rng.choice((0, 1, 512, 1 << 14, 0xFFFF))) + b"\1\0" + data
    return data


def changed(flight: bytes, rng: random.Random) -> bytes:
    """Return a flight of a handshake that says something else."""
    while meaning(said := mutated(flight, rng)).startswith(meaning(flight)):
        pass
    return said


def _check_stranger(seal: Seal | None) -> None:
    if seal is None:
        return
    if seal.authenticated:
        raise Finding("a stranger was authenticated")
    if seal._incoming.pending > MAX_HANDSHAKE_BYTES:
        raise Finding(f"{seal._incoming.pending} bytes of a stranger were kept")


# --- a hostile target ------------------------------------------------------------------------------------------------


def fuzz_sealed_dials(frames: int, seed: int) -> Verdicts:
    """Be a listener with the secret that answers nonsense, or one without it. Counts dials."""
    forge = Forge(seed, SEALED_HANDSHAKE | {"welcome": (60, SEALED_HANDSHAKE["welcome"][1])}, wrong=0.15)
    with secured() as sessions, Stage(extra=sessions.options) as stage, trial("sealed dials", seed) as verdicts:
        # Not held to shm, so that a welcome in the name of a peer of this process can come to something.
        endpoint = replace(stage.engine.links._endpoint, transport=None, credentials=sessions)
        with Nonsense(stage, forge, sessions) as nonsense:
            while verdicts.judged < frames:
                if verdicts.judged % 500 == 0:
                    stage.look()
                kind = nonsense.expect()
                try:
                    with Dial(endpoint, nonsense.address, Deadline(int(1000 * PATIENCE_SECONDS))) as dial:
                        dial.greet(None)
                        verdicts.accepted["Welcome"] += 1
                        dial.settle(1)
                        verdicts.accepted["Linked"] += 1
                except DeadlineExceeded as error:
                    raise Finding(f"a dial to a peer that had said its last went on: {error}") from error
                except LLMException as error:
                    verdicts.refuse(error)
                nonsense.answered()
                assert sessions.given is not None
                _check_stranger(sessions.given) if kind == "stranger" else check_bounded(sessions.given)
        stage.settled()
    return verdicts


class Nonsense:
    """A listener in a thread of its own that says to each connection what it is told to. A context manager.

    Attributes:
        address: Where it listens.
    """

    def __init__(self, stage: Stage, forge: Forge, sessions: Sessions) -> None:
        assert stage.friend._engine is not None
        self._exports = stage.friend._engine.store.exports
        self._forge, self._sessions = forge, sessions
        self._plans: queue.SimpleQueue[Hostile | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._welcome = msgspec.structs.replace(good_welcome(self._exports.incarnation), lane_share=bytes(32))

    def __enter__(self) -> Self:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._thread = threading.Thread(target=self._serve, name="llm-datadist-nonsense")
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with socket.create_connection(self.address, PATIENCE_SECONDS):
            pass  # the empty visit ends it
        self._thread.join()
        self._server.close()

    def expect(self) -> str:
        """Say what the next connection will meet; it is the fuzzer's, in the same thread as this call."""
        kind = _kind(self._forge.rng)
        peer = None if kind == "stranger" else Hostile(self._sessions, self._forge, kind, server_side=True)
        self._plans.put(peer)
        return kind

    def answered(self) -> None:
        """Wait until the connection is over; raise what went wrong in it."""
        error = self._done.get(timeout=PATIENCE_SECONDS)
        if error is not None:
            raise error

    def _serve(self) -> None:
        while True:
            sock, _ = self._server.accept()
            with sock:
                sock.settimeout(PATIENCE_SECONDS)
                preamble = sock.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
                if not preamble:
                    return
                try:
                    self._answer(sock, self._plans.get(timeout=PATIENCE_SECONDS))
                except OSError:
                    self._done.put(None)  # it has hung up before it has heard all
                except BaseException as error:  # noqa: BLE001 (the fuzzer's thread raises it)
                    self._done.put(error)
                else:
                    self._done.put(None)

    def _answer(self, sock: socket.socket, peer: Hostile | None) -> None:
        if peer is None:
            self._intrude(sock)
            return
        peer.shake(sock)
        hello = peer.hear_hello(sock)
        inproc.accept(hello.token, self._exports)  # it is in this process, so that a welcome can come to something
        choice = self._forge.rng.random()
        first = [frame(self._welcome), frame(Linked(7, b""))][: 2 if choice < 0.1 else int(choice < 0.3)]
        sock.sendall(peer.lie(first))
        sock.shutdown(socket.SHUT_WR)
        peer.heard(drain(sock))

    def _intrude(self, sock: socket.socket) -> None:
        """Be one that has no secret, or whose records somebody changes in the handshake."""
        rng, sessions = self._forge.rng, self._sessions
        match rng.randrange(4):
            case 0:
                sock.sendall(garbage(rng))
            case 1:
                sock.sendall(b"".join(self._forge.frame() for _ in range(rng.randrange(3))))
            case 2:
                seal = Credentials.session(sessions.foreign, server_side=True)
                sock.sendall(seal.shake(sock.recv(1 << 16)))
            case 3:
                seal = sessions.own(server_side=True)
                sock.sendall(changed(seal.shake(sock.recv(1 << 16)), rng))
        sock.shutdown(socket.SHUT_WR)
        drain(sock)


# --- a hostile peer of a link -----------------------------------------------------------------------------------------


def fuzz_sealed_handlers(frames: int, seed: int) -> Verdicts:
    """Be many linked peers behind TLS: wrong frames, odd records, or records that somebody changes on their way."""
    rng = random.Random(seed)
    with secured() as sessions:

        def speak(session: Session, said: list[bytes]) -> None:
            odd = rng.random() < 0.05
            ours, theirs = socket.socketpair()
            if odd:
                seal, victim, writer = sessions.odd_pair(server_side=False)
                data = writer.odd(b"".join(said), rng)
            else:
                seal, victim = sessions.fresh_pair()
                data = sealed(seal, said, rng)
            with ours:
                link = join(session.stage, theirs, session.number, victim, sessions.foreign)
                say(ours, data)
                hear(seal, drain(ours))
            judge(link, session.verdicts)
            check_bounded(victim)
            if not odd:
                _check_taken(session.taken, said)

        return fuzz_handlers(frames, seed, speak=speak)


def _check_taken(taken: list[Message], said: list[bytes]) -> None:
    """Raise Finding where the victim took a message that was not said, or not in its turn."""
    parser = FrameParser()
    parser.feed(b"".join(said))
    for message in taken:
        payload = parser.take()
        if payload is None or decode(payload) != message:
            raise Finding(f"{message} was taken, and was not said")


TARGETS: Final[dict[str, Target]] = {
    "sealed greetings": fuzz_sealed_greetings,
    "sealed dials": fuzz_sealed_dials,
    "sealed handlers": fuzz_sealed_handlers,
}
