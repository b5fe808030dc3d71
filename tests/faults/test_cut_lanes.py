"""Data lanes whose bytes are harmed on their way: right bytes or a typed error in time, and the link stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from faults.relay import BIG, HARM, Fault, Relayed
from llm_datadist import BlocksCacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded, PeerLost, TransferFailed
from tests.support.linking import SUCCESS, begin_there, links, result_there
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show

if TYPE_CHECKING:
    from faults.relay import Direction


def pull(relayed: Relayed, source: Any) -> BaseException | None:
    """Pull once and return the error, if there is one; success means right bytes, and outside them nothing moves."""
    target = relayed.decoder.do(show, "rows")
    relayed.decoder.do(begin_there, "pull", call, "pull_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("rows"), 1)
    relayed.others_are_served()
    error: BaseException | None = relayed.decoder.do(result_there, "pull")
    now = relayed.decoder.do(show, "rows")
    if error is None:
        same_bytes(now, moved(target, source, [(1, 0)]))
    for tensor in range(4):
        np.testing.assert_array_equal(now[tensor][0], target[tensor][0])
    return error


@pytest.mark.parametrize("relayed", ["tcp"], indirect=True)
@pytest.mark.parametrize(
    ("harm", "direction", "at"),
    [
        *((harm, "up", 20) for harm in HARM if harm != "drop"),
        *((harm, "down", 0) for harm in HARM if harm != "drop"),
        # Changed bytes of a payload are seen by checksums only.
        *((harm, "down", 100_000) for harm in ("truncate", "reset", "half_close")),
    ],
)
def test_lanes_that_are_harmed_fail_a_transfer_or_are_made_again_and_the_link_stays(
    relayed: Relayed, harm: str, direction: Direction, at: int
) -> None:
    source = relayed.prompt.do(make, "rows", BIG, 1)
    relayed.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=1 << 20), 2)
    assert relayed.link() == SUCCESS
    assert pull(relayed, source) is None
    assert relayed.relay.now("lane", direction, HARM[harm](at)) >= 1
    error = pull(relayed, source)
    assert error is None or isinstance(error, TransferFailed | DeadlineExceeded | PeerLost), error
    relayed.relay.resume()
    assert relayed.decoder.do(links) == {1: "ready"}
    # Whatever was lost is made again: within a few calls, each of which ends in time.
    for _ in range(5):
        error = pull(relayed, source)
        if error is None:
            break
        assert isinstance(error, TransferFailed | DeadlineExceeded | PeerLost), error
    assert error is None, error
    assert relayed.decoder.do(links) == {1: "ready"}


@pytest.mark.parametrize("relayed", ["tcp"], indirect=True)
@pytest.mark.parametrize("puller", ["decoder", "prompt"])
def test_attack_poc6_lanes_that_a_network_has_forgotten_cost_one_call(relayed: Relayed, puller: str) -> None:
    """Lanes lose what they have acknowledged, and the link answers. Only the decoder can dial new ones."""
    here, there = (relayed.decoder, relayed.prompt) if puller == "decoder" else (relayed.prompt, relayed.decoder)
    source = there.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 1)
    target = here.do(make, "target", Spec(blocks=True), 2)
    assert relayed.link() == SUCCESS
    key = BlocksCacheKey(there.cluster_id, BLOCKS.model_id)

    def pull_block(block: int) -> BaseException | None:
        here.do(begin_there, "pull", call, "pull_blocks", key, Use("target"), [block], [block])
        relayed.others_are_served()
        error: BaseException | None = here.do(result_there, "pull")
        return error

    assert [pull_block(0) for _ in range(4)] == [None] * 4
    for direction in ("up", "down"):
        assert relayed.relay.now("lane", direction, Fault("drop")) >= 1
    error = pull_block(1)
    assert isinstance(error, DeadlineExceeded), error
    assert error.phase == "copy"
    assert [pull_block(block) for block in range(2, 8)] == [None] * 6
    same_bytes(here.do(show, "target"), moved(target, source, [(each, each) for each in (0, *range(2, 8))]))
    assert relayed.decoder.do(links) == {1: "ready"}


@pytest.mark.parametrize("relayed", ["tcp"], indirect=True)
@pytest.mark.parametrize("harm", ["truncate", "reset", "corrupt", "drop"])
@pytest.mark.parametrize(("direction", "at"), [("up", 0), ("up", 20), ("down", 0)])
def test_lanes_that_are_harmed_in_their_greeting_cost_the_handshake(
    relayed: Relayed, harm: str, direction: Direction, at: int
) -> None:
    relayed.relay.plan("lane", direction, HARM[harm](at))
    code, _ = relayed.link(300 if harm == "drop" else 10_000)
    assert code in {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT}
    assert relayed.decoder.do(links) == {}
