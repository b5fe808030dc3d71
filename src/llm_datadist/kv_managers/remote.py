"""v1: calls that pull from a PROMPT. They run on a DECODER (API §8)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.checks import check_int64, check_rule, check_type, check_uint32, check_uint64
from llm_datadist.kv_managers.base import KvUser, check_cache
from llm_datadist.managers import arguments, moves
from llm_datadist.managers.arguments import layer_selection
from llm_datadist.managers.moves import Move
from llm_datadist.native import parse_blocks
from llm_datadist.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex, LLMRole
from llm_datadist.v1codes import v1_codes

if TYPE_CHECKING:
    from llm_datadist.kv_cache import KvCache

__all__ = ["KvRemoteCalls"]


class KvRemoteCalls(KvUser):
    """pull_cache, pull_blocks. The peer may carry our own cluster id (R28)."""

    def pull_cache(
        self,
        cache_key: CacheKey | CacheKeyByIdAndIndex,
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        src_cache_offset: int | None = None,
        dst_cache_offset: int | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull a row of a PROMPT's continuous cache into row ``batch_index`` of ``kv_cache``.

        A complete pull consumes the key at the PROMPT, unless it is a prefix key; layer ranges are complete when
        their union is, offsets and ``size`` make no pull incomplete (R5).

        Args:
            cache_key: The PROMPT's row: by key, or by cache id and row. Its cluster id selects the link.
            kv_cache: Destination, a continuous cache of this process.
            batch_index: Row of the destination.
            size: Bytes per tensor; -1: what the destination's row has after ``dst_cache_offset``.
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all. Lengths must be equal.
            src_cache_offset: Bytes into the source's row, in every tensor; None: 0.
            dst_cache_offset: Bytes into the destination's row, in every tensor; None: 0.
            tensor_num_per_layer: Tensors per layer; must divide ``num_tensors`` when a range is given (R14).

        Raises:
            TypeError: Wrong types (``NoneArgument`` for None).
            ParamError: This is no DECODER, a rule on one argument is broken, or the two caches do not fit each other.
            CacheNotFound: No such cache here, or no such key, id or row at the PROMPT.
            NotLinked: No link to the key's cluster.
            DeadlineExceeded: Longer than ``sync_kv_timeout`` (``LLM_WAIT_PROCESS_TIMEOUT``); the link stays usable.
            TransferFailed: The source changed during the pull; the addressed bytes are undefined.
            PeerLost: The peer died; link again.

        Source: API §8.
        """
        engine = self._engine
        self._require_role("pull_cache", LLMRole.DECODER)
        check_type("cache_key", cache_key, (CacheKey, CacheKeyByIdAndIndex))
        cache = check_cache("kv_cache", kv_cache)._cache
        check_uint32("batch_index", batch_index)
        check_int64("size", size)
        check_rule(not cache.is_blocks_cache, "kv_cache: a blocks cache; use pull_blocks")
        wanted = arguments.byte_count(size)
        src_offset = 0 if src_cache_offset is None else check_uint64("src_cache_offset", src_cache_offset)
        dst_offset = 0 if dst_cache_offset is None else check_uint64("dst_cache_offset", dst_cache_offset)
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        arguments.check_single_id(cache_key)
        name = arguments.remote_name(cache_key, None)
        move = Move(engine, "pull_cache", "kv_cache", cache.cache_id, name, layers, self._deadline())
        with v1_codes():
            moves.pull_row(move, batch_index, wanted, src_offset=src_offset, dst_offset=dst_offset)

    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        *,
        src_layer_range: range | None = None,
        dst_layer_range: range | None = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Pull blocks of a PROMPT's blocks cache: ``prompt_blocks[i]`` to ``decoder_blocks[i]``, in order (R26).

        Args:
            prompt_cache_key: The PROMPT's cache; its cluster id selects the link. Nothing is consumed.
            decoder_kv_cache: Destination, a blocks cache of this process.
            prompt_blocks: Block numbers at the PROMPT, a list that is not empty.
            decoder_blocks: Block numbers here, as many.
            src_layer_range: Layers of the source; None or empty: all.
            dst_layer_range: Layers of the destination; None or empty: all.
            tensor_num_per_layer: Tensors per layer (R14).

        Raises:
            TypeError, ParamError, CacheNotFound, NotLinked, DeadlineExceeded, TransferFailed, PeerLost: as
                :meth:`pull_cache`; different block sizes are a ParamError (R17).

        Source: API §8.
        """
        engine = self._engine
        self._require_role("pull_blocks", LLMRole.DECODER)
        check_type("prompt_cache_key", prompt_cache_key, BlocksCacheKey)
        cache = check_cache("decoder_kv_cache", decoder_kv_cache)._cache
        sources = parse_blocks("prompt_blocks", check_type("prompt_blocks", prompt_blocks, list))
        targets = parse_blocks("decoder_blocks", check_type("decoder_blocks", decoder_blocks, list))
        check_rule(len(sources), "prompt_blocks is empty: at least one block is needed")
        arguments.equal_lengths(sources, targets, ("prompt_blocks", "decoder_blocks"))
        check_rule(cache.is_blocks_cache, "decoder_kv_cache: not a blocks cache; use pull_cache")
        layers = layer_selection(src_layer_range, dst_layer_range, tensor_num_per_layer)
        name = arguments.remote_name(prompt_cache_key, None)
        move = Move(engine, "pull_blocks", "decoder_kv_cache", cache.cache_id, name, layers, self._deadline())
        with v1_codes():
            moves.pull_blocks(move, sources, targets, name="decoder_blocks")
