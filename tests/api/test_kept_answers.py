"""What is kept beside the answer about a remote cache is never taken for another local cache, or for other layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist.errors import CacheMismatch, ParamError
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

SOURCE: Final = Spec(tensors=4, rows=8, blocks=True, blocks_key=BLOCKS)
#: Local caches that fit the source: with as many blocks, fewer, more.
FITTING: Final = {"same": Spec(4, 8, blocks=True), "short": Spec(4, 3, blocks=True), "long": Spec(4, 12, blocks=True)}
HALF: Final = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}


def made(pair: Pair, names: Any) -> dict[str, Any]:
    """Start, make the source and the local caches, pull into the first one: from then on the answer is kept."""
    pair.start(rca=True)
    first, *_ = shown = {
        name: pair.decoder.do(make, name, spec, 10 + number) for number, (name, spec) in enumerate(names.items())
    }
    shown["source"] = pair.prompt.do(make, "kv", SOURCE, 1)
    pull(pair, first, [0], [0])
    shown[first] = moved(shown[first], shown["source"], [(0, 0)])
    return shown


def pull(pair: Pair, name: str, src: list[int], dst: list[int], **layers: range) -> None:
    pair.decoder.do(_pull, name, src, dst, layers)


def _pull(world: World, name: str, src: list[int], dst: list[int], layers: dict[str, range]) -> None:
    call(world, "pull_blocks", BLOCKS, Use(name), src, dst, **layers)


def _pull_refused(world: World, name: str, src: list[int], dst: list[int], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        _pull(world, name, src, dst, {})


def test_one_answer_serves_local_caches_of_other_sizes_in_turn(pair: Pair) -> None:
    shown = made(pair, FITTING)
    for round_ in range(2):
        for name, block in (("long", 11), ("short", 2), ("same", 7)):
            pull(pair, name, [round_ + 3], [block])
            shown[name] = moved(shown[name], shown["source"], [(block, round_ + 3)])
    for name in FITTING:
        same_bytes(pair.decoder.do(show, name), shown[name])
    same_bytes(pair.prompt.do(show, "kv"), shown["source"])


def test_a_block_that_only_the_cache_before_had_is_refused(pair: Pair) -> None:
    made(pair, {"long": FITTING["long"], "short": FITTING["short"]})
    pull(pair, "long", [1], [11])
    pair.decoder.do(_pull_refused, "short", [1], [11], ParamError, r"dst_blocks\[0\]=11")


@pytest.mark.parametrize(
    ("other", "error", "says"),
    [
        (Spec(4, 8, 96, blocks=True), CacheMismatch, "block sizes"),
        (Spec(2, 8, blocks=True), CacheMismatch, "num_tensors"),
    ],
)
def test_what_does_not_fit_is_refused_after_what_does(pair: Pair, other: Spec, error: Any, says: str) -> None:
    shown = made(pair, {"same": FITTING["same"], "other": other})
    pair.decoder.do(_pull_refused, "other", [1], [1], error, says)
    pull(pair, "same", [5], [6])
    same_bytes(pair.decoder.do(show, "same"), moved(shown["same"], shown["source"], [(6, 5)]))
    same_bytes(pair.decoder.do(show, "other"), shown["other"])


def test_layers_are_those_of_each_call(pair: Pair) -> None:
    shown = made(pair, {"same": FITTING["same"]})
    pull(pair, "same", [1], [2], **HALF)
    pull(pair, "same", [3], [4])
    pull(pair, "same", [5], [6], **HALF)
    wanted = moved(shown["same"], shown["source"], [(4, 3)])
    wanted = moved(wanted, shown["source"], [(2, 1), (6, 5)], [(0, 2), (1, 3)])
    same_bytes(pair.decoder.do(show, "same"), wanted)


def test_pulls_and_pushes_by_one_key_do_not_mix(pair: Pair) -> None:
    shown = made(pair, {"short": FITTING["short"]})
    source = shown["source"]
    for number in range(3):
        pair.decoder.do(call, "push_blocks", BLOCKS, Use("short"), [number], [number + 5])
        source = moved(source, shown["short"], [(number + 5, number)])
        pull(pair, "short", [number + 5, 4], [number, 1])
        shown["short"] = moved(shown["short"], source, [(number, number + 5), (1, 4)])
    same_bytes(pair.decoder.do(show, "short"), shown["short"])
    same_bytes(pair.prompt.do(show, "kv"), source)
