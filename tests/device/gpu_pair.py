"""The library between two processes with caches in one GPU: bytes, speed, a dead peer, a lost context."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    DeviceError,
    LLMDataDist,
    LLMException,
    LLMRole,
    Placement,
    views,
)
from llm_datadist._native import Device
from llm_datadist.devices import CudaDevice
from tests.device import cu
from tests.device.cu import MIB, mapped, stream, unmap
from tests.device.gpu_driver import FAKE, PTX, Bytes, answer, ask, check, check_use, milliseconds, tell
from tests.device.gpu_moves import rate, typical
from tests.support import fakecuda
from tests.support.world import cluster_info, make_config

Rows = NDArray[np.uint8]  # tensor, block, byte
_TENSORS: Final = 4
_EXTENT: Final = (1 if FAKE else 64) * MIB  # bytes of a tensor
_BLOCKS: Final = [4096, 65536] if FAKE else [4096 << i for i in range(0, 9, 2)]  # bytes of each; by model id
_HOST: Final = 99  # model id of a cache in host memory


def _desc(block: int, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(_TENSORS, [_EXTENT // block, block], DataType.DT_INT8, placement)


def _content(model: int) -> Rows:
    """Return what the peer publishes."""
    block = _BLOCKS[model] if model != _HOST else 4096
    return np.random.default_rng(model).integers(0, 256, (_TENSORS, _EXTENT // block, block), np.uint8)


class Side:
    """An instance with caches in the GPU, and their bytes."""

    def __init__(self, role: LLMRole, transport: str, device: CudaDevice | None) -> None:
        options = make_config(
            enable_remote_cache_accessible=True,
            sync_kv_timeout=20_000,
            listen_ip_info="127.0.0.1:0",
            mem_pool_cfg=json.dumps({"memory_size": _TENSORS * _EXTENT * (len(_BLOCKS) + 1)}),
            host_mem_pool_cfg=json.dumps({"memory_size": 2 * _TENSORS * _EXTENT}),
            extra={"llm.Transport": transport},
            gpu=device is None,
        )
        self.instance = LLMDataDist(role, 1 if role is LLMRole.PROMPT else 2, device=device)
        self.instance.init(options)
        self.manager, self._through = self.instance.cache_manager, Bytes(_EXTENT)

    def read(self, cache: Cache) -> Rows:
        tensors = [self._through.read(at, _EXTENT) for at in cache.tensor_addrs]
        return np.stack(tensors).reshape(_TENSORS, *cache.cache_desc.shape)

    def write(self, cache: Cache, rows: Rows) -> None:
        for at, content in zip(cache.tensor_addrs, rows, strict=True):
            self._through.write(at, content)


def peer() -> None:
    """Publish a cache for each size of blocks, and one in host memory; tell the checksum of one when asked."""
    side = Side(LLMRole.PROMPT, sys.argv[-1], CudaDevice(0))
    caches = [side.manager.allocate_blocks_cache(_desc(block), BlocksCacheKey(1, i)) for i, block in enumerate(_BLOCKS)]
    for model, cache in enumerate(caches):
        side.write(cache, _content(model))
    host = side.manager.allocate_blocks_cache(_desc(4096, Placement.HOST), BlocksCacheKey(1, _HOST))
    for view, content in zip(views.tensor_views(host), _content(_HOST), strict=True):
        view[:] = content.view(np.int8)
    tell(port=side.instance.listen_port)
    for line in sys.stdin:
        wrong = len(fakecuda.load().state().violations) if FAKE else 0
        tell(state=[crc32(side.read(caches[int(line)]).tobytes()), wrong])


class Pair(Side):
    """The other side, linked to a peer in a process of its own, which ends with this one."""

    def __init__(self, transport: str) -> None:
        command = [sys.executable, "-m", "tests.device.gpu_check", "--section", "peer", transport]
        self.peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        super().__init__(LLMRole.DECODER, transport, None)
        self.instance.link_clusters([cluster_info(1, self._answer()["port"])], 10_000)

    def _answer(self) -> dict[str, Any]:
        assert self.peer.stdout is not None
        answered: dict[str, Any] = json.loads(self.peer.stdout.readline())
        return answered

    def state(self, model: int) -> list[int]:
        """Return the checksum of a cache of the peer, and how often it used the fake driver wrongly."""
        print(model, file=self.peer.stdin, flush=True)
        found: list[int] = self._answer()["state"]
        return found

    def pull(self, model: int, cache: Cache, blocks: Any, into: Any) -> None:
        self.manager.pull_blocks(BlocksCacheKey(1, model), cache, src_blocks=blocks, dst_blocks=into)


def _library(transport: str) -> None:
    """Move every byte each way, and measure; then go on after the peer's death."""
    pair = Pair(transport)
    for model, block in enumerate(_BLOCKS):
        cache, content, all_rows = pair.manager.allocate_blocks_cache(_desc(block)), _content(model), _EXTENT // block
        every, into, back = np.arange(all_rows), *(np.random.default_rng(i).permutation(all_rows) for i in (1, 2))
        rates = {"pull": rate(content.nbytes, partial(pair.pull, model, cache, every, into))}
        rows = pair.read(cache)
        check(f"every byte of a pull of blocks of {block}", (rows[:, into] == content).all())
        link = pair.instance.explain(1)
        right = link.transport == transport and "not mapped" not in link.reason
        check(f"the link uses {transport} for all regions", right, transport=link.transport, reason=link.reason)
        one = typical(partial(pair.pull, model, cache, [0], [int(into[0])]), 200)
        push = partial(pair.manager.push_blocks, BlocksCacheKey(1, model), cache, every, back)
        rates["push"] = rate(content.nbytes, push)
        content[:, back] = rows
        check(f"every byte of a push of blocks of {block}", pair.state(model) == [crc32(content.tobytes()), 0])
        tell(table=f"{transport}, GB/s", KiB=block >> 10, **rates, us_of_one_block=round(one * 1e6, 1))
        if block == _BLOCKS[-1]:
            _copies_and_swaps(pair, cache, rows)
            _death(pair, cache, model)
        pair.manager.deallocate_blocks_cache(cache)
    pair.instance.finalize()
    check_use()


def _copies_and_swaps(pair: Pair, cache: Cache, rows: Rows) -> None:
    pair.manager.copy_blocks(cache, {0: [1], 1: [2, 3]})
    rows[:, 1:4] = rows[:, :1]
    check("every byte of a chain of copies, in its order", (pair.read(cache) == rows).all())
    memory, desc, n = np.zeros_like(rows), _desc(rows.shape[2], Placement.HOST), rows.shape[1]
    pageable = Cache.create_cpu_cache(desc, [tensor.ctypes.data for tensor in memory])
    pinned = pair.manager.allocate_blocks_cache(desc)
    for name, host, tensors in (("pageable", pageable, list(memory)), ("pinned", pinned, views.tensor_views(pinned))):
        pair.manager.swap_blocks(cache, host, {i: n - 1 - i for i in range(n)})
        rows = np.ascontiguousarray(rows[:, ::-1])
        check(f"every byte of a swap to {name} memory", (np.stack(tensors).view(np.uint8) == rows).all())
        pair.manager.swap_blocks(host, cache, {i: i for i in range(n)})
        check(f"every byte of a swap from {name} memory", (pair.read(cache) == rows).all())
    pair.manager.deallocate_blocks_cache(pinned)


def _raised(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except LLMException as error:
        return error
    return None


def _death(pair: Pair, cache: Cache, model: int) -> None:
    pair.peer.kill()
    pair.peer.wait()
    began, error = time.monotonic(), None
    while error is None and time.monotonic() < began + 20:
        error = _raised(partial(pair.pull, model, cache, [0], [0]))
    check("a pull fails once the peer is dead", error is not None, error=repr(error), seconds=time.monotonic() - began)
    rows = pair.read(cache)
    pair.manager.copy_blocks(cache, {1: [0]})
    rows[:, 0] = rows[:, 1]
    check("copies go on after the peer's death", (pair.read(cache) == rows).all())


library_shm, library_tcp = partial(_library, "shm"), partial(_library, "tcp")


def lost() -> None:
    """Lose the context; the library must say so at once, and go on with host memory."""
    pair, every = Pair("shm"), np.arange(_EXTENT // 4096)
    cache, host = (pair.manager.allocate_blocks_cache(_desc(4096, each)) for each in (Placement.DEVICE, Placement.HOST))
    if (child := os.fork()) == 0:
        error = _raised(lambda: Device.open(0))
        os._exit(isinstance(error, DeviceError) and error.code)
    check("a forked child cannot use the device", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3)
    on, (at, handle) = stream(), mapped(2 * MIB)
    unmap(at, handle)
    cu.launch(cu.kernel(PTX), [at], [at + MIB], [(0, 0, 4096)], on)
    ask("a kernel at unmapped addresses", "ILLEGAL_ADDRESS", answer("cuStreamSynchronize", on))
    for turn in ("first", "second"):
        call = partial(pair.manager.copy_blocks, cache, {0: [1]})
        error, spent = milliseconds(partial(_raised, call))
        check(f"DeviceError by the {turn} call after a lost context", isinstance(error, DeviceError), error=str(error))
        tell(note=f"ms of the {turn} call", value=spent)
    pair.pull(_HOST, host, every, every)
    shown = np.stack(views.tensor_views(host)).view(np.uint8)
    check("caches in host memory go on", (shown == _content(_HOST)).all())
    pair.instance.finalize()


def torch_views() -> None:
    """Let torch, if it has CUDA, write a cache and read it."""
    if FAKE or find_spec("torch") is None or not (torch := import_module("torch")).cuda.is_available():
        return
    side, content = Side(LLMRole.DECODER, "auto", CudaDevice(0)), _content(0)
    cache = side.manager.allocate_blocks_cache(_desc(4096))
    for view, tensor in zip(views.torch_views(cache), content, strict=True):
        view.copy_(torch.from_numpy(tensor.view(np.int8)))
    torch.cuda.synchronize()
    check("torch writes what the library reads", (side.read(cache) == content).all())
    side.manager.copy_blocks(cache, {0: [1]})
    same = [bool((each[0] == each[1]).all()) for each in views.torch_views(cache)]
    check("torch reads what the library writes", all(same))
