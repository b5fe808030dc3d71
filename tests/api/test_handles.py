"""Handles know the instance that made them: no call resolves a handle of another one, or of an earlier init, by its
number."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest

from llm_datadist import (
    Cache,
    CacheKeyByIdAndIndex,
    KvCache,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.errors import CacheError, StateError
from tests.support.ends import LocalEnd
from tests.support.layers import Always
from tests.support.linking import SUCCESS, info
from tests.support.memory import cpu_cache
from tests.support.moves import BLOCKS, Spec, Use, cache_id, make, picture, same_bytes, show
from tests.support.v1 import POOL, desc, kv_make
from tests.support.world import World, baseline, make_config, settled

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist import LLMDataDist
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("Cache", "Cache.grant", "KvCache", "errors.CacheError")

CACHES: Final = {
    "blocks": Spec(blocks=True),
    "rows": Spec(),
    "host": Spec(blocks=True, placement=Placement.HOST),
}
SETTINGS: Final = {"enable_remote_cache_accessible": True}
PEER_ROWS, BLOCKS_HERE, ROWS_HERE = Use("peer's rows"), Use("own blocks"), Use("own rows")
#: Calls with a handle that is not of this instance, once for each argument that takes one.
CALLS: Final[list[tuple[str, tuple[Any, ...]]]] = [
    ("pull_cache", (PEER_ROWS, Use("rows"), 1)),
    ("pull_blocks", (BLOCKS, Use("blocks"), [1], [6])),
    ("push_cache", (PEER_ROWS, Use("rows"), 1)),
    ("push_blocks", (BLOCKS, Use("blocks"), [1], [6])),
    ("copy_cache", (Use("rows"), ROWS_HERE, 1, 2)),
    ("copy_cache", (ROWS_HERE, Use("rows"), 1, 2)),
    ("copy_blocks", (Use("blocks"), {1: [6]})),
    ("swap_blocks", (Use("host"), BLOCKS_HERE, {1: 6})),
    ("swap_blocks", (Use("cpu"), Use("blocks"), {1: 6})),
    ("transfer_cache_async", (Use("blocks"), Always(), Use("key config"), [1], [6])),
]
V1_CALLS: Final[dict[str, list[tuple[str, tuple[Any, ...]]]]] = {
    "DECODER": [
        ("pull_cache", (PEER_ROWS, Use("rows"), 1)),
        ("pull_blocks", (BLOCKS, Use("blocks"), [1], [6])),
        ("copy_cache", (Use("rows"), ROWS_HERE, 1, 2)),
        ("copy_cache", (ROWS_HERE, Use("rows"), 1, 2)),
        ("copy_blocks", (Use("blocks"), {1: [6]})),
        ("swap_blocks", (Use("cpu"), Use("blocks"), {1: 6})),
        ("get_cache_tensors", (Use("blocks"), 1)),
    ],
    "PROMPT": [("transfer_cache_async", (Use("rows"), Always(), [TransferConfig(9, [1, 1, 1, 1])]))],
}


@pytest.fixture
def worlds() -> Iterator[tuple[World, World]]:
    """Two instances of this process, clusters 2 and 3, not started; afterwards nothing may be left."""
    ends = LocalEnd("ours"), LocalEnd("theirs")
    before = ends[0].do(baseline)
    yield ends[0].world, ends[1].world
    for end in ends:
        end.stop()
    assert settled(before) == before


@pytest.fixture
def peer(children: tuple[ChildEnd, ChildEnd]) -> Iterator[ChildEnd]:
    """Cluster 1 in a process of its own, with blocks and rows to pull."""
    end = children[0]
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **SETTINGS)
    end.do(make, "blocks", Spec(blocks=True, blocks_key=BLOCKS), 1)
    end.do(make, "rows", Spec(), 2)
    yield end
    end.stop()


def again(datadist: LLMDataDist, **settings: Any) -> None:
    datadist.finalize()
    datadist.init(make_config(**settings))


def refuses(manager: Any, calls: list[tuple[str, tuple[Any, ...]]], known: dict[str, Any], *named: str) -> None:
    """Make each call; it has to name both instances, and in its awaited form at once."""
    for name, given in calls:
        args = [known[each.name] if isinstance(each, Use) else each for each in given]
        for form in (name, f"{name}_async"):
            if not hasattr(manager, form):
                continue
            with pytest.raises(CacheError) as caught:
                getattr(manager, form)(*args)
            assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
            text = str(caught.value)
            assert text.startswith(f"{name}: ")
            assert [word for word in named if word not in text] == []


@pytest.mark.parametrize("earlier", [False, True], ids=["of another instance", "of an earlier init"])
def test_a_handle_of_another_instance_or_of_an_earlier_init_is_refused(
    worlds: tuple[World, World], peer: ChildEnd, earlier: bool
) -> None:
    ours, theirs = worlds
    for number, world in enumerate((ours, theirs)):
        world.start("DECODER", 2 + number, make_config(**SETTINGS))
        for name, spec in CACHES.items():
            make(world, name, spec, number)
    foreign = dict((ours if earlier else theirs).caches)
    if earlier:
        old = incarnation(ours)
        again(ours.dd, **SETTINGS)
        for name, spec in CACHES.items():
            make(ours, name, spec, 5)
    maker = f"cluster 2 (incarnation {old})" if earlier else "cluster 3 (incarnation "
    named = f"cluster 2 (incarnation {incarnation(ours)})", maker
    assert ours.dd.link_clusters([info(1, peer.port)], 10_000) == SUCCESS
    rows = CacheKeyByIdAndIndex(1, peer.do(cache_id, "rows"), 0)
    known = foreign | {"own blocks": ours.caches["blocks"], "own rows": ours.caches["rows"], "peer's rows": rows}
    known["cpu"] = cpu_cache(ours, "cpu", CACHES["host"].desc)
    known["key config"] = [TransferWithCacheKeyConfig(BLOCKS, range(1), range(1))]
    before = picture(ours), [show(world, name) for world in worlds for name in CACHES]
    there = [peer.do(show, name) for name in ("blocks", "rows")]
    refuses(ours.cm, CALLS, known, *named)
    for world_bytes, was in zip((show(w, n) for w in worlds for n in CACHES), before[1], strict=True):
        same_bytes(world_bytes, was)
    for name, was in zip(("blocks", "rows"), there, strict=True):
        same_bytes(peer.do(show, name), was)
    assert picture(ours) == before[0]


def incarnation(world: World) -> str:
    """Return what errors say of the present init."""
    return world.caches["blocks"].grant([0], 60.0).incarnation.hex()[:8]


@pytest.mark.parametrize("earlier", [False, True], ids=["of another instance", "of an earlier init"])
@pytest.mark.parametrize("role", V1_CALLS)
def test_a_v1_handle_of_another_instance_or_of_an_earlier_init_is_refused(
    worlds: tuple[World, World], role: str, earlier: bool
) -> None:
    ours, theirs = worlds
    listen = {"listen_ip_info": "127.0.0.1:0"} if role == "PROMPT" else {}
    for number, world in enumerate((ours, theirs)):
        world.start(role, 2 + number, make_config(**POOL | listen))
        kv_make(world, "blocks", desc(), number, blocks=True)
        kv_make(world, "rows", desc(), number)
    owner = ours if earlier else theirs
    foreign = {name: owner.memory[f"kv {name}"] for name in ("blocks", "rows")}
    if earlier:
        again(ours.dd, **POOL | listen)
        kv_make(ours, "blocks", desc(), 5, blocks=True)
        kv_make(ours, "rows", desc(), 6)
    memory = np.zeros((4, 8 * 48), np.uint8)
    cpu = KvCache.create_cpu_cache(CACHES["host"].desc, [row.ctypes.data for row in memory])
    known = foreign | {"own rows": ours.memory["kv rows"], "cpu": cpu, "peer's rows": CacheKeyByIdAndIndex(1, 1, 0)}
    before = [show(world, name) for world in worlds for name in foreign]
    refuses(ours.dd.kv_cache_manager, V1_CALLS[role], known, "cluster 2 (", f"cluster {2 if earlier else 3} (")
    for now, was in zip((show(world, name) for world in worlds for name in foreign), before, strict=True):
        same_bytes(now, was)
    assert not memory.any()


def test_a_cache_over_user_memory_swaps_with_every_instance(worlds: tuple[World, World]) -> None:
    cpu: Cache | None = None
    for number, world in enumerate(worlds):
        world.start("DECODER", 2 + number, make_config())
        source = make(world, "blocks", CACHES["blocks"], 7 + number)
        cpu = cpu or cpu_cache(world, "cpu", CACHES["host"].desc)
        world.cm.swap_blocks(world.caches["blocks"], cpu, {3: 5})
        same_bytes([tensor[5] for tensor in show(worlds[0], "cpu")], [tensor[3] for tensor in source])


def test_no_two_inits_of_a_process_use_one_cache_id(worlds: tuple[World, World]) -> None:
    ids = []
    for number, world in enumerate(worlds):
        world.start("MIX", 2 + number, make_config())
    for _ in range(2):
        for world in worlds:
            make(world, "blocks", CACHES["blocks"], 1)
            make(world, "registered", Spec(memory="private"), 1)
            ids += [world.caches[name].cache_id for name in ("blocks", "registered")]
            stale = world.caches["registered"]
            again(world.dd)
            kept = make(world, "registered", Spec(memory="private"), 2)
            world.cm.unregister_cache(stale.cache_id)  # which names nothing here
            same_bytes(show(world, "registered"), kept)
            assert world.dd.statistics().caches.registered == 1
            ids.append(world.caches["registered"].cache_id)
    assert len(set(ids)) == len(ids)


def test_a_grant_of_a_handle_from_before_finalize_says_that_it_is_finalized(worlds: tuple[World, World]) -> None:
    world = worlds[0]
    world.start("MIX", 2, make_config())
    make(world, "blocks", CACHES["blocks"], 1)
    stale = world.caches["blocks"]
    given = stale.grant([1], 60.0)
    again(world.dd)
    make(world, "blocks", CACHES["blocks"], 1)
    with pytest.raises(StateError, match="finalized") as caught:
        stale.grant([1], 60.0)
    assert caught.value.status_code is LLMStatusCode.LLM_ENGINE_FINALIZED
    assert (given.active, given.end) == (False, "finalized")
    given.revoke()
