"""Every public call inside every callback: handlers, lost peers, synchronizers, loggers. Each ends in time."""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LayerSynchronizer,
    LLMDataDist,
    LLMException,
    LLMRole,
    MemInfo,
    Memtype,
    Placement,
    TransferConfig,
)
from llm_datadist.cache_manager import CacheManager
from llm_datadist.types.question import PeerQuestion
from tests.support.ends import ChildEnd
from tests.support.kinds import World
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info
from tests.support.moves import wait_until
from tests.support.world import make_config

pytestmark = pytest.mark.covers("LLMDataDist: answer_questions on_peer_lost", "CacheManager: transfer_cache_async")

BOUND: Final = 20.0  # seconds, for a call and what surrounds it
POOL: Final = '{"memory_size": 1048576, "page_shift": 12}'
DESC: Final = CacheDesc(2, [8, 1024], DataType.DT_INT8)
THEIRS: Final = BlocksCacheKey(3)
OPTIONS: Final = make_config(
    listen_ip_info="127.0.0.1:0", sync_kv_timeout=500, mem_pool_cfg=POOL, host_mem_pool_cfg=POOL
)


class Stage:
    """Cluster 1, on which callbacks act; cluster 2, which is lost; cluster 3, which stays. Made again where needed."""

    def __init__(self) -> None:
        self.dd, self.lost, self.stays = map(_new, (1, 2, 3))
        self.memory = np.zeros((2, 8 * 1024), np.int8)
        self.remapped = MemInfo(Memtype.MEM_TYPE_HOST, self.memory.ctypes.data, 8)
        self.addresses = [row.ctypes.data for row in self.memory]

    def set_up(self) -> None:
        for each in (self.dd, self.lost, self.stays):
            each.init(OPTIONS)  # does nothing where it is
        linked = {each.remote_cluster_id for each in self.dd.statistics().links}
        for each in (self.lost, self.stays):
            if each.cluster_id not in linked:
                assert self.dd.link_clusters([info(each.cluster_id, each.listen_port)], 10_000) == SUCCESS
        self.cm, self.port = self.dd.cache_manager, self.stays.listen_port
        self.cache = self.cm.allocate_blocks_cache(DESC)
        self.rows = self.cm.allocate_cache(CacheDesc(2, [2, 1024], DataType.DT_INT8))
        self.host = self.cm.allocate_blocks_cache(CacheDesc(2, [8, 1024], DataType.DT_INT8, Placement.HOST))
        self.theirs = self.stays.cache_manager.allocate_blocks_cache(DESC, THEIRS)
        self.target = TransferConfig(3, list(self.theirs.tensor_addrs), range(1))
        self.key = CacheKeyByIdAndIndex(3, self.theirs.cache_id, 0)

    def clear(self) -> None:
        for each in (self.dd, self.stays):
            if "not initialised" not in repr(each):
                manager = each.cache_manager
                for cache in (self.cache, self.host, self.theirs):
                    manager.deallocate_blocks_cache(cache)
                manager.deallocate_cache(self.rows)

    def close(self) -> None:
        for each in (self.dd, self.lost, self.stays):
            each.finalize()


def _new(cluster_id: int) -> LLMDataDist:
    return LLMDataDist(LLMRole.MIX, cluster_id)


#: Transfers and copies, which have a form for asyncio too.
MOVES: Final[dict[str, Callable[[Stage], tuple[Any, ...]]]] = {
    "pull_cache": lambda s: (s.key, s.rows),
    "pull_blocks": lambda s: (THEIRS, s.cache, [1], [2]),
    "push_cache": lambda s: (s.key, s.rows),
    "push_blocks": lambda s: (THEIRS, s.cache, [1], [2]),
    "copy_cache": lambda s: (s.rows, s.rows, 0, 1),
    "copy_blocks": lambda s: (s.cache, {0: [1]}),
    "swap_blocks": lambda s: (s.host, s.cache, {0: 1}),
}
#: Every public call: those of LLMDataDist, then those of CacheManager.
CALLS: Final[dict[str, Callable[[Stage], object]]] = {
    "init": lambda s: s.dd.init(OPTIONS),
    "finalize": lambda s: s.dd.finalize(),
    "switch_role": lambda s: s.dd.switch_role(LLMRole.MIX, {"llm.listenIpInfo": "127.0.0.1:0"}),
    "link_clusters": lambda s: s.dd.link_clusters([info(3, s.port)], 500),
    "connect": lambda s: s.dd.connect(f"127.0.0.1:{s.port}", 3, 500),
    "link_clusters_async": lambda s: s.dd.link_clusters_async([info(3, s.port)], 500).close(),
    "unlink_clusters": lambda s: s.dd.unlink_clusters([info(3, s.port)], 500),
    "unlink_clusters_async": lambda s: s.dd.unlink_clusters_async([info(3, s.port)], 500).close(),
    "drain": lambda s: s.dd.drain(50),
    "check_link_status": lambda s: s.dd.check_link_status(3),
    "link": lambda s: s.dd.link("name", {1: 0, 3: 1}, "{}"),
    "unlink": lambda s: s.dd.unlink(7),
    "query_register_mem_status": lambda s: s.dd.query_register_mem_status(7),
    "explain_communicator": lambda s: s.dd.explain_communicator(7),
    "statistics": lambda s: s.dd.statistics(),
    "explain": lambda s: s.dd.explain(3),
    "ask": lambda s: s.dd.ask(3, "none", b"", 500),
    "answer_questions": lambda s: s.dd.answer_questions("name", None),
    "on_peer_lost": lambda s: s.dd.on_peer_lost(lambda *_: None),
    "check_integrity": lambda s: s.dd.check_integrity(),
    "cluster_id": lambda s: s.dd.cluster_id,
    "cache_manager": lambda s: s.dd.cache_manager,
    "kv_cache_manager": lambda s: s.dd.kv_cache_manager,
    "listen_port": lambda s: s.dd.listen_port,
    "incarnation": lambda s: s.dd.incarnation,
    "allocate_cache": lambda s: s.cm.allocate_cache(DESC),
    "deallocate_cache": lambda s: s.cm.deallocate_cache(s.rows),
    "remove_cache_key": lambda s: s.cm.remove_cache_key(CacheKey(1, 5)),
    "allocate_blocks_cache": lambda s: s.cm.allocate_blocks_cache(DESC),
    "deallocate_blocks_cache": lambda s: s.cm.deallocate_blocks_cache(s.cache),
    "register_cache": lambda s: s.cm.register_cache(DESC, s.addresses),
    "register_blocks_cache": lambda s: s.cm.register_blocks_cache(DESC, s.addresses),
    "register_tensors": lambda s: s.cm.register_tensors([np.zeros((4, 64), np.uint8)]),
    "unregister_cache": lambda s: s.cm.unregister_cache(7),
    "remap_registered_memory": lambda s: s.cm.remap_registered_memory(s.remapped),
    "transfer_cache_async": lambda s: s.cm.transfer_cache_async(s.cache, Always(), [s.target]),
    "claim_grant": lambda s: s.cm.claim_grant(3, bytes(16), wait=False),
    "release_grant": lambda s: s.cm.release_grant(3, bytes(16)),
    "digest_blocks": lambda s: s.cm.digest_blocks(s.cache, [0], bytes(16)),
    **{name: lambda s, name=name: getattr(s.cm, name)(*MOVES[name](s)) for name in MOVES},  # type: ignore[misc]
    **{f"{name}_async": lambda s, name=name: getattr(s.cm, f"{name}_async")(*MOVES[name](s)).close() for name in MOVES},  # type: ignore[misc]
}


# --- callbacks: each function brings one about, in which ``act`` runs -------------------------------------------------
def in_handler(s: Stage, act: Callable[[], None]) -> None:
    def handler(_: PeerQuestion) -> bytes:
        act()
        return b""

    s.dd.answer_questions("act", handler)
    s.stays.ask(1, "act", b"", 10_000)


def _on_loss(s: Stage, act: Callable[[], None]) -> None:
    s.dd.on_peer_lost(lambda cluster_id, _: act() if cluster_id == 2 else None)


def in_loss_when_the_peer_ends(s: Stage, act: Callable[[], None]) -> None:
    _on_loss(s, act)
    s.lost.finalize()


def in_loss_by_unlink(s: Stage, act: Callable[[], None]) -> None:
    _on_loss(s, act)
    s.dd.unlink_clusters([info(2, s.lost.listen_port)], 5000)


def in_loss_by_finalize(s: Stage, act: Callable[[], None]) -> None:
    _on_loss(s, act)
    s.dd.finalize()


def in_synchronizer(s: Stage, act: Callable[[], None]) -> None:
    class Acting(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            act()
            return True

    s.cm.transfer_cache_async(s.cache, Acting(), [s.target]).synchronize(10_000)


class Acting(logging.Handler):
    """Acts on the first record of the thread that made it."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__()
        self._act, self._thread = act, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if record.thread == self._thread:
            self._act()


@contextmanager
def logged(act: Callable[[], None]) -> Iterator[None]:
    log, handler = logging.getLogger("LLM_DATADIST"), Acting(act)
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)


def in_logger_of_init(s: Stage, act: Callable[[], None]) -> None:
    s.dd.finalize()
    with logged(act):
        s.dd.init(OPTIONS)


def in_logger_of_finalize(s: Stage, act: Callable[[], None]) -> None:
    with logged(act):
        s.dd.finalize()


def in_logger_of_switch_role(s: Stage, act: Callable[[], None]) -> None:
    s.lost.finalize()
    s.stays.finalize()
    wait_until(lambda: not s.dd.statistics().links)
    with logged(act):
        s.dd.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})


def in_logger_of_a_pull(s: Stage, act: Callable[[], None]) -> None:
    with logged(act):
        s.cm.pull_blocks(THEIRS, s.cache, [1], [2])


CALLBACKS: Final = {
    function.__name__: function
    for function in (
        in_handler,
        in_loss_when_the_peer_ends,
        in_loss_by_unlink,
        in_loss_by_finalize,
        in_synchronizer,
        in_logger_of_init,
        in_logger_of_finalize,
        in_logger_of_switch_role,
        in_logger_of_a_pull,
    )
}


class Once:
    """Makes a call the first time; what came of it."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self.outcome = "not called"
        self.over = threading.Event()

    def __call__(self) -> None:
        call, self._call = self._call, None
        if call is None:
            return
        try:
            call()
            self.outcome = "returned"
        except LLMException as error:
            self.outcome = type(error).__name__
        except BaseException as error:  # noqa: BLE001 (it is judged by the test)
            self.outcome = f"untyped: {error!r}"
        self.over.set()


def walk(_: World, callback: str) -> dict[str, str]:
    """Make each call in a callback; return what came of them, up to the first that hangs."""
    stage, found = Stage(), {}
    for name, call in CALLS.items():
        stage.set_up()
        act = Once(partial(call, stage))
        ended = threading.Event()
        thread = threading.Thread(target=brought_about, args=(callback, stage, act, ended), daemon=True)
        thread.start()
        in_time = act.over.wait(BOUND) and ended.wait(BOUND)
        found[name] = act.outcome if in_time else f"hangs: {act.outcome}"
        if not in_time:
            return found
        stage.clear()
    stage.close()
    return found


def brought_about(callback: str, stage: Stage, act: Once, ended: threading.Event) -> None:
    with suppress(LLMException):  # the call may have ended what the callback was for
        CALLBACKS[callback](stage, act)
    ended.set()


@pytest.fixture
def child() -> Iterator[ChildEnd]:
    end = ChildEnd("stage")
    yield end
    end.kill()


@pytest.mark.parametrize("callback", CALLBACKS)
def test_each_call_in_a_callback_returns_or_is_refused_in_time(child: ChildEnd, callback: str) -> None:
    public = {name for kind in (LLMDataDist, CacheManager) for name in dir(kind) if name[0] != "_"}
    assert public - {"llm_engine_instance", "check_cache_key"} == CALLS.keys()
    found = child.do(walk, callback)
    assert {name: said for name, said in found.items() if said.startswith(("hangs", "untyped", "not"))} == {}
    assert found.keys() == CALLS.keys()
    if callback == "in_loss_by_finalize":
        assert {found["init"], found["switch_role"]} <= {"StateError", "NotInitialized"}
