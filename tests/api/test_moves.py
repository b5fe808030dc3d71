"""Pulls and pushes by row and by block: one move per row of a table, every byte of both caches compared with a NumPy
twin (interface §6.10 to §6.13). The arithmetic of ranges: tests/unit/test_layout.py."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import FrameType
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llm_datadist import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex
from tests.support.kinds import Bytes, Pair, World
from tests.support.moves import (
    BLOCKS,
    Spec,
    Use,
    cache_id,
    call,
    forget,
    make,
    moved,
    picture,
    refill,
    same_bytes,
    show,
    wait_until,
)
from tests.support.pairs import TRANSPORTS, pair_of

pytestmark = pytest.mark.covers("LayerSelection", "CacheManager: pull_blocks pull_cache push_blocks push_cache")

KEYS = REQUEST, PREFIX = CacheKey(1, 10), CacheKey(1, 2**64 - 1, prefix_id=11)
ROWS, OWN_ROWS = Spec(rows=4, keys=KEYS), Spec(rows=6)
PAGED, OWN_BLOCKS = Spec(rows=8, blocks=True, blocks_key=BLOCKS), Spec(rows=6, blocks=True)
LONG_ROWS = Spec(rows=3, stride=5 * 48 - 7, keys=KEYS)  # five blocks, the last one short
NAMED = Spec(keys=(CacheKey(1, 7), CacheKey(1, 0)))

Pairs = list[tuple[int, int]]
Key = CacheKey | BlocksCacheKey | CacheKeyByIdAndIndex


@dataclass(frozen=True)
class Move:
    """One call between ``there`` and ``here``, a cache of the end that calls, and what becomes of the destination.

    ``key`` names ``there``; a number is a row of it by cache id. ``pairs`` are (destination, source) rows or blocks,
    ``tensors`` the same of tensors (None: each to its like), ``nbytes`` what moves of each row (None: all that fits).
    ``cut`` is the row of the source whose pieces are the source blocks. ``args`` are the block lists unless given.
    """

    method: str
    key: Key | int
    pairs: Pairs
    args: tuple[Any, ...] | None = None
    there: Spec = PAGED
    here: Spec = OWN_BLOCKS
    ranges: dict[str, Any] = field(default_factory=dict)
    tensors: Pairs | None = None
    nbytes: int | None = None
    cut: int | None = None
    by_prompt: bool = False

    @property
    def modes(self) -> list[bool]:
        """Without and with remote cache access: where the call is allowed."""
        if self.method.startswith("push"):
            return [True]
        return [False] if isinstance(self.key, CacheKey) else [False, True]

    def twin(self, dst: Bytes, src: Bytes) -> Bytes:
        """Return what the destination must hold afterwards."""
        if self.cut is None:
            return moved(dst, src, self.pairs, self.tensors, self.nbytes)
        unit = self.here.stride
        for to, piece in self.pairs:
            part = [tensor[self.cut : self.cut + 1, piece * unit : (piece + 1) * unit] for tensor in src]
            dst = moved(dst, part, [(to, 0)], self.tensors)
        return dst


def pull_row(key: CacheKey | int, pair: tuple[int, int], *args: int, there: Spec = ROWS, **more: Any) -> Move:
    return Move("pull_cache", key, [pair], (pair[0], *args), there, **({"here": OWN_ROWS} | more))


def push_row(pair: tuple[int, int], there: Spec = ROWS, **more: Any) -> Move:
    return Move("push_cache", pair[0], [pair], (pair[1],), there, **({"here": OWN_ROWS} | more))


def push_request_0(cache_id: int) -> Move:
    return Move("push_cache", CacheKeyByIdAndIndex(1, cache_id), [(1, 5)], (5,), NAMED, OWN_ROWS)


def layers(src: range | None, dst: range | None, per_layer: int = 2) -> dict[str, Any]:
    return {"src_layer_range": src, "dst_layer_range": dst, "tensor_num_per_layer": per_layer}


AT_2: Final = CacheKey(2, 7)
ONE_BY_ONE: Final = layers(range(4, 6), range(1, 3), 1)
SHIFTED: Final[Pairs] = [(1, 4), (2, 5)]
SCATTERED: Final[Pairs] = [(4, 1), (5, 2), (0, 5)]
PIECES: Final[Pairs] = [(4, 0), (5, 1), (0, 2), (2, 3), (1, 4)]


def move_layers(method: str, ranges: dict[str, Any], tensors: Pairs) -> Move:
    there, here = Spec(8, blocks=True, blocks_key=BLOCKS), Spec(2, blocks=True)
    return Move(method, BLOCKS, SCATTERED, there=there, here=here, ranges=ranges, tensors=tensors)


#: Over all transports, with and without remote cache access where the call allows both.
EVERYWHERE: Final = {
    "pull a row by request id": pull_row(REQUEST, (4, 0)),
    "pull part of a row": pull_row(1, (1, 1), 17, nbytes=17),
    "i1 the linked end pulls a row": pull_row(AT_2, (5, 0), there=Spec(keys=(AT_2,)), by_prompt=True),
    "r14 pull layers of a row": pull_row(2, (3, 2), there=Spec(6), here=Spec(3), ranges=ONE_BY_ONE, tensors=SHIFTED),
    "r14 pull layers of blocks": move_layers("pull_blocks", layers(range(3, 4), None), [(0, 6), (1, 7)]),
    "i8 a row goes into blocks": Move("pull_blocks", PREFIX, PIECES, there=LONG_ROWS, cut=1),
    "i8 a row goes into blocks by cache id": Move("pull_blocks", 2, PIECES, there=LONG_ROWS, cut=2),
    "push a row": push_row((3, 5)),
    "i11 the linked end pushes a row": push_row((2, 4), by_prompt=True),
    "r14 push layers of a row": push_row((3, 2), Spec(3), here=Spec(6), ranges=ONE_BY_ONE, tensors=SHIFTED),
    "r14 push layers of blocks": move_layers("push_blocks", layers(None, range(3, 4)), [(6, 0), (7, 1)]),
}
#: Over one transport.
ONCE: Final = {
    "pull a row by default": Move("pull_cache", REQUEST, [(0, 0)], (), ROWS, OWN_ROWS),
    "i7 a longer row there is truncated": pull_row(1, (1, 1), there=Spec(stride=80), here=Spec(4, 2, 32)),
    "size lets a shorter row in": pull_row(1, (2, 1), 32, there=Spec(stride=32), here=Spec(4, 3, 80), nbytes=32),
    "r14 an empty range is none": pull_row(1, (3, 1), ranges=layers(range(0), range(5, 5))),
    "pull blocks of another model": Move(
        "pull_blocks", BlocksCacheKey(1, 9), [(3, 3)], there=Spec(blocks=True, blocks_key=BlocksCacheKey(77, 9))
    ),
    "i8 a row shorter than a block": Move("pull_blocks", 0, [(2, 0)], there=Spec(rows=3, stride=5), cut=0),
    "push a row by default": Move("push_cache", 0, [(0, 0)], (), ROWS, OWN_ROWS),
    "i7 a longer row there keeps its tail": push_row((2, 1), Spec(rows=3, stride=80), here=Spec(rows=2, stride=32)),
    "push to cache id 0: request 0 of model 0": push_request_0(0),
    "push to cache id -1: request 0 of model 0": push_request_0(-1),
    "push blocks by cache id": Move("push_blocks", 0, SCATTERED, (np.array([1, 2, 5]), (4, np.int32(5), False))),
}


def _params() -> Iterator[Any]:
    """Every move over its transports, in its modes: (transport, remote access, memory of a GPU) is one scene."""
    for rca, gpu in product((False, True), (False, True)):
        for transport in TRANSPORTS:
            moves = {name: move for name, move in EVERYWHERE.items() if rca in move.modes}
            if transport == ("tcp" if rca else "shm"):
                moves |= {name: move for name, move in ONCE.items() if rca is move.modes[0]}
            scene = f"{transport}-{'rca' if rca else 'plain'}{'-gpu' if gpu else ''}"
            for name, move in moves.items():
                yield pytest.param((transport, rca, gpu), move, id=f"{scene}-{name}")


#: What no move may touch, at both ends: the same keys of other models and kinds.
BESIDE: Final = {
    "rows": Spec(rows=3, keys=(CacheKey(1, 10, model_id=5), CacheKey(1, 11), CacheKey(1, 2**64 - 1, prefix_id=10))),
    "blocks": Spec(blocks=True, blocks_key=BlocksCacheKey(1, 8)),
}


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two linked ends with other caches; one at a time, since the child processes are those of all tests."""
    transport, rca, gpu = request.param
    for pair in pair_of(request, transport, gpu=gpu):
        pair.start(rca=rca)
        before = [(end, end.do(_beside), end.do(_left)) for end in (pair.prompt, pair.decoder)]
        yield pair
        for end, caches, left in before:
            wait_until(lambda end=end, left=left: end.do(_left) == left)  # type: ignore[misc]  # bound at once
            for name, content in caches.items():
                same_bytes(end.do(show, name), content)


def _beside(world: World) -> dict[str, Bytes]:
    return {name: make(world, name, spec, seed) for seed, (name, spec) in enumerate(BESIDE.items(), 70)}


def _left(world: World) -> Any:
    now = picture(world)
    return now.keys, now.caches, now.pins, [each.used_bytes for each in now.pools]


def _give_back(world: World, spec: Spec) -> None:
    forget(world, "kv")
    for key in spec.keys:
        world.cm.remove_cache_key(key)


def run(pair: Pair, move: Move) -> None:
    """Make the caches, move, compare; what stays named moves twice, the second time by the kept answer."""
    caller, owner = (pair.prompt, pair.decoder) if move.by_prompt else (pair.decoder, pair.prompt)
    source, target = (caller, owner) if move.method.startswith("push") else (owner, caller)
    src, dst = [src for _, src in move.pairs], [dst for dst, _ in move.pairs]
    args = move.args if move.args is not None else ([] if move.cut is not None else src, dst)
    stays = not isinstance(move.key, CacheKey) and move.there is not NAMED
    owner.do(make, "kv", move.there, 1)
    caller.do(make, "kv", move.here, 2)
    try:
        key = move.key
        if isinstance(key, int):
            key = CacheKeyByIdAndIndex(owner.cluster_id, owner.do(cache_id, "kv"), key)
        content = source.do(show, "kv")
        for turn in range(2 if stays else 1):
            before = target.do(refill, "kv", 10 + turn)
            caller.do(partial(call, **move.ranges), move.method, key, Use("kv"), *args)
            same_bytes(target.do(show, "kv"), move.twin(before, content))
            same_bytes(source.do(show, "kv"), content)
    finally:
        caller.do(_give_back, move.here)
        owner.do(_give_back, move.there)


@pytest.mark.parametrize(("scene", "move"), list(_params()), indirect=["scene"], scope="module")
def test_a_move_writes_the_addressed_bytes_and_no_others(scene: Pair, move: Move) -> None:
    run(scene, move)


@settings(max_examples=20)
@given(
    method=st.sampled_from(["pull_blocks", "push_blocks"]),
    tensors=st.integers(1, 5),
    rows=st.tuples(st.integers(1, 60), st.integers(1, 60)),
    stride=st.sampled_from([1, 7, 48, 512, 4096, 5000]),
    seed=st.integers(0, 2**32 - 1),
)
def _random_blocks(pair: Pair, method: str, tensors: int, rows: tuple[int, int], stride: int, seed: int) -> None:
    here, there = rows
    dst_rows, src_rows = (there, here) if method == "push_blocks" else (here, there)
    random = np.random.default_rng(seed)
    pairs = [(int(d), int(s)) for d, s in random.integers(0, (dst_rows, src_rows), (int(random.integers(1, 200)), 2))]
    theirs = Spec(tensors, there, stride, blocks=True, blocks_key=BLOCKS)
    run(pair, Move(method, BLOCKS, pairs, there=theirs, here=Spec(tensors, here, stride, blocks=True)))


@pytest.mark.parametrize(
    "scene", list(product(TRANSPORTS, [True], [False, True])), indirect=True, scope="module", ids=str
)
def test_r26_random_blocks_of_random_shapes(scene: Pair) -> None:
    _random_blocks(scene)


def _frames(world: World) -> list[str]:
    """Pull a block five times; return the Python functions that the last pull called."""
    called: list[str] = []

    def record(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname)

    pull = partial(world.cm.pull_blocks, BLOCKS, world.caches["kv"], [3], [5])
    for _ in range(4):
        pull()
    sys.setprofile(record)
    try:
        pull()
    finally:
        sys.setprofile(None)
    return called


_MOST_FRAMES: Final = {"shm": 25, "tcp": 30}


@pytest.mark.parametrize("scene", list(product(_MOST_FRAMES, [True], [False, True])), indirect=True, scope="module")
def test_a_warm_pull_of_a_block_calls_few_python_functions(scene: Pair) -> None:
    """docs/notes/one-pull.md says what a frame costs."""
    scene.prompt.do(make, "kv", PAGED, 1)
    scene.decoder.do(make, "kv", OWN_BLOCKS, 2)
    try:
        called = scene.decoder.do(_frames)
    finally:
        scene.decoder.do(_give_back, OWN_BLOCKS)
        scene.prompt.do(_give_back, PAGED)
    assert len(called) <= _MOST_FRAMES[scene.transport], called
