"""Data lanes whose bytes are harmed on their way: right bytes or a typed error in time, and the link stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded, PeerLost, TransferFailed
from tests.faults.relayed import BIG, HARM, Relayed
from tests.faults.streams import Fault
from tests.support.linking import SUCCESS, begin_there, links, result_there
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show

if TYPE_CHECKING:
    from tests.faults.relay import Direction


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
def test_lanes_that_lose_what_they_have_acknowledged_cost_calls_their_time_until_they_are_replaced(
    relayed: Relayed,
) -> None:
    """As a network does that forgets connections. A call ends in time all the same."""
    source = relayed.prompt.do(make, "rows", BIG, 1)
    relayed.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=1 << 20), 2)
    assert relayed.link() == SUCCESS
    assert pull(relayed, source) is None
    assert relayed.relay.now("lane", "down", Fault("drop")) >= 1
    error = pull(relayed, source)
    assert isinstance(error, DeadlineExceeded), error
    assert error.phase == "copy"
    assert relayed.decoder.do(links) == {1: "ready"}
    for _ in range(5):
        error = pull(relayed, source)
        if error is None:
            break
        assert isinstance(error, DeadlineExceeded), error
    assert error is None, error
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
