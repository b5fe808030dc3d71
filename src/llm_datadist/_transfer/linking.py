"""Linking after argument checks, in v1 mode and in v2 mode.

``link_clusters`` and ``unlink_clusters`` return the remaining work, a function of the call's deadline. It links several
clusters at once, in threads ``llm-datadist-link_<n>`` that end with the call, and returns an :class:`Outcome`. In v1
mode a call links all its clusters or none. To undo a link it asks the peer, then unlinks by force.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from llm_datadist._checks import check_uint64
from llm_datadist._deadline import Deadline, wait_all
from llm_datadist._log import links_logger as logger
from llm_datadist._log import named
from llm_datadist._threads import Threads
from llm_datadist.errors import KeyInUse, LinkError, LLMException, LLMStatusCode, NotLinked, ParamError, link_failures
from llm_datadist.types.cluster import host_of
from llm_datadist.types.enums import LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist._links.link import Link, Peer
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._transfer.engine import Engine
    from llm_datadist.types import LLMClusterInfo

    Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
    Statuses = tuple[LLMStatusCode, list[LLMStatusCode]]
    Failed = tuple[LLMStatusCode, LLMException | None]
    Pending = Callable[[Deadline], "Outcome"]

_OK: Final = LLMStatusCode.LLM_SUCCESS
# Status codes of v1 mode that differ from those of v2 (interface §8).
_CODES: Final = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}
_THREADS: Final = 128  # clusters linked at once: a silent one must not use the time of the next (interface R19)
_EMPTY: Final = "clusters is empty: at least one LLMClusterInfo is needed"
_UNDO_MS: Final = 1000  # milliseconds for undoing; afterwards this side unlinks without the peer's agreement


def v1_code(code: LLMStatusCode) -> LLMStatusCode:
    """Return what v1 calls ``code``: its own for time-outs and memory, the same for all others."""
    return _CODES.get(code, code)


@contextmanager
def v1_codes() -> Iterator[None]:
    """Give every LLMException of the block its status in v1; its class stays."""
    try:
        yield
    except LLMException as error:
        in_use = isinstance(error, KeyInUse)
        error.restate(LLMStatusCode.LLM_FAILED if in_use else v1_code(error.status_code))
        raise


class Outcome(NamedTuple):
    """Result of a call: its status, the status of each cluster, and beside it the exception of each that failed."""

    overall: LLMStatusCode
    statuses: list[LLMStatusCode]
    errors: Sequence[LLMException | None]

    def tell(self) -> Statuses:
        """Return the statuses; keep the exceptions for :attr:`LLMStatusCode.error` of this thread or task."""
        reasons: dict[LLMStatusCode, list[LLMException]] = {}
        for status, error in zip(self.statuses or [self.overall], self.errors, strict=True):
            if error is not None and error not in reasons.setdefault(status, []):
                reasons[status].append(error)
        link_failures.set({status: _one_of(status, errors) for status, errors in reasons.items()})
        return self.overall, self.statuses


def _one_of(status: LLMStatusCode, errors: list[LLMException]) -> LLMException:
    """Return the one error, or one that quotes them all."""
    if len(errors) == 1:
        return copy.copy(errors[0])  # without a traceback, whose frames would keep caches and links
    return LinkError(f"{len(errors)} clusters failed: {'; '.join(map(named, errors))}", status_code=status)


def link_clusters(engine: Engine, clusters: Clusters, linked: list[Peer] | None = None) -> Pending:
    """Return the work that links, and adds peers to ``linked``. It keeps failures for ``explain``, too."""
    links, mutual = engine.links, engine.options.transfer_backend is not None

    def link(cluster: LLMClusterInfo, deadline: Deadline) -> None:
        try:
            peer = links.link(cluster.remote_cluster_id, _remote_address(cluster), deadline, mutual=mutual)
            if linked is not None:
                linked.append(peer)
        except LLMException as error:
            if cluster.remote_cluster_id is not None:
                links.note(cluster.remote_cluster_id, "link_clusters failed", error)
            raise

    in_v1 = partial(_link_all_or_none, links, engine.options.role, clusters)
    return partial(_run, engine, "link", clusters, link, in_v1)


def unlink_clusters(engine: Engine, clusters: Clusters, *, force: bool) -> Pending:
    """Return the work that unlinks. It logs the reason of each failure."""
    v2, forced = engine.options.cache_manager, force or engine.options.transfer_backend is not None
    give_up = engine.links.unlink if v2 else partial(_unlink_idle, engine.links)

    def unlink(cluster: LLMClusterInfo, deadline: Deadline) -> None:
        if v2 and not forced:
            _remote_address(cluster)
        give_up(check_uint64("id", cluster.remote_cluster_id), deadline, force=forced)

    def in_v1(each: Callable[[], Outcome], _: Deadline) -> Outcome:
        overall, codes, errors = each()
        codes = [v1_code(code) for code in codes]
        # A cluster that was not linked is not a failure.
        failed = [code for code in codes if code not in (_OK, LLMStatusCode.LLM_NOT_YET_LINK)]
        return Outcome(failed[-1] if failed else _OK if codes else overall, codes, errors)

    return partial(_run, engine, "unlink", clusters, unlink, in_v1)


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
    in_v1: Callable[[Callable[[], Outcome], Deadline], Outcome],
    deadline: Deadline,
) -> Outcome:
    """Do ``work`` for every cluster; in v1 mode ``in_v1`` makes the result."""
    with engine.meters.call(f"{verb}_clusters", [each.remote_cluster_id for each in clusters]) as call:

        def status(cluster: LLMClusterInfo) -> Failed:
            try:
                work(cluster, deadline)
            except LLMException as error:
                call.error = error
                cluster_id, code = cluster.remote_cluster_id, error.status_code
                logger.warning("%s cluster %s: %s: %s", verb, cluster_id, code, named(error))
                return code, error
            return _OK, None

        if not clusters:
            logger.warning("%s_clusters: %s", verb, _EMPTY)
        each = partial(_each, clusters, status, deadline)
        outcome = each() if engine.options.cache_manager else in_v1(each, deadline)
        call.status = outcome.overall
    return outcome


def _each(clusters: Clusters, status: Callable[[LLMClusterInfo], Failed], deadline: Deadline) -> Outcome:
    """Do the clusters in parallel; the overall status is the last that is not SUCCESS."""
    if not clusters:
        return Outcome(LLMStatusCode.LLM_PARAM_INVALID, [], [ParamError(_EMPTY)])
    if len(clusters) == 1:
        results = [status(clusters[0])]
    else:
        with Threads(min(_THREADS, len(clusters)), "llm-datadist-link") as threads:
            results = wait_all([threads.share(status, each) for each in clusters], deadline.cancel)
    codes = [code for code, _ in results]
    overall = next((code for code in reversed(codes) if code is not _OK), _OK)
    return Outcome(overall, codes, [error for _, error in results])


def _link_all_or_none(
    links: LinkManager, role: LLMRole, clusters: Clusters, each: Callable[[], Outcome], deadline: Deadline
) -> Outcome:
    """Link to all clusters or to none: give up the new links when one cluster fails.

    ``each`` links to every cluster separately. Undoing may take a second more than the deadline. If :func:`_refusals`
    has any, no peer is asked. Otherwise, with ``LLM_LINK_FAILED``, the statuses name the failed clusters and their
    failures; the other clusters, which have ``LLM_LINK_FAILED`` too, are not linked.
    """
    if refused := _refusals(role, clusters):
        for error in refused.values():
            logger.warning("link_clusters: %s: %s", error.status_code, error)
        errors = [refused.get(i) for i in range(len(clusters))]
        statuses = [LLMStatusCode.LLM_LINK_FAILED if error is None else error.status_code for error in errors]
        return Outcome(list(refused.values())[-1].status_code, statuses, errors)
    before = links.all()
    try:
        overall, statuses, failures = each()
    except BaseException:  # of the handler of a signal
        for made in links.all():
            if made.origin.dialled and made not in before:
                links.unlink(made.peer.cluster_id, Deadline(0), force=True)
        raise
    codes = [v1_code(status) for status in statuses]
    if overall is _OK or not clusters:
        return Outcome(overall, codes, failures)
    dialled = {link.origin.address: link for link in links.all() if link.origin.dialled}
    undoing = Deadline(min(deadline.budget_ms, _UNDO_MS))
    for i, cluster in enumerate(clusters):
        if codes[i] is _OK:
            codes[i] = LLMStatusCode.LLM_LINK_FAILED
            if (link := dialled.get(_remote_address(cluster))) is not None:
                _undo(links, link, undoing)
    return Outcome(LLMStatusCode.LLM_LINK_FAILED, codes, failures)


def _refusals(role: LLMRole, clusters: Clusters) -> dict[int, ParamError]:
    """Return the errors found before any peer is asked, by position."""
    if role is not LLMRole.DECODER:
        return dict.fromkeys(range(len(clusters)), ParamError(f"only a DECODER links, and this is a {role.name}"))
    refused: dict[int, ParamError] = {}
    seen: set[int | None] = set()
    for i, cluster in enumerate(clusters):
        ours, theirs = len(cluster.local_ip_info_list), len(cluster.remote_ip_info_list)
        number = cluster.remote_cluster_id
        if not ours == theirs == 1:
            text = f"clusters[{i}] has {ours} local and {theirs} remote ips: one each per device, so 1"
            refused[i] = ParamError(text)
        elif number is not None and number in seen:
            text = f"clusters[{i}]: cluster {number} is in the list twice"
            refused[i] = ParamError(text, status_code=LLMStatusCode.LLM_REPEAT_REQUEST)
        seen.add(number)
    return refused


def _undo(links: LinkManager, link: Link, deadline: Deadline) -> None:
    """Unlink what this call has linked, if necessary by force."""
    try:
        links.unlink(link.peer.cluster_id, deadline, force=False)
    except LLMException as error:
        logger.info("undoing the link to %s by force: %s", link.peer, named(error))
        links.unlink(link.peer.cluster_id, deadline, force=True)


def _unlink_idle(links: LinkManager, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
    """Unlink; keep the link while a pull runs on it, or if the peer does not agree in time."""
    try:
        link = links.get(cluster_id)
    except NotLinked:
        links.unlink(cluster_id, deadline, force=force)  # ends the redialling of a lost one
        raise
    if link.busy:
        raise _link_busy(link, "unlink_clusters")
    links.unlink(cluster_id, deadline, force=force)


def check_link_status(links: LinkManager, cluster_id: int, deadline: Deadline) -> None:
    """Ping the peer and wait for its answer. Errors as :meth:`LLMDataDist.check_link_status`."""
    link = links.get(cluster_id)
    if link.busy:
        raise _link_busy(link, "check_link_status")
    answered = link.responds(deadline, deadline.budget_ms)
    if link.ended:
        raise link.lost_error("check_link_status", "ping")
    if not answered:
        with v1_codes():
            raise deadline.error(f"check_link_status of {link.peer}", "ping", cluster_id)


def _link_busy(link: Link, call: str) -> LinkError:
    return LinkError(
        f"{call}: a transfer is running on the link to {link.peer}; ask again when it has ended",
        status_code=LLMStatusCode.LLM_LINK_BUSY,
        peer=link.peer.cluster_id,
    )
