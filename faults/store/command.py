"""The prefix store under harm: savers, readers and liars are killed, stopped and interrupted, and so is the store.

    python -m faults store [--seconds 600] [--seed N] [--transport shm tcp] [--gpu]

Four savers, eight readers and a liar, each a process, use one store whose pool holds a third of their keys. A schedule
from the seed kills (``kill -9``) and stops (SIGSTOP) all of them, at any moment and at gates: steps of a save, a lookup
or a load. It flips bits in slots. Every byte of every load is compared with f(namespace, key, place). After each epoch
the harm ends. Then no slot may be missing, the replay of the store's events must be its index, and no lookup may have
found a key that was not published then. The liar's own keys are not judged: it may spoil those that it saves.

With ``--gpu`` the blocks of the clients lie in a GPU of the fake driver, which tells at each client's end what it did
wrong, and what it has not given back.
"""

import argparse
import gc
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from faults.gates import Gate
from faults.store import server
from faults.store.clients import BLOCKS, FAULT, ROLES, Space, Task, refill, run
from faults.store.history import Published, Record, records_of
from tests.support import fakecuda
from tests.support.ends import ChildEnd
from tests.support.linking import free_port
from tests.support.world import World

TRANSPORTS: Final = ("shm", "tcp")
CAST: Final = ("saver",) * 4 + ("reader",) * 8 + ("liar",)
SPACES: Final = (Space(0, 2, 16384, 96), Space(1, 4, 4096, 192), Space(2, 1, 65536, 48))
#: The pool holds a third of all keys.
POOL_BYTES: Final = sum(each.keys * each.tensors * each.nbytes for each in SPACES) // 3
#: Seconds between two events, and of a stop.
_PAUSES, _STOPS = (0.02, 0.5), (0.01, 3.0)
_PATIENCE_SECONDS: Final = 120.0
#: What clients can make a store keep, and what a process has anyway.
_MOST_OWN_BYTES: Final = 256 << 20
#: Pulls of stopped savers end by their deadline, too.
_PULL_MS: Final = 700
_TICK: Final = 0.02
_POOL_OF_CLIENT: Final = BLOCKS * 4 * 65536 + (4 << 20)


@dataclass
class Actor:
    """One process, and what is done to it."""

    name: str
    end: ChildEnd
    task: Task | None = None  # None: the store
    until: float = 0.0  # it is stopped until then


@dataclass
class Epoch:
    """Some seconds of harm to new processes, over one transport; then the judgement."""

    transport: str
    seed: str
    folder: Path
    gpu: bool = False
    counts: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = random.Random(self.seed)
        self._address = f"127.0.0.1:{free_port()}"
        self._gates: dict[Path, bool] = {}  # folder -> decided
        (self.folder / "gates").mkdir(parents=True)
        self._lives = 0

    def run(self, seconds: float) -> None:
        self._actors = {"store": Actor("store", self._store())}
        try:
            for number, role in enumerate(CAST, 10):
                space = SPACES[number % len(SPACES)]
                task = Task(role, number, f"{self.seed} {number}", self.folder, self._address, space)
                self._actors[f"{role} {number}"] = Actor(f"{role} {number}", self._client(task), task)
            limit = time.monotonic() + seconds
            while time.monotonic() < limit:
                self._event()
                self._attend(self._chance.uniform(*_PAUSES))
            self._rest()
            try:
                self._judge()
            except Exception as error:  # noqa: BLE001 (whatever it is)
                self.faults.append(f"the judgement: {error!r}")
        finally:
            for each in self._actors.values():
                each.end.signal(signal.SIGCONT)
                each.end.kill()

    # --- processes ---

    def _settings(self, pool: int) -> dict[str, Any]:
        return {
            "mem_pool_cfg": f'{{"memory_size": {pool}, "page_shift": 12}}',
            "host_mem_pool_cfg": None,
            "sync_kv_timeout": 3_000,
            "gpu": self.gpu,
            "extra": {"llm.Transport": self.transport, "llm.PeerTimeout": "2"},
        }

    def _store(self) -> ChildEnd:
        end = ChildEnd("store")
        self._lives += 1
        journal = self.folder / f"store {self._lives}.events"
        end.do(server.start, self._address, POOL_BYTES, self.transport, journal, len(SPACES), _PULL_MS)
        return end

    def _client(self, task: Task) -> ChildEnd:
        end = ChildEnd(f"{task.role} {task.number}")
        end.start("PROMPT", task.number, **self._settings(_POOL_OF_CLIENT))
        end.begin(run, task)
        return end

    def _kill(self, actor: Actor, why: str) -> None:
        self.counts[f"kill, {actor.name.split()[0]}, {why}"] += 1
        actor.end.kill()
        actor.until = 0.0
        self._forget_gates(actor)
        actor.end = self._store() if actor.task is None else self._client(actor.task)

    def _stop(self, actor: Actor, why: str) -> None:
        self.counts[f"stop, {actor.name.split()[0]}, {why}"] += 1
        shortest, longest = _STOPS
        actor.until = time.monotonic() + shortest * (longest / shortest) ** self._chance.random()
        actor.end.signal(signal.SIGSTOP)

    # --- harm ---

    def _event(self) -> None:
        kinds = {"kill": 4, "stop": 8, "kill store": 0.3, "stop store": 1, "gate": 6, "flip": 3}
        kind = self._chance.choices(list(kinds), list(kinds.values()))[0]
        store = self._actors["store"]
        clients = [each for each in self._actors.values() if each.task]
        actor = store if "store" in kind else self._chance.choice(clients)
        if kind in ("gate", "flip"):
            if not store.until and not self._pending("store"):
                self._gate(store) if kind == "gate" else self._flip(store)
        elif kind.startswith("kill"):
            self._kill(actor, "at any moment")
        elif not actor.until:
            self._stop(actor, "at any moment")

    def _gate(self, store: Actor) -> None:
        step = self._chance.choice(server.STEPS)
        folder = self.folder / "gates" / f"store {len(self._gates)} {step}"
        folder.mkdir()
        self._gates[folder] = False
        store.end.do(server.shut, step, folder)

    def _flip(self, store: Actor) -> None:
        if store.end.do(server.flip, self._chance.random()):
            self.counts["flip"] += 1

    def _pending(self, name: str) -> bool:
        return any(not done and each.name.startswith(f"{name} ") for each, done in self._gates.items())

    def _forget_gates(self, actor: Actor) -> None:
        for folder in (self.folder / "gates").iterdir():
            if folder.name.startswith(f"{actor.name} "):
                self._gates[folder] = True

    def _attend(self, seconds: float) -> None:
        """Let time pass: continue who was stopped for long enough, and decide at gates."""
        limit = time.monotonic() + seconds
        while True:
            for actor in self._actors.values():
                if actor.until and actor.until < time.monotonic():
                    actor.until = 0.0
                    actor.end.signal(signal.SIGCONT)
                if actor.end.answered():
                    self._crashed(actor)
            for folder in (self.folder / "gates").iterdir():
                if not self._gates.get(folder) and Gate(folder).reached:
                    self._decide(folder)
            if time.monotonic() > limit:
                return
            time.sleep(_TICK)

    def _crashed(self, actor: Actor) -> None:
        try:
            text = f"it ended by itself: {actor.end.finish(0)}" if actor.end.code is None else f"code {actor.end.code}"
        except Exception as error:  # noqa: BLE001 (whatever ended it)
            text = repr(error)
        self.faults.append(f"{actor.name}: {text}")
        self._kill(actor, "after a crash")

    def _decide(self, folder: Path) -> None:
        """Somebody stands at a gate: kill it there, stop it there for a while, or let it go on."""
        self._gates[folder] = True
        role, number, *step = folder.name.split(" ")
        actor = self._actors["store" if role == "store" else f"{role} {number}"]
        where = f"at {' '.join(step if role == 'store' else step[1:])}"
        # A store that is killed all the time has nothing to give.
        what = self._chance.choices(("kill", "stop", "wait"), (0.4 if role == "store" else 1, 2, 2))[0]
        if what == "kill":
            self._kill(actor, where)
            return
        if what == "stop":
            self._stop(actor, where)
        else:
            self.counts[f"wait, {role}, {where}"] += 1
            self._attend(self._chance.random() * 0.5)
        Gate(folder).open()

    # --- judgement ---

    def _rest(self) -> None:
        """End the harm, and have all clients come to an end."""
        (self.folder / "stop").touch()
        for actor in self._actors.values():
            actor.until = 0.0
            actor.end.signal(signal.SIGCONT)
        clients = [each for each in self._actors.values() if each.task]
        limit = time.monotonic() + _PATIENCE_SECONDS
        while not all(each.end.answered() for each in clients) and time.monotonic() < limit:
            for folder in (self.folder / "gates").iterdir():  # some come to their last gate now
                Gate(folder).open()
            time.sleep(_TICK)
        for actor in clients:
            try:
                counts: Counter[str] = actor.end.finish(0.0)
            except TimeoutError:
                self.faults.append(f"{actor.name}: hangs")
                continue
            except Exception as error:  # noqa: BLE001 (whatever ended it)
                self.faults.append(f"{actor.name}: {error!r}")
                continue
            self.faults += [f"{actor.name}: {each.removeprefix(FAULT)}" for each in counts if each.startswith(FAULT)]
            self.counts.update({name: count for name, count in counts.items() if not name.startswith(FAULT)})
            self.faults += [f"{actor.name}: fake GPU: {each}" for each in actor.end.do(_finalize)]

    def _judge(self) -> None:
        store = self._actors["store"].end
        if left := store.do(server.left_over):
            self.faults.append(f"left at the store: {left}")
        if (kept := store.do(server.own_memory)) > _MOST_OWN_BYTES:
            self.faults.append(f"the store keeps {kept >> 20} MiB beside its pool")
        events: list[Record] = []
        for life in range(1, self._lives + 1):
            events += records_of(self.folder / f"store {life}.events")
        published = Published(events)
        index = store.do(server.index)
        for name, replay in (("journal", published.index), ("store", store.do(server.replayed))):
            if replay is not None and replay != index:
                text = (
                    f"{len(index - replay)} keys of the index are not in it, {len(replay - index)} are not in the index"
                )
                self.faults.append(f"replay of the events of the {name}: {text}")
        journals = [record for path in self.folder.glob("*.journal") for record in records_of(path)]
        self.faults += published.judge(journals)
        self.counts["events"] += len(events)
        self.counts["keys in the index at the end"] += len(index)
        self._refill(store)
        store.do(server.stop)

    def _refill(self, store: ChildEnd) -> None:
        """Every slot can be filled once more: none has leaked."""
        judge, counts = ChildEnd("judge"), store.do(server.slots)
        judge.start("PROMPT", 9, **self._settings(_POOL_OF_CLIENT))
        for space in SPACES:
            if missing := judge.do(refill, self._address, space, counts.get(space.namespace, 0)):
                self.faults.append(f"{missing} slots of {space} cannot be filled any more")
        judge.stop()
        judge.close()


def _finalize(world: World) -> list[str]:
    """Give everything back; return what a fake GPU complains about."""
    world.stop()
    gc.collect()
    return fakecuda.complaints_here()


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    seed = options.seed or random.SystemRandom().randrange(1 << 32)
    yield f"seed {seed}", True
    total: Counter[str] = Counter()
    limit, number = time.monotonic() + options.seconds, 0
    with tempfile.TemporaryDirectory(prefix="faults-store-") as folder:
        # A store has no GPU: it pulls from theirs over lanes beside shm.
        beside = {"shm": "auto"} if options.gpu else {}
        for transport in (beside.get(each, each) for each in cycle(options.transport)):
            if time.monotonic() > limit - 2:
                break
            epoch = Epoch(transport, f"{seed} {number}", Path(folder) / str(number), options.gpu)
            epoch.run(min(options.epoch, limit - time.monotonic()))
            number += 1
            total += epoch.counts
            line = ", ".join(f"{epoch.counts[each]} {each}" for each in ("save", "lookup", "hits", "load"))
            yield "\n    ".join([f"epoch {number}, {transport}: {line}", *epoch.faults[:20]]), not epoch.faults
    wanted = {f"{role}, at {step}" for role, each in ROLES.items() for step in each.gates}
    wanted |= {f"store, at {step}" for step in server.STEPS}
    missed = wanted - {name.partition(", ")[2] for name in total}
    yield f"gates that nobody came to: {'; '.join(sorted(missed)) or 'none'}", True
    for name, count in sorted(total.items()):
        yield f"{name:48}{count:>14,}", True


OPTIONS: Final = {
    "seconds": (600.0, ""),
    "epoch": (20.0, "seconds of harm after which everything is judged"),
    "seed": (None, "any, if left out"),
    "transport": (TRANSPORTS, ""),
    "gpu": (False, "with the clients' blocks in a GPU, of the fake driver"),
}
