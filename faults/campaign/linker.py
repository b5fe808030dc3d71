"""The thread of a worker that links to its peers again and again, and at times lets go of one."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from faults.campaign.interrupted import Awaiting
from llm_datadist.errors import LLMException
from tests.support.linking import info

if TYPE_CHECKING:
    from random import Random

    from faults.campaign.scene import Scene


class Linker:
    """Both ends of every pair have one, so that they dial at once; some dial through a relay."""

    def __init__(self, scene: Scene, rng: Random) -> None:
        self._scene = scene
        self._rng = rng
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
        """Link, unless there is a link; at times link or unlink all the same."""
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
        scene.journal.doing.look(len(statistics.links), len(statistics.redials))
        for link in statistics.links[:1]:
            scene.call("explain", 0.0, self._explain, link.remote_cluster_id)
        return {link.remote_cluster_id for link in statistics.links}

    def _explain(self, cluster_id: int) -> None:
        try:
            repr(self._scene.dd.explain(cluster_id))
        except LLMException:
            self._scene.journal.note("links gone before they were explained")
