"""CacheStore: the caches of one LLMDataDist with their memory: pools, registry, guards and exported regions together.

The registry says who needs what, the pools hold the bytes, the guards tell foreign readers. This is the one place
where the three meet, and where the registry's effects are carried out, guards first.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import NOTHING, Effects, Registry, key_of
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist._memory.exports import PRIVATE, Exports
from llm_datadist._memory.guards import Guard, GuardTable
from llm_datadist._memory.pool import DirectMemory, MemoryPool, create_pool
from llm_datadist._memory.quarantine import Quarantine, writers_named
from llm_datadist._memory.segment import ExternalSegment
from llm_datadist._memory.write_intents import WriteIntents
from llm_datadist._native import Tensors, steps
from llm_datadist.errors import DeadlineExceeded, ParamError
from llm_datadist.types import BlocksCacheKey, CacheKey, Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from llm_datadist._cache.geometry import Geometry
    from llm_datadist._cache.registry import Entry
    from llm_datadist._memory.device import Device
    from llm_datadist._memory.pool import Allocation
    from llm_datadist._memory.segment import Segment
    from llm_datadist._memory.write_intents import Hazard
    from llm_datadist.config import Options

__all__ = ["CacheStore", "Storage", "private_memory", "wait_at_the_end", "withdraw"]

_REGIONS = {Placement.DEVICE: 1, Placement.HOST: 2}
_OPTION = {
    Placement.DEVICE: "mem_pool_cfg (llm.MemPoolConfig)",
    Placement.HOST: "host_mem_pool_cfg (llm.HostMemPoolConfig)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Where a cache's tensors are, for this process and for a peer.

    Attributes:
        tensors: Addresses here.
        regions: uint32 region id per tensor, little-endian: what a Resolved carries.
        offsets: uint64 offset per tensor (or address, for private memory), little-endian.
        allocation: The pool memory behind it; None for registered memory.
        segments: What keeps the memory mapped, one per tensor or one for all: for views.
        tag: Names this memory, and no other one ever, to whoever has to stop using it.
    """

    tensors: Tensors
    regions: bytes
    offsets: bytes
    allocation: Allocation | None
    segments: tuple[Segment, ...]
    tag: int = field(default_factory=itertools.count(1).__next__)

    @property
    def private(self) -> bool:
        """True when the memory lies outside every pool: it is unmapped when its owner frees it."""
        return not any(self.regions)

    def names(self) -> tuple[bytes, bytes]:
        """Return (regions, offsets), as a transport that maps exported regions wants them."""
        return self.regions, self.offsets

    def private_names(self) -> tuple[bytes, bytes]:
        """Return (regions, offsets) by address, as a transport that maps nothing wants them."""
        return bytes(4 * len(self.tensors.bases)), self.tensors.bases.astype("<u8").tobytes()


class CacheStore:
    """All caches of one LLMDataDist. Callers' threads and the control thread; the parts lock for themselves.

    Args:
        options: Pools and mode.
        device: What DEVICE placement means here.
        host: What HOST placement means here.
        incarnation: Random id of this process incarnation, for the exports.
    """

    def __init__(self, options: Options, device: Device, host: Device, incarnation: bytes) -> None:
        self.registry = Registry()
        self.writers = WriteIntents()
        self.remote_accessible = options.remote_accessible
        self._patience_ms = options.sync_kv_timeout_ms
        self._quarantine = Quarantine(self.writers)
        self._pools: dict[Placement, MemoryPool] = {}
        #: Where DEVICE memory comes from in v1 mode without a pool (R12).
        self._direct = None if options.cache_manager or options.mem_pool else DirectMemory("device, no pool", device)
        self._guards: GuardTable | None = None
        try:
            for placement, pool, where in (
                (Placement.DEVICE, options.mem_pool, device),
                (Placement.HOST, options.host_mem_pool, host),
            ):
                if pool is not None:
                    self._pools[placement] = create_pool(
                        placement.name.lower(),
                        where,
                        pool.memory_size,
                        pool.page_shift,
                        peers_may_write=options.remote_accessible,
                        prefault=options.pool_prefault,
                    )
            self._guards = GuardTable()
        except BaseException:
            self._close_memory()
            raise
        self.exports = Exports(
            incarnation=incarnation,
            regions={_REGIONS[placement]: pool.segment for placement, pool in self._pools.items()},
            guards=self._guards,
            writable=options.remote_accessible,
            writers=self.writers,
            by_address=True,
        )
        #: Ends all use of a storage by our own data lanes, by its tag; set by whoever owns the lanes.
        self.quiesce: Callable[[int], None] = lambda tag: None

    # --- making caches ---------------------------------------------------------------------------------------------

    def allocate(
        self, geometry: Geometry, keys: Sequence[tuple[CacheKey | BlocksCacheKey, int]], deadline: Deadline
    ) -> Entry:
        """Take memory from the pool of the geometry's placement and bind ``(key, row)`` pairs: all of it, or nothing.

        Waits only where memory in quarantine could be enough.

        Raises:
            ParamError: No pool is configured for that placement (R12).
            KeyInUse: A key is bound already (R3).
            OutOfMemory: The pool cannot hold the tensors, or foreign writers do not let go of it.
        """
        pool = self._pools.get(Placement(geometry.placement)) or self._direct
        if pool is None:
            raise ParamError(
                f"cache_desc.placement={Placement(geometry.placement).name}: no pool to allocate from; set "
                f"{_OPTION[Placement(geometry.placement)]} before init, or register memory of your own"
            )
        self.registry.require_free(key for key, _ in _bindable(keys))
        allocation = self._quarantine.allocate(pool, geometry.num_tensors, geometry.tensor_bytes, deadline)
        try:
            storage = self._pooled(geometry, allocation)
            return self._add(geometry, storage, keys, owned=True, remote_accessible=True)
        except BaseException:
            allocation.free()
            raise

    def register(
        self,
        geometry: Geometry,
        addrs: Sequence[int],
        keys: Sequence[tuple[CacheKey | BlocksCacheKey, int]],
        *,
        remote_accessible: bool,
    ) -> Entry:
        """Enter memory of the user, one address per tensor. The memory is not touched."""
        addresses = np.array(addrs, dtype=np.uint64)
        segments = tuple(self._segment_of(address, geometry.tensor_bytes) for address in addrs)
        regions, offsets = self._locate(addresses, geometry.tensor_bytes)
        tensors = Tensors(addresses, geometry.tensor_bytes)
        names = regions.astype("<u4").tobytes(), offsets.astype("<u8").tobytes()
        storage = Storage(tensors, *names, None, segments)
        return self._add(geometry, storage, keys, owned=False, remote_accessible=remote_accessible)

    def _pooled(self, geometry: Geometry, allocation: Allocation) -> Storage:
        """Return where allocated tensors are: in an exported pool by region and offset, else by address."""
        placement = Placement(geometry.placement)
        shared = self._pools.get(placement) is allocation.pool
        region, offsets = (_REGIONS[placement], allocation.offsets) if shared else (PRIVATE, allocation.addresses)
        tensors = Tensors(np.array(allocation.addresses, np.uint64), geometry.tensor_bytes, mapped=True)
        count = len(offsets)
        names = struct.pack("<I", region) * count, struct.pack(f"<{count}Q", *offsets)
        return Storage(tensors, *names, allocation, (allocation.pool.segment,))

    def _locate(
        self, addresses: np.ndarray[Any, np.dtype[np.uint64]], nbytes: int
    ) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], np.ndarray[Any, np.dtype[np.uint64]]]:
        """Return each tensor's region and offset. Registered memory inside one of our pools is that pool's."""
        regions = np.full(addresses.shape, PRIVATE, dtype=np.uint32)
        offsets = addresses.copy()
        for placement, pool in self._pools.items():
            start, end = pool.segment.address, pool.segment.address + pool.segment.nbytes
            if nbytes <= pool.segment.nbytes:
                inside = (addresses >= start) & (addresses <= np.uint64(end - nbytes))
                regions[inside] = _REGIONS[placement]
                offsets[inside] -= np.uint64(start)
        if (regions == PRIVATE).any():
            # One way of naming for the whole cache, so that one transport reaches all of it.
            return np.full(addresses.shape, PRIVATE, dtype=np.uint32), addresses
        return regions, offsets

    def _segment_of(self, address: int, nbytes: int) -> Segment:
        for pool in self._pools.values():
            start = pool.segment.address
            if start <= address and address + nbytes <= start + pool.segment.nbytes:
                return pool.segment
        return ExternalSegment(address, nbytes)

    def _add(
        self,
        geometry: Geometry,
        storage: Storage,
        keys: Sequence[tuple[CacheKey | BlocksCacheKey, int]],
        *,
        owned: bool,
        remote_accessible: bool,
    ) -> Entry:
        guards = self._guard_table()
        taken: list[Guard] = []
        try:
            bindable = list(_bindable(keys))
            for _ in range(1 + len(bindable)):
                taken.append(guards.allocate())  # noqa: PERF401 (what was taken before a failure must be known)
            guard, *key_guards = taken
            bindings = [(key, row, each) for (key, row), each in zip(bindable, key_guards, strict=True)]
            entry, effects = self.registry.add(
                geometry, storage, guard, bindings, owned=owned, remote_accessible=remote_accessible
            )
        except BaseException:
            for unused in taken:
                guards.release(unused.slot)
            raise
        self.apply(effects)
        return entry

    # --- giving them back ------------------------------------------------------------------------------------------

    def deallocate(self, cache_id: int) -> None:
        """The owner gives an allocated cache back; anything else is a no-op (API §6.2)."""
        self.apply(self.registry.drop_owner(cache_id))

    def unregister(self, cache_id: int, deadline: Deadline) -> None:
        """Drop a registered cache once nobody writes it any more; anything else is a no-op.

        Raises:
            DeadlineExceeded: Somebody still does; the cache stays registered.
        """
        self.apply(withdraw(self.registry, self.writers, cache_id, self._void, deadline))

    def remove_key(self, key: CacheKey) -> None:
        """Unbind a key; a placeholder or an unknown key is a no-op (R25)."""
        table_key = key_of(key)
        if table_key is not None:
            self.apply(self.registry.remove_key(table_key))

    def apply(self, effects: Effects) -> None:
        """Do what the registry decided: foreigners first, then let the memory go, or into quarantine."""
        guards = self._guard_table()
        for guard in effects.advance:
            # Another thread may have carried out later effects by now, with the end of the last pin: whatever has the
            # slot then is not ours to make void.
            guards.void(guard)
        for guard in effects.retire:
            guards.release(guard.slot)
        for entry in effects.free:
            self.quiesce(entry.storage.tag)
            allocation: Allocation | None = entry.storage.allocation
            if allocation is not None:
                # Whoever is not found here announces later, and finds the guard advanced. Readers count where the
                # memory is unmapped with its cache: it must not go under one of this process.
                busy = self.writers.busy(entry.guard.slot, readers=entry.storage.private)
                self._quarantine.free(allocation, busy)

    def _void(self, entry: Entry) -> Guard:
        """Make a cache's guard void for everybody, our own lanes among them.

        Returns:
            Its successor in the same slot, where its writers are still to be found.
        """
        generation = self._guard_table().advance(entry.guard.slot)
        self.quiesce(entry.storage.tag)
        return Guard(entry.guard.slot, generation)

    def sweep(self) -> None:
        """Let go of what foreign writers have ended with."""
        self._quarantine.sweep()
        self.writers.tidy()

    def keepable(self, entry: Entry) -> bool:
        """A peer may keep where the cache is and use it without a word: nothing is consumed, guards protect it."""
        registered_one_sided = not entry.owned and self.remote_accessible
        return entry.geometry.kind is not CacheKind.CACHE or registered_one_sided

    # --- using them here -------------------------------------------------------------------------------------------

    def holding(self, cache_id: int, what: object) -> AbstractContextManager[Entry]:
        """Keep a cache's memory for the length of one local call; ``what`` is put into words in an error only.

        Raises:
            CacheNotFound: No such cache.
        """
        if steps.watch is not None:
            steps.watch("hold", self)
        return _Hold(self, cache_id, what)

    # --- what there is ---------------------------------------------------------------------------------------------

    def pools(self) -> Iterator[MemoryPool | DirectMemory]:
        """Iterate over the configured pools, and over what stands in for one."""
        yield from self._pools.values()
        if self._direct is not None:
            yield self._direct

    def quarantined_bytes(self) -> int:
        """Return the bytes that wait for foreign writers, after a look at these."""
        self.sweep()
        return self._quarantine.nbytes

    def check_integrity(self) -> None:
        """Raise AssertionError when registry, pools or guards contradict themselves."""
        self.registry.check_integrity()
        self._guard_table().check_integrity()
        self.writers.check_integrity()
        self._quarantine.check_integrity()
        for pool in self.pools():
            pool.check_integrity()

    def close(self) -> None:
        """Drop every cache and give the memory back; views that are still alive keep their mapping.

        Memory of the user is waited for where a peer still writes it, in bounds; the pools' outlives this process.
        """
        self.writers.shut()
        private = private_memory(self.registry.snapshot()[0])
        self.apply(self.registry.clear())
        wait_at_the_end(self.writers, private, Deadline(self._patience_ms))
        self._quarantine.sweep()
        if self._direct is not None:
            self._direct.close()  # before the next line, which would unmap what is still in use
        self._quarantine.release_all()
        self._close_memory()

    def _close_memory(self) -> None:
        self.writers.close()
        for pool in self._pools.values():
            pool.close()
        if self._guards is not None:
            self._guards.close()

    def _guard_table(self) -> GuardTable:
        assert self._guards is not None
        return self._guards


class _Hold(msgspec.Struct, eq=False):
    """See :meth:`CacheStore.holding`. A class that is quickly made: this is on the path of every small copy."""

    store: CacheStore
    cache_id: int
    what: object
    entry: Entry | None = None

    def __enter__(self) -> Entry:
        self.entry = entry = self.store.registry.hold(self.cache_id, self.what)
        return entry

    def __exit__(self, *exc_info: object) -> None:
        assert self.entry is not None
        effects = self.store.registry.let_go(self.entry)
        if effects is not NOTHING:
            self.store.apply(effects)


def _bindable(keys: Sequence[tuple[CacheKey | BlocksCacheKey, int]]) -> Iterator[tuple[tuple[int, int, int], int]]:
    """Yield (table key, row) of every key that binds: placeholders do not (R4)."""
    for key, row in keys:
        table_key = key_of(key)
        if table_key is not None:
            yield table_key, row


def withdraw(
    registry: Registry, writers: WriteIntents, cache_id: int, void: Callable[[Entry], Guard], deadline: Deadline
) -> Effects:
    """Drop a registered cache once nobody is at its memory; any other id is a no-op. Runs at the owner.

    Meanwhile nobody finds it. When it cannot be dropped in time it is as it was, under a newer guard.

    Args:
        void: Makes the cache's guard void and returns the next one of the same slot.

    Raises:
        DeadlineExceeded: Somebody still is (phase ``drain``); the text says who.
    """
    entry = registry.registered(cache_id)
    if entry is None:
        return Effects()
    if not deadline.poll(lambda: registry.begin_closing(entry) or registry.registered(cache_id) is not entry):
        raise deadline.error(f"unregister_cache: another call unregisters cache {cache_id}", "drain")
    if registry.registered(cache_id) is not entry:
        return Effects()
    guard: Guard = entry.guard
    try:
        guard = void(entry)
        hazards = writers.busy(guard.slot, readers=True)
        if not deadline.poll(lambda: not entry.holds.inside and not writers.pending(hazards)):
            raise _still_used(entry, writers.pending(hazards), deadline)
    except BaseException:
        registry.reopen(entry, guard)
        raise
    return registry.unregister(cache_id)


def private_memory(entries: Iterable[Entry]) -> list[Entry]:
    """Return the entries with memory outside every pool: nothing keeps that mapped for who is late."""
    return [each for each in entries if each.storage.private]


def wait_at_the_end(writers: WriteIntents, entries: list[Entry], deadline: Deadline) -> None:
    """Finalize: wait, in bounds, for who is at memory of the user; whoever does not end is named in the log."""
    hazards = tuple(hazard for each in entries for hazard in writers.busy(each.guard.slot, readers=True))
    if not deadline.poll(lambda: not any(each.holds.inside for each in entries) and not writers.pending(hazards)):
        logger.warning(
            "finalize: after %d ms registered memory is still in use by %s: do not free it before they have ended",
            deadline.budget_ms,
            _users(sum(each.holds.inside for each in entries), writers.pending(hazards)),
        )


def _still_used(entry: Entry, pending: tuple[Hazard, ...], deadline: Deadline) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"unregister_cache: after {deadline.budget_ms} ms the memory of cache {entry.cache_id} is still in use by "
        f"{_users(entry.holds.inside, pending)}; the cache stays registered: try again later (unlinking stops no "
        "writer, the end of its process does)",
        phase="drain",
        budget_ms=deadline.budget_ms,
        elapsed_ms=deadline.elapsed_ms(),
        peer=next((each.page.cluster_id for each in pending), None),
    )


def _users(holds: int, pending: tuple[Hazard, ...]) -> str:
    names = [f"{holds} calls of this process"] if holds else []
    return " and ".join([*names, writers_named(pending)] if pending or not names else names)
