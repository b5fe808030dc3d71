"""The calls that wait, for asyncio: ``await cache_manager.pull_blocks_async(...)``. All of them extensions.

Each takes what the blocking call of the same name takes and raises what that raises: argument errors at once, where the
coroutine is made, everything else where it is awaited. The blocking call runs in a thread of the engine's own
(``llm-datadist-async_<n>``, at most 32 at a time; ``sync_kv_timeout`` counts from when one is free).

A task that is cancelled gets its ``CancelledError`` when nothing of the call can write to the destination any more
(R7): a call that has not begun never does; one that waits for an answer of the peer, or moves bytes over tcp, gives up
within 50 ms; one that copies in this process or over shm or cma, or digests what it has moved, ends within about 4 MiB.
What a cancelled call leaves is undefined inside the addressed rows or blocks, untouched outside, and the link stays
usable. A cancelled pull may have been complete all the same, and have consumed its key.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.managers.local import LocalCalls
from llm_datadist.managers.remote import RemoteCalls

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any

    from llm_datadist.grant import Grant
    from llm_datadist.managers.base import Pending
    from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

    Done = Coroutine[Any, Any, None]
    Indices = list[int] | tuple[int, ...]

__all__ = ["AwaitedCalls"]


class AwaitedCalls(LocalCalls, RemoteCalls):
    """pull, push, copy and swap, to be awaited."""

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
        """Await :meth:`~llm_datadist.managers.remote.RemoteCalls.pull_cache`: the same arguments, errors and effects.

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
        """Await :meth:`~llm_datadist.managers.remote.RemoteCalls.pull_blocks`: the same arguments, errors and effects.

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
        """Await :meth:`~llm_datadist.managers.remote.RemoteCalls.push_cache`: the same arguments, errors and effects.

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
        """Await :meth:`~llm_datadist.managers.remote.RemoteCalls.push_blocks`: the same arguments, errors and effects.

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
        """Await :meth:`~llm_datadist.managers.local.LocalCalls.copy_cache`: the same arguments, errors and effects.

        Source: API §6.5; extension.
        """
        return self._awaited(self._copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id))

    def copy_blocks_async(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> Done:
        """Await :meth:`~llm_datadist.managers.local.LocalCalls.copy_blocks`: the same arguments, errors and effects.

        Source: API §6.8; extension.
        """
        return self._awaited(self._copy_blocks(cache, copy_block_info))

    def swap_blocks_async(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> Done:
        """Await :meth:`~llm_datadist.managers.local.LocalCalls.swap_blocks`: the same arguments, errors and effects.

        A cancelled swap is finished first: it has no timeout (R6).

        Source: API §6.9; extension.
        """
        return self._awaited(self._swap_blocks(src_cache, dst_cache, src_to_dst))
