"""LlmDataDist, the class of the C++ header (interface §9): calls that return statuses."""

from __future__ import annotations

import logging
import threading
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import unwrap
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._checks import check_dict, check_int, check_rule, check_timeout, check_type, is_digits
from llm_datadist._deadline import Deadline
from llm_datadist._log import calls_logger as logger
from llm_datadist._native import parse_blocks
from llm_datadist._native.public_call import for_main_thread, public_calls, require_outermost
from llm_datadist._transfer import linking
from llm_datadist._transfer.arguments import check, check_addresses, check_pairs
from llm_datadist._transfer.calls import BlocksTransfer, RowTransfer
from llm_datadist._transfer.local_copy import CacheRow
from llm_datadist._transfer.meters import log_for_user
from llm_datadist.config import CACHE_MANAGER, DEVICE_ID, LISTEN, REMOTE_ACCESSIBLE
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.arguments import ALL_LAYERS, ARGUMENTS
from llm_datadist.cpp_api.structs import (
    OPTION_DEVICE_ID,
    OPTION_LISTEN_IP_INFO,
    Cache,
    CacheDesc,
    CacheIndex,
    ClusterInfo,
    KvCacheExtParam,
    LlmRole,
    RegisterCfg,
)
from llm_datadist.datadist import LLMDataDist, life_of, tear_down
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, NotInitialized, ParamError
from llm_datadist.types import Placement
from llm_datadist.types.cluster import host_of, show_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist._memory.device import Device
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.linking import Pending
    from llm_datadist.types.descriptors import BlockNumbers

_NO_CFG: Final = RegisterCfg()
_NO_OPTIONS: Final[dict[str, str]] = {}
_NOT_INITIALIZED: Final = "this LlmDataDist is not initialised; call Initialize first"


@public_calls(
    here=("PullKvCache", "PullKvBlocks", "PushKvCache", "PushKvBlocks", "CopyKvCache"),
    whole=("Initialize", "Finalize", "SetRole"),
)
class LlmDataDist:
    """One instance, with the calls of the C++ class.

    Every call returns ``LLM_FAILED`` before Initialize, and if the operating system refuses something. A dropped object
    serves until Finalize or its process's end. Transfers (Pull, Push) need a link. Of local caches they read
    ``cache_id`` only. Only PushKvCache consumes a key, that of the peer's row. Their statuses: ``LLM_PARAM_INVALID``,
    ``LLM_KV_CACHE_NOT_EXIST``, ``LLM_NOT_YET_LINK``: no byte has moved. ``LLM_TIMEOUT``: longer than
    ``OPTION_SYNC_CACHE_WAIT_TIME``; the link stays usable (interface R7). ``LLM_SUSPECT_REMOTE_ERROR``: the peer died.
    ``LLM_FAILED``: the peer's cache was freed or unregistered during the copy. After these three the destination is
    undefined.

    Threads: any, except that Finalize must be alone (interface §11).

    Args:
        cluster_id, role: As of LLMDataDist; Initialize checks them.
        device: Memory behind kDevice. Default: None, host memory. An extension.

    Raises:
        TypeError: Wrong types, in every call (``NoneArgument`` for None).

    Source: interface §9.
    """

    def __init__(self, cluster_id: int, role: LlmRole, *, device: Device | None = None) -> None:
        self._device = device
        self._cluster_id = check_int("cluster_id", cluster_id)
        self._role = check_type("role", role, LlmRole)
        self._state = _State()

    def Initialize(self, options: dict[str, str]) -> LLMStatusCode:
        """Reserve the pools, start the listener and make the instance usable, as ``LLMDataDist.init``.

        Always in CacheManager mode with RCA, in spite of options.

        Args:
            options: ``OPTION_*`` keys, and every option of ``LLMDataDist.init``. ``OPTION_DEVICE_ID`` is required.
                ``llm.MemPoolConfig`` and ``llm.HostMemPoolConfig`` size the pools of AllocateCache.

        Returns:
            Statuses of ``LLMDataDist.init``'s errors; ``LLM_PARAM_INVALID`` for ``kEnd`` too.

        Source: interface §9, §3.1.
        """
        given = check_dict("options", options, str, str)
        with _StatusCall(self._state, "Initialize") as call:
            # Made at the first call: bad arguments of the constructor are a status.
            if self._state.dist is None:
                made = LLMDataDist(arguments.role("role", self._role), self._cluster_id, device=self._device)
                vars(self._state).setdefault("dist", made)  # the first one; a fork could inherit a lock
            dist = self.datadist
            if life_of(dist).engine is None:
                device = given.get(DEVICE_ID, given.get(OPTION_DEVICE_ID))
                text = f"{OPTION_DEVICE_ID}: {device!r}, the number of a device is needed (0: only the host is there)"
                check_rule(device is not None and is_digits(device), text)
                # Unwrapped: it is this call, not one inside of it.
                unwrap(LLMDataDist.init)(dist, given | {CACHE_MANAGER: "1", REMOTE_ACCESSIBLE: "1"})
        return call.status

    def Finalize(self) -> LLMStatusCode:
        """Close links, listener, pools and tables, as ``LLMDataDist.finalize``.

        ``LLM_SUCCESS`` without Initialize too.

        Source: interface §9, §3.2.
        """
        with _StatusCall(self._state, "Finalize") as call:
            if self._state.dist is not None:
                tear_down(self._state.dist)
        return call.status

    @property
    def last_error(self) -> Exception | None:
        """The exception of this thread's last failed status, or None. An extension."""
        error: Exception | None = getattr(self._state.errors, "last", None)
        return error

    @property
    def datadist(self) -> LLMDataDist:
        """The LLMDataDist underneath. An extension.

        Raises:
            NotInitialized: Before the first Initialize.
        """
        if self._state.dist is None:
            raise NotInitialized(f"datadist: {_NOT_INITIALIZED}")
        return self._state.dist

    def __repr__(self) -> str:
        if self._state.dist is None:
            return f"<LlmDataDist {self._role.name} cluster {self._cluster_id}: not initialised>"
        return f"<LlmDataDist over {self._state.dist!r}>"

    def LinkLlmClusters(
        self, clusters: list[ClusterInfo], timeout: int = 1000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen, as ``LLMDataDist.link_clusters``.

        Args:
            clusters: A local ip is needed unless ``OPTION_LOCAL_COMM_RES`` or ``OPTION_LISTEN_IP_INFO`` was given.
            timeout: Milliseconds for the whole call, int32 above 0.

        Returns:
            ``(status, statuses)``; ``(LLM_PARAM_INVALID, [])`` for no cluster, a bad address or ``timeout``: nothing
                has happened.

        Source: interface §9, §3.4.
        """
        with _StatusCall(self._state, "LinkLlmClusters") as call:
            engine = call.engine
            check_timeout(timeout)
            local_ip = engine.options.local_comm_res is None and engine.options.listen is None
            infos = arguments.cluster_infos(clusters, local_ip=local_ip)
            call.collect(linking.link_clusters(engine, infos), timeout)
        return call.status, call.statuses

    def UnlinkLlmClusters(
        self, clusters: list[ClusterInfo], timeout: int = 1000, force: bool = False
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Unlink clusters, as ``LLMDataDist.unlink_clusters``. A cluster id of 0 may stand for the remote address.

        Returns:
            As :meth:`LinkLlmClusters`; ``LLM_TIMEOUT`` for a cluster that did not agree in time: its link stays.

        Source: interface §9, §3.4.
        """
        with _StatusCall(self._state, "UnlinkLlmClusters") as call:
            engine = call.engine
            check_timeout(timeout)
            check_type("force", force, bool)
            infos = arguments.cluster_infos(clusters)
            known = {each.address: each.remote_cluster_id for each in engine.links.reconnects()}
            for link in engine.links.all():
                known |= dict.fromkeys((link.origin.shown, link.origin.asked), link.peer.cluster_id)
            for info in (each for each in infos if each.remote_cluster_id is None):
                addresses = [show_address((host_of(ip), port)) for ip, port in info.remote_ip_info_list]
                info.remote_cluster_id = next((known[each] for each in addresses if each in known), 0)
            require_outermost("unlink_clusters")
            call.collect(linking.unlink_clusters(engine, infos, force=force), timeout)
        return call.status, call.statuses

    def SetRole(self, role: LlmRole, options: dict[str, str] = _NO_OPTIONS) -> LLMStatusCode:
        """Change the role; start, move or stop the listener. As ``LLMDataDist.switch_role``.

        Args:
            options: With ``OPTION_LISTEN_IP_INFO`` the instance listens there, otherwise nowhere.

        Returns:
            ``LLM_EXIST_LINK``: a link exists. ``LLM_PARAM_INVALID``: ``kEnd``, or not ip:port. ``LLM_FAILED``: the
                address cannot be bound. ``LLM_FEATURE_NOT_ENABLED``: another address with ``OPTION_TRANSFER_BACKEND``.

        Source: interface §9, §3.6.
        """
        with _StatusCall(self._state, "SetRole") as call:
            _, dist, taken = call.engine, self.datadist, arguments.role("role", role)
            given = check_dict("options", options, str, str)
            listen = given.get(LISTEN, given.get(OPTION_LISTEN_IP_INFO))
            unwrap(LLMDataDist.switch_role)(dist, taken, {} if listen is None else {LISTEN: listen})
        return call.status

    def RegisterKvCache(
        self, cache_desc: CacheDesc, addrs: list[int], cfg: RegisterCfg = _NO_CFG
    ) -> tuple[LLMStatusCode, int | None]:
        """Register memory of the caller, as ``CacheManager.register_cache``; usable by row and block.

        It must stay mapped until UnregisterKvCache or Finalize has returned. ``cfg`` is reserved.

        Returns:
            ``(LLM_SUCCESS, cache_id)``, an id that no earlier Initialize of this process has used;
                ``(LLM_PARAM_INVALID, None)``.

        Source: interface §9, §6.6.
        """
        cache_id: int | None = None
        with _StatusCall(self._state, "RegisterKvCache") as call:
            engine = call.engine
            geometry, addresses, _ = check(ARGUMENTS, cache_desc=cache_desc, addrs=addrs, cfg=cfg)
            check_addresses(addresses, geometry)
            with engine.meters.span("RegisterKvCache", "%r", cache_desc):
                cache_id = engine.caches.register(geometry, addresses, [], remote_accessible=True).cache_id
        return call.status, cache_id

    def _cut_off(self, returned: object) -> None:
        """Undo a call whose caller does not get the new cache."""
        made = returned[1] if isinstance(returned, tuple) else None
        engine = life_of(self.datadist).engine
        if engine is None:
            return
        if isinstance(made, Cache):
            engine.caches.discard(made.cache_id)
        elif isinstance(made, int):
            engine.caches.unregister(made, engine.deadline())

    def UnregisterKvCache(self, cache_id: int) -> LLMStatusCode:
        """Unregister a cache, as ``CacheManager.unregister_cache``.

        Returns:
            ``LLM_SUCCESS``: no call and no peer uses the memory. ``LLM_TIMEOUT``: the memory is in use; the cache stays
                registered.

        Source: interface §9, §6.7.
        """
        with _StatusCall(self._state, "UnregisterKvCache") as call:
            engine = call.engine
            check(ARGUMENTS, cache_id=cache_id)
            with engine.meters.span("UnregisterKvCache", "id=%d", cache_id):
                engine.caches.unregister(cache_id, engine.deadline())
        return call.status

    def AllocateCache(self, cache_desc: CacheDesc) -> tuple[LLMStatusCode, Cache | None]:
        """Allocate a cache from the pool of its placement, usable by row and by block.

        Returns:
            ``(LLM_SUCCESS, cache)``; use it until DeallocateCache or Finalize only. ``(LLM_PARAM_INVALID, None)``:
                an impossible descriptor, or no pool (interface R12). ``(LLM_OUT_OF_MEMORY, None)``: nothing was
                allocated.

        Source: interface §9, §6.1.
        """
        cache: Cache | None = None
        with _StatusCall(self._state, "AllocateCache") as call:
            engine = call.engine
            (geometry,) = check(ARGUMENTS, cache_desc=cache_desc)
            desc = replace(cache_desc, shape=list(cache_desc.shape))
            with engine.meters.span("AllocateCache", "%r", cache_desc):
                entry = engine.caches.allocate(geometry, [], engine.deadline())
            try:
                cache = Cache(entry.cache_id, entry.storage.tensors.bases.tolist(), desc)
            except BaseException:
                engine.caches.discard(entry.cache_id)
                raise
        return call.status, cache

    def DeallocateCache(self, cache_id: int) -> LLMStatusCode:
        """Deallocate a cache; unknown, freed and registered ids: ``LLM_SUCCESS`` without effect.

        Running reads of peers fail. The memory is reused once no peer writes it.

        Source: interface §9, §6.2.
        """
        with _StatusCall(self._state, "DeallocateCache") as call:
            engine = call.engine
            check(ARGUMENTS, cache_id=cache_id)
            with engine.meters.span("DeallocateCache", "id=%d", cache_id):
                engine.caches.deallocate(cache_id)
        return call.status

    def PullKvCache(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
    ) -> LLMStatusCode:
        """Pull a row of a peer's cache into row ``batch_index`` of ``dst_cache``, as ``CacheManager.pull_cache``.

        Source: interface §9, §6.10.
        """
        with _StatusCall(self._state, "PullKvCache") as call:
            engine = call.engine
            name = arguments.remote_name("src_cache_index", src_cache_index, engine.cluster_id, row=True)
            cache_id, row, nbytes, layers = check(
                ARGUMENTS, dst_cache=dst_cache, batch_index=batch_index, size=size, ext_param=ext_param
            )
            pull = RowTransfer(engine, "dst_cache", cache_id, layers, row, nbytes, what="PullKvCache", name=name)
            pull.run(engine.deadline())
        return call.status

    def PullKvBlocks(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: BlockNumbers,
        dst_blocks: BlockNumbers,
        ext_param: KvCacheExtParam = ALL_LAYERS,
    ) -> LLMStatusCode:
        """Pull blocks of a peer's cache: ``src_blocks[i]`` to ``dst_blocks[i]``, in order.

        As ``CacheManager.pull_blocks``; ``src_cache_index.batch_index`` is 0. ``LLM_PARAM_INVALID``: unequal block
        sizes too (interface R17).

        Source: interface §9, §6.11.
        """
        with _StatusCall(self._state, "PullKvBlocks") as call:
            engine = call.engine
            name = arguments.remote_name("src_cache_index", src_cache_index, engine.cluster_id, row=False)
            cache_id = arguments.cache_id("dst_cache", dst_cache)
            sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
            check_pairs(sources, targets)
            layers = arguments.layers("ext_param", ext_param)
            given = engine, "dst_cache", cache_id, layers, targets, sources, "dst_blocks"
            BlocksTransfer(*given, what="PullKvBlocks", name=name).run(engine.deadline())
        return call.status

    def PushKvCache(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = ALL_LAYERS,
    ) -> LLMStatusCode:
        """Push a row of ``src_cache`` into a row of a peer's cache.

        As ``CacheManager.push_cache``; ``src_cache`` is on kDevice (interface R16).

        Source: interface §9, §6.12.
        """
        with _StatusCall(self._state, "PushKvCache") as call:
            engine = call.engine
            cache_id = arguments.cache_id("src_cache", src_cache)
            name = arguments.remote_name("dst_cache_index", dst_cache_index, row=True)
            row, nbytes = check(ARGUMENTS, src_batch_index=src_batch_index, size=size)
            check_rule(nbytes == -1, f"size={nbytes}: only -1 (the whole row) can be pushed")
            layers = arguments.layers("ext_param", ext_param)
            _require_device(engine, cache_id, "PushKvCache: src_cache", "pushed")
            given = engine, "src_cache", cache_id, layers, row
            push = RowTransfer(*given, what="PushKvCache", name=name, push=True, consumes=True)
            push.run(engine.deadline())
        return call.status

    def PushKvBlocks(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_blocks: BlockNumbers,
        dst_blocks: BlockNumbers,
        ext_param: KvCacheExtParam = ALL_LAYERS,
    ) -> LLMStatusCode:
        """Push blocks of ``src_cache``: ``src_blocks[i]`` to the peer's ``dst_blocks[i]``, in order.

        As ``CacheManager.push_blocks`` by cache id (interface R31); ``dst_cache_index.batch_index`` is 0.
        ``LLM_PARAM_INVALID``: unequal block sizes too (interface R17).

        Source: interface §9, §6.13.
        """
        with _StatusCall(self._state, "PushKvBlocks") as call:
            engine = call.engine
            cache_id = arguments.cache_id("src_cache", src_cache)
            name = arguments.remote_name("dst_cache_index", dst_cache_index, row=False)
            sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
            check_pairs(sources, targets)
            layers = arguments.layers("ext_param", ext_param)
            given = engine, "src_cache", cache_id, layers, sources, targets, "src_blocks"
            push = BlocksTransfer(*given, what="PushKvBlocks", name=name, push=True, consumes=True)
            push.run(engine.deadline())
        return call.status

    def CopyKvCache(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
    ) -> LLMStatusCode:
        """Copy a range of a row, as ``CacheManager.copy_cache``.

        The source comes first and is on kDevice. Only ``cache_id`` is read.

        Returns:
            ``LLM_PARAM_INVALID``, ``LLM_KV_CACHE_NOT_EXIST``: nothing was copied. ``LLM_TIMEOUT``: the addressed bytes
                are undefined.

        Source: interface §9, §6.5.
        """
        with _StatusCall(self._state, "CopyKvCache") as call:
            engine = call.engine
            src, dst = check(ARGUMENTS, src_cache=src_cache, dst_cache=dst_cache)
            src_row, dst_row = check(ARGUMENTS, src_batch_index=src_batch_index, dst_batch_index=dst_batch_index)
            start, nbytes = check(ARGUMENTS, offset=offset, size=size)
            _require_device(engine, src, "CopyKvCache: src", "copied")
            detail = "%d[%d] -> %d[%d] offset=%d size=%d"
            with engine.meters.span("CopyKvCache", detail, src, src_row, dst, dst_row, start, nbytes) as span:
                span.nbytes = engine.local.copy_cache(
                    CacheRow(dst, dst_row), CacheRow(src, src_row), start, nbytes, engine.deadline(), "CopyKvCache"
                )
        return call.status

    def CopyKvBlocks(
        self, src_cache: Cache, dst_cache: Cache, src_blocks: BlockNumbers, dst_blocks_list: Sequence[BlockNumbers]
    ) -> LLMStatusCode:
        """Copy blocks: ``src_blocks[i]`` to ``dst_blocks_list[k][i]`` for every list k, in order.

        Device to device, device to host and host to device; list by list (interface R26). A ``cache_id`` from 1 names a
        cache; -1 on kHost is host memory at ``tensor_addrs``. Source and destination may be one cache.

        Args:
            src_blocks: Block numbers, not empty. As every list of blocks, it may be an array (interface §6.0).
            dst_blocks_list: At least one list, each as long as ``src_blocks``.

        Returns:
            ``LLM_PARAM_INVALID``: host to host, an empty list, unequal lengths, block sizes or ``num_tensors``, an
                index outside its cache, overlapping tensors; nothing was copied. ``LLM_KV_CACHE_NOT_EXIST``: no such
                cache. ``LLM_OUT_OF_MEMORY``: the device has none left (interface R10). ``LLM_TIMEOUT``: a copy
                on the device exceeded ``OPTION_SYNC_CACHE_WAIT_TIME``; the addressed blocks are undefined. Other copies
                have no limit (interface R6).

        Source: interface §9.
        """
        with _StatusCall(self._state, "CopyKvBlocks") as call:
            engine = call.engine
            device = engine.caches.device
            src = arguments.operand("src_cache", src_cache, device)
            dst = arguments.operand("dst_cache", dst_cache, device)
            blocks = arguments.block_lists(src_blocks, dst_blocks_list)
            detail = "%s -> %s, %d blocks to %d lists"
            ids = (src_cache.cache_id, dst_cache.cache_id, blocks[0].size, len(blocks[1]))
            with engine.meters.span("CopyKvBlocks", detail, *ids) as span:
                span.nbytes = engine.local.copy_block_lists(src, dst, blocks, engine.deadline(), "CopyKvBlocks")
        return call.status


class _State:
    """State that the calls of one LlmDataDist share."""

    dist: LLMDataDist | None = None

    def __init__(self) -> None:
        self._errors, self._of_main = threading.local(), SimpleNamespace()

    @property
    def errors(self) -> Any:  # noqa: ANN401
        """The attribute ``last`` of the calling thread; an errand's is the main thread's."""
        return self._of_main if for_main_thread() else self._errors


class _StatusCall(AbstractContextManager["_StatusCall"]):
    """Context of one call, which turns exceptions except TypeError into its ``status``. Threads: one."""

    __slots__ = ("_of", "_what", "status", "statuses")

    def __init__(self, of: _State, what: str) -> None:
        self._of = of
        self._what = what
        self.status = LLMStatusCode.LLM_SUCCESS
        self.statuses: list[LLMStatusCode] = []  # of each cluster

    @property
    def engine(self) -> Engine:
        """The engine underneath; NotInitialized if there is none."""
        dist = self._of.dist
        if dist is None:
            raise NotInitialized(f"{self._what}: {_NOT_INITIALIZED}")
        if (engine := life_of(dist).engine) is None:
            raise life_of(dist).missing(self._what, _NOT_INITIALIZED)
        return engine

    def collect(self, pending: Pending, timeout: int) -> None:
        """Link or unlink, and keep each cluster's status; LinkError with every reason if some failed."""
        overall, self.statuses, errors = pending(Deadline(timeout, cancellable=True))
        if overall is LLMStatusCode.LLM_SUCCESS:
            return
        if not self.statuses:
            raise ParamError(f"{self._what}: {errors[0]}")
        each = zip(self.statuses, errors, strict=True)
        failed = [f"clusters[{i}] {code.name}: {error}" for i, (code, error) in enumerate(each) if error is not None]
        text = f"{self._what}: {len(failed)} of {len(self.statuses)} failed: {'; '.join(failed)}"
        raise LinkError(text, status_code=overall)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        # NoneArgument is an LLMException and a TypeError (interface R1); here it is a TypeError.
        # In the main thread an OSError is a signal handler's.
        own = LLMException, MemoryError, *(() if threading.current_thread() is threading.main_thread() else (OSError,))
        if not isinstance(error, own) or isinstance(error, TypeError):
            return False
        other = LLMStatusCode.LLM_OUT_OF_MEMORY if isinstance(error, MemoryError) else LLMStatusCode.LLM_FAILED
        self.status = getattr(error, "status_code", None) or other
        text = " ".join(str(error).splitlines()) or repr(error)
        if logger.isEnabledFor(logging.WARNING):
            log_for_user(logging.WARNING, "%s returns %s: %s", self._what, self.status, text)
        # last_error may live long: without the frames, which refer to caches and links.
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__ or each.__context__
        self._of.errors.last = error
        return True


def _require_device(engine: Engine, cache_id: int, what: str, verb: str) -> None:
    """Check that a source is on kDevice; ids are never reused."""
    placement = engine.caches.registry.lookup(cache_id, what).geometry.placement
    check_rule(placement == Placement.DEVICE, f"src_cache: it is on kHost; only rows on kDevice can be {verb}")
