"""Fuzz targets before a link exists: both roles of the handshake, plain and behind TLS, and the same-host rendezvous.

Behind TLS there are peers that have the secret and lie, and strangers that have not and meddle with records. A
handshake takes as long as five greetings. So most connections go on with a session whose ends are still in step after
the connection before; the others do their own handshake. Everything else is as for any peer: the real listener, the
real dialling end, real sockets.
"""

import array
import copy
import os
import queue
import random
import socket
import ssl
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Self

from faults.fuzz import Finding, Targets, Verdicts, trial
from faults.fuzz.forge import HANDSHAKE, LINK, Forge, mutated
from faults.fuzz.readers import packet
from faults.fuzz.stage import PATIENCE_SECONDS, Stage, drain
from faults.sealing import HANDSHAKE as HANDSHAKE_RECORD
from faults.sealing import HEADER, RecordWriter, logged_secret, meaning
from faults.strangers import Plain, Tls, listener, welcome_of
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.dial import Dial
from llm_datadist._links.identity import Transcript
from llm_datadist._links.tls_session import MAX_HANDSHAKE_BYTES, TlsSession
from llm_datadist._native import readable
from llm_datadist._transport import instances
from llm_datadist._transport.samehost.peer_memory import PeerMemory
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, DeadlineExceeded, LinkError, LLMException
from tests.support.probe import Probe

#: What a TLS session may keep of what it was given, or has to send: a record, and a few answers.
_MOST_PENDING: Final = 1 << 16
#: What a connection is, and how many of a hundred: in a session of before, after a handshake, with odd records, by one
#: that is not believed.
_KINDS: Final = {"kept": 84, "fresh": 4, "odd": 4, "stranger": 8}
_LABELS: Final = {False: "CLIENT_TRAFFIC_SECRET_0", True: "SERVER_TRAFFIC_SECRET_0"}


# --- who speaks -------------------------------------------------------------------------------------------------------


class Hostile:
    """What a peer says in one connection, through its codec; with a writer it says records of all kinds."""

    def __init__(self, forge: Forge, codec: Plain, writer: RecordWriter | None = None) -> None:
        self.forge, self.codec, self._writer = forge, codec, writer

    def lie(self, first: Sequence[bytes] = ()) -> bytes:
        """Return a few frames; ``first`` are said before them."""
        return self.put([*first, *(self.forge.frame() for _ in range(self.forge.rng.randrange(1, 4)))])

    def put(self, frames: list[bytes]) -> bytes:
        """Return frames sealed each, or all together; sometimes somebody changes sealed ones on their way."""
        rng, put = self.forge.rng, self.codec.put
        if self._writer is not None:
            return self._writer.odd(b"".join(frames), rng)
        data = b"".join(map(put, frames)) if rng.random() < 0.3 else put(b"".join(frames))
        return mutated(data, rng) if isinstance(self.codec, Tls) and rng.random() < 0.1 else data

    def hear_hello(self, sock: socket.socket) -> wire.Hello:
        parser = FrameParser()
        parser.feed(self.codec.opened(b""))  # it may have come with the end of the handshake
        while (payload := parser.take()) is None:
            data = sock.recv(1 << 16)
            if not data:
                raise ConnectionAbortedError("it said nothing")
            parser.feed(self.codec.opened(data))
        hello = wire.decode(payload)
        assert isinstance(hello, wire.Hello)
        return hello

    def heard(self, data: bytes) -> list[wire.Message]:
        """Return the messages of the victim, which must be right."""
        parser, found = FrameParser(), []
        with suppress(AuthFailed):  # the victim may refuse the session itself
            parser.feed(self.codec.opened(data))
        while (payload := parser.take()) is not None:
            found.append(wire.decode(payload))
        return found


class Unsealed:
    """The peers of ends without authentication."""

    share = b""
    sealed = False

    def __init__(self) -> None:
        self.options: dict[str, str] = {}
        self.credentials: Credentials | None = None

    def hostile(self, forge: Forge, *, server_side: bool) -> Hostile | None:
        """Return the peer of the next connection; None is one that is not believed."""
        return Hostile(forge, Plain())

    def judge(self, peer: Hostile | None) -> None:
        """Raise Finding for what the victim has made of that peer."""


class Sessions(Unsealed, Credentials):
    """The credentials of victim and fuzzer, which gives the victim the session that the fuzzer wants it to have."""

    def __init__(self, folder: Path) -> None:
        files = CredentialFiles(secrets=new_secret(folder / "secrets", "fuzz"))
        self.options = {"llm.AuthSecretFile": str(files.secrets)}
        Credentials.__init__(self, files)
        self.credentials, self.share, self.sealed = self, bytes(32), True
        self.foreign = Credentials(CredentialFiles(secrets=new_secret(folder / "foreign", "fuzz")))
        self._logging = Credentials(files)
        self._log = folder / "keys"
        self._kept: tuple[TlsSession, TlsSession] | None = None
        self.planned: TlsSession | None = None  # what the victim gets next
        self.given: TlsSession | None = None  # what it got last

    def session(self, *, server_side: bool) -> TlsSession:
        planned, self.planned = self.planned, None
        self.given = planned or Credentials.session(self, server_side=server_side)
        return self.given

    def own(self, *, server_side: bool) -> TlsSession:
        return Credentials.session(self, server_side=server_side)

    def hostile(self, forge: Forge, *, server_side: bool) -> Hostile | None:
        kind = forge.rng.choices(list(_KINDS), list(_KINDS.values()))[0]
        self.given = None
        match kind:
            case "stranger":
                return None
            case "fresh":
                return Hostile(forge, Tls(self.own(server_side=server_side)))
            case "odd":
                tls, self.planned, writer = self.odd_pair(server_side=server_side)
                return Hostile(forge, Tls(tls), writer)
        tls, self.planned = self.kept_pair(server_side=server_side)
        return Hostile(forge, Tls(tls))

    def judge(self, peer: Hostile | None) -> None:
        if self.given is None:
            return
        if peer is not None:
            check_bounded(self.given)
        elif self.given.authenticated:
            raise Finding("a stranger was authenticated")
        elif self.given.incoming.pending > MAX_HANDSHAKE_BYTES:
            raise Finding(f"{self.given.incoming.pending} bytes of a stranger were kept")

    def fresh_pair(self) -> tuple[TlsSession, TlsSession]:
        return _shaken(self)

    def kept_pair(self, *, server_side: bool) -> tuple[TlsSession, TlsSession]:
        """Return both ends of an authenticated session, the fuzzer's first. ``server_side``: which one that is."""
        if self._kept is None or not _in_step(*self._kept):
            client, server = _shaken(self)
            self._kept = (server, client) if server_side else (client, server)
        return self._kept

    def odd_pair(self, *, server_side: bool) -> tuple[TlsSession, TlsSession, RecordWriter]:
        """Return the same of a session of its own, and what writes odd records in place of the fuzzer's end."""
        self._log.unlink(missing_ok=True)
        for context in self._logging.current():
            context.keylog_filename = str(self._log)
        client, server = _shaken(self._logging)
        writer = RecordWriter(logged_secret(self._log, _LABELS[server_side]))
        return (server, client, writer) if server_side else (client, server, writer)


def _shaken(credentials: Credentials) -> tuple[TlsSession, TlsSession]:
    client, server = (Credentials.session(credentials, server_side=side) for side in (False, True))
    flight = client.shake()
    while not server.authenticated:
        flight = client.shake(server.shake(flight))
    return client, server


def _in_step(one: TlsSession, other: TlsSession) -> bool:
    try:
        return other.decrypt(one.encrypt(b"ping")) == one.decrypt(other.encrypt(b"ping")) == b"ping"
    except AuthFailed:
        return False


@contextmanager
def secured() -> Iterator[Sessions]:
    with tempfile.TemporaryDirectory() as folder:
        yield Sessions(Path(folder))


def check_bounded(tls: TlsSession) -> None:
    """Raise Finding for a TLS session that keeps more than it must."""
    kept, unsent = tls.incoming.pending, tls.outgoing.pending
    if kept > _MOST_PENDING or unsent > _MOST_PENDING:
        raise Finding(f"a TLS session keeps {kept} bytes unopened and {unsent} unsent")


# --- a hostile initiator ----------------------------------------------------------------------------------------------


def fuzz_greetings(frames: int, seed: int, *, sealed: bool = False) -> Verdicts:
    """Connect to the listener of the victim with bad greetings, with the secret or without it. Counts greetings."""
    forge, name = Forge(seed, HANDSHAKE, wrong=0.15, sealed=sealed), "sealed greetings" if sealed else "greetings"
    with (
        secured() if sealed else nullcontext(Unsealed()) as peers,
        Stage(extra=peers.options) as stage,
        trial(name, seed) as verdicts,
    ):
        if isinstance(peers, Sessions):
            credentials: Any = stage.engine.links.endpoint.credentials
            credentials.session = peers.session
        while verdicts.judged < frames:
            if verdicts.judged % 500 == 0:
                stage.settled()
            _greet(stage.port, peers, forge, verdicts)
        stage.settled()
    return verdicts


def _greet(port: int, peers: Unsealed, forge: Forge, verdicts: Verdicts) -> None:
    peer, messages = peers.hostile(forge, server_side=False), []
    with socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS) as sock:
        if peer is None:
            assert isinstance(peers, Sessions)
            _intrude(sock, peers, forge.rng)
            drain(sock)
        else:
            with suppress(OSError):  # it may have hung up before it has heard all of this
                spoiled = not peers.sealed and forge.rng.random() < 0.1
                preamble = peer.codec.preamble
                sock.sendall(mutated(preamble, forge.rng) if spoiled else preamble)
                peer.codec.shake(sock)
                sock.sendall(peer.lie())
                sock.shutdown(socket.SHUT_WR)
            messages = peer.heard(drain(sock))
    peers.judge(peer)
    if not messages:
        verdicts.refuse("hung up")
    elif isinstance(messages[0], wire.Refused):
        verdicts.refuse("Refused")
    else:
        verdicts.take(messages[0])


def _intrude(sock: socket.socket, sessions: Sessions, rng: random.Random) -> None:
    """Be one that has no secret, or whose records somebody changes in the handshake."""
    tls = Credentials.session(rng.choice((sessions, sessions.foreign)), server_side=False)
    with suppress(OSError, AuthFailed):
        hello = tls.shake()
        match rng.randrange(5):
            case 0:
                sock.sendall(mutated(wire.TLS_PREAMBLE, rng) + hello)
            case 1:
                sock.sendall(wire.TLS_PREAMBLE + garbage(rng))
            case 2:
                sock.sendall(wire.TLS_PREAMBLE + changed(hello, rng))
            case 3:
                sock.sendall(wire.TLS_PREAMBLE + hello)
                sock.sendall(changed(tls.shake(sock.recv(1 << 16)) or b"\0", rng))
            case 4:
                context = sessions.foreign.current()[0]
                context.verify_mode = ssl.CERT_NONE  # believe the other end whatever it shows
                tls = TlsSession(context, server_side=False)
                sock.sendall(wire.TLS_PREAMBLE + tls.shake())
                sock.sendall(tls.shake(sock.recv(1 << 16)))
    with suppress(OSError):
        sock.shutdown(socket.SHUT_WR)


def garbage(rng: random.Random) -> bytes:
    """Return bytes that are no handshake; some begin as if they were."""
    data = rng.randbytes(rng.choice((0, 1, 5, 300, MAX_HANDSHAKE_BYTES, MAX_HANDSHAKE_BYTES + 1, 40_000)))
    if rng.random() < 0.6:
        return HEADER.pack(HANDSHAKE_RECORD, 0x0301, rng.choice((0, 1, 512, 1 << 14, 0xFFFF))) + b"\1\0" + data
    return data


def changed(flight: bytes, rng: random.Random) -> bytes:
    """Return a flight of a handshake that says something else."""
    while meaning(said := mutated(flight, rng)).startswith(meaning(flight)):
        pass
    return said


# --- a hostile target -------------------------------------------------------------------------------------------------


def fuzz_dials(frames: int, seed: int, *, sealed: bool = False) -> Verdicts:
    """Be a listener that answers nonsense, with the secret or without it. Counts dials."""
    forge = Forge(seed, HANDSHAKE | {"welcome": 60}, wrong=0.15, sealed=sealed)
    name = "sealed dials" if sealed else "dials"
    with (
        secured() if sealed else nullcontext(Unsealed()) as peers,
        Stage(extra=peers.options) as stage,
        trial(name, seed) as verdicts,
    ):
        # Not held to shm, so that a welcome in the name of a peer of this process can come to something.
        transports = copy.copy(stage.engine.transports)
        transports.asked = None
        endpoint = replace(stage.engine.links.endpoint, transports=transports, credentials=peers.credentials)
        with Nonsense(stage, forge, peers) as nonsense:
            while verdicts.judged < frames:
                if verdicts.judged % 500 == 0:
                    stage.look()
                peer = nonsense.expect()
                try:
                    with Dial(endpoint, nonsense.address, Deadline(int(1000 * PATIENCE_SECONDS))) as dial:
                        dial.greet(None)
                        verdicts.accepted["Welcome"] += 1
                        dial.confirm(1)
                        verdicts.accepted["Linked"] += 1
                except DeadlineExceeded as error:
                    raise Finding(f"a dial to a peer that had said its last went on: {error}") from error
                except LLMException as error:
                    verdicts.refuse(error)
                nonsense.answered()
                peers.judge(peer)
        stage.settled()
    return verdicts


class Nonsense:
    """A listener that says to each connection what it is told to. A context manager."""

    def __init__(self, stage: Stage, forge: Forge, peers: Unsealed) -> None:
        self._exports = Probe(stage.friend).engine.caches.exports
        self._forge, self._peers = forge, peers
        self._plans: queue.SimpleQueue[Hostile | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._welcome = welcome_of(9, self._exports.incarnation, bytes(16), share=peers.share)
        self._listening = listener(self._serve)

    def __enter__(self) -> Self:
        self.address = "127.0.0.1", self._listening.__enter__()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listening.__exit__(None, None, None)

    def expect(self) -> Hostile | None:
        """Say what the next connection will meet; it is the fuzzer's, in the same thread as this call."""
        peer = self._peers.hostile(self._forge, server_side=True)
        self._plans.put(peer)
        return peer

    def answered(self) -> None:
        """Wait until the connection is over; raise what went wrong in it."""
        error = self._done.get(timeout=PATIENCE_SECONDS)
        if error is not None and not isinstance(error, OSError):  # else it has hung up before it has heard all
            raise error

    def _serve(self, sock: socket.socket) -> None:
        error: BaseException | None = None
        try:
            sock.recv(wire.PREAMBLE_BYTES, socket.MSG_WAITALL)
            self._answer(sock, self._plans.get(timeout=PATIENCE_SECONDS))
        except BaseException as raised:  # noqa: BLE001 (the fuzzer's thread raises it)
            error = raised
        self._done.put(error)

    def _answer(self, sock: socket.socket, peer: Hostile | None) -> None:
        if peer is None:
            self._intrude(sock)
            return
        peer.codec.shake(sock)
        hello = peer.hear_hello(sock)
        instances.accept(hello.token, self._exports)  # it is in this process, so that a welcome can come to something
        choice = self._forge.rng.random()
        agreed = Transcript.of(hello, self._welcome).digest() if choice < 0.05 else bytes(16)
        first = [wire.frame(self._welcome), wire.frame(wire.Linked(7, agreed))][
            : 2 if choice < 0.1 else int(choice < 0.3)
        ]
        sock.sendall(peer.lie(first))
        sock.shutdown(socket.SHUT_WR)
        peer.heard(drain(sock))

    def _intrude(self, sock: socket.socket) -> None:
        """Be one that has no secret, or whose records somebody changes in the handshake."""
        rng, sessions = self._forge.rng, self._peers
        assert isinstance(sessions, Sessions)
        match rng.randrange(4):
            case 0:
                sock.sendall(garbage(rng))
            case 1:
                sock.sendall(b"".join(self._forge.frame() for _ in range(rng.randrange(3))))
            case 2:
                tls = Credentials.session(sessions.foreign, server_side=True)
                sock.sendall(tls.shake(sock.recv(1 << 16)))
            case 3:
                tls = sessions.own(server_side=True)
                sock.sendall(changed(tls.shake(sock.recv(1 << 16)), rng))
        sock.shutdown(socket.SHUT_WR)
        drain(sock)


# --- the rendezvous ---------------------------------------------------------------------------------------------------


def fuzz_rendezvous(frames: int, seed: int) -> Verdicts:
    """Send packets with descriptors of all kinds to the victim's rendezvous, with a token that is expected."""
    forge = Forge(seed, LINK)
    with Stage() as stage, trial("rendezvous", seed) as verdicts, _descriptors() as descriptors:
        listener = stage.probe.transport("shm").rendezvous
        met: list[PeerMemory | LinkError] = []
        while verdicts.judged < frames:
            # The token of the packets the forge makes.
            stage.probe.on_control(listener.expect, bytes(16), met.append)
            chosen = forge.rng.choices(descriptors, k=forge.rng.randrange(6))
            _send(listener.name, packet(forge.rng), chosen)
            stage.probe.on_control(listener.forget, bytes(16))
            outcome = met.pop() if met else "dropped"
            if isinstance(outcome, str | LinkError):
                verdicts.refuse(outcome)
            else:
                verdicts.take(outcome)
                outcome.close()
        stage.settled()
    return verdicts


@contextmanager
def _descriptors() -> Iterator[list[int]]:
    """Yield descriptors that a stranger might send: none of them is a sealed memfd of the right size."""
    small, sealed = os.memfd_create("fuzz"), os.memfd_create("fuzz", os.MFD_ALLOW_SEALING)
    os.ftruncate(sealed, 4096)
    found = [small, sealed, *os.pipe(), os.open(os.devnull, os.O_RDWR), os.open("/", os.O_RDONLY), os.eventfd(0)]
    try:
        yield found
    finally:
        for each in found:
            os.close(each)


def _send(name: str, data: bytes, descriptors: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect("\0" + name[1:] if name.startswith("@") else name)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
        with suppress(ConnectionError):
            while not readable(sock.fileno()):
                with suppress(PermissionError):  # until the listener has admitted this process
                    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)
                    break
            sock.recv(1 << 16)


TARGETS: Final[Targets] = {
    "greetings": (0.003, fuzz_greetings),
    "dials": (0.003, fuzz_dials),
    "rendezvous": (0.002, fuzz_rendezvous),
    "sealed greetings": (0.003, lambda frames, seed: fuzz_greetings(frames, seed, sealed=True)),
    "sealed dials": (0.003, lambda frames, seed: fuzz_dials(frames, seed, sealed=True)),
}
