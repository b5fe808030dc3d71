"""Checksums (``llm.Checksum``): after a transfer both sides digest their memory, and the initiator compares.

A changed, missing or misplaced byte is found, and a source that its owner changes too early. An unanswered question
fails the transfer.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._checks import check_rule
from llm_datadist._links.messages import MAX_VERIFY_RUNS, Failed, Message, RemoteFailure, Verified, Verify, failed
from llm_datadist._log import calls_logger as logger
from llm_datadist._native import BlockList, CopyPool, Plan, Tensors, surviving
from llm_datadist._native.plan import NONCE_BYTES, PlanSide, digest, split_plan
from llm_datadist._native.public_call import elsewhere
from llm_datadist._threads import Threads
from llm_datadist._transfer.arguments import check_blocks
from llm_datadist.errors import ChecksumMismatch, LLMException, LLMStatusCode, ParamError, ProtocolError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from llm_datadist._cache.local_caches import LocalCaches
    from llm_datadist._cache.registry import Entry
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._transfer.access import AccessPolicy
    from llm_datadist._transfer.resolution import Resolution

MAX_QUESTION_BYTES: Final = 64 << 20  # of memory: some 10 ms, during which questions of other peers wait
MAX_QUESTION_TENSORS: Final = 1 << 15  # of one question; their digests fill half a frame

_PIECES: Final = 1024  # about, per question of the search for the first difference
#: Runs of one question; :func:`_split_runs` may double them and add the pieces.
_MAX_RUNS: Final = MAX_VERIFY_RUNS // 2 - _PIECES
_ROW_PIECE_BYTES: Final = 4096  # precision of the search in a row
_FIRST_PAUSE: Final = 0.001  # seconds between questions to a busy peer, at first and at most
_LONGEST_PAUSE: Final = 0.05

_MAX_WAITING: Final = 256  # questions of one peer, and their bytes; beyond, the answer is LLM_LINK_BUSY
_MAX_WAITING_BYTES: Final = 8 << 20
_MAX_BUDGET_MS: Final = 24 * 3600 * 1000


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of both sides of a transfer whose bytes have arrived. Threads: the call's."""

    link: Link
    local: Entry
    remote: Resolution
    push: bool
    same_memory: bool
    deadline: Deadline
    what: str
    pool: CopyPool | None

    @elsewhere
    def verify(self, plan: Plan) -> None:
        """Compare the bytes of ``plan``, without those that a later run has overwritten (interface R26).

        Raises:
            ChecksumMismatch: Names the first difference.
            TransferFailed: The peer refused, for example because its cache has changed.
            DeadlineExceeded, PeerLost, NotLinked: No answer.
        """
        plan = surviving(plan, alias=self.same_memory and plan.dst_first == plan.src_first)
        per_tensor = plan.nbytes // plan.count if plan.count else 0
        differing: dict[int, Plan] = {}  # the peer's tensor -> the first part of it that differs
        max_bytes = min(MAX_QUESTION_BYTES, max(1, per_tensor) * MAX_QUESTION_TENSORS)
        for part in split_plan(plan, max_bytes, _MAX_RUNS):
            try:
                same = self._agree(part)[:, 0]
            except LLMException:
                if not differing:
                    raise
                break  # a known difference is the answer
            size = part.nbytes // part.count
            for i in np.flatnonzero(~same).tolist():
                one = part.replace(dst_first=part.dst_first + i, src_first=part.src_first + i, count=1, nbytes=size)
                differing.setdefault(self._first(one, here=False), one)
        if differing:
            raise self._mismatch(plan, differing)
        self.link.count_verified(plan.nbytes)

    def _first(self, plan: Plan, *, here: bool) -> int:
        return plan.dst_first if here is not self.push else plan.src_first

    def _column(self, *, here: bool) -> int:
        return 0 if here is not self.push else 1

    def _agree(self, part: Plan, *, each_run: bool = False) -> NDArray[np.bool_]:
        """Return True for digests that agree, shape (tensors, 1 or runs)."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        spans = part.runs[:, (self._column(here=False), 2)].astype("<u8", order="C").tobytes()
        ours: list[NDArray[np.uint64]] = []

        def build(number: int) -> Verify:
            return Verify(
                id=number,
                cache_id=self.remote.cache_id,
                pin=self.remote.pin,
                guards=self.remote.guards,
                push=self.push,
                extent=self.remote.geometry.tensor_bytes,
                first=self._first(part, here=False),
                count=part.count,
                runs=spans,
                each_run=each_run,
                nonce=nonce,
                budget_ms=self.deadline.remaining_ms(),
            )

        def digest_ours() -> None:
            if not ours:  # else the peer was busy
                ours.append(self._digest(part, nonce, each_run=each_run))

        answer = self._ask(build, digest_ours)
        if not isinstance(answer, Verified):
            raise ProtocolError(f"{self.what}: {self.link.peer} answered a Verify with {type(answer).__name__}")
        sent, expected = len(answer.digests), ours[0].nbytes
        if sent != expected:
            text = f"{self.link.peer} sent {sent} bytes of digests, {expected} were asked for"
            raise ProtocolError(f"{self.what}: {text}")
        theirs = np.frombuffer(answer.digests, "<u8").reshape(ours[0].shape)
        agree: NDArray[np.bool_] = (ours[0] == theirs).all(axis=2)
        return agree

    def _digest(self, part: Plan, nonce: bytes, *, each_run: bool) -> NDArray[np.uint64]:
        end, deadline = PlanSide(part, self.local.storage.tensors, is_dst=not self.push), self.deadline
        found = digest(end, self.pool, deadline.expires_ns, nonce, each_run=each_run, cancelled=deadline.cancelled)
        if found is None:
            raise deadline.error(f"{self.what}: verifying", "verify", self.link.peer.cluster_id)
        return found

    def _mismatch(self, plan: Plan, differing: dict[int, Plan]) -> ChecksumMismatch:
        tensor, part = next(iter(differing.items()))
        with suppress(LLMException):  # without answers the place is less precise
            part = self._narrow(part)
        local_tensor, local_block, here = self._where(part, here=True)
        _, remote_block, there = self._where(part, here=False)
        return ChecksumMismatch(
            f"{self.what}: checksum mismatch with {self.link.peer}: {there} of its cache {self.remote.cache_id} and "
            f"{here} of the cache here do not hold the same bytes; {len(differing)} of {plan.count} tensors differ; "
            f"the {'remote' if self.push else 'local'} bytes addressed are undefined; repeat the call, and suspect "
            "whatever else writes to either place, or the memory, if it happens again",
            cache_id=self.remote.cache_id,
            tensors=len(differing),
            local_tensor=local_tensor,
            local_block=local_block,
            remote_tensor=tensor,
            remote_block=remote_block,
            peer=self.link.peer.cluster_id,
            phase="verify",
        )

    def _narrow(self, part: Plan) -> Plan:
        """Return the first differing block, or piece of a row; more if the difference vanishes."""
        # The peer's blocks, else own ones, else pieces of a row.
        column, block = self._column(here=True), _ROW_PIECE_BYTES
        for here, geometry in ((True, self.local.geometry), (False, self.remote.geometry)):
            if geometry.kind is not CacheKind.CACHE:
                column, block = self._column(here=here), geometry.stride
        unit = 0
        while unit != block:
            unit = max(1, -(-part.nbytes // _PIECES // block)) * block
            runs = _split_runs(part.runs, column, unit)
            differ = np.flatnonzero(~self._agree(part.replace(runs=runs), each_run=True)[0])
            if not differ.size:
                break  # both agree now, so something still writes there
            first = runs[differ[0] : differ[0] + 1]
            part = part.replace(runs=first, nbytes=int(first[0, 2]))
        return part

    def _where(self, part: Plan, *, here: bool) -> tuple[int, int, str]:
        """Return tensor, block or row (-1: several), and a text, on one side."""
        geometry, tensor = (self.local if here else self.remote).geometry, self._first(part, here=here)
        begins = part.runs[:, self._column(here=here)]
        begin, end = int(begins.min()), int((begins + part.runs[:, 2]).max())
        block, text = begin // geometry.stride, f"tensor {tensor}"
        if len(part.runs) == 1 and (end - 1) // geometry.stride == block:
            text += f" {'row' if geometry.kind is CacheKind.CACHE else 'block'} {block}"
        else:
            block = -1
        return tensor, block, f"{text} (bytes {begin} to {end} of the tensor)"

    def _ask(self, build: Callable[[int], Verify], meanwhile: Callable[[], None]) -> Message:
        """Ask, again while the peer is busy; call ``meanwhile`` before each wait."""
        link, what, pause = self.link, f"{self.what}: verifying", _FIRST_PAUSE
        while True:
            try:
                return link.request(build, self.deadline, what, "verify", meanwhile)
            except RemoteFailure as failure:
                if failure.status_code is LLMStatusCode.LLM_TIMEOUT:
                    raise self.deadline.error(what, "verify", link.peer.cluster_id) from failure
                if failure.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                    raise self._refused(failure) from failure
            self.deadline.check(what, "verify", link.peer.cluster_id)
            time.sleep(min(pause, self.deadline.next_turn()))
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _refused(self, failure: RemoteFailure) -> TransferFailed:
        """Return the error of a refusal; drop cached resolutions, which may be outdated."""
        self.link.caches.cached.clear()
        code = failure.status_code
        if code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST:
            code = LLMStatusCode.LLM_FAILED
        text = f"{self.what}: {self.link.peer} could not confirm the bytes: {failure}"
        return TransferFailed(text, status_code=code, peer=failure.peer, phase="verify")


def digest_blocks(
    caches: LocalCaches, pool: CopyPool | None, cache_id: int, blocks: BlockList, nonce: bytes, deadline: Deadline
) -> tuple[NDArray[np.uint64], int]:
    """Return a digest of each block over all tensors, shape (blocks, 2), and the bytes read."""

    def digests(tensors: Tensors, at: NDArray[np.uint64], length: int, count: int) -> NDArray[np.uint64]:
        """Return those of runs of ``length`` bytes in ``count`` tensors, shape (count, runs, 2)."""
        runs = np.ascontiguousarray(np.stack([at, at, np.full(len(at), length, np.uint64)], axis=1))
        plan = Plan(0, 0, count, runs, ordered=False, nbytes=count * length * len(at))
        side = PlanSide(plan, tensors, is_dst=False)
        found = digest(side, pool, deadline.expires_ns, nonce, each_run=True, cancelled=deadline.cancelled)
        if found is None:
            raise deadline.error("digest_blocks", "verify")
        return found

    with caches.using(cache_id, "digest_blocks: cache") as entry:
        check_blocks("blocks", blocks, entry.geometry)
        stride, count = entry.geometry.stride, entry.geometry.num_tensors
        if not len(blocks):
            return np.empty((0, 2), np.uint64), 0
        parts = digests(entry.storage.tensors, blocks.array.astype(np.uint64) * np.uint64(stride), stride, count)
    # A digest of the digests of its tensors.
    table = np.ascontiguousarray(parts.transpose(1, 0, 2))
    row = table.nbytes // len(table)
    tensors = Tensors(np.array([table.ctypes.data], np.uint64), table.nbytes)
    at = np.arange(len(table), dtype=np.uint64) * np.uint64(row)
    return digests(tensors, at, row, 1)[0], stride * count * len(table)


def _split_runs(runs: NDArray[np.uint64], column: int, unit: int) -> NDArray[np.uint64]:
    """Split runs where offsets in ``column`` are multiples of ``unit``."""
    runs, step = runs[runs[:, 2] > 0], np.uint64(unit)
    at, length = runs[:, column], runs[:, 2]
    pieces = ((at + length - np.uint64(1)) // step - at // step + np.uint64(1)).astype(np.int64)
    of = np.repeat(np.arange(len(runs)), pieces)  # piece -> its run
    nth = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    grid = (at[of] // step + nth) * step
    begin = np.maximum(grid, at[of])
    end = np.minimum(grid + step, at[of] + length[of])
    skipped = begin - at[of]
    return np.ascontiguousarray(np.stack([runs[of, 0] + skipped, runs[of, 1] + skipped, end - begin], axis=1))


class ChecksumTarget:
    """Target of checksums: answers one question of each peer in turn.

    Owns: the thread ``llm-datadist-verify_0``, from the first question to :meth:`close`.
    Threads: the control thread fills the queues, that thread empties them; any drops those of a peer.
    """

    def __init__(self, caches: LocalCaches, policy: AccessPolicy, pool: CopyPool | None) -> None:
        self._caches = caches
        self._policy = policy
        self._pool = pool
        self._lock = threading.Lock()
        # Questions with their time.monotonic_ns() limits; the first peer is next.
        self.queues: dict[Link, deque[tuple[Verify, int]]] = {}
        self.thread = Threads(1, "llm-datadist-verify")

    def on_verify(self, link: Link, message: Verify) -> None:
        expires_ns = time.monotonic_ns() + min(message.budget_ms, _MAX_BUDGET_MS) * 1_000_000
        try:
            with self._lock:
                waiting = self.queues.get(link, ())
                if len(waiting) >= _MAX_WAITING or sum(len(each.runs) for each, _ in waiting) >= _MAX_WAITING_BYTES:
                    text = f"{_MAX_WAITING} checksums of this peer, or {_MAX_WAITING_BYTES} bytes of them, wait already"
                    raise LLMException(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
                self.thread.submit(self._serve)  # first, because it may raise; the thread waits for the lock
                self.queues.setdefault(link, deque()).append((message, expires_ns))
        except LLMException as error:
            link.tell(failed(message.id, error))
        except RuntimeError as error:  # finalize: the link is about to end
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_ENGINE_FINALIZED), str(error)))

    def drop_peer(self, link: Link) -> None:
        with self._lock:
            self.queues.pop(link, None)

    def close(self) -> None:
        """Finish the current question, drop the others, join the thread. Idempotent."""
        with self._lock:
            self.queues.clear()
        self.thread.shutdown(cancel_futures=True)

    def _serve(self) -> None:
        with self._lock:
            if not self.queues:
                return  # the link of the question has ended
            link = next(iter(self.queues))
            queue = self.queues.pop(link)
            question, expires_ns = queue.popleft()
            if queue:
                self.queues[link] = queue  # behind the others
        try:
            answer: Message = Verified(question.id, self._digests(link, question, expires_ns))
        except LLMException as error:
            answer = failed(question.id, error)
        except Exception as error:  # noqa: BLE001 (the thread would swallow it, and the peer would wait)
            logger.error("unexpected error while digesting for %s", link.peer, exc_info=error)
            answer = Failed(
                question.id, int(LLMStatusCode.LLM_FAILED), f"internal error: {type(error).__name__}; see the log there"
            )
        link.tell(answer)

    def _digests(self, link: Link, question: Verify, expires_ns: int) -> bytes:
        # For a push too: the digest of a few bytes reveals them.
        self._policy.require(link, "pull")
        registry = self._caches.registry
        entry = registry.reach(link, question.cache_id, question.pin, use=True)
        try:
            # A peer may ask only about what it may move.
            self._policy.require_use(link, entry, question.pin)
            if question.push:
                self._policy.require_push(link, entry.cache_id)
            self._policy.require_lent(link, entry, push=question.push)
            plan = _question_plan(entry, question)
            self._policy.require_grant(entry, question.guards, plan)
            self._require_current(entry, question)
            end = PlanSide(plan, entry.storage.tensors, is_dst=False)
            found = digest(end, self._pool, expires_ns, question.nonce, each_run=question.each_run)
            self._require_current(entry, question)
        finally:
            self._caches.apply(registry.end_use(entry))
        if found is None:
            raise LLMException("verify: no time was left for the digest", status_code=LLMStatusCode.LLM_TIMEOUT)
        return found.astype("<u8").tobytes()

    def _require_current(self, entry: Entry, question: Verify) -> None:
        for each in (entry.guard, *question.guards):
            if self._caches.exports.guards.load(each.slot) != each.generation:
                raise TransferFailed(f"verify: cache {entry.cache_id} was freed, rebound or unregistered meanwhile")


def _question_plan(entry: Entry, question: Verify) -> Plan:
    """Return the plan, within the limits; the digest checks tensor bounds."""
    geometry, count = entry.geometry, question.count
    if question.extent != geometry.tensor_bytes:
        raise ParamError(f"verify: extent={question.extent}: the tensors have {geometry.tensor_bytes} bytes")
    if not 1 <= count <= (1 if question.each_run else MAX_QUESTION_TENSORS):
        raise ParamError(f"verify: count={count}: one question is about 1 to {MAX_QUESTION_TENSORS} tensors")
    check_rule(len(question.runs) % 16 == 0, f"verify: runs of {len(question.runs)} bytes are no pairs of uint64")
    spans = np.frombuffer(question.runs, "<u8").reshape(-1, 2)
    # Lengths first, because their sum could wrap.
    longest = int(spans[:, 1].max(initial=0))
    total = int(spans[:, 1].sum()) * count if longest <= MAX_QUESTION_BYTES else longest
    if total > MAX_QUESTION_BYTES:
        raise ParamError(f"verify: {total} bytes: one question is about at most {MAX_QUESTION_BYTES}")
    runs = np.ascontiguousarray(spans[:, (0, 0, 1)], np.uint64)
    return Plan(question.first, question.first, count, runs, ordered=False, nbytes=total)
