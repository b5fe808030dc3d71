"""A relay between the two ends of a sealed control connection that does one wrong thing to it.

    python -m faults sealed-control --trials 100000 --links 20000

It does what :mod:`faults.sealed_relay` does to lanes, in the handshake and behind it, in either direction. There
are two kinds of trials:

``--trials``
    Two :class:`~llm_datadist._links.channel.Channel` with their seals, which authenticate each other through the relay
    and send messages both ways. No end may take a message that was not sent, nor one that left after the wrong byte.
``--links``
    Two LLMDataDist that link through the relay, pull and push, and compare every byte. No pull that needs the control
    connection may end well after the wrong byte, and every call has to end.

The only changes that an end may overlook are those that TLS 1.3 tells it to ignore in the handshake
(:func:`faults.tls.meaning`); they are counted as "neutral".
"""

from __future__ import annotations

import argparse
import itertools
import random
import select
import selectors
import socket
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from faults.fuzz import Finding
from faults.fuzz import trial as silence
from faults.fuzz.stage import Stage
from faults.harness import say
from faults.sealed_relay import FAULTS, RECORD_FAULTS, Flow, Framing, Report
from faults.tls import HEADER, meaning
from llm_datadist._links.channel import Channel
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import PREAMBLE_BYTES, SEALED_PREAMBLE, Failed, Located, frame
from llm_datadist._links.seal import Seal
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, LLMException

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist._links.messages import Message

TLS_RECORDS: Final = Framing(
    HEADER.size,
    lambda head: HEADER.size + int(HEADER.unpack_from(head)[2]),
    lambda record: record[:3] + (len(record) - HEADER.size - 1).to_bytes(2, "big") + record[HEADER.size : -1],
)
_NEVER: Final = 1 << 60
_RECORD_BYTES, _RECORD_OVERHEAD = 1 << 14, 22
_SECONDS: Final = 30.0
_QUIET_SECONDS: Final = 0.004
"""When nothing moves for so long the relay hangs up: an end may wait for what was dropped."""
_LINK_QUIET_SECONDS: Final = 0.03


class Way:
    """One direction through the relay: what came, and what went on instead."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.came, self.went = bytearray(), bytearray()

    def feed(self, data: bytes) -> bytes:
        """Return what goes on instead of these bytes."""
        self.came += data
        out = self.flow.feed(data)
        self.went += out
        return out

    @property
    def harmed(self) -> bool:
        """Whether what went is another stream than what came, so far."""
        return not meaning(bytes(self.came)).startswith(meaning(bytes(self.went)))


def ways(rng: random.Random, nbytes: int, most: int) -> tuple[str, Way, Way]:
    """Return a fault, and both directions, of which one has it, in the handshake or behind it.

    Args:
        rng: Chooses.
        nbytes: About so many are of the handshake.
        most: Faults of bytes are not later.
    """
    fault = rng.choice(FAULTS)
    first, last = (0, 6) if fault in RECORD_FAULTS else (0, nbytes)
    if rng.random() < 0.6:
        first, last = (5, 14) if fault in RECORD_FAULTS else (nbytes, most)
    faulty = Flow(fault, rng.randrange(first, last), rng, TLS_RECORDS)
    honest = Flow("drop record" if fault in RECORD_FAULTS else "flip", _NEVER, rng, TLS_RECORDS)
    faulty.other = honest
    up, down = (faulty, honest) if rng.random() < 0.5 else (honest, faulty)
    return fault, Way(up), Way(down)


# --- two channels ----------------------------------------------------------------------------------------------------


class _End:
    """One channel, and what it took."""

    def __init__(self, control: ControlLoop, sock: socket.socket, seal: Seal) -> None:
        self.taken: list[Message] = []
        self.lost = threading.Event()
        self.channel = Channel(control, sock, self.taken.append, lambda reason: self.lost.set(), seal=seal)


class Channels:
    """The scene of the trials with two channels. A context manager."""

    def __init__(self, seed: int, *, sealed: bool) -> None:
        self._rng, self._sealed = random.Random(seed), sealed
        self._control = ControlLoop()
        self.report = Report()

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as folder:
            credentials = Credentials(CredentialFiles(secrets=new_secret(Path(folder) / "secrets", "a")))
            # Not through the credentials, which look at their file each time: it is gone when the trials begin.
            self._contexts = credentials._current()
        self._control.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.stop()

    def trial(self) -> None:
        """Authenticate two ends through the relay, let them talk, and see what they took."""
        fault, up, down = ways(self._rng, 1000, 8000)
        name = f"trial {self.report.trials}: {fault}"
        kind: Callable[..., Seal] = Seal if self._sealed else _NoSeal
        seals = kind(self._contexts[0], server_side=False), kind(self._contexts[1], server_side=True)
        if _shake(*seals, up, down):
            if (up.flow.hit or down.flow.hit) and not (up.harmed or down.harmed):
                self.report.ended["neutral"] += 1
            self._talk(name, seals, (up, down))
        elif up.flow.hit or down.flow.hit:
            self.report.ended["handshake refused"] += 1
        else:
            self.report.wrong.append(f"{name}: a handshake that nobody touched came to nothing")
        self.report.trials += 1
        self.report.hit[fault] += up.flow.hit or down.flow.hit

    def _talk(self, name: str, seals: tuple[Seal, Seal], directions: tuple[Way, Way]) -> None:
        marks = [(len(way.came), len(way.went), way.harmed) for way in directions]
        said = [_messages(self._rng), _messages(self._rng)]
        near, here = socket.socketpair()
        far, there = socket.socketpair()
        ends = [_End(self._control, sock, seal) for sock, seal in zip((near, far), seals, strict=True)]
        takers = ends[::-1]
        with here, there:
            for end, messages in zip(ends, said, strict=True):
                end.channel.begin()
                for message in messages:
                    with suppress(LLMException):  # it has ended already
                        end.channel.send(message)
            counts = [len(messages) for messages in said]
            _carry((here, there), directions, lambda: [len(taker.taken) for taker in takers] == counts)
        for end in ends:
            if not end.lost.wait(_SECONDS):
                self.report.hung.append(name)
                end.channel.close("it hung")
        for way, mark, messages, taker in zip(directions, marks, said, takers, strict=True):
            allowed = 0 if mark[2] else _intact(way, mark, messages)
            if len(taker.taken) > allowed or taker.taken != messages[: len(taker.taken)]:
                self.report.wrong.append(f"{name}: {len(taker.taken)} messages were taken, {allowed} were right")
        reasons = [end.channel.reason for end in ends]
        found = "tampered with" if any("tampered" in reason for reason in reasons) else "cut short"
        whole = all(len(taker.taken) == len(messages) for taker, messages in zip(takers, said, strict=True))
        self.report.ended["good" if whole else found] += 1


class _NoSeal(Seal):
    """Lets everything through: with it the trials must find something wrong."""

    def shake(self, received: bytes = b"") -> bytes:
        self.authenticated = True
        return b""

    def seal(self, data: bytes) -> bytes:
        return data

    def open(self, received: bytes) -> bytes:
        return received


def _shake(client: Seal, server: Seal, up: Way, down: Way) -> bool:
    """Return whether both ends are authenticated, as far as each knows."""
    try:
        flight = up.feed(client.shake())
        for _ in range(2):
            answer = down.feed(server.shake(flight))
            flight = b"" if client.authenticated else up.feed(client.shake(answer))
    except AuthFailed:
        return False
    return client.authenticated and server.authenticated


def _messages(rng: random.Random) -> list[Message]:
    """Return messages of one record and of several."""
    found: list[Message] = []
    for number in range(rng.randrange(1, 6)):
        count = rng.choice((0, 1, 3, 2000))
        found.append(Failed(number, 1, "x" * rng.choice((0, 100, 3000))))
        if rng.random() < 0.3:
            found.append(Located(number, rng.randbytes(8 * count), rng.randbytes(4 * count), b"", rng.random() < 0.5))
    return found


def _intact(way: Way, mark: tuple[int, int, bool], messages: list[Message]) -> int:
    """Return how many of the messages went on whole, before the first byte that differs."""
    both = zip(way.came[mark[0] :], way.went[mark[1] :], strict=False)
    left = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], both))
    for count, message in enumerate(messages):
        nbytes = len(frame(message))
        left -= nbytes + _RECORD_OVERHEAD * -(-nbytes // _RECORD_BYTES)
        if left < 0:
            return count
    return len(messages)


def _carry(socks: tuple[socket.socket, socket.socket], directions: tuple[Way, Way], over: Callable[[], bool]) -> None:
    """Be the relay until an end hangs up, all is said, or nothing moves."""
    here, there = socks
    ways_of = {here: (there, directions[0]), there: (here, directions[1])}
    out = {here: bytearray(), there: bytearray()}
    for sock in socks:
        sock.setblocking(False)
    while not over():
        ready, room, _ = select.select(socks, [sock for sock in socks if out[sock]], [], _QUIET_SECONDS)
        if not (ready or room):
            return
        try:
            for sock in ready:
                if not (data := sock.recv(1 << 20)):
                    return
                to, way = ways_of[sock]
                out[to] += way.feed(data)
            for sock in socks:
                with suppress(BlockingIOError):
                    del out[sock][: sock.send(out[sock])]
        except ConnectionError:
            return
        if any(way.flow.cut for way in directions):
            return


# --- two ends that are linked ----------------------------------------------------------------------------------------


class _Relay:
    """Listens in front of a victim, in a thread of its own; the first control connection of a trial goes its ways.

    Lanes are carried as they are; a second control connection is not. A context manager.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._selector = selectors.DefaultSelector()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self._wake, self._bell = socket.socketpair()
        self._ways: tuple[Way, Way] | None = None  # of the control connection to come
        self.over = threading.Event()  # the control connection of this trial
        self._pairs: dict[socket.socket, tuple[socket.socket, Way | None]] = {}
        self._changed_at = 0.0
        self._current: tuple[Way, Way] | None = None
        self._thread = threading.Thread(target=self._run, name="llm-datadist-relay")

    def __enter__(self) -> Self:
        self._selector.register(self._server, selectors.EVENT_READ)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bell.close()
        self._thread.join()
        for sock in (self._server, self._wake, *self._pairs):
            sock.close()
        self._selector.close()

    def plan(self, up: Way, down: Way) -> None:
        """Let the next control connection go these ways. Called while there is none."""
        self.over.clear()
        self._ways = up, down

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select(_LINK_QUIET_SECONDS):
                sock = key.fileobj
                assert isinstance(sock, socket.socket)
                if sock is self._wake:
                    return
                if sock is self._server:
                    self._accept()
                elif sock in self._pairs:
                    self._pass_on(sock)
            self._hang_up_if_quiet()

    def _accept(self) -> None:
        dialler, _ = self._server.accept()
        dialler.settimeout(_SECONDS)
        preamble = dialler.recv(PREAMBLE_BYTES, socket.MSG_WAITALL)
        control = preamble == SEALED_PREAMBLE
        planned, self._ways = (self._ways, None) if control else (None, self._ways)
        if control and planned is None:
            dialler.close()
            return
        listener = socket.create_connection(self._target, _SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        dialler.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        up, down = planned or (None, None)
        if planned is not None:
            self._current, self._changed_at = planned, time.monotonic()
        self._pairs |= {dialler: (listener, up), listener: (dialler, down)}
        for sock in (dialler, listener):
            self._selector.register(sock, selectors.EVENT_READ)
        listener.sendall(preamble)

    def _pass_on(self, sock: socket.socket) -> None:
        """Carry what came; the ends read, so a send does not wait for long."""
        other, way = self._pairs[sock]
        try:
            data = sock.recv(1 << 16)
            if data:
                other.sendall(data if way is None else way.feed(data))
        except OSError:
            data = b""
        if way is not None:
            self._changed_at = time.monotonic()
        if not data or (way is not None and way.flow.cut):
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        other, way = self._pairs.pop(sock)
        del self._pairs[other]
        for each in (sock, other):
            self._selector.unregister(each)
            each.close()
        if way is not None:
            self._current = None
            self.over.set()

    def _hang_up_if_quiet(self) -> None:
        """After the fault an end may wait for what was dropped, and nothing moves."""
        if self._current is None or not any(way.flow.hit for way in self._current):
            return
        if time.monotonic() - self._changed_at > _LINK_QUIET_SECONDS:
            self._end(next(sock for sock, (_, way) in self._pairs.items() if way is not None))


class Links:
    """The scene of the trials with two linked ends. A context manager."""

    def __init__(self, seed: int, transport: str) -> None:
        self._rng = random.Random(seed)
        self._transport = transport
        self.report = Report()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            secrets = str(new_secret(folder / "secrets", "a"))
            extra = {"llm.AuthSecretFile": secrets, "llm.Transport": self._transport}
            self._stage = undo.enter_context(Stage(rca=True, extra=extra))
            self._relay = undo.enter_context(_Relay(("127.0.0.1", self._stage.port)))
            self._stage.unlink()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def trial(self) -> None:
        """Link through the relay, and pull and push until the link has ended."""
        fault, up, down = ways(self._rng, 1500, 1850)
        name = f"link {self.report.trials}, {self._transport}: {fault}"
        self._relay.plan(up, down)
        try:
            self._stage.link(self._relay.port)
        except Finding:
            ended = "link refused"
            if not (up.flow.hit or down.flow.hit):
                self.report.wrong.append(f"{name}: a link that nobody touched was refused")
        else:
            ended = self._use(name, up, down)
        self._stage.unlink()
        if not self._relay.over.wait(_SECONDS):
            self.report.hung.append(name)
        self.report.ended[ended] += 1
        self.report.trials += 1
        self.report.hit[fault] += up.flow.hit or down.flow.hit

    def _use(self, name: str, up: Way, down: Way) -> str:
        """Pull, which asks the owner each time, and push; return how it ended."""
        for _ in range(6):
            harmed, start = up.harmed or down.harmed, time.monotonic()
            try:
                self._stage.look()
                self._stage.push()
            except LLMException as error:
                if not (up.flow.hit or down.flow.hit):
                    self.report.wrong.append(f"{name}: a call that nobody touched failed: {error}")
                return "link ended"
            except Finding as error:
                self.report.wrong.append(f"{name}: {error}")
                return "wrong bytes"
            finally:
                if time.monotonic() - start > _SECONDS:
                    self.report.hung.append(name)
            if harmed:
                self.report.wrong.append(f"{name}: a pull went on after the wrong byte")
        return "neutral" if up.flow.hit or down.flow.hit else "good"


def run(trials: int, seed: int, *, sealed: bool = True) -> Report:
    """Do so many trials with two channels."""
    with Channels(seed, sealed=sealed) as channels:
        for _ in range(trials):
            channels.trial()
        return channels.report


def run_links(trials: int, seed: int, transport: str) -> Report:
    """Do so many trials with two linked ends."""
    with Links(seed, transport) as links, silence(f"links over {transport}", seed):
        for _ in range(trials):
            links.trial()
        return links.report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from the command line; 1 when something was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--trials", type=int, default=100_000, help="with two channels")
    parser.add_argument("--links", type=int, default=20_000, help="with two linked ends, over shm and over tcp")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)
    reports = [run(options.trials, options.seed)]
    reports += [run_links(options.links // 2, options.seed, transport) for transport in ("shm", "tcp")]
    for name, report in zip(("channels", "links over shm", "links over tcp"), reports, strict=True):
        for line in (f"{name}: {report}", *report.wrong[:10], *report.hung[:10]):
            say(line)
    return int(any(report.wrong or report.hung for report in reports))
