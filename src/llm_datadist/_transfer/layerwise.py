"""Layer-wise jobs: each layer is sent once the model has computed it (interface R18).

A job has a daemon thread and ends when all is sent, at its first failure, or by ``finalize``. Then every destination
has a result. ``finalize`` leaves a thread behind if its synchronizer does not return; the job takes no further step.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_uint32
from llm_datadist._deadline import Deadline
from llm_datadist._log import calls_logger as logger
from llm_datadist._native.public_call import OfProcess, do_what_was_put_off, public_call, public_calls
from llm_datadist._transfer.addresses import RemoteOffset, locate
from llm_datadist._transfer.initiator import PushDestination, TransferOp
from llm_datadist._transfer.meters import CallSpan
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.errors import (
    CacheMismatch,
    CacheNotFound,
    DeadlineExceeded,
    LLMException,
    LLMStatusCode,
    ParamError,
    ProtocolError,
    StateError,
    TransferFailed,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from llm_datadist._cache.geometry import CachePair, LayerPlan
    from llm_datadist._cache.registry import Entry
    from llm_datadist._native import Plan, Timer
    from llm_datadist._transfer.addresses import Locations
    from llm_datadist._transfer.initiator import Initiator
    from llm_datadist._transfer.meters import Meters
    from llm_datadist.types.layerwise import LayerSynchronizer

TENSORS_PER_LAYER: Final = 2  # K and V, always (interface §6.14)
_WHAT: Final = "transfer_cache_async"
_GRACE_MS: Final = 1000  # wait of finalize for a thread, beyond the deadline of its transfer
_FOR_EVER_MS: Final = 1 << 40
_POLL_SECONDS: Final = 0.01


class TransferJob:
    """Work of a :class:`CacheTask`, with one delivery per config.

    Owns: the local use of the source, which ``release`` ends with the job.
    Threads: :meth:`run` in ``thread``, any for the rest. Nothing is called under the lock.
    ``timeout_code`` is the interface's status of a time-out; ``call`` receives the result.
    """

    def __init__(
        self,
        name: str,
        deliveries: Sequence[Delivery],
        synchronizer: LayerSynchronizer,
        release: Callable[[], None],
        timeout_code: LLMStatusCode = LLMStatusCode.LLM_TIMEOUT,
        call: CallSpan | None = None,
    ) -> None:
        self.name = name
        self._call = call or CallSpan()
        self.timeout_code = timeout_code
        self.sent = 0  # layers, over all destinations
        self._deliveries = list(deliveries)
        self._layers = sorted({layer for each in deliveries for layer in each.layers})
        self._synchronizer: LayerSynchronizer | None = synchronizer
        self._release: Callable[[], None] | None = release
        self._lock = threading.Lock()  # guards the next five
        self._results: list[LLMStatusCode | None] = [None] * len(deliveries)
        self._errors: list[BaseException | None] = [None] * len(deliveries)
        self._first: LLMStatusCode = LLMStatusCode.LLM_SUCCESS
        self._sending = False
        self._ended: LLMException | None = None
        self._done = threading.Event()
        self.thread = threading.Thread(target=copy_context().run, args=(self.run,), name=name, daemon=True)

    def run(self) -> None:
        with self._call as call:
            try:
                for layer in self._layers:
                    selected = [i for i, each in enumerate(self._deliveries) if layer in each.layers]
                    if not (self._synchronized(layer, selected) and all(self._send_to(i, layer) for i in selected)):
                        break
            except BaseException as error:  # noqa: BLE001 (a SystemExit of the user's code is no success)
                self._fail(error, "its thread died")
            self._finish()
            call.status, _, errors = self.results()
            call.error = next((error for error in errors if error is not None), None)

    @public_call
    def _send_to(self, i: int, layer: int) -> bool:
        """Return False if the job is over."""
        with self._lock:
            self._sending = self._ended is None  # then end() leaves the rest to this thread
        if not self._sending:
            return False
        try:
            self._deliveries[i].send(layer)
        except Exception as error:  # noqa: BLE001 (kept, logged and reported)
            self._fail(error, f"layer {layer} was not sent to destination {i}", [i])
            return False  # still "sending", so run() finishes the job
        self.sent += 1
        last = layer == self._deliveries[i].layers[-1]
        with self._lock:
            self._sending = False
            if last:
                self._results[i] = LLMStatusCode.LLM_SUCCESS
            return self._ended is None  # else end() has left the rest to this thread

    def _synchronized(self, layer: int, selected: list[int]) -> bool:
        """Wait until a layer is ready; return False if the job is over."""
        if (synchronizer := self._synchronizer) is None:
            return False  # the job has ended
        try:
            ready = synchronizer.synchronize_layer(layer, None)
        except BaseException as error:  # noqa: BLE001 (as in run)
            self._fail(error, f"synchronize_layer({layer}) raised")
            return False
        if not ready:
            reason, invalid = f"synchronize_layer({layer}) returned {ready!r}", LLMStatusCode.LLM_PARAM_INVALID
            why = LLMException(f"{self.name}: {reason}: not to be sent, the job stops", status_code=invalid)
            self._fail(why, reason, selected)
        return bool(ready)

    @public_call
    def _fail(self, cause: BaseException, reason: str, failed: Collection[int] = ()) -> None:
        """Give unfinished destinations ``cause``, and its status to those in ``failed``, LLM_FAILED to the others.

        After :meth:`end` its reason is the cause for all, because ended links cause any error.
        """
        if self._ended is not None:
            cause, failed = self._ended, range(len(self._results))
        with self._lock:
            if None not in self._results:
                return
            self._first = self._code_of(cause if failed else None)
            for i, result in enumerate(self._results):
                if result is None:
                    self._results[i] = self._code_of(cause if i in failed else None)
                    self._errors[i] = cause
        logger.warning("%s stops: %s: %r", self.name, reason, cause)

    def _code_of(self, error: BaseException | None) -> LLMStatusCode:
        """Return the status of an error, else LLM_FAILED."""
        if isinstance(error, DeadlineExceeded):
            return self.timeout_code
        code = error.status_code if isinstance(error, LLMException) else LLMStatusCode.LLM_FAILED
        return LLMStatusCode.LLM_FAILED if code is LLMStatusCode.LLM_SUCCESS else code

    @public_call
    def _finish(self) -> None:
        """Release the source, then be done. Idempotent."""
        with self._lock:
            release, self._release = self._release, None
        if release is None:
            return
        early = LLMException(f"{self.name}: it ended early", status_code=LLMStatusCode.LLM_FAILED)
        self._fail(self._ended or early, "the end came")  # does nothing if all have results
        self._synchronizer, self._deliveries = None, []
        try:
            release()
        finally:
            self._done.set()

    def end(self, reason: LLMException) -> None:
        """Start no further transfer; a running one is the last."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            sending = self._sending
        if not sending:
            self._finish()

    def stop(self) -> None:
        """:meth:`end` the job after an interrupt; wait for the running transfer."""
        text = f"{self.name}: its caller was interrupted"
        self.end(LLMException(text, status_code=LLMStatusCode.LLM_FAILED))
        self._done.wait()

    @property
    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_ms: int | None) -> bool:
        if threading.current_thread() is self.thread:
            raise StateError(f"{self.name}: waiting inside its own synchronizer would deadlock")
        deadline = Deadline(_FOR_EVER_MS if timeout_ms is None else timeout_ms)
        while not self._done.wait(deadline.next_turn()):
            do_what_was_put_off()  # the wait may be long
            if deadline.expired():
                return False
        return True

    @public_call
    def results(self) -> tuple[LLMStatusCode, list[LLMStatusCode | None], list[BaseException | None]]:
        """Return (first failure or success, results, errors)."""
        with self._lock:
            return self._first, list(self._results), list(self._errors)


@public_calls()
class CacheTask(OfProcess):
    """Layer-wise transfer, running or over, from ``transfer_cache_async``. Threads: any.

    A failure and ``finalize`` end the transfer, a time-out of these calls does not. Results are final.

    Source: interface §4, R18.
    """

    def __init__(self, job: TransferJob) -> None:
        self._job = job

    def synchronize(self, timeout_in_millis: int | None = None) -> LLMStatusCode:
        """Wait for the end of the transfer. May be called again.

        Args:
            timeout_in_millis: Milliseconds, uint32. Default: no limit.

        Returns:
            ``LLM_SUCCESS`` if everything was sent, else the status of the first failure, which stopped the transfer.
            ``LLM_TIMEOUT``, in v1 ``LLM_WAIT_PROCESS_TIMEOUT``, if the transfer is not over in time.

        Raises:
            TypeError, ParamError: ``timeout_in_millis`` is not a uint32.
            StateError: Called by the transfer's own synchronizer, or in a forked child.

        Source: interface §4.
        """
        return self._job.results()[0] if self._wait(timeout_in_millis) else self._job.timeout_code

    def get_results(self, timeout_in_millis: int | None = None) -> list[LLMStatusCode | None]:
        """Wait for the end of the transfer; return each config's status. May be called again.

        Args:
            timeout_in_millis: Milliseconds, uint32. Default: no limit.

        Returns:
            ``LLM_SUCCESS``: all layers of the config arrived; with all others some may have arrived.
            ``LLM_PARAM_INVALID``: layers do not fit the destination, an address lies in no cache there, or the
            synchronizer returned False. ``LLM_FAILED``: the synchronizer raised, or another config stopped the
            transfer. ``LLM_ENGINE_FINALIZED``: finalize came first. ``LLM_NOT_YET_LINK``, ``LLM_KV_CACHE_NOT_EXIST``,
            ``LLM_SUSPECT_REMOTE_ERROR`` and others: as a push. The time-out of :meth:`synchronize` for all if the
            transfer is not over in time.

        Raises:
            TypeError, ParamError, StateError: As :meth:`synchronize`.

        Source: interface §4.
        """
        over = self._wait(timeout_in_millis)
        results = self._job.results()[1]
        return results if over else [self._job.timeout_code] * len(results)

    @property
    def errors(self) -> list[BaseException | None]:
        """Error of each config, None without one so far. Extension."""
        return self._job.results()[2]

    def _wait(self, timeout_in_millis: int | None) -> bool:
        if timeout_in_millis is not None:
            timeout_in_millis = check_uint32("timeout_in_millis", timeout_in_millis)
        return self._job.wait(timeout_in_millis)

    def __repr__(self) -> str:
        _, results, _ = self._job.results()
        words = ", ".join("unfinished" if each is None else each.name for each in results)
        return f"<CacheTask {self._job.name}: {'over' if self._job.done else 'running'}; {words or 'no config'}>"


class Tasks:
    """Jobs of an engine and their threads ``llm-datadist-task-<n>``; a transfer takes at most ``patience_ms``."""

    def __init__(self, patience_ms: int) -> None:
        self._patience_ms = patience_ms
        self._lock = threading.Lock()
        self._jobs: list[TransferJob] = []
        self._numbers = itertools.count(1)
        self._stopped = False

    def name(self) -> str:
        return f"llm-datadist-task-{next(self._numbers)}"

    def start(self, job: TransferJob) -> CacheTask:
        """Run a job in its own thread, or end it and raise."""
        try:
            with self._lock:
                if self._stopped:
                    raise _finalized(job)
                self._jobs = [each for each in self._jobs if not each.done or each.thread.is_alive()]
                self._jobs.append(job)
            try:
                job.thread.start()
            except (RuntimeError, MemoryError) as error:
                text = f"{job.name}: no thread can be started: {error}"
                raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error
        except LLMException as refusal:
            job.end(refusal)
            raise
        return CacheTask(job)

    @property
    def running(self) -> int:
        return sum(not job.done for job in self._jobs)

    def finish(self) -> None:
        """Wait until all jobs have ended, or none sends in ``patience_ms``."""
        sent, limit = -1, Deadline(self._patience_ms)
        while not all(job.done for job in self._jobs):
            now = sum(job.sent for job in self._jobs)
            if now != sent:
                sent, limit = now, Deadline(self._patience_ms)
            elif limit.expired():
                return
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """Start no further transfer."""
        with self._lock:
            self._stopped = True
            jobs = list(self._jobs)
        for job in jobs:
            job.end(_finalized(job))

    def join(self) -> None:
        """Join the threads, except the caller's and those whose synchronizer does not return."""
        self.stop()
        limit = Deadline(self._patience_ms + _GRACE_MS)
        for job in self._jobs:
            if job.thread.ident is None or job.thread is threading.current_thread():
                continue  # without an ident it starts later, for an ended job
            job.thread.join(limit.remaining())
            if job.thread.is_alive():
                logger.warning("%s: its synchronizer has not returned; the thread is left to it", job.name)


def _finalized(job: TransferJob) -> StateError:
    return StateError(f"{job.name}: finalize came before its end", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


@dataclass(slots=True)
class Delivery:
    """Destination of a job. Threads: the job's."""

    initiator: Initiator
    meters: Meters
    timeout_ms: int  # of one layer
    entry: Entry  # of the source, in local use by the job
    cut: LayerPlan
    cluster_id: int
    layers: range  # of the source, in order; not empty
    destination: PushDestination = field(default_factory=PushDestination, init=False)

    def send(self, layer: int) -> None:
        """Send a layer; errors as a push."""
        raise NotImplementedError

    def push(self, part: LayerPush, deadline: Deadline, span: Timer) -> int:
        part.local, part.deadline, part.span, part.destination = self.entry, deadline, span, self.destination
        return self.initiator.run(part)


class LayerPush(TransferOp):
    """Push of ``count`` tensors into those from ``target`` on; it consumes no key.

    They go to byte ``offset`` of a located cache; if that is None, where the key names a row, or into blocks.
    """

    cut: LayerPlan
    tensor: int  # first one, of the source
    target: int
    count: int = TENSORS_PER_LAYER
    offset: int | None = None

    def plan(self, pair: CachePair) -> Plan:
        dst, offset, count = pair.remote, self.offset, self.count
        fits = self.target + count <= dst.num_tensors
        if offset is not None and (not fits or offset + self.cut.extent > dst.tensor_bytes):
            at = RemoteOffset(self.name.cache_id, self.target, offset)
            raise ProtocolError(f"{_WHAT}: {self.name} does not have what it was located at: {at}")
        if not fits:
            raise ParamError(
                f"dst_layer_range: layer {self.target // count}, the destination has {dst.num_tensors // count} "
                f"layers of {count} tensors"
            )
        if offset is None:
            offset = self.cut.offset_in(dst, pair.row)
        return self.cut.plan(self.target, self.tensor, count, offset=offset, alias=pair.same_memory)


@dataclass(slots=True)
class KeyDelivery(Delivery):
    """Delivery to a cache by key, or by id and row; ``layers[i]`` becomes ``dst_layers[i]``."""

    name: RemoteName
    dst_layers: range

    def send(self, layer: int) -> None:
        target = self.dst_layers[layer - self.layers.start]
        tensors = layer * TENSORS_PER_LAYER, target * TENSORS_PER_LAYER
        part = LayerPush(self.cut, *tensors, what=_WHAT, name=self.name, push=True)
        with self.meters.span(_WHAT, "layer %d -> layer %d of %s", layer, target, self.name) as span:
            span.nbytes = self.push(part, Deadline(self.timeout_ms), span)


@dataclass(slots=True)
class AddressDelivery(Delivery):
    """Delivery to raw addresses: K and V of each of ``layers``, in order."""

    addresses: Sequence[int]
    located: Locations | None = field(default=None, init=False)

    def send(self, layer: int) -> None:
        at = (layer - self.layers.start) * TENSORS_PER_LAYER
        here, deadline = slice(at, at + TENSORS_PER_LAYER), Deadline(self.timeout_ms)
        shown = ", ".join(f"{address:#x}" for address in self.addresses[here])
        with self.meters.span(_WHAT, "layer %d -> %s of %d", layer, shown, self.cluster_id) as span:
            if self.located is not None:
                with suppress(CacheNotFound, CacheMismatch):  # the caches have changed
                    span.nbytes = self._push_layer(layer, self.located.offsets[here], deadline, span)
                    return
            self.located = self._locate(deadline)
            span.nbytes = self._push_layer(layer, self.located.offsets[here], deadline, span)

    def _locate(self, deadline: Deadline) -> Locations:
        """Look the addresses up; TransferFailed if earlier layers are lost.

        They are if the caches have changed, and an allocated one is among them: registered memory stays the same.
        """
        before = self.located
        now = locate(self.initiator.links, self.cluster_id, self.addresses, self.cut.extent, deadline, _WHAT)
        if before is not None and before.offsets != now.offsets and (before.allocated or now.allocated):
            raise TransferFailed(
                f"{_WHAT}: the memory at dst_addrs of cluster {self.cluster_id} has been freed and allocated anew "
                f"meanwhile: cache {now.offsets[0].cache_id} is there now, and what was sent before went to cache "
                f"{before.offsets[0].cache_id}; send all of it again",
                peer=self.cluster_id,
                phase="locate",
            )
        return now

    def _push_layer(self, layer: int, offsets: Sequence[RemoteOffset], deadline: Deadline, span: Timer) -> int:
        key, value = offsets
        if value == key._replace(tensor=key.tensor + 1):
            offsets = [key]
        count, nbytes = TENSORS_PER_LAYER // len(offsets), 0
        for tensor, (cache_id, target, offset) in enumerate(offsets, layer * TENSORS_PER_LAYER):
            name = RemoteName(self.cluster_id, cache_id=cache_id)
            part = LayerPush(self.cut, tensor, target, count, offset, what=_WHAT, name=name, push=True)
            nbytes += self.push(part, deadline, span)
        return nbytes
