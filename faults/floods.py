"""Floods of each message kind: what does one peer, or ten, cost the honest peers of the same instance?

    python -m faults floods

The victim is a store. Honest peers ask it, look up keys that are there, and link anew. None of that may fail, and no
link may be lost. Flooders take CPU wherever they are: those of the row "burn" only make messages.
"""

import argparse
import secrets
import select
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count, product
from typing import Final

import numpy as np

from faults.strangers import Stranger
from llm_datadist import CacheDesc, DataType
from llm_datadist._links import messages as wire
from llm_datadist.errors import LLMException
from llm_datadist.store import STORE_ID, StoreClient, StoreOptions, StoreServer, messages, namespace
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, info, link, unlink
from tests.support.world import World

SPACE: Final = namespace(fingerprint=b"floods", tp_size=1, tp_rank=0, hash_algorithm="x", hash_seed="0", salt="")
KEYS: Final = [b"%064d" % number for number in range(256)]
ABSENT: Final = [b"no %061d" % number for number in range(4096)]
_BATCH: Final = 50
_MANY: Final = 8
#: 99th percentile beside a flood over that of quiet seconds, at most.
_MOST: Final = 20


def question(name: str, body: Callable[[], bytes]) -> Callable[[int], wire.Message]:
    return lambda number: wire.Question(number, name, body(), 10_000)


FLOODS: Final[dict[str, Callable[[int], wire.Message]]] = {
    "burn": wire.Ping,
    "question": question("nobody answers", lambda: b"x"),
    "ping": wire.Ping,
    "claim": lambda number: wire.Claim(number, secrets.token_bytes(16), 1, 60_000),
    "resolve": lambda number: wire.Resolve(number, False, (0, 1, 2), 0, 0, 1000),
    "events": question(messages.EVENTS, lambda: messages.EventsAfter(SPACE, b"", 0).encode()),
    "lookup": question(messages.LOOKUP, lambda: messages.Lookup([SPACE], ABSENT, [secrets.token_bytes(16)]).encode()),
    "suspect": question(messages.SUSPECT, lambda: messages.Suspect(SPACE, list(range(len(KEYS)))).encode()),
}


def serve(world: World) -> int:
    """Be the victim; return its port."""
    world.memory["store"] = server = StoreServer(64 << 20)
    server.datadist.answer_questions("echo", lambda question: question.body)
    return server.port


def linked(world: World) -> int:
    """Check the victim; return the number of its links."""
    dd = world.memory["store"].datadist
    dd.check_integrity()
    return len(dd.statistics().links)


def begin(world: World, port: int) -> None:
    """Be an honest client with keys in the store."""
    world.memory["client"] = client = StoreClient(
        world.dd, f"127.0.0.1:{port}", SPACE, StoreOptions(lookup_ms=10_000, pause_seconds=0.1)
    )
    assert client.connect(10)
    cache = world.cm.allocate_blocks_cache(CacheDesc(1, [len(KEYS), 64], DataType.DT_INT8))
    assert client.save(KEYS, cache, list(range(len(KEYS)))) == len(KEYS)


def ask(world: World, _: int) -> bool:
    return world.dd.ask(STORE_ID, "echo", b"x", 10_000) == b"x"


def look_up(world: World, _: int) -> bool:
    hit = world.memory["client"].lookup(KEYS[:_MANY])
    world.memory["client"].release(hit)
    return len(hit) == _MANY


def relink(world: World, port: int) -> bool:
    return link(world, [info(STORE_ID, port)]) == SUCCESS


def measure_calls(world: World, what: str, port: int, seconds: float) -> tuple[list[float], int]:
    """Call for some seconds; return the milliseconds of each, and how many failed."""
    times, failed, until = [], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        since = time.perf_counter()
        try:
            failed += not CALLS[what](world, port)
        except LLMException:
            failed += 1
        times.append(1e3 * (time.perf_counter() - since))
        if what == "link":
            unlink(world, [info(STORE_ID, port)])
        time.sleep(0.005)
    return times, failed


CALLS: Final = {"ask": ask, "look up": look_up, "link": relink}


def join(world: World, port: int, links: int, first: int) -> None:
    """Become several peers, which say what they like later."""
    world.memory["strangers"] = strangers = [Stranger(port, first + number) for number in range(links)]
    for each in strangers:
        each.link(over="tcp", transport="tcp")
        each.sock.setblocking(False)


def flood(world: World, kind: str, seconds: float) -> int:
    """Say a kind of message over all links as fast as they take it; return how many, and read what comes."""
    numbers, said, until = count(1), 0, time.monotonic() + seconds
    unsent = {each.sock: b"" for each in world.memory["strangers"]}
    silent_until = dict.fromkeys(unsent, 0.0)
    while (now := time.monotonic()) < until:
        reads, writes, _ = select.select(unsent, unsent, (), 0.1)
        for sock in reads:
            assert sock.recv(1 << 20), "hung up on"
        for sock in writes:
            if not unsent[sock]:
                unsent[sock] = b"".join(wire.frame(FLOODS[kind](next(numbers))) for _ in range(_BATCH))
                said += _BATCH
            if kind == "burn" and now < silent_until[sock]:
                unsent[sock] = b""
                continue
            silent_until[sock] = now + 1  # or its link is taken for dead
            unsent[sock] = unsent[sock][sock.send(unsent[sock]) :]
    return said


def leave(world: World) -> None:
    for name in ("client", "store"):
        if name in world.memory:
            world.memory.pop(name).close()
    for each in world.memory.pop("strangers", []):
        each.__exit__()


def measure(options: argparse.Namespace) -> Iterator[tuple[str, bool]]:
    quiet: dict[str, float] = {}
    for links, kind in ((0, "quiet"), *product((1, options.links), options.kinds)):
        with ExitStack() as stack:
            names = ("store", "client", "dialer", "flooder", "other flooder")[: 3 + links]
            every = [stack.enter_context(closing(ChildEnd(name, fresh=True))) for name in names]
            for end in every:
                stack.callback(end.do, leave)
            ends, flooders = every[:3], every[3:]
            port = ends[0].do(serve)
            for number, end in enumerate(ends[1:]):
                end.start("DECODER", number + 1, mem_pool_cfg='{"memory_size": 1048576, "page_shift": 12}')
            ends[1].do(begin, port)
            for at, end in enumerate(flooders):
                end.do(join, port, links // len(flooders), 900 + at * 100)
                end.begin(flood, kind, 3 * options.seconds + 2)
            text, failed, right = "", 0, True
            for what in CALLS:
                times, wrong = ends[1 + (what == "link")].do(measure_calls, what, port, options.seconds)
                middle, p99 = np.quantile(times, (0.5, 0.99))
                times_quiet = p99 / quiet.setdefault(what, p99)
                failed, right = failed + wrong, right and times_quiet <= _MOST
                text += f"{what} {middle:6.2f} {p99:7.2f} {times_quiet:5.1f}x | "
            said, left = sum(end.finish() for end in flooders), ends[0].do(linked)
        text = f"{kind:9}{links:3}: {text}{said:8} said, {failed} failed, {left - 1 - links} links lost or too many"
        yield text, right and not failed and left == 1 + links


HEAD: Final = "flood, links: median and p99 in ms, p99 over that of quiet seconds"
OPTIONS: Final = {
    "links": (10, "flooding links of the second half of the rows"),
    "seconds": (3.0, "of each honest operation"),
    "kinds": (tuple(FLOODS), ""),
}
