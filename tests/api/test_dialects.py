"""What KvCacheManager (v1) and the C++-shaped calls both do, in one suite: transfers, codes, links
(interface §8, §9)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from tests.support.cpp import Shape
from tests.support.dialects import V1, Cpp
from tests.support.frozen import frozen
from tests.support.linking import alone
from tests.support.moves import moved, picture, same_bytes, show, wait_until
from tests.support.v1 import DIRECT, POOL

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.dialects import Dialect
    from tests.support.moves import Bytes

pytestmark = pytest.mark.covers(
    "KvCacheManager: deallocate_cache pull_blocks pull_cache transfer_cache_async",
    "cpp_api: Cache CacheDesc CacheIndex KvCacheExtParam LlmDataDist LlmRole",
    "cpp_api.LlmDataDist: DeallocateCache PullKvBlocks PullKvCache PushKvBlocks PushKvCache UnlinkLlmClusters",
)

OK, DONE = LLMStatusCode.LLM_SUCCESS, (LLMStatusCode.LLM_SUCCESS, "")
GONE, UNLINKED = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, LLMStatusCode.LLM_NOT_YET_LINK
#: Of the order of making.
ROWS, BLOCKS = 1, 2
SHAPES = {"rows": Shape(rows=8), "blocks": Shape(rows=12, width=24)}


@pytest.fixture(params=[V1(POOL), V1(DIRECT), Cpp()], ids=["v1", "v1 without a pool", "cpp"])
def dialect(request: pytest.FixtureRequest) -> Dialect:
    chosen: Dialect = request.param
    return chosen


class Two:
    """A prompt and a decoder with caches "rows" and "blocks", and what every byte of them has to be."""

    def __init__(self, pair: Pair, dialect: Dialect, *, linked: bool = True, timeout: int = 10_000) -> None:
        self.prompt, self.decoder, self.dialect, self.transport = pair.prompt, pair.decoder, dialect, pair.transport
        self.port = self.prompt.do(dialect.start, "PROMPT", pair.transport, timeout)
        self.decoder.do(dialect.start, "DECODER", pair.transport, timeout)
        self.theirs, self.mine = self.fill(self.prompt, 1), self.fill(self.decoder, 10)
        if linked:
            self.link()

    def fill(self, end: Any, seed: int) -> dict[str, Bytes]:
        return {
            name: end.do(self.dialect.make, name, shape, seed + at, name == "blocks")
            for at, (name, shape) in enumerate(SHAPES.items())
        }

    def link(self) -> None:
        assert self.decoder.do(self.dialect.link, self.port) == (OK, [OK])

    def pull(self, name: str, dst: list[int], src: list[int]) -> Any:
        """Make the decoder pull a row, or blocks, and remember what that moves if it is a success."""
        if name == "rows":
            answer = self.decoder.do(self.dialect.pull_row, ROWS, src[0], name, dst[0])
        else:
            pairs = list(zip(dst, src, strict=True))
            answer = self.decoder.do(self.dialect.pull_blocks, BLOCKS, name, pairs)
        if answer == DONE:
            self.mine[name] = moved(self.mine[name], self.theirs[name], zip(dst, src, strict=True))
        return answer

    def check(self) -> None:
        for end, caches in ((self.decoder, self.mine), (self.prompt, self.theirs)):
            for name, wanted in caches.items():
                same_bytes(end.do(show, name), wanted)


def test_rows_and_blocks_are_pulled_whole_in_part_and_by_layers(pair: Pair, dialect: Dialect) -> None:
    two = Two(pair, dialect)
    assert two.pull("rows", [5], [3]) == DONE
    assert two.pull("rows", [0], [0]) == DONE
    assert two.decoder.do(dialect.pull_row, ROWS, 2, "rows", 7, 17) == DONE
    for target, source in zip(two.mine["rows"], two.theirs["rows"], strict=True):
        target[7, :17] = source[2, :17]
    layers = ((1, 2), (0, 1), 1)
    assert two.decoder.do(dialect.pull_row, ROWS, 6, "rows", 1, -1, layers) == DONE
    two.mine["rows"] = moved(two.mine["rows"], two.theirs["rows"], [(1, 6)], [(0, 1), (1, 2)])
    # Pairs take effect in the order given: the last one wins.
    assert two.pull("blocks", [3, 4, 0, 3], [1, 2, 11, 10]) == DONE
    assert two.decoder.do(dialect.pull_blocks, BLOCKS, "blocks", [(5, 7)], ((1, 1), (0, 0), 2)) == DONE
    two.mine["blocks"] = moved(two.mine["blocks"], two.theirs["blocks"], [(5, 7)], [(0, 2), (1, 3)])
    two.check()


def test_r31_rows_and_blocks_are_pushed_to_where_the_decoder_has_them(pair: Pair, dialect: Dialect) -> None:
    two = Two(pair, dialect)
    place = two.decoder.do(dialect.place, "rows", 6)
    assert two.prompt.do(dialect.push_row, "rows", 3, place) == DONE
    two.mine["rows"] = moved(two.mine["rows"], two.theirs["rows"], [(6, 3)])
    place = two.decoder.do(dialect.place, "blocks", 0)
    pairs = [(3, 0), (2, 1), (11, 2), (0, 3), (2, 9)]
    assert two.prompt.do(dialect.push_blocks, "blocks", place, pairs) == DONE
    two.mine["blocks"] = moved(two.mine["blocks"], two.theirs["blocks"], pairs)
    two.check()


def test_r22_what_is_not_linked_or_not_there_has_a_code_and_linking_again_mends_it(
    tcp_pair: Pair, dialect: Dialect
) -> None:
    two = Two(tcp_pair, dialect, linked=False)
    before = [end.do(picture) for end in (two.decoder, two.prompt)]
    for name in SHAPES:
        status, text = two.pull(name, [1], [2])
        assert (status, "cluster 1" in text) == (UNLINKED, True), text
    assert [end.do(picture) for end in (two.decoder, two.prompt)] == before
    two.link()
    for name in SHAPES:
        assert two.pull(name, [1], [2]) == DONE
    status, text = two.decoder.do(dialect.pull_row, 99, 0, "rows", 0)
    assert (status, "99" in text) == (GONE, True), text
    assert two.decoder.do(dialect.pull_row, ROWS, 8, "rows", 0)[0] is GONE
    assert two.decoder.do(dialect.pull_blocks, 99, "blocks", [(0, 0)])[0] is GONE
    two.check()

    # Unlinked and linked again; the prompt goes and comes back; its caches go, then the decoder's own.
    assert two.decoder.do(dialect.unlink, two.port) == (OK, [OK])
    alone(two.decoder, two.prompt)
    assert two.pull("blocks", [1], [5])[0] is UNLINKED
    two.link()
    assert two.pull("blocks", [1], [5]) == DONE
    two.prompt.stop()
    wait_until(lambda: two.pull("blocks", [1], [6])[0] is UNLINKED)
    two.port = two.prompt.do(dialect.start, "PROMPT", two.transport)
    two.theirs = two.fill(two.prompt, 20)
    two.link()
    for name in SHAPES:
        assert two.pull(name, [4], [7]) == DONE
    two.check()
    assert two.prompt.do(dialect.deallocate, "blocks") == DONE
    assert two.pull("blocks", [4], [7])[0] is GONE
    assert two.decoder.do(dialect.deallocate, "rows") == DONE
    status, text = two.pull("rows", [4], [7])
    assert (status, "id 1" in text) == (GONE, True), text


def test_r06_r07_a_peer_that_does_not_answer_times_out_and_the_link_stays(shm_pair: Pair, dialect: Dialect) -> None:
    two = Two(shm_pair, dialect, timeout=300)
    with frozen(two.prompt):
        for name in SHAPES:
            status, text = two.pull(name, [1], [2])
            assert (status, "300 ms" in text) == (dialect.timed_out, True), text
    wait_until(lambda: bool(two.pull("blocks", [1], [2]) == DONE))
    two.check()
