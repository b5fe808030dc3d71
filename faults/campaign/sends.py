"""Layer-wise transfers of the campaign: by key, and without remote cache access to raw addresses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from faults.campaign.producer import blocks_key
from llm_datadist import LLMStatusCode, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.errors import LLMException
from tests.support.layers import Always

if TYPE_CHECKING:
    from faults.campaign.directory import Found
    from faults.campaign.memory import Destination
    from faults.campaign.scene import Scene

#: Of one transfer: each has ``sync_kv_timeout`` for itself.
LAYERS: Final = 2
_SLACK_SECONDS: Final = 15.0


def send(scene: Scene, found: Found, letters: Destination, sources: list[int], rows: list[int], layers: range) -> None:
    """Send layers, and wait until the transfer has ended; raise what came of it."""
    config: Any
    if scene.epoch.rca:
        config = TransferWithCacheKeyConfig(blocks_key(found), layers, layers)
    else:
        addresses = np.frombuffer(found.extra, "<u8")[2 * layers.start : 2 * layers.stop]
        config = TransferConfig(found.cluster_id, addresses.tolist(), layers)
    task = scene.cm.transfer_cache_async(letters.cache, Always(), [config], sources, rows)
    # Nothing of it may go on: what is sent is written anew afterwards.
    code = task.synchronize(int((LAYERS * scene.budget + _SLACK_SECONDS) * 1e3))
    if code is not LLMStatusCode.LLM_SUCCESS:
        raise task.errors[0] or LLMException("a transfer that failed has no error", status_code=code)
