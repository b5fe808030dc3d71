"""LLMDataDist: the composition root. init builds the engine, finalize takes it down (API §3)."""

from __future__ import annotations

import atexit
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from llm_datadist.checks import check_int32, check_list, check_rule, check_type, check_uint64
from llm_datadist.cluster import trans_int_ip
from llm_datadist.deadline import Deadline
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, NotInitialized, ParamError
from llm_datadist.log import logger
from llm_datadist.options import Options
from llm_datadist.types import LLMClusterInfo, LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.engine import Engine
    from llm_datadist.memory.device import Device
    from llm_datadist.metrics import LinkStatistics, Statistics

__all__ = ["LLMDataDist"]

#: Clusters that are linked at once: one that does not answer must not cost the next one its time (R19).
_LINK_THREADS = 128


class LLMDataDist:
    """One end of the links: a prefill or decode process (or a part of one) that publishes and moves KV caches.

    Objects are independent; several may live in one process (R20). Any thread may call any method, except that
    ``finalize`` must be alone (API §11).

    Args:
        role: A label; with the CacheManager either side may pull and push.
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
        self._manager: CacheManager | None = None
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
        if not options.cache_manager:
            raise LLMException(
                "llm.EnableCacheManager=0: the v1 interface (KvCacheManager) is not part of this version; "
                "set LLMConfig.enable_cache_manager = True",
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
        # Late, so that importing the package does not load asyncio.
        from llm_datadist.cache_manager import CacheManager
        from llm_datadist.engine import Engine

        engine = Engine(self._cluster_id, options, self._device)
        self._manager = CacheManager(engine)
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

    @property
    def cache_manager(self) -> CacheManager:
        """The CacheManager; the same object until finalize.

        Raises:
            NotInitialized: Before init or after finalize.
        """
        manager = self._manager
        if manager is None:
            raise _not_initialized("cache_manager")
        return manager

    @property
    def listen_port(self) -> int | None:
        """The port this process listens on (picked, if 0 was asked for), or None. An extension.

        Raises:
            NotInitialized: Before init or after finalize.
        """
        address = self._require_engine("listen_port").links.listen_address
        return None if address is None else address[1]

    # --- links -----------------------------------------------------------------------------------------------------

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen; each link is usable both ways at once. Link failures are returned, not raised.

        All clusters are linked in parallel; those that succeed stay, whatever happens to the others. The reason of
        each failure is logged at WARNING. With ``llm.TransferBackend`` both ends may link: the second one's call
        succeeds on the link that the first one made.

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

        Source: API §3.4.
        """
        engine = self._require_engine("link_clusters")
        self._check_clusters(clusters, timeout)
        needs_local = not engine.options.local_comm_res
        for i, cluster in enumerate(clusters):
            check_rule(
                cluster.local_ip_info_list or not needs_local,
                f"clusters[{i}]: local_ip_info_list is empty; append_local_ip_info(own ip, 0) names this host",
            )
        deadline = Deadline.after_ms(timeout)
        mutual = engine.options.transfer_backend is not None

        def link(cluster: LLMClusterInfo) -> None:
            engine.links.link(cluster.remote_cluster_id, _remote_address(cluster), deadline, mutual=mutual)

        return _each(clusters, link, "link")

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Give links up. A cluster that is not linked is a success. Failures are returned, not raised.

        Waits for running operations. Not forced: tells the peer and waits for its agreement; on ``LLM_TIMEOUT`` the
        link is kept, at both ends. Forced: this side only, by ``remote_cluster_id`` alone, without contacting the
        peer; operations that still run at the timeout fail. With ``llm.TransferBackend`` always as if forced.

        Args:
            clusters: Each with ``remote_cluster_id`` and, unless forced, one remote ip.
            timeout: Milliseconds for all of it.
            force: See above.

        Raises:
            NotInitialized: Before init or after finalize.
            TypeError: Wrong types, or a ``remote_cluster_id`` that is not set.
            ParamError: ``timeout`` not above 0.

        Source: API §3.4.
        """
        engine = self._require_engine("unlink_clusters")
        self._check_clusters(clusters, timeout)
        check_type("force", force, bool)
        for i, cluster in enumerate(clusters):
            if cluster.remote_cluster_id is None:
                raise NoneArgument(f"clusters[{i}].remote_cluster_id is None: unlinking needs it")
        deadline = Deadline.after_ms(timeout)
        force = force or engine.options.transfer_backend is not None

        def unlink(cluster: LLMClusterInfo) -> None:
            if not force:
                _remote_address(cluster)
            engine.links.unlink(check_uint64("id", cluster.remote_cluster_id), deadline, force=force)

        return _each(clusters, unlink, "unlink")

    def _check_clusters(self, clusters: object, timeout: object) -> None:
        milliseconds = check_int32("timeout", timeout)
        check_rule(milliseconds > 0, f"timeout={milliseconds}: milliseconds above 0 are needed")
        check_list("clusters", clusters, LLMClusterInfo, tuple_ok=True)

    # --- what is going on: extensions --------------------------------------------------------------------------------

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

    def _require_engine(self, what: str) -> Engine:
        engine = self._engine
        if engine is None:
            raise _not_initialized(what)
        return engine

    def __repr__(self) -> str:
        engine = self._engine
        state = "not initialised" if engine is None else f"{len(engine.links.all())} links"
        return f"<LLMDataDist {self._role.name} cluster {self._cluster_id}: {state}>"


def _not_initialized(what: str) -> NotInitialized:
    return NotInitialized(f"{what}: this LLMDataDist is not initialized; call init first")


def _remote_address(cluster: LLMClusterInfo) -> tuple[str, int]:
    remotes = cluster.remote_ip_info_list
    if len(remotes) != 1:
        raise ParamError(f"cluster {cluster.remote_cluster_id} has {len(remotes)} remote ips: exactly one is needed")
    ip, port = remotes[0]
    return trans_int_ip(ip), port


def _each(
    clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], work: Callable[[LLMClusterInfo], None], verb: str
) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
    """Do ``work`` for every cluster, in parallel; overall status = the last one that is no success (API §3.4)."""

    def status(cluster: LLMClusterInfo) -> LLMStatusCode:
        try:
            work(cluster)
        except LLMException as error:
            logger.warning("%s cluster %s: %s: %s", verb, cluster.remote_cluster_id, error.status_code, error)
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


def _shutdown_handler() -> None:
    """At interpreter exit: finalize what is still live, quietly."""
    for instance in list(LLMDataDist._live):
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
