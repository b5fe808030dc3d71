"""What a test leaves behind is seen; what somebody else takes with him meanwhile is not laid to its door."""

from __future__ import annotations

import os
import threading

import pytest

from llm_datadist.testing import scene
from tests.support import world

LOOKS = pytest.mark.parametrize("look", [scene.residue, world.residue], ids=["scene", "world"])


@LOOKS
def test_a_thread_that_was_leaving_at_the_first_look_is_no_difference(look: object) -> None:
    assert callable(look)
    now = look()
    gone = max(now["kernel threads"]) + (1 << 22)  # more than the system gives out
    before = now | {"kernel threads": sorted([*now["kernel threads"], gone])}
    assert scene.settled(before, look) == before


@LOOKS
def test_a_thread_too_many_is_seen_even_when_another_one_has_left(look: object) -> None:
    assert callable(look)
    now = look()
    before = now | {"kernel threads": sorted([*now["kernel threads"], 1 << 22])}
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


@LOOKS
def test_a_descriptor_too_many_is_seen(look: object) -> None:
    assert callable(look)
    before = look()
    reader, writer = os.pipe()
    try:
        assert scene.settled(before, look, seconds=0)["fds"] != before["fds"]
    finally:
        os.close(reader)
        os.close(writer)
    assert scene.settled(before, look) == before
