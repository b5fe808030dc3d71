"""The nursery of the ends: its children are what interpreters of their own would be."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from tests.support.ends import ChildEnd
from tests.support.moves import Spec
from tests.support.world import make_config, residue, settled

if TYPE_CHECKING:
    import pytest

    from tests.support.world import World


def look(world: World) -> dict[str, Any]:
    return {"pid": os.getpid(), "parent": os.getppid(), "name": world.name, "fds": residue()["fds"]}


def pool_addresses(world: World) -> list[int]:
    world.start("PROMPT", 1, make_config())
    cache = world.cm.allocate_blocks_cache(Spec(memory="pool").desc)
    return list(cache.tensor_addrs)


def test_children_have_a_pipe_and_no_descriptor_of_their_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    before = residue()
    ends = [ChildEnd(f"child {number}") for number in range(3)]
    seen = [end.do(look) for end in ends]
    assert [each["name"] for each in seen] == ["child 0", "child 1", "child 2"]
    assert [each["pid"] for each in seen] == [end.pid for end in ends]
    assert len({each["parent"] for each in seen}) == 1
    assert seen[0]["parent"] != os.getpid()
    fresh = ChildEnd("fresh", fresh=True)
    assert [each["fds"] for each in seen] == [fresh.do(look)["fds"]] * 3
    one, other = (end.do(pool_addresses) for end in ends[:2])
    assert set(one).isdisjoint(other), "pools lie at different addresses"
    monkeypatch.setenv("LLM_DATADIST_TEST_OF_THE_NURSERY", "1")
    elsewhere = ChildEnd("in another environment")
    assert elsewhere.do(look)["parent"] == os.getpid()
    for end in (*ends, fresh, elsewhere):
        end.close()
    assert settled(before) == before
