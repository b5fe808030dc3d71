"""v1: calls that stay inside this process (API §8): the same copies as v2's, on KvCaches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_int32, check_rule, check_type
from llm_datadist.kv_cache import KvCache
from llm_datadist.kv_managers.base import KvUser, check_cache
from llm_datadist.managers import arguments
from llm_datadist.managers.local import LocalCalls
from llm_datadist.tensor import Tensor, TensorDesc
from llm_datadist.v1codes import v1_codes
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.engine import Engine
    from llm_datadist.types import LLMRole

__all__ = ["KvLocalCalls"]


class KvLocalCalls(KvUser):
    """copy_cache, copy_blocks, swap_blocks, get_cache_tensors."""

    def __init__(self, engine: Engine, role: Callable[[], LLMRole]) -> None:
        super().__init__(engine, role)
        self._local = LocalCalls(engine)

    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: int | None = None,
    ) -> None:
        """Copy bytes [offset, offset + size) of a batch row to the same place of another, in every tensor.

        As v2's (R8), between two caches on the device.

        Args:
            dst: Destination, a continuous cache.
            src: Source, a continuous cache.
            dst_batch_index: Row of the destination.
            src_batch_index: Row of the source.
            offset: Bytes into the row.
            size: Bytes per tensor, or -1: to the end of the row.
            req_id: Shown as ``req_id=N`` in every log record and error of this call (R9).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: A CPU or blocks cache, an index or range outside a row, descriptors that do not match.
            CacheNotFound: A cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the addressed bytes are
                undefined.

        Source: [seed:copy_cache], API §8.
        """
        self._engine  # noqa: B018 (a dead manager says so before anything else)
        with v1_codes():
            with arguments.naming_request(req_id):
                target, source = check_cache("dst", dst)._cache, check_cache("src", src)._cache
            self._local.copy_cache(target, source, dst_batch_index, src_batch_index, offset, size, req_id)

    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one blocks cache: ``{src_block: [dst_block, ...]}``, in the order given (R26).

        Raises:
            TypeError: Wrong types; the values must be lists of int (``NoneArgument`` for None).
            ParamError: Not a blocks cache on the device, an index outside it or negative.
            CacheNotFound: The cache is not there any more.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the addressed blocks are
                undefined.

        Source: [seed:deprecated] copy_blocks, API §8.
        """
        self._engine  # noqa: B018 (as above)
        with v1_codes():
            self._local.copy_blocks(check_cache("cache", cache)._cache, copy_block_info)

    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Move blocks between device and host memory; ``{src_block: dst_block}``, in the order given.

        The host side is a ``KvCache.create_cpu_cache``. Block sizes and ``num_tensors`` must be equal, block counts
        may differ; a row of a continuous cache counts as a block. Threads and staging buffers as v2's (R10).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: Sizes or counts differ, an index outside its cache, not one HOST and one DEVICE, a zero address,
                or a deallocated cache.
            OutOfMemory: No device memory for the staging buffers (``LLM_DEVICE_OUT_OF_MEMORY``).

        Source: [seed:swap_blocks], API §8.
        """
        engine = self._engine
        check_type("src", src, KvCache)
        check_type("dst", dst, KvCache)
        src_blocks, dst_blocks = arguments.swap_pairs(src_to_dst)
        ids = (src.cache_id, dst.cache_id, len(src_to_dst))
        with v1_codes(), engine.meters.span("swap_blocks", "src=%d dst=%d %d blocks", *ids) as span:
            both = (src._cache, dst._cache)
            span.nbytes = engine.local.swap_blocks(*both, src_blocks, dst_blocks, ends=("src", "dst"))

    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return one tensor of the cache for each device (one here), over the cache's own memory.

        What is written to ``Tensor.numpy()`` is written to the cache; ``DT_BF16`` is converted to float32 there, in
        an array of its own.

        Args:
            cache: Of either kind.
            tensor_index: In [0, num_tensors), int32.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: The index is outside, the cache was deallocated, or its elements are text (``DT_STRING``).

        Source: API §8.
        """
        self._engine  # noqa: B018 (as above)
        check_type("cache", cache, KvCache)
        index = check_int32("tensor_index", tensor_index)
        desc = cache.cache_desc
        check_rule(
            0 <= index < desc.num_tensors, f"tensor_index={index}: the cache has {desc.num_tensors} tensors, from 0"
        )
        with v1_codes():
            return [Tensor(tensor_views(cache._cache)[index], TensorDesc(desc.data_type, list(desc.shape)))]
