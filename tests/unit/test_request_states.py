"""States of vLLM's requests: what vLLM may do at any moment. Every call in every state: tests/vllm."""

from __future__ import annotations

from itertools import product

from llm_datadist.integrations.request_states import HANDED_OUT, WAITING, Event, Fetch, Offer, RequestStates

PAIRS = list(product(Fetch, Offer))


def after(fetch: Fetch, offer: Offer, *events: Event) -> tuple[Fetch, Offer]:
    states = RequestStates(fetch, offer)
    for event in events:
        states.fire(event)
    return states.fetch, states.offer


def test_a_request_may_end_in_every_state_and_leaves_only_what_workers_still_report() -> None:
    for fetch, offer in PAIRS:
        ended = after(fetch, offer, Event.SKIP, Event.WITHDRAW)
        assert ended == after(*ended, Event.SKIP, Event.WITHDRAW), "vLLM may say so twice"
        assert ended[0] is (Fetch.FETCHING if fetch is Fetch.FETCHING else Fetch.NONE)
        assert ended[1] is (offer if offer in HANDED_OUT else Offer.NONE)
        assert after(*ended, Event.REPORT, Event.RELEASE) == (Fetch.NONE, Offer.NONE)


def test_a_preempted_request_is_computed_and_granted_anew_unless_its_offer_was_handed_out() -> None:
    for offer in Offer:
        preempted = after(Fetch.NONE, offer, Event.PREEMPT)[1]
        wanted = Offer.COMPUTING if offer in (Offer.COMPUTING, Offer.GRANTED) else offer
        assert preempted is wanted


def test_a_request_gets_one_fetch_whatever_its_reference_says() -> None:
    for fetch in Fetch:
        allocated = after(fetch, Offer.NONE, Event.ALLOCATE)[0]
        assert allocated is (Fetch.FETCHING if fetch in WAITING else fetch)


def test_an_id_used_again_while_its_offer_lasts_gets_no_second_offer() -> None:
    for offer in HANDED_OUT:
        events = Event.NAME_READER, Event.GRANT, Event.HAND_OUT, Event.WITHDRAW
        assert after(Fetch.NONE, offer, *events) == (Fetch.NONE, offer)
        assert after(Fetch.NONE, offer, Event.NAME_OFFER, Event.SKIP) == (Fetch.NONE, offer)
