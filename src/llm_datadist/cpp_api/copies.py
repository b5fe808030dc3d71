"""Copies inside the process in the C++-shaped interface (API §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist._checks import check_rule, check_uint32, check_uint64
from llm_datadist._transfer.arguments import byte_count
from llm_datadist._transfer.local_copy import CacheRow
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call, StatusCalls, deadline_of
from llm_datadist.types import Placement

if TYPE_CHECKING:
    from llm_datadist.cpp_api.structs import Cache
    from llm_datadist.errors import LLMStatusCode

__all__ = ["CopyCalls"]


class CopyCalls(StatusCalls):
    """CopyKvCache, CopyKvBlocks."""

    def CopyKvCache(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_batch_index: int = 0,
        dst_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
    ) -> LLMStatusCode:
        """Copy bytes [offset, offset + size) of a batch row to the same place of another, in every tensor.

        Note the order: source first, unlike ``CacheManager.copy_cache``. ``num_tensors`` and element type must be
        equal and, with ``size`` -1 (to the end of the row), the row shapes too (R8).

        Args:
            src_cache: Source, on kDevice; only its ``cache_id`` is read.
            dst_cache: Destination, on either; only its ``cache_id`` is read.
            src_batch_index: Row of the source, uint32.
            dst_batch_index: Row of the destination, uint32.
            offset: Bytes into the row, uint64.
            size: Bytes per tensor, or -1.

        Returns:
            ``LLM_PARAM_INVALID``: a source on kHost, an index or range outside a row, descriptors that do not match.
            ``LLM_KV_CACHE_NOT_EXIST``: no such cache. ``LLM_TIMEOUT``: longer than ``OPTION_SYNC_CACHE_WAIT_TIME``;
            the addressed bytes are undefined.

        Raises:
            TypeError: Wrong types.

        Source: API §9, §6.5.
        """
        with Call(self, "CopyKvCache") as call:
            engine = self._engine("CopyKvCache")
            src, dst = arguments.cache_id("src_cache", src_cache), arguments.cache_id("dst_cache", dst_cache)
            src_row = check_uint32("src_batch_index", src_batch_index)
            dst_row = check_uint32("dst_batch_index", dst_batch_index)
            start, nbytes = check_uint64("offset", offset), byte_count(size)
            # Ids are never used again, so what is looked up here is what is copied.
            placement = engine.store.registry.lookup(src, "CopyKvCache: src").geometry.placement
            check_rule(placement == Placement.DEVICE, "src_cache: it is on kHost; only rows on kDevice can be copied")
            detail = "%d[%d] -> %d[%d] offset=%d size=%d"
            with engine.meters.span("CopyKvCache", detail, src, src_row, dst, dst_row, start, nbytes) as span:
                to, of = CacheRow(dst, dst_row), CacheRow(src, src_row)
                span.nbytes = engine.local.copy_cache(to, of, start, nbytes, deadline_of(engine), "CopyKvCache")
        return call.status

    def CopyKvBlocks(
        self, src_cache: Cache, dst_cache: Cache, src_blocks: list[int], dst_blocks_list: list[list[int]]
    ) -> LLMStatusCode:
        """Copy blocks to several places: ``src_blocks[i]`` to ``dst_blocks_list[k][i]`` for every k, in every tensor.

        Device to device (a shared, partly filled block that is about to be written), device to host and host to
        device (swap). The pairs take effect list by list, in the order given (R26). A cache with ``cache_id`` 1 or
        above is looked up; -1 with placement kHost is host memory of yours, described by ``cache_desc`` and
        ``tensor_addrs``.

        Args:
            src_cache: Source.
            dst_cache: Destination; may be the source.
            src_blocks: Block numbers, not empty. A 1-D integer NumPy array does as well (extension).
            dst_blocks_list: At least one list, each as long as ``src_blocks``.

        Returns:
            ``LLM_PARAM_INVALID``: host to host, an empty list, unequal lengths, different block sizes or
            ``num_tensors``, an index outside its cache; nothing was copied. ``LLM_KV_CACHE_NOT_EXIST``: no cache with
            that id. ``LLM_OUT_OF_MEMORY``: no staging memory on the device (R10). ``LLM_TIMEOUT``: a copy on the
            device took longer than ``OPTION_SYNC_CACHE_WAIT_TIME``, and the addressed blocks are undefined; between
            host and device there is no limit, as for ``swap_blocks`` (R6).

        Raises:
            TypeError: Wrong types.

        Source: [seed:CopyKvBlocks], API §9.
        """
        with Call(self, "CopyKvBlocks") as call:
            engine = self._engine("CopyKvBlocks")
            src, dst = arguments.operand("src_cache", src_cache), arguments.operand("dst_cache", dst_cache)
            sources, lists = arguments.block_lists(src_blocks, dst_blocks_list)
            detail = "%s -> %s, %d blocks to %d lists"
            ids = (src_cache.cache_id, dst_cache.cache_id, sources.size, len(lists))
            with engine.meters.span("CopyKvBlocks", detail, *ids) as span:
                span.nbytes = engine.local.copy_block_lists(
                    src, dst, sources, lists, deadline_of(engine), "CopyKvBlocks"
                )
        return call.status
