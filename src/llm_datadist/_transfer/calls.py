"""Pulls and pushes behind the arguments of their public forms: hold the local cache, check what is known here, plan.

The v2, v1 and C++-shaped calls are such forms. Runs in the caller's thread; what fails before the initiator is called
has moved nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from llm_datadist._cache import geometry
from llm_datadist._cache.geometry import CacheKind, RowRange
from llm_datadist._deadline import Deadline
from llm_datadist._transfer import arguments
from llm_datadist._transfer.initiator import TransferOp
from llm_datadist.errors import LLMStatusCode, StateError
from llm_datadist.types import Cache

if TYPE_CHECKING:
    from llm_datadist._cache.geometry import CachePair, LayerSelection
    from llm_datadist._cache.registry import Entry
    from llm_datadist._native import BlockList, Plan
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.resolution import RemoteName
    from llm_datadist.types import CacheDesc
    from llm_datadist.types.grant import Grant, Granter

__all__ = [
    "EngineUser",
    "Pending",
    "TransferCall",
    "new_handle",
    "pull_blocks",
    "pull_row",
    "push_blocks",
    "push_row",
]


class TransferCall(msgspec.Struct, eq=False):
    """One public pull or push, its own arguments checked. Used by one thread.

    Attributes:
        engine: Owns the local cache.
        what: Name of the call in errors, logs and statistics.
        argument: Name of the argument that is the local cache.
        cache_id: The local cache.
        name: The remote cache.
        layers: Layers of both.
        deadline: Of the whole call.
    """

    engine: Engine
    what: str
    argument: str
    cache_id: int
    name: RemoteName
    layers: LayerSelection
    deadline: Deadline

    def __str__(self) -> str:
        """Return what an error calls the local cache."""
        return f"{self.what}: {self.argument}"


def pull_row(call: TransferCall, row: int, size: int, *, src_offset: int = 0, dst_offset: int = 0) -> None:
    """Pull ``size`` bytes per tensor, or -1, of the remote row into the local ``row``; offsets are bytes into a row.

    Raises:
        CacheNotFound: No such local cache; also as :meth:`Initiator.run`.
    """
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

        span.nbytes = engine.initiator.run(TransferOp(call.name, local, plan, call.deadline, call.what))


def pull_blocks(
    call: TransferCall,
    src_blocks: BlockList | None,
    dst_blocks: BlockList,
    grant: Grant | None = None,
    *,
    name: str = "dst_blocks",
) -> None:
    """Pull remote ``src_blocks[i]`` into ``dst_blocks[i]``, in the order given (R26). Errors as :func:`pull_row`.

    Without ``src_blocks`` the remote row is cut into pieces of the local block size, piece i for ``dst_blocks[i]``.
    ``name`` is the caller's name of ``dst_blocks``.
    """
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%s -> %d, %d blocks", call.name, call.cache_id, len(dst_blocks)) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        dst = local.geometry
        arguments.check_blocks(name, dst_blocks, dst)
        layers.check_local("dst_layer_range", dst.num_tensors)

        def plan(pair: CachePair) -> Plan:
            if src_blocks is None:
                return geometry.plan_pieces(pair.remote, dst, src_row=pair.row, dst_blocks=dst_blocks, layers=layers)
            return pair.block_planner(pair.remote, dst, layers).plan(dst_blocks, src_blocks)

        op = TransferOp(call.name, local, plan, call.deadline, call.what, grant=grant)
        span.nbytes = engine.initiator.run(op)


def push_row(call: TransferCall, row: int) -> None:
    """Push the local ``row`` into the remote one. Errors as :func:`pull_row`."""
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%d[%d] -> %s", call.cache_id, row, call.name) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        src = local.geometry
        src.require_row("src_batch_index", row)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(pair: CachePair) -> Plan:
            return geometry.plan_row(
                src, pair.remote, RowRange(row), RowRange(pair.row), size=src.stride, layers=layers
            )

        op = TransferOp(call.name, local, plan, call.deadline, call.what, push=True, consumes=True)
        span.nbytes = engine.initiator.run(op)


def push_blocks(call: TransferCall, src_blocks: BlockList, dst_blocks: BlockList) -> None:
    """Push ``src_blocks[i]`` into remote ``dst_blocks[i]``, in the order given (R26). Errors as :func:`pull_row`."""
    engine, layers = call.engine, call.layers
    with (
        engine.meters.span(call.what, "%d -> %s, %d blocks", call.cache_id, call.name, len(src_blocks)) as span,
        engine.store.using(call.cache_id, call) as local,
    ):
        src = local.geometry
        arguments.check_blocks("src_blocks", src_blocks, src)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(pair: CachePair) -> Plan:
            return pair.block_planner(src, pair.remote, layers).plan(dst_blocks, src_blocks)

        op = TransferOp(call.name, local, plan, call.deadline, call.what, push=True, consumes=True)
        span.nbytes = engine.initiator.run(op)


#: The rest of a call whose arguments have been checked. Threads: any.
Pending = Callable[[Deadline], None]


class EngineUser:
    """Base of managers: holds the engine of one ``init``. Threads: any."""

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

    def _deadline(self) -> Deadline:
        return Deadline(self._of.options.sync_kv_timeout_ms)


def new_handle(entry: Entry, cache_desc: CacheDesc, granter: Granter) -> Cache:
    """Return the public handle of a new cache."""
    storage = entry.storage
    return Cache(
        entry.cache_id,
        cache_desc,
        storage.tensors.bases.tolist(),
        entry.geometry.kind is CacheKind.BLOCKS,
        memory=storage,
        granter=granter,
    )
