"""The tests' own tools: children of the nursery have what interpreters of their own would have; what a test leaves
behind is seen, and what somebody else takes with him meanwhile is not laid to its door."""

import os
import threading
from typing import Any

import pytest

from llm_datadist.testing import scene
from tests.support.ends import ChildEnd
from tests.support.world import World, residue


def descriptors(_: World) -> Any:
    return residue()["fds"]


def test_children_have_no_descriptor_of_their_siblings() -> None:
    """Regression: children kept descriptors of their siblings, because all were forked from one process."""
    ends = [ChildEnd(f"child {number}") for number in range(3)]
    fresh = ChildEnd("fresh", fresh=True)
    assert [end.do(descriptors) for end in ends] == [fresh.do(descriptors)] * 3
    for end in (*ends, fresh):
        end.close()


@pytest.mark.parametrize("look", [scene.residue, residue], ids=["scene", "world"])
def test_a_thread_and_a_descriptor_too_many_are_seen_and_a_thread_that_has_left_is_no_difference(look: Any) -> None:
    """Regression: a thread of the test before, which was still leaving, was counted as a leak."""
    now = look()
    gone = max(now["kernel threads"]) + (1 << 22)  # more than the system gives out
    before = now | {"kernel threads": sorted([*now["kernel threads"], gone])}
    assert scene.settled(before, look) == before
    stay = threading.Event()
    thread = threading.Thread(target=stay.wait, name="left behind")
    thread.start()
    found = scene.settled(before, look, seconds=0)
    stay.set()
    thread.join()
    assert set(found["kernel threads"]) - set(before["kernel threads"]) == {thread.native_id}
    assert scene.settled(before, look) == before
    with open(os.devnull):
        assert scene.settled(before, look, seconds=0)["fds"] != before["fds"]
    assert scene.settled(before, look) == before
