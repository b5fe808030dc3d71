"""init, finalize, init again; several instances; managers that are stale (interface §3.1, §3.2)."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
)
from llm_datadist._links.messages import CONTROL_PREAMBLE
from llm_datadist.cache_manager import CacheManager
from llm_datadist.errors import NotInitialized, StateError
from llm_datadist.views import tensor_views
from tests.support.linking import SUCCESS, info
from tests.support.moves import wait_until
from tests.support.strangers import listener
from tests.support.world import make_config, residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.covers(
    "CacheManager",
    "tensor_views",
    "LLMDataDist: cache_manager finalize init listen_port llm_engine_instance",
    "LLMStatusCode.LLM_ENGINE_FINALIZED",
    "errors.NotInitialized",
)

DESC: Final = CacheDesc(2, [4, 16], DataType.DT_FLOAT)
HOST_DESC: Final = CacheDesc(2, [4, 16], DataType.DT_FLOAT, Placement.HOST)
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


# --- several instances ------------------------------------------------------------------------------------------------


def test_r20_instances_are_independent_and_the_last_live_one_is_the_engine_instance() -> None:
    first, second, third = (live(cluster_id, **LISTENING) for cluster_id in (1, 2, 3))
    assert LLMDataDist.llm_engine_instance is third
    assert len({each.listen_port for each in (first, second, third)}) == 3
    assert [each.cache_manager.allocate_cache(DESC).cache_id for each in (first, second, third)] == [1, 1, 1]
    for here in (first, third):
        assert here.link_clusters([info(2, second.listen_port)]) == SUCCESS
    second.finalize()
    assert LLMDataDist.llm_engine_instance is third
    third.finalize()
    assert LLMDataDist.llm_engine_instance is first
    assert first.cache_manager.allocate_cache(DESC).cache_id == 2
    wait_until(lambda: first.statistics().links == ())
    second.init(make_config())
    assert LLMDataDist.llm_engine_instance is second, "one that came before is it again"
    second.finalize()
    first.finalize()


def _v2(datadist: LLMDataDist, blocks: bool) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    manager = datadist.cache_manager
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    deallocate = manager.deallocate_blocks_cache if blocks else manager.deallocate_cache
    return allocate, deallocate, lambda: datadist.statistics().caches.live


def _v1(datadist: LLMDataDist, blocks: bool) -> tuple[Any, Callable[[Any], None], Callable[[], Any]]:
    manager = datadist.kv_cache_manager
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    return allocate, manager.deallocate_cache, lambda: datadist.statistics().caches.live


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("calls", [_v1, _v2])
def test_r20_a_handle_of_another_instance_or_of_an_earlier_init_gives_nothing_back(
    calls: Any, blocks: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {"enable_cache_manager": calls is _v2}
    first, second = live(1, **settings), live(2, **settings)
    allocate, deallocate, count = calls(first, blocks)
    ours, theirs = allocate(DESC), calls(second, blocks)[0](DESC)
    assert ours.cache_id == theirs.cache_id == 1
    deallocate(theirs)
    assert (count(), second.statistics().caches.live) == (1, 1)
    first.finalize()
    first.init(make_config(**settings))
    allocate, deallocate, count = calls(first, blocks)
    again = allocate(DESC)
    deallocate(ours)
    assert (again.cache_id, count()) == (1, 1)
    assert caplog.text.count("was made by another LLMDataDist, or before finalize") == 2
    deallocate(again)
    assert count() == 0
    calls(second, blocks)[1](theirs)  # it has lost nothing
    assert second.statistics().caches.live == 0
    first.finalize()
    second.finalize()


# --- init and finalize ------------------------------------------------------------------------------------------------


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


def test_i14_i11_init_again_on_the_same_port_with_peers_each_time() -> None:
    server, client = live(1, **LISTENING), live(2)
    listen = {"listen_ip_info": f"127.0.0.1:{server.listen_port}"}
    for _ in range(3):
        assert client.link_clusters([info(1, server.listen_port)]) == SUCCESS
        assert server.cache_manager.allocate_cache(DESC, [CacheKey(1, 1)]).cache_id == 1
        server.finalize()
        server.init(make_config(**listen))
        wait_until(lambda: client.statistics().links == ())
    client.finalize()
    server.finalize()


def test_threads_that_init_and_finalize_one_object_make_one_engine() -> None:
    for _ in range(5):
        datadist = LLMDataDist(LLMRole.MIX, 1)
        managers: list[CacheManager] = []

        def init(datadist: LLMDataDist = datadist, managers: list[CacheManager] = managers) -> None:
            datadist.init(make_config())
            managers.append(datadist.cache_manager)

        for target in (init, datadist.finalize):
            threads = [threading.Thread(target=target) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert len(managers) == 4
        assert len(set(map(id, managers))) == 1


def test_finalize_during_a_handshake_ends_it_with_a_code() -> None:
    arrived, go = threading.Event(), threading.Event()

    def wait_and_hang_up(sock: socket.socket) -> None:
        arrived.set()
        go.wait(20)
        sock.shutdown(socket.SHUT_RDWR)

    datadist = live(2)
    told: list[Any] = []
    with listener(wait_and_hang_up) as port:
        caller = threading.Thread(target=lambda: told.append(datadist.link_clusters([info(1, port)], 20_000)))
        caller.start()
        arrived.wait(20)
        datadist.finalize()
        go.set()
        caller.join()
    assert told == [(LLMStatusCode.LLM_LINK_FAILED, [LLMStatusCode.LLM_LINK_FAILED])]


def test_finalize_amid_strangers_who_come_and_go_leaves_nothing() -> None:
    for _ in range(8):
        datadist = live(1, **LISTENING)
        address, over = ("127.0.0.1", datadist.listen_port), threading.Event()

        def storm(address: tuple[str, int | None] = address, over: threading.Event = over) -> None:
            while not over.is_set():
                with suppress(OSError), socket.create_connection(address, 0.1) as sock:
                    sock.sendall(CONTROL_PREAMBLE[:7])

        strangers = [threading.Thread(target=storm) for _ in range(3)]
        for stranger in strangers:
            stranger.start()
        datadist.finalize()
        over.set()
        for stranger in strangers:
            stranger.join()


# --- what is not initialised ------------------------------------------------------------------------------------------


CALLS: Final[dict[str, Callable[[LLMDataDist], object]]] = {
    "cache_manager": lambda dd: dd.cache_manager,
    "kv_cache_manager": lambda dd: dd.kv_cache_manager,
    "check_link_status": lambda dd: dd.check_link_status(1),
    "listen_port": lambda dd: dd.listen_port,
    "link_clusters": lambda dd: dd.link_clusters([info(1, 1)]),
    "unlink_clusters": lambda dd: dd.unlink_clusters([info(1, 1)]),
    "link_clusters_async": lambda dd: dd.link_clusters_async([info(1, 1)]),
    "unlink_clusters_async": lambda dd: dd.unlink_clusters_async([info(1, 1)]),
    "link": lambda dd: dd.link("name", {1: 0, 2: 1}, "{}"),
    "unlink": lambda dd: dd.unlink(1),
    "query_register_mem_status": lambda dd: dd.query_register_mem_status(1),
    "explain_communicator": lambda dd: dd.explain_communicator(1),
    "switch_role": lambda dd: dd.switch_role(LLMRole.PROMPT),
    "statistics": lambda dd: dd.statistics(),
    "explain": lambda dd: dd.explain(1),
    "check_integrity": lambda dd: dd.check_integrity(),
}


def test_before_init_and_after_finalize_every_call_is_a_runtime_error() -> None:
    usable_before_init = {"init", "finalize", "cluster_id", "llm_engine_instance"}
    assert {name for name in dir(LLMDataDist) if not name.startswith("_")} == usable_before_init | set(CALLS)
    datadist = LLMDataDist(LLMRole.MIX, 1)
    for _ in range(2):
        for name, call in CALLS.items():
            with pytest.raises(NotInitialized, match="not initialized") as caught:
                call(datadist)
            assert isinstance(caught.value, RuntimeError)
            assert name.removesuffix("_async") in str(caught.value)
        datadist.init(make_config())
        datadist.finalize()


# --- stale managers ---------------------------------------------------------------------------------------------------


def _cache(*, blocks: bool) -> Cache:
    return Cache.create_cpu_cache(HOST_DESC, [1 << 20, 2 << 20]) if blocks else Cache(1, DESC, [1 << 20, 2 << 20])


ROW, BLOCKS = _cache(blocks=False), _cache(blocks=True)
#: Every operation of a manager with arguments that have no fault.
OPERATIONS: dict[str, tuple[Any, ...]] = {
    "allocate_cache": (DESC, [CacheKey(1, 1)]),
    "deallocate_cache": (ROW,),
    "remove_cache_key": (CacheKey(1, 1),),
    "allocate_blocks_cache": (DESC, BlocksCacheKey(1)),
    "deallocate_blocks_cache": (BLOCKS,),
    "register_cache": (DESC, [1 << 20, 2 << 20]),
    "register_blocks_cache": (DESC, [1 << 20, 2 << 20]),
    "unregister_cache": (1,),
    "remap_registered_memory": ([MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1)],),
    "copy_cache": (ROW, ROW),
    "copy_blocks": (BLOCKS, {0: [1]}),
    "swap_blocks": (BLOCKS, BLOCKS, {0: 1}),
    "pull_cache": (CacheKeyByIdAndIndex(1, 1), ROW),
    "pull_blocks": (BlocksCacheKey(1), BLOCKS, [0], [1]),
    "push_cache": (CacheKeyByIdAndIndex(1, 1), ROW),
    "push_blocks": (BlocksCacheKey(1), BLOCKS, [0], [1]),
}
#: The forms to be awaited refuse where they are called.
_AWAITED: Final = ("copy_cache", "copy_blocks", "swap_blocks", "pull_cache", "pull_blocks", "push_cache", "push_blocks")
OPERATIONS |= {f"{name}_async": OPERATIONS[name] for name in _AWAITED} | {"transfer_cache_async": (ROW, None, [])}


def test_r21_a_stale_manager_refuses_every_operation_also_after_init_again() -> None:
    public = {name for name in dir(CacheManager) if not name.startswith("_")}
    assert public == set(OPERATIONS) | {"check_cache_key"}
    datadist = live(1, enable_remote_cache_accessible=True)
    stale = datadist.cache_manager
    assert datadist.cache_manager is stale
    datadist.finalize()
    before = None
    for _ in range(2):
        for name, arguments in OPERATIONS.items():
            with pytest.raises(StateError, match="finalized") as caught:
                getattr(stale, name)(*arguments)
            assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
        datadist.init(make_config(enable_remote_cache_accessible=True))
        assert datadist.cache_manager is not stale
        now = datadist.statistics()
        assert now == (before or now)
        before = now
    datadist.finalize()
