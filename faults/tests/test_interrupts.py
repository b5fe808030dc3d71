"""Interrupts in every call, a sample of what ``python -m faults interrupts`` does (docs/notes/faults.md, Attacks)."""

import random
import signal
import time
from pathlib import Path

import pytest

from faults import interrupts
from llm_datadist import BlocksCacheKey
from tests.support.linking import bytes_move_both_ways
from tests.support.moves import wait_until
from tests.support.world import World

POINTS, TIMES = 24, 40


@pytest.mark.parametrize("rca", [True, False], ids=["rca", "no rca"])
@pytest.mark.parametrize("transport", interrupts.TRANSPORTS)
def test_attack_an_interrupt_in_any_call_leaves_no_late_byte_no_hold_and_no_lock(transport: str, rca: bool) -> None:
    source = random.Random(7)
    with interrupts.interrupted_end(transport, rca=rca) as scene:
        for verb in (each for each in interrupts.VERBS.values() if each.rca is rca and transport in each.transports):
            count = interrupts.instructions(scene, verb)
            assert count > POINTS
            interrupts.at_each_instruction(scene, verb, sorted(source.sample(range(1, count + 1), POINTS)))
            if verb.at_random:
                interrupts.at_random(scene, verb, TIMES, source)
        assert scene.counts["interrupted"] > POINTS


def _pull_until_the_timer_rings(world: World) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    world.cm.pull_blocks(BlocksCacheKey(1, 0), world.caches["kv"], [0], [0])


def _is_stopped(pid: int) -> bool:
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] == "T" for task in tasks)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_an_interrupt_ends_a_call_that_waits_for_a_stopped_peer(transport: str) -> None:
    with interrupts.interrupted_end(transport, rca=False) as scene:
        handler = signal.signal(signal.SIGALRM, signal.getsignal(signal.SIGUSR1))
        scene.there.signal(signal.SIGSTOP)
        wait_until(lambda: _is_stopped(scene.there.pid))  # it may answer for a moment yet
        try:
            since = time.monotonic()
            with pytest.raises(interrupts.Interrupted):
                _pull_until_the_timer_rings(scene.world)
            assert 0.2 <= time.monotonic() - since < min(interrupts.PROMPT_SECONDS, interrupts.BOUND_SECONDS), (
                "not only at its deadline"
            )
        finally:
            scene.there.signal(signal.SIGCONT)
            signal.signal(signal.SIGALRM, handler)
        bytes_move_both_ways(scene.here, scene.there)
