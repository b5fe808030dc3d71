"""Readers that are stuck cost the owner and its other peers nothing: `faults/stuck_readers.py` measures that."""

import pytest

from faults.stuck_readers import scene_of


@pytest.mark.timeout(300)  # many threads that pull 64 MiB each
@pytest.mark.parametrize(("transport", "readers"), [("tcp", 16), ("shm", 8), ("cma", 8)])
def test_a_healthy_reader_beside_stuck_ones(transport: str, readers: int) -> None:
    """Regression: unsent bytes of 100 stuck readers filled the host's TCP memory, and a healthy one waited 206 ms."""
    with scene_of(transport, readers) as scene:
        scene.stick()
        scene.pull(20)  # which compares every byte
        assert scene.stuck() == readers, "they are stuck still"
        assert scene.filled(10.0), "the owner fills what their buffers grow by"
        scene.free()
        scene.pull(5)
