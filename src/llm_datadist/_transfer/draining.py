"""Drain: an instance takes no new work, lets what it has promised end, and leaves its peers.

First links, communicators, grants and claims without a grant are refused. Once no key waits for a pull, no grant is
active and no transfer task runs, every link is unlinked: its peer lets running operations end, and agrees. So peers see
no loss, and dial no more.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Final

from llm_datadist._deadline import wait_all
from llm_datadist._threads import Threads
from llm_datadist.errors import LLMException
from llm_datadist.metrics import Leftover

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._transfer.engine import Engine

_THREADS: Final = 128  # links that end at once: a silent peer must not use the time of the next


def drain(engine: Engine, deadline: Deadline, busy: Callable[[], bool]) -> Leftover:
    """Return what is left at the deadline; links stay while ``busy``. Errors as :meth:`LLMDataDist.drain`."""
    why = f"cluster {engine.cluster_id} is draining"
    engine.links.stop_linking(f"{why}: it takes no new links; another instance may")
    engine.grants.refuse(f"{why}: it lends no more blocks")
    if deadline.poll(lambda: not (busy() or _left(engine).promised)):
        _leave(engine, deadline)
    return _left(engine)


def _left(engine: Engine) -> Leftover:
    _, keys, _ = engine.caches.registry.statistics()
    return Leftover(
        keys=tuple(each.key for each in keys if each.unconsumed_bytes),
        grants=engine.grants.statistics().active,
        tasks=engine.tasks.running,
        links=tuple(link.peer.cluster_id for link in engine.links.all() if not link.ended),
    )


def _leave(engine: Engine, deadline: Deadline) -> None:
    """Unlink all peers at once."""

    def unlink(link: Link) -> None:
        with suppress(LLMException):  # DeadlineExceeded: the link is left
            engine.links.unlink(link.peer.cluster_id, deadline, force=False)

    with Threads(_THREADS, "llm-datadist-link") as threads:
        wait_all([threads.share(unlink, each) for each in engine.links.all()], deadline.cancel)
