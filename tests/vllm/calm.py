"""The connector, in servers whose processes sleep while they wait for each other: for more ranks than cores.

vLLM's processes wait for each other by spinning, for a second after each message; as long as blocks are kept for a
reader there is a message each millisecond. Three ranks that spin on two cores, which other programs need as well, leave
other threads waiting for seconds: links were silent for so long that they ended. Nothing of the connector is changed.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from llm_datadist.integrations.vllm import LLMDataDistConnector

__all__ = ["CalmConnector"]


def _sleep(_: Any, timeout_ms: int | None = None) -> None:
    time.sleep(0.0005)


SpinCondition.wait = _sleep  # in the engine's process and in those of its ranks: each imports this module


class CalmConnector(LLMDataDistConnector):
    """Is the connector."""
