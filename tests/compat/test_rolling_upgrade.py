"""Eight processes that pull from one another all the time, restarted one by one from a build to the next."""

from collections import Counter
from contextlib import AbstractContextManager

import pytest

from tests.compat import words
from tests.compat.builds import NEXT, releases
from tests.compat.conftest import THIS, Born
from tests.support.ends import ChildEnd
from tests.support.linking import free_port
from tests.support.moves import wait_until
from tests.support.world import small_pool

#: From which build to which.
STEPS = [(THIS, "newer"), *((each, THIS) for each in releases("speaks"))]
PROMPTS, DECODERS = (1, 2, 3, 4), (5, 6, 7, 8)
#: Right pulls of each decoder from each prompt after each restart.
PULLS = 3
#: How long that may take on a machine that does other things.
SECONDS = 200.0


class Fleet(AbstractContextManager["Fleet"]):
    """Prompts at ports that stay, and decoders that pull from all of them; none is left, whatever happens."""

    def __init__(self, born: Born, transport: str, *builds: str) -> None:
        self._born = born
        for build in builds:
            born(build).close()  # the first of a build takes long: here, where nothing else runs
        #: On a machine that does other things too, a process may be silent for long and live.
        self._settings = small_pool(2) | {"extra": {"llm.Transport": transport, "llm.PeerTimeout": "60"}}
        self.ports = {prompt: free_port() for prompt in PROMPTS}
        self.ends: dict[int, ChildEnd] = {}
        self.met: Counter[str] = Counter()  # by all pulls of decoders that ended

    def start(self, cluster_id: int, build: str, spoilt: bool = False) -> None:
        end = self.ends[cluster_id] = self._born(build)
        if cluster_id in self.ports:
            end.start("PROMPT", cluster_id, listen_ip_info=f"127.0.0.1:{self.ports[cluster_id]}", **self._settings)
            end.do(words.publish, cluster_id, spoilt)
        else:
            end.start("DECODER", cluster_id, **self._settings)
            end.do(words.pull_all_the_time, self.ports)

    def stop(self, cluster_id: int) -> None:
        """End a process as an operator does, while others pull from it, or while it pulls."""
        end = self.ends.pop(cluster_id)
        for each in end.do(words.stop_pulling):
            self.met.update(each)
        end.stop()
        end.close()

    def go_on(self) -> None:
        """Wait until each decoder has pulled from each prompt again."""
        before = self._right()
        wait_until(lambda: all(new >= old + PULLS for old, new in zip(before, self._right(), strict=True)), SECONDS)

    def _right(self) -> list[int]:
        return [met.get("right", 0) for end in self._decoders() for met in end.do(words.met)]

    def _decoders(self) -> list[ChildEnd]:
        return [end for cluster_id, end in self.ends.items() if cluster_id not in self.ports]

    def spoken(self) -> Counter[int]:
        """Return how many links have which version."""
        return Counter(end.do(words.told, peer, "protocol") for end in self._decoders() for peer in self.ports)

    def __exit__(self, *_: object) -> None:
        for each in self.ends.values():
            each.kill()

    def end(self) -> Counter[str]:
        for cluster_id in sorted(self.ends, reverse=True):
            self.stop(cluster_id)
        return self.met


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("old", "new"), STEPS)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_rolling_upgrade_costs_no_byte_and_no_call(born: Born, transport: str, old: str, new: str) -> None:
    with Fleet(born, transport, old, new) as fleet:
        for cluster_id in PROMPTS + DECODERS:
            fleet.start(cluster_id, old)
        fleet.go_on()
        links = len(PROMPTS) * len(DECODERS)
        before = fleet.ends[1].do(words.newest)
        assert fleet.spoken() == {before: links}
        # Both kinds in turn: prompts and decoders of both builds pull from one another in every mixture.
        for number, cluster_id in enumerate(sorted(PROMPTS + DECODERS, key=lambda each: each % 4), start=1):
            fleet.stop(cluster_id)
            fleet.start(cluster_id, new)
            fleet.go_on()
            upgraded = (number + 1) // 2 * (number // 2)
            after = fleet.ends[cluster_id].do(words.newest)
            assert after > before
            assert fleet.spoken() == +Counter({before: links - upgraded, after: upgraded})
        met = fleet.end()
    print(f"{transport}, {old} to {new}: {met}")  # noqa: T201 (shown by -s)
    assert {each for each in met if each != "right" and not each.startswith("restart: ")} == set()
    assert met["right"] >= links * PULLS * 9
    assert len(met) > 1, "no pull met a restart"


def test_the_judge_of_the_upgrade_notices_a_wrong_byte_and_a_refusal_for_the_version(born: Born) -> None:
    """One byte of one prompt is wrong; another prompt's version is none of the decoder's."""
    with Fleet(born, "shm", THIS, "far") as fleet:
        fleet.ports = {each: fleet.ports[each] for each in (1, 2, 3)}
        fleet.start(1, THIS)
        fleet.start(2, THIS, spoilt=True)
        fleet.start(3, "far")
        fleet.start(5, THIS)
        decoder = fleet.ends[5]

        def kinds() -> list[set[str]]:
            return [{each.partition(":")[0] for each in met} - {"restart"} for met in decoder.do(words.met)]

        wait_until(lambda: kinds() == [{"right"}, {"right", "wrong"}, {"version"}], SECONDS)
        met = fleet.end()
    assert {each.partition(":")[0] for each in met} - {"restart"} == {"right", "wrong", "version"}
    assert all(f"{NEXT} to {NEXT} at cluster 3" in each for each in met if each.startswith("version"))
