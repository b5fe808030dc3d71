"""Hosts that are cut off, wholly or one way, before a pull or in the middle of it; hosts that come back (interface R7,
R22)."""

from dataclasses import replace
from typing import Any

import pytest

from llm_datadist import BlocksCacheKey, CacheKey, LLMStatusCode
from llm_datadist.errors import CacheNotFound, DeadlineExceeded, LLMException, NotLinked, PeerLost, TransferFailed
from tests.hosts.conftest import Cluster
from tests.support.linking import begin_there, bytes_move_both_ways, links, result_there, runs_there
from tests.support.moves import Spec, Use, call, make, moved, picture, same_bytes, show, wait_until
from tests.support.world import World

BULK, PAGES = CacheKey(1, 5), BlocksCacheKey(1, 0)
BULKY = Spec(tensors=4, rows=1, stride=4 << 20)  # 16 MiB
PAGED = Spec(blocks=True)
MEGABITS = 40  # the bulk takes more than three seconds, and what happens meanwhile a few milliseconds
HURRIED, LONG = 1_500, 60_000
PATIENT, IMPATIENT = {"llm.PeerTimeout": "600"}, {"llm.PeerTimeout": "1.5"}
PULL_BULK: tuple[Any, ...] = ("pull_cache", BULK, Use("bulk"), 0)
PULL_PAGES: tuple[Any, ...] = ("pull_blocks", PAGES, Use("pages"), [0, 7], [5, 2])


class Scene:
    """A decoder with a link to each of two prompts, all on hosts of their own. The first prompt is to be cut off."""

    def __init__(self, cluster: Cluster, *, budget: int, extra: dict[str, str]) -> None:
        self.network = cluster.network
        self.hosts = cluster.hosts[:3]
        settings: dict[str, Any] = {"sync_kv_timeout": budget, "extra": extra}
        self.prompt, self.other = (
            cluster.born(host, "PROMPT", number, **settings) for number, host in enumerate(self.hosts[:2], 1)
        )
        self.decoder = cluster.born(self.hosts[2], "DECODER", 3, **settings)
        for prompt in (self.prompt, self.other):
            cluster.link(self.decoder, prompt)
        self.published = [
            self.prompt.do(make, "bulk", replace(BULKY, keys=(BULK,)), 1),
            self.prompt.do(make, "pages", replace(PAGED, blocks_key=PAGES), 2),
        ]
        self.bulk_here = self.decoder.do(make, "bulk", BULKY, 3)
        self.pages_here = self.decoder.do(make, "pages", PAGED, 4)
        self.keys = len(self.prompt.do(picture).keys)

    def begin_bulk(self) -> None:
        """Have the decoder pull the bulk, slowly, and wait until it is in the middle of it."""
        host = self.hosts[0]
        host.limit(MEGABITS)
        sent = host.bytes_sent()
        self.decoder.do(begin_there, "bulk", call, *PULL_BULK)
        wait_until(lambda: host.bytes_sent() > sent + (1 << 20))
        assert self.prompt.do(picture).pins == 1

    def cut(self, how: str) -> None:
        prompt, _, decoder = self.hosts
        match how:
            case "unplugged":
                prompt.pull_plug()
            case "blackhole":
                self.network.cut(prompt, decoder)
            case "answers lost":
                self.network.lose(prompt, decoder)

    def error(self, name: str) -> LLMException:
        """Return how a pull that was begun has failed; it must have, before long."""
        wait_until(lambda: not self.decoder.do(runs_there, name))
        error = self.decoder.do(result_there, name)
        assert isinstance(error, LLMException), error
        return error

    def nothing_was_consumed(self) -> None:
        """The prompt holds nothing for the decoder any more, and has its keys and its bytes."""
        wait_until(lambda: self.prompt.do(picture).pins == 0)
        assert len(self.prompt.do(picture).keys) == self.keys
        for name, was in zip(("bulk", "pages"), self.published, strict=True):
            same_bytes(self.prompt.do(show, name), was)

    def works_again(self) -> None:
        """Without any other call, pulls move the right bytes again before long, by the keys that failed before."""
        bulk, pages = self.published
        wait_until(lambda: self.decoder.do(succeeds, PULL_PAGES), 20)
        same_bytes(self.decoder.do(show, "pages"), moved(self.pages_here, pages, [(5, 0), (2, 7)]))
        wait_until(lambda: self.decoder.do(succeeds, PULL_BULK), 20)
        same_bytes(self.decoder.do(show, "bulk"), moved(self.bulk_here, bulk, [(0, 0)]))
        wait_until(lambda: len(self.prompt.do(picture).keys) == self.keys - 1)
        with pytest.raises(CacheNotFound):
            self.decoder.do(call, *PULL_BULK)
        bytes_move_both_ways(self.decoder, self.prompt)


def succeeds(world: World, pull: tuple[Any, ...]) -> bool:
    """Say whether a call succeeds; where it does not, it must say why in one of the ways that are documented."""
    try:
        call(world, *pull)
    except (DeadlineExceeded, NotLinked, PeerLost, TransferFailed):  # the last one where NIXL met no address that is up
        return False
    return True


@pytest.mark.parametrize(("how", "phase"), [("unplugged", "copy"), ("blackhole", "copy"), ("answers lost", "resolve")])
def test_r7_a_pull_from_a_host_that_is_cut_off_ends_at_its_deadline_and_the_link_is_fine_afterwards(
    cluster: Cluster, how: str, phase: str
) -> None:
    """It is cut off in the middle of the pull, or before it: then the question arrives, and no answer."""
    scene = Scene(cluster, budget=HURRIED, extra=PATIENT)
    if phase == "copy":
        scene.begin_bulk()
        scene.cut(how)
    else:
        scene.cut(how)
        scene.decoder.do(begin_there, "bulk", call, *PULL_BULK)
        wait_until(lambda: scene.prompt.do(picture).pins == 1)
    bytes_move_both_ways(scene.decoder, scene.other)
    error = scene.error("bulk")
    assert isinstance(error, DeadlineExceeded), error
    assert (error.status_code, error.phase) == (LLMStatusCode.LLM_TIMEOUT, phase)
    assert scene.decoder.do(links).keys() == {1, 2}, "nobody has given the host up"
    same_bytes(scene.decoder.do(show, "pages"), scene.pages_here)
    if phase == "copy":
        scene.network.heal()
    else:
        same_bytes(scene.decoder.do(show, "bulk"), scene.bulk_here)
    scene.nothing_was_consumed()  # of what is lost on the way, the prompt's own doing: it knows the decoder's time
    scene.network.heal()
    scene.works_again()


@pytest.mark.parametrize("how", ["unplugged", "blackhole", "answers lost"])
def test_r22_a_host_that_stays_cut_off_is_lost_at_both_ends_and_linked_again_without_any_call_when_it_comes_back(
    cluster: Cluster, how: str
) -> None:
    scene = Scene(cluster, budget=LONG, extra=IMPATIENT)
    scene.begin_bulk()
    scene.cut(how)
    scene.decoder.do(begin_there, "pages", call, *PULL_PAGES)
    bytes_move_both_ways(scene.decoder, scene.other)
    for name, phase in (("bulk", "copy"), ("pages", "resolve")):
        error = scene.error(name)
        assert isinstance(error, PeerLost), error
        assert error.status_code is LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR
        assert (error.peer, error.phase) == (1, phase)
        assert "cluster 1" in str(error)
    wait_until(lambda: scene.decoder.do(links).keys() == {2})
    wait_until(lambda: scene.prompt.do(links) == {})
    scene.nothing_was_consumed()
    for pull in (PULL_BULK, PULL_PAGES):
        with pytest.raises(NotLinked):
            scene.decoder.do(call, *pull)
    same_bytes(scene.decoder.do(show, "pages"), scene.pages_here)
    bytes_move_both_ways(scene.decoder, scene.other)
    scene.network.heal()
    scene.works_again()
