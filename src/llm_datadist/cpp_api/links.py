"""Links and roles in the C++-shaped interface (API §9, §3.4, §3.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_int32, check_rule, check_type
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls
from llm_datadist.errors import LinkError, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist.cpp_api.structs import ClusterInfo

__all__ = ["LinkCalls"]


class LinkCalls(StatusCalls):
    """LinkLlmClusters, UnlinkLlmClusters, SetRole."""

    def LinkLlmClusters(
        self, clusters: list[ClusterInfo], timeout: int = 1000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen, all in parallel; those that succeed stay. A link is usable both ways at once.

        Args:
            clusters: Each with one remote ip and port. A local ip is needed only where neither
                ``OPTION_LOCAL_COMM_RES`` nor ``OPTION_LISTEN_IP_INFO`` was given.
            timeout: Milliseconds for all of it, int32 above 0.

        Returns:
            ``(status, statuses)``: the status of the last cluster that failed, and one each, as
            :meth:`LLMDataDist.link_clusters`. ``(LLM_PARAM_INVALID, [])`` when an argument is wrong: no cluster, an
            address that is none, ``timeout`` not above 0; then nothing has happened.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §3.4.
        """
        statuses: list[LLMStatusCode] = []
        with Call(self, "LinkLlmClusters") as call:
            options = self._engine("LinkLlmClusters").options
            _check_timeout(timeout)
            local_ip = options.local_comm_res is None and options.listen is None
            infos = arguments.cluster_infos(clusters, local_ip=local_ip, learn=True)
            overall, statuses = self._initialized("LinkLlmClusters").link_clusters(infos, timeout)
            _require_all("LinkLlmClusters", clusters, overall, statuses)
        return call.status, statuses

    def UnlinkLlmClusters(
        self, clusters: list[ClusterInfo], timeout: int = 1000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Give links up; a cluster that is not linked is a success.

        Args:
            clusters: Each with ``remote_cluster_id`` and, unless forced, one remote ip.
            timeout: Milliseconds for all of it, int32 above 0.
            force: This side only, without contacting the peer.

        Returns:
            As :meth:`LinkLlmClusters`; per cluster ``LLM_UNLINK_FAILED`` or ``LLM_TIMEOUT`` where the peer did not
            agree, and then the link is kept.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §3.4.
        """
        statuses: list[LLMStatusCode] = []
        with Call(self, "UnlinkLlmClusters") as call:
            dist = self._initialized("UnlinkLlmClusters")
            _check_timeout(timeout)
            check_type("force", force, bool)
            infos = arguments.cluster_infos(clusters)
            overall, statuses = dist.unlink_clusters(infos, timeout, force)
            _require_all("UnlinkLlmClusters", clusters, overall, statuses)
        return call.status, statuses


def _check_timeout(timeout: int) -> None:
    milliseconds = check_int32("timeout", timeout)
    check_rule(milliseconds > 0, f"timeout={milliseconds}: milliseconds above 0 are needed")


def _require_all(what: str, clusters: list[ClusterInfo], overall: LLMStatusCode, statuses: list[LLMStatusCode]) -> None:
    if overall is LLMStatusCode.LLM_SUCCESS:
        return
    failed = [
        f"cluster {cluster.remote_cluster_id} {status.name}"
        for cluster, status in zip(clusters, statuses, strict=True)
        if status is not LLMStatusCode.LLM_SUCCESS
    ]
    text = f"{what}: {', '.join(failed)} ({len(failed)} of {len(statuses)}); the warnings before this one say why"
    raise LinkError(text, status_code=overall)
