"""Links of style B: all members of a rank table name each other, and nobody has to be first (API §3.5)."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, Protocol

from llm_datadist.checks import check_int, check_rule, check_type, check_uint32, check_uint64
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMException, LLMStatusCode, ParamError, StateError
from llm_datadist.instance.base import EngineOwner

if TYPE_CHECKING:
    from llm_datadist.engine import Engine
    from llm_datadist.enums import RegisterMemStatus
    from llm_datadist.metrics import CommunicatorStatistics

__all__ = ["CommunicatorLinks", "StandIns", "stand_ins"]

_MAX_MEMBERS: Final = 4
_NAME_LIMIT: Final = 128


class StandIns(Protocol):
    """What ``testing/loopback.py`` does to ``link()`` while it is in force."""

    def table(self, caller: CommunicatorLinks, comm_name: str, ranks: dict[int, int]) -> str | None:
        """Return the rank table to take in place of the caller's; None: take the caller's own."""

    def linked(self, caller: CommunicatorLinks, comm_name: str, ranks: dict[int, int], comm_id: int) -> None:
        """The caller's communicator has begun: have the other members join."""


#: In force in this process, or none. Only ``testing/loopback.py`` changes it.
stand_ins: list[StandIns] = []


class CommunicatorLinks(EngineOwner):
    """link, unlink, query_register_mem_status; extension: explain_communicator."""

    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Begin to link all members of a communicator to each other; return its id at once.

        Every member calls this, in any order and without a ``listen_ip_info``, with the same name, ranks and table.
        The preparation goes on in the background: :meth:`query_register_mem_status` is PREPARING, then OK or FAILED,
        at the latest ``link_total_time`` seconds after the call (120 if it is 0 or not set; the environment variable
        HCCL_CONNECT_TIMEOUT changes that). Until OK nothing can be pulled or pushed over it. The links that result
        are like those of ``link_clusters``: each works both ways, and :meth:`explain` shows it. A link to a member
        that is there already is used; a second communicator with the same members gets an id of its own. A member that
        is lost while others are still missing has to come again, and is dialled again; one that is lost after OK is
        not: ``unlink`` and ``link`` anew, at both ends. The reason of a failure is logged at WARNING and in
        :meth:`explain_communicator`.

        Of two members the one with the lower cluster id waits for the other one at its address in the table, on a
        port that follows from ``comm_name``: one of eight in 27000-31999, the first that is free. The environment
        variable LLM_DATADIST_LINK_PORTS ("low-high") moves that range, for all members alike. No single attempt
        takes longer than ``link_total_time / link_retry_count``, nor longer than 5 s.

        Args:
            comm_name: 1 to 127 characters.
            cluster_rank_info: Cluster id -> rank of each member, this one too: 2 to 4, ranks ascending.
            rank_table: JSON object with ``server_list``: servers with ``device`` lists, in which each device has its
                ``rank_id``. A rank is reached at its server's ``host_ip``, else at the ``server_id`` if that is an
                IPv4 address, else at its ``device_ip``. Other fields have no effect.

        Returns:
            The communicator's id: 1, 2, ... since ``init``; never the value of a status.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A rule above is broken; the text names the argument, or the field of the table.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``): use ``link_clusters``.
            LinkRefused: None of the communicator's ports is free on this host (``LLM_LINK_FAILED``).

        Source: API §3.5, BEHAVIOUR §2.3.
        """
        engine = self._communicating("link")
        ranks = _check_arguments(comm_name, cluster_rank_info, rank_table)
        check_rule(
            self._cluster_id in ranks,
            f"cluster_rank_info: {ranks} does not have this cluster, {self._cluster_id}",
        )
        substitute = stand_ins[-1].table(self, comm_name, ranks) if stand_ins else None
        comm_id = engine.open_communicator(comm_name, ranks, rank_table if substitute is None else substitute)
        if substitute is not None:
            stand_ins[-1].linked(self, comm_name, ranks, comm_id)
        return comm_id

    def unlink(self, comm_id: int) -> None:
        """Give a communicator up, also one that is still being prepared, or has failed.

        Only this end: the other members see their links to it end, and each unlinks for itself. Waits for operations
        that run, within ``sync_kv_timeout``; what runs longer fails. A member stays linked while another communicator
        of this end names it, and where ``link_clusters`` made the link.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Not an int (``NoneArgument`` for None).
            ParamError: Outside uint64.
            NotLinked: There is no such communicator.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``).

        Source: API §3.5, BEHAVIOUR §2.3.
        """
        engine = self._communicating("unlink")
        number = check_uint64("comm_id", comm_id)
        engine.links.communicators.close(number, Deadline(engine.options.sync_kv_timeout_ms))

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return how far a communicator has come: PREPARING, then OK or FAILED, which it stays until ``unlink``.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Not an int (``NoneArgument`` for None).
            ParamError: Outside uint64.
            NotLinked: There is no such communicator.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``).

        Source: API §3.5.
        """
        engine = self._communicating("query_register_mem_status")
        return engine.links.communicators.status(check_uint64("comm_id", comm_id))

    def explain_communicator(self, comm_id: int) -> CommunicatorStatistics:
        """Return a communicator's members, who of them is still missing, and why it failed. An extension.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Not an int (``NoneArgument`` for None).
            ParamError: Outside uint64.
            NotLinked: There is no such communicator.
        """
        engine = self._require_engine("explain_communicator")
        return engine.links.communicators.explain(check_uint64("comm_id", comm_id))

    def _communicating(self, call: str) -> Engine:
        engine = self._require_engine(call)
        if not engine.options.cache_manager:
            raise StateError(
                f"{call}: not in v1 mode; use link_clusters, or llm.EnableCacheManager=1",
                status_code=LLMStatusCode.LLM_PARAM_INVALID,
            )
        if engine.options.transfer_backend is not None:
            raise LLMException(
                f"{call}: not with llm.TransferBackend={engine.options.transfer_backend}; use link_clusters",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        return engine


def _check_arguments(comm_name: object, cluster_rank_info: object, rank_table: object) -> dict[int, int]:
    """Check what can be seen without the engine, in the documented order; return the ranks as plain ints."""
    name = check_type("comm_name", comm_name, str)
    check_rule(name, "comm_name: '' is empty")
    check_rule(len(name) < _NAME_LIMIT, f"comm_name: {len(name)} characters, below {_NAME_LIMIT} are needed")
    check_rule(_encodes(name), f"comm_name: {name!r} holds what is no character")
    given = check_type("cluster_rank_info", cluster_rank_info, dict)
    for key, value in given.items():
        check_int("key of cluster_rank_info", key)
        check_int(f"cluster_rank_info[{key!r}]", value)
    check_rule(len(given) <= _MAX_MEMBERS, f"cluster_rank_info: {len(given)} members, at most {_MAX_MEMBERS}")
    ids = [check_uint64("key of cluster_rank_info", key) for key in given]
    ranks = [check_uint32(f"cluster_rank_info[{key!r}]", value) for key, value in given.items()]
    check_type("rank_table", rank_table, str)
    check_rule(len(given) > 1, f"cluster_rank_info: {len(given)} members, 2 to {_MAX_MEMBERS} are needed")
    if any(after <= before for before, after in pairwise(ranks)):
        raise ParamError(f"cluster_rank_info: the ranks {ranks} are not in ascending order")
    check_rule(len(set(ids)) == len(ids), f"cluster_rank_info: {ids} names a cluster twice")
    return dict(zip(ids, ranks, strict=True))


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
