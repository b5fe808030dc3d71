"""Two real engines with the fewest slots, in two processes: the tokens are those of one engine that computes all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

from five_cases import NEW, prompts
from llm_datadist.integrations.vllm.staging import PortableCopier
from llm_datadist.integrations.vllm.worker import RankWorker
from tests.vllm.seen import ENVIRONMENT, SeenConnector
from tests.vllm.staged_prefill import engine, sampling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn

LENGTHS = (127, 128, 129, 500, 700)

Tokens = list[int]


class Pair:
    """A prefill engine in another process, and a decode engine here."""

    def __init__(self, checkpoint: Path, other: subprocess.Popen[str], *, cached: bool) -> None:
        self.other, self.cached = other, cached
        self.decode = engine(checkpoint, "decode", cached=cached)

    def tokens(self, prompt: Tokens, params: dict[str, Any] | None = None) -> Tokens:
        asked = [{"prompt_token_ids": prompt}]
        (output,) = self.decode.generate(asked, sampling(NEW, params or {}), use_tqdm=False)
        return list(output.outputs[0].token_ids)

    def fetched(self, prompt: Tokens) -> Tokens:
        assert self.other.stdin is not None
        assert self.other.stdout is not None
        self.other.stdin.write(json.dumps(prompt) + "\n")
        self.other.stdin.flush()
        params = json.loads(self.other.stdout.readline())
        self.decode.reset_prefix_cache()
        if self.cached:
            self.tokens(prompt[: len(prompt) // 2])
        SeenConnector.orders.clear()
        found = self.tokens(prompt, params)
        assert any(orders.loads for orders in SeenConnector.orders), "its KV came through slots"
        return found


@pytest.fixture(scope="module", params=["chunked", "cached"])
def pair(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Pair]:
    """Engines that compute long prompts in several steps, or that cache prefixes."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        command = [sys.executable, "-m", "tests.vllm.staged_prefill", str(checkpoint), request.param]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}  # of `servers`, for one
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        ) as other:
            assert other.stdin is not None
            assert other.stdout is not None
            made = Pair(checkpoint, other, cached=request.param == "cached")
            assert other.stdout.readline() == "ready\n"
            yield made
            other.stdin.close()
        made.decode.llm_engine.engine_core.shutdown()


@pytest.mark.parametrize("length", LENGTHS)
def test_the_tokens_are_those_of_one_engine_and_others_from_wrong_slots(
    pair: Pair, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prompt needs slots of the smallest pool that the one before has given back."""
    (prompt,) = prompts(1, length)
    expected = pair.tokens(prompt)
    assert pair.fetched(prompt) == expected
    for broken in (_lose_pulled, _lose_loaded):
        with monkeypatch.context() as patch:
            broken(patch)
            assert pair.fetched(prompt) != expected, "the model does not look at its KV: equal tokens prove nothing"
    assert pair.fetched(prompt) == expected


def _lose_pulled(patch: pytest.MonkeyPatch) -> None:
    """Zero the slots of a fetch before they are copied."""
    pull: Callable[..., dict[str, float]] = RankWorker._pull  # noqa: SLF001

    def lose(self: RankWorker, claimed: Any, targets: Any) -> dict[str, float]:
        found = pull(self, claimed, targets)
        assert isinstance(self.copier, PortableCopier)
        for view in self.copier.slots.values():
            view[[slot for _, slots in targets for slot in slots]] = 0
        return found

    patch.setattr(RankWorker, "_pull", lose)


def _lose_loaded(patch: pytest.MonkeyPatch) -> None:
    """Zero the blocks in place of the copy of slots to them."""

    def lose(self: PortableCopier, slots: list[int], blocks: list[int]) -> None:
        for view in self.device.values():
            view[blocks] = 0

    patch.setattr(PortableCopier, "load", lose)
