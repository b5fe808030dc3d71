"""sync_kv_timeout bounds transfers (interface R6, R7): phase, code, a link that stays usable, no pin left."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import DeadlineExceeded
from tests.support.ends import ChildEnd
from tests.support.frozen import freeze
from tests.support.gates import count_messages, releases, resolves, stopped
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.moves import Bytes

KEY, BUDGET_MS = CacheKey(1, 10), 700
ROWS, PAGED = Spec(keys=(KEY,)), Spec(blocks=True, blocks_key=BLOCKS)


@pytest.fixture
def frozen(shm_pair: Pair) -> Iterator[Pair]:
    """Two linked processes; whatever happens, the prompt goes on at the end."""
    yield shm_pair
    assert isinstance(shm_pair.prompt, ChildEnd)
    shm_pair.prompt.signal(signal.SIGCONT)


def stop(pair: Pair) -> None:
    freeze(pair.prompt)


def go_on(pair: Pair) -> None:
    assert isinstance(pair.prompt, ChildEnd)
    pair.prompt.signal(signal.SIGCONT)


def both(pair: Pair, source: Spec, target: Spec, **settings: Any) -> tuple[Bytes, Bytes]:
    pair.start(sync_kv_timeout=BUDGET_MS, **settings)
    pair.prompt.do(count_messages)
    return pair.prompt.do(make, "kv", source, 1), pair.decoder.do(make, "kv", target, 2)


def times_out(pair: Pair, phase: str, *args: Any) -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        pair.decoder.do(call, *args)
    error = caught.value
    assert error.status_code is LLMStatusCode.LLM_TIMEOUT
    assert (error.phase, error.budget_ms, error.retryable) == (phase, BUDGET_MS, True)
    assert error.elapsed_ms >= BUDGET_MS
    assert isinstance(error, TimeoutError)
    assert args[0] in str(error)
    assert f"{BUDGET_MS} ms" in str(error)
    assert "\n" not in str(error)


def test_r06_a_target_that_does_not_answer_times_out_in_resolve_and_the_link_stays(frozen: Pair) -> None:
    src, dst = both(frozen, ROWS, Spec())
    before = frozen.prompt.do(picture)
    stop(frozen)
    times_out(frozen, "resolve", "pull_cache", KEY, Use("kv"))
    same_bytes(frozen.decoder.do(show, "kv"), dst)
    go_on(frozen)
    # The target answers late; the pin of that answer is given back, and nothing is consumed.
    wait_until(lambda: (frozen.prompt.do(resolves), frozen.prompt.do(releases)) == (1, 1))
    assert frozen.prompt.do(picture).pins == 0
    assert frozen.prompt.do(picture).keys == before.keys
    frozen.decoder.do(call, "pull_cache", KEY, Use("kv"), 3)
    same_bytes(frozen.decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    same_bytes(frozen.prompt.do(show, "kv"), src)
    wait_until(lambda: frozen.prompt.do(picture).pins == 0)


@pytest.mark.parametrize(
    ("source", "args"),
    [
        (PAGED, ("push_blocks", BLOCKS, Use("kv"), [1], [2])),
        (ROWS, ("push_cache", CacheKeyByIdAndIndex(1, 1, 2), Use("kv"), 1)),
    ],
)
def test_r06_a_push_times_out_in_resolve_as_well(frozen: Pair, source: Spec, args: tuple[Any, ...]) -> None:
    dst, src = both(frozen, source, Spec(blocks=source.blocks), rca=True)
    stop(frozen)
    times_out(frozen, "resolve", *args)
    go_on(frozen)
    wait_until(lambda: frozen.prompt.do(resolves) == 1 and frozen.prompt.do(picture).pins == 0)
    same_bytes(frozen.prompt.do(show, "kv"), dst)
    frozen.decoder.do(call, *args)
    same_bytes(frozen.prompt.do(show, "kv"), moved(dst, src, [(2, 1)]))


def test_a_blocks_cache_that_was_resolved_is_pulled_from_a_stopped_process(frozen: Pair) -> None:
    src, dst = both(frozen, PAGED, Spec(blocks=True))
    frozen.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
    stop(frozen)
    frozen.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [1, 2], [5, 6])  # one-sided: no message
    same_bytes(frozen.decoder.do(show, "kv"), moved(dst, src, [(0, 0), (5, 1), (6, 2)]))


def test_r06_no_time_left_before_the_copy_is_a_timeout_in_copy_that_consumes_nothing(
    pair: Pair, tmp_path: Path
) -> None:
    src, dst = both(pair, ROWS, Spec())
    with (
        stopped(pair.decoder, "deadline", tmp_path, "pull_cache", KEY, Use("kv"), 3) as pulling,
        pytest.raises(DeadlineExceeded) as caught,
    ):
        pulling.finish()
    assert caught.value.status_code is LLMStatusCode.LLM_TIMEOUT
    assert caught.value.phase == "copy"
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert [key.key for key in pair.prompt.do(picture).keys] == ["(0, 10, 0)"]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    pair.decoder.do(call, "pull_cache", KEY, Use("kv"), 3)
    same_bytes(pair.decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))


def test_r06_no_time_left_before_a_push_is_a_timeout_that_consumes_nothing(pair: Pair, tmp_path: Path) -> None:
    dst, src = both(pair, ROWS, Spec(), rca=True)
    pushing = ("push_cache", CacheKeyByIdAndIndex(1, 1, 0), Use("kv"), 1)
    with (
        stopped(pair.decoder, "write deadline", tmp_path, *pushing) as push,
        pytest.raises(DeadlineExceeded) as caught,
    ):
        push.finish()
    assert caught.value.phase == "copy"
    wait_until(lambda: pair.prompt.do(picture).pins == 0)
    assert [key.key for key in pair.prompt.do(picture).keys] == ["(0, 10, 0)"]
    same_bytes(pair.prompt.do(show, "kv"), dst)
    pair.decoder.do(call, *pushing)
    same_bytes(pair.prompt.do(show, "kv"), moved(dst, src, [(0, 1)]))
