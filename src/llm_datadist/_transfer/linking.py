"""Linking after argument checks: many clusters at once, with one status each; communicators.

``link_clusters`` and ``unlink_clusters`` return the work that is left, which takes the deadline of the call. Several
clusters are linked in threads ``llm-datadist-link_<n>`` that end with the call.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_uint64
from llm_datadist._deadline import wait_all
from llm_datadist._log import logger, named
from llm_datadist._transfer import v1
from llm_datadist._transfer.threads import Threads
from llm_datadist.errors import LLMException, LLMStatusCode, ParamError
from llm_datadist.types.cluster import host_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._transfer.engine import Engine
    from llm_datadist.types import LLMClusterInfo

    Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
    Statuses = tuple[LLMStatusCode, list[LLMStatusCode]]
    Pending = Callable[[Deadline], Statuses]

#: Clusters that are linked at once: one that does not answer must not cost the next one its time (interface R19).
_THREADS: Final = 128


def link_clusters(engine: Engine, clusters: Clusters) -> Pending:
    """Return the work that links; the reason of each failure is logged, and kept for ``explain``."""
    links, role, mutual = engine.links, engine.options.role, engine.options.transfer_backend is not None

    def link(cluster: LLMClusterInfo, deadline: Deadline) -> None:
        try:
            links.link(cluster.remote_cluster_id, _remote_address(cluster), deadline, mutual=mutual)
        except LLMException as error:
            if cluster.remote_cluster_id is not None:
                links.note(cluster.remote_cluster_id, "link_clusters failed", error)
            raise

    def all_or_none(each: Callable[[], Statuses], deadline: Deadline) -> Statuses:
        return v1.link_clusters(links, role, clusters, deadline.budget_ms, each)

    return partial(_run, engine, "link", clusters, link, all_or_none)


def unlink_clusters(engine: Engine, clusters: Clusters, *, force: bool) -> Pending:
    """Return the work that unlinks; the reason of each failure is logged."""
    v2, forced = engine.options.cache_manager, force or engine.options.transfer_backend is not None
    give_up = engine.links.unlink if v2 else partial(v1.unlink_cluster, engine.links)

    def unlink(cluster: LLMClusterInfo, deadline: Deadline) -> None:
        if v2 and not forced:
            _remote_address(cluster)
        give_up(check_uint64("id", cluster.remote_cluster_id), deadline, force=forced)

    return partial(_run, engine, "unlink", clusters, unlink, lambda each, _: v1.unlink_result(each()[1]))


def _remote_address(cluster: LLMClusterInfo) -> tuple[str, int]:
    remotes = cluster.remote_ip_info_list
    if len(remotes) != 1:
        raise ParamError(f"cluster {cluster.remote_cluster_id} has {len(remotes)} remote ips: exactly one is needed")
    ip, port = remotes[0]
    return host_of(ip), port


def _run(
    engine: Engine,
    verb: str,
    clusters: Clusters,
    work: Callable[[LLMClusterInfo, Deadline], None],
    in_v1: Callable[[Callable[[], Statuses], Deadline], Statuses],
    deadline: Deadline,
) -> Statuses:
    """Do ``work`` for every cluster; in v1 mode ``in_v1`` makes the result of it."""
    with engine.meters.call(f"{verb}_clusters", [each.remote_cluster_id for each in clusters]) as call:

        def status(cluster: LLMClusterInfo) -> LLMStatusCode:
            try:
                work(cluster, deadline)
            except LLMException as error:
                call.error = error
                cluster_id, code = cluster.remote_cluster_id, error.status_code
                logger.warning("%s cluster %s: %s: %s", verb, cluster_id, code, named(error))
                return code.because(error)
            return LLMStatusCode.LLM_SUCCESS

        each = partial(_each, clusters, status, deadline)
        statuses = each() if engine.options.cache_manager else in_v1(each, deadline)
        call.status = statuses[0]
    return statuses


def _each(clusters: Clusters, status: Callable[[LLMClusterInfo], LLMStatusCode], deadline: Deadline) -> Statuses:
    """Return the last status that is no success, and the status of every cluster."""
    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    if len(clusters) == 1:
        codes = [status(clusters[0])]
    else:
        with Threads(min(_THREADS, len(clusters)), "llm-datadist-link") as threads:
            codes = wait_all([threads.share(status, each) for each in clusters], deadline.cancel)
    failed = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return (failed[-1] if failed else LLMStatusCode.LLM_SUCCESS), codes


def open_communicator(engine: Engine, name: str, ranks: dict[int, int], rank_table: str) -> int:
    """Begin to link the members of a communicator; return its id."""
    return engine.open_communicator(name, ranks, rank_table)


#: What ``link()`` of every LLMDataDist calls is the last one. A test that rehearses communicators adds its own.
openers: Final[list[Callable[[Engine, str, dict[int, int], str], int]]] = [open_communicator]
