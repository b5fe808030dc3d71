"""Store of one LLMDataDist's caches: registry, pools and guards together.

Threads: any; the parts have locks. A call that raises leaves pools and registry unchanged.
"""

from __future__ import annotations

import itertools
import struct
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from llm_datadist._cache.geometry import CacheKind
from llm_datadist._cache.registry import DRAIN, Effects, Entry, Key, Registry, key_of
from llm_datadist._checks import typed_memory_error
from llm_datadist._deadline import Deadline
from llm_datadist._log import logger
from llm_datadist._memory.exports import NON_POOL, Exports
from llm_datadist._memory.guards import Guard, GuardTable
from llm_datadist._memory.pool import Allocation, DirectMemory, MemoryPool, create_pool, kept_mapped
from llm_datadist._memory.quarantine import Quarantine, writers_named
from llm_datadist._memory.write_intents import ActiveWrite, WriteIntents
from llm_datadist._native import Tensors, Use, steps
from llm_datadist._native.public_call import put_off, require_outermost
from llm_datadist.errors import DeadlineExceeded, DeviceError, ParamError
from llm_datadist.types import BlocksCacheKey, CacheKey, Placement

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist._cache.geometry import Geometry
    from llm_datadist._memory.device import Device
    from llm_datadist._memory.segment import Segment
    from llm_datadist._native import LentBlocks, Place
    from llm_datadist.config import Options

    Bindable = list[tuple[Key, int]]
    KeyedRows = Sequence[tuple[CacheKey | BlocksCacheKey, int]]

#: First cache id of each ``init``, far apart: an id that outlives its ``init`` names no later cache.
first_ids = itertools.count(1, 10**12)
_REGIONS: Final = {Placement.DEVICE: 1, Placement.HOST: 2}
_OPTIONS: Final = {
    Placement.DEVICE: "mem_pool_cfg (llm.MemPoolConfig)",
    Placement.HOST: "host_mem_pool_cfg (llm.HostMemPoolConfig)",
}


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Location of a cache's tensors, for this process and for a peer."""

    tensors: Tensors
    regions: bytes  # uint32 region id per tensor, little-endian, as in Resolved
    offsets: bytes  # uint64 offset, or non-pool address, per tensor, little-endian
    allocation: Allocation | None  # None for registered memory
    segments: tuple[Segment, ...]  # those that hold tensors; views of them keep the memory mapped
    lent: dict[tuple[int, int], LentBlocks] | None = None  # of active grants, by their guards; None if reads need none
    tag: int = field(default_factory=itertools.count(1).__next__)  # unique, for :attr:`LocalCaches.quiesce`

    @property
    def non_pool(self) -> bool:
        """True for non-pool memory, which may be unmapped under a late user."""
        return not any(self.regions)

    def names(self, *, mapped: bool) -> tuple[bytes, bytes]:
        """Return (regions, offsets); with addresses, unless the transport has ``mapped`` the regions."""
        if mapped:
            return self.regions, self.offsets
        return bytes(4 * len(self.tensors.bases)), self.tensors.bases.astype("<u8").tobytes()


class Pools:
    """Configured pools by placement, and v1's substitute for a device pool."""

    def __init__(self, options: Options, device: Device, host: Device) -> None:
        self._pools: dict[Placement, MemoryPool] = {}
        # DEVICE memory in v1 mode without a pool (interface R12).
        self.direct = None if options.cache_manager or options.mem_pool else DirectMemory("device, no pool", device)
        configured = (Placement.DEVICE, options.mem_pool, device), (Placement.HOST, options.host_mem_pool, host)
        write, prefault = options.remote_accessible, options.pool_prefault
        try:
            for placement, pool, where in configured:
                if pool is not None:
                    name = placement.name.lower()
                    made = create_pool(name, where, pool, peers_may_write=write, prefault=prefault)
                    self._pools[placement] = made
                    if where is not device:
                        device.pin(made.segment)
        except BaseException:
            self.close()
            raise

    def of(self, placement: Placement) -> MemoryPool | DirectMemory:
        """Return the pool of ``placement``; ParamError if there is none (interface R12)."""
        pool = self._pools.get(placement) or self.direct
        if pool is None:
            raise ParamError(
                f"cache_desc.placement={placement.name}: no pool to allocate from; set {_OPTIONS[placement]} before "
                "init, or register memory of your own"
            )
        return pool

    def __iter__(self) -> Iterator[MemoryPool | DirectMemory]:
        yield from self._pools.values()
        if self.direct is not None:
            yield self.direct

    def exported(self) -> dict[int, Segment]:
        return {_REGIONS[placement]: pool.segment for placement, pool in self._pools.items()}

    def storage_of(self, geometry: Geometry, allocation: Allocation) -> Storage:
        """Describe allocated tensors: by region and offset in a pool."""
        placement, place = Placement(geometry.placement), allocation.segment.place
        is_exported = self._pools.get(placement) is allocation.pool
        region, offsets = (_REGIONS[placement], allocation.offsets) if is_exported else (NON_POOL, allocation.addresses)
        tensors = Tensors(np.array(allocation.addresses, np.uint64), geometry.tensor_bytes, place=place)
        count = len(offsets)
        names = struct.pack("<I", region) * count, struct.pack(f"<{count}Q", *offsets)
        return Storage(tensors, *names, allocation, (allocation.segment,))

    def storage_at(self, addrs: Sequence[int], nbytes: int, place: Place) -> Storage:
        """Describe registered tensors at a place: by region and offset if all lie in pools."""
        addresses = np.array(addrs, dtype=np.uint64)
        regions, offsets = np.full(addresses.shape, NON_POOL, dtype="<u4"), addresses.astype("<u8")
        segments = []
        for region, segment in self.exported().items():
            base = np.uint64(segment.address)
            inside = (addresses >= base) & (addresses + np.uint64(nbytes) <= base + np.uint64(segment.nbytes))
            if inside.any() and segment.place.device == place.device:
                regions[inside] = region
                offsets[inside] -= base
                segments.append(segment)
        if (regions == NON_POOL).any():  # for all tensors, so that one transport reaches the whole cache
            regions[:], offsets[:] = NON_POOL, addresses
        return Storage(
            Tensors(addresses, nbytes, place=place), regions.tobytes(), offsets.tobytes(), None, tuple(segments)
        )

    def close(self) -> None:
        """Close the pools; the store has closed :attr:`direct`."""
        for pool in self._pools.values():
            pool.close()


class LocalCaches:
    """Caches of one LLMDataDist, with their memory.

    The engine sets two hooks. ``quiesce`` ends the use of a storage by this side's lanes and NIXL; ``freed`` learns of
    freed caches.
    """

    def __init__(self, options: Options, device: Device, host: Device, incarnation: bytes) -> None:
        self.registry = Registry(next(first_ids))
        self.writers = WriteIntents()
        self.remote_accessible = options.remote_accessible
        self._granted_reads = options.granted_reads
        self.quiesce: Callable[[Storage], None] = lambda storage: None
        self.freed: Callable[[Entry], None] = lambda entry: None
        self._patience_ms = options.sync_kv_timeout_ms
        self._quarantine = Quarantine(self.writers)
        self.device = device
        self.pools = Pools(options, device, host)
        try:
            self._guards = GuardTable()
        except BaseException:
            self.pools.close()
            raise
        regions, writable, users = self.pools.exported(), options.remote_accessible, options.same_host_users
        gpu = device if device.ordinal >= 0 else None
        self.exports = Exports(incarnation, regions, self._guards, writable, self.writers, users=users, device=gpu)

    @typed_memory_error("allocate")
    def allocate(self, geometry: Geometry, keys: KeyedRows, deadline: Deadline, **access: bool) -> Entry:
        """Take memory and bind ``(key, row)`` pairs, or neither. Waits only for quarantined memory.

        ParamError: the placement has no pool (interface R12). KeyInUse: a key is bound (interface R3). OutOfMemory: the
        pool cannot hold the tensors, or foreign writers still use it.
        """
        pool = self.pools.of(Placement(geometry.placement))
        bindable = _bindable(keys)
        self.registry.require_free(key for key, _ in bindable)
        allocation = self._quarantine.allocate(pool, geometry.num_tensors, geometry.tensor_bytes, deadline)
        try:
            storage = self.pools.storage_of(geometry, allocation)
            return self._add(geometry, storage, bindable, **access)
        except BaseException:
            allocation.free()
            raise

    @typed_memory_error("register")
    def register(
        self, geometry: Geometry, addrs: Sequence[int], keys: KeyedRows, name: str = "addrs", **access: bool
    ) -> Entry:
        """Add memory of the user at checked addresses, which errors call ``name``; ``access`` as of :meth:`_add`."""
        placement = Placement(geometry.placement)
        place = self.device.place_of(name, addrs, geometry.tensor_bytes, placement)
        storage = self.pools.storage_at(addrs, geometry.tensor_bytes, place)
        return self._add(geometry, storage, _bindable(keys), **access)

    def _add(
        self, geometry: Geometry, storage: Storage, bindable: Bindable, *, granted_only: bool = False, **access: bool
    ) -> Entry:
        owned = storage.allocation is not None
        if geometry.kind is CacheKind.BLOCKS and (granted_only or self._granted_reads):
            storage = replace(storage, lent={})
        guards = self._guards.allocate_many(1 + len(bindable))
        try:
            bindings = [(key, row, guard) for (key, row), guard in zip(bindable, guards[1:], strict=True)]
            entry, effects = self.registry.add(geometry, storage, guards[0], bindings, owned=owned, **access)
        except BaseException:
            for guard in guards:
                self._guards.release(guard.slot)
            raise
        self.apply(effects)
        return entry

    def using(self, cache_id: int, what: object) -> Use[Entry]:
        """Return a context manager for a local use. CacheNotFound names the argument ``what``."""
        if steps.watch is not None:
            steps.watch("use", self)
        entry = self.registry.entry_of(cache_id) or self.registry.lookup(cache_id, what)
        return Use(entry.uses, entry, self, what)

    def refuse(self, entry: Entry, what: object) -> None:
        """Raise CacheNotFound if the cache is being freed."""
        self.registry.lookup(entry.cache_id, what)

    def last_left(self, entry: Entry) -> None:
        """Free a cache whose last use has ended."""
        self.apply(self.registry.last_left(entry))

    def deallocate(self, cache_id: int) -> None:
        """End the owner's need of an allocated cache; ignore any other id (interface §6.2).

        Inside another call of this thread it is put off, as is :meth:`remove_key`.
        """
        if not put_off(self.deallocate, cache_id):
            self.apply(self.registry.drop_owner(cache_id))

    def discard(self, cache_id: int) -> None:
        """Free an allocated cache, unknown to the caller, and its keys."""
        if not put_off(self.discard, cache_id):
            self.apply(self.registry.withdraw(cache_id, owned=True))

    def remove_key(self, key: CacheKey) -> None:
        """Unbind a key; ignore a placeholder or an unknown key (interface R25)."""
        if not put_off(self.remove_key, key) and (table_key := key_of(key)) is not None:
            self.apply(self.registry.remove_key(table_key))

    def unregister(self, cache_id: int, deadline: Deadline) -> None:
        """Wait for the users of a registered cache, while lookups fail, then drop it; ignore any other id.

        After DeadlineExceeded (phase ``drain``; names the users) the cache stays registered, under a newer guard; if
        another call unregisters it, that one decides.
        StateError inside another call: its caller frees the memory next.
        """
        require_outermost("unregister_cache")
        registry = self.registry
        if (entry := registry.registered(cache_id)) is None:
            return
        if not deadline.poll(lambda: registry.begin_closing(entry) or registry.registered(cache_id) is not entry):
            raise deadline.error(f"unregister_cache: another call unregisters cache {cache_id}", DRAIN)
        if registry.registered(cache_id) is not entry:
            return
        guard: Guard = entry.guard
        try:
            # The same slot, so the writers are still found.
            guard = Guard(guard.slot, self._guards.advance(guard.slot))
            self.quiesce(entry.storage)
            writes = self.writers.busy(guard.slot, readers=True)
            if not deadline.poll(lambda: not entry.uses.inside and not self.writers.pending(writes)):
                raise _still_used(entry, self.writers.pending(writes), deadline)
        except BaseException:
            registry.reopen(entry, guard)
            raise
        self.apply(registry.withdraw(cache_id, owned=False))
        entry.kept = None  # here, not where the last pin ends: to free it may take long

    def apply(self, effects: Effects) -> None:
        """Apply effects: stop peers by the guards, then free the memory."""
        for entry in effects.free:
            self.freed(entry)  # first: a peer that meets an advanced guard may ask at once
        for guard in effects.advance:
            # void(): another thread may have given the slot away already.
            self._guards.void(guard)
        for guard in effects.retire:
            self._guards.release(guard.slot)
        for entry in effects.free:
            try:
                self.quiesce(entry.storage)
            except DeviceError as error:
                logger.error("cache %d: %s; its memory stays in use until this process ends", entry.cache_id, error)
                kept_mapped.append(entry.kept)
                continue
            allocation: Allocation | None = entry.storage.allocation
            if allocation is not None:
                # A writer that is not found here meets the advanced guard. Readers count if the memory gets unmapped,
                # which would crash this process.
                busy = self.writers.busy(entry.guard.slot, readers=entry.storage.non_pool)
                self._quarantine.free(allocation, busy)

    def sweep(self) -> None:
        """Free quarantined memory and lost peers' pages whose writers have ended."""
        self._quarantine.sweep()
        self.writers.tidy()

    def quarantined_bytes(self) -> int:
        """Return the bytes that wait for foreign writers, after a sweep."""
        self.sweep()
        return self._quarantine.nbytes

    def check_integrity(self) -> None:
        for part in (self.registry, self._guards, *self.pools):
            part.check_integrity()

    def close(self) -> None:
        """Drop every cache and free the memory; views stay mapped.

        Waits for users of non-pool memory, at most ``sync_kv_timeout``. Late peers of pools have their own mappings, or
        (cma) get EFAULT.
        """
        self.writers.shut()
        non_pool = [entry for entry in self.registry.snapshot()[0] if entry.storage.non_pool]
        self.apply(self.registry.clear())
        deadline = Deadline(self._patience_ms)
        writes = tuple(write for each in non_pool for write in self.writers.busy(each.guard.slot, readers=True))
        if not deadline.poll(lambda: not any(e.uses.inside for e in non_pool) and not self.writers.pending(writes)):
            kept_mapped.extend(each.kept for each in non_pool if each.kept)
            logger.warning(
                "finalize: after %d ms registered memory is still in use by %s: do not free it before they have ended",
                deadline.budget_ms,
                _users(sum(each.uses.inside for each in non_pool), self.writers.pending(writes)),
            )
        self._quarantine.sweep()
        if self.pools.direct is not None:
            self.pools.direct.close()  # before the next line would unmap it under users
        self._quarantine.release_all()
        self.writers.close()
        self.pools.close()
        self._guards.close()


def _bindable(keys: KeyedRows) -> Bindable:
    """Return (table key, row) of each key but placeholders (interface R4)."""
    return [(table_key, row) for key, row in keys if (table_key := key_of(key)) is not None]


def _still_used(entry: Entry, pending: tuple[ActiveWrite, ...], deadline: Deadline) -> DeadlineExceeded:
    budget, elapsed = deadline.budget_ms, deadline.elapsed_ms()
    text = (
        f"unregister_cache: after {budget} ms the memory of cache {entry.cache_id} is still in use by "
        f"{_users(entry.uses.inside, pending)}; the cache stays registered: try again later (unlinking stops no "
        "writer, the end of its process does)"
    )
    peer = next((each.page.cluster_id for each in pending), None)
    return DeadlineExceeded(text, phase=DRAIN, budget_ms=budget, elapsed_ms=elapsed, peer=peer)


def _users(calls: int, pending: tuple[ActiveWrite, ...]) -> str:
    names = [f"{calls} calls of this process"] if calls else []
    return " and ".join([*names, writers_named(pending)] if pending or not names else names)
