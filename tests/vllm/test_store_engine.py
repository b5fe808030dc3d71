"""An engine in this process and a prefix store in another: hits are exact, and whatever the store does ends no request.

The engine's own prefix cache is emptied between two questions, as if another engine asked; test_store_servers.py has
several. Answers are compared with those of an engine without a store.
"""

from __future__ import annotations

import json
import random
import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest

from five_cases import prompts
from llm_datadist.integrations.vllm.staging import PortableCopier, SlotPool
from llm_datadist.store import StoreClient
from model import build
from tests.vllm.latent import build_latent
from tests.vllm.seen import ENVIRONMENT
from tests.vllm.stored import BLOCK, Engine, Other, RemoteStore, SeenStoreConnector

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # vLLM and torch warn

Tokens = list[int]
LENGTHS = (127, 128, 129, 256, 300, 700)
ASKED = [prompt[:length] for prompt, length in zip(prompts(len(LENGTHS), 700), LENGTHS, strict=True)]
LONG = ASKED[-1]


def full(prompt: Tokens) -> int:
    """Return the tokens of a prompt that a store can have: whole blocks before the last token."""
    return (len(prompt) - 1) // BLOCK * BLOCK


@pytest.fixture(scope="module", autouse=True)
def _environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield


def many() -> list[Tokens]:
    """Return a hundred prompts, some of which begin alike."""
    source, begins = random.Random(1), prompts(10, 300)
    return [begins[number % 10][: source.randrange(100, 300)] for number in range(100)]


@pytest.fixture(scope="module")
def cold(checkpoint: Path, _environment: None) -> dict[int, Tokens]:
    """Return the right answers, by the length of their prompts."""
    with Engine(checkpoint, None) as engine:
        return {len(prompt): engine.answers([prompt])[0][0] for prompt in ASKED}


@pytest.fixture
def store() -> Iterator[RemoteStore]:
    with RemoteStore() as made:
        yield made


def test_another_engine_loads_what_one_has_computed(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore
) -> None:
    """Prompts of partial and of whole blocks, some computed in several steps; in the end no slot is held."""
    with Engine(checkpoint, store) as engine:
        for prompt in ASKED:
            assert engine.answers([prompt]) == [(cold[len(prompt)], 0)]
        engine.forget()
        for prompt in ASKED:
            assert engine.answers([prompt]) == [(cold[len(prompt)], full(prompt))]
        engine.forget()
        assert engine.answers([LONG], salt="tenant") == [(cold[len(LONG)], 0)]
        engine.forget()
        found = engine.answers(ASKED)  # beside each other
        assert found == [(cold[len(prompt)], full(prompt)) for prompt in ASKED]
        engine.forget()
        (answer, _), *_ = engine.answers([LONG[:250]], new=16)  # completes a block itself
        engine.forget()
        assert engine.answers([LONG[:250] + answer])[0][1] == 256
        engine.forget()
    figures = store.figures()
    assert figures["loads"] == figures["filling"] == figures["failed"] == 0
    assert figures["published"] == figures["stored"] == sum((len(each) + 7) // BLOCK for each in ASKED) + 5 + 1


@pytest.fixture
def roomy() -> Iterator[RemoteStore]:
    """A store that has room for the namespaces of all engines of a test."""
    with RemoteStore(namespaces=8) as made:
        yield made


def test_what_is_not_the_same_identity_hits_nothing(
    checkpoint: Path, cold: dict[int, Tokens], roomy: RemoteStore, tmp_path: Path
) -> None:
    with Engine(checkpoint, roomy) as engine:
        engine.answers([LONG])
        engine.forget()
    other: Any = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    engines: dict[str, dict[str, Any]] = {
        "salt": {"extra": {"salt": "tenant"}},
        "hash": {"prefix_caching_hash_algo": "sha256_cbor"},
        "dtype": {"dtype": "bfloat16"},
        "rope": {"model": build(tmp_path / "rope", **other)},
        "weights": {"model": build(tmp_path / "weights", seed=1)},
        "none": {},
    }
    hits = {}
    for name, changes in engines.items():
        model = changes.pop("model", checkpoint)
        with Engine(model, roomy, **changes) as engine:
            ((answer, hits[name]),) = engine.answers([LONG])
            if name != "dtype":  # roughly the same KV
                assert (answer == cold[len(LONG)]) is (name not in {"rope", "weights"})
    assert hits == dict.fromkeys(engines, 0) | {"none": full(LONG)}


def adapter(folder: Path, seed: int) -> Path:
    """Save a random adapter of the values of all layers."""
    folder.mkdir()
    made = torch.Generator().manual_seed(seed)
    sizes = {"lora_A": (8, 256), "lora_B": (128, 8)}
    name = "base_model.model.model.layers.{}.self_attn.v_proj.{}.weight"
    save_file(
        {name.format(i, part): torch.randn(size, generator=made) for i in range(4) for part, size in sizes.items()},
        folder / "adapter_model.safetensors",
    )
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def test_an_adapter_hits_what_it_has_computed_and_nothing_of_another_with_its_name(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore, tmp_path: Path
) -> None:
    one, other = (LoRARequest("a", 1 + i, str(adapter(tmp_path / str(i), i))) for i in range(2))
    answers: list[Tokens] = []
    with Engine(checkpoint, store, enable_lora=True, max_lora_rank=8) as engine:
        for adapted in (None, one, other):
            ((answer, hit),) = engine.answers([LONG], lora=adapted)
            assert hit == 0
            engine.forget()
            assert engine.answers([LONG], lora=adapted) == [(answer, full(LONG))]
            engine.forget()
            answers.append(answer)
    assert answers[0] == cold[len(LONG)]
    assert answers[0] != answers[1] != answers[2] != answers[0], "the adapters do nothing"


def test_a_latent_head_is_loaded_as_it_was_computed(store: RemoteStore, tmp_path: Path) -> None:
    """Of a prompt of whole blocks and one token only that token is computed, as by the engine that has the blocks."""
    model = build_latent(tmp_path / "latent")
    asked = [prompt[:length] for prompt, length in zip(ASKED[-3:], (145, 289, 433), strict=True)]
    SeenStoreConnector.digests.clear()
    with Engine(model, store, 256) as engine:
        computed = [engine.answers([prompt])[0] for prompt in asked]
        own = [engine.answers([prompt])[0] for prompt in asked]
        engine.forget()
        assert [engine.answers([prompt])[0] for prompt in asked] == own
        engine.forget()
        with Other(store, 1) as other:
            assert all(SeenStoreConnector.digests[key] == {other.digest_of(key)} for key in SeenStoreConnector.digests)
    assert [hit for _, hit in computed] == [0] * len(asked)
    assert [hit for _, hit in own] == [len(prompt) - 1 for prompt in asked]


def test_zeroed_slots_are_refused_and_would_give_other_tokens(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore
) -> None:
    with Engine(checkpoint, store) as engine:
        engine.answers([LONG])
        engine.forget()
    store.zero()
    with Engine(checkpoint, store, extra={"store_options": {"verify": False}}) as engine:
        ((answer, hit),) = engine.answers([LONG])
        assert hit == full(LONG)
        assert answer != cold[len(LONG)], "an answer does not depend on what is loaded"
    with Engine(checkpoint, store) as engine:
        ((answer, _),) = engine.answers([LONG])
        assert answer == cold[len(LONG)]
        engine.forget()
        assert engine.answers([LONG]) == [(answer, full(LONG))], "what was computed has been saved anew"


def test_after_a_reset_no_engine_finds_what_was_saved_before(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore
) -> None:
    """The engine saves and finds again what it computes afterwards, in namespaces of its own."""
    with Engine(checkpoint, store) as engine:
        for _ in range(2):
            assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]
            engine.forget()
            assert engine.answers([LONG]) == [(cold[len(LONG)], full(LONG))]
            engine.forget()
            assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]
        engine.forget()
        store.stop()
        assert not engine.llm.reset_prefix_cache(reset_connector=True)
        store.process.send_signal(signal.SIGCONT)
    with Engine(checkpoint, store) as engine:
        assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]


def test_all_engines_of_a_shared_namespace_go_on_with_it_after_a_reset(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore
) -> None:
    shared = {"clear_shared": True}
    with Engine(checkpoint, store, extra=shared) as engine:
        assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]
        engine.forget()
        assert engine.llm.reset_prefix_cache(reset_connector=True)
        assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]
        engine.forget()
    with Engine(checkpoint, store, extra=shared) as engine:
        assert engine.answers([LONG]) == [(cold[len(LONG)], full(LONG))]


def test_a_burst_of_requests_leaves_all_full_blocks_in_the_store(
    checkpoint: Path, store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of many requests beside each other has blocks that only the end of a request before makes room for."""
    save = StoreClient.save

    def slowly(*args: Any) -> int:
        threading.Event().wait(0.2)
        return save(*args)

    asked = prompts(20, 400)  # with more a fast engine fills what may be kept
    monkeypatch.setattr(StoreClient, "save", slowly)
    with Engine(checkpoint, store, 128) as engine:
        engine.answers(asked, new=2)
        engine.forget()
        assert store.figures()["published"] == sum(len(each) // BLOCK for each in asked)


@pytest.mark.parametrize("how", ["kill", "stop"])
def test_a_store_that_is_lost_between_lookup_and_load_ends_no_request(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore, how: str
) -> None:
    options = {"lookup_ms": 2000, "save_ms": 1000}
    with Engine(checkpoint, store, extra={"timeout_ms": 1000, "store_options": options}) as engine:
        engine.answers([LONG])
        engine.forget()
        lost: list[str] = []

        def lose() -> None:
            lost.append(how)
            getattr(store, how)()

        SeenStoreConnector.before_load = lose
        assert engine.answers([LONG])[0][0] == cold[len(LONG)]
        assert lost == [how]
        engine.forget()
        assert engine.answers([LONG]) == [(cold[len(LONG)], 0)]
        engine.forget()


def test_slots_are_not_evicted_between_lookup_and_load(checkpoint: Path, cold: dict[int, Tokens]) -> None:
    with RemoteStore(nbytes=22 << 20) as store, Engine(checkpoint, store) as engine:  # ten slots of a namespace
        engine.answers([LONG])
        engine.forget()
        assert store.figures()["slots"] == 10

        with Other(store, 10) as other:
            taken: list[int] = []
            SeenStoreConnector.before_load = lambda: taken.append(other.save(10))
            assert engine.answers([LONG]) == [(cold[len(LONG)], full(LONG))]
            assert taken == [5], "five are lent, as many as one reader may have"
            engine.forget()
            assert other.save(10) == 10


STAGED: dict[str, Any] = {"staging": True, "staging_bytes": 2 * 2304 * 4 * 2 * 2 * 64 * 4}  # the fewest


def delay_copies(patch: pytest.MonkeyPatch) -> None:
    """Copy in another thread, a little later; fill slots with NaN when they are free again."""
    source, free = random.Random(1), SlotPool.free
    copiers: list[PortableCopier] = []

    def later(name: str) -> None:
        copy = getattr(PortableCopier, name)

        def begin(self: PortableCopier, *args: list[int]) -> None:
            copiers[:] = [self]
            timer = threading.Timer(source.random() * 0.003, copy, (self, *args))
            timer.start()
            timer.join()

        patch.setattr(PortableCopier, name, begin)

    def poison(self: SlotPool, request: str) -> None:
        for view in copiers[0].slots.values() if copiers else ():
            for _, slots in self.held.get(request, ()):
                view[slots] = float("nan")
        free(self, request)

    later("save")
    later("load")
    patch.setattr(SlotPool, "free", poison)


@pytest.fixture(scope="module")
def expected(checkpoint: Path, _environment: None) -> list[Tokens]:
    """Return the right answers to :func:`many`."""
    with Engine(checkpoint, None, 512) as engine:
        return [tokens for tokens, _ in engine.answers(many(), new=40)]


@pytest.mark.parametrize("extra", [{}, STAGED], ids=["host", "staged"])
def test_a_hundred_prompts_under_twenty_blocks_are_right_and_leave_nothing(
    checkpoint: Path,
    store: RemoteStore,
    expected: list[Tokens],
    extra: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delay_copies(monkeypatch)
    SeenStoreConnector.digests.clear()
    SeenStoreConnector.preempted.clear()
    with Engine(checkpoint, store, 20, max_num_batched_tokens=512, extra=extra) as engine:
        first = engine.answers(many(), new=40)
        engine.forget()
        again = engine.answers(many(), new=40)
        engine.forget()
        assert [tokens for tokens, _ in first] == [tokens for tokens, _ in again] == expected
        assert SeenStoreConnector.preempted
        assert sum(hit for _, hit in again) > 5_000
        with Other(store, 1) as other:
            stored = {key: other.digest_of(key) for key in SeenStoreConnector.digests}
        assert len(stored) > 50
        assert all(digest in SeenStoreConnector.digests[key] for key, digest in stored.items() if digest)
        assert sum(digest is None for digest in stored.values()) < len(stored) // 2
    figures = store.figures()
    assert figures["loads"] == figures["filling"] == 0


def test_staged_and_unstaged_engines_share_blocks_and_lost_copies_give_other_tokens(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = ASKED[-2]
    with Engine(checkpoint, store) as engine:
        engine.answers([LONG])
        engine.forget()
    with Engine(checkpoint, store, extra=STAGED) as engine:
        assert engine.answers([LONG]) == [(cold[len(LONG)], full(LONG))]
        assert engine.answers([short]) == [(cold[len(short)], 0)]
        engine.forget()
        with monkeypatch.context() as patch:
            patch.setattr(PortableCopier, "load", lambda self, _, blocks: _zero(self.device, blocks))
            ((answer, hit),) = engine.answers([LONG])
        assert hit == full(LONG)
        assert answer != cold[len(LONG)], "an answer does not depend on what is copied"
        engine.forget()
    with Engine(checkpoint, store) as engine:
        assert engine.answers([short]) == [(cold[len(short)], full(short))]


def _zero(views: dict[str, torch.Tensor], blocks: list[int]) -> None:
    for view in views.values():
        view[blocks] = 0


def test_a_load_that_fails_copies_nothing_to_staged_blocks(
    checkpoint: Path, cold: dict[int, Tokens], store: RemoteStore
) -> None:
    with Engine(checkpoint, store, extra=STAGED | {"timeout_ms": 1000}) as engine:
        engine.answers([LONG])
        engine.forget()
        store.zero()
        assert engine.answers([LONG])[0][0] == cold[len(LONG)]
        engine.forget()


def test_a_step_that_fails_saves_nothing(checkpoint: Path, store: RemoteStore) -> None:
    """vLLM asks for the saves of a step although it has failed, with KV that was not computed."""
    with Engine(checkpoint, store) as engine:
        runner = engine.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        layer = runner.model.model.layers[-1]

        def fail(*_: Any, **__: Any) -> None:
            raise ArithmeticError("as a kernel does")

        layer.forward = fail
        SeenStoreConnector.digests.clear()
        with pytest.raises(ArithmeticError):
            engine.answers([LONG])
        assert SeenStoreConnector.digests, "a save was ordered"
    assert store.figures().get("stored", 0) == 0
