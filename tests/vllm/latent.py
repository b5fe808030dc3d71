"""Make a checkpoint with one latent KV head (MLA): a small random DeepSeek-V2 without experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from model import CHARACTERS, SPECIAL, build

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["build_latent"]

LAYERS = 3


def build_latent(folder: Path) -> Path:
    """Save the checkpoint, with the tokenizer of the other model; return the folder."""
    build(folder)
    (folder / "made.json").unlink()
    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=len(SPECIAL) + len(CHARACTERS),
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=64,
        num_hidden_layers=LAYERS,
        first_k_dense_replace=LAYERS,  # no layer has experts
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=None,
        # The only ones that vLLM's kernel for CPUs takes.
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=64,
        v_head_dim=64,
        max_position_embeddings=4096,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        dtype="float32",
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)
    return folder
