"""An owner whose control thread stands still: what was used once moves all the same."""

import pytest

from faults.stalls import go_on, stall_there
from llm_datadist.errors import CacheNotFound
from tests.support.linking import bytes_move_both_ways
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, same_bytes, show
from tests.support.pairs import Pair

PATIENT = {"llm.PeerTimeout": "600"}


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
