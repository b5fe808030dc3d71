"""The data lanes of one process: stream sockets over which the owner of memory sends or receives it by itself.

:class:`Lanes` owns the native engine, whose threads move the bytes, and all lanes; a :class:`LaneGroup` is the lanes of
one link. Requests of peers are answered on the control thread. A lane that breaks fails what is on it, nothing else.
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
"""Lanes that one peer may have on one link: as many as it dials, twice, because it may have lost those of before."""

LANE_PREAMBLE: Final = preamble(1)
TOKEN_BYTES: Final = 16
NONCE_BYTES: Final = 16
_ACCEPTED: Final = b"\x01"
_REFUSED: Final = "the peer does not know this session, or has lanes enough"
# What the kernel takes of a lane beyond what is on its way. Without a bound, a hundred readers that are stuck hold
# gigabytes of the memory that the host's TCP connections share, and all of them lose packets.
_UNSENT_BYTES: Final = 512 << 10

_KEEPALIVE_SECONDS: Final = 5
#: Bounds one attempt to dial all lanes of a link again; finalize may wait for it.
_REDIAL_MS: Final = 1000


class LaneSocket(NamedTuple):
    """A connected lane to be, and the keys that seal it, this end's and the peer's; None where the link is not sealed.

    The keys are in no text: a repr of this is not to be logged.
    """

    socket: socket.socket
    keys: tuple[bytes, bytes] | None = None

    def __repr__(self) -> str:
        """Leave the keys out."""
        return f"<LaneSocket {self.socket!r}{', sealed' if self.keys else ''}>"


def _expand(secret: bytes, dialler: bytes, listener: bytes) -> list[bytes]:
    """Return the dialler's proof, its key and the listener's: HKDF-Expand of the link's secret, with both nonces."""
    uses = (b"proof", b"there", b"back")
    return [hmac.digest(secret, use + dialler + listener + b"\x01", "sha256") for use in uses]


def dial_lanes(
    address: tuple[str, int], token: bytes, count: int, deadline: Deadline, *, secret: bytes = b""
) -> list[LaneSocket]:
    """Connect ``count`` lanes of the session ``token`` to the listener at ``address``: all, or none is left open.

    Blocks in the caller's thread. With a ``secret``, which both ends of the link have, the lanes are sealed, and this
    end proves that it knows it.
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
    """Answer the listener's nonce with the proof, where there is a secret; return the lane, not accepted yet."""
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
        # A network forgets connections that carry nothing. No TCP_USER_TIMEOUT: that also ends the lane of a peer which
        # lives and does not read for a while.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _KEEPALIVE_SECONDS)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


async def read_lane_greeting(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> bytes:
    """Return the token of a new lane, after the listener has read its preamble.

    The caller bounds the time, checks the token, then calls :func:`check_lane` or closes the socket.
    """
    return await read_exactly(loop, sock, TOKEN_BYTES, "lane greeting")


async def check_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket, secret: bytes) -> LaneSocket | None:
    """Return the lane if its dialler proves that it knows the link's secret, where there is one.

    The nonce of this end makes the proof and the keys new: what was recorded of an earlier lane is worth nothing here.
    """
    if not secret:
        return LaneSocket(sock)
    nonce, mine = await read_exactly(loop, sock, NONCE_BYTES, "nonce"), secrets.token_bytes(NONCE_BYTES)
    await loop.sock_sendall(sock, mine)
    proof, there, back = _expand(secret, nonce, mine)
    proven = hmac.compare_digest(proof, await read_exactly(loop, sock, len(proof), "proof"))
    return LaneSocket(sock, (back, there)) if proven else None


async def accept_lane(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    """Tell the dialler that its lane is accepted; the socket is then ready for :meth:`Lanes.add`."""
    _tune(sock)
    await loop.sock_sendall(sock, _ACCEPTED)


class LaneGroup:
    """The lanes of one link, and how much each of them has to do. Made, begun and ended by :class:`Lanes`.

    Until it has begun, its lanes wait as sockets: what the peer says meanwhile stays in the kernel, so that no request
    comes before the link that it is for. Threads: any.

    Attributes:
        link: The link, opaque here; None until it has begun.
        token: What opens it to lanes of the peer; empty where this end dials.
        grants: What the peer may use without another question to the owner.
        on_lost: Called when a lane ended by itself, with how many are left, and why; None: nobody wants to know.
        secret: What seals its lanes; empty where the link is not sealed. Set before the peer knows the token.
        doubted: Newest lane with a write that ended without the owner's answer; 0: none, lanes are numbered from 1.
        told: Newest lane when the owner was last told to drop all lanes, and the number of the ``Ping`` after that.
        settled: Newest lane that the owner is known to have dropped.
    """

    def __init__(self, token: bytes = b"") -> None:
        self.link: object = None
        self.token = token
        self.grants = ReplyCache()
        self.on_lost: Callable[[int, str], None] | None = None
        self.secret = b""
        self.doubted, self.told, self.settled = 0, (0, 0), 0
        self._changed = threading.Condition(threading.Lock())  # protects all below
        self.loads: dict[int, int] = {}  # lane -> bytes of our jobs on it
        self._waiting: list[LaneSocket] = []
        self._begun = False
        self._closed = False

    def __len__(self) -> int:
        return len(self.loads) + len(self._waiting)

    def wait(self, sock: LaneSocket) -> bool:
        """Keep a socket until the group begins; False when it has begun."""
        with self._changed:
            if self._closed:
                raise LinkRefused("the link of this lane has ended")
            if not self._begun:
                self._waiting.append(sock)
            return not self._begun

    def begin(self, link: object) -> list[LaneSocket]:
        """Keep no socket any more; return those that waited."""
        with self._changed:
            self.link, self._begun = link, True
            waiting, self._waiting = self._waiting, []
            return waiting

    def take(self, nbytes: int, deadline: Deadline | None = None, *, large: bool = False) -> int:
        """Return the lane with the least to do, and add ``nbytes`` to its load.

        The oldest lane is kept for transfers that are not ``large``, where there is another: both ends have them in
        the same order, as they were dialled. Where the peer dials, lost lanes come back without this end: they are
        waited for until the ``deadline``.
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
        """Take ``nbytes`` from the load of a lane. ``doubtful``: a write ended without the owner's answer."""
        with self._changed:
            if lane in self.loads:
                self.loads[lane] -= nbytes
            if doubtful:
                self.doubted = max(self.doubted, lane)

    def add(self, lane: int) -> bool:
        """Take a new lane in; False when the group was closed meanwhile."""
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
        """Take every lane out, for good; return them, and the sockets that waited."""
        with self._changed:
            self._closed, self.on_lost = True, None
            lanes, self.loads = list(self.loads), {}
            waiting, self._waiting = self._waiting, []
            self._changed.notify_all()
            return lanes, waiting

    def __repr__(self) -> str:
        return f"<LaneGroup {len(self)} lanes{', closed' if self._closed else ''}>"


class Lanes:
    """Owns the engine, its threads and all lanes until :meth:`close`. Requests are answered on the loop's thread.

    The engine is made with the first link that has lanes: most processes never need one.
    """

    def __init__(self, threads: int, owner: MoveOwner) -> None:
        self._threads = threads
        self.owner = owner
        self._pid = HERE["pid"]
        # Single dict operations only: callers add, the loop's thread looks up.
        self._groups: dict[int, LaneGroup] = {}
        self._by_token: dict[bytes, LaneGroup] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._redialling = Threads(1, "llm-datadist-lanes")  # a thread exists from the first lost lane on
        self._making = threading.Lock()  # protects the two below
        self._engine: LaneEngine | None = None
        self._closed = False

    @property
    def engine(self) -> LaneEngine:
        """The engine, made now if need be; ``LinkRefused`` when closed."""
        with self._making:
            if self._closed:
                raise LinkRefused("the data lanes of this process are closed")
            if self._engine is None:
                self._engine = LaneEngine(self._threads)
                if self._loop is not None:
                    self._loop.call_soon_threadsafe(self._listen)
            return self._engine

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Answer requests from now on. Called once, on the loop's thread."""
        with self._making:
            self._loop = loop
        self._listen()

    def _listen(self) -> None:
        if self._loop is not None and self._engine is not None:
            self._loop.add_reader(self._engine.event_fd(), self._on_events)

    def stop(self) -> None:
        """Answer no request and take no link any more. On the loop's thread, before :meth:`close`. Idempotent."""
        with self._making:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None and self._engine is not None:
            loop.remove_reader(self._engine.event_fd())

    def close(self) -> None:
        """Lose every lane and join the threads: no memory is touched any more. Idempotent, any thread."""
        if self._pid != HERE["pid"]:
            self._making = threading.Lock()  # may be held for ever by a thread that only the parent has
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
        """Return the group of a link to come, with lanes over these sockets, which are taken over.

        With a token, :meth:`find` finds it until it is shut.
        """
        group = LaneGroup(token)
        for sock in socks:
            group.wait(sock)
        if token:
            self._by_token[token] = group
        return group

    def group(self, token: bytes) -> LaneGroup:
        """Return the group that was opened with this token; an empty one once it has ended."""
        group = self._by_token.get(token)
        return LaneGroup(token) if group is None else group

    def find(self, token: bytes) -> LaneGroup:
        """Return the group that a new lane of a peer belongs to; ``LinkRefused`` when it has lanes enough."""
        group = self._by_token.get(token)
        if group is None:
            raise LinkRefused("a lane with an unknown token")
        if len(group) >= MAX_LANES:
            raise LinkRefused(f"a link has at most {MAX_LANES} lanes")
        return group

    def begin(self, group: LaneGroup, link: object) -> None:
        """Serve the lanes of a link from now on: the link is there."""
        self.add_all(group, group.begin(link))

    def add_all(self, group: LaneGroup, socks: Sequence[LaneSocket]) -> None:
        """:meth:`add` each; all are taken over, whatever happens."""
        with ExitStack() as left:
            for sock in socks:
                left.callback(sock.socket.close)  # which does nothing to one that was added
            for sock in socks:
                self.add(group, sock)

    def add(self, group: LaneGroup, sock: LaneSocket) -> None:
        """Add a lane to a link over a connected socket, which is taken over even when it is refused."""
        try:
            if group.wait(sock):
                return
            engine = self.engine
        except LinkRefused:
            sock.socket.close()
            raise
        lane = engine.reserve_lane()
        # Before its first event can come.
        self._groups[lane] = group
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
        """Close all lanes of a link: its jobs fail, and no memory is touched for it any more. Idempotent."""
        if self._pid != HERE["pid"]:  # a forked child's copies go with the engine, and the lock may be held there
            return
        self._by_token.pop(group.token, None)
        lanes, waiting = group.close()
        self.drop(group, lanes)
        for sock in waiting:
            sock.socket.close()

    def redial_soon(self, group: LaneGroup, redial: Callable[[Deadline], None]) -> None:
        """Have lost lanes of a link dialled again. Threads: any; returns at once."""

        def attempt() -> None:
            try:
                redial(Deadline(_REDIAL_MS))
            except LLMException as error:
                # The end of the link is on its way, or the next transfer tries again.
                logger.info("data lanes to %s were not brought back: %s", group.link, error)

        with suppress(RuntimeError):  # closed, or without a thread: the next transfer dials
            self._redialling.submit(attempt)

    def quiesce(self, tag: int) -> None:
        """Stop all use of memory granted under ``tag``; none of it is touched any more when this returns.

        Advance its guards before: they stop what is granted later.
        """
        if self._engine is not None:
            self._engine.quiesce(tag)

    def _on_events(self) -> None:
        for event in self.engine.poll_events():
            group = self._groups.get(event.lane)
            if group is not None:  # else we dropped it
                self._dispatch(group, event)

    def _dispatch(self, group: LaneGroup, event: LaneEvent) -> None:
        try:
            if isinstance(event, LaneLost):
                self._groups.pop(event.lane, None)
                group.discard(event.lane)  # after the line above: see add()
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
            if reply.standing:
                group.grants.keep(handle, write, tensors.native, guards, tag, tensors.mapped)
            give = self.engine.accept_write if write else self.engine.serve_read
            give(event.lane, event.id, plan, tensors, guards, tag)
        except LLMException as error:
            self.engine.refuse(event.lane, event.id, *status_of(error))

    def __repr__(self) -> str:
        return f"<Lanes {len(self._groups)} lanes, {self._threads if self._engine else 0} threads>"
