"""omni-infer with static links: every pair linked at the start, in bursts; two ranks for one decoder."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.clients.kv import shown
from tests.clients.omni_static import BLOCKS, KINDS, Rank, begin, drive, finalize_all, link_all, pull_kv
from tests.support.linking import links
from tests.support.ranks import host

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("omni-infer, static")

SRC, DST = [1, 2, 3, 15], [8, 0, 1, 12]


def pulled(decoder: ChildEnd, own: int, prompt: ChildEnd, cluster_id: int, dst: list[int]) -> None:
    """Pull all positions and compare every byte of both caches."""
    assert max(SRC + dst) < BLOCKS
    expected = [decoder.do(shown, f"kv {own} {kind}") for kind in range(KINDS)]
    sources = [prompt.do(shown, f"kv {cluster_id} {kind}") for kind in range(KINDS)]
    decoder.do(pull_kv, own, cluster_id, SRC, dst)
    for kind in range(KINDS):
        for tensor, source in zip(expected[kind], sources[kind], strict=True):
            tensor[dst] = source[SRC]
        np.testing.assert_equal(decoder.do(shown, f"kv {own} {kind}"), expected[kind])
        np.testing.assert_equal(prompt.do(shown, f"kv {cluster_id} {kind}"), sources[kind])


def test_two_prompts_and_two_decoders_and_two_ranks_serve_one_decoder(processes: Processes) -> None:
    prompts = [Rank(number, host(number % 2), number - 1) for number in (1, 2)]
    decoders = [Rank(number, host(number % 2), number - 11) for number in (11, 12)]
    ends = {rank.cluster_id: processes.born(f"cluster {rank.cluster_id}") for rank in prompts + decoders}
    for rank in prompts + decoders:
        ends[rank.cluster_id].do(begin, "PROMPT" if rank in prompts else "DECODER", rank, 10 * rank.cluster_id)
    for rank in prompts + decoders:
        ends[rank.cluster_id].do(link_all, decoders if rank in prompts else prompts)
    for cluster_id, end in ends.items():
        assert 1 <= end.do(drive, cluster_id, "wait") <= 4
        others = decoders if cluster_id < 10 else prompts
        assert end.do(links) == {other.cluster_id: "ready" for other in others}
    for decoder, prompt in itertools.product(decoders, prompts):
        pulled(ends[decoder.cluster_id], decoder.cluster_id, ends[prompt.cluster_id], prompt.cluster_id, DST)
    # Two prompt ranks for one decoder: each has half of the blocks.
    pulled(ends[11], 11, ends[1], 1, [2, 3, 4, 5])
    pulled(ends[11], 11, ends[2], 2, [6, 7, 9, 10])
    for end in ends.values():
        end.do(finalize_all)


def test_more_pairs_than_one_burst_all_become_ready(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """36 prompts, all in one process here, and a decoder: 32 links, a pause, 4 more."""
    prompt, decoder = ends
    prompts = [Rank(2**63 + number, host(0), number) for number in range(36)]
    own = Rank(2**64 - 2, host(1), 0)
    decoder.do(begin, "DECODER", own, 5)
    for rank in prompts:
        prompt.do(begin, "PROMPT", rank, rank.rank)
    decoder.do(link_all, prompts)
    prompt.do(link_all, [own])
    assert decoder.do(drive, own.cluster_id, "wait") <= 4
    assert len(decoder.do(links)) == 36
    for rank in (prompts[0], prompts[17], prompts[35]):
        pulled(decoder, own.cluster_id, prompt, rank.cluster_id, DST)
    decoder.do(finalize_all)
    prompt.do(finalize_all)
