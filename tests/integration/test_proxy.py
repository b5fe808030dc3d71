"""The proxy of examples/vllm as its user starts it, between a client and servers that do what a test tells them."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Self

import pytest

from tests.support.linking import free_port
from tests.support.source import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from http.client import HTTPResponse

pytest.importorskip("aiohttp", reason="the proxy needs aiohttp: pip install 'open-datadist[vllm]'")

PATHS = ("/v1/completions", "/v1/chat/completions")
REFERENCE = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[3, 4]], "remote_port": 5600}
SECONDS = 30.0
"""What has not happened by then does not happen."""


@dataclass
class Asked:
    """One request as a server has got it."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Handler(BaseHTTPRequestHandler):
    """Notes a request and does what the server was told to do."""

    server: Upstream

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(Asked(self.path, dict(self.headers), body))
        self.server.answer(self)

    def do_GET(self) -> None:
        send(self, 200 if self.path == "/health" and self.server.well else 503, {})

    def log_message(self, *_: object) -> None:
        """Say nothing."""


class Upstream(ThreadingHTTPServer):
    """A server of vLLM, as far as the proxy sees one."""

    def __init__(self, answer: Callable[[Handler], None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer = answer
        self.asked: list[Asked] = []
        self.well = True
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


def send(handler: Handler, status: int, value: dict[str, Any]) -> None:
    content = json.dumps(value).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(content)))
    handler.end_headers()
    handler.wfile.write(content)


def begin_stream(handler: Handler) -> None:
    handler.protocol_version = "HTTP/1.1"
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()


def send_part(handler: Handler, text: str) -> None:
    handler.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))


def prefilled(handler: Handler) -> None:
    send(handler, 200, {"kv_transfer_params": REFERENCE})


def decoded(handler: Handler) -> None:
    send(handler, 200, {"choices": [{"text": "right"}]})


def refused(status: int) -> Callable[[Handler], None]:
    def answer(handler: Handler) -> None:
        send(handler, status, {"error": f"status {status}"})

    return answer


def without_answer(handler: Handler) -> None:
    """End the connection, as a server does that dies at work."""
    handler.close_connection = True


@dataclass
class Waiting:
    """A server that answers nothing until its client has gone."""

    reached: threading.Event = field(default_factory=threading.Event)
    left: threading.Event = field(default_factory=threading.Event)

    def __call__(self, handler: Handler) -> None:
        self.reached.set()
        readable, _, _ = select.select([handler.connection], [], [], SECONDS)
        if readable and handler.connection.recv(1) == b"":
            self.left.set()


@contextmanager
def proxy(prefills: list[str], decoders: list[str]) -> Iterator[int]:
    """Run it; yield its port. It may have complained only of what the test did to the servers."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "vllm" / "proxy.py"), "--port", "0"]
    process = subprocess.Popen(
        [*command, "--prefill", *prefills, "--decode", *decoders],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert process.stdout is not None
        started = re.search(r"Running on http://127.0.0.1:(\d+)", process.stdout.readline())
        assert started, process.communicate()
        yield int(started[1])
        process.terminate()
        _, complaints = process.communicate(timeout=SECONDS)
        assert "Traceback" not in complaints, complaints
    finally:
        process.kill()
        process.communicate()


@contextmanager
def scene(
    prefill: Callable[[Handler], None], decode: Callable[[Handler], None]
) -> Iterator[tuple[Upstream, Upstream, int]]:
    """Start a proxy between one server of each kind; yield these and its port."""
    with Upstream(prefill) as one, Upstream(decode) as other, proxy([one.url], [other.url]) as port:
        yield one, other, port


@contextmanager
def asking(port: int, body: Any, path: str = PATHS[0], headers: dict[str, str] | None = None) -> Iterator[HTTPResponse]:
    """Send a request; yield the answer, of which the body is still to come."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), headers or {})
        yield connection.getresponse()
    finally:
        connection.close()


def ask(port: int, body: Any, path: str = PATHS[0]) -> tuple[int, Any]:
    with asking(port, body, path) as answer:
        return answer.status, json.loads(answer.read())


def health(port: int) -> tuple[int, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("GET", "/health")
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def dead() -> str:
    return f"http://127.0.0.1:{free_port()}"


@pytest.mark.parametrize("path", PATHS)
def test_prefill_computes_one_token_and_its_reference_goes_with_the_request_to_the_decoder(path: str) -> None:
    body = {"prompt": "a", "max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 4, "stream": True}
    body |= {"stream_options": {"include_usage": True}, "seed": 5}
    sent = {"X-Request-Id": "mine", "Authorization": "Bearer key"}
    with scene(prefilled, decoded) as (prefill, decoder, port), asking(port, body, path, sent) as answer:
        assert (answer.status, json.loads(answer.read())) == (200, {"choices": [{"text": "right"}]})
        assert answer.headers["X-Request-Id"] == "mine"
        assert "Authorization" not in answer.headers
    (first,), (second,) = prefill.asked, decoder.asked
    assert first.body == {
        "prompt": "a",
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
        "seed": 5,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }
    assert second.body == body | {"kv_transfer_params": REFERENCE}
    for each in (first, second):
        assert each.path == path
        assert {name: each.headers[name] for name in sent} == sent


def test_prefill_and_decoder_are_given_the_same_new_id_for_each_request_without_one() -> None:
    with scene(prefilled, decoded) as (prefill, decoder, port):
        answered = []
        for _ in range(2):
            with asking(port, {"prompt": "a"}) as answer:
                answered.append(answer.headers["X-Request-Id"])
    assert len(set(answered)) == 2
    for server in (prefill, decoder):
        assert [each.headers["X-Request-Id"] for each in server.asked] == answered
    assert "max_completion_tokens" not in prefill.asked[0].body


def test_parts_of_an_answer_reach_the_client_before_the_next_ones_exist() -> None:
    seen = [threading.Event() for _ in range(3)]
    parts = [f"data: {number}\n\n" for number in range(3)]

    def streamed(handler: Handler) -> None:
        begin_stream(handler)
        for part, event in zip(parts, seen, strict=True):
            send_part(handler, part)
            assert event.wait(SECONDS)
        send_part(handler, "")

    with scene(prefilled, streamed) as (_, _, port), asking(port, {"prompt": "a", "stream": True}) as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        for part, event in zip(parts, seen, strict=True):
            assert answer.read(len(part)).decode() == part
            event.set()
        assert answer.read() == b""


def test_requests_take_prefills_and_decoders_in_turn() -> None:
    with (
        Upstream(prefilled) as one,
        Upstream(prefilled) as two,
        Upstream(decoded) as three,
        Upstream(decoded) as four,
        Upstream(decoded) as five,
        proxy([one.url, two.url], [three.url, four.url, five.url]) as port,
    ):
        for number in range(6):
            assert ask(port, {"prompt": str(number)})[0] == 200
    prompts = [[each.body["prompt"] for each in server.asked] for server in (one, two, three, four, five)]
    assert prompts == [["0", "2", "4"], ["1", "3", "5"], ["0", "3"], ["1", "4"], ["2", "5"]]


@pytest.mark.parametrize("failing", [without_answer, refused(500), refused(503)])
def test_a_prefill_that_fails_is_replaced_by_another_one(failing: Callable[[Handler], None]) -> None:
    with (
        Upstream(failing) as broken,
        Upstream(prefilled) as prefill,
        Upstream(decoded) as decoder,
        proxy([dead(), broken.url, prefill.url], [decoder.url]) as port,
    ):
        for _ in range(3):
            assert ask(port, {"prompt": "a"})[0] == 200
    assert len(prefill.asked) == len(decoder.asked) == 3
    assert len(broken.asked) == 2  # the turn that begins with the good one does not reach it
    assert all(each.body["kv_transfer_params"] == REFERENCE for each in decoder.asked)


def test_without_any_prefill_the_decoder_is_not_asked() -> None:
    with (
        Upstream(without_answer) as broken,
        Upstream(decoded) as decoder,
        proxy([dead(), broken.url], [decoder.url]) as port,
    ):
        status, answer = ask(port, {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (503, "no prefill server answers")
    assert decoder.asked == []


@pytest.mark.parametrize(("status", "tries"), [(400, 1), (404, 1), (429, 1), (500, 2)])
def test_the_error_of_a_prefill_is_passed_on_and_only_a_fault_of_the_server_is_tried_again(
    status: int, tries: int
) -> None:
    with (
        Upstream(refused(status)) as one,
        Upstream(refused(status)) as two,
        Upstream(decoded) as decoder,
        proxy([one.url, two.url], [decoder.url]) as port,
    ):
        assert ask(port, {"prompt": "a"}) == (status, {"error": f"status {status}"})
    assert len(one.asked) + len(two.asked) == tries
    assert decoder.asked == []


@pytest.mark.parametrize("status", [400, 500])
def test_the_error_of_a_decoder_is_passed_on_and_not_tried_again(status: int) -> None:
    with (
        Upstream(prefilled) as prefill,
        Upstream(refused(status)) as one,
        Upstream(decoded) as two,
        proxy([prefill.url], [one.url, two.url]) as port,
    ):
        assert ask(port, {"prompt": "a"}) == (status, {"error": f"status {status}"})
    assert two.asked == []


def test_another_decoder_is_asked_only_if_the_first_one_has_seen_nothing() -> None:
    with (
        Upstream(prefilled) as prefill,
        Upstream(without_answer) as broken,
        Upstream(decoded) as good,
        proxy([prefill.url], [dead(), broken.url, good.url]) as port,
    ):
        # The first turn begins with the dead one and stops at the one that may have consumed the reference.
        assert ask(port, {"prompt": "a"})[0] == 502
        assert ask(port, {"prompt": "b"})[0] == 502
        assert ask(port, {"prompt": "c"})[0] == 200
    assert [each.body["prompt"] for each in broken.asked] == ["a", "b"]
    assert [each.body["prompt"] for each in good.asked] == ["c"]


def test_without_any_decoder_the_client_is_told() -> None:
    with Upstream(prefilled) as prefill, proxy([prefill.url], [dead(), dead()]) as port:
        status, answer = ask(port, {"prompt": "a"})
    assert (status, answer["error"]["message"]) == (503, "no decode server answers")


def test_half_an_answer_does_not_look_like_a_whole_one() -> None:
    def half(handler: Handler) -> None:
        begin_stream(handler)
        send_part(handler, "data: half\n\n")
        handler.close_connection = True

    with scene(prefilled, half) as (_, _, port), asking(port, {"prompt": "a"}) as answer, pytest.raises(IncompleteRead):
        answer.read()


def test_a_client_that_leaves_while_its_prompt_is_computed_takes_the_request_with_it() -> None:
    waiting = Waiting()
    with scene(waiting, decoded) as (_, decoder, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("POST", PATHS[0], json.dumps({"prompt": "a"}))
        assert waiting.reached.wait(SECONDS)
        assert not waiting.left.is_set()
        connection.close()
        assert waiting.left.wait(SECONDS)
    assert decoder.asked == []


def test_a_client_that_leaves_while_its_answer_is_computed_takes_the_request_with_it() -> None:
    waiting = Waiting()

    def streamed(handler: Handler) -> None:
        begin_stream(handler)
        send_part(handler, "data: 0\n\n")
        waiting(handler)

    with scene(prefilled, streamed) as (_, _, port):
        with asking(port, {"prompt": "a", "stream": True}) as answer:
            assert answer.read(9) == b"data: 0\n\n"
            assert not waiting.left.is_set()
        assert waiting.left.wait(SECONDS)


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2], [1, 3]]},
        {"prompt": "a", "n": 2},
        {"prompt": "a", "use_beam_search": True},
    ],
    ids=["texts", "token lists", "n", "beams"],
)
def test_what_has_several_sequences_is_computed_by_the_decoder_alone(body: dict[str, Any]) -> None:
    with scene(prefilled, decoded) as (prefill, decoder, port):
        assert ask(port, body | {"kv_transfer_params": REFERENCE})[0] == 200
    assert prefill.asked == []
    assert [each.body for each in decoder.asked] == [body]


@pytest.mark.parametrize("prompt", [["one"], [1, 2, 3], [[1, 2, 3]], []], ids=["text", "tokens", "list", "nothing"])
def test_one_prompt_may_be_given_as_a_list(prompt: list[Any]) -> None:
    with scene(prefilled, decoded) as (prefill, decoder, port):
        assert ask(port, {"prompt": prompt, "n": 1})[0] == 200
    assert prefill.asked[0].body["prompt"] == decoder.asked[0].body["prompt"] == prompt
    assert decoder.asked[0].body["kv_transfer_params"] == REFERENCE


def test_the_reference_of_a_client_is_never_used() -> None:
    def nothing(handler: Handler) -> None:
        send(handler, 200, {"kv_transfer_params": None})

    with scene(nothing, decoded) as (prefill, decoder, port):
        assert ask(port, {"prompt": "a", "kv_transfer_params": REFERENCE})[0] == 200
    assert prefill.asked[0].body["kv_transfer_params"]["remote_block_ids"] is None
    assert decoder.asked[0].body == {"prompt": "a"}


def test_health_needs_one_server_of_each_kind() -> None:
    with Upstream(prefilled) as prefill, Upstream(decoded) as decoder:
        gone = dead()
        with proxy([gone, prefill.url], [decoder.url]) as port:
            state = {"prefill": {gone: False, prefill.url: True}, "decode": {decoder.url: True}}
            assert health(port) == (200, state)
            decoder.well = False
            assert health(port) == (503, state | {"decode": {decoder.url: False}})
            decoder.well = True
            assert health(port)[0] == 200
            prefill.well = False
            assert health(port)[0] == 503


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff"])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with scene(prefilled, decoded) as (prefill, decoder, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("POST", PATHS[0], body)
        answer = connection.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (400, 400)
        connection.close()
    assert prefill.asked == decoder.asked == []
