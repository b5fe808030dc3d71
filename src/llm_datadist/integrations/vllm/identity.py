"""Identity of an engine's KV: everything that, changed, makes other bytes for the same tokens.

It maps the names of docs/vllm.md ("Identity") to short texts: a value of more than 64 characters is its digest. Engines
fit if all texts agree, except the versions of vLLM that a reader accepts. `kinds.py` adds the attention kernel, which
is chosen later. Names, paths, addresses, parallel sizes and sizes of memory are not in it; `Layout` compares shapes.
LoRA adapters belong to requests: the prompt's digest has them.

Threads: vLLM's. Reads files of weights, nothing else: what is on no disk of this host is not fetched.
"""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from vllm.version import __version__ as vllm_version

from llm_datadist.errors import ParamError
from llm_datadist.integrations.weights import Stamp, digest_of, digests_of, stamp_of

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from vllm.config import LoRAConfig, ModelConfig, VllmConfig
    from vllm.lora.request import LoRARequest

_SHOWN: Final = 64
_Text = Annotated[str, msgspec.Meta(max_length=_SHOWN)]
Identity = Annotated[dict[_Text, _Text], msgspec.Meta(max_length=32)]

#: Load formats that read the safetensors files of a folder.
_FORMATS: Final = {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "mistral", "runai_streamer"}
#: Keys of configurations without effect on KV, as those that begin with an underscore.
_IGNORED: Final = {"name_or_path", "transformers_version", "dtype", "torch_dtype", "max_model_len"}
#: Speculative methods without KV of their own.
_DRAFTLESS: Final = {None, "ngram", "ngram_gpu", "suffix"}
_OF_IMAGES: Final = ("language_model_only", "mm_processor_kwargs", "mm_encoder_attn_dtype", "video_pruning_rate")
_OF_LORA: Final = ("lora_dtype", "target_modules", "enable_tower_connector_lora", "enable_moe_shared_loras")


def identity_of(config: VllmConfig) -> dict[str, str]:
    """Return the identity of a worker's engine, except its kernel; ParamError if its weights need a name."""
    model, cache, speculative = config.model_config, config.cache_config, config.speculative_config
    dtype = str(model.dtype).removeprefix("torch.")
    kv_dtype = {"auto": dtype, "fp8": "fp8_e4m3"}.get(cache.cache_dtype, cache.cache_dtype)
    attention = config.attention_config
    found = _of_model(model, config) | {
        "vllm": vllm_version,
        "dtype": dtype,
        "kv_dtype": _brief(" but ".join([kv_dtype, *cache.kv_cache_dtype_skip_layers])),
        "attention_options": _brief([attention.use_non_causal, attention.indexer_kv_dtype]),
        "kv_layout": str(cache.kv_cache_layout),
        "images": _brief([getattr(model.multimodal_config, name, None) for name in _OF_IMAGES]),
    }
    if speculative is not None and speculative.method not in _DRAFTLESS:
        found["draft"] = _brief([speculative.method, _of_model(speculative.draft_model_config, config)])
    return found


def differences(theirs: Mapping[str, str], ours: Mapping[str, str], accepted: Collection[str] = ()) -> list[str]:
    """Return a text for each difference, but for no accepted version of vLLM."""
    return [
        f"{name}: {theirs.get(name, 'none')} there, {ours.get(name, 'none')} here"
        for name in sorted({*theirs, *ours})
        if theirs.get(name) != ours.get(name) and not (name == "vllm" and theirs.get(name) in accepted)
    ]


def _of_model(model: ModelConfig, config: VllmConfig) -> dict[str, str]:
    """Return what a model is, whatever its cache is."""
    folder = _folder(model.model, model.revision, config.load_config.download_dir)
    parts: dict[str, dict[str, Any]] = {"model": {"implementation": model.model_impl}, "rope": {}}
    parts["quantization"] = {"method": model.quantization, "options": model.quantization_config}
    _split(model.hf_config.to_dict(), "", parts)
    if "longrope" in str(parts["rope"]):  # chooses between two sets of frequencies
        parts["rope"]["max_model_len"] = model.max_model_len
    commit = folder.name if folder is not None and folder.parent.name == "snapshots" else model.revision
    found = {name: _brief(part) for name, part in parts.items()}
    return found | {"revision": _brief([commit, model.code_revision]), "weights": _weights(model, folder, config)}


def _split(given: Mapping[Any, Any], prefix: str, parts: Mapping[str, dict[str, Any]]) -> None:
    """Put each key of a configuration into its part."""
    for name, value in ((str(key), value) for key, value in given.items()):
        if name.startswith(("rope", "rotary", "partial_rotary")):
            parts["rope"][prefix + name] = value
        elif name == "quantization_config":
            parts["quantization"][prefix + name] = value
        elif isinstance(value, dict):
            _split(value, f"{prefix}{name}.", parts)
        elif not name.startswith("_") and name not in _IGNORED:
            parts["model"][prefix + name] = value


def _brief(value: object) -> str:
    """Return a text, or a value as JSON, if it is short; else a digest."""
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str, separators=(",", ":"))
    return text if len(text) <= _SHOWN else hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _folder(path: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """Return the folder of a model on this host, which may be in the hub's cache; None without one."""
    local = Path(os.path.expanduser(path))
    if local.is_dir():
        return local
    from huggingface_hub import snapshot_download  # vLLM has it

    try:
        return Path(snapshot_download(path, revision=revision, cache_dir=cache, local_files_only=True))
    except (OSError, ValueError):
        return None


def _weights(model: ModelConfig, folder: Path | None, config: VllmConfig) -> str:
    if named := config.kv_transfer_config.get_from_extra_config("weights", ""):
        return _brief(f"={named}")  # no digest of files
    load_format = str(config.load_config.load_format)
    files = list(folder.glob("*.safetensors")) if folder is not None and load_format in _FORMATS else []
    if not files:
        raise ParamError(
            f"weights: not given, and {model.model} (load format {load_format}) has no safetensors files on this host, "
            'so its fine-tunes cannot be told apart; give "weights": "NAME", another NAME for each of them'
        )
    try:
        return hashlib.sha256("".join(sorted({*digests_of(files)})).encode()).hexdigest()
    except OSError as error:
        raise ParamError(f"weights: {folder}: its safetensors files cannot be read: {error}") from None


class Adapters:
    """Digests of LoRA adapters, as they are at their first request; vLLM may have loaded them before. Nobody waits.

    If its files change later, an adapter's KV has no name until vLLM loads it under another id: it may use either.
    Threads: the scheduler's; four digest, an adapter each.
    """

    def __init__(self, config: LoRAConfig | None) -> None:
        self._options = [str(getattr(config, name, None)) for name in _OF_LORA]
        self._known: dict[int, Future[tuple[list[Any], str]]] = {}  # by id: stamps and digest
        self._changed: set[int] = set()
        self._pool = ThreadPoolExecutor(4, "lldd-vllm-adapter")

    def begin(self, lora: LoRARequest | None) -> None:
        """Begin to digest the adapter of a new request; of a known one look whether its files have changed."""
        if lora is None:
            return
        known = self._known.get(lora.lora_int_id)
        if known is None or (known.done() and known.exception()):
            self._known[lora.lora_int_id] = self._pool.submit(_digest_of, lora.lora_path)
        else:
            self._look(lora)

    def _look(self, lora: LoRARequest) -> None:
        if not self.pending(lora) and _stamps(lora.lora_path) != self._known[lora.lora_int_id].result()[0]:
            self._changed.add(lora.lora_int_id)

    def pending(self, lora: LoRARequest | None) -> bool:
        """Return True while the adapter of a request is digested."""
        return lora is not None and not self._known[lora.lora_int_id].done()

    def parts(self, lora: LoRARequest | None) -> list[Any] | None:
        """Return what KV depends on. Raises OSError or ValueError for files that do not tell, or not yet."""
        if lora is None:
            return None
        _, digest = self._known[lora.lora_int_id].result(0)
        if lora.load_inplace:  # vLLM loads it in each step
            self._look(lora)
        if lora.lora_int_id in self._changed:
            raise ValueError(f"{lora.lora_path}: its files have changed; load it under another id")
        return [lora.lora_name, digest, lora.is_3d_lora_weight, self._options]

    def stop(self) -> None:
        """End the threads. Idempotent."""
        self._pool.shutdown(cancel_futures=True)


def _digest_of(path: str) -> tuple[list[Any], str]:
    stamps = _stamps(path)
    digests = [(each.name, digest_of(each)) for each, _ in stamps]
    if not stamps or _stamps(path) != stamps:
        raise ValueError(f"{path}: it has no files on this host, or they change")
    return stamps, hashlib.sha256(msgspec.msgpack.encode(digests)).hexdigest()


def _stamps(path: str) -> list[tuple[Path, Stamp]]:
    """Return all files of an adapter, each with its stamp; none if they are not on this host."""
    folder = _folder(path)
    try:
        return sorted((each, stamp_of(each.stat())) for each in folder.iterdir() if each.is_file()) if folder else []
    except OSError:
        return []
