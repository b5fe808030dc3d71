"""This library between two processes, or two ``LLMDataDist`` of one process."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from llm_datadist._deadline import Deadline
from llm_datadist.config import AUTH_SECRET
from llm_datadist.tools.bench.contenders.base import HOST, Contender, Facts, Role
from llm_datadist.tools.bench.workload import BenchMemory, BenchWorkload, Bytes, Op, fill, mirrors, private_tensors
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from llm_datadist import Cache, PeerLink

CLUSTER: Final = {Role.SOURCE: 0, Role.DESTINATION: 1}
KEY: Final = BlocksCacheKey(CLUSTER[Role.SOURCE])
# Far above any call here: a loaded machine must not fail the bench.
_TIMEOUT_MS: Final = 120_000
_CONSUMED_MS: Final = 10_000
_LINK_POOL_BYTES: Final = 1 << 20
_PAGE_SHIFT: Final = 16


def open_instance(
    role: Role, workload: BenchWorkload, transport: str, *, pool_bytes: int, accessible: bool = True
) -> LLMDataDist:
    """Return an initialized LLMDataDist; the source listens.

    ``pool_bytes`` is the size of the device pool; 0: no pool. ``accessible`` is remote cache access (RCA): a push needs
    it, a pull by key must not have it.
    """
    config = LLMConfig(device_id=0, enable_cache_manager=True, enable_remote_cache_accessible=accessible)
    config.sync_kv_timeout = _TIMEOUT_MS
    if pool_bytes:
        config.mem_pool_cfg = str(pool_bytes)
    if workload.op in (Op.H2D, Op.D2H):
        config.host_mem_pool_cfg = config.mem_pool_cfg
    if role is Role.SOURCE:
        config.listen_ip_info = f"{HOST}:0"
    options = config.generate_options()
    options["llm.Transport"] = transport
    options["llm.CopyThreads"] = str(workload.threads)
    if workload.memory is BenchMemory.GPU:
        options["llm.DeviceMemory"] = "cuda"
    if workload.secrets:
        options[AUTH_SECRET] = workload.secrets
    datadist = LLMDataDist(LLMRole.PROMPT if role is Role.SOURCE else LLMRole.DECODER, CLUSTER[role])
    datadist.init(options)
    return datadist


def in_pages(nbytes: int) -> int:
    """Return the bytes that an allocation takes in a pool."""
    page = 1 << _PAGE_SHIFT
    return -(-nbytes // page) * page


def pool_bytes_for(workload: BenchWorkload) -> int:
    """Return the bytes of a pool that holds the workload's tensors; 0 for registered memory."""
    return 0 if workload.memory is BenchMemory.REGISTERED else in_pages(workload.tensor_bytes) * workload.tensors


def desc_of(workload: BenchWorkload, rows: int | None = None, placement: Placement = Placement.DEVICE) -> CacheDesc:
    """Return the geometry of the workload's tensors, or of others with so many rows."""
    shape = [workload.rows if rows is None else rows, workload.block_bytes]
    return CacheDesc(workload.tensors, shape, DataType.DT_UINT8, placement)


def make_cache(
    datadist: LLMDataDist, workload: BenchWorkload, key: BlocksCacheKey | None = None, *, paged: bool = True
) -> tuple[Cache, list[Bytes]]:
    """Make a cache of the workload's tensors, a blocks cache or a continuous one, and arrays over it."""
    manager, desc = datadist.cache_manager, desc_of(workload)
    if workload.memory is not BenchMemory.REGISTERED:
        cache = manager.allocate_blocks_cache(desc, key) if paged else manager.allocate_cache(desc)
        on_gpu = workload.memory is BenchMemory.GPU
        return cache, mirrors(workload, cache.tensor_addrs) if on_gpu else tensor_views(cache)
    tensors = private_tensors(workload)
    bases = [each.ctypes.data for each in tensors]
    return manager.register_blocks_cache(desc, bases, key) if paged else manager.register_cache(desc, bases), tensors


def link(datadist: LLMDataDist, port: int) -> PeerLink:
    """Link the destination to the source at ``port``."""
    return datadist.connect(f"{HOST}:{port}", CLUSTER[Role.SOURCE], _TIMEOUT_MS)


class Ours(Contender):
    """pull_blocks and push_blocks of a blocks cache between two processes, with NumPy arrays of block numbers."""

    ops: ClassVar[tuple[Op, ...]] = (Op.PULL, Op.PUSH, Op.LATENCY)
    memories: ClassVar[tuple[BenchMemory, ...]] = tuple(BenchMemory)

    def start(self) -> Facts:
        self._datadist = self._open(self.role)
        cache, views = make_cache(self._datadist, self.workload, KEY if self.role is Role.SOURCE else None)
        self.own(views)
        self._use(cache)
        return {"port": self._datadist.listen_port}

    def connect(self, facts: Facts) -> Facts:
        link(self._datadist, facts["port"])
        return {"transport": self._transport_used()}

    def transfer(self) -> None:
        self._move()

    def transfer_one(self, index: int) -> None:
        src, dst = self._pairs[index]
        self._datadist.cache_manager.pull_blocks(KEY, self._cache, src, dst)

    def stop(self) -> None:
        self._datadist.finalize()

    def _open(self, role: Role) -> LLMDataDist:
        return open_instance(role, self.workload, self.transport, pool_bytes=pool_bytes_for(self.workload))

    def _use(self, cache: Cache) -> None:
        """Move to or from this cache."""
        work, manager = self.workload, self._datadist.cache_manager
        call = manager.push_blocks if work.op is Op.PUSH else manager.pull_blocks
        self._move = partial(call, KEY, cache, work.src_blocks, work.dst_blocks)
        self._cache = cache
        if work.op is Op.LATENCY:
            self._pairs = [([src], [dst]) for src, dst in work.pairs]

    def _transport_used(self) -> str:
        choice = self._datadist.explain(CLUSTER[Role.SOURCE])
        if choice.sealed != bool(self.workload.secrets):
            raise RuntimeError(f"secrets={self.workload.secrets!r}: the link says sealed={choice.sealed}")
        # Non-pool memory may use another transport than pools.
        private = choice.private_transport if self.workload.memory is BenchMemory.REGISTERED else None
        return private or choice.transport


class Inproc(Ours):
    """Two LLMDataDist in one process."""

    transport = "inproc"
    roles = (Role.ALONE,)

    def start(self) -> Facts:
        self._source, self._datadist = self._open(Role.SOURCE), self._open(Role.DESTINATION)
        _, there = make_cache(self._source, self.workload, KEY)
        cache, here = make_cache(self._datadist, self.workload)
        push = self.workload.op is Op.PUSH
        self.source_views, self.destination_views = (here, there) if push else (there, here)
        self._use(cache)
        port = self._source.listen_port
        assert port is not None, "the source listens"
        return self.connect({"port": port})

    def stop(self) -> None:
        super().stop()
        self._source.finalize()


class ByKey(Ours):
    """Steps that each pull a cache of one row by its key, as in serving.

    Before each pass the source allocates a cache for each block, binds its key and deallocates the cache.
    """

    ops = (Op.LATENCY,)
    memories = (BenchMemory.POOL,)
    pool_only = "pulling a registered cache consumes no key"

    def start(self) -> Facts:
        self._datadist = self._open(self.role)
        if self.role is Role.DESTINATION:
            self._cache = self._datadist.cache_manager.allocate_cache(desc_of(self.workload))
            self.own(tensor_views(self._cache))
            numbers = self.workload.dst_blocks.tolist()
            self._steps = [(CacheKey(CLUSTER[Role.SOURCE], index), row) for index, row in enumerate(numbers)]
        return {"port": self._datadist.listen_port}

    def fill(self, seed: int) -> None:
        if self.role is not Role.SOURCE:
            return
        shape = (self.workload.rows, self.workload.block_bytes)
        tensors = [np.empty(shape, np.uint8) for _ in range(self.workload.tensors)]
        fill(tensors, seed)
        manager, desc = self._datadist.cache_manager, desc_of(self.workload, rows=1)
        for index, block in enumerate(self.workload.src_blocks.tolist()):
            cache = manager.allocate_cache(desc, [CacheKey(CLUSTER[Role.SOURCE], index)])
            for view, tensor in zip(tensor_views(cache), tensors, strict=True):
                view[0] = tensor[block]
            manager.deallocate_cache(cache)

    def transfer_one(self, index: int) -> None:
        key, row = self._steps[index]
        self._datadist.cache_manager.pull_cache(key, self._cache, row)

    def verify(self, seed: int) -> bool:
        """Compare the pulled bytes; at the source, check that every key is consumed: a pull may return earlier."""
        statistics = self._datadist.statistics
        if self.role is Role.SOURCE and not Deadline(_CONSUMED_MS).poll(lambda: not statistics().keys):
            raise RuntimeError(f"{len(statistics().keys)} keys are still bound after they were pulled")
        return super().verify(seed)

    def _open(self, role: Role) -> LLMDataDist:
        # At the source each block is its own allocation, rounded up to pages.
        blocks = in_pages(self.workload.block_bytes) * self.workload.tensors * self.workload.blocks
        size = blocks if role is Role.SOURCE else pool_bytes_for(self.workload)
        return open_instance(role, self.workload, self.transport, pool_bytes=size, accessible=False)


class Linking(Ours):
    """Steps that each link and unlink. Both sides have a pool of 1 MiB."""

    ops = (Op.LINK,)

    @classmethod
    def footprint(cls, workload: BenchWorkload) -> int:
        return 2 * _LINK_POOL_BYTES

    def start(self) -> Facts:
        self._datadist = open_instance(self.role, self.workload, self.transport, pool_bytes=_LINK_POOL_BYTES)
        return {"port": self._datadist.listen_port}

    def connect(self, facts: Facts) -> Facts:
        self._port = facts["port"]
        with link(self._datadist, self._port):
            return {"transport": self._transport_used()}

    def transfer_one(self, index: int) -> None:
        link(self._datadist, self._port).close(_TIMEOUT_MS)

    def verify(self, seed: int) -> bool:
        if self._datadist.statistics().links and self.role is Role.DESTINATION:
            raise RuntimeError("a link is left after unlink_clusters")
        return self.role is Role.DESTINATION
