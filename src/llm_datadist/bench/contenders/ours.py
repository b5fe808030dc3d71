"""This library between two processes, or two ``LLMDataDist`` of one process."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, ClassVar, Final

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.bench.contenders.base import HOST, Contender, Facts, Role
from llm_datadist.bench.memory import private_tensors
from llm_datadist.bench.workload import BenchMemory, BenchWorkload, Bytes, Op
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist import Cache

CLUSTER: Final = {Role.SOURCE: 0, Role.DESTINATION: 1}
KEY: Final = BlocksCacheKey(CLUSTER[Role.SOURCE])
# Far above any call here: a loaded machine must not fail the bench.
_TIMEOUT_MS: Final = 120_000
_LINK_POOL_BYTES: Final = 1 << 20
_PAGE_SHIFT: Final = 16


def open_instance(
    role: Role, workload: BenchWorkload, transport: str, *, pool_bytes: int, accessible: bool = True
) -> LLMDataDist:
    """Return an initialized LLMDataDist; the source listens.

    Args:
        pool_bytes: Bytes of the device pool; 0: no pool.
        accessible: Remote cache access (RCA); a push needs it, a pull by key must not have it.
    """
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = accessible
    config.sync_kv_timeout = _TIMEOUT_MS
    if pool_bytes:
        config.mem_pool_cfg = json.dumps({"memory_size": pool_bytes, "page_shift": _PAGE_SHIFT})
    if role is Role.SOURCE:
        config.listen_ip_info = f"{HOST}:0"
    options = config.generate_options()
    options["llm.Transport"] = transport
    options["llm.CopyThreads"] = str(workload.threads)
    datadist = LLMDataDist(LLMRole.PROMPT if role is Role.SOURCE else LLMRole.DECODER, CLUSTER[role])
    datadist.init(options)
    return datadist


def pool_bytes_for(tensor_bytes: int, tensors: int) -> int:
    """Return the bytes of a pool that holds this many tensors."""
    page = 1 << _PAGE_SHIFT
    return -(-tensor_bytes // page) * page * tensors


def link(datadist: LLMDataDist, port: int) -> LLMClusterInfo:
    """Link the destination to the source at ``port``, or raise RuntimeError."""
    info = LLMClusterInfo()
    info.remote_cluster_id = CLUSTER[Role.SOURCE]
    info.append_local_ip_info(HOST, 0)
    info.append_remote_ip_info(HOST, port)
    status, _ = datadist.link_clusters([info], _TIMEOUT_MS)
    if status != LLMStatusCode.LLM_SUCCESS:
        raise RuntimeError(f"link_clusters: {status}")
    return info


def make_blocks(
    datadist: LLMDataDist, workload: BenchWorkload, key: BlocksCacheKey | None
) -> tuple[Cache, list[Bytes]]:
    """Make a blocks cache of the workload's rows, and arrays over it."""
    desc = CacheDesc(workload.tensors, [workload.rows, workload.block_bytes], DataType.DT_UINT8)
    manager = datadist.cache_manager
    if workload.memory is BenchMemory.POOL:
        cache = manager.allocate_blocks_cache(desc, key)
        return cache, tensor_views(cache)
    tensors = private_tensors(workload)
    return manager.register_blocks_cache(desc, [each.ctypes.data for each in tensors], key), tensors


class Ours(Contender):
    """pull_blocks and push_blocks of a blocks cache between two processes, with NumPy arrays of block numbers."""

    ops: ClassVar[tuple[Op, ...]] = (Op.PULL, Op.PUSH, Op.LATENCY)

    def start(self) -> Facts:
        self._datadist = self._open(self.role)
        cache, views = make_blocks(self._datadist, self.workload, KEY if self.role is Role.SOURCE else None)
        self.own(views)
        self._move = self._mover(cache)
        return {"port": self._datadist.listen_port}

    def connect(self, facts: Facts) -> Facts:
        link(self._datadist, facts["port"])
        return {"transport": self._transport_used(self._datadist)}

    def transfer(self) -> None:
        self._move()

    def transfer_one(self, index: int) -> None:
        src, dst = self._pairs[index]
        self._datadist.cache_manager.pull_blocks(KEY, self._cache, src, dst)

    def stop(self) -> None:
        self._datadist.finalize()

    def _open(self, role: Role) -> LLMDataDist:
        pool = self.workload.memory is BenchMemory.POOL
        size = pool_bytes_for(self.workload.tensor_bytes, self.workload.tensors) if pool else 0
        return open_instance(role, self.workload, self.transport, pool_bytes=size)

    def _mover(self, cache: Cache) -> Callable[[], None]:
        src, dst, manager = self.workload.src_blocks, self.workload.dst_blocks, self._datadist.cache_manager
        self._cache = cache
        if self.workload.op is Op.LATENCY:
            self._pairs = [([a], [b]) for a, b in zip(src.tolist(), dst.tolist(), strict=True)]
        if self.workload.op is Op.PUSH:
            return lambda: manager.push_blocks(KEY, cache, src, dst)
        return lambda: manager.pull_blocks(KEY, cache, src, dst)

    def _transport_used(self, datadist: LLMDataDist) -> str:
        choice = datadist.explain(CLUSTER[Role.SOURCE])
        # Non-pool memory may use another transport than pools.
        private = choice.private_transport if self.workload.memory is BenchMemory.REGISTERED else None
        return private or choice.transport


class Inproc(Ours):
    """Two LLMDataDist in one process."""

    transport = "inproc"
    roles = (Role.ALONE,)

    def start(self) -> Facts:
        self._source, self._datadist = self._open(Role.SOURCE), self._open(Role.DESTINATION)
        _, there = make_blocks(self._source, self.workload, KEY)
        cache, here = make_blocks(self._datadist, self.workload, None)
        push = self.workload.op is Op.PUSH
        self.source_views, self.destination_views = (here, there) if push else (there, here)
        port = self._source.listen_port
        assert port is not None, "the source listens"
        link(self._datadist, port)
        self._move = self._mover(cache)
        return {"transport": self._transport_used(self._datadist)}

    def stop(self) -> None:
        super().stop()
        self._source.finalize()


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
        info = link(self._datadist, self._port)
        used = self._transport_used(self._datadist)
        self._datadist.unlink_clusters([info], _TIMEOUT_MS)
        return {"transport": used}

    def transfer_one(self, index: int) -> None:
        info = link(self._datadist, self._port)
        status, _ = self._datadist.unlink_clusters([info], _TIMEOUT_MS)
        if status != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"unlink_clusters: {status}")

    def verify(self, seed: int) -> bool:
        if self._datadist.statistics().links and self.role is Role.DESTINATION:
            raise RuntimeError("a link is left after unlink_clusters")
        return self.role is Role.DESTINATION
