"""Calls that move caches between two processes (API §6.10 to §6.13). They run on the initiator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_int64, check_rule, check_type, check_uint32
from llm_datadist.errors import ParamError
from llm_datadist.managers import arguments, moves
from llm_datadist.managers.arguments import layer_selection
from llm_datadist.managers.base import EngineUser
from llm_datadist.managers.moves import Move
from llm_datadist.native import parse_blocks
from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.grant import Grant
    from llm_datadist.managers.base import Pending

    Indices = list[int] | tuple[int, ...]

__all__ = ["RemoteCalls"]


class RemoteCalls(EngineUser):
    """pull_cache, pull_blocks, push_cache, push_blocks: each checks in one step and works in another."""

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull a row of a peer's continuous cache into row ``batch_index`` of ``cache``.

        Without RCA a complete pull consumes the key at the producer, unless it is a prefix key or the cache is
        registered; layer ranges are complete when their union is (R5). With RCA nothing is consumed.

        Args:
            cache_key: The peer's row: by key (not with RCA), or by cache id and row. Its cluster id selects the link.
            cache: Destination, a continuous cache of this process.
            batch_index: Row of the destination.
            size: Bytes per tensor; -1: a whole destination row (a longer source row is truncated).
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all. Lengths must be equal.
            tensor_num_per_layer: Tensors per layer; must divide ``num_tensors`` when a range is given (R14).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A rule on one argument is broken, or the two caches do not fit each other.
            CacheNotFound: No such cache here, or no such key, id or row at the peer.
            NotLinked: No link to the key's cluster.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the link stays usable.
            TransferFailed: The source changed during the pull; the addressed rows are undefined.
            PeerLost: The peer died; link again.

        Source: API §6.10.
        """
        self._pull_cache(cache_key, cache, batch_index, size, src_layer_range, dst_layer_range, tensor_num_per_layer)(
            self._deadline()
        )

    def _pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int,
        size: int,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        arguments.check_pull_cache(engine.options.remote_accessible, cache_key, cache, batch_index, size)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_single_id(cache_key)
        name = arguments.remote_name(cache_key, engine.cluster_id)

        def run(deadline: Deadline) -> None:
            move = Move(engine, "pull_cache", "cache", cache.cache_id, name, layers, deadline)
            moves.pull_row(move, batch_index, size)

        return run

    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        grant: Grant | None = None,
    ) -> None:
        """Pull blocks of a peer's cache into blocks of ``dst_cache``.

        With a BlocksCacheKey pair i moves ``src_blocks[i]`` to ``dst_blocks[i]``, in the order given (R26); nothing is
        consumed. With another key the peer's row is cut into pieces of the block size and piece i goes to
        ``dst_blocks[i]``; the last piece may be short, and the key is consumed as in :meth:`pull_cache`.

        Args:
            src_cache_key: The peer's cache. Its cluster id selects the link.
            dst_cache: Destination, a blocks cache of this process.
            src_blocks: Block numbers at the peer; empty unless the key is a BlocksCacheKey. A 1-D integer NumPy array
                does as well (extension).
            dst_blocks: Block numbers here, as many.
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all.
            tensor_num_per_layer: Tensors per layer (R14).
            grant: What the owner of the blocks gave out for them (extension): the pull succeeds only if the blocks
                were not used again meanwhile. With a BlocksCacheKey only.

        Raises:
            TypeError, ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; different block sizes are a ParamError (R17). A grant that has ended is
                TransferFailed.

        Source: API §6.11.
        """
        self._pull_blocks(
            src_cache_key,
            dst_cache,
            src_blocks,
            dst_blocks,
            src_layer_range,
            dst_layer_range,
            tensor_num_per_layer,
            grant,
        )(self._deadline())

    def _pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Indices,
        dst_blocks: Indices,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
        grant: Grant | None,
    ) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        check_type("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        check_type("dst_cache", dst_cache, Cache)
        sources = parse_blocks("src_blocks", src_blocks)
        targets = parse_blocks("dst_blocks", dst_blocks)
        if not dst_cache.is_blocks_cache:
            raise ParamError("dst_cache: not a blocks cache; use pull_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_pull_blocks(src_cache_key, sources, targets)
        if grant is not None:
            arguments.check_grant(grant, src_cache_key, sources)
        name = arguments.remote_name(src_cache_key, engine.cluster_id)

        def run(deadline: Deadline) -> None:
            move = Move(engine, "pull_blocks", "dst_cache", dst_cache.cache_id, name, layers, deadline)
            moves.pull_blocks(move, sources if isinstance(src_cache_key, BlocksCacheKey) else None, targets, grant)

        return run

    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Push a whole row of ``src_cache`` into a row of a peer's continuous cache. Needs RCA.

        A complete push consumes the key that is bound to the row at the peer (R5).

        Args:
            dst_cache_key: The peer's cache by id, and its row.
            src_cache: Source, a continuous cache of this process.
            src_batch_index: Row of the source.
            src_layer_range: Layers of the source; None: all.
            dst_layer_range: Layers of the destination; None: all.
            size: Only -1.
            tensor_num_per_layer: Tensors per layer (R14).

        Raises:
            TypeError, ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; without RCA a ParamError (R16).

        Source: API §6.12.
        """
        self._push_cache(
            dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer
        )(self._deadline())

    def _push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        size: int,
        tensor_num_per_layer: int,
    ) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        arguments.require_rca(engine.options.remote_accessible, "push_cache")
        check_type("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        check_type("src_cache", src_cache, Cache)
        check_uint32("src_batch_index", src_batch_index)
        check_rule(not src_cache.is_blocks_cache, "src_cache: a blocks cache; use push_blocks")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer, empty_ok=False)
        check_rule(check_int64("size", size) == -1, f"size={size}: only -1 (the whole row) can be pushed")
        name = arguments.remote_name(dst_cache_key, None)

        def run(deadline: Deadline) -> None:
            move = Move(engine, "push_cache", "src_cache", src_cache.cache_id, name, layers, deadline)
            moves.push_row(move, src_batch_index)

        return run

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: list[int] | tuple[int, ...] = (),
        dst_blocks: list[int] | tuple[int, ...] = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Push blocks of ``src_cache`` into blocks of a peer's blocks cache. Needs RCA; consumes nothing.

        Pair i moves ``src_blocks[i]`` to ``dst_blocks[i]``, in the order given (R26).

        Args:
            dst_cache_key: The peer's cache by model id; by cache id (batch index 0) as an extension (R31).
            src_cache: Source, a blocks cache of this process.
            src_blocks: Block numbers here.
            dst_blocks: Block numbers at the peer, as many.
            src_layer_range: Layers of the source; None: all.
            dst_layer_range: Layers of the destination; None: all.
            tensor_num_per_layer: Tensors per layer (R14).

        Raises:
            TypeError, ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`push_cache`; different block sizes are a ParamError (R17).

        Source: API §6.13; [seed:PushKvBlocks] for the addressing by cache id.
        """
        self._push_blocks(
            dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )(self._deadline())

    def _push_blocks(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: Indices,
        dst_blocks: Indices,
        src_layer_range: range | None,
        dst_layer_range: range | None,
        tensor_num_per_layer: int,
    ) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        arguments.require_rca(engine.options.remote_accessible, "push_blocks")
        check_type("dst_cache_key", dst_cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        check_type("src_cache", src_cache, Cache)
        sources = parse_blocks("src_blocks", src_blocks)
        targets = parse_blocks("dst_blocks", dst_blocks)
        if not src_cache.is_blocks_cache:
            raise ParamError("src_cache: not a blocks cache; use push_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer, empty_ok=False)
        arguments.check_push_blocks(dst_cache_key, sources, targets)
        name = arguments.remote_name(dst_cache_key, None)

        def run(deadline: Deadline) -> None:
            move = Move(engine, "push_blocks", "src_cache", src_cache.cache_id, name, layers, deadline)
            moves.push_blocks(move, sources, targets)

        return run
