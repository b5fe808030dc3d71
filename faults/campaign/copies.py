"""Copies inside one process, judged like the others: copy_blocks, swap_blocks, copy_cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from random import Random

    from faults.campaign.memory import Destination
    from faults.campaign.scene import Scene


def copy_inside(scene: Scene, rng: Random, blocks: Destination, rows: Destination, host: Destination) -> None:
    match rng.randrange(3):
        case 0:
            _copy_blocks(scene, rng, blocks)
        case 1:
            _swap_blocks(scene, rng, *((blocks, host) if rng.random() < 0.5 else (host, blocks)))
        case _:
            _copy_cache(scene, rng, rows)


def _copy_blocks(scene: Scene, rng: Random, blocks: Destination) -> None:
    one, two, three = rng.sample(range(blocks.shape.rows), 3)
    outcome = scene.call("copy_blocks", scene.budget, scene.cm.copy_blocks, blocks.cache, {one: [two, three]})
    new = blocks.expected[:, [one, one]] if outcome is None else None
    blocks.settle("copy_blocks", range(blocks.shape.tensors), (two, three), new)


def _swap_blocks(scene: Scene, rng: Random, source: Destination, target: Destination) -> None:
    from_, to = (rng.sample(range(each.shape.rows), 3) for each in (source, target))
    pairs = dict(zip(from_, to, strict=True))
    outcome = scene.call("swap_blocks", 0.0, scene.cm.swap_blocks, source.cache, target.cache, pairs)
    new = source.expected[:, from_] if outcome is None else None
    target.settle("swap_blocks", range(target.shape.tensors), to, new)


def _copy_cache(scene: Scene, rng: Random, rows: Destination) -> None:
    source, target = rng.sample(range(rows.shape.rows), 2)
    outcome = scene.call("copy_cache", scene.budget, scene.cm.copy_cache, rows.cache, rows.cache, target, source)
    new = rows.expected[:, [source]] if outcome is None else None
    rows.settle("copy_cache", range(rows.shape.tensors), (target,), new)
