"""Strangers: peers and listeners made of a raw socket and the messages, which say what a test wants.

What they say goes through a codec: as it is, through a session of TLS, or sealed with the keys of a lane.
"""

import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Self, TypeVar, cast

import msgspec

from faults.sealing import Keys, Opener, Sealer
from llm_datadist._deadline import Deadline
from llm_datadist._links import messages as wire
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.identity import PeerSecrets, Transcript, new_share
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._links.versions import FEATURES, VERSIONS
from llm_datadist._memory.exports import Exports
from llm_datadist._memory.guards import GuardTable
from llm_datadist._transport.samehost.listener import exchange_memory
from llm_datadist._transport.samehost.shm import COOKIE_BYTES
from llm_datadist._transport.tcp.lanes import LANE_PREAMBLE, dial_lanes

M = TypeVar("M", bound=wire.Message)
_SECONDS = 20.0


def hello_of(cluster_id: int, incarnation: bytes, cookie: bytes, /, **changes: object) -> wire.Hello:
    who = _greeting(cluster_id, incarnation, {"shm": cookie})
    good = wire.Hello(**who, wanted=None, reconnects=False, token=secrets.token_bytes(16))
    return msgspec.structs.replace(good, **changes)


def welcome_of(cluster_id: int, incarnation: bytes, cookie: bytes, /, **changes: object) -> wire.Welcome:
    """Return a Welcome; ``rendezvous`` is a change too."""
    offers = {"shm": cookie + str(changes.pop("rendezvous", "@x")).encode(), "tcp": bytes(16)}
    good = wire.Welcome(**_greeting(cluster_id, incarnation, offers), proof=b"")
    return msgspec.structs.replace(good, **changes)


def _greeting(cluster_id: int, incarnation: bytes, offers: dict[str, bytes]) -> dict[str, Any]:
    who = {"cluster_id": cluster_id, "incarnation": incarnation, "offers": offers}
    where = {
        "versions": VERSIONS,
        "features": FEATURES,
        "pid": os.getpid(),
        "host": "stranger",
        "remote_accessible": False,
        "transport": None,
    }
    return who | where | {"nonce": bytes(16), "share": b""}


def rendezvous_of(welcome: wire.Welcome) -> str:
    """Return the name of a listener's same-host rendezvous."""
    return welcome.offers["shm"][COOKIE_BYTES:].decode()


def lane_token_of(welcome: wire.Welcome) -> bytes:
    """Return what opens a listener to the data lanes of this link."""
    return welcome.offers["tcp"]


class Plain:
    """A codec: what is said goes as it is."""

    preamble = wire.CONTROL_PREAMBLE

    def shake(self, sock: socket.socket) -> None:
        """Authenticate both ends, unless they are."""

    def put(self, data: bytes) -> bytes:
        return data

    def opened(self, data: bytes) -> bytes:
        return data


class Tls(Plain):
    preamble = wire.TLS_PREAMBLE

    def __init__(self, tls: TlsSession) -> None:
        self.tls = tls

    def shake(self, sock: socket.socket) -> None:
        if self.tls.authenticated:
            return
        sock.sendall(self.tls.shake())
        while not self.tls.authenticated:
            data = sock.recv(65536)
            assert data, "a peer with the secret was not authenticated"
            sock.sendall(self.tls.shake(data))

    def put(self, data: bytes) -> bytes:
        return self.tls.encrypt(data)

    def opened(self, data: bytes) -> bytes:
        return self.tls.decrypt(data)


class LaneKeys(Plain):
    def __init__(self, keys: Keys) -> None:
        self._sealer, self._opener = Sealer(keys[0]), Opener(keys[1])

    def put(self, data: bytes) -> bytes:
        return self._sealer.seal(data)

    def opened(self, data: bytes) -> bytes:
        self._opener.feed(data)
        plain = bytes(self._opener.plain)
        self._opener.plain.clear()
        return plain


class Stranger:
    """A peer at a listener's port; ``known`` are secrets that prove it was there before. A context manager."""

    def __init__(
        self,
        port: int | None,
        cluster_id: int = 66,
        incarnation: bytes | None = None,
        known: PeerSecrets | None = None,
        codec: Plain | None = None,
    ) -> None:
        assert port is not None
        self.codec = codec or Plain()
        self.known = PeerSecrets() if known is None else known
        self.cluster_id = cluster_id
        self.incarnation = incarnation or secrets.token_bytes(16)
        self.sock = socket.create_connection(("127.0.0.1", port), _SECONDS)
        self._met: list[wire.Greeting] = []  # its Hello, the Welcome
        self._parser = FrameParser()
        self.lanes: list[socket.socket] = []
        self._guards: GuardTable | None = None

    def say(self, *what: bytes | wire.Message) -> None:
        said = b"".join(each if isinstance(each, bytes) else wire.frame(each) for each in what)
        self.sock.sendall(self.codec.put(said))

    def hear(self, kind: type[M]) -> M:
        """Return the next message of a kind; others are skipped."""
        while True:
            while (payload := self._parser.take()) is None:
                data = self.sock.recv(65536)
                assert data, f"hung up on while waiting for {kind}"
                self._parser.feed(self.codec.opened(data))
            message = wire.decode(payload)
            self._met += [message] if isinstance(message, wire.Welcome) else []
            if isinstance(message, kind):
                return message

    def is_hung_up_on(self) -> bool:
        """Wait for the end of the stream; whatever comes before it is dropped."""
        with suppress(ConnectionResetError):
            while self.sock.recv(65536):
                pass
        return True

    def is_served(self) -> None:
        self.say(wire.Ping(4711))
        while self.hear(wire.Pong).id != 4711:
            pass

    def hello(self, **changes: object) -> wire.Hello:
        if self._guards is None:
            self._guards = GuardTable(slots=2)
        self._met = [hello_of(self.cluster_id, self.incarnation, self._guards.cookie, **changes)]
        return cast("wire.Hello", self._met[0])

    def choose(self, transport: str, sequence: int, **changes: Any) -> None:
        """Say which transport, with the digest of the greetings as they were."""
        agreed = Transcript.of(*self._met).digest()
        chosen = wire.TransportChoice(transport, "a stranger's reason", sequence, agreed)
        self.say(msgspec.structs.replace(chosen, **changes))

    def link(self, sequence: int = 1, over: str = "shm", choice: dict[str, Any] | None = None, **hello: Any) -> None:
        """Become linked, properly but for the changes of its choice and its Hello; over tcp with two ``lanes``."""
        said, deadline = self.hello(**hello), Deadline(int((self.sock.gettimeout() or _SECONDS) * 1e3))
        self.sock.sendall(self.codec.preamble)
        self.codec.shake(self.sock)
        self.say(said)
        welcome = self.hear(wire.Welcome)
        if over == "tcp":
            self.lanes = [
                each.socket for each in dial_lanes(self.sock.getpeername(), lane_token_of(welcome), 2, deadline)
            ]
        else:
            assert self._guards is not None
            exports = Exports(self.incarnation, {}, self._guards, writable=said.remote_accessible)
            exchange_memory(rendezvous_of(welcome), said.token, exports, deadline).close()
        transcript = Transcript.of(said, welcome)
        proof = self.known.prove(welcome.incarnation, b"initiator", transcript)
        share = b"" if proof else new_share()
        self.choose(over, sequence, **{"proof": proof, "share": share} | (choice or {}))
        linked = self.hear(wire.Linked)
        if share and linked.share:
            self.known.agree(welcome.incarnation, share, linked.share, transcript)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for sock in (self.sock, *self.lanes):
            sock.close()
        if self._guards is not None:
            self._guards.close()


@contextmanager
def listener(behave: Callable[[socket.socket], None]) -> Iterator[int]:
    """Listen, and treat every connection, each in its own thread, as ``behave`` says; yield the port."""
    stop = threading.Event()
    servants: list[threading.Thread] = []

    def serve(sock: socket.socket) -> None:
        with sock, suppress(OSError):
            sock.settimeout(_SECONDS)
            behave(sock)
            # Nothing more to say: stay until the other side hangs up or the test is over.
            while sock.recv(65536) and not stop.is_set():
                pass

    def accept(server: socket.socket) -> None:
        while not stop.is_set():
            with suppress(TimeoutError):
                servants.append(threading.Thread(target=serve, args=(server.accept()[0],)))
                servants[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.05)
        acceptor = threading.Thread(target=accept, args=(server,))
        acceptor.start()
        try:
            yield server.getsockname()[1]
        finally:
            stop.set()
            for thread in (acceptor, *servants):
                thread.join()


def read_hello(sock: socket.socket) -> wire.Hello:
    """Read the preamble and the Hello of a peer that dials a listener of the test."""
    parser, preamble = FrameParser(), sock.recv(wire.PREAMBLE_BYTES, socket.MSG_WAITALL)
    if preamble.startswith(LANE_PREAMBLE):
        raise ConnectionAbortedError("a data lane: these listeners have none")
    if len(preamble) < wire.PREAMBLE_BYTES:
        raise ConnectionAbortedError("the dialer gave up before it said anything")
    assert preamble == wire.CONTROL_PREAMBLE
    while (payload := parser.take()) is None:
        data = sock.recv(65536)
        assert data
        parser.feed(data)
    hello = wire.decode(payload)
    assert isinstance(hello, wire.Hello)
    return hello


@contextmanager
def silent_port() -> Iterator[int]:
    """A port where connections are accepted by the kernel and never answered."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def full_port() -> Iterator[int]:
    """A port whose queue is full: the kernel answers no further connection, as if there were no host."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as queue:
        for _ in range(3):
            waiting = queue.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()[1]
