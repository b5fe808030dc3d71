"""A network that is slow and full: right bytes, and others are answered."""

from dataclasses import replace
from typing import Any

from llm_datadist import BlocksCacheKey
from tests.hosts.conftest import Cluster
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, info, result_there, unlink
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show, wait_until
from tests.support.world import World

BULK, SMALL, INBOX = BlocksCacheKey(1, 0), BlocksCacheKey(1, 1), BlocksCacheKey(2, 1)
BULKY = Spec(tensors=4, rows=64, stride=64 * 1024, blocks=True)  # 16 MiB
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
    settings = UNHURRIED | {"enable_remote_cache_accessible": True}
    prompt = cluster.born(home, "PROMPT", 1, **settings)
    readers = [cluster.born(host, "DECODER", number, **settings) for number, host in enumerate(away[:2], 2)]
    hurried = cluster.born(away[2], "DECODER", 4, sync_kv_timeout=5_000, enable_remote_cache_accessible=True)
    for decoder in (*readers, hurried):
        cluster.link(decoder, prompt)
    bulk = prompt.do(make, "bulk", replace(BULKY, blocks_key=BULK), 1)
    turned = list(zip(ALL, ALL[::-1], strict=True))
    wanted = [
        moved(reader.do(make, "bulk", replace(BULKY, memory=memory), 2), bulk, turned)
        for reader, memory in zip(readers, ("pool", "private"), strict=True)
    ]
    inbox = readers[0].do(make, "inbox", replace(BULKY, rows=16, blocks_key=INBOX), 5)
    small = prompt.do(make, "small", Spec(blocks=True, blocks_key=SMALL), 3)
    small_there = hurried.do(make, "small", Spec(blocks=True), 4)
    home.limit(80)  # 32 MiB take more than three seconds
    sent = home.bytes_sent()
    for reader in readers:
        reader.do(begin_there, "pulls", pull_until_told)
    prompt.do(begin_there, "push", call, "push_blocks", INBOX, Use("bulk"), ALL[48:], ALL[:16])
    wait_until(lambda: home.bytes_sent() > sent + (1 << 20))
    hurried.do(call, "pull_blocks", SMALL, Use("small"), [0], [5])
    bytes_move_both_ways(readers[0], prompt)
    assert hurried.do(unlink, [info(1, prompt.port, ip=home.address)], 5_000) == SUCCESS
    assert home.held_up() > 10
    assert prompt.do(result_there, "push") is None
    same_bytes(readers[0].do(show, "inbox"), moved(inbox, bulk, zip(ALL[:16], ALL[48:], strict=True)))
    for reader in readers:
        reader.do(tell)
    same_bytes(hurried.do(show, "small"), moved(small_there, small, [(5, 0)]))
    for reader, right in zip(readers, wanted, strict=True):
        assert reader.do(result_there, "pulls") >= 1
        same_bytes(reader.do(show, "bulk"), right)
    same_bytes(prompt.do(show, "bulk"), bulk)
