"""The Prometheus collector over a pair that has moved something."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from llm_datadist import BlocksCacheKey, CacheKey, LLMDataDist, LLMRole
from llm_datadist.errors import CacheNotFound
from llm_datadist.prometheus import register
from tests.support.linking import finalize
from tests.support.moves import BLOCKS, Spec, Use, call, make, wait_until
from tests.support.world import make_config

if TYPE_CHECKING:
    from prometheus_client.registry import RestrictedRegistry

    from llm_datadist.metrics import OperationStatistics
    from tests.support.ends import End
    from tests.support.pairs import Pair
    from tests.support.world import World


def _scrape(world: World, finalized: bool = False) -> str:
    registry = CollectorRegistry()
    register(world.dd, registry)
    if finalized:
        world.dd.finalize()
    return generate_latest(registry).decode()


def _numbers(end: End) -> dict[str, float]:
    lines = [line for line in end.do(_scrape).splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_a_scrape_shows_what_moved_waits_and_is_dialled_again_and_nothing_after_finalize(shm_pair: Pair) -> None:
    shm_pair.start()
    spec = Spec(tensors=2, rows=4, stride=1024)
    shm_pair.prompt.do(make, "blocks", replace(spec, blocks=True, blocks_key=BLOCKS), 1)
    shm_pair.prompt.do(make, "rows", replace(spec, keys=(CacheKey(1, 7),)), 2)
    shm_pair.decoder.do(make, "kv", replace(spec, blocks=True), 3)
    shm_pair.decoder.do(make, "rows", spec, 4)
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1, 2], [1, 2, 3])
    decoder, prompt = _numbers(shm_pair.decoder), _numbers(shm_pair.prompt)
    moved = 3 * 1024 * 2
    assert decoder['llm_datadist_operations_total{cluster="2",operation="pull_blocks"}'] == 1
    assert decoder['llm_datadist_operation_bytes_total{cluster="2",operation="pull_blocks"}'] == moved
    labels = 'cluster="2",operation="pull_blocks",transport="shm"'
    assert decoder[f"llm_datadist_operation_duration_seconds_count{{{labels}}}"] == 1
    assert decoder[f"llm_datadist_transport_bytes_total{{{labels}}}"] == moved
    assert decoder['llm_datadist_link_read_bytes_total{cluster="2",peer="1",transport="shm"}'] == moved
    assert prompt['llm_datadist_link_up{cluster="1",peer="2",transport="shm"}'] == 1
    assert prompt['llm_datadist_caches{cluster="1",state="live"}'] == 2
    waits = [f'llm_datadist_{name}{{cluster="1"}}' for name in ("unconsumed_bytes", "oldest_key_seconds")]
    assert prompt[waits[0]] == 1024 * 2
    assert prompt[waits[1]] > 0
    assert prompt['llm_datadist_pool_used_bytes{cluster="1",pool="device"}'] == 4 * 4096
    shm_pair.decoder.do(call, "pull_cache", CacheKey(1, 7), Use("rows"), 0)
    wait_until(lambda: [_numbers(shm_pair.prompt)[each] for each in waits] == [0, 0])  # no pull consumes the blocks key
    redials = 'llm_datadist_redial_attempts{cluster="2",peer="1"}'
    assert redials not in decoder
    shm_pair.prompt.do(finalize)  # its process lives, so there is hope
    wait_until(lambda: _numbers(shm_pair.decoder).get(redials, 0) >= 1)
    lost = {name: value for name, value in _numbers(shm_pair.decoder).items() if "links_lost_total" in name}
    assert sum(lost.values()) == 1
    assert lost.keys() == {name for name in decoder if "links_lost_total" in name}, "there from the beginning"
    assert shm_pair.decoder.do(_scrape, True) == ""


def test_a_process_has_one_collector_for_all_its_instances_and_a_finalized_one_is_gone() -> None:
    def shown(registry: CollectorRegistry | RestrictedRegistry, name: str = "llm_datadist_pins") -> list[str]:
        text = generate_latest(registry).decode()
        assert text.count(f"# HELP {name} ") == bool(text)
        return sorted(re.findall(rf'^{name}{{cluster="(.)"', text, re.MULTILINE))

    first, second, third = (LLMDataDist(LLMRole.PROMPT, cluster_id) for cluster_id in (1, 2, 3))
    first.init(make_config())
    registry, other = CollectorRegistry(auto_describe=True), CollectorRegistry()
    collector = register(first, registry)
    second.init(make_config())
    assert register(second, registry) is register(third, registry) is register(second, registry) is collector
    register(second, other)
    assert (shown(registry), shown(other)) == (["1", "2"], ["2"])
    assert shown(registry, "llm_datadist_pool_used_bytes") == ["1", "1", "2", "2"]
    third.init(make_config())
    first.finalize()
    assert shown(registry) == ["2", "3"]
    assert shown(registry.restricted_registry(["llm_datadist_pins"])) == ["2", "3"]
    first.init(make_config())
    assert shown(registry) == ["1", "2", "3"]
    registry.unregister(collector)
    assert (shown(registry), shown(other)) == ([], ["2"])
    register(third, registry)
    assert shown(registry) == ["3"]
    for each in (first, second, third):
        each.finalize()
    assert shown(registry) == shown(other) == []
    register(LLMDataDist(LLMRole.PROMPT, 4), registry)
    assert [each.cluster_id for each in collector._datadists] == [3], "nothing holds 4"


def _operations(world: World) -> tuple[OperationStatistics, ...]:
    return world.dd.statistics().operations


def test_histograms_and_failures_equal_what_was_done(shm_pair: Pair) -> None:
    shm_pair.start()
    spec = Spec(tensors=2, rows=4, stride=1024, blocks=True)
    shm_pair.prompt.do(make, "blocks", replace(spec, blocks_key=BLOCKS), 1)
    shm_pair.decoder.do(make, "kv", spec, 2)
    for _ in range(5):
        shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1], [1, 2])
    shm_pair.decoder.do(call, "copy_blocks", Use("kv"), {1: [3]})
    with pytest.raises(CacheNotFound):
        shm_pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 99), Use("kv"), [0], [1])
    found = {each.name: each for each in shm_pair.decoder.do(_operations)}
    pulls = found["pull_blocks"]
    assert (pulls.count, pulls.errors, pulls.failures) == (6, 1, {"CacheNotFound": 1})
    by = {each.transport: (each.count, each.nbytes) for each in pulls.transports}
    assert by == {"shm": (5, 5 * 2 * 2 * 1024), "": (1, 0)}
    assert [each.transport for each in found["copy_blocks"].transports] == [""]
    for each in found.values():
        assert sum(sum(by.buckets) for by in each.transports) == each.count
        assert sum(by.nbytes for by in each.transports) == each.nbytes
        assert sum(by.seconds for by in each.transports) == pytest.approx(each.seconds)
    numbers = _numbers(shm_pair.decoder)
    pulled = 'cluster="2",operation="pull_blocks"'
    assert (
        numbers['llm_datadist_operation_failures_total{cluster="2",kind="CacheNotFound",operation="pull_blocks"}'] == 1
    )
    assert (
        numbers[
            'llm_datadist_operation_duration_seconds_bucket{cluster="2",le="+Inf",operation="pull_blocks",transport="shm"}'
        ]
        == 5
    )
    assert numbers[f"llm_datadist_operations_total{{{pulled}}}"] == 6
