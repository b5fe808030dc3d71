"""Names that both halves of the connector import from vLLM, for a machine with an accelerator but without vLLM.

``PYTHONPATH=tests/vllm/stand_in`` puts it in vLLM's place for test_staging.py, test_staged_requests.py and
test_gpu_pool.py, which run no engine. Everywhere else the tests run with vLLM, which decides whether these names are
still true.
"""

from __future__ import annotations

import enum
import logging
import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

__all__: list[str] = []


class SamplingParams(SimpleNamespace):
    pass


class RequestStatus(enum.Enum):
    WAITING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED_STOPPED = enum.auto()
    FINISHED_LENGTH_CAPPED = enum.auto()
    FINISHED_ABORTED = enum.auto()


class Request:
    def __init__(self, request_id: str, prompt_token_ids: list[int], *_: object) -> None:
        self.request_id, self.prompt_token_ids = request_id, prompt_token_ids
        self.status = RequestStatus.WAITING
        self.num_prompt_tokens, self.num_computed_tokens, self.num_output_tokens = len(prompt_token_ids), 0, 0
        self.kv_transfer_params: Any = None
        self.prompt_embeds = self.lora_request = self.cache_salt = None
        self.mm_features: list[Any] = []


class KVConnectorTransferResults(NamedTuple):
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclass
class KVConnectorStats:
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int
    num_kv_heads: int
    head_size: int
    dtype: Any

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads


_V1 = "distributed.kv_transfer.kv_connector.v1"
_NAMES: dict[str, dict[str, Any]] = {
    "config": {"KVTransferConfig": None},
    "config.vllm": {"get_current_vllm_config_or_none": None},
    "distributed.kv_events": {"MEDIUM_CPU": "CPU", "BlockStored": None},
    "entrypoints.llm": {"LLM": None},
    "utils.hashing": {"get_hash_fn_by_name": str},
    "v1.core.kv_cache_utils": {"resolve_none_hash_seed": str}
    | dict.fromkeys(("generate_block_hash_extra_keys", "maybe_convert_block_hash", "to_event_extra_keys")),
    "distributed.kv_transfer": {"get_kv_transfer_group": None},
    "distributed.kv_transfer.kv_connector.factory": {
        "KVConnectorFactory": SimpleNamespace(register_connector=lambda *_: None)
    },
    f"{_V1}.base": {
        "KVConnectorTransferResults": KVConnectorTransferResults,
        "KVConnectorRole": enum.Enum("KVConnectorRole", ["SCHEDULER", "WORKER"]),
    }
    | {
        name: type(name, (), {})
        for name in (
            "KVConnectorBase_V1",
            "KVConnectorHandshakeMetadata",
            "KVConnectorMetadata",
            "KVConnectorWorkerMetadata",
            "SupportsHMA",
        )
    },
    f"{_V1}.metrics": {"KVConnectorStats": KVConnectorStats, "KVConnectorPromMetrics": object},
    "distributed.parallel_state": {"get_tensor_model_parallel_rank": lambda: 0},
    "logger": {"init_logger": logging.getLogger},
    "lora.request": {"LoRARequest": SimpleNamespace},
    "platforms": {"current_platform": SimpleNamespace(device_type="cpu")},
    "sampling_params": {"SamplingParams": SamplingParams},
    "v1.kv_cache_interface": {
        "FullAttentionSpec": FullAttentionSpec,
        "MLAAttentionSpec": type("MLAAttentionSpec", (FullAttentionSpec,), {}),
        "SlidingWindowSpec": type("SlidingWindowSpec", (FullAttentionSpec,), {}),
        "iter_layer_specs": lambda spec: iter([spec]),
    },
    "v1.metrics.cache_hit_source": {"CacheHitSource": enum.Enum("CacheHitSource", ["P2P", "HOST"])},
    "v1.metrics.utils": {"create_metric_per_engine": None},
    "v1.request": {"Request": Request, "RequestStatus": RequestStatus},
    "version": {"__version__": "0"},
}


def _install() -> None:
    for path, names in _NAMES.items():
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            name = f"{__name__}.{'.'.join(parts[:length])}"
            sys.modules.setdefault(name, ModuleType(name)).__path__ = []
        vars(sys.modules[f"{__name__}.{path}"]).update(names)


_install()
