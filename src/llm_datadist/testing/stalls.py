"""Stalls on command: a part of one end that does not go on until the block is left.

=========== ==========================================================================================
pool        every allocation and every release of pool memory waits (the lock of each pool is held)
registry    every lookup, pin and release waits, those of peers on the control thread among them
control     the control thread does nothing: no answer, no beat, no expiry
copy        pulls and pushes of this end wait where their first byte would move
frame       what this end says to ``peer`` is kept back, and sent in order when the stall ends
=========== ==========================================================================================

The block itself must not need what is stalled: use it from a thread, or an end, that only looks on. Deadlines of others
go on running, which is the point. Inside a copy, after its first byte, :mod:`llm_datadist.testing.midcopy` stops.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from llm_datadist.errors import LLMException

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist.control.link import Link
    from llm_datadist.control.messages import Message
    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.engine import Engine

__all__ = ["STALLS", "stall"]

_PATIENCE_SECONDS: Final = 30.0


@contextmanager
def stall(datadist: LLMDataDist, what: str, *, peer: int | None = None) -> Iterator[None]:
    """Stall ``what`` (a name of :data:`STALLS`) of an initialised end of this process for the length of the block.

    Args:
        datadist: The end.
        what: See the table above.
        peer: "copy" and "frame" only: cluster id of the linked peer meant; None: all links that there are now.

    Raises:
        KeyError: There is no such stall.
        ValueError: The end is not initialised.
        NotLinked: There is no link to ``peer``.
        TimeoutError: What is to be stalled is held by somebody else for half a minute.
    """
    begin = STALLS[what]
    engine = datadist._engine
    if engine is None:
        raise ValueError("a stall needs an LLMDataDist that is initialised")
    with ExitStack() as undo:
        begin(engine, [engine.links.get(peer)] if peer is not None else engine.links.all(), undo)
        yield


def _pool(engine: Engine, _: list[Link], undo: ExitStack) -> None:
    for pool in engine.store.pools():
        _hold(pool._lock, f"the lock of pool {pool.name}", undo)


def _registry(engine: Engine, _: list[Link], undo: ExitStack) -> None:
    _hold(engine.store.registry._lock, "the registry's lock", undo)


def _control(engine: Engine, _: list[Link], undo: ExitStack) -> None:
    here, end = threading.Event(), threading.Event()

    def wait() -> None:
        here.set()
        end.wait()

    engine._control.post(wait)
    undo.callback(end.set)
    if not here.wait(_PATIENCE_SECONDS):
        raise TimeoutError(f"the control thread has not been free for {_PATIENCE_SECONDS:g} s")


def _copy(_: Engine, links: list[Link], undo: ExitStack) -> None:
    end = threading.Event()
    for link in links:
        for name in ("read", "write"):
            _replace(link.connection, name, lambda move: _after(end, move), undo)
    undo.callback(end.set)


def _after(end: threading.Event, move: Callable[..., Any]) -> Callable[..., Any]:
    def moving(*args: Any) -> Any:  # noqa: ANN401
        end.wait()
        return move(*args)

    return moving


def _frame(_: Engine, links: list[Link], undo: ExitStack) -> None:
    for link in links:
        kept: list[Message] = []
        lock = threading.Lock()  # of the list and its end
        channel = link.channel
        assert channel is not None, "a link that can be found has a channel"
        send = channel.send

        def keep(message: Message, kept: list[Message] = kept, lock: threading.Lock = lock) -> None:
            with lock:
                kept.append(message)

        def let_go(
            send: Callable[[Message], None] = send, kept: list[Message] = kept, lock: threading.Lock = lock
        ) -> None:
            with lock, suppress(LLMException):  # the link may have ended meanwhile
                for message in kept:
                    send(message)

        undo.callback(let_go)
        _replace(channel, "send", lambda _, keep=keep: keep, undo)


def _replace(
    owner: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack
) -> None:
    """Replace a method of one object until the stack is unwound."""
    setattr(owner, name, make(getattr(owner, name)))
    undo.callback(delattr, owner, name)


def _hold(lock: threading.Lock, name: str, undo: ExitStack) -> None:
    if not lock.acquire(timeout=_PATIENCE_SECONDS):
        raise TimeoutError(f"{name} has not been free for {_PATIENCE_SECONDS:g} s")
    undo.callback(lock.release)


#: name -> what begins it.
STALLS: Final[dict[str, Callable[[Engine, list[Link], ExitStack], None]]] = {
    "pool": _pool,
    "registry": _registry,
    "control": _control,
    "copy": _copy,
    "frame": _frame,
}
