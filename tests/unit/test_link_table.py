"""Which of two competing links stays: two tables, every order of the steps that hypothesis can think of."""

import itertools
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist._deadline import Deadline
from llm_datadist._links.link import TRANSITIONS, USABLE, Link, LinkEvent, LinkOrigin, LinkState, Peer
from llm_datadist._links.machine import Machine
from llm_datadist._links.table import LinkTable
from llm_datadist._links.versions import Spoken
from llm_datadist._transport.choose import Choice
from llm_datadist._transport.connection import DataPath
from llm_datadist.errors import AlreadyLinked, DeadlineExceeded, LinkRefused, LLMStatusCode, StateError

pytestmark = pytest.mark.covers("errors.AlreadyLinked")

_names = itertools.count(1)


class End:
    """One process: its table, and what its callers were told."""

    def __init__(self, cluster_id: int, incarnation: bytes) -> None:
        self.me = Peer(cluster_id, incarnation, cluster_id, "host")
        self.table = LinkTable(incarnation)
        self.told: list[str] = []

    def link(self, peer: Peer, name: str, *, dialled: bool, sequence: int, peer_sequence: int) -> Link:
        origin = LinkOrigin(dialled, sequence, peer_sequence)
        return Link(peer, Mock(DataPath, connections=()), Choice(name, name, "test"), origin, Spoken(11, frozenset()))

    def end(self, link: Link | None) -> None:
        if link is not None:
            self.table.remove(link)
            link.end("replaced", lost=True)

    def usable(self) -> list[str]:
        return sorted(link.choice.name for link in self.table.all() if link.usable)


def test_what_became_of_links_is_remembered_of_so_many_clusters() -> None:
    table, error = LinkTable(b"x" * 16), LinkRefused("not you")
    for cluster_id in range(5000):
        table.note(cluster_id, "link_clusters failed", error)
    assert [table.past(0), table.past(5000 - 4097)] == [("", None)] * 2
    for cluster_id in (5000 - 4096, 4999):
        text, kept = table.past(cluster_id)
        assert (type(kept), str(kept), kept is error) == (LinkRefused, "not you", False)
        assert text.startswith("; link_clusters failed ")
        assert text.endswith(" s ago: LinkRefused: not you")
    table.note(4999, "the link was lost", "its process has ended")
    assert table.past(4999)[1] is None


def test_a_lost_peer_is_remembered_until_it_is_linked_again_or_unlinked() -> None:
    here, peers = End(1, b"x" * 16), [Peer(number, bytes([number]) * 16, number, "host") for number in (2, 3, 4)]

    def made(peer: Peer) -> Link:
        link = here.link(peer, "link", dialled=False, sequence=0, peer_sequence=1)
        here.table.admit(link)
        return link

    for link, kind in zip(map(made, peers), ("silent", "connection", ""), strict=True):
        here.table.remove(link, kind)
        here.table.remove(link, "replaced")  # it is not there any more
    assert here.table.lost == {2: "silent", 3: "connection"}
    made(peers[0])
    here.table.refuse_reconnects(3)
    assert here.table.lost == {}
    for number in range(10, 310):
        here.table.remove(made(Peer(number, number.to_bytes(16), number, "host")), "silent")
    assert (len(here.table.lost), 10 in here.table.lost, 309 in here.table.lost) == (256, False, True)


def dial(here: End, there: End) -> Iterator[None]:
    """One call of link_clusters, step by step; between two steps anything else may happen."""
    while True:
        yield  # Hello and Welcome are on their way
        try:
            number = here.table.commit(there.me, Deadline(0))
        except DeadlineExceeded:
            continue  # would wait for another call of this end
        if isinstance(number, Link):
            here.told.append(number.choice.name)
            return
        name = f"{here.me.cluster_id}->{there.me.cluster_id} {next(_names)}"
        yield  # Met is on its way
        far = there.link(here.me, name, dialled=False, sequence=0, peer_sequence=number)
        try:
            old = there.table.admit(far)
        except LinkRefused as error:
            if error.status_code is not LLMStatusCode.LLM_LINK_BUSY:
                raise
            far.end("refused", lost=False)
            yield  # Refused is on its way
            here.table.withdraw(there.me)
            continue
        far.ready(None)  # type: ignore[arg-type]  # no channel: nothing is sent over these links
        there.end(old)
        yield  # Linked is on its way
        near = here.link(there.me, name, dialled=True, sequence=number, peer_sequence=far.origin.sequence)
        near.ready(None)  # type: ignore[arg-type]
        here.end(here.table.install(near))
        here.table.withdraw(there.me)
        here.told.append(name)
        return


def run(dials: list[Iterator[None]], order: Iterator[int]) -> None:
    """Advance the dials in the given order until all are over."""
    for _ in range(2000):
        if not dials:
            return
        chosen = dials.pop(next(order, 0) % len(dials))
        if next(chosen, "over") != "over":
            dials.append(chosen)  # none starves
    raise AssertionError("the dials never end")


@settings(max_examples=300)
@given(
    st.lists(st.booleans(), min_size=1, max_size=6),
    st.lists(st.integers(0, 5), max_size=80),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_dials_of_both_ends_leave_one_link_and_never_replace_a_link_that_was_told(
    sides: list[bool], order: list[int], swapped: bool, loser: bool, both: bool
) -> None:
    """Regression: both sides dialled at once, and each kept another connection."""
    ends = End(1, b"b" if swapped else b"a"), End(2, b"a" if swapped else b"b")
    run([dial(ends[side], ends[not side]) for side in sides], iter(order))
    (name,) = ends[0].usable()
    assert ends[1].usable() == [name]
    for end, side in zip(ends, (False, True), strict=True):
        assert end.told == [name] * sides.count(side), "an end that was told of a link still has it"
        end.table.check_integrity()
    ends[loser].end(ends[loser].table.get(ends[not loser].me.cluster_id))  # the other end has not heard of it
    run([dial(ends[loser], ends[not loser]) for _ in range(1 + both)], iter(order))
    (again,) = ends[loser].usable()
    assert ends[not loser].usable() == [again]
    assert again != name


def test_rule_8_a_second_process_under_a_linked_cluster_id_is_refused_naming_both() -> None:
    here, first, second = End(1, b"a"), End(2, b"b"), End(2, b"c")
    second.me = Peer(2, b"c", 77, "elsewhere")
    run([dial(first, here)], iter([]))
    with pytest.raises(AlreadyLinked) as caught:
        here.table.commit(second.me, Deadline(0))
    assert caught.value.status_code is LLMStatusCode.LLM_ALREADY_LINK
    assert all(part in str(caught.value) for part in ("pid 2 on host", "pid 77 on elsewhere"))
    newcomer = here.link(second.me, "newcomer", dialled=False, sequence=0, peer_sequence=1)
    assert here.table.conflict(second.me) is here.table.get(2)
    with pytest.raises(AlreadyLinked):
        here.table.admit(newcomer)
    newcomer.origin.reconnected = True  # dialled before the other one was linked
    with pytest.raises(AlreadyLinked):
        here.table.install(newcomer)
    newcomer.end("refused", lost=False)


def test_a_commit_waits_for_an_unlink_a_closed_table_takes_no_link_and_one_links_to_itself() -> None:
    here, there = End(1, b"a"), End(2, b"b")
    run([dial(here, there)], iter([]))
    link = here.table.get(2)
    assert link is not None
    assert link.begin_unlink()
    with pytest.raises(DeadlineExceeded) as caught:
        here.table.commit(there.me, Deadline(1))
    assert caught.value.phase == "link"
    here.end(link)
    assert isinstance(here.table.commit(there.me, Deadline(0)), int)
    assert here.table.refuse("the instance is being finalized") == []
    for refused in (
        lambda: here.table.commit(Peer(3, b"c", 3, ""), Deadline(0)),
        lambda: here.table.install(here.link(there.me, "x", dialled=True, sequence=1, peer_sequence=1)),
        lambda: here.table.admit(here.link(there.me, "x", dialled=False, sequence=0, peer_sequence=1)),
    ):
        with pytest.raises(LinkRefused, match="finalized"):
            refused()
    assert here.table.all() == []
    alone = End(1, b"a")
    run([dial(alone, alone)], iter([]))  # both ends in one table
    assert len(alone.usable()) == 2
    assert len(set(alone.usable())) == 1
    alone.table.check_integrity()
    dialled = alone.table.get(1)
    assert dialled is not None
    assert dialled.origin.dialled
    for link in alone.table.all():
        alone.end(link)
    assert alone.table.all() == []


def test_r22_what_this_end_unlinked_does_not_come_back_by_a_redial_until_somebody_links() -> None:
    """Regression: a link lost in the moment of its unlink came back."""
    here, there = End(1, b"a"), End(2, b"b")

    def knock(sequence: int, *, reconnected: bool) -> Link:
        link = here.link(there.me, f"knock {sequence}", dialled=False, sequence=0, peer_sequence=sequence)
        link.origin.reconnected = reconnected
        return link

    refused, explicit, back = knock(1, reconnected=True), knock(2, reconnected=False), knock(3, reconnected=True)
    for cluster_id in range(2, 10_000):  # the memory of what was unlinked is bounded
        here.table.refuse_reconnects(cluster_id)
    assert (len(here.table._unlinked), 9_999 in here.table._unlinked) == (4096, True)
    here.table.refuse_reconnects(2)
    with pytest.raises(LinkRefused) as caught:
        here.table.admit(refused)
    assert caught.value.status_code is LLMStatusCode.LLM_NOT_YET_LINK
    assert here.table.all() == []
    here.table.admit(explicit)
    here.table.remove(explicit)
    here.table.admit(back)
    assert here.table.all() == [back]
    for link in (refused, explicit, back):
        link.end("over", lost=False)


# --- The life of a link, pair by pair: tests/test_docs.py holds TRANSITIONS to docs/protocol.md -----------------------


def test_the_story_tells_the_last_sixteen_events_and_an_illegal_event_tells_the_story() -> None:
    machine = Machine("x", TRANSITIONS, LinkState.HANDSHAKE)
    for event in (LinkEvent.READY, *[LinkEvent.SILENT, LinkEvent.HEARD] * 7, LinkEvent.SILENT):
        machine.fire(event)
    events = ["ready -> ready", *["silent -> suspect", "heard -> ready"] * 7, "silent -> suspect"]
    assert machine.story().split("; ") == events
    with pytest.raises(StateError, match=r"^x: ready is illegal when suspect; story: ready -> ready; ") as caught:
        machine.fire(LinkEvent.READY)
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    machine.fire(LinkEvent.HEARD)
    assert machine.story().split("; ") == [*events[1:], "heard -> ready"]
    assert {state.name for state in USABLE} == {"READY", "SUSPECT"}, "operations may start in these only"
