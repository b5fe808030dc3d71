"""Giving a link up: what the two ends say to each other before one of them closes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.control.messages import Farewell, Goodbye, Stay
from llm_datadist.errors import DeadlineExceeded, LLMException
from llm_datadist.log import logger

if TYPE_CHECKING:
    from llm_datadist.control.link import Link
    from llm_datadist.control.table import LinkTable
    from llm_datadist.deadline import Deadline

__all__ = ["give_up", "on_goodbye"]


def give_up(table: LinkTable, link: Link, deadline: Deadline, *, force: bool) -> None:
    """Let running operations finish, and the peer agree, as far as there is time. A caller's thread.

    Raises:
        DeadlineExceeded: Operations still run, or the peer did not answer: the link is kept. Not when forced.
    """
    cluster_id = link.peer.cluster_id
    if not link.begin_unlink():
        # Another call, of either end, is at it.
        gone = table.wait(lambda: table.get(cluster_id) is not link, deadline.remaining())
        if not gone and not force:
            raise deadline.error(f"unlink of {link.peer}", "drain", cluster_id)
    elif force:
        link.wait_idle(deadline)
    else:
        _part(table, link, deadline)


def _part(table: LinkTable, link: Link, deadline: Deadline) -> None:
    """Part in agreement. A link that breaks meanwhile is as good."""
    what = f"unlink of {link.peer}"
    try:
        if not link.wait_idle(deadline):
            raise deadline.error(what, "drain", link.peer.cluster_id)
        link.request(Goodbye, deadline, what, "unlink")
    except DeadlineExceeded:
        link.tell(Stay())
        link.resume()
        table.touch()
        raise
    except LLMException as error:
        logger.info("%s: %s", what, error)


def on_goodbye(link: Link, message: Goodbye) -> None:
    """The peer wants to part: say farewell once nothing runs here. The control thread."""
    link.peer_parts(lambda: link.tell(Farewell(message.id)))
