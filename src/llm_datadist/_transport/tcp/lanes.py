"""Data lanes of one instance: TCP sockets over which the owner of memory sends or receives it.

The native engine moves the bytes and answers requests by cached replies. The control thread answers all other requests.
A broken lane fails its own transfers.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._checks import HERE
from llm_datadist._deadline import Deadline
from llm_datadist._log import links_logger as logger
from llm_datadist._native import (
    LaneEngine,
    LaneEvent,
    LaneLost,
    ReadAsked,
    ReplyCache,
    WriteAsked,
    add_load,
    least_loaded,
    usable_cpus,
)
from llm_datadist._native.public_call import elsewhere, whole
from llm_datadist._threads import Threads
from llm_datadist._transport.address import DialledSocket, preamble, read_exactly
from llm_datadist._transport.moves import MoveOwner, answer, status_of
from llm_datadist.errors import AuthFailed, LinkRefused, LLMException, LLMStatusCode, PeerLost
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable

MAX_LANES: Final = 10
"""Lanes of a peer on one link: twice what a dialer makes at most, as losses may be unnoticed here."""

LANE_PREAMBLE: Final = preamble(1)
TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
_ACCEPTED: Final = b"\x01"
_REFUSED: Final = "the peer rejected the lane token, or has lanes enough"
#: Most lanes of a link for large transfers, beside the first: between hosts several connections use a line better.
_MOST_BULK_LANES: Final = 4
#: Of one link, while all others wait.
_EVENTS_PER_TURN: Final = 4
# Limits on a lane's unsent bytes in the kernel, between hosts and within one. Without them, a hundred stuck readers
# hold gigabytes of the host's memory for TCP, and all connections lose packets.
_UNSENT_BYTES: Final = 512 << 10
_UNSENT_WITHIN_BYTES: Final = 1 << 20
# Congestion control of lanes within a host, where nothing is lost. The default of some systems, bbr, sends by timers,
# which costs a quarter of the CPU time.
_RENO: Final = b"reno"

_KEEPALIVE_SECONDS: Final = 5
# A lane counts as idle as a silent one if its last byte came at most so much later.
_AS_IDLE_NS: Final = 1_000_000
#: Limit of one attempt to dial all lanes of a link again; finalize may wait for it.
_REDIAL_MS: Final = 1000


class LaneSocket(NamedTuple):
    """Connected socket of a future lane; keys of this side and the peer if the link is encrypted."""

    socket: socket.socket
    keys: tuple[bytes, bytes] | None = None

    def __repr__(self) -> str:
        """Leave the keys out."""
        return f"<LaneSocket {self.socket!r}{', encrypted' if self.keys else ''}>"


def _expand(secret: bytes, dialer: bytes, listener: bytes) -> list[bytes]:
    """Return the dialer's proof, its key and the listener's: HKDF-Expand of the link's secret, with both nonces."""
    uses = (b"proof", b"there", b"back")
    return [hmac.digest(secret, use + dialer + listener + b"\x01", "sha256") for use in uses]


def _within_host(sock: socket.socket) -> bool:
    """Return True if both ends have one address; a host's other addresses count as other hosts."""
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:  # it has broken already
        return False


def bulk_lanes(sock: socket.socket) -> int:
    """Return how many lanes for large transfers a dialer makes on the path of a connected socket.

    Within a host more lanes than CPUs only take turns.
    """
    return min(_MOST_BULK_LANES, usable_cpus()) if _within_host(sock) else _MOST_BULK_LANES


def dial_lanes(
    address: tuple[str, int], token: bytes, count: int | None, deadline: Deadline, *, secret: bytes = b""
) -> list[LaneSocket]:
    """Connect ``count`` lanes to a listener under its ``token``; after an error none is left open. Blocks.

    None: one for small transfers, and :func:`bulk_lanes`.
    With the link's ``secret`` lanes are encrypted, and this side proves that it has the secret.
    """
    what = f"data lanes to {show_address(address)}"
    lanes: list[tuple[DialledSocket, bytes]] = []
    with ExitStack() as opened:
        while count is None or len(lanes) < count:
            lane, nonce = DialledSocket([address], deadline, what), secrets.token_bytes(NONCE_BYTES if secret else 0)
            lanes.append((lane, nonce))
            opened.callback(lane.socket.close)
            lane.connect(_tune)
            count = count or 1 + bulk_lanes(lane.socket)
            lane.send(LANE_PREAMBLE + token + nonce)
        proven = [_prove(lane, secret, nonce) for lane, nonce in lanes]
        for lane, _ in lanes:
            if lane.read(1) != _ACCEPTED:
                raise LinkRefused(f"{what}: {_REFUSED}")
            lane.socket.setblocking(True)
        opened.pop_all()
    return proven


def _prove(lane: DialledSocket, secret: bytes, nonce: bytes) -> LaneSocket:
    """Answer the listener's nonce with the proof, if there is a secret."""
    if not secret:
        return LaneSocket(lane.socket)
    theirs = b""
    while len(theirs) < NONCE_BYTES:
        if not (more := lane.read(NONCE_BYTES - len(theirs))):
            raise LinkRefused(f"{lane.what}: {_REFUSED}")
        theirs += more
    proof, there, back = _expand(secret, nonce, theirs)
    lane.send(proof)
    return LaneSocket(lane.socket, (there, back))


def _tune(sock: socket.socket) -> None:
    if sock.family in (socket.AF_INET, socket.AF_INET6):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        within = _within_host(sock)
        unsent = _UNSENT_WITHIN_BYTES if within else _UNSENT_BYTES
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, unsent)
        if within:
            with suppress(OSError):  # a system may refuse it; then its default stays
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _RENO)
        # Networks drop idle connections. TCP_USER_TIMEOUT would also end the lane of a peer that pauses its reads.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def check_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket, secret: bytes) -> LaneSocket:
    """Return the lane. Raises AuthFailed if its dialer does not prove that it has the link's secret.

    This side's nonce makes proof and keys unique: recordings of other lanes prove nothing.
    """
    if not secret:
        return LaneSocket(sock)
    nonce, mine = await read_exactly(loop, sock, NONCE_BYTES, "nonce"), secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, mine)
    proof, there, back = _expand(secret, nonce, mine)
    if not hmac.compare_digest(proof, await read_exactly(loop, sock, len(proof), "proof")):
        raise AuthFailed("it does not know the secret of the link that its data lane is for")
    return LaneSocket(sock, (back, there))


async def accept_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    _tune(sock)
    await loop.sock_sendall(sock, _ACCEPTED)


class LaneGroup:
    """The lanes of one link, their loads, and their :class:`~.connection.Recovery`. Threads: any.

    Until it begins, lanes wait as sockets, and requests in the kernel: none precedes its link.
    """

    def __init__(self, owner: Lanes, token: bytes = b"") -> None:
        self.owner = owner
        self.link: object = None  # opaque here; None until the group begins
        self.token = token  # admits lanes of the peer; empty if this side dials
        self.replies = ReplyCache()  # memory that the peer may use without asking again, and bytes that it has moved
        self.secret = b""  # encrypts the lanes, unless empty; set before the peer gets the token
        self.doubts = [0]  # newest lane with a write that ended without the owner's answer; lanes count from 1
        self.told = 0, 0  # newest lane when the owner was last told to drop all, and the Ping after that
        self.given_up = 0  # newest lane that the owner is known to have dropped
        self.reconnect: Callable[[int, Deadline], list[LaneSocket]] | None = None  # None if only the peer dials
        self.wanted = 0  # lanes, if this side dials
        self._reconnecting = threading.Lock()  # held while dialling
        self._asked = False  # to dial, by an attempt that has not begun
        # Without the lock: single operations on dicts and sets only. A lane may be suspected once too often.
        self._moved: dict[int, int] = {}  # lane -> time of its last byte (monotonic, ns); absent: never
        # Lanes on which a transfer timed out without a byte, and those as idle, until drop_suspects().
        self.suspects: set[int] = set()
        self._lock = threading.Lock()  # protects all below
        self._changed = threading.Condition(self._lock)
        self.loads: dict[int, int] = {}  # lane -> bytes of this side's jobs on it
        self._waiting: list[LaneSocket] = []
        self._begun = False
        self.closed = False

    def __len__(self) -> int:
        return len(self.loads) + len(self._waiting)

    def wait(self, sock: LaneSocket) -> bool:
        """Keep a socket until the group begins; return False if it has begun. Raises LinkRefused once closed."""
        with self._lock:
            if self.closed:
                raise LinkRefused("the link of this lane has ended")
            if not self._begun:
                self._waiting.append(sock)
            return not self._begun

    def begin(self, link: object) -> None:
        with self._lock:
            self.link, self._begun = link, True
            waiting, self._waiting = self._waiting, []
        self.owner.add(self, *waiting)

    def take(
        self, nbytes: int, deadline: Deadline | None = None, *, large: bool = False, kept: int | None = None
    ) -> int:
        """Add ``nbytes`` to the lane with the smallest load, or to ``kept``; return it. Raises PeerLost without lanes.

        ``large`` transfers leave out the oldest of several lanes. Both sides have the same order, unless one of them
        has not noticed yet that a lane is lost. With a ``deadline`` the call waits for a lane that the peer dials.
        """
        lane = self.choose(deadline, large=large) if kept is None else kept
        add_load(self.loads, lane, nbytes)  # unless it was lost, which fails the job
        return lane

    def choose(self, deadline: Deadline | None = None, *, large: bool = False) -> int:
        """Return the lane with the smallest load, as :meth:`take`."""
        if deadline is not None and not self.loads:
            self._await_lane(deadline)
        if not (lane := least_loaded(self.loads, large)):
            raise PeerLost("no data lane to the peer is left; link again", phase="copy")
        return lane

    @elsewhere
    def _await_lane(self, deadline: Deadline) -> None:
        deadline.wait_for(self._changed, lambda: self.closed or bool(self.loads))

    def put(self, lane: int, nbytes: int, *, moved: bool = False, doubtful: bool = False) -> None:
        """Subtract ``nbytes`` from a lane's load.

        ``moved``: the lane has moved bytes. ``doubtful``: a write without the owner's answer.
        """
        add_load(self.loads, lane, -nbytes, self.doubts if doubtful else None)
        if moved:
            self.moved(lane)

    def moved(self, lane: int) -> None:
        """Take note that a lane has moved bytes."""
        self._moved[lane] = time.monotonic_ns()
        self.suspects.discard(lane)

    def add(self, lane: int) -> bool:
        """Add a new lane; return False if the group is closed."""
        with self._lock:
            if not self.closed:
                self.loads[lane] = 0
                self._changed.notify_all()
            return not self.closed

    def discard(self, lane: int) -> None:
        self._moved.pop(lane, None)
        with self._lock:
            self.loads.pop(lane, None)

    def lanes(self) -> list[int]:
        with self._lock:
            return list(self.loads)

    def close(self) -> None:
        """Close all lanes, and refuse others: jobs fail, and none touches memory afterwards. Idempotent."""
        if self.owner._pid != HERE["pid"]:  # its copies end with the engine; a thread of the parent may lock
            return
        self.owner._by_token.pop(self.token, None)
        with self._lock:
            self.closed = True
            lanes, self.loads = list(self.loads), {}
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
        self.owner.drop(self, lanes)
        for sock in waiting:
            sock.socket.close()

    def suspect(self, lane: int) -> None:
        """Suspect a lane, and all as idle: the network may have dropped the connections unnoticed."""
        latest = self._moved.get(lane, 0) + _AS_IDLE_NS
        self.suspects.update({each for each in self.lanes() if self._moved.get(each, 0) <= latest}, {lane})

    def drop_suspects(self, *, peer_lives: bool) -> int:
        suspects, self.suspects = self.suspects, set()
        lost = sorted(suspects.intersection(self.lanes())) if peer_lives else []
        self.owner.drop(self, lost)
        return len(lost)

    def drop(self) -> None:
        self.owner.drop(self, self.lanes())

    @property
    def doubts_writes(self) -> bool:
        return self.doubts[0] > self.given_up

    def give_up_writes(self, tell: Callable[[], int]) -> tuple[int, int]:
        told = self.told  # read once: other threads replace it
        if self.doubts[0] > told[0]:
            newest = max([self.doubts[0], *self.lanes()])  # older than any lane dialled from here on
            self.told = told = newest, tell()
        return told

    def writes_given_up(self, newest: int) -> None:
        self.owner.drop(self, [each for each in self.lanes() if each <= newest])
        self.given_up = max(self.given_up, newest)

    @elsewhere
    def redial(self, deadline: Deadline, *, wait: bool = True) -> None:
        """Dial lost lanes again, one thread at a time; others ``wait``. Raises LLMException if no lane is left."""
        if self.reconnect is None or len(self) >= self.wanted:
            return
        while not self._reconnecting.acquire(timeout=deadline.next_turn() if wait else 0):
            if not wait or deadline.expired():
                return
        try:
            missing = self.wanted - len(self)
            if missing > 0 and not self.closed:
                self.owner.add(self, *self.reconnect(missing, deadline))
        except LLMException:
            if not len(self):
                raise
        finally:
            self._reconnecting.release()

    def redial_soon(self) -> None:
        """Dial in a thread of the owner, for which one attempt of this group waits however often the peer asks."""

        def attempt() -> None:
            self._asked = False
            try:
                self.redial(Deadline(_REDIAL_MS))
            except LLMException as error:
                # The link is ending, or the next transfer dials again.
                logger.info("data lanes to %s were not brought back: %s", self.link, error)

        if self.reconnect is not None and not self.closed and not self._asked:
            with suppress(RuntimeError):  # closed, or without a thread: the next transfer dials
                self.owner.redialling.submit(attempt)
                self._asked = True


class Lanes:
    """The lanes of all links, and the native engine, which the first lane makes: most instances need none.

    Owns: the engine, its threads and all lanes, until :meth:`close`.
    Threads: any; requests without a cached reply are answered on the control thread.
    """

    def __init__(self, threads: int, owner: MoveOwner) -> None:
        self._threads = threads
        self.owner = owner
        self._pid = HERE["pid"]
        # Single dict operations only: callers add, the control thread looks up.
        self._groups: dict[int, LaneGroup] = {}
        self._by_token: dict[bytes, LaneGroup] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._due: dict[LaneGroup, deque[LaneEvent]] = {}  # of the control thread
        self.redialling = Threads(1, "llm-datadist-lanes")  # no thread before the first lost lane
        self._making = threading.Lock()  # protects the two below
        self._engine: LaneEngine | None = None
        self._closed = False

    @property
    def engine(self) -> LaneEngine:
        if (engine := self._engine) is not None and not self._closed:
            return engine
        return self._make_engine()

    @whole
    def _make_engine(self) -> LaneEngine:
        with self._making:
            if self._closed:
                raise LinkRefused("the data lanes of this process are closed")
            if self._engine is None:
                self._engine = LaneEngine(self._threads)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._listen)
            return self._engine

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer requests from now on. Threads: control, once."""
        with self._making:
            self._loop = loop
        self._listen()

    def _listen(self) -> None:
        if self._loop is not None and self._engine is not None:
            self._loop.add_reader(self._engine.event_fd(), self._on_events)

    def stop(self) -> None:
        """Refuse new lanes and answer no request. Threads: control, before :meth:`close`. Idempotent."""
        with self._making:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None and self._engine is not None:
            loop.remove_reader(self._engine.event_fd())

    def close(self) -> None:
        """End every lane and join the threads; then none touches memory. Idempotent."""
        if self._pid != HERE["pid"]:
            self._making = threading.Lock()  # a thread that only the parent has may hold it
        with self._making:
            self._closed = True
            engine = self._engine
        if engine is not None:
            engine.close()
        if self._pid == HERE["pid"]:
            self.redialling.shutdown(cancel_futures=True)
        else:  # the parent's handshakes go on; here no other thread changes the groups
            for group in self._by_token.values():
                for sock in group._waiting:
                    sock.socket.close()
        self._groups.clear()
        self._by_token.clear()

    def open(self, socks: Iterable[LaneSocket] = (), token: bytes = b"") -> LaneGroup:
        """Return the group of a future link, which takes over the sockets."""
        group = LaneGroup(self, token)
        for sock in socks:
            group.wait(sock)
        if token:
            self._by_token[token] = group
        return group

    def group(self, token: bytes) -> LaneGroup:
        """Return the group opened with this token; an empty one if it has ended."""
        group = self._by_token.get(token)
        return LaneGroup(self, token) if group is None else group

    def find(self, token: bytes) -> LaneGroup:
        """Return the group for a new lane of a peer. Raises LinkRefused if there is none, or it is full."""
        if (group := self._by_token.get(token)) is None:
            raise LinkRefused("a lane with an unknown token")
        if len(group) >= MAX_LANES:
            raise LinkRefused(f"a link has at most {MAX_LANES} lanes")
        return group

    def add(self, group: LaneGroup, *socks: LaneSocket) -> None:
        """Make lanes of connected sockets, which are taken over even if this raises."""
        with ExitStack() as left:
            for sock in socks:
                left.callback(sock.socket.close)  # no effect on one that became a lane: it is detached
            for sock in socks:
                if not group.wait(sock):
                    self._attach(group, sock)
            left.pop_all()

    def _attach(self, group: LaneGroup, sock: LaneSocket) -> None:
        lane = self.engine.reserve_lane()
        self._groups[lane] = group  # before its first event
        try:
            self.engine.attach_lane(lane, sock.socket.detach(), group.replies, sock.keys)
        except BaseException:  # there is no libcrypto
            self._groups.pop(lane, None)
            raise
        if not group.add(lane):
            self.drop(group, [lane])
        elif lane not in self._groups:  # lost already
            group.discard(lane)

    def drop(self, group: LaneGroup, lanes: Iterable[int]) -> None:
        for lane in lanes:
            group.discard(lane)
            self._groups.pop(lane, None)
            if self._engine is not None:
                self._engine.drop_lane(lane)

    def quiesce(self, tag: int) -> None:
        if self._engine is not None:
            self._engine.quiesce(tag)

    def _on_events(self) -> None:
        idle = not self._due
        for event in self.engine.poll_events():
            if (group := self._groups.get(event.lane)) is not None:  # else this side has dropped it
                self._due.setdefault(group, deque()).append(event)
        if idle:
            self._take_turns()

    def _take_turns(self) -> None:
        """Handle a few events of each link; the rest after all else that waits for the control thread."""
        if self._loop is None:
            return
        for group, events in list(self._due.items()):
            for _ in range(min(len(events), _EVENTS_PER_TURN)):
                event = events.popleft()
                if self._groups.get(event.lane) is group:
                    self._dispatch(group, event)
            if not events:
                del self._due[group]
        if self._due:
            self._loop.call_soon(self._take_turns)

    def _dispatch(self, group: LaneGroup, event: LaneEvent) -> None:
        try:
            if isinstance(event, LaneLost):
                self._groups.pop(event.lane, None)
                group.discard(event.lane)  # after that line, as add() needs it
                logger.info("a data lane of %s ended, %d are left: %s", group.link, len(group), event.reason)
                group.redial_soon()
            else:
                self._answer(group, event)
        except Exception:  # noqa: BLE001 (a bug in a handler must neither end the loop nor keep a peer waiting)
            logger.exception("lane %d: a handler failed on %s", event.lane, type(event).__name__)
            if not isinstance(event, LaneLost):
                self.engine.refuse(event.lane, event.id, LLMStatusCode.LLM_FAILED, "the target failed; see its log")

    def _answer(self, group: LaneGroup, event: ReadAsked | WriteAsked) -> None:
        write = isinstance(event, WriteAsked)
        try:
            handle, plan, reply = answer(self.owner, group.link, event.meta, write=write)
            tensors, guards, tag = reply.tensors, reply.guards, reply.tag
            if reply.cacheable:
                group.replies.keep(handle, write, tensors.native, guards, tag, reply.lent)
            self.engine.reply(event.lane, event.id, plan, tensors, guards, tag, write=write)
        except LLMException as error:
            self.engine.refuse(event.lane, event.id, *status_of(error))
