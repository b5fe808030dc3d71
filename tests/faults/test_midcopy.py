"""Stopping inside a copy: exactly, by a trap on a page, and by luck, with a signal."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheKey
from llm_datadist.testing.midcopy import PageTrap, frozen, peek, stop_inside_copy, trap_denied
from tests.support.linking import begin_there, bytes_move_both_ways, result_there
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

DENIED = trap_denied()
needs_traps = pytest.mark.skipif(DENIED is not None, reason=f"no page can be trapped here: {DENIED}")
KEY = CacheKey(1, 10)
MIB = 1 << 20
BIG = Spec(tensors=4, rows=2, stride=2 * MIB, keys=(KEY,))
PATIENT = {"llm.PeerTimeout": "600"}


def set_trap(world: World, name: str, tensor: int, offset: int) -> None:
    """Trap the page of a byte of a cache."""
    world.memory["trap"] = PageTrap(world.caches[name].tensor_addrs[tensor] + offset)


def trapped(world: World) -> bool:
    return bool(world.memory["trap"].wait(0))


def release(world: World) -> None:
    world.memory.pop("trap").release()


def address(world: World, name: str, tensor: int) -> int:
    return int(world.caches[name].tensor_addrs[tensor])


def begun(pair: Pair) -> tuple[list[Any], list[Any]]:
    """Make two caches, trap a page in the middle of the destination, and pull into it until it stops there."""
    pair.start(extra=PATIENT)
    source = pair.prompt.do(make, "rows", BIG, 1)
    target = pair.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=2 * MIB), 2)
    pair.decoder.do(set_trap, "rows", 2, 3 * MIB)
    pair.decoder.do(begin_there, "pull", call, "pull_cache", KEY, Use("rows"), 1)
    wait_until(lambda: pair.decoder.do(trapped))
    return source, target


@needs_traps
def test_a_copy_stands_at_a_page_while_the_rest_of_its_process_runs(shm_pair: Pair) -> None:
    source, target = begun(shm_pair)
    stands = shm_pair.decoder.do(show, "rows")
    assert not np.array_equal(stands[0], target[0]), "bytes have arrived"
    page = 3 * MIB - 2 * MIB  # in row 1 of tensor 2
    assert np.array_equal(stands[2][1][page : page + 4096], target[2][1][page : page + 4096]), "not there"
    assert shm_pair.prompt.do(picture).pins == 1
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    shm_pair.decoder.do(release)
    assert shm_pair.decoder.do(result_there, "pull") is None
    same_bytes(shm_pair.decoder.do(show, "rows"), moved(target, source, [(1, 0)]))
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


@needs_traps
def test_a_process_stopped_there_is_inside_the_copy_for_certain(shm_pair: Pair) -> None:
    source, target = begun(shm_pair)
    decoder: Any = shm_pair.decoder
    decoder.signal(signal.SIGSTOP)
    wait_until(lambda: frozen(decoder.pid))
    # Its source is bound anew while it stands: what it copied is not to be reported as success.
    shm_pair.prompt.do(call, "remove_cache_key", KEY)
    decoder.signal(signal.SIGCONT)
    assert not frozen(decoder.pid)
    shm_pair.decoder.do(release)
    error = shm_pair.decoder.do(result_there, "pull")
    assert type(error).__name__ == "TransferFailed", error
    assert "during the copy" in str(error)
    now = shm_pair.decoder.do(show, "rows")
    for tensor in range(4):
        assert np.array_equal(now[tensor][0], target[tensor][0]), "outside the addressed row nothing changes"
    same_bytes(shm_pair.prompt.do(show, "rows"), source)
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


@needs_traps
def test_a_trap_stops_once_and_nobody_after_its_release() -> None:
    memory = np.zeros(3 * 4096, np.uint8)
    with PageTrap(memory.ctypes.data + 4096) as trap:
        assert not trap.wait(0)
        trap.release()
        memory[:] = 7
        trap.release()
    assert (memory == 7).all()


def test_a_signal_stops_a_copy_often_enough_and_says_when_it_did_not(shm_pair: Pair) -> None:
    shm_pair.start(extra=PATIENT)
    spec = Spec(tensors=4, rows=2, stride=3 * MIB, keys=(KEY,))
    source = shm_pair.prompt.do(make, "rows", spec, 1)
    target = shm_pair.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=3 * MIB), 2)
    decoder: Any = shm_pair.decoder
    # The first byte of the first tensor's row, and the last of the last one's. The copy is 12 MiB.
    first, last = decoder.do(address, "rows", 0) + 3 * MIB, decoder.do(address, "rows", 3) + 6 * MIB - 1
    source_first, source_last = int(source[0][0][0]), int(source[3][0][-1])
    caught = tried = 0
    while caught < 3 and tried < 60:
        tried += 1
        target = decoder.do(make_unlike, source_first, source_last)
        decoder.do(begin_there, "pull", call, "pull_cache", KEY, Use("rows"), 1)
        caught += stop_inside_copy(
            decoder.pid,
            lambda: peek(decoder.pid, first, 1)[0] == source_first,
            lambda: peek(decoder.pid, last, 1)[0] == source_last,
        )
        assert frozen(decoder.pid)
        decoder.signal(signal.SIGCONT)
        assert decoder.do(result_there, "pull") is None
        same_bytes(decoder.do(show, "rows"), moved(target, source, [(1, 0)]))
        shm_pair.prompt.do(publish_again)
    assert caught >= 1, f"{caught} of {tried} trials stopped inside the copy"
    with pytest.raises(TimeoutError, match="no copy of process"):
        stop_inside_copy(decoder.pid, lambda: False, lambda: False, 0.01)


def make_unlike(world: World, first: int, last: int) -> list[Any]:
    """Change the two bytes that are watched, so that their change can be seen; return all bytes."""
    from llm_datadist.views import tensor_views

    views = [view.reshape(-1) for view in tensor_views(world.caches["rows"])]
    views[0][3 * MIB] = first ^ 0xFF
    views[3][6 * MIB - 1] = last ^ 0xFF
    return show(world, "rows")


def publish_again(world: World) -> None:
    """The key was consumed by the pull; bind it again, over the same memory."""
    wait_until(lambda: world.dd.statistics().pins == 0)
    old = world.caches["rows"]
    world.memory.setdefault("old", []).append(old)
    world.caches["rows"] = world.cm.register_cache(old.cache_desc, list(old.tensor_addrs), [KEY])
