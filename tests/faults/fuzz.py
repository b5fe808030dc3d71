"""Fuzzing: everything that reads what a peer says, against what no peer should say.

A target feeds one reader with frames made from a seed (:mod:`tests.faults.fuzzgen`) and returns
:class:`Verdicts`: how many it took, how many it refused, by kind. Anything but a typed error, and anything that the
library logs as its own fault, is raised as :class:`Finding`, with the seed. ``python -m tests.faults.fuzz``
runs all of them: ``make faults`` does so for longer than the tests.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import msgspec
import numpy as np

from llm_datadist._links.channel import FrameParser
from llm_datadist._links.messages import Message, decode, encode
from llm_datadist._log import logger
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._native import Plan, Tensors
from llm_datadist._native.lanes import check_plan
from llm_datadist._transport import rendezvous
from llm_datadist._transport.lanes import decode_request, encode_request
from llm_datadist.errors import ParamError, ProtocolError
from tests.faults.fuzzgen import HANDSHAKE, LINK, Forge, mutated, wild

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator

__all__ = [
    "SHARES",
    "TARGETS",
    "Finding",
    "Verdicts",
    "all_targets",
    "anonymous_bytes",
    "fuzz_lane_requests",
    "fuzz_packets",
    "fuzz_parser",
    "main",
    "trial",
]

#: What the library logs when it is itself to blame.
_FAULT: Final = re.compile(r"unexpected error|internal error|a handler failed|never retrieved|Traceback")


class Finding(AssertionError):
    """A reader did what it must not do with something a peer said."""


@dataclass
class Verdicts:
    """What became of the frames of one target.

    Attributes:
        target: Its name.
        seed: What all of it was made from.
        accepted: Frames that were taken, by kind of message.
        refused: Frames that were refused, by kind of error.
        seconds: How long it took.
    """

    target: str
    seed: int
    accepted: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    @property
    def judged(self) -> int:
        """Frames that were read to their verdict."""
        return self.accepted.total() + self.refused.total()

    def take(self, what: object) -> None:
        """Count a frame that was taken."""
        self.accepted[type(what).__name__] += 1

    def refuse(self, error: BaseException | str) -> None:
        """Count a frame that was refused."""
        self.refused[error if isinstance(error, str) else type(error).__name__] += 1

    def __str__(self) -> str:
        pace = self.judged / self.seconds if self.seconds else 0.0
        kinds = ", ".join(f"{name} {count}" for name, count in (self.accepted + self.refused).most_common(12))
        return (
            f"{self.target}, seed {self.seed}: {self.judged} frames, {self.accepted.total()} accepted, "
            f"{self.refused.total()} refused, {pace:.0f}/s ({kinds})"
        )


@contextmanager
def trial(target: str, seed: int) -> Iterator[Verdicts]:
    """Yield the verdicts of one run; what it raises, and what the library logs against itself, becomes a Finding."""
    verdicts, start = Verdicts(target, seed), time.monotonic()
    with _Watch() as watch:
        try:
            yield verdicts
        except Finding:
            raise
        except Exception as error:
            raise Finding(f"{target}, seed {seed}, after {verdicts.judged} frames: {error!r}") from error
    verdicts.seconds = time.monotonic() - start
    if watch.faults:
        raise Finding(f"{target}, seed {seed}: the library logged {watch.faults[:3]}")


class _Watch(logging.Handler):
    """Keeps the log of thousands of bad peers out of sight, and what the library says against itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.faults: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Look at one record."""
        text = record.getMessage()
        if record.levelno >= logging.ERROR or record.exc_info or _FAULT.search(text):
            self.faults.append(f"{record.levelname}: {text} {record.exc_info[1]!r}" if record.exc_info else text)

    def __enter__(self) -> Self:
        self._loggers = [logger, logging.getLogger("asyncio"), logging.getLogger("llm_datadist")]
        self._before = [(each.propagate, each.level) for each in self._loggers]
        for each in self._loggers:
            each.addHandler(self)
            each.propagate = False
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for each, (propagate, level) in zip(self._loggers, self._before, strict=True):
            each.removeHandler(self)
            each.propagate = propagate
            each.setLevel(level)


def anonymous_bytes() -> int:
    """Return RssAnon of this process: what it holds of its own."""
    text = Path("/proc/self/status").read_text("ascii")
    (kib,) = re.findall(r"^RssAnon:\s+(\d+) kB", text, re.MULTILINE)
    return int(kib) << 10


# --- readers without a socket ----------------------------------------------------------------------------------------


def fuzz_parser(frames: int, seed: int) -> Verdicts:
    """Feed :class:`~llm_datadist._links.channel.FrameParser` and ``decode`` in pieces of any size."""
    forge = Forge(seed, LINK | HANDSHAKE)
    rng, parser = forge.rng, FrameParser()
    with trial("parser", seed) as verdicts:
        while verdicts.judged < frames:
            data = b"".join([forge.frame() for _ in range(64)])
            cut = rng.randrange(len(data))
            for piece in (data[:cut], data[cut:]):
                parser.feed(piece)
                parser = _take_all(parser, verdicts)
    return verdicts


def _take_all(parser: FrameParser, verdicts: Verdicts) -> FrameParser:
    """Take what is complete; return the parser, or a fresh one where the stream is lost."""
    while True:
        try:
            payload = parser.take()
        except ProtocolError as error:
            verdicts.refuse(f"header: {type(error).__name__}")
            return FrameParser()
        if payload is None:
            # A header that announces more than there is would swallow all that follows.
            return parser if len(parser.rest()) < 1 << 16 else FrameParser()
        try:
            message = decode(payload)
        except ProtocolError as error:
            verdicts.refuse(error)
        else:
            _check_again(message)
            verdicts.take(message)


def _check_again(message: Message) -> None:
    if decode(encode(message)) != message:
        raise Finding(f"{message} is not what it encodes to")


def fuzz_packets(frames: int, seed: int) -> Verdicts:
    """Feed the packets of the same-host rendezvous to :func:`llm_datadist._transport.rendezvous.decode`."""
    rng = Forge(seed, LINK).rng
    with trial("same-host packets", seed) as verdicts:
        while verdicts.judged < frames:
            try:
                verdicts.take(rendezvous.decode(packet(rng)))
            except ProtocolError as error:
                verdicts.refuse(error)
    return verdicts


def packet(rng: random.Random) -> bytes:
    """Return a packet of the rendezvous that could be meant, or nearly."""
    value: dict[str, Any] = {"type": "refusal", "reason": "no"}
    if rng.random() < 0.9:
        described = msgspec.structs.asdict(RegionDescriptor(1, 4096, "device", writable=False))
        regions = [described | {"region": rng.randrange(40)} for _ in range(rng.randrange(4))]
        value = {"type": "hello", "version": rendezvous.VERSION, "token": bytes(16)}
        value |= {"incarnation": bytes(16), "cookie": bytes(16)}
        value |= {"guards_nbytes": 4096, "regions": regions}
    if rng.random() < 0.4:
        value[rng.choice(list(value))] = wild(rng)
    if rng.random() < 0.2 and value.get("regions"):
        regions = value["regions"]
        if isinstance(regions, list) and regions and isinstance(regions[0], dict):
            regions[0][rng.choice(list(regions[0]))] = wild(rng)
    data = msgspec.msgpack.encode(value)
    return mutated(data, rng) if rng.random() < 0.4 else data


def fuzz_lane_requests(frames: int, seed: int) -> Verdicts:
    """Feed requests of lanes to ``decode_request``, and what it takes to the check against real tensors."""
    rng = Forge(seed, LINK).rng
    memory = np.zeros((4, 4096), np.uint8)
    tensors = Tensors(memory.ctypes.data + 4096 * np.arange(4, dtype=np.uint64), 4096)
    with trial("lane requests", seed) as verdicts:
        while verdicts.judged < frames:
            try:
                request = decode_request(_lane_request(rng))
                check_plan(request.plan, tensors, tensors)
            except (ProtocolError, ParamError) as error:
                verdicts.refuse(error)
            else:
                _check_inside(request.plan)
                verdicts.take(request)
    return verdicts


def _lane_request(rng: random.Random) -> bytes:
    count, runs = rng.randrange(5), np.empty((rng.randrange(4), 3), np.uint64)
    for run in runs:
        start, nbytes = rng.randrange(4096), rng.randrange(256)
        run[:] = (start, start, nbytes)
    nbytes = int(runs[:, 2].sum()) * count if rng.random() < 0.9 else rng.randrange(1 << 40)
    plan = Plan(rng.randrange(3), rng.randrange(3), count, runs, False, nbytes)
    data = encode_request(b"h" * rng.randrange(20), 4096, plan, write=rng.random() < 0.5)
    return mutated(data, rng) if rng.random() < 0.6 else data


def _check_inside(plan: Plan) -> None:
    """What passed the check may not leave the tensors, by arithmetic without bounds."""
    last = plan.src_first + plan.count
    for _, start, nbytes in plan.runs.tolist():
        if plan.count and nbytes and (last > 4 or start + nbytes > 4096):
            raise Finding(f"{plan} leaves four tensors of 4096 bytes")


# --- all of them -----------------------------------------------------------------------------------------------------

#: Targets that need nothing but themselves: name -> function(frames, seed).
TARGETS: Final[dict[str, Callable[[int, int], Verdicts]]] = {
    "parser": fuzz_parser,
    "same-host packets": fuzz_packets,
    "lane requests": fuzz_lane_requests,
}
#: Part of all frames that each target gets, so that all take about as long on one machine.
SHARES: Final = {
    "parser": 0.45,
    "same-host packets": 0.12,
    "lane requests": 0.1,
    "handlers": 0.1,
    "handlers, RCA": 0.04,
    "answers": 0.1,
    "lanes": 0.03,
    "lane handles": 0.03,
    "lane greetings": 0.03,
    "greetings": 0.003,
    "dials": 0.003,
    "rendezvous": 0.002,
}


def all_targets() -> dict[str, Callable[[int, int], Verdicts]]:
    """Return every target by name."""
    from tests.faults import fuzzgreetings, fuzzlanes, fuzzlinks

    return TARGETS | fuzzlinks.TARGETS | fuzzgreetings.TARGETS | fuzzlanes.TARGETS


def main(arguments: list[str] | None = None) -> int:
    """Run every target; print one line each. A finding ends the run with its traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=1_000_000, help="in all; each target gets its share")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--target", choices=sorted(SHARES), help="only this one, with all frames")
    given = parser.parse_args(arguments)
    total = 0
    for name, target in all_targets().items():
        if given.target in (None, name):
            frames = given.frames if given.target else int(given.frames * SHARES[name]) + 1
            verdicts = target(frames, given.seed)
            total += verdicts.judged
            sys.stdout.write(f"{verdicts}\n")
            sys.stdout.flush()
    sys.stdout.write(f"{total} frames judged, no finding\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
