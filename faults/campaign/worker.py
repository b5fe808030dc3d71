"""What the supervisor sends to a worker: functions that run in the worker's main thread, each bounded in time.

Among them: processes that fork under load, and that leave as any interpreter does, in the middle of their calls.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, Final

from faults.campaign.interrupted import Bell, Linker, RungScene
from faults.campaign.journal import SLACK_SECONDS, Journal, Scene, stack
from faults.campaign.lodgers import Lodgers
from faults.campaign.memory import Destination, Directory, Kind, Stamp, whole
from faults.campaign.mover import Mover, Roamer
from faults.campaign.producer import Producer, Slot, blocks_key
from faults.campaign.schedule import MOVERS, Epoch
from faults.gates import shut
from faults.harness import holds_within
from faults.limits import few_descriptors, few_device_allocations, few_threads
from faults.stalls import stall
from llm_datadist import LLMStatusCode
from llm_datadist._native.public_call import public_call
from llm_datadist.errors import LLMException, StateError
from tests.support import fakecuda
from tests.support.linking import info
from tests.support.world import World, make_config, residue, settled

_SECONDS: Final = 20.0
#: Exit status of a child whose call was not refused.
_NOT_REFUSED: Final = 70
_TIDY_SECONDS: Final = 15.0
_PROOF_SLOT: Final = 20
_IDS: Final = 1_000_000
_ATTEMPTS: Final = 10
#: For somebody to come to a gate.
_PATIENCE_SECONDS: Final = 1.0
#: Longer than any call that a thread may be in.
_JOIN_SECONDS: Final = 12.0
_ILLEGAL_ADDRESS: Final = 700  # CUDA_ERROR_ILLEGAL_ADDRESS


def leave() -> None:
    """End this process as ``sys.exit`` does in a main program: exit functions, destructors, then the process."""
    warnings.simplefilter("ignore", ResourceWarning)  # threads of the campaign stop where they are
    sys.unraisablehook = sys.__unraisablehook__
    ctypes.pythonapi.Py_Exit(0)


class Child:
    """A forked child of the main thread. Owns the process until :meth:`wait`.

    First it makes ``calls``, with what it has a copy of: each has to be refused.
    """

    def __init__(self, how: str, calls: Sequence[Callable[[], object]]) -> None:
        self._how = how
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12: fork beside threads
            self._pid = os.fork()
        if self._pid == 0:
            for call in calls:
                with suppress(StateError):
                    call()
                    os._exit(_NOT_REFUSED)
            if how == "sys.exit":
                leave()
            if how == "exec":
                os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", ""])
            os._exit(0)

    def wait(self, journal: Journal) -> None:
        limit = time.monotonic() + _SECONDS
        while not (ended := os.waitpid(self._pid, os.WNOHANG))[0]:
            if time.monotonic() > limit:
                journal.violation("hangs", f"a forked child that leaves by {self._how} has not ended")
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return
            time.sleep(0.01)
        if code := os.waitstatus_to_exitcode(ended[1]):
            journal.violation("crashes", f"a forked child that leaves by {self._how} ended with {code}")


@dataclass
class _Life:
    scene: Scene
    producer: Producer
    movers: list[Mover]
    linker: Linker
    roamer: Roamer
    threads: list[threading.Thread]
    before: dict[str, Any]
    fresh: dict[str, Any]
    stalls: threading.Lock = field(default_factory=threading.Lock)
    proof: Slot | None = None

    def start(self, name: str, function: Callable[[], object]) -> None:
        self.threads.append(threading.Thread(target=function, name=f"campaign-{name}", daemon=True))
        self.threads[-1].start()


def prepare(world: World, folder: str, worker: int) -> None:
    """Once in the life of a process: what it complains about goes to a file; its directory is mapped."""
    complaints = os.open(Path(folder) / f"stderr-{worker}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.dup2(complaints, 2)
    os.close(complaints)
    faulthandler.enable()
    sys.setswitchinterval(0.001)
    gc.set_threshold(200)  # finalizers run often, see faults.campaign.mover
    world.memory["folder"] = Path(folder)
    world.memory["directory"] = Directory(Path(folder) / "directory")
    world.memory["worker"] = worker
    world.memory["bell"] = Bell()


def begin(world: World, epoch: Epoch, port: int, dialled: bool = False) -> int:
    """Initialise for an epoch; return the pid. ``dialled``: peers dial already, so a count of sockets says nothing."""
    worker, directory, folder = (world.memory[name] for name in ("worker", "directory", "folder"))
    before = residue()
    settings = epoch.settings(worker)
    settings["extra"] |= {"llm.ShmSocketDir": str(folder / "sockets")} if epoch.number % 3 == 2 else {}
    role = "PROMPT" if worker < 2 else "DECODER"
    world.start(role, worker + 1, make_config(listen_ip_info=f"127.0.0.1:{port}", **settings))
    engine = world.probe.engine
    _ = world.probe.transport("tcp").lanes.engine  # made with the first lane otherwise, and kept: that is no leak
    life = directory.life(worker)
    # An id of an earlier life must not name a cache of this one: a peer that pushes by id could not know.
    engine.caches.registry.next_id += life * _IDS
    (folder / f"incarnation-{worker}").write_bytes(engine.caches.exports.incarnation)
    path = folder / f"journal-{epoch.number}-{worker}-{life}"
    journal = Journal(path, f"worker {worker}", harmed=epoch.harmed)
    scene = Scene(world.dd, world.cm, epoch, worker, life, directory, journal, {})
    producer = Producer(scene, Random(f"{scene.seed} producer"))
    movers = [Mover(scene, Random(f"{scene.seed} mover {number}"), number) for number in range(MOVERS - 1)]
    linker = Linker(scene, Random(f"{scene.seed} linker"))
    rung = RungScene.beside(scene, world.memory["bell"], Random(f"{scene.seed} bell"))
    roamer = Roamer(Mover(rung, Random(f"{scene.seed} roamer"), MOVERS - 1), Linker(rung, rung.rng), rung.rng)
    world.memory["life"] = _Life(scene, producer, movers, linker, roamer, [], before, {} if dialled else residue())
    return os.getpid()


def go(world: World, ports: dict[int, int]) -> None:
    life: _Life = world.memory["life"]
    life.scene.ports.update(ports)
    life.scene.journal.__enter__()
    lodgers = Lodgers(life.scene, Random(f"{life.scene.seed} lodgers"))
    runs = (life.producer.run, lodgers.run, life.linker.run, *(mover.run for mover in life.movers))
    for number, run in enumerate(runs):
        life.start(str(number), run)


def roam(world: World, seconds: float) -> None:
    life: _Life = world.memory["life"]
    life.roamer.run(seconds, life.scene.stop.is_set)


# --- faults of its own ------------------------------------------------------------------------------------------------


def storm(world: World) -> None:
    world.memory["life"].producer.storm.set()


def exhaust(world: World) -> None:
    world.memory["life"].producer.exhaust.set()


@public_call
def _call(function: Callable[[], object]) -> None:
    function()


def _hold(world: World, name: str, seconds: float, harm: Callable[[], AbstractContextManager[None]]) -> None:
    """Be in that state for a while, and in no other. Returns at once."""
    life: _Life = world.memory["life"]

    def run() -> None:
        with life.stalls, suppress(LLMException, TimeoutError, AssertionError), harm():
            time.sleep(seconds)

    # As a call of the library: a finalizer that runs in this thread would wait for the lock that it holds.
    life.start(name, partial(_call, run))


def limit(world: World, what: str, free: int, seconds: float) -> None:
    """Leave the process few descriptors, threads, or allocations of the GPU; the last are threads where it has none."""
    limits = {"descriptors": few_descriptors, "allocations": few_device_allocations if world.gpu else few_threads}
    _hold(world, "limit", seconds, partial(limits.get(what, few_threads), free))


def lose_device(world: World) -> None:
    """End all work of the GPU in this process, as an illegal address does; a process does not recover from that."""
    fakecuda.load().fail("cuEventQuery", _ILLEGAL_ADDRESS)


def stop_for(world: World, what: str, seconds: float) -> None:
    """Stall a part of this end, see faults.stalls."""
    _hold(world, "stall", seconds, partial(stall, world.dd, what))


def fork(world: World, how: str) -> None:
    """Fork a child that leaves. Returns at once."""
    life: _Life = world.memory["life"]
    if life.stalls.acquire(blocking=False):  # another program does not begin without descriptors
        try:
            child = Child(how, life.producer.calls_of_a_child())
        finally:
            life.stalls.release()
        life.start("fork", lambda: child.wait(life.scene.journal))


def depart(world: World, finalize: bool) -> None:
    world.memory["life"].scene.journal.leaving = True
    if finalize:
        world.dd.finalize()
    leave()


def stop_at(world: World, step: str, peer: int, seconds: float, unlink: bool) -> None:
    """Let whoever comes next to a step of walk 1 stand there, see faults.gates. Returns at once.

    ``unlink``: from the peer meanwhile, which waits for that call.
    """
    life: _Life = world.memory["life"]
    folder = Path(tempfile.mkdtemp(prefix="gate-", dir=world.memory["folder"]))

    def run() -> None:
        with life.stalls, suppress(LLMException, TimeoutError), shut(world.dd, step, folder, peer=peer + 1) as gate:
            try:
                gate.wait(_PATIENCE_SECONDS)
                life.scene.journal.note("calls stopped at a gate")
                if unlink:
                    linker = Linker(life.scene, Random(0))
                    life.start("unlink", partial(linker.unlink, peer, 3000, force=False))
                time.sleep(seconds)
            finally:
                gate.open()  # for whoever comes only now, too

    life.start("gate", run)


# --- after the faults -------------------------------------------------------------------------------------------------


def halt(world: World) -> None:
    """Let every thread finish what it does; whoever does not is a hang."""
    life: _Life = world.memory["life"]
    life.scene.stop.set()
    until = time.monotonic() + life.scene.budget + _JOIN_SECONDS + SLACK_SECONDS
    for thread in life.threads:
        thread.join(max(until - time.monotonic(), 0.1))
        if thread.is_alive():
            where = stack(thread.ident or 0)
            life.scene.journal.violation("hangs", f"{thread.name} has not ended:\n{where}")
    gc.collect()


def link_to(world: World, ports: dict[int, int], seconds: float) -> None:
    """Be linked to all these workers with no unlink before."""
    life: _Life = world.memory["life"]
    journal = life.scene.journal
    for peer, port in ports.items():
        until, codes = time.monotonic() + seconds, []
        while time.monotonic() < until:
            _, (code,) = world.dd.link_clusters([info(peer + 1, port)], 3000)
            codes.append(code.name)
            if code in {LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK}:
                break
            time.sleep(0.05)
        else:
            text = f"no link to worker {peer} within {seconds} s of healing: {codes[:9]}; {world.dd.statistics()}"
            journal.violation("not healed", text)


def publish_proof(world: World) -> None:
    life: _Life = world.memory["life"]
    if not _freed(life):
        return
    life.proof = Slot(life.scene, _PROOF_SLOT, Kind.PROOF, life.scene.epoch.shape)
    life.proof.renew()


def prove(world: World) -> None:
    life: _Life = world.memory["life"]
    scene = life.scene
    stamp = Stamp(scene.worker, scene.life, 60, 0)
    for peer in scene.epoch.peers(scene.worker):
        found = scene.directory.look(peer, _PROOF_SLOT)
        if found is None:
            scene.journal.violation("not healed", f"worker {peer} has published nothing after healing")
            continue
        target = Destination(scene, found.shape, stamp)
        rows = list(range(found.shape.rows))
        for _ in range(_ATTEMPTS):
            pull = partial(scene.cm.pull_blocks, blocks_key(found), target.cache, rows, rows)
            error = scene.call("pull_blocks healed", scene.budget, pull)
            if error is None:
                break
            target.settle("proof", range(found.shape.tensors), rows, None)
        else:
            scene.journal.violation("not healed", f"after {_ATTEMPTS} pulls from worker {peer}: {error!r}")
        if error is None:
            new = whole(found.stamp, found.shape)
            target.settle(f"proof of {found}", range(found.shape.tensors), rows, new)
        target.close()


def finish(world: World, unlink: bool) -> None:
    """Give all back; judge what is left; finalize; judge again."""
    life: _Life = world.memory.pop("life")
    scene, journal = life.scene, life.scene.journal
    if life.proof is not None:
        life.proof.free()
    _freed(life)
    _wait_until(journal, "left in the tables", lambda: _remains(world))
    if unlink:
        for number, peer in enumerate(scene.epoch.peers(scene.worker)):
            cluster = info(peer + 1, 1)
            scene.call("unlink_clusters", 5.0, world.dd.unlink_clusters, [cluster], 5000, number % 2 == 1)
        _wait_until(journal, "still linked", lambda: [str(link) for link in world.dd.statistics().links])
        wanted = {name: what for name, what in life.fresh.items() if name in {"fds", "memfd mappings"}}
        _wait_until(journal, "held without a link", lambda: _more(wanted, residue()))
    try:
        world.dd.check_integrity()
    except AssertionError as error:
        journal.violation("internal errors", f"check_integrity: {error!r}")
    journal.call("finalize", scene.budget, world.dd.finalize)
    journal.__exit__()
    before = life.before
    del life, scene
    world.memory.pop("life", None)
    left = _more(before, settled(before))
    if left:
        journal.violation("leaks", f"left after finalize: {left}")
    journal.flush()


def _freed(life: _Life) -> bool:
    owners: list[Producer | Mover] = [life.producer, *life.movers, life.roamer.mover]
    freed = holds_within(lambda: not [each for each in owners if not each.free()], _TIDY_SECONDS, 0)
    if not freed:
        life.scene.journal.violation("leaks", "memory of the user is still in use after healing")
    return freed


def _remains(world: World) -> dict[str, Any]:
    statistics = world.dd.statistics()
    caches = statistics.caches
    counts: dict[str, Any] = {
        "pins": statistics.pins,
        "quarantined bytes": statistics.quarantined_bytes,
        "lost writers": statistics.lost_writers,
        "keys": [key.key for key in statistics.keys],
        "caches": caches.live + caches.deferred + caches.draining,
        "pool bytes": sum(pool.used_bytes for pool in statistics.pools),
    }
    return {name: value for name, value in counts.items() if value}


def _wait_until(journal: Journal, what: str, remains: Callable[[], Any]) -> None:
    if not holds_within(lambda: not remains(), _TIDY_SECONDS):
        journal.violation("leaks", f"{what}: {remains()}; descriptors {dict(residue()['fds'])}")


def _more(before: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return what there is more of, as (before, now). At the first look a stranger may have been connected."""
    return {
        name: (was, now[name])
        for name, was in before.items()
        if (now[name] - was if isinstance(was, Counter) else now[name] != was)
    }
