"""Loopback: a client's unit test links to itself.

    with loopback_links() as peers:
        comm_id = datadist.link("link", {1: 0, 2: 1}, '{"server_list": []}')
        assert datadist.query_register_mem_status(comm_id) == RegisterMemStatus.OK
        peers[2].cache_manager.register_blocks_cache(...)

Inside, ``link()`` of any LLMDataDist of this process ignores its rank table and makes the other members: LLMDataDist
objects of this process, joined when ``link()`` returns. They link over loopback and move real bytes.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist._deadline import Deadline
from llm_datadist.datadist import Life, LLMDataDist, life_of
from llm_datadist.types.enums import LLMRole, RegisterMemStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llm_datadist._transfer.engine import Engine

_JOIN_MS: Final = 10_000


@contextmanager
def loopback_links(options: Mapping[str, str] | None = None) -> Iterator[Loopback]:
    """Make the other members of every ``link()`` of this process; finalize them at the end.

    An initialised LLMDataDist of this process is not made: it must call ``link()`` too, and ``link()`` does not wait
    for it.

    Args:
        options: Further options of the members, for example ``llm.MemPoolConfig``. The caller's RCA and timeouts apply.

    Yields:
        The members, by cluster id.
    """
    members = Loopback(options or {})
    Life.loopbacks.append(members.open)
    try:
        yield members
    finally:
        Life.loopbacks.remove(members.open)
        members.close()


class Loopback:
    """The members that :func:`loopback_links` made: ``peers[cluster_id]`` is an LLMDataDist. Threads: one.

    Attributes:
        members: All of them, by cluster id.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.members: dict[int, LLMDataDist] = {}
        self._options = options

    def __getitem__(self, cluster_id: int) -> LLMDataDist:
        """Return one member; raise KeyError if no ``link()`` has named it yet."""
        return self.members[cluster_id]

    def open(self, engine: Engine, name: str, ranks: dict[int, int], rank_table: str) -> int:
        """Open a communicator for ``link()``: make the other members, and have them join."""
        caller = next(each for each in list(Life.all) if life_of(each).engine is engine)
        if caller in self.members.values():
            return engine.open_communicator(name, ranks, rank_table)
        for cluster_id in ranks:
            if cluster_id not in self.members and all(each.cluster_id != cluster_id for each in list(Life.all)):
                self.members[cluster_id] = self._make(cluster_id, caller)
        comm_id = engine.open_communicator(name, ranks, _table(ranks))
        self._join(caller, name, ranks, comm_id)
        return comm_id

    def _join(self, caller: LLMDataDist, comm_name: str, ranks: dict[int, int], comm_id: int) -> None:
        """Let the made members join; wait unless the test makes others itself."""
        made = [self.members[cluster_id] for cluster_id in ranks if cluster_id in self.members]
        ids = [(member, member.link(comm_name, ranks, _table(ranks))) for member in made]
        if len(made) + 1 < len(ranks):
            return
        ends: list[tuple[LLMDataDist, int]] = [(caller, comm_id), *ids]
        preparing = RegisterMemStatus.PREPARING
        Deadline(_JOIN_MS).poll(
            lambda: all(end.query_register_mem_status(number) is not preparing for end, number in ends)
        )

    def close(self) -> None:
        """Finalize every member. Idempotent."""
        for member in self.members.values():
            member.finalize()

    def _make(self, cluster_id: int, caller: LLMDataDist) -> LLMDataDist:
        theirs = life_of(caller).require_engine("link").options
        latest = LLMDataDist.llm_engine_instance
        member = LLMDataDist(LLMRole.MIX, cluster_id)
        member.init(
            {
                "ge.exec.deviceId": "0",
                "llm.EnableCacheManager": "1",
                "llm.EnableRemoteCacheAccessible": str(int(theirs.remote_accessible)),
                "llm.SyncKvCacheWaitTime": str(theirs.sync_kv_timeout_ms),
                "llm.LinkTotalTime": str(theirs.link_total_time),
                **self._options,
            }
        )
        # A client expects its own instance there.
        LLMDataDist.llm_engine_instance = latest
        return member


def _table(ranks: dict[int, int]) -> str:
    """Return a rank table with this process's own loopback address."""
    address = ".".join(str(byte) for byte in (127, *os.getpid().to_bytes(3, "big")))
    devices = [{"device_id": "0", "rank_id": str(rank)} for rank in ranks.values()]
    return json.dumps(
        {"version": "1.0", "server_list": [{"server_id": address, "host_ip": address, "device": devices}]}
    )
