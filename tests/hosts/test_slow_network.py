"""Networks that are slow, far, lossy and out of order: right bytes, or a deadline that holds."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded
from tests.hosts.conftest import impossible
from tests.hosts.network import Impossible
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, info, links, result_there, unlink
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.cluster import Cluster
    from tests.hosts.relay import Counts
    from tests.support.ends import ChildEnd
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


@contextmanager
def far_apart(
    cluster: Cluster, chances: dict[str, float], **settings: Any
) -> Iterator[tuple[ChildEnd, ChildEnd, Counts]]:
    """A prompt and a decoder, linked through a relay; the counts are right afterwards."""
    hosts = cluster.hosts[:2]
    try:
        with cluster.network.relay(hosts, seed=11, **chances) as counts:
            settings = {"enable_remote_cache_accessible": True} | UNHURRIED | settings
            prompt = cluster.born(hosts[0], "PROMPT", 1, address=hosts[0].relayed, **settings)
            decoder = cluster.born(hosts[1], "DECODER", 2, address=hosts[1].relayed, **settings)
            cluster.link(decoder, prompt)
            yield prompt, decoder, counts
            cluster.part()  # through the relay
    except Impossible as error:
        impossible(error)


SMALL = Spec(tensors=4, rows=16, stride=16 * 1024, blocks=True)  # 1 MiB
BAD_WEATHER = {"delay": 0.002, "jitter": 0.003, "loss": 0.01}


@pytest.mark.parametrize("memory", ["pool", "private"])
def test_pulls_and_pushes_through_delay_loss_and_reordering_move_right_bytes(cluster: Cluster, memory: str) -> None:
    there, back = list(range(0, 16, 2)), list(range(15, 7, -1))
    with far_apart(cluster, BAD_WEATHER) as (prompt, decoder, counts):
        bulk = prompt.do(make, "bulk", replace(SMALL, blocks_key=BULK, memory=memory), 1)
        inbox = prompt.do(make, "inbox", replace(SMALL, blocks_key=INBOX, memory=memory), 2)
        here = decoder.do(make, "bulk", replace(SMALL, memory=memory), 3)
        decoder.do(call, "pull_blocks", BULK, Use("bulk"), there, back)
        here = moved(here, bulk, zip(back, there, strict=True))
        same_bytes(decoder.do(show, "bulk"), here)
        decoder.do(call, "push_blocks", INBOX, Use("bulk"), back, there)
        same_bytes(prompt.do(show, "inbox"), moved(inbox, here, zip(there, back, strict=True)))
        same_bytes(prompt.do(show, "bulk"), bulk)
        bytes_move_both_ways(decoder, prompt)
    assert counts.lost > 0
    assert counts.overtaken > 0


def test_a_pull_that_the_network_is_too_slow_for_ends_at_its_deadline_and_the_next_is_right(cluster: Cluster) -> None:
    # Two or three round trips at most: a new connection starts with a few packets, whatever it grows to later.
    with far_apart(cluster, {"delay": 0.15}, sync_kv_timeout=1_200) as (prompt, decoder, _):
        bulk = prompt.do(make, "bulk", replace(BULKY, blocks_key=BULK), 1)
        decoder.do(make, "bulk", BULKY, 2)
        row = decoder.do(make, "rows", Spec(), 3)
        with pytest.raises(DeadlineExceeded) as caught:
            decoder.do(call, "pull_blocks", BULK, Use("bulk"), ALL, ALL)
        assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
        assert decoder.do(links) == {1: "ready"}
        same_bytes(decoder.do(show, "rows"), row)
        wait_until(lambda: decoder.do(one_block))
        same_bytes([t[7:8] for t in decoder.do(show, "bulk")], [t[3:4] for t in bulk])
        same_bytes(prompt.do(show, "bulk"), bulk)


def one_block(world: World) -> bool:
    """Pull block 3 to block 7; say whether its time was enough."""
    try:
        call(world, "pull_blocks", BULK, Use("bulk"), [3], [7])
    except DeadlineExceeded:
        return False
    return True
