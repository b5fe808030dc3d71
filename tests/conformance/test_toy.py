"""A new transport is one module and one registration: the transport toy passes the suite, and links choose it."""

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

from faults.lanepeer import Handles, MemoryHandler
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMStatusCode, Placement
from llm_datadist.testing import LocalPeer, Peer, TransportConformance
from llm_datadist.testing.peers import REGION_BYTES
from tests.conformance.toy import ToyConnection, ToyServer, ToyTransport, first_of_all, regions_of
from tests.support.world import World, cluster_info, make_config


class SuiteConnection(Handles, ToyConnection):
    """Its handles say where the tensors are."""


class ToyPeer(LocalPeer):
    """A peer whose server is called directly, in place of a link."""

    def __init__(self, *, writable: bool) -> None:
        super().__init__(writable=writable)
        self._writable, self._handler = writable, MemoryHandler(self)
        self._serving = ToyServer(self._handler, threading.Lock())

    def connect(self) -> SuiteConnection:
        regions = regions_of(REGION_BYTES, writable=self._writable)
        here = ToyServer(self._handler, threading.Lock())
        return SuiteConnection(self, here, regions, writable=self._writable)

    def hold(self, slot: int, generation: int) -> None:
        self._handler.guards = [(self.exports.guards.address_of(slot), generation)]

    def ask(self, link: object, data: bytes, deadline: object) -> bytes:
        answers: list[bytes] = []
        self._serving.on_request(data, answers.append)
        return answers[0]

    def tell(self, link: object, data: bytes) -> None:
        """Nothing is told."""


class TestToy(TransportConformance):
    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return ToyPeer(writable=writable)


@pytest.fixture
def registered() -> Iterator[None]:
    with first_of_all():
        yield


@contextmanager
def linked() -> Iterator[tuple[World, World]]:
    """Yield a decoder that is linked to a prompt in this process, and the prompt."""
    prompt, decoder = World("prompt"), World("decoder")
    try:
        port = prompt.start("PROMPT", 1, make_config(listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True))
        decoder.start("DECODER", 2, make_config(enable_remote_cache_accessible=True))
        assert decoder.dd.link_clusters([cluster_info(1, port)], timeout=10_000)[0] == LLMStatusCode.LLM_SUCCESS
        yield decoder, prompt
    finally:
        decoder.stop()
        prompt.stop()


@pytest.mark.usefixtures("registered")
def test_a_link_over_a_transport_that_was_registered_moves_blocks_both_ways_and_says_so() -> None:
    desc, key = CacheDesc(2, [16, 1024], DataType.DT_UINT8, Placement.DEVICE), BlocksCacheKey(1, 0)
    theirs = np.random.default_rng(1).integers(0, 256, (2, 16, 1024), np.uint8)
    mine = np.zeros_like(theirs)
    pulled, pushed = mine.copy(), theirs.copy()
    pulled[:, [0, 7, 2]] = theirs[:, [3, 9, 4]]
    pushed[:, [15, 1]] = pulled[:, [7, 2]]
    with linked() as (decoder, prompt):
        prompt.cm.register_blocks_cache(desc, [each.ctypes.data for each in theirs], key)
        cache = decoder.cm.register_blocks_cache(desc, [each.ctypes.data for each in mine])
        said = decoder.dd.explain(1)
        assert (said.transport, said.private_transport, said.reason) == ("toy", "toy", "toys on both sides")
        decoder.cm.pull_blocks(key, cache, [3, 9, 4], [0, 7, 2])
        assert np.array_equal(mine, pulled)
        decoder.cm.push_blocks(key, cache, [7, 2], [15, 1])
        assert np.array_equal(theirs, pushed)
        assert np.array_equal(mine, pulled)


@pytest.mark.usefixtures("registered")
def test_a_peer_that_offers_nothing_is_reached_by_the_next_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToyTransport, "offer", lambda self, meeting: b"")
    with linked() as (decoder, _):
        said = decoder.dd.explain(1)
        assert (said.transport, said.reason) == ("inproc", "the peer is in this process; not toy: the peer has no toy")
