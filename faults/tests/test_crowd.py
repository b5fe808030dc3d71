"""2,000 connections of strangers at a listener (docs/notes/faults.md, Attacks); ``crowd.py`` measures their cost."""

import pytest

from faults.crowd import CROWD, MANNERS, Crowd, footprint, prepare, pull
from tests.support.ends import begin_there, result_there
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import wait_until
from tests.support.pairs import Pair

#: Handshakes with one address that a listener has in progress at a time.
_GREETINGS = 64
#: The first strangers have code loaded, and each greeting takes a little.
_MORE_BYTES = 16 << 20


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_attack_two_thousand_strangers_cost_no_more_than_their_bound_and_a_linked_peer_goes_on(
    request: pytest.FixtureRequest, transport: str
) -> None:
    pair: Pair = request.getfixturevalue(f"{transport}_pair")
    pair.start(rca=True)
    prompt, decoder, port = pair.prompt, pair.decoder, pair.prompt.port
    assert port is not None
    sources = prompt.do(prepare)
    with Crowd(port, ["silent"]) as first:
        first.come(1)
        descriptors, anonymous = prompt.do(footprint)
    with Crowd(port, MANNERS) as crowd:
        for kind in ("blocks", "key"):
            decoder.do(begin_there, "pulls", pull, kind, sources, 1.0)
            crowd.come(CROWD // 2)
            assert prompt.do(links) == {2: "ready"}
            now = prompt.do(footprint)
            # Those that were hung up on may be leaving.
            assert now[0] <= descriptors + 2 * _GREETINGS
            assert now[1] <= anonymous + _MORE_BYTES
            assert isinstance(done := decoder.do(result_there, "pulls"), list), done
            assert len(done) > 10
        wait_until(lambda: prompt.do(footprint)[0] <= descriptors + _GREETINGS)
        assert crowd.counts["said"] > CROWD - 10
        assert crowd.counts["welcomed"]
        # A peer that comes now is let in, too.
        assert decoder.do(unlink, [info(1, port)]) == SUCCESS
        assert decoder.do(link, [info(1, port)]) == SUCCESS
        bytes_move_both_ways(prompt, decoder)
    wait_until(lambda: prompt.do(footprint)[0] <= descriptors)
