"""Where the threads of a CopyPool may run: off the CPU of the caller that wakes them, within what others allow."""

from __future__ import annotations

import os
import threading
from contextlib import closing
from pathlib import Path

import pytest

from llm_datadist._native import NO_DEADLINE, CopyPool, execute, plan_row
from tests.support import twin

SHARED = 3 << 20  # bytes: above 1 MiB the pool helps
CPUS = sorted(os.sched_getaffinity(0))


def copy_threads() -> set[int]:
    """Return the ids of this process's copy threads; a thread's name is set by its maker, before the pool is there."""
    tasks = Path("/proc/self/task").glob("*/comm")
    return {int(name.parent.name) for name in tasks if name.read_text().startswith("lldd-copy-")}


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


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU: there is no other one to keep to")
def test_workers_keep_off_the_cpu_of_their_caller_unless_somebody_else_gave_them_a_mask() -> None:
    """As taskset does, thread by thread."""
    with closing(CopyPool(3)) as pool:
        workers = copy_threads()
        assert len(workers) == pool.threads - 1, "another pool is open"
        assert all(os.sched_getaffinity(each) == set(CPUS) for each in workers)
        for cpu in (CPUS[0], CPUS[1], CPUS[1], CPUS[0]):
            copy_on(cpu, pool)
            assert all(os.sched_getaffinity(each) == set(CPUS) - {cpu} for each in workers)
        for each in workers:
            os.sched_setaffinity(each, {CPUS[0]})
        for cpu in (CPUS[1], CPUS[0], CPUS[1]):
            copy_on(cpu, pool)
            assert all(os.sched_getaffinity(each) == {CPUS[0]} for each in workers)
