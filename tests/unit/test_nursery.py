"""The tests' own tools: children of the nursery are what interpreters of their own would be; what a test leaves behind
is seen, and what somebody else takes with him meanwhile is not laid to its door."""

import os
import threading
from typing import Any

import pytest

from llm_datadist.testing import scene
from tests.support.ends import ChildEnd
from tests.support.moves import Spec
from tests.support.world import World, make_config, residue, settled


def look(world: World) -> dict[str, Any]:
    return {"pid": os.getpid(), "parent": os.getppid(), "name": world.name, "fds": residue()["fds"]}


def pool_addresses(world: World) -> list[int]:
    world.start("PROMPT", 1, make_config())
    cache = world.cm.allocate_blocks_cache(Spec(memory="pool").desc)
    return list(cache.tensor_addrs)


def test_children_have_a_pipe_and_no_descriptor_of_their_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: children kept descriptors of their siblings, because all were forked from one process."""
    before = residue()
    ends = [ChildEnd(f"child {number}") for number in range(3)]
    seen = [end.do(look) for end in ends]
    assert [each["name"] for each in seen] == ["child 0", "child 1", "child 2"]
    assert [each["pid"] for each in seen] == [end.pid for end in ends]
    assert len({each["parent"] for each in seen}) == 1
    assert seen[0]["parent"] != os.getpid()
    fresh = ChildEnd("fresh", fresh=True)
    assert [each["fds"] for each in seen] == [fresh.do(look)["fds"]] * 3
    assert len({end.do(pool_addresses)[0] for end in ends}) > 1, "pools lie at different addresses, but for chance"
    monkeypatch.setenv("LLM_DATADIST_TEST_OF_THE_NURSERY", "1")
    elsewhere = ChildEnd("in another environment")
    assert elsewhere.do(look)["parent"] == os.getpid()
    for end in (*ends, fresh, elsewhere):
        end.close()
    assert settled(before) == before


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
