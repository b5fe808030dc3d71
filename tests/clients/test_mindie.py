"""MindIE: a full mesh by rank tables from two daemon threads, one pull per model id, MIX, unlink while
preparing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist import LLMStatusCode
from tests.clients.kv import shown
from tests.clients.mindie import BLOCKS, KINDS, Member, address, arguments, begin, drive, poll_count, wait_links
from tests.support.linking import links
from tests.support.moves import wait_until
from tests.support.ranks import host

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("MindIE-LLM")

OK = LLMStatusCode.LLM_SUCCESS
SRC, DST = [3, 4, 5, 36, 0], [30, 31, 0, 7, 12]


def member(number: int, *, hosts: int = 1, pods: bool = False) -> Member:
    """Cluster ``number``, on one of some hosts."""
    return Member(number, host(number % hosts), address(number, host(0)), str(number) if pods else None)


def pulled(end: ChildEnd, source: ChildEnd, cluster_id: int) -> None:
    """Pull all kinds, and compare every byte of every kind at both ends."""
    before = {kind: [end.do(shown, f"kv {kind}"), source.do(shown, f"kv {kind}")] for kind in KINDS}
    assert end.do(drive, "pull", cluster_id, SRC, DST) == OK
    for kind, (mine, theirs) in before.items():
        for tensor, other in zip(mine, theirs, strict=True):
            tensor[DST] = other[SRC]
        np.testing.assert_equal(end.do(shown, f"kv {kind}"), mine)
        np.testing.assert_equal(source.do(shown, f"kv {kind}"), theirs)
    assert max(SRC + DST) < BLOCKS


def test_two_prefills_and_two_decoders_in_a_full_mesh(processes: Processes) -> None:
    ends = {number: processes.born(f"engine {number}") for number in (1, 2, 3, 4)}
    members = {number: member(number, hosts=2) for number in ends}
    for number, end in ends.items():
        end.do(begin, "prefill" if number <= 2 else "decoder", members[number], 10 * number)
    # The scheduler tells both ends of every link, in any order.
    for number, end in ends.items():
        others = [peer for peer in members if (peer <= 2) != (number <= 2)]
        end.do(drive, "ask_for", *(members[peer] for peer in others[:: -1 if number % 2 else 1]))
    for number, end in ends.items():
        end.do(wait_links, *(peer for peer in members if (peer <= 2) != (number <= 2)))
    for decoder in (3, 4):
        for prefill in (1, 2):
            pulled(ends[decoder], ends[prefill], prefill)
    assert [end.do(poll_count)[1] for end in ends.values()] == [[]] * 4
    for end in ends.values():
        end.do(drive, "finalize")


def test_flex_is_mix_and_pulls_both_ways_also_in_one_server_and_in_super_pods(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prefill, flex = ends
    members = [member(1, pods=True), member(2, pods=True)]
    name, ranks, table = arguments(*members)
    assert arguments(*members[::-1]) == (name, ranks, table)
    assert '"version": "1.2"' in table
    assert '"server_count": "1"' in table
    prefill.do(begin, "prefill", members[0], 10)
    flex.do(begin, "flex", members[1], 20)
    prefill.do(drive, "ask_for", members[1])
    flex.do(drive, "ask_for", members[0])
    prefill.do(wait_links, 2)
    flex.do(wait_links, 1)
    pulled(flex, prefill, 1)
    pulled(prefill, flex, 2)
    flex.do(drive, "finalize")
    prefill.do(drive, "finalize")


def test_a_window_full_of_absent_peers_goes_on_polling_and_is_unlinked_while_preparing(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prefill, decoder = ends
    members = [member(number) for number in range(1, 24)]
    prefill.do(begin, "prefill", members[0], 10)
    decoder.do(begin, "decoder", members[1], 20)
    # 15 that never come, the one that does, and more than the window holds.
    decoder.do(drive, "ask_for", *members[2:17], members[0], *members[17:])
    prefill.do(drive, "ask_for", members[1])
    decoder.do(wait_links, 1)
    prefill.do(wait_links, 2)
    pulled(decoder, prefill, 1)
    wait_until(lambda: decoder.do(poll_count)[0] > 50)
    assert decoder.do(poll_count)[1] == []
    assert decoder.do(links) == {1: "ready"}
    decoder.do(drive, "finalize")  # unlinks the sixteen that are still being prepared
    prefill.do(drive, "finalize")


def test_after_unlink_a_request_ends_with_not_yet_link_and_linking_again_mends_it(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prefill, decoder = ends
    members = [member(1), member(2)]
    prefill.do(begin, "prefill", members[0], 10)
    decoder.do(begin, "decoder", members[1], 20)
    for _ in range(2):
        prefill.do(drive, "ask_for", members[1])
        decoder.do(drive, "ask_for", members[0])
        prefill.do(wait_links, 2)
        decoder.do(wait_links, 1)
        pulled(decoder, prefill, 1)
        prefill.do(drive, "unlink", 2)
        wait_until(lambda: decoder.do(links) == {})
        assert decoder.do(drive, "pull", 1, SRC, DST) == LLMStatusCode.LLM_NOT_YET_LINK
        decoder.do(drive, "unlink", 1)
    decoder.do(drive, "finalize")
    prefill.do(drive, "finalize")
