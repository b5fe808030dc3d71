"""CacheManager, the v2 interface to caches (API §6): checks arguments, then hands over to the engine's parts.

Every method checks everything that can be known without the peer first, in the documented order; when a check fails
nothing has happened. ``TypeError``, ``NoneArgument`` and ``ParamError`` are raised before, everything else after.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from llm_datadist._cache.geometry import CacheKind, Geometry, LayerPlan
from llm_datadist._checks import check_int64, check_list, check_rule, check_type, check_uint32, check_uint64
from llm_datadist._native import BlockList, parse_blocks
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import layer_selection
from llm_datadist._transfer.calls import EngineUser, TransferCall, new_handle
from llm_datadist._transfer.layerwise import TENSORS_PER_LAYER, AddressDelivery, KeyDelivery, Source, TransferJob
from llm_datadist._transfer.local_copy import CacheRow
from llm_datadist.errors import LLMStatusCode, NotLinked, ParamError
from llm_datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    MemInfo,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence
    from typing import Any

    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._transfer.calls import Pending
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transfer.layerwise import CacheTask, Delivery
    from llm_datadist.types.grant import Grant

    Indices = list[int] | tuple[int, ...]
    Done = Coroutine[Any, Any, None]
    Config = TransferConfig | TransferWithCacheKeyConfig

__all__ = ["Blocks", "CacheManager", "start_transfer"]


class CacheManager(EngineUser):
    """Caches of one LLMDataDist, from ``LLMDataDist.cache_manager``. Any thread may call any method.

    The calls are documented where they are written: memory (``cache_manager.py``), copies inside the process
    (``cache_manager.py``), transfers (``cache_manager.py``), layer-wise ones (``cache_manager.py``), and for
    asyncio (``cache_manager.py``). After ``finalize`` every method raises ``StateError`` with
    ``LLM_ENGINE_FINALIZED`` (R21), also when the LLMDataDist has been initialised again: that made a new manager.

    Source: API §6.0.
    """

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that exactly one of ``req_id`` and ``prefix_id`` is set (below 2**64 - 1).

        Raises:
            ParamError: Both, or neither.

        Source: API §6.0.
        """
        arguments.check_single_id(check_type("cache_key", cache_key, CacheKey))

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> Cache:
        """Allocate a continuous cache from the pool of its placement. To be deprecated by the interface.

        Key i names batch row i (``shape[0]`` rows). A row without a key gets the placeholder
        ``CacheKey(c, req_id=2**64 - 1)``; trailing ones may be left out (R4). The same key twice: the last row wins
        (R2). The memory goes back to the pool when the cache is deallocated *and* its keys are consumed or removed.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``; each is a separate allocation, rounded up to pages.
            cache_keys: At most ``shape[0]`` keys; their cluster id is ignored here.

        Returns:
            The cache; ``tensor_addrs`` has one address per tensor.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: Impossible shape, more keys than rows, no pool for that placement (R12).
            KeyInUse: A key is bound to another cache (R3).
            OutOfMemory: The pool is exhausted, or peers did not end their writes into memory that was given back
                within ``sync_kv_timeout``; nothing was allocated or bound.

        Source: [seed:deprecated] allocate_cache, API §6.1.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        check_list("cache_keys", cache_keys, CacheKey, tuple_ok=True)
        geometry = Geometry.of(cache_desc, CacheKind.CACHE)
        arguments.check_key_count(cache_keys, geometry.rows)
        with engine.meters.span("allocate_cache", "%r keys=%s", cache_desc, cache_keys):
            entry = engine.store.allocate(
                geometry, [(key, row) for row, key in enumerate(cache_keys)], self._deadline()
            )
        return new_handle(entry, cache_desc, engine.grants)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give an allocated continuous cache back; ``cache.tensor_addrs`` is emptied. To be deprecated.

        Keys that are bound keep the memory, and peers can still pull by key and by id, until they are consumed or
        removed. Unknown, freed and registered caches: no-op, except that the handle is emptied. A handle of another
        LLMDataDist, or from before ``finalize``: no-op, and a warning.

        Raises:
            TypeError: Not a Cache (``NoneArgument`` for None).
            ParamError: A blocks cache: use :meth:`deallocate_blocks_cache`.

        Source: [seed:deprecated] deallocate_cache, API §6.2.
        """
        engine = self._engine
        check_type("cache", cache, Cache)
        check_rule(not cache.is_blocks_cache, "cache: this is a blocks cache; use deallocate_blocks_cache")
        if not arguments.made_here("deallocate_cache", cache, engine):
            return
        with engine.meters.span("deallocate_cache", "id=%d", cache.cache_id):
            cache._empty()  # first: whoever still finds addresses in the handle finds the cache in the registry
            engine.store.deallocate(cache.cache_id)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, of a registered cache too (R25); later pulls by it fail. To be deprecated.

        May free a cache that was deallocated and waited for this key. A pull of the key that is running fails.
        Unknown keys and placeholders: no-op.

        Raises:
            TypeError: Not a CacheKey (``NoneArgument`` for None).

        Source: [seed:deprecated] remove_cache_key, API §6.3.
        """
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        with engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.store.remove_key(cache_key)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a blocks (paged) cache: ``shape[0]`` blocks per tensor. To be deprecated.

        One blocks cache per ``model_id`` and LLMDataDist can carry a key.

        Raises:
            TypeError: Wrong types.
            ParamError: Impossible shape, no pool for that placement (R12).
            KeyInUse: There is a blocks cache of that model.
            OutOfMemory: The pool is exhausted, or peers did not end their writes into memory that was given back
                within ``sync_kv_timeout``; nothing was allocated or bound.

        Source: [seed:deprecated] allocate_blocks_cache, API §6.4.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        keys = arguments.blocks_keys(blocks_cache_key)
        geometry = Geometry.of(cache_desc, CacheKind.BLOCKS)
        with engine.meters.span("allocate_blocks_cache", "%r key=%s", cache_desc, blocks_cache_key):
            entry = engine.store.allocate(geometry, keys, self._deadline())
        return new_handle(entry, cache_desc, engine.grants)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give a blocks cache back with its key, at once (R27); ``cache.tensor_addrs`` is emptied. To be deprecated.

        Pulls of it that are running fail. Unknown, freed and registered caches: no-op, but the handle is emptied. A
        handle of another LLMDataDist: as :meth:`deallocate_cache`.

        Raises:
            TypeError: Not a Cache (``NoneArgument`` for None).
            ParamError: Not a blocks cache.

        Source: [seed:deprecated] deallocate_blocks_cache (its body repeats allocate_cache by a slip), API §6.4.
        """
        engine = self._engine
        check_type("cache", cache, Cache)
        check_rule(cache.is_blocks_cache, "cache: not a blocks cache; use deallocate_cache")
        if not arguments.made_here("deallocate_blocks_cache", cache, engine):
            return
        with engine.meters.span("deallocate_blocks_cache", "id=%d", cache.cache_id):
            cache._empty()  # first, as in deallocate_cache
            engine.store.deallocate(cache.cache_id)

    # --- memory of the user ----------------------------------------------------------------------------------------

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: list[CacheKey] | tuple[CacheKey, ...] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a continuous cache, one address per tensor. The memory is not touched.

        Keys bind as in :meth:`allocate_cache`, but one that is bound already keeps its first binding, and pulling
        consumes none of them. May be called before or after linking.

        Args:
            cache_desc: Geometry of each tensor.
            addrs: ``num_tensors`` non-zero addresses. They may lie inside a pool of this library.
            cache_keys: At most ``shape[0]`` keys.
            remote_accessible: None means True; False refuses peers access to this cache and nothing else (R16). True
                itself may be said before ``link()`` only, as documented; leave it out after that.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list.
            ParamError: Impossible shape, wrong number of addresses, a zero address, more keys than rows;
                ``remote_accessible=True`` after ``link()``.

        Source: API §6.6.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        addresses = arguments.addresses(addrs)
        check_list("cache_keys", cache_keys, CacheKey, tuple_ok=True)
        accessible = arguments.accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, CacheKind.CACHE)
        arguments.check_addresses(addresses, geometry)
        arguments.check_key_count(cache_keys, geometry.rows)
        keys = [(key, row) for row, key in enumerate(cache_keys)]
        with engine.meters.span("register_cache", "%r keys=%s", cache_desc, cache_keys):
            entry = engine.store.register(geometry, addresses, keys, remote_accessible=accessible)
        return new_handle(entry, cache_desc, engine.grants)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a blocks cache. As :meth:`register_cache`, except that the newest key wins.

        Raises:
            TypeError: Wrong types; ``addrs`` must be a list.
            ParamError: Impossible shape, wrong number of addresses, a zero address; ``remote_accessible=True`` after
                ``link()``.

        Source: API §6.6.
        """
        engine = self._engine
        check_type("cache_desc", cache_desc, CacheDesc)
        addresses = arguments.addresses(addrs)
        keys = arguments.blocks_keys(blocks_cache_key)
        accessible = arguments.accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, CacheKind.BLOCKS)
        arguments.check_addresses(addresses, geometry)
        with engine.meters.span("register_blocks_cache", "%r key=%s", cache_desc, blocks_cache_key):
            entry = engine.store.register(geometry, addresses, keys, remote_accessible=accessible)
        return new_handle(entry, cache_desc, engine.grants)

    def unregister_cache(self, cache_id: int) -> None:
        """Drop a registered cache and its keys. Pulls of it that are running fail; unknown ids: no-op.

        When this returns nobody is at the memory any more, and it may be freed: peers that push into it, and calls of
        other threads that use it, are waited for within ``sync_kv_timeout``.

        Raises:
            TypeError: Not an int.
            ParamError: Outside int64.
            DeadlineExceeded: Somebody is still at it; the text says who. The cache stays registered, with its keys.

        Source: API §6.7.
        """
        engine = self._engine
        check_int64("cache_id", cache_id)
        with engine.meters.span("unregister_cache", "id=%d", cache_id):
            engine.store.unregister(cache_id, self._deadline())

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the arguments and do nothing: host memory needs no repair (reserved by the interface).

        Raises:
            ParamError: Not MemInfo or a non-empty list of them, not device memory, zero address or size.
            NotLinked: There is no link.

        Source: API §6.15.
        """
        engine = self._engine
        arguments.check_mem_infos(mem_infos)
        if not engine.links.all():
            raise NotLinked("remap_registered_memory: nothing is linked")

    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes [offset, offset + size) of a batch row to the same place of another, in every tensor.

        The descriptors must match: ``num_tensors`` and ``data_type`` equal and, with ``size == -1`` (to the end of
        the row), the row shapes too (R8). Placement and batch size may differ.

        Args:
            dst: Destination, a continuous cache.
            src: Source, a continuous cache.
            dst_batch_index: Row of the destination.
            src_batch_index: Row of the source.
            offset: Bytes into the row.
            size: Bytes per tensor, or -1.
            req_id: Shown as ``req_id=N`` in every log record and error of this call (R9).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A blocks cache, an index or range outside a row, descriptors that do not match.
            CacheNotFound: A cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed bytes are undefined.

        Source: [seed:copy_cache], API §6.5.
        """
        self._copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)(self._deadline())

    def _copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int,
        src_batch_index: int,
        offset: int,
        size: int,
        req_id: int | None,
    ) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        with arguments.naming_request(req_id):
            arguments.check_copy(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)
        what = f"copy_cache req_id={req_id}" if req_id is not None else "copy_cache"
        detail = "dst=%d[%d] src=%d[%d] offset=%d size=%d req_id=%s"
        args = (dst.cache_id, dst_batch_index, src.cache_id, src_batch_index, offset, size, req_id)

        def run(deadline: Deadline) -> None:
            with arguments.naming_request(req_id), engine.meters.span("copy_cache", detail, *args) as span:
                to, of = CacheRow(dst.cache_id, dst_batch_index), CacheRow(src.cache_id, src_batch_index)
                span.nbytes = engine.local.copy_cache(to, of, offset, size, deadline, what)

        return run

    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one blocks cache: ``{src_block: [dst_block, ...]}``, in the order given (R26).

        Raises:
            TypeError: Wrong types; the values must be lists of int (``NoneArgument`` for None).
            ParamError: Not a blocks cache, an index outside it.
            CacheNotFound: The cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed blocks are undefined.

        Source: [seed:deprecated] copy_blocks, API §6.8.
        """
        self._copy_blocks(cache, copy_block_info)(self._deadline())

    def _copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        check_type("cache", cache, Cache)
        src_blocks, dst_blocks = arguments.copy_pairs(copy_block_info)
        check_rule(cache.is_blocks_cache, "cache: not a blocks cache")

        def run(deadline: Deadline) -> None:
            with engine.meters.span("copy_blocks", "id=%d %d sources", cache.cache_id, len(copy_block_info)) as span:
                span.nbytes = engine.local.copy_blocks(cache.cache_id, src_blocks, dst_blocks, deadline)

        return run

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Move blocks between a device and a host blocks cache; ``{src_block: dst_block}``, in the order given.

        The host side is usually ``Cache.create_cpu_cache``. Block sizes and ``num_tensors`` must be equal, block
        counts may differ. Up to four threads copy; swapping in to a device that needs staging takes four block-sized
        buffers of device memory at first use (R10).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: Not blocks caches, sizes or counts differ, an index outside its cache, not one HOST and one
                DEVICE, a zero address, or a deallocated cache.
            OutOfMemory: No device memory for the staging buffers.

        Source: [seed:swap_blocks], API §6.9.
        """
        self._swap_blocks(src_cache, dst_cache, src_to_dst)(self._deadline())

    def _swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> Pending:
        """Check the arguments; return what is left to do."""
        engine = self._engine
        check_type("src_cache", src_cache, Cache)
        check_type("dst_cache", dst_cache, Cache)
        check_rule(src_cache.is_blocks_cache, "src_cache: not a blocks cache")
        check_rule(dst_cache.is_blocks_cache, "dst_cache: not a blocks cache")
        src_blocks, dst_blocks = arguments.swap_pairs(src_to_dst)
        ids = (src_cache.cache_id, dst_cache.cache_id, len(src_to_dst))

        def run(_: Deadline) -> None:
            with engine.meters.span("swap_blocks", "src=%d dst=%d %d blocks", *ids) as span:
                span.nbytes = engine.local.swap_blocks(src_cache, dst_cache, src_blocks, dst_blocks)

        return run

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
            move = TransferCall(engine, "pull_cache", "cache", cache.cache_id, name, layers, deadline)
            calls.pull_row(move, batch_index, size)

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
            move = TransferCall(engine, "pull_blocks", "dst_cache", dst_cache.cache_id, name, layers, deadline)
            calls.pull_blocks(move, sources if isinstance(src_cache_key, BlocksCacheKey) else None, targets, grant)

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
            move = TransferCall(engine, "push_cache", "src_cache", src_cache.cache_id, name, layers, deadline)
            calls.push_row(move, src_batch_index)

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
            move = TransferCall(engine, "push_blocks", "src_cache", src_cache.cache_id, name, layers, deadline)
            calls.push_blocks(move, sources, targets)

        return run

    def _awaited(self, pending: Pending) -> Done:
        engine = self._engine
        return engine.workers.run(pending, engine.options.sync_kv_timeout_ms)

    def pull_cache_async(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> Done:
        """Await :meth:`pull_cache`: the same arguments, errors and effects.

        Source: API §6.10; extension.
        """
        return self._awaited(
            self._pull_cache(
                cache_key, cache, batch_index, size, src_layer_range, dst_layer_range, tensor_num_per_layer
            )
        )

    def pull_blocks_async(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: Indices = (),
        dst_blocks: Indices = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        grant: Grant | None = None,
    ) -> Done:
        """Await :meth:`pull_blocks`: the same arguments, errors and effects.

        The lists are read at once.

        Source: API §6.11; extension.
        """
        return self._awaited(
            self._pull_blocks(
                src_cache_key,
                dst_cache,
                src_blocks,
                dst_blocks,
                src_layer_range,
                dst_layer_range,
                tensor_num_per_layer,
                grant,
            )
        )

    def push_cache_async(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> Done:
        """Await :meth:`push_cache`: the same arguments, errors and effects.

        Source: API §6.12; extension.
        """
        return self._awaited(
            self._push_cache(
                dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer
            )
        )

    def push_blocks_async(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: Indices = (),
        dst_blocks: Indices = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> Done:
        """Await :meth:`push_blocks`: the same arguments, errors and effects.

        Source: API §6.13; extension.
        """
        return self._awaited(
            self._push_blocks(
                dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
            )
        )

    def copy_cache_async(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> Done:
        """Await :meth:`copy_cache`: the same arguments, errors and effects.

        Source: API §6.5; extension.
        """
        return self._awaited(self._copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def copy_blocks_async(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> Done:
        """Await :meth:`copy_blocks`: the same arguments, errors and effects.

        Source: API §6.8; extension.
        """
        return self._awaited(self._copy_blocks(cache, copy_block_info))

    def swap_blocks_async(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> Done:
        """Await :meth:`swap_blocks`: the same arguments, errors and effects.

        A cancelled swap is finished first: it has no timeout (R6).

        Source: API §6.9; extension.
        """
        return self._awaited(self._swap_blocks(src_cache, dst_cache, src_to_dst))

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[Config] | tuple[Config, ...],
        src_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to peers layer by layer, from a thread of its own, as the model finishes the layers.

        For each layer that some config contains, in ascending order: ``layer_synchronizer.synchronize_layer(layer,
        None)`` is called once and blocks until the layer is ready, then the layer's two tensors (2l and 2l + 1) go to
        each of these configs in the order of the list. Two tensors per layer, always. The first failure stops the whole
        transfer; each config has its own result (R18), see :class:`CacheTask`. ``sync_kv_timeout``
        bounds each layer to each config, not the synchronizer. No key is consumed (R5), and nobody tells the receiver.

        What of each tensor is sent, and where to:

        * no block lists: row ``src_batch_index``, the whole of it; of a blocks cache block 0. To the address, the row
          of the key, or block 0 of the blocks cache.
        * ``dst_block_indices`` only: the whole tensor, all rows of it (``src_batch_index`` does not matter then), cut
          into pieces of ``dst_block_memory_size``; piece i goes to block ``dst_block_indices[i]``, the last piece of a
          tensor may be short, pieces beyond the list are not sent.
        * both lists: pair by pair, in the order given (R26); blocks have the size of the source's, whose rows they are.

        Block b of a raw address lies b block sizes after it.

        The source is kept for as long as the transfer runs: a cache that is deallocated meanwhile gives its memory back
        afterwards, ``unregister_cache`` waits for the end, up to ``sync_kv_timeout``. ``finalize`` ends the transfer
        within a bound; every unfinished config gets ``LLM_ENGINE_FINALIZED``. A synchronizer that never returns keeps
        its thread, and nothing else, for ever.

        Args:
            src_cache: Source, with DEVICE placement (R16) and an even number of tensors.
            layer_synchronizer: Says when a layer is ready; called in the thread of the transfer. False stops: the
                configs of that layer get ``LLM_PARAM_INVALID``, other unfinished ones ``LLM_FAILED``.
            transfer_configs: Without RCA :class:`TransferConfig`: ``dst_addrs`` must lie in caches that the peer has
                allocated or registered, and what is sent must fit; else that config ends with ``LLM_PARAM_INVALID``,
                the error naming the address. They are written by cma, over data lanes or inside the process: with
                ``llm.Transport=shm`` alone nothing reaches them (``LLM_FEATURE_NOT_ENABLED``). With RCA
                :class:`TransferWithCacheKeyConfig`. Read once, now; a ``src_layer_range`` of None becomes all layers in
                the object too.
            src_block_indices: Blocks here; a 1-D integer NumPy array does as well (extension).
            dst_block_indices: Blocks at the peer, as many.
            dst_block_memory_size: Bytes of a destination block. Needed with ``dst_block_indices`` alone; with both
                lists None, 0 or the block size; without lists None or 0.

        Returns:
            The task, to wait for and to ask for results.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A rule on one argument is broken; the text names it.
            CacheNotFound: The source is not there any more.

        Source: API §6.14, BEHAVIOUR §6.
        """
        engine = self._engine
        check_type("src_cache", src_cache, Cache)
        check_rule(
            src_cache.cache_desc.placement is Placement.DEVICE, "src_cache: placement HOST, only DEVICE can be sent"
        )
        blocks = Blocks(src_block_indices, dst_block_indices, dst_block_memory_size)
        return start_transfer(
            engine,
            src_cache.cache_id,
            layer_synchronizer,
            transfer_configs,
            blocks,
            by_key=engine.options.remote_accessible,
        )


class Blocks:
    """The block arguments of a transfer, checked in their documented order.

    Raises:
        TypeError, ParamError: See :meth:`CacheManager.transfer_cache_async`.
    """

    def __init__(self, src_block_indices: object, dst_block_indices: object, dst_block_memory_size: object) -> None:
        self.dst = _indices("dst_block_indices", dst_block_indices)
        self.src = _indices("src_block_indices", src_block_indices)
        self.given = dst_block_memory_size is not None
        self.size = check_uint64("dst_block_memory_size", dst_block_memory_size) if self.given else 0
        if self.src is not None:
            check_rule(
                self.dst is not None,
                "src_block_indices without dst_block_indices: transfer from blocks to cache is not supported",
            )
        if self.src is not None and self.dst is not None:
            arguments.equal_lengths(self.src, self.dst, ("src_block_indices", "dst_block_indices"))
        if self.src is None and self.dst is not None:
            check_rule(self.given, "dst_block_memory_size is None: dst_block_indices without src_block_indices need it")

    def check_size(self) -> None:
        """Without blocks there is no block size."""
        check_rule(
            self.dst is not None or self.size == 0,
            f"dst_block_memory_size={self.size}: only None or 0 without dst_block_indices",
        )

    def cut(self, src: Geometry, row: int) -> LayerPlan:
        """Return what of each tensor goes where."""
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
    engine: Engine,
    cache_id: int,
    layer_synchronizer: object,
    transfer_configs: object,
    blocks: Blocks,
    *,
    by_key: bool,
    timeout_code: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT,
) -> CacheTask:
    """Check what :class:`Blocks` has not, hold the source and start the thread. For both generations.

    Args:
        engine: Of the manager.
        cache_id: The source, whose placement has been checked.
        layer_synchronizer: As given.
        transfer_configs: As given.
        blocks: The block arguments.
        by_key: Configs are :class:`TransferWithCacheKeyConfig`, else :class:`TransferConfig`.
        timeout_code: What a time-out is called by this interface.
    """
    abstract: type = LayerSynchronizer
    synchronizer: LayerSynchronizer = check_type("layer_synchronizer", layer_synchronizer, abstract)
    kind: type[Config] = TransferWithCacheKeyConfig if by_key else TransferConfig
    configs = check_list("transfer_configs", transfer_configs, kind, tuple_ok=True)
    blocks.check_size()
    store = engine.store
    with ExitStack() as undo:
        entry = store.registry.begin_use(cache_id, "transfer_cache_async: src_cache")
        release = undo.callback(lambda: store.apply(store.registry.end_use(entry)))
        layers = _layers(entry.geometry)
        deliveries = [_delivery(engine, entry, config, blocks, layers, i) for i, config in enumerate(configs)]
        for config in configs:
            if config.src_layer_range is None:
                config.src_layer_range = layers
        job = TransferJob(engine.tasks.name(), deliveries, synchronizer, release, timeout_code)
        undo.pop_all()  # it is the job's now
    return engine.tasks.start(job)


def _layers(src: Geometry) -> range:
    check_rule(
        src.num_tensors % TENSORS_PER_LAYER == 0,
        f"src_cache has {src.num_tensors} tensors: an even number is needed, {TENSORS_PER_LAYER} make a layer",
    )
    return range(src.num_tensors // TENSORS_PER_LAYER)


def _delivery(engine: Engine, entry: Entry, config: Config, blocks: Blocks, layers: range, i: int) -> Delivery:
    wanted = layers if config.src_layer_range is None else config.src_layer_range
    check_rule(
        wanted and wanted.stop <= layers.stop,
        f"transfer_configs[{i}].src_layer_range={wanted}: the source has {layers.stop} layers of two tensors",
    )
    cut, timeout = blocks.cut(entry.geometry, config.src_batch_index), engine.options.sync_kv_timeout_ms
    source = Source(entry, cut, engine.initiator, engine.locator, engine.meters, timeout)
    if isinstance(config, TransferWithCacheKeyConfig):
        config.check_lengths()
        name = arguments.remote_name(config.cache_key, None)
        return KeyDelivery(source, name, wanted, config.dst_layer_range)
    addresses: Sequence[int] = tuple(config.dst_addrs)
    needed = TENSORS_PER_LAYER * len(wanted)
    check_rule(
        len(addresses) == needed,
        f"transfer_configs[{i}].dst_addrs has {len(addresses)} addresses: two per layer are needed, so {needed}",
    )
    return AddressDelivery(source, config.dst_cluster_id, addresses, wanted)
