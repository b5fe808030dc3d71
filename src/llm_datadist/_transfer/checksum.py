"""The initiator's half of a checksum (``llm.Checksum``): after a transfer both ends digest their own memory.

Nothing is hashed on its way: what is compared is what the two memories hold now, so a byte that any part of the way
changed, left out or put elsewhere is found. A source that its owner changed between the copy and the question is a
mismatch as well: then the two ends do not hold the same bytes, and nobody can say which were meant.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._links.link import RemoteFailure
from llm_datadist._links.messages import MAX_VERIFY_RUNS, Failed, Verified, Verify
from llm_datadist._log import logger
from llm_datadist._native import Plan
from llm_datadist._native.plan import DIGEST_BYTES, NONCE_BYTES, PlanEnd, digest, standing
from llm_datadist._transport.tcp import split_plan
from llm_datadist.errors import ChecksumMismatch, LLMException, LLMStatusCode, ParamError, ProtocolError, TransferFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

    from llm_datadist._cache.geometry import Geometry
    from llm_datadist._cache.registry import Entry
    from llm_datadist._cache.store import CacheStore
    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.messages import Guarded, Message
    from llm_datadist._native import CopyPool

__all__ = [
    "MAX_QUESTION_BYTES",
    "MAX_QUESTION_TENSORS",
    "ChecksumClient",
    "ChecksumServer",
    "CompletedTransfer",
    "Remote",
]

#: A place that differs is looked for among about so many pieces at a time.
_PIECES: Final = 1024
#: Runs of one question, so that what :func:`_cut` makes of them (twice as many, and the pieces) fits a message too.
_MAX_RUNS: Final = MAX_VERIFY_RUNS // 2 - _PIECES
#: How closely it is found in a row, which has no blocks.
_ROW_PIECE_BYTES: Final = 4096
#: A peer that is busy is asked again after so many seconds, at first and at most.
_FIRST_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.05


class Remote(Protocol):
    """What is known of the peer's cache."""

    @property
    def cache_id(self) -> int:
        """Its id there."""

    @property
    def geometry(self) -> Geometry:
        """Its geometry."""

    @property
    def guards(self) -> tuple[Guarded, ...]:
        """What shows that it is still the same."""

    @property
    def pin(self) -> int:
        """What holds it there, or 0."""


@dataclass(frozen=True, slots=True)
class CompletedTransfer:
    """A transfer that is done but for the comparison.

    Attributes:
        link: The link it went over.
        local: The cache of this end.
        remote: The peer's cache.
        push: True when the bytes went there.
        same_memory: True when both ends are the same tensors.
        deadline: Of the whole call.
        what: What the call is, for errors.
    """

    link: Link
    local: Entry
    remote: Remote
    push: bool
    same_memory: bool
    deadline: Deadline
    what: str

    def first(self, plan: Plan, *, here: bool) -> int:
        """Return the first tensor of a plan at this end or the other."""
        return plan.dst_first if here is not self.push else plan.src_first

    def column(self, *, here: bool) -> int:
        """Return which column of the runs holds the offsets of this end or the other."""
        return 0 if here is not self.push else 1


class ChecksumClient:
    """Compares both ends after a transfer. Runs in the caller's thread and keeps nothing.

    Args:
        pool: Threads that help to digest, or None.
    """

    def __init__(self, pool: CopyPool | None) -> None:
        self._pool = pool

    def verify(self, done: CompletedTransfer, plan: Plan) -> None:
        """Return once both ends were seen to hold the same bytes wherever ``plan`` has put them.

        Of an ordered plan that is what no later run has written over (R26).

        Raises:
            ChecksumMismatch: They do not; the text names the first place.
            TransferFailed: The peer's cache was freed, rebound or unregistered meanwhile, or it would not answer.
            DeadlineExceeded: No answer in time (phase ``verify``).
            PeerLost: The link broke.
        """
        plan = standing(plan, alias=done.same_memory and plan.dst_first == plan.src_first)
        differing: dict[int, Plan] = {}  # the peer's tensor -> the first part of it that differs
        for part in _parts(plan, _MAX_RUNS):
            try:
                same = self._agree(done, part)[:, 0]
            except LLMException:
                if not differing:
                    raise
                break  # that they differ is known already: it stays the answer
            for pair in np.flatnonzero(~same).tolist():
                one = _one_tensor(part, pair)
                differing.setdefault(done.first(one, here=False), one)
        if differing:
            raise self._mismatch(done, plan, differing)
        done.link.count_verified(plan.nbytes)

    def _agree(self, done: CompletedTransfer, part: Plan, *, each_run: bool = False) -> NDArray[np.bool_]:
        """Return, of shape (tensors, 1 or runs), which digests agree."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        ours: list[NDArray[np.uint64]] = []

        def build(number: int) -> Verify:
            return _question(done, part, number, nonce, each_run=each_run)

        def digest_ours() -> None:
            if not ours:
                ours.append(self._digest(done, part, nonce, each_run=each_run))

        answer = _ask(done, build, digest_ours)
        if not isinstance(answer, Verified):
            raise ProtocolError(f"{done.what}: {done.link.peer} answered a Verify with {type(answer).__name__}")
        expected = ours[0].shape[0] * ours[0].shape[1] * DIGEST_BYTES
        if len(answer.digests) != expected:
            raise ProtocolError(
                f"{done.what}: {done.link.peer} sent {len(answer.digests)} bytes of digests, {expected} were asked for"
            )
        theirs = np.frombuffer(answer.digests, "<u8").reshape(ours[0].shape)
        agree: NDArray[np.bool_] = (ours[0] == theirs).all(axis=2)
        return agree

    def _digest(self, done: CompletedTransfer, part: Plan, nonce: bytes, *, each_run: bool) -> NDArray[np.uint64]:
        end = PlanEnd(part, done.local.storage.tensors, is_dst=not done.push)
        deadline = done.deadline
        found = digest(end, self._pool, deadline.expires_ns, nonce, each_run=each_run, cancelled=deadline.cancelled)
        if found is None:
            raise done.deadline.error(f"{done.what}: verifying", "verify", done.link.peer.cluster_id)
        return found

    # --- when they differ ------------------------------------------------------------------------------------------

    def _mismatch(self, done: CompletedTransfer, plan: Plan, differing: dict[int, Plan]) -> ChecksumMismatch:
        tensor, part = next(iter(differing.items()))
        with suppress(LLMException):  # a mismatch it is, wherever
            part = self._locate(done, part)
        here, there = _Place.of(done, part, here=True), _Place.of(done, part, here=False)
        return ChecksumMismatch(
            f"{done.what}: checksum mismatch with {done.link.peer}: {there} of its cache {done.remote.cache_id} and "
            f"{here} of the cache here do not hold the same bytes; {len(differing)} of {plan.count} tensors differ; "
            f"the {'remote' if done.push else 'local'} bytes addressed are undefined; repeat the call, and suspect "
            "whatever else writes to either place, or the memory, if it happens again",
            cache_id=done.remote.cache_id,
            tensors=len(differing),
            local_tensor=here.tensor,
            local_block=here.block,
            remote_tensor=tensor,
            remote_block=there.block,
            peer=done.link.peer.cluster_id,
            phase="verify",
        )

    def _locate(self, done: CompletedTransfer, part: Plan) -> Plan:
        """Return the first block (or piece of a row) of one tensor that differs, or how far the search came."""
        column, block = _grid(done)
        unit = 0
        while unit != block:
            unit = max(1, -(-part.nbytes // _PIECES // block)) * block
            runs = _cut(part.runs, column, unit)
            differ = np.flatnonzero(~self._agree(done, part.replace(runs=runs), each_run=True)[0])
            if not differ.size:
                break  # it agrees by now: somebody writes there
            first = runs[differ[0] : differ[0] + 1]
            part = part.replace(runs=first, nbytes=int(first[0, 2]))
        return part


@dataclass(frozen=True, slots=True)
class _Place:
    """The bytes of a part of one tensor at one end, for people."""

    tensor: int
    block: int
    word: str
    begin: int
    end: int

    @classmethod
    def of(cls, done: CompletedTransfer, part: Plan, *, here: bool) -> _Place:
        geometry = done.local.geometry if here else done.remote.geometry
        word = "row" if geometry.kind is CacheKind.CACHE else "block"
        begins = part.runs[:, done.column(here=here)]
        begin, end = int(begins.min()), int((begins + part.runs[:, 2]).max())
        block = begin // geometry.stride
        # Of a search that did not end all that is known is where it was.
        found = len(part.runs) == 1 and (end - 1) // geometry.stride == block
        return cls(done.first(part, here=here), block if found else -1, word, begin, end)

    def __str__(self) -> str:
        where = f"tensor {self.tensor}" if self.block < 0 else f"tensor {self.tensor} {self.word} {self.block}"
        return f"{where} (bytes {self.begin} to {self.end} of the tensor)"


def _parts(plan: Plan, max_runs: int) -> list[Plan]:
    """Cut a plan into parts that one question each may be about."""
    per_tensor = plan.nbytes // plan.count if plan.count else 0
    return list(split_plan(plan, min(MAX_QUESTION_BYTES, max(1, per_tensor) * MAX_QUESTION_TENSORS), max_runs))


def _one_tensor(part: Plan, pair: int) -> Plan:
    return part.replace(
        dst_first=part.dst_first + pair,
        src_first=part.src_first + pair,
        count=1,
        nbytes=part.nbytes // part.count,
    )


def _question(done: CompletedTransfer, part: Plan, number: int, nonce: bytes, *, each_run: bool) -> Verify:
    spans = part.runs[:, (done.column(here=False), 2)].astype("<u8", order="C")
    return Verify(
        id=number,
        cache_id=done.remote.cache_id,
        pin=done.remote.pin,
        guards=list(done.remote.guards),
        push=done.push,
        extent=done.remote.geometry.tensor_bytes,
        first=done.first(part, here=False),
        count=part.count,
        runs=spans.tobytes(),
        each_run=each_run,
        nonce=nonce,
        budget_ms=done.deadline.remaining_ms(),
    )


def _ask(done: CompletedTransfer, build: Callable[[int], Verify], meanwhile: Callable[[], None]) -> Message:
    """Ask the peer, again and again while it is busy with our other questions: the transfer itself is done."""
    link, what, pause = done.link, f"{done.what}: verifying", _FIRST_PAUSE
    while True:
        try:
            return link.request(build, done.deadline, what, "verify", meanwhile)
        except RemoteFailure as failure:
            if failure.status_code is LLMStatusCode.LLM_TIMEOUT:
                raise done.deadline.error(what, "verify", link.peer.cluster_id) from failure
            if failure.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                raise _refused(done, failure) from failure
        done.deadline.check(what, "verify", link.peer.cluster_id)
        time.sleep(min(pause, done.deadline.remaining()))
        pause = min(2 * pause, _LONGEST_PAUSE)


def _refused(done: CompletedTransfer, failure: RemoteFailure) -> TransferFailed:
    """Turn any refusal into a failed transfer: the bytes were not seen to be right. What was kept may be old."""
    done.link.kept.clear()
    code = failure.status_code
    if code in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_KV_CACHE_NOT_EXIST):
        code = LLMStatusCode.LLM_FAILED
    text = " ".join(f"{done.what}: {done.link.peer} could not confirm the bytes: {failure}".splitlines())
    return TransferFailed(text, status_code=code, peer=failure.peer, phase="verify")


def _grid(done: CompletedTransfer) -> tuple[int, int]:
    """Return the column whose offsets fall into blocks, and the bytes of a block."""
    for here, geometry in ((False, done.remote.geometry), (True, done.local.geometry)):
        if geometry.kind is not CacheKind.CACHE:
            return done.column(here=here), geometry.stride
    return done.column(here=True), _ROW_PIECE_BYTES


def _cut(runs: NDArray[np.uint64], column: int, unit: int) -> NDArray[np.uint64]:
    """Cut runs wherever the offsets in ``column`` are multiples of ``unit``."""
    at, length = runs[:, column], runs[:, 2]
    held = length > 0
    at, length, runs = at[held], length[held], runs[held]
    step = np.uint64(unit)
    pieces = ((at + length - np.uint64(1)) // step - at // step + np.uint64(1)).astype(np.int64)
    of = np.repeat(np.arange(len(runs)), pieces)  # piece -> its run
    nth = (np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)).astype(np.uint64)
    grid = (at[of] // step + nth) * step
    begin = np.maximum(grid, at[of])
    end = np.minimum(grid + step, at[of] + length[of])
    skipped = begin - at[of]
    return np.ascontiguousarray(np.stack([runs[of, 0] + skipped, runs[of, 1] + skipped, end - begin], axis=1))


MAX_QUESTION_BYTES: Final = 64 << 20
"""Bytes of memory that one question may be about: some 10 ms, for which the questions of others wait."""
MAX_QUESTION_TENSORS: Final = 1 << 15
"""Tensors of one question: their digests fit a frame twice."""

#: A peer may have so many questions waiting, of so many bytes; beyond, the answer is LLM_LINK_BUSY.
_MAX_WAITING: Final = 256
_MAX_WAITING_BYTES: Final = 8 << 20
_MAX_BUDGET_MS: Final = 24 * 3600 * 1000


class _Queue:
    """The questions of one peer, with when each must be answered."""

    __slots__ = ("nbytes", "questions")

    def __init__(self) -> None:
        self.questions: deque[tuple[Verify, int]] = deque()
        self.nbytes = 0

    def full(self) -> bool:
        return len(self.questions) >= _MAX_WAITING or self.nbytes >= _MAX_WAITING_BYTES

    def put(self, question: Verify, expires_ns: int) -> None:
        self.questions.append((question, expires_ns))
        self.nbytes += len(question.runs)

    def take(self) -> tuple[Verify, int]:
        question, expires_ns = self.questions.popleft()
        self.nbytes -= len(question.runs)
        return question, expires_ns


class ChecksumServer:
    """Answers :class:`~llm_datadist._links.messages.Verify`.

    The control thread puts questions into the queues, the thread ``llm-datadist-verify``, which exists from the first
    question to :meth:`close`, answers one after the other, of each peer in turn. The lock guards the queues.

    Args:
        store: The caches asked about.
        pool: Threads that help to digest, or None.
    """

    def __init__(self, store: CacheStore, pool: CopyPool | None) -> None:
        self._store = store
        self._pool = pool
        self._lock = threading.Lock()
        self._queues: dict[Link, _Queue] = {}  # the first one is next
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="llm-datadist-verify")

    def handlers(self) -> Mapping[type[Message], Callable[[Link, Any], None]]:
        """Return what the link manager dispatches to this class."""
        return {Verify: self.on_verify}

    def on_verify(self, link: Link, message: Verify) -> None:
        """A peer wants to know what our memory holds. Runs on the control thread."""
        expires_ns = time.monotonic_ns() + min(message.budget_ms, _MAX_BUDGET_MS) * 1_000_000
        with self._lock:
            queue = self._queues.setdefault(link, _Queue())
            full = queue.full()
            if not full:
                queue.put(message, expires_ns)
        if full:
            text = f"{_MAX_WAITING} checksums of this peer, or {_MAX_WAITING_BYTES} bytes of them, wait already"
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_LINK_BUSY), text))
            return
        try:
            self._thread.submit(self._serve)
        except RuntimeError as error:  # closed meanwhile: the link is about to end
            link.tell(Failed(message.id, int(LLMStatusCode.LLM_ENGINE_FINALIZED), str(error)))

    def drop_peer(self, link: Link) -> None:
        """A link has ended: nobody waits for its answers."""
        with self._lock:
            self._queues.pop(link, None)

    def close(self) -> None:
        """Finish the question in hand, forget the others, and join the thread. Idempotent."""
        with self._lock:
            self._queues.clear()
        self._thread.shutdown(cancel_futures=True)

    # --- the thread ------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer one question."""
        with self._lock:
            if not self._queues:
                return  # its link has ended
            link, queue = next(iter(self._queues.items()))
            question, expires_ns = queue.take()
            del self._queues[link]
            if queue.questions:
                self._queues[link] = queue  # behind the others
        try:
            answer: Message = Verified(question.id, self._digests(link, question, expires_ns))
        except LLMException as error:
            answer = Failed(question.id, int(error.status_code), str(error)[:4000])
        except Exception as error:  # noqa: BLE001 (nobody looks at the future; the caller must hear that it failed)
            logger.error("unexpected error while digesting for %s", link.peer, exc_info=error)
            answer = Failed(question.id, int(LLMStatusCode.LLM_FAILED), f"internal error: {error!r}"[:4000])
        link.tell(answer)

    def _digests(self, link: Link, question: Verify, expires_ns: int) -> bytes:
        registry = self._store.registry
        entry = registry.reach(link, question.cache_id, question.pin, use=True)
        try:
            self._check(link, entry, question)
            plan = _plan(entry, question)
            self._require_current(entry, question)
            end = PlanEnd(plan, entry.storage.tensors, is_dst=False)
            found = digest(end, self._pool, expires_ns, question.nonce, each_run=question.each_run)
            self._require_current(entry, question)
        finally:
            self._store.apply(registry.end_use(entry))
        if found is None:
            raise LLMException("verify: no time was left for the digest", status_code=LLMStatusCode.LLM_TIMEOUT)
        return found.astype("<u8").tobytes()

    def _check(self, link: Link, entry: Entry, question: Verify) -> None:
        """Only what a peer may move it may ask about."""
        if not question.pin and not self._store.keepable(entry):
            raise ParamError(f"verify: cache {entry.cache_id} is read under a pin")
        if not entry.remote_accessible:
            raise ParamError(f"verify: cache {entry.cache_id} was registered with remote_accessible=False")
        if question.push and not self._store.remote_accessible and entry.cache_id not in link.located:
            raise ParamError("verify: a push needs remote cache access (llm.EnableRemoteCacheAccessible=1)")

    def _require_current(self, entry: Entry, question: Verify) -> None:
        """The entry's own guard as well, whatever the peer names: the memory of a withdrawn cache is not touched."""
        load = self._store.exports.guards.load
        named = ((each.slot, each.generation) for each in question.guards)
        for slot, generation in ((entry.guard.slot, entry.guard.generation), *named):
            if load(slot) != generation:
                raise TransferFailed(f"verify: cache {entry.cache_id} was freed, rebound or unregistered meanwhile")


def _plan(entry: Entry, question: Verify) -> Plan:
    """Return what to digest. That it lies inside the tensors is checked again by the digest itself, byte by byte."""
    geometry, count = entry.geometry, question.count
    if question.extent != geometry.tensor_bytes:
        raise ParamError(f"verify: extent={question.extent}: the tensors have {geometry.tensor_bytes} bytes")
    if not 1 <= count <= (1 if question.each_run else MAX_QUESTION_TENSORS):
        raise ParamError(f"verify: count={count}: one question is about 1 to {MAX_QUESTION_TENSORS} tensors")
    if len(question.runs) % 16:
        raise ParamError(f"verify: runs of {len(question.runs)} bytes are no pairs of uint64")
    spans = np.frombuffer(question.runs, "<u8").reshape(-1, 2)
    # Each length before their sum, which could wrap.
    longest = int(spans[:, 1].max(initial=0))
    total = int(spans[:, 1].sum()) * count if longest <= MAX_QUESTION_BYTES else longest
    if total > MAX_QUESTION_BYTES:
        raise ParamError(f"verify: {total} bytes: one question is about at most {MAX_QUESTION_BYTES}")
    runs = np.ascontiguousarray(spans[:, (0, 0, 1)], np.uint64)
    return Plan(question.first, question.first, count, runs, ordered=False, nbytes=total)
