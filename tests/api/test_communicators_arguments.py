"""The arguments of link, unlink and query_register_mem_status, and of register_* after link (interface §3.5, §6.6)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.errors import LLMException, LLMStatusCode, NoneArgument, NotInitialized, ParamError
from tests.support.moves import Spec as CacheSpec
from tests.support.moves import Use, call, make, refused, same_bytes, show
from tests.support.ranks import drop, finalize_and_init, join, joined, start_two, status, table
from tests.support.refusals import NONE, RULE, TYPE, UINT64, UNLINKED, Spec, Table, bad, refuse
from tests.support.world import make_config

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist: explain_communicator link query_register_mem_status unlink")


def register(world: World, remote_accessible: bool | None, blocks: bool = True) -> None:
    desc, key = CacheDesc(1, [4, 48], DataType.DT_UINT8), BlocksCacheKey(world.dd.cluster_id, 5)
    world.memory[f"late {blocks}"] = late = np.full(4 * 48, 7, np.uint8)
    if blocks:
        world.caches["late"] = world.cm.register_blocks_cache(desc, [late.ctypes.data], key, remote_accessible)
    else:
        world.cm.register_cache(desc, [late.ctypes.data], (), remote_accessible)


def test_r16_after_link_memory_is_accessible_unless_told_otherwise_and_true_may_not_be_said(shm_pair: Pair) -> None:
    ends = start_two(shm_pair, enable_remote_cache_accessible=True, extra={"llm.Transport": "auto"})
    ends[0].do(register, True)
    joined(*ends)
    for blocks in (True, False):
        refused([ends[0]], [], ParamError, ["remote_accessible", "link()"], register, True, blocks)
    ends[0].do(register, None)
    ends[0].do(register, False, False)
    wanted = ends[1].do(make, "kv", CacheSpec(tensors=1, rows=4, blocks=True), 1)
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


ARGUMENTS = {
    "comm_name": Spec((1, b"x"), (RULE, "{}", "", "\ud800"), (RULE, "128", "x" * 128)),
    "cluster_rank_info": Spec(
        ([(2, 0), (3, 1)],),
        (TYPE, "key of {}", {"2": 0, 3: 1}),
        (NONE, "key of {}", {None: 0, 3: 1}),
        (TYPE, "{}[2]", {2: "0", 3: 1}, {2: 0.0, 3: 1}),
        (NONE, "{}[3]", {2: 0, 3: None}),
        (RULE, "0 members", {}),
        (RULE, "1 members", {2: 0}),
        (RULE, "5 members", {2: 0, 3: 1, 4: 2, 5: 3, 6: 4}),
        (RULE, "-1", {-1: 0, 2: 1}),
        (RULE, str(2**64), {2: 0, 2**64: 1}),
        (RULE, "{}[2]: -1", {2: -1, 3: 1}),
        (RULE, f"{{}}[3]: {2**32}", {2: 0, 3: 2**32}),
        (RULE, "ascending", {3: 1, 2: 0}, {3: 0, 2: 0}, {np.int64(2): 0, 3: 1, np.uint8(4): 1}),
        (RULE, "this cluster, 2", {3: 0, 4: 1}),
    ),
    "rank_table": Spec(
        ({},),
        (RULE, "{}: no JSON", "", "{", "[" * 100_000),
        (RULE, "{}: list", "[]"),
        (RULE, "{}.server_list: ", "{}", '{"server_list": {}}', '{"server_list": []}'),
        (RULE, "{}.server_list[0]: int", '{"server_list": [1]}'),
        (RULE, "{}.server_list[0].device: ", servers(device=None), servers(device=[])),
        (RULE, "{}.server_list[0].device[0]: str", servers(device=["0"])),
        *(
            (RULE, f"server_list[0].device[0].rank_id: {type(rank).__name__} {rank!r}", devices(rank))
            for rank in (None, "a", True, -1, "4294967296")
        ),
        (RULE, "device[1].rank_id: rank 0 is there twice", devices("0", "0")),
        (RULE, "rank 1 is there twice", devices("0", "1")),
        (RULE, "no device has rank_id 0, the rank of cluster 2", devices("7")),
        (RULE, "server_list[0].host_ip: str 'a host'", servers(host_ip="a host")),
        (RULE, "server_list[0].host_ip: int 1", servers(host_ip=1)),
        (RULE, "device[0].device_ip: str '::1'", devices("0", device_ip="::1")),
        (RULE, "no IPv4", servers(host_ip="", server_id="0", device=[{"rank_id": "0"}])),
    ),
}


def test_r01_a_wrong_argument_of_link_is_refused_before_anything_happens(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    refuse([end], Table("dd.link", GOOD, ARGUMENTS))
    end.do(register, True)  # link() has not been called
    assert end.do(join, *GOOD.values()) == 1, "no id was used up"


def test_r19_the_documented_checks_of_link_come_in_the_documented_order(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    given: list[Any] = [None, None, None]
    #: What is said of the arguments as they are; then this one gets that value.
    steps: list[tuple[str, int, Any]] = [
        ("comm_name", 0, "n"),
        ("cluster_rank_info", 1, dict.fromkeys(range(5), 0)),
        ("5 members", 1, {-1: 0}),
        ("-1", 1, {9: 0}),
        ("rank_table", 2, "{"),
        ("1 members", 1, {9: 1, 8: 0}),
        ("ascending", 1, {8: 0, 9: 1}),
        ("this cluster, 2", 1, {2: 0, 9: 1}),
        ("JSON", 2, GOOD_TABLE),
    ]
    for text, position, value in steps:
        refused([end], [], NoneArgument if given[position] is None else ParamError, [text], join, *given)
        given[position] = value


def test_r01_a_communicator_that_is_unknown_or_of_an_end_that_has_none_is_refused(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    calls = ("unlink", "query_register_mem_status", "explain_communicator")
    unknown = (0, 1, 2**64 - 1, int(LLMStatusCode.LLM_ALREADY_LINK))
    for call_ in calls:
        rows = [bad(UNLINKED, f"communicator {comm_id}", comm_id=comm_id) for comm_id in unknown]
        refuse([end], Table(f"dd.{call_}", {}, {"comm_id": UINT64}, *rows))
    end.world.dd.finalize()
    for call_, args in (("link", tuple(GOOD.values())), *((call_, (1,)) for call_ in calls)):
        with pytest.raises(NotInitialized, match="not initialized"):
            getattr(end.world.dd, call_)(*args)


def test_with_the_hixl_backend_all_three_calls_are_feature_not_enabled(end: LocalEnd) -> None:
    end.start("DECODER", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for function, args in ((join, tuple(GOOD.values())), (drop, (1,)), (status, (1,))):
        refused([end], [], LLMException, ["link_clusters"], function, *args, status=code)
