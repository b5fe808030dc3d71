"""A service of a router, prefills and decoders, each a process that may be drained, replaced or killed at any time.

docs/howto-service.md explains it. Without arguments a small one runs here, and one of its prefills is replaced:

    python examples/service.py
    python examples/service.py router 127.0.0.1:7000
    python examples/service.py prefill 127.0.0.1:7000 --name prefill-0
    python examples/service.py decoder 127.0.0.1:7000 --name decoder-0
    python examples/service.py ready 127.0.0.1:7000

An extension of the interface (questions, grants, drain). Not part of the published interface.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.errors import LinkError, LLMException, LLMStatusCode, ParamError
from llm_datadist.types.grant import Grant
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from numpy.typing import NDArray

    from llm_datadist.types.question import PeerQuestion

    Message = dict[str, Any]
    Handler = Callable[[Message], Awaitable[Message]]

#: Seconds before a request is tried again, by error; the next pauses are 0.05, doubled each time, at most 1. No other
#: error is tried again. It is the table of docs/howto-service.md.
PAUSES: Final = {
    "PeerLost": 0.0,
    "NotLinked": 0.0,
    "GrantEnded": 0.0,
    "ConnectionError": 0.0,  # of the RPC below, as the next
    "TimeoutError": 0.0,
    "DeadlineExceeded": 0.0,
    "CacheNotFound": 0.05,
    "LinkError": 0.05,
    "LinkRefused": 0.05,
    "OutOfMemory": 0.05,
    "TransferFailed": 0.05,
    "TransferAborted": 0.05,
    "ChecksumMismatch": 0.05,
}
ATTEMPT: Final = 2.0  # seconds of one try; a request has several
REPORT: Final = 0.25  # seconds from one report to the next
SILENCE: Final = 2.0  # seconds without a report, after which a process gets no requests
LEAVE: Final = 10.0  # seconds of a drain; longer than any request and grant needs
LIFETIME: Final = 5.0  # seconds of a grant, for readers that are silent; shorter than a drain

BLOCKS, STRIDE = 64, 1 << 14  # of each of two tensors
DESC: Final = CacheDesc(2, [BLOCKS, STRIDE], DataType.DT_UINT8)


# --- the model: the KV of a prompt, and the token that follows from all bytes of it ----------------------------------


def blocks_of(prompt: bytes) -> int:
    """Return how many blocks the KV of a prompt has."""
    return 1 + len(prompt) // 16


def kv_of(prompt: bytes) -> NDArray[np.uint8]:
    """Return the KV of a prompt: [block, tensor, byte]."""
    count = blocks_of(prompt)
    kv = np.frombuffer(hashlib.shake_128(prompt).digest(count * 2 * STRIDE), np.uint8)
    return kv.reshape(count, 2, STRIDE)


def token_of(kv: NDArray[np.uint8]) -> str:
    """Return the token: another one if any byte of the KV is another one."""
    return hashlib.sha256(kv.tobytes()).hexdigest()


# --- the service's own RPC: a line of JSON, and one back -------------------------------------------------------------


async def call(address: str, message: Message, seconds: float) -> Message:
    """Ask another process. ConnectionError, TimeoutError: it may have done its work."""
    ip, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(ip, int(port))
            try:
                writer.write(json.dumps(message).encode() + b"\n")
                line = await reader.readline()
            finally:
                writer.close()
                await writer.wait_closed()
    except TimeoutError as error:
        raise TimeoutError(f"{address}: no answer within {seconds:.1f} s") from error
    except OSError as error:
        raise ConnectionError(f"{address}: {error}") from error
    if not line.endswith(b"\n"):
        raise ConnectionError(f"{address}: it ended before its answer")
    answer: Message = json.loads(line)
    return answer


class Server:
    """Answers other processes."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.running: set[asyncio.Task[Any] | None] = set()

    async def start(self, address: str) -> str:
        """Listen; return the address with the port that port 0 has picked."""
        ip, _, port = address.rpartition(":")
        self.server = await asyncio.start_server(self.answer, ip, int(port))
        return f"{ip}:{self.server.sockets[0].getsockname()[1]}"

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one message, and hang up."""
        self.running.add(task := asyncio.current_task())
        try:
            with suppress(ConnectionError, ValueError):  # the other process has gone, or sends no JSON
                answer = await self.handler(json.loads(await reader.readline()))
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()
        finally:
            self.running.discard(task)

    async def drain(self) -> None:
        """Take no more messages; let those that there are be answered."""
        self.server.close()
        if running := [each for each in self.running if each]:
            await asyncio.wait(running, timeout=LEAVE)


def cluster_of(name: str) -> int:
    """Return the cluster id of all processes of this name, one after the other: no table of ids that may be lost."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])


def terminated() -> asyncio.Event:
    """Return what SIGTERM sets."""
    event = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, event.set)
    return event


def failure(error: Exception) -> Message:
    """Return the answer of what failed."""
    return {"error": type(error).__name__, "text": str(error)}


# --- the router ------------------------------------------------------------------------------------------------------


class Router:
    """Knows all processes by their reports, and sends each request to a decoder, with the prefill to ask."""

    def __init__(self) -> None:
        self.workers: dict[str, Message] = {}  # the last report of each, by name
        self.heard: dict[str, float] = {}
        self.met: Counter[str] = Counter()  # errors that were tried again
        self.turns = itertools.count()

    async def run(self, address: str) -> None:
        """Serve until SIGTERM, then let requests end."""
        server = Server(self.answer)
        print(f"router: at {await server.start(address)}", flush=True)
        await terminated().wait()
        await server.drain()

    async def answer(self, message: Message) -> Message:
        """Answer a client or a worker."""
        match message["kind"]:
            case "report":
                self.workers[message["name"]], self.heard[message["name"]] = message, time.monotonic()
                return {"prefills": self.present("prefill")}
            case "request":
                return await self.request(message)
            case _:
                pairs = [(decoder["name"], prefill["name"]) for decoder, prefill in self.pairs()]
                return {"ready": bool(pairs), "pairs": pairs, "workers": self.workers, "met": self.met}

    def present(self, role: str) -> list[Message]:
        """Return the workers that take requests."""
        now = time.monotonic()
        workers = [each for name, each in self.workers.items() if now - self.heard[name] < SILENCE]
        return [each for each in workers if each["role"] == role and each["ready"]]

    def pairs(self) -> list[tuple[Message, Message]]:
        """Return decoders and prefills that are linked."""
        prefills, decoders = self.present("prefill"), self.present("decoder")
        both = itertools.product(decoders, prefills)
        return [(decoder, prefill) for decoder, prefill in both if str(prefill["cluster"]) in decoder["links"]]

    async def request(self, message: Message) -> Message:
        """Try until there is an answer, an error that repeating does not mend, or the end of the client's time."""
        limit, grown = time.monotonic() + message["seconds"], 0.0
        answer = failure(TimeoutError("no prefill and decoder were ready"))
        while (left := limit - time.monotonic()) > 0:
            pause = 0.05
            if pairs := self.pairs():
                decoder, prefill = pairs[next(self.turns) % len(pairs)]
                work = {"kind": "decode", "prefill": prefill["cluster"], "prompt": message["prompt"]}
                seconds = min(ATTEMPT, left)
                try:
                    answer = await call(decoder["rpc"], work | {"seconds": seconds}, seconds)
                except (ConnectionError, TimeoutError) as error:
                    answer = failure(error)
                if answer.get("error") not in PAUSES:
                    return answer
                self.met[answer["error"]] += 1
                pause, grown = max(PAUSES[answer["error"]], grown), min(max(2 * grown, 0.05), 1.0)
            await asyncio.sleep(min(pause, left))
        return answer


# --- prefills and decoders -------------------------------------------------------------------------------------------


class Blocks:
    """Numbers of free blocks of a cache. Threads: any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.free = set(range(BLOCKS))

    def take(self, count: int) -> list[int]:
        """Return so many, ascending. LinkError that may be retried: too few are free. ParamError: too few exist."""
        if count > BLOCKS:
            raise ParamError(f"the prompt: it needs {count} blocks of {BLOCKS}")
        with self.lock:
            if len(self.free) < count:
                status = LLMStatusCode.LLM_LINK_BUSY
                raise LinkError(f"{count} blocks are needed, {len(self.free)} are free", status_code=status)
            taken = sorted(self.free)[:count]
            self.free.difference_update(taken)
            return taken

    def give(self, blocks: list[int]) -> None:
        """Take them back."""
        with self.lock:
            self.free.update(blocks)


class Worker:
    """What a prefill and a decoder share: an id, reports, and the end."""

    kind = ""
    role = LLMRole.MIX
    listens = ""

    def __init__(self, router: str, name: str) -> None:
        self.router, self.name = router, name
        self.blocks = Blocks()
        self.wake = asyncio.Event()
        self.ready = False

    async def run(self) -> None:
        """Work until SIGTERM; then take no new work, let what was promised end, and leave the peers."""
        stop = terminated()
        options = LLMConfig(mem_pool_cfg="16MiB", sync_kv_timeout=int(ATTEMPT * 1000))
        if self.listens:
            options.listen_ip_info = self.listens
        # init and finalize take no long time: they may run on the loop.
        with LLMDataDist(self.role, cluster_of(self.name), config=options) as self.node:
            self.start()
            server = Server(self.answer)
            self.rpc = await server.start("127.0.0.1:0")
            work = asyncio.create_task(self.report())
            work.add_done_callback(lambda _: stop.set())  # an error of it is the end, too
            await stop.wait()
            self.ready = False
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            await self.tell(**self.state())
            await server.drain()
            left = await asyncio.to_thread(self.node.drain, int(LEAVE * 1000))
            print(f"{self.name}: drained, {left or 'nothing'} is left", flush=True)

    async def report(self) -> None:
        """Tell the router what there is, and do what follows from its answer, for ever."""
        told = False
        while True:
            answer = await self.tell(**self.state())
            await self.meet(answer["prefills"] if answer else [])
            if self.ready and not told:
                told = True
                print(f"{self.name}: ready, cluster {self.node.cluster_id}", flush=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self.wake.wait(), REPORT)
            self.wake.clear()

    async def tell(self, **message: Any) -> Message | None:
        """Tell the router; None if it does not answer."""
        try:
            return await call(self.router, {"name": self.name} | message, ATTEMPT)
        except (ConnectionError, TimeoutError):
            return None

    def state(self) -> Message:
        """Return the report."""
        node = self.node
        links = {each.remote_cluster_id: each.protocol for each in node.statistics().links if each.state == "ready"}
        known = {"cluster": node.cluster_id, "incarnation": node.incarnation, "kv": f"127.0.0.1:{node.listen_port}"}
        return {"kind": "report", "role": self.kind, "rpc": self.rpc, "ready": self.ready, "links": links} | known

    async def answer(self, message: Message) -> Message:
        """Answer a probe."""
        return {"ready": self.ready}

    def start(self) -> None:
        """Begin, once there is a node."""

    async def meet(self, prefills: list[Message]) -> None:
        """Do what the router's list asks for."""


class Prefill(Worker):
    """Answers questions: computes the KV of a prompt, and lends its blocks to the decoder that asks."""

    kind = "prefill"
    role = LLMRole.PROMPT
    listens = "127.0.0.1:0"

    def start(self) -> None:
        """Have a cache, and answer."""
        manager = self.node.cache_manager
        self.cache = manager.allocate_blocks_cache(DESC, BlocksCacheKey(self.node.cluster_id), granted_only=True)
        self.memory = tensor_views(self.cache)
        self.engine = ThreadPoolExecutor(1)
        self.node.answer_questions("prefill", self.asked)
        self.ready = True

    def asked(self, question: PeerQuestion) -> None:
        """Take a question on the control thread, which must not wait; the engine's thread answers it."""
        self.engine.submit(question.answer_by, partial(self.prefill, question))

    def prefill(self, question: PeerQuestion) -> bytes:
        """Fill blocks, and lend them until the decoder has released them, or its link or the time has ended."""
        token, prompt = question.body[:16], question.body[16:]
        blocks = self.blocks.take(blocks_of(prompt))
        try:
            kv = kv_of(prompt)
            for number, tensor in enumerate(self.memory):
                tensor[blocks] = kv[:, number]
            ended = partial(self.ended, blocks)
            # While it drains this is a LinkError, which the decoder gets.
            lent = self.cache.grant(blocks, LIFETIME, token=token, peer=question.cluster_id, on_end=ended)
            return lent.to_bytes()
        except BaseException:
            self.blocks.give(blocks)
            raise

    def ended(self, blocks: list[int], _: Grant) -> None:
        """Use the blocks again: nobody reads them any more."""
        self.blocks.give(blocks)


class Decoder(Worker):
    """Asks a prefill, pulls the KV, returns the token."""

    kind = "decoder"
    role = LLMRole.DECODER

    def start(self) -> None:
        """Have a cache; a lost link wakes the loop that links."""
        self.cache = self.node.cache_manager.allocate_blocks_cache(DESC)
        self.memory = tensor_views(self.cache)
        self.requests = ThreadPoolExecutor(16)
        loop = asyncio.get_running_loop()

        def lost(*_: object) -> None:  # in any thread
            loop.call_soon_threadsafe(self.wake.set)

        self.node.on_peer_lost(lost)

    async def meet(self, prefills: list[Message]) -> None:
        """Link what is not linked, also a new process under a known id; give up what has gone.

        The library dials a lost link again, but only to the same process.
        """
        now = self.node.statistics()
        linked = {each.remote_cluster_id: each.peer_incarnation for each in now.links}
        new = [each for each in prefills if linked.get(each["cluster"]) != each["incarnation"]]
        if new:  # what fails is logged, and tried with the next report
            await self.node.link_clusters_async([to_link(each["cluster"], each["kv"]) for each in new], 2000)
        gone = {each.remote_cluster_id for each in now.redials} - {each["cluster"] for each in prefills}
        if prefills and gone:
            await self.node.unlink_clusters_async([to_link(each) for each in gone], 2000, force=True)
        self.ready = bool(self.node.statistics().links)

    async def answer(self, message: Message) -> Message:
        """Answer a request."""
        if message["kind"] != "decode":
            return await super().answer(message)
        if not self.ready:
            return failure(LinkError(f"{self.name} has no link"))
        try:
            decode = partial(self.decode, message["prefill"], message["prompt"].encode(), message["seconds"])
            # In a thread of its own, with all that it must give back: a cancelled await does not end the thread.
            return {"token": await asyncio.get_running_loop().run_in_executor(self.requests, decode)}
        except LLMException as error:
            return failure(error)

    def decode(self, prefill: int, prompt: bytes, seconds: float) -> str:
        """Try once."""
        manager, token = self.node.cache_manager, secrets.token_bytes(16)
        blocks = self.blocks.take(blocks_of(prompt))
        try:
            lent = Grant.from_bytes(self.node.ask(prefill, "prefill", token + prompt, int(seconds * 1000)))
            lent_blocks = lent.block_numbers.tolist()
            manager.pull_blocks(BlocksCacheKey(prefill), self.cache, lent_blocks, blocks, grant=lent)
            return token_of(np.stack([tensor[blocks] for tensor in self.memory], axis=1))
        finally:
            manager.release_grant(prefill, token)
            self.blocks.give(blocks)


def to_link(cluster_id: int, address: str = "") -> LLMClusterInfo:
    """Return what ``link_clusters`` has to know."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info("127.0.0.1", 0)
    if address:
        ip, _, port = address.rpartition(":")
        info.append_remote_ip_info(ip, int(port))
    return info


# --- all of it on one machine ----------------------------------------------------------------------------------------


async def demo() -> None:
    """Start a service, replace a prefill while clients ask, and end it."""
    processes: dict[str, subprocess.Popen[str]] = {}

    def start(role: str, name: str, *words: str) -> None:
        options = [each for text in sys.warnoptions for each in ("-W", text)]
        command = [sys.executable, *options, __file__, role, *words]
        processes[name] = subprocess.Popen(command, stdout=subprocess.PIPE if role == "router" else None, text=True)

    async def stop(name: str) -> None:
        processes[name].terminate()
        if await asyncio.to_thread(processes.pop(name).wait):
            raise SystemExit(f"{name} failed")

    async def ask(numbers: range) -> None:
        prompts = ["to be or not to be "[: number % 19] * (number % 3) for number in numbers]
        requests = [{"kind": "request", "prompt": prompt, "seconds": 30.0} for prompt in prompts]
        answers = await asyncio.gather(*(call(router, request, 35.0) for request in requests))
        wrong = [
            (prompt, answer)
            for prompt, answer in zip(prompts, answers, strict=True)
            if answer.get("token") != token_of(kv_of(prompt.encode()))
        ]
        if wrong:
            raise SystemExit(f"wrong answers: {wrong}")

    async def linked(prefills: int) -> None:
        pairs: list[list[str]] = []
        async with asyncio.timeout(60.0):
            while len(pairs) < prefills:
                await asyncio.sleep(0.1)
                pairs = (await call(router, {"kind": "status"}, 60.0))["pairs"]

    try:
        start("router", "router", "127.0.0.1:0")
        output = processes["router"].stdout
        assert output is not None
        with output:
            router = output.readline().split()[-1]
        for name in ("prefill-0", "prefill-1", "decoder-0"):
            start(name.partition("-")[0], name, router, "--name", name)
        await linked(2)
        await ask(range(20))
        await asyncio.gather(stop("prefill-0"), ask(range(20, 100)))
        start("prefill", "prefill-0", router, "--name", "prefill-0")
        await linked(2)
        await ask(range(100, 120))
        print("client: 120 right answers; prefill-0 was replaced meanwhile")
        for name in ("decoder-0", "prefill-0", "prefill-1", "router"):
            await stop(name)
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
    print("service: OK")


def main() -> None:
    """Be the process that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("role", nargs="?", choices=["router", "prefill", "decoder", "ready"])
    parser.add_argument("address", nargs="?", help="ip:port of the router; of any process for ready")
    parser.add_argument("--name", help="of a prefill or decoder; the next process with it gets its cluster id")
    asked = parser.parse_args()
    logging.basicConfig(stream=sys.stdout, format=f"{asked.name or asked.role}: %(message)s")  # lost links and the like
    match asked.role:
        case None:
            asyncio.run(demo())
        case "router":
            asyncio.run(Router().run(asked.address))
        case "ready":  # a probe
            try:
                sys.exit(not asyncio.run(call(asked.address, {"kind": "status"}, 5.0))["ready"])
            except (ConnectionError, TimeoutError) as error:
                sys.exit(str(error))
        case role:
            kind = {"prefill": Prefill, "decoder": Decoder}[role]
            asyncio.run(kind(asked.address, asked.name).run())


if __name__ == "__main__":
    main()
