"""Linking and unlinking for asyncio: ``await datadist.link_clusters_async(...)``. Extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.instance.clusters import ClusterLinks

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from llm_datadist.errors import LLMStatusCode
    from llm_datadist.types import LLMClusterInfo

    Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
    Statuses = Coroutine[Any, Any, tuple[LLMStatusCode, list[LLMStatusCode]]]

__all__ = ["AwaitedLinks"]


class AwaitedLinks(ClusterLinks):
    """link_clusters_async, unlink_clusters_async."""

    def link_clusters_async(self, clusters: Clusters, timeout: int = 3000) -> Statuses:
        """Await :meth:`~llm_datadist.instance.clusters.ClusterLinks.link_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        clusters that it linked stay linked.

        Source: API §3.4; extension.
        """
        engine, call = self._linking(clusters, timeout)
        return engine.workers.run(call, timeout)

    def unlink_clusters_async(self, clusters: Clusters, timeout: int = 3000, force: bool = False) -> Statuses:
        """Await :meth:`~llm_datadist.instance.clusters.ClusterLinks.unlink_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        each link is kept or gone, as after a timeout.

        Source: API §3.4; extension.
        """
        engine, call = self._unlinking(clusters, timeout, force)
        return engine.workers.run(call, timeout)
