"""omni-npu: sleep mode, prompts in pipeline stages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, LLMRole
from tests.clients.kv import contents, drive, shown
from tests.clients.omni import (
    BLOCK_BYTES,
    BLOCKS,
    DST,
    KINDS,
    LAYERS,
    PROMPT_ID,
    SRC,
    OmniManager,
    Prompt,
    holds,
    register,
    start,
    told,
)
from tests.support.moves import moved, picture, same_bytes

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("omni-npu")


def test_sleep_mode_the_prompts_object_is_initialised_again_with_the_saved_options(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prompt, decoder = ends
    port = prompt.do(start, True, 10)
    decoder.do(start, False, 20)
    for nap in range(2):
        seed = 10 + 100 * nap
        decoder.do(drive, "pull_kv", told(port), SRC, DST)
        holds(decoder, 20 + nap, seed)
        decoder.do(drive, "close_link", told(port))
        decoder.do(drive, "unregister")
        assert decoder.do(picture).caches.registered == 0
        prompt.do(drive, "sleep")
        with pytest.raises(RuntimeError, match="link to "):
            decoder.do(drive, "link", told(port))
        prompt.do(drive, "wake")
        port = prompt.do(listening)
        prompt.do(register, seed + 100)
        assert prompt.do(registered_ids) == [1, 2, 3], "ids begin at 1 again"
        decoder.do(register, 20 + nap + 1)
    decoder.do(drive, "pull_kv", told(port), SRC, DST)
    holds(decoder, 22, 210)


def listening(world: World) -> int | None:
    return world.dd.listen_port


def registered_ids(world: World) -> list[int]:
    return [cache.cache_id for cache in world.memory["client"].caches]


# --- pipeline parallel prompts: keyless caches over parts of the same tensors ----------------------------------------


def start_stage(world: World, stage: int, seed: int, layers: int) -> int | None:
    """One stage of a prompt: it has its own layers only, under a cluster id of its own."""
    manager = OmniManager(LLMRole.PROMPT, PROMPT_ID + stage)
    world.memory["client"] = manager
    world.dd = manager.initialise(0)
    world.memory["kv"] = contents(seed, layers, BLOCKS, BLOCK_BYTES)
    manager.register([world.memory["kv"]])
    return world.dd.listen_port


def register_parts(world: World, parts: list[tuple[int, int]]) -> None:
    """After linking: a keyless cache for the layers of each stage, over tensors that are registered already."""
    manager, tensors = world.memory["client"], world.memory["kv 0"]
    world.memory["parts"] = [manager.register_one(tensors[first:last], None) for first, last in parts]


def pull_part(world: World, part: int, prompt: Prompt) -> None:
    key = BlocksCacheKey(prompt.cluster_id, 0)
    world.cm.pull_blocks(key, world.memory["parts"][part], SRC, DST)


def unregister_parts(world: World) -> None:
    for cache in world.memory["parts"]:
        world.cm.unregister_cache(cache.cache_id)


def test_overlapping_keyless_caches_over_parts_of_the_tensors_registered_after_linking(processes: Processes) -> None:
    parts = [(0, 2), (2, 4), (1, 3), (0, 4)]  # two topologies and the whole: every address is in three caches
    stages = [processes.born(f"stage {stage}") for stage in range(len(parts))]
    decoder = processes.born("decoder")
    decoder.do(start, False, 20)
    told_of = []
    for stage, (end, (first, last)) in enumerate(zip(stages, parts, strict=True)):
        port: Any = end.do(start_stage, stage, 50 + stage, last - first)
        told_of.append(Prompt(PROMPT_ID + stage, "127.0.0.1", port, 1))
        decoder.do(drive, "link", told_of[-1])
    decoder.do(register_parts, parts)

    expected = contents(20, LAYERS, BLOCKS, BLOCK_BYTES)
    for stage, (first, last) in enumerate(parts):
        decoder.do(pull_part, stage, told_of[stage])
        source = contents(50 + stage, last - first, BLOCKS, BLOCK_BYTES)
        tensors = [(first + t, t) for t in range(last - first)]
        expected = moved(expected, source, zip(DST, SRC, strict=True), tensors)
        same_bytes(decoder.do(shown, "kv 0"), expected)

    decoder.do(unregister_parts)  # another topology; the caches of all layers stay
    assert decoder.do(picture).caches.registered == KINDS
    decoder.do(register_parts, [(3, 4)])
    decoder.do(unregister_parts)
    same_bytes(decoder.do(shown, "kv 0"), expected)
