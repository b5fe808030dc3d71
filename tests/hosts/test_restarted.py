"""Hosts that are restarted under the same address: a process killed, another one with its port and cluster id
(interface R22)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from llm_datadist.errors import CacheNotFound, PeerLost
from tests.support.linking import begin_there, bytes_move_both_ways, links, result_there
from tests.support.moves import Spec, Use, cache_id, call, forget, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.hosts.cluster import Cluster
    from tests.support.ends import ChildEnd

BULK = BlocksCacheKey(1, 0)
BULKY = Spec(tensors=4, rows=64, stride=64 * 1024, blocks=True, blocks_key=BULK)  # 16 MiB
ROW = CacheKey(1, 5)
ALL = list(range(BULKY.rows))
PATIENT: dict[str, Any] = {"sync_kv_timeout": 60_000, "extra": {"llm.PeerTimeout": "600"}}


def pulls_move_new_bytes(prompt: ChildEnd, decoder: ChildEnd, seed: int) -> None:
    """What the prompt publishes now arrives, by the keys of before."""
    bulk = prompt.do(make, "bulk", BULKY, seed)
    rows = prompt.do(make, "rows", Spec(keys=(ROW,)), seed + 1)
    target = decoder.do(make, "rows", Spec(), seed + 2)
    decoder.do(make, "bulk", Spec(BULKY.tensors, BULKY.rows, BULKY.stride, blocks=True), seed + 3)
    decoder.do(call, "pull_blocks", BULK, Use("bulk"), ALL, ALL)
    same_bytes(decoder.do(show, "bulk"), bulk)
    decoder.do(call, "pull_cache", ROW, Use("rows"), 5)
    same_bytes(decoder.do(show, "rows"), moved(target, rows, [(5, 0)]))
    bytes_move_both_ways(decoder, prompt)


def test_r22_a_prompt_restarted_in_the_middle_of_a_pull_is_linked_again_without_unlink(cluster: Cluster) -> None:
    home, far, third, _ = cluster.hosts
    prompt = cluster.born(home, "PROMPT", 1)
    other = cluster.born(third, "PROMPT", 2)
    decoder = cluster.born(far, "DECODER", 3, **PATIENT)
    for each in (prompt, other):
        cluster.link(decoder, each)
    pulls_move_new_bytes(prompt, decoder, 1)
    old = prompt.do(cache_id, "rows")
    home.limit(40)
    sent = home.bytes_sent()
    decoder.do(begin_there, "bulk", call, "pull_blocks", BULK, Use("bulk"), ALL, ALL)
    wait_until(lambda: home.bytes_sent() > sent + (1 << 20))
    port = prompt.port
    cluster.kill(prompt)
    error = decoder.do(result_there, "bulk")
    assert isinstance(error, PeerLost), error
    assert (error.peer, error.phase) == (1, "copy")
    bytes_move_both_ways(decoder, other)
    home.unlimit()

    assert port is not None
    again = cluster.born(home, "PROMPT", 1, port=port)
    wait_until(lambda: decoder.do(links).get(1) != "ready")
    cluster.link(decoder, again)
    # The ids of the dead name nothing yet, whatever this process knew about them.
    for key in (CacheKeyByIdAndIndex(1, old), ROW):
        with pytest.raises(CacheNotFound):
            decoder.do(call, "pull_cache", key, Use("rows"))
        with pytest.raises(CacheNotFound):
            decoder.do(call, "pull_blocks", key, Use("bulk"), [], [0])
    with pytest.raises(CacheNotFound):
        decoder.do(call, "pull_blocks", BULK, Use("bulk"), [1], [0])
    for name in ("bulk", "rows"):
        decoder.do(forget, name)
    pulls_move_new_bytes(again, decoder, 11)
    bytes_move_both_ways(decoder, other)


def test_r22_a_decoder_restarted_behind_a_cut_replaces_the_link_its_prompt_believes_in(cluster: Cluster) -> None:
    home, far, *_ = cluster.hosts
    prompt = cluster.born(home, "PROMPT", 1, **PATIENT)
    decoder = cluster.born(far, "DECODER", 3, **PATIENT)
    cluster.link(decoder, prompt)
    before = prompt.do(picture).pins
    pulls_move_new_bytes(prompt, decoder, 1)
    port = decoder.port
    assert port is not None
    cluster.network.cut(home, far)
    cluster.kill(decoder)  # nobody hears of it
    assert prompt.do(links) == {3: "ready"}
    again = cluster.born(far, "DECODER", 3, port=port, **PATIENT)
    cluster.network.heal()
    cluster.link(again, prompt)
    for name in ("bulk", "rows"):
        prompt.do(forget, name)
    pulls_move_new_bytes(prompt, again, 11)
    wait_until(lambda: prompt.do(picture).pins == before)
