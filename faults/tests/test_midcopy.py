"""Stopping inside a copy exactly, by a trap on a page. By luck, with a signal: test_trials.py."""

import signal
from typing import Any

import numpy as np
import pytest

from faults.midcopy import frozen, release, set_trap, trapped
from faults.page_trap import trap_denied
from llm_datadist import CacheKey
from tests.support.linking import begin_there, bytes_move_both_ways, result_there
from tests.support.moves import Spec, Use, call, make, same_bytes, show, wait_until
from tests.support.pairs import Pair

DENIED = trap_denied()
needs_traps = pytest.mark.skipif(DENIED is not None, reason=f"no page can be trapped here: {DENIED}")
KEY = CacheKey(1, 10)
MIB = 1 << 20
BIG = Spec(tensors=4, rows=2, stride=2 * MIB, keys=(KEY,))
PATIENT = {"llm.PeerTimeout": "600"}


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
