"""The arguments of link, unlink and query_register_mem_status, and of register_* after link (interface §3.5, §6.6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, NotInitialized, ParamError
from tests.support.moves import Spec, Use, call, make, refused, same_bytes, show
from tests.support.ranks import drop, explained, finalize_and_init, join, joined, start_two, status, table
from tests.support.refusals import NONE, RULE, TYPE, UINT64, UNLINKED, Row, Table, bad, refuse
from tests.support.world import make_config

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist: explain_communicator link query_register_mem_status unlink")

# --- memory -----------------------------------------------------------------------------------------------------------


def register(world: World, remote_accessible: bool | None) -> None:
    desc = CacheDesc(1, [4, 48], DataType.DT_UINT8)
    world.memory["late"] = late = np.full(4 * 48, 7, np.uint8)
    key = BlocksCacheKey(world.dd.cluster_id, 5)
    world.caches["late"] = world.cm.register_blocks_cache(desc, [late.ctypes.data], key, remote_accessible)


def register_row(world: World, remote_accessible: bool | None) -> None:
    world.memory["row"] = row = np.full(4 * 48, 7, np.uint8)
    world.cm.register_cache(CacheDesc(1, [4, 48], DataType.DT_UINT8), [row.ctypes.data], (), remote_accessible)


def test_r16_after_link_memory_is_accessible_unless_told_otherwise_and_true_may_not_be_said(shm_pair: Pair) -> None:
    ends = start_two(shm_pair, enable_remote_cache_accessible=True, extra={"llm.Transport": "auto"})
    ends[0].do(register, True)
    joined(*ends)
    for function in (register, register_row):
        refused([ends[0]], [], ParamError, ["remote_accessible", "link()"], function, True)
    ends[0].do(register, None)
    ends[0].do(register_row, False)
    wanted = ends[1].do(make, "kv", Spec(tensors=1, rows=4, blocks=True), 1)
    ends[1].do(call, "pull_blocks", BlocksCacheKey(1, 5), Use("kv"), [1, 2], [0, 3])
    wanted[0][[0, 3]] = 7
    same_bytes(ends[1].do(show, "kv"), wanted)
    ends[0].do(finalize_and_init, make_config())
    ends[0].do(register, True)  # nothing was linked since this init


# --- arguments --------------------------------------------------------------------------------------------------------

GOOD_TABLE = table("127.0.0.1", "127.0.0.1")
GOOD: dict[str, Any] = {"comm_name": "n", "cluster_rank_info": {2: 0, 3: 1}, "rank_table": GOOD_TABLE}


def servers(**changes: Any) -> str:
    """Return a table whose first server has these fields."""
    content = json.loads(GOOD_TABLE)
    content["server_list"][0] |= changes
    return json.dumps(content)


def devices(*ranks: Any, **fields: Any) -> str:
    return servers(device=[{"device_id": "0", "rank_id": rank} | fields for rank in ranks])


WRONG: list[Row] = [
    bad(NONE, "comm_name", comm_name=None),
    bad(TYPE, "comm_name", "int", comm_name=1),
    bad(TYPE, "comm_name", "bytes", comm_name=b"x"),
    bad(RULE, "comm_name", comm_name=""),
    bad(RULE, "comm_name", "128", comm_name="x" * 128),
    bad(RULE, "comm_name", comm_name="\ud800"),
    bad(NONE, "cluster_rank_info", cluster_rank_info=None),
    bad(TYPE, "cluster_rank_info", "list", cluster_rank_info=[(2, 0), (3, 1)]),
    bad(TYPE, "cluster_rank_info", "str", cluster_rank_info={"2": 0, 3: 1}),
    bad(NONE, "cluster_rank_info", cluster_rank_info={None: 0, 3: 1}),
    bad(TYPE, "cluster_rank_info[2]", "str", cluster_rank_info={2: "0", 3: 1}),
    bad(NONE, "cluster_rank_info[3]", cluster_rank_info={2: 0, 3: None}),
    bad(TYPE, "cluster_rank_info[2]", "float", cluster_rank_info={2: 0.0, 3: 1}),
    bad(RULE, "cluster_rank_info", "0 members", cluster_rank_info={}),
    bad(RULE, "cluster_rank_info", "1 members", cluster_rank_info={2: 0}),
    bad(RULE, "cluster_rank_info", "5 members", cluster_rank_info={2: 0, 3: 1, 4: 2, 5: 3, 6: 4}),
    bad(RULE, "cluster_rank_info", "-1", cluster_rank_info={-1: 0, 2: 1}),
    bad(RULE, "cluster_rank_info", str(2**64), cluster_rank_info={2: 0, 2**64: 1}),
    bad(RULE, "cluster_rank_info[2]", "-1", cluster_rank_info={2: -1, 3: 1}),
    bad(RULE, "cluster_rank_info[3]", str(2**32), cluster_rank_info={2: 0, 3: 2**32}),
    bad(RULE, "ascending", "[1, 0]", cluster_rank_info={3: 1, 2: 0}),
    bad(RULE, "ascending", "[0, 0]", cluster_rank_info={3: 0, 2: 0}),
    bad(RULE, "ascending", cluster_rank_info={np.int64(2): 0, 3: 1, np.uint8(4): 1}),
    bad(RULE, "cluster_rank_info", "2", cluster_rank_info={3: 0, 4: 1}),
    bad(NONE, "rank_table", rank_table=None),
    bad(TYPE, "rank_table", "dict", rank_table={}),
    bad(RULE, "rank_table", "JSON", rank_table=""),
    bad(RULE, "rank_table", "JSON", rank_table="{"),
    bad(RULE, "rank_table", "JSON", rank_table="[" * 100_000),
    bad(RULE, "rank_table", "list", rank_table="[]"),
    bad(RULE, "rank_table.server_list", rank_table="{}"),
    bad(RULE, "rank_table.server_list", "dict", rank_table='{"server_list": {}}'),
    bad(RULE, "rank_table.server_list", "[]", rank_table='{"server_list": []}'),
    bad(RULE, "rank_table.server_list[0]", "int", rank_table='{"server_list": [1]}'),
    bad(RULE, "rank_table.server_list[0].device", "NoneType", rank_table=servers(device=None)),
    bad(RULE, "rank_table.server_list[0].device", rank_table=servers(device=[])),
    bad(RULE, "server_list[0].device[0]", "str", rank_table=servers(device=["0"])),
    bad(RULE, "server_list[0].device[0].rank_id", "None", rank_table=devices(None)),
    bad(RULE, "rank_id", "'a'", rank_table=devices("a")),
    bad(RULE, "rank_id", "True", rank_table=devices(True)),
    bad(RULE, "rank_id", "-1", rank_table=devices(-1)),
    bad(RULE, "rank_id", "4294967296", rank_table=devices("4294967296")),
    bad(RULE, "device[1].rank_id", "twice", rank_table=devices("0", "0")),
    bad(RULE, "rank 1", "twice", rank_table=devices("0", "1")),
    bad(RULE, "rank_id 0", "cluster 2", rank_table=devices("7")),
    bad(RULE, "server_list[0].host_ip", "a host", rank_table=servers(host_ip="a host")),
    bad(RULE, "server_list[0].host_ip", "int", rank_table=servers(host_ip=1)),
    bad(RULE, "device[0].device_ip", "::1", rank_table=devices("0", device_ip="::1")),
    bad(RULE, "no IPv4", "rank 0", rank_table=servers(host_ip="", server_id="0", device=[{"rank_id": "0"}])),
]


def test_r01_a_wrong_argument_of_link_is_refused_before_anything_happens(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    refuse([end], Table("dd.link", GOOD, {}, *WRONG))
    end.do(register, True)  # link() has not been called
    assert end.do(join, *GOOD.values()) == 1, "no id was used up"


def test_r19_the_documented_checks_of_link_come_in_the_documented_order(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    given: list[Any] = [None, None, None]
    for _ in range(4):
        refused([end], [], NoneArgument, ["comm_name"], join, *given)
        given[0] = "n"
        refused([end], [], NoneArgument, ["cluster_rank_info"], join, *given)
        given[1] = dict.fromkeys(range(5), 0)
        refused([end], [], ParamError, ["5 members"], join, *given)
        given[1] = {-1: 0}
        refused([end], [], ParamError, ["-1"], join, *given)
        given[1] = {9: 0}
        refused([end], [], NoneArgument, ["rank_table"], join, *given)
        given[2] = "{"
        refused([end], [], ParamError, ["1 members"], join, *given)
        given[1] = {9: 1, 8: 0}
        refused([end], [], ParamError, ["ascending"], join, *given)
        given[1] = {8: 0, 9: 1}
        refused([end], [], ParamError, ["this cluster, 2"], join, *given)
        given[1] = {2: 0, 9: 1}
        refused([end], [], ParamError, ["JSON"], join, *given)
        given = [None, None, None]


def test_r01_a_wrong_or_unknown_communicator_is_refused(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    unknown = [
        bad(UNLINKED, f"communicator {comm_id}", comm_id=comm_id)
        for comm_id in (0, 1, 2**64 - 1, int(LLMStatusCode.LLM_ALREADY_LINK))
    ]
    for call_ in ("unlink", "query_register_mem_status", "explain_communicator"):
        refuse([end], Table(f"dd.{call_}", {}, {"comm_id": UINT64}, *unknown))


def test_before_init_and_after_finalize_every_call_is_a_runtime_error(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    end.world.dd.finalize()
    for function, args in ((join, tuple(GOOD.values())), (drop, (1,)), (status, (1,)), (explained, (1,))):
        with pytest.raises(NotInitialized, match="not initialized"):
            end.do(function, *args)


def test_with_the_hixl_backend_all_three_calls_are_feature_not_enabled(end: LocalEnd) -> None:
    end.start("DECODER", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    refused([end], [], LLMException, ["link_clusters"], join, *GOOD.values(), status=code)
    refused([end], [], LLMException, ["link_clusters"], drop, 1, status=code)
    refused([end], [], LLMException, ["link_clusters"], status, 1, status=code)
