"""A prefill engine whose KV is staged: a program that answers each prompt of its input with kv_transfer_params."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.config import KVTransferConfig
from vllm.entrypoints.llm import LLM
from vllm.sampling_params import SamplingParams

from servers import Connector, Role

__all__ = ["MAX_TOKENS", "engine", "sampling"]

MAX_TOKENS = 768
#: Of the smallest pool: one request of blocks of 128 tokens, four layers, K and V of two heads of 64 floats.
STAGING_BYTES = MAX_TOKENS * 4 * 2 * 2 * 64 * 4


def engine(checkpoint: Path, role: Role, *, cached: bool) -> LLM:
    """Return an engine without a server.

    It caches prefixes, or computes prompts of more than 256 tokens in several steps.
    """
    extra = {"staging": True, "staging_bytes": STAGING_BYTES}
    connector = Connector("SeenConnector", "tests.vllm.seen", extra)
    return LLM(
        str(checkpoint),
        dtype="float32",
        max_model_len=MAX_TOKENS,
        max_num_batched_tokens=MAX_TOKENS if cached else 256,
        enable_chunked_prefill=not cached,
        enforce_eager=True,
        enable_prefix_caching=cached,
        num_gpu_blocks_override=16,
        kv_transfer_config=KVTransferConfig(**connector.config(role)),
    )


def sampling(new: int, params: dict[str, Any]) -> SamplingParams:
    return SamplingParams(max_tokens=new, temperature=0, ignore_eos=True, extra_args={"kv_transfer_params": params})


def main() -> None:
    """Answer on standard output, of which vLLM's log is no part."""
    with os.fdopen(os.dup(1), "w", buffering=1) as answers:
        os.dup2(2, 1)
        prefill = engine(Path(sys.argv[1]), "prefill", cached=sys.argv[2] == "cached")
        answers.write("ready\n")
        for line in sys.stdin:
            prompt = {"prompt_token_ids": json.loads(line)}
            (output,) = prefill.generate([prompt], sampling(1, {"do_remote_decode": True}), use_tqdm=False)
            answers.write(json.dumps(output.kv_transfer_params) + "\n")
        prefill.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
