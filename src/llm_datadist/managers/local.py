"""Calls that copy inside this process (API §6.5, §6.8, §6.9)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_rule, check_type
from llm_datadist.managers import arguments
from llm_datadist.managers.base import EngineUser
from llm_datadist.types import Cache

if TYPE_CHECKING:
    from llm_datadist.deadline import Deadline
    from llm_datadist.managers.base import Pending

__all__ = ["LocalCalls"]


class LocalCalls(EngineUser):
    """copy_cache, copy_blocks, swap_blocks: each checks in one step and works in another."""

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
                span.nbytes = engine.local.copy_cache(
                    dst.cache_id,
                    src.cache_id,
                    dst_row=dst_batch_index,
                    src_row=src_batch_index,
                    offset=offset,
                    size=size,
                    deadline=deadline,
                    what=what,
                )

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
