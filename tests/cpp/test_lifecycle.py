"""Initialize, Finalize, links, roles, statuses and their reasons in the C++-shaped interface (interface §9, §3)."""

from __future__ import annotations

import copy
import logging
import pickle
import socket
import threading
from dataclasses import asdict, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import cpp_api
from llm_datadist.cpp_api import (
    OPTION_DEVICE_ID,
    OPTION_LOCAL_COMM_RES,
    Cache,
    CacheDesc,
    CacheIndex,
    CachePlacement,
    ClusterInfo,
    IpInfo,
    KvCacheExtParam,
    LlmDataDist,
    LlmRole,
    LLMStatusCode,
)
from llm_datadist.errors import NotInitialized, NotLinked, ParamError
from tests.support.cpp import (
    BAD,
    OK,
    Shape,
    attempt,
    cluster,
    dist,
    link,
    made,
    run,
    start,
    start_pair,
)
from tests.support.linking import alone
from tests.support.moves import Use, picture, same_bytes, show
from tests.support.refusals import RULE, TYPE, Spec, Table, bad, refuse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers(
    "cpp_api: CachePlacement ClusterInfo IpInfo LlmDataDist LlmRole OPTION_DEVICE_ID RegisterCfg Undefined",
    "cpp_api.LlmDataDist: Finalize Initialize LinkLlmClusters RegisterKvCache SetRole UnlinkLlmClusters datadist",
    "cpp_api.LlmDataDist: AllocateCache DeallocateCache UnregisterKvCache last_error",
)

FAILED = LLMStatusCode.LLM_FAILED
LISTEN_IP = cpp_api.OPTION_LISTEN_IP_INFO
LISTEN = {OPTION_DEVICE_ID: "0", LISTEN_IP: "127.0.0.1:0"}
CALLS = [name for name in vars(LlmDataDist) if name[0].isupper() and name not in ("Initialize", "Finalize")]


@pytest.fixture
def one(end: LocalEnd) -> Iterator[LlmDataDist]:
    """An LlmDataDist that is not initialised yet; the end sees that nothing of it is left."""
    made = LlmDataDist(1, LlmRole.kMix)
    end.world.memory["dist"] = made
    yield made
    made.Finalize()


def test_structs_enumerations_and_option_keys_are_those_of_the_header() -> None:
    desc, info = CacheDesc(), ClusterInfo()
    assert desc == CacheDesc(CachePlacement.kDevice, 0, cpp_api.DT_UNDEFINED, [])
    assert Cache() == Cache(-1, [], desc)
    assert KvCacheExtParam() == KvCacheExtParam((-1, -1), (-1, -1), 2)
    assert info == ClusterInfo(0, 0, [], [])
    assert IpInfo() == IpInfo("", 0)
    assert cpp_api.RegisterCfg() == cpp_api.RegisterCfg()
    info.local_ip_infos.append(IpInfo("1.2.3.4", 5))
    assert ClusterInfo().local_ip_infos == []
    assert {each.name: each.value for each in CachePlacement} == {"kHost": 0, "kDevice": 1}
    roles = {each.name: each.value for each in LlmRole}
    assert roles == {"kPrompt": 1, "kDecoder": 2, "kMix": 3, "kEnd": 4}
    options = {name: value for name, value in vars(cpp_api).items() if name.startswith("OPTION_")}
    assert options == {
        "OPTION_BUF_POOL_CFG": "llm.BufPoolCfg",
        "OPTION_DEVICE_ID": "llm.DeviceId",
        "OPTION_ENABLE_SET_ROLE": "llm.EnableSwitchRole",
        "OPTION_GLOBAL_RESOURCE_CONFIG": "llm.GlobalResourceConfig",
        "OPTION_LISTEN_IP_INFO": "llm.ListenIpInfo",
        "OPTION_LOCAL_COMM_RES": "llm.LocalCommRes",
        "OPTION_SYNC_CACHE_WAIT_TIME": "llm.SyncKvCacheWaitTime",
        "OPTION_TRANSFER_BACKEND": "llm.TransferBackend",
    }
    assert [name for name in cpp_api.__all__ if not hasattr(cpp_api, name)] == []
    assert [name for name in CALLS if not (getattr(LlmDataDist, name).__doc__ or "").strip()] == []


def test_initialize_and_finalize_are_repeatable_and_the_modes_are_forced(one: LlmDataDist) -> None:
    assert one.Finalize() is OK
    assert "not initialised" in repr(one)
    with pytest.raises(NotInitialized, match="Initialize"):
        one.datadist  # noqa: B018 (a property that raises)
    desc, memory = Shape(1, 2, 4).desc, np.zeros(8, np.int32)
    off = {"llm.EnableRemoteCacheAccessible": "0", "llm.EnableCacheManager": "0"}
    last = 0
    for _ in range(2):
        given = LISTEN | off
        assert one.Initialize(given) is OK
        assert given == LISTEN | off  # the caller's dict is the caller's
        engine, port = one.datadist._engine, one.datadist.listen_port
        assert engine is not None
        assert (engine.options.remote_accessible, engine.options.cache_manager) == (True, True)
        assert one.Initialize(LISTEN | {LISTEN_IP: "nonsense"}) is OK  # it does nothing
        assert (one.datadist._engine, one.datadist.listen_port) == (engine, port)
        assert "MIX cluster 1: 0 links" in repr(one)
        (status, first), again = [one.RegisterKvCache(desc, [memory.ctypes.data]) for _ in range(2)]
        assert first is not None
        assert (status, again) == (OK, (OK, first + 1))
        assert first > last, "no id of an earlier Initialize comes again"
        last = first + 1
        del engine
        assert one.Finalize() is OK
        assert one.Finalize() is OK


def test_initialize_has_a_status_for_its_options_the_constructors_arguments_and_what_the_system_refuses(
    one: LlmDataDist,
) -> None:
    rows: list[tuple[dict[str, str], tuple[str, ...]]] = [
        ({}, ("llm.DeviceId", "None")),
        *(({OPTION_DEVICE_ID: text}, ("llm.DeviceId", repr(text))) for text in ("", "x", "-1", "0;1")),
        ({OPTION_DEVICE_ID: str(2**31)}, ("2147483648",)),
        (LISTEN | {LISTEN_IP: "127.0.0.1:65536"}, ("65536",)),
        (LISTEN | {"llm.SyncKvCacheWaitTime": "0"}, ("llm.SyncKvCacheWaitTime", "'0'")),
        (LISTEN | {"llm.MemPoolConfig": "{}"}, ("memory_size",)),
    ]
    for options, parts in rows:
        assert one.Initialize(options) is BAD, options
        assert [part for part in parts if part not in str(one.last_error)] == [], one.last_error
    for cluster_id, role in ((-1, LlmRole.kMix), (2**64, LlmRole.kMix), (1, LlmRole.kEnd)):
        made = LlmDataDist(cluster_id, role)
        assert made.Initialize(LISTEN) is BAD
        assert isinstance(made.last_error, ParamError)
        assert made.Finalize() is OK
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert one.Initialize(LISTEN | {LISTEN_IP: address}) is FAILED
        assert address in str(one.last_error)
    assert one.Initialize(LISTEN) is OK


@pytest.mark.usefixtures("end")
def test_not_initialised_is_a_failure() -> None:
    made = LlmDataDist(2**64 - 1, LlmRole.kPrompt)
    for _ in range(2):  # before the first Initialize, and after Finalize
        for method in CALLS:  # before any argument is looked at
            call = getattr(made, method)
            result = call(**dict.fromkeys(signature(call).parameters))
            assert (result[0] if isinstance(result, tuple) else result) is FAILED
            assert isinstance(made.last_error, NotInitialized)
            assert method in str(made.last_error)
        assert made.Initialize(LISTEN) is OK
        assert made.datadist.cluster_id == 2**64 - 1
        assert made.Finalize() is OK


def test_the_reason_is_logged_in_one_line_and_kept_for_its_thread(
    one: LlmDataDist, caplog: pytest.LogCaptureFixture
) -> None:
    assert one.Initialize(LISTEN) is OK
    assert one.last_error is None
    with caplog.at_level(logging.WARNING, "LLM_DATADIST"):
        assert one.UnregisterKvCache(2**63) is BAD
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("UnregisterKvCache returns LLMStatusCode.LLM_PARAM_INVALID: cache_id: ")
    assert record.filename == "test_lifecycle.py"
    first = one.last_error
    assert isinstance(first, ParamError)

    def elsewhere() -> None:
        seen.append(one.last_error)
        one.PushKvBlocks(Cache(1), CacheIndex(7, 1), [0], [0])
        seen.append(one.last_error)

    seen: list[Exception | None] = []
    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert seen[0] is None
    assert "id 1" in str(seen[1])
    assert one.last_error is first
    assert one.UnregisterKvCache(1) is OK
    assert one.last_error is first  # of the last call that failed


def test_each_cluster_has_its_own_status_and_the_overall_one_is_the_last_failure(shm_pair: Pair) -> None:
    port = start_pair(shm_pair, linked=False)
    two_ips = ClusterInfo(3, remote_ip_infos=[IpInfo("127.0.0.1", port), IpInfo("127.0.0.1", port)])
    wrong = cluster(4, port)
    # A cluster id of zero is learned (interface R28).
    result = shm_pair.decoder.do(run, "LinkLlmClusters", [cluster(0, port), two_ips, wrong], 10_000)
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert result == (failed, [OK, BAD, failed])
    assert [each.remote_cluster_id for each in shm_pair.decoder.do(picture).links] == [1]
    for clusters, status, parts in (
        ([cluster(1, port)], "LLM_ALREADY_LINK", ["1 of 1 failed: clusters[0] LLM_ALREADY_LINK: already linked"]),
        ([cluster(1, port), two_ips, wrong], "LLM_LINK_FAILED", ["3 of 3", "[0] LLM_ALREADY_LINK: ", "id=4"]),
        ([two_ips], "LLM_PARAM_INVALID", ["1 of 1 failed: clusters[0] LLM_PARAM_INVALID: cluster 3 has 2 remote ips"]),
    ):
        assert shm_pair.decoder.do(run, "LinkLlmClusters", clusters, 10_000)[0].name == status
        text = str(shm_pair.decoder.do(_last_error))
        assert [part for part in parts if part not in text] == [], text
    assert shm_pair.decoder.do(run, "UnlinkLlmClusters", [cluster(1, port), two_ips], 10_000)[0] is BAD
    assert "1 of 2 failed: clusters[1] LLM_PARAM_INVALID: cluster 3" in str(shm_pair.decoder.do(_last_error))


def test_a_local_ip_is_needed_only_without_listener_and_local_comm_res(tcp_pair: Pair) -> None:
    decoder, silent = tcp_pair.decoder, {LISTEN_IP: ""}
    port = tcp_pair.prompt.do(start, LlmRole.kPrompt, 1, "tcp", {})
    decoder.do(start, LlmRole.kDecoder, 2, "tcp", silent)
    status, text = decoder.do(attempt, "LinkLlmClusters", [cluster(1, port)])
    assert (status, "clusters[0].local_ip_infos" in text) == (BAD, True), text
    info = ClusterInfo(1, 0, [IpInfo("127.0.0.1", 0)], [IpInfo("127.0.0.1", port)])
    assert decoder.do(run, "LinkLlmClusters", [info], 10_000) == (OK, [OK])
    assert decoder.do(run, "Finalize") is OK
    decoder.do(start, LlmRole.kDecoder, 2, "tcp", silent | {OPTION_LOCAL_COMM_RES: "{}"})
    link(decoder, 1, port)


def _last_error(world: World) -> Exception | None:
    return dist(world).last_error


def test_a_link_keeps_the_role_until_each_side_has_unlinked_by_force(shm_pair: Pair) -> None:
    port = start_pair(shm_pair)
    prompt, decoder = ends = (shm_pair.prompt, shm_pair.decoder)
    decoder.do(made, "kv", Shape(), 1)
    for end, *args in ((prompt, LlmRole.kDecoder), (decoder, LlmRole.kPrompt, LISTEN)):
        before = end.do(_port_and_role)
        assert end.do(attempt, "SetRole", *args)[0] is LLMStatusCode.LLM_EXIST_LINK
        assert end.do(_port_and_role) == before
    assert decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000, True) == (OK, [OK])
    assert decoder.do(picture).links == ()
    assert prompt.do(run, "UnlinkLlmClusters", [ClusterInfo(2)], 10_000, True) == (OK, [OK])
    alone(*ends)
    for force in (True, False):  # of what is not linked it is a success
        assert decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000, force) == (OK, [OK])
    assert decoder.do(run, "PullKvBlocks", CacheIndex(1, 1), Use("kv"), [1], [2]) is LLMStatusCode.LLM_NOT_YET_LINK
    assert isinstance(decoder.do(_last_error), NotLinked)
    same = {LISTEN_IP: f"127.0.0.1:{port}"}  # the listener is left alone where the address stays
    assert prompt.do(run, "SetRole", LlmRole.kMix, same) is OK
    assert prompt.do(_port_and_role) == (port, "MIX")
    link(decoder, 1, port)
    assert decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000) == (OK, [OK])
    alone(*ends)
    assert prompt.do(run, "SetRole", LlmRole.kMix, {}) is OK  # the same role is one, too
    assert prompt.do(_port_and_role) == (None, "MIX")


def _port_and_role(world: World) -> tuple[int | None, str]:
    return world.dd.listen_port, dist(world).datadist._role.name


def test_r01_set_role_refuses_what_is_no_role_and_no_options(end: LocalEnd) -> None:
    port = end.do(start, LlmRole.kPrompt, 1, "auto", {})
    options = (
        (TYPE, "key of {}", {1: "x"}),
        (TYPE, LISTEN_IP, {LISTEN_IP: 1}),
        (RULE, "ip:port", {LISTEN_IP: "127.0.0.1"}),
    )
    specs = {"role": Spec((1, "kMix"), (RULE, "kEnd", LlmRole.kEnd)), "options": Spec(("x",), *options)}
    refuse([end], Table("cpp.SetRole", {"role": LlmRole.kMix}, specs))
    assert end.do(_port_and_role) == (port, "PROMPT")


# --- memory: what is given out comes back -----------------------------------------------------------------------------


def _sent(cache: Cache) -> Any:
    data = pickle.dumps(cache)
    assert len(data) < 4096, "the bytes of the pool went along"
    return pickle.loads(data)


def test_a_copy_of_the_struct_is_the_same_fields_and_never_a_copy_of_the_memory(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.HostMemPoolConfig": ""})
    wanted = end.do(made, "kv", Shape(), 1)
    cache = end.world.memory["cache kv"]
    before = end.do(picture)
    ways: list[Callable[[Cache], Any]] = [copy.copy, copy.deepcopy, replace, asdict, _sent]
    for duplicate in ways:
        twin = duplicate(cache)
        given = twin if isinstance(twin, dict) else {name: getattr(twin, name) for name in ("cache_id", "tensor_addrs")}
        assert (given["cache_id"], given["tensor_addrs"]) == (cache.cache_id, cache.tensor_addrs), duplicate
        assert isinstance(twin, dict) or twin == cache
        assert duplicate is not copy.deepcopy or twin._memory is cache._memory
        del twin, given
    assert end.do(picture) == before  # it frees nothing either
    no_pool = bad(RULE, "llm.HostMemPoolConfig", cache_desc=Shape(placement=CachePlacement.kHost).desc)
    refuse([end], Table("cpp.AllocateCache", {}, {}, no_pool))
    assert dist(end.world).Finalize() is OK
    same_bytes(end.do(show, "kv"), wanted)  # the struct keeps the pool mapped


def test_deallocate_is_for_allocated_and_unregister_for_registered_caches(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {})
    for name, memory in (("kv", "private"), ("allocated", "pool"), ("other", "pool")):
        end.do(made, name, Shape(memory=memory), 1)
    assert end.do(run, "DeallocateCache", 1) is OK  # it is registered: this is not the call
    assert end.do(picture).caches.registered == 1
    for _ in range(2):  # the second time it is unknown, and that is no error
        assert end.do(run, "UnregisterKvCache", 1) is OK
        assert end.do(run, "DeallocateCache", 2) is OK
        now = end.do(picture)
        assert (now.caches.registered, now.caches.live, now.pools[0].used_bytes) == (0, 1, 4 * 4096)
