"""Two ends for a test: the same test runs over inproc (two in this process), shm and tcp (two processes)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.ends import End, LocalEnd
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import wait_until
from tests.support.world import World, baseline, settled_of

TRANSPORTS = ("inproc", "shm", "tcp")


@dataclass
class Pair:
    """A prompt (cluster 1, listening) and a decoder (cluster 2), not started yet."""

    prompt: End
    decoder: End
    transport: str

    def start(self, *, linked: bool = True, rca: bool = False, **settings: Any) -> tuple[End, End]:
        """Start both, and link the decoder to the prompt unless told otherwise; return both."""
        extra = {"llm.Transport": self.transport} | settings.pop("extra", {})
        if rca:
            settings["enable_remote_cache_accessible"] = True
        self.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra, **settings)
        self.decoder.start("DECODER", 2, extra=extra, **settings)
        if linked:
            self.link()
        return self.prompt, self.decoder

    def link(self) -> None:
        codes = self.decoder.do(link, [info(1, self.prompt.port)])
        assert codes == SUCCESS, codes
        for end in (self.prompt, self.decoder):
            if end.gpu:
                end.do(imports_end)


def imports_end(world: World) -> None:
    """Return once the driver has answered for all memory of peers: what links say does not change by that."""
    wait_until(lambda: all("has not answered yet" not in each.reason for each in world.dd.statistics().links))


def pair_of(request: pytest.FixtureRequest, transport: str, *, gpu: bool = False) -> Iterator[Pair]:
    if transport == "inproc":
        ends: tuple[End, End] = (LocalEnd("prompt"), LocalEnd("decoder"))
    else:
        ends = request.getfixturevalue("children")
    for end in ends:
        end.gpu = gpu
    before = [end.do(baseline) for end in ends]
    yield Pair(*ends, transport)
    # The decoder first: it is the one that linked.
    for end in reversed(ends):
        end.stop()
        end.gpu = False
    assert [end.do(settled_of, was) for end, was in zip(ends, before, strict=True)] == before


def pairs(*transports: str) -> Any:
    """Two ends over each of these: two processes but for inproc; afterwards nothing may be left in either process."""

    @pytest.fixture(params=transports if len(transports) > 1 else None)
    def ends(request: pytest.FixtureRequest, gpu: bool) -> Iterator[Pair]:
        yield from pair_of(request, getattr(request, "param", transports[0]), gpu=gpu)

    return ends
