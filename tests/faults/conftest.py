"""The scene of the tests that harm bytes on their way."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from faults.relay import DEADLINE_MS, Relay, Relayed
from tests.support.ends import LocalEnd
from tests.support.linking import SUCCESS, alone, bytes_move_both_ways, info, link, links
from tests.support.moves import picture, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.pairs import Pair


@pytest.fixture(params=["shm", "tcp"])
def relayed(request: pytest.FixtureRequest) -> Iterator[Relayed]:
    """Afterwards both link directly, every byte moves, and nothing of the harmed link is left."""
    pair: Pair = request.getfixturevalue(f"{request.param}_pair")
    extra = {"llm.PeerTimeout": "3"}
    pair.start(linked=False, sync_kv_timeout=DEADLINE_MS, extra=extra)
    assert pair.prompt.port is not None
    neighbour = LocalEnd("neighbour")
    neighbour.start("DECODER", 3, extra=extra | {"llm.Transport": pair.transport})
    try:
        assert neighbour.do(link, [info(1, pair.prompt.port)]) == SUCCESS
        with Relay(("127.0.0.1", pair.prompt.port)) as relay:
            scene = Relayed(pair, relay, neighbour)
            yield scene
            scene.others_are_served()
        alone(pair.decoder)
        wait_until(lambda: pair.prompt.do(links) == {3: "ready"})
        wait_until(lambda: pair.prompt.do(picture).pins == 0)
        pair.link()
        bytes_move_both_ways(pair.prompt, pair.decoder)
        scene.others_are_served()
    finally:
        neighbour.stop()
