"""Questions of peers: what they hold here, those answered in pieces, and those of peers that end."""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import MAX_BODY, Answer, Failed, Question
from llm_datadist._links.versions import QUESTIONS
from llm_datadist._log import SeldomLog
from llm_datadist._transfer.questions import Questions
from llm_datadist.errors import CacheMismatch, LLMStatusCode
from llm_datadist.types.question import PeerQuestion
from tests.support.moves import wait_until

Pieces = Generator[None, None, "bytes | None"]


class _Link:
    def __init__(self, told: list[Any], features: tuple[str, ...] = (QUESTIONS,)) -> None:
        self.peer = SimpleNamespace(cluster_id=2, incarnation=b"x")
        self.spoken = SimpleNamespace(features=features)
        self.tell = told.append


def linked(told: list[Any], *features: str) -> Any:
    return cast("Any", _Link(told, features or (QUESTIONS,)))


@pytest.fixture
def control() -> Iterator[ControlLoop]:
    control = ControlLoop()
    control.start()
    yield control
    control.stop()


def say(control: ControlLoop, questions: Questions, link: Any, *said: Question) -> None:
    """Say it without a round between."""

    def begin() -> None:
        for each in said:
            questions.on_question(link, each)

    control.call(begin)


def busy(answer: object) -> bool:
    return isinstance(answer, Failed) and answer.code == LLMStatusCode.LLM_LINK_BUSY.value


def test_an_answer_after_the_end_of_its_link_leaves_nothing(control: ControlLoop) -> None:
    told: list[Any] = []
    ended, other = linked(told), linked(told)
    questions, kept = Questions(control), list[PeerQuestion]()
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


def test_a_link_without_questions_is_refused_and_its_question_is_not_handled(control: ControlLoop) -> None:
    told, asked = list[Any](), list[PeerQuestion]()
    questions = Questions(control)
    questions.serve("x", asked.append)
    questions.on_question(linked(told, "reads-by-key"), Question(1, "x", b"", 100))
    assert told == [Failed(1, LLMStatusCode.LLM_FEATURE_NOT_ENABLED.value, "this link was made without questions")]
    assert asked == []


def test_one_peer_holds_half_of_the_bytes_and_another_half_of_the_rest_until_they_are_answered(
    control: ControlLoop,
) -> None:
    questions, kept, large = Questions(control), list[PeerQuestion](), Question(1, "x", bytes(MAX_BODY), 100)
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


class Worker:
    """A handler in pieces: a question's body is the number of them. It notes each, and each round of the thread."""

    def __init__(self, control: ControlLoop) -> None:
        self.control = control
        self.noted: list[str] = []
        self.threads: set[str] = set()
        self.over = False

    def note_rounds(self) -> None:
        if not self.over:
            self.noted.append("round")
            self.control.go_on(self.note_rounds)

    def handle(self, question: PeerQuestion) -> Pieces:
        name, count = question.body.decode().split()
        try:
            for number in range(int(count)):
                self.note(f"{name}{number}")
                yield
            self.note(f"{name} last")
            return question.body
        finally:
            self.note(f"{name} finally")

    def note(self, what: str) -> None:
        self.noted.append(what)
        self.threads.add(threading.current_thread().name)

    def pieces(self, *names: str) -> list[str]:
        return [each for each in self.noted if each[0] in names]


def test_each_link_has_one_piece_a_round_and_its_questions_are_answered_in_order(control: ControlLoop) -> None:
    here, there, questions, worker = list[Any](), list[Any](), Questions(control), Worker(control)
    questions.serve("work", worker.handle)
    questions.serve("echo", lambda question: question.body)
    one, other = linked(here), linked(there)

    def begin() -> None:
        worker.note_rounds()
        for number, body in enumerate((b"a 3", b"b 0", b"c 2")):
            questions.on_question(one, Question(number, "work", body, 100))
        questions.on_question(one, Question(3, "echo", b"at once", 100))
        questions.on_question(other, Question(4, "work", b"z 5", 100))

    control.call(begin)
    wait_until(lambda: len(here) == 4 and len(there) == 1)
    worker.over = True
    assert here == [Answer(3, b"at once"), Answer(0, b"a 3"), Answer(1, b"b 0"), Answer(2, b"c 2")]
    assert there == [Answer(4, b"z 5")]
    ends = [f"{name} {end}" for name in "abc" for end in ("last", "finally")]
    expected = ["a0", "a1", "a2", *ends[:4], "c0", "c1", *ends[4:]]
    assert worker.pieces("a", "b", "c") == expected
    rounds = "".join("|" if each == "round" else each[0] for each in worker.noted if "finally" not in each)
    assert rounds.strip("|") == "az|az|az|az|bz|cz|c|c"
    assert worker.threads == {"llm-datadist-control"}


def test_questions_in_pieces_count_as_unanswered(control: ControlLoop) -> None:
    told, questions, worker, asked = list[Any](), Questions(control), Worker(control), linked([])
    asked.tell = told.append
    questions.serve("work", worker.handle)

    def begin() -> None:
        for number in range(260):
            questions.on_question(asked, Question(number, "work", b"a 1", 100))

    control.call(begin)
    wait_until(lambda: len(told) == 260)
    assert [answer.id for answer in told if busy(answer)] == [256, 257, 258, 259]
    assert sum(isinstance(answer, Answer) for answer in told) == 256
    assert (questions._begun, questions._held) == ({}, 0)


def test_a_piece_that_fails_refuses_its_question_and_the_next_one_is_answered(
    control: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    told, questions = list[Any](), Questions(control)
    errors: list[BaseException] = [CacheMismatch("no"), ZeroDivisionError("bug"), SystemExit("exit")]

    def fail(question: PeerQuestion) -> Pieces:
        yield
        if errors:
            raise errors.pop(0)
        question.answer(b"before its end")
        return None

    def no_bytes(question: PeerQuestion) -> Pieces:
        yield
        return cast("bytes", 5)

    questions.serve("fail", fail)
    questions.serve("no bytes", no_bytes)
    link = linked(told)
    for number in range(4):
        say(control, questions, link, Question(number, "fail", b"", 100))
    say(control, questions, link, Question(4, "no bytes", b"", 100))
    wait_until(lambda: len(told) == 5)
    assert [getattr(answer, "text", "") for answer in told] == [
        "no",
        "internal error: ZeroDivisionError('bug')",
        "internal error: SystemExit('exit')",
        "",
        told[4].text,
    ]
    assert "bytes" in told[4].text
    assert told[3] == Answer(3, b"before its end")
    assert control.call(lambda: "alive") == "alive"


@pytest.mark.parametrize("inside", [False, True], ids=["between pieces", "by a piece"])
def test_a_link_that_ends_closes_its_generators_on_the_control_thread_and_no_piece_follows(
    control: ControlLoop, inside: bool
) -> None:
    told, questions, worker, link = list[Any](), Questions(control), Worker(control), linked([])
    questions.serve("work", worker.handle)

    def endless(question: PeerQuestion) -> Pieces:
        try:
            while True:
                worker.note("e")
                if inside and len(worker.noted) == 4:
                    questions.drop_peer(link)
                yield
        finally:
            worker.note("e finally")

    questions.serve("endless", endless)
    say(control, questions, link, Question(1, "endless", b"", 100), Question(2, "work", b"w 3", 100))
    if not inside:
        wait_until(lambda: len(worker.noted) > 4)
        questions.drop_peer(link)
    wait_until(lambda: "e finally" in worker.noted)
    pieces = len(worker.noted)
    for _ in range(3):
        control.call(lambda: None)
    assert len(worker.noted) == pieces
    assert set(worker.noted) == {"e", "e finally"}, "the second one had not begun"
    assert worker.threads == {"llm-datadist-control"}
    assert questions._begun == {}
    assert told == []


def test_an_error_in_the_finally_of_a_given_up_generator_leaves_the_others(
    control: ControlLoop, caplog: pytest.LogCaptureFixture
) -> None:
    closed: list[bytes] = []

    def stubborn(question: PeerQuestion) -> Pieces:
        try:
            while True:
                yield
        finally:
            closed.append(question.body)
            raise KeyError("in finally")

    questions = Questions(control)
    questions.serve("stubborn", stubborn)
    for body in (b"a", b"b"):
        link = linked([])
        say(control, questions, link, Question(1, "stubborn", body, 100))
        questions.drop_peer(link)
    wait_until(lambda: closed == [b"a", b"b"])
    assert control.call(lambda: "alive") == "alive"
    assert len(caplog.records) == 1, "two in one second"


def test_a_handler_that_always_fails_fills_no_log(control: ControlLoop, caplog: pytest.LogCaptureFixture) -> None:
    told, questions = list[Any](), Questions(control)
    for name in ("one", "other"):
        questions.serve(name, lambda question: cast("bytes", 1 // len(question.body)))
        for number in range(100):
            questions.on_question(linked(told), Question(number, name, b"", 100))
    assert len(told) == 200
    lines = [record.getMessage() for record in caplog.records]
    assert {f"unexpected error while a question {name!r} is answered" for name in ("one", "other")} <= set(lines)
    assert len(lines) < 20


def test_a_log_line_that_comes_later_tells_how_many_were_left_out(caplog: pytest.LogCaptureFixture) -> None:
    log = SeldomLog()
    log.log(logging.WARNING, "x", "it failed")
    for _ in range(5):
        log._lines["x"] = (float("inf"), log._lines["x"][1])
        log.log(logging.WARNING, "x", "it failed")
    log._lines["x"] = (0.0, log._lines["x"][1])
    log.log(logging.WARNING, "x", "it failed")
    assert [record.getMessage() for record in caplog.records] == ["it failed", "it failed (5 more like it)"]
