"""LLMDataDist, one end of the links: ``init`` builds the engine, ``finalize`` takes it down (interface §3).

Its calls check their arguments; ``_transfer/`` does the rest. What only ``init`` needs is imported late, so that
importing the package stays quick.
"""

from __future__ import annotations

import atexit
import os
import threading
from importlib import import_module
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Final

from llm_datadist._checks import (
    check_enabled,
    check_int,
    check_list,
    check_rule,
    check_text,
    check_timeout,
    check_type,
    check_uint32,
    check_uint64,
    typed_memory_error,
)
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native.signals import hold_signals, public_calls_hold_signals, put_off, require_outermost
from llm_datadist._transfer import linking
from llm_datadist.config import LISTEN, SWITCH_ROLE, Options, parse_listen_ip_info
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, NotInitialized, ParamError, StateError
from llm_datadist.types import LLMClusterInfo, LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from llm_datadist._memory.device import Device
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.linking import Clusters, Pending, Statuses
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.metrics import CommunicatorStatistics, LinkStatistics, Statistics
    from llm_datadist.types.enums import RegisterMemStatus

    AwaitedStatuses = Coroutine[Any, Any, Statuses]

__all__ = ["LLMDataDist"]


_MAX_MEMBERS: Final = 4
_NAME_LIMIT: Final = 128


@public_calls_hold_signals(whole=("init", "finalize", "switch_role"), init="_undo_init", link="_unlink")
class LLMDataDist:
    """One end of the links: a prefill or decode process (or a part of one) that publishes and moves KV caches.

    Objects are independent; several may live in one process (interface R20). An argument of a wrong
    type is a TypeError (``NoneArgument`` for None where it is not allowed). All but ``init``, ``finalize`` and
    ``cluster_id`` raise NotInitialized before init and after finalize.

    Threads: any, except that ``finalize`` must be alone (interface §11).

    Args:
        role: A label in v2 mode, where either side may pull and push; in v1 mode it says which calls are allowed.
        cluster_id: uint64, unique among all that link to each other.
        device: What DEVICE placement means in this process; None: host memory. An extension.

    Attributes:
        llm_engine_instance: The most recently initialised live object of this process, or None.

    Raises:
        ParamError: ``cluster_id`` outside uint64.

    Source: interface §3.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None

    def __init__(self, role: LLMRole, cluster_id: int, *, device: Device | None = None) -> None:
        self._role = check_type("role", role, LLMRole)
        self._cluster_id = check_uint64("cluster_id", cluster_id)
        self._device = device
        self._life = Life()

    def init(self, options: dict[str, str]) -> None:
        """Reserve the pools, start to listen if ``llm.listenIpInfo`` is given, and become usable.

        A second call on an initialised object returns silently. After ``finalize`` it may be called again. The dict
        is what ``LLMConfig.generate_options()`` returns, or written by hand; it is not changed.

        Raises:
            TypeError: Not a dict of str to str.
            ParamError: An option breaks its rule; the text names it.
            OutOfMemory: A pool does not fit the host or its cgroup (interface R11), or no memory is left.
            LinkError: The listen address cannot be bound (``LLM_FAILED``); the text names it.
            LLMException: No descriptor, thread or room for a shared library is left (``LLM_FAILED``).

        Source: interface §3.1.
        """
        life = self._life
        with life.lock:
            life.init_undoable = life.engine is None
            if not life.init_undoable:
                return
            parsed = Options.parse(options, self._role)
            _import_late(parsed)
            from llm_datadist._transfer.engine import Engine

            engine = Engine(self._cluster_id, parsed, self._device)
            if parsed.cache_manager:
                from llm_datadist.cache_manager import CacheManager

                life.manager = CacheManager(engine)
            else:
                from llm_datadist.kv_cache_manager import KvCacheManager

                life.manager = KvCacheManager(engine)
            life.engine = engine
            with Life.all_lock:
                Life.all.append(self)
                LLMDataDist.llm_engine_instance = self
            logger.info("%r initialised", self)

    def _undo_init(self, _: None) -> None:
        """Undo an ``init`` whose caller gets an exception of a signal's handler."""
        if self._life.init_undoable:
            tear_down(self)

    def finalize(self) -> None:
        """Give up links, listener, pools and tables. Peers are not told; they see their links end.

        No-op when not initialised. Managers taken before are dead from now on (interface R21); NumPy views stay safe to
        read. Inside of another call of this thread, as by a finalizer (``__del__``), it is done when that one ends.

        Raises:
            StateError: Called in the control thread, where the garbage collector may run finalizers: it cannot wait
                for its own end.

        Source: interface §3.2.
        """
        tear_down(self)

    @property
    def cluster_id(self) -> int:
        """The cluster id given to the constructor."""
        return self._cluster_id

    @hold_signals
    def __repr__(self) -> str:
        engine = self._life.engine
        state = "not initialised" if engine is None else f"{len(engine.links.all())} links"
        return f"<LLMDataDist {self._role.name} cluster {self._cluster_id}: {state}>"

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
                and the ``remote_cluster_id``, or none to learn it (interface R28).
            timeout: Milliseconds for all of it.

        Returns:
            ``(status, statuses)``: SUCCESS or the status of the last failing cluster, and one status each, whose
            ``error`` is the exception (extension):
            ``LLM_ALREADY_LINK``, ``LLM_LINK_FAILED`` (unreachable, refused, another cluster id), ``LLM_TIMEOUT``,
            ``LLM_PARAM_INVALID`` (not exactly one remote ip, RCA differs between the ends).

        Raises:
            ParamError: ``timeout`` not above 0, or a cluster without local ip.

        Source: interface §3.4, §8.
        """
        return self._linking(clusters, timeout)(Deadline(timeout, cancellable=True))

    def link_clusters_async(self, clusters: Clusters, timeout: int = 3000) -> AwaitedStatuses:
        """Await :meth:`link_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        clusters that it linked stay linked.

        Source: interface §3.4; extension.
        """
        pending = self._linking(clusters, timeout)
        return self._life.require_engine("link_clusters_async").workers.run(pending, timeout)

    def _linking(self, clusters: Clusters, timeout: int) -> Pending:
        """Check the arguments; return the work that is left."""
        engine = self._life.require_engine("link_clusters")
        check_timeout(timeout)
        check_list("clusters", clusters, LLMClusterInfo, tuple_ok=True)
        needs_local = engine.options.cache_manager and not engine.options.local_comm_res
        for i, cluster in enumerate(clusters):
            check_rule(
                cluster.local_ip_info_list or not needs_local,
                f"clusters[{i}]: local_ip_info_list is empty; append_local_ip_info(own ip, 0) names this host",
            )
        return linking.link_clusters(engine, clusters)

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
            NoneArgument: A ``remote_cluster_id`` that is not set.
            ParamError: ``timeout`` not above 0.
            StateError: Called inside of another call of this thread, as by a finalizer.

        Source: interface §3.4, §8.
        """
        return self._unlinking(clusters, timeout, force)(Deadline(timeout, cancellable=True))

    def unlink_clusters_async(self, clusters: Clusters, timeout: int = 3000, force: bool = False) -> AwaitedStatuses:
        """Await :meth:`unlink_clusters`: the same arguments and results.

        Argument errors are raised at once. A cancelled call ends within ``timeout`` before ``CancelledError`` comes;
        each link is kept or gone, as after a timeout.

        Source: interface §3.4; extension.
        """
        pending = self._unlinking(clusters, timeout, force)
        return self._life.require_engine("unlink_clusters_async").workers.run(pending, timeout)

    def _unlinking(self, clusters: Clusters, timeout: int, force: bool) -> Pending:
        """Check the arguments; return the work that is left."""
        engine = self._life.require_engine("unlink_clusters")
        require_outermost("unlink_clusters")
        check_timeout(timeout)
        check_list("clusters", clusters, LLMClusterInfo, tuple_ok=True)
        check_type("force", force, bool)
        for i, cluster in enumerate(clusters):
            if cluster.remote_cluster_id is None:
                raise NoneArgument(f"clusters[{i}].remote_cluster_id is None: unlinking needs it")
        return linking.unlink_clusters(engine, clusters, force=force)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Find out whether a link works, by a ping over it; returns when the peer has answered. Only in v1 mode.

        Raises:
            StateError: In v2 mode (``LLM_PARAM_INVALID``): ``statistics().links`` shows the states there.
            ParamError: Outside uint64, or this is no DECODER.
            NotLinked: There is no link to that cluster, or it was given up meanwhile.
            LinkError: A pull is running on the link (``LLM_LINK_BUSY``); ask again.
            DeadlineExceeded: No answer within ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the link is kept.
            PeerLost: The link broke meanwhile; link again.

        Source: interface §3.7.
        """
        engine = self._life.require_engine("check_link_status")
        if engine.options.cache_manager:
            raise _wrong_mode("check_link_status is a call of v1 mode (llm.EnableCacheManager=0)")
        cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)
        if self._role is not LLMRole.DECODER:
            raise ParamError(f"check_link_status: only a DECODER may, and this is a {self._role.name}")
        linking.check_link_status(engine.links, cluster_id, engine.deadline())

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
            comm_name: 1 to 127 characters, no NUL.
            cluster_rank_info: Cluster id -> rank of each member, this one too: 2 to 4, ranks ascending.
            rank_table: JSON object with ``server_list``: servers with ``device`` lists, in which each device has its
                ``rank_id``. A rank is reached at its server's ``host_ip``, else at the ``server_id`` if that is an
                address, else at its ``device_ip``. Other fields have no effect.

        Returns:
            The communicator's id: 1, 2, ... since ``init``; never the value of a status.

        Raises:
            ParamError: A rule above is broken; the text names the argument, or the field of the table.
            StateError: In v1 mode (``LLM_PARAM_INVALID``).
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``): use ``link_clusters``.
            LinkRefused: None of the communicator's ports is free on this host (``LLM_LINK_FAILED``).

        Source: interface §3.5, B2.3.
        """
        engine = self._communicating("link")
        ranks = _checked_ranks(comm_name, cluster_rank_info, rank_table)
        check_rule(
            self._cluster_id in ranks, f"cluster_rank_info: {ranks} does not have this cluster, {self._cluster_id}"
        )
        with engine.meters.call("link", [each for each in ranks if each != self._cluster_id]):
            return linking.openers[-1](engine, comm_name, ranks, rank_table)

    def unlink(self, comm_id: int) -> None:
        """Give a communicator up, also one that is still being prepared, or has failed.

        Only this end: the other members see their links to it end, and each unlinks for itself. Waits for operations
        that run, within ``sync_kv_timeout``; what runs longer fails. A member stays linked while another communicator
        of this end names it, and where ``link_clusters`` made the link.

        Raises:
            ParamError: Outside uint64.
            NotLinked: There is no such communicator.
            StateError: In v1 mode (``LLM_PARAM_INVALID``); inside of another call of this thread, as by a finalizer.
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``).

        Source: interface §3.5, B2.3.
        """
        require_outermost("unlink")
        self._unlink(comm_id)

    def _unlink(self, comm_id: int) -> None:
        engine = self._communicating("unlink")
        number = check_uint64("comm_id", comm_id)
        with engine.meters.call("unlink"):
            engine.links.communicators.close(number, engine.deadline())

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return how far a communicator has come: PREPARING, then OK or FAILED, which it stays until ``unlink``.

        Raises:
            ParamError, NotLinked, StateError, LLMException: As :meth:`unlink`.

        Source: interface §3.5.
        """
        engine = self._communicating("query_register_mem_status")
        return engine.links.communicators.status(check_uint64("comm_id", comm_id))

    def explain_communicator(self, comm_id: int) -> CommunicatorStatistics:
        """Return a communicator's members, those still missing, and why it failed. An extension.

        Raises:
            ParamError, NotLinked: As :meth:`unlink`.
        """
        engine = self._life.require_engine("explain_communicator")
        return engine.links.communicators.explain(check_uint64("comm_id", comm_id))

    def _communicating(self, call: str) -> Engine:
        engine = self._life.require_engine(call)
        if not engine.options.cache_manager:
            raise _wrong_mode(f"{call}: not in v1 mode; use link_clusters, or llm.EnableCacheManager=1")
        backend = engine.options.transfer_backend
        check_enabled(backend is None, f"{call}: not with llm.TransferBackend={backend}; use link_clusters")
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
            ParamError: ``llm.listenIpInfo`` is not of the form ip:port; in v1 mode the same role, or PROMPT without it.
            StateError: There is a link, made by either end, or a communicator is being prepared (``LLM_EXIST_LINK``).
            LinkError: The new address cannot be bound (``LLM_FAILED``).
            LLMException: With ``LLM_FEATURE_NOT_ENABLED``: v1 mode without ``enable_switch_role``, or with several
                addresses; another address with ``llm.TransferBackend``.

        Whatever is raised, role and listener are as before; only when the new address shares the port of the old one,
        and both the new and the old cannot be bound any more, this end listens no more, and the text says so.

        Source: interface §3.6, B7.
        """
        with self._life.lock:  # before role and engine are looked at
            engine = self._life.require_engine("switch_role")
            check_type("role", role, LLMRole)
            listen = None if switch_options is None else check_type("switch_options", switch_options, dict).get(LISTEN)
            if listen is not None:
                check_type(f"switch_options[{LISTEN!r}]", listen, str)
            if not engine.options.cache_manager:
                _check_v1(engine.options, self._role, role, listen)
            wanted = None if listen is None else parse_listen_ip_info(listen)
            if engine.options.transfer_backend is not None:
                now, fixed = engine.links.listen_address, engine.options.listen
                check_enabled(
                    wanted in (None, fixed, now),
                    f"{LISTEN}: {wanted} instead of {now}: with llm.TransferBackend={engine.options.transfer_backend} "
                    "the address cannot change",
                )
                wanted = fixed
            try:
                engine.switch(role, wanted)
            except LLMException as error:
                error.args = (f"switch_role to {role.name}: {error}; the role stays {self._role.name}",)
                raise
            before, self._role = self._role, role
        logger.info("%r: its role was %s", self, before.name)

    @property
    def cache_manager(self) -> CacheManager:
        """The CacheManager (v2 mode); the same object until finalize.

        Raises:
            StateError: In v1 mode (``LLM_PARAM_INVALID``).

        Source: interface §3.3.
        """
        from llm_datadist.cache_manager import CacheManager

        manager = self._life.manager
        if isinstance(manager, CacheManager):
            return manager
        raise _wrong_interface("cache_manager", manager, "1", "kv_cache_manager")

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The KvCacheManager (v1 mode: ``llm.EnableCacheManager`` is not 1); the same object until finalize.

        Raises:
            StateError: In v2 mode (``LLM_PARAM_INVALID``).

        Source: interface §3.3.
        """
        from llm_datadist.kv_cache_manager import KvCacheManager

        manager = self._life.manager
        if isinstance(manager, KvCacheManager):
            return manager
        raise _wrong_interface("kv_cache_manager", manager, "0", "cache_manager")

    @property
    def listen_port(self) -> int | None:
        """The port this process listens on (picked, if 0 was asked for), or None. An extension."""
        address = self._life.require_engine("listen_port").links.listen_address
        return None if address is None else address[1]

    @property
    def incarnation(self) -> str:
        """Random id of this ``init``, hexadecimal: it tells two processes of one cluster id apart. An extension."""
        return self._life.require_engine("incarnation").store.exports.incarnation.hex()

    def statistics(self) -> Statistics:
        """Return pools, caches, keys with their age, pins, quarantine, swap, links and operations. An extension."""
        return self._life.require_engine("statistics").statistics()

    def explain(self, remote_cluster_id: int) -> LinkStatistics:
        """Return the link to a cluster: its state, the transport it uses and why that one. An extension.

        Raises:
            NotLinked: There is no link. The text says what became of it; after a ``link_clusters`` that failed,
                ``__cause__`` is the exception.
        """
        engine = self._life.require_engine("explain")
        return engine.links.get(check_uint64("remote_cluster_id", remote_cluster_id)).statistics()

    def check_integrity(self) -> None:
        """Check that all tables agree with each other; for tests and for idle moments. An extension.

        Raises:
            AssertionError: They do not; the text says what.
        """
        self._life.require_engine("check_integrity").check_integrity()


class Life:
    """What one LLMDataDist has from ``init`` to ``finalize``, for the packages of this library (:data:`life_of`)."""

    all: ClassVar[list[LLMDataDist]] = []  # the initialised ones of this process, oldest first
    all_lock: ClassVar[threading.Lock] = threading.Lock()
    #: In a forked child: the parent's engines, kept so that nothing of theirs is torn down here.
    abandoned: ClassVar[list[Engine]] = []

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.manager: CacheManager | KvCacheManager | None = None
        #: Held while the engine is made, taken down, or takes another role. Guards the next.
        self.lock = threading.Lock()
        self.init_undoable = False  # until another init() has found it initialised

    def require_engine(self, call: str) -> Engine:
        if (engine := self.engine) is None:
            raise _not_initialized(call)
        return engine


life_of: Final[Callable[[LLMDataDist], Life]] = attrgetter("_life")


def tear_down(instance: LLMDataDist) -> None:
    """Finalize an instance. Errors as :meth:`LLMDataDist.finalize`."""
    if must_not_wait():
        raise StateError(
            f"finalize: called in {threading.current_thread().name}, a control thread of this library, which would "
            "wait for itself; call it from another thread"
        )
    if put_off(tear_down, instance):
        return
    life = life_of(instance)
    with life.lock:
        engine, life.engine, life.manager = life.engine, None, None
        if engine is None:
            return
        with Life.all_lock:
            Life.all.remove(instance)
            if LLMDataDist.llm_engine_instance is instance:
                LLMDataDist.llm_engine_instance = Life.all[-1] if Life.all else None
        engine.close()
        logger.info("%r finalized", instance)


def _shutdown_handler() -> None:
    """Let running layer-wise transfers end, then finalize; called when the interpreter exits."""
    instances = list(Life.all)
    for engine in [life_of(each).engine for each in instances]:  # all of them first: one may send to another
        if engine is not None:
            engine.tasks.finish()
    for instance in instances:
        try:
            instance.finalize()
        except LLMException as error:
            logger.warning("finalize at exit: %s", error)


def _in_forked_child() -> None:
    """Forget the parent's objects: they are not initialised here, and the child may make its own."""
    Life.all_lock = threading.Lock()
    for life in map(life_of, Life.all):
        life.lock = threading.Lock()
        engine, life.engine, life.manager = life.engine, None, None
        if engine is not None:
            Life.abandoned.append(engine)
            engine.abandon()
    Life.all.clear()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_in_forked_child)


def _import_late(options: Options) -> None:
    """Import what an engine with these options needs, from files: without memory or descriptor init fails here."""
    names = ["_transfer.engine", "cache_manager" if options.cache_manager else "kv_cache_manager"]
    if options.tracing:
        names.append("_transfer.tracing")
    try:
        with typed_memory_error("init"):
            for name in names:
                import_module(f"llm_datadist.{name}")
    # ImportError: a shared object for which there is no address space. SystemError: the interpreter lost a MemoryError.
    except (OSError, ImportError, SystemError) as error:
        raise LLMException(f"init: {error}", status_code=LLMStatusCode.LLM_FAILED) from error


def _not_initialized(what: str) -> NotInitialized:
    return NotInitialized(f"{what}: this LLMDataDist is not initialized; call init first")


def _wrong_interface(wanted: str, manager: object, value: str, other: str) -> StateError:
    if manager is None:
        return _not_initialized(wanted)
    return _wrong_mode(
        f"{wanted}: this LLMDataDist was initialised with the other interface; use {other}, or "
        f"llm.EnableCacheManager={value} (LLMConfig.enable_cache_manager)"
    )


def _wrong_mode(text: str) -> StateError:
    return StateError(text, status_code=LLMStatusCode.LLM_PARAM_INVALID)


def _checked_ranks(comm_name: object, cluster_rank_info: object, rank_table: object) -> dict[int, int]:
    """Check the arguments of ``link()`` in their documented order; return the ranks as ints."""
    name = check_text("comm_name", check_type("comm_name", comm_name, str))
    check_rule(name, "comm_name: '' is empty")
    check_rule(len(name) < _NAME_LIMIT, f"comm_name: {len(name)} characters, below {_NAME_LIMIT} are needed")
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


def _check_v1(options: Options, old: LLMRole, new: LLMRole, listen: str | None) -> None:
    check_enabled(
        options.enable_switch_role,
        f"switch_role: {SWITCH_ROLE} is not '1'; set LLMConfig.enable_switch_role = True before init",
    )
    check_rule(new is not old, f"role: it is {old.name} already")
    check_enabled(
        ";" not in (listen or ""), f"{LISTEN}: {listen!r} lists several addresses; one instance serves one device"
    )
    check_rule(new is not LLMRole.PROMPT or listen is not None, f"{LISTEN} is missing: PROMPT needs it")
