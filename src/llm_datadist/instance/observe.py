"""What is going on in an LLMDataDist: all of it extensions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_uint64
from llm_datadist.instance.base import EngineOwner

if TYPE_CHECKING:
    from llm_datadist.metrics import LinkStatistics, Statistics

__all__ = ["Observed"]


class Observed(EngineOwner):
    """statistics, explain, check_integrity, listen_port."""

    @property
    def listen_port(self) -> int | None:
        """The port this process listens on (picked, if 0 was asked for), or None. An extension.

        Raises:
            NotInitialized: Before init or after finalize.
        """
        address = self._require_engine("listen_port").links.listen_address
        return None if address is None else address[1]

    def statistics(self) -> Statistics:
        """Return pools, caches, keys with their age, pins, quarantine, swap, links and operations. An extension.

        Raises:
            NotInitialized: Before init or after finalize.
        """
        return self._require_engine("statistics").statistics()

    def explain(self, remote_cluster_id: int) -> LinkStatistics:
        """Return the link to a cluster: its state, the transport it uses and why that one. An extension.

        Raises:
            NotInitialized: Before init or after finalize.
            NotLinked: There is no link.
        """
        engine = self._require_engine("explain")
        return engine.links.get(check_uint64("remote_cluster_id", remote_cluster_id)).statistics()

    def check_integrity(self) -> None:
        """Check that all tables agree with each other; for tests and for idle moments. An extension.

        Raises:
            AssertionError: They do not; the text says what.
        """
        self._require_engine("check_integrity").check_integrity()
