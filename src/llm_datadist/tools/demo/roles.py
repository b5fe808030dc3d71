"""The demo's roles, written as users would write them: ``python -m llm_datadist.tools.demo.roles ROLE TRANSPORT ...``.

A role prints lines for the user, and results in JSON behind :data:`RESULT`. The decoder reads the offer from standard
input; the prompt side serves until that input ends. So all of them end with the process that started them.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)
from llm_datadist.tools.demo.model import Array, DemoModel, DemoWorkload, PagedKV
from llm_datadist.views import tensor_views

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Begins a result; all else that a role prints is for the user.
RESULT: Final = "\x1eresult "
_HOST: Final = "127.0.0.1"
# Far above what link and pull take: a loaded machine must not fail the demo.
_TIMEOUT_MS: Final = 10_000
_KEY: Final = BlocksCacheKey(0, 0)
_WORK: Final = DemoWorkload()
_BLOCKS: Final = -(-_WORK.prompt_tokens // _WORK.block_tokens)


class _Side(NamedTuple):
    """One LLMDataDist, and its blocks cache; ``host`` is a copy for NumPy if that lies in a GPU."""

    datadist: LLMDataDist
    cache: Cache
    tensors: list[Array]
    registered: bool
    host: Cache | None = None

    def swap(self, blocks: list[int], *, to_device: bool) -> None:
        """Copy blocks between the cache and its copy, if there is one."""
        if self.host is not None:
            pair = (self.host, self.cache) if to_device else (self.cache, self.host)
            self.datadist.cache_manager.swap_blocks(*pair, {block: block for block in blocks})


@contextmanager
def _side(role: LLMRole, transport: str, memory: str, device: str, secrets: str) -> Iterator[_Side]:
    """Initialise one role, with a blocks cache full of NaN: a missing byte makes no token right by accident."""
    is_prompt = role is LLMRole.PROMPT
    own: list[Array] = list(np.full(_WORK.shape, np.nan, np.float32))
    config = LLMConfig(mem_pool_cfg=len(own) * own[0].nbytes, sync_kv_timeout=_TIMEOUT_MS)
    if device != "host":
        config.host_mem_pool_cfg = config.mem_pool_cfg
    if is_prompt:
        config.listen_ip_info = f"{_HOST}:0"  # any free port; datadist.listen_port has it
    config.ge_options = {"llm.Transport": transport, "llm.DeviceMemory": device}
    if secrets:
        config.ge_options["llm.AuthSecretFile"] = secrets
    with LLMDataDist(role, 0 if is_prompt else 1, config=config) as datadist:
        manager, key = datadist.cache_manager, _KEY if is_prompt else None
        desc = CacheDesc(len(own), list(_WORK.shape[1:]), DataType.DT_FLOAT)
        if memory == "registered":
            cache = manager.register_blocks_cache(desc, [each.ctypes.data for each in own], key)
            yield _Side(datadist, cache, own, registered=True)
        else:
            cache, host = manager.allocate_blocks_cache(desc, key), None
            if device != "host":
                on_host = CacheDesc(desc.num_tensors, desc.shape, desc.data_type, Placement.HOST)
                host = manager.allocate_blocks_cache(on_host)
            for view, each in zip(views := tensor_views(host or cache), own, strict=True):
                view[:] = each
            side = _Side(datadist, cache, views, registered=False, host=host)
            side.swap(list(range(_WORK.pool_blocks)), to_device=True)
            yield side


def _reference(*_: str) -> None:
    """Run prompt and generation in this process on plain NumPy memory, without the library."""
    model, started = DemoModel(_WORK), time.perf_counter()
    kv = PagedKV(list(np.zeros(_WORK.shape, np.float32)), list(range(_WORK.pool_blocks)))
    first_token = model.forward(_WORK.prompt(), kv)
    digest, tokens = kv.digest(), model.generate(first_token, _WORK.generate, kv)
    _tell(first_token=first_token, digest=digest, tokens=tokens, seconds=time.perf_counter() - started)


def _prompt(*setup: str) -> None:
    with _side(LLMRole.PROMPT, *setup) as side:
        print(f"listens on port {side.datadist.listen_port}")
        _tell(**_publish(side))
        sys.stdin.read()


def _decoder(*setup: str) -> None:
    with _side(LLMRole.DECODER, *setup) as side:
        model = DemoModel(_WORK)
        print("ready")
        _tell(**_pull(side, json.loads(sys.stdin.readline()), model))


def _both(*setup: str) -> None:
    with _side(LLMRole.PROMPT, *setup) as prompt, _side(LLMRole.DECODER, *setup) as decoder:
        offer = _publish(prompt)
        _tell(**offer)
        _tell(**_pull(decoder, offer, DemoModel(_WORK)))


def _publish(side: _Side) -> dict[str, Any]:
    """Run the prompt into the cache; return the offer, as a router hands it from prefill to decode."""
    blocks = _WORK.blocks(shifted=False)
    kv = PagedKV(side.tensors, blocks)
    first_token = DemoModel(_WORK).forward(_WORK.prompt(), kv)
    side.swap(blocks[:_BLOCKS], to_device=True)
    print(f"prefill of {kv.length} tokens published as cache {side.cache.cache_id}: {_BLOCKS} blocks")
    address = {"port": side.datadist.listen_port, "blocks": blocks[:_BLOCKS]}
    return address | {"length": kv.length, "first_token": first_token, "digest": kv.digest()}


def _pull(side: _Side, offer: dict[str, Any], model: DemoModel) -> dict[str, Any]:
    """Link, pull the offered blocks into others, unlink and generate; return what came of it."""
    datadist, sources = side.datadist, offer["blocks"]
    link = datadist.connect(f"{_HOST}:{offer['port']}", cluster_id=0, timeout=_TIMEOUT_MS)
    choice = link.explain()
    # Registered memory may use another transport than pools.
    transport = (choice.private_transport if side.registered else None) or choice.transport
    print(f"linked over {transport}")
    blocks = _WORK.blocks(shifted=True)
    started = time.perf_counter()
    datadist.cache_manager.pull_blocks(_KEY, side.cache, src_blocks=sources, dst_blocks=blocks[: len(sources)])
    seconds = time.perf_counter() - started
    side.swap(blocks[: len(sources)], to_device=False)
    kv = PagedKV(side.tensors, blocks, offer["length"])
    digest, nbytes = kv.digest(), len(sources) * side.tensors[0][0].nbytes * len(side.tensors)
    print(f"pulled {len(sources)} blocks, {nbytes / 1e6:.1f} MB, in {seconds * 1e3:.2f} ms")
    link.close(_TIMEOUT_MS)
    tokens = model.generate(offer["first_token"], _WORK.generate, kv)
    print(f"generated {len(tokens)} tokens")
    place = datadist.statistics().pools[0].device
    moved = {"transport": transport, "reason": choice.reason, "device": place, "blocks": len(sources), "bytes": nbytes}
    return moved | {"seconds": seconds, "digest": digest, "tokens": tokens, "sealed": choice.sealed}


def _tell(**result: object) -> None:
    print(RESULT + json.dumps(result))


_ROLES: Final = {"reference": _reference, "prompt": _prompt, "decoder": _decoder, "both": _both}


if __name__ == "__main__":
    try:
        _ROLES[sys.argv[1]](*sys.argv[2:])
    except Exception as error:  # noqa: BLE001  the runner shows it
        _tell(error=f"{type(error).__name__}: {error}")
        sys.exit(1)
