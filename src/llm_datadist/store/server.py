"""StoreServer, a prefix store: one pool of slots that it fills by pulling and lends by grants; docs/store.md.

Lookups are answered on the control thread, saves in threads: one of each client at a time. So a client that stands
still costs one thread, for the time of one pull.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections import Counter, defaultdict
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Final, Literal

import numpy as np

from llm_datadist._checks import check_int, check_rule, check_type, clean, require_intact
from llm_datadist._log import logger
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native import count_keys
from llm_datadist._native.public_call import OfProcess, public_calls, put_off
from llm_datadist.config import PEER_POLICY
from llm_datadist.datadist import LLMDataDist, drain, life_of, tear_down
from llm_datadist.errors import CacheMismatch, LinkError, LLMStatusCode, OutOfMemory, ParamError, StateError
from llm_datadist.store import messages
from llm_datadist.store.client import STORE_ID
from llm_datadist.store.events import KEY_BYTES, EventLog
from llm_datadist.store.identity import shown
from llm_datadist.store.messages import NO_EVENTS, B, BlockShape, Events, decode
from llm_datadist.store.savers import THREAD_NAME, Savers, busy
from llm_datadist.store.slots import SLOT_BYTES, Filling, Readers, Slots
from llm_datadist.store.statistics import NamespaceStatistics, StoreStatistics
from llm_datadist.types import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMRole
from llm_datadist.types.grant import Grant

if TYPE_CHECKING:
    from llm_datadist.metrics import Leftover
    from llm_datadist.store.slots import Numbers
    from llm_datadist.types import Cache
    from llm_datadist.types.question import PeerQuestion

#: Options by which peers could write slots.
_SEALED: Final = ("llm.EnableRemoteCacheAccessible", "llm.WriteByAddress")
_PAGE_SHIFT: Final = 16
_MAX_SLOTS: Final = 1 << 18  # of one namespace: a reader has a table of them
_LOGGED: Final = 2  # keys of events that are kept for each slot
_FEW_KEYS: Final = 1024  # kept in any case
_SLOT_BYTES: Final = SLOT_BYTES + _LOGGED * KEY_BYTES
_LOAD_BYTES: Final = 4096  # of a hit, beside 16 for each slot
_MAX_LENT: Final = 16 << 20  # bytes of the hits of one client
_MAX_LENT_TO_ALL: Final = 64 << 20  # of all clients; beyond, each has the next
_LENT_IN_ANY_CASE: Final = 768 << 10
_PULL_MS: Final = 5000

Name = tuple[str, bytes]  # tenant and namespace
Reader = tuple[int, str]  # cluster id and incarnation
Ranks = tuple[str, tuple[bytes, ...]]  # tenant, and the namespaces of an engine
_Lent = tuple["_Space", bytes, "Numbers", bytes]  # by a hit: slots as bytes, the same once each, and their digests


class _Emptied(Exception):
    """A namespace was emptied after a save had begun."""


class _Space:
    """A namespace's slots. Threads: under the lock of the server, except ``cache``, ``shape`` and ``nonce``."""

    generation: bytes  # random, another one whenever it is emptied

    def __init__(self, name: Name, ranks: Ranks, shape: BlockShape, cache: Cache, count: int, label: str) -> None:
        self.name = name
        self.label = label
        self.ranks = ranks  # its engine's
        self.shown = shown(name[1])
        self.shape = shape
        self.cache = cache
        self.slots = Slots(count)
        self.nonce = secrets.token_bytes(16)
        self.log = EventLog(max(_FEW_KEYS, _LOGGED * count))
        self.loads = 0  # hits that were not released
        self.lent: dict[Reader, Readers] = {}  # while it has slots
        self._spare: list[Readers] = []  # without readers, at most one: a large table takes longer than a lookup
        self.counts: Counter[str] = Counter()  # fields of NamespaceStatistics

    def __str__(self) -> str:
        tenant, _ = self.name
        return self.shown + (f" of tenant {tenant}" if tenant else "")

    def room_for(self, reader: Reader, slots: Numbers) -> Numbers:
        """Return the leading slots that a reader may hold: half of all at most, however often."""
        lent = self.lent.get(reader)
        if lent is None:
            return slots[: max(1, self.slots.count // 2)]
        fresh = np.cumsum(lent.of[slots] == 0)
        return slots[: np.searchsorted(fresh, max(1, self.slots.count // 2) - lent.slots, "right")]

    def cost(self, reader: Reader, slots: Numbers) -> int:
        """Return the bytes that are kept for a hit, with the table of a reader that has no other one."""
        return _LOAD_BYTES + 16 * slots.size + (0 if reader in self.lent else 2 * self.slots.count)

    def lend(self, reader: Reader, slots: Numbers) -> tuple[Numbers, int]:
        """Count a hit of published slots; return them once each, and the cost."""
        table = self.lent.get(reader) or (self._spare.pop() if self._spare else Readers(self.slots.count, np.uint16))
        read = self.slots.begin_read(slots)
        cost = self.cost(reader, read)
        self.lent[reader] = table
        table.begin(read)
        self.loads += 1
        return read, cost

    def take_back(self, reader: Reader, read: Numbers) -> None:
        """End a hit whose grant has ended: the guard has advanced."""
        self.slots.end_read(read)
        self.lent[reader].end(read)
        if not self.lent[reader].slots:
            self._spare = [self.lent.pop(reader)]
        self.loads -= 1


@public_calls(here=("check_integrity",), whole=("__init__", "close"))
class StoreServer(OfProcess, AbstractContextManager["StoreServer"]):
    """A prefix store in this process: an LLMDataDist, its pool, an index.

    Clients are :class:`StoreClient`. The store pulls what they save, digests its copy, and lends slots by grants. It
    runs without remote cache access, so no peer can write its pool. In a forked child every call is a StateError.

    Args:
        memory: Bytes of the pool, at least 64 KiB for each namespace.
        listen: "ip:port"; port 0 picks a free one.
        cluster_id: Cluster id, unique among all that link to each other.
        namespaces: Number of namespaces, which share the pool equally; those of one engine's ranks are one. One more
            displaces the one used least recently, but not in the last minute, and further ones unless its tensors fit
            into what that leaves.
        options: More options of ``init``, but none that lets peers write: ``llm.EnableRemoteCacheAccessible`` and
            ``llm.WriteByAddress`` are 0.

    Raises:
        ParamError: An argument breaks its rule.
        OutOfMemory, LinkError: As :meth:`LLMDataDist.init`.
    """

    _KEPT_SECONDS: ClassVar = 60.0  # after its last use a namespace is displaced by no other one

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
        given = {} if options is None else dict(check_type("options", options, dict))
        for name in _SEALED:
            check_rule(given.setdefault(name, "0") == "0", f"options: {name}={given[name]}, a store needs 0")
        self._share = size // most >> _PAGE_SHIFT << _PAGE_SHIFT
        check_rule(self._share > 0, f"memory: {size} bytes, at least {most << _PAGE_SHIFT} are needed")
        self._most = most
        self._lock = threading.Lock()  # guards the index; nothing blocks under it
        self._making = threading.Lock()  # held while a namespace gets its memory
        self._examining = threading.Lock()  # held by a suspicion: more at once keep the control thread waiting
        self._spaces: dict[Name, _Space] = {}
        self._used: dict[Ranks, float] = {}  # monotonic time of the last use; ranks of an engine count as one
        #: Of a tenant's namespaces that are not there.
        self._absent: defaultdict[str, bytes] = defaultdict(partial(secrets.token_bytes, 16))
        self._lent: Counter[Reader] = Counter()  # bytes of hits
        self._lent_to_all = 0
        self._cleared = 0
        #: The store's LLMDataDist, for its statistics.
        self.datadist = LLMDataDist(LLMRole.MIX, cluster_id)
        self.datadist.init(_options(size, listen) | given)
        with ExitStack() as undo:
            undo.callback(tear_down, self.datadist)
            self._manager = self.datadist.cache_manager
            self._savers = Savers()
            undo.callback(self._savers.close)
            self._answer_questions()
            undo.pop_all()

    def _answer_questions(self) -> None:
        for name, handler in (
            (messages.LOOKUP, self._on_lookup),
            (messages.SAVE, self._on_save),
            (messages.CLEAR, self._on_clear),
            (messages.SUSPECT, self._on_suspect),
            (messages.EVENTS, self._on_events),
        ):
            self.datadist.answer_questions(name, handler)

    @property
    def port(self) -> int:
        """The port that clients dial."""
        port = self.datadist.listen_port
        assert port is not None, "a store listens"
        return port

    def drain(self, timeout_ms: int = 10_000) -> Leftover:
        """Take and lend nothing more, and let loads and saves end, as :meth:`LLMDataDist.drain`; then :meth:`close`."""
        return drain(life_of(self.datadist), timeout_ms, self._savers.ending)

    def close(self) -> None:
        """End all links and give the memory back. Idempotent.

        Inside another call of this thread, as by a finalizer (``__del__``), it happens when that call ends.

        Raises:
            StateError: Called in a control thread or a thread of a store: it cannot wait for its own end.
        """
        thread = threading.current_thread().name
        if must_not_wait() or thread.startswith(THREAD_NAME):
            raise StateError(f"close: called in {thread}; call it from another thread")
        if not put_off(self._end):
            self._end()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _cut_off(self, result: object) -> None:
        """End a store whose caller does not get it; other errands but ``close`` return something."""
        if result is None:
            self._end()

    def _end(self) -> None:
        self._savers.close()
        tear_down(self.datadist)

    # --- lookups, on the control thread -------------------------------------------------------------------------------

    def _on_lookup(self, question: PeerQuestion) -> bytes:
        asked = _body(messages.RawLookup, question, "pull", "push")
        keys = count_keys(packed := bytes(asked.keys))
        _require(not keys or question.may("pull"), question, "pull")  # who may only save asks without keys
        count = self._require_room_of(asked.namespaces)
        right = not keys or len(set(asked.namespaces)) == len(asked.tokens) == count
        check_rule(right and count * keys <= messages.MAX_LOOKUP_KEYS, "lookup: its parts do not fit")
        reader, names = (question.cluster_id, question.incarnation), [(question.tenant, n) for n in asked.namespaces]
        found: list[messages.Found] = []
        lent: list[_Lent] = []
        granted = 0
        try:
            with self._lock:
                generations = [self._generation(name) for name in names]
                if keys:
                    self._lend([self._spaces.get(name) for name in names], reader, packed, keys, lent)
            for (space, slots, read, digests), token in zip(lent, asked.tokens, strict=bool(lent)):
                end = partial(self._end_load, space, reader)
                grant = space.cache.grant(read, None, token=token, peer=question.cluster_id, on_end=end)
                granted += 1
                found.append(messages.Found(grant.cache_id, grant.guard, slots, digests, space.nonce, space.shape))
        except BaseException:  # the client releases what it was given
            for space, _, read, _ in lent[granted:]:
                self._take_back(space, reader, read)
            raise
        return messages.Run(found, generations).encode()

    def _lend(self, spaces: list[_Space | None], reader: Reader, keys: bytes, asked: int, lent: list[_Lent]) -> None:
        """Under the lock: count a hit of the leading run that all have; add what each lends."""
        now, there, runs = time.monotonic(), [space for space in spaces if space is not None], []
        for space in there:
            runs.append(space.slots.run(keys))
            self._used[space.ranks] = now
            space.counts.update(lookups=1, asked=asked, found=len(runs[-1]))
        count = min(map(len, runs)) if len(there) == len(spaces) else 0
        if not count:
            return
        count = self._room_for(there, reader, [run[:count] for run in runs])
        for space, run in zip(there, runs, strict=True):
            places = run[:count].astype("<i8", copy=False).tobytes()
            digests = space.slots.digests(run[:count]).astype("<u8", copy=False).tobytes()
            read, cost = space.lend(reader, run[:count])
            lent.append((space, places, read, digests))
            self._count(reader, cost)

    def _room_for(self, spaces: list[_Space], reader: Reader, runs: list[Numbers]) -> int:
        """Under the lock: return the keys of the next hit; LinkError (``LLM_LINK_BUSY``) if it can have none."""
        both = list(zip(spaces, runs, strict=True))
        wanted = sum(space.cost(reader, run) for space, run in both)
        most = _MAX_LENT if self._lent_to_all + wanted <= _MAX_LENT_TO_ALL else _LENT_IN_ANY_CASE * len(spaces)
        count = min(len(space.room_for(reader, run)) for space, run in both)
        if count and self._lent[reader] + wanted <= most:
            return count
        for space in spaces:
            space.counts["refused"] += 1
        raise busy("this client holds as many hits as it may; it gets more once it has released some")

    def _count(self, reader: Reader, nbytes: int) -> None:
        """Under the lock."""
        self._lent_to_all += nbytes
        self._lent[reader] += nbytes
        if not self._lent[reader]:
            del self._lent[reader]

    def _end_load(self, space: _Space, reader: Reader, grant: Grant) -> None:
        """Take slots back whose grant has ended. Threads: any."""
        self._take_back(space, reader, grant.block_numbers)

    def _take_back(self, space: _Space, reader: Reader, read: Numbers) -> None:
        with self._lock:
            space.take_back(reader, read)
            self._count(reader, -space.cost(reader, read))

    # --- saves, in threads --------------------------------------------------------------------------------------------

    def _on_save(self, question: PeerQuestion) -> None:
        asked = _body(messages.Save, question, "push")
        who, grant = f"cluster {question.cluster_id}", Grant.from_bytes(asked.grant)
        right = len(asked.keys) == len(asked.blocks) and asked.rank < len(asked.ranks)
        check_rule(right, f"{who} sent unequal numbers of keys and blocks, or a rank that is none")
        self._require_room_of(asked.ranks)
        owner = grant.cluster_id, grant.incarnation.hex()
        wrong = f"{who} sent a grant of cluster {grant.cluster_id}, incarnation {owner[1]}"
        check_rule(owner == (question.cluster_id, question.incarnation), wrong)
        until = time.monotonic() + question.budget_ms / 1e3
        self._savers.submit(question, lambda: self._save(question.tenant, asked, grant, until))

    def _save(self, tenant: str, asked: messages.Save, grant: Grant, until: float) -> bytes:
        if time.monotonic() >= until:
            raise LinkError("save: its client has given up", status_code=LLMStatusCode.LLM_TIMEOUT)
        name = tenant, asked.ranks[asked.rank]
        try:
            space, filling = self._fill(name, asked)
            if filling.slots:
                self._pull(space, asked, grant, filling)
        except _Emptied:
            with self._lock:
                return messages.Done(0, 0, self._generation(name)).encode()
        return messages.Done(len(filling.slots), filling.left, asked.generation).encode()

    def _fill(self, name: Name, asked: messages.Save) -> tuple[_Space, Filling]:
        """Take slots for the keys that are missing."""
        while True:
            with self._lock:  # before another namespace is displaced
                self._require_generation(name, asked)
            space = self._space(name, asked)
            with self._lock:
                if self._spaces.get(name) is not space:
                    continue  # displaced
                self._require_generation(name, asked)
                self._used[space.ranks] = time.monotonic()
                filling = space.slots.fill(asked.keys)
                self._tell("removed", space, filling.evicted)
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
            if space.generation != asked.generation:
                space.slots.abandon(filling.slots)
                raise _Emptied
            space.slots.publish(filling.slots, digests)
            self._tell("stored", space, [asked.keys[position] for position in filling.positions])

    # --- namespaces ---------------------------------------------------------------------------------------------------

    def _generation(self, name: Name) -> bytes:
        """Under the lock."""
        return self._absent[name[0]] if (space := self._spaces.get(name)) is None else space.generation

    def _require_generation(self, name: Name, asked: messages.Save) -> None:
        """Under the lock: raise _Emptied if the namespace was emptied after the asker had begun."""
        if self._generation(name) != asked.generation:
            raise _Emptied

    def _require_room_of(self, ranks: list[bytes]) -> int:
        """Return the number of ranks; LinkError (``LLM_LINK_BUSY``) if so many cannot share a namespace's memory."""
        least, text = len(ranks) << _PAGE_SHIFT, "start it with more memory, or with fewer namespaces"
        if self._share < least:
            raise busy(f"{len(ranks)} ranks need {least} bytes, a namespace of this store has {self._share}; {text}")
        return len(ranks)

    def _space(self, name: Name, asked: messages.Save) -> _Space:
        """Return a namespace, made with its first save. Raises CacheMismatch for another shape of blocks."""
        if (space := self._spaces.get(name)) is None:
            with self._making:
                if (space := self._spaces.get(name)) is None:
                    space = self._make(name, (name[0], tuple(asked.ranks)), asked)
                    with self._lock:
                        space.generation = self._absent[name[0]]
                        self._used[space.ranks] = time.monotonic()
                        self._spaces[name] = space
        if space.shape != asked.shape:
            raise CacheMismatch(f"namespace {space} has {space.shape}; the saved cache has {asked.shape}")
        return space

    def _make(self, name: Name, ranks: Ranks, asked: messages.Save) -> _Space:
        shape = asked.shape
        try:
            kind = DataType(shape.data_type)
        except ValueError as error:
            raise ParamError(f"shape: {error}") from error
        share = self._share // len(ranks[1])
        block = CacheDesc(shape.tensors, [1, *shape.shape], kind).size
        tensor = share // shape.tensors >> _PAGE_SHIFT << _PAGE_SHIFT
        # What is kept of a slot in this process counts, too: blocks may have one byte.
        count = min(tensor // block, _MAX_SLOTS, share // (shape.tensors * block + _SLOT_BYTES))
        if count < 1:
            raise ParamError(
                f"shape: one block of {shape} needs more than the {share} bytes of a namespace of this store; "
                "start it with more memory, or with fewer namespaces"
            )
        while self._full(ranks):
            self._displace(ranks)
        cache, desc = None, CacheDesc(shape.tensors, [count, *shape.shape], kind)
        while cache is None:
            try:
                cache = self._manager.allocate_blocks_cache(desc, granted_only=True)
            except OutOfMemory as error:  # other shapes have left pieces that are too small
                if not (error.pool and self._spaces):  # without a pool: the process has no memory
                    raise
                self._displace(ranks)
        return _Space(name, ranks, shape, cache, count, clean(asked.label))

    def _full(self, ranks: Ranks) -> bool:
        """Return True if a tenant needs the place of another namespace of its own: a named one has half of them."""
        tenant = ranks[0]
        with self._lock:
            own = sum(each == tenant for each, _ in self._used)
            full = len(self._used) >= self._most or (tenant != "" and own >= max(1, self._most // 2))
            return full and ranks not in self._used

    def _displace(self, ranks: Ranks) -> None:
        """Give up the tenant's other namespace that was used least recently; LinkError if all are in use."""
        tenant, before = ranks[0], time.monotonic() - self._KEPT_SECONDS
        with self._lock:
            held = {space.ranks for space in self._spaces.values() if not space.slots.idle()}
            others = {each for each, at in self._used.items() if each[0] == tenant and at <= before} - held - {ranks}
            if not others:
                whose = f"tenant {tenant} has none that it could give up" if tenant else "all are in use"
                raise busy(f"this store has {self._most} namespaces, and {whose}; start it with more")
            least = min(others, key=self._used.__getitem__)
            del self._used[least]
            gone = [each for each in self._spaces.values() if each.ranks == least]
            for space in gone:
                self._forget(space)
        for space in gone:
            self._manager.deallocate_blocks_cache(space.cache)

    def _forget(self, space: _Space) -> None:
        """Under the lock."""
        del self._spaces[space.name]
        self._cleared += 1

    def _on_clear(self, question: PeerQuestion) -> None:
        asked = _body(messages.Clear, question, "push")
        generation = secrets.token_bytes(16)
        with self._lock:
            own = [each for each in self._spaces.values() if each.name[0] == question.tenant]
            spaces = [each for each in own if each.shown in asked.namespaces] if asked.namespaces else own
            # From here on, before the answer, saves that have begun store nothing.
            self._absent[question.tenant] = generation
            for space in spaces:
                space.generation = generation
        self._savers.submit(question, lambda: self._clear(spaces, generation))

    def _clear(self, spaces: list[_Space], generation: bytes) -> bytes:
        for space in spaces:
            with self._lock:
                space.counts["cleared"] += 1
                left = space.slots.published
            while left > 0:  # in parts, because lookups wait for it; those that are stored from now on are newer
                with self._lock:
                    keys = space.slots.drop_oldest()
                    self._tell("removed", space, keys)
                left = left - len(keys) if keys else 0
        return messages.Done(len(spaces), 0, generation).encode()

    # --- wrong bytes, events, statistics ------------------------------------------------------------------------------

    def _on_suspect(self, question: PeerQuestion) -> None:
        asked = _body(messages.Suspect, question, "push")
        self._savers.submit(question, lambda: self._examine((question.tenant, asked.namespace), asked))

    def _examine(self, name: Name, asked: messages.Suspect) -> bytes:
        """Digest slots again, and forget those that changed; a client's word is not enough."""
        with self._examining:
            with self._lock:
                if (space := self._spaces.get(name)) is None:
                    return b""
                slots = space.slots.begin_read(space.slots.published_of(asked.slots))
                digests = space.slots.digests(slots)
            wrong: list[int] = []
            try:
                differ = self._manager.digest_blocks(space.cache, slots, space.nonce) != digests
                wrong = slots[differ.any(axis=1)].tolist()
            finally:
                with self._lock:
                    keys = space.slots.drop(wrong)
                    space.slots.end_read(slots)
                    self._tell("removed", space, keys)
        if wrong:
            logger.error("%d slots of namespace %s had changed and were dropped", len(wrong), space)
        return b""

    def _tell(self, kind: Literal["stored", "removed"], space: _Space, keys: list[bytes]) -> None:
        """Under the lock: count keys that were ``stored`` or ``removed``, and add the event."""
        space.counts[kind] += len(keys)
        space.log.add(kind, keys)

    def events(self, namespace: bytes, after: Events = NO_EVENTS, tenant: str = "") -> Events:
        """Return the next events of a namespace, as :meth:`StoreClient.events`."""
        name = check_type("tenant", tenant, str), check_type("namespace", namespace, bytes)
        with self._lock:
            if (space := self._spaces.get(name)) is not None:
                return space.log.after(after.incarnation, after.last)
            return messages.Events(b"", 1, 0, not after.incarnation, [])

    def _on_events(self, question: PeerQuestion) -> bytes:
        asked = _body(messages.EventsAfter, question, "pull")
        after = messages.Events(asked.incarnation, 1, asked.after, True, [])
        return self.events(asked.namespace, after, question.tenant).encode()

    def index(self, tenant: str = "") -> dict[bytes, list[bytes]]:
        """Return the published keys of each namespace of a tenant, the oldest first."""
        with self._lock:
            return {each.name[1]: each.slots.keys() for each in self._spaces.values() if each.name[0] == tenant}

    def statistics(self) -> StoreStatistics:
        """Return the present figures."""
        with self._lock:
            spaces = tuple(_figures(space) for space in self._spaces.values())
            return StoreStatistics(spaces, self._most, self._cleared, self._savers.waiting())

    def check_integrity(self) -> None:
        """Raise AssertionError unless all tables agree."""
        with self._lock:
            for space in self._spaces.values():
                space.slots.check_integrity()
            lent = self._lent.total()
            require_intact(lent == self._lent_to_all, f"store: {lent} bytes of hits, {self._lent_to_all} are counted")
        self.datadist.check_integrity()


def _body(kind: type[B], question: PeerQuestion, *rights: str) -> B:
    """Return a question's body. Raises ParamError if the policy gives the peer none of these rights."""
    _require(any(map(question.may, rights)), question, rights[0])
    return decode(kind, question.body, f"cluster {question.cluster_id}")


def _require(allowed: bool, question: PeerQuestion, right: str) -> None:
    check_rule(allowed, f"{PEER_POLICY} of the store does not allow cluster {question.cluster_id} to {right}")


def _figures(space: _Space) -> NamespaceStatistics:
    slots, desc = space.slots, space.cache.cache_desc
    return NamespaceStatistics(
        tenant=space.name[0],
        namespace=space.shown,
        slots=slots.count,
        free=slots.free,
        filling=slots.filling,
        published=slots.published,
        loads=space.loads,
        events=space.log.number,
        logged=space.log.keys,
        label=space.label,
        rank=f"{space.ranks[1].index(space.name[1])}/{len(space.ranks[1])}",
        block_bytes=desc.num_tensors * desc.size // slots.count,
        **space.counts,
    )


def _options(memory: int, listen: str) -> dict[str, str]:
    return {
        "ge.exec.deviceId": "0",
        "llm.EnableCacheManager": "1",
        "llm.listenIpInfo": listen,
        "llm.SyncKvCacheWaitTime": str(_PULL_MS),
        "llm.SameUserOnly": "1",
        "llm.MemPoolConfig": json.dumps({"memory_size": memory, "page_shift": _PAGE_SHIFT}),
    }
