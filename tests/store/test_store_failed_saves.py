"""A save whose pull fails, or that a peer does not know, stores nothing and raises nothing: the engine goes on."""

from pathlib import Path
from typing import Any

import pytest

from tests.store import engines as e
from tests.support.ends import begin_there, result_there
from tests.support.moves import wait_until

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


def test_a_peer_that_is_no_store_is_one_that_has_nothing() -> None:
    with e.family_of() as family:
        peer = family.child("no store")
        peer.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
        engine = family.engine(peer)
        assert engine.do(e.save, KEYS, [3, 4]) == 0
        assert engine.do(e.look_up, KEYS) == 0
