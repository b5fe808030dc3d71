"""The proxy of examples/vllm as its user starts it, between a client and servers that do what a test tells them."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPResponse, IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

from tests.support.linking import free_port
from tests.support.source import ROOT

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
def asking(
    port: int, body: Any = None, path: str = PATHS[0], headers: dict[str, str] | None = None
) -> Iterator[HTTPResponse]:
    """Send a request, a GET where it has no body; yield the answer, of which the body is still to come."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        content = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers or {})
        yield connection.getresponse()
    finally:
        connection.close()


def ask(port: int, body: Any = None, path: str = PATHS[0]) -> tuple[int, Any]:
    with asking(port, body, path) as answer:
        return answer.status, json.loads(answer.read())


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


def without_reference(handler: Handler) -> None:
    send(handler, 200, {"kv_transfer_params": None})


def alone(**request: Any) -> Row:
    """A request that the decoder computes alone, as it came but for a reference of the client's."""
    return [prefilled], [decoded], [request | {"kv_transfer_params": REFERENCE}], [RIGHT], [[], [0]]


def with_prefill(**request: Any) -> Row:
    return [prefilled], [decoded], [request], [RIGHT], [[0], [0]]


def three(failing: Answer) -> Row:
    """The turn that begins with the good prefill does not reach the one that fails."""
    return [None, failing, prefilled], [decoded], [A] * 3, [RIGHT] * 3, [[], [0, 1], [0, 1, 2], [0, 1, 2]]


def refusing(status: int, *, tries: int) -> Row:
    """Only a fault of the server is tried again."""
    both: list[Answer] = [refused(status)] * 2
    return both, [decoded], [A], [(status, f"status {status}")], [[0], [0] * (tries - 1), []]


Answer = Callable[[Handler], None] | None  # None: nothing listens there
#: Prefill servers, decoders, requests, answers to them, and the numbers of the requests that each server was asked.
Row = tuple[list[Answer], list[Answer], list[Any], list[tuple[int, str]], list[list[int]]]
A = {"prompt": "a"}
RIGHT = (200, "right")
SCENES: dict[str, Row] = {
    "in turn": ([prefilled] * 2, [decoded] * 3, [A] * 6, [RIGHT] * 6, [[0, 2, 4], [1, 3, 5], [0, 3], [1, 4], [2, 5]]),
    "a prefill dies": three(without_answer),
    "a prefill fails with 500": three(refused(500)),
    "a prefill fails with 503": three(refused(503)),
    "no prefill": ([None, without_answer], [decoded], [A], [(503, "no prefill server answers")], [[], [0], []]),
    "prefills say 400": refusing(400, tries=1),
    "prefills say 404": refusing(404, tries=1),
    "prefills say 429": refusing(429, tries=1),
    "prefills say 500": refusing(500, tries=2),
    "a decoder says 400": ([prefilled], [refused(400), decoded], [A], [(400, "status 400")], [[0], [0], []]),
    "a decoder says 500": ([prefilled], [refused(500), decoded], [A], [(500, "status 500")], [[0], [0], []]),
    # The first turn begins with the dead one and stops at the one that may have consumed the reference.
    "another decoder only if the first one has seen nothing": (
        [prefilled],
        [None, without_answer, decoded],
        [A] * 3,
        [(502, ""), (502, ""), RIGHT],
        [[0, 1, 2], [], [0, 1], [2]],
    ),
    "no decoder": ([prefilled], [None, None], [A], [(503, "no decode server answers")], [[0], [], []]),
    "no JSON": ([prefilled], [decoded], [b"no json", b"[1]", b"\xff"], [(400, "'code': 400")] * 3, [[], []]),
    "texts": alone(prompt=["one", "two"]),
    "token lists": alone(prompt=[[1, 2], [1, 3]]),
    "n": alone(prompt="a", n=2),
    "beams": alone(prompt="a", use_beam_search=True),
    "a list of a text": with_prefill(prompt=["one"], n=1),
    "a list of tokens": with_prefill(prompt=[1, 2, 3], n=1),
    "a list of a list": with_prefill(prompt=[[1, 2, 3]], n=1),
    "a list of nothing": with_prefill(prompt=[], n=1),
    "a reference of the client's": (
        [without_reference],
        [decoded],
        [A | {"kv_transfer_params": REFERENCE}],
        [RIGHT],
        [[0], [0]],
    ),
}


@pytest.mark.parametrize(("prefills", "decoders", "requests", "answers", "asked"), SCENES.values(), ids=SCENES)
def test_whom_the_proxy_asks_and_what_it_tells_the_client(
    prefills: list[Answer],
    decoders: list[Answer],
    requests: list[Any],
    answers: list[tuple[int, str]],
    asked: list[list[int]],
) -> None:
    """A reference goes to the decoder only from the prefill server that was asked for this request."""
    requests = [each | {"seed": number} if isinstance(each, dict) else each for number, each in enumerate(requests)]
    with ExitStack() as stack:
        servers = [each and stack.enter_context(Upstream(each)) for each in (*prefills, *decoders)]
        urls = [f"http://127.0.0.1:{free_port()}" if each is None else each.url for each in servers]
        port = stack.enter_context(proxy(urls[: len(prefills)], urls[len(prefills) :]))
        for request, (status, text) in zip(requests, answers, strict=True):
            told, answer = ask(port, request)
            assert (told, text in str(answer)) == (status, True), answer
    bodies = [[] if each is None else [one.body for one in each.asked] for each in servers]
    assert [[body["seed"] for body in each] for each in bodies] == asked
    for number, each in enumerate(bodies):
        for body in each:
            reference = body.pop("kv_transfer_params", None)
            wanted = {name: value for name, value in requests[body["seed"]].items() if name != "kv_transfer_params"}
            if number < len(prefills):
                assert body["prompt"] == wanted["prompt"]
                assert reference["remote_block_ids"] is None
            else:
                given = any(asked[: len(prefills)]) and without_reference not in prefills
                assert (body, reference) == (wanted, REFERENCE if given else None)


def test_half_an_answer_does_not_look_like_a_whole_one() -> None:
    def half(handler: Handler) -> None:
        begin_stream(handler)
        send_part(handler, "data: half\n\n")
        handler.close_connection = True

    with scene(prefilled, half) as (_, _, port), asking(port, {"prompt": "a"}) as answer, pytest.raises(IncompleteRead):
        answer.read()


@pytest.mark.parametrize("answering", [False, True], ids=["its prompt", "its answer"])
def test_a_client_that_leaves_while_something_is_computed_takes_the_request_with_it(answering: bool) -> None:
    waiting = Waiting()

    def streamed(handler: Handler) -> None:
        begin_stream(handler)
        send_part(handler, "data: 0\n\n")
        waiting(handler)

    with scene(prefilled if answering else waiting, streamed if answering else decoded) as (_, decoder, port):
        connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        connection.request("POST", PATHS[0], json.dumps(A | {"stream": answering}))
        if answering:
            assert connection.getresponse().read(9) == b"data: 0\n\n"
        assert waiting.reached.wait(SECONDS)
        assert not waiting.left.is_set()
        connection.close()
        assert waiting.left.wait(SECONDS)
    assert answering or decoder.asked == []


def test_health_needs_one_server_of_each_kind() -> None:
    with Upstream(prefilled) as prefill, Upstream(decoded) as decoder:
        gone = f"http://127.0.0.1:{free_port()}"
        with proxy([gone, prefill.url], [decoder.url]) as port:
            state = {"prefill": {gone: False, prefill.url: True}, "decode": {decoder.url: True}}
            assert ask(port, path="/health") == (200, state)
            decoder.well = False
            assert ask(port, path="/health") == (503, state | {"decode": {decoder.url: False}})
            decoder.well = True
            assert ask(port, path="/health")[0] == 200
            prefill.well = False
            assert ask(port, path="/health")[0] == 503
