"""The life of a cache, pair by pair: what the table allows leads where it says, everything else raises its story.

The table is that of docs/interface.md: tests/test_docs.py.
"""

from __future__ import annotations

import itertools

import pytest

from llm_datadist._cache.registry import TRANSITIONS, Event, Lifecycle, State
from llm_datadist.errors import LLMStatusCode, StateError

#: What is left of (owner, keys, pins) says the state.
LEFT = {
    State.LIVE: (True, 1, 1),
    State.DEFERRED: (False, 1, 1),
    State.DRAINING: (False, 0, 1),
    State.FREED: (False, 0, 0),
}


def in_state(state: State) -> Lifecycle:
    """A life that came to ``state`` by legal events."""
    life = Lifecycle("cache 7")
    life.settle(Event.BIND, owner=True, keys=1, pins=0)
    life.settle(Event.PIN, owner=True, keys=1, pins=1)
    if state is State.DEFERRED:
        life.settle(Event.DROP_OWNER, owner=False, keys=1, pins=1)
    elif state is not State.LIVE:
        life.settle(Event.WITHDRAW, owner=False, keys=0, pins=1)
    if state is State.FREED:
        life.settle(Event.UNPIN, owner=False, keys=0, pins=0)
    assert life.state is state
    return life


def test_a_pair_of_state_and_event_leads_where_the_table_says_or_raises_with_the_story() -> None:
    for state, event in itertools.product(State, Event):
        targets = TRANSITIONS.get((state, event), frozenset())
        illegal = f"is illegal when {state.value}"
        if targets:
            assert in_state(state).require(event) == targets
        else:
            with pytest.raises(StateError, match=f"^cache 7: {event.value} {illegal}; story: bind "):
                in_state(state).require(event)
        for target, (owner, keys, pins) in LEFT.items():
            life = in_state(state)
            story = life.story()
            assert story.startswith("bind (keys 1, pins 0) -> live; pin (keys 1, pins 1) -> live")
            if target in targets:
                assert life.settle(event, owner=owner, keys=keys, pins=pins) is life.state is target
                assert life.story() == f"{story}; {event.value} (keys {keys}, pins {pins}) -> {target.value}"
                continue
            told = f"cannot lead from {state.value} to {target.value}" if targets else illegal
            with pytest.raises(StateError) as caught:
                life.settle(event, owner=owner, keys=keys, pins=pins)
            assert str(caught.value) == f"cache 7: {event.value} {told}; story: {story}"
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert (life.state, life.story()) == (state, story)


def test_the_state_follows_from_what_is_left_and_a_story_keeps_the_last_events_in_order() -> None:
    for owner, keys, pins in itertools.product((True, False), (0, 2), (0, 3)):
        expected = State.LIVE if owner else State.DEFERRED if keys else State.DRAINING if pins else State.FREED
        event = Event.BIND if owner else Event.DROP_OWNER
        assert Lifecycle("c").settle(event, owner=owner, keys=keys, pins=pins) is expected
    life = Lifecycle("cache 1")
    assert life.story() == "added"
    for pins in range(1, 40):
        life.settle(Event.PIN, owner=True, keys=0, pins=pins)
    assert life.story() == "; ".join(f"pin (keys 0, pins {pins}) -> live" for pins in range(24, 40))
