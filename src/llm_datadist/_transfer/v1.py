"""What v1 mode does differently behind its arguments: its status codes, and links that are made all or none.

Everything runs in the caller's thread. A link that cannot be undone politely is given up by force, and logged.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist._deadline import Deadline
from llm_datadist._log import logger, named
from llm_datadist.errors import KeyInUse, LinkError, LLMException, LLMStatusCode, NotLinked, ParamError
from llm_datadist.types import LLMClusterInfo, LLMRole
from llm_datadist.types.cluster import host_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager

    Statuses = tuple[LLMStatusCode, list[LLMStatusCode]]

_OK: Final = LLMStatusCode.LLM_SUCCESS
#: Milliseconds that undoing may take; after it the links are given up without the peer's agreement.
_UNDO_MS: Final = 1000

_CODES: Final = {
    LLMStatusCode.LLM_TIMEOUT: LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
    LLMStatusCode.LLM_OUT_OF_MEMORY: LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,
}


def v1_code(code: LLMStatusCode) -> LLMStatusCode:
    """Return what v1 calls ``code``: its own for time-outs and memory, the same for all others."""
    return _CODES.get(code, code).because(code.error)


@contextmanager
def v1_codes() -> Iterator[None]:
    """Give every LLMException of the block its status in v1; its class stays."""
    try:
        yield
    except LLMException as error:
        in_use = isinstance(error, KeyInUse)
        error.restate(LLMStatusCode.LLM_FAILED if in_use else v1_code(error.status_code))
        raise


def link_clusters(
    links: LinkManager,
    role: LLMRole,
    clusters: Sequence[LLMClusterInfo],
    timeout: int,
    link_each: Callable[[], Statuses],
) -> Statuses:
    """Link to all clusters or to none: give up the new links when one cluster fails.

    ``link_each`` links to each cluster for itself. Undoing may take a second more than ``timeout`` (milliseconds).
    If :func:`_refusals` has any, nothing is tried. Else, with ``LLM_LINK_FAILED``, the statuses say which cluster
    failed and how; the others, which have ``LLM_LINK_FAILED`` too, are not linked.
    """
    refused = _refusals(role, clusters)
    if refused:
        for status in refused.values():
            logger.warning("link_clusters: %s: %s", status, status.error)
        untried = LLMStatusCode.LLM_LINK_FAILED
        return list(refused.values())[-1], [refused.get(i, untried) for i in range(len(clusters))]
    before = links.all()
    try:
        overall, statuses = link_each()
    except BaseException:  # of the handler of a signal
        for made in links.all():
            if made.origin.dialled and made not in before:
                links.unlink(made.peer.cluster_id, Deadline(0), force=True)
        raise
    codes = [v1_code(status) for status in statuses]
    if overall is _OK or not clusters:
        return overall, codes
    dialled = {link.origin.address: link for link in links.all() if link.origin.dialled}
    deadline = Deadline(min(timeout, _UNDO_MS))
    for i, cluster in enumerate(clusters):
        if codes[i] is _OK:
            codes[i] = LLMStatusCode.LLM_LINK_FAILED
            ip, port = cluster.remote_ip_info_list[0]
            link = dialled.get((host_of(ip), port))
            if link is not None:
                _undo(links, link, deadline)
    return LLMStatusCode.LLM_LINK_FAILED, codes


def _refusals(role: LLMRole, clusters: Sequence[LLMClusterInfo]) -> dict[int, LLMStatusCode]:
    """Return what is wrong before any peer is asked: position -> status, with its error."""
    invalid, twice = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_REPEAT_REQUEST
    if role is not LLMRole.DECODER:
        error = ParamError(f"only a DECODER links, and this is a {role.name}")
        return dict.fromkeys(range(len(clusters)), invalid.because(error))
    refused: dict[int, LLMStatusCode] = {}
    seen: set[int] = set()
    for i, cluster in enumerate(clusters):
        ours, theirs = len(cluster.local_ip_info_list), len(cluster.remote_ip_info_list)
        number = cluster.remote_cluster_id
        if not ours == theirs == 1:
            text = f"clusters[{i}] has {ours} local and {theirs} remote ips: one each per device, so 1"
            refused[i] = invalid.because(ParamError(text))
        elif number in seen:
            text = f"clusters[{i}]: cluster {number} is in the list twice"
            refused[i] = twice.because(ParamError(text, status_code=twice))
        if number is not None:
            seen.add(number)
    return refused


def _undo(links: LinkManager, link: Link, deadline: Deadline) -> None:
    """Give up a link that this call has made, if need be by force."""
    try:
        links.unlink(link.peer.cluster_id, deadline, force=False)
    except LLMException as error:
        logger.info("undoing the link to %s by force: %s", link.peer, named(error))
        links.unlink(link.peer.cluster_id, deadline, force=True)


def unlink_cluster(links: LinkManager, cluster_id: int, deadline: Deadline, *, force: bool) -> None:
    """Give one link up; keep it while a pull is running on it, or if the peer does not agree in time."""
    try:
        link = links.get(cluster_id)
    except NotLinked:
        links.unlink(cluster_id, deadline, force=force)  # a lost one is not dialled again from now on
        raise
    if link.busy:
        raise _link_busy(link, "unlink_clusters")
    links.unlink(cluster_id, deadline, force=force)


def unlink_result(statuses: list[LLMStatusCode]) -> Statuses:
    """Return v1's result for these statuses: a cluster that was not linked is no failure."""
    codes = [v1_code(status) for status in statuses]
    failed = [code for code in codes if code not in (_OK, LLMStatusCode.LLM_NOT_YET_LINK)]
    if not codes:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    return (failed[-1] if failed else _OK), codes


def check_link_status(links: LinkManager, cluster_id: int, deadline: Deadline) -> None:
    """Ping the peer over its link and wait for the answer. Errors as :meth:`LLMDataDist.check_link_status`."""
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
