"""architecture rule 8 for checksums: what a peer asks is checked as a stranger's, and so is what it answers."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest

from faults.gated import begin
from llm_datadist import LLMStatusCode
from llm_datadist._deadline import Deadline
from llm_datadist._links.messages import MAX_VERIFY_RUNS, Failed, Guarded, RemoteFailure, UnlinkAck, Verified, Verify
from llm_datadist._native import NO_DEADLINE, Plan
from llm_datadist._native.plan import PlanEnd, digest
from llm_datadist._transfer.access import AccessPolicy
from llm_datadist._transfer.checksum import MAX_QUESTION_BYTES, MAX_QUESTION_TENSORS, ChecksumServer
from llm_datadist.errors import DeadlineExceeded, ProtocolError, TransferFailed
from tests.support.checksums import KEY, PAGED, ROWS, STRIDE, TENSORS, both, kept, questions, verified
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import residue, settled

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist._links.link import Link
    from llm_datadist._links.messages import Message
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("LLMStatusCode.LLM_SUCCESS", "errors.DeadlineExceeded")

INVALID = LLMStatusCode.LLM_PARAM_INVALID
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
BUSY = int(LLMStatusCode.LLM_LINK_BUSY)
EXTENT = 8 * STRIDE
FIRST_ID = 10**6


def engine(end: Any) -> Any:
    """Return the engine of an end of this process."""
    return end.world.dd._require_engine("test")


def spans(*pairs: tuple[int, int]) -> bytes:
    return np.array(pairs, dtype="<u8").tobytes()


def question(pair: Pair, **change: Any) -> Verify:
    """Return a fair question about all of block 2 of the first cache of the prompt, but for the changes."""
    guard = engine(pair.prompt).store.registry.lookup(1).guard
    fields: dict[str, Any] = {
        "id": 0,
        "cache_id": 1,
        "pin": 0,
        "guards": [Guarded(guard.slot, guard.generation)],
        "push": False,
        "extent": EXTENT,
        "first": 0,
        "count": TENSORS,
        "runs": spans((2 * STRIDE, STRIDE)),
        "each_run": False,
        "nonce": bytes(range(16)),
        "budget_ms": 10_000,
    }
    return Verify(**(fields | change))


def asked(pair: Pair, **change: Any) -> Message:
    """Ask the prompt, and return its answer."""
    fair, link = question(pair, **change), engine(pair.decoder).links.get(1)
    build = lambda number: msgspec.structs.replace(fair, id=number)  # noqa: E731
    answer: Message = link.request(build, Deadline(10_000), "a question", "verify")
    return answer


def digests(pair: Pair, **change: Any) -> bytes:
    answer = asked(pair, **change)
    assert isinstance(answer, Verified)
    return answer.digests


def expected(pair: Pair, *pairs: tuple[int, int], each_run: bool = False) -> bytes:
    tensors = engine(pair.prompt).store.registry.lookup(1).storage.tensors
    runs = np.array([(0, *each) for each in pairs], np.uint64)
    plan = Plan(0, 0, 1 if each_run else TENSORS, runs, ordered=False, nbytes=0)
    found = digest(PlanEnd(plan, tensors, is_dst=False), None, NO_DEADLINE, question(pair).nonce, each_run=each_run)
    assert found is not None
    return found.tobytes()


def test_a_fair_question_is_answered_again_and_again(local_pair: Pair) -> None:
    both(local_pair, PAGED, Spec(blocks=True))
    for _ in range(3):  # a replay is one more question
        assert digests(local_pair) == expected(local_pair, (2 * STRIDE, STRIDE))
    pieces = [(0, 5), (7, 0), (EXTENT, 0), (1, EXTENT - 1)]
    each = digests(local_pair, count=1, each_run=True, runs=spans(*pieces))
    assert each == expected(local_pair, *pieces, each_run=True)
    assert len(digests(local_pair, runs=b"")) == TENSORS * 16


UNFAIR: list[tuple[dict[str, Any], LLMStatusCode, str]] = [
    ({"cache_id": 7}, GONE, "no cache with id 7"),
    ({"cache_id": -1}, GONE, "no cache with id -1"),
    ({"cache_id": 2}, INVALID, "read under a pin"),
    ({"cache_id": 4}, INVALID, "remote_accessible=False"),
    ({"pin": 5}, GONE, "no pin 5 of this peer"),
    ({"pin": 2**63 - 1}, GONE, "no pin"),
    ({"push": True}, INVALID, "remote cache access"),
    ({"extent": EXTENT + 1}, INVALID, f"the tensors have {EXTENT} bytes"),
    ({"extent": 0}, INVALID, f"the tensors have {EXTENT} bytes"),
    ({"count": 0}, INVALID, "count=0"),
    ({"count": TENSORS + 1}, INVALID, f"{TENSORS} tensors"),
    ({"count": MAX_QUESTION_TENSORS + 1}, INVALID, f"count={MAX_QUESTION_TENSORS + 1}"),
    ({"count": 2**63 - 1}, INVALID, "count="),
    ({"count": 2, "each_run": True}, INVALID, "count=2"),
    ({"first": 1}, INVALID, f"{TENSORS} tensors"),
    ({"first": 2**63 - 1}, INVALID, f"{TENSORS} tensors"),
    ({"runs": bytes(15)}, INVALID, "runs of 15 bytes"),
    ({"runs": spans((0, STRIDE), (EXTENT - 4, 5))}, INVALID, "runs[1] is 5 bytes"),
    ({"runs": spans((EXTENT + 1, 0))}, INVALID, "ends outside"),
    ({"runs": spans((2**64 - 1, 2))}, INVALID, "ends outside"),
    ({"runs": spans((0, 2**64 - 1))}, INVALID, "one question is about at most"),
    ({"runs": spans(*[(0, 2**63)] * 2)}, INVALID, "one question is about at most"),  # the sum would be 0
    ({"runs": spans(*[(0, MAX_QUESTION_BYTES // 8)] * 3)}, INVALID, "one question is about at most"),
    ({"guards": [Guarded(2**40, 1)]}, LLMStatusCode.LLM_FAILED, "guard slot"),
    ({"guards": [Guarded(0, 1)]}, LLMStatusCode.LLM_FAILED, "guard slot 0"),
    ({"guards": [Guarded(1, 2**64 - 1)]}, LLMStatusCode.LLM_FAILED, "freed, rebound or unregistered"),
    ({"budget_ms": 0}, LLMStatusCode.LLM_TIMEOUT, "no time"),
]


def test_rule_10_an_unfair_question_is_refused_and_costs_nothing(local_pair: Pair) -> None:
    """Pins of others and of other caches: tests/unit/test_access_matrix.py and test_registry_machine.py."""
    src, dst = both(local_pair, PAGED, Spec(blocks=True))
    local_pair.prompt.do(make, "rows", Spec(), 3)
    local_pair.prompt.do(make, "hidden", Spec(blocks=True, memory="inside", accessible=False), 4)
    for number, (change, status, text) in enumerate(UNFAIR):
        with pytest.raises(RemoteFailure) as caught:
            asked(local_pair, **change)
        assert caught.value.status_code is status, change
        assert text in str(caught.value), change
        local_pair.prompt.do(picture)  # checks every table
        block = number % 8
        local_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [block])  # the link is as good as before
        dst = moved(dst, src, [(block, 1)])
    same_bytes(local_pair.decoder.do(show, "kv"), dst)
    same_bytes(local_pair.prompt.do(show, "kv"), src)


def test_rule_10_more_runs_than_a_question_may_have_cost_the_connection(local_pair: Pair) -> None:
    both(local_pair, PAGED, Spec(blocks=True))
    digests(local_pair, runs=spans((0, 1)) * MAX_VERIFY_RUNS)
    with pytest.raises(Exception, match=r"lost cluster 1|given up"):
        asked(local_pair, runs=spans((0, 1)) * (MAX_VERIFY_RUNS + 1))
    wait_until(lambda: local_pair.prompt.do(picture).links == ())


# --- many questions ---------------------------------------------------------------------------------------------------


@contextmanager
def full(pair: Pair, room: int, timeout: int, **change: Any) -> Iterator[tuple[threading.Event, list[Message]]]:
    """The prompt, which answers nothing until the event is set, has been asked as often as it has room, and 3 times
    more. The list has what comes back to the decoder."""
    both(pair, PAGED, Spec(blocks=True), sync_kv_timeout=timeout)
    go, seen = threading.Event(), []
    engine(pair.prompt)._checksums._thread.submit(go.wait, 60)
    link = engine(pair.decoder).links.get(1)
    deliver = link.requests.answer

    def note(number: int, message: Message) -> bool:
        seen.append(message)
        return bool(deliver(number, message))

    link.requests.answer = note
    try:
        for number in range(room + 3):  # no call waits for the answers
            link.send(question(pair, id=FIRST_ID + number, **change))
        wait_until(lambda: len(seen) == 3)
        refused = [(answer.id, answer.code) for answer in seen if isinstance(answer, Failed)]
        assert refused == [(FIRST_ID + room + n, BUSY) for n in range(3)]
        assert pair.prompt.do(questions) == room
        yield go, seen
    finally:
        go.set()


def test_rule_10_a_peer_has_room_for_so_many_questions_and_a_pull_waits_until_there_is_room(local_pair: Pair) -> None:
    with full(local_pair, 256, 30_000) as (go, seen):
        finish = begin(local_pair.decoder, call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
        # Its question was refused at least twice, so it was asked again.
        wait_until(lambda: sum(isinstance(answer, Failed) for answer in seen) >= 3 + 2)
        go.set()
        finish()
        assert verified(local_pair.decoder) == TENSORS * STRIDE
        answered = {answer.id for answer in seen if isinstance(answer, Verified)}
        assert {number for number in answered if number >= FIRST_ID} == set(range(FIRST_ID, FIRST_ID + 256))


def test_rule_10_large_questions_take_more_room_and_a_lost_link_gives_it_back(local_pair: Pair) -> None:
    """To a peer that stays busy a pull is no success (interface R6)."""
    with full(local_pair, 32, 200, runs=spans((0, 1)) * MAX_VERIFY_RUNS):
        with pytest.raises(DeadlineExceeded) as caught:
            local_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1], [2])
        assert caught.value.phase == "verify"
        assert local_pair.prompt.do(questions) == 32
        engine(local_pair.decoder).links.stop("the test ends it")
        wait_until(lambda: local_pair.prompt.do(questions) == 0)


def test_one_peer_after_the_other_is_answered() -> None:
    served: list[str] = []
    before = residue()
    no_caches: Any = None  # every answer is a failure
    server = ChecksumServer(no_caches, AccessPolicy(no_caches), None)
    go = threading.Event()
    server._thread.submit(go.wait, 60)
    fair = Verify(0, 1, 0, [], False, 1, 0, 1, b"", False, bytes(16), 10_000)
    for name, count in (("greedy", 4), ("modest", 2)):
        link = Mock(peer=name)  # all that the queues ask of a link is that it can be a key
        link.tell.side_effect = lambda message, name=name: served.append(f"{name}{message.id}")
        for number in range(count):
            server.on_verify(link, msgspec.structs.replace(fair, id=number))
    go.set()
    wait_until(lambda: len(served) == 6)
    server.close()
    assert served == ["greedy0", "modest0", "greedy1", "modest1", "greedy2", "greedy3"]
    server.on_verify(link, fair)
    assert served[-1] == "modest0"
    server.close()
    assert settled(before) == before


# --- answers that lie -------------------------------------------------------------------------------------------------


LIES: list[tuple[Callable[[Verify], Message], type[Exception], str]] = [
    (lambda asked: Verified(asked.id, b""), ProtocolError, "sent 0 bytes of digests, 64 were asked for"),
    (lambda asked: Verified(asked.id, bytes(63)), ProtocolError, "sent 63 bytes"),
    (lambda asked: Verified(asked.id, bytes(80)), ProtocolError, "sent 80 bytes"),
    (lambda asked: UnlinkAck(asked.id), ProtocolError, "answered a Verify with UnlinkAck"),
    (lambda asked: Verified(asked.id, bytes(64)), TransferFailed, "4 of 4 tensors differ"),
    (lambda asked: Failed(asked.id, 0, "two\nlines"), TransferFailed, "two lines"),
    (lambda asked: Failed(asked.id, 77, "any"), TransferFailed, "could not confirm the bytes: any"),
]


def test_rule_10_an_answer_that_lies_is_no_success_and_every_question_has_its_own_nonce(local_pair: Pair) -> None:
    src, dst = both(local_pair, ROWS, Spec())
    handlers = engine(local_pair.prompt).links._handlers
    honest, nonces = handlers[Verify], []

    def pull(answer: Callable[[Link, Verify], None]) -> None:
        def note(link: Link, message: Verify) -> None:
            nonces.append(message.nonce)
            answer(link, message)

        handlers[Verify] = note
        local_pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 5)

    for lie, kind, text in LIES:
        with pytest.raises(kind, match=text) as caught:
            pull(lambda link, message, lie=lie: link.send(lie(message)))  # type: ignore[misc]
        assert "\n" not in str(caught.value)
        assert getattr(caught.value, "status_code", None) is not LLMStatusCode.LLM_SUCCESS
        assert (verified(local_pair.decoder), kept(local_pair)) == (0, 1)
    pull(honest)
    same_bytes(local_pair.decoder.do(show, "kv"), moved(dst, src, [(5, 0)]))
    assert len(set(nonces)) == len(nonces) > len(LIES)
