"""Communicators of four processes, in one process, of killed members, and of an end that is initialised again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist.errors import CacheNotFound, NotLinked
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links
from tests.support.moves import Spec, Use, call, make, picture, wait_until
from tests.support.ranks import (
    FAILED,
    OK,
    PREPARING,
    SECONDS,
    drop,
    finalize_and_init,
    host,
    join,
    joined,
    new_name,
    not_linked,
    settle,
    start_two,
    status,
    table,
)
from tests.support.world import make_config

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist.explain_communicator")


def explain(world: World, cluster_id: int) -> Any:
    return world.dd.explain(cluster_id)


# --- life cycle -------------------------------------------------------------------------------------------------------


def test_four_processes_in_one_communicator_are_linked_pairwise(four: list[ChildEnd]) -> None:
    for cluster_id, end in enumerate(four, 2**63 + 1):
        end.start("MIX", cluster_id, **SECONDS)
    ranks = {end.cluster_id: rank for rank, end in enumerate(four)}
    name, rank_table = new_name(), table(*(host(number) for number in range(4)))
    for number in (2, 0, 3):
        assert four[number].do(join, name, ranks, rank_table) == 1
    wait_until(lambda: len(four[0].do(links)) == 2)
    four[0].do(make, "kv", Spec(blocks=True), 1)
    assert four[0].do(status, 1) is PREPARING
    assert "PREPARING" in not_linked(four[0], four[2].cluster_id), "linked, but the communicator is not ready"
    four[1].do(join, name, ranks, rank_table)
    assert settle(four, [1] * 4) == [OK] * 4
    for number, first in enumerate(four):
        assert sorted(first.do(links)) == sorted(ranks.keys() - {first.cluster_id})
        for second in four[number + 1 :]:
            bytes_move_both_ways(first, second)
    four[3].do(drop, 1)
    wait_until(lambda: all(len(end.do(links)) == 2 for end in four[:3]))
    bytes_move_both_ways(four[0], four[1])


def test_link_clusters_claims_a_link_whose_communicator_is_not_ready(four: list[ChildEnd]) -> None:
    """Two of three members are linked; link_clusters makes that link usable, and keeps it when the rest fails."""
    for cluster_id, end in enumerate(four[:2], 1):
        end.start("MIX", cluster_id, listen_ip_info="127.0.0.1:0", link_total_time=3 if cluster_id == 1 else 60)
    ranks, name, rank_table = {1: 0, 2: 1, 3: 2}, new_name(), table(*[host(0)] * 3)
    for end in four[:2]:
        end.do(join, name, ranks, rank_table)
    wait_until(lambda: all(end.do(links) for end in four[:2]))
    four[1].do(make, "kv", Spec(blocks=True), 1)
    not_linked(four[1], 1)
    assert four[1].do(link, [info(1, four[0].port)]) == SUCCESS
    already = LLMStatusCode.LLM_ALREADY_LINK
    assert four[1].do(link, [info(1, four[0].port)]) == (already, [already])
    four[1].do(drop, 1)
    assert four[1].do(links) == {1: "ready"}
    with pytest.raises(CacheNotFound):
        four[1].do(call, "pull_blocks", BlocksCacheKey(1, 0), Use("kv"), [0], [0])
    # At the other end the communicator fails, and its link with it: who asked for it by link_clusters dials again.
    assert settle(four[:1], [1]) == [FAILED]
    wait_until(lambda: four[1].do(is_redialled, 1))
    bytes_move_both_ways(*four[:2])


def is_redialled(world: World, peer: int) -> bool:
    engine = world.dd._engine
    link_ = None if engine is None else engine.links.peek(peer)
    return link_ is not None and link_.origin.reconnected and link_.usable


def test_r20_ends_of_one_process_join_each_other_and_others(local_pair: Pair) -> None:
    ends = start_two(local_pair)
    ids = joined(*ends)
    assert [end.do(explain, peer).transport for end, peer in zip(ends, (2, 1), strict=True)] == ["inproc", "inproc"]
    assert ids == [1, 1]
    bytes_move_both_ways(*ends)


def test_r21_finalize_with_communicators_then_init_and_link_again(pair: Pair) -> None:
    ends = start_two(pair)
    joined(*ends)
    ends[0].do(join, new_name(), {1: 0, 77: 1}, table(host(0), host(1)))
    for end in ends:
        end.do(finalize_and_init, make_config(extra={"llm.Transport": pair.transport}, **SECONDS))
        assert end.do(picture).communicators == ()
        with pytest.raises(NotLinked):
            end.do(status, 1)
    assert joined(*ends) == [1, 1], "ids begin anew"
    bytes_move_both_ways(*ends)


def test_kill_9_of_a_member_while_preparing_fails_the_others_in_time(four: list[ChildEnd]) -> None:
    for cluster_id, end in enumerate(four, 1):
        end.start("MIX", cluster_id, link_total_time=3)
    # Cluster 3 joins and is killed before cluster 4 comes; then cluster 4 comes, and finds 1 and 2 only.
    survivors, victim = [four[0], four[1], four[3]], four[2]
    ranks, name, rank_table = {1: 0, 2: 1, 3: 2, 4: 3}, new_name(), table(*[host(0)] * 4)
    for end in (victim, *survivors[:2]):
        end.do(join, name, ranks, rank_table)
    wait_until(lambda: all(len(end.do(links)) == 2 for end in survivors[:2]))
    victim.kill()
    survivors[2].do(join, name, ranks, rank_table)
    assert settle(survivors, [1, 1, 1]) == [FAILED] * 3
    four.remove(victim)


def test_r22_kill_9_of_a_member_that_was_ready_and_its_successor_joins_without_any_unlink(shm_pair: Pair) -> None:
    survivor, victim = shm_pair.prompt, ChildEnd("victim")
    for killed in (3, 0):  # the one that dialled, the one that listened
        survivor.start("MIX", 1, **SECONDS)
        victim.start("MIX", killed, **SECONDS)
        joined(survivor, victim)
        survivor.do(make, "kv", Spec(blocks=True), 1)
        victim.kill()
        alone(survivor)
        not_linked(survivor, killed)
        victim = ChildEnd("successor")
        victim.start("MIX", killed, **SECONDS)
        assert joined(survivor, victim) == [2, 1]
        bytes_move_both_ways(survivor, victim)
        survivor.stop()
        victim.stop()
    victim.close()
