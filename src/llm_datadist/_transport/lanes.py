"""Data lanes of one instance: TCP sockets over which the owner of memory sends or receives it.

The native engine's threads move the bytes; the control thread answers requests. A broken lane fails its own transfers.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._checks import HERE
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist._native import LaneEngine, LaneEvent, LaneLost, ReadAsked, ReplyCache, WriteAsked
from llm_datadist._threads import Threads
from llm_datadist._transport.address import DialledSocket, preamble, read_exactly
from llm_datadist._transport.moves import MoveOwner, answer, status_of
from llm_datadist.errors import LinkRefused, LLMException, LLMStatusCode, PeerLost
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Iterable, Sequence

MAX_LANES: Final = 10
"""Lanes of a peer on one link: twice what it dials, as losses may be unnoticed here."""

LANE_PREAMBLE: Final = preamble(1)
TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
_ACCEPTED: Final = b"\x01"
_REFUSED: Final = "the peer rejected the lane token, or has lanes enough"
# Limit on a lane's unsent bytes in the kernel. Without it, a hundred stuck readers hold gigabytes of the host's memory
# for TCP, and all connections lose packets.
_UNSENT_BYTES: Final = 512 << 10

_KEEPALIVE_SECONDS: Final = 5
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


def dial_lanes(
    address: tuple[str, int], token: bytes, count: int, deadline: Deadline, *, secret: bytes = b""
) -> list[LaneSocket]:
    """Connect ``count`` lanes to a listener under its ``token``; after an error none is left open. Blocks.

    With the link's ``secret`` lanes are encrypted, and this side proves that it has the secret.
    """
    what = f"data lanes to {show_address(address)}"
    lanes: list[tuple[DialledSocket, bytes]] = []
    with ExitStack() as opened:
        for _ in range(count):
            lane, nonce = DialledSocket([address], deadline, what), secrets.token_bytes(NONCE_BYTES if secret else 0)
            lanes.append((lane, nonce))
            opened.callback(lane.socket.close)
            lane.connect(_tune)
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
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
        # Networks drop idle connections. TCP_USER_TIMEOUT would also end the lane of a peer that pauses its reads.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def read_lane_greeting(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    """Return the token of a new lane, after its preamble. The caller bounds the time."""
    return await read_exactly(loop, sock, TOKEN_BYTES, "lane greeting")


async def check_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket, secret: bytes) -> LaneSocket | None:
    """Return the lane; None if its dialer does not prove that it has the link's secret.

    This side's nonce makes proof and keys unique: recordings of other lanes prove nothing.
    """
    if not secret:
        return LaneSocket(sock)
    nonce, mine = await read_exactly(loop, sock, NONCE_BYTES, "nonce"), secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, mine)
    proof, there, back = _expand(secret, nonce, mine)
    proven = hmac.compare_digest(proof, await read_exactly(loop, sock, len(proof), "proof"))
    return LaneSocket(sock, (back, there)) if proven else None


async def accept_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    _tune(sock)
    await loop.sock_sendall(sock, _ACCEPTED)


class LaneGroup:
    """The lanes of one link and their loads. Threads: any.

    Until it begins, lanes wait as sockets, and requests in the kernel: none precedes its link.

    Attributes:
        link: The link, opaque here; None until the group begins.
        token: Admits lanes of the peer; empty if this side dials.
        grants: Memory that the peer may use without asking the owner again.
        on_lost: Called with the number of lanes left and the reason when a lane breaks.
        secret: Encrypts the lanes, unless empty. Set before the peer gets the token.
        doubted: Newest lane with a write that ended without the owner's answer; 0 for none (lanes count from 1).
        told: Newest lane when the owner was last told to drop all, and the ``Ping`` after that.
        given_up: Newest lane that the owner is known to have dropped.
    """

    def __init__(self, token: bytes = b"") -> None:
        self.link: object = None
        self.token = token
        self.grants = ReplyCache()
        self.on_lost: Callable[[int, str], None] | None = None
        self.secret = b""
        self.doubted, self.told, self.given_up = 0, (0, 0), 0
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self.loads: dict[int, int] = {}  # lane -> bytes of this side's jobs on it
        self._waiting: list[LaneSocket] = []
        self._begun = False
        self._closed = False

    def __len__(self) -> int:
        return len(self.loads) + len(self._waiting)

    def wait(self, sock: LaneSocket) -> bool:
        """Keep a socket until the group begins; return False if it has begun. Raises LinkRefused once closed."""
        with self._changed:
            if self._closed:
                raise LinkRefused("the link of this lane has ended")
            if not self._begun:
                self._waiting.append(sock)
            return not self._begun

    def begin(self, link: object) -> list[LaneSocket]:
        with self._changed:
            self.link, self._begun = link, True
            waiting, self._waiting = self._waiting, []
            return waiting

    def take(self, nbytes: int, deadline: Deadline | None = None, *, large: bool = False) -> int:
        """Return the lane with the smallest load, and add ``nbytes`` to it. Raises PeerLost if there is none.

        ``large`` transfers leave out the oldest of several lanes; both sides have the same order. With a ``deadline``
        the call waits for a lane that the peer dials.
        """
        if deadline is not None and not self.loads:
            deadline.wait_for(self._changed, lambda: self._closed or bool(self.loads))
        with self._changed:
            if not self.loads:
                raise PeerLost("no data lane to the peer is left; link again", phase="copy")
            lanes = list(self.loads)
            lane = min(lanes[large and len(lanes) > 1 :], key=self.loads.__getitem__)
            self.loads[lane] += nbytes
            return lane

    def put(self, lane: int, nbytes: int, *, doubtful: bool = False) -> None:
        """Subtract ``nbytes`` from a lane's load; ``doubtful``: a write without the owner's answer."""
        with self._changed:
            if lane in self.loads:
                self.loads[lane] -= nbytes
            if doubtful:
                self.doubted = max(self.doubted, lane)

    def add(self, lane: int) -> bool:
        """Add a new lane; return False if the group is closed."""
        with self._changed:
            if not self._closed:
                self.loads[lane] = 0
                self._changed.notify_all()
            return not self._closed

    def discard(self, lane: int) -> None:
        with self._changed:
            self.loads.pop(lane, None)

    def lanes(self) -> list[int]:
        with self._changed:
            return list(self.loads)

    @property
    def closed(self) -> bool:
        return self._closed

    def close(self) -> tuple[list[int], list[LaneSocket]]:
        """Take all lanes out and refuse others; return them, and the sockets that waited."""
        with self._changed:
            self._closed, self.on_lost = True, None
            lanes, self.loads = list(self.loads), {}
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
            return lanes, waiting

    def __repr__(self) -> str:
        return f"<LaneGroup {len(self)} lanes{', closed' if self._closed else ''}>"


class Lanes:
    """The lanes of all links, and the native engine, which the first lane makes: most instances need none.

    Owns: the engine, its threads and all lanes, until :meth:`close`.
    Threads: any; requests are answered on the control thread.
    """

    def __init__(self, threads: int, owner: MoveOwner) -> None:
        self._threads = threads
        self.owner = owner
        self._pid = HERE["pid"]
        # Single dict operations only: callers add, the control thread looks up.
        self._groups: dict[int, LaneGroup] = {}
        self._by_token: dict[bytes, LaneGroup] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._redialling = Threads(1, "llm-datadist-lanes")  # no thread before the first lost lane
        self._making = threading.Lock()  # protects the two below
        self._engine: LaneEngine | None = None
        self._closed = False

    @property
    def engine(self) -> LaneEngine:
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
            self._redialling.shutdown(cancel_futures=True)
        self._groups.clear()
        self._by_token.clear()

    def open(self, socks: Iterable[LaneSocket] = (), token: bytes = b"") -> LaneGroup:
        """Return the group of a future link, which takes over the sockets."""
        group = LaneGroup(token)
        for sock in socks:
            group.wait(sock)
        if token:
            self._by_token[token] = group
        return group

    def group(self, token: bytes) -> LaneGroup:
        """Return the group opened with this token; an empty one if it has ended."""
        group = self._by_token.get(token)
        return LaneGroup(token) if group is None else group

    def find(self, token: bytes) -> LaneGroup:
        """Return the group for a new lane of a peer. Raises LinkRefused if there is none, or it is full."""
        group = self._by_token.get(token)
        if group is None:
            raise LinkRefused("a lane with an unknown token")
        if len(group) >= MAX_LANES:
            raise LinkRefused(f"a link has at most {MAX_LANES} lanes")
        return group

    def begin(self, group: LaneGroup, link: object) -> None:
        self.add_all(group, group.begin(link))

    def add_all(self, group: LaneGroup, socks: Sequence[LaneSocket]) -> None:
        """:meth:`add` each socket; after an error, close all that are not lanes yet."""
        with ExitStack() as left:
            for sock in socks:
                left.callback(sock.socket.close)  # no effect on one that was added: it is detached
            for sock in socks:
                self.add(group, sock)

    def add(self, group: LaneGroup, sock: LaneSocket) -> None:
        """Make a lane of a connected socket, which is taken over even if this raises."""
        try:
            if group.wait(sock):
                return
            engine = self.engine
        except LinkRefused:
            sock.socket.close()
            raise
        lane = engine.reserve_lane()
        self._groups[lane] = group  # before its first event
        try:
            engine.attach_lane(lane, sock.socket.detach(), group.grants, sock.keys)
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

    def shut(self, group: LaneGroup) -> None:
        """Close all lanes of a link: its jobs fail, and none touches memory afterwards. Idempotent."""
        if self._pid != HERE["pid"]:  # a forked child's copies end with the engine; a thread of the parent may lock
            return
        self._by_token.pop(group.token, None)
        lanes, waiting = group.close()
        self.drop(group, lanes)
        for sock in waiting:
            sock.socket.close()

    def redial_soon(self, group: LaneGroup, redial: Callable[[Deadline], None]) -> None:
        """Have lost lanes of a link dialled again. Threads: any; never waits."""

        def attempt() -> None:
            try:
                redial(Deadline(_REDIAL_MS))
            except LLMException as error:
                # The link is ending, or the next transfer dials again.
                logger.info("data lanes to %s were not brought back: %s", group.link, error)

        with suppress(RuntimeError):  # closed, or without a thread: the next transfer dials
            self._redialling.submit(attempt)

    def quiesce(self, tag: int) -> None:
        """As :meth:`.Transport.quiesce`."""
        if self._engine is not None:
            self._engine.quiesce(tag)

    def _on_events(self) -> None:
        for event in self.engine.poll_events():
            group = self._groups.get(event.lane)
            if group is not None:  # else this side has dropped it
                self._dispatch(group, event)

    def _dispatch(self, group: LaneGroup, event: LaneEvent) -> None:
        try:
            if isinstance(event, LaneLost):
                self._groups.pop(event.lane, None)
                group.discard(event.lane)  # after that line, as add() needs it
                logger.info("a data lane of %s ended, %d are left: %s", group.link, len(group), event.reason)
                if (on_lost := group.on_lost) is not None:
                    on_lost(len(group), event.reason)
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
                group.grants.keep(handle, write, tensors.native, guards, tag, tensors.mapped)
            give = self.engine.accept_write if write else self.engine.serve_read
            give(event.lane, event.id, plan, tensors, guards, tag)
        except LLMException as error:
            self.engine.refuse(event.lane, event.id, *status_of(error))

    def __repr__(self) -> str:
        return f"<Lanes {len(self._groups)} lanes, {self._threads if self._engine else 0} threads>"
