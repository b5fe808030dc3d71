"""Healthy loads and faults of serving systems. Each is a generator over a prompt and a decoder: a step is a round.

The ends live in two processes, each of which has many LLMDataDists. Functions that take a world run at an end.
"""

import secrets
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Self, cast

import pytest
from prometheus_client import CollectorRegistry, start_http_server

from faults.gated import stopped
from llm_datadist import BlocksCacheKey, CacheKey
from llm_datadist.errors import CacheMismatch, CacheNotFound
from llm_datadist.prometheus import register
from tests.support.ends import ChildEnd, End, begin_there, frozen, result_there
from tests.support.linking import info, link, link_number, lose, unlink, vanish
from tests.support.moves import Spec, Use, call, forget, make, same_bytes, show, wait_until
from tests.support.world import World, small_pool

Rounds = Generator[None, None, None]

KV: Final = Spec(tensors=4, rows=64, stride=4096, blocks=True)
KV_MIB: Final = 1
PAGE: Final = Spec(tensors=1, rows=1, stride=4096)
EVERY_BLOCK: Final = list(range(KV.rows))
SLOW_SECONDS: Final = 1.3
_OTHER: Final = 500  # between the cluster ids of two prompts of a decoder


class Instance(End):
    """One of several LLMDataDists of a child process."""

    def __init__(self, process: ChildEnd, cluster_id: int) -> None:
        self._process = process
        self.cluster_id = cluster_id

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        return self._process.do(_inside, self.cluster_id, function, *args)


def stop_instances(world: World) -> None:
    for each in world.memory.values():
        each.stop()


def serve(world: World) -> int:
    """Export the metrics of a process, as its user would; return the port."""
    registry = CollectorRegistry()
    for each in world.memory.values():
        register(each.dd, registry)
    server, thread = start_http_server(0, "127.0.0.1", registry)
    world.memory["server"] = server, thread
    return int(server.server_port)


def end_serving(world: World) -> None:
    server, thread = world.memory.pop("server")
    server.shutdown()
    server.server_close()
    thread.join()


def _inside(world: World, cluster_id: int, function: Callable[..., Any], *args: Any) -> Any:
    name = f"cluster {cluster_id}"
    return function(world.memory.setdefault(name, World(name)), *args)


@dataclass(frozen=True)
class Pair:
    """A prompt and a decoder, not started yet; an empty folder; and where to say what is to be done at the end."""

    prompt: End
    decoder: End
    folder: Path
    stack: ExitStack

    @property
    def key(self) -> BlocksCacheKey:
        return BlocksCacheKey(self.prompt.cluster_id, 0)

    def with_process(self, role: str) -> Self:
        """Return it with one of the ends in a process of its own."""
        end = ChildEnd(role)
        self.stack.callback(end.kill)
        end.cluster_id = getattr(self, role).cluster_id
        return replace(self, prompt=end) if role == "prompt" else replace(self, decoder=end)

    def start(self, kv: Spec | None = KV, **settings: Any) -> None:
        """Start and link both, with a blocks cache for their whole life; ``settings`` as :func:`_start`."""
        _start(self.decoder, "DECODER", **settings)
        if kv is not None:
            self.decoder.do(make, "kv", kv, 2)
        self.start_prompt(kv, **settings)

    def start_prompt(self, kv: Spec | None = KV, **settings: Any) -> None:
        """Start the prompt, perhaps not the first one, and link the decoder to it."""
        _start(self.prompt, "PROMPT", **settings)
        if kv is not None:
            self.prompt.do(make, "kv", replace(kv, blocks_key=self.key), 1)
        self.link()

    def beside(self, cluster_id: int, **settings: Any) -> Self:
        """Return the decoder with a further prompt, in a process of its own, under that cluster id."""
        pair = self.with_process("prompt")
        pair.prompt.cluster_id = cluster_id
        pair.start_prompt(**settings)
        return pair

    def link(self) -> None:
        """Link them, unless a lost link is back already."""
        self.decoder.do(link, [info(self.prompt.cluster_id, self.prompt.port)])
        assert self.decoder.do(link_number, self.prompt.cluster_id)

    def pull(self, blocks: list[int]) -> None:
        self.decoder.do(call, "pull_blocks", self.key, Use("kv"), blocks, blocks)

    def same_kv(self) -> None:
        """Compare every byte of the two blocks caches."""
        same_bytes(self.decoder.do(show, "kv"), self.prompt.do(show, "kv"))


def _start(
    end: End, role: str, *, mib: int = 2, transport: str = "auto", silence: str = "600", **settings: Any
) -> None:
    extra = {"llm.Transport": transport, "llm.PeerTimeout": silence}
    end.start(role, end.cluster_id, listen_ip_info="127.0.0.1:0", extra=extra, **small_pool(mib), **settings)


# --- healthy loads ----------------------------------------------------------------------------------------------------
def paged(pair: Pair) -> Rounds:
    """Blocks pulled by their key, and pushed."""
    pair.start(enable_remote_cache_accessible=True)
    while True:
        pair.pull(EVERY_BLOCK)
        pair.same_kv()
        pair.decoder.do(call, "push_blocks", pair.key, Use("kv"), [1, 2], [1, 2])
        yield


def as_vllm(pair: Pair) -> Rounds:
    """As vLLM's connector: the KV cache fills its pool; a grant for each request is claimed, pulled under, released."""
    pair.start(replace(KV, memory="inside"), mib=KV_MIB)
    while True:
        for begin in range(0, KV.rows, 16):
            blocks, token = EVERY_BLOCK[begin : begin + 16], secrets.token_bytes(16)
            pair.prompt.do(_give, blocks, 30.0, token)
            pair.decoder.do(_pull_granted, pair.key, blocks, token)
        pair.same_kv()
        yield


def rows(pair: Pair) -> Rounds:
    """A cache with a key for each request, which its pull consumes."""
    pair.start(None)
    pair.decoder.do(make, "row", PAGE, 1)
    for first in count(0, 2):
        pair.prompt.do(_publish, pair.prompt.cluster_id, first, first + 2)
        yield
        pair.decoder.do(_pull_rows, pair.prompt.cluster_id, first, first + 2)


def polls(pair: Pair) -> Rounds:
    """Nine pulls in ten are of what nobody has published yet."""
    pair.start()
    while True:
        pair.pull(EVERY_BLOCK)
        for _ in range(9):
            with pytest.raises(CacheNotFound):
                pair.decoder.do(call, "pull_blocks", replace(pair.key, model_id=9), Use("kv"), [0], [0])
        yield


def unlinks(pair: Pair) -> Rounds:
    """The decoder unlinks an idle peer for a while, and its link to another one breaks and comes back."""
    pair.start()
    other = pair.beside(pair.prompt.cluster_id + _OTHER)
    while True:
        yield from _pulls(pair)
        assert pair.decoder.do(unlink, [info(pair.prompt.cluster_id, pair.prompt.port)])[0] == 0
        other.decoder.do(_lose, other.prompt.cluster_id)
        other.link()
        yield from _pulls(other)
        pair.link()


def restarted(pair: Pair) -> Rounds:
    """The prompt's process is killed; another one takes its cluster id."""
    pair = pair.with_process("prompt")
    pair.start()
    yield from _pulls(pair)
    cast("ChildEnd", pair.prompt).kill()
    yield from _pulls(pair.beside(pair.prompt.cluster_id), None)


def replaced(pair: Pair) -> Rounds:
    """The same over tcp, under another cluster id, and nobody unlinks the one that has gone."""
    pair = pair.with_process("prompt")
    pair.start(transport="tcp")
    yield from _pulls(pair)
    cast("ChildEnd", pair.prompt).kill()
    yield from _pulls(pair.beside(pair.prompt.cluster_id + _OTHER, transport="tcp"), None)


def upgraded(pair: Pair) -> Rounds:
    """The prompt is finalized, another incarnation links, and so on."""
    pair = pair.with_process("prompt")
    pair.start()
    while True:
        yield from _pulls(pair)
        pair.prompt.stop()
        pair.start_prompt()


def drained(pair: Pair) -> Rounds:
    """The prompt is drained, stands for a while without links, and is finalized while the decoder uses another one."""
    pair.start()
    other = pair.beside(pair.prompt.cluster_id + _OTHER)
    yield from _pulls(pair)
    pair.prompt.do(_drain)
    yield from _pulls(other, None)


def _pulls(pair: Pair, rounds: int | None = 60) -> Rounds:
    for _ in count() if rounds is None else range(rounds):
        pair.pull([0])
        yield


def _drain(world: World) -> None:
    assert not world.dd.drain()


def _give(world: World, blocks: list[int], ttl: float, token: bytes | None = None) -> None:
    world.caches["kv"].grant(blocks, ttl, token=token)


def _pull_granted(world: World, key: BlocksCacheKey, blocks: list[int], token: bytes) -> None:
    grant = world.cm.claim_grant(key.prompt_cluster_id, token)
    world.cm.pull_blocks(key, world.caches["kv"], blocks, blocks, grant=grant)
    grant.release()


def _publish(world: World, cluster_id: int, first: int, last: int) -> None:
    for request in range(first, last):
        make(world, "row", replace(PAGE, keys=(CacheKey(cluster_id, request),)), request)
        forget(world, "row")  # it waits for its pull


def _pull_rows(world: World, cluster_id: int, first: int, last: int) -> None:
    for request in range(first, last):
        world.cm.pull_cache(CacheKey(cluster_id, request), world.caches["row"], 0)


# --- faults: healthy until the second step ----------------------------------------------------------------------------
def stopped_peer(pair: Pair) -> Rounds:
    """The decoder, which linked, stops for ever."""
    pair = pair.with_process("decoder")
    pair.start(silence="10")
    yield
    with frozen(pair.decoder):
        yield from _for_ever()


def loses_links(pair: Pair) -> Rounds:
    """The link breaks six times within a second, and is back at once each time."""
    pair.start()
    yield
    for _ in range(6):
        pair.decoder.do(_lose, pair.prompt.cluster_id)
        pair.link()
    yield from _for_ever()


def unreachable(pair: Pair) -> Rounds:
    """The network loses the prompt, and closes each connection to its address."""
    pair.start()
    yield
    pair.prompt.do(vanish)
    with _closes_connections(pair.prompt.port):
        yield from _for_ever()


def mismatched(pair: Pair) -> Rounds:
    """Some pulls are into a cache of another shape."""
    pair.start()
    pair.decoder.do(make, "other", replace(KV, tensors=2), 3)
    while True:
        yield
        pair.pull(EVERY_BLOCK)
        with pytest.raises(CacheMismatch):
            pair.decoder.do(call, "pull_blocks", pair.key, Use("other"), [0], [0])


def stands_still(pair: Pair) -> Rounds:
    """The prompt's process stops for over a second in each pull."""
    pair = pair.with_process("prompt")
    pair.start(transport="tcp")
    yield
    while True:
        with frozen(pair.prompt):
            pair.decoder.do(begin_there, "pull", call, "pull_blocks", pair.key, Use("kv"), [0], [0])
            until = time.monotonic() + SLOW_SECONDS
            while time.monotonic() < until:
                yield
        assert pair.decoder.do(result_there, "pull") is None


def never_pulled(pair: Pair) -> Rounds:
    """The reader of a key never comes."""
    pair.start(None)
    yield
    pair.prompt.do(_publish, pair.prompt.cluster_id, 0, 1)
    yield from _for_ever()


def overproduces(pair: Pair) -> Rounds:
    """For each four rows that are published three are pulled: 6 pages more wait each second, of a pool that has 256."""
    pair.start(None, mib=1)
    pair.decoder.do(make, "row", PAGE, 1)
    yield
    begun, owner, published, pulled = time.monotonic(), pair.prompt.cluster_id, 0, 0
    try:
        while True:
            while published - pulled < 6 * (time.monotonic() - begun):
                pair.prompt.do(_publish, owner, published, published + 4)
                pair.decoder.do(_pull_rows, owner, pulled, pulled + 3)
                published, pulled = published + 4, pulled + 3
            yield
    finally:
        pair.decoder.do(_pull_rows, owner, pulled, published)


def stuck_writer(pair: Pair) -> Rounds:
    """The decoder stops in the middle of a push, and the prompt gives the cache back."""
    pair = pair.with_process("decoder")
    pair.start(enable_remote_cache_accessible=True)
    yield
    push = ("push_blocks", pair.key, Use("kv"), [0], [0])
    with stopped(pair.decoder, "before write", pair.folder, *push, peer=pair.prompt.cluster_id):
        pair.prompt.do(forget, "kv")
        yield from _for_ever()


def nearly_full(pair: Pair) -> Rounds:
    """Of the 256 pages of the pool 240 are always taken, and some of the others come and go."""
    pair.start(Spec(tensors=1, rows=240, stride=PAGE.stride, blocks=True), mib=1)
    while True:
        yield
        pair.prompt.do(make, "row", replace(PAGE, rows=8), 3)
        yield
        pair.prompt.do(forget, "row")


def late_readers(pair: Pair) -> Rounds:
    """Nobody claims a grant before its time is over."""
    pair.start()
    while True:
        yield
        pair.prompt.do(_give, [0], 0.2)


def _lose(world: World, peer: int) -> None:
    before = link_number(world, peer)
    lose(world, peer)
    wait_until(lambda: link_number(world, peer) != before)


@contextmanager
def _closes_connections(port: int | None) -> Iterator[None]:
    def run() -> None:
        while not ended.is_set():
            server.accept()[0].close()

    assert port is not None
    ended = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as server:
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            socket.create_connection(("127.0.0.1", port)).close()
            thread.join()


def _for_ever() -> Rounds:
    while True:
        yield


#: What an ordinary day has, too: deploys, drains, polls.
LOADS: Final = (paged, as_vllm, rows, polls, unlinks, restarted, replaced, upgraded, drained)
#: The fault that each alert is for, and the end that sees it.
FAULTS: Final[dict[str, tuple[Callable[[Pair], Rounds], str]]] = {
    "LlmDatadistLinkDown": (stopped_peer, "prompt"),
    "LlmDatadistLostLinks": (loses_links, "both"),
    "LlmDatadistRedialling": (unreachable, "decoder"),
    "LlmDatadistFailureRatio": (mismatched, "decoder"),
    "LlmDatadistSlow": (stands_still, "decoder"),
    "LlmDatadistOldestKey": (never_pulled, "prompt"),
    "LlmDatadistUnconsumedGrowing": (overproduces, "prompt"),
    "LlmDatadistQuarantine": (stuck_writer, "prompt"),
    "LlmDatadistPoolNearlyFull": (nearly_full, "prompt"),
    "LlmDatadistGrantExpiries": (late_readers, "prompt"),
}
