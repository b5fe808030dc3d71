"""Calls that stand at a gate of `faults/gates.py`, at an end of either kind, and counts of messages."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from faults.gates import Gate, Watcher, shut, watched
from llm_datadist._links.messages import Release, Resolve
from tests.support.ends import Call, ChildEnd, End, LocalEnd
from tests.support.moves import call
from tests.support.v1 import kv_call
from tests.support.world import World


def gated_call(world: World, cluster_id: int, step: str, folder: Path, method: str, *args: Any, **kwargs: Any) -> Any:
    with shut(world.dd, step, folder, peer=cluster_id):
        return call(world, method, *args, **kwargs)


def gated_call_v1(world: World, peer: int, step: str, folder: Path, method: str, *args: Any, **kwargs: Any) -> Any:
    with shut(world.dd, step, folder, peer=peer):
        return kv_call(world, method, *args, **kwargs)


class Stopped:
    """A call that is stopped at a step. The test's side of the gate."""

    def __init__(self, folder: Path, collect: Callable[[], Any]) -> None:
        self.gate = Gate(folder)
        self._collect = collect
        self.finished = False

    def finish(self) -> Any:
        assert not self.finished
        self.finished = True
        self.gate.open()
        return self._collect()


@contextmanager
def stopped(
    end: End, step: str, folder: Path, method: str, *args: Any, peer: int = 1, **kwargs: Any
) -> Iterator[Stopped]:
    """Begin a call of the cache manager of ``end`` and wait until it stops at ``step`` of its way to ``peer``."""
    function = partial(gated_call, **kwargs)
    call = Stopped(folder, begin(end, function, peer, step, folder, method, *args))
    try:
        call.gate.wait()
        yield call
    finally:
        if not call.finished:  # the test has failed before
            with suppress(Exception):
                call.finish()


def begin(end: End, function: Callable[..., Any], *args: Any) -> Callable[[], Any]:
    """Start a call at an end, whichever kind it is; the function returned waits for its result."""
    if isinstance(end, ChildEnd):
        end.begin(function, *args)
        return end.finish
    assert isinstance(end, LocalEnd)
    return Call(end.do, function, *args).result


def shut_there(world: World, step: str, folder: Path, peer: int) -> None:
    world.memory["gate"] = stack = ExitStack()
    stack.enter_context(shut(world.dd, step, folder, peer=peer))


def open_there(world: World) -> None:
    world.memory.pop("gate").close()


def watch_there(world: World, watcher: Watcher) -> None:
    """Have every step of an end's process passed to ``watcher`` until the end stops."""
    stack = ExitStack()
    stack.enter_context(watched(watcher))
    world.memory[f"watch {id(stack)}"] = stack


def count_messages(world: World) -> None:
    """Count from now on how often a peer asks this end where a cache is, and how often it gives a pin back."""
    links = world.probe.engine.links
    world.memory["resolves"] = world.memory["releases"] = 0

    def count(name: str, subject: object, details: tuple[Any, ...]) -> None:
        # A question before the answer leaves, a release after its effects.
        if subject is links and (name, type(details[0])) in (("handle", Resolve), ("handled", Release)):
            world.memory["resolves" if name == "handle" else "releases"] += 1

    watch_there(world, count)


def resolves(world: World) -> int:
    return int(world.memory["resolves"])


def releases(world: World) -> int:
    return int(world.memory["releases"])
