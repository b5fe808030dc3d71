"""Links of style A: one end dials the other one's listener (API §3.4)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from llm_datadist.checks import check_int32, check_list, check_rule, check_type, check_uint64
from llm_datadist.cluster import trans_int_ip
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, ParamError
from llm_datadist.instance.base import EngineOwner
from llm_datadist.instance.v1links import link_v1, unlink_v1, unlinked_v1
from llm_datadist.log import logger
from llm_datadist.types import LLMClusterInfo

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine import Engine

    Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
    Statuses = tuple[LLMStatusCode, list[LLMStatusCode]]
    Call = Callable[[Deadline], Statuses]
    #: Is told of each failure: "link" or "unlink", which cluster, why. From several threads.
    Report = Callable[[str, LLMClusterInfo, LLMException], None]

__all__ = ["ClusterLinks", "log_failure"]

#: Clusters that are linked at once: one that does not answer must not cost the next one its time (R19).
_LINK_THREADS = 128


def log_failure(verb: str, cluster: LLMClusterInfo, error: LLMException) -> None:
    """Log why a cluster was not linked or unlinked: the callers get statuses only."""
    logger.warning("%s cluster %s: %s: %s", verb, cluster.remote_cluster_id, error.status_code, error)


class ClusterLinks(EngineOwner):
    """link_clusters, unlink_clusters."""

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen; each link is usable both ways at once. Link failures are returned, not raised.

        All clusters are linked in parallel; those that succeed stay, whatever happens to the others. The reason of
        each failure is logged at WARNING. With ``llm.TransferBackend`` both ends may link: the second one's call
        succeeds on the link that the first one made.

        In v1 mode only a DECODER links, and all clusters of a call are linked or none: when one fails the others are
        given up, and the status is ``LLM_LINK_FAILED``. Refused before anything is tried: another role, and a cluster
        without exactly one local and one remote ip (``LLM_PARAM_INVALID``), a cluster id twice
        (``LLM_REPEAT_REQUEST``). A time-out is ``LLM_WAIT_PROCESS_TIMEOUT`` there.

        Args:
            clusters: Each with one remote ip and port, a local ip (unless ``local_comm_res`` is given and not empty),
                and the ``remote_cluster_id``, or none to learn it (R28).
            timeout: Milliseconds for all of it.

        Returns:
            ``(status, statuses)``: SUCCESS or the status of the last failing cluster, and one status each:
            ``LLM_ALREADY_LINK``, ``LLM_LINK_FAILED`` (unreachable, refused, another cluster id), ``LLM_TIMEOUT``,
            ``LLM_PARAM_INVALID`` (not exactly one remote ip, RCA differs between the ends).

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types.
            ParamError: ``timeout`` not above 0, or a cluster without local ip.

        Source: API §3.4, §8.
        """
        _, call = self._linking(clusters, timeout)
        return call(Deadline(timeout))

    def _linking(self, clusters: Clusters, timeout: int, report: Report = log_failure) -> tuple[Engine, Call]:
        """Check the arguments; return what is left to do."""
        engine = self._require_engine("link_clusters")
        self._check_clusters(clusters, timeout)
        v2, role = engine.options.cache_manager, self._role
        needs_local = v2 and not engine.options.local_comm_res
        for i, cluster in enumerate(clusters):
            check_rule(
                cluster.local_ip_info_list or not needs_local,
                f"clusters[{i}]: local_ip_info_list is empty; append_local_ip_info(own ip, 0) names this host",
            )
        mutual = engine.options.transfer_backend is not None

        def call(deadline: Deadline) -> Statuses:
            def link(cluster: LLMClusterInfo) -> None:
                engine.links.link(cluster.remote_cluster_id, _remote_address(cluster), deadline, mutual=mutual)

            return _each(clusters, link, "link", report)

        def call_v1(deadline: Deadline) -> Statuses:
            return link_v1(engine, role, clusters, timeout, lambda: call(deadline))

        return engine, call if v2 else call_v1

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Give links up. A cluster that is not linked is a success. Failures are returned, not raised.

        Waits for running operations. Not forced: tells the peer and waits for its agreement; on ``LLM_TIMEOUT`` the
        link is kept, at both ends. Forced: this side only, by ``remote_cluster_id`` alone, without contacting the
        peer; operations that still run at the timeout fail. With ``llm.TransferBackend`` always as if forced.

        In v1 mode running pulls are not waited for: ``LLM_LINK_BUSY``, and the link is kept. A cluster that is not
        linked has ``LLM_NOT_YET_LINK``, which is no failure of the call. A time-out is ``LLM_WAIT_PROCESS_TIMEOUT``.

        Args:
            clusters: Each with ``remote_cluster_id`` and, unless forced or in v1 mode, one remote ip.
            timeout: Milliseconds for all of it.
            force: See above.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types, or a ``remote_cluster_id`` that is not set.
            ParamError: ``timeout`` not above 0.

        Source: API §3.4, §8.
        """
        _, call = self._unlinking(clusters, timeout, force)
        return call(Deadline(timeout))

    def _unlinking(
        self, clusters: Clusters, timeout: int, force: bool, report: Report = log_failure
    ) -> tuple[Engine, Call]:
        """Check the arguments; return what is left to do."""
        engine = self._require_engine("unlink_clusters")
        self._check_clusters(clusters, timeout)
        check_type("force", force, bool)
        for i, cluster in enumerate(clusters):
            if cluster.remote_cluster_id is None:
                raise NoneArgument(f"clusters[{i}].remote_cluster_id is None: unlinking needs it")
        forced = force or engine.options.transfer_backend is not None

        v2 = engine.options.cache_manager

        def call(deadline: Deadline) -> Statuses:
            def unlink(cluster: LLMClusterInfo) -> None:
                cluster_id = check_uint64("id", cluster.remote_cluster_id)
                if not v2:
                    unlink_v1(engine, cluster_id, deadline, force=forced)
                    return
                if not forced:
                    _remote_address(cluster)
                engine.links.unlink(cluster_id, deadline, force=forced)

            overall, codes = _each(clusters, unlink, "unlink", report)
            return (overall, codes) if v2 else unlinked_v1(codes)

        return engine, call

    def _check_clusters(self, clusters: object, timeout: object) -> None:
        milliseconds = check_int32("timeout", timeout)
        check_rule(milliseconds > 0, f"timeout={milliseconds}: milliseconds above 0 are needed")
        check_list("clusters", clusters, LLMClusterInfo, tuple_ok=True)


def _remote_address(cluster: LLMClusterInfo) -> tuple[str, int]:
    remotes = cluster.remote_ip_info_list
    if len(remotes) != 1:
        raise ParamError(f"cluster {cluster.remote_cluster_id} has {len(remotes)} remote ips: exactly one is needed")
    ip, port = remotes[0]
    return trans_int_ip(ip), port


def _each(clusters: Clusters, work: Callable[[LLMClusterInfo], None], verb: str, report: Report) -> Statuses:
    """Do ``work`` for every cluster, in parallel; overall status = the last one that is no success (API §3.4)."""

    def status(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            work(cluster)
        except LLMException as error:
            report(verb, cluster, error)
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    if len(clusters) == 1:
        codes = [status(clusters[0])]
    else:
        with ThreadPoolExecutor(min(_LINK_THREADS, len(clusters)), "llm-datadist-link") as threads:
            codes = list(threads.map(status, clusters))
    failed = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return (failed[-1] if failed else LLMStatusCode.LLM_SUCCESS), codes
