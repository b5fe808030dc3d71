"""Bad input to LLMDataDist: constructor, init, links of style A (interface §3.1 to §3.4, R1, R11)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode, config
from llm_datadist.errors import NotInitialized
from tests.api.conftest import ACCESSIBLE
from tests.support.linking import free_port, info, link, unlink
from tests.support.refusals import NONE, RULE, TYPE, UINT64, Kind, Spec, raises, refuse_each, state
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from tests.support.pairs import Pair


def test_r01_constructor() -> None:
    specs = {"role": Spec(("PROMPT", 1, LLMRole)), "cluster_id": UINT64}
    refuse_each(LLMDataDist, {"role": LLMRole.MIX, "cluster_id": 1}, specs)
    assert LLMDataDist.llm_engine_instance is None


# --- init (interface §3.1): the rules of the options, each broken alone -----------------------------------------------

DEVICE: Final = {"ge.exec.deviceId": "0"}
OPTIONS: Final = DEVICE | {"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"}
HIXL: Final = OPTIONS | {"llm.TransferBackend": "hixl"}
HIXL_BY_RES: Final = {"llm.TransferBackend": "hixl", "llm.LocalCommRes": ""}
DIRECT: Final = {"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}
POOLS: Final = ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
GIB: Final = 2**30

#: Option, bad values, and what the error names beside the option and the value.
BAD_VALUES: Final[list[tuple[str, list[str], str]]] = [
    ("ge.exec.deviceId", ["", "-1", "cuda:0", "cpu", str(2**31)], ""),
    ("ge.exec.deviceId", ["0;1"], "several"),  # one instance serves one device
    ("ge.flowGraphMemMaxSize", ["1,2", "-1", "1.23", ""], ""),
    ("llm.EnableCacheManager", ["2", "true", ""], "'0' nor '1'"),
    ("llm.EnableRemoteCacheAccessible", ["yes", "True"], ""),
    ("llm.EnableSwitchRole", ["2"], ""),
    ("llm.SyncKvCacheWaitTime", ["0", "-5", "1.5", str(2**31)], ""),
    ("llm.SyncKvCacheWaitTime", ["0"], "[1, 2147483647]"),
    ("llm.GlobalResourceConfig", ["{"], "JSON"),
    ("llm.LinkTotalTime", ["-1", str(2**32)], ""),
    ("llm.LinkRetryCount", ["0", "101"], "[1, 100]"),
    ("llm.MemoryUtilization", ["much"], ""),
    ("llm.TransferBackend", ["other", "ucx", ""], "'hixl'"),
    ("llm.Transport", ["rdma"], "auto, inproc, shm, cma, nixl, tcp"),
    ("llm.ShmSocketDir", [""], ""),
    ("llm.PoolPrefault", ["yes"], ""),
    ("llm.Checksum", ["yes"], ""),
    ("llm.CopyThreads", ["0", "1025"], "[1, 1024]"),
    ("llm.CopyThreads", ["two"], ""),
    ("llm.PeerTimeout", ["inf", "soon"], ""),
    ("llm.MaxLinks", ["0", "-1", "1.5", str(2**32)], ""),
    ("llm.WriteByAddress", ["2", "yes"], ""),
    ("llm.AuthSecretFile", [""], "names no file"),
    *((key, [""], "names no file") for key in ("llm.TlsCert", "llm.TlsKey", "llm.TlsCa")),
    ("llm.Insecure", ["", "yes"], "is neither '0' nor '1'"),
    ("llm.SameHostUsers", ["", "1,,2", "-1", "no such user", str(2**32 - 1)], "neither a user id nor a user"),
    ("llm.NixlFallback", ["yes", "2"], ""),
    ("llm.NixlPlaintext", ["yes", "2"], ""),
    ("llm.StrictTypes", ["yes", "2"], ""),
    ("llm.MaxLinkAge", ["0", "0.9", "soon", "inf"], ""),
    ("llm.MaxLinkAge", ["60"], "are not authenticated"),
    *((pool, ["", "{", "[]"], "") for pool in POOLS),
]
BAD_LISTEN: Final = ("", "26000", "1.2.3.4:1:2", "a:", "a:port", "a:-1", "a:65536", "::1:5", ":5", "1:2;3:4", "1:²")
#: Pools: what is written, and the field that the error names; a page is the least, 20 GiB the most of host memory.
BAD_POOLS: Final = [
    ("{}", "memory_size"),
    *((f'{{"memory_size": {size}}}', "memory_size") for size in ("0", "-1", "1e6", "true", '"65536"', "65535")),
    *((f'{{"memory_size": 65536, "page_shift": {n}}}', "page_shift") for n in ("9", "31", "12.0", "true", "null")),
]
#: Every option there is, and one that there is not.
KEYS: Final = {text for text in vars(config).values() if isinstance(text, str) and text[:4] in ("llm.", "ge.e", "ge.f")}
ALL_KEYS: Final = sorted(KEYS | config.NO_EFFECT | {"llm.DeviceId", "llm.ListenIpInfo", "llm.Unknown"})
BAD_INIT: Final[list[tuple[Any, Kind, tuple[str, ...]]]] = [
    (None, NONE, ("options", "dict")),
    ([], TYPE, ("options", "dict", "list")),
    ("ge.exec.deviceId=0", TYPE, ("options",)),
    (list(OPTIONS.items()), TYPE, ("options",)),
    (OPTIONS | {7: "x"}, TYPE, ("options", "str", "7")),
    (OPTIONS | {"ge.exec.deviceId": 0}, TYPE, ("options['ge.exec.deviceId']", "str", "int: 0")),
    (OPTIONS | {"ge.exec.deviceId": None}, NONE, ("ge.exec.deviceId", "str")),
    (OPTIONS | {"ge.flowGraphMemMaxSize": 5}, TYPE, ("ge.flowGraphMemMaxSize", "str", "5")),
    (OPTIONS | {"llm.EnableCacheManager": True}, TYPE, ("llm.EnableCacheManager", "bool: True")),
    ({}, RULE, ("ge.exec.deviceId is missing",)),
    ({"llm.Transport": "rdma"}, RULE, ("ge.exec.deviceId is missing",)),  # of two wrong options the earlier one
    *((OPTIONS | {key: text}, RULE, (key, part, repr(text)[:20])) for key, texts, part in BAD_VALUES for text in texts),
    (OPTIONS | {"llm.MemoryUtilization": "1.1"}, RULE, ("Utilization: 1.1", "[0.0, 1.0]")),
    *((OPTIONS | {"llm.PeerTimeout": text}, RULE, ("llm.PeerTimeout", text + ".0", "above 0")) for text in ("0", "-3")),
    (OPTIONS | {"llm.PeerTimeout": "0.09"}, RULE, ("llm.PeerTimeout", "0.09", "0.1 s at least")),
    (OPTIONS | {"llm.SyncKvCacheWaitTime": "9" * 5000}, RULE, ("llm.SyncKvCacheWaitTime", "whole number")),
    *((OPTIONS | {"llm.listenIpInfo": text}, RULE, ("listen_ip_info", repr(text))) for text in BAD_LISTEN),
    *((OPTIONS | {pool: text}, RULE, (part,)) for pool in POOLS for text, part in BAD_POOLS),
    (OPTIONS | {POOLS[1]: f'{{"memory_size": {20 * GIB + 65536}}}'}, RULE, (POOLS[1],)),
    *(
        (OPTIONS | {key: text}, RULE, (f"{key}: {text[:200]!r} has {text[-1]!r}: NUL and lone surrogates are not",))
        for key in ALL_KEYS
        for text in ("\0", "/a\ud800", "x" * 100_000 + "\udfff")
    ),
    *((OPTIONS | {f"llm.{letter}": "1"}, RULE, ("options: 'llm.", "NUL and")) for letter in "\0\udc80"),
    # modes
    (OPTIONS | DIRECT, RULE, ("EnableCacheManager", "llm.LocalCommRes", "'0'")),
    (HIXL | {"llm.EnableCacheManager": "0"}, RULE, ("EnableCacheManager", "'hixl'")),
    ({key: HIXL[key] for key in HIXL if key != "llm.EnableCacheManager"}, RULE, ("EnableCacheManager", "'hixl'")),
    (HIXL | {"llm.EnableRemoteCacheAccessible": "0"}, RULE, ("EnableRemoteCacheAccessible", "'0'")),
    ({key: HIXL[key] for key in HIXL if key != "llm.listenIpInfo"}, RULE, ("listenIpInfo", "missing")),
    (DEVICE | HIXL_BY_RES, RULE, ("listenIpInfo", "missing")),
    (OPTIONS | HIXL_BY_RES | {"llm.EnableRemoteCacheAccessible": "0"}, RULE, ("EnableRemoteCacheAccessible", "'0'")),
]


def test_r01_init_names_the_option_and_can_be_repeated() -> None:
    """The object stays as it was: not initialised, and usable by an init with good options."""
    before = residue()
    dd = LLMDataDist(LLMRole.DECODER, 1)
    for options, kind, texts in BAD_INIT:
        try:
            with pytest.raises(kind) as caught:
                dd.init(options)
            raises(caught.value, kind, texts)
        except BaseException as error:
            error.add_note(f"init({options})"[:200])
            raise
        assert LLMDataDist.llm_engine_instance is None
        with pytest.raises(NotInitialized):
            _ = dd.cache_manager
    dd.init(OPTIONS)
    dd.check_integrity()
    assert LLMDataDist.llm_engine_instance is dd
    dd.finalize()
    assert LLMDataDist.llm_engine_instance is None
    assert settled(before) == before


# --- links of style A: what is returned; failures are statuses, never exceptions --------------------------------------

OK: Final = LLMStatusCode.LLM_SUCCESS
INVALID: Final = LLMStatusCode.LLM_PARAM_INVALID
FAILED: Final = LLMStatusCode.LLM_LINK_FAILED
ALREADY: Final = LLMStatusCode.LLM_ALREADY_LINK


@ACCESSIBLE
def test_link_and_unlink_clusters_return_the_status_of_each_and_nothing_has_happened(scene: Pair) -> None:
    closed, linked = info(5, free_port()), info(1, scene.prompt.port)
    links: list[tuple[list[LLMClusterInfo], list[LLMStatusCode]]] = [
        ([], []),
        ([info(5)], [INVALID]),
        ([info(5, free_port(), free_port())], [INVALID]),
        ([closed], [FAILED]),
        ([closed, info(6)], [FAILED, INVALID]),
        ([info(6), closed], [INVALID, FAILED]),
        ([linked], [ALREADY]),
        ([info(None, scene.prompt.port)], [ALREADY]),
        ([info(9, scene.prompt.port)], [FAILED]),  # it announces another id (interface R28)
        ([linked, closed], [ALREADY, FAILED]),
    ]
    ends = (scene.decoder, scene.prompt)
    calls: list[tuple[Any, list[LLMClusterInfo], list[LLMStatusCode], tuple[bool, ...]]]
    calls = [(link, clusters, statuses, ()) for clusters, statuses in links]
    # Cluster, remote addresses, status unless it is forced: then the id is enough, and there is nothing to do.
    unlinks = [(1, 0, INVALID), (1, 2, INVALID), (77, 0, INVALID), (77, 1, OK), (0, 1, OK), (2**64 - 1, 1, OK)]
    for cluster_id, ips, status in unlinks:
        ports = [free_port() for _ in range(ips)]
        by_force = info(76 if cluster_id == 1 else cluster_id, *ports)  # by force the link to 1 would be gone
        calls += [(unlink, [info(cluster_id, *ports)], [status], ()), (unlink, [by_force], [OK], (True,))]
    for call, clusters, statuses, force in calls:
        before = [end.do(state) for end in ends]
        overall = next((code for code in reversed(statuses) if code is not OK), OK) if statuses else INVALID
        assert scene.decoder.do(call, clusters, 5000, *force) == (overall, statuses), (call, clusters)
        assert [end.do(state) for end in ends] == before, (call, clusters)
