"""How many threads swap blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist import _native
from llm_datadist._transfer.local_copy import SwapEngine
from llm_datadist.testing import StagedDevice

if TYPE_CHECKING:
    from tests.support.kinds import LocalEnd


def test_r10_four_workers_or_as_many_as_cpus_are_usable(end: LocalEnd) -> None:
    assert [SwapEngine(StagedDevice(), cpus).workers for cpus in (1, 2, 3, 4, 5, 64)] == [1, 2, 3, 4, 4, 4]
    end.start("DECODER", 1)
    assert end.world.dd.statistics().swap.workers == min(4, _native.usable_cpus())
