"""CacheManager, the v2 interface to caches (interface §6).

Every method checks everything that can be known without the peer first, in the documented order; when a check fails
nothing has happened. ``TypeError``, ``NoneArgument`` and ``ParamError`` are raised before, everything else after. What
a method does then is in ``_transfer/calls.py``, which the other two interfaces share.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._checks import check_int, check_rule, check_type, check_uint64
from llm_datadist._links.messages import MAX_READERS
from llm_datadist._native import parse_blocks
from llm_datadist._native.signals import public_calls_hold_signals
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import ARGUMENTS, check, layer_selection
from llm_datadist._transfer.calls import EngineUser, LayerwiseArguments, RowCopy, awaited, blocking, transfer_call
from llm_datadist._transfer.grants import GrantClaims, check_token
from llm_datadist.errors import NotLinked, ParamError
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
    from llm_datadist._transfer.arguments import Bindings
    from llm_datadist._transfer.calls import Pending
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist.types.descriptors import BlockNumbers
    from llm_datadist.types.grant import Grant

    Config = TransferConfig | TransferWithCacheKeyConfig

__all__ = ["CacheManager"]


@public_calls_hold_signals(
    allocate_cache="_discard",
    allocate_blocks_cache="_discard",
    register_cache="_unregister",
    register_blocks_cache="_unregister",
    claim_grant="_give_back",
    transfer_cache_async="_stop",
)
class CacheManager(EngineUser):
    """Caches of one LLMDataDist, from ``LLMDataDist.cache_manager``.

    After ``finalize`` every method raises ``StateError`` with ``LLM_ENGINE_FINALIZED`` (interface R21), also when the
    LLMDataDist was initialised again, which makes a new manager. ``<call>_async`` is a call's form for asyncio.

    Where a method says nothing else, an argument of a wrong type is a TypeError (``NoneArgument`` for None), and a
    ``Cache`` of another LLMDataDist, or of an earlier ``init``, a CacheError (``LLM_PARAM_INVALID``).

    A method under ``@blocking`` checks its arguments and returns the work that is left; the decorator does that work,
    within ``sync_kv_timeout``.

    Threads: any.

    Source: interface §6.0.
    """

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> Cache:
        """Allocate a continuous cache from the pool of its placement.

        Key i names batch row i (``shape[0]`` rows). A row without a key gets the placeholder
        ``CacheKey(c, req_id=2**64 - 1)``; trailing ones may be left out (interface R4). The same key twice: the last
        row wins (interface R2). The memory goes back to the pool when the cache is deallocated *and* its keys are
        consumed or removed. The original marks it to be deprecated; this library keeps it.

        Args:
            cache_desc: ``num_tensors`` tensors of ``shape``; each is a separate allocation, rounded up to pages.
            cache_keys: At most ``shape[0]`` keys; their cluster id is ignored here.

        Returns:
            The cache; ``tensor_addrs`` has one address per tensor.

        Raises:
            ParamError: Impossible shape, more keys than rows, no pool for that placement (interface R12).
            KeyInUse: A key is bound to another cache (interface R3).
            OutOfMemory: The pool is exhausted, or peers did not end their writes into memory that was given back
                within ``sync_kv_timeout``; nothing was allocated or bound.

        Source: interface §6.1.
        """
        engine = self._engine
        _, keys = check(ARGUMENTS, cache_desc=cache_desc, cache_keys=cache_keys)
        return calls.allocate(engine, "allocate_cache", cache_desc, CacheKind.CACHE, keys)

    def deallocate_cache(self, cache: Cache) -> None:
        """Give an allocated continuous cache back; ``cache.tensor_addrs`` is emptied.

        Keys that are bound keep the memory, and peers can still pull by key and by id, until they are consumed or
        removed. Unknown, freed and registered caches: no-op, except that the handle is emptied. A handle of another
        LLMDataDist, or from before ``finalize``: no-op, and a warning. The original marks it to be deprecated; this
        library keeps it.

        Raises:
            ParamError: A blocks cache: use :meth:`deallocate_blocks_cache`.

        Source: interface §6.2.
        """
        engine = self._engine
        check(ARGUMENTS, cache=cache)
        check_rule(not cache.is_blocks_cache, "cache: this is a blocks cache; use deallocate_blocks_cache")
        calls.deallocate(engine, "deallocate_cache", cache)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, of a registered cache too (interface R25); later pulls by it fail.

        May free a cache that was deallocated and waited for this key. A pull of the key that is running fails.
        Unknown keys and placeholders: no-op. The original marks it to be deprecated; this library keeps it.

        Source: interface §6.3.
        """
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        with engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.store.remove_key(cache_key)

    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None) -> Cache:
        """Allocate a blocks (paged) cache: ``shape[0]`` blocks per tensor.

        One blocks cache per ``model_id`` and LLMDataDist can carry a key. The original marks it to be deprecated;
        this library keeps it.

        Raises:
            ParamError, OutOfMemory: As :meth:`allocate_cache`.
            KeyInUse: There is a blocks cache of that model.

        Source: interface §6.4.
        """
        engine = self._engine
        _, keys = check(ARGUMENTS, cache_desc=cache_desc, blocks_cache_key=blocks_cache_key)
        return calls.allocate(engine, "allocate_blocks_cache", cache_desc, CacheKind.BLOCKS, keys)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Give a blocks cache back with its key, at once (interface R27); ``cache.tensor_addrs`` is emptied.

        Pulls of it that are running fail. Unknown, freed and registered caches: no-op, but the handle is emptied. A
        handle of another LLMDataDist: as :meth:`deallocate_cache`. The original marks it to be deprecated; this
        library keeps it.

        Raises:
            ParamError: Not a blocks cache.

        Source: interface §6.4, R27.
        """
        engine = self._engine
        check(ARGUMENTS, cache=cache)
        check_rule(cache.is_blocks_cache, "cache: not a blocks cache; use deallocate_cache")
        calls.deallocate(engine, "deallocate_blocks_cache", cache)

    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: list[CacheKey] | tuple[CacheKey, ...] = (),
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a continuous cache, one address per tensor. No byte of it changes.

        The kernel says whether all of it is mapped here, and its first and last page readable; memory of a device is
        not. A page in between that cannot be read is found by the first copy, which it ends, or the process with it.

        Keys bind as in :meth:`allocate_cache`, but one that is bound already keeps its first binding, and pulling
        consumes none of them. May be called before or after linking.

        Args:
            cache_desc: Geometry of each tensor.
            addrs: ``num_tensors`` non-zero addresses. They may lie inside a pool of this library.
            cache_keys: At most ``shape[0]`` keys.
            remote_accessible: None means True; False refuses peers access to this cache and nothing else
                (interface R16). True itself may be said before ``link()`` only, as documented; leave it out after that.

        Raises:
            ParamError: Impossible shape, wrong number of addresses, a zero address, an address without memory for its
                tensor, more keys than rows; ``remote_accessible=True`` after ``link()``.

        Source: interface §6.6.
        """
        self._engine  # noqa: B018 (a finalized manager raises before anything else)
        _, addresses, keys = check(ARGUMENTS, cache_desc=cache_desc, addrs=addrs, cache_keys=cache_keys)
        return self._register("register_cache", cache_desc, CacheKind.CACHE, addresses, keys, remote_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
    ) -> Cache:
        """Enter memory of yours as a blocks cache. As :meth:`register_cache`, except that the newest key wins.

        Raises:
            ParamError: As :meth:`register_cache`.

        Source: interface §6.6.
        """
        self._engine  # noqa: B018 (as above)
        _, addresses, keys = check(ARGUMENTS, cache_desc=cache_desc, addrs=addrs, blocks_cache_key=blocks_cache_key)
        return self._register("register_blocks_cache", cache_desc, CacheKind.BLOCKS, addresses, keys, remote_accessible)

    def _register(
        self,
        call: str,
        cache_desc: CacheDesc,
        kind: CacheKind,
        addresses: list[int],
        keys: Bindings,
        remote_accessible: bool | None,
    ) -> Cache:
        engine = self._engine
        accessible = arguments.check_accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, kind)
        arguments.check_addresses(addresses, geometry)
        arguments.check_key_count(keys, geometry)
        with engine.meters.span(call, "%r keys=%s", cache_desc, keys):
            entry = engine.store.register(geometry, addresses, keys, remote_accessible=accessible)
        return calls.new_handle(engine, entry, cache_desc)

    def _unregister(self, cache: Cache) -> None:
        """Undo a registration whose caller never gets the handle."""
        self._of.store.unregister(cache.cache_id, self._of.deadline())

    def unregister_cache(self, cache_id: int) -> None:
        """Drop a registered cache and its keys. Pulls of it that are running fail; unknown ids: no-op.

        When this returns no peer and no call uses the memory any more, and it may be freed: peers that push into it,
        and calls of other threads that use it, are waited for within ``sync_kv_timeout``.

        Raises:
            ParamError: Outside int64.
            DeadlineExceeded: The memory is still in use; the text says by which peer or call. The cache stays
                registered, with its keys.
            StateError: Called inside of another call of this thread, as by a finalizer: it cannot wait for that.

        Source: interface §6.7.
        """
        engine = self._engine
        check(ARGUMENTS, cache_id=cache_id)
        with engine.meters.span("unregister_cache", "id=%d", cache_id):
            engine.store.unregister(cache_id, engine.deadline())

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the arguments and do nothing: host memory needs no repair (reserved by the interface).

        Raises:
            ParamError: Not MemInfo or a non-empty list of them, not device memory, zero address or size.
            NotLinked: There is no link.

        Source: interface §6.15.
        """
        engine = self._engine
        arguments.check_mem_infos(mem_infos)
        if not engine.links.all():
            raise NotLinked("remap_registered_memory: nothing is linked")

    @blocking
    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> Pending:
        """Copy bytes [offset, offset + size) of a batch row to the same place of another, in every tensor.

        The descriptors must match: ``num_tensors`` and ``data_type`` equal and, with ``size == -1`` (to the end of
        the row), the row shapes too (interface R8). Placement and batch size may differ.

        Args:
            dst: Destination, a continuous cache.
            src: Source, a continuous cache.
            dst_batch_index: Row of the destination.
            src_batch_index: Row of the source.
            offset: Bytes into the row.
            size: Bytes per tensor, or -1.
            req_id: Shown as ``req_id=N`` in every log record and error of this call (interface R9).

        Raises:
            ParamError: A blocks cache, an index or range outside a row, descriptors that do not match.
            CacheNotFound: A cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed bytes are undefined.

        Source: interface §6.5.
        """
        given = RowCopy(dst, src, dst_batch_index, src_batch_index, offset, size)
        return calls.copy_cache(self._engine, ARGUMENTS, given, req_id)

    copy_cache_async = awaited(copy_cache)

    @blocking
    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> Pending:
        """Copy blocks inside one blocks cache: ``{src_block: [dst_block, ...]}``, in the order given (interface R26).

        Raises:
            ParamError: Not a blocks cache, an index outside it.
            CacheNotFound: The cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed blocks are undefined.

        Source: interface §6.8.
        """
        return calls.copy_blocks(self._engine, ARGUMENTS, cache, copy_block_info)

    copy_blocks_async = awaited(copy_blocks)

    @blocking
    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> Pending:
        """Move blocks between a device and a host blocks cache; ``{src_block: dst_block}``, in the order given.

        The host side is usually ``Cache.create_cpu_cache``. Block sizes and ``num_tensors`` must be equal, block
        counts may differ. Up to four threads copy; swapping in to a device that needs staging takes four block-sized
        buffers of device memory at first use (interface R10).

        Raises:
            ParamError: Not blocks caches, sizes or counts differ, an index outside its cache, not one HOST and one
                DEVICE, a zero address, one without memory for its tensor, or a deallocated cache.
            OutOfMemory: No device memory for the staging buffers.

        Source: interface §6.9.
        """
        engine = self._engine
        check(ARGUMENTS, src_cache=src_cache, dst_cache=dst_cache)
        check_rule(src_cache.is_blocks_cache, "src_cache: not a blocks cache")
        check_rule(dst_cache.is_blocks_cache, "dst_cache: not a blocks cache")
        (pairs,) = check(ARGUMENTS, src_to_dst=src_to_dst)
        return calls.swap_blocks(engine, src_cache, dst_cache, pairs, ("src_cache", "dst_cache"))

    swap_blocks_async = awaited(swap_blocks, "A cancelled swap is finished first: it has no timeout (interface R6).")

    @blocking
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
    ) -> Pending:
        """Pull a row of a peer's continuous cache into row ``batch_index`` of ``cache``.

        Without RCA a complete pull consumes the key at the producer, unless it is a prefix key or the cache is
        registered; layer ranges are complete when their union is (interface R5). With RCA nothing is consumed.

        Args:
            cache_key: The peer's row: by key (not with RCA), or by cache id and row. Its cluster id selects the link.
            cache: Destination, a continuous cache of this process.
            batch_index: Row of the destination.
            size: Bytes per tensor; -1: a whole destination row (a longer source row is truncated).
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all. Lengths must be equal.
            tensor_num_per_layer: Tensors per layer; must divide ``num_tensors`` when a range is given (interface R14).

        Raises:
            ParamError: A rule on one argument is broken, or the two caches do not fit each other.
            CacheNotFound: No such cache here, or no such key, id or row at the peer.
            NotLinked: No link to the key's cluster.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the link stays usable.
            TransferFailed: The source changed during the pull; the addressed rows are undefined.
            PeerLost: The peer died; link again.

        Source: interface §6.10.
        """
        engine = self._engine
        if engine.options.remote_accessible:
            check_type("cache_key", cache_key, CacheKeyByIdAndIndex)
        else:
            check_type("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        check(ARGUMENTS, cache=cache, batch_index=batch_index, size=size)
        check_rule(not cache.is_blocks_cache, "cache: a blocks cache; use pull_blocks")
        arguments.byte_count("size", size)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_single_id(cache_key)
        name = arguments.remote_name(cache_key, engine.cluster_id)
        call = transfer_call(engine, "pull_cache", "cache", cache, name, layers)
        return partial(calls.pull_row, call, batch_index, size)

    pull_cache_async = awaited(pull_cache)

    @blocking
    def pull_blocks(
        self,
        src_cache_key: CacheKey | CacheKeyByIdAndIndex | BlocksCacheKey,
        dst_cache: Cache,
        src_blocks: BlockNumbers = (),
        dst_blocks: BlockNumbers = (),
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
        grant: Grant | None = None,
    ) -> Pending:
        """Pull blocks of a peer's cache into blocks of ``dst_cache``.

        With a BlocksCacheKey pair i moves ``src_blocks[i]`` to ``dst_blocks[i]``, in the order given (interface R26);
        nothing is consumed. With another key the peer's row is cut into pieces of the block size and piece i goes to
        ``dst_blocks[i]``; the last piece may be short, and the key is consumed as in :meth:`pull_cache`.

        Args:
            src_cache_key: The peer's cache. Its cluster id selects the link.
            dst_cache: Destination, a blocks cache of this process.
            src_blocks: Block numbers at the peer; empty unless the key is a BlocksCacheKey. A 1-D integer NumPy array
                does as well (extension).
            dst_blocks: Block numbers here, as many.
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`pull_cache`.
            grant: What the owner of the blocks gave out for them (extension): the pull succeeds only if the blocks
                were not used again meanwhile. With a BlocksCacheKey only.

        Raises:
            ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as :meth:`pull_cache`;
                different block sizes are a ParamError (interface R17).
            GrantEnded: The grant has ended; the addressed blocks are undefined.

        Source: interface §6.11.
        """
        engine = self._engine
        check_type("src_cache_key", src_cache_key, (CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey))
        # The rules of ARGUMENTS, called directly: small pulls and pushes of blocks are frequent.
        check_type("dst_cache", dst_cache, Cache)
        sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
        if not dst_cache.is_blocks_cache:
            raise ParamError("dst_cache: not a blocks cache; use pull_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_pull_blocks(src_cache_key, sources, targets)
        if grant is not None:
            arguments.check_grant(grant, src_cache_key, sources)
        name = arguments.remote_name(src_cache_key, engine.cluster_id)
        call = transfer_call(engine, "pull_blocks", "dst_cache", dst_cache, name, layers)
        pairs = isinstance(src_cache_key, BlocksCacheKey)
        return partial(calls.pull_blocks, call, sources if pairs else None, targets, grant)

    pull_blocks_async = awaited(pull_blocks, "The lists are read at once.")

    def claim_grant(self, cluster_id: int, token: bytes, readers: int = 1, wait: bool = True) -> Grant:
        """Get a grant from the owner of the blocks, for :meth:`pull_blocks`. An extension.

        Waits until the owner has given it (``Cache.grant(..., token=token)``), within ``sync_kv_timeout``. From then on
        the grant ends with the link. Call :meth:`Grant.release` once the blocks are not needed any more.

        Args:
            cluster_id: The owner; there must be a link.
            token: The 16 bytes that name the grant.
            readers: How many peers share the grant, this one too: the ranks of one engine. All of them must say the
                same. The grant ends when all have released it.
            wait: If False, the call does not wait for a grant that the owner has not given yet.

        Returns:
            The grant.

        Raises:
            TypeError: Wrong types.
            ParamError: A token of another length, or a number of readers outside [1, 1024].
            CacheMismatch: The grant is shared by another number of readers, or has more blocks than a message holds.
            NotLinked: There is no link to the owner.
            GrantEnded: The grant has ended.
            CacheNotFound: The grant has as many readers as it is for.
            DeadlineExceeded: The owner knows of no such grant, and has not given one in time; if ``wait`` is False,
                not yet: its ``budget_ms`` is 0 then. Retryable.
            PeerLost: The link broke.

        Source: extension.
        """
        engine = self._engine
        check_uint64("cluster_id", cluster_id)
        named, count, _ = check_token(token), check_int("readers", readers), check_type("wait", wait, bool)
        check_rule(1 <= count <= MAX_READERS, f"readers: {count}, it must be in [1, {MAX_READERS}]")
        with engine.meters.call("claim_grant", [cluster_id]):
            return engine.claims.claim(cluster_id, named, count, engine.deadline(), wait=wait)

    _give_back = staticmethod(GrantClaims.give_back)  # undoes a claim whose caller never gets the grant

    @blocking
    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> Pending:
        """Push a whole row of ``src_cache`` into a row of a peer's continuous cache. Needs RCA.

        A complete push consumes the key that is bound to the row at the peer (interface R5).

        Args:
            dst_cache_key: The peer's cache by id, and its row.
            src_cache: Source, a continuous cache of this process.
            src_batch_index: Row of the source.
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`pull_cache`; a range must not be empty.
            size: Only -1.

        Raises:
            ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; without RCA a ParamError (interface R16).

        Source: interface §6.12.
        """
        engine = self._engine
        arguments.require_rca(engine.options.remote_accessible, "push_cache")
        check_type("dst_cache_key", dst_cache_key, CacheKeyByIdAndIndex)
        check(ARGUMENTS, src_cache=src_cache, src_batch_index=src_batch_index)
        check_rule(not src_cache.is_blocks_cache, "src_cache: a blocks cache; use push_blocks")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer, empty_ok=False)
        check(ARGUMENTS, size=size)
        check_rule(size == -1, f"size={size}: only -1 (the whole row) can be pushed")
        name = arguments.remote_name(dst_cache_key, None)
        call = transfer_call(engine, "push_cache", "src_cache", src_cache, name, layers)
        return partial(calls.push_row, call, src_batch_index)

    push_cache_async = awaited(push_cache)

    @blocking
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: BlockNumbers = (),
        dst_blocks: BlockNumbers = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> Pending:
        """Push blocks of ``src_cache`` into blocks of a peer's blocks cache. Needs RCA; consumes nothing.

        Pair i moves ``src_blocks[i]`` to ``dst_blocks[i]``, in the order given (interface R26).

        Args:
            dst_cache_key: The peer's cache by model id; by cache id (batch index 0) as an extension (interface R31).
            src_cache: Source, a blocks cache of this process.
            src_blocks: Block numbers here.
            dst_blocks: Block numbers at the peer, as many.
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`push_cache`.

        Raises:
            ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`push_cache`; different block sizes are a ParamError (interface R17).

        Source: interface §6.13, R31.
        """
        engine = self._engine
        arguments.require_rca(engine.options.remote_accessible, "push_blocks")
        check_type("dst_cache_key", dst_cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        check_type("src_cache", src_cache, Cache)  # the rules of ARGUMENTS, as in pull_blocks
        sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
        if not src_cache.is_blocks_cache:
            raise ParamError("src_cache: not a blocks cache; use push_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer, empty_ok=False)
        arguments.check_push_blocks(dst_cache_key, sources, targets)
        name = arguments.remote_name(dst_cache_key, None)
        call = transfer_call(engine, "push_blocks", "src_cache", src_cache, name, layers)
        return partial(calls.push_blocks, call, sources, targets)

    push_blocks_async = awaited(push_blocks, "The lists are read at once.")

    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[Config] | tuple[Config, ...],
        src_block_indices: BlockNumbers | None = None,
        dst_block_indices: BlockNumbers | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to peers layer by layer, from a thread of its own, as the model finishes the layers.

        For each layer that some config contains, in ascending order: ``layer_synchronizer.synchronize_layer(layer,
        None)`` is called once and blocks until the layer is ready, then the layer's two tensors (2l and 2l + 1) go to
        each of these configs in the order of the list. Two tensors per layer, always. The first failure stops the whole
        transfer; each config has its own result (interface R18), see :class:`CacheTask`. ``sync_kv_timeout``
        bounds each layer to each config, not the synchronizer. No key is consumed (interface R5), and the receiver is
        not told.

        What of each tensor is sent, and where to:

        * no block lists: row ``src_batch_index``, the whole of it; of a blocks cache block 0. To the address, the row
          of the key, or block 0 of the blocks cache.
        * ``dst_block_indices`` only: the whole tensor, all rows of it (``src_batch_index`` does not matter then), cut
          into pieces of ``dst_block_memory_size``; piece i goes to block ``dst_block_indices[i]``, the last piece of a
          tensor may be short, pieces beyond the list are not sent.
        * both lists: pair by pair, in the order given (interface R26); blocks have the size of the source's, whose rows
          they are.

        Block b of a raw address lies b block sizes after it.

        The source is kept for as long as the transfer runs: a cache that is deallocated meanwhile gives its memory back
        afterwards, ``unregister_cache`` waits for the end, up to ``sync_kv_timeout``. ``finalize`` ends the transfer
        within a bound; every unfinished config gets ``LLM_ENGINE_FINALIZED``. A synchronizer that never returns keeps
        its thread, and nothing else, for ever.

        Args:
            src_cache: Source, with DEVICE placement (interface R16) and an even number of tensors.
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
            ParamError: A rule on one argument is broken; the text names it.
            CacheNotFound: The source is not there any more.

        Source: interface §6.14, B6.
        """
        engine = self._engine
        check(ARGUMENTS, src_cache=src_cache)
        check_rule(
            src_cache.cache_desc.placement is Placement.DEVICE, "src_cache: placement HOST, only DEVICE can be sent"
        )
        blocks = src_block_indices, dst_block_indices, dst_block_memory_size
        by_key = engine.options.remote_accessible
        given = LayerwiseArguments(layer_synchronizer, transfer_configs, *blocks, by_key=by_key)
        return calls.start_transfer(engine, src_cache, given)
