"""transfer_cache_async: caches sent layer by layer while the model computes the next one (API §6.14, BEHAVIOUR §6)."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from llm_datadist.cache.cut import cut_pairs, cut_pieces, cut_row
from llm_datadist.checks import check_list, check_rule, check_type, check_uint64
from llm_datadist.errors import LLMStatusCode
from llm_datadist.layerwise import TENSORS_PER_LAYER, AddressDelivery, KeyDelivery, Source
from llm_datadist.managers import arguments
from llm_datadist.managers.base import EngineUser
from llm_datadist.native import BlockList, parse_blocks
from llm_datadist.tasks import TransferJob
from llm_datadist.types import Cache, LayerSynchronizer, Placement, TransferConfig, TransferWithCacheKeyConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.cache.cut import Cut
    from llm_datadist.cache.layout import Geometry
    from llm_datadist.cache.registry import Entry
    from llm_datadist.engine import Engine
    from llm_datadist.tasks import CacheTask, Delivery

    Config = TransferConfig | TransferWithCacheKeyConfig

__all__ = ["Blocks", "LayerwiseCalls", "start_transfer"]


class LayerwiseCalls(EngineUser):
    """transfer_cache_async."""

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
        transfer; each config has its own result (R18), see :class:`~llm_datadist.tasks.CacheTask`. ``sync_kv_timeout``
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
        TypeError, ParamError: See :meth:`LayerwiseCalls.transfer_cache_async`.
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

    def cut(self, src: Geometry, row: int) -> Cut:
        """Return what of each tensor goes where."""
        if self.dst is None:
            return cut_row(src, row)
        if self.src is None:
            return cut_pieces(src, self.dst, self.size)
        arguments.check_blocks("src_block_indices", self.src, src)
        check_rule(
            self.size in (0, src.stride),
            f"dst_block_memory_size={self.size}: with src_block_indices only None, 0 or the block size {src.stride}",
        )
        check_rule(row == 0, f"src_batch_index={row}: only 0 with src_block_indices")
        return cut_pairs(src, self.src, self.dst)


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
        entry = store.registry.hold(cache_id, "transfer_cache_async: src_cache")
        release = undo.callback(lambda: store.apply(store.registry.let_go(entry)))
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
    source = Source(engine, entry, blocks.cut(entry.geometry, config.src_batch_index))
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
