"""StoreClient, one rank's use of its namespace of a prefix store, and of those of its engine."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from collections import Counter
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np
from msgspec.structs import replace

from llm_datadist._checks import (
    check_int32,
    check_list,
    check_rule,
    check_text,
    check_timeout,
    check_type,
    check_uint64,
)
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger, named
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native import parse_indices
from llm_datadist._native.public_call import OfProcess, public_calls, put_off
from llm_datadist.config import parse_listen_ip_info
from llm_datadist.datadist import LLMDataDist, life_of
from llm_datadist.errors import (
    CacheMismatch,
    CacheNotFound,
    ChecksumMismatch,
    DeadlineExceeded,
    GrantEnded,
    LinkError,
    LLMException,
    LLMStatusCode,
    NotLinked,
    ParamError,
    StateError,
)
from llm_datadist.store import messages
from llm_datadist.store.hit import Hit
from llm_datadist.store.identity import shown
from llm_datadist.store.messages import NO_EVENTS, BlockShape, Events
from llm_datadist.store.statistics import StoreClientStatistics
from llm_datadist.types import CacheKeyByIdAndIndex, LLMClusterInfo
from llm_datadist.types.cluster import show_address
from llm_datadist.types.descriptors import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from llm_datadist.types.descriptors import BlockNumbers

    Indices = np.ndarray[Any, np.dtype[np.int64]]

#: Cluster id of a store unless it is given another one.
STORE_ID: Final = 0x53746F7265

_SAVE_BYTES: Final = 64 << 20  # of one question, so that a preempted request waits for no more
_UNKNOWN: Final = bytes(16)  # generation
_SAVE_SPARE: Final = 2.0  # seconds of a save's grant beyond its question
_DIAL_MS: Final = 2000
_ENTER_SECONDS: Final = 3.0
_FIRST_PAUSE: Final = 0.05  # seconds between dials, at first and at most
_LONGEST_PAUSE: Final = 5.0
_LOOK_PAUSE: Final = 1.0  # seconds between looks at the link
_DAY: Final = 86_400  # seconds
_LATE_IN_A_ROW: Final = 5  # one late answer is of a busy machine
_SUSPECT_MS: Final = 1000
_SIZES: Final = frozenset(range(1, messages.MAX_KEY + 1))  # of keys
_MISSES: Final = ("absent", "late", "gone", "busy")
_REFUSED: Final = ("busy", "gone", "late", "failed", "cleared")


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a :class:`StoreClient`.

    Attributes:
        store_id: Cluster id of the store.
        lookup_ms: Milliseconds of a lookup; without an answer it is a miss.
        pause_seconds: Seconds without lookups and saves after the store refused one of them (not ``LLM_LINK_BUSY``), or
            left five in a row without an answer; at most a day. Lookups are misses then, saves store nothing.
        save_ms: Milliseconds of one question of a save, for at most 64 MiB or one block.
        verify: Compare digests after each load. Costs reading the bytes once more.
        label: Names the namespace in the store's metrics, as by its model; at most 128 characters. Whoever saves first
            gives it.

    Raises:
        TypeError, ParamError: A field of a wrong type, or outside its range.
    """

    store_id: int = STORE_ID
    lookup_ms: int = 250
    pause_seconds: float = 1.0
    save_ms: int = 10_000
    verify: bool = True
    label: str = ""

    def __post_init__(self) -> None:
        check_uint64("store_id", self.store_id)
        for name, value in (("lookup_ms", self.lookup_ms), ("save_ms", self.save_ms)):
            check_rule(check_int32(name, value) > 0, f"{name}: {value}, milliseconds above 0 are needed")
        pause = check_type("pause_seconds", self.pause_seconds, (int, float))
        check_rule(0 <= pause <= _DAY, f"pause_seconds: {pause} is outside [0, {_DAY}]")
        check_type("verify", self.verify, bool)
        label = check_text("label", check_type("label", self.label, str))
        check_rule(len(label) <= messages.MAX_LABEL, f"label: {len(label)} characters, at most {messages.MAX_LABEL}")


@public_calls(whole=("__init__",))
class StoreClient(OfProcess, AbstractContextManager["StoreClient"]):
    """Lookups, loads and saves of one namespace of a store.

    A background thread links to the store, also when the link is lost. Until then lookups are misses, and saves store
    nothing; the log says so once. A ``with`` statement waits for the first link, at most 3 s. The store is the process
    that answers at the address, and no other one that links under its cluster id: a link that such a process has made
    is ended. A hit is exactly the bytes saved under its key in its namespace.
    Threads: any. In a forked child every call is a StateError.

    Args:
        datadist: An initialised LLMDataDist in v2 mode, without remote cache access; it may have several clients.
        address: "ip:port" or "[ipv6]:port" of the store.
        namespace: Of :func:`llm_datadist.store.namespace`, 32 bytes.
        options: Default: None, those of :class:`StoreOptions`.
        ranks: Namespaces of all ranks of one engine in rank order, ``namespace`` among them, at most 16. The store
            counts and displaces them as one namespace, whose memory they share equally. If that is too little, lookups
            are misses and saves store nothing; the log says so at each link. Default: empty, ``namespace`` only.

    Raises:
        TypeError, ParamError: An argument of a wrong type, a malformed address, a namespace not of 32 bytes, ``ranks``
            that repeat one or lack ``namespace``.
        NotInitialized: ``datadist`` is not initialised.
    """

    def __init__(
        self,
        datadist: LLMDataDist,
        address: str,
        namespace: bytes,
        options: StoreOptions | None = None,
        *,
        ranks: Sequence[bytes] = (),
    ) -> None:
        given = StoreOptions() if options is None else check_type("options", options, StoreOptions)
        names = self._ranks = list(check_list("ranks", ranks, bytes)) or [check_type("namespace", namespace, bytes)]
        check_rule({len(each) for each in names} == {32}, "namespace, ranks: each must have 32 bytes")
        right = namespace in names and len(set(names)) == len(names) <= messages.MAX_RANKS
        check_rule(right, f"ranks: up to {messages.MAX_RANKS} different ones are needed, namespace among them")
        self._manager = check_type("datadist", datadist, LLMDataDist).cache_manager
        self._datadist = datadist
        self._namespace = namespace
        self._options = given
        self._address = show_address(parse_listen_ip_info(address, "address"))
        self._cluster = cluster_of(given.store_id, address)
        self._what = f"store at {address}"
        self._store = ""  # incarnation of the process that answered at the address
        self._wanted = threading.Event()  # it should dial, or end
        self._linked = threading.Event()
        self._closed = False
        self._resume_at = 0.0  # monotonic; no question before
        self._skipped_for = ""  # reason of ``_resume_at``
        self._late = 0  # answers in a row
        self._generation = _UNKNOWN  # of the namespace, as last told
        self._warned = ""
        self._counting = threading.Lock()
        self._counts: Counter[str] = Counter()
        weak = weakref.proxy(self)  # the thread of a client that its caller never got, or dropped, ends
        self._dialler = threading.Thread(target=_dial, args=(weak,), name="llm-datadist-store-dial", daemon=True)
        self._dialler.start()

    def connect(self, timeout: float) -> bool:
        """Wait until the store is linked, at most ``timeout`` seconds; return False if it is not.

        Raises:
            TypeError, ParamError: ``timeout`` is not a number, or not in [0, 86,400].
        """
        seconds = check_type("timeout", timeout, (int, float))
        check_rule(0 <= seconds <= _DAY, f"timeout: {seconds} is outside [0, {_DAY}]")
        return Deadline(int(seconds * 1e3)).poll(self._linked.is_set)

    def lookup(self, keys: Sequence[bytes]) -> Hit:
        """Return the leading run of ``keys`` that the store has, and keep it there until the hit is released.

        A store that is gone, stopped, or of another release is a miss: at once if that is known, else within
        ``lookup_ms``. A store that lets this process hold no more hits is a miss, too.

        Raises:
            TypeError, ParamError: ``keys`` is not a list or tuple of bytes, each of 1 to 64.
            StateError: The client is closed, or its LLMDataDist finalized.
        """
        return self._look_up([self._namespace], keys)[0]

    def lookup_ranks(self, keys: Sequence[bytes]) -> list[Hit]:
        """Return the leading run of ``keys`` that the store has for all ranks: equally long hits, one of each rank.

        Returns:
            Hits in rank order, which :meth:`release` ends one by one; empty for a miss.

        Raises:
            TypeError, ParamError, StateError: As :meth:`lookup`.
        """
        hits = self._look_up(self._ranks, keys)
        return hits if len(hits[0]) else []

    def _look_up(self, namespaces: list[bytes], keys: Sequence[bytes]) -> list[Hit]:
        checked, why = _check_keys(keys), "absent"
        deadline, step = Deadline(self._options.lookup_ms), messages.MAX_LOOKUP_KEYS // len(namespaces)
        hits = [Hit(name) for name in namespaces]
        try:
            for begin in range(0, len(checked), step):
                hits, why = self._longer(hits, checked[begin : begin + step], deadline)
                if why:
                    break
            self._count("hits" if len(hits[0]) else f"miss {why}".replace("failed", "gone"), lookups=1)
        except BaseException:
            self._cut_off(hits)
            raise
        return hits

    def _longer(self, hits: list[Hit], keys: list[bytes], deadline: Deadline) -> tuple[list[Hit], str]:
        """Ask for the next keys of a run; return the hits with the answer, and why the run ends there, if it does."""
        if why := self._skipped("lookup"):
            return hits, why
        names, tokens = [hit.namespace for hit in hits], [secrets.token_bytes(16) for _ in hits]
        try:
            body = messages.Lookup(names, keys, tokens).encode()
            run = self._learn(names, self._ask(messages.LOOKUP, body, deadline.remaining_ms() or 1))
            self._require_own("lookup")  # after the answer: it came over that link
            if not run.found:
                return hits, "absent"
            counts = [len(found.slots) // 8 for found in run.found]
            right = len(counts) == len(hits) and len(set(counts)) == 1 and counts[0] <= len(keys)
            check_rule(right, f"{self._what} found {counts} of {len(keys)} keys in {len(hits)} namespaces")
            own = self._options.store_id, bytes.fromhex(self._store)
            owned = [replace(found, owner=(*own, token)) for found, token in zip(run.found, tokens, strict=True)]
            longer = [hit.longer(found) for hit, found in zip(hits, owned, strict=True)]
        except BaseException as error:
            # The answer may be on its way, or be none of a sound store.
            for token in tokens:
                self._manager.release_grant(self._options.store_id, token)
            if not isinstance(error, LLMException) or isinstance(error, StateError):
                raise
            return hits, self._note(error)
        return longer, "" if counts[0] == len(keys) else "absent"

    def _learn(self, namespaces: list[bytes], answer: bytes) -> messages.Run:
        """Return the answer to a lookup, and keep the generation of the own namespace."""
        run = messages.decode(messages.Run, answer, self._what)
        check_rule(len(run.generations) == len(namespaces), f"{self._what} told {len(run.generations)} generations")
        self._generation = run.generations[namespaces.index(self._namespace)]
        return run

    def load(self, hit: Hit, cache: Cache, blocks: BlockNumbers, *, release: bool = True) -> None:
        """Load the blocks of a hit: key i of the hit into ``blocks[i]`` of ``cache``.

        Args:
            hit: Of this client, or a copy from a client of the same namespace.
            cache: Blocks cache of the client's LLMDataDist, with the tensors and the block shape of the hit.
            blocks: Block numbers; fewer than keys load the leading ones.
            release: Release the hit, also after an error.

        Raises:
            ParamError: Not a blocks cache, more blocks than keys, a block outside the cache, another namespace, a hit
                of another store.
            CacheMismatch: The hit's blocks have another shape. No byte has moved.
            GrantEnded: The hit was released, or its client or the store was lost. The blocks are undefined.
            ChecksumMismatch: The store's bytes are not those that it published. The blocks are undefined; the store
                examines the slot.
            DeadlineExceeded, TransferFailed, LinkError: The transfer failed. The blocks are undefined.
        """
        try:
            self._load(check_type("hit", hit, Hit), check_type("cache", cache, Cache), blocks)
        finally:
            if release:
                self.release(hit)

    def _load(self, hit: Hit, cache: Cache, blocks: BlockNumbers) -> None:
        indices = parse_indices("blocks", blocks)
        count = len(indices)
        check_rule(hit.namespace == self._namespace, f"hit: {hit!r} is of another namespace than this client")
        check_rule(count <= len(hit), f"blocks: {count} for a hit of {len(hit)} keys")
        shape = shape_of(cache)
        if not count or hit.shape is None:
            return
        if shape != hit.shape:
            raise CacheMismatch(f"load: the store has {hit.shape}, cache has {shape}")
        for grant in hit.grants:
            check_rule(grant.cluster_id == self._options.store_id, f"load: {hit!r} has a grant not of the {self._what}")
            if grant.incarnation.hex() != self._store:
                raise GrantEnded(f"load: {hit!r} is of an earlier process of the {self._what}, or that was lost")
        self._require_own("load")
        at = 0
        for grant, keys in zip(hit.grants, hit.counts, strict=True):
            if at < count:
                part, key = slice(at, min(at + keys, count)), CacheKeyByIdAndIndex(grant.cluster_id, grant.cache_id, 0)
                self._manager.pull_blocks(key, cache, hit.slots[part], indices[part], grant=grant)
            at += keys
        self._require_own("load")  # after the last byte, too: it came over that link
        if self._options.verify:
            self._verify(hit, cache, indices)

    def _verify(self, hit: Hit, cache: Cache, indices: Indices) -> None:
        """Compare the digests of loaded blocks. Raises ChecksumMismatch, after the store has examined the slots."""
        found = self._manager.digest_blocks(cache, indices, hit.nonce)
        wrong = np.flatnonzero((found != hit.digests[: len(found)]).any(axis=1))
        if wrong.size:
            suspects = hit.slots[wrong[: messages.MAX_SAVE_KEYS]].tolist()
            with suppress(LLMException):
                self._ask(messages.SUSPECT, messages.Suspect(self._namespace, suspects).encode(), _SUSPECT_MS)
            raise ChecksumMismatch(
                f"load: {wrong.size} of {len(found)} blocks are not what the {self._what} published, the first is "
                f"block {indices[wrong[0]]}; the blocks are undefined",
                cache_id=hit.grants[0].cache_id,
                local_block=int(indices[wrong[0]]),
                remote_block=int(hit.slots[wrong[0]]),
                peer=self._options.store_id,
                phase="verify",
            )

    def release(self, hit: Hit) -> None:
        """Let the store reuse the slots of a hit. Idempotent; does not wait. No effect for a copy."""
        if check_type("hit", hit, Hit).take():
            with suppress(StateError):  # finalized, which has ended the link
                for grant in hit.grants:
                    self._manager.release_grant(grant.cluster_id, grant.token)

    def _cut_off(self, found: object) -> None:
        """Release hits whose caller does not get them."""
        for each in found if isinstance(found, list) else [found]:
            if isinstance(each, Hit):
                self.release(each)

    def save(self, keys: Sequence[bytes], cache: Cache, blocks: BlockNumbers) -> int:
        """Have the store pull block ``blocks[i]`` of ``cache`` under ``keys[i]``; return the number newly stored.

        Keys that the store has, or is being given, are not moved again. The caller must not write the blocks until the
        call ends; then the store cannot read them. Fewer keys are stored if the store has no room, or is lost, stopped
        or busy, if its pull fails, or if the namespace was emptied (:meth:`clear`).

        Args:
            keys: One for each block, of 1 to 64 bytes.

        Raises:
            TypeError, ParamError: Bad keys or blocks, or not a blocks cache.
            CacheMismatch: The namespace has blocks of another shape, a block needs more memory than the store has for a
                namespace, or the store is of another release.
            CacheNotFound: The cache was freed.
            StateError: The client is closed, or its LLMDataDist finalized.
        """
        if self._linked.is_set() and self._generation == _UNKNOWN:  # a store that begins to listen refuses questions
            self._open()
        generation = self._generation  # of the beginning: nothing is stored after a later `clear`
        checked, indices = _check_keys(keys), parse_indices("blocks", blocks)
        check_rule(len(checked) == len(indices), f"blocks: {len(indices)} for {len(checked)} keys")
        shape = shape_of(check_type("cache", cache, Cache))
        block_bytes = shape.tensors * cache.cache_desc.size // cache.cache_desc.shape[0]
        step = max(1, min(messages.MAX_SAVE_KEYS, _SAVE_BYTES // block_bytes))
        stored, why, begin = 0, "", 0
        for begin in range(0, len(checked), step):
            part = slice(begin, begin + step)
            if why := self._skipped("save"):
                break
            saved, why = self._save(checked[part], shape, cache, indices[part], generation)
            stored += saved
            if why:
                break
        self._count("refused " + why, len(checked) - begin, keys=len(checked), stored=stored)
        return stored

    def _save(
        self, keys: list[bytes], shape: BlockShape, cache: Cache, blocks: Indices, generation: bytes
    ) -> tuple[int, str]:
        """Save what goes into one question; return the number newly stored, and the reason to ask no other one."""
        try:
            # It ends in any case: also if neither the revoke nor the end of the link comes.
            grant = cache.grant(blocks, self._options.save_ms / 1e3 + _SAVE_SPARE, peer=self._options.store_id)
            try:
                # After the grant, which ends with the link: no other process that took the store's place may use it.
                self._require_own("save")
                lent, rank = grant.to_bytes(), self._ranks.index(self._namespace)
                asked = self._ranks, rank, generation, shape, keys, blocks.tolist(), lent, self._options.label
                body = messages.Save(*asked).encode()
                answer = self._ask(messages.SAVE, body, self._options.save_ms)
            finally:
                grant.revoke()  # before this call ends: nobody reads the blocks any more
            done = messages.decode(messages.Done, answer, self._what)
        except LLMException as error:
            if isinstance(error, (ParamError, CacheNotFound, StateError)):
                raise
            return 0, self._note(error)  # of the pull, too: its error comes by status
        if done.generation != generation:
            self._generation = done.generation
            return 0, "cleared"
        self._count("refused busy", done.left)
        return done.count, ""

    def clear(self, timeout_ms: int = 1000) -> bool:
        """Empty the namespaces of all ranks; return True once the store has done it.

        Afterwards no lookup finds what was saved before. Hits that were not released can still be loaded. A save stores
        nothing that began before the call, wherever it waits; nor does one of a client that the store has told nothing
        since, so the next save of each other client may store nothing.

        Returns:
            False if the store is not linked, refused, or did not answer in time; it may be done later.

        Raises:
            TypeError, ParamError: A bad ``timeout_ms``.
            StateError: The client is closed, or its LLMDataDist finalized.
        """
        check_timeout(timeout_ms)
        self._resume_at = 0.0
        if self._skipped("clear"):
            return False
        try:
            body = messages.Clear([shown(each) for each in self._ranks]).encode()
            answer = self._ask(messages.CLEAR, body, timeout_ms)
            self._require_own("clear")
            self._generation = messages.decode(messages.Done, answer, self._what).generation
        except LLMException as error:
            if isinstance(error, StateError):
                raise
            self._note(error)
            return False
        return True

    def statistics(self) -> StoreClientStatistics:
        """Return the present figures."""
        with self._counting:
            counts = {name: self._counts[name] for name in ("lookups", "hits", "keys", "stored")}
            misses = {why: self._counts["miss " + why] for why in _MISSES}
            refused = {why: self._counts["refused " + why] for why in _REFUSED}
        return StoreClientStatistics(**counts, misses=misses, refused=refused)

    def _count(self, what: str, number: int = 1, **more: int) -> None:
        with self._counting:
            self._counts.update({what: number} | more)

    def events(self, after: Events = NO_EVENTS) -> Events:
        """Return the next events of this client's namespace.

        Replayed from the first one on, they give the index of the namespace. Check ``follows`` of each answer.

        Args:
            after: The last answer. Default: from the beginning.

        Raises:
            TypeError: ``after`` is not such an answer.
            LLMException: The store is not linked, or did not answer.
        """
        place = check_type("after", after, Events)
        if self._skipped("events"):
            raise NotLinked(f"events: the {self._what} is not linked, or did not answer just now")
        body = messages.EventsAfter(self._namespace, place.incarnation, place.last).encode()
        answer = self._ask(messages.EVENTS, body, self._options.save_ms)
        return messages.decode(Events, answer, self._what)

    def close(self) -> None:
        """End the background thread. The link, and hits that were not released, stay. Idempotent.

        Inside another call of this thread, as by a finalizer (``__del__``), it ends when that call ends.
        """
        if not put_off(self._end):
            self._end()

    def __enter__(self) -> Self:
        self.connect(_ENTER_SECONDS)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self) -> None:
        self._closed = True
        if self._dialler is threading.current_thread():  # perhaps below a lock of the event; it will look
            return
        self._wanted.set()
        if not must_not_wait():  # on a control thread, for which the dial may wait
            self._dialler.join()

    def _ask(self, name: str, body: bytes, timeout_ms: int) -> bytes:
        answer = self._datadist.ask(self._options.store_id, name, body, timeout_ms)
        self._late = 0
        return answer

    def _skipped(self, call: str) -> str:
        """Return the reason why a call does not ask the store, or an empty text."""
        if self._closed:
            raise StateError(f"{call}: this StoreClient is closed")
        if not self._linked.is_set():
            self._warn("not linked; until it is, lookups are misses and saves store nothing")
            return "gone"
        if not self._is_own():
            self._dial_again()  # the link has ended, or is of another process now
            return "gone"
        return self._skipped_for if time.monotonic() < self._resume_at else ""

    def _is_own(self) -> bool:
        """Return True while the link to the store's id is the one that was dialled. A peer may say any incarnation."""
        return self._store != "" and self._found() == self._store

    def _require_own(self, what: str) -> None:
        if not self._is_own():
            raise GrantEnded(f"{what}: the link to the {self._what} has ended")

    def _dial_again(self) -> None:
        self._linked.clear()
        self._wanted.set()

    def _note(self, error: LLMException) -> str:
        """Remember a failure: dial again, or leave the store alone for a while. Return the reason for statistics."""
        why = _reason(error)
        self._late = self._late + 1 if why == "late" else 0
        if isinstance(error, LinkError) and why == "gone":
            self._dial_again()
        elif why in ("busy", "failed") or self._late >= _LATE_IN_A_ROW:
            many = f"{_LATE_IN_A_ROW} late answers in a row, the last one: {error}"
            self._warn(many if why == "late" else named(error))
            if why != "busy":
                self._resume_at, self._late = time.monotonic() + self._options.pause_seconds, 0
                self._skipped_for = why
        return why

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            logger.warning("%s: %s", self._what, text)

    def _dial(self) -> None:
        """Link to the store whenever it is wanted. In a thread of its own."""
        pause: float | None = None  # seconds
        while True:
            self._wanted.clear()  # before the look: whoever sets it afterwards is heard
            if self._closed:
                return
            try:
                if not self._found():
                    # Its status does not tell: another process may be linked under this cluster id.
                    self._datadist.link_clusters([self._cluster], _DIAL_MS)
                if (store := self._found()) and (store != self._store or not self._linked.is_set()):
                    store = store if self._open() else ""
                self._store = store
            except StateError:
                return  # finalized
            except Exception as error:  # noqa: BLE001 (as a lack of memory: it is tried again)
                self._warn(f"unexpected error while it is linked: {error!r}")
                self._store = ""
            linked = self._store != ""
            if not linked:
                self._linked.clear()
                pause = _FIRST_PAUSE if pause is None else min(2 * pause, _LONGEST_PAUSE)
            elif not self._linked.is_set():
                self._resume_at, pause = 0.0, None
                self._linked.set()
            # A call may have noticed the end of the link before the link itself has: look once more.
            self._wanted.wait(_LOOK_PAUSE if linked else pause)

    def _open(self) -> bool:
        """Ask for the generation; return False without an answer. The log says if the store refuses so many ranks."""
        refused = ""
        try:
            body = messages.Lookup(self._ranks, [], []).encode()
            self._learn(self._ranks, self._ask(messages.LOOKUP, body, _DIAL_MS))
        except StateError:
            raise
        except LLMException as error:
            if _reason(error) in ("gone", "late"):
                return False
            refused = named(error)
        self._warned = ""
        self._warn(refused)
        return True

    def _found(self) -> str:
        """Return the incarnation of the process that answered at the store's address, while it is linked."""
        try:
            link = life_of(self._datadist).require_engine("lookup").links.get(self._options.store_id)
        except NotLinked:
            return ""
        if (dialled := link.origin.shown) == self._address:
            return link.peer.incarnation.hex()
        self._warn(
            f"its cluster id is of another link: pid {link.peer.pid} on {link.peer.host}, {dialled or 'by itself'}"
        )
        if not dialled and threading.current_thread() is self._dialler:
            # A process that links under the store's id costs its own link only.
            self._datadist.unlink_clusters([self._cluster], _DIAL_MS, force=True)
        return ""


def _dial(client: StoreClient) -> None:
    with suppress(ReferenceError):
        StoreClient._dial(client)  # noqa: SLF001 (of this module; the client is a proxy)


def _reason(error: LLMException) -> str:
    """Return the reason of a failure, as statistics name it."""
    if error.status_code is LLMStatusCode.LLM_LINK_BUSY:
        return "busy"
    lost = isinstance(error, (LinkError, GrantEnded))
    return "late" if isinstance(error, DeadlineExceeded) else "gone" if lost else "failed"


def shape_of(cache: Cache) -> BlockShape:
    """Return the shape of a blocks cache; ParamError for another cache."""
    check_rule(cache.is_blocks_cache, "cache: not a blocks cache")
    desc = cache.cache_desc
    return BlockShape(desc.num_tensors, desc.data_type.value, list(desc.shape[1:]))


def _check_keys(keys: Sequence[bytes]) -> list[bytes]:
    checked = check_type("keys", keys, (list, tuple))
    if not ({*map(type, checked)} <= {bytes} and _SIZES.issuperset(map(len, checked))):
        for i, size in enumerate(map(len, check_list("keys", keys, bytes))):
            check_rule(size in _SIZES, f"keys[{i}]: {size} bytes, 1 to {messages.MAX_KEY} are needed")
    return list(checked)


def cluster_of(store_id: int, address: str) -> LLMClusterInfo:
    """Return how to link to a store."""
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = store_id
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(*parse_listen_ip_info(address, "address"))
    return cluster
