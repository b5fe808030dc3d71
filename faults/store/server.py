"""The store's process in the campaign and in tests of wrong KV: gates, flipped bits, its events with their times."""

import random
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy as np

from faults.gates import Gate, watched
from faults.store.history import Journal, Record, errors_logged, stop_once
from llm_datadist._native import steps
from llm_datadist.store import StoreServer
from llm_datadist.views import tensor_views
from tests.support.moves import wait_until
from tests.support.world import World

#: Steps at which a store can be stopped: of its pulls, of its control thread, and "tell": its index has changed, which
#: nobody can have seen yet, and its event is not told.
STEPS: Final = ("ask", "answer", "copy", "copied", "handle", "handled", "tell")
_NOBODY: Final = bytes(32)


class WatchedServer(StoreServer):
    """A store that writes its events into a journal, at the moment of the change."""

    _KEPT_SECONDS = 0.0  # namespaces are displaced all the time

    def __init__(self, *args: Any, journal: Journal, **settings: Any) -> None:
        self._journal = journal
        super().__init__(*args, **settings)
        self._write("cleared", _NOBODY, [_NOBODY])

    def _tell(self, kind: Literal["stored", "removed"], space: Any, keys: list[bytes]) -> None:
        if steps.watch is not None:
            steps.watch("tell", self, kind)
        super()._tell(kind, space, keys)
        self._write(kind, space.name[1], keys)

    def _forget(self, space: Any) -> None:
        super()._forget(space)
        self._write("cleared", space.name[1], [_NOBODY])

    def _write(self, kind: str, name: bytes, keys: list[bytes]) -> None:
        now = time.monotonic()
        self._journal.write(Record(kind, name, key, now, now) for key in keys)

    def flip(self, chance: random.Random, wanted: bytes | None = None) -> bool:
        """Flip a bit of a published slot, of the one whose first tensor begins with ``wanted``; False without one."""
        with self._lock:  # nobody fills the slot meanwhile
            for space in chance.sample(list(self._spaces.values()), len(self._spaces)):
                views = [each.reshape(space.slots.count, -1).view(np.uint8) for each in tensor_views(space.cache)]
                found = space.slots.published_of(range(space.slots.count))
                if wanted is not None:
                    found = [slot for slot in found if views[0][slot].tobytes().startswith(wanted)]
                if found:
                    slot = chance.choice(found)
                    published = space.slots.keys()
                    at = [space.slots.run(msgspec.msgpack.encode([key])).tolist() for key in published]
                    flipped = [key for key, slots in zip(published, at, strict=True) if slots == [slot]]
                    self._write("flip", space.name[1], flipped)
                    block = chance.choice(views)[slot]
                    block[chance.randrange(block.size)] ^= 1 << chance.randrange(8)
                    return True
        return False


def start(world: World, address: str, memory: int, transport: str, journal: Path, namespaces: int, pull_ms: int) -> int:
    """Begin to serve; return the port."""
    options = {"llm.Transport": transport, "llm.PeerTimeout": "2", "llm.SyncKvCacheWaitTime": str(pull_ms)}
    world.memory["journal"] = Journal(journal)
    world.memory["errors"] = errors_logged()
    world.memory["server"] = server = WatchedServer(
        memory, address, namespaces=namespaces, options=options, journal=world.memory["journal"]
    )
    return server.port


def stop(world: World) -> None:
    """Check every table and end."""
    server: WatchedServer = world.memory.pop("server")
    server.check_integrity()
    server.close()
    world.memory.pop("journal").close()
    world.memory.clear()


def shut(world: World, step: str, folder: Path) -> None:
    """Stop the first thread that comes to a step from now on."""
    if (last := world.memory.pop("gate", None)) is not None:
        last.close()
    world.memory["gate"] = stack = ExitStack()
    stack.enter_context(watched(stop_once(step, Gate(folder))))


def flip(world: World, seed: float, wanted: bytes | None = None) -> bool:
    return bool(world.memory["server"].flip(random.Random(seed), wanted))


def index(world: World) -> set[tuple[bytes, bytes]]:
    return {(name, key) for name, keys in world.memory["server"].index().items() for key in keys}


def replayed(world: World) -> set[tuple[bytes, bytes]] | None:
    """Return the index that the store's own events give; None if it has forgotten the first ones."""
    found: set[tuple[bytes, bytes]] = set()
    server: WatchedServer = world.memory["server"]
    for name in server.index():
        told = server.events(name)
        while told.events:
            if not told.follows:
                return None
            for event in told.events:
                keys = {(name, key) for key in event.keys}
                found = found | keys if event.kind == "stored" else found - keys
            told = server.events(name, told)
    return found


def slots(world: World) -> dict[bytes, int]:
    """Return how many slots each namespace has."""
    server: WatchedServer = world.memory["server"]
    return {name: space.slots.count for (_, name), space in server._spaces.items()}  # noqa: SLF001


def left_over(world: World, seconds: float = 15.0) -> str:
    """Return what is neither free nor published although nobody uses the store any more; empty: nothing."""
    server: WatchedServer = world.memory["server"]

    def found() -> list[str]:
        now = server.statistics()
        return [
            str(each)
            for each in now.namespaces
            if each.filling or each.loads or each.free + each.published != each.slots
        ] + [f"{now.waiting} saves wait"] * bool(now.waiting)

    limit = time.monotonic() + seconds
    while (left := found()) and time.monotonic() < limit:
        time.sleep(0.05)
    server.check_integrity()
    if grants := server.datadist.statistics().grants.active:
        left.append(f"{grants} grants are active")
    # A flipped bit is an error, too.
    return "; ".join([*left, *(each for each in world.memory["errors"] if "had changed" not in each)])


def own_memory(_: World) -> int:
    """Return the bytes of memory that this process has for itself."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def linked(world: World) -> set[int]:
    """Return the clusters that are linked to the store."""
    return {each.remote_cluster_id for each in world.memory["server"].datadist.statistics().links}


def alone(world: World, cluster_id: int) -> None:
    """Wait until a cluster is not linked any more."""
    wait_until(lambda: cluster_id not in linked(world))
