"""The model of the control plane (benchmarks/scaling_model.py), held to heartbeats in virtual time, and to a link."""

import heapq
import itertools
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest

from benchmarks import scaling_model as model
from faults.gates import watched
from llm_datadist import BlocksCacheKey
from llm_datadist._links import liveness
from llm_datadist._links.link import Link, LinkOrigin, Peer
from llm_datadist._links.liveness import Heartbeat
from llm_datadist._links.messages import Beat, Message, Resolved, decode, frame
from llm_datadist._links.versions import Spoken
from tests.support.ends import LocalEnd
from tests.support.linking import SUCCESS, info, link
from tests.support.moves import Spec, Use, call, make
from tests.support.probe import socket_of

_BEATS = 3


class VirtualTime:
    """A clock, and the part of a control loop that heartbeats use."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.loop = self

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), function))

    def run_until(self, end: float) -> None:
        while self._due and self._due[0][0] <= end:
            self.now, _, function = heapq.heappop(self._due)
            function()


def simulate(monkeypatch: pytest.MonkeyPatch, instances: int, linked: Iterable[tuple[int, int]]) -> Counter[str]:
    """Let real heartbeats of so many instances run over such links for some virtual seconds; return what they sent."""
    clock, counted = VirtualTime(), Counter[str]()
    monkeypatch.setattr(liveness, "time", clock)
    monkeypatch.setattr("llm_datadist._links.link.time", clock)
    ends: list[list[Link]] = [[] for _ in range(instances)]
    nothing: Any = SimpleNamespace(connections=(), name="tcp", private=None, reason="")

    def send(pair: list[Link], to: int, message: Message, _: object = None) -> None:
        data = frame(message)
        counted["messages"] += 1
        counted["bytes"] += len(data)
        assert decode(data[4:]) == message
        pair[to].heard()

    for numbers in linked:
        pair: list[Link] = []
        for mine, theirs in enumerate(reversed(numbers)):
            peer = Peer(cluster_id=theirs, incarnation=theirs.to_bytes(16, "big"), pid=1, host="")
            origin = LinkOrigin(dialled=mine == 0, sequence=1, peer_sequence=1)
            pair.append(Link(peer, nothing, nothing, origin, Spoken(11, frozenset())))
            pair[mine].ready(
                cast("Any", SimpleNamespace(reason="", send=partial(send, pair, 1 - mine), handle_late=lambda: None))
            )
            ends[numbers[mine]].append(pair[mine])

    lose = Mock(side_effect=AssertionError("a link is lost"))
    for number, its_links in enumerate(ends):
        heart = Heartbeat(cast("Any", clock), partial(list, its_links), lose, 10.0, None, lambda now: None)
        clock.now = 1000 + number / instances  # they do not beat at the same moment
        heart.start()
    clock.run_until(1001 + _BEATS - 1e-6)
    return counted


@pytest.mark.parametrize(
    ("fleet", "linked"),
    [
        (model.mesh(2), [(0, 1)]),
        (model.mesh(24), list(itertools.combinations(range(24), 2))),
        (model.pairs(3, 9), list(itertools.product(range(3), range(3, 12)))),
        (model.cells(2, model.mesh(3)), [(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)]),
        (model.pairs(10, 990), list(itertools.product(range(10), range(10, 1000)))),
    ],
    ids=["2", "mesh of 24", "3 and 9", "two cells", "1,000"],
)
def test_what_heartbeats_send_in_virtual_time_is_what_the_model_says(
    monkeypatch: pytest.MonkeyPatch, fleet: model.Fleet, linked: list[tuple[int, int]]
) -> None:
    assert (fleet.links, fleet.busiest) == (len(linked), max(Counter(end for pair in linked for end in pair).values()))
    counted = simulate(monkeypatch, fleet.instances, linked)
    assert counted["messages"] == _BEATS * fleet.beats_per_s
    assert counted["bytes"] == _BEATS * fleet.beat_bytes_per_s(1)


@pytest.mark.parametrize("count", [0, 1, 127, 128, 255, 256, 65_535, 65_536, 86_400, 2**32 - 1, 2**32])
def test_a_beat_has_as_many_bytes_as_the_model_says(count: int) -> None:
    assert model.beat_bytes(count) == len(frame(Beat(count)))


def test_linking_and_resolving_stay_within_the_bytes_that_the_model_says() -> None:
    resolved: list[Resolved] = []

    def watch(step: str, _: object, details: tuple[Any, ...]) -> None:
        if step == "send" and details and isinstance(details[0], Resolved):
            resolved.append(details[0])

    prompt, decoder = LocalEnd("prompt"), LocalEnd("decoder")
    with ExitStack() as stack:
        for number, end in enumerate((prompt, decoder), 1):
            stack.callback(end.stop)
            extra = {"llm.Transport": "inproc"}
            end.start("PROMPT", number, listen_ip_info="127.0.0.1:0", extra=extra)
        assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
        sock = socket_of(decoder.world.probe.link(1))
        # Bytes acknowledged and received, of struct tcp_info in linux/tcp.h; beats may be among them.
        there, back = struct.unpack_from("=QQ", sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 200), 120)
        assert 200 < there + back < model.HANDSHAKE_BYTES
        stack.enter_context(watched(watch))
        for tensors in (2, 160):
            spec = Spec(tensors, 4, 64, blocks=True, blocks_key=BlocksCacheKey(1, tensors))
            for end in (prompt, decoder):
                end.do(make, f"kv {tensors}", spec, 1)
            decoder.do(call, "pull_blocks", BlocksCacheKey(1, tensors), Use(f"kv {tensors}"), [1], [2])
    assert [len(each.offsets) // 8 for each in resolved] == [2, 160]
    for each, tensors in zip(resolved, (2, 160), strict=True):
        assert 12 * tensors < len(frame(each)) <= model.resolved_bytes(tensors)


def test_the_page_has_the_table_of_the_model() -> None:
    page = (Path(__file__).parents[2] / "docs/scaling.md").read_text()
    assert "\n".join(model.rows()) in page
