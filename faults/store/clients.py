"""Clients of the campaign, each a process: savers, readers, and liars that misuse what a client can.

A client runs in the main thread of its process, so that a timer's handler can raise in each call. What it loads is
compared byte by byte with the oracle. What a failed or interrupted call may have written is overwritten at once, and
has to stay so: later bytes are late ones.
"""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from faults.campaign.interrupted import Bell
from faults.campaign.journal import Interrupted
from faults.gates import Gate, watched
from faults.limits import few_device_allocations
from faults.store.history import Journal, Record, errors_logged, stop_once
from llm_datadist import CacheDesc, DataType
from llm_datadist.errors import CacheMismatch, ChecksumMismatch, LLMException, ParamError
from llm_datadist.store import STORE_ID, Hit, StoreClient, StoreOptions, messages, namespace
from tests.support import fakecuda
from tests.support.kv import POISON, bytes_of, key_of
from tests.support.world import World, byte_views

#: No call of a client takes longer, whatever happens to the store. Stops of the client's own process are shorter.
HANG_SECONDS: Final = 60.0
#: A machine with more processes than cores answers late.
OPTIONS: Final = StoreOptions(lookup_ms=300, pause_seconds=0.2)
#: Blocks of a client's cache, and the most of one call.
BLOCKS, RUN = 24, 8


@dataclass(frozen=True)
class Space:
    """A namespace, its geometry, and how many keys its clients use."""

    number: int
    tensors: int
    nbytes: int
    keys: int

    @property
    def namespace(self) -> bytes:
        return namespace(
            fingerprint=b"campaign",
            tp_size=1,
            tp_rank=0,
            hash_algorithm="sha256_cbor",
            hash_seed="0",
            salt=f"tenant {self.number}",
        )

    def key(self, number: int) -> bytes:
        return key_of(f"space {self.number}", number)

    def bytes_of(self, key: bytes) -> Any:
        return bytes_of(self.namespace, key, self.tensors, self.nbytes)


@dataclass(frozen=True)
class Task:
    """Orders to one client."""

    role: str
    number: int  # its cluster id
    seed: str
    folder: Path  # of the epoch: the file "stop" ends all clients; gates are folders in "gates"
    address: str
    space: Space


def run(world: World, task: Task) -> Counter[str]:
    """Be a client until the epoch is over; return counts, those of faults under names that begin with FAULT."""
    return ROLES[task.role](world, task).run()


#: Begins the name of what must not be.
FAULT: Final = "FAULT: "


class Client:
    """One client with a cache. Steps are chosen by chance."""

    steps: ClassVar[dict[str, float]]  # name of a method -> weight
    #: Steps of the library at which this client is stopped at times.
    gates: ClassVar[Sequence[str]] = ()

    def __init__(self, world: World, task: Task) -> None:
        self.world, self.task, self.space = world, task, task.space
        self.counts: Counter[str] = Counter()
        self.chance = random.Random(task.seed)
        self._bell = Bell()
        self.failed: type[LLMException] | None = None  # the last call, so
        self._errors = errors_logged()
        desc = CacheDesc(self.space.tensors, [BLOCKS, self.space.nbytes // 8], DataType.DT_UINT64)
        self.cache = world.cm.allocate_blocks_cache(desc)
        self._views = [view.reshape(BLOCKS, -1) for view in byte_views(self.cache)]
        self.overwrite(range(BLOCKS))

    def run(self) -> Counter[str]:
        stop = self.task.folder / "stop"
        with (
            Journal(self.task.folder / f"{self.task.role} {self.task.number} {time.monotonic_ns()}.journal") as journal,
            closing(self),
        ):
            self.journal = journal
            self.client = self._opened()
            names, weights = list(self.steps), list(self.steps.values())
            while not stop.exists():
                getattr(self, self.chance.choices(names, weights)[0])()
        self.world.cm.deallocate_blocks_cache(self.cache)
        for each in self._errors:
            self.fault(f"logged: {each}")
        if (fake := fakecuda.loaded()) is not None:
            self.counts["copies and kernels of the GPU"] = fake.state().copies + fake.state().kernels
        return self.counts

    # --- memory ---

    def overwrite(self, blocks: Sequence[int]) -> None:
        for view in self._views:
            view[list(blocks)] = POISON

    def write(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        for key, block in zip(keys, blocks, strict=True):
            for view, words in zip(self._views, self.space.bytes_of(key), strict=True):
                view[block] = words

    def wrong(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        return sum(
            int((view[block] != words).sum())
            for key, block in zip(keys, blocks, strict=True)
            for view, words in zip(self._views, self.space.bytes_of(key), strict=True)
        )

    def untouched(self, blocks: Sequence[int] = range(BLOCKS)) -> None:
        """Blocks that no call may write hold what was written last."""
        changed = sum(int((view[list(blocks)] != POISON).sum()) for view in self._views)
        if changed:
            self.fault(f"{changed} bytes in blocks that no call addresses")
            self.overwrite(blocks)

    # --- calls ---

    def fault(self, text: str) -> None:
        self.counts[FAULT + text] += 1

    def call(self, what: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call, at times under a timer that rings, with a gate or a full GPU; return None if it failed."""
        began, bound = time.monotonic(), partial(function, *args, **kwargs)
        self.failed = None
        try:
            if fakecuda.loaded() is not None and self.chance.random() < 0.02:
                with few_device_allocations(self.chance.randrange(3)):
                    value = bound()
            elif self.gates and self.chance.random() < 0.02:
                value = self._through_a_gate(bound)
            elif self.chance.random() < 0.2:
                value = self._bell.call(self.chance, lambda late: None, bound)
            else:
                value = bound()
        except Interrupted:
            self.counts[f"{what} interrupted"] += 1
            return None
        except LLMException as error:
            self.counts[f"{what} {type(error).__name__}"] += 1
            self.failed = type(error)
            if self.failed is LLMException and not what.startswith("lie"):
                self.fault(f"{what}: no class of its own: {error}")
            return None
        except Exception as error:  # noqa: BLE001 (all of them are judged)
            self.fault(f"{what}: untyped {error!r}")
            return None
        finally:
            if (took := time.monotonic() - began) > HANG_SECONDS:
                self.fault(f"{what}: hung for {took:.0f} s")
        self.counts[what] += 1
        return value

    def _through_a_gate(self, function: Callable[[], Any]) -> Any:
        """Call; stop the first thread that comes to a step, until the supervisor has decided what happens there."""
        step = self.chance.choice(self.gates)
        name = f"{self.task.role} {self.task.number} {time.monotonic_ns()} {step}"
        folder = self.task.folder / "gates" / name
        folder.mkdir(parents=True)
        with watched(stop_once(step, Gate(folder))):
            return function()

    def choose(self) -> tuple[list[bytes], list[int]]:
        """Return a run of keys, some in the middle of the space, and blocks for them."""
        first = self.chance.randrange(self.space.keys)
        count = self.chance.randint(1, min(RUN, self.space.keys - first))
        return [self.space.key(first + each) for each in range(count)], self.chance.sample(range(BLOCKS), count)

    def close(self) -> None:
        self.client.close()

    def reopen(self) -> None:
        """Close the client and make another one, as an engine that restarts in good order."""
        self.client.close()
        self.client = self._opened()

    def _opened(self) -> StoreClient:
        client = StoreClient(self.world.dd, self.task.address, self.space.namespace, OPTIONS)
        client.connect(2.0)  # there may be no store now
        return client

    def note(self, what: str, keys: Sequence[bytes], begin: float, end: float) -> None:
        self.journal.write(Record(what, self.space.namespace, key, begin, end) for key in keys)


class Saver(Client):
    """Computes blocks and saves them. As soon as a save has ended, for whatever reason, it uses the blocks again."""

    steps: ClassVar = {"save": 20, "save_again": 2, "pause": 2, "reopen": 1}
    gates: ClassVar = ("send", "sent", "handle", "handled")

    def save(self) -> None:
        self._save(*self.choose())

    def _save(self, keys: list[bytes], blocks: list[int]) -> None:
        self.untouched()
        self.write(keys, blocks)
        now = time.monotonic()
        self.note("save", keys, now, now)
        stored = self.call("save", self.client.save, keys, self.cache, blocks)
        if stored is not None:
            self.counts["keys stored"] += stored
            if not 0 <= stored <= len(keys):
                self.fault(f"save of {len(keys)} keys returned {stored}")
        if self.wrong(keys, blocks):
            self.fault("the blocks of a save were written")
        self.overwrite(blocks)

    def save_again(self) -> None:
        keys, blocks = self.choose()
        self._save(keys, blocks)
        self._save(keys, blocks)

    def pause(self) -> None:
        time.sleep(self.chance.random() * 0.05)


class Reader(Client):
    """Looks keys up, loads them in all orders and ways, and compares every byte."""

    steps: ClassVar = {
        "read": 12, "read_twice": 2, "read_late": 2, "read_handed_over": 2, "give_back": 2,
        "read_given_back": 1, "forget": 1, "reopen": 1,
    }  # fmt: skip
    gates: ClassVar = ("copy", "copied", "send", "sent")

    def look(self) -> tuple[Hit, list[bytes], list[int]] | None:
        keys, blocks = self.choose()
        begin = time.monotonic()
        hit = self.call("lookup", self.client.lookup, keys)
        end = time.monotonic()
        if not hit:
            time.sleep(0.001)  # a store that is gone is a miss at once
            return None
        self.counts["hits"] += 1
        found = keys[: len(hit)]
        self.note("hit", found, begin, end)
        return hit, found, blocks[: len(hit)]

    def load(self, what: str, hit: Hit, keys: list[bytes], blocks: list[int], **options: Any) -> bool:
        """Load and compare; leave the blocks overwritten."""
        self.untouched()
        loaded = self.call(what, self._load, hit, blocks, options)
        if loaded:
            self.counts["bytes compared"] += len(keys) * self.space.tensors * self.space.nbytes
            if wrong := self.wrong(keys, blocks):
                self.fault(f"{what}: {wrong} wrong bytes")
        elif self.failed is ChecksumMismatch:
            now = time.monotonic()
            self.note("mismatch", keys, now, now)
        self.overwrite(blocks)
        return bool(loaded)

    def _load(self, hit: Hit, blocks: list[int], options: dict[str, Any]) -> bool:
        self.client.load(hit, self.cache, blocks, **options)
        return True

    def read(self) -> None:
        if seen := self.look():
            self.load("load", *seen)

    def read_twice(self) -> None:
        if seen := self.look():
            self.load("load, kept", *seen, release=False)
            self.load("load again", *seen)

    def read_late(self) -> None:
        if seen := self.look():
            time.sleep(self.chance.random() * 0.2)
            self.load("load, late", *seen)

    def read_handed_over(self) -> None:
        if seen := self.look():
            hit, keys, blocks = seen
            self.load("load, handed over", Hit.from_bytes(hit.to_bytes()), keys, blocks, release=False)
            self.call("release", self.client.release, hit)

    def give_back(self) -> None:
        if seen := self.look():
            self.call("release", self.client.release, seen[0])

    def read_given_back(self) -> None:
        """Use a hit that was given back: an error, or by luck the right bytes."""
        if seen := self.look():
            self.call("release", self.client.release, seen[0])
            time.sleep(self.chance.random() * 0.05)
            self.load("load, given back", *seen)

    def forget(self) -> None:
        self.look()


class Liar(Client):
    """Misuses what a client has. It may spoil the keys that it saves itself: they are of a space of its own."""

    steps: ClassVar = {
        "scribble": 4,
        "other_geometry": 2,
        "bad_hits": 4,
        "hoard": 2,
        "fill_up": 1,
        "nonsense": 3,
        "intrude": 0.2,
        "babble": 4,
        "reopen": 1,
    }

    def own(self) -> tuple[list[bytes], list[int]]:
        count = self.chance.randint(1, RUN)
        numbers = self.chance.sample(range(4 * RUN), count)
        return [key_of("lies", number) for number in numbers], self.chance.sample(range(BLOCKS), count)

    def _note_own(self, keys: Sequence[bytes]) -> None:
        now = time.monotonic()
        self.note("save", keys, now, now)

    def scribble(self) -> None:
        """Change the blocks while the store pulls them."""
        keys, blocks = self.own()
        self._note_own(keys)
        over = threading.Event()

        def change() -> None:
            while not over.is_set():
                for view in self._views:
                    view[blocks] += 1

        thread = threading.Thread(target=change)
        thread.start()
        try:
            self.call("lie: scribbled save", self.client.save, keys, self.cache, blocks)
        finally:
            over.set()
            thread.join()

    def other_geometry(self) -> None:
        """Save and load with caches whose blocks have another shape than the namespace's, once it has one."""
        hit = self.call("lookup", self.client.lookup, [self.space.key(self.chance.randrange(self.space.keys))])
        if not hit:
            return  # the first save decides on the shape
        desc = CacheDesc(self.space.tensors + 1, [RUN, self.space.nbytes // 16], DataType.DT_UINT64)
        cache = self.world.cm.allocate_blocks_cache(desc)
        keys, _ = self.own()
        self._note_own(keys)
        blocks = list(range(len(keys)))
        self.call("lie: other geometry saved", self.client.save, keys, cache, blocks)
        self.call("lie: other geometry loaded", self.client.load, hit, cache, [0])
        with suppress(LLMException):
            self.world.cm.deallocate_blocks_cache(cache)

    def bad_hits(self) -> None:
        """Load hits with changed bits, cut ones, and those of others after they were released."""
        hit = self.call("lookup", self.client.lookup, [self.space.key(self.chance.randrange(self.space.keys))])
        if not hit:
            return
        data = bytearray(hit.to_bytes())
        for _ in range(self.chance.randint(1, 4)):
            data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
        for forged in (bytes(data), bytes(data[: self.chance.randrange(len(data))]), self.chance.randbytes(64)):
            made = self.call("lie: forged hit", Hit.from_bytes, forged)
            if made is not None and 0 < len(made) <= BLOCKS:
                self.call("lie: forged load", self.client.load, made, self.cache, list(range(len(made))))
                self.call("lie: forged release", self.client.release, made)
        self.call("release", self.client.release, hit)
        self.call("lie: second release", self.client.release, hit)

    def hoard(self) -> None:
        """Look up much, release nothing, and go away after a while."""
        hits = [self.call("lookup", self.client.lookup, self.choose()[0]) for _ in range(50)]
        time.sleep(self.chance.random() * 0.2)
        hits.clear()
        self.reopen()

    def fill_up(self) -> None:
        """Hold as many hits as the store lends, and leave them to the end of the link, or give some back."""
        held = []
        for _ in range(self.chance.randrange(1000)):
            token = self.chance.randbytes(16)
            keys = [self.space.key(each) for each in range(self.chance.randint(1, RUN))]
            body = messages.Lookup([self.space.namespace], keys, [token]).encode()
            held.append(token)
            if self.call("lie: lookup without a hit", self.world.dd.ask, STORE_ID, messages.LOOKUP, body, 300) is None:
                break
        for token in held[: self.chance.choice((0, len(held) // 2, len(held)))]:
            self.world.cm.release_grant(STORE_ID, token)

    def intrude(self) -> None:
        """Save in a namespace for which the store has no room, unless it displaces another; at times single bytes."""
        space = replace(self.space, number=self.chance.randrange(100, 110))
        keys, blocks = self.own()
        cache = self.cache
        if tiny := self.chance.random() < 0.5:
            cache = self.world.cm.allocate_blocks_cache(CacheDesc(1, [BLOCKS, 1], DataType.DT_UINT8))
        now = time.monotonic()
        self.journal.write(Record("save", space.namespace, key, now, now) for key in keys)
        with closing(StoreClient(self.world.dd, self.task.address, space.namespace, OPTIONS)) as client:
            if client.connect(1.0):
                self.call("lie: save in another namespace", client.save, keys, cache, blocks)
        if tiny:
            self.world.cm.deallocate_blocks_cache(cache)

    def babble(self) -> None:
        """Send questions that no client sends."""
        hit = self.call("lookup", self.client.lookup, [self.space.key(self.chance.randrange(self.space.keys))])
        name, (keys, _), token = self.space.namespace, self.own(), bytes(16)
        shape = messages.BlockShape(self.space.tensors, DataType.DT_UINT64.value, [self.space.nbytes // 8])
        bodies = [
            self.chance.randbytes(self.chance.randrange(200)),
            bytes([messages.FORMAT]) + self.chance.randbytes(self.chance.randrange(200)),
            messages.Lookup([name], keys, [token]).encode(),
            messages.Lookup([name], [self.space.key(each) for each in range(RUN)], [token]).encode(),  # the same token
            messages.Suspect(name, list(range(RUN * RUN))).encode(),
            messages.EventsAfter(name, b"", self.chance.randrange(1 << 40)).encode(),
        ]
        if hit:  # its grant is the store's own
            bodies.append(messages.Save([name], 0, token, shape, keys[:1], [0], hit.grants[0].to_bytes()).encode())
        questions = messages.LOOKUP, messages.SAVE, messages.SUSPECT, messages.EVENTS, "llm_datadist.store nothing"
        for body in bodies:
            self.call("lie: babble", self.world.dd.ask, STORE_ID, self.chance.choice(questions), body, 300)

    def nonsense(self) -> None:
        """Calls with arguments that no sound client has."""
        keys, blocks = self.own()
        self._note_own(keys)
        for what, args in (
            ("twice the same key", (keys[:1] * 2, self.cache, blocks[:1] * 2)),
            ("blocks out of range", (keys, self.cache, [BLOCKS + each for each in blocks])),
            ("fewer blocks than keys", (keys, self.cache, blocks[1:])),
            ("no keys", ([], self.cache, [])),
            ("an empty key", ([b""], self.cache, [0])),
            ("a long key", ([bytes(1 << 16)], self.cache, [0])),
        ):
            with suppress(TypeError, ParamError):
                self.call(f"lie: {what}", self.client.save, *args)


ROLES: Final = {"saver": Saver, "reader": Reader, "liar": Liar}


def refill(world: World, address: str, space: Space, count: int) -> int:
    """Save as many new keys as the namespace has slots; return how many of them it does not have then."""
    desc = CacheDesc(space.tensors, [BLOCKS, space.nbytes // 8], DataType.DT_UINT64)
    cache = world.cm.allocate_blocks_cache(desc)
    keys = [key_of(f"refill {space.number}", number) for number in range(count)]
    patient = StoreOptions(lookup_ms=10_000, pause_seconds=0.001)
    with closing(StoreClient(world.dd, address, space.namespace, patient)) as client:
        assert client.connect(10.0)
        # By one call, because SIEVE may evict new keys, but none that is being filled.
        try:
            stored = client.save(keys, cache, [0] * count)
        except CacheMismatch:
            return 0  # a liar was the first to save after a store had begun
        found = 0
        for key in keys:
            hit = client.lookup([key])
            found += len(hit)
            client.release(hit)
    world.cm.deallocate_blocks_cache(cache)
    return count - min(stored, found)
