"""Limits of the process that are reached: descriptors, threads and memory, while ends link, pull and initialise."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from faults.limits import few_descriptors, few_threads, give, little_memory, take
from llm_datadist import (
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)
from llm_datadist._memory.guards import GuardTable
from llm_datadist.errors import OutOfMemory, TransferFailed
from tests.support.ends import ChildEnd
from tests.support.layers import Always
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, unlink
from tests.support.memory import desc, state, user_memory
from tests.support.moves import BLOCKS, Spec, Use, call, make, wait_until
from tests.support.world import baseline, make_config, settled

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair
    from tests.support.world import World

#: More than a link takes, over any transport.
MOST = 16


def link_with(world: World, free: int, *args: Any) -> Any:
    with few_descriptors(free):
        return link(world, *args)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("side", ["initiator", "target"])
def test_attack_poc4_a_link_without_descriptors_fails_with_a_code_and_leaves_nothing_half_made(
    request: pytest.FixtureRequest, transport: str, side: str
) -> None:
    pair: Pair = request.getfixturevalue(f"{transport}_pair")
    pair.start(linked=False)
    assert pair.prompt.port is not None
    peers, failures = [info(1, pair.prompt.port)], 0
    for free in range(MOST):
        if side == "initiator":
            outcome = pair.decoder.do(link_with, free, peers, 1500)
        else:
            pair.prompt.do(take, few_descriptors, free)
            outcome = pair.decoder.do(link, peers, 1500)
            pair.prompt.do(give)
        if outcome == SUCCESS:
            bytes_move_both_ways(pair.decoder, pair.prompt)
            assert pair.decoder.do(unlink, peers) == SUCCESS
        else:
            failures += 1
            assert len(outcome[1]) == 1
        assert pair.decoder.do(links) == {}, (free, outcome)
        wait_until(lambda: pair.prompt.do(links) == {})
    assert 0 < failures < MOST
    assert pair.decoder.do(link, peers) == SUCCESS
    bytes_move_both_ways(pair.decoder, pair.prompt)


def init_with(world: World, limit: Any, free: int) -> str:
    """Return what init under a limit came to: a status, or "done" and finalized; nothing may be left."""
    before = baseline(world)
    world.dd = LLMDataDist(LLMRole.PROMPT, 1)
    options = make_config(listen_ip_info="127.0.0.1:0")
    try:
        with limit(free):
            world.dd.init(options)
    except LLMException as error:
        outcome = error.status_code.name
    else:
        outcome = "done"
        world.dd.check_integrity()
        world.dd.finalize()
    del world.dd
    assert settled(before) == before
    return outcome


@pytest.mark.parametrize(
    ("limit", "steps", "code"),
    [
        (few_descriptors, range(0, 24, 1), "LLM_FAILED"),
        (partial(few_threads, named=""), range(4), "LLM_FAILED"),
        (little_memory, range(0, 512 << 20, 24 << 20), "LLM_OUT_OF_MEMORY"),
    ],
)
def test_init_at_a_limit_fails_with_a_code_and_leaves_nothing(limit: Any, steps: range, code: str) -> None:
    end = ChildEnd("limited")
    try:
        outcomes = [end.do(init_with, limit, free) for free in steps]
    finally:
        end.close()
    assert outcomes[0] != "done"
    assert outcomes[-1] == "done"
    assert set(outcomes) - {"done", "LLM_FAILED", "LLM_OUT_OF_MEMORY"} == set()
    assert code in outcomes


def test_a_layer_wise_transfer_without_a_thread_fails_with_a_code(end: LocalEnd) -> None:
    end.start("PROMPT", 1, enable_remote_cache_accessible=True)
    end.do(make, "kv", Spec(), 1)
    to = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1, 0), range(1), range(1))
    with few_threads(0), pytest.raises(LLMException, match="can't start new thread") as caught:
        end.world.cm.transfer_cache_async(end.world.caches["kv"], Always(), [to])
    assert (type(caught.value), caught.value.status_code) == (LLMException, LLMStatusCode.LLM_FAILED)


def init_v1(world: World) -> str:
    """Initialise for the v1 interface, whose modules nobody has imported yet, without a descriptor; then with."""
    before = baseline(world)
    options, world.dd = make_config(enable_cache_manager=None, host_mem_pool_cfg=None), LLMDataDist(LLMRole.DECODER, 1)
    for name in ("llm_datadist.kv_cache_manager", "llm_datadist._transfer.v1"):
        sys.modules.pop(name, None)
    try:
        with few_descriptors(0):
            world.dd.init(options)
    except LLMException as error:
        outcome = f"{error.status_code.name}: {error}"
    assert settled(before) == before
    world.dd.init(options)
    world.dd.finalize()
    del world.dd
    return outcome


def test_init_that_cannot_read_its_own_modules_fails_with_a_code_and_leaves_nothing() -> None:
    end = ChildEnd("without modules")
    try:
        assert "LLM_FAILED: init: [Errno 24] Too many open files" in end.do(init_v1)
    finally:
        end.close()


LITTLE = """
import resource, sys
from pathlib import Path
from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist.errors import OutOfMemory
config = LLMConfig()
config.device_id, config.enable_cache_manager = 0, True
options, dist = config.generate_options(), LLMDataDist(LLMRole.PROMPT, 1)
size = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
resource.setrlimit(resource.RLIMIT_AS, (size + int(sys.argv[1]), resource.RLIM_INFINITY))
status = "done"
try:
    dist.init(options)
except LLMException as error:
    status = error.status_code.name
    assert isinstance(error, OutOfMemory) is (status == "LLM_OUT_OF_MEMORY")
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(status)
"""


def test_the_first_init_of_a_process_with_little_memory_left_fails_with_a_code() -> None:
    """It imports most of the library, which takes memory itself."""
    outcomes = []
    for free in (0, 2, 4, 6, 8, 16, 32, 400):
        command = [sys.executable, "-c", LITTLE, str(free << 20)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        outcomes.append(ended.stdout.strip())
    assert {"LLM_OUT_OF_MEMORY"} <= set(outcomes) - {"done"} <= {"LLM_OUT_OF_MEMORY", "LLM_FAILED"}
    assert outcomes[-1] == "done"


def without_memory(world: World) -> list[str]:
    """Return what allocating and registering say when a native allocation fails."""
    texts = []
    with mock.patch.object(GuardTable, "allocate_many", side_effect=MemoryError("bad_alloc")):
        for make_one in (
            partial(world.cm.allocate_blocks_cache, desc()),
            partial(world.cm.register_blocks_cache, desc(), user_memory(world, "mine", desc())),
        ):
            with pytest.raises(OutOfMemory) as caught:
                make_one()
            texts.append(str(caught.value))
    return texts


def test_allocating_and_registering_without_memory_fail_with_a_code_and_take_nothing(end: LocalEnd) -> None:
    end.start("PROMPT", 1)
    end.world.cm.deallocate_cache(end.world.cm.allocate_cache(desc()))  # the peak of what was used stays
    before = state(end.world)
    assert [text.partition(":")[0] for text in end.do(without_memory)] == ["allocate", "register"]
    assert state(end.world) == before


def test_a_checksum_without_a_thread_fails_one_pull_and_delays_no_other(shm_pair: Pair) -> None:
    shm_pair.start(extra={"llm.Checksum": "1"})
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    prompt.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    decoder.do(make, "kv", Spec(blocks=True), 2)
    pull = ("pull_blocks", BLOCKS, Use("kv"), [0], [0])
    prompt.do(take, few_threads, 0)
    with pytest.raises(TransferFailed, match="no thread can be started"):
        decoder.do(call, *pull)
    prompt.do(give)
    for _ in range(3):
        decoder.do(call, *pull)
