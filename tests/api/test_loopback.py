"""loopback_links: a unit test of a client links to itself, with a table that holds no addresses (interface §3.5, P)."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, RegisterMemStatus
from llm_datadist.errors import NotLinked, ParamError
from llm_datadist.testing import loopback_links
from tests.support.ends import LocalEnd
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show
from tests.support.ranks import settle
from tests.support.world import World

OK = RegisterMemStatus.OK
SPEC = Spec(2, 4, 64, blocks=True, memory="private")
EMPTY = '{"version": "1.0", "status": "completed", "server_count": "0", "server_list": []}'


@pytest.mark.parametrize("rca", [True, False])
def test_link_is_ok_when_it_returns_and_bytes_are_real(end: LocalEnd, rca: bool) -> None:
    end.start("DECODER", 1, enable_remote_cache_accessible=rca)
    here, there = end.world, World("there")
    with loopback_links() as peers:
        for number, rank_table in enumerate((EMPTY, "{}", "", "not even JSON"), start=1):
            comm_id = here.dd.link("link", {1: 0, 2: 1}, rank_table)
            assert (comm_id, here.dd.query_register_mem_status(comm_id)) == (number, OK)
            there.dd = peers[2]
            theirs, ours = (
                make(world, "kv", replace(SPEC, blocks_key=BlocksCacheKey(cluster, 0)), 10 * number + cluster)
                for world, cluster in ((there, 2), (here, 1))
            )
            call(here, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [0, 1], [1, 3])
            same_bytes(show(here, "kv"), ours := moved(ours, theirs, [(1, 0), (3, 1)]))
            call(there, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [3], [2])
            same_bytes(show(there, "kv"), moved(theirs, ours, [(2, 3)]))
            here.dd.unlink(comm_id)
            assert here.dd.statistics().links == ()


def test_the_members_are_gone_afterwards_and_link_reads_its_table_again(end: LocalEnd) -> None:
    end.start("DECODER", 1)
    with loopback_links({"llm.MemPoolConfig": '{"memory_size": 1048576}'}) as peers:
        for wrong in ({1: 0}, {2: 0, 3: 1}, {2: 1, 1: 0}):
            with pytest.raises(ParamError):
                end.world.dd.link("link", wrong, EMPTY)
        with pytest.raises(TypeError):
            end.world.dd.link("link", {1: 0, 2: 1}, None)  # type: ignore[arg-type]
        assert peers.members == {}
        end.world.dd.link("link", {1: 0, 2: 1, 3: 2, 4: 3}, EMPTY)
        assert sorted(peers.members) == [2, 3, 4]
        assert sorted(each.remote_cluster_id for each in peers[3].statistics().links) == [1, 2, 4]
        assert peers[2].cache_manager.allocate_blocks_cache(CacheDesc(1, [2, 8], DataType.DT_UINT8)).tensor_addrs
        assert LLMDataDist.llm_engine_instance is end.world.dd
        with pytest.raises(KeyError):
            peers[5]
    assert not any(thread.name.startswith("llm-datadist-meet") for thread in threading.enumerate())
    for member in peers.members.values():
        with pytest.raises(RuntimeError, match="not initialized"):
            member.statistics()
    with pytest.raises(ParamError, match="server_list"):
        end.world.dd.link("link", {1: 0, 2: 1}, EMPTY)
    end.do(make, "kv", Spec(blocks=True), 1)
    with pytest.raises(NotLinked):
        end.do(call, "pull_blocks", BlocksCacheKey(2, 0), Use("kv"), [0], [0])


def test_r20_ends_that_the_test_made_itself_meet_each_other(end: LocalEnd) -> None:
    other = LocalEnd("other")
    end.start("PROMPT", 1)
    other.start("DECODER", 2)
    with loopback_links() as peers:
        first = end.world.dd.link("pair", {1: 0, 2: 1}, EMPTY)
        assert end.world.dd.query_register_mem_status(first) is RegisterMemStatus.PREPARING
        second = other.world.dd.link("pair", {1: 0, 2: 1}, EMPTY)
        assert settle([end, other], [first, second]) == [OK, OK]
        assert peers.members == {}
        source = end.do(make, "kv", Spec(blocks=True, blocks_key=BlocksCacheKey(1, 0)), 1)
        target = other.do(make, "kv", Spec(blocks=True), 2)
        other.do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [1, 2], [5, 0])
        same_bytes(other.do(show, "kv"), moved(target, source, [(5, 1), (0, 2)]))
    other.stop()
