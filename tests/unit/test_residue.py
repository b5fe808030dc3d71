"""What a test leaves behind is seen; what somebody else takes with him meanwhile is not laid to its door."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest

from llm_datadist.testing import scene
from tests.support import world


@pytest.mark.parametrize("look", [scene.residue, world.residue], ids=["scene", "world"])
def test_a_thread_and_a_descriptor_too_many_are_seen_and_a_thread_that_has_left_is_no_difference(look: Any) -> None:
    now = look()
    gone = max(now["kernel threads"]) + (1 << 22)  # more than the system gives out
    before = now | {"kernel threads": sorted([*now["kernel threads"], gone])}
    assert scene.settled(before, look) == before
    stay = threading.Event()
    thread = threading.Thread(target=stay.wait, name="left behind")
    thread.start()
    try:
        found = scene.settled(before, look, seconds=0)
        assert set(found["kernel threads"]) - set(before["kernel threads"]) == {thread.native_id}
    finally:
        stay.set()
        thread.join()
    assert scene.settled(before, look) == before
    reader, writer = os.pipe()
    try:
        assert scene.settled(before, look, seconds=0)["fds"] != before["fds"]
    finally:
        os.close(reader)
        os.close(writer)
    assert scene.settled(before, look) == before
