"""Calls that do not end by themselves: a signal's handler raises in them, or the task that awaits them is cancelled.

Handlers run in the main thread of a process. So a worker's main thread makes calls too, whenever nothing else is asked
of it, under a timer that rings at any moment. Awaited calls are made by the other threads.
"""

import _weakrefset
import asyncio
import signal
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from types import FrameType
from typing import Any, Final, Self

from faults.campaign.journal import Cancelled, Interrupted, Scene
from llm_datadist.errors import LLMException
from tests.support.linking import info

#: What a caller loses by an interrupt is the handle of what was made, or of the task: these are left alone.
_QUIET: Final = frozenset(
    {"allocate", "register", "deallocate", "unregister", "statistics", "explain", "transfer_cache_async"}
)
_SECONDS: Final = (5e-5, 2e-2)
#: Callbacks of weak references are in these files.
_LOSING: Final = {_weakrefset.__file__, weakref.__file__}


def _loses(frame: FrameType | None) -> bool:
    """Return True in a finalizer, or a callback of a weak reference: what a handler raises there is lost."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename in _LOSING:
            return True
        frame = frame.f_back
    return False


class Bell:
    """A timer whose handler raises inside of a call. The main thread only, one for each process."""

    def __init__(self) -> None:
        self._armed = False
        self._rung = 0.0
        signal.signal(signal.SIGALRM, self._ring)

    def call(self, rng: Random, late: Callable[[float], None], function: Callable[[], Any]) -> Any:
        """Call, and interrupt it once unless it ends before; say how long after the interrupt it ended."""
        shortest, longest = _SECONDS
        self._rung = 0.0
        try:
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, shortest * (longest / shortest) ** rng.random())
            return function()
        finally:
            self._armed = False
            signal.setitimer(signal.ITIMER_REAL, 0)
            if self._rung:
                late(time.monotonic() - self._rung)

    def _ring(self, _: int, frame: FrameType | None) -> None:
        if self._armed and _loses(frame):
            signal.setitimer(signal.ITIMER_REAL, _SECONDS[0])
        elif self._armed:
            self._armed = False
            self._rung = time.monotonic()
            raise Interrupted


@dataclass(kw_only=True)
class RungScene(Scene):
    """The scene of a worker as its main thread sees it."""

    bell: Bell
    rng: Random

    @classmethod
    def beside(cls, scene: Scene, bell: Bell, rng: Random) -> Self:
        """Return the same scene, in which calls are interrupted."""
        return cls(**vars(scene), bell=bell, rng=rng)

    def call(self, kind: str, budget: float, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if kind in _QUIET:
            return super().call(kind, budget, function, *args, **kwargs)
        call = partial(self.bell.call, self.rng, self.journal.ended_after_interrupt, partial(function, *args, **kwargs))
        return super().call(kind, budget, call)


class Awaiting:
    """The awaited form of calls, with an event loop of one thread. A context manager."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._loop = asyncio.new_event_loop()

    def form(self, what: str, call: partial[Any]) -> tuple[str, Callable[[], Any]]:
        """Return a call, or at times its awaited form, which at times is cancelled; and what to count it as."""
        name = getattr(call.func, "__name__", "")
        if self._rng.random() > 0.2 or not name.startswith(("pull_", "push_", "link_", "unlink_")):
            return what, call
        method = getattr(call.func.__self__, f"{name}_async")  # type: ignore[attr-defined]
        after = self._rng.choice((None, 0.0, 3e-4, 2e-3, 2e-2, 0.1))
        return f"{name} awaited", lambda: self._loop.run_until_complete(
            _awaited(partial(method, *call.args, **call.keywords), after)
        )

    def close(self) -> None:
        self._loop.close()


async def _awaited(call: Callable[[], Any], after: float | None) -> Any:
    task = asyncio.ensure_future(call())
    if after is not None:
        await asyncio.wait({task}, timeout=after)
        task.cancel()
    try:
        return await task
    except asyncio.CancelledError:
        raise Cancelled from None


class Linker:
    """Both ends of every pair have one, so that they dial at once; some dial through a relay."""

    def __init__(self, scene: Scene, rng: Random) -> None:
        self._scene, self._rng = scene, rng
        self._awaiting: Awaiting | None = None  # the main thread has none

    def run(self) -> None:
        scene, rng, self._awaiting = self._scene, self._rng, Awaiting(self._rng)
        while not scene.stop.is_set():
            for peer in scene.epoch.peers(scene.worker):
                self.look_after(peer)
                if scene.stop.is_set():
                    break
            scene.stop.wait(rng.choice((0.02, 0.1, 0.3)))
        self._awaiting.close()

    def any_peer(self) -> int:
        return self._rng.choice(self._scene.epoch.peers(self._scene.worker))

    def look_after(self, peer: int) -> None:
        rng = self._rng
        linked = peer + 1 in self._linked()
        if self._scene.resting:
            if linked and self._scene.directory.apart():
                self.unlink(peer, 300, force=True)
            return
        if not linked or rng.random() < 0.05:
            self.link(peer, rng.choice((300, 1000, 3000)))
        elif rng.random() < 0.03:
            self.unlink(peer, rng.choice((300, 1000)), force=rng.random() < 0.5)

    def link(self, peer: int, timeout: int) -> Any:
        scene = self._scene
        cluster = info(peer + 1, scene.ports[peer])
        return self._call("link_clusters", timeout, partial(scene.dd.link_clusters, [cluster], timeout))

    def unlink(self, peer: int, timeout: int, *, force: bool) -> Any:
        scene = self._scene
        what = "unlink_clusters by force" if force else "unlink_clusters"
        cluster = info(peer + 1, scene.ports[peer])
        return self._call(what, timeout, partial(scene.dd.unlink_clusters, [cluster], timeout, force))

    def _call(self, what: str, timeout: int, call: partial[Any]) -> Any:
        form = (what, call) if self._awaiting is None else self._awaiting.form(what, call)
        return self._scene.call(form[0], timeout / 1e3, form[1])

    def _linked(self) -> set[int]:
        scene = self._scene
        statistics = scene.call("statistics", 0.0, scene.dd.statistics)
        if isinstance(statistics, Exception):
            return set()
        for link in statistics.links[:1]:
            scene.call("explain", 0.0, self._explain, link.remote_cluster_id)
        return {link.remote_cluster_id for link in statistics.links}

    def _explain(self, cluster_id: int) -> None:
        try:
            repr(self._scene.dd.explain(cluster_id))
        except LLMException:
            self._scene.journal.note("links gone before they were explained")
