"""Fuzz targets without a socket: the parser of frames, packets of the rendezvous, requests of lanes."""

import random
from collections.abc import Callable
from typing import Any, Final

import msgspec
import numpy as np

from faults.fuzz import Finding, Targets, Verdicts, trial
from faults.fuzz.forge import HANDSHAKE, LINK, Forge, mutated, wild
from llm_datadist._links.channel import FrameParser
from llm_datadist._links.messages import Message, decode, encode
from llm_datadist._memory.exports import RegionDescriptor
from llm_datadist._native import Plan, check_plan, encode_request
from llm_datadist._transport.moves import MoveRequest, decode_request
from llm_datadist._transport.samehost import rendezvous
from llm_datadist.errors import ParamError, ProtocolError
from tests.support.twin import tensors_of


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


def _reading(
    name: str, make: Callable[[random.Random], bytes], read: Callable[[bytes], object]
) -> Callable[[int, int], Verdicts]:
    """Return a target that feeds a reader with what ``make`` returns."""

    def fuzz(frames: int, seed: int) -> Verdicts:
        rng = Forge(seed, LINK).rng
        with trial(name, seed) as verdicts:
            while verdicts.judged < frames:
                try:
                    verdicts.take(read(make(rng)))
                except (ProtocolError, ParamError) as error:
                    verdicts.refuse(error)
        return verdicts

    return fuzz


def packet(rng: random.Random) -> bytes:
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


def _lane_request(rng: random.Random) -> bytes:
    count, runs = rng.randrange(5), np.empty((rng.randrange(4), 3), np.uint64)
    for run in runs:
        start, nbytes = rng.randrange(4096), rng.randrange(256)
        run[:] = (start, start, nbytes)
    nbytes = int(runs[:, 2].sum()) * count if rng.random() < 0.9 else rng.randrange(1 << 40)
    plan = Plan(rng.randrange(3), rng.randrange(3), count, runs, False, nbytes)
    data = encode_request(b"h" * rng.randrange(20), 4096, plan, rng.random() < 0.5)
    return mutated(data, rng) if rng.random() < 0.6 else data


_MEMORY: Final = np.zeros((4, 4096), np.uint8)
_TENSORS: Final = tensors_of(list(_MEMORY))


def _read_request(data: bytes) -> MoveRequest:
    """Read a request of a lane, and check it against real tensors; what passes may not leave them."""
    request = decode_request(data)
    plan = request.plan
    check_plan(plan, _TENSORS.native, _TENSORS.native)
    last = plan.src_first + plan.count  # by arithmetic without bounds
    for _, start, nbytes in plan.runs.tolist():
        if plan.count and nbytes and (last > 4 or start + nbytes > 4096):
            raise Finding(f"{plan} leaves four tensors of 4096 bytes")
    return request


TARGETS: Final[Targets] = {
    "parser": (0.379, fuzz_parser),
    "same-host packets": (0.12, _reading("same-host packets", packet, rendezvous.decode)),
    "lane requests": (0.1, _reading("lane requests", _lane_request, _read_request)),
}
