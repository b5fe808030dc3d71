"""LLMDataDist: the composition root. init builds the engine, finalize takes it down (API §3)."""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from llm_datadist._checks import check_int, check_int32, check_list, check_rule, check_type, check_uint32, check_uint64
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist.config import LISTEN, SWITCH_ROLE, Options, parse_listen_ip_info
from llm_datadist.errors import (
    LinkError,
    LLMException,
    LLMStatusCode,
    NoneArgument,
    NotInitialized,
    NotLinked,
    ParamError,
    StateError,
    v1_code,
    v1_codes,
)
from llm_datadist.types import LLMClusterInfo, LLMRole
from llm_datadist.types.cluster import trans_int_ip

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence

    from llm_datadist._links.link import Link
    from llm_datadist._memory.device import Device
    from llm_datadist._transfer.engine import Engine
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.metrics import CommunicatorStatistics, LinkStatistics, Statistics
    from llm_datadist.types.enums import RegisterMemStatus

    Clusters = list[LLMClusterInfo] | tuple[LLMClusterInfo, ...]
    Statuses = tuple[LLMStatusCode, list[LLMStatusCode]]
    Call = Callable[[Deadline], Statuses]
    Report = Callable[[str, LLMClusterInfo, LLMException], None]
    Codes = Statuses
    AwaitedStatuses = Coroutine[Any, Any, Statuses]

__all__ = [
    "LLMDataDist",
    "StandIns",
    "link_v1",
    "log_failure",
    "not_initialized",
    "stand_ins",
    "unlink_v1",
    "unlinked_v1",
]


def log_failure(verb: str, cluster: LLMClusterInfo, error: LLMException) -> None:
    """Log why a cluster was not linked or unlinked: the callers get statuses only."""
    logger.warning("%s cluster %s: %s: %s", verb, cluster.remote_cluster_id, error.status_code, error)


class LLMDataDist:
    """One end of the links: a prefill or decode process (or a part of one) that publishes and moves KV caches.

    The calls that link are documented in ``datadist.py``, ``datadist.py`` and, for rank tables,
    ``datadist.py``, ``switch_role`` in ``datadist.py``, the managers of caches in
    ``datadist.py``, the extensions that tell what is going on in ``datadist.py``. Objects are
    independent; several may live in one process (R20). Any thread may call any method, except that ``finalize`` must
    be alone (API §11).

    Args:
        role: A label in v2 mode, where either side may pull and push; in v1 mode it says who may do what.
        cluster_id: uint64, unique among all that link to each other.
        device: What DEVICE placement means in this process; None: host memory. An extension.

    Attributes:
        llm_engine_instance: The most recently initialised live object of this process, or None.

    Raises:
        TypeError: Wrong types (``NoneArgument`` for None).
        ParamError: ``cluster_id`` outside uint64.

    Source: API §3.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None
    _live: ClassVar[list[LLMDataDist]] = []
    _live_lock: ClassVar[threading.Lock] = threading.Lock()
    #: In a forked child: the parent's engines, kept so that nothing of theirs is torn down here.
    _abandoned: ClassVar[list[Engine]] = []

    def __init__(self, role: LLMRole, cluster_id: int, *, device: Device | None = None) -> None:
        self._role = check_type("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._device = device
        self._engine: Engine | None = None
        self._manager = None
        self._lifecycle = threading.Lock()

    # --- life cycle ------------------------------------------------------------------------------------------------

    def init(self, options: dict[str, str]) -> None:
        """Reserve the pools, start to listen if ``llm.listenIpInfo`` is given, and become usable.

        A second call on an initialised object returns silently. After ``finalize`` it may be called again. The dict
        is what ``LLMConfig.generate_options()`` returns, or written by hand; it is not changed.

        Raises:
            TypeError: Not a dict of str to str.
            ParamError: An option breaks its rule; the text names it.
            OutOfMemory: A pool does not fit the host or its cgroup (R11).
            LinkError: The listen address cannot be bound (``LLM_FAILED``); the text names it.

        Source: API §3.1.
        """
        with self._lifecycle:
            if self._engine is None:
                self._init(Options.parse(options, self._role))

    def _init(self, options: Options) -> None:
        # Late, so that importing the package does not load asyncio.
        from llm_datadist._transfer.engine import Engine

        engine = Engine(self._cluster_id, options, self._device)
        self._manager = self._make_manager(engine)
        self._engine = engine
        with LLMDataDist._live_lock:
            LLMDataDist._live.append(self)
            LLMDataDist.llm_engine_instance = self
        logger.info("%r initialised", self)

    def finalize(self) -> None:
        """Give up links, listener, pools and tables. Peers are not told; they see their links end.

        No-op when not initialised. Managers taken before are dead from now on (R21); NumPy views stay safe to read.

        Source: API §3.2.
        """
        with self._lifecycle:
            engine, self._engine, self._manager = self._engine, None, None
            if engine is None:
                return
            with LLMDataDist._live_lock:
                LLMDataDist._live.remove(self)
                if LLMDataDist.llm_engine_instance is self:
                    LLMDataDist.llm_engine_instance = LLMDataDist._live[-1] if LLMDataDist._live else None
            engine.close()
            logger.info("%r finalized", self)

    # --- properties ------------------------------------------------------------------------------------------------

    @property
    def cluster_id(self) -> int:
        """The cluster id given to the constructor."""
        return self._cluster_id

    def __repr__(self) -> str:
        engine = self._engine
        state = "not initialised" if engine is None else f"{len(engine.links.all())} links"
        return f"<LLMDataDist {self._role.name} cluster {self._cluster_id}: {state}>"

    _role: LLMRole
    _cluster_id: int
    _engine: Engine | None
    #: Held while the engine is made, taken down, or takes another role.
    _lifecycle: threading.Lock

    def _require_engine(self, what: str) -> Engine:
        engine = self._engine
        if engine is None:
            raise not_initialized(what)
        return engine

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen; each link is usable both ways at once. Link failures are returned, not raised.

        All clusters are linked in parallel; those that succeed stay, whatever happens to the others. The reason of
        each failure is logged at WARNING. With ``llm.TransferBackend`` both ends may link: the second one's call
        succeeds on the link that the first one made.

        In v1 mode only a DECODER links, and all clusters of a call are linked or none: when one fails the others are
        given up, and the status is ``LLM_LINK_FAILED``. Refused before anything is tried: another role, and a cluster
        without exactly one local and one remote ip (``LLM_PARAM_INVALID``), a cluster id twice
        (``LLM_REPEAT_REQUEST``). A time-out is ``LLM_WAIT_PROCESS_TIMEOUT`` there.

        Args:
            clusters: Each with one remote ip and port, a local ip (unless ``local_comm_res`` is given and not empty),
                and the ``remote_cluster_id``, or none to learn it (R28).
            timeout: Milliseconds for all of it.

        Returns:
            ``(status, statuses)``: SUCCESS or the status of the last failing cluster, and one status each:
            ``LLM_ALREADY_LINK``, ``LLM_LINK_FAILED`` (unreachable, refused, another cluster id), ``LLM_TIMEOUT``,
            ``LLM_PARAM_INVALID`` (not exactly one remote ip, RCA differs between the ends).

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types.
            ParamError: ``timeout`` not above 0, or a cluster without local ip.

        Source: API §3.4, §8.
        """
        _, call = self._linking(clusters, timeout)
        return call(Deadline(timeout))

    def _linking(self, clusters: Clusters, timeout: int, report: Report = log_failure) -> tuple[Engine, Call]:
        """Check the arguments; return what is left to do."""
        engine = self._require_engine("link_clusters")
        self._check_clusters(clusters, timeout)
        v2, role = engine.options.cache_manager, self._role
        needs_local = v2 and not engine.options.local_comm_res
        for i, cluster in enumerate(clusters):
            check_rule(
                cluster.local_ip_info_list or not needs_local,
                f"clusters[{i}]: local_ip_info_list is empty; append_local_ip_info(own ip, 0) names this host",
            )
        mutual = engine.options.transfer_backend is not None

        def call(deadline: Deadline) -> Statuses:
            def link(cluster: LLMClusterInfo) -> None:
                engine.links.link(cluster.remote_cluster_id, _remote_address(cluster), deadline, mutual=mutual)

            return _each(clusters, link, "link", report)

        def call_v1(deadline: Deadline) -> Statuses:
            return link_v1(engine, role, clusters, timeout, lambda: call(deadline))

        return engine, call if v2 else call_v1

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Give links up. A cluster that is not linked is a success. Failures are returned, not raised.

        Waits for running operations. Not forced: tells the peer and waits for its agreement; on ``LLM_TIMEOUT`` the
        link is kept, at both ends. Forced: this side only, by ``remote_cluster_id`` alone, without contacting the
        peer; operations that still run at the timeout fail. With ``llm.TransferBackend`` always as if forced.

        In v1 mode running pulls are not waited for: ``LLM_LINK_BUSY``, and the link is kept. A cluster that is not
        linked has ``LLM_NOT_YET_LINK``, which is no failure of the call. A time-out is ``LLM_WAIT_PROCESS_TIMEOUT``.

        Args:
            clusters: Each with ``remote_cluster_id`` and, unless forced or in v1 mode, one remote ip.
            timeout: Milliseconds for all of it.
            force: See above.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types, or a ``remote_cluster_id`` that is not set.
            ParamError: ``timeout`` not above 0.

        Source: API §3.4, §8.
        """
        _, call = self._unlinking(clusters, timeout, force)
        return call(Deadline(timeout))

    def _unlinking(
        self, clusters: Clusters, timeout: int, force: bool, report: Report = log_failure
    ) -> tuple[Engine, Call]:
        """Check the arguments; return what is left to do."""
        engine = self._require_engine("unlink_clusters")
        self._check_clusters(clusters, timeout)
        check_type("force", force, bool)
        for i, cluster in enumerate(clusters):
            if cluster.remote_cluster_id is None:
                raise NoneArgument(f"clusters[{i}].remote_cluster_id is None: unlinking needs it")
        forced = force or engine.options.transfer_backend is not None

        v2 = engine.options.cache_manager

        def call(deadline: Deadline) -> Statuses:
            def unlink(cluster: LLMClusterInfo) -> None:
                cluster_id = check_uint64("id", cluster.remote_cluster_id)
                if not v2:
                    unlink_v1(engine, cluster_id, deadline, force=forced)
                    return
                if not forced:
                    _remote_address(cluster)
                engine.links.unlink(cluster_id, deadline, force=forced)

            overall, codes = _each(clusters, unlink, "unlink", report)
            return (overall, codes) if v2 else unlinked_v1(codes)

        return engine, call

    def _check_clusters(self, clusters: object, timeout: object) -> None:
        milliseconds = check_int32("timeout", timeout)
        check_rule(milliseconds > 0, f"timeout={milliseconds}: milliseconds above 0 are needed")
        check_list("clusters", clusters, LLMClusterInfo, tuple_ok=True)

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

    def switch_role(self, role: LLMRole, switch_options: dict[str, Any] | None = None) -> None:
        """Take another role, and begin, move or cease to listen. Caches, their ids and keys are not touched.

        With ``llm.listenIpInfo`` in the options this end listens there from now on (the same address as before is
        left alone); without it, it listens no more. Other options are ignored, so the dict of a whole LLMConfig will
        do. With ``llm.TransferBackend`` the listener stays as it is.

        In v2 mode the role is a label: the same role is allowed, and ``enable_switch_role`` is not asked for. In v1
        mode ``enable_switch_role`` is needed, the role must be another one, and PROMPT needs ``llm.listenIpInfo``.

        Args:
            role: The role from now on.
            switch_options: A dict of options, or None for none.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types (``NoneArgument`` for a role that is None).
            ParamError: ``llm.listenIpInfo`` is not of the form ip:port; in v1 mode the same role, or PROMPT without it.
            StateError: There is a link, whoever made it, or a communicator is being prepared (``LLM_EXIST_LINK``).
            LinkError: The new address cannot be bound (``LLM_FAILED``).
            LLMException: With ``LLM_FEATURE_NOT_ENABLED``: v1 mode without ``enable_switch_role``, or with several
                addresses; another address with ``llm.TransferBackend``.

        Whatever is raised, role and listener are as before; only when the new address shares the port of the old one,
        and both the new and the old cannot be bound any more, this end listens no more, and the text says so.

        Source: API §3.6, BEHAVIOUR §7.
        """
        with self._lifecycle:  # first of all: role and engine are those of now
            engine = self._require_engine("switch_role")
            check_type("role", role, LLMRole)
            text = _listen_text(switch_options)
            if not engine.options.cache_manager:
                _check_v1(engine.options, self._role, role, text)
            wanted = None if text is None else parse_listen_ip_info(text)
            if engine.options.transfer_backend is not None:
                _check_backend(engine.options, engine.links.listen_address, wanted)
                wanted = engine.options.listen
            try:
                engine.switch(role, wanted)
            except LLMException as error:
                error.args = (f"switch_role to {role.name}: {error}; the role stays {self._role.name}",)
                raise
            before, self._role = self._role, role
        logger.info("%r: its role was %s", self, before.name)

    _manager: CacheManager | KvCacheManager | None

    def _make_manager(self, engine: Engine) -> CacheManager | KvCacheManager:
        # Late, so that importing the package does not load what only init needs.
        if engine.options.cache_manager:
            from llm_datadist.cache_manager import CacheManager

            return CacheManager(engine)
        from llm_datadist.kv_cache_manager import KvCacheManager

        return KvCacheManager(engine, lambda: self._role)

    @property
    def cache_manager(self) -> CacheManager:
        """The CacheManager (v2 mode); the same object until finalize.

        Raises:
            NotInitialized: Before init or after finalize.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).

        Source: API §3.3.
        """
        from llm_datadist.cache_manager import CacheManager

        manager = self._manager
        if isinstance(manager, CacheManager):
            return manager
        raise _no_such("cache_manager", manager, "1", "kv_cache_manager")

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The KvCacheManager (v1 mode: ``llm.EnableCacheManager`` is not 1); the same object until finalize.

        Raises:
            NotInitialized: Before init or after finalize.
            StateError: In v2 mode (``LLM_PARAM_INVALID``).

        Source: API §3.3.
        """
        from llm_datadist.kv_cache_manager import KvCacheManager

        manager = self._manager
        if isinstance(manager, KvCacheManager):
            return manager
        raise _no_such("kv_cache_manager", manager, "0", "cache_manager")

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

    def link_clusters_async(self, clusters: Clusters, timeout: int = 3000) -> AwaitedStatuses:
        """Await :meth:`link_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        clusters that it linked stay linked.

        Source: API §3.4; extension.
        """
        engine, call = self._linking(clusters, timeout)
        return engine.workers.run(call, timeout)

    def unlink_clusters_async(self, clusters: Clusters, timeout: int = 3000, force: bool = False) -> AwaitedStatuses:
        """Await :meth:`unlink_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        each link is kept or gone, as after a timeout.

        Source: API §3.4; extension.
        """
        engine, call = self._unlinking(clusters, timeout, force)
        return engine.workers.run(call, timeout)


def _shutdown_handler() -> None:
    """At interpreter exit: let layer-wise transfers that move come to their end, then finalize, quietly."""
    live = list(LLMDataDist._live)
    for engine in [each._engine for each in live]:  # all of them first: one may send to another
        if engine is not None:
            engine.tasks.finish()
    for instance in live:
        try:
            instance.finalize()
        except LLMException as error:
            logger.warning("finalize at exit: %s", error)


def _in_forked_child() -> None:
    """The parent's objects are not initialised here; the child may make its own."""
    LLMDataDist._live_lock = threading.Lock()
    for instance in LLMDataDist._live:
        instance._lifecycle = threading.Lock()
        engine, instance._engine, instance._manager = instance._engine, None, None
        if engine is not None:
            LLMDataDist._abandoned.append(engine)
            engine.abandon()
    LLMDataDist._live.clear()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_in_forked_child)


def not_initialized(what: str) -> NotInitialized:
    """Return the error of a call that needs ``init`` first."""
    return NotInitialized(f"{what}: this LLMDataDist is not initialized; call init first")


#: Clusters that are linked at once: one that does not answer must not cost the next one its time (R19).
_LINK_THREADS = 128


def _remote_address(cluster: LLMClusterInfo) -> tuple[str, int]:
    remotes = cluster.remote_ip_info_list
    if len(remotes) != 1:
        raise ParamError(f"cluster {cluster.remote_cluster_id} has {len(remotes)} remote ips: exactly one is needed")
    ip, port = remotes[0]
    return trans_int_ip(ip), port


def _each(clusters: Clusters, work: Callable[[LLMClusterInfo], None], verb: str, report: Report) -> Statuses:
    """Do ``work`` for every cluster, in parallel; overall status = the last one that is no success (API §3.4)."""

    def status(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            work(cluster)
        except LLMException as error:
            report(verb, cluster, error)
            return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    if not clusters:
        return LLMStatusCode.LLM_PARAM_INVALID, []
    if len(clusters) == 1:
        codes = [status(clusters[0])]
    else:
        with ThreadPoolExecutor(min(_LINK_THREADS, len(clusters)), "llm-datadist-link") as threads:
            codes = list(threads.map(status, clusters))
    failed = [code for code in codes if code is not LLMStatusCode.LLM_SUCCESS]
    return (failed[-1] if failed else LLMStatusCode.LLM_SUCCESS), codes


_OK = LLMStatusCode.LLM_SUCCESS
#: What polite undoing may take; after it the links are given up without the peer's word.
_UNDO_MS: Final = 1000


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
    dialled = {link.origin.address: link for link in engine.links.all() if link.origin.dialled}
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


_MAX_MEMBERS: Final = 4
_NAME_LIMIT: Final = 128


class StandIns(Protocol):
    """What ``testing/loopback.py`` does to ``link()`` while it is in force."""

    def table(self, caller: LLMDataDist, comm_name: str, ranks: dict[int, int]) -> str | None:
        """Return the rank table to take in place of the caller's; None: take the caller's own."""

    def linked(self, caller: LLMDataDist, comm_name: str, ranks: dict[int, int], comm_id: int) -> None:
        """The caller's communicator has begun: have the other members join."""


#: In force in this process, or none. Only ``testing/loopback.py`` changes it.
stand_ins: list[StandIns] = []


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


def _listen_text(switch_options: object) -> str | None:
    if switch_options is None:
        return None
    value = check_type("switch_options", switch_options, dict).get(LISTEN)
    return None if value is None else check_type(f"switch_options[{LISTEN!r}]", value, str)


def _check_v1(options: Options, old: LLMRole, new: LLMRole, listen: str | None) -> None:
    if not options.enable_switch_role:
        raise LLMException(
            f"switch_role: {SWITCH_ROLE} is not '1'; set LLMConfig.enable_switch_role = True before init",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    check_rule(new is not old, f"role: it is {old.name} already")
    if listen is not None and ";" in listen:
        raise LLMException(
            f"{LISTEN}: {listen!r} lists several addresses; one instance serves one device",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )
    check_rule(new is not LLMRole.PROMPT or listen is not None, f"{LISTEN} is missing: PROMPT needs it")


def _check_backend(options: Options, now: tuple[str, int] | None, wanted: tuple[str, int] | None) -> None:
    if wanted not in (None, options.listen, now):
        raise LLMException(
            f"{LISTEN}: {wanted} instead of {now}: with llm.TransferBackend={options.transfer_backend} the address "
            "cannot change",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )


def _no_such(wanted: str, manager: object, value: str, other: str) -> StateError:
    if manager is None:
        return not_initialized(wanted)
    return StateError(
        f"{wanted}: this LLMDataDist was initialised with the other interface; use {other}, or "
        f"llm.EnableCacheManager={value} (LLMConfig.enable_cache_manager)",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )
