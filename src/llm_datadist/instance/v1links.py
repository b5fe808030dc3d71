"""Links in v1 mode: a DECODER links to PROMPTs, all of one call or none (API §3.7, §8, BEHAVIOUR §2.4).

The calls of one process need no lock around them: two that ask for the same link agree in the table of links, so
``LLM_PROCESSING_LINK`` never comes back, and no number of clusters is too many (R19).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist.checks import check_uint64
from llm_datadist.cluster import trans_int_ip
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, NotLinked, ParamError, StateError
from llm_datadist.instance.base import EngineOwner
from llm_datadist.log import logger
from llm_datadist.types import LLMRole
from llm_datadist.v1codes import v1_code, v1_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.control.link import Link
    from llm_datadist.engine import Engine
    from llm_datadist.types import LLMClusterInfo

    Codes = tuple[LLMStatusCode, list[LLMStatusCode]]

__all__ = ["V1Links", "link_v1", "unlink_v1", "unlinked_v1"]

_OK = LLMStatusCode.LLM_SUCCESS
#: What polite undoing may take; after it the links are given up without the peer's word.
_UNDO_MS: Final = 1000


class V1Links(EngineOwner):
    """check_link_status."""

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Find out whether a link works, by a ping over it; returns when the peer has answered. Only in v1 mode.

        Raises:
            NotInitialized: Before init or after finalize.
            StateError: In v2 mode (``LLM_PARAM_INVALID``): ``statistics().links`` shows the states there.
            TypeError: Not an int (``NoneArgument`` for None).
            ParamError: Outside uint64, or this is no DECODER.
            NotLinked: There is no link to that cluster, or it was given up meanwhile.
            LinkError: A pull is running on the link (``LLM_LINK_BUSY``); ask again.
            DeadlineExceeded: No answer within ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the link is kept.
            PeerLost: The link broke meanwhile; link again.

        Source: API §3.7.
        """
        engine = self._require_engine("check_link_status")
        if engine.options.cache_manager:
            raise StateError(
                "check_link_status is a call of v1 mode (llm.EnableCacheManager=0)",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )
        cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)
        if self._role is not LLMRole.DECODER:
            raise ParamError(f"check_link_status: only a DECODER may, and this is a {self._role.name}")
        deadline = Deadline(engine.options.sync_kv_timeout_ms)
        link = engine.links.get(cluster_id)
        if link.busy:
            raise _busy(link, "check_link_status")
        number = link.ping()
        answered = deadline.poll(lambda: link.last_pong >= number or link.ended)
        if link.ended:
            raise link.lost_error("check_link_status", "ping")
        if not answered:
            with v1_codes():
                raise deadline.error(f"check_link_status of {link.peer}", "ping", cluster_id)


def link_v1(
    engine: Engine,
    role: LLMRole,
    clusters: Sequence[LLMClusterInfo],
    timeout: int,
    each: Callable[[], Codes],
) -> Codes:
    """Link to all clusters, or to none: those that were linked are given up when another one fails.

    Args:
        engine: Of the LLMDataDist.
        role: Its role as of now.
        clusters: To link to.
        timeout: Milliseconds; what undoing takes comes on top, a second at most.
        each: Links to each cluster for itself and returns the statuses.

    Returns:
        ``(status, statuses)``. ``LLM_PARAM_INVALID``: this is no DECODER, no clusters, or a cluster without exactly
        one local and one remote ip, one per device; ``LLM_REPEAT_REQUEST``: a cluster id twice; then nothing was
        tried. ``LLM_LINK_FAILED``: the statuses say which cluster failed and how, and the others, which have
        ``LLM_LINK_FAILED`` too, are not linked.
    """
    refused = _refusals(role, clusters)
    if refused:
        for reason, status in refused.values():
            logger.warning("link_clusters: %s: %s", status, reason)
        unheard = ("", LLMStatusCode.LLM_LINK_FAILED)
        return list(refused.values())[-1][1], [refused.get(i, unheard)[1] for i in range(len(clusters))]
    overall, statuses = each()
    codes = [v1_code(status) for status in statuses]
    if overall is _OK or not clusters:
        return overall, codes
    dialled = {link.address: link for link in engine.links.all() if link.dialled}
    deadline = Deadline(min(timeout, _UNDO_MS))
    for i, cluster in enumerate(clusters):
        if codes[i] is _OK:
            codes[i] = LLMStatusCode.LLM_LINK_FAILED
            ip, port = cluster.remote_ip_info_list[0]
            link = dialled.get((trans_int_ip(ip), port))
            if link is not None:
                _undo(engine, link, deadline)
    return LLMStatusCode.LLM_LINK_FAILED, codes


def _refusals(role: LLMRole, clusters: Sequence[LLMClusterInfo]) -> dict[int, tuple[str, LLMStatusCode]]:
    """Return what can be said without asking anybody: position -> (reason, status)."""
    invalid = LLMStatusCode.LLM_PARAM_INVALID
    if role is not LLMRole.DECODER:
        return dict.fromkeys(range(len(clusters)), (f"only a DECODER links, and this is a {role.name}", invalid))
    refused: dict[int, tuple[str, LLMStatusCode]] = {}
    seen: set[int] = set()
    for i, cluster in enumerate(clusters):
        ours, theirs = len(cluster.local_ip_info_list), len(cluster.remote_ip_info_list)
        number = cluster.remote_cluster_id
        if not ours == theirs == 1:
            refused[i] = (f"clusters[{i}] has {ours} local and {theirs} remote ips: one each per device, so 1", invalid)
        elif number in seen:
            refused[i] = (f"clusters[{i}]: cluster {number} is in the list twice", LLMStatusCode.LLM_REPEAT_REQUEST)
        if number is not None:
            seen.add(number)
    return refused


def _undo(engine: Engine, link: Link, deadline: Deadline) -> None:
    """Give up a link that this call has made: politely, or, when the peer does not agree in time, by force."""
    try:
        engine.links.unlink(link.peer.cluster_id, deadline, force=False)
    except LLMException as error:
        logger.info("undoing the link to %s by force: %s", link.peer, error)
        engine.links.unlink(link.peer.cluster_id, deadline, force=True)


def unlink_v1(engine: Engine, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
    """Give one link up.

    Raises:
        NotLinked: There is none. One that was lost is not dialled again from now on.
        LinkError: A pull is running on it (``LLM_LINK_BUSY``): the link is kept.
        DeadlineExceeded: The peer did not agree in time: the link is kept.
    """
    try:
        link = engine.links.get(cluster_id)
    except NotLinked:
        engine.links.unlink(cluster_id, deadline, force=force)
        raise
    if link.busy:
        raise _busy(link, "unlink_clusters")
    engine.links.unlink(cluster_id, deadline, force=force)


def unlinked_v1(statuses: list[LLMStatusCode]) -> Codes:
    """Return what v1 says of these statuses: a cluster that was not linked is told, and no failure of the call."""
    codes = [v1_code(status) for status in statuses]
    failed = [code for code in codes if code not in (_OK, LLMStatusCode.LLM_NOT_YET_LINK)]
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    return (failed[-1] if failed else _OK), codes


def _busy(link: Link, call: str) -> LinkError:
    return LinkError(
        f"{call}: a transfer is running on the link to {link.peer}; ask again when it has ended",
        status_code=LLMStatusCode.LLM_LINK_BUSY,
        peer=link.peer.cluster_id,
    )
