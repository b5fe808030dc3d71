"""Shares, pieces and rows against oracles, and bytes between the workers of engines that are not alike.

A kernel of vLLM writes the KV where bytes are compared: at the prefill engine, and once more where the decode engine
would have it. No server runs.
"""

from __future__ import annotations

import random
from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: make test-vllm")

import torch
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface as kinds
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from llm_datadist import LLMDataDist
from llm_datadist.errors import CacheMismatch, LLMException
from llm_datadist.integrations.vllm import LLMDataDistConnector, worker
from llm_datadist.integrations.vllm import rank as rank_module
from llm_datadist.integrations.vllm.kinds import describe, require_supported, windows_of
from llm_datadist.integrations.vllm.layout import (
    COLUMNS,
    Layout,
    divide,
    pieces,
    portions,
    rows_of,
    shares,
)
from llm_datadist.integrations.vllm.offers import KvOffer, Orders
from llm_datadist.integrations.vllm.staging import PortableCopier
from llm_datadist.integrations.vllm.worker import RankWorker
from tests.vllm.test_staging import copy_as_cuda

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

TP = (1, 2, 4, 8)
HEADS = (1, 2, 4, 8)
SIZES = (16, 32, 128)
STAGED = [(False, False), (True, False), (False, True), (True, True)]  # there, here
UNEVEN = [(16, 32), (32, 16), (16, 128), (128, 16), (32, 128), (128, 32)]
SIZE = 32  # of a head's K, and of its V
LAYERS = 2
TOKENS = 300


def layout(ranks: int, heads: int, tokens: int, *, pages: int = 1, nbytes: int = 8, order: str = COLUMNS) -> Layout:
    """Return the layout of a model with so many KV heads; K and V of a token have together ``nbytes``."""
    return Layout(
        identity={"attention": order},
        block_tokens=tokens,
        pages=pages,
        heads=max(1, heads // ranks),
        row_bytes=tokens // pages * nbytes,
        places=[["layer"]],
        ranks=ranks,
        replicas=max(1, ranks // heads),
        strips=[(nbytes // 2, 1), (1, nbytes // 2)],
    )


# --- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", HEADS)
def test_every_head_comes_once_and_every_rank_of_the_peer_is_claimed(heads: int) -> None:
    for there in TP:
        for here in TP:
            theirs, ours = layout(there, heads, 16), layout(here, heads, 16)
            claimed: Counter[int] = Counter()
            reading: Counter[int] = Counter()
            readers: dict[int, set[int]] = {}
            for rank in range(here):
                held: list[int] = []
                for share in shares(ours, rank, theirs):
                    claimed[share.rank] += 1
                    readers.setdefault(share.rank, set()).add(share.readers)
                    reading[share.rank] += share.count > 0
                    head_there = share.rank * heads // there + share.theirs
                    head_here = rank * heads // here + share.ours
                    if share.count:
                        assert head_there == head_here
                    held += range(share.ours, share.ours + share.count)
                assert held == list(range(ours.heads))
            assert readers == {rank: {claimed[rank]} for rank in range(there)}, "a grant would wait for a reader"
            for first in range(0, there, theirs.replicas):
                of_replicas = [reading[rank] for rank in range(first, first + theirs.replicas)]
                assert max(of_replicas) - min(of_replicas) <= 1, "one replica serves more than its part"


def values(heads: int, tokens: int, size: int) -> np.ndarray[Any, Any]:
    """Return bytes by head, token, K or V, and component; none is 0."""
    head, token, half, part = np.ogrid[:heads, :tokens, :2, :size]
    found: np.ndarray[Any, Any] = ((head * 7919 + token * 104_729 + half * 57 + part * 31) % 251 + 1).astype(np.uint8)
    return found


def memory_of(at: Layout, rank: int, kv: np.ndarray[Any, Any], blocks: list[int]) -> np.ndarray[Any, Any]:
    """Return a rank's rows, as the kernel orders their bytes; other blocks are 0."""
    tokens, size = at.page_tokens, kv.shape[3]
    first = rank // at.replicas * at.heads
    held = np.zeros((at.heads, len(blocks) * at.block_tokens, 2, size), np.uint8)
    fit = min(held.shape[1], kv.shape[1])
    held[:, :fit] = kv[first : first + at.heads, :fit]
    keys, others = held.reshape(at.heads, len(blocks), at.pages, tokens, 2, size).transpose(4, 1, 2, 0, 3, 5)
    pages = [keys.swapaxes(3, 4).reshape(*keys.shape[:3], -1), others.reshape(*others.shape[:3], -1)]
    rows = np.zeros((64, at.pages, at.heads, at.row_bytes), np.uint8)
    rows[blocks] = np.concatenate(pages, axis=3)
    return rows.reshape(-1, at.row_bytes)


def read(theirs: Layout, ours: Layout, kv: np.ndarray[Any, Any], tokens: int, most: int) -> None:
    """Move what a rank reads, as a worker does, and compare all of its memory."""
    source = random.Random(tokens)
    there, here = (source.sample(range(1, 64), -(-tokens // each.block_tokens)) for each in (theirs, ours))
    moved = pieces(theirs, [(0, there)], ours, [(0, here)])
    stored = [memory_of(theirs, rank, kv, there) for rank in range(theirs.ranks)]
    for rank in range(ours.ranks):
        own = np.zeros((64 * ours.rows, ours.row_bytes), np.uint8)
        for share in shares(ours, rank, theirs):
            if not share.count:
                continue
            if theirs.page_tokens == ours.page_tokens:
                rows = rows_of(theirs, moved.theirs, share.theirs, share.count)
                own[rows_of(ours, moved.ours, share.ours, share.count)] = stored[share.rank][rows]
            else:
                for portion in portions(theirs, ours, moved, share, most):
                    divide(portion, moved.tokens, theirs, stored[share.rank][portion[0]], ours, own)
        both = min(len(there) * theirs.block_tokens, len(here) * ours.block_tokens)
        assert (own == memory_of(ours, rank, kv[:, :both], here)).all(), (theirs, ours, rank)


@pytest.mark.parametrize("there", SIZES)
@pytest.mark.parametrize("here", SIZES)
def test_every_byte_of_every_head_and_token_is_where_the_kernel_reads_it(there: int, here: int) -> None:
    for heads in HEADS:
        kv = values(heads, 384, 4)
        for ranks in TP:
            for others in TP:
                theirs, ours = layout(ranks, heads, there), layout(others, heads, here)
                ours.check(theirs)
                read(theirs, ours, kv, (1, 15, 129, 300)[(ranks + others) % 4], most=2)


@pytest.mark.parametrize(("there", "here"), [((128, 4), (32, 1)), ((64, 4), (128, 2)), ((32, 2), (32, 1))])
def test_blocks_of_several_pages(there: tuple[int, int], here: tuple[int, int]) -> None:
    kv = values(2, 384, 4)
    theirs, ours = (layout(2 - index, 2, size, pages=n) for index, (size, n) in enumerate((there, here)))
    read(theirs, ours, kv, 300, most=3)


def test_tokens_that_are_already_here_are_not_moved() -> None:
    theirs, ours = layout(1, 1, 16), layout(1, 1, 32)
    moved = pieces(theirs, [(0, [9, 8, 7, 6]), (2, [5, 4])], ours, [(1, [3]), (1, [2])])
    assert moved.theirs.tolist() == [7, 6, 5, 4]
    assert moved.ours.tolist() == [6, 7, 4, 5]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"identity": {"attention": "CPU_ATTN amx"}}, "attention: CPU_ATTN amx there, CPU_ATTN columns here"),
        ({"heads": 4}, "KV heads: 4 x 1 ranks there, 2 x 1 ranks here"),
        ({"row_bytes": 1024, "strips": []}, "bytes of a token of a row: 64 there, 8 here"),
        ({"block_tokens": 32, "row_bytes": 256, "strips": []}, "block_tokens: 32 there, 16 here, and rows of"),
    ],
)
def test_engines_that_do_not_fit_are_refused_with_the_difference(changes: dict[str, Any], said: str) -> None:
    ours = layout(1, 2, 16)
    with pytest.raises(CacheMismatch, match=said):
        ours.check(msgspec.structs.replace(ours, **changes))


@pytest.mark.parametrize("changes", [{"pages": 3}, {"pages": 32}, {"replicas": 2}, {"row_bytes": 129}])
def test_a_layout_that_no_engine_has_is_refused(changes: dict[str, Any]) -> None:
    ours = layout(1, 2, 16)
    with pytest.raises(CacheMismatch, match="do not divide evenly"):
        ours.check(msgspec.structs.replace(ours, **changes))


def test_rows_with_other_strips_are_not_divided() -> None:
    ours = layout(1, 2, 16)
    with pytest.raises(CacheMismatch, match="cannot be divided"):
        ours.check(msgspec.structs.replace(layout(1, 2, 32), strips=[(1, 1)]))


# --- kinds ----------------------------------------------------------------------------------------------------------


def spec_of(kind: Any = FullAttentionSpec, **given: Any) -> Any:
    return kind(**({"block_size": 16, "num_kv_heads": 1, "head_size": SIZE, "dtype": torch.float32} | given))


def configured(
    specs: list[Any],
    *,
    ranks: int = 1,
    heads: int = 1,
    layers: Any = None,
    role: str = "kv_producer",
    block_bytes: int = 0,
    staged: bool = False,
    **parallel: Any,
) -> tuple[Any, Any]:
    """Return what a connector sees of an engine: one group of layers for each spec."""
    sizes = {"pipeline_parallel_size": 1, "decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    extra: dict[str, Any] = {"pool": False, "lease_s": 3600}
    if staged:
        extra |= {"staging": True, "staging_bytes": 20 * block_bytes}
    transfer = KVTransferConfig(kv_connector="c", kv_role=role, engine_id=role, kv_connector_extra_config=extra)
    names = [[f"{group}.{layer}" for layer in range(LAYERS)] for group in range(len(specs))]
    module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "CPU_ATTN"), isa="vec")
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        cache_config=SimpleNamespace(block_size=specs[0].block_size),
        model_config=SimpleNamespace(
            model="model", enable_sleep_mode=False, get_total_num_kv_heads=lambda: heads, max_model_len=TOKENS
        ),
        weight_transfer_config=None,
        lora_config=None,
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks, **(sizes | parallel)),
        compilation_config=SimpleNamespace(
            static_forward_context=layers or {name: module for group in names for name in group}
        ),
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=group) for spec, group in zip(specs, names, strict=True)]
    cache = SimpleNamespace(
        transfer_group_ids=list(range(len(specs))),
        kv_cache_groups=groups,
        kv_cache_tensors=[SimpleNamespace(size=40 * block_bytes)],
        num_blocks=40,
    )
    return config, cache


SUBCLASSES = {
    "SinkFullAttentionSpec": {"sink_len": 4},
    "RSWASpec": {"rswa_window": 16},
    "HiddenStateCacheSpec": {},
    "SlidingWindowMLASpec": {"sliding_window": 32},
    "ChunkedLocalAttentionSpec": {"attention_chunk_size": 32},
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", SUBCLASSES)
def test_only_exact_kinds_of_layers_are_served(name: str, wrapped: bool) -> None:
    spec = spec_of(getattr(kinds, name), **SUBCLASSES[name])
    if wrapped:
        spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"0.0": spec_of(), "0.1": spec})
    with pytest.raises(LLMException, match=f"does not support layers of kind {name}"):
        require_supported(*configured([spec]))


def test_known_kinds_are_served_and_windows_found() -> None:
    window = spec_of(SlidingWindowSpec, sliding_window=64, extra_retained_tokens=2)
    both = {"2.0": spec_of(), "2.1": spec_of(MLAAttentionSpec)}
    config, cache = configured([spec_of(), window, UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=both)])
    require_supported(config, cache)
    assert windows_of(cache) == [None, 66, None]


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size=2"),
        ({"decode_context_parallel_size": 2}, "decode_context_parallel_size=2"),
        ({"prefill_context_parallel_size": 4}, "prefill_context_parallel_size=4"),
    ],
)
@pytest.mark.parametrize("role", KVConnectorRole)
def test_ranks_that_divide_layers_or_tokens_are_refused_when_the_connector_starts(
    role: KVConnectorRole, parallel: dict[str, Any], said: str
) -> None:
    config, cache = configured([spec_of()], **parallel)
    with pytest.raises(LLMException, match=f"does not support {said}"):
        LLMDataDistConnector(config, role, cache)
    assert LLMDataDist.llm_engine_instance is None, "a pool was made"


@pytest.mark.parametrize(("device", "said"), [("cuda", 'cuda with "pool": false'), ("xpu", "xpu")])
@pytest.mark.parametrize("role", KVConnectorRole)
def test_kv_that_peers_cannot_read_is_refused_when_the_connector_starts(
    monkeypatch: pytest.MonkeyPatch, role: KVConnectorRole, device: str, said: str
) -> None:
    monkeypatch.setattr("llm_datadist.integrations.vllm.kinds.current_platform", SimpleNamespace(device_type=device))
    config, cache = configured([spec_of()])
    rule = f'^LLMDataDistConnector does not support KV on {said}, unless kv_connector_extra_config has "staging": true$'
    with pytest.raises(LLMException, match=rule):
        LLMDataDistConnector(config, role, cache)
    assert LLMDataDist.llm_engine_instance is None, "a pool was made"
    require_supported(*configured([spec_of()], staged=True))


def described(spec: Any, *, shape: tuple[int, ...] = (), **given: Any) -> Layout:
    """Return the layout of a rank of an engine with one group of layers, whose views have a shape."""
    config, cache = configured([spec], **given)
    of = shape or (cache.num_blocks, spec.num_kv_heads, 16, 2 * SIZE)
    names = cache.kv_cache_groups[0].layer_names
    found, _ = describe(dict(zip(names, torch.zeros(len(names), *of), strict=True)), config, cache, {})
    return found


def test_replicas_are_those_of_the_model_and_one_head_is_latent() -> None:
    assert described(spec_of(), ranks=8, heads=2).replicas == 4
    assert described(spec_of(num_kv_heads=2), ranks=4, heads=8).replicas == 1
    latent = described(spec_of(MLAAttentionSpec), shape=(40, 1, 16, 576), ranks=4, heads=16)
    assert (latent.replicas, latent.holders, latent.heads, latent.row_bytes) == (4, 1, 1, 16 * 576 * 4)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        ((40, 1, 8, 64), "a layer of shape .* for 40 blocks of 16 tokens"),
        ((41, 1, 16, 64), "a layer of shape"),
        ((40, 16, 64), "a layer of shape"),
    ],
)
def test_memory_of_another_shape_is_refused(shape: tuple[int, ...], said: str) -> None:
    with pytest.raises(LLMException, match=said):
        described(spec_of(), shape=shape)


def test_bytes_of_another_kernel_are_not_taken_for_those_of_this_one() -> None:
    def found(name: str, isa: str, dtype: torch.dtype = torch.float32) -> Layout:
        module = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: name), isa=isa)
        return described(spec_of(dtype=dtype), layers=dict.fromkeys(["0.0", "0.1"], module))

    assert found("CPU_ATTN", "vec") == found("CPU_ATTN", "vec16", torch.bfloat16)
    assert found("CPU_ATTN", "vec").identity == {"attention": COLUMNS}
    others = [found("CPU_ATTN", "amx"), found("CPU_ATTN", "neon"), found("CPU_ATTN", "vec", torch.uint8)]
    others.append(found("FLASH_ATTN", ""))
    assert len({COLUMNS, *(each.identity["attention"] for each in others)}) == 5
    assert not any(each.strips for each in others)


# --- bytes between workers ------------------------------------------------------------------------------------------


class Engine:
    """The workers of all ranks, with their KV caches. If it is staged, blocks that peers read are slots."""

    def __init__(
        self, role: str, ranks: int, heads: int, tokens: int, patch: pytest.MonkeyPatch, *, staged: bool, latent: bool
    ) -> None:
        held, count = max(1, heads // ranks), -(-TOKENS // tokens)
        self.blocks = random.Random(ranks).sample(range(1, 40), count)
        self.read = random.Random(ranks + 1).sample(range(20), count) if staged else self.blocks
        self.caches, self.workers = [], []
        self.tokens, self.replicas, self.staged, self.latent = tokens, max(1, ranks // heads), staged, latent
        for rank in range(ranks):
            patch.setattr(rank_module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            spec = spec_of(MLAAttentionSpec if latent else FullAttentionSpec, num_kv_heads=held, block_size=tokens)
            nbytes = LAYERS * held * tokens * 2 * SIZE * 4
            given = configured([spec], ranks=ranks, heads=heads, role=role, block_bytes=nbytes, staged=staged)
            self.workers.append(RankWorker(*given))
            self.caches.append(list(torch.zeros(LAYERS, 40, held, tokens, 2 * SIZE)))  # as vLLM: one allocation
            self.workers[rank].register({f"0.{layer}": view for layer, view in enumerate(self.caches[rank])})
            self.workers[rank].use_copies(copy_as_cuda)
            for slots in self.slots(rank):
                slots[:] = float("nan")  # another request's

    def slots(self, rank: int) -> list[torch.Tensor]:
        if not self.staged:
            return []
        copier = self.workers[rank].copier
        assert isinstance(copier, PortableCopier)
        return list(copier.slots.values())

    def require_others_untouched(self, rank: int) -> None:
        """Require that slots of no request are as they were."""
        others = [slot for slot in range(20) if slot not in self.read]
        assert all(bool(slots[others].isnan().all()) for slots in self.slots(rank))

    def written(self, rank: int, kv: torch.Tensor) -> list[torch.Tensor]:
        """Return what the KV cache is once vLLM's kernel has written this KV (layer, K or V, token, head, part)."""
        found = [torch.zeros_like(view) for view in self.caches[rank]]
        held = found[0].shape[1]
        first = rank // self.replicas * held
        if self.latent:  # one row of bytes for each token, as they are
            for view, halves in zip(found, kv, strict=True):
                for token, row in enumerate(halves[:, :, 0].transpose(0, 1).flatten(1)):
                    view[self.blocks[token // self.tokens], 0, token % self.tokens] = row
            return found
        kernels = import_module("vllm._custom_ops")
        slots = torch.tensor(
            [self.blocks[n // self.tokens] * self.tokens + n % self.tokens for n in range(kv.shape[2])]
        )
        for view, (keys, others) in zip(found, kv[:, :, :, first : first + held], strict=True):
            halves = view.view(40, held, self.tokens * 2, SIZE).chunk(2, dim=2)
            kernels.cpu_attn_reshape_and_cache(keys.contiguous(), others.contiguous(), *halves, slots, "vec")
        return found


@pytest.fixture
def fetch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[Engine, Engine]]]:
    current_platform.import_kernels()
    monkeypatch.setattr(worker, "_BUFFER_BYTES", 40_000)  # several portions
    monkeypatch.setattr(rank_module, "identity_of", lambda _: {})
    made: list[Engine] = []

    def one(
        there: tuple[int, int],
        here: tuple[int, int],
        heads: int,
        staged: tuple[bool, bool] = (False, False),
        latent: bool = False,
    ) -> tuple[Engine, Engine]:
        """Let an engine of (ranks, tokens of a block) fetch a request from another."""
        prefill, decode = (
            Engine(role, *shape, monkeypatch, staged=slots, latent=latent)
            for role, shape, slots in [
                ("kv_producer", (there[0], heads, there[1]), staged[0]),
                ("kv_consumer", (here[0], heads, here[1]), staged[1]),
            ]
        )
        made.extend([prefill, decode])
        kv = torch.rand(LAYERS, 2, TOKENS, heads, SIZE)
        for rank, cache in enumerate(prefill.caches):
            for view, written in zip(cache, prefill.written(rank, kv), strict=True):
                view.copy_(written)
        endpoints = [each.endpoint() for each in prefill.workers]
        token = random.randbytes(16)
        for each in prefill.workers:
            saves = list(zip(prefill.blocks, prefill.read, strict=True)) if prefill.staged else []
            each.obey(Orders(saves=saves, grants={"r": (token, prefill.read)}), idle=True)
            each.save()
        if prefill.staged:  # vLLM uses them again
            for cache in prefill.caches:
                for view in cache:
                    view[:] = float("nan")
        for each in prefill.workers:
            each.obey(Orders(offered=["r"]), idle=True)
        ranks = [each.endpoint for each in endpoints if each is not None]
        offer = KvOffer(b"", [(0, prefill.read)], ranks, endpoints[0].layout)  # type: ignore[union-attr]
        orders = Orders(claims={"r": (offer, token)}, fetches={"r": [(0, decode.read)]})
        if decode.staged:
            orders.loads["r"] = decode.read, decode.blocks
        for each in decode.workers:
            each.obey(orders, idle=True)
        for each, ended in [(each, "received") for each in decode.workers] + [
            (each, "sent") for each in prefill.workers
        ]:
            assert until_ended(each, ended)
        for rank, cache in enumerate(decode.caches):
            for view, written in zip(cache, decode.written(rank, kv), strict=True):
                assert (view == written).all()
            decode.require_others_untouched(rank)
        for rank in range(there[0]):
            prefill.require_others_untouched(rank)
        return prefill, decode

    yield one
    for engine in made:
        for each in engine.workers:
            each.stop()


def until_ended(of: RankWorker, ended: str) -> bool:
    """Return True once a worker reports the request as received, or as sent."""
    for _ in range(60_000):  # a step sleeps a millisecond
        results = of.results()
        assert not results.failed_recving
        told = of.take_told()
        sent = results.finished_sending | set(told.ended if told is not None else ())
        if "r" in (results.finished_recving if ended == "received" else sent):
            return True
    return False


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize("heads", [1, 2, 4])
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 2), (2, 4), (1, 4), (4, 1), (2, 2)])
def test_all_heads_come_and_all_blocks_are_free_at_once_whatever_the_ranks(
    fetch: Callable[..., tuple[Engine, Engine]], there: int, here: int, heads: int, staged: tuple[bool, bool]
) -> None:
    fetch((there, 32), (here, 32), heads, staged)


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize(("there", "here"), [(1, 2), (2, 1), (4, 2)])
def test_a_latent_head_comes_whatever_the_ranks(
    fetch: Callable[..., tuple[Engine, Engine]], there: int, here: int, staged: tuple[bool, bool]
) -> None:
    fetch((there, 16), (here, 16), 1, staged, latent=True)


@pytest.mark.parametrize("staged", STAGED)
@pytest.mark.parametrize(("there", "here"), UNEVEN)
@pytest.mark.parametrize(("ranks", "heads"), [((1, 1), 1), ((1, 2), 1), ((2, 1), 2)])
def test_blocks_of_other_sizes_are_divided(
    fetch: Callable[..., tuple[Engine, Engine]],
    there: int,
    here: int,
    ranks: tuple[int, int],
    heads: int,
    staged: tuple[bool, bool],
) -> None:
    fetch((ranks[0], there), (ranks[1], here), heads, staged)
