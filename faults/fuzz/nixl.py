"""Fuzz target: what a peer asks of the owner over nixl. Agents here move nothing, so that no NIXL is needed."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty, SimpleQueue
from typing import Final
from unittest import mock

import msgspec
import numpy as np
from numpy.typing import NDArray

from faults.fuzz import Finding, Targets, Verdicts, trial
from faults.fuzz.forge import LINK, Forge, mutated, wild
from llm_datadist._deadline import Deadline
from llm_datadist._native import Plan, encode_request, plan_row
from llm_datadist._transport.moves import MoveReply, MoveRequest
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import Address, Ask, Done, Meet, NixlRefused, read_answer, read_request
from llm_datadist._transport.nixl.transport import NixlConnection
from llm_datadist._transport.transport import Context
from llm_datadist.errors import CacheNotFound, ProtocolError
from tests.support.twin import tensors_of

HANDLE: Final = b"mine"
TAG: Final = 7
EXTENT: Final = 4096
_MOVES: Final = 8  # so that a Done finds a move that was granted
_PATIENCE_SECONDS: Final = 10.0
_MEMORY: Final = np.zeros((4, EXTENT), np.uint8)
_TENSORS: Final = tensors_of(list(_MEMORY))


class StillAgent:
    """An agent that moves nothing, and finds what reaches outside the owner's memory."""

    def __init__(self, fabric: str, *, progress: bool, pools: object = ()) -> None:
        self.name = "still"
        self.loaded: dict[str, str] = {}

    def cover(self, bases: NDArray[np.uint64], extent: int, device: int = -1) -> None:
        """Take tensors as registered."""

    def covers_any(self, bases: list[int]) -> bool:
        return False

    def address(self, known: str) -> Address:
        return Address(self.name, 1, b"" if known else b"metadata", "1")

    def load(self, address: Address) -> bool:
        """Fail as NIXL does with metadata of another version; need them otherwise."""
        if address.package == "another":
            raise NixlFailed("they mean nothing here")
        return bool(address.metadata)

    def move(
        self,
        verb: str,
        peer: str,
        here: NDArray[np.uint64],
        there: NDArray[np.uint64],
        turn: Callable[[], object],
        moved: Callable[[int], None],
        devices: tuple[int, int] = (-1, -1),
    ) -> None:
        first, last = _MEMORY.ctypes.data, _MEMORY.ctypes.data + _MEMORY.nbytes
        if len(here) and (int(here[:, 0].min()) < first or int((here[:, 0] + here[:, 1]).max()) > last):
            raise Finding("bytes outside the owner's memory would be moved")

    def receive(self) -> None:
        """Let nothing come in, and other threads run."""
        time.sleep(0)

    def end(self) -> None:
        """Do nothing."""

    def cpu_seconds(self) -> float:
        return 0.0


class _Owner:
    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        if request.handle != HANDLE:
            raise CacheNotFound("no such cache")
        return MoveReply(_TENSORS, [], TAG)


class _NoWire:
    def ask(self, link: object, data: bytes, deadline: Deadline) -> bytes:
        raise AssertionError("the owner asks nothing")

    def tell(self, link: object, data: bytes) -> None:
        raise AssertionError("the owner is the end that was dialled: it tells nothing")


@contextmanager
def serving(agent: type[StillAgent] = StillAgent) -> Iterator[NixlConnection]:
    """Yield the owner's end of a connection whose agents are those; afterwards nothing may be left of its requests."""
    with mock.patch("llm_datadist._transport.nixl.slots.Agent", agent):
        context = Context(mock.sentinel.no_options, mock.Mock(regions={}), _Owner(), _NoWire())
        connection = NixlConnection(context, "tcp", writable=True)
        with connection:
            connection.begin("the link")
            yield connection
            connection.server.quiesce(TAG)
        connection.server.join()
    server = connection.server
    left = (server.requests, server.waiting_bytes, server.push_receiver.users)
    if left != ({}, 0, 0):
        raise Finding(f"left behind: requests, their bytes, users of the receiver: {left}")


def ask(move: int = 1, *, write: bool = False, budget_ms: int = 60_000, nbytes: int = 64) -> Ask:
    plan = Plan(0, 0, 4, plan_row(0, 0, nbytes), False, 4 * nbytes)
    meta = encode_request(HANDLE, EXTENT, plan, write)
    if write:
        return Ask(move, write, True, meta, None, b"", b"", "", budget_ms)
    receiver = Address("receiver", 1, b"metadata", "1")
    return Ask(move, write, False, meta, receiver, bytes(32), bytes(8), "", budget_ms)


def fuzz_nixl_requests(frames: int, seed: int) -> Verdicts:
    rng = Forge(seed, LINK).rng
    with trial("nixl requests", seed) as verdicts:
        while verdicts.judged < frames:
            with serving() as connection:
                for _ in range(500):
                    _judge(connection, _request(rng), verdicts)
    return verdicts


def _judge(connection: NixlConnection, data: bytes, verdicts: Verdicts) -> None:
    answers: SimpleQueue[bytes] = SimpleQueue()
    try:
        connection.server.on_request(data, answers.put)
    except ProtocolError as error:
        verdicts.refuse(error)
        return
    request = read_request(data)
    if isinstance(request, Meet) or (isinstance(request, Done) and not request.good):  # not waited for
        verdicts.take(request)
        return
    try:
        answer = read_answer(answers.get(timeout=_PATIENCE_SECONDS))
    except Empty:
        raise Finding(f"{request} has no answer") from None
    if isinstance(answer, NixlRefused):
        verdicts.refuse("Refused")
    else:
        verdicts.take(answer)


def _request(rng: random.Random) -> bytes:
    move, chosen = rng.randrange(_MOVES), rng.random()
    request: Ask | Done | Meet = ask(move, write=chosen < 0.4, budget_ms=rng.choice((0, 1, 60_000)), nbytes=64)
    if chosen < 0.2:
        request = Done(move, rng.random() < 0.5)
    elif chosen > 0.95:
        request = Meet(Address("receiver", 1, rng.choice((b"", b"metadata")), rng.choice(("1", "another"))))
    fields = msgspec.to_builtins(request, builtin_types=(bytes,))
    if rng.random() < 0.3:
        at = rng.randrange(len(fields))
        if isinstance(fields[at], list) and rng.random() < 0.5:
            fields[at][rng.randrange(len(fields[at]))] = wild(rng)
        else:
            fields[at] = wild(rng)
    elif isinstance(request, Ask) and rng.random() < 0.1:
        at = fields.index(request.meta)
        fields[at] = mutated(request.meta, rng)
    data = msgspec.msgpack.encode(fields)
    return mutated(data, rng) if rng.random() < 0.2 else data


TARGETS: Final[Targets] = {"nixl requests": (0.02, fuzz_nixl_requests)}
