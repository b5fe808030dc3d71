"""Links whose bytes go through a relay that does them harm: in the handshake and after, and on data lanes.

The survivor gets a typed error within its deadline, its other link moves data meanwhile, nothing is left behind, and
both ends link again directly. What nobody can see without checksums, changed bytes of a payload, is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.relay import BIG, HARM, KEY, Fault, Relayed
from llm_datadist import LLMStatusCode
from llm_datadist.errors import DeadlineExceeded, LLMException, NotLinked, PeerLost
from tests.support.linking import SUCCESS, begin_there, bytes_move_both_ways, links, result_there
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from faults.relay import Direction

OK = LLMStatusCode.LLM_SUCCESS
# --- in the handshake -------------------------------------------------------------------------------------------------


#: Up go preamble, Hello and Met, 230 bytes over tcp and 300 over shm; down come Welcome and Linked, 210.
@pytest.mark.parametrize("harm", HARM)
@pytest.mark.parametrize(
    ("relayed", "direction", "at"),
    [("shm", "up", 0), ("shm", "up", 30), ("tcp", "up", 205), ("shm", "down", 2), ("tcp", "down", 60)],
    indirect=["relayed"],
)
def test_a_handshake_that_is_harmed_fails_in_time_and_leaves_nothing(
    relayed: Relayed, harm: str, direction: Direction, at: int
) -> None:
    relayed.relay.plan("control", direction, HARM[harm](at))
    ends = harm in {"truncate", "reset", "half_close"}  # else somebody may wait for what never comes
    code, codes = relayed.link(10_000 if ends else 300)
    # LLM_FAILED: the target's word for a handshake that breaks the protocol.
    allowed = {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED}
    if not ends:
        allowed.add(LLMStatusCode.LLM_TIMEOUT)
    if harm in {"corrupt", "duplicate"}:
        allowed.add(OK)  # in the name of a host, say, or behind all that is read
    assert code in allowed
    assert codes == [code]
    assert (relayed.decoder.do(links) == {}) == (code is not OK)


def test_a_slow_handshake_succeeds(relayed: Relayed) -> None:
    directions: tuple[Direction, ...] = ("up", "down")
    for direction in directions:
        relayed.relay.plan(None, direction, Fault("delay", seconds=0.05), Fault("throttle", rate=20_000.0))
    assert relayed.link() == SUCCESS
    bytes_move_both_ways(relayed.prompt, relayed.decoder)


# --- after it: the control connection ---------------------------------------------------------------------------------


def ask_in_vain(relayed: Relayed) -> LLMException:
    """Ask for a key over the harmed connection; return the error, and check that nothing has moved."""
    target = relayed.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=1 << 20), 2)
    relayed.decoder.do(begin_there, "pull", call, "pull_cache", KEY, Use("rows"), 1)
    relayed.others_are_served()
    error = relayed.decoder.do(result_there, "pull")
    assert isinstance(error, LLMException), error
    same_bytes(relayed.decoder.do(show, "rows"), target)
    return error


@pytest.mark.parametrize("harm", ["truncate", "reset", "half_close", "corrupt"])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_control_connection_that_is_cut_or_garbled_ends_the_link(
    relayed: Relayed, harm: str, direction: Direction
) -> None:
    relayed.prompt.do(make, "rows", BIG, 1)
    assert relayed.link() == SUCCESS
    # What is dialled again after the loss comes to nothing: this is about the link that is harmed.
    relayed.relay.plan("control", "up", Fault("reset"))
    # The next frame's header is hit, whoever's it is: a beat's or the question's.
    assert relayed.relay.now("control", direction, HARM[harm](0)) == 1
    error = ask_in_vain(relayed)
    assert isinstance(error, PeerLost | NotLinked), error
    assert error.peer == 1
    assert "\n" not in str(error)
    relayed.relay.forget_plans()


@pytest.mark.parametrize(
    ("relayed", "harm", "direction"), [("shm", "drop", "up"), ("tcp", "stall", "down")], indirect=["relayed"]
)
def test_a_control_connection_that_carries_nothing_ends_the_question_in_time_and_the_link_after_the_beats(
    relayed: Relayed, harm: str, direction: Direction
) -> None:
    relayed.prompt.do(make, "rows", BIG, 1)
    assert relayed.link() == SUCCESS
    assert relayed.relay.now("control", direction, HARM[harm](0)) == 1
    error = ask_in_vain(relayed)
    assert isinstance(error, DeadlineExceeded), error
    assert error.phase == "resolve"
    # The end that hears nothing finds it out by the beats; the other one by what it does then.
    wait_until(lambda: relayed.decoder.do(links) == {} and 2 not in relayed.prompt.do(links), 10)


def test_a_stall_that_ends_soon_costs_nothing(relayed: Relayed) -> None:
    source = relayed.prompt.do(make, "rows", BIG, 1)
    target = relayed.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=1 << 20), 2)
    assert relayed.link() == SUCCESS
    relayed.relay.now(None, "down", Fault("stall"))
    relayed.decoder.do(begin_there, "pull", call, "pull_cache", KEY, Use("rows"), 1)
    relayed.others_are_served()
    relayed.relay.resume()
    assert relayed.decoder.do(result_there, "pull") is None
    same_bytes(relayed.decoder.do(show, "rows"), moved(target, source, [(1, 0)]))
