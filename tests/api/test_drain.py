"""drain(): what is refused, what still runs, what is left, and what peers see of it."""

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    DeadlineExceeded,
    LinkError,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    NotInitialized,
    NotLinked,
    ParamError,
    PeerLink,
    StateError,
)
from llm_datadist._deadline import Deadline
from llm_datadist._links.link import LinkState
from llm_datadist.views import tensor_views
from tests.support.moves import wait_until
from tests.support.probe import Probe, socket_of

pytestmark = pytest.mark.covers("LLMDataDist: drain finalize link_clusters")

DESC = CacheDesc(2, [4, 64], DataType.DT_FLOAT16)
TOKEN, LATER = b"1" * 16, b"2" * 16
SHORT = 200  # milliseconds of a drain that cannot end


@pytest.fixture
def prompt() -> Iterator[LLMDataDist]:
    config = LLMConfig(listen_ip_info="127.0.0.1:0", mem_pool_cfg="1MiB", sync_kv_timeout=20_000)
    with LLMDataDist(LLMRole.PROMPT, 1, config=config) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def decoder(request: pytest.FixtureRequest) -> Iterator[LLMDataDist]:
    options = {"llm.Transport": "tcp"} if request.param == "tcp" else {}
    with LLMDataDist(
        LLMRole.DECODER, 2, config=LLMConfig(mem_pool_cfg="1MiB", sync_kv_timeout=20_000, ge_options=options)
    ) as made:
        yield made


@pytest.fixture
def link(prompt: LLMDataDist, decoder: LLMDataDist) -> PeerLink:
    return decoder.connect(f"127.0.0.1:{prompt.listen_port}", timeout=10_000)


def draining(prompt: LLMDataDist) -> bool:
    """Whether a drain has begun: a grant is refused, and nothing else has changed."""
    cache = prompt.cache_manager.allocate_blocks_cache(DESC)
    try:
        cache.grant([0], ttl=60.0).revoke()
    except LinkError:
        return True
    finally:
        prompt.cache_manager.deallocate_blocks_cache(cache)
    return False


def sees_no_loss(decoder: LLMDataDist) -> None:
    wait_until(lambda: decoder.statistics().links == ())
    statistics = decoder.statistics()
    assert (statistics.redials, statistics.links_lost, statistics.lost_peers) == ((), {}, ())


def test_nothing_to_wait_for_ends_all_links_as_unlinked(
    prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink
) -> None:
    prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))  # such keys wait for no pull
    left = prompt.drain(20_000)
    assert not left
    assert (left.keys, left.grants, left.tasks, left.links) == ((), 0, 0, ())
    sees_no_loss(decoder)
    prompt.finalize()
    sees_no_loss(decoder)
    with pytest.raises(NotLinked):
        link.explain()
    link.close()


def test_what_is_new_is_refused_by_a_retryable_error_that_says_draining(
    prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink
) -> None:
    cache = prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    held = cache.grant([1], ttl=60.0, token=TOKEN)
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(decoder.cache_manager.claim_grant, 1, LATER)
        wait_until(lambda: prompt.statistics().grants.waiting == 1)
        left = prompt.drain(SHORT)
        assert (left.grants, left.links) == (1, (2,))
        assert left
        calls: list[Callable[[], object]] = [
            waiting.result,
            lambda: decoder.cache_manager.claim_grant(1, LATER),
            lambda: cache.grant([2], ttl=60.0),
            lambda: prompt.connect(f"127.0.0.1:{prompt.listen_port}"),
            lambda: prompt.link("all", {1: 0, 2: 1}, '{"server_list": []}'),
        ]
        for call in calls:
            with pytest.raises(LinkError, match="cluster 1 is draining") as caught:
                call()
            assert caught.value.retryable
    with (
        LLMDataDist(LLMRole.DECODER, 3) as another,
        pytest.raises(LinkError, match="cluster 1 is draining: it takes no new links; another instance may"),
    ):
        another.connect(f"127.0.0.1:{prompt.listen_port}")
    # What there was still works.
    target = decoder.cache_manager.allocate_blocks_cache(DESC)
    grant = decoder.cache_manager.claim_grant(1, TOKEN)
    decoder.cache_manager.pull_blocks(BlocksCacheKey(1), target, [1], [0], grant=grant)
    grant.release()
    wait_until(lambda: not held.active)
    assert not prompt.drain(20_000)


def test_it_waits_for_keys_and_grants_and_every_byte_arrives(
    prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink
) -> None:
    rows = prompt.cache_manager.allocate_cache(DESC, [CacheKey(1, req_id=7)])
    blocks = prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1), granted_only=True)
    for number, view in enumerate(tensor_views(rows) + tensor_views(blocks)):
        view[:] = number + 1
    blocks.grant([1, 3], ttl=60.0, token=TOKEN)
    row, block = decoder.cache_manager.allocate_cache(DESC), decoder.cache_manager.allocate_blocks_cache(DESC)
    with ThreadPoolExecutor() as threads:
        drained = threads.submit(prompt.drain, 20_000)
        wait_until(lambda: draining(prompt))
        decoder.cache_manager.pull_cache(CacheKey(1, req_id=7), row, 2)
        grant = decoder.cache_manager.claim_grant(1, TOKEN)
        decoder.cache_manager.pull_blocks(BlocksCacheKey(1), block, [1, 3], [0, 1], grant=grant)
        assert not drained.done()
        grant.release()
        assert not drained.result()
    for number, view in enumerate(tensor_views(row)):
        assert (view[2] == number + 1).all()
        assert not view[[0, 1, 3]].any()
    for number, view in enumerate(tensor_views(block)):
        assert (view[:2] == number + 3).all()
        assert not view[2:].any()
    sees_no_loss(decoder)


def test_a_key_that_nobody_pulls_is_named(prompt: LLMDataDist, link: PeerLink) -> None:
    prompt.cache_manager.allocate_cache(DESC, [CacheKey(1, req_id=7)])
    left = prompt.drain(SHORT)
    assert [key.split(", ")[1] for key in left.keys] == ["7"]
    assert left.links == (2,)
    prompt.cache_manager.remove_cache_key(CacheKey(1, req_id=7))
    assert not prompt.drain(20_000)


def test_pulls_that_run_are_not_cut(prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink) -> None:
    """A pull either begins before its link is given up, and is whole, or does not begin."""
    source = prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    for view in tensor_views(source):
        view[:] = 5
    pulled, refused, began = [0], [0], threading.Event()
    phases: set[str | None] = set()

    def pull_on() -> None:
        target = decoder.cache_manager.allocate_blocks_cache(DESC)
        while not refused[0]:
            for view in tensor_views(target):
                view[:] = 0
            try:
                decoder.cache_manager.pull_blocks(BlocksCacheKey(1), target, [0, 1, 2, 3], [0, 1, 2, 3])
            except NotLinked as error:
                phases.add(error.phase)
                refused[0] += 1
            else:
                assert all((view == 5).all() for view in tensor_views(target))
                pulled[0] += 1
                began.set()

    with ThreadPoolExecutor() as threads:
        pulls = [threads.submit(pull_on) for _ in range(2)]
        assert began.wait(20)
        assert not prompt.drain(20_000)
        for each in pulls:
            each.result(20)
    assert phases == {None}  # no byte had moved
    sees_no_loss(decoder)


def test_it_unlinks_a_link_whose_earlier_unlink_gives_up(
    prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink
) -> None:
    here, there = Probe(prompt).engine.links, Probe(decoder).engine.links
    with ThreadPoolExecutor() as threads:
        with there.operation(1):  # so the peer does not agree
            earlier = threads.submit(here.unlink, 2, Deadline(SHORT), force=False)
            wait_until(lambda: here.all()[0].state is LinkState.DRAINING or earlier.done())
            drained = threads.submit(prompt.drain, 20_000)
            with pytest.raises(DeadlineExceeded):
                earlier.result()
        assert not drained.result()


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_lost_link_is_dialled_no_more(prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink, when: str) -> None:
    decoder.cache_manager.allocate_cache(DESC, [CacheKey(2, req_id=7)])
    if when == "meanwhile":
        assert decoder.drain(SHORT).links == (1,)
    Probe(prompt).engine.links.listen(None, even_if_linked=True)
    with suppress(OSError):  # the other side may have read the end
        socket_of(Probe(decoder).link(1)).shutdown(socket.SHUT_RDWR)
    wait_until(lambda: decoder.statistics().lost_peers == ((1, "connection"),))
    if when == "before":
        wait_until(lambda: len(decoder.statistics().redials) == 1)
        assert decoder.drain(SHORT).links == ()
    wait_until(lambda: decoder.statistics().redials == ())


def test_after_finalize_another_init_works(prompt: LLMDataDist, decoder: LLMDataDist, link: PeerLink) -> None:
    assert not prompt.drain(20_000)
    prompt.finalize()
    with prompt, decoder.connect(f"127.0.0.1:{prompt.listen_port}", timeout=10_000):
        assert not draining(prompt)


def test_what_it_refuses_itself(prompt: LLMDataDist) -> None:
    calls: list[tuple[Any, type[Exception], str]] = [
        (0, ParamError, "timeout_ms=0"),
        (-1, ParamError, "timeout_ms=-1"),
        (2**31, ParamError, "timeout_ms: 2147483648"),
        (1.5, TypeError, "timeout_ms"),
        (None, TypeError, "timeout_ms"),
    ]
    for value, kind, text in calls:
        with pytest.raises(kind, match=text):
            prompt.drain(value)
    assert not draining(prompt)
    with pytest.raises(NotInitialized, match="drain"):
        LLMDataDist(LLMRole.PROMPT, 4).drain()
    seen: list[BaseException] = []

    def ended(_: object) -> None:
        try:
            prompt.drain(SHORT)
        except StateError as error:
            seen.append(error)

    cache = prompt.cache_manager.allocate_blocks_cache(DESC)
    cache.grant([0], ttl=60.0, on_end=ended).revoke()
    assert len(seen) == 1
    assert "drain" in str(seen[0])
