"""loopback_links: a unit test of a client links to itself, with a table that holds no addresses (interface §3.5, P)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, RegisterMemStatus
from llm_datadist.errors import NotLinked, ParamError
from llm_datadist.testing import loopback_links
from tests.support.ends import LocalEnd
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show
from tests.support.ranks import settle

if TYPE_CHECKING:
    from llm_datadist import Cache

OK = RegisterMemStatus.OK
EMPTY = '{"version": "1.0", "status": "completed", "server_count": "0", "server_list": []}'


def registered(datadist: LLMDataDist, fill: int) -> tuple[Cache, np.ndarray]:
    """Register two tensors of four blocks of 64 bytes."""
    memory = np.full((2, 4, 64), fill, np.uint8)
    key = BlocksCacheKey(datadist.cluster_id, 0)
    desc = CacheDesc(2, [4, 64], DataType.DT_UINT8)
    return datadist.cache_manager.register_blocks_cache(desc, [tensor.ctypes.data for tensor in memory], key), memory


@pytest.mark.parametrize("rca", [True, False])
def test_link_is_ok_when_it_returns_and_bytes_are_real(end: LocalEnd, rca: bool) -> None:
    end.start("DECODER", 1, enable_remote_cache_accessible=rca)
    datadist = end.world.dd
    with loopback_links() as peers:
        for number, rank_table in enumerate((EMPTY, "{}", "", "not even JSON"), start=1):
            comm_id = datadist.link("link", {1: 0, 2: 1}, rank_table)
            assert (comm_id, datadist.query_register_mem_status(comm_id)) == (number, OK)
            there, source = registered(peers[2], 7)
            here, target = registered(datadist, 0)
            datadist.cache_manager.pull_blocks(BlocksCacheKey(2, 0), here, [0, 1], [1, 3])
            wanted = np.zeros_like(target)
            wanted[:, [1, 3]] = 7
            np.testing.assert_array_equal(target, wanted)
            assert (source == 7).all()
            peers[2].cache_manager.pull_blocks(BlocksCacheKey(1, 0), there, [0], [2])
            assert (source[:, 2] == 0).all()
            datadist.unlink(comm_id)
            assert datadist.statistics().links == ()


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
