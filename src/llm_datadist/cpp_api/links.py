"""Links and roles in the C++-shaped interface (API §9, §3.4, §3.6)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_int32, check_rule, check_type
from llm_datadist._deadline import Deadline
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls
from llm_datadist.datadist import log_failure
from llm_datadist.errors import LinkError, LLMStatusCode

if TYPE_CHECKING:
    from llm_datadist.cpp_api.structs import ClusterInfo, LlmRole
    from llm_datadist.errors import LLMException
    from llm_datadist.types import LLMClusterInfo

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
            reasons = _Reasons()
            _, link = self._initialized("LinkLlmClusters")._linking(infos, timeout, reasons.report)
            overall, statuses = link(Deadline(timeout))
            reasons.require_success("LinkLlmClusters", infos, overall, statuses)
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
            reasons = _Reasons()
            _, unlink = dist._unlinking(infos, timeout, force, reasons.report)
            overall, statuses = unlink(Deadline(timeout))
            reasons.require_success("UnlinkLlmClusters", infos, overall, statuses)
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


class _Reasons:
    """Why clusters failed, of one call: for ``last_error``, since statuses alone do not say. Filled by any thread."""

    def __init__(self) -> None:
        self._errors: dict[int, LLMException] = {}  # by the identity of the cluster info

    def report(self, verb: str, cluster: LLMClusterInfo, error: LLMException) -> None:
        """Keep one reason, and log it."""
        log_failure(verb, cluster, error)
        self._errors[id(cluster)] = error

    def require_success(
        self,
        what: str,
        infos: list[LLMClusterInfo],
        overall: LLMStatusCode,
        statuses: list[LLMStatusCode],
    ) -> None:
        """Raise LinkError with every reason unless the call succeeded."""
        if overall is LLMStatusCode.LLM_SUCCESS:
            return
        failed = [
            f"clusters[{i}] {status.name}: {self._errors[id(info)]}"
            for i, (info, status) in enumerate(zip(infos, statuses, strict=True))
            if status is not LLMStatusCode.LLM_SUCCESS
        ]
        raise LinkError(f"{what}: {len(failed)} of {len(statuses)} failed: {'; '.join(failed)}", status_code=overall)
