"""Interrupts: the handler of a signal that raises, in every call, at each instruction or at random.

``python -m faults interrupts`` runs all of it; ``test_interrupts.py`` a sample. The interrupted end lives in this
process, because handlers run in the main thread of a process; its peer in another one.
"""

import _weakrefset
import argparse
import ctypes
import logging
import os
import random
import signal
import struct
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheTask,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)
from llm_datadist._memory.write_intents import IntentWriter
from llm_datadist._native import WRITER_SLOTS
from llm_datadist._transport.tcp.connection import TcpConnection
from llm_datadist.store import StoreClient, StoreOptions, StoreServer
from llm_datadist.testing.scene import residue, settled
from tests.support.authority import Authority
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.errands import interrupt_main, traced
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info, link, links
from tests.support.moves import Spec, make, picture, show, wait_until
from tests.support.probe import instances
from tests.support.world import World, make_config, small_pool

TRANSPORTS: Final = ("shm", "cma", "tcp", "tls")
#: A call that ends later than this after it began hangs.
BOUND_SECONDS: Final = 10.0
#: A call ends that long after an interrupt: 100 ms, and what a busy machine adds.
PROMPT_SECONDS: Final = 1.0
#: What the interrupted end writes over the memory of a call that was interrupted; bytes that come late overwrite it.
_REFILL: Final = 0x5A
_WINDOWS: Final = 64  # each call has its own blocks, until all were used: bytes that are later than the next call show
_BLOCKS: Final = 4
_PACKAGE: Final = os.path.dirname(llm_datadist.__file__)
_SERVED: Final = BlocksCacheKey(1, 0)
_STORE: Final = 77
_LIBC: Final = ctypes.CDLL(None)
_SIGNALS: Final = (signal.SIGUSR1, signal.SIGALRM, signal.SIGINT, signal.SIGTERM)


class Interrupted(ValueError):
    """What the handler raises: no codec may take it for an error of its own."""


_came: Final[list[int]] = []


def _interrupt(number: int, frame: FrameType | None) -> None:
    _came.append(number)
    # Python drops what a callback of a weak reference raises, as of a thread whose object goes: no call can end by it.
    if frame is None or frame.f_code.co_filename != _weakrefset.__file__:
        raise Interrupted


@dataclass
class Scene:
    """One end with a cache of many windows, linked to a peer with a cache like it."""

    transport: str
    here: LocalEnd
    there: ChildEnd
    authority: Authority
    window: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self.world = self.here.world
        self.cm, self.caches, self.memory = self.world.cm, self.world.caches, self.world.memory
        self.peer = info(1, self.there.port)

    @property
    def blocks(self) -> list[int]:
        return list(range(self.window * _BLOCKS, (self.window + 1) * _BLOCKS))

    def dial(self) -> None:
        assert self.world.dd.link_clusters([self.peer], 5000) == SUCCESS

    def unlink(self, *, force: bool = False) -> None:
        assert self.world.dd.unlink_clusters([self.peer], 5000, force=force) == SUCCESS

    def link(self) -> None:
        """Link, unless there is a link; a loss may be about to be noticed."""
        wait_until(lambda: set(self.here.do(links).values()) <= {"ready"})
        if not self.here.do(links):
            assert self.here.do(link, [info(1, self.there.port)]) == SUCCESS
        wait_until(lambda: list(self.there.do(links).values()) == ["ready"])


class _Held(LayerSynchronizer):
    """No layer is ready before the gate is open."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return self.gate.wait(BOUND_SECONDS)


def _send_layers(scene: Scene, synchronizer: LayerSynchronizer) -> CacheTask:
    to = TransferWithCacheKeyConfig(_SERVED, range(1), range(1))
    scene.memory["task"] = task = scene.cm.transfer_cache_async(
        scene.caches["source"], synchronizer, [to], scene.blocks, scene.blocks
    )
    return task


def _start_layers(scene: Scene) -> None:
    scene.memory["held"] = held = _Held()
    _send_layers(scene, held)


def _nothing_is_sent_late(scene: Scene) -> None:
    """Let the model go on: a transfer whose caller was interrupted sends nothing of what is written from now on."""
    task, held = scene.memory.pop("task", None), scene.memory.pop("held", None)
    sources = _tensors(scene.world, "source")
    mine = [tensor[scene.blocks].copy() for tensor in sources]
    if task is None:
        for tensor in sources:
            tensor[scene.blocks] = _REFILL
    if held is not None:
        held.gate.set()
    if task is not None:
        assert task.synchronize(int(BOUND_SECONDS * 1e3)) is LLMStatusCode.LLM_SUCCESS
    wait_until(lambda: not any(each.name.startswith("llm-datadist-task") for each in threading.enumerate()))
    if task is None:
        for got in scene.there.do(show, "served"):
            assert not (got.reshape(_WINDOWS * _BLOCKS, -1)[scene.blocks] == _REFILL).all(), "bytes came late"
    for tensor, bytes_ in zip(sources, mine, strict=True):
        tensor[scene.blocks] = bytes_


def _init(scene: Scene) -> None:
    scene.memory["other"] = dd = LLMDataDist(LLMRole.PROMPT, 3)
    dd.init(make_config(listen_ip_info="127.0.0.1:0", **small_pool()))


def _finalize_other(scene: Scene) -> None:
    scene.memory.pop("other").finalize()
    assert len(instances()) == 1, "an instance listens that nobody holds"


# --- a prefix store ---------------------------------------------------------------------------------------------------
def _serve_store(world: World, options: dict[str, str]) -> int:
    world.memory["store"] = store = StoreServer(64 << 20, cluster_id=_STORE, namespaces=1, options=options)
    return store.port


def _end_store(world: World) -> None:
    world.memory.pop("store").close()


def _with_store(scene: Scene) -> StoreClient:
    """Return the client of a store in the peer's process."""
    client: StoreClient | None = scene.memory.get("client")
    if client is None:
        port = scene.there.do(_serve_store, _options(scene.transport, _STORE, scene.authority))
        address = f"127.0.0.1:{port}"
        client = StoreClient(scene.world.dd, address, bytes(32), StoreOptions(store_id=_STORE))
        assert client.connect(BOUND_SECONDS)
        scene.memory.update(client=client, saved=deque(maxlen=8))
    return client


def _before_save(scene: Scene) -> None:
    """Write new bytes, which shall be saved under new keys."""
    _with_store(scene)
    bytes_ = []
    for tensor in _tensors(scene.world, "source"):
        tensor[scene.blocks] = np.frombuffer(random.randbytes(tensor[scene.blocks].nbytes), tensor.dtype).reshape(
            tensor[scene.blocks].shape
        )
        bytes_.append(tensor[scene.blocks].copy())
    scene.memory["saved"].append(([random.randbytes(8) for _ in scene.blocks], bytes_))


def _save(scene: Scene) -> None:
    keys, _ = scene.memory["saved"][-1]
    scene.memory["client"].save(keys, scene.caches["source"], scene.blocks)


def _hits_are_what_was_saved(scene: Scene) -> None:
    """Whatever the caller has written since: a save that was interrupted stored the bytes of its time, or nothing."""
    client = _with_store(scene)
    for keys, bytes_ in scene.memory["saved"]:
        hit = client.lookup(keys)
        scene.counts["hits"] += len(hit)
        at = scene.blocks[: len(hit)]
        client.load(hit, scene.caches["kv"], at)
        for got, given in zip(_tensors(scene.world, "kv"), bytes_, strict=True):
            assert np.array_equal(got[at], given[: len(hit)]), "a hit has bytes that were written after the save"


def _before_load(scene: Scene) -> None:
    """Have a hit of all blocks."""
    client, found = _with_store(scene), 0
    while found < _BLOCKS:
        if scene.memory["saved"]:
            found = len(hit := client.lookup(scene.memory["saved"][-1][0]))
            client.release(hit)
        if found < _BLOCKS:
            _before_save(scene)
            _save(scene)


def _load(scene: Scene) -> None:
    client = scene.memory["client"]
    client.load(client.lookup(scene.memory["saved"][-1][0]), scene.caches["kv"], scene.blocks)


def _look_up(scene: Scene) -> None:
    client = scene.memory["client"]
    client.release(client.lookup(scene.memory["saved"][-1][0]))


# --- the calls --------------------------------------------------------------------------------------------------------


def _give_back(scene: Scene) -> None:
    cache = scene.memory.pop("mine", None)
    if cache is None:
        return
    if cache.is_blocks_cache:
        scene.cm.unregister_cache(cache.cache_id)
        return
    for request in (1, 2):
        scene.cm.remove_cache_key(CacheKey(2, request, 0))
    scene.cm.deallocate_cache(cache)


def _offer(world: World) -> None:
    cache = world.memory.pop("offered", None)
    if cache is not None:
        world.cm.remove_cache_key(CacheKey(1, 9, 0))
        world.cm.deallocate_cache(cache)
    world.memory["offered"] = world.cm.allocate_cache(Spec(rows=1, stride=4096).desc, [CacheKey(1, 9, 0)])


def _apart(scene: Scene) -> None:
    """Have no link at either end."""
    scene.world.dd.unlink_clusters([info(1, scene.there.port)], 5000)
    wait_until(lambda: not scene.here.do(links) and not scene.there.do(links))


def _join_task(scene: Scene) -> None:
    task = scene.memory.pop("task", None)
    if task is not None:
        assert task.synchronize(int(BOUND_SECONDS * 1e3)) is LLMStatusCode.LLM_SUCCESS


@dataclass(frozen=True)
class Verb:
    """One call. ``before`` and ``after`` are not interrupted."""

    call: Callable[[Scene], object]
    before: Callable[[Scene], object] = lambda _: None
    after: Callable[[Scene], object] = lambda _: None
    writes: str | None = None  # the cache that it writes here, by the blocks of the window
    transports: Sequence[str] = TRANSPORTS
    rca: bool = True
    # False where the caller loses a handle by an interrupt between the end of the call and its own next instruction: it
    # is interrupted in its errand only.
    at_random: bool = True


_ROWS: Final = Spec(rows=2).desc
_TWO: Final = Spec(tensors=2, blocks=True).desc
#: Verbs of one process need no other transport.
_HERE: Final = ("shm",)
VERBS: Final[dict[str, Verb]] = {
    "pull_blocks": Verb(lambda s: s.cm.pull_blocks(_SERVED, s.caches["kv"], s.blocks, s.blocks), writes="kv"),
    "pull_cache": Verb(
        lambda s: s.cm.pull_cache(CacheKey(1, 9, 0), s.caches["row"], 0),
        before=lambda s: s.there.do(_offer),  # whether the last pull has consumed the key or not
        rca=False,
    ),
    "push_blocks": Verb(lambda s: s.cm.push_blocks(_SERVED, s.caches["source"], s.blocks, s.blocks)),
    "transfer_cache_async": Verb(
        lambda s: _send_layers(s, Always()).synchronize(int(BOUND_SECONDS * 1e3)), after=_join_task
    ),
    "transfer_cache_async, begun": Verb(_start_layers, after=_nothing_is_sent_late, at_random=False),
    "init": Verb(_init, after=_finalize_other, transports=_HERE, at_random=False),
    "copy_blocks": Verb(
        lambda s: s.cm.copy_blocks(
            s.caches["copied"], {block: [(block + 2 * _BLOCKS) % (_WINDOWS * _BLOCKS)] for block in s.blocks}
        ),
        transports=_HERE,
    ),
    "swap_blocks": Verb(
        lambda s: s.cm.swap_blocks(s.caches["source"], s.caches["host"], {block: block for block in s.blocks}),
        writes="host",
        transports=_HERE,
    ),
    "allocate_cache": Verb(
        lambda s: s.memory.update(mine=s.cm.allocate_cache(_ROWS, [CacheKey(2, 1, 0), CacheKey(2, 2, 0)])),
        after=_give_back,
        transports=_HERE,
        at_random=False,
    ),
    "register_blocks_cache": Verb(
        lambda s: s.memory.update(
            mine=s.cm.register_blocks_cache(_TWO, list(s.caches["host"].tensor_addrs), BlocksCacheKey(2, 5))
        ),
        after=_give_back,
        transports=_HERE,
        at_random=False,
    ),
    "register_tensors": Verb(
        lambda s: s.memory.update(mine=s.cm.register_tensors([np.zeros((2, 64)) for _ in range(2)])),
        after=_give_back,
        transports=_HERE,
        at_random=False,
    ),
    "link_clusters": Verb(Scene.dial, before=_apart),
    "unlink_clusters": Verb(Scene.unlink, before=Scene.link),
    "unlink_clusters, forced": Verb(lambda s: s.unlink(force=True), before=Scene.link),
    "save": Verb(_save, before=_before_save, after=_hits_are_what_was_saved, writes="source", rca=False),
    "load": Verb(_load, before=_before_load, writes="kv", rca=False),
    "lookup": Verb(_look_up, before=_before_load, rca=False),
}


def _options(transport: str, cluster_id: int, authority: Authority) -> dict[str, str]:
    match transport:
        case "cma":
            return {}
        case "tls":
            return {"llm.Transport": "tcp"} | authority.issue(str(cluster_id), [cluster_id])
        case _:
            return {"llm.Transport": transport}


@contextmanager
def interrupted_end(transport: str, *, rca: bool = True) -> Iterator[Scene]:
    """Start both ends; afterwards nothing may be left in this process."""
    here, there = LocalEnd("interrupted"), ChildEnd("served")
    before = residue()
    memory = "private" if transport == "cma" else "pool"
    spec = Spec(tensors=2, rows=_WINDOWS * _BLOCKS, stride=4096, blocks=True, memory=memory)
    handlers = [signal.signal(each, _interrupt) for each in _SIGNALS]
    folder = tempfile.TemporaryDirectory()
    authority = Authority(Path(folder.name))
    try:
        for end, role, cluster_id in ((there, "PROMPT", 1), (here, "DECODER", 2)):
            end.start(
                role,
                cluster_id,
                listen_ip_info="127.0.0.1:0",
                sync_kv_timeout=4000,  # a pin that an interrupt leaves ends two seconds after it
                enable_remote_cache_accessible=rca,
                extra=_options(transport, cluster_id, authority),
            )
        there.do(make, "served", replace(spec, blocks_key=_SERVED), 3)
        here.do(make, "kv", spec, 5)
        here.do(make, "copied", spec, 6)
        here.do(make, "source", spec, 7)
        here.do(make, "host", replace(spec, memory="pool", placement=Placement.HOST), 8)
        here.do(make, "row", Spec(rows=1, stride=4096), 9)
        scene = Scene(transport, here, there, authority)
        scene.link()
        yield scene
    finally:
        folder.cleanup()
        for number, handler in zip(_SIGNALS, handlers, strict=True):
            signal.signal(number, handler)
        if (client := here.world.memory.pop("client", None)) is not None:
            client.close()
            there.do(_end_store)
        here.stop()
        there.stop()
        left = settled(before)
        there.close()
    assert left == before


class Walk:
    """Calls a verb and interrupts it; then compares everything that the call may not leave behind."""

    def __init__(self, scene: Scene, verb: Verb) -> None:
        self.scene, self.verb = scene, verb
        self._kept: Interrupted | None = None
        self._written: list[list[int]] = []  # windows that were written over after an interrupt
        self._prepare()
        verb.call(scene)
        verb.after(scene)
        verb.before(scene)
        self._idle = self._picture()  # what the end shows between two calls

    def all(self, interrupts: Iterable[Callable[[Callable[[], object]], object]]) -> None:
        """Make a call for each of these, and look at what is left now and then."""
        for count, interrupt in enumerate(interrupts, 1):
            self.run(interrupt)
            if count % _WINDOWS == 0:
                self.check()
        self.check()

    def _prepare(self) -> None:
        self.scene.window = (self.scene.window + 1) % _WINDOWS
        if self.scene.window == 0:
            self.check_bytes()
        self.verb.before(self.scene)

    def run(self, interrupt: Callable[[Callable[[], object]], object]) -> None:
        scene = self.scene
        self._prepare()
        since = time.monotonic()
        try:
            interrupt(lambda: self.verb.call(scene))
            scene.counts["done"] += 1
        except Interrupted as error:
            self._kept = error  # with its frames, as a caller may
            scene.counts["interrupted"] += 1
            if self.verb.writes is not None:  # use the memory of the interrupted call at once, as its caller may
                for tensor in _tensors(scene.world, self.verb.writes):
                    tensor[scene.blocks] = _REFILL
                self._written.append(scene.blocks)
        except LLMException as error:
            raise AssertionError(f"an interrupt became {error!r}") from error
        took = time.monotonic() - since
        scene.slowest = max(scene.slowest, took)
        assert took < BOUND_SECONDS + PROMPT_SECONDS, f"a call took {took:.1f} s"
        self.verb.after(self.scene)

    def check_bytes(self) -> None:
        if self.verb.writes is not None:
            for tensor in _tensors(self.scene.world, self.verb.writes):
                for blocks in self._written:
                    assert (tensor[blocks] == _REFILL).all(), "bytes came after the call had raised"
        self._written.clear()

    def check(self) -> None:
        scene = self.scene
        self.check_bytes()
        self.verb.before(scene)
        wait_until(lambda: self._picture() == self._idle)
        for end in (scene.here, scene.there):
            wait_until(lambda end=end: end.do(picture).pins == 0)  # type: ignore[misc]
        scene.link()
        wait_until(lambda: not _busy(scene.world))
        served = scene.there.do(show, "served")
        cache = scene.caches["kv"]
        scene.cm.pull_blocks(_SERVED, cache, list(range(_WINDOWS * _BLOCKS)), list(range(_WINDOWS * _BLOCKS)))
        for got, given in zip(show(scene.world, "kv"), served, strict=True):
            assert np.array_equal(got, given)

    def _picture(self) -> Any:
        here = picture(self.scene.world)
        links = tuple((each.remote_cluster_id, each.state) for each in here.links)
        grants = replace(here.grants, released=0, expired=0, revoked=0, lost=0)
        return replace(here, links=links, grants=grants, quarantined_bytes=0)


def _tensors(world: World, name: str) -> list[Any]:
    return [tensor.reshape(_WINDOWS * _BLOCKS, -1) for tensor in llm_datadist.views.tensor_views(world.caches[name])]


def _busy(world: World) -> list[str]:
    there = world.probe.engine.links.peek(1)
    assert there is not None
    assert there.channel is not None
    found = []
    if there.busy or there.requests.waiting:
        found.append(f"{there!r}, {there.requests.waiting} waiting")
    if there.channel.being_read:
        found.append("a reader of the channel")
    for connection in there.connection.connections:
        if isinstance(connection, TcpConnection) and any(connection.group.loads.values()):
            found.append(f"load of lanes {connection.group.loads}")
        writer = connection.intent_writer
        if isinstance(writer, IntentWriter) and len(writer.free) != WRITER_SLOTS:
            found.append(f"{writer!r}")
    return found


class AtInstruction:
    """Interrupts a call at the n-th instruction of the library that it runs, in this thread or in its errands.

    In this thread soon after it: the interpreter runs no handler between some instructions, but a trace function does.
    """

    def __init__(self, wanted: int, *, here: bool) -> None:
        self._wanted = wanted
        self._here = here  # else in errands only
        self.seen = 0

    def __call__(self, function: Callable[[], object]) -> None:
        _came.clear()
        try:
            with traced(self._trace):
                function()
        finally:
            _silence(lambda: signal.setitimer(signal.ITIMER_REAL, 0))

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        errand = threading.current_thread() is not threading.main_thread()
        if not (frame.f_code.co_filename.startswith(_PACKAGE) and (errand or self._here)):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.seen += 1
            if self.seen == self._wanted and errand:
                interrupt_main(signal.SIGUSR1, lambda: bool(_came))
            elif self.seen == self._wanted:
                signal.setitimer(signal.ITIMER_REAL, 3e-5)
        return self._trace


def instructions(scene: Scene, verb: Verb) -> int:
    """Return how many instructions of the library one call of a verb runs for its caller."""
    counted = AtInstruction(0, here=verb.at_random)
    Walk(scene, verb).all([counted])
    return counted.seen


def at_each_instruction(scene: Scene, verb: Verb, points: Iterable[int]) -> None:
    Walk(scene, verb).all(AtInstruction(point, here=verb.at_random) for point in points)


def at_random(scene: Scene, verb: Verb, times: int, source: random.Random) -> None:
    """Interrupt calls by a timer, at any moment of theirs."""
    walk = Walk(scene, verb)
    since = time.perf_counter()
    for _ in range(20):
        walk.run(lambda function: function())
    mean = (time.perf_counter() - since) / 20
    bells = [Bell(signal.SIGINT), Bell(signal.SIGTERM)]

    def ring(function: Callable[[], object]) -> None:
        bell = source.choice(bells)
        try:
            bell.set(source.uniform(1e-6, 1.2 * mean))
            function()
        finally:
            _silence(lambda: bell.set(0))

    walk.all([ring] * times)


class Bell:
    """A timer of the kernel that sends this process a signal; it lives as long as the process."""

    def __init__(self, number: int) -> None:
        self._timer = ctypes.c_void_p()
        event = struct.pack("QiI48x", 0, number, 0)  # struct sigevent: SIGEV_SIGNAL
        assert _LIBC.timer_create(time.CLOCK_MONOTONIC, event, ctypes.byref(self._timer)) == 0

    def set(self, seconds: float) -> None:
        """Ring once after so many seconds; 0 ends it."""
        value = struct.pack("4q", 0, 0, int(seconds), int(seconds % 1 * 1e9))
        assert _LIBC.timer_settime(self._timer, 0, value, None) == 0


def _silence(stop: Callable[[], object]) -> None:
    """Stop a timer, which may ring while it is being stopped."""
    try:
        stop()
    except Interrupted:
        stop()
        raise


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    seed = options.seed or int(time.time())
    yield f"seed {seed}", True
    logging.getLogger("LLM_DATADIST").setLevel(logging.ERROR)
    source = random.Random(seed)
    rows = [(each, name) for each in options.transport for name in options.verb if each in VERBS[name].transports]
    moments = options.random // max(1, sum(VERBS[name].at_random for _, name in rows)) + 1
    for transport, name in rows:
        verb = VERBS[name]
        with interrupted_end(transport, rca=verb.rca) as scene:
            count = instructions(scene, verb)
            points = range(1 + source.randrange(options.every), count + 1, options.every)
            at_each_instruction(scene, verb, points)
            if verb.at_random:
                at_random(scene, verb, moments, source)
            counts = f"{dict(scene.counts)}, slowest {scene.slowest:.3f} s"
            yield f"{transport:4} {name:24} {count:5} instructions, {counts}", True
    yield "0 late bytes, 0 hangs, nothing left behind", True


OPTIONS: Final = {
    "every": (1, "only each n-th instruction"),
    "random": (20_000, "interrupts at random moments, in all"),
    "verb": (tuple(VERBS), "only these"),
    "transport": (TRANSPORTS, ""),
    "seed": (None, "any, if left out"),
}
