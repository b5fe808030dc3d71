"""Two builds of this library, a prompt's and a decoder's: what users do with a link, over every transport between
processes, every byte compared; what one of them lacks; and builds that have no version in common."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import CacheKey, CacheKeyByIdAndIndex, LLMStatusCode
from llm_datadist.errors import CacheNotFound, GrantEnded
from tests.compat import words
from tests.compat.builds import NEXT, releases
from tests.compat.conftest import THIS, Born
from tests.support.authority import secret_file
from tests.support.ends import End
from tests.support.grants import LONG, claim, grant, pull, pull_claimed, tell
from tests.support.layers import OK, keyed, make_both, raw, received, send
from tests.support.linking import bytes_move_both_ways, info, link, link_number, linked, links, lose
from tests.support.moves import BLOCKS, Spec, Use, cache_id, call, moved, same_bytes, wait_until
from tests.support.pairs import Pair, pairs
from tests.support.probe import nixl_is_installed
from tests.support.wire import VERSIONS

pair = pairs("shm", "cma", "tcp", "nixl")
PAGED = Spec(blocks=True, blocks_key=BLOCKS)
KEYS = tuple(CacheKey(1, 10 + row) for row in range(8))


def started(pair: Pair, **settings: Any) -> None:
    """Both ends, linked over this transport, in the newest language of both."""
    if pair.transport == "nixl" and not nixl_is_installed():
        pytest.skip("NIXL is not installed: make test-compat")
    pair.start(**settings)
    newest = min(end.do(words.newest) for end in (pair.prompt, pair.decoder))
    for end, peer in ((pair.prompt, 2), (pair.decoder, 1)):
        assert (end.do(words.told, peer, "transport"), end.do(words.told, peer, "protocol")) == (pair.transport, newest)


def pushes(pair: Pair) -> None:
    """Blocks by key, and rows by cache id, both ways."""
    for here, there in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        for verb, paged, args, row, moves in (
            ("push_blocks", True, ([1, 2, 5], [4, 0, 7]), 0, [(4, 1), (0, 2), (7, 5)]),
            ("push_cache", False, (3,), 6, [(6, 3)]),
        ):
            target, source = make_both(there, here, Spec(blocks=paged), Spec(blocks=paged))
            key = CacheKeyByIdAndIndex(there.cluster_id, there.do(cache_id, "kv"), row)
            here.do(call, verb, key, Use("kv"), *args)
            same_bytes(received(there), moved(target, source, moves))
            same_bytes(received(here), source)


def keys(pair: Pair) -> None:
    """A pull by key consumes it; the next one finds nothing."""
    before, source = make_both(pair.decoder, pair.prompt, Spec(), Spec(keys=KEYS))
    for row in range(4):
        pair.decoder.do(call, "pull_cache", KEYS[row], Use("kv"), row)
    same_bytes(received(pair.decoder), moved(before, source, [(row, row) for row in range(4)]))
    same_bytes(received(pair.prompt), source)
    with pytest.raises(CacheNotFound):
        pair.decoder.do(call, "pull_cache", KEYS[0], Use("kv"), 7)


def grants(pair: Pair) -> None:
    """A grant that travels as bytes, one that is claimed, and the end of both."""
    before, source = make_both(pair.decoder, pair.prompt, Spec(blocks=True), PAGED)
    data = pair.prompt.do(grant, [1, 2], LONG)
    pair.decoder.do(pull, data, [2, 1], [0, 5])
    token = b"a token of bytes"
    pair.prompt.do(grant, [3, 4], LONG, "kv", token)
    pair.decoder.do(claim, token)
    pair.decoder.do(pull_claimed, [4], [6])
    same_bytes(received(pair.decoder), moved(before, source, [(0, 2), (5, 1), (6, 4)]))
    pair.decoder.do(tell, "claimed", "release")
    wait_until(lambda: bool(pair.prompt.do(tell, token.hex(), "released")))
    with pytest.raises(GrantEnded):
        pair.decoder.do(pull_claimed, [3], [7])


def layers_by_key(pair: Pair) -> None:
    layers(pair, lambda receiver: keyed(receiver, "kv", range(2), row=2, dst_row=5))


def layers_by_address(pair: Pair) -> None:
    """Over shm and nixl nobody writes so: that is said, whatever the build."""
    if pair.transport in ("cma", "tcp"):
        layers(pair, lambda receiver: raw(receiver, "kv", row=2, offset=5 * 48))
        return
    target, _ = make_both(pair.prompt, pair.decoder, Spec(), Spec())
    assert pair.decoder.do(send, "kv", [raw(pair.prompt, "kv")]).first is LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    same_bytes(received(pair.prompt), target)


def layers(pair: Pair, config: Callable[[End], object]) -> None:
    """Row 2 goes to row 5 layer by layer, both ways."""
    for sender, receiver in ((pair.prompt, pair.decoder), (pair.decoder, pair.prompt)):
        target, source = make_both(receiver, sender, Spec(), Spec())
        outcome = sender.do(send, "kv", [config(receiver)])
        assert (outcome.results, outcome.first) == ([OK], OK), outcome
        same_bytes(received(receiver), moved(target, source, [(5, 2)]))
        same_bytes(received(sender), source)


def checksums(pair: Pair) -> None:
    """What was pulled is compared with what the peer has."""
    bytes_move_both_ways(pair.prompt, pair.decoder)
    for end, peer in ((pair.prompt, 2), (pair.decoder, 1)):
        assert end.do(words.told, peer, "verified_bytes") == 4 * 2 * 48


def reconnect(pair: Pair) -> None:
    """A lost link is dialled again, by itself; the sides prove that they have met; pulls before, after."""
    bytes_move_both_ways(pair.prompt, pair.decoder)
    for end, peer in ((pair.decoder, 1), (pair.prompt, 2)):
        before = end.do(link_number, peer)
        end.do(lose, peer)
        wait_until(lambda end=end, peer=peer, before=before: end.do(link_number, peer) > before)  # type: ignore[misc]
        wait_until(lambda: linked(pair.prompt, pair.decoder))
    bytes_move_both_ways(pair.prompt, pair.decoder)


RCA = {"rca": True}
#: What is done, with the ends' settings.
SCENES: dict[Callable[[Pair], None], dict[str, Any]] = {
    pushes: RCA,
    layers_by_key: RCA,
    checksums: {"extra": {"llm.Checksum": "1"}},
    **{scene: {} for scene in (keys, grants, layers_by_address, reconnect)},
}


@pytest.mark.usefixtures("children")
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_byte_arrives_between_two_builds(pair: Pair, scene: Callable[[Pair], None]) -> None:
    started(pair, **SCENES[scene])
    scene(pair)


@pytest.mark.usefixtures("children")
def test_a_link_of_two_builds_is_authenticated_and_again(pair: Pair, tmp_path: Path) -> None:
    secret = secret_file(tmp_path / "secrets", only=b"s" * 32)
    plaintext = {"llm.NixlPlaintext": "1"} if pair.transport == "nixl" else {}
    started(pair, extra=secret | plaintext | {"llm.MaxLinkAge": "1"})
    number = pair.decoder.do(link_number, 1)
    for end, peer in ((pair.prompt, 2), (pair.decoder, 1)):
        assert end.do(words.told, peer, "sealed")
        first = end.do(words.told, peer, "authenticated_at")
        wait_until(lambda end=end, peer=peer, first=first: end.do(words.told, peer, "authenticated_at") > first)  # type: ignore[misc]
    bytes_move_both_ways(pair.prompt, pair.decoder)
    assert pair.decoder.do(link_number, 1) == number


@pytest.mark.parametrize("turn", [1, -1], ids=["listens", "dials"])
@pytest.mark.parametrize("other", ["far", *releases("refused")])
def test_builds_that_cannot_link_are_refused_readably(born: Born, other: str, turn: int) -> None:
    """If greetings can be read, both ends name both ranges. Otherwise this one says that the other build may differ."""
    builds = (other, THIS)[::turn]
    prompt, decoder = ends = [born(each) for each in builds]
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    decoder.start("DECODER", 2)
    for end in ends:
        end.do(words.listen_to_log)
    assert decoder.do(link, [info(1, prompt.port)])[0] is LLMStatusCode.LLM_LINK_FAILED
    wait_until(lambda: all(end.do(words.logged) for end in ends))
    ranges = {THIS: f"{VERSIONS[0]} to {VERSIONS[1]}", "far": f"{NEXT} to {NEXT}"}
    for build, end in list(zip(builds, ends, strict=True))[::-1]:
        text = " ".join(end.do(words.logged))
        if other == "far":
            parts = [f"{ranges[each]} at cluster {number}" for number, each in enumerate(builds, 1)]
            assert all(part in text for part in ("no common protocol version", *parts)), text
        elif build == THIS and "a release before 0.2.0" not in text:
            assert all(part in text for part in (words.OF_VERSIONS[1], "install releases next to each other")), text
        assert end.do(links) == {}
        end.stop()
        end.close()
