"""A signal whose handler raises ends a native copy, and no byte arrives after the exception."""

from __future__ import annotations

import os
import signal
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from llm_datadist._native import CopyPool, Plan, ProcessMemory, execute, plan_row
from llm_datadist._native.plan import NO_DEADLINE
from llm_datadist.testing.scene import tensors_over

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

NBYTES = 512 << 20


class Alarm(Exception):
    pass


@pytest.fixture(scope="module")
def ends() -> tuple[Bytes, Bytes]:
    """Source and destination, with their pages."""
    return np.full(NBYTES, 7, np.uint8), np.zeros(NBYTES, np.uint8)


@pytest.fixture
def alarmed() -> Iterator[None]:
    """Let SIGALRM raise an Alarm out of whatever runs then."""

    def ring(*_: object) -> None:
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def copy_for_ever(way: str, src: Bytes, dst: Bytes, pool: CopyPool | None) -> None:
    plan = Plan(0, 0, 1, plan_row(0, 0, NBYTES), way == "ordered", NBYTES)
    while True:
        if way == "process":
            ends = tensors_over(dst).native, tensors_over(src).native
            ProcessMemory(os.getpid()).read(plan, *ends, pool, NO_DEADLINE)
        else:
            execute(plan, tensors_over(dst), tensors_over(src), pool, NO_DEADLINE, None)


@pytest.mark.usefixtures("alarmed")
@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("way", ["inside", "ordered", "process"])
def test_a_raising_signal_ends_a_copy_and_no_byte_comes_later(
    ends: tuple[Bytes, Bytes], threads: int, way: str
) -> None:
    src, dst = ends
    dst[:] = 0
    pool = CopyPool(threads) if threads else None
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(Alarm):
            copy_for_ever(way, src, dst, pool)
        dst[:] = 1
        time.sleep(0.02)
        assert (dst == 1).all()
    finally:
        if pool is not None:
            pool.close()
