"""Questions of peers that end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from llm_datadist._links.messages import Answer, Question
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.questions import Questions
from llm_datadist.types.question import PeerQuestion


class _Link:
    def __init__(self, told: list[Any]) -> None:
        self.peer = SimpleNamespace(cluster_id=2, incarnation=b"x")
        self.origin = SimpleNamespace(behind="pid 1")
        self.tell = told.append


def test_an_answer_after_the_end_of_its_link_leaves_nothing() -> None:
    told: list[Any] = []
    ended, other = (cast("Any", _Link(told)) for _ in range(2))
    questions, kept = Questions(AccessPolicy(cast("Any", None))), list[PeerQuestion]()
    questions.serve("later", kept.append)
    for link in (ended, other):
        questions.on_question(link, Question(1, "later", b"", 100))
    questions.drop_peer(ended)
    for question in kept:
        question.answer(b"at last")
        question.answer(b"again")
    assert told == [Answer(1, b"at last")] * 2
    assert questions._unanswered == {other: 0}
