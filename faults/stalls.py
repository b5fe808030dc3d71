"""Stalls on command: a part of one end that does not go on until the block is left.

=========== ==========================================================================================
pool        every allocation and every release of pool memory waits (the lock of each pool is held)
registry    every lookup, pin and release waits, those of peers on the control thread among them
control     the control thread does nothing: no answer, no heartbeat, no expiry
copy        pulls and pushes of this end wait where their first byte would move
frame       what this end says to its peers is kept back, and sent in order when the stall ends
=========== ==========================================================================================

The block itself must not need what is stalled: use it from a thread, or an end, that only looks on. Deadlines of others
go on running, which is the point. Inside a copy, after its first byte, :mod:`faults.midcopy` stops.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

from faults.gates import watched
from llm_datadist._links.link import Link
from llm_datadist._links.messages import Message
from llm_datadist.datadist import LLMDataDist
from llm_datadist.errors import LLMException
from tests.support.probe import Probe, lock_of
from tests.support.world import World

_PATIENCE_SECONDS: Final = 30.0


@contextmanager
def stall(datadist: LLMDataDist, what: str) -> Iterator[None]:
    """Stall ``what`` of an initialised end of this process, over all links that there are now, while the block runs."""
    probe = Probe(datadist)
    with ExitStack() as undo:
        STALLS[what](probe, probe.engine.links.all(), undo)
        yield


def _pool(probe: Probe, _: list[Link], undo: ExitStack) -> None:
    for pool in probe.engine.caches.pools:
        _hold(lock_of(pool), f"the lock of pool {pool.name}", undo)


def _registry(probe: Probe, _: list[Link], undo: ExitStack) -> None:
    registry, end = probe.engine.caches.registry, threading.Event()
    _hold(lock_of(registry), "the registry's lock", undo)
    for name in ("lookup", "entry_of"):  # which need no lock where a cache can be found
        _replace(registry, name, lambda move: lambda *args: (end.wait(), move(*args))[1], undo)
    undo.callback(end.set)


def _control(probe: Probe, _: list[Link], undo: ExitStack) -> None:
    here, end = threading.Event(), threading.Event()

    def wait() -> None:
        here.set()
        end.wait()

    probe.post(wait)
    undo.callback(end.set)
    if not here.wait(_PATIENCE_SECONDS):
        raise TimeoutError(f"the control thread has not been free for {_PATIENCE_SECONDS:g} s")


def _copy(_: Probe, links: list[Link], undo: ExitStack) -> None:
    end = threading.Event()

    def wait(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name == "copy" and subject in links:
            end.wait()

    undo.enter_context(watched(wait))
    undo.callback(end.set)


def _frame(_: Probe, links: list[Link], undo: ExitStack) -> None:
    for link in links:
        assert link.channel is not None, "a link that can be found has a channel"
        kept = _Kept(link.channel.send)
        undo.callback(kept.let_go)
        _replace(link.channel, "send", kept.instead, undo)


class _Kept:
    """Messages that wait for the end of a stall. Any thread."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._lock = threading.Lock()  # of the two below
        self._messages: list[tuple[Message, object]] = []
        self._over = False

    def instead(self, _: object) -> Callable[..., None]:
        return self.send

    def send(self, message: Message, reports: object = None) -> None:
        with self._lock:
            if not self._over:
                self._messages.append((message, reports))
                return
        self._send(message, reports)

    def let_go(self) -> None:
        """Send all that was kept; on a link that has ended meanwhile it is lost."""
        with self._lock, suppress(LLMException):
            self._over = True
            for message in self._messages:
                self._send(*message)


def _replace(
    owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack
) -> None:
    before = getattr(owner, name)
    if name in vars(owner):
        undo.callback(setattr, owner, name, before)
    else:  # a method of its class
        undo.callback(delattr, owner, name)
    setattr(owner, name, make(before))


def _hold(lock: threading.Lock, name: str, undo: ExitStack) -> None:
    if not lock.acquire(timeout=_PATIENCE_SECONDS):
        raise TimeoutError(f"{name} has not been free for {_PATIENCE_SECONDS:g} s")
    undo.callback(lock.release)


#: name -> what begins it.
STALLS: Final[dict[str, Callable[[Probe, list[Link], ExitStack], None]]] = {
    "pool": _pool,
    "registry": _registry,
    "control": _control,
    "copy": _copy,
    "frame": _frame,
}


def stall_there(world: World, what: str) -> None:
    world.memory["stall"] = stack = ExitStack()
    stack.enter_context(stall(world.dd, what))


def go_on(world: World) -> None:
    world.memory.pop("stall").close()
