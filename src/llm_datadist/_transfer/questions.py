"""Questions of the users' own, by name: this instance's handlers (:class:`Questions`), calls to peers (:func:`ask`)."""

from __future__ import annotations

import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from llm_datadist._checks import check_rule, check_text, check_type
from llm_datadist._links.messages import MAX_BODY, Answer, Question, RemoteFailure, failed
from llm_datadist._links.versions import QUESTIONS
from llm_datadist._log import logger
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, ParamError, ProtocolError
from llm_datadist.types.question import PeerQuestion

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist._deadline import Deadline
    from llm_datadist._links.link import Link
    from llm_datadist._links.manager import LinkManager
    from llm_datadist._links.messages import Message
    from llm_datadist._transfer.access import AccessPolicy

    Handler = Callable[[PeerQuestion], bytes | None]

_MAX_UNANSWERED: Final = 256  # of one link; beyond, the answer is LLM_LINK_BUSY
_MAX_NAME: Final = 64


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
    """Handlers of this instance. Threads: control for questions, any for the rest; handlers run outside the lock."""

    def __init__(self, access: AccessPolicy) -> None:
        self._access = access
        self._lock = threading.Lock()
        self._handlers: dict[str, Handler] = {}
        self._lost: list[Callable[[int, str], None]] = []
        self._unanswered: Counter[Link] = Counter()

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
            self._access.require_ask(link)  # first: nobody else learns which questions are answered
        except ParamError as error:
            link.tell(failed(message.id, error))
            return
        busy = LLMStatusCode.LLM_LINK_BUSY
        with self._lock:
            handler, full = self._handlers.get(message.name), self._unanswered[link] >= _MAX_UNANSWERED
            self._unanswered[link] += not full
        if full:
            text = f"{_MAX_UNANSWERED} questions of this peer wait already"
            link.tell(failed(message.id, LinkError(text, status_code=busy)))
            return
        send = partial(self._send, link, message.id, [True])
        question = PeerQuestion(self._access.asker(link), message.body, message.budget_ms, send)
        if handler is not None:
            with suppress(BaseException):  # it is logged, and ends no thread of the library
                question.answer_by(partial(handler, question))
            return
        none = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
        question.refuse(LLMException("no handler answers questions of this name", status_code=none))

    def _send(self, link: Link, number: int, first: list[bool], answer: bytes | LLMException) -> None:
        """Send the answer; whoever empties ``first`` is the first. Threads: any."""
        if isinstance(answer, LLMException):
            message: Message = failed(number, answer)
        else:
            message = Answer(number, check_body("answer", answer))
        with self._lock:
            if not first:
                return
            first.clear()
            if link in self._unanswered:  # else it has ended
                self._unanswered[link] -= 1
        link.tell(message)

    def drop_peer(self, link: Link) -> None:
        with self._lock:
            del self._unanswered[link]
            callbacks = list(self._lost)
        for callback in callbacks:
            try:
                callback(link.peer.cluster_id, link.peer.incarnation.hex())
            except BaseException as error:  # noqa: BLE001 (of the user; the link's end must go on)
                logger.error("unexpected error of a callback of on_peer_lost", exc_info=error)


def ask(links: LinkManager, cluster_id: int, name: str, body: bytes, deadline: Deadline) -> bytes:
    """Return the peer's answer. Errors as :meth:`LLMDataDist.ask`. Threads: any."""
    what = f"ask {name!r} of cluster {cluster_id}"
    with links.get(cluster_id) as link:
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
