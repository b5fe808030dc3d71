"""Spans of OpenTelemetry, and the Prometheus collector over a pair that has moved something."""

import asyncio
import gc
import re
import sys
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final
from unittest.mock import Mock

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.registry import RestrictedRegistry

import llm_datadist
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMDataDist,
    LLMRole,
    TransferWithCacheKeyConfig,
)
from llm_datadist.errors import CacheNotFound, NotLinked, ParamError
from llm_datadist.prometheus import register
from tests.support.kinds import ChildEnd, End, LocalEnd, Pair, World
from tests.support.layers import Always
from tests.support.linking import SUCCESS, explain, free_port, info, link, statistics, unlink, vanish
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, make, moved, same_bytes, show, wait_until
from tests.support.source import run
from tests.support.wire import VERSIONS
from tests.support.world import make_config

TRACED: Final = {"llm.Tracing": "1"}
PAGED: Final = Spec(tensors=2, rows=4, stride=1024, blocks=True)
ROWS: Final = Spec(tensors=4, rows=2, stride=64)


_exporter: Final = InMemorySpanExporter()
_faulty: Final = Mock(SpanProcessor)  # a processor of the user's that can be made to fail


@pytest.fixture
def spans(local_pair: Pair) -> Iterator[InMemorySpanExporter]:
    """The spans that ended since the test began; the provider is that of this process, which has one for good."""
    if not isinstance(trace.get_tracer_provider(), TracerProvider):
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(_faulty)
        provider.add_span_processor(SimpleSpanProcessor(_exporter))
        trace.set_tracer_provider(provider)
    _exporter.clear()
    yield _exporter
    _exporter.clear()


def _shown(span: ReadableSpan) -> dict[str, Any]:
    return {key.removeprefix("llm_datadist."): value for key, value in (span.attributes or {}).items()}


def _start(pair: Pair, *, rca: bool = False) -> tuple[World, World]:
    """Start both ends in this process, with caches at both; only the decoder's calls are traced."""
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=rca or None)
    pair.decoder.start("DECODER", 2, extra=TRACED, enable_remote_cache_accessible=rca or None)
    pair.prompt.do(make, "kv", replace(PAGED, blocks_key=BLOCKS), 1)
    pair.prompt.do(make, "rows", ROWS, 2)
    pair.decoder.do(make, "kv", PAGED, 3)
    pair.decoder.do(make, "rows", ROWS, 4)
    return pair.prompt.do(lambda world: world), pair.decoder.do(lambda world: world)


def _link(pair: Pair) -> None:
    pair.link()
    _exporter.clear()


def test_each_call_has_one_span_that_says_what_moved_and_how(spans: InMemorySpanExporter, local_pair: Pair) -> None:
    prompt, decoder = _start(local_pair, rca=True)
    _link(local_pair)
    cm, kv, rows = decoder.cm, decoder.caches["kv"], decoder.caches["rows"]
    row = CacheKeyByIdAndIndex(1, cache_id(prompt, "rows"), 1)
    cm.pull_blocks(BLOCKS, kv, [0, 1, 2], [1, 2, 3])
    cm.push_blocks(BLOCKS, kv, [0, 1], [2, 3])
    cm.pull_cache(row, rows, 0)
    cm.push_cache(row, rows, 1)
    cm.copy_blocks(kv, {0: [1, 2]})
    cm.copy_cache(rows, rows, 0, 1)
    prompt.cm.copy_cache(prompt.caches["rows"], prompt.caches["rows"], 0, 1)  # without the option there is no span
    cm.transfer_cache_async(rows, Always(), [TransferWithCacheKeyConfig(row, range(2), range(2))]).synchronize()
    wait_until(lambda: len(spans.get_finished_spans()) == 7)
    there: dict[str, Any] = {"peer": "1", "transport": "inproc"}
    fine: dict[str, Any] = {"status": "LLM_SUCCESS"}
    assert [(span.name, _shown(span)) for span in spans.get_finished_spans()] == [
        (name, {"operation": name, **about, **fine})
        for name, about in [
            ("pull_blocks", {"blocks": 3, "bytes": 3 * 2 * 1024, **there}),
            ("push_blocks", {"blocks": 2, "bytes": 2 * 2 * 1024, **there}),
            ("pull_cache", {"bytes": 4 * 64, **there}),
            ("push_cache", {"bytes": 4 * 64, **there}),
            ("copy_blocks", {"bytes": 2 * 2 * 1024}),
            ("copy_cache", {"bytes": 4 * 64}),
            ("transfer_cache_async", {"bytes": 4 * 64, **there}),
        ]
    ]
    remote = [SpanKind.CLIENT if "peer" in _shown(span) else SpanKind.INTERNAL for span in spans.get_finished_spans()]
    assert [span.kind for span in spans.get_finished_spans()] == remote
    assert {span.status.status_code for span in spans.get_finished_spans()} == {StatusCode.UNSET}


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_the_transport_is_the_one_that_moved_the_bytes(
    spans: InMemorySpanExporter, local_pair: Pair, children: tuple[ChildEnd, ChildEnd], transport: str
) -> None:
    """The peer in a process of its own; over cma its memory is outside its pool, where shm does not reach it."""
    prompt, decoder = children[0], local_pair.decoder
    forced = {} if transport == "cma" else {"llm.Transport": transport}
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=forced)
    try:
        decoder.start("DECODER", 2, extra=TRACED | forced)
        prompt.do(make, "kv", replace(PAGED, blocks_key=BLOCKS, memory="private" if transport == "cma" else "pool"), 1)
        decoder.do(make, "kv", PAGED, 3)
        decoder.do(link, [info(1, prompt.port)])
        if transport == "cma" and decoder.do(explain, 1).private_transport != "cma":
            pytest.skip("the kernel does not let this process read the other one's memory")
        decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0], [0])
        assert _shown(spans.get_finished_spans()[-1])["transport"] == transport
    finally:
        decoder.stop()
        prompt.stop()


def test_links_have_spans_and_what_fails_has_an_exception(spans: InMemorySpanExporter, local_pair: Pair) -> None:
    _, decoder = _start(local_pair)
    spans.clear()
    nowhere = info(5, free_port())
    assert link(decoder, [info(1, local_pair.prompt.port), nowhere])[0].name == "LLM_LINK_FAILED"
    with pytest.raises(CacheNotFound):
        decoder.cm.pull_blocks(BlocksCacheKey(1, 99), decoder.caches["kv"], [0], [0])
    with pytest.raises(NotLinked):
        decoder.cm.pull_blocks(BlocksCacheKey(5), decoder.caches["kv"], [0], [0])
    with pytest.raises(ParamError):
        decoder.cm.pull_blocks(BLOCKS, decoder.caches["kv"], [0], [77])
    assert unlink(decoder, [info(1, local_pair.prompt.port)]) == SUCCESS
    linking, missing, unlinked, outside, unlinking = spans.get_finished_spans()
    assert [(span.name, _shown(span)["peer"], _shown(span)["status"]) for span in spans.get_finished_spans()] == [
        ("link_clusters", ("1", "5"), "LLM_LINK_FAILED"),
        ("pull_blocks", "1", "LLM_KV_CACHE_NOT_EXIST"),
        ("pull_blocks", "5", "LLM_NOT_YET_LINK"),
        ("pull_blocks", "1", "LLM_PARAM_INVALID"),
        ("unlink_clusters", "1", "LLM_SUCCESS"),
    ]
    kinds = ["LinkRefused", "CacheNotFound", "NotLinked", "ParamError"]
    for span, kind in zip((linking, missing, unlinked, outside), kinds, strict=True):
        assert span.status.status_code is StatusCode.ERROR
        (event,) = span.events
        assert event.attributes is not None
        assert str(event.attributes["exception.type"]).endswith(kind)
        assert span.status.description == event.attributes["exception.message"]
    assert unlinking.status.status_code is StatusCode.UNSET


def test_the_parent_is_the_callers_span_also_of_awaited_calls(spans: InMemorySpanExporter, local_pair: Pair) -> None:
    prompt, decoder = _start(local_pair, rca=True)
    _link(local_pair)
    tracer, kv, rows = trace.get_tracer("engine"), decoder.caches["kv"], decoder.caches["rows"]
    row = CacheKeyByIdAndIndex(1, cache_id(prompt, "rows"), 1)

    async def request(name: str) -> None:
        with tracer.start_as_current_span(name):
            await decoder.cm.pull_blocks_async(BLOCKS, kv, [0], [0])

    async def requests() -> None:
        await asyncio.gather(*[request(f"request {n}") for n in range(4)])

    asyncio.run(requests())
    layers, current = Mock(LayerSynchronizer), dict[int, str]()  # the span that was current when a layer was asked for
    layers.synchronize_layer.side_effect = lambda layer, _: bool(
        current.setdefault(layer, getattr(trace.get_current_span(), "name", ""))
    )
    with tracer.start_as_current_span("step"):
        decoder.cm.pull_blocks(BLOCKS, kv, [0], [0])
        configs = (TransferWithCacheKeyConfig(row, range(2), range(2)),)
        decoder.cm.transfer_cache_async(rows, layers, configs).synchronize()
        assert getattr(trace.get_current_span(), "name", "") == "step"
    wait_until(lambda: len(spans.get_finished_spans()) == 4 + 4 + 3)
    known = {span.context.span_id: span for span in spans.get_finished_spans() if span.context is not None}
    pairs = sorted((known[span.parent.span_id].name, span.name) for span in known.values() if span.parent is not None)
    calls = [(f"request {n}", "pull_blocks") for n in range(4)]
    assert pairs == [*calls, ("step", "pull_blocks"), ("step", "transfer_cache_async")]
    assert current == dict.fromkeys(range(2), "transfer_cache_async")


def test_a_tracer_that_fails_breaks_no_transfer(
    spans: InMemorySpanExporter, local_pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, decoder = _start(local_pair)
    _link(local_pair)
    source, before = show(prompt, "kv"), show(decoder, "kv")
    for name in ("on_start", "on_end"):
        monkeypatch.setattr(getattr(_faulty, name), "side_effect", RuntimeError(f"{name} fails"))
    decoder.cm.pull_blocks(BLOCKS, decoder.caches["kv"], [0], [1])
    with pytest.raises(CacheNotFound):
        decoder.cm.pull_blocks(BlocksCacheKey(1, 99), decoder.caches["kv"], [0], [0])
    same_bytes(show(decoder, "kv"), moved(before, source, [(1, 0)]))
    assert "on_start fails" in caplog.text
    monkeypatch.undo()
    for name in ("set_attribute", "record_exception"):
        monkeypatch.setattr(Span, name, Mock(side_effect=RuntimeError(f"{name} fails")))
    decoder.cm.pull_blocks(BLOCKS, decoder.caches["kv"], [0], [2])
    same_bytes(show(decoder, "kv"), moved(before, source, [(1, 0), (2, 0)]))
    assert "set_attribute fails" in caplog.text
    assert [span.name for span in spans.get_finished_spans()] == ["pull_blocks"], "it ends all the same"


_OFF: Final = """
import sys
import weakref
{hide}
from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.errors import LLMException
config = LLMConfig()
config.device_id, config.enable_cache_manager = 0, True
dd = LLMDataDist(LLMRole.DECODER, 1)
try:
    dd.init(config.generate_options() | {{"llm.Tracing": "{value}"}})
except LLMException as error:
    print(error.status_code.name, error)
else:
    print(sorted(name for name in sys.modules if name == "opentelemetry"))
    dd.finalize()
"""


@pytest.mark.parametrize(
    ("hide", "value", "printed"),
    [
        ("", "0", "[]"),
        ("", "1", "['opentelemetry']"),
        (
            "sys.modules['opentelemetry'] = None",
            "1",
            "LLM_FEATURE_NOT_ENABLED llm.Tracing needs opentelemetry-api: pip install 'open-datadist[otel]'",
        ),
    ],
    ids=["off", "on", "not installed"],
)
def test_the_package_is_loaded_only_when_asked_for_and_named_if_missing(hide: str, value: str, printed: str) -> None:
    script = _OFF.format(hide=hide, value=value)
    done = run(sys.executable, "-c", script)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, printed, "")


def _scrape(world: World, finalized: bool = False) -> str:
    registry = CollectorRegistry()
    register(world.dd, registry)
    if finalized:
        world.dd.finalize()
    return generate_latest(registry).decode()


def _numbers(end: End) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in end.do(_scrape).splitlines() if not line.startswith("#")]
    numbers = {name: float(value) for name, value in lines}
    assert len(numbers) == len(lines), "Prometheus drops what comes twice"
    return numbers


def test_a_scrape_shows_what_moved_waits_and_is_dialled_again_and_nothing_after_finalize(shm_pair: Pair) -> None:
    shm_pair.start()
    spec = Spec(tensors=2, rows=4, stride=1024)
    shm_pair.prompt.do(make, "blocks", replace(spec, blocks=True, blocks_key=BLOCKS), 1)
    shm_pair.prompt.do(make, "rows", replace(spec, keys=(CacheKey(1, 7),)), 2)
    shm_pair.decoder.do(make, "kv", replace(spec, blocks=True), 3)
    shm_pair.decoder.do(make, "rows", spec, 4)
    shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1, 2], [1, 2, 3])
    shm_pair.decoder.do(call, "copy_blocks", Use("kv"), {1: [3]})
    decoder, prompt = _numbers(shm_pair.decoder), _numbers(shm_pair.prompt)
    moved = 3 * 1024 * 2
    assert decoder['llm_datadist_operations_total{cluster="2",operation="pull_blocks"}'] == 1
    assert decoder['llm_datadist_operation_bytes_total{cluster="2",operation="pull_blocks"}'] == moved
    labels = 'cluster="2",operation="pull_blocks",transport="shm"'
    assert decoder[f"llm_datadist_operation_duration_seconds_count{{{labels}}}"] == 1
    assert decoder[f"llm_datadist_transport_bytes_total{{{labels}}}"] == moved
    assert decoder['llm_datadist_link_read_bytes_total{cluster="2",peer="1",transport="shm"}'] == moved
    served = 'llm_datadist_link_served_bytes_total{cluster="1",peer="2",transport="shm"}'
    wait_until(lambda: _numbers(shm_pair.prompt)[served] == moved)
    assert _numbers(shm_pair.prompt)[served.replace("served", "received")] == 0
    assert prompt['llm_datadist_link_up{cluster="1",peer="2",transport="shm"}'] == 1
    assert prompt['llm_datadist_caches{cluster="1",state="live"}'] == 2
    about = f'protocol="{VERSIONS[1]}",release="{llm_datadist.__version__}",role='
    assert decoder[f'llm_datadist_info{{cluster="2",{about}"DECODER"}}'] == 1
    assert decoder[f'llm_datadist_peer_info{{cluster="2",peer="1",{about}"PROMPT"}}'] == 1
    tables = {"ended_grants": 0, "peer_secrets": 1}
    for name, entries in tables.items():
        assert prompt[f'llm_datadist_table_entries{{cluster="1",table="{name}"}}'] == entries
    waits = [f'llm_datadist_{name}{{cluster="1"}}' for name in ("unconsumed_bytes", "oldest_key_seconds")]
    assert prompt[waits[0]] == 1024 * 2
    assert prompt[waits[1]] > 0
    assert prompt['llm_datadist_pool_used_bytes{cluster="1",pool="device"}'] == 4 * 4096
    shm_pair.decoder.do(call, "pull_cache", CacheKey(1, 7), Use("rows"), 0)
    wait_until(lambda: [_numbers(shm_pair.prompt)[each] for each in waits] == [0, 0])  # no pull consumes the blocks key
    for _ in range(4):
        shm_pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 1, 2], [1, 2, 3])
    with pytest.raises(CacheNotFound):
        shm_pair.decoder.do(call, "pull_blocks", BlocksCacheKey(1, 99), Use("kv"), [0], [1])
    _histograms_and_failures_equal_what_was_done(shm_pair.decoder, moved)
    redials = 'llm_datadist_redial_attempts{cluster="2",peer="1"}'
    assert redials not in decoder
    shm_pair.prompt.do(vanish)  # its process lives, so there is hope
    wait_until(lambda: _numbers(shm_pair.decoder).get(redials, 0) >= 1)
    lost = {name: value for name, value in _numbers(shm_pair.decoder).items() if "links_lost_total" in name}
    assert sum(lost.values()) == 1
    assert lost.keys() == {name for name in decoder if "links_lost_total" in name}, "there from the beginning"
    assert shm_pair.decoder.do(_scrape, True) == ""


def test_a_link_to_itself_is_one_of_a_scrape_with_what_either_side_has_counted(end: LocalEnd) -> None:
    extra = {"llm.EnableRemoteCacheAccessible": "1", "llm.Transport": "tcp"}
    end.start("DECODER", 5, listen_ip_info="127.0.0.1:0", extra=extra)
    assert end.do(link, [info(5, end.port)]) == SUCCESS
    end.do(make, "target", replace(PAGED, blocks_key=BlocksCacheKey(5, 3)), 1)
    end.do(make, "source", PAGED, 2)
    end.do(call, "push_blocks", BlocksCacheKey(5, 3), Use("source"), [0, 1, 2], [1, 2, 3])
    where, pushed, numbers = '{cluster="5",peer="5",transport="tcp"}', 3 * 1024 * 2, _numbers(end)
    assert numbers[f"llm_datadist_link_up{where}"] == 1
    for name in ("written", "received"):
        assert numbers[f"llm_datadist_link_{name}_bytes_total{where}"] == pushed


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
    dropped = LLMDataDist(LLMRole.PROMPT, 4)
    register(dropped, registry)
    gone = weakref.ref(dropped)
    del dropped
    gc.collect()
    assert gone() is None, "nothing holds 4"
    third.init(make_config())
    assert shown(registry) == ["3"]
    third.finalize()


def _histograms_and_failures_equal_what_was_done(decoder: End, nbytes: int) -> None:
    """Five pulls of so many bytes, one that failed, and a copy."""
    found = {each.name: each for each in decoder.do(statistics).operations}
    pulls = found["pull_blocks"]
    assert (pulls.count, pulls.errors, pulls.failures) == (6, 1, {"CacheNotFound": 1})
    by = {each.transport: (each.count, each.nbytes) for each in pulls.transports}
    assert by == {"shm": (5, 5 * nbytes), "": (1, 0)}
    assert [each.transport for each in found["copy_blocks"].transports] == [""]
    for each in found.values():
        assert sum(sum(by.buckets) for by in each.transports) == each.count
        assert sum(by.nbytes for by in each.transports) == each.nbytes
        assert sum(by.seconds for by in each.transports) == pytest.approx(each.seconds)
    numbers = _numbers(decoder)
    failed = 'llm_datadist_operation_failures_total{cluster="2",kind="CacheNotFound",operation="pull_blocks"}'
    assert numbers[failed] == 1
    bucket = '{cluster="2",le="+Inf",operation="pull_blocks",transport="shm"}'
    assert numbers[f"llm_datadist_operation_duration_seconds_bucket{bucket}"] == 5
    assert numbers['llm_datadist_operations_total{cluster="2",operation="pull_blocks"}'] == 6
