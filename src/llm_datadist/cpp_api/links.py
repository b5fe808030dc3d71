"""Links and roles in the C++-shaped interface (API §9, §3.4, §3.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.checks import check_int32, check_rule, check_type
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls
from llm_datadist.errors import LinkError, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist.cpp_api.structs import ClusterInfo, LlmRole

__all__ = ["LinkCalls"]

_NO_OPTIONS: Final[dict[str, str]] = {}


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

    def SetRole(self, role: LlmRole, options: dict[str, str] = _NO_OPTIONS) -> LLMStatusCode:
        """Take another role, and begin, move or cease to listen. Caches, their ids and memory are not touched.

        ``OPTION_ENABLE_SET_ROLE`` is not needed: that is the older generation's rule.

        Args:
            role: The role from now on; the same one is allowed.
            options: With ``OPTION_LISTEN_IP_INFO`` this end listens there from now on, without it no more. Other keys
                are ignored.

        Returns:
            ``LLM_EXIST_LINK``: there is a link, whoever made it. ``LLM_PARAM_INVALID``: ``kEnd``, or no ip:port.
            ``LLM_FAILED``: the address cannot be bound. ``LLM_FEATURE_NOT_ENABLED``: another address with
            ``OPTION_TRANSFER_BACKEND``. Role and listener are then as :meth:`LLMDataDist.switch_role` says.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §3.6.
        """
        with Call(self, "SetRole") as call:
            dist = self._initialized("SetRole")
            dist.switch_role(arguments.role("role", role), arguments.switch_options(options))
        return call.status


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
