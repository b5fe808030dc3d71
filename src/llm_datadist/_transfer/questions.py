"""Questions of the users' own, by name: this instance's handlers (:class:`Questions`), calls to peers (:func:`ask`)."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_rule, check_text, check_type
from llm_datadist._links.messages import MAX_BODY, Answer, Question, RemoteFailure, failed
from llm_datadist._links.versions import QUESTIONS
from llm_datadist._log import SeldomLog, calls_logger
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, ProtocolError
from llm_datadist.types.question import PeerQuestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._links.messages import Message
    from llm_datadist._transfer.access import AccessPolicy

    Handler = Callable[[PeerQuestion], bytes | None]

# Of unanswered questions; beyond, the answer is LLM_LINK_BUSY.
_MAX_UNANSWERED: Final = 256  # of one link
_MAX_BYTES: Final = 64 << 20  # of all links
_BYTES_EACH: Final = 1024  # besides the body
_MAX_NAME: Final = 64
_LOST: Final = "callback of on_peer_lost"


def check_name(name: object) -> str:
    """Return the name of a question; TypeError, ParamError."""
    text = check_text("name", check_type("name", name, str))
    check_rule(1 <= len(text) <= _MAX_NAME, f"name: {len(text)} characters, 1 to {_MAX_NAME} are needed")
    return text


def check_body(name: str, body: object) -> bytes:
    """Return the bytes of a question or an answer; TypeError, ParamError."""
    data = check_type(name, body, bytes)
    check_rule(len(data) <= MAX_BODY, f"{name}: {len(data)} bytes, at most {MAX_BODY} fit a message")
    return data


class Questions:
    """Handlers of this instance, and their unanswered questions.

    Threads: control for questions, any for the rest; handlers run outside the lock.
    """

    def __init__(self, access: AccessPolicy) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._lost: list[Callable[[int, str], None]] = []
        # Of unanswered questions: number and bytes of each link, and all bytes.
        self._unanswered: Counter[Link] = Counter()
        self._bytes: Counter[Link] = Counter()
        self._held = 0
        self._log = SeldomLog(calls_logger)

    def serve(self, name: str, handler: Handler | None) -> None:
        with self._lock:
            if handler is None:
                self._handlers.pop(name, None)
            else:
                self._handlers[name] = handler

    def on_peer_lost(self, callback: Callable[[int, str], None]) -> None:
        with self._lock:
            self._lost.append(callback)

    def on_question(self, link: Link, message: Question) -> None:
        try:
            handler = self._admit(link, message)
        except LLMException as refusal:
            link.tell(failed(message.id, refusal))
            return
        send = partial(self._send, link, message, [True])
        question = PeerQuestion(self._access.asker(link), message.body, message.budget_ms, send)
        with suppress(BaseException):  # it is logged, and ends no thread of the library
            question.answer_by(partial(handler, question))

    def _admit(self, link: Link, message: Question) -> Handler:
        """Count a question, and return its handler. Raises LLMException if it is refused."""
        none, busy = LLMStatusCode.LLM_FEATURE_NOT_ENABLED, LLMStatusCode.LLM_LINK_BUSY
        if QUESTIONS not in link.spoken.features:
            raise LLMException("this link was made without questions", status_code=none)
        self._access.require(link, "ask")  # before the handler: nobody else learns which questions are answered
        size = len(message.body) + _BYTES_EACH
        with self._lock:
            if (handler := self._handlers.get(message.name)) is None:
                raise LLMException("no handler answers questions of this name", status_code=none)
            if self._unanswered[link] >= _MAX_UNANSWERED:
                raise LinkError(f"{_MAX_UNANSWERED} questions of this peer wait already", status_code=busy)
            if self._bytes[link] + size > _MAX_BYTES - self._held - size:  # so each peer leaves half to the others
                raise LinkError("too many bytes of questions, of this peer or of all, wait already", status_code=busy)
            self._count(link, 1, message)
        return handler

    def _count(self, link: Link, number: int, question: Question) -> None:
        """Under the lock."""
        size = number * (len(question.body) + _BYTES_EACH)
        self._unanswered[link] += number
        self._bytes[link] += size
        self._held += size

    def _send(self, link: Link, question: Question, first: list[bool], answer: bytes | BaseException) -> None:
        """Send the answer; whoever empties ``first`` is the first. Threads: any."""
        if not isinstance(answer, BaseException):
            message: Message = Answer(question.id, check_body("answer", answer))
        elif isinstance(answer, LLMException):
            message = failed(question.id, answer)
        else:
            text = f"unexpected error while a question {question.name!r} is answered"
            self._log.log(logging.ERROR, question.name, text, answer)
            internal = f"internal error: {type(answer).__name__}; see the log there"  # its text may be a secret
            message = failed(question.id, LLMException(internal, status_code=LLMStatusCode.LLM_FAILED))
        with self._lock:
            if not first:
                return
            first.clear()
            if link in self._unanswered:  # else it has ended
                self._count(link, -1, question)
        link.tell(message)

    def drop_peer(self, link: Link) -> None:
        with self._lock:
            del self._unanswered[link]
            self._held -= self._bytes.pop(link, 0)
            callbacks = list(self._lost)
        for callback in callbacks:
            try:
                callback(link.peer.cluster_id, link.peer.incarnation.hex())
            except BaseException as error:  # noqa: BLE001 (of the user; the link's end must go on)
                self._log.log(logging.ERROR, _LOST, f"unexpected error of a {_LOST}", error)


def ask(links: LinkManager, cluster_id: int, name: str, body: bytes, deadline: Deadline) -> bytes:
    """Return the peer's answer. Errors as :meth:`LLMDataDist.ask`. Threads: any."""
    what = f"ask {name!r} of cluster {cluster_id}"
    with links.operation(cluster_id) as link:
        if QUESTIONS not in link.spoken.features:
            text = f"{what}: the release of {link.peer} knows no questions"
            raise LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED, peer=cluster_id)
        try:
            budget = deadline.remaining_ms()
            answer = link.request(lambda number: Question(number, name, body, budget), deadline, what, "ask")
        except RemoteFailure as failure:
            raise failure.typed(what, LLMException) from failure
    if not isinstance(answer, Answer):
        raise ProtocolError(f"{what}: {link.peer} answered a Question with {type(answer).__name__}")
    return answer.body
