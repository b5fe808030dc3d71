"""v1: transfer_cache_async, from a PROMPT to addresses of a DECODER (API §6.14, §8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.errors import LLMStatusCode
from llm_datadist.kv_managers.base import KvUser, check_cache
from llm_datadist.managers.layerwise import Blocks, start_transfer
from llm_datadist.types import LLMRole
from llm_datadist.v1codes import v1_code, v1_codes

if TYPE_CHECKING:
    from llm_datadist.kv_cache import KvCache
    from llm_datadist.tasks import CacheTask
    from llm_datadist.types import LayerSynchronizer, TransferConfig

__all__ = ["KvLayerwiseCalls"]


class KvLayerwiseCalls(KvUser):
    """transfer_cache_async."""

    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: list[TransferConfig] | tuple[TransferConfig, ...],
        src_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_indices: list[int] | tuple[int, ...] | None = None,
        dst_block_memory_size: int | None = None,
    ) -> CacheTask:
        """Send a cache to addresses of peers layer by layer, from a thread of its own. Only on a PROMPT.

        The DECODER linked, and has told its addresses (``per_device_tensor_addrs``) by other means. The data shapes,
        the synchronizer and the results are those of v2's ``transfer_cache_async`` without remote cache access.

        Args:
            src_cache: Source, on the device, with an even number of tensors.
            layer_synchronizer: Says when a layer is ready; called in the thread of the transfer.
            transfer_configs: :class:`TransferConfig` only.
            src_block_indices: Blocks here, or None.
            dst_block_indices: Blocks at the peer, or None.
            dst_block_memory_size: Bytes of a destination block.

        Returns:
            The task, to wait for and to ask for results; a time-out is ``LLM_WAIT_PROCESS_TIMEOUT``.

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: This is no PROMPT, or a rule on one argument is broken.
            CacheNotFound: The source is not there any more.

        Source: API §8, §6.14.
        """
        engine = self._engine
        self._require_role("transfer_cache_async", LLMRole.PROMPT)
        cache = check_cache("src_cache", src_cache)
        blocks = Blocks(src_block_indices, dst_block_indices, dst_block_memory_size)
        waited = v1_code(LLMStatusCode.LLM_TIMEOUT)
        with v1_codes():
            return start_transfer(
                engine,
                cache.cache_id,
                layer_synchronizer,
                transfer_configs,
                blocks,
                by_key=False,
                timeout_code=waited,
            )
