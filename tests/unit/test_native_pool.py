"""The pool of copy threads: its threads and where they run, its callers, forks, and the exit of the interpreter."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from llm_datadist._native import NO_DEADLINE, CopyPool, execute, plan_row
from llm_datadist.errors import ParamError
from llm_datadist.testing.scene import kernel_threads, residue, settled
from tests.support import twin

SHARED = 3 << 20  # bytes: above 1 MiB the pool helps
CPUS = sorted(os.sched_getaffinity(0))


def copy_threads() -> set[int]:
    """Return the ids of this process's copy threads; a thread's name is set by its maker, before the pool is there."""
    return {number for number, name in kernel_threads().items() if name.startswith("lldd-copy-")}


def copy(pool: CopyPool) -> None:
    dst, src = twin.noise(1, 1, SHARED), twin.noise(2, 1, SHARED)
    plan = twin.make_plan(plan_row(0, 0, SHARED))
    assert execute(plan, twin.tensors_of(dst).native, twin.tensors_of(src).native, pool, NO_DEADLINE) == SHARED
    assert np.array_equal(dst, src)


def copy_on(cpu: int, pool: CopyPool) -> None:
    """Copy on that CPU, in a thread that ends, so that this one may run where it could before."""
    with ThreadPoolExecutor(1, initializer=os.sched_setaffinity, initargs=(0, {cpu})) as thread:
        thread.submit(copy, pool).result()


def test_a_pool_names_its_threads_and_joins_them() -> None:
    before = residue()
    pool = CopyPool(3)
    new = [name for name in kernel_threads().values() if name.startswith("lldd-copy")]
    assert sorted(new) == ["lldd-copy-0", "lldd-copy-1"]  # the caller is the third
    assert (pool.threads, pool.closed, repr(pool)) == (3, False, "<CopyPool 3 threads>")
    pool.close()
    pool.close()
    assert settled(before) == before
    assert (pool.closed, repr(pool)) == (True, "<CopyPool 3 threads, closed>")
    copy(pool)
    forgotten = CopyPool(2)
    del forgotten
    assert settled(before) == before


@pytest.mark.parametrize("threads", [0, -1, 1025])
def test_a_pool_of_an_impossible_size(threads: int) -> None:
    with pytest.raises(ParamError, match=f"^threads is {threads}: a CopyPool has 1 to 1024 threads"):
        CopyPool(threads)


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


EXIT = """
import threading, time
from llm_datadist._native import CopyPool

class Late:
    def __del__(self):  # while modules are taken down: other threads may want the interpreter's lock meanwhile
        sleep(0.3)

def work():
    while True:
        CopyPool(2).close()  # without the lock, and it is wanted back

sleep, late = time.sleep, Late()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""


def test_a_daemon_thread_in_native_code_does_not_crash_the_exit_of_the_interpreter() -> None:
    ended = subprocess.run([sys.executable, "-c", EXIT], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


FORK = """
import os, signal, sys, warnings
from llm_datadist._native import CopyPool
from tests.unit.test_native_pool import copy

warnings.simplefilter("ignore")  # Python 3.12 on: fork beside threads
pool, kept = CopyPool(3), CopyPool(2)
copy(pool)
child = os.fork()
signal.alarm(50)  # no child outlives a failed test
copy(pool)
if child == 0:
    pool.close()
    own = CopyPool(2)
    copy(own)
    own.close()
    del pool
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
copy(pool)
pool.close()
"""


def test_a_forked_child_copies_alone_and_ends() -> None:
    """The child's exit runs the destructors: of a closed pool, a deleted one and one that was left alone."""
    subprocess.run([sys.executable, "-c", FORK], check=True, timeout=60)
