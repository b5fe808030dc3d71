"""v1 without a pool: freed memory is unmapped, but never under somebody of this process (R7, R12)."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from llm_datadist import BlocksCacheKey
from llm_datadist.errors import PeerLost, TransferFailed
from llm_datadist.memory import direct
from llm_datadist.testing.gates import Gate
from tests.support.linking import begin_there, result_there
from tests.support.moves import Use, picture, wait_until
from tests.support.v1 import DIRECT, desc, gated_call_v1, kv_call, kv_make, start_v1

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

    from tests.conftest import Pair

BLOCKS = BlocksCacheKey(1, 3)


def pulling(pair: Pair, folder: Path, **settings: object) -> Gate:
    """Begin a pull of blocks, in the same process, that stops when it has announced itself and moved nothing."""
    start_v1(pair, **(DIRECT | settings))
    pair.prompt.do(kv_make, "kv", desc(), 1, (), True, BLOCKS)
    pair.decoder.do(kv_make, "kv", desc(), 2, (), True)
    args = ("pull_blocks", BLOCKS, Use("kv"), [0, 1], [2, 3])
    pair.decoder.do(begin_there, "pull", gated_call_v1, 1, "before copy", folder, *args)
    gate = Gate(folder)
    gate.wait()
    return gate


def test_memory_that_is_deallocated_under_a_reader_waits_for_it(local_pair: Pair, tmp_path: Path) -> None:
    gate = pulling(local_pair, tmp_path)
    local_pair.prompt.do(kv_call, "deallocate_cache", Use("kv"))
    waiting = local_pair.prompt.do(picture)
    assert (waiting.caches.live, waiting.quarantined_bytes) == (0, 4 * 4096)
    gate.open()
    assert isinstance(local_pair.decoder.do(result_there, "pull"), TransferFailed)
    wait_until(lambda: local_pair.prompt.do(picture).quarantined_bytes == 0)
    assert local_pair.prompt.do(picture).pools[0].used_bytes == 0


def test_memory_that_is_read_at_finalize_stays_mapped(
    local_pair: Pair, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gate = pulling(local_pair, tmp_path, sync_kv_timeout=100)
    try:
        with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
            local_pair.prompt.stop()
        assert "stay mapped" in caplog.text
        assert len(direct._kept_mapped) == 1
        gate.open()
        assert isinstance(local_pair.decoder.do(result_there, "pull"), PeerLost)
    finally:
        gate.open()
        direct._kept_mapped.clear()
