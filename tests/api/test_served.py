"""Bytes served and received: what an owner knows of the reads and writes of its peers."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import pytest

from faults.gates import watched
from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey
from llm_datadist.errors import CacheNotFound
from llm_datadist.prometheus import StatisticsCollector
from tests.support import linking
from tests.support.kinds import ChildEnd, Pair, World
from tests.support.linking import SUCCESS, explain, finalize, info, link, links_of, speaking, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show, wait_until
from tests.support.wire import messages as wire

pytestmark = pytest.mark.covers("LLMDataDist: statistics explain")

SPEC: Final = Spec(blocks=True, tensors=4, rows=8, stride=4096)
OWNED: Final = replace(SPEC, blocks_key=BLOCKS)
BLOCK_BYTES: Final = SPEC.tensors * SPEC.stride
MAX: Final = 2**63 - 1


def _totals(world: World) -> dict[int, tuple[int | None, int | None]]:
    """Return bytes served and received, by peer."""
    return {each.remote_cluster_id: (each.served_bytes, each.received_bytes) for each in world.dd.statistics().links}


def _moved(world: World) -> tuple[int, int]:
    (one,) = world.dd.statistics().links
    return one.read_bytes, one.written_bytes


@pytest.mark.parametrize("transport", ["shm", "cma", "tcp"])
def test_an_owner_knows_exactly_what_each_of_three_processes_has_read_and_written(
    four: list[ChildEnd], transport: str
) -> None:
    owner, *readers = four
    options: dict[str, Any] = {"extra": {"llm.Transport": transport}, "enable_remote_cache_accessible": True}
    owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **options)
    there = owner.do(make, "kv", OWNED, 1)
    wanted: dict[int, tuple[int, int]] = {}
    for number, reader in enumerate(readers, 2):
        reader.start("DECODER", number, **options)
        assert reader.do(link, [info(1, owner.port)]) == SUCCESS
        assert owner.do(_totals)[number] == (0, 0)
        here = reader.do(make, "own", SPEC, number)
        for pulled in range(number):
            reader.do(call, "pull_blocks", BLOCKS, Use("own"), [0, pulled], [7, pulled])
            here = moved(here, there, [(7, 0), (pulled, pulled)])
        reader.do(call, "push_blocks", BLOCKS, Use("own"), [7], [number])
        there = moved(there, here, [(number, 7)])
        with pytest.raises(CacheNotFound):
            reader.do(call, "pull_blocks", BlocksCacheKey(1, 99), Use("own"), [0], [0])
        same_bytes(reader.do(show, "own"), here)
        wanted[number] = 2 * number * BLOCK_BYTES, BLOCK_BYTES
        assert reader.do(_moved) == wanted[number]
        assert reader.do(_totals) == {1: (0, 0)}
        served, received = owner.do(_totals)[number]
        assert served is not None
        assert received is not None
        assert (served <= wanted[number][0], received <= wanted[number][1]) == (True, True), "it is never ahead"
    wait_until(lambda: owner.do(_totals) == wanted)
    same_bytes(owner.do(show, "kv"), there)


def _beat_no_more(world: World) -> None:
    world.probe.on_control(world.probe.engine.links.heartbeat.stop)


def _watch_goodbyes(world: World) -> None:
    """Keep what the statistics say once the peer's goodbye is handled."""
    world.memory["seen"], world.memory["watching"] = [], ExitStack()

    def watch(name: str, _: object, details: tuple[Any, ...]) -> None:
        if name == "handled" and isinstance(details[0], wire.UnlinkRequest):
            world.memory["seen"].append(_totals(world))

    world.memory["watching"].enter_context(watched(watch))


def _seen(world: World) -> list[Any]:
    with world.memory.pop("watching"):
        return list(world.memory.pop("seen"))


@pytest.mark.parametrize("way", ["unlink", "by force", "finalize"])
def test_a_goodbye_has_the_last_totals(shm_pair: Pair, way: str) -> None:
    """Without a heartbeat nothing else brings them."""
    prompt, decoder = shm_pair.start(rca=True)
    decoder.do(_beat_no_more)
    prompt.do(make, "kv", OWNED, 1)
    decoder.do(make, "own", SPEC, 2)
    decoder.do(call, "pull_blocks", BLOCKS, Use("own"), [0, 1, 2], [3, 4, 5])
    decoder.do(call, "push_blocks", BLOCKS, Use("own"), [6], [7])
    prompt.do(_watch_goodbyes)
    if way == "finalize":
        decoder.do(finalize)
    else:
        assert decoder.do(unlink, [info(1, prompt.port)], 10_000, way == "by force") == SUCCESS
    linking.alone(prompt)
    assert prompt.do(_seen) == [{2: (3 * BLOCK_BYTES, BLOCK_BYTES)}]


def test_a_link_that_its_peer_unlinks_shows_the_last_totals_while_it_drains(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.start()
    decoder.do(_beat_no_more)
    prompt.do(make, "kv", OWNED, 1)
    decoder.do(make, "own", SPEC, 2)
    decoder.do(call, "pull_blocks", BLOCKS, Use("own"), [0], [1])
    prompt.do(_use_link)
    decoder.do(linking.begin_there, "unlink", unlink, [info(1, prompt.port)])
    wait_until(lambda: prompt.do(linking.links) == {2: "draining"})
    assert prompt.do(_totals) == {2: (BLOCK_BYTES, 0)}
    prompt.do(_leave_link)
    assert decoder.do(linking.result_there, "unlink") == SUCCESS


def _use_link(world: World) -> None:
    world.memory["use"] = links_of(world).operation(2)
    world.memory["use"].__enter__()


def _leave_link(world: World) -> None:
    world.memory.pop("use").__exit__(None, None, None)


def test_with_an_older_peer_only_what_this_side_counts_is_known(pair: Pair) -> None:
    prompt, decoder = pair.prompt, pair.decoder
    with speaking(decoder, spoken=(11, 11)):
        pair.start()
        assert prompt.do(explain, 2).protocol == 11
        source = prompt.do(make, "kv", OWNED, 1)
        target = decoder.do(make, "own", SPEC, 2)
        decoder.do(call, "pull_blocks", BLOCKS, Use("own"), [0, 1], [2, 3])
        same_bytes(decoder.do(show, "own"), moved(target, source, [(2, 0), (3, 1)]))
        if pair.transport == "tcp":
            wait_until(lambda: prompt.do(_totals) == {2: (2 * BLOCK_BYTES, 0)})
        else:
            _beats(decoder, 2)  # it reports although nobody believes it
            assert prompt.do(_totals) == {2: (None, None)}
        known = ("served", "received") if pair.transport == "tcp" else ()
        assert prompt.do(_samples) == [f"llm_datadist_link_{name}_bytes_total" for name in known]


def _samples(world: World) -> list[str]:
    """Return the metrics of bytes served and received that have a sample."""
    samples = [each.name for family in StatisticsCollector(world.dd).collect() for each in family.samples]
    return [each for each in samples if "served" in each or "received" in each]


def _beats(end: Any, count: int) -> None:
    """Wait until the end has sent so many heartbeats more, and so have others, about."""
    before = end.do(_beat_count)
    wait_until(lambda: end.do(_beat_count) >= before + count)


def _beat_count(world: World) -> int:
    count: int = world.probe.engine.links.heartbeat.count
    return count


@pytest.fixture
def stranger(shm_pair: Pair) -> Iterator[Stranger]:
    """A peer linked over shm, which says what it likes."""
    shm_pair.start()
    with Stranger(shm_pair.prompt.port) as made:
        made.link()
        yield made
    linking.bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


def test_a_peer_that_lies_changes_its_own_totals_only_and_never_backwards(shm_pair: Pair, stranger: Stranger) -> None:
    def told() -> Any:
        stranger.is_served()
        totals = shm_pair.prompt.do(_totals)
        assert totals[2] == (0, 0)
        return totals[66]

    assert told() == (0, 0)
    stranger.say(wire.Beat(1, 300, 20))
    assert told() == (300, 20)
    stranger.say(wire.Beat(2, 200, 30), wire.Beat(3), wire.UnlinkRequest(1, 250), wire.UnlinkCancel())
    assert told() == (300, 30)
    stranger.say(wire.UnlinkRequest(2, MAX, MAX), wire.UnlinkCancel(), wire.Beat(4, 1, 1))
    assert told() == (MAX, MAX)


@pytest.mark.parametrize("kind", [wire.Beat, wire.UnlinkRequest])
@pytest.mark.parametrize("number", [-1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("first", [True, False])
def test_totals_out_of_range_end_the_link(
    shm_pair: Pair, stranger: Stranger, kind: type[wire.Message], number: int, first: bool
) -> None:
    tag = kind.__struct_config__.tag
    payload = wire.encode([tag, 1, number, 0] if first else [tag, 1, 0, number])
    stranger.say(wire.FRAME_HEADER.pack(len(payload)) + payload, wire.Ping(1))
    with pytest.raises((AssertionError, ConnectionResetError), match=r"hung up on|reset"):
        stranger.hear(wire.Pong)
    wait_until(lambda: shm_pair.prompt.do(linking.links) == {2: "ready"})


def test_over_tcp_a_peer_that_reports_is_not_believed(tcp_pair: Pair) -> None:
    tcp_pair.start()
    with Stranger(tcp_pair.prompt.port) as stranger:
        stranger.link(over="tcp")
        stranger.say(wire.Beat(1, 300, 20))
        stranger.is_served()
        assert tcp_pair.prompt.do(_totals) == {2: (0, 0), 66: (0, 0)}
