"""The C++-shaped interface: structs, statuses and their reasons, links, roles, memory; what only its transfers and
copies have; what each argument and each field of a struct must be (interface §9, §3, R1, R8, R10, R13, R14, R16, R17,
R26, R31)."""

import copy
import logging
import pickle
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from inspect import signature
from itertools import product
from typing import Any, Final
from unittest import mock

import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex, cpp_api
from llm_datadist.cpp_api import Cache, CacheIndex, ClusterInfo, IpInfo, KvCacheExtParam, LlmDataDist, LlmRole
from llm_datadist.errors import DeviceError, NotInitialized, NotLinked, ParamError
from tests.support import cpp, fakecuda, refusals
from tests.support.cpp import BAD, DEVICE, HOST, OK, Shape, attempt, cluster, dist, link, made, run, start, start_pair
from tests.support.kinds import LocalEnd, Pair, World
from tests.support.linking import SUCCESS, alone, info, redials, statistics, vanish
from tests.support.linking import link as link_v2
from tests.support.memory import FIXED_ADDRS
from tests.support.moves import Spec as CacheSpec
from tests.support.moves import Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.probe import Probe
from tests.support.refusals import GONE, MISMATCH, NONE, RULE, TYPE, Spec, Table, bad, integer, refuse, refuse_each
from tests.support.world import GPU_OPTION

pytestmark = [
    pytest.mark.covers(
        "cpp_api: CachePlacement ClusterInfo IpInfo LlmDataDist LlmRole OPTION_DEVICE_ID RegisterCfg Undefined Cache",
        "cpp_api: CacheDesc CacheIndex KvCacheExtParam",
        "cpp_api.LlmDataDist: Finalize Initialize LinkLlmClusters RegisterKvCache SetRole UnlinkLlmClusters datadist",
        "cpp_api.LlmDataDist: AllocateCache DeallocateCache UnregisterKvCache last_error CopyKvBlocks CopyKvCache",
        "cpp_api.LlmDataDist: PullKvBlocks PullKvCache PushKvBlocks PushKvCache",
    ),
    pytest.mark.gpu,
]

FAILED = cpp_api.LLMStatusCode.LLM_FAILED
LISTEN_IP = cpp_api.OPTION_LISTEN_IP_INFO
LISTEN = {cpp_api.OPTION_DEVICE_ID: "0", LISTEN_IP: "127.0.0.1:0"}
CALLS = [name for name in vars(LlmDataDist) if name[0].isupper() and name not in ("Initialize", "Finalize")]


@pytest.fixture
def one(end: LocalEnd) -> Iterator[LlmDataDist]:
    """An LlmDataDist that is not initialised yet; the end sees that nothing of it is left."""
    made = LlmDataDist(1, LlmRole.kMix)
    end.world.memory["dist"] = made
    yield made
    made.Finalize()


def test_structs_enumerations_and_option_keys_are_those_of_the_header() -> None:
    desc, info = cpp_api.CacheDesc(), ClusterInfo()
    assert desc == cpp_api.CacheDesc(cpp_api.CachePlacement.kDevice, 0, cpp_api.DT_UNDEFINED, [])
    assert Cache() == Cache(-1, [], desc)
    assert KvCacheExtParam() == KvCacheExtParam((-1, -1), (-1, -1), 2)
    assert info == ClusterInfo(0, 0, [], [])
    assert IpInfo() == IpInfo("", 0)
    assert cpp_api.RegisterCfg() == cpp_api.RegisterCfg()
    info.local_ip_infos.append(IpInfo("1.2.3.4", 5))
    assert ClusterInfo().local_ip_infos == []
    assert {each.name: each.value for each in cpp_api.CachePlacement} == {"kHost": 0, "kDevice": 1}
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
        engine, port = Probe(one.datadist).engine, one.datadist.listen_port
        assert (engine.options.remote_accessible, engine.options.cache_manager) == (True, True)
        assert one.Initialize(LISTEN | {LISTEN_IP: "nonsense"}) is OK  # it does nothing
        assert (Probe(one.datadist).engine, one.datadist.listen_port) == (engine, port)
        assert "MIX cluster 1: 0 links" in repr(one)
        (status, first), again = [one.RegisterKvCache(desc, [memory.ctypes.data]) for _ in range(2)]
        assert first is not None
        assert (status, again) == (OK, (OK, first + 1))
        assert first > last, "no id of an earlier Initialize comes again"
        last = first + 1
        del engine
        assert one.Finalize() is OK
        assert one.Finalize() is OK


def test_initialize_has_a_status_for_options_arguments_and_what_the_system_refuses(one: LlmDataDist) -> None:
    rows: list[tuple[dict[str, str], tuple[str, ...]]] = [
        ({}, ("llm.DeviceId", "None")),
        *(({cpp_api.OPTION_DEVICE_ID: text}, ("llm.DeviceId", repr(text))) for text in ("", "x", "-1", "0;1")),
        ({cpp_api.OPTION_DEVICE_ID: str(2**31)}, ("2147483648",)),
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


def test_the_reason_is_logged_and_kept_for_its_thread(one: LlmDataDist, caplog: pytest.LogCaptureFixture) -> None:
    assert one.Initialize(LISTEN) is OK
    assert one.last_error is None
    with caplog.at_level(logging.WARNING, "LLM_DATADIST"):
        assert one.UnregisterKvCache(2**63) is BAD
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("UnregisterKvCache returns LLMStatusCode.LLM_PARAM_INVALID: cache_id: ")
    assert record.filename == "test_cpp.py"
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
    """Regression: only the log told why a link call had failed."""
    port = start_pair(shm_pair, linked=False)
    two_ips = ClusterInfo(3, remote_ip_infos=[IpInfo("127.0.0.1", port), IpInfo("127.0.0.1", port)])
    wrong = cluster(4, port)
    # A cluster id of zero is learned (interface R28).
    result = shm_pair.decoder.do(run, "LinkLlmClusters", [cluster(0, port), two_ips, wrong], 10_000)
    failed = cpp_api.LLMStatusCode.LLM_LINK_FAILED
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
    assert shm_pair.decoder.do(run, "LinkLlmClusters", [cluster(0, port)], 10_000)[0] is OK
    assert shm_pair.decoder.do(run, "UnlinkLlmClusters", [cluster(0, port + 1)], 10_000)[0] is OK
    assert [each.remote_cluster_id for each in shm_pair.decoder.do(picture).links] == [1]
    assert shm_pair.decoder.do(run, "UnlinkLlmClusters", [cluster(0, port)], 10_000)[0] is OK
    assert shm_pair.decoder.do(picture).links == ()


def test_a_lost_link_too_is_unlinked_by_its_address(tcp_pair: Pair) -> None:
    port = start_pair(tcp_pair)
    tcp_pair.prompt.do(vanish)
    wait_until(lambda: [each.remote_cluster_id for each in tcp_pair.decoder.do(redials)] == [1])
    assert tcp_pair.decoder.do(run, "UnlinkLlmClusters", [cluster(0, port)], 10_000) == (OK, [OK])
    assert tcp_pair.decoder.do(redials) == ()


def test_a_link_that_the_peer_dialled_is_unlinked_by_the_address_that_was_asked_for(tcp_pair: Pair) -> None:
    both = {cpp_api.OPTION_TRANSFER_BACKEND: "hixl"}
    port = start_pair(tcp_pair, linked=False, options=both)
    link(tcp_pair.prompt, 2, tcp_pair.decoder.do(_port))
    assert tcp_pair.decoder.do(run, "LinkLlmClusters", [cluster(0, port)], 10_000) == (OK, [OK])
    assert tcp_pair.decoder.do(run, "UnlinkLlmClusters", [cluster(0, port)], 10_000) == (OK, [OK])
    assert tcp_pair.decoder.do(picture).links == ()


def _port(world: World) -> int:
    return dist(world).datadist.listen_port or 0


def test_a_local_ip_is_needed_only_without_listener_and_local_comm_res(tcp_pair: Pair) -> None:
    decoder, silent = tcp_pair.decoder, {LISTEN_IP: ""}
    port = tcp_pair.prompt.do(start, LlmRole.kPrompt, 1, "tcp", {})
    decoder.do(start, LlmRole.kDecoder, 2, "tcp", silent)
    status, text = decoder.do(attempt, "LinkLlmClusters", [cluster(1, port)])
    assert (status, "clusters[0].local_ip_infos" in text) == (BAD, True), text
    info = ClusterInfo(1, 0, [IpInfo("127.0.0.1", 0)], [IpInfo("127.0.0.1", port)])
    assert decoder.do(run, "LinkLlmClusters", [info], 10_000) == (OK, [OK])
    assert decoder.do(run, "Finalize") is OK
    decoder.do(start, LlmRole.kDecoder, 2, "tcp", silent | {cpp_api.OPTION_LOCAL_COMM_RES: "{}"})
    link(decoder, 1, port)


def _last_error(world: World) -> Exception | None:
    return dist(world).last_error


def test_a_link_keeps_the_role_until_each_side_has_unlinked_by_force(shm_pair: Pair) -> None:
    port = start_pair(shm_pair)
    prompt, decoder = ends = (shm_pair.prompt, shm_pair.decoder)
    decoder.do(made, "kv", Shape(), 1)
    for end, *args in ((prompt, LlmRole.kDecoder), (decoder, LlmRole.kPrompt, LISTEN)):
        before = end.do(_port_and_role)
        assert end.do(attempt, "SetRole", *args)[0] is cpp_api.LLMStatusCode.LLM_EXIST_LINK
        assert end.do(_port_and_role) == before
    assert decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000, True) == (OK, [OK])
    assert decoder.do(picture).links == ()
    assert prompt.do(run, "UnlinkLlmClusters", [ClusterInfo(2)], 10_000, True) == (OK, [OK])
    alone(*ends)
    for force in (True, False):  # of what is not linked it is a success
        assert decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000, force) == (OK, [OK])
    status = decoder.do(run, "PullKvBlocks", CacheIndex(1, 1), Use("kv"), [1], [2])
    assert status is cpp_api.LLMStatusCode.LLM_NOT_YET_LINK
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
    return world.dd.listen_port, repr(dist(world).datadist).split()[1]


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
    """Regression: a copied Cache took the pool along, because its memory was pickled."""
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
        del twin, given
    assert end.do(picture) == before  # it frees nothing either
    no_pool = bad(RULE, "llm.HostMemPoolConfig", cache_desc=Shape(placement=cpp_api.CachePlacement.kHost).desc)
    refuse([end], Table("cpp.AllocateCache", {}, {}, no_pool))
    same_bytes(end.do(show, "kv"), wanted)


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


@pytest.mark.parametrize("call", ["AllocateCache", "RegisterKvCache"])
def test_a_call_that_a_signal_interrupts_leaves_no_cache_that_nobody_knows(
    one: LlmDataDist, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: object) -> None:
        raise Interrupted

    def ringing(*args: Any, **more: Any) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return real(*args, **more)

    memory = np.zeros(8, np.int32)
    addresses = [] if call == "AllocateCache" else [[memory.ctypes.data]]
    assert one.Initialize(LISTEN | {"llm.MemPoolConfig": '{"memory_size": 1048576}'}) is OK
    store, verb = Probe(one.datadist).engine.caches, "allocate" if addresses == [] else "register"
    real = getattr(store, verb)
    monkeypatch.setattr(store, verb, ringing)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(Interrupted):
            getattr(one, call)(Shape(1, 2, 4).desc, *addresses)
    finally:
        signal.signal(signal.SIGUSR1, before)
    now = one.datadist.statistics()
    assert (now.caches.live, now.caches.registered, now.pools[0].used_bytes) == (0, 0, 0)


def test_an_allocation_without_memory_for_its_struct_leaves_no_cache(
    one: LlmDataDist, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert one.Initialize(LISTEN | {"llm.MemPoolConfig": '{"memory_size": 1048576}'}) is OK
    with monkeypatch.context() as patched:
        patched.setattr("llm_datadist.cpp_api.datadist.Cache", mock.Mock(side_effect=MemoryError))
        assert one.AllocateCache(Shape(1, 2, 4).desc) == (cpp_api.LLMStatusCode.LLM_OUT_OF_MEMORY, None)
    now = one.datadist.statistics()
    assert (now.caches.live, now.pools[0].used_bytes) == (0, 0)
    assert one.AllocateCache(Shape(1, 2, 4).desc)[0] is OK


ALL = (-1, -1)
KV = Use("kv")
ON_HOST = Shape(placement=HOST)
BLOCKS = CacheIndex(1, 1)


# --- what moves -------------------------------------------------------------------------------------------------------
#: What is pushed: (src layers, dst layers, tensors per layer), and the (dst, src) tensors that move of four.
PUSHES: dict[str, tuple[tuple[Any, ...], list[tuple[int, int]]]] = {
    "the first layer of one tensor": (((0, 0), (0, 0), 1), [(0, 0)]),
    "the last layer of one tensor": (((3, 3), (3, 3), 1), [(3, 3)]),
    "the first layer of two tensors": (((0, 0), (0, 0), 2), [(0, 0), (1, 1)]),
    "a layer that is the whole cache": (((0, 0), (0, 0), 4), [(t, t) for t in range(4)]),
    "pairs are inclusive and may differ between the ends": (((0, 1), (2, 3), 1), [(2, 0), (3, 1)]),
    "default source layers stand for all": ((ALL, (0, 1), 2), [(t, t) for t in range(4)]),
    "default destination layers stand for all": (((0, 0), ALL, 4), [(t, t) for t in range(4)]),
    "default layers move everything, 3 tensors per layer": ((ALL, ALL, 3), [(t, t) for t in range(4)]),
    "default layers move everything, 255 tensors per layer": ((ALL, ALL, 255), [(t, t) for t in range(4)]),
}


@pytest.mark.parametrize("there", [DEVICE, HOST])
@pytest.mark.parametrize("here", [DEVICE, HOST])
def test_r14_r16_r31_layers_move_between_all_placements(
    pair: Pair, here: cpp_api.CachePlacement, there: cpp_api.CachePlacement
) -> None:
    decoder, prompt = pair.decoder, pair.prompt
    start_pair(pair)
    mine, theirs = decoder.do(made, "kv", Shape(placement=here), 1), prompt.do(made, "kv", Shape(placement=there), 2)
    for at, (name, (ext, tensors)) in enumerate(PUSHES.items()):
        pairs = [(7 - at % 8, at % 8), (at % 8, 6 - at % 6)]
        sources, targets = [source for _, source in pairs], [target for target, _ in pairs]
        assert decoder.do(run, "PushKvBlocks", KV, BLOCKS, sources, targets, KvCacheExtParam(*ext)) is OK
        theirs = moved(theirs, mine, pairs, tensors)
        for got, wanted in zip(prompt.do(show, "kv"), theirs, strict=True):
            np.testing.assert_array_equal(got, wanted, err_msg=name)
    layers = KvCacheExtParam((1, 2), (0, 1), 1)
    if here is DEVICE:  # of kHost: tests/cpp/test_cpp.py
        assert decoder.do(run, "PushKvCache", KV, CacheIndex(1, 1, 7), 6, -1, layers) is OK
        theirs = moved(theirs, mine, [(7, 6)], [(0, 1), (1, 2)])
    assert decoder.do(run, "PullKvCache", CacheIndex(1, 1, 6), KV, 1, 17, layers) is OK
    mine = moved(mine, theirs, [(1, 6)], [(0, 1), (1, 2)], 17)
    # Pairs take effect in the order given: the last one wins.
    layers = KvCacheExtParam((1, 1), (0, 0), 2)
    assert decoder.do(run, "PullKvBlocks", BLOCKS, KV, [1, 2, 7, 6], [3, 4, 0, 3], layers) is OK
    mine = moved(mine, theirs, [(3, 1), (4, 2), (0, 7), (3, 6)], [(0, 2), (1, 3)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(prompt.do(show, "kv"), theirs)


@pytest.mark.parametrize(
    ("memory", "transport", "checksum"),
    [("pool", "auto", 0), ("inside", "auto", 0), ("private", "auto", 0), ("private", "tcp", 0), ("pool", "auto", 1)],
)
def test_one_cache_serves_as_rows_and_as_blocks(shm_pair: Pair, memory: str, transport: str, checksum: int) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_pair(shm_pair, transport=transport, options={"llm.Checksum": str(checksum)})
    mine, theirs = (end.do(made, "kv", Shape(memory=memory), at) for at, end in enumerate((decoder, prompt)))
    there = prompt.do(cpp.index, "kv")
    # Of the struct nothing else is read.
    only_id = Cache(decoder.do(cpp.index, "kv").cache_id, [1, 2, 3], cpp_api.CacheDesc(HOST, 77))
    for at in range(2):
        assert decoder.do(run, "PullKvBlocks", there, KV, np.array([1]), np.array([2 + at], np.uint64)) is OK
        assert decoder.do(run, "PullKvCache", there, only_id) is OK
        mine = moved(mine, theirs, [(2 + at, 1), (0, 0)])
        assert decoder.do(run, "PushKvBlocks", only_id, there, [2], [5 + at]) is OK
        assert decoder.do(run, "PushKvCache", KV, CacheIndex(1, there.cache_id, 3 + at), 6) is OK
        theirs = moved(theirs, mine, [(5 + at, 2), (3 + at, 6)])
    same_bytes(decoder.do(show, "kv"), mine)
    same_bytes(prompt.do(show, "kv"), theirs)
    found = decoder.do(statistics)
    assert found.links[0].resolved == 4  # once for each direction, of rows and of blocks
    assert found.links[0].verified_bytes == checksum * 4 * 2 * 4 * 64
    assert prompt.do(picture).pins == 0
    totals = {each.name: (each.count, each.errors, each.nbytes) for each in found.operations if each.name[0] == "P"}
    assert totals == dict.fromkeys(["PullKvBlocks", "PullKvCache", "PushKvBlocks", "PushKvCache"], (2, 0, 2 * 4 * 64))


def test_a_cache_manager_at_the_other_end_uses_it_too(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    port = prompt.do(start, LlmRole.kPrompt, 1, "shm", {})
    theirs = prompt.do(made, "kv", Shape(), 1)
    decoder.start("DECODER", 2, enable_remote_cache_accessible=True, extra={"llm.Transport": "shm"})
    assert decoder.do(link_v2, [info(1, port)]) == SUCCESS
    rows = decoder.do(make, "rows", CacheSpec(rows=8, stride=64), 2)
    blocks = decoder.do(make, "blocks", CacheSpec(rows=16, stride=32, blocks=True), 3)
    paged = decoder.do(make, "paged", CacheSpec(rows=8, stride=64, blocks=True), 4)
    decoder.do(call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 3), Use("rows"), 5)
    same_bytes(decoder.do(show, "rows"), moved(rows, theirs, [(5, 3)]))
    # A row of the peer in pieces of a block.
    decoder.do(call, "pull_blocks", CacheKeyByIdAndIndex(1, 1, 2), Use("blocks"), [], [9, 4])
    pieces = [tensor[2].reshape(2, 32) for tensor in theirs]
    same_bytes(decoder.do(show, "blocks"), moved(blocks, pieces, [(9, 0), (4, 1)]))
    decoder.do(call, "push_blocks", CacheKeyByIdAndIndex(1, 1), Use("paged"), [1, 2], [6, 7])
    decoder.do(call, "push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    same_bytes(prompt.do(show, "kv"), moved(moved(theirs, paged, [(6, 1), (7, 2)]), rows, [(0, 1)]))


# --- copies -----------------------------------------------------------------------------------------------------------
@pytest.mark.gpu
def test_r08_r13_r26_lists_take_effect_in_order_also_from_and_to_the_host(end: LocalEnd) -> None:
    random = np.random.default_rng(0)
    end.do(start, LlmRole.kMix, 1, "auto", {GPU_OPTION: "cuda"} if end.gpu else {})
    shapes = {"kv": Shape(rows=50), "other": Shape(rows=70), "host": Shape(rows=50, placement=HOST)}
    held = {name: end.do(made, name, shape, seed) for seed, (name, shape) in enumerate(shapes.items())}
    held["cpu"] = end.do(cpp.host_memory, "cpu", Shape(rows=60, placement=HOST), 3)
    # An id is looked up, and nothing else of the struct is read.
    assert end.do(run, "CopyKvBlocks", Cache(1, [1], cpp_api.CacheDesc(HOST, 9)), Cache(2), range(1, 2), [(2,)]) is OK
    assert end.do(run, "CopyKvCache", Cache(1, [1], cpp_api.CacheDesc(HOST, 9)), Cache(2), 3, 4) is OK
    assert end.do(run, "CopyKvCache", KV, Use("host"), 1, 2) is OK
    assert end.do(run, "CopyKvCache", KV, Use("other"), 5, 0, 9, 20) is OK
    held["other"] = moved(held["other"], held["kv"], [(2, 1), (4, 3)])
    for target, source in zip(held["other"], held["kv"], strict=True):
        target[0, 9:29] = source[5, 9:29]
    held["host"] = moved(held["host"], held["kv"], [(2, 1)])
    for _ in range(20):
        # Within "kv" the later pairs read what the earlier ones wrote.
        for of, to in (("kv", "other"), ("kv", "kv"), ("kv", "host"), ("cpu", "kv"), ("kv", "cpu"), ("host", "kv")):
            sources = random.integers(0, 50, int(random.integers(1, 40)))
            lists = random.integers(0, 50, (int(random.integers(1, 5)), len(sources)))
            assert end.do(run, "CopyKvBlocks", Use(of), Use(to), sources.tolist(), list(lists)) is OK
            for tensor, source in zip(held[to], held[of], strict=True):
                for row, block in zip(lists.flat, [*sources] * len(lists), strict=True):
                    tensor[row] = source[block]
            for name, wanted in held.items():
                same_bytes(end.do(show, name), wanted)
    # With a size, rows of unequal length will do (interface R8).
    wide = end.do(made, "wide", Shape(width=17), 4)
    assert end.do(run, "CopyKvCache", KV, Use("wide"), 0, 0, 0, 64) is OK
    same_bytes(end.do(show, "wide"), moved(wide, held["kv"], [(0, 0)]))


@pytest.mark.gpu(True)
def test_a_device_that_fails_is_a_status_and_not_an_exception(end: LocalEnd) -> None:
    end.do(start, LlmRole.kMix, 1, "auto", {GPU_OPTION: "cuda"})
    end.do(made, "kv", Shape(), 1)
    end.do(cpp.host_memory, "cpu", ON_HOST, 2)
    fakecuda.load().fail("cuMemcpyAsync", 999)
    status, text = end.do(attempt, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]])
    assert (status.name, "cuMemcpyAsync: CUDA_ERROR_UNKNOWN (999)" in text) == ("LLM_FAILED", True), text
    assert isinstance(dist(end.world).last_error, DeviceError)
    assert end.do(run, "CopyKvBlocks", Use("cpu"), KV, [0], [[0]]) is OK


def test_r06_a_copy_on_the_device_that_takes_too_long_times_out(end: LocalEnd) -> None:
    pool = '{"memory_size": 402653184}'
    end.do(start, LlmRole.kMix, 1, "auto", {"llm.SyncKvCacheWaitTime": "1", "llm.MemPoolConfig": pool})
    for name in ("src", "dst"):  # 64 MiB a block
        status, end.world.memory[f"cache {name}"] = end.do(run, "AllocateCache", Shape(1, 2, 16 << 20).desc)
        assert status is OK
    status, text = end.do(attempt, "CopyKvBlocks", Use("src"), Use("dst"), [0, 1], [[0, 1]] * 16)
    assert (status.name, "CopyKvBlocks" in text) == ("LLM_TIMEOUT", True), text
    end.world.dd.check_integrity()


THERE = CacheIndex(1, 1)
DESC = cpp_api.CacheDesc(DEVICE, 2, cpp_api.DataType.DT_INT32, [8, 16])
ADDRS = FIXED_ADDRS

# --- structs: what each field must not be, and what the error names ---------------------------------------------------
NO_STRUCT: Final = (1, "kv", (1, 1))
_PAIRS: Final = (0, (0,), (0, 0, 0), (0, 0.5), None, range(2))


def wrong(good: Any, **fields: Sequence[Any]) -> list[tuple[refusals.Kind, str, Any]]:
    """Return the struct with each value of each field; it is of a wrong type."""
    return [
        (NONE if value in (None, [None]) else TYPE, name, replace(good, **{name: value}))
        for name, values in fields.items()
        for value in values
    ]


DESCRIPTOR: Final = Spec(
    NO_STRUCT,
    *wrong(DESC, placement=[1, None], num_tensors=[2.0, None], data_type=[3, None], shape=[None, 8, [8.0], [None]]),
    (RULE, "num_tensors=0", replace(DESC, num_tensors=0)),
    (RULE, "num_tensors=4294967295", replace(DESC, num_tensors=2**32 - 1)),
    (RULE, "uint32", *(replace(DESC, num_tensors=number) for number in (-1, 2**32))),
    (RULE, "data_type=DT_UNDEFINED", replace(DESC, data_type=cpp_api.DT_UNDEFINED)),
    (RULE, "shape is empty", replace(DESC, shape=[])),
    (RULE, "shape: [8, -1]", replace(DESC, shape=[8, -1])),
    (RULE, "int64", replace(DESC, shape=[2**63])),
)
CACHE: Final = Spec(
    (*NO_STRUCT, THERE),
    *wrong(Cache(1), cache_id=["1", 1.0, None]),
    (RULE, "cache.cache_id", Cache(2**63)),
    (RULE, "int64", Cache(-(2**63) - 1)),
)
INDEX: Final = Spec(
    (*NO_STRUCT, Cache(1)),
    *wrong(THERE, cluster_id=["1", None], cache_id=[1.0, None], batch_index=["0"]),
    (RULE, "cluster_id", CacheIndex(-1, 1)),
    (RULE, "uint64", CacheIndex(2**64, 1)),
    (RULE, "cache_id", CacheIndex(1, 2**63)),
    (RULE, "batch_index", CacheIndex(1, 1, -1)),
    (RULE, "uint32", CacheIndex(1, 1, 2**32)),
)


def memory(addrs: Sequence[int] = (64, 64), **fields: Any) -> Cache:
    """Return host memory without an id, or what is none."""
    return Cache(-1, list(addrs), replace(DESC, **{"placement": HOST} | fields))


#: A side of CopyKvBlocks: a cache, or host memory without an id.
OPERAND: Final = Spec(
    CACHE.wrong,
    *CACHE.inner,
    (RULE, "cache_id=-1 on kDevice", memory(placement=DEVICE)),
    (RULE, "num_tensors=0", memory(num_tensors=0)),
    (RULE, "DT_UNDEFINED", memory(data_type=cpp_api.DT_UNDEFINED)),
    (RULE, "{}.cache_desc.shape is empty", memory(shape=[])),
    (RULE, "-16", memory(shape=[8, -16])),
    (RULE, "{}.tensor_addrs has 3", memory([64] * 3)),
    (RULE, "{}: tensor_addrs[1]=0", memory([64, 0])),
    (RULE, "{}: tensor_addrs[0]=0x40: its 512 bytes must be mapped", memory()),
    (RULE, "{}.tensor_addrs[1]", memory([64, -1])),
    (RULE, "address space", memory([64, 2**64 - 8])),
    *((RULE, f"{{}}.cache_id={number}", Cache(number, ADDRS, replace(DESC, placement=HOST))) for number in (0, -2)),
    (GONE, "99", Cache(99, ADDRS, replace(DESC, placement=HOST))),
)
EXT: Final = Spec(
    NO_STRUCT,
    *wrong(KvCacheExtParam(), src_layer_range=_PAIRS, dst_layer_range=_PAIRS, tensor_num_per_layer=[None, 2.0]),
    (RULE, "src_layer_range", *(KvCacheExtParam(pair) for pair in ((0, -1), (-1, 0), (1, 0), (0, 0)))),
    (RULE, "src_layer_range[1]", KvCacheExtParam((0, 2**31))),
    (RULE, "dst_layer_range", *(KvCacheExtParam((-1, -1), pair) for pair in ((0, -1), (0, 0), (-2, -2)))),
    (RULE, "dst_layer_range", KvCacheExtParam((0, 1), (0, 0))),
    (RULE, "2 layers", *(KvCacheExtParam(pair, (2, 2)) for pair in ((0, 0), (2, 2)))),
    (RULE, "4 layers", KvCacheExtParam((4, 4), (4, 4), 1)),
    (RULE, "tensor_num_per_layer=3", KvCacheExtParam((0, 0), (0, 0), 3)),
    (RULE, "tensor_num_per_layer=8", KvCacheExtParam((0, 0), (0, 0), 8)),
    (RULE, "tensor_num_per_layer=0", KvCacheExtParam(tensor_num_per_layer=0)),
    (RULE, "uint8", *(KvCacheExtParam(tensor_num_per_layer=number) for number in (-1, 256))),
)


_IP: Any = cpp_api.IpInfo


def infos(*fields: Any) -> list[ClusterInfo]:
    return [ClusterInfo(*fields)]


CLUSTERS: Final = Spec(
    (1, ClusterInfo(9)),
    (TYPE, "{}[0]", ["9"]),
    (NONE, "{}[0]", [None]),
    (TYPE, "{}[0].remote_cluster_id", infos("9")),
    (NONE, "{}[0].remote_cluster_id", infos(None)),
    (TYPE, "remote_role_type", infos(9, "0")),
    (NONE, "local_ip_infos", infos(9, 0, None)),
    (TYPE, "local_ip_infos[0]", infos(9, 0, ["1.2.3.4"])),
    (TYPE, "remote_ip_infos", infos(9, 0, [], "1.2.3.4")),
    (NONE, "remote_ip_infos[0].ip", infos(1, 0, [], [_IP(None)])),
    (TYPE, "remote_ip_infos[0].port", infos(1, 0, [], [_IP("1.2.3.4", "1")])),
    (NONE, "local_ip_infos[0].port", infos(1, 0, [_IP("1.2.3.4", None)])),
    (RULE, "{} is empty", []),
    (RULE, "{}[0].remote_cluster_id", infos(-1)),
    (RULE, "{}[1].remote_cluster_id", [*infos(1), *infos(2**64)]),
    (RULE, "{}[0].remote_ip_infos[0].port", *(infos(1, 0, [], [_IP("1.2.3.4", port)]) for port in (-1, 65536))),
    (RULE, "{}[0].remote_ip_infos[0].ip: ''", infos(1, 0, [], [_IP("")])),
    (RULE, "remote_ip_infos[0].ip: '1.2.3'", infos(1, 0, [], [_IP("1.2.3")])),
    (RULE, "local_ip_infos[0].ip: 'localhost'", infos(1, 0, [_IP("localhost")])),
    (RULE, "remote_role_type", infos(1, 2**31)),
)

# --- calls ------------------------------------------------------------------------------------------------------------
LIST: Final = Spec((1, "12", {1: 2}), (TYPE, "{}[0]", [1.5], ["1"]), (NONE, "{}[0]", [None]))
ADDRESSES: Final = Spec(
    (*LIST.wrong, tuple(ADDRS)),
    *LIST.inner,
    (RULE, "{} is empty", []),
    (RULE, "{} has 1", [ADDRS[0]]),
    (RULE, "{}[1]=0", [ADDRS[0], 0]),
    (RULE, "{}[1]=0x8: its 512 bytes must be mapped", [ADDRS[0], 8]),
    (RULE, "{}[1]", [ADDRS[0], -1], [ADDRS[0], 2**64]),
    (RULE, "address space", [ADDRS[0], 2**64 - 4]),
)
LISTS: Final = Spec((1, "12"), (TYPE, "{}[0]", [1], [[1.5]]), (NONE, "{}[0]", [None], [[None]]))
ROW_INDEX: Final = integer(0, 2**32 - 1, 6)
SIZE: Final = Spec(
    ("1", 1.0, [1]),
    (RULE, "{}=0: must be -1 or above 0", 0),
    (RULE, "{}=-2: must be -1 or above 0", -2),
    (RULE, "{}", 65),
    (RULE, "int64", 2**63, -(2**63) - 1),
)
PULL: Final = {"src_cache_index": INDEX, "dst_cache": CACHE, "ext_param": EXT}
PUSH: Final = {"src_cache": CACHE, "dst_cache_index": INDEX, "ext_param": EXT}
COPY: Final = {"src_cache": CACHE, "dst_cache": CACHE}
TO_ROW: Final = {"src_cache": KV, "dst_cache_index": THERE}
FROM_ROW: Final = {"src_cache_index": THERE, "dst_cache": KV}
TWO: Final = {"src_blocks": [1, 2], "dst_blocks": [2, 3]}
LISTS_OF_TWO: Final = {"src_blocks": refusals.BLOCK_LIST, "dst_blocks": refusals.BLOCK_LIST}
#: Ids that no cache has.
NO_IDS: Final = (99, 0, -1, -(2**63))
PUSH_ROWS: Final = (
    bad(GONE, "99", dst_cache_index=CacheIndex(1, 99)),
    bad(refusals.UNLINKED, "cluster 7", dst_cache_index=CacheIndex(7, 1)),
)
PULLS: Final = (
    bad(RULE, "our own", src_cache_index=CacheIndex(2, 1)),
    bad(GONE, "99", src_cache_index=CacheIndex(1, 99)),
    bad(GONE, "id 99", dst_cache=Cache(99)),
    bad(refusals.UNLINKED, "cluster 7", src_cache_index=CacheIndex(7, 1)),
)
UNEQUAL: Final = refusals.each(RULE, "equal lengths", src_blocks=[[1]], dst_blocks=[[2, 3, 4]])
CLUSTER_CALL: Final = {"clusters": CLUSTERS, "timeout": integer(1, 2**31 - 1, -1)}
TABLES: Final = (
    Table(
        "cpp.RegisterKvCache",
        {"cache_desc": DESC, "addrs": ADDRS, "cfg": cpp_api.RegisterCfg()},
        {"cache_desc": DESCRIPTOR, "addrs": ADDRESSES, "cfg": Spec(NO_STRUCT)},
    ),
    Table("cpp.UnregisterKvCache", {"cache_id": 77}, {"cache_id": refusals.INT64}),
    Table(
        "cpp.AllocateCache",
        {"cache_desc": DESC},
        {"cache_desc": DESCRIPTOR},
        bad(refusals.FULL, str(1 << 30), cache_desc=Shape(1, 1, 1 << 28).desc),
    ),
    Table("cpp.DeallocateCache", {"cache_id": 77}, {"cache_id": refusals.INT64}),
    Table(
        "cpp.PullKvCache",
        FROM_ROW,
        PULL | {"batch_index": ROW_INDEX, "size": SIZE},
        *PULLS,
        bad(GONE, "6 rows", src_cache_index=CacheIndex(1, 1, 6)),
    ),
    Table(
        "cpp.PullKvBlocks",
        FROM_ROW | TWO,
        PULL | LISTS_OF_TWO,
        *UNEQUAL,
        *PULLS,
        bad(RULE, "batch_index=3", src_cache_index=CacheIndex(1, 1, 3)),
        bad(MISMATCH, "128 bytes", "64", src_cache_index=CacheIndex(1, 2)),  # interface R17
    ),
    Table(
        "cpp.PushKvCache",
        TO_ROW,
        PUSH | {"src_batch_index": ROW_INDEX, "size": integer(-1, -1, 64, 2**63)},
        *PUSH_ROWS,
        bad(RULE, "batch_index", dst_cache_index=CacheIndex(1, 1, 6)),
        bad(RULE, "src_cache", "kHost", src_cache=Use("host")),
    ),
    Table(
        "cpp.PushKvBlocks",
        TO_ROW | TWO,
        PUSH | LISTS_OF_TWO,
        *UNEQUAL,
        *PUSH_ROWS,
        *(bad(GONE, f"id {number}", src_cache=Cache(number)) for number in NO_IDS),
        *(bad(GONE, "PushKvBlocks: ", dst_cache_index=CacheIndex(1, number)) for number in NO_IDS),
        bad(RULE, "src_blocks is empty", src_blocks=[], dst_blocks=[]),
        bad(RULE, "batch_index=3", dst_cache_index=CacheIndex(1, 1, 3)),
        bad(MISMATCH, "64 bytes", "128", dst_cache_index=CacheIndex(1, 2)),
        bad(MISMATCH, "64 bytes", "60", dst_cache_index=CacheIndex(1, 3)),
    ),
    Table(
        "cpp.CopyKvCache",
        {"src_cache": KV, "dst_cache": KV, "dst_batch_index": 1},
        COPY | {"src_batch_index": ROW_INDEX, "dst_batch_index": ROW_INDEX, "offset": refusals.UINT64, "size": SIZE},
        *(bad(GONE, "99", **{name: Cache(99)}) for name in COPY),
        bad(RULE, "offset=64", offset=64),
        bad(RULE, "offset=1", "size=64", offset=1, size=64),
        bad(MISMATCH, "row shapes", dst_cache=Use("wide")),
        bad(MISMATCH, "4 tensors", "3", dst_cache=Use("few")),
        bad(RULE, "src_cache", "kHost", src_cache=Use("host")),
    ),
    Table(
        "cpp.CopyKvBlocks",
        {"src_cache": KV, "dst_cache": KV, "src_blocks": [1], "dst_blocks_list": [[2]]},
        {"src_cache": OPERAND, "dst_cache": OPERAND, "src_blocks": LIST, "dst_blocks_list": LISTS},
        bad(RULE, "src_blocks is empty", src_blocks=[], dst_blocks_list=[[]]),
        bad(RULE, "dst_blocks_list is empty", dst_blocks_list=[]),
        bad(RULE, "dst_blocks_list[1]", "equal", dst_blocks_list=[[2], []]),
        bad(RULE, "dst_blocks_list[0]", "2", "1", "equal", src_blocks=[1, 2]),
        *(bad(RULE, "src_blocks[0]", str(block), src_blocks=[block]) for block in (6, -1)),
        bad(RULE, "dst_blocks_list[1][1]=6", "[0, 6)", src_blocks=[0, 1], dst_blocks_list=[[2, 3], [4, 6]]),
        *(bad(RULE, "dst_blocks_list[0][0]", dst_blocks_list=[[block]]) for block in (-2, 2**64)),
        bad(MISMATCH, "block sizes", "64", "68", dst_cache=Use("wide")),
        bad(MISMATCH, "num_tensors", "4", "3", dst_cache=Use("few")),
        *(bad(RULE, "HOST", src_cache=src, dst_cache=dst) for src, dst in product((Use("host"), Use("cpu")), repeat=2)),
    ),
    Table("cpp.LinkLlmClusters", {"clusters": infos(9), "timeout": 1000}, CLUSTER_CALL),
    Table(
        "cpp.UnlinkLlmClusters",
        {"clusters": [cluster(9, 1)], "timeout": 1000, "force": False},
        CLUSTER_CALL | {"force": Spec((0, 1, "x"))},
    ),
)


@pytest.fixture
def both(local_pair: Pair) -> Pair:
    """Return two linked ends in this process, each with a cache "kv"."""
    start_pair(local_pair)
    for seed, end in enumerate((local_pair.decoder, local_pair.prompt)):
        end.do(made, "kv", Shape(rows=6), seed)
    for width in (32, 15):
        local_pair.prompt.do(made, f"kv of {width}", Shape(width=width), width)
    shapes = {"wide": Shape(width=17), "few": Shape(tensors=3), "host": ON_HOST, "one": Shape(tensors=1)}
    for seed, (name, shape) in enumerate(shapes.items()):
        local_pair.decoder.do(made, name, shape, seed)
    local_pair.decoder.do(cpp.host_memory, "cpu", ON_HOST, 9)
    return local_pair


def test_the_tables_have_every_call_and_every_argument() -> None:
    names = {name for name in vars(LlmDataDist) if name[0].isupper()} - {"Initialize", "Finalize", "SetRole"}
    wanted = {f"cpp.{name}": signature(getattr(LlmDataDist, name)).parameters.keys() - {"self"} for name in names}
    assert {table.call: {name for row in table.rows for name in row.changes} for table in TABLES} == wanted


def test_r01_a_wrong_argument_is_a_type_error_or_a_status_and_nothing_has_happened(both: Pair) -> None:
    for table in TABLES:
        refusals.refuse((both.decoder, both.prompt), table)
    # Tensors that overlap without being the same.
    (address,) = both.decoder.world.memory["cache one"].tensor_addrs  # type: ignore[attr-defined]
    shifted = memory([address + 64], num_tensors=1)
    overlap = bad(RULE, "overlap", src_cache=shifted, dst_cache=Use("one"))
    refusals.refuse((both.decoder, both.prompt), Table("cpp.CopyKvBlocks", TABLES[9].good, {}, overlap))


def test_the_call_of_each_table_is_good_unless_a_row_spoils_it(both: Pair) -> None:
    """A bool counts as an int. Nothing can be said of linking to a cluster without an address."""
    for table in TABLES[:-2]:
        assert both.decoder.do(refusals.attempt, table, [{}]) == [None], table.call
    assert both.decoder.do(refusals.attempt, TABLES[4], [{"batch_index": True}]) == [None]
    assert both.decoder.do(refusals.attempt, TABLES[-1], [{}]) == [None]


def test_r01_initialize_and_the_constructor_take_their_types_only() -> None:
    specs = {"cluster_id": Spec(("1", 1.0)), "role": Spec((3, "kMix"))}
    refuse_each(LlmDataDist, {"cluster_id": 1, "role": LlmRole.kMix}, specs)
    key, device = (TYPE, "key of {}", {1: "0"}), "{}['llm.DeviceId']"
    options = Spec(([], "0"), key, (TYPE, device, {"llm.DeviceId": 0}), (NONE, device, {"llm.DeviceId": None}))
    refuse_each(LlmDataDist(1, LlmRole.kMix).Initialize, {}, {"options": options})
