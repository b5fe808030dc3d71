"""How often members that are not there are looked for: soon at first, seldom where there are many of them."""

from __future__ import annotations

import time
from typing import Final

import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._links.communicator import Communicator, CommunicatorPlan
from llm_datadist._links.retry import MemberDial

TRIES: Final = 40


def member(*, again: bool = False) -> MemberDial:
    plan = CommunicatorPlan("name", {1: 0, 2: 1}, {1: "127.0.0.1", 2: "127.0.0.1"}, bytes(16), 60, 1)
    communicator = Communicator(1, 2, plan, Deadline(60_000))
    communicator.ports = {1: [1, 2, 3]}
    return MemberDial(communicator, 1, again=again)


def pauses(one: MemberDial, crowd: int) -> list[float]:
    result = []
    for _ in range(TRIES):
        now = time.monotonic()
        one.postpone(crowd)
        result.append(one.due - now)
    return result


def test_the_first_attempt_is_made_at_once_and_one_for_a_lost_member_is_not() -> None:
    assert member().due <= time.monotonic()
    before = time.monotonic()
    assert member(again=True).due >= before + 0.4


def test_alone_it_is_tried_again_soon_and_never_less_than_twice_a_second() -> None:
    waits = pauses(member(), 0)
    assert waits[0] < 0.1
    assert all(wait < 0.6 for wait in waits)
    assert sorted(waits[:8]) == waits[:8], "less and less often"


@pytest.mark.parametrize("crowd", [300, 1500, 10_000])
def test_many_that_never_come_cost_so_many_attempts_in_all_and_no_more(crowd: int) -> None:
    waits = pauses(member(), crowd)
    attempts_per_second = crowd / min(waits)
    assert attempts_per_second < 160


def test_they_are_taken_in_the_order_in_which_they_are_due() -> None:
    first, second = member(), member(again=True)
    assert first < second
    assert not second < first
