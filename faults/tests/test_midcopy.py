"""Stopping inside a copy: exactly, by a trap on a page, and by luck, with a signal."""

import signal
from typing import Any

import numpy as np
import pytest

from faults.midcopy import frozen, peek, release, set_trap, stop_inside_copy, trapped
from faults.page_trap import PageTrap, trap_denied
from llm_datadist import CacheKey
from llm_datadist.views import tensor_views
from tests.support.linking import begin_there, bytes_move_both_ways, result_there
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.world import World

DENIED = trap_denied()
needs_traps = pytest.mark.skipif(DENIED is not None, reason=f"no page can be trapped here: {DENIED}")
KEY = CacheKey(1, 10)
MIB = 1 << 20
BIG = Spec(tensors=4, rows=2, stride=2 * MIB, keys=(KEY,))
PATIENT = {"llm.PeerTimeout": "600"}


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
    # One thread, so that the last byte is the last one.
    shm_pair.start(extra=PATIENT | {"llm.CopyThreads": "1"})
    source = shm_pair.prompt.do(make, "rows", BIG, 1)
    target = shm_pair.decoder.do(make, "rows", Spec(tensors=4, rows=2, stride=2 * MIB), 2)
    shm_pair.decoder.do(expect, moved(target, source, [(1, 0)]))
    decoder: Any = shm_pair.decoder
    first = decoder.do(address, "rows", 0) + 2 * MIB
    last = decoder.do(address, "rows", 3) + 4 * MIB - 1
    arrived_first, arrived_last = int(source[0][0][0]), int(source[3][0][-1])
    caught = tried = 0
    while caught < 2 and tried < 100:
        tried += 1
        decoder.do(spoil, "rows")
        decoder.do(begin_there, "pull", call, "pull_cache", KEY, Use("rows"), 1)
        inside = stop_inside_copy(
            decoder.pid,
            lambda: peek(decoder.pid, first, 1)[0] == arrived_first,
            lambda: peek(decoder.pid, last, 1)[0] == arrived_last,
        )
        caught += inside
        decoder.signal(signal.SIGCONT)
        assert decoder.do(result_there, "pull") is None
        assert decoder.do(as_expected, "rows")
        shm_pair.prompt.do(publish_again)
    assert caught == 2, f"{caught} of {tried} trials stopped inside the copy"
    with pytest.raises(TimeoutError, match="no copy of process"):
        stop_inside_copy(decoder.pid, lambda: False, lambda: False, 0.01)


def expect(world: World, expected: list[Any]) -> None:
    world.memory["expected"] = expected


def spoil(world: World, name: str) -> None:
    """Change every byte of row 1, so that the first and the last that arrives can be seen."""
    for view, expected in zip(tensor_views(world.caches[name]), world.memory["expected"], strict=True):
        view.reshape(2, -1)[1] = expected[1] ^ 0xFF


def as_expected(world: World, name: str) -> bool:
    same_bytes(show(world, name), world.memory["expected"])
    return True


def publish_again(world: World) -> None:
    """The key was consumed by the pull; bind it again, over the same memory."""
    wait_until(lambda: world.dd.statistics().pins == 0)
    old = world.caches["rows"]
    world.memory.setdefault("old", []).append(old)
    world.caches["rows"] = world.cm.register_cache(old.cache_desc, list(old.tensor_addrs), [KEY])
