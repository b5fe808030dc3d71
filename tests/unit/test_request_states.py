"""States of vLLM's requests: every pair of state and event, and what vLLM may do at any moment."""

from __future__ import annotations

from itertools import product

import pytest

from llm_datadist.integrations.request_states import (
    FETCHES,
    HANDED_OUT,
    OFFERS,
    WAITING,
    Event,
    Fetch,
    Offer,
    RequestStates,
)

PAIRS = list(product(Fetch, Offer))


def after(fetch: Fetch, offer: Offer, *events: Event) -> tuple[Fetch, Offer]:
    states = RequestStates(fetch, offer)
    for event in events:
        states.fire(event)
    return states.fetch, states.offer


@pytest.mark.parametrize("event", Event)
def test_every_pair_of_state_and_event(event: Event) -> None:
    for fetch, offer in PAIRS:
        states = RequestStates(fetch, offer)
        named = event in FETCHES[fetch] or event in OFFERS[offer]
        assert states.fire(event) is named
        assert states.fetch is FETCHES[fetch].get(event, fetch)
        assert states.offer is OFFERS[offer].get(event, offer)
    in_fetches, in_offers = (any(event in row for row in table.values()) for table in (FETCHES, OFFERS))
    assert in_fetches is not in_offers, "an event is of one of the two"


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
