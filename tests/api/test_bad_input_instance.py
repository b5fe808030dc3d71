"""Bad input to LLMDataDist: constructor, init, links of style A, explain (interface §3.1 to §3.4, R1, R11)."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist import LLMClusterInfo, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from llm_datadist.errors import NoneArgument, NotInitialized, ParamError
from tests.api.conftest import ACCESSIBLE, PLAIN
from tests.support.linking import info
from tests.support.refusals import NONE, RULE, TYPE, UNLINKED, Row, Table, bad, integers, refuse, rows, state, types
from tests.support.world import World, residue, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pair

# --- the constructor (interface §3) -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("role", "cluster_id", "error", "text"),
    [
        (None, 1, NoneArgument, "role"),
        ("PROMPT", 1, TypeError, "role"),
        (1, 1, TypeError, "role"),
        (LLMRole, 1, TypeError, "role"),
        (LLMRole.MIX, None, NoneArgument, "cluster_id"),
        (LLMRole.MIX, "1", TypeError, "cluster_id"),
        (LLMRole.MIX, 1.0, TypeError, "cluster_id"),
        (LLMRole.MIX, [1], TypeError, "cluster_id"),
        (LLMRole.MIX, -1, ParamError, "cluster_id"),
        (LLMRole.MIX, 2**64, ParamError, "cluster_id"),
    ],
)
def test_r01_constructor(role: Any, cluster_id: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LLMDataDist(role, cluster_id)
    assert LLMDataDist.llm_engine_instance is None


# --- init (interface §3.1): the rules of the options, each broken alone -----------------------------------------------

OPTIONS: Final = {"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1:0"}
POOL: Final = "llm.MemPoolConfig"
HOST_POOL: Final = "llm.HostMemPoolConfig"

#: What is added to good options (a str; None: taken away), and what the error names.
BAD_OPTIONS: Final[list[tuple[dict[str, Any], str]]] = [
    ({"ge.exec.deviceId": None}, "ge.exec.deviceId"),
    ({"ge.exec.deviceId": ""}, "ge.exec.deviceId"),
    ({"ge.exec.deviceId": "-1"}, "ge.exec.deviceId"),
    ({"ge.exec.deviceId": "cuda:0"}, "ge.exec.deviceId"),
    ({"ge.exec.deviceId": "0;1"}, "ge.exec.deviceId"),  # one instance serves one device
    ({"ge.exec.deviceId": str(2**31)}, "ge.exec.deviceId"),
    ({"ge.flowGraphMemMaxSize": "1,2"}, "ge.flowGraphMemMaxSize"),
    ({"ge.flowGraphMemMaxSize": "-1"}, "ge.flowGraphMemMaxSize"),
    ({"ge.flowGraphMemMaxSize": "1.23"}, "ge.flowGraphMemMaxSize"),
    ({"ge.flowGraphMemMaxSize": ""}, "ge.flowGraphMemMaxSize"),
    ({"llm.EnableCacheManager": "2"}, "llm.EnableCacheManager"),
    ({"llm.EnableCacheManager": "true"}, "llm.EnableCacheManager"),
    ({"llm.EnableCacheManager": ""}, "llm.EnableCacheManager"),
    ({"llm.EnableRemoteCacheAccessible": "yes"}, "llm.EnableRemoteCacheAccessible"),
    ({"llm.SyncKvCacheWaitTime": "0"}, "llm.SyncKvCacheWaitTime"),
    ({"llm.SyncKvCacheWaitTime": "-5"}, "llm.SyncKvCacheWaitTime"),
    ({"llm.SyncKvCacheWaitTime": "1.5"}, "llm.SyncKvCacheWaitTime"),
    ({"llm.SyncKvCacheWaitTime": str(2**31)}, "llm.SyncKvCacheWaitTime"),
    ({"llm.listenIpInfo": "26000"}, "listen_ip_info"),
    ({"llm.listenIpInfo": "127.0.0.1:1:2"}, "listen_ip_info"),
    ({"llm.listenIpInfo": "127.0.0.1:"}, "listen_ip_info"),
    ({"llm.listenIpInfo": "127.0.0.1:port"}, "listen_ip_info"),
    ({"llm.listenIpInfo": "127.0.0.1:65536"}, "listen_ip_info"),
    ({"llm.listenIpInfo": ":26000"}, "listen_ip_info"),
    ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, "llm.LocalCommRes"),
    ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "0"}, "EnableCacheManager"),
    ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": None}, "EnableCacheManager"),
    ({"llm.TransferBackend": "hixl", "llm.EnableRemoteCacheAccessible": "0"}, "EnableRemoteCacheAccessible"),
    ({"llm.TransferBackend": "hixl", "llm.listenIpInfo": None}, "listenIpInfo"),
    ({"llm.TransferBackend": "other"}, "llm.TransferBackend"),
    ({"llm.GlobalResourceConfig": "{"}, "llm.GlobalResourceConfig"),
    ({"llm.LinkTotalTime": "-1"}, "llm.LinkTotalTime"),
    ({"llm.LinkTotalTime": str(2**32)}, "llm.LinkTotalTime"),
    ({"llm.LinkRetryCount": "0"}, "llm.LinkRetryCount"),
    ({"llm.LinkRetryCount": "101"}, "llm.LinkRetryCount"),
    ({"llm.MemoryUtilization": "1.1"}, "llm.MemoryUtilization"),
    *[
        ({key: text}, part or key)
        for key in (POOL, HOST_POOL)
        for text, part in (
            ("", ""),
            ("{", ""),
            ("[]", ""),
            ("{}", "memory_size"),
            ('{"memory_size": 0}', "memory_size"),
            ('{"memory_size": -1}', "memory_size"),
            ('{"memory_size": 1e6}', "memory_size"),
            ('{"memory_size": true}', "memory_size"),
            ('{"memory_size": "65536"}', "memory_size"),
            ('{"memory_size": 65535}', "memory_size"),  # less than a page
            ('{"memory_size": 65536, "page_shift": 9}', "page_shift"),
            ('{"memory_size": 65536, "page_shift": 31}', "page_shift"),
            ('{"memory_size": 65536, "page_shift": 12.0}', "page_shift"),
            ('{"memory_size": 65536, "page_shift": true}', "page_shift"),
            ('{"memory_size": 65536, "page_shift": null}', "page_shift"),
        )
    ],
    ({HOST_POOL: f'{{"memory_size": {20 * 2**30 + 65536}}}'}, "llm.HostMemPoolConfig"),  # 20 GiB at most
]


@pytest.fixture
def untouched() -> Iterator[None]:
    """No thread, no descriptor, no memory, no instance is left."""
    before = residue()
    yield
    assert LLMDataDist.llm_engine_instance is None
    assert settled(before) == before


def refused_and_then_initialised(options: Any, error: type[Exception], text: str) -> None:
    """The object stays as it was: not initialised, and usable by an init with good options."""
    dd = LLMDataDist(LLMRole.DECODER, 1)
    with pytest.raises(error) as caught:
        dd.init(options)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    if isinstance(caught.value, LLMException):
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert LLMDataDist.llm_engine_instance is None
    with pytest.raises(NotInitialized):
        _ = dd.cache_manager
    dd.init(OPTIONS)
    dd.check_integrity()
    assert LLMDataDist.llm_engine_instance is dd
    dd.finalize()


def _changed(case: Any) -> str:
    return repr(case)[:70] if isinstance(case, dict) else ""


@pytest.mark.parametrize(("change", "text"), BAD_OPTIONS, ids=_changed)
@pytest.mark.usefixtures("untouched")
def test_r01_init_names_the_option_and_can_be_repeated(change: dict[str, Any], text: str) -> None:
    options = {key: value for key, value in (OPTIONS | change).items() if value is not None}
    refused_and_then_initialised(options, ParamError, text)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (None, NoneArgument, "options"),
        ([], TypeError, "options"),
        ("ge.exec.deviceId=0", TypeError, "options"),
        (list(OPTIONS.items()), TypeError, "options"),
        (OPTIONS | {"ge.exec.deviceId": 0}, TypeError, "ge.exec.deviceId"),
        (OPTIONS | {"ge.exec.deviceId": None}, NoneArgument, "ge.exec.deviceId"),
        (OPTIONS | {"ge.flowGraphMemMaxSize": 5}, TypeError, "ge.flowGraphMemMaxSize"),
        (OPTIONS | {"llm.EnableCacheManager": True}, TypeError, "llm.EnableCacheManager"),
        (OPTIONS | {7: "x"}, TypeError, "options"),
    ],
)
@pytest.mark.usefixtures("untouched")
def test_r01_init_wants_a_dict_of_str_to_str(options: Any, error: type[Exception], text: str) -> None:
    refused_and_then_initialised(options, error, text)


# --- links of style A (interface §3.4): what is raised ----------------------------------------------------------------


def nowhere() -> LLMClusterInfo:
    """A cluster with all that a call needs; nobody is reached, since the call is refused before."""
    return info(5, 9)


def linked() -> LLMClusterInfo:
    return info(1)


CLUSTERS: Final[list[Row]] = [
    *integers("timeout", 1, 2**31 - 1),
    *bad(RULE, timeout=-1),
    *bad(RULE, timeout=-(2**31) - 1),
    *types("clusters", nowhere(), 1, "clusters", {1: nowhere()}),
    *bad(NONE, "clusters[0]", clusters=[None]),
    *bad(NONE, "clusters[1]", clusters=[nowhere(), None]),
    *bad(TYPE, "clusters[1]", clusters=[nowhere(), 1]),
    *bad(TYPE, "clusters[0]", clusters=[[nowhere()]]),
]
LINK: Final = Table(
    "link_clusters",
    {"clusters": [nowhere()], "timeout": 1000},
    (
        *CLUSTERS,
        *bad(RULE, "local_ip_info_list is empty", clusters=[info(5, 9, local=None)]),
        *bad(RULE, "clusters[1]: local_ip_info_list is empty", clusters=[nowhere(), info(6, 9, local=None)]),
        *bad(RULE, "local_ip_info_list is empty", clusters=[LLMClusterInfo()]),
    ),
    of_instance=True,
)
UNLINK: Final = Table(
    "unlink_clusters",
    {"clusters": [linked()], "timeout": 1000, "force": True},
    (
        *CLUSTERS,
        *types("force", 1, 0, "yes"),
        *bad(NONE, "clusters[0].remote_cluster_id", clusters=[LLMClusterInfo()]),
        *bad(NONE, "clusters[1].remote_cluster_id", clusters=[linked(), info(None, 9)]),
    ),
    of_instance=True,
)
EXPLAIN: Final = Table(
    "explain",
    {"remote_cluster_id": 1},
    (
        *integers("remote_cluster_id", 0, 2**64 - 1),
        *bad(UNLINKED, "77", remote_cluster_id=77),
        *bad(UNLINKED, "2", remote_cluster_id=2),
    ),
    of_instance=True,
)


@PLAIN
@rows((LINK, UNLINK, EXPLAIN))
def test_r01_bad_input_is_refused_and_nothing_has_happened(scene: Pair, table: Table, row: Row) -> None:
    refuse((scene.decoder, scene.prompt), table, row)


# --- and what is returned: link failures are statuses, never exceptions -----------------------------------------------

OK: Final = LLMStatusCode.LLM_SUCCESS
INVALID: Final = LLMStatusCode.LLM_PARAM_INVALID
FAILED: Final = LLMStatusCode.LLM_LINK_FAILED
ALREADY: Final = LLMStatusCode.LLM_ALREADY_LINK
UNLINK_FAILED: Final = LLMStatusCode.LLM_UNLINK_FAILED


def closed_port() -> int:
    """A port where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _call(world: World, method: str, clusters: list[LLMClusterInfo], *more: bool) -> Any:
    return getattr(world.dd, method)(clusters, 5000, *more)


def returned(pair: Pair, method: str, clusters: list[LLMClusterInfo], each: list[LLMStatusCode], *more: bool) -> None:
    """The call returns these statuses, and nothing has happened at either end."""
    ends = (pair.decoder, pair.prompt)
    before = [end.do(state) for end in ends]
    overall = next((code for code in reversed(each) if code is not OK), OK) if each else INVALID
    assert pair.decoder.do(_call, method, clusters, *more) == (overall, each)
    assert [end.do(state) for end in ends] == before


@ACCESSIBLE
@pytest.mark.parametrize(
    ("clusters", "each"),
    [
        ([], []),
        ([("no remote ip", 5)], [INVALID]),
        ([("two remote ips", 5)], [INVALID]),
        ([("nobody there", 5)], [FAILED]),
        ([("nobody there", 5), ("no remote ip", 6)], [FAILED, INVALID]),
        ([("no remote ip", 6), ("nobody there", 5)], [INVALID, FAILED]),
        ([("the prompt", 1)], [ALREADY]),
        ([("the prompt", None)], [ALREADY]),
        ([("the prompt", 9)], [FAILED]),  # it announces another id (interface R28)
        ([("the prompt", 1), ("nobody there", 5)], [ALREADY, FAILED]),
    ],
)
def test_link_clusters_returns_the_status_of_each(
    scene: Pair, clusters: list[tuple[str, int | None]], each: list[LLMStatusCode]
) -> None:
    ports: dict[str, list[int | None]] = {
        "no remote ip": [],
        "two remote ips": [closed_port(), closed_port()],
        "nobody there": [closed_port()],
        "the prompt": [scene.prompt.port],
    }
    returned(scene, "link_clusters", [info(cluster, *ports[where]) for where, cluster in clusters], each)


@ACCESSIBLE
@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize(
    ("cluster_id", "remote_ips", "status"),
    [
        (1, 0, INVALID),  # linked, but not forced it takes one remote ip
        (1, 2, INVALID),
        (77, 0, INVALID),
        (77, 1, OK),  # not linked: nothing to do
        (0, 1, OK),
        (2**64 - 1, 1, OK),
    ],
)
def test_unlink_clusters_returns_the_status_of_each(
    scene: Pair, cluster_id: int, remote_ips: int, status: LLMStatusCode, force: bool
) -> None:
    if force and cluster_id == 1:
        cluster_id = 76  # by force the id is enough, and the link would be gone
    clusters = [info(cluster_id, *[closed_port()] * remote_ips)]
    returned(scene, "unlink_clusters", clusters, [OK if force else status], force)
