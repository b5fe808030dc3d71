"""One end alone; and the scene of the tables of bad input: two linked ends full of caches, made once per file: no row
changes it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, Placement
from tests.support.moves import Spec, make
from tests.support.pairs import Pair, pair_of
from tests.support.world import World, fill, small_pool

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import LocalEnd


@pytest.fixture
def world(end: LocalEnd) -> World:
    """An initialised end alone, with both pools, pages of 4 KiB."""
    end.start("PROMPT", 1)
    return end.world


#: The prompt's caches by id, in the order of making: all of one pool, rows of 32 bytes unless the name says otherwise.
PROMPT_CACHES: Final[dict[str, Spec]] = {
    "rows": Spec(4, 3, 32, keys=(CacheKey(1, 10), CacheKey(1, 11), CacheKey(1, 12))),
    "paged": Spec(4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 0)),
    "narrow rows": Spec(4, 3, 16, keys=(CacheKey(1, 30), CacheKey(1, 0, model_id=1))),
    "two tensors": Spec(2, 3, 32, keys=(CacheKey(1, 40),)),
    "wide blocks": Spec(4, 6, 64, blocks=True, blocks_key=BlocksCacheKey(1, 1)),
    "two paged tensors": Spec(2, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 2)),
    "hidden rows": Spec(4, 3, 32, memory="private", accessible=False),
    "hidden blocks": Spec(4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(1, 3), memory="private", accessible=False),
    "five tensors": Spec(5, 3, 32, keys=(CacheKey(1, 50),)),
    "prefix": Spec(4, 3, 32, keys=(CacheKey(1, 2**64 - 1, 0, 20),)),
}

#: The decoder's, which is the end that calls.
DECODER_CACHES: Final[dict[str, Spec]] = {
    "rows": Spec(4, 3, 32, keys=(CacheKey(2, 1),)),
    "more rows": Spec(4, 5, 32),
    "narrow rows": Spec(4, 3, 16),
    "two tensors": Spec(2, 3, 32),
    "five tensors": Spec(5, 3, 32),
    "paged": Spec(4, 6, 32, blocks=True, blocks_key=BlocksCacheKey(2, 0)),
    "more blocks": Spec(4, 6, 32, blocks=True),
    "host": Spec(4, 8, 32, blocks=True, placement=Placement.HOST, memory="private"),
    "freed rows": Spec(4, 3, 32),
    "freed blocks": Spec(4, 6, 32, blocks=True),
    "waiting": Spec(4, 3, 32, keys=(CacheKey(2, 50),)),
}


def _populate(world: World, specs: dict[str, Spec]) -> None:
    for seed, (name, spec) in enumerate(specs.items()):
        make(world, name, spec, seed)


def _populate_decoder(world: World) -> None:
    """Beside those of the table: one of another element type, two that were given back, one that waits for a pull."""
    _populate(world, DECODER_CACHES)
    world.caches["signed"] = world.cm.allocate_cache(CacheDesc(4, [3, 32], DataType.DT_INT8))
    fill(world.caches["signed"], 99)
    world.cm.deallocate_cache(world.caches["freed rows"])
    world.cm.deallocate_blocks_cache(world.caches["freed blocks"])
    world.cm.deallocate_cache(world.caches["waiting"])


def _scene(request: pytest.FixtureRequest, transport: str, *, rca: bool) -> Iterator[Pair]:
    for pair in pair_of(request, transport):
        pair.start(rca=rca, **small_pool())
        pair.prompt.do(_populate, PROMPT_CACHES)
        pair.decoder.do(_populate_decoder)
        yield pair


@pytest.fixture(scope="module")
def scene(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Two linked ends; one at a time, since the child processes are those of all tests. See :data:`PLAIN`."""
    yield from _scene(request, "shm", rca=request.param)


#: Without and with remote cache access; neither has a host pool.
PLAIN: Final = pytest.mark.parametrize("scene", [pytest.param(False, id="shm")], indirect=True, scope="module")
ACCESSIBLE: Final = pytest.mark.parametrize("scene", [pytest.param(True, id="shm")], indirect=True, scope="module")


@pytest.fixture
def fresh_scene(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """The same in this process, for a test that does change it; with remote cache access."""
    yield from _scene(request, "inproc", rca=True)
