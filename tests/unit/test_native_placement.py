"""Where the threads of a CopyPool may run: off the CPU of the caller that wakes them, within what others allow."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist._native import NO_DEADLINE, CopyPool, execute, plan_row
from tests.support import twin

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = 3 << 20  # bytes: above 1 MiB the pool helps
CPUS = sorted(os.sched_getaffinity(0))

needs_two_cpus = pytest.mark.skipif(len(CPUS) < 2, reason="one CPU: there is no other one to keep to")


def copy_threads() -> set[int]:
    """Return the ids of this process's copy threads; a thread's name is set by its maker, before the pool is there."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return {int(name.parent.name) for name in tasks if name.read_text().startswith("lldd-copy-")}


@pytest.fixture
def pool() -> Iterator[CopyPool]:
    shared = CopyPool(3)
    yield shared
    shared.close()


@pytest.fixture
def workers(pool: CopyPool) -> set[int]:
    mine = copy_threads()
    assert len(mine) == pool.threads - 1, "another pool is open"
    return mine


def copy_on(cpu: int, pool: CopyPool) -> None:
    """Copy on that CPU, in a thread that ends, so that this one may run where it could before."""

    def copy() -> None:
        os.sched_setaffinity(0, {cpu})
        dst, src = twin.noise(1, 1, SHARED), twin.noise(2, 1, SHARED)
        plan = twin.make_plan(plan_row(0, 0, SHARED))
        assert execute(plan, twin.tensors_of(dst), twin.tensors_of(src), pool, NO_DEADLINE) == SHARED
        done.append((dst[0] == src[0]).all())

    done: list[bool] = []
    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert done == [True]


@needs_two_cpus
def test_workers_keep_off_the_cpu_of_their_caller(pool: CopyPool, workers: set[int]) -> None:
    assert all(os.sched_getaffinity(each) == set(CPUS) for each in workers)
    for cpu in (CPUS[0], CPUS[1], CPUS[1], CPUS[0]):
        copy_on(cpu, pool)
        assert all(os.sched_getaffinity(each) == set(CPUS) - {cpu} for each in workers)


@needs_two_cpus
def test_a_mask_that_somebody_else_gave_is_kept(pool: CopyPool, workers: set[int]) -> None:
    """As taskset does, thread by thread."""
    copy_on(CPUS[0], pool)
    for each in workers:
        os.sched_setaffinity(each, {CPUS[0]})
    for cpu in (CPUS[1], CPUS[0], CPUS[1]):
        copy_on(cpu, pool)
        assert all(os.sched_getaffinity(each) == {CPUS[0]} for each in workers)
