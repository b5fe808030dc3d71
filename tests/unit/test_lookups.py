"""Lookups of an engine's requests: the scheduler never waits, few are under way, and no hit is forgotten."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn

import pytest

from llm_datadist.integrations import lookups as module
from llm_datadist.integrations.lookups import Lookups
from tests.support.double_store import Double
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

KEYS = [b"a", b"b", b"c"]
MOST = 3


@pytest.fixture
def store() -> Double:
    return Double(ranks=[b"0", b"1"])


@pytest.fixture
def lookups(store: Double) -> Iterator[Lookups]:
    made = Lookups(MOST, 250, 16)
    made.use(store)  # type: ignore[arg-type]
    yield made
    store.may_answer.set()
    made.stop()
    assert store.closed


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]  # so that no test waits for the seconds of the rules
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def answered(lookups: Lookups, request: str, first: int = 0) -> list[Any]:
    found: list[Any] = []

    def is_there() -> bool:
        found[:] = [lookups.find(request, first, lambda: KEYS[first:])]
        return found[0] is not None

    wait_until(is_there, 60)
    return list(found[0])


def counts(lookups: Lookups) -> Counter[str]:
    found: Counter[str] = Counter()
    for name, number in lookups.counted:
        found.update({name: number})
    return +found


def test_a_request_is_told_none_until_the_answer_to_its_one_question_is_there(lookups: Lookups, store: Double) -> None:
    store.has(KEYS, shorter=1)
    store.may_answer.clear()
    assert [lookups.find("r", 0, lambda: KEYS) for _ in range(100)] == [None] * 100
    store.may_answer.set()
    assert [len(hit) for hit in answered(lookups, "r")] == [2, 2]
    assert store.asked == [KEYS]
    assert counts(lookups)["found_tokens"] == 2 * 16
    assert lookups.take("r")[0] == 0
    assert store.held == 1, "they are the caller's"


def test_a_miss_is_kept_and_the_request_is_not_asked_for_again(lookups: Lookups, store: Double) -> None:
    assert [answered(lookups, "r") for _ in range(3)] == [[], [], []]
    assert len(store.asked) == 1
    assert counts(lookups)["misses_absent"] == 1


def test_four_thousand_waiting_requests_have_few_questions(lookups: Lookups, store: Double) -> None:
    store.may_answer.clear()
    store.has(KEYS)
    for _ in range(3):
        assert {lookups.find(f"r{number}", 0, lambda: KEYS) for number in range(4000)} == {None}
    store.may_answer.set()
    for number in range(MOST):
        assert len(answered(lookups, f"r{number}")) == 2
    assert len(store.asked) == store.held == MOST
    assert lookups.find("another", 0, lambda: KEYS) is None, "unused hits count, too"
    assert len(store.asked) == MOST
    lookups.end("r0")
    assert len(answered(lookups, "another")) == 2


def test_misses_let_others_ask(lookups: Lookups, store: Double) -> None:
    for number in range(2 * MOST):
        assert answered(lookups, f"r{number}") == []
        lookups.sweep()
    assert len(store.asked) == 2 * MOST


def test_a_hit_that_is_not_used_within_a_second_is_released_and_asked_again(
    lookups: Lookups, store: Double, clock: list[float]
) -> None:
    store.has(KEYS)
    assert len(answered(lookups, "r")) == 2
    lookups.sweep()
    clock[0] += 0.9
    lookups.sweep()
    assert store.held == 1
    clock[0] += 0.2
    lookups.sweep()
    assert store.held == 0
    assert len(answered(lookups, "r")) == 2
    assert (len(store.asked), store.held) == (2, 1)


def test_a_question_of_a_request_that_has_ended_is_released_when_the_answer_comes(
    lookups: Lookups, store: Double
) -> None:
    store.has(KEYS)
    store.may_answer.clear()
    assert lookups.find("r", 0, lambda: KEYS) is None
    wait_until(lambda: len(store.asked) == 1, 60)
    assert lookups.find("queued", 0, lambda: KEYS) is None
    for each in ("r", "queued"):
        lookups.end(each)
    assert lookups.busy == set()
    store.may_answer.set()
    wait_until(lambda: len(store.open) == 2 and store.held == 0, 60)
    assert len(answered(lookups, "next")) == 2
    assert len(store.asked) == 2, "the queued one was not asked at all"


def test_a_request_without_an_answer_is_computed_and_counted(
    lookups: Lookups, store: Double, clock: list[float]
) -> None:
    store.has(KEYS)
    store.may_answer.clear()
    assert lookups.find("r", 0, lambda: KEYS) is None
    clock[0] += 0.9
    assert lookups.find("r", 0, lambda: KEYS) is None
    clock[0] += 0.2
    assert lookups.find("r", 0, lambda: KEYS) == []
    assert lookups.find("r", 0, lambda: KEYS) == [], "and it is not asked for again"
    assert counts(lookups)["misses_late"] == 1
    store.may_answer.set()
    wait_until(lambda: len(store.open) == 2 and store.held == 0, 60)


@pytest.mark.parametrize("there", [False, True])
def test_more_computed_blocks_make_another_question(lookups: Lookups, store: Double, there: bool) -> None:
    store.has(KEYS if there else [])
    assert bool(answered(lookups, "r")) is there
    store.has(KEYS[1:])
    assert [len(hit) for hit in answered(lookups, "r", 1)] == [2, 2]
    assert (store.asked, store.held) == ([KEYS, KEYS[1:]], 1)


def test_a_question_that_raises_is_a_miss(lookups: Lookups) -> None:
    class Raising(Double):
        def lookup_ranks(self, _: object) -> NoReturn:
            raise ArithmeticError

    lookups.use(Raising(ranks=[b"0", b"1"]))  # type: ignore[arg-type]
    assert answered(lookups, "r") == []


def test_misses_are_counted_by_their_reason(lookups: Lookups, store: Double) -> None:
    for why in ("late", "gone", "busy", "absent"):
        store.reason = why
        assert answered(lookups, why) == []
        lookups.sweep()
    assert {name: number for name, number in counts(lookups).items() if name != "lookup_seconds"} == {
        "misses_late": 1,
        "misses_gone": 1,
        "misses_busy": 1,
        "misses_absent": 1,
    }


def test_another_client_forgets_what_the_one_before_has_found(lookups: Lookups, store: Double) -> None:
    store.has(KEYS)
    assert len(answered(lookups, "r")) == 2
    other = Double(ranks=[b"2", b"3"])
    lookups.use(other)  # type: ignore[arg-type]
    assert store.held == 0
    assert answered(lookups, "r") == []
    wait_until(lambda: store.closed, 60)
    assert other.asked == [KEYS]
