"""A thin proxy that makes one server of vLLM prefill servers and vLLM decode servers.

    python examples/vllm/proxy.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

A completion goes to a prefill server first, for one token; what that answers as ``kv_transfer_params`` goes with the
request to a decode server, whose answer is passed on as it comes. This is the contract of NIXL's toy proxy, so the
connector of the servers may be NixlConnector, LLMDataDistConnector or another one that keeps to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import uuid
from collections import deque
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

__all__ = ["Proxy"]

_log = logging.getLogger("proxy")

_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
_PASSED_ON = ("Content-Type", "Retry-After", "WWW-Authenticate")
_UNREACHABLE = (aiohttp.ClientError, TimeoutError)


class Proxy:
    """Sends each completion through a prefill and a decode server, each in its turn.

    Args:
        prefills: Base addresses of the prefill servers.
        decoders: Those of the decode servers.
    """

    def __init__(self, prefills: Iterable[str], decoders: Iterable[str]) -> None:
        self._prefills = deque(each.rstrip("/") for each in prefills)
        self._decoders = deque(each.rstrip("/") for each in decoders)
        self._session: aiohttp.ClientSession

    def application(self) -> web.Application:
        """Return it as an application of aiohttp; run it with ``handler_cancellation``, see `complete`."""
        application = web.Application(client_max_size=256 << 20)
        application.cleanup_ctx.append(self._connect)
        application.router.add_post("/v1/completions", self.complete)
        application.router.add_post("/v1/chat/completions", self.complete)
        application.router.add_get("/health", self.health)
        return application

    async def _connect(self, _: web.Application) -> AsyncIterator[None]:
        # No kept connections: one that the server closes while a request is on its way looks like a dead server.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as self._session:
            yield

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion.

        A client that goes away cancels this handler; that closes the connection to the server that is at work, which
        aborts the request there.
        """
        try:
            body = await request.json()
        except ValueError:
            body = None
        if not isinstance(body, dict):
            return _error(400, "the body is no JSON object")
        headers = {"X-Request-Id": request.headers.get("X-Request-Id") or str(uuid.uuid4())}
        if "Authorization" in request.headers:
            headers["Authorization"] = request.headers["Authorization"]
        # What a client says of KV is not taken: only the prefill server knows which blocks are whose.
        body.pop("kv_transfer_params", None)
        if _is_one_sequence(body):
            answer = await self._prefill(request.path, body, headers)
            if isinstance(answer, web.Response):
                return answer
            body |= answer
        return await self._decode(request, body, headers)

    async def _prefill(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> dict[str, Any] | web.Response:
        """Have the prompt computed; return the field for the decode server, none, or the error for the client."""
        asked = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": _PREFILL}
        if "max_completion_tokens" in body:
            asked["max_completion_tokens"] = 1
        for name in ("stream_options", "min_tokens"):  # they contradict what was set above
            asked.pop(name, None)
        failure = _error(503, "no prefill server answers")
        for server in _turn(self._prefills):
            try:
                async with self._session.post(server + path, json=asked, headers=headers) as answer:
                    content = await answer.read()
            except _UNREACHABLE as error:
                _log.warning("prefill %s: %s; trying the next one", server, repr(error))
                continue
            if answer.status < 400:
                reference = json.loads(content).get("kv_transfer_params")
                return {"kv_transfer_params": reference} if reference else {}
            failure = web.Response(status=answer.status, body=content, headers=_passed_on(answer))
            if answer.status < 500:
                break  # the request is at fault: another server would say the same
            _log.warning("prefill %s: status %d; trying the next one", server, answer.status)
        return failure

    async def _decode(self, request: web.Request, body: dict[str, Any], headers: dict[str, str]) -> web.StreamResponse:
        """Have the answer computed, and pass it on as it comes."""
        for server in _turn(self._decoders):
            response: web.StreamResponse | None = None
            try:
                async with self._session.post(server + request.path, json=body, headers=headers) as answer:
                    response = web.StreamResponse(status=answer.status, headers=_passed_on(answer))
                    response.headers["X-Request-Id"] = headers["X-Request-Id"]
                    await response.prepare(request)
                    async for part in answer.content.iter_any():
                        await response.write(part)
                    await response.write_eof()
                    return response
            except aiohttp.ClientConnectorError as error:
                _log.warning("decoder %s: %s; trying the next one", server, error)  # it has seen nothing of the request
            except _UNREACHABLE as error:
                _log.warning("decoder %s: %s", server, repr(error))
                if response is None:  # it may have consumed the reference: no other one can use that
                    return _error(502, "the decode server ended the connection before it answered")
                if request.transport is not None:
                    request.transport.close()  # half an answer must not look like a whole one
                return response
        return _error(503, "no decode server answers")

    async def health(self, _: web.Request) -> web.Response:
        """Answer 200 while at least one server of each kind does."""
        state: dict[str, dict[str, bool]] = {}
        for kind, servers in (("prefill", [*self._prefills]), ("decode", [*self._decoders])):
            state[kind] = dict(zip(servers, await asyncio.gather(*map(self._answers, servers)), strict=True))
        well = all(any(each.values()) for each in state.values())
        return web.json_response(state, status=200 if well else 503)

    async def _answers(self, server: str) -> bool:
        try:
            async with self._session.get(server + "/health", timeout=aiohttp.ClientTimeout(total=2)) as answer:
                return answer.status == 200
        except _UNREACHABLE:
            return False


def _turn(servers: deque[str]) -> list[str]:
    """Return the servers in the order in which this request tries them; the next one begins with another."""
    order = list(servers)
    servers.rotate(-1)
    return order


def _is_one_sequence(body: dict[str, Any]) -> bool:
    """Return False for what has several prompts or answers: the decode server computes that alone.

    One reference stands for the blocks of one prompt, and can be used once.
    """
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not all(isinstance(each, int) for each in prompt)
    return not several and body.get("n") in (None, 1) and not body.get("use_beam_search")


def _passed_on(answer: aiohttp.ClientResponse) -> dict[str, str]:
    return {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "proxy", "code": status}}, status=status)


def _main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prefill", nargs="+", required=True, metavar="URL", help="prefill servers")
    parser.add_argument("--decode", nargs="+", required=True, metavar="URL", help="decode servers")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    application = Proxy(asked.prefill, asked.decode).application()
    web.run_app(application, host=asked.host, port=asked.port, handler_cancellation=True, shutdown_timeout=5)


if __name__ == "__main__":
    _main()
