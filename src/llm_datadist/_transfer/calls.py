"""Work of the v1, v2 and C++ calls, in blocking and awaited form, and the argument checks that these calls share."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from llm_datadist._cache import geometry
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerPlan, RowRange
from llm_datadist._checks import check_list, check_rule, check_type, check_uint64, type_error
from llm_datadist._deadline import Deadline
from llm_datadist._log import calls_logger as logger
from llm_datadist._native import BlockList, parse_blocks
from llm_datadist._native.public_call import OfProcess
from llm_datadist._transfer import arguments
from llm_datadist._transfer.grants import give_back
from llm_datadist._transfer.initiator import TransferOp
from llm_datadist._transfer.layerwise import TENSORS_PER_LAYER, AddressDelivery, CacheTask, KeyDelivery, TransferJob
from llm_datadist._transfer.local_copy import CacheRow
from llm_datadist.errors import CacheError, LLMStatusCode, ParamError, StateError
from llm_datadist.types import Cache, CacheKey, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from llm_datadist._cache.geometry import CachePair, LayerSelection
    from llm_datadist._cache.registry import Entry
    from llm_datadist._native import Plan
    from llm_datadist._transfer.arguments import Bindings, Rules
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import Delivery
    from llm_datadist._transfer.local_copy import Pairs
    from llm_datadist.types import CacheDesc

    Config = TransferConfig | TransferWithCacheKeyConfig

Work = Callable[[Deadline], None]  # of a call after the argument checks, for the caller's thread or a worker
Awaited = Coroutine[Any, Any, None]


class EngineUser(OfProcess):
    """Base of both managers: the engine of one ``init``, refused after ``finalize`` (interface R21)."""

    def __init__(self, engine: Engine) -> None:
        self._of = engine

    @property
    def _engine(self) -> Engine:
        if not self._of.alive:
            raise StateError(
                f"this {type(self).__name__} belongs to a finalized LLMDataDist; take a new one after init",
                status_code=LLMStatusCode.LLM_ENGINE_FINALIZED,
            )
        return self._of

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that exactly one of ``req_id`` and ``prefix_id`` is set (below 2**64 - 1).

        Raises:
            TypeError: Not a CacheKey (``NoneArgument`` for None).
            ParamError: Both, or neither.

        Source: interface §6.0, §8.
        """
        arguments.check_single_id(check_type("cache_key", cache_key, CacheKey))

    def _cut_off(self, result: object) -> None:
        """Undo a call whose caller does not get its result. The source of a transfer may be used again then."""
        caches = self._of.caches
        if isinstance(result, CacheTask):
            result._job.stop()  # noqa: SLF001 (of a handle that this module has made; no attribute for users)
        elif isinstance(result, Grant):
            give_back(result)
        elif isinstance(result, Cache) and caches.registry.registered(result.cache_id) is not None:
            caches.unregister(result.cache_id, self._of.deadline())
        elif isinstance(result, Cache):
            caches.discard(result.cache_id)

    def _perform(self, work: Work) -> None:
        """Do the work of a call after its argument checks. Its awaited form does it in a worker."""
        work(Deadline(self._of.options.sync_kv_timeout_ms))


P = ParamSpec("P")
User = TypeVar("User", bound=EngineUser)


class _Awaiting(EngineUser):
    """A manager whose calls check their arguments and leave the work."""

    work: Work

    def _perform(self, work: Work) -> None:
        self.work = work


def awaited(call: Callable[Concatenate[User, P], None], note: str = "") -> Callable[Concatenate[User, P], Awaited]:
    """Return the asyncio form of a call that ends with ``_perform``; it checks arguments at once."""

    @wraps(call)
    def call_async(self: User, /, *args: P.args, **kwargs: P.kwargs) -> Awaited:
        checked = _Awaiting(self._of)
        call(checked, *args, **kwargs)  # type: ignore[arg-type]  # a call uses what every EngineUser has
        return self._of.workers.run(checked.work, self._of.options.sync_kv_timeout_ms)

    result = "Coroutine[Any, Any, None]"
    call_async.__annotations__ = call.__annotations__ | {"return": result}
    call_async.__signature__ = signature(call).replace(return_annotation=result)  # type: ignore[attr-defined]
    source = (call.__doc__ or "").rpartition("Source: ")[2].strip().removesuffix(".")
    call_async.__doc__ = (
        f"Await :meth:`{call.__name__}`: the same arguments, errors and effects.\n\n{note}\n\n"
        f"Source: {source}; extension."
    )
    call_async.__name__ += "_async"
    call_async.__qualname__ += "_async"
    return call_async


def allocate(
    engine: Engine, call: str, cache_desc: CacheDesc, kind: CacheKind, keys: Bindings, *, granted_only: bool = False
) -> Cache:
    shape = Geometry.of(cache_desc, kind)
    arguments.check_key_count(keys, shape)
    with engine.meters.span(call, "%r keys=%s", cache_desc, keys):
        entry = engine.caches.allocate(shape, keys, engine.deadline(), granted_only=granted_only)
    return new_handle(engine, entry, cache_desc)


def blocks_cache_id(engine: Engine, call: str, name: str, cache: object, other: str) -> int:
    """Return the cache id of a handle as :func:`local_id`; ParamError, with the ``other`` call, if it has rows."""
    if not isinstance(cache, Cache):
        raise type_error(name, cache, Cache)
    if not cache._is_blocks_cache:  # noqa: SLF001 (as in local_id)
        raise ParamError(f"{name}: not a blocks cache; use {other}")
    return local_id(engine, call, name, cache)


def local_id(engine: Engine, call: str, name: str, cache: Cache) -> int:
    """Return the cache id of a handle; CacheError if it is of another LLMDataDist or ``init``."""
    # The fields of a handle that this module has made: small transfers are frequent, and a property would be a call.
    granter, cache_id = cache._granter, cache._cache_id  # noqa: SLF001
    if granter is None or granter is engine.grants:
        return cache_id
    raise CacheError(
        f"{call}: {name}={cache!r}: a handle of {granter}, not of {engine.grants}; give a handle that this LLMDataDist "
        "has made since init",
        status_code=LLMStatusCode.LLM_PARAM_INVALID,
    )


def deallocate(engine: Engine, call: str, cache: Cache) -> None:
    """Deallocate the cache and empty its handle; only warn about foreign handles."""
    try:
        cache_id = local_id(engine, call, "cache", cache)
    except CacheError as error:
        logger.warning("%s; nothing is given back", error)
        return
    with engine.meters.span(call, "id=%d", cache_id):
        # First: as long as the handle has addresses, the registry has the cache.
        cache._empty()  # noqa: SLF001 (of a handle that this module has made)
        engine.caches.deallocate(cache_id)


def new_handle(engine: Engine, entry: Entry, cache_desc: CacheDesc) -> Cache:
    """Return the handle of a new cache; undo the cache if there is no memory for it."""
    storage = entry.storage
    try:
        return Cache(
            entry.cache_id,
            cache_desc,
            storage.tensors.bases.tolist(),
            entry.geometry.kind is CacheKind.BLOCKS,
            memory=storage,
            granter=engine.grants,
        )
    except BaseException:
        if entry.owned:
            engine.caches.discard(entry.cache_id)
        else:
            engine.caches.unregister(entry.cache_id, engine.deadline())
        raise


def copy_cache(engine: Engine, rules: Rules, req_id: int | None, **given: object) -> Work:
    """``given``: the other arguments of :meth:`CacheManager.copy_cache`, in order."""
    with arguments.naming_request(req_id):
        dst, src, dst_row, src_row, offset, size = arguments.check(rules, **given)
        check_rule(not src.is_blocks_cache, "src: a blocks cache; use copy_blocks")
        check_rule(not dst.is_blocks_cache, "dst: a blocks cache; use copy_blocks")
        arguments.byte_count("size", size)
        arguments.check(rules, req_id=req_id)
        to = CacheRow(local_id(engine, "copy_cache", "dst", dst), dst_row)
        at = CacheRow(local_id(engine, "copy_cache", "src", src), src_row)
    what = f"copy_cache req_id={req_id}" if req_id is not None else "copy_cache"
    detail = "dst=%d[%d] src=%d[%d] offset=%d size=%d req_id=%s"
    args = (*to, *at, offset, size, req_id)

    def run(deadline: Deadline) -> None:
        with arguments.naming_request(req_id), engine.meters.span("copy_cache", detail, *args) as span:
            span.nbytes = engine.local.copy_cache(to, at, offset, size, deadline, what)

    return run


def copy_blocks(engine: Engine, rules: Rules, cache: object, copy_block_info: dict[Any, Any]) -> Work:
    local, pairs = arguments.check(rules, cache=cache, copy_block_info=copy_block_info)
    check_rule(local.is_blocks_cache, "cache: not a blocks cache")
    cache_id = local_id(engine, "copy_blocks", "cache", local)

    def run(deadline: Deadline) -> None:
        with engine.meters.span("copy_blocks", "id=%d %d sources", cache_id, len(copy_block_info)) as span:
            span.nbytes = engine.local.copy_blocks(cache_id, pairs, deadline)

    return run


def swap_blocks(engine: Engine, src: Cache, dst: Cache, pairs: Pairs, names: tuple[str, str]) -> Work:
    """Move blocks between device and host memory, without a deadline (interface R6)."""
    # Only the addresses are used, but a foreign handle's may be unmapped.
    ids = [local_id(engine, "swap_blocks", name, cache) for name, cache in zip(names, (src, dst), strict=True)]

    def run(_: Deadline) -> None:
        with engine.meters.span("swap_blocks", "src=%d dst=%d %d blocks", *ids, blocks=len(pairs[0])) as span:
            span.nbytes = engine.local.swap_blocks(src, dst, pairs, names)

    return run


class CacheTransfer(TransferOp):
    """Pull or push of a public call, between a local and a remote cache; as text, the local one in errors.

    :meth:`run` begins a local use, checks what needs no peer, and moves the bytes.
    """

    engine: Engine
    argument: str  # the caller's, for the local cache
    cache_id: int  # local
    layers: LayerSelection

    def __str__(self) -> str:
        return f"{self.what}: {self.argument}"

    def check_layers(self, local: Geometry) -> None:
        self.layers.check_local("src_layer_range" if self.push else "dst_layer_range", local.num_tensors)


class RowTransfer(CacheTransfer):
    """Pull of ``size`` bytes per tensor (-1: the rest) into ``row``, or push of the whole row; offsets are in bytes."""

    row: int
    size: int = -1
    src_offset: int = 0
    dst_offset: int = 0

    def run(self, deadline: Deadline) -> None:
        engine, self.deadline = self.engine, deadline
        args = (self.cache_id, self.row, self.name) if self.push else (self.name, self.cache_id, self.row)
        with (
            engine.meters.span(self.what, "%d[%d] -> %s" if self.push else "%s -> %d[%d]", *args) as self.span,
            engine.caches.using(self.cache_id, self) as self.local,
        ):
            local = self.local.geometry
            local.require_row("src_batch_index" if self.push else "batch_index", self.row)
            arguments.check_size(self.size, local, self.dst_offset)
            self.check_layers(local)
            self.span.nbytes = engine.initiator.run(self)

    def plan(self, pair: CachePair) -> Plan:
        here = self.local.geometry
        ours, theirs = RowRange(self.row, self.dst_offset), RowRange(pair.row, self.src_offset)
        if self.push:
            return geometry.plan_row(here, pair.remote, ours, theirs, size=here.stride, layers=self.layers)
        return geometry.plan_row(pair.remote, here, theirs, ours, size=self.size, layers=self.layers)


class BlocksTransfer(CacheTransfer):
    """Pull of remote blocks ``theirs[i]`` into ``ours[i]``, or push the other way, in list order (interface R26).

    Without ``theirs`` piece i of the remote row goes into ``ours[i]``. Errors call ``ours`` by ``blocks_name``.
    """

    ours: BlockList
    theirs: BlockList | None
    blocks_name: str

    def run(self, deadline: Deadline) -> None:
        engine, ours, name, self.deadline = self.engine, self.ours, self.name, deadline
        src, dst = (self.cache_id, name) if self.push else (name, self.cache_id)
        with (
            engine.meters.span(self.what, "%s -> %s, %d blocks", src, dst, blocks=len(ours)) as self.span,
            engine.caches.using(self.cache_id, self) as self.local,
        ):
            local, layers = self.local.geometry, self.layers
            if ours.largest >= local.rows:
                raise arguments.outside(self.blocks_name, ours, local)
            if layers.src is not None or layers.dst is not None:
                self.check_layers(local)
            self.span.nbytes = engine.initiator.run(self)

    def plan(self, pair: CachePair) -> Plan:
        here, there, theirs, layers = self.local.geometry, pair.remote, self.theirs, self.layers
        if theirs is None:
            return geometry.plan_pieces(there, here, src_row=pair.row, dst_blocks=self.ours, layers=layers)
        if self.push:
            return pair.block_planner(here, there, layers).plan(theirs, self.ours)
        return pair.block_planner(there, here, layers).plan(self.ours, theirs)


class LayerwiseArguments:
    """Arguments of transfer_cache_async except the source, checked in their documented order."""

    def __init__(
        self,
        layer_synchronizer: object,
        transfer_configs: object,
        src_block_indices: object,
        dst_block_indices: object,
        dst_block_memory_size: object,
        *,
        by_key: bool,
    ) -> None:
        self.dst = _indices("dst_block_indices", dst_block_indices)
        self.src = _indices("src_block_indices", src_block_indices)
        given = dst_block_memory_size is not None
        self.size = check_uint64("dst_block_memory_size", dst_block_memory_size) if given else 0
        if self.src is not None:
            if self.dst is None:
                text = "src_block_indices without dst_block_indices: transfer from blocks to cache is not supported"
                raise ParamError(text)
            arguments.equal_lengths(self.src, self.dst, ("src_block_indices", "dst_block_indices"))
        check_rule(
            given or self.dst is None or self.src is not None,
            "dst_block_memory_size is None: dst_block_indices without src_block_indices need it",
        )
        abstract: type = LayerSynchronizer
        self.synchronizer: LayerSynchronizer = check_type("layer_synchronizer", layer_synchronizer, abstract)
        kind: type[Config] = TransferWithCacheKeyConfig if by_key else TransferConfig
        self.configs = check_list("transfer_configs", transfer_configs, kind)
        check_rule(self.configs, "transfer_configs is empty: at least one destination is needed")
        check_rule(
            self.dst is not None or self.size == 0,
            f"dst_block_memory_size={self.size}: only None or 0 without dst_block_indices",
        )

    def cut(self, src: Geometry, row: int) -> LayerPlan:
        if self.dst is None:
            return LayerPlan.of_row(src, row)
        if self.src is None:
            return LayerPlan.of_pieces(src, self.dst, self.size)
        arguments.check_blocks("src_block_indices", self.src, src)
        check_rule(
            self.size in (0, src.stride),
            f"dst_block_memory_size={self.size}: with src_block_indices only None, 0 or the block size {src.stride}",
        )
        check_rule(row == 0, f"src_batch_index={row}: only 0 with src_block_indices")
        return LayerPlan.of_blocks(src, self.src, self.dst)


def _indices(name: str, values: object) -> BlockList | None:
    if values is None:
        return None
    parsed = parse_blocks(name, values)
    check_rule(len(parsed), f"{name} is empty: at least one block is needed; None sends a row")
    return parsed


def start_transfer(
    engine: Engine, src_cache: Cache, given: LayerwiseArguments, timeout_code: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT
) -> CacheTask:
    """Begin a local use of the source, whose placement is checked, and start the job."""
    caches, cache_id = engine.caches, local_id(engine, "transfer_cache_async", "src_cache", src_cache)
    with ExitStack() as undo:
        entry = caches.registry.begin_use(cache_id, "transfer_cache_async: src_cache")
        release = undo.callback(lambda: caches.apply(caches.registry.end_use(entry)))
        tensors = entry.geometry.num_tensors
        check_rule(
            tensors % TENSORS_PER_LAYER == 0,
            f"src_cache has {tensors} tensors: an even number is needed, {TENSORS_PER_LAYER} make a layer",
        )
        layers = range(tensors // TENSORS_PER_LAYER)
        deliveries = [_delivery(engine, entry, given, layers, i) for i in range(len(given.configs))]
        for config in given.configs:
            if config.src_layer_range is None:
                config.src_layer_range = layers
        call = engine.meters.call("transfer_cache_async", [each.cluster_id for each in deliveries])
        job = TransferJob(engine.tasks.name(), deliveries, given.synchronizer, release, timeout_code, call)
        undo.pop_all()  # the job releases the source from now on
    return engine.tasks.start(job)


def _delivery(engine: Engine, entry: Entry, given: LayerwiseArguments, layers: range, i: int) -> Delivery:
    config = given.configs[i]
    wanted = layers if config.src_layer_range is None else config.src_layer_range
    check_rule(
        wanted and wanted.stop <= layers.stop,
        f"transfer_configs[{i}].src_layer_range={wanted}: the source has {layers.stop} layers of two tensors",
    )
    cut, timeout_ms = given.cut(entry.geometry, config.src_batch_index), engine.options.sync_kv_timeout_ms
    common = engine.initiator, engine.meters, timeout_ms, entry, cut, config.dst_cluster_id, wanted
    if isinstance(config, TransferWithCacheKeyConfig):
        config.check_lengths()
        return KeyDelivery(*common, arguments.remote_name(config.cache_key, None), config.dst_layer_range)
    addresses = tuple(config.dst_addrs)
    needed = TENSORS_PER_LAYER * len(wanted)
    check_rule(
        len(addresses) == needed,
        f"transfer_configs[{i}].dst_addrs has {len(addresses)} addresses: two per layer are needed, so {needed}",
    )
    return AddressDelivery(*common, addresses)
