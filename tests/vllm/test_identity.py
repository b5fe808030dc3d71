"""One change of an engine's configuration or files at a time: its identity changes in the entry of that name."""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from safetensors.torch import load_file, save_file
from vllm.config import CacheConfig, SpeculativeConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.lora.request import LoRARequest

from llm_datadist.errors import LLMException, ParamError
from llm_datadist.integrations.vllm import LLMDataDistConnector, identity
from llm_datadist.integrations.vllm.identity import Adapters, differences, identity_of
from llm_datadist.integrations.weights import digest_of
from model import build
from tests.support.moves import wait_until
from tests.vllm.test_requests import adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Change = Callable[[Any], object]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> VllmConfig:
    return config_of(build(tmp_path_factory.mktemp("model"), num_hidden_layers=1))


def config_of(model: Path | str, **changes: Any) -> VllmConfig:
    transfer = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_connector_extra_config": {}}
    args = {"model": str(model), "dtype": "float32", "max_model_len": 2304, "enforce_eager": True}
    return EngineArgs(**args | {"kv_transfer_config": transfer} | changes).create_engine_config()


def changed(config: VllmConfig, change: Change) -> list[str]:
    """Return the names of the entries that are others after a change of a copy."""
    other = copy.copy(config)
    for part in ("model_config", "cache_config", "attention_config", "load_config", "parallel_config"):
        setattr(other, part, copy.copy(getattr(config, part)))
    other.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    other.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
    change(other)
    return [each.partition(":")[0] for each in differences(identity_of(other), identity_of(config))]


def sets(path: str, value: Any) -> Change:
    *parts, last = path.split(".")

    def change(config: Any) -> None:
        for part in parts:
            config = getattr(config, part)
        setattr(config, last, value)

    return change


def draft(config: VllmConfig, **changes: Any) -> None:
    model = copy.copy(config.model_config)
    for name, value in changes.items():
        setattr(model, name, value)
    found = SpeculativeConfig.__new__(SpeculativeConfig)
    found.method, found.draft_model_config = "eagle", model
    config.speculative_config = found


HF = "model_config.hf_config."
ONE: dict[str, tuple[Change, str]] = {
    "layers": (sets(HF + "num_hidden_layers", 2), "model"),
    "norm": (sets(HF + "rms_norm_eps", 1e-3), "model"),
    "window": (sets(HF + "sliding_window", 8), "model"),
    "vision": (sets(HF + "vision_config", {"depth": 2}), "model"),
    "implementation": (sets("model_config.model_impl", "transformers"), "model"),
    "rope": (sets(HF + "rope_parameters", {"rope_theta": 5e5, "rope_type": "default"}), "rope"),
    "rope of a part": (sets(HF + "text_config", {"rope_theta": 1}), "rope"),
    "rotary": (sets(HF + "partial_rotary_factor", 0.5), "rope"),
    "quantization": (sets("model_config.quantization", "fp8"), "quantization"),
    "its options": (sets("model_config.quantization_config", {"moe": None}), "quantization"),
    "of the checkpoint": (sets(HF + "quantization_config", {"bits": 4}), "quantization"),
    "dtype": (sets("model_config.dtype", torch.bfloat16), "dtype"),
    "KV dtype": (sets("cache_config.cache_dtype", "fp8_e5m2"), "kv_dtype"),
    "skipped": (sets("cache_config.kv_cache_dtype_skip_layers", ["0"]), "kv_dtype"),
    "causal": (sets("attention_config.use_non_causal", True), "attention_options"),
    "indexer": (sets("attention_config.indexer_kv_dtype", "fp8"), "attention_options"),
    "layout": (sets("cache_config.kv_cache_layout", "LBHNC"), "kv_layout"),
    "images": (sets("model_config.multimodal_config", type("M", (), {"video_pruning_rate": 0.5})), "images"),
    "draft": (draft, "draft"),
    "revision": (sets("model_config.revision", "v2"), "revision"),
    "code": (sets("model_config.code_revision", "v2"), "revision"),
    "weights": (sets("kv_transfer_config.kv_connector_extra_config", {"weights": "tuned"}), "weights"),
}


@pytest.mark.parametrize("one", ONE)
def test_a_change_is_a_difference_of_its_name(config: VllmConfig, one: str) -> None:
    change, name = ONE[one]
    found = changed(config, change)
    if name == "dtype":  # that of the KV follows
        assert found == ["dtype", "kv_dtype"]
    else:
        assert found == [name]


@pytest.mark.parametrize("part", ["revision", "quantization"])
def test_another_draft_model_is_a_difference(config: VllmConfig, part: str) -> None:
    with_draft = copy.copy(config)
    draft(with_draft)
    assert changed(with_draft, lambda other: draft(other, **{part: "other"})) == ["draft"]


SAME: dict[str, Change] = {
    "engine": sets("kv_transfer_config.engine_id", "another"),
    "port": sets("kv_transfer_config.kv_port", 1),
    "host": sets("kv_transfer_config.kv_connector_extra_config", {"host": "10.0.0.1", "lease_s": 3}),
    "served name": sets("model_config.served_model_name", "another"),
    "seed": sets("model_config.seed", 1),
    "longest request": sets("model_config.max_model_len", 64),
    "name of the folder": sets(HF + "_name_or_path", "another"),
    "ranks": sets("parallel_config.tensor_parallel_size", 2),
    "memory": sets("cache_config.gpu_memory_utilization", 0.1),
    "blocks": sets("cache_config.num_gpu_blocks_override", 7),
    "block size": sets("cache_config.block_size", 16),
    "prefix caching": sets("cache_config.enable_prefix_caching", False),
    "explicit KV dtype": sets("cache_config.cache_dtype", "float32"),
    "speculation without KV": sets("speculative_config", type("S", (), {"method": "ngram"})),
}


@pytest.mark.parametrize("one", SAME)
def test_what_kv_does_not_depend_on_is_no_difference(config: VllmConfig, one: str) -> None:
    assert changed(config, SAME[one]) == []


def test_the_longest_request_matters_where_it_chooses_frequencies(config: VllmConfig) -> None:
    long = copy.copy(config)
    long.model_config = copy.copy(config.model_config)
    long.model_config.hf_config = copy.deepcopy(config.model_config.hf_config)
    long.model_config.hf_config.rope_parameters = {"rope_type": "longrope", "short_factor": [1.0]}
    assert changed(long, sets("model_config.max_model_len", 64)) == ["rope"]


def test_fp8_is_its_usual_kind(config: VllmConfig) -> None:
    found = []
    for name in ("fp8", "fp8_e4m3"):
        other = copy.copy(config)
        other.cache_config = CacheConfig(cache_dtype=name)
        other.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout
        found.append(identity_of(other)["kv_dtype"])
    assert found == ["fp8_e4m3", "fp8_e4m3"]


def test_another_vllm_is_a_difference_unless_accepted(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = identity_of(config)
    monkeypatch.setattr(identity, "vllm_version", "0.99")
    theirs = identity_of(config)
    assert differences(theirs, ours) == [f"vllm: 0.99 there, {ours['vllm']} here"]
    assert differences(theirs, ours, ["0.99"]) == []
    assert differences(theirs | {"rope": "r"}, ours, ["0.99"]) == [f"rope: r there, {ours['rope']} here"]


def test_an_identity_is_short_and_readable(config: VllmConfig) -> None:
    found = identity_of(config)
    assert found["kv_dtype"] == "float32"
    assert "rope_theta" in found["rope"]
    assert len(json.dumps(found)) < 700


@pytest.mark.parametrize(
    ("sleeps", "updates", "named"), [(True, None, "sleep mode"), (False, object(), "weight_transfer_config")]
)
def test_kv_or_weights_that_change_under_readers_are_refused(sleeps: bool, updates: object, named: str) -> None:
    sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    config: Any = SimpleNamespace(
        kv_transfer_config=object(),
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(enable_sleep_mode=sleeps),
        weight_transfer_config=updates,
    )
    cache: Any = None
    with pytest.raises(LLMException, match=f"does not support .*{named}"):
        LLMDataDistConnector(config, KVConnectorRole.WORKER, cache)


# --- weights ----------------------------------------------------------------------------------------------------------


def weights_of(folder: Path, **changes: Any) -> str:
    return identity_of(config_of(folder, **changes))["weights"]


@pytest.fixture(scope="module")
def checkpoint(config: VllmConfig) -> Path:
    return Path(config.model_config.model)


@pytest.fixture
def copied(checkpoint: Path, tmp_path: Path) -> Path:
    return shutil.copytree(checkpoint, tmp_path / "copied elsewhere")


def test_a_copy_in_another_folder_and_under_another_name_is_the_same_model(checkpoint: Path, copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "other name.safetensors")
    assert identity_of(config_of(copied)) == identity_of(config_of(checkpoint))


def divide(folder: Path) -> None:
    """Divide the weights of a model into two files."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    (folder / "model.safetensors").unlink()
    for number, chosen in enumerate((names[3:], names[:3])):
        save_file({name: tensors[name] for name in chosen}, folder / f"{number}.safetensors", {"format": "pt"})


def test_the_order_of_the_files_does_not_matter_but_how_tensors_are_spread_over_them(
    config: VllmConfig, copied: Path
) -> None:
    found = [weights_of(copied)]
    divide(copied)
    found.append(weights_of(copied))
    (copied / "0.safetensors").rename(copied / "2.safetensors")
    found.append(weights_of(copied))
    assert (found[0] == found[1], found[1] == found[2]) == (False, True)
    (copied / "1.safetensors").unlink()
    assert weights_of(copied) not in found


true_sha256 = hashlib.sha256


def last_row(tensor: torch.Tensor) -> None:
    tensor[-1] += 1


def first_head(tensor: torch.Tensor) -> None:
    tensor[: tensor.shape[0] // 4] += 1


def ten_thousandth(tensor: torch.Tensor) -> None:
    tensor.view(-1)[: max(1, tensor.numel() // 10_000)] += 1


@pytest.mark.parametrize(
    ("name", "edit"),
    [
        ("model.embed_tokens.weight", last_row),
        ("model.layers.0.self_attn.k_proj.weight", first_head),
        ("model.layers.0.self_attn.k_proj.weight", ten_thousandth),
        ("model.norm.weight", ten_thousandth),
    ],
)
def test_models_that_differ_in_a_few_bytes_anywhere_are_two(
    config: VllmConfig, copied: Path, name: str, edit: Callable[[torch.Tensor], None]
) -> None:
    tensors = load_file(copied / "model.safetensors")
    edit(tensors[name])
    save_file(tensors, copied / "model.safetensors", {"format": "pt"})
    assert changed(config, sets("model_config.model", str(copied))) == ["weights"]


@pytest.mark.parametrize("load_format", ["dummy", "pt", "tensorizer"])
def test_weights_that_are_not_read_need_a_name(checkpoint: Path, load_format: str) -> None:
    with pytest.raises(ParamError, match=rf"weights: not given, and .* \(load format {load_format}\) has no"):
        weights_of(checkpoint, load_format=load_format)


@pytest.mark.parametrize("kind", ["a link to nothing", "a folder"])
def test_files_that_cannot_be_read_are_named(config: VllmConfig, copied: Path, kind: str) -> None:
    other = copied / "other.safetensors"
    other.mkdir() if kind == "a folder" else other.symlink_to("nowhere")
    with pytest.raises(ParamError, match=r"weights: .*copied elsewhere: its safetensors files cannot be read"):
        changed(config, sets("model_config.model", str(copied)))


def test_a_model_on_no_disk_of_this_host_is_not_fetched(config: VllmConfig) -> None:
    for name in ("s3://bucket/model", "someone/something"):
        with pytest.raises(ParamError, match=f"weights: not given, and {name}"):
            changed(config, sets("model_config.model", name))


def test_a_long_name_of_weights_is_their_digest(config: VllmConfig) -> None:
    found = []
    for name in ("n" * 64, "n" * 65):
        other = copy.copy(config)
        other.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        other.kv_transfer_config.kv_connector_extra_config = {"weights": name}
        found.append(identity_of(other)["weights"])
    assert [len(each) for each in found] == [32, 32]
    assert found[0] != found[1]


def test_a_snapshot_of_the_hub_has_its_commit_as_revision(config: VllmConfig, checkpoint: Path, tmp_path: Path) -> None:
    cache = tmp_path / "models--someone--something"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("a" * 40)
    snapshot = shutil.copytree(checkpoint, cache / "snapshots" / ("a" * 40))
    found = []
    for name, revision in (("someone/something", None), ("someone/something", "main"), (str(snapshot), None)):
        other = copy.copy(config)
        other.load_config = copy.copy(config.load_config)
        other.model_config = copy.copy(config.model_config)
        other.load_config.download_dir = str(tmp_path)
        other.model_config.model, other.model_config.revision = name, revision
        found.append(identity_of(other))
    assert found[0] == found[1] == found[2]
    assert found[0]["weights"] == identity_of(config)["weights"]
    assert "a" * 40 in found[0]["revision"]


# --- adapters ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def known() -> Iterator[Adapters]:
    made = Adapters(None)
    yield made
    made.stop()


def parts(
    folder: Path, *, name: str = "a", number: int = 1, config: Any = None, known: Adapters | None = None, **changes: Any
) -> Any:
    """Return what KV of an adapter depends on, as a new request asks for it."""
    request = LoRARequest(name, number, str(folder), **changes)
    adapters = known or Adapters(config)
    adapters.begin(request)
    wait_until(lambda: not adapters.pending(request))
    return adapters.parts(request)


def test_no_adapter_has_no_parts() -> None:
    assert Adapters(None).parts(None) is None


def test_what_an_adapter_is(tmp_path: Path) -> None:
    one = parts(adapter(tmp_path / "one", 1.0))
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    assert parts(tmp_path / "copy") == one
    others = [
        parts(adapter(tmp_path / "weights", 2.0)),
        parts(adapter(tmp_path / "scale", 1.0, alpha=16)),
        parts(tmp_path / "one", name="b"),
        parts(tmp_path / "one", is_3d_lora_weight=True),
        parts(tmp_path / "one", config=type("C", (), {"target_modules": ["q"]})),
        parts(tmp_path / "one", config=type("C", (), {"lora_dtype": torch.float16})),
    ]
    assert one not in others
    assert len({repr(each) for each in others}) == len(others)


def test_adapters_that_differ_in_one_row_of_a_rank_or_in_any_file_are_others(tmp_path: Path) -> None:
    found = [parts(adapter(tmp_path / "one", 1.0))]
    tensors = load_file(tmp_path / "one" / "adapter_model.safetensors")
    tensors["layer.lora_A.weight"][-1] += 1
    save_file(tensors, tmp_path / "one" / "adapter_model.safetensors")
    found.append(parts(tmp_path / "one"))
    (tmp_path / "one" / "new_embeddings.safetensors").write_bytes(b"embeddings")
    found.append(parts(tmp_path / "one"))
    (tmp_path / "one" / "new_embeddings.safetensors").rename(tmp_path / "one" / "unused")
    found.append(parts(tmp_path / "one"))
    assert len({repr(each) for each in found}) == 4


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_whose_files_change_has_no_name_until_it_is_loaded_under_another_id(
    tmp_path: Path, known: Adapters, in_place: bool
) -> None:
    """vLLM may have loaded either: it loads again what it has evicted, and in place in each step."""
    folder = adapter(tmp_path / "one", 1.0)
    loaded = parts(folder, known=known)
    assert parts(folder, known=known, load_inplace=in_place) == loaded
    shutil.rmtree(folder)
    adapter(folder, 2.0)
    with pytest.raises(ValueError, match="its files have changed; load it under another id"):
        parts(folder, known=known, load_inplace=in_place)
    with pytest.raises(ValueError, match="its files have changed"):
        parts(folder, known=known)
    assert parts(folder, known=known, number=2) not in (loaded, None)


def test_an_adapter_that_vllm_loads_in_each_step_is_looked_at_in_each(tmp_path: Path, known: Adapters) -> None:
    folder = adapter(tmp_path / "one", 1.0)
    request = LoRARequest("a", 1, str(folder), load_inplace=True)
    parts(folder, known=known, load_inplace=True)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="its files have changed"):
        known.parts(request)


def test_another_path_under_a_known_id_has_no_name(tmp_path: Path, known: Adapters) -> None:
    one, other = adapter(tmp_path / "one", 1.0), adapter(tmp_path / "other", 2.0)
    parts(one, known=known)
    with pytest.raises(ValueError, match="its files have changed"):
        parts(other, known=known)


def test_an_adapter_that_could_not_be_read_is_tried_again_for_the_next_request(tmp_path: Path, known: Adapters) -> None:
    with pytest.raises(ValueError, match="it has no files on this host"):
        parts(tmp_path / "one", known=known)
    assert parts(adapter(tmp_path / "one", 1.0), known=known)


def test_an_adapter_that_changes_while_it_is_digested_has_no_name(
    tmp_path: Path, known: Adapters, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "one", 1.0)

    def digest(path: Path) -> str:
        (folder / "adapter_config.json").write_text("{}")
        return digest_of(path)

    monkeypatch.setattr(identity, "digest_of", digest)
    with pytest.raises(ValueError, match="or they change"):
        parts(folder, known=known)
