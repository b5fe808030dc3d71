"""StoreClient, one instance's use of one namespace of a prefix store."""

from __future__ import annotations

import secrets
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from llm_datadist._checks import check_int, check_int32, check_list, check_rule, check_type, check_uint64
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger, named
from llm_datadist._memory.unmap import must_not_wait
from llm_datadist._native import parse_indices
from llm_datadist._native.signals import OfProcess, public_calls_hold_signals, put_off
from llm_datadist.config import parse_listen_ip_info
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
from llm_datadist.store.messages import BlockShape
from llm_datadist.types import CacheKeyByIdAndIndex, LLMClusterInfo
from llm_datadist.types.descriptors import Cache

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from llm_datadist.datadist import LLMDataDist
    from llm_datadist.types.descriptors import BlockNumbers

    Indices = np.ndarray[Any, np.dtype[np.int64]]

#: Cluster id of a store unless it is given another one.
STORE_ID: Final = 0x53746F7265

_SAVE_BYTES: Final = 64 << 20  # of one question, so that a preempted request waits for no more
_DIAL_MS: Final = 2000
_FIRST_PAUSE: Final = 0.05  # seconds between dials, at first and at most
_LONGEST_PAUSE: Final = 5.0
_LOOK_PAUSE: Final = 1.0  # seconds between looks at the link
_SUSPECT_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Options of a :class:`StoreClient`.

    Attributes:
        store_id: Cluster id of the store.
        lookup_ms: Milliseconds of a lookup; without an answer it is a miss.
        pause_seconds: Seconds without lookups and saves after a question of theirs was refused or not answered. Lookups
            are misses then, saves store nothing.
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
        check_rule(pause >= 0, f"pause_seconds: {pause}, at least 0 is needed")
        check_type("verify", self.verify, bool)


@public_calls_hold_signals(__init__="_end", lookup="release")
class StoreClient(OfProcess):
    """Lookups, loads and saves of one namespace of a store.

    A background thread links to the store, also when the link is lost. Until then lookups are misses, and saves store
    nothing. A hit is exactly the bytes saved under its key in its namespace. Threads: any. In a forked child every call
    is a StateError.

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
        self._manager = datadist.cache_manager
        self._datadist = datadist
        self._namespace = namespace
        self._options = given
        self._cluster = _cluster(given.store_id, address)
        self._what = f"store at {address}"
        self._wanted = threading.Event()  # it should dial, or end
        self._linked = threading.Event()
        self._closed = False
        self._resume_at = 0.0  # monotonic; no question before
        self._warned = ""
        weak = weakref.proxy(self)  # the thread of a client that its caller never got, or dropped, ends
        self._dialler = threading.Thread(target=_dial, args=(weak,), name="llm-datadist-store-dial", daemon=True)
        self._dialler.start()

    def connect(self, timeout: float) -> bool:
        """Wait until the store is linked, at most ``timeout`` seconds; return False if it is not."""
        return Deadline(int(timeout * 1e3)).poll(self._linked.is_set)

    def lookup(self, keys: Sequence[bytes]) -> Hit:
        """Return the leading run of ``keys`` that the store has, and keep it there until the hit is released.

        A store that is gone, stopped, or of another release is a miss: at once if that is known, else within
        ``lookup_ms``. The first 4,096 keys count.

        Raises:
            TypeError, ParamError: ``keys`` is not a list or tuple of bytes, each of 1 to 64.
            StateError: The client is closed, or its LLMDataDist finalized.
        """
        checked = list(_check_keys(keys)[: messages.MAX_LOOKUP_KEYS])
        if not checked or not self._usable("lookup"):
            return Hit(self._namespace)
        token = secrets.token_bytes(16)
        body = messages.Lookup(self._namespace, checked, token).encode()
        try:
            answer = self._ask(messages.LOOKUP, body, self._options.lookup_ms)
            hit = Hit(self._namespace, messages.decode(messages.Found, answer, self._what), held=True)
            check_rule(len(hit) <= len(checked), f"{self._what} found {len(hit)} of {len(checked)} keys")
        except BaseException as error:
            # The answer may be on its way, or be none of a sound store.
            self._manager.release_grant(self._options.store_id, token)
            if not isinstance(error, LLMException) or isinstance(error, StateError):
                raise
            self._note(error)
            return Hit(self._namespace)
        return hit

    def load(self, hit: Hit, cache: Cache, blocks: BlockNumbers, *, release: bool = True) -> None:
        """Load the blocks of a hit: key i of the hit into ``blocks[i]`` of ``cache``.

        Args:
            hit: Of this client, or a copy from a client of the same namespace.
            cache: Blocks cache of the client's LLMDataDist, with the tensors and the block shape of the hit.
            blocks: Block numbers; fewer than keys load the leading ones.
            release: Release the hit, also after an error.

        Raises:
            ParamError: Not a blocks cache, more blocks than keys, a block outside the cache, another namespace.
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
        if not count or hit.grant is None:
            return
        if shape != hit.shape:
            raise CacheMismatch(f"load: the store has {hit.shape}, cache has {shape}")
        key = CacheKeyByIdAndIndex(hit.grant.cluster_id, hit.grant.cache_id, 0)
        self._manager.pull_blocks(key, cache, hit.slots[:count], indices, grant=hit.grant)
        if self._options.verify:
            found = self._manager.digest_blocks(cache, indices, hit.nonce)
            wrong = np.flatnonzero((found != hit.digests[:count]).any(axis=1))
            if wrong.size:
                self._suspect(hit.slots[wrong])
                raise ChecksumMismatch(
                    f"load: {wrong.size} of {count} blocks are not what the {self._what} published, the first is block "
                    f"{indices[wrong[0]]}; the blocks are undefined",
                    cache_id=hit.grant.cache_id,
                    local_block=int(indices[wrong[0]]),
                    remote_block=int(hit.slots[wrong[0]]),
                    peer=hit.grant.cluster_id,
                    phase="verify",
                )

    def release(self, hit: Hit) -> None:
        """Let the store reuse the slots of a hit. Idempotent; does not wait. No effect for a copy."""
        if check_type("hit", hit, Hit).take() and hit.grant is not None:
            with suppress(StateError):  # finalized, which has ended the link
                self._manager.release_grant(hit.grant.cluster_id, hit.grant.token)

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
            body = messages.Save(self._namespace, shape, keys, blocks.tolist(), grant.to_bytes()).encode()
            answer = self._ask(messages.SAVE, body, self._options.save_ms)
        finally:
            grant.revoke()  # before this call ends: nobody reads the blocks any more
        return messages.decode(messages.Saved, answer, self._what).count

    def events(self, after: int = 0) -> tuple[int, list[messages.Event]]:
        """Return the number of the store's oldest event, and the next events after number ``after``.

        Replayed from the first event on, they give the index of the store. If ``after + 1`` is below the oldest, the
        store has forgotten some.

        Raises:
            LLMException: The store did not answer.
        """
        body = messages.EventsAfter(check_int("after", after)).encode()
        answer = self._ask(messages.EVENTS, body, self._options.save_ms)
        found = messages.decode(messages.Events, answer, self._what)
        return found.oldest, found.events

    def close(self) -> None:
        """End the background thread. The link, and hits that were not released, stay. Idempotent.

        Inside another call of this thread, as by a finalizer (``__del__``), it ends when that call ends.
        """
        if not put_off(self._end):
            self._end()

    def __enter__(self) -> Self:
        return self

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
        return self._datadist.ask(self._options.store_id, name, body, timeout_ms)

    def _usable(self, call: str) -> bool:
        if self._closed:
            raise StateError(f"{call}: this StoreClient is closed")
        return self._linked.is_set() and time.monotonic() >= self._resume_at

    def _note(self, error: LLMException) -> None:
        """Remember a failure: dial again, or leave the store alone for a while."""
        if isinstance(error, LinkError) and error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
            self._linked.clear()
            self._wanted.set()
        elif not isinstance(error, (LinkError, GrantEnded)):
            self._resume_at = time.monotonic() + self._options.pause_seconds
        text = named(error)
        if not isinstance(error, (LinkError, DeadlineExceeded, GrantEnded)) and text != self._warned:
            self._warned = text
            logger.warning("%s: %s", self._what, text)

    def _suspect(self, slots: Indices) -> None:
        body = messages.Suspect(self._namespace, slots.tolist()).encode()
        with suppress(LLMException):
            self._ask(messages.SUSPECT, body, _SUSPECT_MS)

    def _dial(self) -> None:
        """Link to the store whenever it is wanted. In a thread of its own."""
        pause: float | None = None  # seconds
        while True:
            self._wanted.clear()  # before the look: whoever sets it afterwards is heard
            if self._closed:
                return
            try:
                if not self._is_up():
                    # Its status does not tell: another process may be linked under this cluster id.
                    self._datadist.link_clusters([self._cluster], _DIAL_MS)
                linked = self._is_up()
            except StateError:
                return  # finalized
            if not linked:
                self._linked.clear()
                pause = _FIRST_PAUSE if pause is None else min(2 * pause, _LONGEST_PAUSE)
            elif not self._linked.is_set():
                self._resume_at, pause = 0.0, None
                self._linked.set()
            # A call may have noticed the end of the link before the link itself has: look once more.
            self._wanted.wait(_LOOK_PAUSE if linked else pause)

    def _is_up(self) -> bool:
        with suppress(NotLinked):
            return self._datadist.explain(self._options.store_id).state in ("ready", "suspect")
        return False


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
