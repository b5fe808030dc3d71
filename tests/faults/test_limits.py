"""Limits of the process that are reached: descriptors, threads and memory, while ends link, pull and initialise."""

from __future__ import annotations

import os
import resource
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pair
    from tests.support.world import World

#: More than a link takes, over any transport.
MOST = 16


@contextmanager
def few_descriptors(free: int) -> Iterator[None]:
    """Leave the process so many descriptors that it may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1 + free, hard))
        try:
            while True:
                held.append(os.dup(0))
        except OSError:
            pass
        for each in [held.pop() for _ in range(min(free, len(held)))]:
            os.close(each)
        yield
    finally:
        for each in held:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def link_with(world: World, free: int, *args: Any) -> Any:
    with few_descriptors(free):
        return link(world, *args)


def take_descriptors(world: World, free: int) -> None:
    world.memory["few"] = few_descriptors(free)
    world.memory["few"].__enter__()


def give_descriptors(world: World) -> None:
    world.memory.pop("few").__exit__(None, None, None)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("side", ["initiator", "target"])
def test_attack_poc4_a_link_without_descriptors_fails_with_a_code_and_leaves_nothing_half_made(
    request: pytest.FixtureRequest, transport: str, side: str
) -> None:
    pair: Pair = request.getfixturevalue(f"{transport}_pair")
    pair.start(linked=False)
    assert pair.prompt.port is not None
    peers, failures = [info(1, pair.prompt.port)], 0
    for free in range(MOST):
        if side == "initiator":
            outcome = pair.decoder.do(link_with, free, peers, 1500)
        else:
            pair.prompt.do(take_descriptors, free)
            outcome = pair.decoder.do(link, peers, 1500)
            pair.prompt.do(give_descriptors)
        if outcome == SUCCESS:
            bytes_move_both_ways(pair.decoder, pair.prompt)
            assert pair.decoder.do(unlink, peers) == SUCCESS
        else:
            failures += 1
            assert len(outcome[1]) == 1
        assert pair.decoder.do(links) == {}, (free, outcome)
        wait_until(lambda: pair.prompt.do(links) == {})
    assert 0 < failures < MOST
    assert pair.decoder.do(link, peers) == SUCCESS
    bytes_move_both_ways(pair.decoder, pair.prompt)
