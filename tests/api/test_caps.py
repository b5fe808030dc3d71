"""The caps of the original are not enforced (interface R19): clusters in a call, links, registered addresses."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.testing import scene
from tests.support.linking import OK, bytes_move_both_ways, info, link, links, unlink
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.strangers import Stranger, silent_port
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("LLMDataDist.link_clusters")

TIMEOUT = LLMStatusCode.LLM_TIMEOUT
SMALL = '{"memory_size": 65536, "page_shift": 12}'


@contextmanager
def prompts(count: int, **settings: Any) -> Iterator[list[tuple[int, int]]]:
    """So many prompts in this process; yield (cluster id, port) of each."""
    small = {"mem_pool_cfg": SMALL, "host_mem_pool_cfg": None} | settings
    with ExitStack() as leaving:
        reached = []
        for cluster_id in range(100, 100 + count):
            world = World(f"prompt {cluster_id}")
            port = world.start("PROMPT", cluster_id, make_config(listen_ip_info="127.0.0.1:0", **small))
            leaving.callback(world.stop)
            assert port is not None
            reached.append((cluster_id, port))
        yield reached


def test_r19_many_more_than_16_clusters_in_one_call_and_those_that_do_not_answer_cost_the_others_nothing(
    end: LocalEnd,
) -> None:
    count = 40
    end.start("DECODER", 2)
    with prompts(count) as reached, silent_port() as silent:
        clusters = [info(*each) for each in reached]
        assert end.do(link, clusters, 30_000) == (OK, [OK] * count)
        assert end.do(links) == {cluster_id: "ready" for cluster_id, _ in reached}
        assert end.do(unlink, clusters, 30_000) == (OK, [OK] * count)
        assert end.do(links) == {}
        # Twenty come first: a call that worked through them sixteen at a time would have no time left.
        mute = [info(cluster_id, silent) for cluster_id in range(10, 30)]
        assert end.do(link, mute + clusters[:3], 2000) == (TIMEOUT, [TIMEOUT] * 20 + [OK] * 3)


def test_r19_more_links_than_512_cost_no_thread_each_and_move_data(shm_pair: Pair) -> None:
    count = 520
    shm_pair.start(extra={"llm.PeerTimeout": "600"})  # strangers send no beats
    assert shm_pair.prompt.port is not None
    threads = shm_pair.prompt.do(kernel_threads)
    with ExitStack() as leaving:
        for cluster_id in range(1000, 1000 + count):
            leaving.enter_context(Stranger(shm_pair.prompt.port, cluster_id)).link()
        there = shm_pair.prompt.do(links)
        assert len(there) == count + 1
        assert set(there.values()) <= {"ready", "suspect"}  # a busy machine makes silence of their beats
        assert shm_pair.prompt.do(kernel_threads) <= threads  # one that was leaving may have left
        bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    wait_until(lambda: shm_pair.prompt.do(links) == {2: "ready"})


def kernel_threads(world: World) -> set[int]:
    return set(scene.kernel_threads())


@pytest.mark.parametrize(("pair", "memory"), [("shm", "private"), ("tcp", "inside")], indirect=["pair"])
def test_r19_more_than_240_addresses_are_registered_and_pulled(pair: Pair, memory: str) -> None:
    pair.start(extra={"llm.Transport": "auto"} if pair.transport == "shm" else {})  # cma for private memory
    spec = Spec(tensors=300, rows=4, stride=32, blocks=True, memory=memory)
    source = pair.prompt.do(make, "kv", Spec(**{**vars(spec), "blocks_key": BLOCKS}), 1)
    target = pair.decoder.do(make, "kv", spec, 2)
    pair.decoder.do(call, "pull_blocks", BLOCKS, Use("kv"), [0, 3], [2, 1])
    same_bytes(pair.decoder.do(show, "kv"), moved(target, source, [(2, 0), (1, 3)]))
    same_bytes(pair.prompt.do(show, "kv"), source)
    assert pair.prompt.do(picture).caches.registered == 1
