"""MindIE's separate deployment engine: a mesh by rank tables, one pull per model id, MIX, unlink while preparing."""

from typing import Final, NamedTuple

import pytest

from llm_datadist import DataType
from llm_datadist import LLMStatusCode as Code
from tests.clients.kv import Kind, holds, options, play, rank_table
from tests.support.ends import ChildEnd
from tests.support.linking import links
from tests.support.moves import wait_until
from tests.support.ranks import PREPARING, host

pytestmark = pytest.mark.covers("MindIE-LLM")

#: By model id (K, V, quantised K, index); an odd number of layers. Its script has K blocks (128, 1, 512), V blocks
#: (128, 1, 64), 1198 of them; fewer here.
KINDS: Final = (
    Kind(3, 37, (128, 1, 16)),
    Kind(3, 37, (128, 1, 2), DataType.DT_BF16),
    Kind(1, 37, (128, 1, 8), DataType.DT_INT8),
    Kind(5, 37, (128,), DataType.DT_FLOAT),
)
BLOCKS: Final = [3, 4, 5, 36, 0], [30, 31, 0, 7, 12]
MODE: Final = {"enable_cache_manager": True, "enable_remote_cache_accessible": True, "sync_kv_timeout": 10_000}
#: Properties first, then two keys written into the dict by hand.
OPTIONS: Final = options(**MODE, link_total_time=1080, link_retry_count=80) | {
    "llm.RdmaServiceLevel": "4",
    "llm.RdmaTrafficClass": "132",
}


class Member(NamedTuple):
    """What a scheduler tells about one end of a link; its device has a loopback address beside the run's host."""

    cluster_id: int
    super_device_id: str | None = None

    @property
    def device_ip(self) -> str:
        first, second, third, fourth = map(int, host(0).split("."))
        return f"{first}.{second + 32}.{third}.{(fourth + self.cluster_id) % 256}"


def arguments(one: Member, other: Member) -> tuple[str, dict[int, int], str]:
    """Return name, ranks and table, the same at both ends: rank 0 is the smaller device ip."""
    pair = sorted((one, other), key=lambda member: tuple(map(int, member.device_ip.split("."))))
    devices = []
    for rank, member in enumerate(pair):
        device = {"device_id": "0", "device_ip": member.device_ip, "rank_id": str(rank)}
        if member.super_device_id is not None:
            device["super_device_id"] = member.super_device_id
        devices.append((host(0), device))
    table = rank_table(devices, "1.0") if one.super_device_id is None else rank_table(devices, "1.2", ["0"])
    ranks = {member.cluster_id: rank for rank, member in enumerate(pair)}
    return f"link{pair[1].device_ip}:{pair[0].device_ip}", ranks, table


def test_flex_is_mix_and_pulls_both_ways_in_super_pods_and_links_again(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prefill, flex = ends
    given = arguments(Member(1, "1"), Member(2, "2"))
    assert arguments(Member(2, "2"), Member(1, "1")) == given
    assert all(part in given[2] for part in ('"version": "1.2"', '"server_count": "1"'))
    play((prefill, "start", "PROMPT", 1, OPTIONS, KINDS, 10, True), (flex, "start", "MIX", 2, OPTIONS, KINDS, 20, True))
    for _ in range(2):
        ids = [play((end, "link", *given)) for end in ends]
        assert Code.LLM_ALREADY_LINK not in ids, "an id that reads like a status"
        for end, comm_id in zip(ends, ids, strict=True):
            play((end, "ready", comm_id))
        assert play((flex, "pull", 1, *BLOCKS)) is Code.LLM_SUCCESS
        holds(flex, KINDS, 20, (10, *BLOCKS))
        assert play((prefill, "pull", 2, [1, 2], [8, 9])) is Code.LLM_SUCCESS
        holds(prefill, KINDS, 10, (20, [1, 2], [8, 9]))
        play((prefill, "unlink", ids[0]))
        wait_until(lambda: flex.do(links) == {})
        assert play((flex, "pull", 1, *BLOCKS)) is Code.LLM_NOT_YET_LINK
        play((flex, "unlink", ids[1]))
    play((flex, "finalize"), (prefill, "finalize"))


def test_a_window_full_of_absent_peers_is_unlinked_while_preparing(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prefill, decoder = ends
    for end, role, number in ((prefill, "PROMPT", 1), (decoder, "DECODER", 2)):
        play((end, "start", role, number, OPTIONS, KINDS, 10 * number, True))
    # 15 that never come, the one that does, and seven more.
    peers = [*range(3, 18), 1, *range(18, 25)]
    ids = {peer: play((decoder, "link", *arguments(Member(2), Member(peer)))) for peer in peers}
    joined = play((prefill, "link", *arguments(Member(1), Member(2))))
    play((decoder, "ready", ids.pop(1)), (prefill, "ready", joined), (decoder, "pull", 1, *BLOCKS))
    holds(decoder, KINDS, 20, (10, *BLOCKS))
    for _ in range(3):
        assert {play((decoder, "query_register_mem_status", each)) for each in ids.values()} == {PREPARING}
    assert decoder.do(links) == {1: "ready"}
    for each in [*ids.values()][:16]:
        play((decoder, "unlink", each))
    play((decoder, "finalize"), (prefill, "finalize"))
