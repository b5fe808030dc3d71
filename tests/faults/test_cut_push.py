"""A push whose data lanes break in the middle: it is repeated into the cache it was going to, or not at all."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from faults.gated import stopped
from faults.relay import Fault, Relay
from llm_datadist.errors import TransferFailed
from tests.support.linking import SUCCESS, info, link, links
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.pairs import Pair

SPEC = Spec(tensors=4, rows=4, stride=1 << 20, blocks=True)
THERE = Spec(tensors=4, rows=4, stride=1 << 20, blocks=True, blocks_key=BLOCKS, memory="private")
PUSH = ("push_blocks", BLOCKS, Use("mine"), [0, 1, 2], [1, 2, 3])


@pytest.fixture
def relayed_push(tcp_pair: Pair) -> Iterator[tuple[Pair, Relay, Any, Any]]:
    """The decoder has pushed once through a relay; every lane will break after 100,000 bytes more."""
    tcp_pair.start(linked=False, rca=True)
    assert tcp_pair.prompt.port is not None
    mine = tcp_pair.decoder.do(make, "mine", SPEC, 1)
    tcp_pair.prompt.do(make, "old", THERE, 2)
    with Relay(("127.0.0.1", tcp_pair.prompt.port)) as relay:
        assert tcp_pair.decoder.do(link, [info(1, relay.port)]) == SUCCESS
        tcp_pair.decoder.do(call, *PUSH)
        old = tcp_pair.prompt.do(show, "old")
        assert relay.now("lane", "up", Fault("truncate", at=100_000)) >= 1
        yield tcp_pair, relay, mine, old
        assert tcp_pair.decoder.do(links) == {1: "ready"}


def test_it_is_repeated_where_the_key_still_leads(relayed_push: tuple[Pair, Relay, Any, Any], tmp_path: Path) -> None:
    pair, _, mine, old = relayed_push
    with stopped(pair.decoder, "ask", tmp_path, *PUSH) as push:
        assert push.finish() is None
    same_bytes(pair.prompt.do(show, "old"), moved(old, mine, [(1, 0), (2, 1), (3, 2)]))


def test_it_fails_where_the_key_leads_elsewhere_meanwhile(
    relayed_push: tuple[Pair, Relay, Any, Any], tmp_path: Path
) -> None:
    pair, *_ = relayed_push
    with stopped(pair.decoder, "ask", tmp_path, *PUSH) as push:
        new = pair.prompt.do(make, "new", THERE, 3)  # the newest binding of a blocks key wins
        with pytest.raises(TransferFailed, match="may hold a part of what was pushed"):
            push.finish()
    same_bytes(pair.prompt.do(show, "new"), new)
    wait_until(lambda: pair.decoder.do(links) == {1: "ready"})
    pair.decoder.do(call, *PUSH)
    same_bytes(pair.prompt.do(show, "new"), moved(new, pair.decoder.do(show, "mine"), [(1, 0), (2, 1), (3, 2)]))
