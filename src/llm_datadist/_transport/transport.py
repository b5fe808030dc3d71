"""The seam between transports and the rest of the library.

A transport is one module: its :class:`Transport`, and the :class:`~.connection.Connection` that it makes.
:mod:`.registry` has the list of all, best first. Nothing outside this package, the options and the tools names one.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from llm_datadist._transport import instances
from llm_datadist._transport.choose import Choice, Verdict, agree, choose, yield_to
from llm_datadist._transport.connection import Capabilities, Connection, DataPath
from llm_datadist._transport.peer_memory import PeerMemory
from llm_datadist.errors import LinkError, LinkRefused

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports
    from llm_datadist._transport.moves import MoveOwner
    from llm_datadist.config import Options


class Wire(Protocol):
    """Carries requests of a transport to the peer of a link, and its answers. Threads: any."""

    def ask(self, link: Any, data: bytes, deadline: Deadline) -> bytes:  # noqa: ANN401 (a link, opaque here)
        """Send a request and return its answer. Raises DeadlineExceeded, or LinkError where the link is lost."""

    def tell(self, link: Any, data: bytes) -> None:  # noqa: ANN401
        """Send a request whose answer is not waited for; nothing happens where the link has ended."""


@dataclass(frozen=True, slots=True)
class Context:
    """What the transports of one LLMDataDist are made of."""

    options: Options
    exports: Exports
    owner: MoveOwner  # answers peers that ask this side to move bytes
    wire: Wire


class Transport:
    """One way of moving bytes; one object for each LLMDataDist.

    Owns: what all its connections share; :meth:`close` gives that back.
    Threads: the methods with a ``meeting`` run in the dialer's calling thread, at the listener on the control thread.
    Errors: :meth:`judge` says why not; :meth:`connect` raises LinkRefused, and then nothing of it is left.
    """

    name: str  # as in ``llm.Transport``
    capabilities: Capabilities  # of its connections
    beside: bool = False  # may carry non-pool memory beside a transport that does not reach that
    peer_cannot: str = "the peer cannot use it"
    preamble: bytes = b""  # of connections to the listener that are this transport's; see :meth:`admit`

    def __init__(self, context: Context) -> None:
        """Make what all connections share. Raises LLMException if the transport is asked for and cannot be had."""

    def offer(self, meeting: Meeting) -> bytes:
        """Return what this side's greeting says under the name; empty for nothing. The listener knows the dialer's."""
        return b""

    def exchange(self, meeting: Meeting, deadline: Deadline) -> None:
        """At the dialer: do what takes time once both greetings are known, before any transport is judged."""

    def judge(self, meeting: Meeting) -> Verdict:
        """Judge both offers. Each side asks its own transports, and both must choose alike."""
        raise NotImplementedError

    def lacks(self, meeting: Meeting) -> str:
        """Return what the peer has left out that :meth:`connect` needs ("dialled no ..."); empty for nothing."""
        return ""

    def connect(self, meeting: Meeting) -> Connection:
        """Return a connection to the peer of a meeting, for which :meth:`judge` has found it possible."""
        raise NotImplementedError

    def forget(self, meeting: Meeting) -> None:
        """Give back what :meth:`offer` has prepared and no connection uses. Idempotent."""

    async def admit(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Callable[[], None]:
        """Check a connection that began with :attr:`preamble`; return what takes it over.

        Raises LLMException to refuse it.
        """
        raise NotImplementedError

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve peers from now on. On the control thread, before the listener."""

    def stop(self) -> None:
        """Serve no peer any more. On the control thread."""

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        """Stop all use of memory granted under ``tag``; none of it is touched any more when this returns.

        ``private``: the addresses of its tensors where they are outside all pools. Its guards have been advanced.
        """

    def close(self) -> None:
        """Give everything back, threads too. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: close the child's copies of descriptors, and touch nothing else."""


@dataclass(eq=False, slots=True)
class Meeting:
    """One handshake as transports see it, on one side.

    Owns: what transports have prepared for this peer, and its mapped memory, until :meth:`open` or :meth:`close`.
    Threads: one.
    Errors: after any, :meth:`close` gives everything back.
    """

    transports: Mapping[str, Transport]  # best first
    exports: Exports  # of this side
    asked: str | None  # the transport that this side must use
    authenticated: bool  # the peer has shown a certificate that this side trusts
    token: bytes  # of this handshake, the dialer's
    dialled: bool  # this side is the dialer
    #: What the peer's instance exports, if it has proven that it lives in this process.
    here: Exports | None = field(init=False)
    mine: dict[str, bytes] = field(default_factory=dict, init=False)
    theirs: Mapping[str, bytes] = field(default_factory=dict, init=False)
    incarnation: bytes = field(default=b"", init=False)  # of the peer, as it says; so are these
    peer: str = field(default="the peer", init=False)
    cluster_id: int = field(default=0, init=False)
    offered: Exports | LinkRefused = field(init=False)  # what the peer may map, or why it may map nothing
    secret: bytes = field(default=b"", init=False)  # both sides have it; empty without authentication
    sock: socket.socket | None = field(default=None, init=False)  # the control connection
    address: tuple[str, int] = field(default=("", 0), init=False)  # of the listener, at the dialer
    deadline: Deadline | None = field(default=None, init=False)  # of the dialer's call
    #: The peer's memory, why there is none, or None if nobody has tried.
    memory: PeerMemory | LinkError | None = field(default=None, init=False)
    forced: str | None = field(default=None, init=False)  # the transport that both sides must use
    choice: Choice = field(init=False)
    _asked_there: str | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)  # the peer brings no memory any more
    _used: set[str] = field(default_factory=set, init=False)

    def __post_init__(self) -> None:
        self.offered = self.exports
        if self.dialled:
            self.here = None
            instances.offer(self.token, self.exports)
        else:
            self.here = instances.accept(self.token, self.exports)

    def hear(
        self, offers: Mapping[str, bytes], asked: str | None, incarnation: bytes, peer: str, cluster_id: int
    ) -> None:
        """Take note of the peer's greeting."""
        self.theirs, self._asked_there = offers, asked
        self.incarnation, self.peer, self.cluster_id = incarnation, peer, cluster_id
        if self.dialled:
            self.here = instances.answer(self.token)

    def offers(self) -> dict[str, bytes]:
        """Return what this side's greeting says of each transport."""
        for name, each in self.transports.items():
            self.mine[name] = b""  # what fails in the middle is given back too
            self.mine[name] = each.offer(self)
        return {name: data for name, data in self.mine.items() if data}

    def bring(self, memory: PeerMemory | LinkError) -> None:
        """Take the outcome of a rendezvous; memory that comes too late is closed."""
        if not self._over:
            self.memory = memory
        elif isinstance(memory, PeerMemory):
            memory.close()

    def end_exchange(self) -> None:
        """Take no memory any more: the peer has chosen."""
        self._over = True

    def choose(self) -> Choice:
        """Return which transports this side chooses, after the dialer's exchange. Raises LinkRefused."""
        self.forced = agree(self.asked, self._asked_there, [*self.transports])
        if self.dialled:
            assert self.deadline is not None, "a dial has a deadline"
            for each in self.transports.values():
                each.exchange(self, self.deadline)
        self.choice = choose([*self.transports.values()], lambda each: each.judge(self), self.forced)
        return self.choice

    def yield_to(self, theirs: str | None) -> None:
        """Use the dialer's transport for non-pool memory if it cannot use this side's better one."""
        self.choice = yield_to(self.choice, [*self.transports.values()], theirs)

    def connect(self, name: str) -> Connection:
        """Return a connection of one transport, which has then used what it offered."""
        connection = self.transports[name].connect(self)
        self._used.add(name)
        return connection

    def open(self) -> DataPath:
        """Return the data path by the chosen transports. Raises LinkRefused."""
        choice = self.choice
        if lacks := self.transports[choice.name].lacks(self):
            raise LinkRefused(f"the peer chose {choice.name} and {lacks}")
        if choice.private is not None and (lacks := self.transports[choice.private].lacks(self)):
            choice = self.choice = Choice(choice.name, None, f"{choice.reason}; but the peer {lacks}")
        if isinstance(self.memory, PeerMemory):
            self.memory.introduce(self.peer, self.cluster_id)
        shared = self.connect(choice.name)
        try:
            private = None if choice.private in (None, choice.name) else self.connect(choice.private)
        except BaseException:
            shared.close()
            raise
        return DataPath(shared, private)

    def close(self) -> None:
        """Give back what no connection uses. Idempotent."""
        if self.dialled:
            instances.withdraw(self.token)
        for name in self.mine.keys() - self._used:
            self.transports[name].forget(self)
        memory, self.memory, self._over = self.memory, None, True
        if isinstance(memory, PeerMemory):
            memory.close()
