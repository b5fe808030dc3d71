"""The v1, v2 and C++ calls after argument checks, in blocking and awaited form.

A call begins a local use of its cache, checks what needs no peer, and moves the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from functools import wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import msgspec

from llm_datadist._cache import geometry
from llm_datadist._cache.geometry import CacheKind, Geometry, LayerPlan, RowRange
from llm_datadist._checks import check_list, check_rule, check_type, check_uint64
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
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
    from llm_datadist._transfer.resolution import RemoteName
    from llm_datadist.types import CacheDesc

    Config = TransferConfig | TransferWithCacheKeyConfig

Pending = Callable[[Deadline], None]  # work after the argument checks, for the caller's thread or a worker
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
        store = self._of.store
        if isinstance(result, CacheTask):
            result._job.stop()  # noqa: SLF001 (of a handle that this module has made; no attribute for users)
        elif isinstance(result, Grant):
            give_back(result)
        elif isinstance(result, Cache) and store.registry.registered(result.cache_id) is not None:
            store.unregister(result.cache_id, self._of.deadline())
        elif isinstance(result, Cache):
            store.discard(result.cache_id)


P = ParamSpec("P")
User = TypeVar("User", bound=EngineUser)


def blocking(check: Callable[Concatenate[User, P], Pending]) -> Callable[Concatenate[User, P], None]:
    """Make a public call of a method that checks arguments and returns the remaining work."""
    check.__annotations__ = {name: _Annotation(text) for name, text in check.__annotations__.items()}

    @wraps(check)
    def call(self: User, /, *args: P.args, **kwargs: P.kwargs) -> None:
        check(self, *args, **kwargs)(Deadline(self._of.options.sync_kv_timeout_ms))

    _set_result(call, "None")
    return call


def awaited(call: Callable[Concatenate[User, P], None], note: str = "") -> Callable[Concatenate[User, P], Awaited]:
    """Return the asyncio form of a :func:`blocking` call, which checks arguments at once."""
    check: Callable[Concatenate[User, P], Pending] = call.__wrapped__  # type: ignore[attr-defined]  # set by wraps

    @wraps(check)
    def call_async(self: User, /, *args: P.args, **kwargs: P.kwargs) -> Awaited:
        pending = check(self, *args, **kwargs)
        return self._of.workers.run(pending, self._of.options.sync_kv_timeout_ms)

    _set_result(call_async, "Coroutine[Any, Any, None]")
    source = (check.__doc__ or "").rpartition("Source: ")[2].strip().removesuffix(".")
    call_async.__doc__ = (
        f"Await :meth:`{check.__name__}`: the same arguments, errors and effects.\n\n{note}\n\n"
        f"Source: {source}; extension."
    )
    call_async.__name__ += "_async"
    call_async.__qualname__ += "_async"
    return call_async


class _Annotation(str):
    """Text of an annotation, which a signature shows without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _set_result(call: Callable[..., object], result: str) -> None:
    """Make ``help`` and ``inspect`` show the wrapped parameters and this result."""
    call.__annotations__ = call.__annotations__ | {"return": _Annotation(result)}
    call.__signature__ = signature(call).replace(return_annotation=_Annotation(result))  # type: ignore[attr-defined]


def allocate(
    engine: Engine, call: str, cache_desc: CacheDesc, kind: CacheKind, keys: Bindings, *, granted_only: bool = False
) -> Cache:
    shape = Geometry.of(cache_desc, kind)
    arguments.check_key_count(keys, shape)
    with engine.meters.span(call, "%r keys=%s", cache_desc, keys):
        entry = engine.store.allocate(shape, keys, engine.deadline(), granted_only=granted_only)
    return new_handle(engine, entry, cache_desc)


def local_id(engine: Engine, call: str, name: str, cache: Cache) -> int:
    """Return the cache id of a handle; CacheError if it is of another LLMDataDist or ``init``."""
    if cache._granter in (engine.grants, None):  # noqa: SLF001 (of a handle that this module has made)
        return cache.cache_id
    raise _foreign(engine, call, name, cache)


def _foreign(engine: Engine, call: str, name: str, cache: Cache) -> CacheError:
    granter = cache._granter  # noqa: SLF001 (of a handle, as in local_id)
    return CacheError(
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
        engine.store.deallocate(cache_id)


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
            engine.store.discard(entry.cache_id)
        else:
            engine.store.unregister(entry.cache_id, engine.deadline())
        raise


class RowCopy(NamedTuple):
    dst: object
    src: object
    dst_batch_index: object
    src_batch_index: object
    offset: object
    size: object


def copy_cache(engine: Engine, rules: Rules, given: RowCopy, req_id: int | None) -> Pending:
    with arguments.naming_request(req_id):
        dst, src, dst_row, src_row, offset, size = arguments.check(rules, **given._asdict())
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


def copy_blocks(engine: Engine, rules: Rules, cache: object, copy_block_info: dict[int, list[int]]) -> Pending:
    local, pairs = arguments.check(rules, cache=cache, copy_block_info=copy_block_info)
    check_rule(local.is_blocks_cache, "cache: not a blocks cache")
    cache_id = local_id(engine, "copy_blocks", "cache", local)

    def run(deadline: Deadline) -> None:
        with engine.meters.span("copy_blocks", "id=%d %d sources", cache_id, len(copy_block_info)) as span:
            span.nbytes = engine.local.copy_blocks(cache_id, pairs, deadline)

    return run


def swap_blocks(engine: Engine, src: Cache, dst: Cache, pairs: Pairs, names: tuple[str, str]) -> Pending:
    """Move blocks between device and host memory, without a deadline (interface R6)."""
    # Only the addresses are used, but a foreign handle's may be unmapped.
    ids = [local_id(engine, "swap_blocks", name, cache) for name, cache in zip(names, (src, dst), strict=True)]

    def run(_: Deadline) -> None:
        with engine.meters.span("swap_blocks", "src=%d dst=%d %d blocks", *ids, blocks=len(pairs[0])) as span:
            span.nbytes = engine.local.swap_blocks(src, dst, pairs, names)

    return run


class TransferCall(msgspec.Struct, eq=False):
    """Pull or push after argument checks; as text, the local cache in errors. Threads: one."""

    engine: Engine
    what: str  # name of the call
    argument: str  # the caller's, for the local cache
    cache_id: int  # local
    name: RemoteName
    layers: LayerSelection

    def __str__(self) -> str:
        return f"{self.what}: {self.argument}"


def transfer_call(
    engine: Engine, what: str, argument: str, cache: Cache, name: RemoteName, layers: LayerSelection
) -> TransferCall:
    if cache._granter not in (engine.grants, None):  # noqa: SLF001 (as local_id, which would be a call more)
        raise _foreign(engine, what, argument, cache)
    return TransferCall(engine, what, argument, cache.cache_id, name, layers)


def pull_row(
    call: TransferCall, row: int, size: int, deadline: Deadline, *, src_offset: int = 0, dst_offset: int = 0
) -> None:
    """Pull ``size`` bytes per tensor (-1: the rest) into ``row``; offsets are bytes into a row."""
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%s -> %d[%d]", call.name, call.cache_id, row) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        dst = local.geometry
        dst.require_row("batch_index", row)
        arguments.check_size(size, dst, dst_offset)
        layers.check_local("dst_layer_range", dst.num_tensors)

        def plan(pair: CachePair) -> Plan:
            src_range, dst_range = RowRange(pair.row, src_offset), RowRange(row, dst_offset)
            return geometry.plan_row(pair.remote, dst, src_range, dst_range, size=size, layers=layers)

        span.nbytes = engine.initiator.run(TransferOp(call.name, local, plan, deadline, call.what, span))


def pull_blocks(
    call: TransferCall,
    src_blocks: BlockList | None,
    dst_blocks: BlockList,
    grant: Grant | None,
    deadline: Deadline,
    *,
    name: str = "dst_blocks",
) -> None:
    """Pull remote ``src_blocks[i]`` into ``dst_blocks[i]``, in list order (interface R26).

    Without ``src_blocks`` piece i of the remote row goes there. Errors call ``dst_blocks`` by ``name``.
    """
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%s -> %d, %d blocks", call.name, call.cache_id, blocks=len(dst_blocks)) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        dst = local.geometry
        arguments.check_blocks(name, dst_blocks, dst)
        layers.check_local("dst_layer_range", dst.num_tensors)

        def plan(pair: CachePair) -> Plan:
            if src_blocks is None:
                return geometry.plan_pieces(pair.remote, dst, src_row=pair.row, dst_blocks=dst_blocks, layers=layers)
            return pair.block_planner(pair.remote, dst, layers).plan(dst_blocks, src_blocks)

        span.nbytes = engine.initiator.run(TransferOp(call.name, local, plan, deadline, call.what, span, grant=grant))


def push_row(call: TransferCall, row: int, deadline: Deadline) -> None:
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%d[%d] -> %s", call.cache_id, row, call.name) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        src = local.geometry
        src.require_row("src_batch_index", row)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(pair: CachePair) -> Plan:
            src_range, dst_range = RowRange(row), RowRange(pair.row)
            return geometry.plan_row(src, pair.remote, src_range, dst_range, size=src.stride, layers=layers)

        op = TransferOp(call.name, local, plan, deadline, call.what, span, push=True, consumes=True)
        span.nbytes = engine.initiator.run(op)


def push_blocks(call: TransferCall, src_blocks: BlockList, dst_blocks: BlockList, deadline: Deadline) -> None:
    """Push ``src_blocks[i]`` into remote ``dst_blocks[i]``, in list order (interface R26)."""
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%d -> %s, %d blocks", call.cache_id, call.name, blocks=len(src_blocks)) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        src = local.geometry
        arguments.check_blocks("src_blocks", src_blocks, src)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(pair: CachePair) -> Plan:
            return pair.block_planner(src, pair.remote, layers).plan(dst_blocks, src_blocks)

        op = TransferOp(call.name, local, plan, deadline, call.what, span, push=True, consumes=True)
        span.nbytes = engine.initiator.run(op)


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
    store, cache_id = engine.store, local_id(engine, "transfer_cache_async", "src_cache", src_cache)
    with ExitStack() as undo:
        entry = store.registry.begin_use(cache_id, "transfer_cache_async: src_cache")
        release = undo.callback(lambda: store.apply(store.registry.end_use(entry)))
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
