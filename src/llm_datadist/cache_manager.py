"""CacheManager, the v2 interface to caches (interface §6); ``_transfer/calls.py`` does the work.

A method checks its arguments, then performs the work; its awaited form has the work done in a worker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist._cache.geometry import CacheKind, Geometry
from llm_datadist._checks import check_int, check_list, check_rule, check_type, check_uint64
from llm_datadist._links.messages import MAX_READERS
from llm_datadist._native import parse_blocks
from llm_datadist._native.plan import NONCE_BYTES
from llm_datadist._native.public_call import public_calls
from llm_datadist._transfer import arguments, calls
from llm_datadist._transfer.arguments import ARGUMENTS, check, layer_selection
from llm_datadist._transfer.calls import (
    BlocksTransfer,
    EngineUser,
    LayerwiseArguments,
    RowTransfer,
    awaited,
)
from llm_datadist._transfer.checksum import digest_blocks
from llm_datadist._transfer.grants import check_token, claim_grant, release_grant
from llm_datadist._transfer.tensors import describe
from llm_datadist.errors import NotLinked
from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex, Placement

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist._transfer.calls import Config
    from llm_datadist._transfer.layerwise import CacheTask
    from llm_datadist._transfer.tensors import GivenTensors
    from llm_datadist.types import CacheDesc, LayerSynchronizer, MemInfo
    from llm_datadist.types.descriptors import Block, BlockNumbers, Several, To
    from llm_datadist.types.grant import Grant


@public_calls(
    here=("copy_cache", "copy_blocks", "swap_blocks", "pull_cache", "pull_blocks", "push_cache", "push_blocks")
)
class CacheManager(EngineUser):
    """Caches of one LLMDataDist; ``LLMDataDist.cache_manager`` returns it.

    Errors of every method, besides those listed: TypeError for a wrong type (``NoneArgument`` for None); ParamError for
    an integer outside its width, an index, range or block outside its cache, and a blocks cache in place of a
    continuous one or the reverse; CacheNotFound for a freed cache; CacheError (``LLM_PARAM_INVALID``) for a ``Cache``
    of another LLMDataDist or ``init``; after ``finalize`` StateError with ``LLM_ENGINE_FINALIZED`` (interface R21).
    Argument errors precede side effects; a ``ParamError`` about the peer's cache follows one request.
    ``<call>_async`` is the asyncio form of a call. Threads: any.

    Source: interface §6.0.
    """

    def allocate_cache(self, cache_desc: CacheDesc, cache_keys: list[CacheKey] | tuple[CacheKey, ...] = ()) -> Cache:
        """Allocate a continuous cache from the pool of its placement.

        Key i names batch row i; of equal keys the last one binds (interface R2). The placeholder ``CacheKey(c,
        req_id=2**64 - 1)`` binds nothing (interface R4). The memory returns to the pool once the cache is deallocated
        *and* its keys are consumed or removed. Marked to be deprecated; this library keeps it.

        Args:
            cache_desc: Each of its tensors becomes an allocation of whole pages.
            cache_keys: At most ``shape[0]`` keys; their cluster id is ignored.

        Raises:
            ParamError: Impossible shape, too many keys, no pool for that placement (interface R12).
            KeyInUse: Another cache has the key (interface R3).
            OutOfMemory: The pool is exhausted, or peers still write freed memory after ``sync_kv_timeout``. Nothing was
                allocated or bound.

        Source: interface §6.1.
        """
        engine = self._engine
        _, keys = check(ARGUMENTS, cache_desc=cache_desc, cache_keys=cache_keys)
        return calls.allocate(engine, "allocate_cache", cache_desc, CacheKind.CACHE, keys)

    def deallocate_cache(self, cache: Cache) -> None:
        """Deallocate a continuous cache; empties ``cache.tensor_addrs``.

        Bound keys keep the memory: peers can pull by key and by id until all are consumed or removed. Unknown, freed
        and registered caches stay as they are. A foreign handle only logs a warning. Marked to be deprecated; this
        library keeps it.

        Source: interface §6.2.
        """
        engine = self._engine
        check(ARGUMENTS, cache=cache)
        check_rule(not cache.is_blocks_cache, "cache: this is a blocks cache; use deallocate_blocks_cache")
        calls.deallocate(engine, "deallocate_cache", cache)

    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key; running and later pulls by it fail.

        Registered caches lose their keys too (interface R25). A deallocated cache is freed with its last key. Unknown
        keys and placeholders: no-op. Marked to be deprecated; this library keeps it.

        Source: interface §6.3.
        """
        engine = self._engine
        check_type("cache_key", cache_key, CacheKey)
        with engine.meters.span("remove_cache_key", "%s", cache_key):
            engine.caches.remove_key(cache_key)

    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: BlocksCacheKey | None = None, *, granted_only: bool = False
    ) -> Cache:
        """Allocate a blocks (paged) cache: ``shape[0]`` blocks per tensor.

        Marked to be deprecated; this library keeps it.

        Args:
            granted_only: As in :meth:`register_blocks_cache`.

        Raises:
            ParamError, OutOfMemory: As :meth:`allocate_cache`.
            KeyInUse: This LLMDataDist has a blocks cache with a key of that ``model_id``.

        Source: interface §6.4.
        """
        engine = self._engine
        given = {"cache_desc": cache_desc, "blocks_cache_key": blocks_cache_key, "granted_only": granted_only}
        _, keys, only = check(ARGUMENTS, **given)
        return calls.allocate(engine, "allocate_blocks_cache", cache_desc, CacheKind.BLOCKS, keys, granted_only=only)

    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Deallocate a blocks cache and unbind its key (interface R27); empties ``cache.tensor_addrs``.

        Running pulls of it fail. Other caches, foreign handles: as :meth:`deallocate_cache`. Marked to be deprecated;
        this library keeps it.

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
        """Register memory of the caller as a continuous cache; changes no byte of it.

        A copy that meets an unreadable page fails, or ends the process. Keys bind as in :meth:`allocate_cache`, but a
        bound key keeps its first binding. Pulls consume none.

        Args:
            addrs: ``num_tensors`` non-zero addresses of host memory; may lie inside a pool.
            cache_keys: At most ``shape[0]`` keys.
            remote_accessible: False refuses peers access (interface R16). Default: None, True.

        Raises:
            ParamError: Impossible shape, wrong number of addresses, a zero or unmapped address, a first or last page
                that cannot be read, too many keys; ``remote_accessible=True`` (not None) after ``link()``.

        Source: interface §6.6.
        """
        given = {"cache_desc": cache_desc, "addrs": addrs, "cache_keys": cache_keys}
        return self._register("register_cache", CacheKind.CACHE, given, remote_accessible)

    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: BlocksCacheKey | None = None,
        remote_accessible: bool | None = None,
        *,
        granted_only: bool = False,
    ) -> Cache:
        """Register a blocks cache, as :meth:`register_cache`, but the newest binding of a key wins.

        Args:
            granted_only: Peers pull under a grant only and push nothing; other calls of theirs are a CacheMismatch. An
                extension. Default: False, or with ``llm.GrantedReads`` True.

        Source: interface §6.6.
        """
        given = {"cache_desc": cache_desc, "addrs": addrs, "blocks_cache_key": blocks_cache_key}
        given["granted_only"] = granted_only
        return self._register("register_blocks_cache", CacheKind.BLOCKS, given, remote_accessible)

    def register_tensors(
        self,
        tensors: GivenTensors,
        key: BlocksCacheKey | CacheKey | list[CacheKey] | tuple[CacheKey, ...] | None = None,
        *,
        blocks: bool | None = None,
        placement: Placement | None = None,
        remote_accessible: bool | None = None,
        granted_only: bool = False,
    ) -> Cache:
        """Register torch tensors or NumPy arrays as :meth:`register_blocks_cache` or :meth:`register_cache`.

        An extension. The cache keeps the tensors until :meth:`unregister_cache` or ``finalize`` has ended the last use.

        Args:
            tensors: List or tuple, one for each K or V of a layer; ``shape[0]`` counts blocks or rows. All are torch
                tensors or all arrays, contiguous, of one shape, type and device, and share no memory.
            key: BlocksCacheKey of a blocks cache; of a continuous one CacheKey, or a list, whose key i names row i.
            blocks: Kind of a cache without key. Default: None, a blocks cache.
            placement: Default: None, HOST for tensors of the host if the instance has a GPU, else DEVICE.

        Raises:
            TypeError: Not a list or tuple, or ``tensors[i]`` is neither tensor nor array.
            ParamError: ``tensors[i]`` breaks a rule, or another argument does not suit the tensors or the key.

        Example: ``register_tensors([half for kv in layers for half in (kv[0], kv[1])], BlocksCacheKey(1))``
        """
        paged = isinstance(key, BlocksCacheKey) or (key is None and blocks is not False)
        fits = blocks is None or check_type("blocks", blocks, bool) is paged
        check_rule(fits, f"blocks={blocks}: the key means the other kind of cache; leave blocks out")
        check_rule(paged or granted_only is not True, "granted_only=True: only for a blocks cache")
        rows = [key] if isinstance(key, CacheKey) else () if key is None else key
        keys = key if paged else check_list("key", rows, CacheKey)
        desc, found = describe(tensors, placement, self._engine.caches.device.ordinal)
        given = {"cache_desc": desc, "addrs": [each.address for each in found]}
        given |= {"blocks_cache_key" if paged else "cache_keys": keys, "granted_only": granted_only}
        return self._register("register_tensors", CacheKind(paged), given, remote_accessible, found)

    def _register(
        self, call: str, kind: CacheKind, given: dict[str, Any], remote_accessible: bool | None, found: object = None
    ) -> Cache:
        engine = self._engine
        cache_desc, addresses, keys, *only = check(ARGUMENTS, **given)
        accessible = arguments.check_accessible(remote_accessible, linked=engine.links.communicators.called)
        geometry = Geometry.of(cache_desc, kind)
        arguments.check_addresses(addresses, geometry)
        arguments.check_key_count(keys, geometry, "key" if found else "cache_keys")
        name, access = "tensors" if found else "addrs", {"remote_accessible": accessible, "granted_only": any(only)}
        with engine.meters.span(call, "%r keys=%s", cache_desc, keys):
            entry = engine.caches.register(geometry, addresses, keys, name, **access)
        entry.kept = found
        return calls.new_handle(engine, entry, cache_desc)

    def unregister_cache(self, cache_id: int) -> None:
        """Unregister a cache and its keys; then no peer and no call uses the memory.

        Running pulls of it fail. The call waits for writing peers and other threads' calls. Unknown ids: no-op.

        Raises:
            DeadlineExceeded: The peer or call in the text uses the memory (``sync_kv_timeout``); cache and keys stay.
            StateError: Called inside another call of this thread, as by a finalizer.

        Source: interface §6.7.
        """
        engine = self._engine
        check(ARGUMENTS, cache_id=cache_id)
        with engine.meters.span("unregister_cache", "id=%d", cache_id):
            engine.caches.unregister(cache_id, engine.deadline())

    def remap_registered_memory(self, mem_infos: MemInfo | list[MemInfo]) -> None:
        """Check the arguments and do nothing: host memory needs no repair.

        Raises:
            ParamError: Not one or more MemInfo of device memory, with address and size.
            NotLinked: There is no link.

        Source: interface §6.15.
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
        """Copy a range of a row to the same place of another row.

        ``num_tensors`` and ``data_type`` must be equal; if ``size == -1``, the row shapes too (interface R8).

        Args:
            dst, src: Continuous caches.
            offset: Bytes into the row.
            size: Bytes per tensor. Default: -1, to the end of the row.
            req_id: Shown as ``req_id=N`` in this call's log records and errors (interface R9).

        Raises:
            ParamError: The descriptors do not match.
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed bytes are undefined.

        Source: interface §6.5.
        """
        rows = {"dst": dst, "src": src, "dst_batch_index": dst_batch_index, "src_batch_index": src_batch_index}
        self._perform(calls.copy_cache(self._engine, ARGUMENTS, req_id, **rows, offset=offset, size=size))

    copy_cache_async = awaited(copy_cache)

    def copy_blocks(self, cache: Cache, copy_block_info: dict[Block, Several]) -> None:
        """Copy blocks inside a blocks cache: ``{src_block: [dst_block, ...]}``, in order (interface R26).

        Raises:
            DeadlineExceeded: Longer than ``sync_kv_timeout``; the addressed blocks are undefined.

        Source: interface §6.8.
        """
        self._perform(calls.copy_blocks(self._engine, ARGUMENTS, cache, copy_block_info))

    copy_blocks_async = awaited(copy_blocks)

    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[Block, To]) -> None:
        """Copy blocks between a device and a host blocks cache: ``{src_block: dst_block}``, in order.

        At most four threads copy, without a time limit (interface R10).

        Raises:
            ParamError: Not one HOST and one DEVICE, unequal block sizes or ``num_tensors``, a zero or unmapped address,
                overlapping tensors, a deallocated cache.
            OutOfMemory: The device has none left.

        Source: interface §6.9.
        """
        engine = self._engine
        check(ARGUMENTS, src_cache=src_cache, dst_cache=dst_cache)
        check_rule(src_cache.is_blocks_cache, "src_cache: not a blocks cache")
        check_rule(dst_cache.is_blocks_cache, "dst_cache: not a blocks cache")
        (pairs,) = check(ARGUMENTS, src_to_dst=src_to_dst)
        self._perform(calls.swap_blocks(engine, src_cache, dst_cache, pairs, ("src_cache", "dst_cache")))

    swap_blocks_async = awaited(swap_blocks, "A cancelled swap is finished first: it has no timeout (interface R6).")

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

        Without RCA a complete pull consumes the key, unless it is a prefix key or the cache is registered. Layer ranges
        are complete once their union is (interface R5). With RCA a pull consumes nothing.

        Args:
            cache_key: Peer row, by key (only without RCA) or by id; its cluster id selects the link.
            size: Bytes per tensor. Default: -1, a local row; a longer peer row is truncated.
            src_layer_range, dst_layer_range: Layers, equally many. Default: None or empty, all.
            tensor_num_per_layer: Must divide ``num_tensors`` if a range is given (interface R14).

        Raises:
            ParamError, CacheNotFound, NotLinked: A broken rule, or no such cache, key, row or link. No byte has moved,
                unless a NotLinked has a ``phase``.
            DeadlineExceeded, TransferFailed, PeerLost: Longer than ``sync_kv_timeout``; the source freed, rebound or
                unregistered during the copy; the peer died. The row is undefined.

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
        cache_id = calls.local_id(engine, "pull_cache", "cache", cache)
        self._perform(
            RowTransfer(engine, "cache", cache_id, layers, batch_index, size, what="pull_cache", name=name).run
        )

    pull_cache_async = awaited(pull_cache)

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
    ) -> None:
        """Pull blocks, or a row, of a peer's cache into blocks of ``dst_cache``.

        With a BlocksCacheKey, or a grant, ``src_blocks[i]`` goes to ``dst_blocks[i]`` (interface R26). Any other key
        names a row, whose i-th piece of one block goes to ``dst_blocks[i]``; the last piece may be short. A row pull
        consumes its key as :meth:`pull_cache` does.

        Args:
            src_cache_key: Peer cache or row; its cluster id selects the link. With a grant also its blocks cache by id,
                with batch index 0.
            src_blocks: Peer block numbers, only with a BlocksCacheKey or a grant; list, tuple, range, or (extension) a
                1-D integer array or CPU tensor.
            dst_blocks: Local block numbers.
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`pull_cache`.
            grant: Permission for these blocks; the pull fails if it ends before the last byte. An extension.

        Raises:
            ParamError, CacheNotFound, NotLinked: As :meth:`pull_cache`; also unequal block sizes (interface R17).
            DeadlineExceeded, TransferFailed, GrantEnded, PeerLost: The addressed blocks are undefined.

        Source: interface §6.11.
        """
        engine = self._engine
        # The rules of ARGUMENTS, called directly: small transfers of blocks are frequent.
        cache_id = calls.blocks_cache_id(engine, "pull_blocks", "dst_cache", dst_cache, "pull_cache")
        sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        theirs = arguments.check_pull_blocks(src_cache_key, sources, targets, grant)
        if grant is not None:
            arguments.check_grant(grant, src_cache_key, sources)
        name = arguments.remote_name(src_cache_key, engine.cluster_id)
        given = engine, "dst_cache", cache_id, layers, targets, theirs, "dst_blocks"
        self._perform(BlocksTransfer(*given, what="pull_blocks", name=name, grant=grant).run)

    pull_blocks_async = awaited(pull_blocks, "The lists are read at once.")

    def claim_grant(self, cluster_id: int, token: bytes, readers: int = 1, wait: bool = True) -> Grant:
        """Claim a grant of cluster ``cluster_id`` for :meth:`pull_blocks`. An extension.

        The call waits for the owner's ``Cache.grant(..., token=token)``, within ``sync_kv_timeout``. Then the grant
        ends with the link. Call :meth:`Grant.release` after the last pull.

        Args:
            readers: Peers, 1 to 1024, that share the grant, equal in all their calls; the last release ends it.
            wait: If False, the call does not wait.

        Raises:
            ParamError: ``token`` not of 16 bytes, or ``readers`` outside its range.
            CacheMismatch: Another number of readers; the owner's policy refuses; too many blocks for a message.
            CacheNotFound: All readers have claimed it.
            GrantEnded, NotLinked, PeerLost: The grant, or the link to its owner, has ended.
            LinkError: Too many claims of this peer wait at the owner (``LLM_LINK_BUSY``).
            DeadlineExceeded: The owner has not made the grant yet, or has not answered within ``sync_kv_timeout``. If
                ``wait`` is False, ``budget_ms`` is 0 in the first case only.
        """
        engine = self._engine
        check_uint64("cluster_id", cluster_id)
        named, count, _ = check_token(token), check_int("readers", readers), check_type("wait", wait, bool)
        check_rule(1 <= count <= MAX_READERS, f"readers: {count}, it must be in [1, {MAX_READERS}]")
        with engine.meters.call("claim_grant", [cluster_id]):
            return claim_grant(engine.links, cluster_id, named, count, engine.deadline(), wait=wait)

    def release_grant(self, cluster_id: int, token: bytes) -> None:
        """Tell the owner that this reader of its grant has finished. An extension.

        For grants that the owner gave to this instance (``Cache.grant(..., peer=...)``), also for one whose message has
        not come: messages of a link keep their order. The call does not wait. Unknown tokens, clusters without a
        link: no-op, as a link's end has ended its grants.

        Raises:
            ParamError: ``token`` not of 16 bytes.
        """
        engine = self._engine
        release_grant(engine.links, check_uint64("cluster_id", cluster_id), check_token(token))

    def digest_blocks(self, cache: Cache, blocks: BlockNumbers, nonce: bytes) -> NDArray[np.uint64]:
        """Return a digest of each block, over its bytes in all tensors. An extension.

        Equal bytes have equal digests, at every instance with the same ``nonce``; other bytes have others, but for
        chance (1 in 2**64 or less), if they were written without knowledge of the nonce.

        Args:
            nonce: 16 bytes.

        Returns:
            Shape ``(len(blocks), 2)``, in the order of ``blocks``.

        Raises:
            ParamError: A block outside the cache, or ``nonce`` not of 16 bytes.
            DeadlineExceeded: Longer than ``sync_kv_timeout``.
        """
        engine = self._engine
        check(ARGUMENTS, cache=cache)
        check_rule(cache.is_blocks_cache, "cache: not a blocks cache")
        numbers, key = parse_blocks("blocks", blocks), check_type("nonce", nonce, bytes)
        check_rule(len(key) == NONCE_BYTES, f"nonce: {len(key)} bytes, it must have {NONCE_BYTES}")
        cache_id = calls.local_id(engine, "digest_blocks", "cache", cache)
        with engine.meters.span("digest_blocks", "id=%d %d blocks", cache_id, blocks=len(numbers)) as span:
            digests, span.nbytes = digest_blocks(
                engine.caches, engine.initiator.pool, cache_id, numbers, key, engine.deadline()
            )
        return digests

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
        """Push row ``src_batch_index`` of ``src_cache`` into a peer's row. Needs RCA.

        A complete push consumes the key of the peer's row (interface R5). The peer is not notified.

        Args:
            dst_cache_key: Peer cache by id, and row.
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`pull_cache`; a range must not be empty.
            size: Only -1, the whole row.

        Raises:
            ParamError, CacheNotFound, NotLinked: As :meth:`pull_cache`; ParamError without RCA (interface R16).
            DeadlineExceeded, TransferFailed, PeerLost: The addressed row of the peer is undefined.

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
        cache_id = calls.local_id(engine, "push_cache", "src_cache", src_cache)
        given = engine, "src_cache", cache_id, layers, src_batch_index
        self._perform(RowTransfer(*given, what="push_cache", name=name, push=True, consumes=True).run)

    push_cache_async = awaited(push_cache)

    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey | CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_blocks: BlockNumbers = (),
        dst_blocks: BlockNumbers = (),
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Push ``src_blocks[i]`` to a peer's ``dst_blocks[i]``, in order (interface R26). Needs RCA; consumes nothing.

        Args:
            dst_cache_key: Peer cache by model id, or by cache id (an extension) with batch index 0 (interface R31).
            src_layer_range, dst_layer_range, tensor_num_per_layer: As in :meth:`push_cache`.

        Raises:
            ParamError, CacheNotFound, NotLinked: As :meth:`push_cache`; also unequal block sizes (interface R17).
            DeadlineExceeded, TransferFailed, PeerLost: The addressed blocks of the peer are undefined.

        Source: interface §6.13, R31.
        """
        engine = self._engine
        arguments.require_rca(engine.options.remote_accessible, "push_blocks")
        check_type("dst_cache_key", dst_cache_key, (BlocksCacheKey, CacheKeyByIdAndIndex))
        cache_id = calls.blocks_cache_id(engine, "push_blocks", "src_cache", src_cache, "push_cache")
        sources, targets = parse_blocks("src_blocks", src_blocks), parse_blocks("dst_blocks", dst_blocks)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer, empty_ok=False)
        arguments.check_push_blocks(dst_cache_key, sources, targets)
        name = arguments.remote_name(dst_cache_key, None)
        given = engine, "src_cache", cache_id, layers, sources, targets, "src_blocks"
        self._perform(BlocksTransfer(*given, what="push_blocks", name=name, push=True, consumes=True).run)

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
        """Push a cache layer by layer, from its own thread, while the model computes.

        For each layer of a config, ascending, the thread calls ``layer_synchronizer``, then sends tensors 2l and 2l + 1
        to each config with that layer, in list order. ``sync_kv_timeout`` bounds each layer to each config, not the
        synchronizer. The first failure stops the transfer. No key is consumed.

        Args:
            src_cache: Local DEVICE cache with an even number of tensors; ``unregister_cache`` waits for the end.
            transfer_configs: With RCA :class:`TransferWithCacheKeyConfig`, else :class:`TransferConfig`. Read now; None
                as ``src_layer_range`` becomes all layers.
            src_block_indices: Local blocks. Default: None, whole tensors in pieces; without ``dst_block_indices`` row
                ``src_batch_index``, of a blocks cache block 0.
            dst_block_indices: Peer blocks, one for each source block or piece; pieces without one are not sent.
            dst_block_memory_size: Bytes of a piece. With both lists None, 0 or the block size; without lists None or 0.

        Raises:
            ParamError, CacheNotFound: A rule is broken, or the source was freed. Nothing is sent.

        Source: interface §6.14, R18, B6.
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
