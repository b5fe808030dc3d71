"""Devices whose memory caches with Placement.DEVICE use, and the order with their kernels. An extension."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from llm_datadist._checks import check_int32, check_rule, check_uint64
from llm_datadist._memory.cuda import CudaDevice
from llm_datadist._native import AFTER, StreamEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CudaDevice", "after"]


@contextmanager
def after(stream: object, device: int | None = None) -> Iterator[None]:
    """Let copies begin only once a stream has done what it has been given before this block.

    It holds for calls in the block, also asynchronous ones: pulls, pushes, copies, swaps, digests. Their threads wait,
    no other does; a call whose time ends first has moved nothing. Nested blocks wait for all their streams.

    What a peer reads or writes here by itself does not wait: synchronize the stream before you tell the peer.

    Args:
        stream: A ``torch.cuda.Stream``, or the handle of a CUDA stream as an integer; 0 is the default stream.
        device: Number of the GPU whose stream it is. A torch stream knows it.

    Raises:
        TypeError: ``stream`` is neither.
        ParamError: A handle without ``device``.
        DeviceError: No stream of that GPU, or one whose work is being captured into a graph. Calls in the block raise
            it, too, if the GPU fails, or if they have no deadline and the work takes more than a minute.
        LLMException: There is no driver, or no such GPU (``LLM_FEATURE_NOT_ENABLED``).
    """
    if hasattr(stream, "cuda_stream"):
        stream, device = stream.cuda_stream, getattr(stream, "device_index", device)
    handle = check_uint64("stream", stream)
    check_rule(device is not None, "device: name the GPU of a stream that is given by its handle")
    token = AFTER.set(StreamEvent(check_int32("device", device), handle, AFTER.get()))
    try:
        yield
    finally:
        AFTER.reset(token)
