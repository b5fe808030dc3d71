"""link, unlink, query_register_mem_status: rank tables become links, whoever calls first (interface §3.5, B2.3)."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.errors import LLMStatusCode, NotLinked
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import Spec, make, picture, wait_until
from tests.support.ranks import (
    FAILED,
    OK,
    PREPARING,
    SECONDS,
    drop,
    explained,
    host,
    join,
    join_all,
    joined,
    new_name,
    not_linked,
    settle,
    start_two,
    status,
    table,
)

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist: link query_register_mem_status unlink")


def explain(world: World, cluster_id: int) -> Any:
    return world.dd.explain(cluster_id)


# --- two members ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1], ids=["prompt first", "decoder first"])
def test_nobody_has_to_be_first_and_the_link_works_both_ways(pair: Pair, first: int) -> None:
    ends = start_two(pair)
    early, late = ends[first], ends[1 - first]
    name, ranks, rank_table = new_name(), {1: 0, 2: 1}, table(host(0), host(1))
    early.do(make, "kv", Spec(blocks=True), 1)
    assert early.do(join, name, ranks, rank_table) == 1
    assert early.do(status, 1) is PREPARING
    assert "PREPARING" in not_linked(early, late.cluster_id)
    assert late.do(join, name, ranks, rank_table) == 1
    assert settle(ends, [1, 1]) == [OK, OK]
    for end, peer in ((early, late), (late, early)):
        assert end.do(links) == {peer.cluster_id: "ready"}
        there = end.do(explain, peer.cluster_id)
        assert (there.transport, there.remote_cluster_id) == (pair.transport, peer.cluster_id)
        assert end.do(explained, 1).waiting_for == ()
    bytes_move_both_ways(*ends)


def test_the_members_may_be_on_one_host_with_one_address_and_the_table_may_be_spelled_differently(pair: Pair) -> None:
    ends = start_two(pair)
    name, first = new_name(), table(host(0), host(0))
    second = json.dumps(json.loads(first), indent=2, sort_keys=True)
    assert first != second
    ids = [ends[0].do(join, name, {1: 0, 2: 1}, first), ends[1].do(join, name, {1: 0, 2: 1}, second)]
    assert settle(ends, ids) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_a_member_that_never_calls_is_failed_in_bounded_time_with_the_reason(
    end: LocalEnd, caplog: pytest.LogCaptureFixture
) -> None:
    end.start("PROMPT", 5, link_total_time=1)
    end.do(make, "kv", Spec(blocks=True), 1)
    ids = [end.do(join, new_name(), ranks, table(host(0), host(1))) for ranks in ({5: 0, 9: 1}, {1: 0, 5: 1})]
    assert settle([end, end], ids, 10) == [FAILED, FAILED]
    for comm_id, missing in zip(ids, (9, 1), strict=True):
        told = end.do(explained, comm_id)
        assert told.waiting_for == (missing,)
        assert f"cluster {missing} did not join within 1 s" in told.reason
        assert any(told.reason in record.getMessage() for record in caplog.records if record.levelname == "WARNING")
        assert "did not join" in not_linked(end, missing)
        assert end.do(status, comm_id) is FAILED, "for good"
        end.do(drop, comm_id)
    assert end.world.dd.statistics().communicators == ()


def test_a_failed_communicator_does_not_stand_in_the_way_of_the_next_one(pair: Pair) -> None:
    ends = start_two(pair, link_total_time=1)
    name, rank_table = new_name(), table(host(0), host(0))
    comm_id = ends[0].do(join, name, {1: 0, 2: 1}, rank_table)
    assert settle(ends[:1], [comm_id]) == [FAILED]
    # The same name again, while the failed one is still there.
    ids = join_all(ends, name, rank_table)
    assert ids == [2, 1]
    assert settle(ends, ids) == [OK, OK]
    bytes_move_both_ways(*ends)


@pytest.mark.parametrize(
    ("ranks", "rank_table", "part"),
    [
        ({1: 0, 2: 1, 3: 2}, None, "cluster_rank_info differs: {1: 0, 2: 1"),
        ({1: 1, 2: 3}, None, "cluster_rank_info differs"),
        ({1: 0, 2: 1}, {"version": "1.2"}, "rank_table differs: digest"),
    ],
    ids=["members", "ranks", "table"],
)
def test_members_that_do_not_mean_the_same_fail_at_once_and_say_what_differs(
    shm_pair: Pair, ranks: dict[int, int], rank_table: dict[str, Any] | None, part: str
) -> None:
    ends = start_two(shm_pair)
    name, hosts = new_name(), [host(0)] * 4
    ids = [
        ends[0].do(join, name, {1: 0, 2: 1}, table(*hosts)),
        ends[1].do(join, name, ranks, table(*hosts, **(rank_table or {}))),
    ]
    assert settle(ends, ids, 20) == [FAILED, FAILED], "long before link_total_time"
    for end, comm_id in zip(ends, ids, strict=True):
        reason = end.do(explained, comm_id).reason
        assert part in reason
        assert "cluster 1" in reason
        assert "cluster 2" in reason
    assert [end.do(links) for end in ends] == [{}, {}]


def test_remote_cache_access_at_one_end_only_fails_at_both(shm_pair: Pair) -> None:
    shm_pair.prompt.start("PROMPT", 1, enable_remote_cache_accessible=True, **SECONDS)
    shm_pair.decoder.start("DECODER", 2, **SECONDS)
    ends = shm_pair.prompt, shm_pair.decoder
    ids = join_all(ends)
    assert settle(ends, ids) == [FAILED, FAILED]
    assert all(
        "EnableRemoteCacheAccessible differs" in e.do(explained, c).reason for e, c in zip(ends, ids, strict=True)
    )


def test_ends_without_a_common_transport_fail_in_time_and_say_why(shm_pair: Pair) -> None:
    shm_pair.prompt.start("PROMPT", 1, extra={"llm.Transport": "shm"}, link_total_time=2)
    shm_pair.decoder.start("DECODER", 2, extra={"llm.Transport": "tcp"}, link_total_time=2)
    ends = shm_pair.prompt, shm_pair.decoder
    ids = join_all(ends)
    assert settle(ends, ids) == [FAILED, FAILED]
    assert "llm.Transport differs: shm at the peer, tcp here" in ends[1].do(explained, ids[1]).reason


# --- unlink -----------------------------------------------------------------------------------------------------------


def test_unlink_is_local_and_the_other_member_sees_the_end(pair: Pair) -> None:
    ends = start_two(pair)
    ids = joined(*ends)
    ends[1].do(make, "kv", Spec(blocks=True), 1)
    ends[0].do(drop, ids[0])
    alone(*ends)
    assert ends[1].do(status, ids[1]) is OK, "until it unlinks itself"
    not_linked(ends[1], 1)
    with pytest.raises(NotLinked, match=f"communicator {ids[0]}"):
        ends[0].do(status, ids[0])
    ends[1].do(drop, ids[1])
    assert joined(*ends) == [2, 2]
    bytes_move_both_ways(*ends)


def test_unlink_while_preparing_ends_the_preparation(shm_pair: Pair) -> None:
    ends = start_two(shm_pair, link_total_time=2)
    name, rank_table = new_name(), table(host(0), host(0))
    before = [end.do(picture) for end in ends]
    for end in ends:
        end.do(drop, end.do(join, name, {1: 0, 2: 1}, rank_table))
        assert end.do(picture).communicators == ()
    # Whoever comes after waits in vain.
    comm_id = ends[0].do(join, name, {1: 0, 2: 1}, rank_table)
    assert settle(ends[:1], [comm_id]) == [FAILED]
    ends[0].do(drop, comm_id)
    assert [end.do(picture) for end in ends] == before
    ids = join_all(ends, name, rank_table)
    assert settle(ends, ids) == [OK, OK]


def test_unlink_waits_for_a_running_pull(local_pair: Pair) -> None:
    """The link is given up after the operation, not under it: every byte of the pull arrives."""
    ends = start_two(local_pair)
    comm_id, _ = joined(*ends)
    link_ = ends[0].do(lambda world: world.dd._engine.links.get(2))
    order: list[str] = []

    def give_up() -> None:
        ends[0].do(drop, comm_id)
        order.append("unlinked")

    with link_.operation():
        unlinker = threading.Thread(target=give_up)
        unlinker.start()
        wait_until(lambda: link_.state.value == "draining")
        order.append("operation ends")
    unlinker.join()
    assert order == ["operation ends", "unlinked"]
    alone(*ends)


# --- several communicators with one member ----------------------------------------------------------------------------


@pytest.mark.parametrize("gone", [0, 1], ids=["the older goes", "the newer goes"])
def test_a_second_communicator_has_its_own_id_and_keeps_the_link(pair: Pair, gone: int) -> None:
    ends = start_two(pair)
    assert joined(*ends) == [1, 1]
    assert joined(*ends) == [2, 2]
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]
    for end in ends:
        end.do(drop, (1, 2)[gone])
    bytes_move_both_ways(*ends)
    ends[0].do(drop, (2, 1)[gone])
    alone(*ends)


def test_two_calls_with_the_very_same_arguments_find_each_other_pairwise(pair: Pair) -> None:
    ends = start_two(pair)
    name, rank_table = new_name(), table(host(0), host(0))
    ids = [join_all(ends, name, rank_table) for _ in range(2)]
    assert ids == [[1, 1], [2, 2]]
    assert [settle(ends, each) for each in ids] == [[OK, OK], [OK, OK]]
    bytes_move_both_ways(*ends)


def test_a_link_of_link_clusters_is_used_and_outlives_the_communicator(pair: Pair) -> None:
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **SECONDS)
    pair.decoder.start("DECODER", 2, extra=extra, **SECONDS)
    ends = pair.prompt, pair.decoder
    pair.link()
    before = [end.do(explain, peer) for end, peer in zip(ends, (2, 1), strict=True)]
    ids = joined(*ends)
    assert [end.do(explain, peer) for end, peer in zip(ends, (2, 1), strict=True)] == before, "the same link"
    for end, comm_id in zip(ends, ids, strict=True):
        end.do(drop, comm_id)
    bytes_move_both_ways(*ends)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(*ends)


def test_link_clusters_over_a_communicator_is_already_link_and_unlink_clusters_ends_it(pair: Pair) -> None:
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **SECONDS)
    pair.decoder.start("DECODER", 2, extra=extra, **SECONDS)
    ends = pair.prompt, pair.decoder
    ids = joined(*ends)
    already = LLMStatusCode.LLM_ALREADY_LINK
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (already, [already])
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(*ends)
    assert [end.do(status, comm_id) for end, comm_id in zip(ends, ids, strict=True)] == [OK, OK]
    pair.decoder.do(make, "kv", Spec(blocks=True), 1)
    not_linked(pair.decoder, 1)
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    for end, comm_id in zip(ends, ids, strict=True):
        end.do(drop, comm_id)
    bytes_move_both_ways(*ends)


def test_forty_communicators_begun_in_opposite_orders_all_become_ready(shm_pair: Pair) -> None:
    ends = start_two(shm_pair)
    names, rank_table = [new_name() for _ in range(40)], table(host(0), host(0))
    for end, order in zip(ends, (names, names[::-1]), strict=True):
        for name in order:
            end.do(join, name, {1: 0, 2: 1}, rank_table)
    for end in ends:
        assert settle([end] * 40, range(1, 41)) == [OK] * 40
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]
    for end in ends:
        for comm_id in range(1, 41):
            end.do(drop, comm_id)
    alone(*ends)


def test_members_that_never_come_do_not_hold_up_one_that_does(shm_pair: Pair) -> None:
    ends = start_two(shm_pair)
    for missing in range(100, 130):
        ends[1].do(join, new_name(), {2: 0, missing: 1}, table(host(0), host(1)))
        ends[0].do(join, new_name(), {1: 0, missing: 1}, table(host(0), host(1)))
    late = ends[1].cluster_id
    # Those that are dialled: more than there are threads.
    dead = [ends[1].do(join, new_name(), {1: 0, late: 1}, table(host(2), host(3))) for _ in range(40)]
    comm_ids = joined(*ends)
    bytes_move_both_ways(*ends)
    assert {ends[1].do(status, each) for each in dead} == {PREPARING}
    assert comm_ids == [31, 71]
