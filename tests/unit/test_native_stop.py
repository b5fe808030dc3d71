"""A copy that is cancelled in the middle: stopped by a flag that another thread sets, not by any clock."""

from __future__ import annotations

import mmap
import os
import threading
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from llm_datadist._deadline import Deadline
from llm_datadist._native import NO_DEADLINE, CopyPool, Plan, ProcessMemory, execute, plan_row
from llm_datadist.errors import ParamError
from llm_datadist.testing.page_trap import PageTrap, trap_denied
from tests.support import twin

if TYPE_CHECKING:
    from collections.abc import Callable

MIB: Final = 1 << 20
BOUND_S: Final = 60
SIZE: Final = 64 * MIB  # many chunks
DENIED = trap_denied()
needs_traps = pytest.mark.skipif(DENIED is not None, reason=f"no page can be trapped here: {DENIED}")


def shared_bytes(value: int) -> twin.Bytes:
    """Return memory that begins at a page and can be trapped."""
    memory = np.frombuffer(mmap.mmap(-1, SIZE), np.uint8)
    memory[:] = value
    return memory


def stopped_at(
    plan: Plan,
    dst: twin.Bytes,
    src: twin.Bytes,
    pool: CopyPool | None,
    cancelled: bytearray,
    cancel: Callable[[], None],
) -> int:
    """Copy; call ``cancel`` while the copy stands at a page of its first chunk; return the bytes done."""
    done: list[int] = []
    ends = twin.tensors_of([dst]), twin.tensors_of([src])
    thread = threading.Thread(
        target=lambda: done.append(execute(plan, *ends, pool, NO_DEADLINE, cancelled)), daemon=True
    )
    with PageTrap(dst.ctypes.data + 8192) as trap:
        thread.start()
        try:
            assert trap.wait(BOUND_S), "the copy never came to the page"
            cancel()
        finally:
            trap.release()
            thread.join(BOUND_S)
    assert not thread.is_alive()
    return done[0]


@needs_traps
@pytest.mark.parametrize("ordered", [False, True])
def test_a_cancelled_copy_ends_after_the_chunk_it_is_at(ordered: bool) -> None:
    dst, src = shared_bytes(1), shared_bytes(2)
    starts = np.arange(0, SIZE, MIB, dtype=np.uint64)  # in steps, because a single run may go backwards
    runs = np.stack([starts, starts, np.full_like(starts, MIB)], axis=1)
    deadline = Deadline(BOUND_S * 1000, cancellable=True)
    flag = deadline.cancelled
    assert flag is not None
    done = stopped_at(twin.make_plan(runs, ordered=ordered), dst, src, None, flag, deadline.cancel)
    assert done == 4 * MIB
    assert (dst[:done] == 2).all()
    assert (dst[done:] == 1).all()


@needs_traps
def test_without_a_cancellation_it_goes_on_to_the_end() -> None:
    dst, src = shared_bytes(1), shared_bytes(2)
    plan = twin.make_plan(plan_row(0, 0, SIZE))
    assert stopped_at(plan, dst, src, None, bytearray(1), lambda: None) == SIZE
    assert (dst == 2).all()


@pytest.mark.parametrize("nbytes", [64, 3 * MIB, 9 * MIB])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("far", [False, True])
def test_what_is_cancelled_before_it_begins_moves_nothing(nbytes: int, ordered: bool, far: bool) -> None:
    """By the kernel's hand too: this process is its own far end."""
    dst, src = twin.noise(1, 2, nbytes)
    before = dst.copy()
    plan = twin.make_plan(plan_row(0, 0, nbytes), ordered=ordered)
    to, of = twin.tensors_of([dst]), twin.tensors_of([src])
    pool = CopyPool(2)

    def copy(cancelled: bytearray) -> int:
        if far:
            return ProcessMemory(os.getpid()).read(plan, to.native, of.native, pool, NO_DEADLINE, cancelled)
        return execute(plan, to, of, pool, NO_DEADLINE, cancelled)

    assert copy(bytearray(b"\x01")) == 0
    assert np.array_equal(dst, before)
    assert copy(bytearray(1)) == nbytes
    assert np.array_equal(dst, src)
    pool.close()


@pytest.mark.parametrize("ordered", [False, True])
def test_a_copy_by_the_kernel_is_cancelled_between_chunks(ordered: bool) -> None:
    """160 GiB: it ends in time only because it is told to."""
    dst, src = twin.noise(3, 2, 8 * MIB)
    plan = twin.make_plan(np.repeat(plan_row(0, 0, 8 * MIB), 20_000, axis=0), ordered=ordered)
    deadline = Deadline(BOUND_S * 1000, cancellable=True)
    ends, own = (twin.tensors_of([dst]).native, twin.tensors_of([src]).native), ProcessMemory(os.getpid())
    done: list[int] = []
    thread = threading.Thread(
        target=lambda: done.append(own.read(plan, *ends, None, NO_DEADLINE, deadline.cancelled)),
        daemon=True,
    )
    marker = int(dst[0])
    src[0] = marker ^ 0xFF  # so that its arrival shows
    thread.start()
    begun = Deadline(BOUND_S * 1000).poll(lambda: int(dst[0]) != marker)
    deadline.cancel()
    thread.join(BOUND_S)
    assert begun
    assert not thread.is_alive()
    assert 0 < done[0] < plan.nbytes
    assert done[0] % MIB == 0, "whole chunks"


@pytest.mark.parametrize("flag", [bytearray(), bytearray(2)])
def test_a_flag_is_one_byte(flag: bytearray) -> None:
    dst, src = twin.noise(4, 2, 64)
    before = dst.copy()
    with pytest.raises(ParamError, match=f"^cancelled has {len(flag)} bytes: must be one"):
        execute(twin.make_plan(plan_row(0, 0, 64)), twin.tensors_of([dst]), twin.tensors_of([src]), None, 0, flag)
    assert np.array_equal(dst, before)


def test_a_flag_is_not_kept() -> None:
    """A bytearray that somebody still holds a buffer of cannot change its size."""
    dst, src = twin.noise(5, 2, 64)
    flag = bytearray(1)
    execute(twin.make_plan(plan_row(0, 0, 64)), twin.tensors_of([dst]), twin.tensors_of([src]), None, NO_DEADLINE, flag)
    flag += b"more"
    assert len(flag) == 5
