"""StoreServer, a prefix store: one pool of slots that it fills by pulling and lends by grants; docs/store.md.

Lookups are answered on the control thread, saves in threads: one of each client at a time. So a client that stands
still costs one thread, for the time of one pull.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter, deque
from contextlib import ExitStack
from functools import partial
from itertools import count, islice
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from llm_datadist._checks import check_int, check_rule
from llm_datadist._log import logger
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native.signals import OfProcess, public_calls_hold_signals, put_off
from llm_datadist.datadist import LLMDataDist, tear_down
from llm_datadist.errors import (
    CacheMismatch,
    DeadlineExceeded,
    LinkError,
    LLMException,
    LLMStatusCode,
    OutOfMemory,
    ParamError,
    StateError,
)
from llm_datadist.store import messages
from llm_datadist.store.client import STORE_ID
from llm_datadist.store.messages import BlockShape, Event, decode
from llm_datadist.store.slots import Filling, Slots
from llm_datadist.store.statistics import NamespaceStatistics, StoreStatistics
from llm_datadist.types import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMRole
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.types import Cache
    from llm_datadist.types.question import PeerQuestion

    Job = Callable[[], bytes]
    Client = tuple[int, str]

#: Options by which peers could write slots.
_SEALED: Final = ("llm.EnableRemoteCacheAccessible", "llm.WriteByAddress")
_PAGE_SHIFT: Final = 16
_THREADS: Final = 8
_NAME: Final = "llm-datadist-store-save"
_MAX_WAITING: Final = 16  # saves of one client; beyond, the answer is LLM_LINK_BUSY
_MAX_SLOTS: Final = 1 << 20  # of one namespace: a grant has no more blocks
_MAX_EVENTS: Final = 1 << 18  # kept: keys of events, and events
_KEYS_AT_ONCE: Final = 8192  # of events in one answer, and events
_MAX_LOADS: Final = 1 << 16  # of one namespace: each has a guard
_SWEEP_EVERY: Final = 64  # lookups between searches for ended grants, at least
_PULL_MS: Final = 5000


class _Space:
    """A namespace's slots. Threads: under the lock of the server, except ``cache``, ``shape`` and ``nonce``."""

    def __init__(self, name: bytes, shape: BlockShape, cache: Cache, count: int) -> None:
        self.name = name
        self.shape = shape
        self.cache = cache
        self.slots = Slots(count)
        self.nonce = secrets.token_bytes(16)
        self.loads: list[tuple[Grant, list[int]]] = []  # slots lent to a reader, until the grant has ended
        self.sweep_at = _SWEEP_EVERY
        self.used = 0  # number of the last use, among all namespaces
        self.counts: Counter[str] = Counter()  # fields of NamespaceStatistics

    def sweep(self) -> None:
        """End the loads whose grants have ended: ``active`` is False only once the guard has advanced."""
        left = []
        for grant, slots in self.loads:
            if grant.active:
                left.append((grant, slots))
            else:
                self.slots.end_read(slots)
        self.loads = left
        self.sweep_at = 2 * len(left) + _SWEEP_EVERY


@public_calls_hold_signals(whole=("__init__", "close"), __init__="_end")
class StoreServer(OfProcess):
    """A prefix store in this process: an LLMDataDist, its pool, an index.

    Clients are :class:`StoreClient`. The store pulls what they save, digests its copy, and lends slots by grants. It
    runs without remote cache access, so no peer can write its pool. In a forked child every call is a StateError.

    Args:
        memory: Bytes of the pool, at least 64 KiB for each namespace.
        listen: "ip:port"; port 0 picks a free one.
        cluster_id: Cluster id, unique among all that link to each other.
        namespaces: Number of namespaces, which share the pool equally. One more displaces the one used least recently,
            and further ones unless its tensors fit into what that leaves.
        options: More options of ``init``, but none that lets peers write: ``llm.EnableRemoteCacheAccessible`` and
            ``llm.WriteByAddress`` are 0.

    Raises:
        ParamError: An argument breaks its rule.
        OutOfMemory, LinkError: As :meth:`LLMDataDist.init`.
    """

    def __init__(
        self,
        memory: int,
        listen: str = "127.0.0.1:0",
        *,
        cluster_id: int = STORE_ID,
        namespaces: int = 4,
        options: dict[str, str] | None = None,
    ) -> None:
        most, size = check_int("namespaces", namespaces), check_int("memory", memory)
        check_rule(most >= 1, f"namespaces: {most}, at least 1 is needed")
        given = dict(options or {})
        for name in _SEALED:
            check_rule(given.setdefault(name, "0") == "0", f"options: {name}={given[name]}, a store needs 0")
        self._share = size // most >> _PAGE_SHIFT << _PAGE_SHIFT
        check_rule(self._share > 0, f"memory: {size} bytes, at least {most << _PAGE_SHIFT} are needed")
        self._most = most
        self._lock = threading.Lock()  # guards the index; nothing blocks under it
        self._making = threading.Lock()  # held while a namespace gets its memory
        self._spaces: dict[bytes, _Space] = {}
        self._uses = count()
        self._events: deque[Event] = deque()
        self._kept = 0  # keys of them, and their number
        self._number = 0
        self._cleared = 0
        #: The store's LLMDataDist, for its statistics.
        self.datadist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.datadist.init(_options(size, listen) | given)
        with ExitStack() as undo:
            undo.callback(tear_down, self.datadist)
            self._manager = self.datadist.cache_manager
            self._savers = _Savers()
            undo.callback(self._savers.close)
            for name, handler in (
                (messages.LOOKUP, self._on_lookup),
                (messages.SAVE, self._on_save),
                (messages.SUSPECT, self._on_suspect),
                (messages.EVENTS, self._on_events),
            ):
                self.datadist.answer_questions(name, handler)
            undo.pop_all()

    @property
    def port(self) -> int:
        """The port that clients dial."""
        port = self.datadist.listen_port
        assert port is not None, "a store listens"
        return port

    def close(self) -> None:
        """End all links and give the memory back. Idempotent.

        Inside another call of this thread, as by a finalizer (``__del__``), it happens when that call ends.

        Raises:
            StateError: Called in a control thread or a thread of a store: it cannot wait for its own end.
        """
        thread = threading.current_thread().name
        if must_not_wait() or thread.startswith(_NAME):
            raise StateError(f"close: called in {thread}; call it from another thread")
        if not put_off(self._end):
            self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, _: object = None) -> None:
        self._savers.close()
        tear_down(self.datadist)

    # --- lookups, on the control thread -------------------------------------------------------------------------------

    def _on_lookup(self, question: PeerQuestion) -> bytes:
        asked = decode(messages.Lookup, question.body, f"cluster {question.cluster_id}")
        with self._lock:
            if (space := self._spaces.get(asked.namespace)) is None:
                return messages.NOTHING.encode()
            slots = space.slots.run(asked.keys)
            space.used = next(self._uses)
            space.counts.update(lookups=1, asked=len(asked.keys), found=len(slots))
            if len(space.loads) >= space.sweep_at:
                space.sweep()
            if not slots or len(space.loads) >= _MAX_LOADS:
                return messages.NOTHING.encode()
            digests = space.slots.digests(slots)
            space.slots.begin_read(slots)
        try:
            grant = space.cache.grant(slots, None, token=asked.token, peer=question.cluster_id)
        except BaseException:
            with self._lock:
                space.slots.end_read(slots)
            raise
        with self._lock:
            space.loads.append((grant, slots))
        places = np.array(slots, "<i8").tobytes(), digests.astype("<u8").tobytes()
        return messages.Found(grant.to_bytes(), *places, space.nonce, space.shape).encode()

    # --- saves, in threads --------------------------------------------------------------------------------------------

    def _on_save(self, question: PeerQuestion) -> None:
        who = f"cluster {question.cluster_id}"
        asked = decode(messages.Save, question.body, who)
        check_rule(len(asked.keys) == len(asked.blocks), f"{who} sent unequal numbers of keys and blocks")
        until = time.monotonic() + question.budget_ms / 1e3
        self._savers.submit(question, lambda: self._save(question, asked, until))

    def _save(self, question: PeerQuestion, asked: messages.Save, until: float) -> bytes:
        if time.monotonic() >= until:
            raise DeadlineExceeded("save: its client has given up")
        grant = Grant.from_bytes(asked.grant)
        wrong = f"cluster {question.cluster_id} sent a grant of cluster {grant.cluster_id}"
        check_rule(grant.cluster_id == question.cluster_id, wrong)
        space, filling = self._fill(asked)
        if filling.slots:
            self._pull(space, asked, grant, filling)
        return messages.Saved(len(filling.slots)).encode()

    def _fill(self, asked: messages.Save) -> tuple[_Space, Filling]:
        """Take slots for the keys that are missing."""
        while True:
            space = self._space(asked.namespace, asked.shape)
            with self._lock:
                if self._spaces.get(asked.namespace) is not space:
                    continue  # displaced
                space.used = next(self._uses)
                if space.slots.free < len(asked.keys):
                    space.sweep()
                filling = space.slots.fill(asked.keys)
                space.counts["removed"] += len(filling.evicted)
                self._tell("removed", space.name, filling.evicted)
                return space, filling

    def _pull(self, space: _Space, asked: messages.Save, grant: Grant, filling: Filling) -> None:
        """Pull the blocks into slots, digest them there, publish them. On failure the slots are free again."""
        blocks = [asked.blocks[position] for position in filling.positions]
        try:
            key = CacheKeyByIdAndIndex(grant.cluster_id, grant.cache_id, 0)
            # It returns after the last byte and compares the grant's guard then: the owner still lent these blocks.
            self._manager.pull_blocks(key, space.cache, blocks, filling.slots, grant=grant)
            digests = self._manager.digest_blocks(space.cache, filling.slots, space.nonce)
        except BaseException:
            with self._lock:
                space.counts["failed"] += 1
                space.slots.abandon(filling.slots)
            raise
        with self._lock:
            space.slots.publish(filling.slots, digests)
            space.counts["stored"] += len(filling.slots)
            self._tell("stored", space.name, [asked.keys[position] for position in filling.positions])

    # --- namespaces ---------------------------------------------------------------------------------------------------

    def _space(self, name: bytes, shape: BlockShape) -> _Space:
        """Return a namespace, made with its first save. Raises CacheMismatch for another shape of blocks."""
        if (space := self._spaces.get(name)) is None:
            with self._making:
                if (space := self._spaces.get(name)) is None:
                    space = self._make(name, shape)
                    with self._lock:
                        space.used = next(self._uses)
                        self._spaces[name] = space
        if space.shape != shape:
            raise CacheMismatch(f"namespace {name[:4].hex()} has {space.shape}; the saved cache has {shape}")
        return space

    def _make(self, name: bytes, shape: BlockShape) -> _Space:
        try:
            kind = DataType(shape.data_type)
        except ValueError as error:
            raise ParamError(f"shape: {error}") from error
        block = CacheDesc(shape.tensors, [1, *shape.shape], kind).size
        tensor = self._share // shape.tensors >> _PAGE_SHIFT << _PAGE_SHIFT
        count = min(tensor // block, _MAX_SLOTS)
        if count < 1:
            raise ParamError(
                f"shape: one block of {shape} needs more than the {self._share} bytes of a namespace of this store; "
                "start it with more memory, or with fewer namespaces"
            )
        while len(self._spaces) >= self._most:
            self._displace()
        cache = None
        while cache is None:
            try:
                cache = self._manager.allocate_blocks_cache(CacheDesc(shape.tensors, [count, *shape.shape], kind))
            except OutOfMemory as error:  # other shapes have left pieces that are too small
                if not (error.pool and self._spaces):  # without a pool: the process has no memory
                    raise
                self._displace()
        logger.info("namespace %s: %d slots of %s", name[:4].hex(), count, shape)
        return _Space(name, shape, cache, count)

    def _displace(self) -> None:
        """Give up the namespace that was used least recently and is not in use now; LinkError if all are."""
        with self._lock:
            for space in sorted(self._spaces.values(), key=lambda each: each.used):
                space.sweep()
                if space.slots.idle():
                    break
            else:
                text = f"all {self._most} namespaces are in use; start the store with more"
                raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            del self._spaces[space.name]
            self._cleared += 1
            self._tell("cleared", space.name, [])
        logger.warning("namespace %s was displaced by a new one", space.name[:4].hex())
        self._manager.deallocate_blocks_cache(space.cache)

    # --- wrong bytes, events, statistics ------------------------------------------------------------------------------

    def _on_suspect(self, question: PeerQuestion) -> None:
        asked = decode(messages.Suspect, question.body, f"cluster {question.cluster_id}")
        self._savers.submit(question, lambda: self._examine(asked))

    def _examine(self, asked: messages.Suspect) -> bytes:
        """Digest slots again, and forget those that changed; a client's word is not enough."""
        with self._lock:
            if (space := self._spaces.get(asked.namespace)) is None:
                return b""
            slots = space.slots.published_of(asked.slots)
            digests = space.slots.digests(slots)
            space.slots.begin_read(slots)
        wrong: list[int] = []
        try:
            differ = self._manager.digest_blocks(space.cache, slots, space.nonce) != digests
            wrong = np.array(slots, np.int64)[differ.any(axis=1)].tolist()
        finally:
            with self._lock:
                keys = space.slots.drop(wrong)
                space.slots.end_read(slots)
                space.counts["removed"] += len(keys)
                self._tell("removed", space.name, keys)
        if wrong:
            logger.error("%d slots of namespace %s had changed and were dropped", len(wrong), space.name[:4].hex())
        return b""

    def _tell(self, kind: str, name: bytes, keys: list[bytes]) -> None:
        """Under the lock: add an event, and forget the oldest beyond the bound."""
        if keys or kind == "cleared":
            self._number += 1
            self._events.append(Event(self._number, kind, name, keys))
            self._kept += len(keys) + 1
            while self._kept > _MAX_EVENTS:
                self._kept -= len(self._events.popleft().keys) + 1

    def events(self, after: int = 0) -> tuple[int, list[Event]]:
        """Return the number of the oldest event kept, and the next events after number ``after``."""
        with self._lock:
            oldest = self._events[0].number if self._events else self._number + 1
            found: list[Event] = []
            room = _KEYS_AT_ONCE
            for event in islice(self._events, max(0, after + 1 - oldest), None):
                room -= len(event.keys) + 1
                if room < 0:
                    break
                found.append(event)
            return oldest, found

    def _on_events(self, question: PeerQuestion) -> bytes:
        asked = decode(messages.EventsAfter, question.body, f"cluster {question.cluster_id}")
        return messages.Events(*self.events(asked.after)).encode()

    def index(self) -> dict[bytes, list[bytes]]:
        """Return the published keys of each namespace, the oldest first."""
        with self._lock:
            return {space.name: space.slots.keys() for space in self._spaces.values()}

    def statistics(self) -> StoreStatistics:
        """Return the present figures."""
        with self._lock:
            for space in self._spaces.values():
                space.sweep()
            spaces = tuple(_figures(space) for space in self._spaces.values())
            return StoreStatistics(spaces, self._most, self._cleared, self._number, self._savers.waiting())

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables agree."""
        with self._lock:
            for space in self._spaces.values():
                space.slots.check_integrity()
        self.datadist.check_integrity()


def _figures(space: _Space) -> NamespaceStatistics:
    slots, desc = space.slots, space.cache.cache_desc
    return NamespaceStatistics(
        namespace=space.name.hex(),
        slots=slots.count,
        free=slots.free,
        filling=slots.filling,
        published=slots.published,
        loads=len(space.loads),
        block_bytes=desc.num_tensors * desc.size // slots.count,
        **space.counts,
    )


class _Savers:
    """Threads that do the jobs of each client one after the other, in its order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._jobs: dict[Client, deque[Callable[[], None]]] = {}  # with the running one's client, until it has none
        self._ready: SimpleQueue[Client | None] = SimpleQueue()
        self._closed = False
        # No executor: that a thread cannot be started shows here, and a store that is not closed ends with its process.
        self._threads: list[threading.Thread] = []
        try:
            for number in range(_THREADS):
                thread = threading.Thread(target=self._run, name=f"{_NAME}_{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:
            self.close()
            raise

    def submit(self, question: PeerQuestion, job: Job) -> None:
        """Queue the job that answers a question; LinkError (``LLM_LINK_BUSY``) if its client has too many."""
        client = question.cluster_id, question.incarnation
        with self._lock:
            if self._closed:
                raise LLMException("the store ends", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
            jobs = self._jobs.get(client)
            if jobs is None:
                self._jobs[client] = jobs = deque()
                self._ready.put(client)
            if len(jobs) >= _MAX_WAITING:
                text = f"{_MAX_WAITING} saves of this client wait already"
                raise LinkError(text, status_code=LLMStatusCode.LLM_LINK_BUSY)
            jobs.append(partial(question.answer_by, job))

    def waiting(self) -> int:
        with self._lock:
            return sum(map(len, self._jobs.values()))

    def close(self) -> None:
        """Drop waiting jobs, join the threads. Idempotent."""
        with self._lock:
            self._closed = True
            for jobs in self._jobs.values():
                jobs.clear()
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (client := self._ready.get()) is not None:
            with self._lock:
                jobs = self._jobs[client]
                if not jobs:
                    del self._jobs[client]
                    continue
                job = jobs.popleft()
            try:
                job()
            finally:
                self._ready.put(client)  # after those of others


def _options(memory: int, listen: str) -> dict[str, str]:
    return {
        "ge.exec.deviceId": "0",
        "llm.EnableCacheManager": "1",
        "llm.listenIpInfo": listen,
        "llm.SyncKvCacheWaitTime": str(_PULL_MS),
        "llm.MemPoolConfig": json.dumps({"memory_size": memory, "page_shift": _PAGE_SHIFT}),
    }
