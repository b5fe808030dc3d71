"""The life of a link, pair by pair, against a table written down a second time."""

from __future__ import annotations

import itertools
from typing import Final

import pytest

from llm_datadist._links.link import TRANSITIONS, USABLE, LinkEvent, LinkMachine, LinkState
from llm_datadist.errors import LLMStatusCode, StateError

#: State: what each event leads to. What is not here is illegal.
EXPECTED: Final[dict[str, dict[str, str]]] = {
    "CLOSED": {"HELLO": "HANDSHAKE"},
    "HANDSHAKE": {"READY": "READY", "LOST": "BROKEN"},
    "READY": {"SILENT": "SUSPECT", "UNLINK": "DRAINING", "LOST": "BROKEN"},
    "SUSPECT": {"HEARD": "READY", "UNLINK": "DRAINING", "LOST": "BROKEN"},
    "DRAINING": {"RESUME": "READY", "IDLE": "CLOSED", "LOST": "BROKEN"},
    "BROKEN": {"CLEANUP": "CLOSED"},
}
PAIRS: Final = list(itertools.product(LinkState, LinkEvent))


def in_state(state: LinkState) -> LinkMachine:
    """Return a machine that was driven there by legal events: the shortest way."""
    ways: dict[LinkState, list[LinkEvent]] = {LinkState.CLOSED: []}
    while state not in ways:
        ways |= {
            target: [*ways[source], event]
            for (source, event), target in TRANSITIONS.items()
            if source in ways and target not in ways
        }
    machine = LinkMachine("link to somebody")
    for event in ways[state]:
        machine.fire(event)
    return machine


@pytest.mark.parametrize(("state", "event"), PAIRS, ids=[f"{s.name}-{e.name}" for s, e in PAIRS])
def test_every_pair_of_state_and_event(state: LinkState, event: LinkEvent) -> None:
    machine = in_state(state)
    target = EXPECTED[state.name].get(event.name)
    assert machine.can(event) == (target is not None)
    assert (state in USABLE) == (state.name in ("READY", "SUSPECT")), "operations may start in these only"
    if target is not None:
        assert machine.fire(event) is machine.state is LinkState[target]
        return
    with pytest.raises(StateError) as caught:
        machine.fire(event)
    assert machine.state is state, "an illegal event changes nothing"
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    text = str(caught.value)
    assert "\n" not in text
    assert all(part in text for part in ("link to somebody", event.value, state.value, machine.story()))


def test_the_story_tells_the_last_sixteen_events() -> None:
    assert LinkMachine("x").story() == "made"
    machine = in_state(LinkState.READY)
    assert machine.story() == "hello -> handshake; ready -> ready"
    for _ in range(20):
        machine.fire(LinkEvent.SILENT)
        machine.fire(LinkEvent.HEARD)
    assert machine.story().split("; ") == ["silent -> suspect", "heard -> ready"] * 8
