"""What every form of a pull or a push does behind its own arguments: hold the local cache, check what can be known
here, plan, hand over to the initiator. ``cache_manager.py`` and ``cpp_api/transfers.py`` are two such forms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from llm_datadist._cache import geometry
from llm_datadist._cache.geometry import CacheKind, RowRange
from llm_datadist._deadline import Deadline
from llm_datadist._transfer import arguments
from llm_datadist.errors import LLMStatusCode, StateError
from llm_datadist.types import Cache

if TYPE_CHECKING:
    from llm_datadist._cache.geometry import CachePair, LayerSelection
    from llm_datadist._cache.registry import Entry
    from llm_datadist._native import BlockList, Plan
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.initiator import RemoteName
    from llm_datadist.types import CacheDesc
    from llm_datadist.types.grant import Grant, Granter

__all__ = [
    "EngineUser",
    "Move",
    "Pending",
    "new_handle",
    "pull_blocks",
    "pull_row",
    "push_blocks",
    "push_row",
]


class Move(msgspec.Struct, eq=False):
    """One public call, its own arguments checked. Used by one thread.

    Attributes:
        engine: Whose cache it is.
        what: What the caller knows the call as: in errors, logs and statistics.
        argument: What the caller knows the local cache as.
        cache_id: The local cache.
        name: The remote one.
        layers: Which of their layers.
        deadline: Until when.
    """

    engine: Engine
    what: str
    argument: str
    cache_id: int
    name: RemoteName
    layers: LayerSelection
    deadline: Deadline

    def __str__(self) -> str:
        """What an error calls the local cache."""
        return f"{self.what}: {self.argument}"


def pull_row(move: Move, row: int, size: int, *, src_offset: int = 0, dst_offset: int = 0) -> None:
    """Pull the remote row into the local ``row``: ``size`` bytes per tensor, or -1; offsets are bytes into either row.

    Raises:
        CacheNotFound: The local cache is not there; then the rest as :meth:`Initiator.pull`.
    """
    engine, layers = move.engine, move.layers
    with (
        engine.meters.span(move.what, "%s -> %d[%d]", move.name, move.cache_id, row) as span,
        engine.store.using(move.cache_id, move) as local,
    ):
        dst = local.geometry
        dst.require_row("batch_index", row)
        arguments.check_size(size, dst, dst_offset)
        layers.check_local("dst_layer_range", dst.num_tensors)

        def plan(ends: CachePair) -> Plan:
            src_range, dst_range = RowRange(ends.row, src_offset), RowRange(row, dst_offset)
            return geometry.plan_row(ends.remote, dst, src_range, dst_range, size=size, layers=layers)

        span.nbytes = engine.initiator.pull(move.name, local, plan, move.deadline, move.what)


def pull_blocks(
    move: Move,
    src_blocks: BlockList | None,
    dst_blocks: BlockList,
    grant: Grant | None = None,
    *,
    name: str = "dst_blocks",
) -> None:
    """Pull remote ``src_blocks[i]`` into ``dst_blocks[i]``, in the order given (R26). Errors as :func:`pull_row`.

    Without ``src_blocks`` the remote row is cut into pieces of the local block size, piece i for ``dst_blocks[i]``.
    ``name``: what the caller knows ``dst_blocks`` as.
    """
    engine, layers = move.engine, move.layers
    with (
        engine.meters.span(move.what, "%s -> %d, %d blocks", move.name, move.cache_id, len(dst_blocks)) as span,
        engine.store.using(move.cache_id, move) as local,
    ):
        dst = local.geometry
        arguments.check_blocks(name, dst_blocks, dst)
        layers.check_local("dst_layer_range", dst.num_tensors)

        def plan(ends: CachePair) -> Plan:
            if src_blocks is None:
                return geometry.plan_pieces(ends.remote, dst, src_row=ends.row, dst_blocks=dst_blocks, layers=layers)
            return ends.block_planner(ends.remote, dst, layers).plan(dst_blocks, src_blocks)

        span.nbytes = engine.initiator.pull(move.name, local, plan, move.deadline, move.what, grant)


def push_row(move: Move, row: int) -> None:
    """Push the local ``row`` into the remote one. Errors as :func:`pull_row`."""
    engine, layers = move.engine, move.layers
    with (
        engine.meters.span(move.what, "%d[%d] -> %s", move.cache_id, row, move.name) as span,
        engine.store.using(move.cache_id, move) as local,
    ):
        src = local.geometry
        src.require_row("src_batch_index", row)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(ends: CachePair) -> Plan:
            src_range, dst_range = RowRange(row), RowRange(ends.row)
            return geometry.plan_row(src, ends.remote, src_range, dst_range, size=src.stride, layers=layers)

        span.nbytes = engine.initiator.push(move.name, local, plan, move.deadline, move.what)


def push_blocks(move: Move, src_blocks: BlockList, dst_blocks: BlockList) -> None:
    """Push ``src_blocks[i]`` into remote ``dst_blocks[i]``, in the order given (R26). Errors as :func:`pull_row`."""
    engine, layers = move.engine, move.layers
    with (
        engine.meters.span(move.what, "%d -> %s, %d blocks", move.cache_id, move.name, len(src_blocks)) as span,
        engine.store.using(move.cache_id, move) as local,
    ):
        src = local.geometry
        arguments.check_blocks("src_blocks", src_blocks, src)
        layers.check_local("src_layer_range", src.num_tensors)

        def plan(ends: CachePair) -> Plan:
            return ends.block_planner(src, ends.remote, layers).plan(dst_blocks, src_blocks)

        span.nbytes = engine.initiator.push(move.name, local, plan, move.deadline, move.what)


#: A call whose arguments have been checked: what is left to do, within a deadline, in whichever thread.
Pending = Callable[[Deadline], None]


class EngineUser:
    """Holds the engine of one ``init``. Any thread."""

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
    """Return the handle of a cache that was just made."""
    storage = entry.storage
    return Cache(
        entry.cache_id,
        cache_desc,
        storage.tensors.bases.tolist(),
        entry.geometry.kind is CacheKind.BLOCKS,
        memory=storage,
        granter=granter,
    )
