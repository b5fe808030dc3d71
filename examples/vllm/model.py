"""Make a checkpoint for tests of KV caches: a small random Llama with a tokenizer and a chat template. No download.

    python examples/vllm/model.py FOLDER

Every token of its answers depends on the whole prompt, which a test of KV caches needs. Two usual ways to get a small
model fail at that: vLLM's ``load_format="dummy"`` and the default scale of random weights make so little of attention
that the output depends (almost) only on the last token, and is right with any KV cache. ``initializer_range`` below is
why it is different here, and `depends_on_early_tokens` checks it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

__all__ = ["build", "depends_on_early_tokens"]

SPECIAL = ("<unk>", "<s>", "</s>")
#: One token per character, so that any two different texts have different tokens.
CHARACTERS = ("\n", *map(chr, range(0x20, 0x7F)), *map(chr, range(0xA1, 0x100)))
CHAT = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}assistant: "


def build(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save the checkpoint into a folder, unless the same one is there already; return the folder.

    Args:
        folder: Where to; it is made.
        seed: Of the weights: models of different seeds answer differently.
        changes: Arguments of ``LlamaConfig`` that are to be different, such as ``sliding_window``.
    """
    asked = {"seed": seed, "changes": changes, "version": 1}
    made = folder / "made.json"
    if made.exists() and json.loads(made.read_text()) == asked:
        return folder
    torch.manual_seed(seed)
    model = LlamaForCausalLM(_config(changes))
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    made.write_text(json.dumps(asked))
    return folder


def _config(changes: dict[str, Any]) -> LlamaConfig:
    """Return the shape: what vLLM's attention on CPUs takes, and two heads of KV, so that two ranks can share them."""
    shape = {
        "vocab_size": len(SPECIAL) + len(CHARACTERS),
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "tie_word_embeddings": False,
        "bos_token_id": SPECIAL.index("<s>"),
        "eos_token_id": SPECIAL.index("</s>"),
        "dtype": "float32",
    }
    return LlamaConfig(**(shape | changes))


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def depends_on_early_tokens(folder: Path, prompts: int = 6, length: int = 300, new: int = 16) -> bool:
    """Return True if another second token of a long prompt changes most of the answer: else equal tokens prove little.

    Several prompts are tried, because a model that hardly sees what was before may answer one of them differently.
    """
    model = LlamaForCausalLM.from_pretrained(folder)
    source = torch.Generator().manual_seed(1)
    for _ in range(prompts):
        one = torch.randint(len(SPECIAL), model.config.vocab_size, (1, length), generator=source)
        other = one.clone()
        other[0, 1] = len(SPECIAL) + (int(one[0, 1]) - len(SPECIAL) + 1) % len(CHARACTERS)
        answers = [_generate(model, prompt, new) for prompt in (one, other)]
        if int((answers[0] == answers[1]).sum()) > new // 2:
            return False
    return True


def _generate(model: Any, prompt: torch.Tensor, new: int) -> torch.Tensor:
    """Return the likeliest tokens, exactly that many."""
    whole = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=new, min_new_tokens=new
    )
    answer: torch.Tensor = whole[0, prompt.shape[1] :]
    return answer


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    asked_for = parser.parse_args()
    build(asked_for.folder)
    if not depends_on_early_tokens(asked_for.folder):
        raise SystemExit("the answers of this model do not depend on early tokens: it cannot test KV caches")
    print(asked_for.folder)
