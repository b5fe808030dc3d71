"""What one peer can cost whoever it is linked to: bounded memory, bounded pins, and nobody else's link (architecture
rule 8)."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist._cache.registry import MAX_PINS_PER_PEER, key_of
from llm_datadist._links.messages import CONTROL_PREAMBLE, Failed, Message, Release, Resolve, Resolved, Welcome, frame
from tests.support.ends import ChildEnd
from tests.support.linking import bytes_move_both_ways, links
from tests.support.moves import Spec, make, picture, wait_until
from tests.support.strangers import Stranger

if TYPE_CHECKING:
    from tests.conftest import Pair

REQUESTS = 10_000
BOUND = 64 << 20
KEY = CacheKey(1, 5)
MANY = BlocksCacheKey(1, 3)


def rss_anon(end: object) -> int:
    """Return the bytes of anonymous memory that a child holds."""
    assert isinstance(end, ChildEnd)
    with open(f"/proc/{end.pid}/status", encoding="ascii") as status:
        (line,) = [line for line in status if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10


def said(stranger: Stranger, messages: list[Message]) -> threading.Thread:
    """Say all of it from a thread: the other side may take it only later."""
    data = b"".join(frame(message) for message in messages)
    thread = threading.Thread(target=stranger.say, args=(data,))
    thread.start()
    return thread


def test_rule_10_ten_thousand_requests_whose_answers_nobody_reads_cost_bounded_memory(shm_pair: Pair) -> None:
    shm_pair.start()
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    # An answer is 24 KB long: all of them would be 240 MB.
    prompt.do(make, "many", Spec(tensors=2000, rows=1, stride=16, blocks=True, blocks_key=MANY), 1)
    assert prompt.port is not None
    question = key_of(MANY)
    with Stranger(prompt.port) as stranger:
        stranger.link()
        before = rss_anon(prompt)
        talker = said(stranger, [Resolve(number, False, question, 0, 0, 60_000) for number in range(1, REQUESTS + 1)])
        # The first answers fill what the kernel and the backlog hold: from then on nobody reads the stranger any more.
        wait_until(lambda: prompt.do(unsent, 66) > 1 << 20)
        for _ in range(3):
            bytes_move_both_ways(prompt, decoder)
        assert rss_anon(prompt) - before < BOUND
        # Nothing was lost: whoever begins to read gets every answer, in order.
        for number in range(1, REQUESTS + 1):
            assert stranger.hear(Resolved).id == number
        talker.join()
        assert rss_anon(prompt) - before < BOUND
        assert prompt.do(links) == {2: "ready", 66: "ready"}
    wait_until(lambda: prompt.do(links) == {2: "ready"})


def unsent(world: object, peer: int) -> int:
    link = world.dd._engine.links.get(peer)  # type: ignore[attr-defined]
    return len(link.channel._backlog)


def test_rule_10_the_pins_of_a_peer_are_bounded_and_go_with_it(shm_pair: Pair) -> None:
    shm_pair.start()
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    prompt.do(make, "kv", Spec(rows=2, stride=64, keys=(KEY,)), 1)
    assert prompt.port is not None
    question = key_of(KEY)
    with Stranger(prompt.port) as stranger:
        stranger.link()
        more = 7
        asked = [Resolve(number, False, question, 0, 0, 600_000) for number in range(1, MAX_PINS_PER_PEER + more + 1)]
        talker = said(stranger, list(asked))
        pins = [stranger.hear(Resolved).pin for _ in range(MAX_PINS_PER_PEER)]
        refusals = [stranger.hear(Failed) for _ in range(more)]
        talker.join()
        assert len(set(pins)) == MAX_PINS_PER_PEER
        assert {refusal.code for refusal in refusals} == {LLMStatusCode.LLM_LINK_BUSY}
        assert all(str(MAX_PINS_PER_PEER) in refusal.text for refusal in refusals)
        assert prompt.do(picture).pins == MAX_PINS_PER_PEER
        bytes_move_both_ways(prompt, decoder)  # another peer is not concerned
        # One released, one more.
        stranger.say(Release(pins[0], 0, 0), Resolve(9999, False, question, 0, 0, 600_000))
        assert stranger.hear(Resolved).id == 9999
    wait_until(lambda: prompt.do(picture).pins == 0)
    assert len(prompt.do(picture).keys) == 1, "nothing was consumed"


def test_rule_10_strangers_who_stop_in_the_middle_of_a_handshake_keep_nobody_out(shm_pair: Pair) -> None:
    """They have introduced themselves and wait at the next step, more of them than are greeted at once."""
    shm_pair.start(linked=False)
    assert shm_pair.prompt.port is not None
    with ExitStack() as leaving:
        strangers = []
        for _ in range(150):
            strangers.append(leaving.enter_context(Stranger(shm_pair.prompt.port)))
            strangers[-1].say(CONTROL_PREAMBLE, strangers[-1].hello())
            strangers[-1].hear(Welcome)
        shm_pair.link()
        bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
        assert strangers[0].is_hung_up_on(), "whoever has been at it for longest makes room"
