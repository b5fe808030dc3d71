"""v1 between two ends: links of all or none, roles, keys that are consumed, offsets, memory without a pool, and
transfers to addresses (interface §3.6, §3.7, §6.14, §8, B2.4, R5, R6, R12, R18, R22)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from faults.gated import gated_call_v1
from faults.gates import Gate
from faults.strangers import silent_port
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
    errors,
)
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, NotInitialized, NotLinked, ParamError, StateError
from tests.support.ends import LocalEnd
from tests.support.frozen import frozen
from tests.support.layers import Always, Gated, addresses
from tests.support.linking import SUCCESS, alone, begin_there, info, link, links, redials, result_there, switch, unlink
from tests.support.moves import Use, in_time, moved, picture, refused, same_bytes, show, wait_until
from tests.support.ranks import drop, host, join, status, table
from tests.support.refusals import NONE, RULE, TYPE, UINT64, Spec, Table, bad, refuse
from tests.support.v1 import DIRECT, POOL, desc, kv_call, kv_make, start_end

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.kinds import Bytes, End, Pair, World

pytestmark = pytest.mark.covers(
    "KvCacheManager: is_initialized pull_blocks pull_cache transfer_cache_async",
    "LLMDataDist: check_link_status link_clusters",
)

OK, INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
REPEAT, FAILED = LLMStatusCode.LLM_REPEAT_REQUEST, LLMStatusCode.LLM_LINK_FAILED
NOT_YET, BUSY = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_BUSY
ALREADY, WAITED = LLMStatusCode.LLM_ALREADY_LINK, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
LISTENING = {"llm.listenIpInfo": "127.0.0.1:0"}
KEYS, BLOCKS = (CacheKey(1, 10, 1), CacheKey(1, 11, 1)), BlocksCacheKey(1, 3)


def probe(world: World, cluster_id: int) -> None:
    world.dd.check_link_status(cluster_id)


@pytest.fixture
def prompts() -> Iterator[list[LocalEnd]]:
    """Three PROMPTs in this process, clusters 11, 12 and 13."""
    ends = [LocalEnd(f"prompt {number}") for number in (11, 12, 13)]
    for number, end in zip((11, 12, 13), ends, strict=True):
        start_end(end, "PROMPT", number, **DIRECT)
    yield ends
    for end in ends:
        end.stop()


def test_r19_all_clusters_of_a_call_are_linked_or_none(end: LocalEnd, prompts: list[LocalEnd]) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    clusters = [info(each.cluster_id, each.port) for each in prompts]
    assert end.do(link, clusters) == (OK, [OK] * 3)
    for each in prompts:
        end.do(probe, each.cluster_id)
    assert end.do(link, clusters[:1]) == (FAILED, [ALREADY])
    assert sorted(end.do(links)) == [11, 12, 13]
    assert end.do(unlink, clusters[:2]) == (OK, [OK] * 2)
    alone(*prompts[:2])
    wrong = info(99, prompts[1].port)
    learned = info(None, prompts[0].port)  # its id is learned, and it is given up all the same
    assert end.do(link, [learned, wrong]) == (FAILED, [FAILED, FAILED])
    with silent_port() as port:  # what does not answer is a time-out of v1, and more than 16 are not too many
        codes = end.do(link, [clusters[0], *(info(100 + i, port) for i in range(20))], 300)
    assert codes == (FAILED, [FAILED, *[WAITED] * 20])
    assert sorted(end.do(links)) == [13]
    alone(*prompts[:2])
    assert end.do(link, [learned]) == SUCCESS
    end.do(probe, 11)


def test_a_call_that_cannot_be_links_nothing(end: LocalEnd, prompts: list[LocalEnd]) -> None:
    clusters = [info(11, prompts[0].port), info(12, prompts[1].port)]
    for role in ("PROMPT", "MIX"):
        start_end(end, role, 1, **DIRECT)
        assert end.do(link, clusters) == (INVALID, [INVALID] * 2)
        with pytest.raises(ParamError, match="only a DECODER"):
            end.do(probe, 11)
        assert end.do(links) == {}
        end.stop()
    start_end(end, "DECODER", 1, **DIRECT)
    for local, remote in ((0, 1), (1, 0), (2, 1), (1, 2), (2, 2), (0, 0)):  # one for the one device
        bad = info(12, *[prompts[1].port] * remote, local=None)
        for _ in range(local):
            bad.append_local_ip_info("127.0.0.1", 0)
        assert end.do(link, [clusters[0], bad]) == (INVALID, [FAILED, INVALID])
        assert end.do(links) == {}
    assert end.do(link, []) == (INVALID, [])
    refused = end.do(link, [*clusters, clusters[0]])
    assert refused == (REPEAT, [FAILED, FAILED, REPEAT])
    assert [str(status.error) for status in refused[1]] == [
        "None",
        "None",
        "clusters[2]: cluster 11 is in the list twice",
    ]
    assert end.do(links) == {}
    for force in (False, True):
        assert end.do(unlink, clusters, 5000, force) == (OK, [NOT_YET] * 2)
        assert end.do(link, clusters[:1]) == SUCCESS
        assert end.do(unlink, [clusters[1], clusters[0], info(99)], 5000, force) == (OK, [NOT_YET, OK, NOT_YET])
        alone(end, prompts[0])
    assert end.do(link, clusters) == (OK, [OK, OK])


def test_a_running_pull_makes_the_link_busy_for_unlink_and_probe(tcp_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    tcp_pair.start(**POOL)
    key, cluster = CacheKey(1, 10), info(1, prompt.port)
    src = prompt.do(kv_make, "kv", desc(), 1, (key,))
    dst = decoder.do(kv_make, "kv", desc(), 2)
    args = (1, "before copy", tmp_path, "pull_cache", key, Use("kv"), 3)
    decoder.do(begin_there, "pull", gated_call_v1, *args)
    gate = Gate(tmp_path)
    try:
        gate.wait()
        for force in (False, True):
            assert decoder.do(unlink, [cluster], 5000, force) == (BUSY, [BUSY])
        with pytest.raises(errors.LinkError) as caught:
            decoder.do(probe, 1)
        assert (caught.value.status_code, caught.value.peer) == (BUSY, 1)
    finally:
        gate.open()
        assert decoder.do(result_there, "pull") is None
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    decoder.do(probe, 1)
    assert decoder.do(unlink, [cluster], 5000, True) == SUCCESS
    alone(prompt, decoder)
    with pytest.raises(NotLinked) as gone:
        decoder.do(probe, 1)
    assert gone.value.status_code is NOT_YET


def test_check_link_status_and_pulls_of_a_stopped_peer_time_out(shm_pair: Pair) -> None:
    shm_pair.start(**POOL, sync_kv_timeout=200, extra={"llm.PeerTimeout": "600"})
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    theirs, mine = both_kinds(prompt, 1), both_kinds(decoder, 3)
    decoder.do(probe, 1)
    with frozen(prompt):
        with pytest.raises(DeadlineExceeded) as caught:
            decoder.do(probe, 1)
        assert (caught.value.status_code, caught.value.phase, caught.value.budget_ms) == (WAITED, "ping", 200)
        for call in PULLS.values():
            refused([decoder], [], DeadlineExceeded, ["200 ms"], kv_call, *call, status=WAITED)
    wait_until(lambda: in_time(decoder, probe, 1))  # once it goes on
    for name, call in PULLS.items():
        wait_until(partial(in_time, decoder, kv_call, *call))
        same_bytes(decoder.do(show, name), moved(mine[name], theirs[name], [(2, 1)]))
    prompt.stop()
    wait_until(lambda: decoder.do(links) == {})
    assert len(decoder.do(redials)) == 1
    assert decoder.do(unlink, [info(1, prompt.port)]) == (OK, [NOT_YET])
    assert decoder.do(redials) == ()


def test_check_link_status_and_link_refuse_what_is_no_cluster_id_and_the_other_mode(end: LocalEnd) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    refuse([end], Table("dd.check_link_status", {}, {"remote_cluster_id": UINT64}))
    arguments = ("name", {1: 0, 2: 1}, table(host(0), host(0)))
    refused([end], [], StateError, ["v1 mode", "link_clusters"], join, *arguments)
    for function in (drop, status):
        refused([end], [], StateError, ["v1 mode"], function, 1)
    end.world.dd.finalize()
    with pytest.raises(NotInitialized):
        end.do(probe, 1)
    end.start("DECODER", 1)
    refused([end], [], StateError, ["v1 mode"], probe, 1)


# --- switch_role ------------------------------------------------------------------------------------------------------
def test_a_link_keeps_the_role_and_after_it_keys_and_pulls_go_by_the_role_of_now(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    shm_pair.start(**POOL, enable_switch_role=True)
    prompt.do(kv_make, "kv", desc(rows=2), 1, (CacheKey(1, 7),))
    exist = LLMStatusCode.LLM_EXIST_LINK
    for end, role in ((prompt, "DECODER"), (decoder, "PROMPT")):
        refused([end], [], StateError, ["unlinked first"], switch, role, LISTENING, status=exist)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    alone(prompt, decoder)
    assert prompt.do(switch, "DECODER") is None
    port = decoder.do(switch, "PROMPT", LISTENING)
    source = decoder.do(kv_make, "late", desc(rows=1), 3, (CacheKey(2, 9),))
    target = prompt.do(show, "kv")
    assert prompt.do(link, [info(2, port)]) == SUCCESS
    prompt.do(kv_call, "pull_cache", CacheKey(2, 9), Use("kv"), 1)
    same_bytes(prompt.do(show, "kv"), moved(target, source, [(1, 0)]))
    with pytest.raises(ParamError, match="DECODER"):  # the key is still bound
        prompt.do(kv_call, "remove_cache_key", CacheKey(1, 7))
    assert len(prompt.do(picture).keys) == 1
    with pytest.raises(ParamError, match="PROMPT"):
        decoder.do(kv_call, "pull_cache", CacheKey(1, 7), Use("late"), 0)
    assert decoder.do(link, [info(1, 1)])[0] is INVALID


# --- pulls ------------------------------------------------------------------------------------------------------------
def both(pair: Pair, **settings: Any) -> tuple[Bytes, Bytes]:
    """Start, link, and make a cache "kv" at each end, the prompt's with KEYS on rows 0 and 1."""
    if pair.transport == "shm":
        pair.transport = "auto"  # shm maps pools; what has none, and raw addresses, are reached by cma, beside it
    pair.start(**(POOL | settings))
    return pair.prompt.do(kv_make, "kv", desc(), 1, KEYS), pair.decoder.do(kv_make, "kv", desc(), 2)


def consumed(pair: Pair, left: int) -> None:
    """Wait until the prompt has so many keys left, and no pin."""
    wait_until(lambda: pair.prompt.do(picture).pins == 0 and len(pair.prompt.do(picture).keys) == left)


def pull(world: World, key: CacheKey, row: int, size: int, keywords: dict[str, Any]) -> None:
    kv_call(world, "pull_cache", key, Use("kv"), row, size, **keywords)


MEMORY = pytest.mark.parametrize("memory", [POOL, DIRECT], ids=["pool", "direct"])


@MEMORY
def test_r12_a_row_is_pulled_by_key_which_is_consumed_and_by_id(pair: Pair, memory: dict[str, Any]) -> None:
    src, dst = both(pair, **memory)
    prompt, decoder = pair.prompt, pair.decoder
    decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"), 5)
    dst = moved(dst, src, [(5, 1)])
    same_bytes(decoder.do(show, "kv"), dst)
    consumed(pair, 1)
    with pytest.raises(CacheNotFound):
        decoder.do(kv_call, "pull_cache", KEYS[1], Use("kv"))
    for row in (0, 7):  # by id and row: row 0 carries the other key, row 7 none
        decoder.do(kv_call, "pull_cache", CacheKeyByIdAndIndex(1, 1, row), Use("kv"), row)
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0), (7, 7)]))
    same_bytes(prompt.do(show, "kv"), src)
    consumed(pair, 0)


@pytest.mark.parametrize(("transport", "by_id"), [("auto", False), ("tcp", True)])
def test_r05_r12_r28_both_ends_are_0_and_what_is_deallocated_waits(shm_pair: Pair, transport: str, by_id: bool) -> None:
    """As vllm-ascend's first connectors do it, with one cache for each model id."""
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    for end, role in ((prompt, "PROMPT"), (decoder, "DECODER")):
        start_end(end, role, 0, extra={"llm.Transport": transport})
    assert decoder.do(link, [info(0, prompt.port)]) == SUCCESS
    for request in (7, 8):
        for model in (1, 2):
            key, first = CacheKey(0, request, model), request == 7
            source = prompt.do(kv_make, "kv", desc(rows=1), 10 * request + model, (key,))
            prompt.do(kv_call, "deallocate_cache", Use("kv"))
            assert prompt.do(picture).caches.deferred == 1
            decoder.do(kv_make, "kv", desc(rows=1), 5)
            name = CacheKeyByIdAndIndex(0, model, 0) if by_id and first else key
            decoder.do(kv_call, "pull_cache", name, Use("kv"), 0)
            same_bytes(decoder.do(show, "kv"), source)
            with pytest.raises(CacheNotFound):  # it was pulled already
                decoder.do(kv_call, "pull_cache", key, Use("kv"), 0)
            # The tables know it a moment before the pool has its pages back.
            wait_until(lambda: prompt.do(picture).pools[0].used_bytes == 0)
            assert (prompt.do(picture).keys, prompt.do(picture).caches.nbytes) == ((), 0)
    assert decoder.do(unlink, [info(0, prompt.port)]) == SUCCESS


@MEMORY
def test_r12_r26_blocks_are_pulled_by_a_key_that_stays_and_go_to_addresses(pair: Pair, memory: dict[str, Any]) -> None:
    src, dst = both(pair, **memory)
    prompt, decoder = pair.prompt, pair.decoder
    theirs = prompt.do(kv_make, "paged", desc(), 3, (), True, BLOCKS)
    mine = decoder.do(kv_make, "paged", desc(rows=6), 4, (), True)
    for _ in range(2):
        decoder.do(kv_call, "pull_blocks", BLOCKS, Use("paged"), [1, 2, 7, 6], [3, 4, 0, 3])
    of_layers = partial(kv_call, src_layer_range=range(1, 2), dst_layer_range=range(1))
    decoder.do(of_layers, "pull_blocks", BLOCKS, Use("paged"), [5], [5])
    mine = moved(moved(mine, theirs, [(3, 1), (4, 2), (0, 7), (3, 6)]), theirs, [(5, 5)], [(0, 2), (1, 3)])
    same_bytes(decoder.do(show, "paged"), mine)
    consumed(pair, 3)
    at_row_5 = [address + 5 * 48 for address in decoder.do(addresses, "kv")]
    assert prompt.do(send, "kv", TransferConfig(2, at_row_5, None, 2)) == SUCCESS
    place = TransferConfig(2, decoder.do(addresses, "paged"))
    assert prompt.do(send, "paged", place, [0, 1, 2, 3, 7], [3, 2, 5, 0, 2]) == SUCCESS
    mine = moved(mine, theirs, [(3, 0), (2, 1), (5, 2), (0, 3), (2, 7)])
    for end, rows, blocks in ((decoder, moved(dst, src, [(5, 2)]), mine), (prompt, src, theirs)):
        same_bytes(end.do(show, "kv"), rows)
        same_bytes(end.do(show, "paged"), blocks)


def send(world: World, name: str, config: TransferConfig, *blocks: list[int]) -> Any:
    task = kv_call(world, "transfer_cache_async", Use(name), Always(), [config], *blocks)
    return task.synchronize(20_000), task.get_results()


PULLS: dict[str, tuple[Any, ...]] = {
    "kv": ("pull_cache", CacheKeyByIdAndIndex(1, 1, 1), Use("kv"), 2),
    "paged": ("pull_blocks", BLOCKS, Use("paged"), [1], [2]),
}


def both_kinds(end: End, seed: int) -> dict[str, Bytes]:
    key = BLOCKS if end.cluster_id == 1 else None
    return {
        "kv": end.do(kv_make, "kv", desc(), seed),
        "paged": end.do(kv_make, "paged", desc(), seed + 1, (), True, key),
    }


#: Offsets into the rows of source and destination, size, and how many bytes move.
OFFSETS = [(0, 0, 48, 48), (31, 13, 17, 17), (8, 40, -1, 8), (None, 47, -1, 1), (47, None, 1, 1)]


def test_offsets_are_bytes_inside_the_row_of_either_end_and_go_with_layer_ranges(pair: Pair) -> None:
    src, dst = both(pair)
    # Outside of the row, at either end: one wrong argument at a time is in test_v1_caches.py.
    for kind, name, end in (
        (ParamError, "dst_cache_offset", "48 bytes"),
        (errors.CacheMismatch, "src_cache_offset", "48"),
    ):
        outside = {name: 2**64 - 1}
        parts = (f"{name}={2**64 - 1}", end)
        refused((pair.decoder, pair.prompt), ["kv"], kind, parts, pull, KEYS[0], 0, 1, outside)
    for row, (src_at, dst_at, size, length) in enumerate(OFFSETS):
        offsets = {"src_cache_offset": src_at, "dst_cache_offset": dst_at, "tensor_num_per_layer": 1}
        pair.decoder.do(pull, CacheKeyByIdAndIndex(1, 1, row), 7 - row, size, offsets)
        at, of = dst_at or 0, src_at or 0
        for tensor, source in zip(dst, src, strict=True):
            tensor[7 - row, at : at + length] = source[row, of : of + length]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 0)  # interface R5: neither offsets nor size make a pull incomplete

    # Rows of unequal length, and a third of the layers: the key stays until the union covers it.
    src = pair.prompt.do(kv_make, "kv", desc(6, 2, 100), 3, KEYS)
    dst = pair.decoder.do(kv_make, "kv", desc(4, 3, 40), 4)
    layers = {"src_layer_range": range(1, 2), "dst_layer_range": range(1)}
    pair.decoder.do(pull, KEYS[1], 2, 30, layers | {"src_cache_offset": 70})
    for to, from_ in ((0, 2), (1, 3)):
        dst[to][2, :30] = src[from_][1, 70:]
    same_bytes(pair.decoder.do(show, "kv"), dst)
    consumed(pair, 2)
    for layer in (0, 2):
        pair.decoder.do(pull, KEYS[1], 0, 40, layers | {"src_layer_range": range(layer, layer + 1)})
    consumed(pair, 1)


def _pull_until_unlinked(world: World) -> list[str]:
    """Pull again and again until the link is gone; return what the errors said."""
    texts: list[str] = []
    while True:
        try:
            kv_call(world, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
        except NotLinked as error:
            return [*texts, str(error)]
        except LLMException as error:
            texts.append(str(error))


def test_r22_whatever_a_lost_prompt_interrupts_the_error_names_the_call(shm_pair: Pair) -> None:
    shm_pair.start(**POOL)
    shm_pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    shm_pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    names = [f"pull {i}" for i in range(4)]
    for name in names:
        shm_pair.decoder.do(begin_there, name, _pull_until_unlinked)
    shm_pair.prompt.stop()
    for name in names:
        *during, after = shm_pair.decoder.do(result_there, name)
        assert [text for text in during if not text.startswith("pull_blocks: ")] == []
        assert "cluster 1" in after


# --- transfers to addresses -------------------------------------------------------------------------------------------
def test_r01_r06_a_task_that_is_not_over_has_v1s_code_and_a_wrong_argument_a_typed_error(local_pair: Pair) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    src, dst = both(local_pair, **DIRECT)
    addrs = decoder.do(addresses, "kv")
    gated = Gated()
    args = (Use("kv"), gated, [TransferConfig(2, addrs[:2], range(1))])
    task = prompt.do(kv_call, "transfer_cache_async", *args)
    assert (task.synchronize(1), task.get_results(1)) == (WAITED, [WAITED])
    gated.open(0)
    assert (task.synchronize(20_000), task.get_results()) == (OK, [OK])
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(0, 0)], [(0, 0), (1, 1)]))
    wait_until(lambda: decoder.do(picture).pins == 0)  # a release is on its way when a task is over

    config, of_three = TransferConfig(2, addrs), TransferConfig(2, addrs[:3])
    by_key = [TransferWithCacheKeyConfig(key, range(2), range(2)) for key in (CacheKeyByIdAndIndex(2, 1), BLOCKS)]
    good = {"src_cache": Use("kv"), "layer_synchronizer": Always(), "transfer_configs": [config]}
    configs = Spec((config,), (NONE, "{}[0]", [None]), (TYPE, "{}[0]", *([each] for each in by_key)))
    table = Table(
        "v1.transfer_cache_async",
        good,
        {"src_cache": Spec((1,)), "layer_synchronizer": Spec((1,)), "transfer_configs": configs},
        bad(RULE, "dst_addrs has 3", transfer_configs=[of_three]),
        bad(RULE, "src_block_indices", src_block_indices=[0]),
        bad(RULE, "dst_block_memory_size is None", dst_block_indices=[0]),
        bad(RULE, "equal lengths", src_block_indices=[0, 1], dst_block_indices=[0]),
    )
    refuse((prompt, decoder), table)
    refuse((decoder, prompt), Table(table.call, good, {}, bad(RULE, "only a PROMPT")))
