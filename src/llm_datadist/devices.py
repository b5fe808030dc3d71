"""Devices whose memory caches with Placement.DEVICE use. An extension."""

from llm_datadist._memory.cuda import CudaDevice

__all__ = ["CudaDevice"]
