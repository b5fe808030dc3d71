"""init, finalize, several instances, threads, forks and exits (interface §3.1, §3.2); handles of another instance or of
an earlier init; finalizers of the user: the collector calls them at any line of the library, in any thread."""

import gc
import inspect
import os
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.datadist import _shutdown_handler
from llm_datadist.errors import CacheError, LinkError, LLMException, NotInitialized, OutOfMemory, ParamError, StateError
from llm_datadist.store import StoreClient, StoreServer
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views
from tests.support.ends import Call, LocalEnd
from tests.support.errands import interrupt_main, traced
from tests.support.grants import LONG, claim, grant, tell
from tests.support.kinds import ChildEnd
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info, link
from tests.support.memory import cpu_cache
from tests.support.moves import BLOCKS, Spec, Use, cache_id, make, picture, same_bytes, show, wait_until
from tests.support.ranks import finalize_and_init
from tests.support.source import ROOT, run
from tests.support.v1 import POOL, desc, kv_make
from tests.support.world import World, baseline, make_config, residue, settled, small_pool

pytestmark = pytest.mark.covers(
    "CacheManager",
    "_shutdown_handler",
    "tensor_views",
    "LLMDataDist",
    "Cache",
    "KvCache",
    "LLMDataDist: cache_manager finalize init listen_port llm_engine_instance",
    "LLMStatusCode: LLM_ENGINE_FINALIZED LLM_FAILED",
    "errors: NotInitialized CacheError",
    "Cache.grant",
    "Grant: active revoke release",
)

DESC: Final = CacheDesc(2, [4, 16], DataType.DT_FLOAT)
LISTENING: Final = {"listen_ip_info": "127.0.0.1:0"}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = residue()
    yield
    assert LLMDataDist.llm_engine_instance is None
    assert settled(before) == before


def live(cluster_id: int, **settings: Any) -> LLMDataDist:
    datadist = LLMDataDist(LLMRole.MIX, cluster_id)
    datadist.init(make_config(**settings))
    return datadist


def test_r20_instances_are_independent_and_the_last_live_one_is_the_engine_instance() -> None:
    first, second, third = (live(cluster_id, **LISTENING) for cluster_id in (1, 2, 3))
    assert LLMDataDist.llm_engine_instance is third
    assert len({each.listen_port for each in (first, second, third)}) == 3
    ids = [each.cache_manager.allocate_cache(DESC).cache_id for each in (first, second, third)]
    assert len(set(ids)) == 3
    for here in (first, third):
        assert here.link_clusters([info(2, second.listen_port)]) == SUCCESS
    second.finalize()
    assert LLMDataDist.llm_engine_instance is third
    third.finalize()
    assert LLMDataDist.llm_engine_instance is first
    assert first.cache_manager.allocate_cache(DESC).cache_id == ids[0] + 1
    wait_until(lambda: first.statistics().links == ())
    second.init(make_config())
    assert LLMDataDist.llm_engine_instance is second, "one that came before is it again"
    second.finalize()
    first.finalize()


def calls(datadist: LLMDataDist, v1: bool, blocks: bool) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    """Return what allocates, what deallocates, and what counts the caches."""
    manager: Any = datadist.kv_cache_manager if v1 else datadist.cache_manager
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    deallocate = manager.deallocate_blocks_cache if blocks and not v1 else manager.deallocate_cache
    return allocate, deallocate, lambda: datadist.statistics().caches.live


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("v1", [True, False])
def test_r20_i11_foreign_handles_give_nothing_back(v1: bool, blocks: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Regression: an equal id of another LLMDataDist, or of an earlier init, gave back a cache of this one."""
    settings = {"enable_cache_manager": not v1}
    first, second = live(1, **settings), live(2, **settings)
    allocate, deallocate, count = calls(first, v1, blocks)
    ours, theirs = allocate(DESC), calls(second, v1, blocks)[0](DESC)
    deallocate(theirs)
    assert (count(), second.statistics().caches.live) == (1, 1)
    first.finalize()
    first.init(make_config(**settings))
    allocate, deallocate, count = calls(first, v1, blocks)
    again = allocate(DESC)
    deallocate(ours)
    assert count() == 1
    assert caplog.text.count("; nothing is given back") == 2
    deallocate(again)
    assert count() == 0
    calls(second, v1, blocks)[1](theirs)  # it has lost nothing
    assert second.statistics().caches.live == 0
    first.finalize()
    second.finalize()


def test_init_and_finalize_may_be_called_again_and_the_options_are_not_changed() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 2**64 - 1)
    datadist.finalize()
    options = make_config()
    before = dict(options)
    datadist.init(options)
    assert options == before
    assert datadist.listen_port is None, "no listener without listen_ip_info"
    assert datadist.cluster_id == 2**64 - 1
    view = tensor_views(datadist.cache_manager.allocate_cache(DESC))[0]
    view[:] = 7
    datadist.finalize()
    datadist.finalize()
    assert (view == 7).all(), "views of cache memory stay readable"
    datadist.init(make_config(**LISTENING))
    port, manager = datadist.listen_port, datadist.cache_manager
    for again in (make_config(), {"ge.exec.deviceId": "nonsense"}, None):
        datadist.init(again)  # type: ignore[arg-type]
    assert (datadist.listen_port, datadist.cache_manager) == (port, manager)
    datadist.finalize()


def test_threads_that_init_and_finalize_one_object_make_one_engine() -> None:
    def init(datadist: LLMDataDist) -> CacheManager:
        datadist.init(make_config())
        return datadist.cache_manager

    for _ in range(5):
        datadist = LLMDataDist(LLMRole.MIX, 1)
        managers = [each.result() for each in [Call(init, datadist) for _ in range(4)]]
        assert len({id(manager) for manager in managers}) == 1
        for each in [Call(datadist.finalize) for _ in range(4)]:
            each.result()


def test_finalize_during_a_handshake_ends_it_with_a_code() -> None:
    datadist = live(2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        linking = Call(datadist.link_clusters, [info(1, server.getsockname()[1])], 20_000)
        with server.accept()[0]:
            datadist.finalize()
    assert linking.result() == (LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])


def test_finalize_amid_strangers_that_come_and_go_leaves_nothing() -> None:
    def storm(port: int, over: threading.Event) -> None:
        while not over.is_set():
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.1) as sock:
                sock.sendall(b"ODATDIS")

    for _ in range(8):
        datadist, over = live(1, **LISTENING), threading.Event()
        strangers = [Call(storm, datadist.listen_port, over) for _ in range(3)]
        datadist.finalize()
        over.set()
        for stranger in strangers:
            stranger.result()


TWO_LISTENERS: Final = {"enable_cache_manager": False, "listen_ip_info": "127.0.0.1:0;127.0.0.1:0"}
#: Settings, the error, and a part of its text.
FAILURES: Final[dict[str, tuple[dict[str, Any], type[LLMException], str]]] = {
    "pool too large": ({"mem_pool_cfg": '{"memory_size": 140737488355328}'}, OutOfMemory, "140737488355328"),
    "no rendezvous": ({"extra": {"llm.ShmSocketDir": "/no/where"}}, ParamError, "/no/where"),
    "v1 with two listeners": (TWO_LISTENERS, ParamError, "2 addresses"),
    "a busy address": ({}, LinkError, ""),
    "another host": ({"listen_ip_info": "192.0.2.1:26000"}, LinkError, "192.0.2.1:26000"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_an_init_that_fails_half_way_leaves_nothing_and_the_port_free(name: str) -> None:
    settings, kind, part = FAILURES[name]
    status = LLMStatusCode.LLM_FAILED if kind is LinkError else kind.default_status
    with socket.create_server(("127.0.0.1", 0)) as probe:
        listen = f"127.0.0.1:{probe.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as busy:
        if name == "a busy address":
            part = f"127.0.0.1:{busy.getsockname()[1]}"
            settings = {"listen_ip_info": part}
        datadist = LLMDataDist(LLMRole.PROMPT, 1)
        before = residue()
        for _ in range(2):
            with pytest.raises(kind) as caught:
                datadist.init(make_config(**{"listen_ip_info": listen} | settings))
            assert caught.value.status_code is status
            assert part in str(caught.value)
            assert "\n" not in str(caught.value)
            assert LLMDataDist.llm_engine_instance is None
            assert settled(before) == before
    datadist.init(make_config(listen_ip_info=listen))
    assert f"127.0.0.1:{datadist.listen_port}" == listen
    datadist.finalize()


def test_listening_beyond_loopback_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ParamError, match=r"llm.listenIpInfo: 0.0.0.0 is beyond this host, .* set llm.AuthSecretFile"):
        live(1, listen_ip_info="0.0.0.0:0", extra={"llm.Insecure": "0"})
    datadist = live(1, listen_ip_info="0.0.0.0:0", extra={"llm.Insecure": "1"})
    warnings = [record.getMessage() for record in caplog.records if "without authentication" in record.getMessage()]
    assert warnings == [warnings[0]]
    assert f"0.0.0.0:{datadist.listen_port}" in warnings[0]
    datadist.finalize()


def attempt(owner: object, name: str) -> None:
    """Call a public name with None for each argument that it needs: it must refuse before it looks at any."""
    member = getattr(owner, name)  # a property is refused here
    needed = [each for each in inspect.signature(member).parameters.values() if each.default is each.empty]
    member(*[None for _ in needed])


def test_before_init_and_after_finalize_every_call_is_a_runtime_error() -> None:
    usable = {"init", "finalize", "cluster_id", "llm_engine_instance"}
    datadist = LLMDataDist(LLMRole.MIX, 1)
    for _ in range(2):
        for name in public_names(LLMDataDist) - usable:
            with pytest.raises(NotInitialized, match="not initialized") as caught:
                attempt(datadist, name)
            assert isinstance(caught.value, RuntimeError)
            assert name.removesuffix("_async") in str(caught.value)
        datadist.init(make_config())
        datadist.finalize()


def test_r21_a_stale_manager_refuses_every_operation_also_after_init_again() -> None:
    datadist = live(1, enable_remote_cache_accessible=True)
    stale = datadist.cache_manager
    assert datadist.cache_manager is stale
    datadist.finalize()
    for again in (False, True):
        if again:
            datadist.init(make_config(enable_remote_cache_accessible=True))
            assert datadist.cache_manager is not stale
            before = datadist.statistics()
        for name in public_names(CacheManager) - {"check_cache_key"}:
            with pytest.raises(StateError, match="finalized") as caught:
                attempt(stale, name)
            assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert datadist.statistics() == before
    datadist.finalize()


def public_names(of: type) -> set[str]:
    return {name for name in dir(of) if not name.startswith("_")}


FORKING: Final = """
import os, sys
from tests.support.ends import LocalEnd
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link
first, second = LocalEnd("first"), LocalEnd("second")
first.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
second.start("DECODER", 2)
assert second.do(link, [info(1, first.port)]) == SUCCESS
child = os.fork()
if child == 0:
    try:
        second.world.cm
    except RuntimeError as error:
        print("child:", str(error).replace(str(os.getppid()), "PARENT"))
    sys.exit(0)
print("exit status", os.waitpid(child, 0)[1])
bytes_move_both_ways(first, second)
first.stop()
first.start("PROMPT", 1, listen_ip_info=f"127.0.0.1:{first.port}")
assert second.do(link, [info(1, first.port)]) == SUCCESS
print("over")
"""


def test_a_forked_child_has_nothing_of_its_parents_and_an_end_without_finalize_is_clean() -> None:
    done = run(sys.executable, "-W", "error", "-X", "dev", "-c", FORKING, cwd=ROOT)
    # Of asyncio's in dev mode only the time that a step took, which is the machine's.
    usual = re.compile(r"link to cluster|Executing <.* took [0-9.]+ seconds")
    noise = [line for line in done.stderr.splitlines() if not usual.match(line)]
    assert (done.returncode, noise) == (0, [])
    whose = "it belongs to process PARENT, of which this one is a fork"
    refused = f"child: cache_manager: {whose}; call it there, or init one here"
    assert done.stdout.splitlines() == [refused, "exit status 0", "over"]


def test_the_exit_handler_finalizes_and_swallows_what_fails() -> None:
    class Failing(LLMDataDist):
        def finalize(self) -> None:
            super().finalize()
            raise StateError("too late")

    first, second = Failing(LLMRole.DECODER, 1), live(2)
    first.init(make_config())
    _shutdown_handler()
    for each in (first, second):
        with pytest.raises(NotInitialized):
            each.statistics()


CACHES: Final = {"blocks": Spec(blocks=True), "rows": Spec(), "host": Spec(blocks=True, placement=Placement.HOST)}
REMOTE: Final = {"enable_remote_cache_accessible": True}
PEER_ROWS, BLOCKS_HERE, ROWS_HERE = Use("peer's rows"), Use("own blocks"), Use("own rows")
#: Of both dialects.
_COPIES: Final[list[tuple[str, tuple[Any, ...]]]] = [
    ("copy_cache", (Use("rows"), ROWS_HERE, 1, 2)),
    ("copy_cache", (ROWS_HERE, Use("rows"), 1, 2)),
    ("copy_blocks", (Use("blocks"), {1: [6]})),
    ("swap_blocks", (Use("cpu"), Use("blocks"), {1: 6})),
    ("pull_cache", (PEER_ROWS, Use("rows"), 1)),
    ("pull_blocks", (BLOCKS, Use("blocks"), [1], [6])),
]
#: Role, settings, and calls with a handle that is not of this instance, once for each argument that takes one.
DIALECTS: Final[dict[str, tuple[str, dict[str, Any], list[tuple[str, tuple[Any, ...]]]]]] = {
    "v2": (
        "DECODER",
        REMOTE,
        [
            *_COPIES,
            ("swap_blocks", (Use("host"), BLOCKS_HERE, {1: 6})),
            ("push_cache", (PEER_ROWS, Use("rows"), 1)),
            ("push_blocks", (BLOCKS, Use("blocks"), [1], [6])),
            ("transfer_cache_async", (Use("blocks"), Always(), Use("key config"), [1], [6])),
        ],
    ),
    "v1 decoder": ("DECODER", POOL, [*_COPIES, ("get_cache_tensors", (Use("blocks"), 1))]),
    "v1 prompt": (
        "PROMPT",
        POOL | {"listen_ip_info": "127.0.0.1:0"},
        [("transfer_cache_async", (Use("rows"), Always(), [TransferConfig(9, [1, 1, 1, 1])]))],
    ),
}


@pytest.fixture
def worlds() -> Iterator[tuple[World, World]]:
    """Two instances of this process, clusters 2 and 3, not started; afterwards nothing may be left."""
    ends = LocalEnd("ours"), LocalEnd("theirs")
    before = ends[0].do(baseline)
    yield ends[0].world, ends[1].world
    for end in ends:
        end.stop()
    assert settled(before) == before


@pytest.fixture
def peer(children: tuple[ChildEnd, ChildEnd]) -> Iterator[ChildEnd]:
    """Cluster 1 in a process of its own, with blocks and rows to pull."""
    end = children[0]
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **REMOTE)
    end.do(make, "blocks", Spec(blocks=True, blocks_key=BLOCKS), 1)
    end.do(make, "rows", Spec(), 2)
    yield end
    end.stop()


def refuses(manager: Any, calls: list[tuple[str, tuple[Any, ...]]], known: dict[str, Any], *named: str) -> None:
    """Make each call; it has to name both instances, and in its awaited form at once."""
    for name, given in calls:
        args = [known[each.name] if isinstance(each, Use) else each for each in given]
        for form in (name, f"{name}_async"):
            if not hasattr(manager, form):
                continue
            with pytest.raises(CacheError) as caught:
                getattr(manager, form)(*args)
            assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
            text = str(caught.value)
            assert text.startswith(f"{name}: ")
            assert [word for word in named if word not in text] == []


def populate(world: World, v1: bool, seed: int) -> dict[str, Any]:
    """Make the caches of a dialect; return their handles."""
    if v1:
        for name, blocks in (("blocks", True), ("rows", False)):
            kv_make(world, name, desc(), seed + blocks, blocks=blocks)
        return {name: world.memory[f"kv {name}"] for name in ("blocks", "rows")}
    for name, spec in CACHES.items():
        make(world, name, spec, seed)
    return dict(world.caches)


@pytest.mark.parametrize("earlier", [False, True], ids=["of another instance", "of an earlier init"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_foreign_or_stale_handle_is_refused(
    worlds: tuple[World, World], peer: ChildEnd, dialect: str, earlier: bool
) -> None:
    ours, v1 = worlds[0], dialect != "v2"
    role, settings, calls = DIALECTS[dialect]
    for number, world in enumerate(worlds):
        world.start(role, 2 + number, make_config(**settings))
    handles = [populate(world, v1, number) for number, world in enumerate(worlds)]
    old, own = ours.dd.incarnation[:8], handles[0]
    if earlier:
        finalize_and_init(ours, make_config(**settings))
        own = populate(ours, v1, 5)
    maker = f"cluster 2 (incarnation {old})" if earlier else "cluster 3 (incarnation "
    named = f"cluster 2 (incarnation {ours.dd.incarnation[:8]})", maker
    if not v1:
        assert ours.dd.link_clusters([info(1, peer.port)], 10_000) == SUCCESS
    rows = CacheKeyByIdAndIndex(1, peer.do(cache_id, "rows"), 0)
    memory = np.zeros((4, 8 * 48), np.uint8)
    cpu = (KvCache if v1 else Cache).create_cpu_cache(CACHES["host"].desc, [row.ctypes.data for row in memory])
    known = handles[0 if earlier else 1] | {"cpu": cpu, "peer's rows": rows}
    known |= {"own blocks": own["blocks"], "own rows": own["rows"]}
    known["key config"] = [TransferWithCacheKeyConfig(BLOCKS, range(1), range(1))]
    before = picture(ours), [show(world, name) for world in worlds for name in world.caches]
    there = [peer.do(show, name) for name in ("blocks", "rows")]
    refuses(ours.dd.kv_cache_manager if v1 else ours.cm, calls, known, *named)
    for now, was in zip((show(w, n) for w in worlds for n in w.caches), before[1], strict=True):
        same_bytes(now, was)
    for name, was in zip(("blocks", "rows"), there, strict=True):
        same_bytes(peer.do(show, name), was)
    assert picture(ours) == before[0]
    assert not memory.any()


@pytest.mark.gpu
def test_a_cache_over_user_memory_swaps_with_every_instance(gpu: bool, worlds: tuple[World, World]) -> None:
    cpu: Cache | None = None
    for number, world in enumerate(worlds):
        world.start("DECODER", 2 + number, make_config(gpu=gpu))
        source = make(world, "blocks", CACHES["blocks"], 7 + number)
        cpu = cpu or cpu_cache(world, "cpu", CACHES["host"].desc)
        world.cm.swap_blocks(world.caches["blocks"], cpu, {3: 5})
        same_bytes([tensor[5] for tensor in show(worlds[0], "cpu")], [tensor[3] for tensor in source])


def test_no_two_inits_use_one_cache_id_and_an_earlier_ones_grants_are_finalized(worlds: tuple[World, World]) -> None:
    ids = []
    for number, world in enumerate(worlds):
        world.start("MIX", 2 + number, make_config())
    for _ in range(2):
        for world in worlds:
            make(world, "blocks", CACHES["blocks"], 1)
            make(world, "registered", Spec(memory="private"), 1)
            ids += [world.caches[name].cache_id for name in ("blocks", "registered")]
            stale, granting = world.caches["registered"], world.caches["blocks"]
            given = granting.grant([1], LONG)
            finalize_and_init(world, make_config())
            make(world, "blocks", CACHES["blocks"], 1)
            with pytest.raises(StateError, match="finalized") as caught:
                granting.grant([1], LONG)
            assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
            assert (given.active, given.end) == (False, "finalized")
            given.revoke()
            kept = make(world, "registered", Spec(memory="private"), 2)
            world.cm.unregister_cache(stale.cache_id)  # which names nothing here
            same_bytes(show(world, "registered"), kept)
            assert world.dd.statistics().caches.registered == 1
            ids.append(world.caches["registered"].cache_id)
    assert len(set(ids)) == len(ids)


_PACKAGE: Final = str(Path(llm_datadist.__file__).parent)
_CONTROL: Final = "llm-datadist-control"
_SERVED: Final = BlocksCacheKey(1, 0)
_HELD: Final = CacheKey(2, 77)
ROUNDS: Final = 30


class Things:
    """One of each thing that can be given back, and giving them back."""

    def __init__(self, world: World, there: ChildEnd, other: LLMDataDist | None = None) -> None:
        self._world, self._there, self._other = world, there, other
        self._token = secrets.token_bytes(16)
        self.grant: Grant = world.caches["kv"].grant([0], LONG)
        there.do(grant, [1], LONG, "served", self._token)
        self.claimed = world.cm.claim_grant(1, self._token)
        self.keyed = world.cm.allocate_cache(Spec(tensors=1, rows=1).desc, [_HELD])
        self.blocks = world.cm.allocate_blocks_cache(Spec(tensors=1, blocks=True).desc)

    def give_back(self) -> None:
        """What the ``__del__`` of a user does."""
        self.grant.revoke()
        self.claimed.release()
        self._world.cm.deallocate_blocks_cache(self.blocks)
        self._world.cm.deallocate_cache(self.keyed)
        self._world.cm.remove_cache_key(_HELD)
        if self._other is not None:
            self._other.finalize()

    def check_gone(self) -> None:
        assert not self.grant.active
        assert self.grant.end == "revoked"
        assert self.keyed.tensor_addrs == self.blocks.tensor_addrs == []
        assert self._other is None or "not initialised" in repr(self._other)
        wait_until(lambda: self._there.do(tell, self._token.hex(), "released"))


class AtLine:
    """Calls a function at the n-th line of the library that a call runs, as the collector might."""

    def __init__(self, wanted: int, function: Callable[[], None], *beside: str) -> None:
        self._files = (_PACKAGE, *beside)
        self._wanted = wanted
        self._function = function
        self.seen = 0

    def __call__(self, call: Callable[[], object]) -> None:
        with traced(self._trace):
            call()
        if self.seen < self._wanted:  # a call that waits has fewer lines at times
            self._function()

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self._wanted:
                self._function()
        return self._trace


@dataclass
class Verb:
    call: Callable[[World, ChildEnd], Any]
    after: Callable[[World, ChildEnd, Any], object] = lambda world, there, result: None


def _send_layers(world: World, _: ChildEnd) -> None:
    config = TransferWithCacheKeyConfig(_SERVED, range(1), range(1))
    assert world.cm.transfer_cache_async(world.caches["kv"], Always(), [config], [0], [0]).synchronize() == SUCCESS[0]


VERBS: Final[dict[str, Verb]] = {
    "grant": Verb(lambda w, _: w.caches["kv"].grant([1], LONG), lambda w, _, grant: grant.revoke()),
    "allocate and bind": Verb(
        lambda w, _: w.cm.allocate_cache(Spec(rows=2).desc, [CacheKey(2, 1), CacheKey(2, 2)]),
        lambda w, _, cache: _forget(w, cache),
    ),
    "register": Verb(
        lambda w, _: w.cm.register_blocks_cache(w.caches["kv"].cache_desc, list(w.caches["kv"].tensor_addrs)),
        lambda w, _, cache: w.cm.unregister_cache(cache.cache_id),
    ),
    "deallocate": Verb(lambda w, _: w.cm.deallocate_cache(w.cm.allocate_cache(Spec(rows=2).desc))),
    "revoke": Verb(lambda w, _: w.caches["kv"].grant([1], LONG).revoke()),
    "pull_blocks": Verb(lambda w, _: w.cm.pull_blocks(_SERVED, w.caches["kv"], [0], [0])),
    "push_blocks": Verb(lambda w, _: w.cm.push_blocks(_SERVED, w.caches["kv"], [0], [0])),
    "copy_blocks": Verb(lambda w, _: w.cm.copy_blocks(w.caches["kv"], {0: [1]})),
    "transfer_cache_async": Verb(_send_layers),
    "statistics": Verb(lambda w, _: (w.dd.statistics(), repr(w.dd))),
}


def _forget(world: World, cache: Any) -> None:
    world.cm.deallocate_cache(cache)
    for request in (1, 2):
        world.cm.remove_cache_key(CacheKey(2, request))


@pytest.fixture
def ends(children: tuple[ChildEnd, ChildEnd]) -> Iterator[tuple[LocalEnd, ChildEnd]]:
    """Two linked ends with caches; new threads of this process have the trace that was set before they start."""
    here, there = LocalEnd("here"), children[0]
    try:
        for end, role, cluster_id in ((there, "PROMPT", 1), (here, "DECODER", 2)):
            end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
        there.do(make, "served", Spec(tensors=2, blocks=True, blocks_key=_SERVED), 3)
        here.do(make, "kv", Spec(tensors=2, blocks=True, blocks_key=BlocksCacheKey(2, 0)), 5)
        assert here.do(link, [info(1, there.port)]) == SUCCESS
        yield here, there
    finally:
        here.stop()
        there.stop()


@pytest.mark.parametrize("name", VERBS)
def test_what_a_finalizer_gives_back_at_any_line_is_gone_after_it(ends: tuple[LocalEnd, ChildEnd], name: str) -> None:
    (here, there), verb = ends, VERBS[name]
    world = here.world

    def once(at: AtLine) -> None:
        results: list[Any] = []
        at(lambda: results.append(verb.call(world, there)))
        verb.after(world, there, results[0])

    once(AtLine(0, lambda: None))
    once(counted := AtLine(0, lambda: None))  # the second time: more is kept
    used = [pool.used_bytes for pool in world.dd.statistics().pools]
    for point in range(1, counted.seen + 1):
        things = Things(world, there, live(9, **small_pool()) if point % 8 == 0 else None)
        once(AtLine(point, things.give_back))
        things.check_gone()
        world.dd.check_integrity()
    assert [pool.used_bytes for pool in world.dd.statistics().pools] == used
    assert counted.seen > 20


@pytest.mark.parametrize("call", ["init", "finalize"])
def test_what_a_finalizer_gives_back_in_init_and_finalize_is_gone(ends: tuple[LocalEnd, ChildEnd], call: str) -> None:
    (here, there), made, options = ends, live(9, **small_pool()), make_config(**small_pool())

    def once(at: AtLine) -> None:
        if call == "finalize":
            made.init(options)
            at(made.finalize)
        else:
            at(lambda: made.init(options))

    made.finalize()
    once(counted := AtLine(0, lambda: None))
    made.finalize()
    for point in range(1, counted.seen + 1, 11):
        things = Things(here.world, there, made)
        once(AtLine(point, things.give_back))
        things.check_gone()


def test_inside_of_another_call_a_revoke_is_put_off_and_what_returns_a_promise_is_refused(end: LocalEnd) -> None:
    end.start("PROMPT", 1)
    make(end.world, "kv", Spec(blocks=True), 1)
    cache, seen = end.world.caches["kv"], []
    grant = cache.grant([0], LONG)

    def revoke() -> None:
        grant.revoke()
        seen.append(grant.active)

    AtLine(5, revoke)(lambda: cache.grant([1], LONG))
    assert seen == [True]
    assert grant.end == "revoked"
    refused: dict[str, Any] = {
        "unregister_cache": lambda: end.world.cm.unregister_cache(7),
        "unlink_clusters": lambda: end.world.dd.unlink_clusters([info(1, 1)], 100),
        "unlink": lambda: end.world.dd.unlink(7),
    }
    for name, call in refused.items():
        texts: list[str] = []

        def attempt(call: Callable[[], object] = call, texts: list[str] = texts) -> None:
            with pytest.raises(StateError) as caught:
                call()
            texts.append(str(caught.value))

        AtLine(5, attempt)(lambda: cache.grant([1], LONG))
        assert texts == [
            f"{name}: called by a finalizer or a callback inside of another call of this library: it would have to "
            "wait for that; call it after that one, or from another thread"
        ]


class InControlThread:
    """Calls functions in a thread, each at a line of the library further on, as the collector might."""

    def __init__(self, name: str = _CONTROL) -> None:
        self._name = name
        self.functions: list[Callable[[], None]] = []
        self.done = 0
        self._skip = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        inside = threading.current_thread().name.startswith(self._name)
        if not inside or not frame.f_code.co_filename.startswith(_PACKAGE):
            return None
        if event == "line" and self.functions:
            self._skip -= 1
            if self._skip < 0:
                self.done += 1
                self._skip = 7 * self.done
                self.functions.pop()()
        return self


@pytest.fixture
def trace() -> Iterator[InControlThread]:
    """The trace of threads that start from now on."""
    trace = InControlThread()
    threading.settrace(trace)
    yield trace
    threading.settrace(None)
    trace.functions = []


def test_what_a_finalizer_gives_back_in_the_control_thread_is_gone_soon(
    trace: InControlThread, ends: tuple[LocalEnd, ChildEnd]
) -> None:
    (here, there), errors = ends, []
    threading.settrace(None)

    def finalize() -> None:
        with pytest.raises(StateError, match="control thread") as caught:
            here.world.dd.finalize()
        errors.append(caught.value)

    for _ in range(ROUNDS):
        things = Things(here.world, there)
        trace.functions = [finalize, things.give_back]
        while trace.functions:
            token = here.world.caches["kv"].grant([1], LONG).token
            there.do(claim, token, 1, 2)
            there.do(tell, "claimed", "release")
        wait_until(lambda things=things: not things.grant.active)  # type: ignore[misc]
        wait_until(lambda things=things: not things.keyed.tensor_addrs)  # type: ignore[misc]
        things.check_gone()
    assert len(errors) == ROUNDS
    here.world.dd.check_integrity()


def test_a_second_finalize_waits_for_the_first_and_a_switch_role_beside_it_does_not() -> None:
    datadist, peer = live(1, **LISTENING), live(2)
    assert peer.link_clusters([info(1, datadist.listen_port)]) == SUCCESS
    inside, may, order = threading.Event(), threading.Event(), []

    def lost(*_: object) -> None:
        inside.set()
        assert may.wait(60)
        order.append("closed")

    def finalize() -> None:
        datadist.finalize()
        order.append("returned")

    datadist.on_peer_lost(lost)
    first = Call(finalize)
    assert inside.wait(60)
    refused = Call(datadist.switch_role, LLMRole.MIX).outcome()
    assert type(refused) is NotInitialized
    second = Call(finalize)
    again = Call(datadist.init, make_config(**LISTENING))
    may.set()
    for each in (first, second, again):
        each.result()
    assert order.index("returned") == len(order) - 2, "the callback may come twice"
    datadist.finalize()
    peer.finalize()


# --- stores and their clients -----------------------------------------------------------------------------------------
def store_threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("llm-datadist-store")]


def client_of(datadist: LLMDataDist, port: int | None = 9) -> StoreClient:
    return StoreClient(datadist, f"127.0.0.1:{port}", bytes(32))


def test_inside_of_another_call_a_store_and_a_client_are_closed_when_it_ends() -> None:
    datadist, server = live(1), StoreServer(1 << 20)
    client, seen = client_of(datadist), []
    assert len(store_threads()) == 9

    def close() -> None:
        client.close()
        server.close()
        seen.append((len(store_threads()), "not initialised" in repr(server.datadist)))

    AtLine(5, close)(datadist.statistics)
    assert seen == [(9, False)]
    assert (store_threads(), "not initialised" in repr(server.datadist)) == ([], True)
    for each in (client, server):
        each.close()
        with each:
            pass
    datadist.finalize()


@pytest.mark.parametrize("name", [_CONTROL, "llm-datadist-store-save"])
def test_a_store_refuses_to_close_where_it_would_wait_for_itself_and_a_client_closes_there(name: str) -> None:
    trace, errors = InControlThread(name), []
    threading.settrace(trace)
    server, datadist = StoreServer(1 << 20), live(1)
    threading.settrace(None)
    client, other = client_of(datadist, server.port), client_of(datadist)
    assert client.connect(20)
    cache = datadist.cache_manager.allocate_blocks_cache(DESC)

    def close() -> None:
        other.close()
        with pytest.raises(StateError, match="call it from another thread") as caught:
            server.close()
        errors.append(str(caught.value))

    trace.functions = [close]
    while trace.functions:
        client.save([secrets.token_bytes(8)], cache, [0])
    wait_until(lambda: len(store_threads()) == 9)
    assert f"called in {name}" in errors[0]
    client.close()
    server.close()
    datadist.finalize()


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("kind", [StoreServer, StoreClient])
def test_an_interrupted_constructor_leaves_nothing(kind: type[StoreServer | StoreClient]) -> None:
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)
        raise Interrupted

    def interrupt() -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        else:
            interrupt_main(signal.SIGUSR1, lambda: bool(came))

    def census() -> tuple[int, int]:
        gc.collect()
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    datadist, usual = live(1), signal.signal(signal.SIGUSR1, handler)
    made: list[Any] = []

    def make() -> None:
        made.append(StoreServer(1 << 20) if kind is StoreServer else client_of(datadist))

    try:
        counted = AtLine(0, lambda: None, threading.__file__)
        counted(make)
        made.pop().close()
        before, cut = census(), 0
        for point in range(1, counted.seen, 1 + counted.seen // 60):
            came.clear()
            with pytest.raises(Interrupted):
                AtLine(point, interrupt, threading.__file__)(make)
            for whole in made:  # fewer lines this time: the signal came after them
                whole.close()
            cut += not made
            made.clear()
            # Fewer: a thread of an earlier test has ended since.
            wait_until(lambda: all(now <= then for now, then in zip(census(), before, strict=True)))
        assert cut > 20
    finally:
        signal.signal(signal.SIGUSR1, usual)
        datadist.finalize()


def test_an_interrupted_call_of_a_store_does_not_end_it() -> None:
    """Regression: what undoes a constructor ended the store after any call."""
    came: list[int] = []

    def handler(number: int, _: object) -> None:
        came.append(number)
        raise Interrupted

    server, usual = StoreServer(1 << 20), signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(Interrupted):
            AtLine(2, lambda: interrupt_main(signal.SIGUSR1, lambda: bool(came)))(server.statistics)
    finally:
        signal.signal(signal.SIGUSR1, usual)
    assert server.port > 0
    server.close()


def test_the_thread_of_a_client_that_nobody_keeps_ends() -> None:
    datadist = live(1)
    client_of(datadist)

    def gone() -> bool:
        gc.collect()  # errors of dials, with their frames
        return not store_threads()

    wait_until(gone)
    datadist.finalize()
