"""swap_blocks: blocks between device and host memory of one process (R10).

| direction | device needs no staging | device needs staging |
|---|---|---|
| out (device -> host) | native copy, up to 4 threads | 4 worker threads copy from the device |
| in (host -> device) | native copy, up to 4 threads | workers fill four device buffers, one thread empties them |

Fewer workers only where fewer CPUs are usable. The four staging buffers have the size of a block, come from the device
itself, not from mem_pool_cfg, are taken at the first swap-in and given back at finalize.
"""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from llm_datadist import native
from llm_datadist.errors import OutOfMemory
from llm_datadist.metrics import SwapStatistics

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.memory.device import Device
    from llm_datadist.memory.segment import Segment
    from llm_datadist.native import Plan, Tensors

__all__ = ["SwapEngine"]

_WORKERS: Final = 4
_STAGING_BUFFERS: Final = 4


class SwapEngine:
    """Owns the swap workers and the staging buffers of one LLMDataDist.

    Callers' threads swap, one at a time; the workers exist from the first swap to :meth:`close`.

    Args:
        device: What DEVICE placement means.
        cpus: How many CPUs there are to use; None: as many as this process may use.
    """

    def __init__(self, device: Device, cpus: int | None = None) -> None:
        self._device = device
        self._lock = threading.Lock()  # one swap at a time: the staging buffers are one set
        self.workers = min(_WORKERS, native.usable_cpus() if cpus is None else cpus)
        self._copy_pool: native.CopyPool | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._staging: list[Segment] = []

    def swap(self, plan: Plan, dst: Tensors, src: Tensors, *, block_bytes: int, to_device: bool) -> None:
        """Carry out a plan between host and device memory, whose runs are whole blocks of ``block_bytes``.

        Raises:
            OutOfMemory: The device cannot provide the staging buffers; nothing was copied.
        """
        if plan.nbytes == 0:
            return
        with self._lock:
            if not self._device.needs_staging:
                if self._copy_pool is None:
                    self._copy_pool = native.CopyPool(self.workers)
                native.execute(plan, dst, src, self._copy_pool, native.NO_DEADLINE)
            elif to_device:
                self._swap_in(plan, dst, src, block_bytes)
            else:
                self._swap_out(plan, dst, src)

    def statistics(self) -> SwapStatistics:
        """Return workers and staging bytes."""
        return SwapStatistics(self.workers, sum(segment.nbytes for segment in self._staging))

    def close(self) -> None:
        """End the workers and give the staging memory back. Idempotent."""
        with self._lock:
            if self._copy_pool is not None:
                self._copy_pool.close()
                self._copy_pool = None
            if self._threads is not None:
                self._threads.shutdown()
                self._threads = None
            self._give_staging_back()

    def _give_staging_back(self) -> None:
        for segment in self._staging:
            segment.close()
        self._staging.clear()

    # --- devices with staging: under the lock ----------------------------------------------------------------------

    def _executor(self) -> ThreadPoolExecutor:
        if self._threads is None:
            # One more than the workers: the thread that empties the staging buffers.
            self._threads = ThreadPoolExecutor(self.workers + 1, thread_name_prefix="llm-datadist-swap")
        return self._threads

    def _swap_out(self, plan: Plan, dst: Tensors, src: Tensors) -> None:
        copies = list(_spans(plan, dst, src))
        if plan.ordered:
            for copy in copies:
                self._device.copy_from_device(*copy)
            return

        def work(first: int) -> None:
            for copy in copies[first :: self.workers]:
                self._device.copy_from_device(*copy)

        _finish([self._executor().submit(work, worker) for worker in range(self.workers)])

    def _swap_in(self, plan: Plan, dst: Tensors, src: Tensors, block_bytes: int) -> None:
        self._take_staging(block_bytes)
        copies = [block for span in _spans(plan, dst, src) for block in _blocks(span, block_bytes)]
        if plan.ordered:
            buffer = self._staging[0].address
            for target, source, nbytes in copies:
                self._device.copy_to_device(buffer, source, nbytes)
                self._device.copy_on_device(target, buffer, nbytes)
            return
        buffers = [segment.address for segment in self._staging]
        _Pipeline(self._device, buffers).run(copies, self._executor(), self.workers)

    def _take_staging(self, nbytes: int) -> None:
        """Make sure that there are four buffers of at least ``nbytes``, the block size."""
        if self._staging and self._staging[0].nbytes >= nbytes:
            return
        self._give_staging_back()
        try:
            for _ in range(_STAGING_BUFFERS):
                self._staging.append(
                    self._device.allocate(nbytes, "swap-staging", peers_may_write=False, prefault=False)
                )
        except BaseException as error:
            self._give_staging_back()
            if not isinstance(error, OutOfMemory):
                raise
            raise OutOfMemory(
                f"swap_blocks: no device memory for {_STAGING_BUFFERS} staging buffers of {nbytes} bytes "
                f"({_STAGING_BUFFERS * nbytes} in all): {error}",
                pool=error.pool,
                requested=_STAGING_BUFFERS * nbytes,
                free=error.free,
                largest_hole=error.largest_hole,
            ) from error


class _Pipeline:
    """Host -> buffer by several workers, buffer -> device by one. Lives for one swap-in."""

    def __init__(self, device: Device, buffers: list[int]) -> None:
        self._device = device
        self._empty: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[tuple[int, int, int] | None] = queue.SimpleQueue()
        self._failed = threading.Event()
        for buffer in buffers:
            self._empty.put(buffer)

    def run(self, copies: list[tuple[int, int, int]], threads: ThreadPoolExecutor, workers: int) -> None:
        drain = threads.submit(self._drain)
        fills = [threads.submit(self._fill, copies[worker::workers]) for worker in range(workers)]
        try:
            _finish(fills)
        finally:
            self._full.put(None)
            drain.result()

    def _fill(self, copies: list[tuple[int, int, int]]) -> None:
        for target, source, nbytes in copies:
            buffer = self._empty.get()
            if self._failed.is_set():
                self._empty.put(buffer)
                return
            try:
                self._device.copy_to_device(buffer, source, nbytes)
            except BaseException:
                # The other workers must not wait for a buffer that never comes back.
                self._failed.set()
                self._empty.put(buffer)
                raise
            self._full.put((target, buffer, nbytes))

    def _drain(self) -> None:
        error: BaseException | None = None
        while (work := self._full.get()) is not None:
            target, buffer, nbytes = work
            try:
                if error is None:
                    self._device.copy_on_device(target, buffer, nbytes)
            except BaseException as failure:  # noqa: BLE001 (kept until the workers have ended)
                error = failure
                self._failed.set()
            finally:
                self._empty.put(buffer)
        if error is not None:
            raise error


def _spans(plan: Plan, dst: Tensors, src: Tensors) -> Iterator[tuple[int, int, int]]:
    """Yield (dst address, src address, bytes), tensor by tensor, in the order of the runs."""
    runs = plan.runs.tolist()
    for i in range(plan.count):
        target, source = int(dst.bases[plan.dst_first + i]), int(src.bases[plan.src_first + i])
        for to, at, nbytes in runs:
            yield target + to, source + at, nbytes


def _blocks(span: tuple[int, int, int], block_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cut a merged run into the blocks that fit a staging buffer."""
    target, source, nbytes = span
    for at in range(0, nbytes, block_bytes):
        yield target + at, source + at, block_bytes


def _finish(futures: list[Future[None]]) -> None:
    """Wait for all, then raise the first error."""
    errors = [error for error in (future.exception() for future in futures) if error is not None]
    if errors:
        raise errors[0]
