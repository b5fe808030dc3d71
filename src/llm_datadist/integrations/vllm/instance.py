"""The LLMDataDist of a connector's half, from the connector's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.config import DEVICE_MEMORY
from llm_datadist.errors import ParamError
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from llm_datadist.devices import CudaDevice

_PAGE_SHIFT: Final = 16


def init_options(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the connector's option ``options``: further options of ``init``."""
    given = vllm_config.kv_transfer_config.get_from_extra_config("options", {})
    if DEVICE_MEMORY in given:
        raise ParamError(f"options: {DEVICE_MEMORY}={given[DEVICE_MEMORY]}: pool and staging decide that; leave it out")
    return {str(key): str(value) for key, value in dict(given).items()}


def start_instance(
    vllm_config: VllmConfig, cluster_id: int, host: str | None, pool_bytes: int, gpu: CudaDevice | None = None
) -> LLMDataDist:
    """Return an initialised LLMDataDist with a pool of ``pool_bytes``, listening at ``host`` unless that is None.

    The pool lies in ``gpu``; in host memory if that is None.
    """
    option = vllm_config.kv_transfer_config.get_from_extra_config
    config = LLMConfig(device_id=0, enable_cache_manager=True, sync_kv_timeout=int(option("timeout_ms", 10_000)))
    if pool_bytes:
        config.mem_pool_cfg = str(-(-pool_bytes >> _PAGE_SHIFT) << _PAGE_SHIFT)  # in whole pages
    if host is not None:
        config.listen_ip_info = show_address((host, 0))
    options = config.generate_options() | {"llm.Transport": str(option("transport", "auto"))}
    datadist = LLMDataDist(LLMRole.DECODER if host is None else LLMRole.PROMPT, cluster_id, device=gpu)
    datadist.init(options | init_options(vllm_config))
    return datadist
