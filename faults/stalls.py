"""Stalls on command: a part of one end that does not go on until the block is left.

=========== ==========================================================================================
registry    every lookup, pin and release waits, those of peers on the control thread among them
control     the control thread does nothing: no answer, no heartbeat, no expiry
=========== ==========================================================================================

The block itself must not need what is stalled: use it from a thread, or an end, that only looks on. Deadlines of others
go on running, which is the point. At a step :mod:`faults.gates` stops, inside a copy, after its first byte,
:mod:`faults.midcopy`.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from llm_datadist.datadist import LLMDataDist
from tests.support.probe import Probe, lock_of
from tests.support.world import World

_PATIENCE_SECONDS: Final = 30.0


@contextmanager
def stall(datadist: LLMDataDist, what: str) -> Iterator[None]:
    """Stall ``what`` of an initialised end of this process for the length of the block."""
    with ExitStack() as undo:
        STALLS[what](Probe(datadist), undo)
        yield


def _registry(probe: Probe, undo: ExitStack) -> None:
    registry: Any = probe.engine.store.registry
    lock, end, lookup = lock_of(registry), threading.Event(), registry.lookup
    if not lock.acquire(timeout=_PATIENCE_SECONDS):
        raise TimeoutError(f"the registry's lock has not been free for {_PATIENCE_SECONDS:g} s")
    undo.callback(lock.release)

    def wait(*args: Any) -> Any:
        end.wait()
        return lookup(*args)

    registry.lookup = wait  # which needs no lock where a cache can be found
    undo.callback(delattr, registry, "lookup")
    undo.callback(end.set)


def _control(probe: Probe, undo: ExitStack) -> None:
    here, end = threading.Event(), threading.Event()

    def wait() -> None:
        here.set()
        end.wait()

    probe.post(wait)
    undo.callback(end.set)
    if not here.wait(_PATIENCE_SECONDS):
        raise TimeoutError(f"the control thread has not been free for {_PATIENCE_SECONDS:g} s")


#: name -> what begins it.
STALLS: Final[dict[str, Callable[[Probe, ExitStack], None]]] = {"registry": _registry, "control": _control}


def stall_there(world: World, what: str) -> None:
    world.memory["stall"] = stack = ExitStack()
    stack.enter_context(stall(world.dd, what))


def go_on(world: World) -> None:
    world.memory.pop("stall").close()
