"""The seam between transports and the rest of the library.

A transport is a :class:`Transport`, and the :class:`~.connection.Connection` that it makes. The module ``inproc`` and
the packages ``samehost`` (shm, cma), ``nixl`` and ``tcp`` have one each. Only this package, the options and the tools
name transports.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from llm_datadist._transport import instances
from llm_datadist._transport.choose import Candidate, Choice, Verdict, agree, choose, yield_to
from llm_datadist._transport.connection import Connection, DataPath
from llm_datadist._transport.users import peer_uid
from llm_datadist.errors import LinkError, LinkRefused

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._deadline import Deadline
    from llm_datadist._memory.exports import Exports
    from llm_datadist._memory.write_intents import IntentPage
    from llm_datadist._transport.moves import MoveOwner
    from llm_datadist.config import Options


#: Name among the offers by which a side announces its GPU, by UUID.
DEVICE: Final = "device"


class Wire(Protocol):
    """Carrier of a transport's requests to a link's peer. Threads: any."""

    def ask(self, link: Any, data: bytes, deadline: Deadline) -> bytes:  # noqa: ANN401 (a link, opaque here)
        """Send a request and return its answer. Raises DeadlineExceeded, or LinkError if the link is lost."""

    def tell(self, link: Any, data: bytes) -> None:  # noqa: ANN401
        """Send a request without an answer, unless the link has ended."""


@dataclass(frozen=True, slots=True)
class Context:
    """Parts of one LLMDataDist for its transports."""

    options: Options
    exports: Exports
    owner: MoveOwner  # answers peers that ask this side to move bytes
    wire: Wire


class Transport(Candidate):
    """One way of moving bytes; one object for each LLMDataDist.

    A subclass has a ``name``, the value of ``llm.Transport``, and the ``capabilities`` of its connections, with that
    name too.

    Owns: what its connections share, until :meth:`close`.
    Threads: methods with a ``meeting`` run in the thread that dials, or at the listener in the control thread.
    Errors: :meth:`judge` says why not; :meth:`connect` raises LinkRefused and leaves nothing behind.
    """

    preamble: bytes = b""  # begins connections to the listener for :meth:`admit`

    def __init__(self, context: Context) -> None:
        """Make what connections share. Raises LLMException if ``llm.Transport`` names it and it cannot be used."""

    def offer(self, meeting: Meeting) -> bytes:
        """Return the offer in this side's greeting, if any. The listener has the dialer's already."""
        return b""

    def exchange(self, meeting: Meeting, deadline: Deadline) -> None:
        """At the dialer: do what blocks, between greetings and :meth:`judge`."""

    def judge(self, meeting: Meeting) -> Verdict:
        """Judge both offers. Both sides must come to the same choice."""
        raise NotImplementedError

    def lacks(self, meeting: Meeting) -> str:
        """Return what :meth:`connect` lacks from the peer ("dialled no ..."); empty for nothing."""
        return ""

    def connect(self, meeting: Meeting) -> Connection:
        """Return a connection to the peer, after a ``possible`` verdict. Raises LinkRefused."""
        raise NotImplementedError

    def forget(self, meeting: Meeting) -> None:
        """Give back what :meth:`offer` prepared, as no connection uses it. Idempotent."""

    async def admit(self, loop: asyncio.AbstractEventLoop, sock: socket.socket) -> Callable[[], None]:
        """Check a socket that began with :attr:`preamble`; return its taker. LLMException refuses."""
        raise NotImplementedError

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve peers from now on. Threads: control, before the listener."""

    def stop(self) -> None:
        """Cease to serve peers. Threads: control."""

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        """Return once no peer can touch memory given under ``tag``; the caller has advanced its guards.

        ``private``: addresses of its tensors if they are outside all pools.
        """

    def close(self) -> None:
        """Give everything back, and join threads. Idempotent."""

    def abandon(self) -> None:
        """In a forked child: close its copies of descriptors, and touch nothing else."""


class MappedPeer(Protocol):
    """Memory of a peer, mapped here after a rendezvous: ``samehost.peer_memory.PeerMemory``, as a meeting needs it."""

    pid: int  # 0 if not visible
    page: IntentPage
    got_devices: bool  # the peer was offered pools in a GPU

    def close(self) -> None:
        """Give up one holder's use."""


@dataclass(eq=False, slots=True)
class Meeting:
    """One side's view of a handshake, for transports.

    Owns: the offers that no connection uses yet, and the peer's mapped memory, until :meth:`close`.
    Threads: one.
    Errors: after any, :meth:`close` gives everything back.
    """

    transports: Mapping[str, Transport]  # best first
    exports: Exports  # of this side
    asked: str | None  # transport that this side must use
    authenticated: bool  # the peer has authenticated itself
    token: bytes  # the dialer's, for this handshake
    dialled: bool  # by this side
    here: Exports | None = field(init=False)  # of the peer, if it has proven that it lives in this process
    mine: dict[str, bytes] = field(default_factory=dict, init=False)
    theirs: Mapping[str, bytes] = field(default_factory=dict, init=False)
    incarnation: bytes = field(default=b"", init=False)  # as the peer says; so are the next two
    peer: str = field(default="the peer", init=False)
    cluster_id: int = field(default=0, init=False)
    offered: Exports | LinkRefused = field(init=False)  # memory that the peer may map, or why none
    secret: bytes = field(default=b"", init=False)  # shared by both sides; empty without authentication
    sock: socket.socket | None = field(default=None, init=False)  # of the control channel
    address: tuple[str, int] = field(default=("", 0), init=False)  # of the listener, at the dialer
    deadline: Deadline | None = field(default=None, init=False)  # of the dialer's call
    memory: MappedPeer | LinkError | None = field(default=None, init=False)  # of the peer; None before a rendezvous
    forced: str | None = field(default=None, init=False)  # transport that both sides must use
    choice: Choice = field(init=False)
    _asked_there: str | None = field(default=None, init=False)
    _over: bool = field(default=False, init=False)  # bring() closes what comes
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
        self.theirs, self._asked_there = offers, asked
        self.incarnation, self.peer, self.cluster_id = incarnation, peer, cluster_id
        if self.dialled:
            self.here = instances.answer(self.token)

    @property
    def both_have_devices(self) -> bool:
        return self.exports.device is not None and bool(self.theirs.get(DEVICE))

    @property
    def any_has_device(self) -> bool:
        """True if a side's caches may lie in a GPU."""
        return self.exports.device is not None or bool(self.theirs.get(DEVICE))

    def offers(self) -> dict[str, bytes]:
        for name, each in self.transports.items():
            self.mine[name] = b""  # what fails in the middle is given back too
            self.mine[name] = each.offer(self)
        announced = {} if self.exports.device is None else {DEVICE: self.exports.device.uuid}
        return {name: data for name, data in self.mine.items() if data} | announced

    @property
    def _mapped(self) -> MappedPeer | None:
        return None if isinstance(self.memory, LinkError) else self.memory

    def bring(self, memory: MappedPeer | LinkError) -> None:
        """Take the outcome of a rendezvous; close memory that comes too late."""
        if not self._over:
            self.memory = memory
        elif not isinstance(memory, LinkError):
            memory.close()

    def end_exchange(self) -> None:
        self._over = True

    def choose(self) -> Choice:
        """Return this side's choice, after the dialer's exchange. Raises LinkRefused."""
        self.forced = agree(self.asked, self._asked_there, [*self.transports])
        if self.dialled:
            assert self.deadline is not None, "a dial has a deadline"
            for each in self.transports.values():
                each.exchange(self, self.deadline)
        self.choice = choose([*self.transports.values()], lambda each: each.judge(self), self.forced)
        return self.choice

    def yield_to(self, theirs: str | None) -> None:
        """Follow a dialer without the better transport for non-pool memory."""
        self.choice = yield_to(self.choice, [*self.transports.values()], theirs)

    def connect(self, name: str) -> Connection:
        """Return a connection, which then owns what the offer prepared."""
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
        if (mapped := self._mapped) is not None:
            mapped.page.introduce(self.peer, self.cluster_id)
        shared = self.connect(choice.name)
        try:
            private = None if choice.private in (None, choice.name) else self.connect(choice.private)
        except BaseException:
            shared.close()
            raise
        devices = self.here is not None if mapped is None else mapped.got_devices
        return DataPath(shared, private, devices=devices)

    def behind(self, host: str) -> str:
        """Return the process, user or address behind the link, as the kernel says; ``host`` is across the socket."""
        if self.here is not None:
            return f"pid {os.getpid()}"
        if (mapped := self._mapped) is not None and mapped.pid:
            return f"pid {mapped.pid}"
        uid = -1 if self.dialled or self.sock is None else peer_uid(self.sock)
        return host.removeprefix("::ffff:") if uid < 0 else f"uid {uid}"

    def close(self) -> None:
        """Give back what no connection uses. Idempotent."""
        if self.dialled:
            instances.withdraw(self.token)
        for name in self.mine.keys() - self._used:
            self.transports[name].forget(self)
        mapped, self.memory, self._over = self._mapped, None, True
        if mapped is not None:
            mapped.close()
