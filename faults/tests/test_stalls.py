"""Stalls: what is stalled waits, deadlines go on, and everything goes on afterwards with the right bytes."""

import pytest

from faults.stalls import go_on, stall_there
from llm_datadist import CacheKey
from llm_datadist.errors import CacheNotFound
from tests.support.linking import begin_there, bytes_move_both_ways, result_there, runs_there
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.world import World

KEY = CacheKey(1, 10)
PATIENT = {"llm.PeerTimeout": "600"}


@pytest.mark.parametrize("what", ["copy", "pool"])
def test_what_is_stalled_waits_and_goes_on(shm_pair: Pair, what: str) -> None:
    shm_pair.start(extra=PATIENT)
    source = shm_pair.prompt.do(make, "rows", Spec(keys=(KEY,)), 1)
    target = shm_pair.decoder.do(make, "rows", Spec(), 2)
    shm_pair.decoder.do(stall_there, what)
    if what == "copy":
        shm_pair.decoder.do(begin_there, "call", call, "pull_cache", KEY, Use("rows"), 5)
        wait_until(lambda: shm_pair.prompt.do(picture).pins == 1)
        same_bytes(shm_pair.decoder.do(show, "rows"), target)
    else:
        shm_pair.decoder.do(begin_there, "call", allocate)
        shm_pair.decoder.do(call, "pull_cache", KEY, Use("rows"), 5)  # needs no pool
    assert shm_pair.decoder.do(runs_there, "call"), "the call is still there"
    shm_pair.decoder.do(go_on)
    result = shm_pair.decoder.do(result_there, "call")
    assert not isinstance(result, BaseException), result
    same_bytes(shm_pair.decoder.do(show, "rows"), moved(target, source, [(5, 0)]))
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


def allocate(world: World) -> None:
    world.caches["more"] = world.cm.allocate_cache(Spec().desc, [])


@pytest.mark.parametrize("verb", ["pull_blocks", "push_blocks"])
def test_over_tcp_what_was_used_once_moves_while_the_owner_answers_nothing_until_it_is_freed(
    tcp_pair: Pair, verb: str
) -> None:
    """A cached reply: the threads of the owner's lanes answer alone, its control thread does not run."""
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    tcp_pair.start(sync_kv_timeout=2000, rca=verb == "push_blocks", extra=PATIENT)
    theirs = prompt.do(make, "blocks", Spec(blocks=True, blocks_key=BLOCKS), 1)
    mine = decoder.do(make, "blocks", Spec(blocks=True), 2)
    decoder.do(call, verb, BLOCKS, Use("blocks"), [0], [0])
    prompt.do(stall_there, "control")
    for number in range(1, 8):
        decoder.do(call, verb, BLOCKS, Use("blocks"), [number], [7 - number])
    pairs = [(0, 0), *((7 - number, number) for number in range(1, 8))]
    pulled = verb == "pull_blocks"
    same_bytes(decoder.do(show, "blocks"), moved(mine, theirs, pairs) if pulled else mine)
    same_bytes(prompt.do(show, "blocks"), theirs if pulled else moved(theirs, mine, pairs))
    prompt.do(go_on)
    prompt.do(forget, "blocks")
    before = decoder.do(show, "blocks")
    with pytest.raises(CacheNotFound):
        decoder.do(call, verb, BLOCKS, Use("blocks"), [0], [1])
    same_bytes(decoder.do(show, "blocks"), before)
    bytes_move_both_ways(prompt, decoder)
