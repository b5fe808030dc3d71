"""The life of a cache, pair by pair: what the table allows leads where it says, everything else raises its story."""

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

#: Written down a second time, from interface B3 and docs/architecture.md: event -> targets, by state.
ROWS = {
    State.LIVE: {
        Event.BIND: "live",
        Event.UNBIND: "live",
        Event.PIN: "live",
        Event.UNPIN: "live",
        Event.DROP_OWNER: "deferred draining freed",
        Event.WITHDRAW: "draining freed",
    },
    State.DEFERRED: {
        Event.UNBIND: "deferred draining freed",
        Event.PIN: "deferred",
        Event.UNPIN: "deferred",
        Event.WITHDRAW: "draining freed",
    },
    State.DRAINING: {Event.UNPIN: "draining freed"},
    State.FREED: {},
}

PAIRS = list(itertools.product(State, Event))
LEGAL = [(state, event) for state, event in PAIRS if event in ROWS[state]]
ILLEGAL = [pair for pair in PAIRS if pair not in LEGAL]


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


def settle(life: Lifecycle, event: Event, target: State) -> State:
    owner, keys, pins = LEFT[target]
    return life.settle(event, owner=owner, keys=keys, pins=pins)


def targets(state: State, event: Event) -> set[State]:
    return {State(name) for name in ROWS[state][event].split()}


def test_every_pair_is_either_in_the_table_or_illegal() -> None:
    assert len(PAIRS) == 24
    assert set(TRANSITIONS) == set(LEGAL)
    assert len(ILLEGAL) == 13


@pytest.mark.parametrize(("state", "event"), LEGAL)
def test_legal_pair_leads_where_the_table_says(state: State, event: Event) -> None:
    assert TRANSITIONS[state, event] == targets(state, event)
    assert in_state(state).require(event) == targets(state, event)
    for target in targets(state, event):
        life = in_state(state)
        assert settle(life, event, target) is target
        assert life.state is target


@pytest.mark.parametrize(("state", "event"), LEGAL)
def test_legal_event_cannot_lead_anywhere_else(state: State, event: Event) -> None:
    for target in set(State) - targets(state, event):
        life = in_state(state)
        story = life.story()
        with pytest.raises(StateError) as caught:
            settle(life, event, target)
        assert str(caught.value) == (
            f"cache 7: {event.value} cannot lead from {state.value} to {target.value}; story: {story}"
        )
        assert (life.state, life.story()) == (state, story)


@pytest.mark.parametrize(("state", "event"), ILLEGAL)
def test_illegal_pair_raises_with_the_story(state: State, event: Event) -> None:
    life = in_state(state)
    story = life.story()
    assert story.startswith("bind (keys 1, pins 0) -> live; pin (keys 1, pins 1) -> live")
    text = f"cache 7: {event.value} is illegal when {state.value}; story: {story}"
    with pytest.raises(StateError) as caught:
        life.require(event)
    assert str(caught.value) == text
    for target in State:
        with pytest.raises(StateError) as caught:
            settle(life, event, target)
        assert str(caught.value) == text
        assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    assert (life.state, life.story()) == (state, story)


def test_which_target_follows_from_what_is_left() -> None:
    for owner, keys, pins in itertools.product((True, False), (0, 2), (0, 3)):
        expected = State.LIVE if owner else State.DEFERRED if keys else State.DRAINING if pins else State.FREED
        if expected is State.LIVE:
            assert Lifecycle("c").settle(Event.BIND, owner=owner, keys=keys, pins=pins) is expected
        else:
            assert Lifecycle("c").settle(Event.DROP_OWNER, owner=owner, keys=keys, pins=pins) is expected


def test_a_story_begins_empty_and_keeps_the_last_events_in_order() -> None:
    life = Lifecycle("cache 1")
    assert life.story() == "added"
    for pins in range(1, 40):
        life.settle(Event.PIN, owner=True, keys=0, pins=pins)
    told = life.story().split("; ")
    assert told == [f"pin (keys 0, pins {pins}) -> live" for pins in range(40 - len(told), 40)]
    assert len(told) == 16
    assert "\n" not in life.story()
