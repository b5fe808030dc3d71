"""A transformers model prefills in one process and decodes in another: its DynamicCache goes through our pools.

The model is a tiny Llama with random weights, made from its config: nothing is downloaded. The process that you start
is the router: it hands the prompt to a prefill process, and what that has published to a decode process. The tokens
have to be those of one process alone, and others when the pulled cache is zeroed: a model whose output does not depend
on its cache would prove nothing.
"""

from __future__ import annotations

import argparse
import multiprocessing
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from llm_datadist import CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist.views import torch_views

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

HOST, PREFILL_ID, DECODE_ID, KEY = "127.0.0.1", 1, 2, CacheKey(1, req_id=0)
PROMPT_TOKENS, NEW_TOKENS, LINK_MS, SECONDS = 48, 24, 5_000, 60.0
CONFIG = LlamaConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    initializer_range=0.1,  # with the default, 0.02, all tokens that this model makes are the same
    bos_token_id=None,
    eos_token_id=None,  # no token ends the text early
)
torch.set_num_threads(1)  # equal sums in every process; and two of them share a small machine


class Outcome(NamedTuple):
    """What the decode process answers: about its link; the tokens from the pulled cache, and from a zeroed one."""

    transport: str
    nbytes: int
    tokens: list[int]
    control: list[int]


def make_model() -> LlamaForCausalLM:
    """Return the model, in float32; every process makes the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


def generate(
    model: LlamaForCausalLM, tokens: list[int], count: int, kv: DynamicCache | None = None
) -> tuple[list[int], DynamicCache]:
    """Append the ``count`` most likely tokens; return all tokens and the cache. ``kv`` holds all given but the last."""
    made = model.generate(
        torch.tensor([tokens]), past_key_values=kv, max_new_tokens=count, do_sample=False, return_dict_in_generate=True
    )
    return made.sequences[0].tolist(), made.past_key_values


def kv_desc(length: int) -> CacheDesc:
    """Describe K and V of every layer, as a DynamicCache has them: (batch, heads, tokens, head size)."""
    shape = [1, CONFIG.num_key_value_heads, length, CONFIG.head_dim]
    return CacheDesc(2 * CONFIG.num_hidden_layers, shape, DataType.DT_FLOAT)


def start(role: LLMRole, cluster_id: int, transport: str) -> LLMDataDist:
    """Return an end with a pool of 16 MiB; the prompt listens on a free port."""
    config = LLMConfig()
    config.device_id, config.enable_cache_manager = 0, True
    config.mem_pool_cfg = '{"memory_size": 16777216}'
    if role is LLMRole.PROMPT:
        config.listen_ip_info = f"{HOST}:0"
    dd = LLMDataDist(role, cluster_id)
    dd.init(config.generate_options() | {"llm.Transport": transport})
    return dd


def prefill(channel: Connection, transport: str) -> None:
    """Run the prompt, publish its keys and values, and tell the router where they are and which token comes first."""
    model, dd = make_model(), start(LLMRole.PROMPT, PREFILL_ID, transport)
    prompt: list[int] = channel.recv()
    tokens, kv = generate(model, prompt, 1)
    cache = dd.cache_manager.allocate_cache(kv_desc(len(prompt)), [KEY])
    computed = [tensor for layer in kv.layers for tensor in (layer.keys, layer.values)]
    for view, tensor in zip(torch_views(cache), computed, strict=True):
        view.copy_(tensor)
    channel.send((dd.listen_port, tokens))
    channel.poll(SECONDS)  # until the router hangs up
    dd.finalize()


def decode(channel: Connection, transport: str) -> None:
    """Pull the keys and values of the prompt and generate from them; then once more from zeros."""
    model, dd = make_model(), start(LLMRole.DECODER, DECODE_ID, transport)
    port, tokens = channel.recv()
    cache = dd.cache_manager.allocate_cache(kv_desc(len(tokens) - 1))
    peer = LLMClusterInfo()
    peer.remote_cluster_id = PREFILL_ID
    peer.append_local_ip_info(HOST, 0)
    peer.append_remote_ip_info(HOST, port)
    status, _ = dd.link_clusters([peer], timeout=LINK_MS)
    if status != LLMStatusCode.LLM_SUCCESS:  # a status: link_clusters does not raise
        raise RuntimeError(f"link_clusters: {status}")
    dd.cache_manager.pull_cache(KEY, cache)
    link = dd.explain(PREFILL_ID)

    views = torch_views(cache)
    layers = list(zip(views[::2], views[1::2], strict=True))
    # A DynamicCache reads the views when it is made, and grows in memory of its own.
    found, _ = generate(model, tokens, NEW_TOKENS - 1, DynamicCache(layers))
    for view in views:
        view.zero_()
    control, _ = generate(model, tokens, NEW_TOKENS - 1, DynamicCache(layers))
    dd.unlink_clusters([peer], timeout=LINK_MS)
    dd.finalize()
    # After the unlink: at this answer the router ends the prefill, and a link of that moment would be lost.
    channel.send(Outcome(link.transport, link.read_bytes, found, control))


def ask(name: str, channel: Connection, question: object) -> Any:
    """Send to a process and return its answer; stop if it ends before that, or takes too long."""
    try:
        channel.send(question)
        if channel.poll(SECONDS):
            return channel.recv()
    except (EOFError, ConnectionError):
        raise SystemExit(f"FAILED: the {name} process ended without an answer") from None
    raise SystemExit(f"FAILED: the {name} process gave no answer within {SECONDS:g} s")


def route(transport: str, prompt: list[int]) -> Outcome:
    """Hand one request to a prefill and a decode process; stop if one of them fails."""
    spawn = multiprocessing.get_context("spawn")
    processes, channels = [], []
    try:
        for role in (prefill, decode):
            channel, end = spawn.Pipe()
            process = spawn.Process(target=role, args=(end, transport), name=role.__name__)
            process.start()
            end.close()  # now that process alone has it: when the process ends, the channel ends
            processes.append(process)
            channels.append(channel)
        published = ask("prefill", channels[0], prompt)
        outcome: Outcome = ask("decode", channels[1], published)
        channels[0].close()
        for process in processes:
            process.join(SECONDS)
            if process.exitcode != 0:
                raise SystemExit(f"FAILED: the {process.name} process ended with {process.exitcode}")
        return outcome
    finally:
        for process in processes:
            process.kill()


def main() -> None:
    """Compare two processes with one, over each transport."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--transport", choices=["shm", "tcp"], help="only this one; without it both")
    asked = parser.parse_args().transport
    prompt = torch.randint(CONFIG.vocab_size, (PROMPT_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    reference, _ = generate(make_model(), prompt, NEW_TOKENS)
    print(f"one process: {NEW_TOKENS} tokens after {PROMPT_TOKENS}: {reference[PROMPT_TOKENS:]}", flush=True)
    for transport in [asked] if asked else ["shm", "tcp"]:
        found = route(transport, prompt)
        print(f"{transport}: linked over {found.transport}, pulled {found.nbytes} bytes of keys and values", flush=True)
        if found.tokens != reference:
            raise SystemExit(f"FAILED: two processes make other tokens: {found.tokens[PROMPT_TOKENS:]}")
        print(f"{transport}: two processes make the same {NEW_TOKENS} tokens", flush=True)
        others = sum(a != b for a, b in zip(found.control, reference, strict=True))
        if others == 0:
            raise SystemExit("FAILED: control: a zeroed cache gives the same tokens, so equal ones prove nothing")
        print(f"{transport}: control: from a zeroed cache, {others} of them are others", flush=True)
    print("prefill_decode: OK")


if __name__ == "__main__":
    main()
