"""Engines of this process with a prefix store in another: what passes through the connector can be looked into."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any, ClassVar, Self

from vllm.config import KVTransferConfig
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.integrations.vllm import LLMDataDistStoreConnector
from llm_datadist.store import StoreClient, StoreOptions
from llm_datadist.views import tensor_views
from servers import store_connector

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorRole
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["BLOCK", "Engine", "Other", "RemoteStore", "SeenStoreConnector"]

BLOCK = 128
Tokens = list[int]


class RemoteStore:
    """A store in a process that a test may stop, kill and spoil."""

    def __init__(self, nbytes: int = 256 << 20, namespaces: int = 4) -> None:
        self._nbytes = nbytes
        command = [sys.executable, "-m", "tests.vllm.remote_store", str(nbytes), str(namespaces)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.address = f"127.0.0.1:{int(self._read())}"

    def _read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def figures(self) -> dict[str, int]:
        """Return the sums over all namespaces; the store has checked its tables."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: list[dict[str, int]] = json.loads(self._read())
        return {name: sum(each[name] for each in found) for name in found[0]} if found else {}

    def zero(self) -> None:
        """Overwrite all slots, as a fault of the memory would."""
        pid, zeroed = self.process.pid, 0
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for line in maps:
                begin, end = (int(each, 16) for each in re.split("[- ]", line)[:2])
                if "memfd:" in line and end - begin == self._nbytes:
                    memory.seek(begin)
                    zeroed += memory.write(bytes(end - begin))
        assert zeroed, "the pool was not found"

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Let it stand still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()
        self.kill()


class SeenStoreConnector(LLMDataDistStoreConnector):
    """Calls ``before_load`` between a lookup and its load; keeps digests of what is to be saved, by key."""

    before_load: ClassVar[Callable[[], object] | None] = None
    digests: ClassVar[dict[bytes, set[bytes]]] = {}
    parts: ClassVar[list[SeenStoreConnector]] = []
    layers: ClassVar[list[torch.Tensor]] = []
    preempted: ClassVar[set[str]] = set()

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.parts.append(self)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        if num_external_tokens and (before := type(self).before_load) is not None:
            before()
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self.preempted.update(scheduler_output.preempted_req_ids or ())
        return super().build_connector_meta(scheduler_output)

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        self.layers[:] = kv_caches.values()

    def wait_for_save(self) -> None:
        order = self._get_connector_metadata().save
        if order is not None:
            for key, block in zip(*order[1:3], strict=True):
                self.digests.setdefault(key, set()).add(self.digest(block))
        super().wait_for_save()

    @classmethod
    def digest(cls, block: int) -> bytes:
        """Return a digest of a block as it is in vLLM's memory, layer by layer."""
        sizes = {each.data_ptr(): each.stride(0) * each.element_size() for each in cls.layers}
        found = hashlib.sha256()
        for address, nbytes in sorted(sizes.items()):
            found.update(ctypes.string_at(address + block * nbytes, nbytes))
        return found.digest()

    @property
    def clients(self) -> list[StoreClient]:
        return [getattr(self._half, "lookups", self._half).client]


class Other:
    """Another client of an engine's namespace, with a cache of its own."""

    def __init__(self, store: RemoteStore, blocks: int) -> None:
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.mem_pool_cfg = json.dumps({"memory_size": 64 << 20, "page_shift": 16})
        self.datadist = LLMDataDist(LLMRole.DECODER, secrets.randbits(63))
        self.datadist.init(config.generate_options())
        space = SeenStoreConnector.parts[0].clients[0].lookup([b"no key"]).namespace
        self.client = StoreClient(self.datadist, store.address, space, StoreOptions(lookup_ms=5000))
        assert self.client.connect(60)
        sizes = [each.stride(0) * each.element_size() for each in SeenStoreConnector.layers]
        desc = CacheDesc(len(sizes), [blocks, sizes[0]], DataType.DT_INT8)
        self.cache = self.datadist.cache_manager.allocate_blocks_cache(desc)

    def save(self, number: int) -> int:
        """Save so many keys; return the number that the store took."""
        return self.client.save([secrets.token_bytes(32) for _ in range(number)], self.cache, list(range(number)))

    def digest_of(self, key: bytes) -> bytes | None:
        """Return the digest of a key's block as the store has it, None without one."""
        hit = self.client.lookup([key])
        if not hit:
            return None
        self.client.load(hit, self.cache, [0])
        return hashlib.sha256(b"".join(each[0].tobytes() for each in tensor_views(self.cache))).digest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.datadist.finalize()


class Engine:
    """An engine; at most one lives at a time, because vLLM has one connector for each process."""

    def __init__(self, model: Path, store: RemoteStore | None, blocks: int = 64, **changes: Any) -> None:
        extra = changes.pop("extra", {})
        patient = {"lookup_ms": 5000} | extra.get("store_options", {})
        extra = extra | {"store_options": patient}
        SeenStoreConnector.parts.clear()
        transfer = None
        if store is not None:
            transfer = store_connector(store.address, **extra).config("both")
            transfer |= {"kv_connector": "SeenStoreConnector", "kv_connector_module_path": "tests.vllm.stored"}
            transfer = KVTransferConfig(**changes.pop("transfer", lambda given: given)(transfer))
        options = {"dtype": "float32", "max_model_len": 2304, "max_num_batched_tokens": 256, "enforce_eager": True}
        self.llm = LLM(str(model), num_gpu_blocks_override=blocks, kv_transfer_config=transfer, **options | changes)
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        if store is not None:
            self.answers([[5, 6]], new=1)  # the ranks tell the scheduler their namespaces
            assert all(client.connect(60) for part in SeenStoreConnector.parts for client in part.clients)

    def answers(
        self, prompts: Sequence[Tokens], new: int = 8, salt: str | None = None, lora: LoRARequest | None = None
    ) -> list[tuple[Tokens, int]]:
        """Return each answer, and the number of tokens of its prompt that were not computed."""
        asked: list[Any] = [{"prompt_token_ids": each} | ({"cache_salt": salt} if salt else {}) for each in prompts]
        sampling = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
        found = self.llm.generate(asked, sampling, use_tqdm=False, lora_request=lora)
        return [(list(each.outputs[0].token_ids), each.num_cached_tokens or 0) for each in found]

    def forget(self) -> None:
        """Wait until all is saved; empty the engine's own prefix cache, which must be free of references."""
        while self.scheduler.has_requests():
            self.llm.llm_engine.step()
        assert self.scheduler.get_kv_cache_usage() == 0
        assert self.scheduler.reset_prefix_cache()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        SeenStoreConnector.before_load = None
        self.llm.llm_engine.engine_core.shutdown()
