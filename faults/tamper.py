"""One wrong thing to sealed bytes on their way: data lanes and control connections, by a relay or in hand.

    python -m faults tamper --lanes 100000 --channels 100000 --links 20000

It changes, drops, repeats, inserts or cuts bytes, or drops, repeats, swaps, replaces, shortens or reflects records, in
either direction, of a control connection in the handshake or behind it. There are three kinds of trials:

``--lanes``
    A job over a lane of its own. None may end well with wrong bytes or touch memory beside its blocks, and every job
    has to end.
``--channels``
    Two :class:`~llm_datadist._links.channel.Channel` with TLS sessions, which authenticate each other and send messages
    both ways. No end may take a message that was not sent, nor one that left after the wrong byte.
``--links``
    Two LLMDataDist that link through the relay, pull and push, and compare every byte. No pull that needs the control
    connection may end well after the wrong byte, and every call has to end.

``--plain`` does the same without encryption to lanes and channels, which must be found wrong: else nothing was looked
at.
The only changes that an end may overlook are those that TLS 1.3 tells it to ignore in the handshake
(:func:`faults.sealing.meaning`); they are counted as "neutral".
"""

import argparse
import itertools
import random
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from faults.fuzz import Finding
from faults.fuzz import trial as silence
from faults.fuzz.stage import Stage
from faults.harness import Report, holds_within
from faults.relay import BYTE_HARM, RECORD_HARM, Relay, Way, both_ways, carry
from faults.sealing import FAR_KEYS, LANE_RECORDS, NEAR_KEYS, TLS_RECORDS
from llm_datadist import _native as native
from llm_datadist._links.channel import Channel
from llm_datadist._links.credentials import Credentials, new_secret
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import Failed, Located, Message, frame
from llm_datadist._links.tls_session import TlsSession
from llm_datadist._transport.moves import decode_request
from llm_datadist.config import CredentialFiles
from llm_datadist.errors import AuthFailed, LLMException

Bytes = NDArray[np.uint8]
HARM: Final = (*BYTE_HARM, *RECORD_HARM)
_EXTENT: Final = 400 << 10
_HANDLE: Final = b"memory"
_RECORD_BYTES, _RECORD_OVERHEAD = 1 << 14, 22
_SECONDS: Final = 30.0


@dataclass
class Tampered(Report):
    """What came of the trials of one kind; ``faults`` ended well with wrong bytes, or took what was not sent."""

    trials: int = 0
    hit: Counter[str] = field(default_factory=Counter)
    hung: list[str] = field(default_factory=list)

    def line(self) -> str:
        hits = ", ".join(f"{name} {count}" for name, count in sorted(self.hit.items()))
        found = f"{self.trials} trials: {len(self.faults)} wrong, {len(self.hung)} hung"
        return f"{self.name}: {found}; {super().line()}; hit by: {hits}"


# --- lanes ------------------------------------------------------------------------------------------------------------


def _answer(engine: native.LaneEngine, event: native.LaneEvent, memory: native.Tensors) -> None:
    if isinstance(event, native.LaneLost):
        return
    write = isinstance(event, native.WriteAsked)
    try:
        engine.reply(event.lane, event.id, decode_request(event.meta).plan, memory, [], 0, write=write)
    except LLMException as error:
        engine.refuse(event.lane, event.id, 1, str(error))


class Lanes:
    def __init__(self, seed: int, *, sealed: bool) -> None:
        self._near, self._far = native.LaneEngine(1), native.LaneEngine(1)
        self._sealed = sealed
        self._rng, noise = random.Random(seed), np.random.default_rng(seed)
        self._ours, self._theirs = (noise.integers(0, 256, _EXTENT, np.uint8) for _ in range(2))
        self.report = Tampered("lanes", seed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._near.close()
        self._far.close()

    def trial(self) -> None:
        rng = self._rng
        plan, write, mapped = self._plan(), rng.random() < 0.5, rng.random() < 0.7
        fault = rng.choice(HARM if self._sealed else BYTE_HARM)
        against_payload = rng.random() < 0.3
        nbytes = 60 if against_payload else rng.choice((60, plan.nbytes + 60))
        at = rng.choice((0, 0, 1, 2)) if fault in RECORD_HARM else rng.randrange(nbytes)
        ways = both_ways(fault, at, rng, LANE_RECORDS, backwards=against_payload == write)
        near, far = (
            native.Tensors(np.array([memory.ctypes.data], np.uint64), _EXTENT, mapped=mapped)
            for memory in (self._ours, self._theirs)
        )
        dst, src = (self._theirs, self._ours) if write else (self._ours, self._theirs)
        before = dst.copy()
        (ours, here), (theirs, there) = socket.socketpair(), socket.socketpair()

        def serve() -> None:
            for event in self._far.poll_events():
                _answer(self._far, event, far)

        with here, there:
            lane, far_lane = self._join(ours, theirs, far)
            job = self._near.start(lane, native.encode_request(_HANDLE, _EXTENT, plan, write), plan, near, write=write)
            carry(here, there, ways, serve, (self._far.event_fd(),))
        outcome = self._near.wait(job, time.monotonic_ns() + int(_SECONDS * 1e9))
        self._near.drop_lane(lane)
        self._far.drop_lane(far_lane)
        self._near.poll_events()
        self._far.poll_events()
        name = f"trial {self.report.trials}: {fault}, {'write' if write else 'read'} of {plan.nbytes}, {outcome}"
        self._judge(name, plan, (dst, src, before), outcome.ending)
        self.report.trials += 1
        self.report.hit[fault] += any(way.hit for way in ways)

    def _join(self, ours: socket.socket, theirs: socket.socket, far: native.Tensors) -> tuple[int, int]:
        """Add the lane at both ends; the far one may have to ask its owner for each request."""
        grants = None
        if self._rng.random() < 0.6:
            grants = native.ReplyCache()
            for write in (False, True):
                grants.keep(_HANDLE, write, far.native, [], 0, far.mapped)
        far_lane = self._far.reserve_lane()
        self._far.attach_lane(far_lane, theirs.detach(), grants, FAR_KEYS if self._sealed else None)
        return self._near.add_lane(ours.detach(), NEAR_KEYS if self._sealed else None), far_lane

    def _plan(self) -> native.Plan:
        """Return up to three runs apart from each other: small ones, around a record's size, and large ones."""
        rng = self._rng
        most = rng.choice((100, 3000, 3000, 23_000, 120_000))
        room = _EXTENT // 3
        dst, src = (rng.sample((0, room, 2 * room), 3) for _ in range(2))
        runs = [
            (d + rng.randrange(100), s + rng.randrange(100), rng.randrange(1, most))
            for d, s in zip(dst, src, strict=True)
        ]
        runs = runs[: rng.randrange(1, 4)]
        return native.Plan(0, 0, 1, np.array(runs, np.uint64), False, sum(run[2] for run in runs))

    def _judge(self, name: str, plan: native.Plan, memory: tuple[Bytes, Bytes, Bytes], ending: native.Ending) -> None:
        dst, src, before = memory
        self.report.outcomes[ending.name.lower()] += 1
        if ending is native.Ending.TIMEOUT:
            self.report.hung.append(name)
        expected = before.copy()
        for to, from_, count in plan.runs.tolist():
            # Where a job failed its blocks may have anything.
            good, any_ = src[from_ : from_ + count], dst[to : to + count]
            expected[to : to + count] = good if ending is native.Ending.GOOD else any_
        if not np.array_equal(dst, expected):
            self.report.faults.append(name)
        dst[:] = before


# --- control connections: two channels --------------------------------------------------------------------------------


def ways(rng: random.Random, nbytes: int, most: int) -> tuple[str, tuple[Way, Way]]:
    """Return a fault, and both ways, of which one has it: in the handshake, of about ``nbytes``, or behind it."""
    fault = rng.choice(HARM)
    first, last = (0, 6) if fault in RECORD_HARM else (0, nbytes)
    if rng.random() < 0.6:
        first, last = (5, 14) if fault in RECORD_HARM else (nbytes, most)
    at = rng.randrange(first, last)
    return fault, both_ways(fault, at, rng, TLS_RECORDS, backwards=rng.random() < 0.5)


class _End:
    def __init__(self, control: ControlLoop, sock: socket.socket, tls: TlsSession) -> None:
        self.taken: list[Message] = []
        self.lost = threading.Event()
        self.channel = Channel(control, sock, self.taken.append, lambda reason: self.lost.set(), tls=tls)


class Channels:
    def __init__(self, seed: int, *, sealed: bool) -> None:
        self._rng, self._sealed = random.Random(seed), sealed
        self._control = ControlLoop()
        self.report = Tampered("channels", seed)

    def __enter__(self) -> Self:
        with tempfile.TemporaryDirectory() as folder:
            credentials = Credentials(CredentialFiles(secrets=new_secret(Path(folder) / "secrets", "a")))
            # Not through the credentials, which look at their file each time: it is gone when the trials begin.
            self._contexts = credentials.current()
        self._control.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._control.stop()

    def trial(self) -> None:
        fault, both = ways(self._rng, 1000, 8000)
        up, down = both
        name = f"trial {self.report.trials}: {fault}"
        kind: Callable[..., TlsSession] = TlsSession if self._sealed else _PlainSession
        sessions = kind(self._contexts[0], server_side=False), kind(self._contexts[1], server_side=True)
        if _shake(*sessions, up, down):
            if (up.hit or down.hit) and not (up.harmed or down.harmed):
                self.report.outcomes["neutral"] += 1
            self._talk(name, sessions, both)
        elif up.hit or down.hit:
            self.report.outcomes["handshake refused"] += 1
        else:
            self.report.faults.append(f"{name}: a handshake that nobody touched came to nothing")
        self.report.trials += 1
        self.report.hit[fault] += up.hit or down.hit

    def _talk(self, name: str, sessions: tuple[TlsSession, TlsSession], directions: tuple[Way, Way]) -> None:
        marks = [(len(way.came), len(way.went), way.harmed) for way in directions]
        said = [_messages(self._rng), _messages(self._rng)]
        near, here = socket.socketpair()
        far, there = socket.socketpair()
        ends = [_End(self._control, sock, tls) for sock, tls in zip((near, far), sessions, strict=True)]
        takers = ends[::-1]
        with here, there:
            for end, messages in zip(ends, said, strict=True):
                end.channel.begin()
                for message in messages:
                    with suppress(LLMException):  # it has ended already
                        end.channel.send(message)
            counts = [len(messages) for messages in said]
            carry(here, there, directions, lambda: [len(taker.taken) for taker in takers] == counts)
        for end in ends:
            if not end.lost.wait(_SECONDS):
                self.report.hung.append(name)
                end.channel.close("it hung")
        for way, mark, messages, taker in zip(directions, marks, said, takers, strict=True):
            allowed = 0 if mark[2] else _intact(way, mark, messages)
            if len(taker.taken) > allowed or taker.taken != messages[: len(taker.taken)]:
                self.report.faults.append(f"{name}: {len(taker.taken)} messages were taken, {allowed} were right")
        reasons = [end.channel.reason for end in ends]
        found = "tampered with" if any("tampered" in reason for reason in reasons) else "cut short"
        whole = all(len(taker.taken) == len(messages) for taker, messages in zip(takers, said, strict=True))
        self.report.outcomes["good" if whole else found] += 1


class _PlainSession(TlsSession):
    """Lets everything through: with it the trials must find something wrong."""

    def shake(self, received: bytes = b"") -> bytes:
        self.authenticated = True
        return b""

    def encrypt(self, data: bytes) -> bytes:
        return data

    def decrypt(self, received: bytes) -> bytes:
        return received


def _shake(client: TlsSession, server: TlsSession, up: Way, down: Way) -> bool:
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


# --- control connections: two ends that are linked --------------------------------------------------------------------


class Links:
    def __init__(self, seed: int, transport: str) -> None:
        self._rng = random.Random(seed)
        self._transport = transport
        self.report = Tampered(f"links over {transport}", seed)

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            folder = Path(undo.enter_context(tempfile.TemporaryDirectory()))
            secrets = str(new_secret(folder / "secrets", "a"))
            extra = {"llm.AuthSecretFile": secrets, "llm.Transport": self._transport}
            self._stage = undo.enter_context(Stage(rca=True, extra=extra))
            self._stage.unlink()
            undo.enter_context(silence(self.report.name, self.report.asked))
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def trial(self) -> None:
        fault, (up, down) = ways(self._rng, 1500, 1850)
        name = f"link {self.report.trials}, {self._transport}: {fault}"
        with Relay(("127.0.0.1", self._stage.port), (up, down)) as relay:
            try:
                self._stage.link(relay.port)
            except Finding:
                ended = "link refused"
                if not (up.hit or down.hit):
                    self.report.faults.append(f"{name}: a link that nobody touched was refused")
            else:
                ended = self._use(name, up, down)
            self._stage.unlink()
            if not holds_within(lambda: all(each.over for each in relay.carried("control")), _SECONDS):
                self.report.hung.append(name)
        self.report.outcomes[ended] += 1
        self.report.trials += 1
        self.report.hit[fault] += up.hit or down.hit

    def _use(self, name: str, up: Way, down: Way) -> str:
        """Pull, which asks the owner each time, and push; return how it ended."""
        for _ in range(6):
            harmed, start = up.harmed or down.harmed, time.monotonic()
            try:
                self._stage.look()
                self._stage.push()
            except LLMException as error:
                if not (up.hit or down.hit):
                    self.report.faults.append(f"{name}: a call that nobody touched failed: {error}")
                return "link ended"
            except Finding as error:
                self.report.faults.append(f"{name}: {error}")
                return "wrong bytes"
            finally:
                if time.monotonic() - start > _SECONDS:
                    self.report.hung.append(name)
            if harmed:
                self.report.faults.append(f"{name}: a pull went on after the wrong byte")
        return "neutral" if up.hit or down.hit else "good"


def run(scene: Lanes | Channels | Links, trials: int) -> Tampered:
    with scene:
        for _ in range(trials):
            scene.trial()
    return scene.report


def _judged(sealed: bool, scene: Callable[[], Lanes | Channels | Links], trials: int) -> tuple[str, bool]:
    report = run(scene(), trials)
    text = "\n    ".join([report.line(), *report.faults[:10], *report.hung[:10]])
    return text, not report.hung and bool(report.faults) is not sealed


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    """Run the scenes side by side, each in a process of its own: none needs a whole processor."""
    sealed, seed = not options.plain, options.seed
    scenes: list[tuple[Callable[[], Lanes | Channels | Links], int]] = [
        (partial(Lanes, seed, sealed=sealed), options.lanes),
        (partial(Channels, seed, sealed=sealed), options.channels),
        *((partial(Links, seed, each), options.links // 2) for each in ("shm", "tcp") if sealed),
    ]
    with ProcessPoolExecutor(len(scenes), get_context("spawn")) as pool:
        yield from pool.map(partial(_judged, sealed), *zip(*scenes, strict=True))


OPTIONS: Final = {
    "lanes": (100_000, "jobs"),
    "channels": (100_000, "pairs of channels"),
    "links": (20_000, "pairs of ends, over shm and over tcp"),
    "seed": (1, ""),
    "plain": (False, "without encryption, which must be found wrong"),
}
