"""The short form: ``with``, a drawn cluster id, connect() and its link, beside the interface's own calls."""

import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from llm_datadist import (
    AlreadyLinked,
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    DataType,
    LinkRefused,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    NoneArgument,
    NotInitialized,
    NotLinked,
    ParamError,
)
from llm_datadist.datadist import life_of
from llm_datadist.types.question import PeerQuestion
from llm_datadist.views import tensor_views
from tests.support.linking import free_port
from tests.support.moves import wait_until
from tests.support.probe import socket_of

pytestmark = pytest.mark.covers("LLMDataDist: connect link_clusters unlink_clusters init finalize")

DESC = CacheDesc(2, [4, 64], DataType.DT_FLOAT16)
HERE = "127.0.0.1:0"


def listening(cluster_id: int = 1, address: str = HERE, **settings: Any) -> LLMDataDist:
    return LLMDataDist(
        LLMRole.PROMPT, cluster_id, config=LLMConfig(listen_ip_info=address, mem_pool_cfg="1MiB", **settings)
    )


@pytest.fixture
def prompt() -> Iterator[LLMDataDist]:
    with listening() as made:
        yield made


@pytest.fixture
def decoder() -> Iterator[LLMDataDist]:
    with LLMDataDist(LLMRole.DECODER, config=LLMConfig(mem_pool_cfg=1 << 20)) as made:
        yield made


def at(prompt: LLMDataDist, host: str = "127.0.0.1") -> str:
    return f"{host}:{prompt.listen_port}"


def linked(end: LLMDataDist) -> list[int]:
    return [each.remote_cluster_id for each in end.statistics().links]


def test_rows_and_blocks_go_over_a_link_of_connect(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    rows = prompt.cache_manager.allocate_cache(DESC, [CacheKey(1, req_id=7)])
    blocks = prompt.cache_manager.allocate_blocks_cache(DESC, BlocksCacheKey(1))
    random = np.random.default_rng(1)
    for view in tensor_views(rows) + tensor_views(blocks):
        view[:] = random.integers(0, 100, view.shape)
    row, block = decoder.cache_manager.allocate_cache(DESC), decoder.cache_manager.allocate_blocks_cache(DESC)
    with decoder.connect(at(prompt)) as link:
        assert (link.cluster_id, link.explain().remote_cluster_id) == (1, 1)
        decoder.cache_manager.pull_cache(CacheKey(link.cluster_id, req_id=7), row, batch_index=3)
        decoder.cache_manager.pull_blocks(BlocksCacheKey(link.cluster_id), block, [2, 0], [0, 1])
    for here, there in zip(tensor_views(row), tensor_views(rows), strict=True):
        assert (here[3] == there[0]).all()
        assert not here[:3].any()
    for here, there in zip(tensor_views(block), tensor_views(blocks), strict=True):
        assert (here[:2] == there[[2, 0]]).all()
        assert not here[2:].any()
    assert linked(decoder) == []
    with pytest.raises(NotLinked):
        link.explain()


def test_with_finalizes_also_after_an_error_and_may_begin_again() -> None:
    end = listening()

    def fail() -> None:
        with end as same:
            assert same is end
            end.cache_manager.allocate_cache(DESC)
            raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fail()
        with pytest.raises(NotInitialized):
            end.statistics()
    with pytest.raises(ParamError, match=r"llm\.listenIpInfo: .*no-port"), listening(address="no-port") as wrong:
        raise AssertionError(wrong)
    end.init({"ge.exec.deviceId": "0", "llm.EnableCacheManager": "1"})
    before = end.incarnation
    with end:
        assert end.incarnation == before


def test_what_with_presumes_gives_way_to_the_config() -> None:
    with LLMDataDist(LLMRole.DECODER) as plain:
        assert plain.cache_manager is not None
    v1 = LLMConfig(enable_cache_manager=False, ge_options={"ge.flowGraphMemMaxSize": "1048576"})
    with LLMDataDist(LLMRole.DECODER, config=v1) as old:
        assert old.kv_cache_manager is not None
    with pytest.raises(TypeError, match="config only support"):
        LLMDataDist(LLMRole.DECODER, config={})  # type: ignore[arg-type]


def test_a_cluster_id_that_is_not_given_is_drawn() -> None:
    ids = {LLMDataDist(LLMRole.MIX).cluster_id for _ in range(64)}
    assert len(ids) == 64
    assert max(ids) < 2**63
    assert max(ids) > 2**50
    with pytest.raises(NoneArgument):
        LLMDataDist(LLMRole.MIX, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]"])
def test_an_address_has_an_ip_or_a_name(host: str, decoder: LLMDataDist) -> None:
    with listening(address=f"{'[::1]' if host == '[::1]' else '127.0.0.1'}:0") as prompt:
        decoder.connect(at(prompt, host), timeout=10_000).close()


@pytest.mark.parametrize(
    ("address", "text"),
    [
        (None, "address only support .*None"),
        (26000, "address only support"),
        ("", "address: '' is not of the form"),
        ("127.0.0.1", "address: .* is not of the form"),
        ("tcp://127.0.0.1:26000", "address: .* is not of the form"),
        ("::1:26000", "address: .* is not of the form"),
        ("127.0.0.1:0", "address: .*port 0"),
        ("127.0.0.1:65536", "address: port '65536'"),
        ("[fe80::1%eth0]:26000", "address: .*%"),
        ("300.0.0.1:26000", "'300.0.0.1' is not an IPv4 address"),
    ],
)
def test_an_address_that_is_none_is_refused(address: Any, text: str, decoder: LLMDataDist) -> None:
    with pytest.raises((ParamError, TypeError), match=text):
        decoder.connect(address)


def test_a_link_that_is_not_made_is_an_error(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    with pytest.raises(LinkRefused):
        decoder.connect(f"127.0.0.1:{free_port()}")
    with pytest.raises(LinkRefused, match="cluster"):
        decoder.connect(at(prompt), cluster_id=5)
    with pytest.raises(ParamError, match="timeout"):
        decoder.connect(at(prompt), timeout=0)
    with decoder.connect(at(prompt), cluster_id=1), pytest.raises(AlreadyLinked):
        decoder.connect(at(prompt))
    assert linked(decoder) == []
    with pytest.raises(NotInitialized):
        LLMDataDist(LLMRole.DECODER).connect(at(prompt))


def test_in_v1_mode_a_failure_has_its_status(prompt: LLMDataDist) -> None:
    with listening(2, enable_cache_manager=False) as v1, pytest.raises(LLMException, match="only a DECODER links"):
        v1.connect(at(prompt))


def test_a_link_can_be_asked(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    def answer(question: PeerQuestion) -> bytes:
        return question.body[::-1]

    prompt.answer_questions("turn", answer)
    with decoder.connect(at(prompt)) as link:
        assert link.ask("turn", b"abc") == b"cba"
    with pytest.raises(NotLinked):
        link.ask("turn", b"abc")


def test_closing_is_idempotent_and_ends_no_other_link(decoder: LLMDataDist) -> None:
    with listening() as first:
        old = decoder.connect(at(first))
        assert linked(first) == [decoder.cluster_id]
    old.close()
    with listening() as second, decoder.connect(at(second)) as new:  # the same cluster id, another init
        old.close()
        assert linked(decoder) == [1]
        new.close()
        assert linked(decoder) == []
        with pytest.raises(NotLinked):
            new.explain()


def test_a_link_of_an_earlier_init_closes_nothing(prompt: LLMDataDist) -> None:
    end = LLMDataDist(LLMRole.DECODER, 2)
    with end:
        old = end.connect(at(prompt))
    old.close()
    with end, end.connect(at(prompt)):
        old.close()
        assert linked(end) == [1]


def test_closing_ends_the_redialling_of_a_lost_link(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    link = decoder.connect(at(prompt))
    here, there = (life_of(each).require_engine("a test").links for each in (decoder, prompt))
    there.listen(None, even_if_linked=True)
    with suppress(OSError):
        socket_of(here.get(1)).shutdown(socket.SHUT_RDWR)
    wait_until(lambda: bool(decoder.statistics().redials))
    link.close()
    assert not decoder.statistics().redials


def test_an_unlink_that_fails_is_an_error_and_keeps_the_link(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    link = decoder.connect(at(prompt))
    with pytest.raises(ParamError, match="timeout"):
        link.close(timeout=0)
    assert linked(decoder) == [1]
    link.close(force=True)
    assert linked(decoder) == []


def test_the_interfaces_own_form_does_the_same(prompt: LLMDataDist, decoder: LLMDataDist) -> None:
    cluster = LLMClusterInfo()
    cluster.append_local_ip_info("127.0.0.1", 0)
    cluster.append_remote_ip_info("127.0.0.1", prompt.listen_port or 0)
    status, _ = decoder.link_clusters([cluster])
    assert status.error is None
    assert cluster.remote_cluster_id is None  # stays the caller's
    assert linked(decoder) == [1]
