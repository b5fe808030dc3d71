"""What an end's own process does: call what comes over its pipe."""

from __future__ import annotations

import gc
from multiprocessing.connection import Connection

from tests.support.world import World, residue

__all__ = ["serve"]


def serve(name: str, fd: int) -> None:
    """The child's main loop: call what comes, until the pipe ends."""
    world = World(name)
    pipe = Connection(fd)
    gc.collect()
    gc.freeze()
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            break
        try:
            answer = (True, function(world, *args))
        except BaseException as error:  # noqa: BLE001 (carried to the test)
            answer = (False, error)
        pipe.send(answer)
    world.stop()
    assert residue()["memfd mappings"] == 0
