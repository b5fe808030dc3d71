"""LLMDataDist, one instance: ``init`` builds its engine, ``finalize`` takes it down (interface §3).

The calls check their arguments and leave the rest to ``_transfer/``. Imports that only ``init`` needs are late, so that
importing the package stays quick.
"""

from __future__ import annotations

import atexit
import os
import secrets
import threading
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar
from weakref import WeakSet

from llm_datadist._checks import (
    HERE,
    check_callable,
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
from llm_datadist._native.public_call import (
    elsewhere,
    inside_another_call,
    public_call,
    public_calls,
    put_off,
    require_outermost,
)
from llm_datadist._transfer import draining, linking, questions
from llm_datadist.config import CACHE_MANAGER, DEVICE_ID, LISTEN, SWITCH_ROLE, LLMConfig, Options, parse_listen_ip_info
from llm_datadist.errors import (
    LLMException,
    LLMStatusCode,
    NoneArgument,
    NotInitialized,
    NotLinked,
    ParamError,
    StateError,
)
from llm_datadist.types import LLMClusterInfo, LLMRole

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator

    from llm_datadist._links.link import Peer
    from llm_datadist._memory.device import Device
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.linking import Clusters, Pending, Statuses
    from llm_datadist._transfer.workers import Workers
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.kv_cache_manager import KvCacheManager
    from llm_datadist.metrics import CommunicatorStatistics, Leftover, LinkStatistics, Statistics
    from llm_datadist.types.enums import RegisterMemStatus
    from llm_datadist.types.question import PeerQuestion

    AwaitedStatuses = Coroutine[Any, Any, Statuses]

__all__ = ["LLMDataDist", "PeerLink"]

Manager = TypeVar("Manager", bound="CacheManager | KvCacheManager")

_MAX_MEMBERS: Final = 4
_NAME_LIMIT: Final = 128


class _RandomId(int):
    """Default of a cluster id, with words for signatures."""

    def __repr__(self) -> str:
        return "RANDOM"


_RANDOM: Final = _RandomId()


@public_calls(here=("link_clusters", "connect", "unlink_clusters", "ask"), whole=("init", "finalize", "switch_role"))
class LLMDataDist:
    """One instance: links to peers, and publishes and moves KV caches.

    A process may have several independent instances (interface R20). A wrong type is a TypeError (``NoneArgument`` for
    None), a cluster or communicator id outside uint64 a ParamError; so is a ``timeout``, the milliseconds of a whole
    call, not above 0. All but ``init``, ``finalize`` and ``cluster_id`` raise NotInitialized before ``init`` and after
    ``finalize``. A call of the other mode, v1 or v2, is a StateError (``LLM_PARAM_INVALID``). Threads: any, except that
    ``finalize`` must be alone (interface §11).

    In a ``with`` statement (extension) the block begins with ``init`` of ``config``, in v2 mode with device 0 unless
    that says otherwise, and ends with ``finalize``.

    Args:
        role: A label in v2 mode; in v1 mode it decides which calls are allowed.
        cluster_id: uint64, unique among all instances that link to each other. Default (extension): 63 random bits.
        config: Options for ``with``. Default: None, those of an empty LLMConfig. An extension.
        device: Where caches with Placement.DEVICE lie, as :class:`llm_datadist.devices.CudaDevice`. Default: None, as
            ``llm.DeviceMemory`` says. An extension.

    Attributes:
        llm_engine_instance: The live instance of this process that was initialised last, or None.

    Source: interface §3.
    """

    llm_engine_instance: ClassVar[LLMDataDist | None] = None

    def __init__(
        self,
        role: LLMRole,
        cluster_id: int = _RANDOM,
        *,
        config: LLMConfig | None = None,
        device: Device | None = None,
    ) -> None:
        self._role = check_type("role", role, LLMRole)
        self._cluster_id = secrets.randbits(63) if cluster_id is _RANDOM else check_uint64("cluster_id", cluster_id)
        self._config = LLMConfig() if config is None else check_type("config", config, LLMConfig)
        self._device = device
        self._life = Life()

    def init(self, options: dict[str, str]) -> None:
        """Reserve the pools, start the listener and make the instance usable.

        On an initialised instance the call does nothing. After ``finalize``, or an error, it may be called again.

        Args:
            options: From ``LLMConfig.generate_options()``, or written by hand.

        Raises:
            TypeError: Not a dict of str to str.
            ParamError: An option, named in the text, breaks its rule.
            OutOfMemory: A pool exceeds the host or its cgroup (interface R11), or no memory is left.
            LinkError: The listen address cannot be bound (``LLM_FAILED``).
            LLMException: No descriptor, thread or address space is left (``LLM_FAILED``).
            StateError: Called in a callback while ``init``, ``finalize`` or ``switch_role`` runs.

        Source: interface §3.1.
        """
        life = self._life
        with life.changing("init"):
            if life.engine is not None:
                return
            parsed = Options.parse(options, self._role)
            engine_type, manager_type = _import_late(parsed)
            engine = engine_type(self._cluster_id, parsed, self._device)
            life.manager = manager_type(engine)
            life.engine, life.owner = engine, HERE["pid"]
            with Life.all_lock:
                Life.all.append(self)
                LLMDataDist.llm_engine_instance = self
            logger.info("%r initialised", self)

    def finalize(self) -> None:
        """Close links, listener, pools and tables; peers are told, and not waited for.

        Managers become unusable (interface R21); NumPy views stay readable. If another thread finalizes already, the
        call waits for its end. Inside another call of this thread, as by a finalizer (``__del__``), it happens when
        that call ends.

        Raises:
            StateError: Called in the control thread, as by the garbage collector: it cannot wait for its own end.

        Source: interface §3.2.
        """
        tear_down(self)

    def __enter__(self) -> Self:
        self.init({DEVICE_ID: "0", CACHE_MANAGER: "1"} | self._config.generate_options())
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.finalize()

    @property
    def cluster_id(self) -> int:
        """The cluster id: the constructor's, or the one that it has drawn."""
        return self._cluster_id

    @public_call
    def __repr__(self) -> str:
        engine = self._life.engine
        state = "not initialised" if engine is None else f"{len(engine.links.all())} links"
        return f"<LLMDataDist {self._role.name} cluster {self._cluster_id}: {state}>"

    def link_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen, in parallel. Failures are returned and logged, not raised.

        Links that succeed stay, and work both ways. With ``llm.TransferBackend`` both sides may link. In v1 mode only a
        DECODER links, to all clusters or none, with statuses of their own (interface §8).

        Args:
            clusters: Each with one remote ip and port, a local ip (unless ``local_comm_res`` is not empty), and
                ``remote_cluster_id``; None learns it (interface R28).

        Returns:
            ``(status, statuses)``: SUCCESS or the last failing cluster's, and one each with its ``error`` (extension):
                ``LLM_ALREADY_LINK``, ``LLM_TIMEOUT``, ``LLM_LINK_FAILED`` (unreachable, refused, another id),
                ``LLM_PARAM_INVALID`` (no cluster, not one remote ip, RCA differs).

        Raises:
            ParamError: A cluster without local ip.

        Source: interface §3.4, §8.
        """
        return elsewhere(self._linking(clusters, timeout))(Deadline(timeout, cancellable=True)).tell()

    def link_clusters_async(self, clusters: Clusters, timeout: int = 3000) -> AwaitedStatuses:
        """Await :meth:`link_clusters`. Argument errors are raised at once. An extension.

        A cancelled call ends within ``timeout``, before ``CancelledError`` comes; its links stay.
        """
        pending = self._linking(clusters, timeout)
        return _awaited(self._life.require_engine("link_clusters_async").workers, pending, timeout)

    def connect(self, address: str, cluster_id: int | None = None, timeout: int = 3000) -> PeerLink:
        """Link to the peer that listens at ``address``; return the link, which closes as a ``with`` block ends.

        An extension; :meth:`link_clusters` is the interface's own form, for several peers and statuses.

        Args:
            address: "ip:port", "[ipv6]:port" or "name:port".
            cluster_id: Another peer's link is refused. Default: None, the link's ``cluster_id`` is what the peer says.

        Raises:
            ParamError: ``address`` has another form, or port 0.
            AlreadyLinked, LinkError, DeadlineExceeded, LLMException: As the statuses of :meth:`link_clusters`.
        """
        self._life.require_engine("connect")
        host, port = parse_listen_ip_info(address, "address")
        check_rule(port, f"address: {address!r} has port 0: name the one where the peer listens")
        cluster = LLMClusterInfo()
        cluster.append_local_ip_info("127.0.0.1", 0)  # without meaning, but the interface asks for one
        cluster.append_remote_ip_info(host, port)
        if cluster_id is not None:
            cluster.remote_cluster_id = cluster_id
        linked: list[Peer] = []
        status, _ = elsewhere(self._linking([cluster], timeout, linked))(Deadline(timeout, cancellable=True)).tell()
        if status.error is not None:
            raise status.error
        return PeerLink(self, cluster, *linked)

    def _linking(self, clusters: Clusters, timeout: int, linked: list[Peer] | None = None) -> Pending:
        engine = self._life.require_engine("link_clusters")
        check_timeout(timeout)
        check_list("clusters", clusters, LLMClusterInfo)
        needs_local = engine.options.cache_manager and not engine.options.local_comm_res
        for i, cluster in enumerate(clusters):
            check_rule(
                cluster.local_ip_info_list or not needs_local,
                f"clusters[{i}]: local_ip_info_list is empty; append_local_ip_info(own ip, 0) names this host",
            )
        return linking.link_clusters(engine, clusters, linked)

    def unlink_clusters(
        self, clusters: list[LLMClusterInfo] | tuple[LLMClusterInfo, ...], timeout: int = 3000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Unlink clusters. A cluster that is not linked is a success; failures are returned.

        The call waits for running operations. Unless ``force`` is set, it also waits for the peer's agreement; after
        ``LLM_TIMEOUT`` both sides keep the link. With ``llm.TransferBackend`` every unlink is forced. In v1 mode a link
        with a running pull stays (``LLM_LINK_BUSY``), and statuses differ (interface §8).

        Args:
            clusters: Each with ``remote_cluster_id`` and, unless forced or in v1 mode, one remote ip.
            force: If True, this side unlinks without the peer; operations that run at the timeout fail.

        Raises:
            NoneArgument: A ``remote_cluster_id`` is not set.
            StateError: Called inside another call of this thread, as by a finalizer.

        Source: interface §3.4, §8.
        """
        return elsewhere(self._unlinking(clusters, timeout, force))(Deadline(timeout, cancellable=True)).tell()

    def unlink_clusters_async(self, clusters: Clusters, timeout: int = 3000, force: bool = False) -> AwaitedStatuses:
        """Await :meth:`unlink_clusters`, as :meth:`link_clusters_async`. An extension.

        After a cancellation each link is kept or gone, as after a timeout.
        """
        pending = self._unlinking(clusters, timeout, force)
        return _awaited(self._life.require_engine("unlink_clusters_async").workers, pending, timeout)

    def _unlinking(self, clusters: Clusters, timeout: int, force: bool) -> Pending:
        engine = self._life.require_engine("unlink_clusters")
        require_outermost("unlink_clusters")
        check_timeout(timeout)
        check_list("clusters", clusters, LLMClusterInfo)
        check_type("force", force, bool)
        for i, cluster in enumerate(clusters):
            if cluster.remote_cluster_id is None:
                raise NoneArgument(f"clusters[{i}].remote_cluster_id is None: unlinking needs it")
        return linking.unlink_clusters(engine, clusters, force=force)

    def check_link_status(self, remote_cluster_id: int) -> None:
        """Ping a peer and wait for its answer. Only in v1 mode; v2 has ``statistics().links``.

        Raises:
            ParamError: This instance is not a DECODER.
            NotLinked, PeerLost: There is no link, or it ended during the call.
            LinkError: A pull is running on the link (``LLM_LINK_BUSY``); repeat the call.
            DeadlineExceeded: No answer within ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the link stays.

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
        """Begin to link all members of a communicator to each other; return its id.

        Every member calls this with the same arguments. :meth:`query_register_mem_status` is PREPARING, then OK or
        FAILED, within ``link_total_time`` seconds. Only after OK members pull and push. Existing links are used.

        Args:
            comm_name: 1 to 127 characters, no NUL.
            cluster_rank_info: Cluster id -> rank of 2 to 4 members, this one too; ranks ascending.
            rank_table: JSON object with ``server_list``, from which each rank has its address.

        Raises:
            ParamError: An argument, table field or the environment's port range, named in the text, breaks its rule.
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``).
            LinkRefused: None of the ports is free on this host (``LLM_LINK_FAILED``).

        Source: interface §3.5, B2.3.
        """
        engine = self._communicating("link")
        ranks = _checked_ranks(comm_name, cluster_rank_info, rank_table)
        own = self._cluster_id
        check_rule(own in ranks, f"cluster_rank_info: {ranks} does not have this cluster, {own}")
        with engine.meters.call("link", [each for each in ranks if each != own]):
            if Life.loopbacks:
                return Life.loopbacks[-1](engine, comm_name, ranks, rank_table)
            return engine.open_communicator(comm_name, ranks, rank_table)

    def unlink(self, comm_id: int) -> None:
        """End a communicator, in any state, at this side only.

        Links made for it alone end: the call waits for their operations within ``sync_kv_timeout``, then these fail.
        Other links stay.

        Raises:
            NotLinked: There is no such communicator.
            StateError: Called inside another call of this thread, as by a finalizer.
            LLMException: With ``llm.TransferBackend`` (``LLM_FEATURE_NOT_ENABLED``).

        Source: interface §3.5, B2.3.
        """
        require_outermost("unlink")
        engine = self._communicating("unlink")
        number = check_uint64("comm_id", comm_id)
        with engine.meters.call("unlink"):
            engine.links.communicators.close(number, engine.deadline())

    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return a communicator's status: PREPARING, then OK or FAILED until ``unlink``. Errors as there.

        Source: interface §3.5.
        """
        engine = self._communicating("query_register_mem_status")
        return engine.links.communicators.status(check_uint64("comm_id", comm_id))

    def explain_communicator(self, comm_id: int) -> CommunicatorStatistics:
        """Return a communicator's members, missing ones and failure, or raise NotLinked. An extension."""
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
        """Change the role; start, move or stop the listener.

        With ``llm.listenIpInfo`` in the options the instance listens there, otherwise nowhere; other options are
        ignored. With ``llm.TransferBackend`` the listener stays. Caches, ids and keys stay.

        Raises:
            ParamError: ``llm.listenIpInfo`` is not ip:port; in v1 mode the same role, or PROMPT without it.
            StateError: A link exists, or a communicator is being prepared (``LLM_EXIST_LINK``). Or called in a callback
                while another ``switch_role`` or ``init`` runs.
            LinkError: The new address cannot be bound (``LLM_FAILED``). Role and listener are as before. If both
                addresses share a port and neither can be bound, the instance stops listening; the text says so.
            LLMException: ``LLM_FEATURE_NOT_ENABLED``: v1 mode without ``enable_switch_role`` or with several addresses;
                another address with ``llm.TransferBackend``.

        Source: interface §3.6, B7.
        """
        self._life.require_engine("switch_role")  # does not wait for a finalize that runs
        with self._life.changing("switch_role"):  # before reading role and engine
            engine = self._life.require_engine("switch_role")
            check_type("role", role, LLMRole)
            listen = None if switch_options is None else check_type("switch_options", switch_options, dict).get(LISTEN)
            if listen is not None:
                check_type(f"switch_options[{LISTEN!r}]", listen, str)
            if not engine.options.cache_manager:
                _check_v1(engine.options, self._role, role, listen)
            wanted = None if listen is None else parse_listen_ip_info(listen, LISTEN)
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

    def drain(self, timeout_ms: int = 10_000) -> Leftover:
        """Take no new work, and leave peers once they need no more, so that ``finalize`` cuts nothing. An extension.

        From now on peers' and own links, communicators, grants, and claims that would wait for a grant are refused: a
        LinkError with ``retryable`` that says "draining". Pulls by key, and under grants that there are, go on. Once
        every key is consumed or removed, no grant is active and no layer-wise transfer runs, each peer lets its
        operations end, and agrees to unlink: it counts no loss, and does not dial again. It lasts until ``finalize``.

        Returns:
            What is left after ``timeout_ms``, false if nothing is. If keys, grants or transfers are, all links stay.

        Raises:
            ParamError: ``timeout_ms`` not above 0.
            StateError: Called inside another call of this thread, as by a finalizer.
        """
        return drain(self._life, timeout_ms)

    @property
    def cache_manager(self) -> CacheManager:
        """The CacheManager (v2 mode); the same object until finalize (interface §3.3)."""
        from llm_datadist.cache_manager import CacheManager

        return self._life.require_manager(CacheManager, "cache_manager", "kv_cache_manager")

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The KvCacheManager (v1 mode); the same object until finalize (interface §3.3)."""
        from llm_datadist.kv_cache_manager import KvCacheManager

        return self._life.require_manager(KvCacheManager, "kv_cache_manager", "cache_manager")

    @property
    def listen_port(self) -> int | None:
        """The port this instance listens on, or None. An extension."""
        address = self._life.require_engine("listen_port").links.listen_address
        return None if address is None else address[1]

    @property
    def incarnation(self) -> str:
        """Random hexadecimal id of this ``init``. An extension."""
        return self._life.require_engine("incarnation").caches.exports.incarnation.hex()

    def statistics(self) -> Statistics:
        """Return the present :class:`~llm_datadist.metrics.Statistics`. An extension."""
        return self._life.require_engine("statistics").statistics()

    def explain(self, remote_cluster_id: int) -> LinkStatistics:
        """Return a link's state, its transports and the reason for them. An extension.

        Raises:
            NotLinked: There is no link that operations may use. If there is none at all, the text has its last event,
                ``__cause__`` the failure of ``link_clusters``.
        """
        engine = self._life.require_engine("explain")
        return engine.links.get(check_uint64("remote_cluster_id", remote_cluster_id)).statistics()

    def ask(self, remote_cluster_id: int, name: str, body: bytes, timeout: int = 3000) -> bytes:
        """Ask a peer a question of the users' own; return the answer. An extension.

        The peer's handler of ``name`` answers (:meth:`answer_questions`). Questions of one thread come in their order.

        Args:
            name: 1 to 64 characters.
            body: At most 1,048,064 bytes, which this library does not read.
            timeout: Milliseconds of the call.

        Raises:
            NotLinked, PeerLost: There is no link, or it ended during the call; the handler may have run.
            DeadlineExceeded: No answer in time; a later one is dropped.
            LLMException: The handler's error, by its status: CacheMismatch for ``LLM_PARAM_INVALID``, CacheNotFound for
                ``LLM_KV_CACHE_NOT_EXIST``, LinkError for ``LLM_LINK_BUSY``, also if the peer has 256 questions of this
                instance to answer, or too many bytes; ``LLM_FEATURE_NOT_ENABLED`` if it has no handler, or its release
                no questions.
        """
        engine = self._life.require_engine("ask")
        cluster_id = check_uint64("remote_cluster_id", remote_cluster_id)
        check_timeout(timeout)
        checked = questions.check_name(name), questions.check_body("body", body)
        with engine.meters.call("ask", [cluster_id]):
            return questions.ask(engine.links, cluster_id, *checked, Deadline(timeout))

    def answer_questions(self, name: str, handler: Callable[[PeerQuestion], bytes | None] | None) -> None:
        """Answer peers' questions of a name from now on; None ends that. An extension.

        The handler runs on the control thread, so it must not wait, and should need less than a millisecond. It returns
        the answer, or None if it calls
        :meth:`PeerQuestion.answer <llm_datadist.types.question.PeerQuestion.answer>` later, in any thread. The peer
        gets an LLMException of the handler as status and text; another exception is logged here, too, for each name
        at most once a second.

        A peer may have 256 questions unanswered, all peers together 64 MiB; each peer leaves half of the rest to the
        others. Further questions are refused with ``LLM_LINK_BUSY``.

        Raises:
            TypeError: ``handler`` cannot be called.
            ParamError: ``name`` not of 1 to 64 characters.
        """
        engine = self._life.require_engine("answer_questions")
        checked = questions.check_name(name)
        if handler is not None:
            check_callable("handler", handler)
        engine.questions.serve(checked, handler)

    def on_peer_lost(self, callback: Callable[[int, str], None]) -> None:
        """Call ``callback(cluster_id, incarnation)`` when a link has ended, for any reason. An extension.

        Its grants have ended by then, or end soon if they are many. The callback runs in any thread of this library,
        and must not wait. It may come twice for one link, and after the peer has a new one. It lasts until
        ``finalize``. TypeError: it cannot be called.
        """
        engine = self._life.require_engine("on_peer_lost")
        check_callable("callback", callback)
        engine.questions.on_peer_lost(callback)

    def check_integrity(self) -> None:
        """Raise AssertionError, with the difference, unless all tables agree; in idle moments. An extension."""
        self._life.require_engine("check_integrity").check_integrity()


class PeerLink(AbstractContextManager["PeerLink"]):
    """A link that :meth:`LLMDataDist.connect` has made; a ``with`` block closes it. An extension.

    It stands for the link to this ``init`` of the peer, also after that was lost and dialled again. Threads: any.
    """

    def __init__(self, datadist: LLMDataDist, cluster: LLMClusterInfo, peer: Peer) -> None:
        cluster.remote_cluster_id = self._cluster_id = peer.cluster_id
        self._datadist, self._cluster = datadist, cluster
        self._own, self._peer = datadist.incarnation, peer.incarnation.hex()

    @property
    def cluster_id(self) -> int:
        """The peer's cluster id, for keys and calls that name it."""
        return self._cluster_id

    def explain(self) -> LinkStatistics:
        """Return :meth:`LLMDataDist.explain` of the peer."""
        return self._datadist.explain(self._cluster_id)

    def ask(self, name: str, body: bytes, timeout: int = 3000) -> bytes:
        """Ask the peer a question, as :meth:`LLMDataDist.ask`."""
        return self._datadist.ask(self._cluster_id, name, body, timeout)

    def close(self, timeout: int = 3000, *, force: bool = False) -> None:
        """Unlink, as :meth:`LLMDataDist.unlink_clusters`; a link that has ended, or was replaced, is a success.

        Raises:
            LLMException: The unlink has failed; without ``force``, after DeadlineExceeded, both sides keep the link.
            StateError: Called inside another call of this thread, as by a finalizer.
        """
        try:
            if self._datadist.incarnation != self._own or self.explain().peer_incarnation != self._peer:
                return
        except NotInitialized:
            return
        except NotLinked:
            pass  # unlinking ends its redialling
        status, _ = self._datadist.unlink_clusters([self._cluster], timeout, force)
        if status.error is not None:
            raise status.error

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<PeerLink of {self._datadist!r} to cluster {self._cluster_id}>"


class Life:
    """State of one LLMDataDist from ``init`` to ``finalize``, for this library's packages (:func:`life_of`)."""

    known: ClassVar[WeakSet[Life]] = WeakSet()  # of all LLMDataDists
    all: ClassVar[list[LLMDataDist]] = []  # initialised instances of this process, oldest first
    all_lock: ClassVar[threading.Lock] = threading.Lock()
    #: In a forked child: the parent's engines, referenced so that no finalizer tears them down here.
    abandoned: ClassVar[list[Engine]] = []
    #: The ``testing.loopback_links`` in force, newest last: it opens the communicators of every instance.
    loopbacks: ClassVar[list[Callable[[Engine, str, dict[int, int], str], int]]] = []

    def __init__(self) -> None:
        self.engine: Engine | None = None
        self.manager: CacheManager | KvCacheManager | None = None
        self.owner: int | None = None  # process of the last init, until its finalize
        #: At most one. No lock: user code runs meanwhile, as loggers, devices and callbacks of lost peers.
        self.changes: dict[None, tuple[str, int, threading.Event]] = {}  # call, thread, whether it is over
        Life.known.add(self)

    @contextmanager
    def changing(self, call: str, *, waits: bool = True) -> Iterator[bool]:
        """Be the one that changes the state, after another has ended; with False beside it.

        Inside another call of this thread that is a StateError: the change may wait for this thread. Unless ``waits``,
        it begins False beside a finalize.
        """
        mine = call, threading.get_ident(), threading.Event()
        while (other := self.changes.setdefault(None, mine)) is not mine:
            running, thread, over = other
            if running == "finalize" and not waits:
                yield False
                return
            if thread == mine[1] or inside_another_call():
                raise StateError(f"{call}: called by a callback while {running} runs; call it after that")
            over.wait()
        try:
            yield True
        finally:
            self.changes.clear()
            mine[2].set()

    def require_engine(self, call: str) -> Engine:
        if (engine := self.engine) is None:
            raise self.missing(call)
        return engine

    def missing(self, call: str, why: str = "this LLMDataDist is not initialized; call init first") -> NotInitialized:
        """Return the error of a call before ``init``, after ``finalize``, or in a forked child."""
        if self.owner not in (None, HERE["pid"]):
            why = f"it belongs to process {self.owner}, of which this one is a fork; call it there, or init one here"
        return NotInitialized(f"{call}: {why}")

    def require_manager(self, kind: type[Manager], call: str, other: str) -> Manager:
        if (manager := self.manager) is None:
            raise self.missing(call)
        if isinstance(manager, kind):
            return manager
        raise _wrong_mode(
            f"{call}: this LLMDataDist was initialised with the other interface; use {other}, or "
            f"llm.EnableCacheManager={int(call == 'cache_manager')} (LLMConfig.enable_cache_manager)"
        )


def life_of(instance: LLMDataDist) -> Life:
    """Return an instance's state, for this library's packages."""
    return instance._life  # noqa: SLF001 (of this module; no attribute for users)


async def _awaited(workers: Workers, pending: Pending, budget_ms: int) -> Statuses:
    """Link or unlink in a worker thread, and keep the reasons of failures for the awaiting task."""
    return (await workers.run(pending, budget_ms)).tell()


def drain(life: Life, timeout_ms: int, busy: Callable[[], bool] = bool) -> Leftover:
    """Do what :meth:`LLMDataDist.drain` says; links stay while ``busy``."""
    engine = life.require_engine("drain")
    require_outermost("drain")
    check_timeout(timeout_ms, "timeout_ms")
    with engine.meters.call("drain"):
        return draining.drain(engine, Deadline(timeout_ms, cancellable=True), busy)


def tear_down(instance: LLMDataDist) -> None:
    """Finalize an instance. Errors as :meth:`LLMDataDist.finalize`."""
    if must_not_wait():
        raise StateError(
            f"finalize: called in {threading.current_thread().name}, a control thread of this library, which would "
            "wait for itself; call it from another thread"
        )
    if not put_off(_tear_down, instance, False):
        _tear_down(instance, True)


def _tear_down(instance: LLMDataDist, waits: bool) -> None:
    """Finalize; one that was put off does not wait for another, which may wait for this thread."""
    life = life_of(instance)
    with life.changing("finalize", waits=waits) as begun:
        if not begun or (engine := life.engine) is None:
            return
        life.engine = life.manager = life.owner = None
        with Life.all_lock:
            Life.all.remove(instance)
            if LLMDataDist.llm_engine_instance is instance:
                LLMDataDist.llm_engine_instance = Life.all[-1] if Life.all else None
        engine.close()
        logger.info("%r finalized", instance)


def _shutdown_handler() -> None:
    """Let running layer-wise transfers end, then finalize, at the interpreter's exit."""
    instances = list(Life.all)
    for engine in [life_of(each).engine for each in instances]:  # all before any finalize: one may send to another
        if engine is not None:
            engine.tasks.finish()
    for instance in instances:
        try:
            instance.finalize()
        except LLMException as error:
            logger.warning("finalize at exit: %s", error)


def _in_forked_child() -> None:
    """Mark the parent's instances as not initialised; the child may make its own."""
    Life.all_lock = threading.Lock()
    for life in list(Life.known):
        life.changes = {}
        engine, life.engine, life.manager = life.engine, None, None
        if engine is not None:
            Life.abandoned.append(engine)
            engine.abandon()
    Life.all.clear()
    LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
os.register_at_fork(after_in_child=_in_forked_child)


def _import_late(options: Options) -> tuple[type[Engine], type[CacheManager | KvCacheManager]]:
    """Import the modules that these options need; return the classes of engine and manager."""
    try:
        with typed_memory_error("init"):
            from llm_datadist._transfer.engine import Engine

            if options.tracing:
                from llm_datadist._transfer import tracing  # noqa: F401 (the engine needs it)
            if options.cache_manager:
                from llm_datadist.cache_manager import CacheManager

                return Engine, CacheManager
            from llm_datadist.kv_cache_manager import KvCacheManager

            return Engine, KvCacheManager
    # ImportError: no address space for a shared object. SystemError: the interpreter lost a MemoryError.
    except (OSError, ImportError, SystemError) as error:
        raise LLMException(f"init: {error}", status_code=LLMStatusCode.LLM_FAILED) from error


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
