"""Pulls and pushes of the C++-shaped interface (API §9): caches are named by id, layers by inclusive pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_rule, check_uint32
from llm_datadist._transfer import calls
from llm_datadist._transfer.arguments import byte_count
from llm_datadist._transfer.calls import TransferCall
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls, deadline_of
from llm_datadist.cpp_api.structs import Cache, CacheIndex, KvCacheExtParam
from llm_datadist.types import Placement

if TYPE_CHECKING:
    from llm_datadist.errors import LLMStatusCode

__all__ = ["TransferCalls"]

_ALL_LAYERS: Final = KvCacheExtParam()


class TransferCalls(StatusCalls):
    """PullKvCache, PullKvBlocks, PushKvCache, PushKvBlocks.

    All need a link (LinkLlmClusters at either end), consume no key, and return, besides what each one names:
    ``LLM_PARAM_INVALID``: a rule on one argument is broken, or the two caches do not fit each other; nothing has
    happened. ``LLM_KV_CACHE_NOT_EXIST``: no such cache here, or no such cache or row there. ``LLM_NOT_YET_LINK``.
    ``LLM_TIMEOUT``: longer than ``OPTION_SYNC_CACHE_WAIT_TIME``; the link stays usable (R7).
    ``LLM_SUSPECT_REMOTE_ERROR``: the peer died; link again. ``LLM_FAILED``: the other end's cache changed meanwhile.
    After the last three the addressed destination is undefined. ``ext_param`` follows R14: both ranges (-1, -1) move
    every tensor, one of them stands for all layers, and a given range needs ``tensor_num_per_layer`` to divide
    ``num_tensors``.
    """

    def PullKvCache(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = _ALL_LAYERS,
    ) -> LLMStatusCode:
        """Pull a row of a peer's cache into row ``batch_index`` of ``dst_cache``.

        Args:
            src_cache_index: The peer's cache and row.
            dst_cache: Destination; only its ``cache_id`` is read.
            batch_index: Row of the destination, uint32.
            size: Bytes per tensor; -1: a whole destination row (a longer source row is truncated).
            ext_param: Layers.

        Returns:
            See :class:`TransferCalls`.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §6.10.
        """
        with Call(self, "PullKvCache") as call:
            engine = self._engine("PullKvCache")
            name = arguments.remote_name("src_cache_index", src_cache_index, engine.cluster_id, row=True)
            cache_id = arguments.cache_id("dst_cache", dst_cache)
            row, nbytes = check_uint32("batch_index", batch_index), byte_count(size)
            layers = arguments.layers(ext_param)
            move = TransferCall(engine, "PullKvCache", "dst_cache", cache_id, name, layers, deadline_of(engine))
            calls.pull_row(move, row, nbytes)
        return call.status

    def PullKvBlocks(
        self,
        src_cache_index: CacheIndex,
        dst_cache: Cache,
        src_blocks: list[int],
        dst_blocks: list[int],
        ext_param: KvCacheExtParam = _ALL_LAYERS,
    ) -> LLMStatusCode:
        """Pull blocks of a peer's cache: ``src_blocks[i]`` to ``dst_blocks[i]``, in the order given (R26).

        Args:
            src_cache_index: The peer's cache; ``batch_index`` 0.
            dst_cache: Destination; only its ``cache_id`` is read.
            src_blocks: Block numbers there, not empty. A 1-D integer NumPy array does as well (extension).
            dst_blocks: Block numbers here, as many.
            ext_param: Layers.

        Returns:
            See :class:`TransferCalls`; different block sizes are ``LLM_PARAM_INVALID`` (R17).

        Raises:
            TypeError: Wrong types.

        Source: API §9, §6.11.
        """
        with Call(self, "PullKvBlocks") as call:
            engine = self._engine("PullKvBlocks")
            name = arguments.remote_name("src_cache_index", src_cache_index, engine.cluster_id, row=False)
            cache_id = arguments.cache_id("dst_cache", dst_cache)
            sources, targets = arguments.block_pairs(src_blocks, dst_blocks)
            layers = arguments.layers(ext_param)
            move = TransferCall(engine, "PullKvBlocks", "dst_cache", cache_id, name, layers, deadline_of(engine))
            calls.pull_blocks(move, sources, targets)
        return call.status

    def PushKvCache(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_batch_index: int = 0,
        size: int = -1,
        ext_param: KvCacheExtParam = _ALL_LAYERS,
    ) -> LLMStatusCode:
        """Push a whole row of ``src_cache`` into a row of a peer's cache.

        Args:
            src_cache: Source, on kDevice (R16); only its ``cache_id`` is read.
            dst_cache_index: The peer's cache and row.
            src_batch_index: Row of the source, uint32.
            size: Only -1.
            ext_param: Layers.

        Returns:
            See :class:`TransferCalls`.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §6.12.
        """
        with Call(self, "PushKvCache") as call:
            engine = self._engine("PushKvCache")
            cache_id = arguments.cache_id("src_cache", src_cache)
            name = arguments.remote_name("dst_cache_index", dst_cache_index, row=True)
            row, nbytes = check_uint32("src_batch_index", src_batch_index), byte_count(size)
            check_rule(nbytes == -1, f"size={nbytes}: only -1 (the whole row) can be pushed")
            layers = arguments.layers(ext_param)
            # Ids are never used again, so what is looked up here is what is pushed.
            placement = engine.store.registry.lookup(cache_id, "PushKvCache: src_cache").geometry.placement
            check_rule(placement == Placement.DEVICE, "src_cache: it is on kHost; only rows on kDevice can be pushed")
            move = TransferCall(engine, "PushKvCache", "src_cache", cache_id, name, layers, deadline_of(engine))
            calls.push_row(move, row)
        return call.status

    def PushKvBlocks(
        self,
        src_cache: Cache,
        dst_cache_index: CacheIndex,
        src_blocks: list[int],
        dst_blocks: list[int],
        ext_param: KvCacheExtParam = _ALL_LAYERS,
    ) -> LLMStatusCode:
        """Push blocks of ``src_cache``: ``src_blocks[i]`` to the peer's ``dst_blocks[i]``, in the order given (R26).

        Args:
            src_cache: Source; only its ``cache_id`` is read (R31).
            dst_cache_index: The peer's cache; ``batch_index`` 0.
            src_blocks: Block numbers here, not empty. A 1-D integer NumPy array does as well (extension).
            dst_blocks: Block numbers there, as many.
            ext_param: Layers.

        Returns:
            See :class:`TransferCalls`; different block sizes are ``LLM_PARAM_INVALID`` (R17).

        Raises:
            TypeError: Wrong types.

        Source: [seed:PushKvBlocks], API §9, §6.13.
        """
        with Call(self, "PushKvBlocks") as call:
            engine = self._engine("PushKvBlocks")
            cache_id = arguments.cache_id("src_cache", src_cache)
            name = arguments.remote_name("dst_cache_index", dst_cache_index, row=False)
            sources, targets = arguments.block_pairs(src_blocks, dst_blocks)
            layers = arguments.layers(ext_param)
            move = TransferCall(engine, "PushKvBlocks", "src_cache", cache_id, name, layers, deadline_of(engine))
            calls.push_blocks(move, sources, targets)
        return call.status
