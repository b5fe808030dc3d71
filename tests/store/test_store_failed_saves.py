"""A save that fails, or that a peer does not know, stores nothing and raises nothing; those of a drain end."""

from pathlib import Path
from typing import Any, cast

import pytest

from llm_datadist.metrics import Leftover
from tests.store import engines as e
from tests.support.ends import ChildEnd, begin_there, result_there
from tests.support.moves import wait_until
from tests.support.world import World

KEYS = e.keys_of(1, 2)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_pull_that_misses_its_deadline_stores_nothing(transport: str, tmp_path: Path) -> None:
    with e.family_of(transport) as family:
        options: dict[str, Any] = {"llm.SyncKvCacheWaitTime": "300"}
        store = family.store(**options)
        saver = family.engine(store)
        with e.pull_stopped(store, saver, tmp_path, "deadline") as gate:
            saver.do(begin_there, "save", e.save, KEYS, [3, 4])
            gate.wait()
            gate.open()
            assert saver.do(result_there, "save") == 0
        assert store.do(e.statistics).namespaces[0].free == store.do(e.statistics).namespaces[0].slots
        wait_until(lambda: saver.do(e.save, KEYS, [3, 4]) == 2)  # the client has paused
        assert saver.do(e.hits, KEYS) == 2


def _drain(world: World) -> Leftover:
    return cast("Leftover", world.memory["server"].drain(20_000))


def _is_refused(saver: ChildEnd) -> bool:
    saver.do(e.save, e.keys_of(9), [0])
    return saver.do(e.figures).refused["busy"] > 0


def test_a_store_that_drains_ends_the_saves_that_it_has_taken(tmp_path: Path) -> None:
    """One runs, one waits for its thread; later ones are refused."""
    with e.family_of() as family:
        store = family.store()
        saver, another = family.engine(store), family.engine(store)
        with e.pull_stopped(store, saver, tmp_path, "link") as gate:
            saver.do(begin_there, "running", e.save, KEYS, [3, 4])
            gate.wait()
            saver.do(begin_there, "waiting", e.save, e.keys_of(3), [5])
            wait_until(lambda: store.do(e.statistics).waiting == 1)
            store.do(begin_there, "drain", _drain)
            wait_until(lambda: _is_refused(another))
        assert (saver.do(result_there, "running"), saver.do(result_there, "waiting")) == (2, 1)
        assert not store.do(result_there, "drain")
        assert store.do(e.statistics).namespaces[0].failed == 0


def test_a_peer_that_is_no_store_is_one_that_has_nothing() -> None:
    with e.family_of() as family:
        peer = family.child("no store")
        peer.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
        engine = family.engine(peer)
        assert engine.do(e.save, KEYS, [3, 4]) == 0
        assert engine.do(e.look_up, KEYS) == 0
