"""Taking memory of the user out of use: unregister_cache and finalize wait for whoever may still write it.

The user frees the memory when they return, so nobody may be at it any more: no foreign writer, no reader in this
process, no call of our own. Readers in other processes are not waited for: they fail by the guard.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.cache.entries import Effects
from llm_datadist.errors import DeadlineExceeded
from llm_datadist.log import logger
from llm_datadist.memory.quarantine import writers_named

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llm_datadist.cache.registry import Entry, Registry
    from llm_datadist.deadline import Deadline
    from llm_datadist.memory.guards import Guard
    from llm_datadist.memory.writers import Hazard, Writers

__all__ = ["private_memory", "wait_at_the_end", "withdraw"]


def withdraw(
    registry: Registry, writers: Writers, cache_id: int, void: Callable[[Entry], Guard], deadline: Deadline
) -> Effects:
    """Drop a registered cache once nobody is at its memory; any other id is a no-op. Runs at the owner.

    Meanwhile nobody finds it. When it cannot be dropped in time it is as it was, under a newer guard.

    Args:
        void: Makes the cache's guard void and returns the next one of the same slot.

    Raises:
        DeadlineExceeded: Somebody still is (phase ``drain``); the text says who.
    """
    entry = registry.registered(cache_id)
    if entry is None:
        return Effects()
    if not deadline.poll(lambda: registry.begin_closing(entry) or registry.registered(cache_id) is not entry):
        raise deadline.error(f"unregister_cache: another call unregisters cache {cache_id}", "drain")
    if registry.registered(cache_id) is not entry:
        return Effects()
    guard: Guard = entry.guard
    try:
        guard = void(entry)
        hazards = writers.busy(guard.slot, readers=True)
        if not deadline.poll(lambda: not entry.holds.inside and not writers.pending(hazards)):
            raise _still_used(entry, writers.pending(hazards), deadline)
    except BaseException:
        registry.reopen(entry, guard)
        raise
    return registry.unregister(cache_id)


def private_memory(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with memory outside every pool: nothing keeps that mapped for who is late."""
    return [each for each in entries if each.storage.private]


def wait_at_the_end(writers: Writers, entries: list[Entry], deadline: Deadline) -> None:
    """Finalize: wait, in bounds, for who is at memory of the user; whoever does not end is named in the log."""
    hazards = tuple(hazard for each in entries for hazard in writers.busy(each.guard.slot, readers=True))
    if not deadline.poll(lambda: not any(each.holds.inside for each in entries) and not writers.pending(hazards)):
        logger.warning(
            "finalize: after %d ms registered memory is still in use by %s: do not free it before they have ended",
            deadline.budget_ms,
            _users(sum(each.holds.inside for each in entries), writers.pending(hazards)),
        )


def _still_used(entry: Entry, pending: tuple[Hazard, ...], deadline: Deadline) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"unregister_cache: after {deadline.budget_ms} ms the memory of cache {entry.cache_id} is still in use by "
        f"{_users(entry.holds.inside, pending)}; the cache stays registered: try again later (unlinking stops no "
        "writer, the end of its process does)",
        phase="drain",
        budget_ms=deadline.budget_ms,
        elapsed_ms=deadline.elapsed_ms(),
        peer=next((each.page.cluster_id for each in pending), None),
    )


def _users(holds: int, pending: tuple[Hazard, ...]) -> str:
    names = [f"{holds} calls of this process"] if holds else []
    return " and ".join([*names, writers_named(pending)] if pending or not names else names)
