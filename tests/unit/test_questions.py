"""Questions of peers: what they hold here, and those of peers that end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm_datadist._links.messages import MAX_BODY, Answer, Failed, Question
from llm_datadist._links.versions import QUESTIONS
from llm_datadist._log import SeldomLog
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.questions import Questions
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.question import PeerQuestion


class _Link:
    def __init__(self, told: list[Any], features: tuple[str, ...] = (QUESTIONS,)) -> None:
        self.peer = SimpleNamespace(cluster_id=2, incarnation=b"x")
        self.spoken = SimpleNamespace(features=features)
        self.origin = SimpleNamespace(behind="pid 1")
        self.tell = told.append


def linked(told: list[Any], *features: str) -> Any:
    return cast("Any", _Link(told, features or (QUESTIONS,)))


def questions_of() -> Questions:
    return Questions(AccessPolicy(cast("Any", None)))


def busy(answer: object) -> bool:
    return isinstance(answer, Failed) and answer.code == LLMStatusCode.LLM_LINK_BUSY.value


def test_an_answer_after_the_end_of_its_link_leaves_nothing() -> None:
    told: list[Any] = []
    ended, other = linked(told), linked(told)
    questions, kept = questions_of(), list[PeerQuestion]()
    questions.serve("later", kept.append)
    for link in (ended, other):
        questions.on_question(link, Question(1, "later", b"", 100))
    questions.drop_peer(ended)
    for question in kept:
        question.answer(b"at last")
        question.answer(b"again")
    assert told == [Answer(1, b"at last")] * 2
    assert questions._unanswered == {other: 0}
    assert (questions._bytes, questions._held) == ({other: 0}, 0)


def test_one_peer_holds_half_of_the_bytes_and_another_half_of_the_rest_until_they_are_answered() -> None:
    questions, kept, large = questions_of(), list[PeerQuestion](), Question(1, "x", bytes(MAX_BODY), 100)
    questions.serve("x", kept.append)
    counts, links = [], [linked([]) for _ in range(3)]
    for link in links:
        before = len(kept)
        for _ in range(100):
            questions.on_question(link, large)
        counts.append(len(kept) - before)
    assert counts == [31, 16, 8], "of 63 that fit"
    told: list[Any] = []
    small, newcomer = linked(told), linked(told)
    for _ in range(256):
        questions.on_question(small, Question(1, "x", b"", 100))
    for _ in range(5):
        questions.on_question(newcomer, large)
    assert [busy(answer) for answer in told] == [True], "four fit"
    for question in kept[:31]:
        question.answer(b"")
    questions.on_question(newcomer, large)
    questions.drop_peer(newcomer)
    assert len(told) == 1
    for link in (*links, small):
        questions.drop_peer(link)
    assert questions._held == 0


def test_a_handler_that_always_fails_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    told, questions = list[Any](), questions_of()
    for name in ("one", "other"):
        questions.serve(name, lambda question: cast("bytes", 1 // len(question.body)))
        for number in range(100):
            questions.on_question(linked(told), Question(number, name, b"", 100))
    assert len(told) == 200
    lines = [record.getMessage() for record in caplog.records]
    assert {f"unexpected error while a question {name!r} is answered" for name in ("one", "other")} <= set(lines)
    assert len(lines) < 20


def test_a_log_line_that_comes_later_tells_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = SeldomLog(logging.getLogger("LLM_DATADIST.calls"))
    log.log(logging.WARNING, "x", "it failed")
    for _ in range(5):
        log._lines["x"] = (float("inf"), log._lines["x"][1])
        log.log(logging.WARNING, "x", "it failed")
    log._lines["x"] = (0.0, log._lines["x"][1])
    log.log(logging.WARNING, "x", "it failed")
    assert [record.getMessage() for record in caplog.records] == ["it failed", "it failed (5 more like it)"]
