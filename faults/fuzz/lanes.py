"""Fuzz targets for the data lanes: what comes over the wire of a lane, and the greeting it begins with.

The victim is a real :class:`~llm_datadist._transport.tcp.lanes.Lanes` over real memory. An honest lane beside the bad
ones reads from it again and again, and compares every byte.
"""

import asyncio
import random
import socket
import time
from contextlib import closing, suppress
from typing import Any, Final, Self

import msgspec
import numpy as np

from faults.fuzz import Finding, Targets, Verdicts, trial
from faults.fuzz.forge import LINK, Forge, mutated, wild
from faults.fuzz.links import join
from faults.fuzz.stage import Stage
from faults.lane_ends import DATA, HEADER, MAGIC, READ, RESULT, WRITE
from faults.sealing import FAR_KEYS, MAX_RECORD, NEAR_KEYS, Keys, Sealer
from llm_datadist._cache.registry import FIRST_PEER_CHOSEN_PIN
from llm_datadist._links.loop import ControlLoop
from llm_datadist._links.messages import Release
from llm_datadist._native import Ending, LaneEngine, LaneEvent, LaneLost, Plan, encode_request, plan_row
from llm_datadist._transport.address import read_exactly
from llm_datadist._transport.moves import MoveReply, MoveRequest
from llm_datadist._transport.tcp.lanes import (
    TOKEN_BYTES,
    LaneGroup,
    Lanes,
    LaneSocket,
)
from llm_datadist.errors import CacheNotFound, LLMException, ProtocolError
from tests.support.twin import tensors_of

_EXTENT: Final = 4096
_SECONDS: Final = 20.0


class _Owner:
    """Grants its memory to requests with the right handle; a :class:`~llm_datadist._transport.moves.MoveOwner`."""

    def __init__(self) -> None:
        self.memory = np.random.default_rng(1).integers(0, 256, (4, _EXTENT), dtype=np.uint8)
        self.sink = np.zeros((4, _EXTENT), np.uint8)
        self.verdicts: Verdicts | None = None
        self.lost = 0
        self.granted = 0  # requests of the bad ones

    def on_lost(self, link: object, reason: str) -> None:
        self.lost += 1
        # A peer that says its last and goes is no breach.
        if self.verdicts is not None and link != "honest" and "closed" not in reason and "ended" not in reason:
            self.verdicts.refuse("breach")

    def on_move(self, link: object, request: MoveRequest) -> MoveReply:
        what, memory = ("write", self.sink) if request.write else ("read", self.memory)
        if self.verdicts is not None and link != "honest":
            self.verdicts.accepted[what] += 1
        if request.handle != b"mine":
            raise CacheNotFound(f"no memory is called {request.handle!r}")
        self.granted += link != "honest"
        return MoveReply(tensors_of(list(memory)))


class _WatchedLanes(Lanes):
    def __init__(self, owner: _Owner) -> None:
        super().__init__(1, owner)
        self._watcher = owner

    def _dispatch(self, group: LaneGroup, event: LaneEvent) -> None:
        super()._dispatch(group, event)
        if isinstance(event, LaneLost):
            self._watcher.on_lost(group.link, event.reason)


class _Scene:
    def __init__(self) -> None:
        self.owner = _Owner()
        self._control = ControlLoop()
        self.lanes = _WatchedLanes(self.owner)
        self._honest = LaneEngine(1)
        self._into = np.zeros((4, _EXTENT), np.uint8)

    def __enter__(self) -> Self:
        self._control.start()
        self._control.call(self.lanes.start, self._control.loop)
        near, far = socket.socketpair()
        self._lane = self._honest.add_lane(near.detach())
        self.lanes.open([LaneSocket(far)]).begin("honest")
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._honest.close()
        self._control.call(self.lanes.stop)
        self.lanes.close()
        self._control.stop()

    def look(self) -> None:
        self._into[:] = 0
        plan = Plan(0, 0, 4, plan_row(0, 0, _EXTENT), False, 4 * _EXTENT)
        meta = encode_request(b"mine", _EXTENT, plan, False)
        job = self._honest.start(self._lane, meta, plan, tensors_of(list(self._into)), write=False)
        outcome = self._honest.wait(job, time.monotonic_ns() + int(_SECONDS * 1e9))
        if outcome.ending is not Ending.GOOD or not np.array_equal(self._into, self.owner.memory):
            raise Finding(f"an honest read beside the bad lanes ended with {outcome}")

    def speak(self, data: bytes, keys: Keys | None = None) -> None:
        """Be one lane, sealed if the victim has keys for it: say something, hear the answers, go."""
        ours, theirs = socket.socketpair()
        with ours:
            lost = self.owner.lost
            self.lanes.open([LaneSocket(theirs, keys)]).begin("bad")
            ours.settimeout(_SECONDS)
            with suppress(ConnectionError):
                ours.sendall(data)
                ours.shutdown(socket.SHUT_WR)
            with suppress(ConnectionError):
                while ours.recv(1 << 16):
                    pass
            limit = time.monotonic() + _SECONDS
            while self.owner.lost == lost:
                if time.monotonic() > limit:
                    raise Finding("a lane ended and nobody was told")
                time.sleep(0)


def fuzz_lanes(frames: int, seed: int, *, sealed: bool = False) -> Verdicts:
    """Be many bad lanes, one after the other. Counted are requests and breaches."""
    rng = Forge(seed, LINK).rng
    with _Scene() as scene, trial("sealed lanes" if sealed else "lanes", seed) as verdicts:
        scene.owner.verdicts = verdicts
        session = 0
        while verdicts.judged < frames:
            if session % 200 == 0:
                scene.look()
            session += 1
            said = b"".join(_lane_frame(rng, number) for number in range(1, 1 + rng.randrange(1, 25)))
            said = mutated(said, rng) if rng.random() < 0.3 else said
            scene.speak(*_sealed(said, rng) if sealed else (said,))
        scene.look()
        if not scene.owner.granted:
            raise Finding(f"lanes, seed {seed}: no request of {verdicts.judged} was granted: nothing was tried")
    return verdicts


def _sealed(said: bytes, rng: random.Random) -> tuple[bytes, Keys]:
    """Return records of what is said, sometimes changed on their way, and the keys of the end that opens them."""
    with closing(Sealer(NEAR_KEYS[0])) as sealer:
        records = sealer.seal(said, rng.choice((1, 100, 5000, MAX_RECORD)))
        if rng.random() < 0.1:
            records += sealer.record(rng.randbytes(rng.choice((0, MAX_RECORD, MAX_RECORD + 1))))
    return mutated(records, rng) if rng.random() < 0.1 else records, FAR_KEYS


def _lane_frame(rng: random.Random, number: int) -> bytes:
    kind = rng.choice((READ, READ, READ, WRITE, WRITE, DATA, RESULT) if rng.random() < 0.1 else (READ, WRITE))
    meta, payload = b"", b""
    if kind in (READ, WRITE):
        start, nbytes, count = rng.randrange(_EXTENT), rng.randrange(512), rng.randrange(1, 4)
        plan = Plan(0, 0, count, plan_row(start, start, nbytes), False, nbytes * count)
        meta = encode_request(b"mine" if rng.random() < 0.9 else b"yours", _EXTENT, plan, kind == WRITE)
        if rng.random() < 0.2:
            meta = mutated(meta, rng)
        payload = bytes(plan.nbytes) if kind == WRITE else b""
    size = len(payload) if rng.random() < 0.97 else rng.choice((0, 1, 2**48, 2**48 + 1, 2**64 - 1))
    length = len(meta) if rng.random() < 0.97 else rng.choice((0, 1, 1 << 20, (1 << 20) + 1, 2**64 - 1))
    number = number if rng.random() < 0.97 else rng.choice((0, 1, 2, 2**64 - 1))
    return HEADER.pack(MAGIC, kind, 0, 0, number, length, size, 0) + meta + payload


def fuzz_lane_handles(frames: int, seed: int) -> Verdicts:
    """Ask the owner of real caches for memory by handles that it never gave out, over a real link."""
    rng = Forge(seed, LINK).rng
    ours, theirs = socket.socketpair()
    with Stage(rca=True) as stage, trial("lane handles", seed) as verdicts, ours:
        stage.publish()
        link, owner = join(stage, theirs, 1), stage.probe.transport("tcp").lanes.owner
        entries, _, _ = stage.engine.caches.registry.snapshot()
        guards = {each.cache_id: [each.guard.slot, each.guard.generation] for each in entries}
        geometries = [msgspec.to_builtins(each.geometry) for each in entries]
        target = stage.engine.target
        plan = Plan(0, 0, 4, plan_row(0, 0, 48), False, 192)

        def ask_many() -> None:
            for _ in range(500):
                write = rng.random() < 0.5
                if rng.random() < 0.1:
                    target.on_release(link, Release(_pin_name(rng), 0, rng.randrange(5)))
                handle = _key_handle(rng, geometries) if rng.random() < 0.3 else _handle(rng, guards)
                try:
                    grant = owner.on_move(link, MoveRequest(handle, 384, plan, write))
                except LLMException as error:
                    verdicts.refuse(error)
                else:
                    if not grant.guards:
                        raise Finding("memory was granted without a guard")
                    verdicts.take(grant)

        while verdicts.judged < frames:
            stage.probe.on_control(ask_many)
        ours.close()
        stage.settled()
    return verdicts


def _handle(rng: random.Random, true: dict[int, list[int]]) -> bytes:
    """Return a handle; ``true`` are the guards of the caches that there are, by id."""
    guards = [[rng.randrange(24), rng.randrange(1, 6)] for _ in range(rng.randrange(1, 4))]
    cache_id = rng.randrange(5)
    if rng.random() < 0.1:
        guards[0] = list(true.get(cache_id, guards[0]))
    fields: list[object] = [0, cache_id, rng.choice((0, 0, 0, rng.randrange(9))), guards]
    if rng.random() < 0.1:
        guards[0][rng.randrange(2)] = wild(rng)
    return _spoiled(fields, rng)


def _key_handle(rng: random.Random, geometries: list[Any]) -> bytes:
    """Return a handle that names a key and what its cache is taken to be, one of ``geometries`` for example."""
    geometry = list(rng.choice(geometries))
    if rng.random() < 0.1:
        geometry[rng.randrange(len(geometry))] = wild(rng)
    reported = rng.choice((0, 0, 0, 1 << 40))
    return _spoiled([1, [0, rng.randrange(9), 0], geometry, _pin_name(rng), rng.randrange(60_000), reported], rng)


def _pin_name(rng: random.Random) -> int:
    return FIRST_PEER_CHOSEN_PIN + rng.randrange(256)


def _spoiled(fields: list[object], rng: random.Random) -> bytes:
    if rng.random() < 0.2:
        fields[rng.randrange(len(fields))] = wild(rng)
    data = msgspec.msgpack.encode(fields)
    return mutated(data, rng) if rng.random() < 0.2 else data


def fuzz_lane_greetings(frames: int, seed: int) -> Verdicts:
    """Begin lanes with anything: a token, cut off or too long, in any pieces."""
    rng = Forge(seed, LINK).rng

    async def run(verdicts: Verdicts) -> None:
        while verdicts.judged < frames:
            greeting = rng.randbytes(TOKEN_BYTES)
            said = mutated(greeting, rng) if rng.random() < 0.6 else greeting
            ours, theirs = socket.socketpair()
            with ours, theirs:
                theirs.setblocking(False)
                ours.send(said)
                ours.shutdown(socket.SHUT_WR)
                try:
                    token = await read_exactly(asyncio.get_running_loop(), theirs, TOKEN_BYTES, "lane greeting")
                except ProtocolError as error:
                    verdicts.refuse(error)
                    continue
                rest = theirs.recv(1 << 16)
            if token + rest != said:
                raise Finding(f"{said!r} was read as {token!r}, and {rest!r} was left for the engine")
            verdicts.accepted["greeting"] += 1

    with trial("lane greetings", seed) as verdicts:
        asyncio.run(run(verdicts))
    return verdicts


TARGETS: Final[Targets] = {
    "lanes": (0.03, fuzz_lanes),
    "sealed lanes": (0.015, lambda frames, seed: fuzz_lanes(frames, seed, sealed=True)),
    "lane handles": (0.03, fuzz_lane_handles),
    "lane greetings": (0.03, fuzz_lane_greetings),
}
