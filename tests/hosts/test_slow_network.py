"""Networks that are slow, far, lossy and out of order: right bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey
from tests.hosts.conftest import impossible
from tests.hosts.network import Impossible
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, info, result_there, unlink
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.hosts.cluster import Cluster
    from tests.support.world import World

BULK, INBOX = BlocksCacheKey(1, 0), BlocksCacheKey(1, 1)
BULKY = Spec(tensors=4, rows=64, stride=64 * 1024, blocks=True)  # 16 MiB
ROW = CacheKey(1, 5)
ALL = list(range(BULKY.rows))
UNHURRIED: dict[str, Any] = {"sync_kv_timeout": 60_000, "extra": {"llm.PeerTimeout": "60"}}


def pull_until_told(world: World) -> int:
    """Pull the bulk again and again; return how often."""
    count = 0
    while "enough" not in world.memory:
        call(world, "pull_blocks", BULK, Use("bulk"), ALL[::-1], ALL)
        count += 1
    return count


def tell(world: World) -> None:
    world.memory["enough"] = True


def test_several_readers_fill_the_pipe_and_others_are_answered_meanwhile(cluster: Cluster) -> None:
    home, *away = cluster.hosts
    prompt = cluster.born(home, "PROMPT", 1, **UNHURRIED)
    readers = [cluster.born(host, "DECODER", number, **UNHURRIED) for number, host in enumerate(away[:2], 2)]
    hurried = cluster.born(away[2], "DECODER", 4, sync_kv_timeout=5_000)
    for decoder in (*readers, hurried):
        cluster.link(decoder, prompt)
    bulk = prompt.do(make, "bulk", replace(BULKY, blocks_key=BULK), 1)
    turned = list(zip(ALL, ALL[::-1], strict=True))
    wanted = [moved(reader.do(make, "bulk", BULKY, 2), bulk, turned) for reader in readers]
    rows = prompt.do(make, "rows", Spec(keys=(ROW,)), 3)
    rows_there = hurried.do(make, "rows", Spec(), 4)
    home.limit(80)  # 32 MiB take more than three seconds
    sent = home.bytes_sent()
    for reader in readers:
        reader.do(begin_there, "bulk", pull_until_told)
    wait_until(lambda: home.bytes_sent() > sent + (1 << 20))
    hurried.do(call, "pull_cache", ROW, Use("rows"), 5)
    bytes_move_both_ways(readers[0], prompt)
    assert hurried.do(unlink, [info(1, prompt.port, ip=home.address)], 5_000) == SUCCESS
    assert home.held_up() > 10
    for reader in readers:
        reader.do(tell)
    same_bytes(hurried.do(show, "rows"), moved(rows_there, rows, [(5, 0)]))
    for reader, right in zip(readers, wanted, strict=True):
        assert reader.do(result_there, "bulk") >= 1
        same_bytes(reader.do(show, "bulk"), right)
    same_bytes(prompt.do(show, "bulk"), bulk)


@pytest.mark.parametrize("memory", ["pool", "private"])
def test_pulls_and_pushes_through_delay_loss_and_reordering_move_right_bytes(cluster: Cluster, memory: str) -> None:
    hosts, settings = cluster.hosts[:2], UNHURRIED | {"enable_remote_cache_accessible": True}
    small = Spec(tensors=4, rows=16, stride=16 * 1024, blocks=True, memory=memory)  # 1 MiB
    there, back = list(range(0, 16, 2)), list(range(15, 7, -1))
    try:
        with cluster.network.relay(hosts, seed=11, delay=0.002, jitter=0.003, loss=0.01) as counts:
            prompt = cluster.born(hosts[0], "PROMPT", 1, address=hosts[0].relayed, **settings)
            decoder = cluster.born(hosts[1], "DECODER", 2, address=hosts[1].relayed, **settings)
            cluster.link(decoder, prompt)
            bulk = prompt.do(make, "bulk", replace(small, blocks_key=BULK), 1)
            inbox = prompt.do(make, "inbox", replace(small, blocks_key=INBOX), 2)
            here = decoder.do(make, "bulk", small, 3)
            decoder.do(call, "pull_blocks", BULK, Use("bulk"), there, back)
            here = moved(here, bulk, zip(back, there, strict=True))
            same_bytes(decoder.do(show, "bulk"), here)
            decoder.do(call, "push_blocks", INBOX, Use("bulk"), back, there)
            same_bytes(prompt.do(show, "inbox"), moved(inbox, here, zip(there, back, strict=True)))
            same_bytes(prompt.do(show, "bulk"), bulk)
            bytes_move_both_ways(decoder, prompt)
            cluster.part()  # through the relay
    except Impossible as error:
        impossible(error)
    assert counts.lost > 0
    assert counts.overtaken > 0
