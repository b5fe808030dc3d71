"""StoreClient, one instance's use of one namespace of a prefix store."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._checks import check_int32, check_list, check_rule, check_type, check_uint64
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger, named
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native import parse_indices
from llm_datadist._native.signals import OfProcess, public_calls_hold_signals, put_off
from llm_datadist.config import parse_listen_ip_info
from llm_datadist.datadist import LLMDataDist
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
from llm_datadist.store.messages import NO_EVENTS, BlockShape, Events
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
_DIAL_MS: Final = 2000
_FIRST_PAUSE: Final = 0.05  # seconds between dials, at first and at most
_LONGEST_PAUSE: Final = 5.0
_LOOK_PAUSE: Final = 1.0  # seconds between looks at the link
_DAY: Final = 86_400  # seconds
_LATE_IN_A_ROW: Final = 5  # one late answer is of a busy machine
_SUSPECT_MS: Final = 1000


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

    Raises:
        TypeError, ParamError: A field of a wrong type, or outside its range.
    """

    store_id: int = STORE_ID
    lookup_ms: int = 5
    pause_seconds: float = 1.0
    save_ms: int = 10_000
    verify: bool = True

    def __post_init__(self) -> None:
        check_uint64("store_id", self.store_id)
        for name, value in (("lookup_ms", self.lookup_ms), ("save_ms", self.save_ms)):
            check_rule(check_int32(name, value) > 0, f"{name}: {value}, milliseconds above 0 are needed")
        pause = check_type("pause_seconds", self.pause_seconds, (int, float))
        check_rule(0 <= pause <= _DAY, f"pause_seconds: {pause} is outside [0, {_DAY}]")
        check_type("verify", self.verify, bool)


@public_calls_hold_signals(__init__="_end", lookup="release")
class StoreClient(OfProcess, AbstractContextManager["StoreClient"]):
    """Lookups, loads and saves of one namespace of a store.

    A background thread links to the store, also when the link is lost. Until then lookups are misses, and saves store
    nothing. The store is the process that answers at the address, and no other one that links under its cluster id: a
    link that such a process has made is ended. A hit is exactly the bytes saved under its key in its namespace.
    Threads: any. In a forked child every call is a StateError.

    Args:
        datadist: An initialised LLMDataDist in v2 mode, without remote cache access; it may have several clients.
        address: "ip:port" or "[ipv6]:port" of the store.
        namespace: Of :func:`llm_datadist.store.namespace`, 32 bytes.
        options: Default: None, those of :class:`StoreOptions`.

    Raises:
        TypeError, ParamError: An argument of a wrong type, a malformed address, a namespace not of 32 bytes.
        NotInitialized: ``datadist`` is not initialised.
    """

    def __init__(
        self, datadist: LLMDataDist, address: str, namespace: bytes, options: StoreOptions | None = None
    ) -> None:
        given = StoreOptions() if options is None else check_type("options", options, StoreOptions)
        check_rule(len(check_type("namespace", namespace, bytes)) == 32, "namespace: it must have 32 bytes")
        self._manager = check_type("datadist", datadist, LLMDataDist).cache_manager
        self._datadist = datadist
        self._namespace = namespace
        self._options = given
        self._address = show_address(parse_listen_ip_info(address, "address"))
        self._cluster = _cluster(given.store_id, address)
        self._what = f"store at {address}"
        self._store = ""  # incarnation of the process that answered at the address
        self._wanted = threading.Event()  # it should dial, or end
        self._linked = threading.Event()
        self._closed = False
        self._resume_at = 0.0  # monotonic; no question before
        self._late = 0  # answers in a row
        self._warned = ""
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
        checked, deadline = _check_keys(keys), Deadline(self._options.lookup_ms)
        found: list[messages.Found] = []
        try:
            for begin in range(0, len(checked), messages.MAX_LOOKUP_KEYS):
                part = list(checked[begin : begin + messages.MAX_LOOKUP_KEYS])
                if not self._usable("lookup") or not self._look_up(part, found, deadline):
                    break
        except BaseException:
            self.release(Hit(self._namespace, found, held=True))
            raise
        return Hit(self._namespace, found, held=True)

    def _look_up(self, keys: list[bytes], found: list[messages.Found], deadline: Deadline) -> bool:
        """Ask for the next keys of a run, and add the answer; return False at the end of the run."""
        token = secrets.token_bytes(16)
        try:
            body = messages.Lookup(self._namespace, keys, token).encode()
            answer = self._ask(messages.LOOKUP, body, deadline.remaining_ms() or 1)
            self._require_own("lookup")  # after the answer: it came over that link
            part = messages.decode(messages.Found, answer, self._what)
            if part == messages.NOTHING:
                return False
            hit = Hit(self._namespace, [*found, part])
            check_rule(hit.counts[-1] <= len(keys), f"{self._what} found {hit.counts[-1]} of {len(keys)} keys")
            grant = hit.grants[-1]
            own = self._options.store_id, self._store, token
            right = (grant.cluster_id, grant.incarnation.hex(), grant.token) == own
            check_rule(right, f"{self._what} answered with {grant!r}, which is not its own, or not for this lookup")
        except BaseException as error:
            # The answer may be on its way, or be none of a sound store.
            self._manager.release_grant(self._options.store_id, token)
            if not isinstance(error, LLMException) or isinstance(error, StateError):
                raise
            self._note(error)
            return False
        found.append(part)
        return hit.counts[-1] == len(keys)

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
            suspects = hit.slots[wrong[: messages.MAX_LOOKUP_KEYS]].tolist()
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

    def save(self, keys: Sequence[bytes], cache: Cache, blocks: BlockNumbers) -> int:
        """Have the store pull block ``blocks[i]`` of ``cache`` under ``keys[i]``; return the number newly stored.

        Keys that the store has, or is being given, are not moved again. The caller must not write the blocks until the
        call ends; then the store cannot read them. Fewer keys are stored if the store has no room, or is lost, stopped
        or busy, or if its pull fails.

        Args:
            keys: One for each block, of 1 to 64 bytes.

        Raises:
            TypeError, ParamError: Bad keys or blocks, or not a blocks cache.
            CacheMismatch: The namespace has blocks of another shape, a block needs more memory than the store has for a
                namespace, or the store is of another release.
            CacheNotFound: The cache was freed.
            StateError: The client is closed, or its LLMDataDist finalized.
        """
        checked, indices = _check_keys(keys), parse_indices("blocks", blocks)
        check_rule(len(checked) == len(indices), f"blocks: {len(indices)} for {len(checked)} keys")
        shape = shape_of(check_type("cache", cache, Cache))
        block_bytes = shape.tensors * cache.cache_desc.size // cache.cache_desc.shape[0]
        step = max(1, min(messages.MAX_SAVE_KEYS, _SAVE_BYTES // block_bytes))
        stored = 0
        for begin in range(0, len(checked), step):
            part = slice(begin, begin + step)
            if not self._usable("save"):
                break
            try:
                stored += self._save(list(checked[part]), shape, cache, indices[part])
            except LLMException as error:
                if isinstance(error, (ParamError, CacheNotFound, StateError)):
                    raise
                self._note(error)  # of the pull, too: its error comes by status
                break
        return stored

    def _save(self, keys: list[bytes], shape: BlockShape, cache: Cache, blocks: Indices) -> int:
        grant = cache.grant(blocks, None, peer=self._options.store_id)
        try:
            # After the grant, which ends with the link: no other process that took the store's place may use it.
            self._require_own("save")
            body = messages.Save(self._namespace, shape, keys, blocks.tolist(), grant.to_bytes()).encode()
            answer = self._ask(messages.SAVE, body, self._options.save_ms)
        finally:
            grant.revoke()  # before this call ends: nobody reads the blocks any more
        return messages.decode(messages.Saved, answer, self._what).count

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
        if not self._usable("events"):
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

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _end(self, _: object = None) -> None:
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

    def _usable(self, call: str) -> bool:
        if self._closed:
            raise StateError(f"{call}: this StoreClient is closed")
        if not self._linked.is_set() or time.monotonic() < self._resume_at:
            return False
        if not (own := self._is_own()):
            self._dial_again()  # the link has ended, or is of another process now
        return own

    def _is_own(self) -> bool:
        """Return True while the link to the store's id is the one that was dialled. A peer may say any incarnation."""
        return self._store != "" and self._found() == self._store

    def _require_own(self, what: str) -> None:
        if not self._is_own():
            raise GrantEnded(f"{what}: the link to the {self._what} has ended")

    def _dial_again(self) -> None:
        self._linked.clear()
        self._wanted.set()

    def _note(self, error: LLMException) -> None:
        """Remember a failure: dial again, or leave the store alone for a while."""
        busy = error.status_code is LLMStatusCode.LLM_LINK_BUSY
        late = isinstance(error, DeadlineExceeded)
        self._late = self._late + 1 if late else 0
        if isinstance(error, LinkError) and not busy:
            self._dial_again()
        elif not isinstance(error, GrantEnded) and (not late or self._late >= _LATE_IN_A_ROW):
            self._warn(f"{_LATE_IN_A_ROW} late answers in a row, the last one: {error}" if late else named(error))
            if not busy:
                self._resume_at, self._late = time.monotonic() + self._options.pause_seconds, 0

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
                self._store = self._found()
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

    def _found(self) -> str:
        """Return the incarnation of the process that answered at the store's address, while it is linked."""
        try:
            link = self._datadist.explain(self._options.store_id)
        except NotLinked:
            return ""
        if link.dialled == self._address:
            return link.peer_incarnation
        self._warn(
            f"its cluster id is of another link: pid {link.peer_pid} on {link.peer_host}, {link.dialled or 'by itself'}"
        )
        if not link.dialled and threading.current_thread() is self._dialler:
            # A process that links under the store's id costs its own link only.
            self._datadist.unlink_clusters([self._cluster], _DIAL_MS, force=True)
        return ""


def _dial(client: StoreClient) -> None:
    with suppress(ReferenceError):
        StoreClient._dial(client)  # noqa: SLF001 (of this module; the client is a proxy)


def shape_of(cache: Cache) -> BlockShape:
    """Return the shape of a blocks cache; ParamError for another cache."""
    check_rule(cache.is_blocks_cache, "cache: not a blocks cache")
    desc = cache.cache_desc
    return BlockShape(desc.num_tensors, desc.data_type.value, list(desc.shape[1:]))


def _check_keys(keys: Sequence[bytes]) -> list[bytes] | tuple[bytes, ...]:
    checked = check_list("keys", keys, bytes)
    for i, key in enumerate(checked):
        if not 1 <= len(key) <= messages.MAX_KEY:
            raise ParamError(f"keys[{i}]: {len(key)} bytes, 1 to {messages.MAX_KEY} are needed")
    return checked


def _cluster(store_id: int, address: str) -> LLMClusterInfo:
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = store_id
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info(*parse_listen_ip_info(address, "address"))
    return cluster
