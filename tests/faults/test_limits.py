"""Limits of the process, reached while ends initialise, link and pull: no descriptor, thread or memory is left."""

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest

from faults.gates import watched
from faults.limits import few_descriptors, few_threads, give, little_memory, take
from llm_datadist import CacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode, TransferConfig
from llm_datadist.errors import OutOfMemory, TransferFailed
from tests.support.ends import ChildEnd, End, LocalEnd
from tests.support.layers import Always
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links, unlink
from tests.support.memory import desc, state, user_memory
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until
from tests.support.pairs import Pair
from tests.support.source import ROOT
from tests.support.world import World, baseline, make_config, residue_of, settled, settled_of

TRANSPORTS = pytest.mark.parametrize("linked", ["shm", "cma", "tcp"], indirect=True)
SIDES = pytest.mark.parametrize("side", ["prompt", "decoder"])
ROWS = range(8)
PULL = ("pull_blocks", BLOCKS, Use("target"), list(ROWS), list(ROWS))
NO_THREAD = (few_threads, (0, ""))
_fresh = itertools.count(1000)


@pytest.fixture
def linked(request: pytest.FixtureRequest, gpu: bool) -> Pair:
    """Two linked ends, which have a source by blocks and a target; nothing may be left afterwards."""
    pair: Pair = request.getfixturevalue("tcp_pair" if request.param == "tcp" else "shm_pair")
    pair.start(extra={"llm.Transport": request.param}, sync_kv_timeout=2_000)
    for end in (pair.prompt, pair.decoder):
        end.do(import_this)  # that takes descriptors
    pair.prompt.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 1)
    pair.decoder.do(make, "target", Spec(blocks=True), 2)
    pair.decoder.do(make, "row", Spec(rows=2), 3)
    pulls_well(pair, 0)
    return pair


def import_this(_: World) -> None:
    pass


def failure(function: Callable[..., object], *args: Any) -> LLMException | None:
    """Return the typed error of a call that may fail now, or None."""
    try:
        function(*args)
    except LLMException as error:
        return error
    return None


def within(world: World, limit: Any, free: tuple[Any, ...], function: Callable[..., Any], *args: Any) -> Any:
    """Make a call at a limit."""
    with limit(*free):
        return function(world, *args)


def offer(pair: Pair, number: int) -> CacheKey:
    """Have the prompt publish a row under a key of its own."""
    key = CacheKey(1, 100 + number, 0)
    pair.prompt.do(make, f"row {number}", Spec(rows=1, keys=(key,)), number)
    return key


def pull_both(pair: Pair, key: CacheKey) -> None:
    """Pull by blocks, which asks nobody, and by key, which asks the owner."""
    pair.decoder.do(call, *PULL)
    pair.decoder.do(call, "pull_cache", key, Use("row"), 1)


def compare_row(pair: Pair, number: int) -> None:
    target, source = pair.decoder.do(show, "row"), pair.prompt.do(show, f"row {number}")
    same_bytes(target, moved(target, source, [(1, 0)]))


def compare(pair: Pair, number: int) -> None:
    """Every byte that was pulled is right."""
    same_bytes(pair.decoder.do(show, "target"), pair.prompt.do(show, "source"))
    compare_row(pair, number)


def pulls_well(pair: Pair, number: int) -> None:
    pull_both(pair, offer(pair, number))
    compare(pair, number)
    pair.prompt.do(forget, f"row {number}")


def _pulled(pair: Pair) -> bool:
    """Return True if pulls succeed; a key is not used again, because one that was not pulled stays bound."""
    return failure(pulls_well, pair, next(_fresh)) is None


# --- init -------------------------------------------------------------------------------------------------------------


def init_with(world: World, limit: Any, free: int, v1: bool = False, gpu: bool = False) -> str:
    """Return what init under a limit came to, "" for success: nothing may be left, and without the limit it succeeds.

    ``v1``: for that interface, whose modules nobody has imported yet.
    """
    before = baseline(world)
    settings = {"enable_cache_manager": None, "host_mem_pool_cfg": None} if v1 else {"gpu": gpu}
    options, world.dd = make_config(listen_ip_info="127.0.0.1:0", **settings), LLMDataDist(LLMRole.PROMPT, 1)
    for name in ("llm_datadist.kv_cache_manager",) if v1 else ():
        sys.modules.pop(name, None)
    outcome = ""
    try:
        with limit(free):
            world.dd.init(options)
    except LLMException as error:
        outcome = f"{error.status_code.name}: {error}"
    if outcome:
        assert settled(before) == before
        world.dd.init(options)
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
    ids=["descriptors", "threads", "memory"],
)
@pytest.mark.gpu
def test_init_at_a_limit_fails_with_a_code_and_leaves_nothing(gpu: bool, limit: Any, steps: range, code: str) -> None:
    with closing(ChildEnd("limited")) as end:
        end.gpu = gpu
        if gpu:  # a process that has met the driver
            end.start("MIX", 1)
            end.stop()
        outcomes = [end.do(init_with, limit, free, False, gpu).partition(":")[0] for free in steps]
    assert (outcomes[0] != "", outcomes[-1]) == (True, "")
    assert {code} <= set(outcomes) - {""} <= {"LLM_FAILED", "LLM_OUT_OF_MEMORY"}


def test_init_that_cannot_read_its_own_modules_fails_with_a_code_and_leaves_nothing() -> None:
    with closing(ChildEnd("without modules")) as end:
        assert "LLM_FAILED: init: [Errno 24] Too many open files" in end.do(init_with, few_descriptors, 0, True)


LITTLE = """
import sys
from faults.limits import little_memory
from llm_datadist import LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist.errors import OutOfMemory
config = LLMConfig()
config.device_id, config.enable_cache_manager = 0, True
options, dist, status = config.generate_options(), LLMDataDist(LLMRole.PROMPT, 1), "done"
with little_memory(int(sys.argv[1])):
    try:
        dist.init(options)
    except LLMException as error:
        status = error.status_code.name
        assert isinstance(error, OutOfMemory) is (status == "LLM_OUT_OF_MEMORY")
print(status)
"""


def test_the_first_init_of_a_process_with_little_memory_left_fails_with_a_code() -> None:
    """It imports most of the library, which takes memory itself."""
    outcomes = []
    for free in (0, 2, 4, 6, 8, 16, 32, 400):
        command = [sys.executable, "-c", LITTLE, str(free << 20)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=ROOT)
        assert ended.returncode == 0, ended.stderr
        outcomes.append(ended.stdout.strip())
    assert {"LLM_OUT_OF_MEMORY"} <= set(outcomes) - {"done"} <= {"LLM_OUT_OF_MEMORY", "LLM_FAILED"}
    assert outcomes[-1] == "done"


# --- links and pulls --------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@TRANSPORTS
@SIDES
@pytest.mark.parametrize(
    ("limit", "steps"),
    [(few_descriptors, range(16)), (little_memory, (0, 1 << 20, 9 << 20, 33 << 20, 65 << 20, 512 << 20))],
    ids=["descriptors", "address space"],
)
def test_attack_poc4_a_link_at_a_limit_fails_with_a_code_and_leaves_nothing_half_made(
    linked: Pair, side: str, limit: Any, steps: Any
) -> None:
    prompt, decoder = linked.prompt, linked.decoder
    end: End = getattr(linked, side)
    peers = [info(1, prompt.port)]
    codes = {LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_TIMEOUT, LLMStatusCode.LLM_OUT_OF_MEMORY}
    outcomes = []
    for free in steps:
        assert decoder.do(unlink, peers) == SUCCESS
        wait_until(lambda: prompt.do(links) == {})
        end.do(take, limit, free)
        outcomes.append(outcome := decoder.do(link, peers, 1_500))
        end.do(give)
        if outcome != SUCCESS:
            assert (outcome[0] in codes, len(outcome[1])) == (True, 1), (free, outcome)
            assert decoder.do(links) == {}, (free, outcome)
            wait_until(lambda: prompt.do(links) == {})
            assert decoder.do(link, peers) == SUCCESS
        wait_until(lambda: prompt.do(links) == {2: "ready"})
        pulls_well(linked, 1)
    assert outcomes[-1] == SUCCESS
    assert outcomes[0] != SUCCESS or limit is little_memory
    bytes_move_both_ways(prompt, decoder)


@pytest.mark.gpu
@TRANSPORTS
@SIDES
def test_pulls_need_no_descriptor_and_without_address_space_succeed_or_fail_with_a_code(
    linked: Pair, side: str
) -> None:
    end: End = getattr(linked, side)
    ends = linked.prompt, linked.decoder
    before = [each.do(residue_of) for each in ends]
    for limit, free in ((few_descriptors, 0), (little_memory, 0), (little_memory, 64 << 10), (little_memory, 1 << 20)):
        key = offer(linked, 1)
        end.do(take, limit, free)
        error = failure(pull_both, linked, key)
        end.do(give)
        assert error is None or limit is little_memory, error
        if error is None:
            compare(linked, 1)
        linked.prompt.do(forget, "row 1")
        pulls_well(linked, 2)
        bytes_move_both_ways(linked.prompt, linked.decoder)
        if limit is few_descriptors:
            assert [each.do(settled_of, was) for each, was in zip(ends, before, strict=True)] == before


def lose_lanes(world: World, peer: int) -> None:
    """Drop every data lane of a link."""
    for each in world.probe.link(peer).connection.connections:
        if each.recovery is not None:
            each.recovery.drop()


@pytest.mark.gpu
@pytest.mark.parametrize("linked", ["tcp"], indirect=True)
@SIDES
@pytest.mark.parametrize("free", [0, 1, 2])
def test_lost_lanes_without_descriptors_fail_calls_with_a_code_and_come_back(
    linked: Pair, side: str, free: int
) -> None:
    end: End = getattr(linked, side)
    before, target, key = end.do(residue_of)["fds"], linked.decoder.do(show, "target"), offer(linked, 1)
    end.do(take, few_descriptors, free)
    for each, peer in ((linked.prompt, 2), (linked.decoder, 1)):
        each.do(lose_lanes, peer)
    # What the loss frees is taken, too.
    end.do(give)
    end.do(take, few_descriptors, free)
    for _ in range(2):
        error = failure(pull_both, linked, key)
        if error is None:
            compare(linked, 1)
            break
        assert error.status_code is not LLMStatusCode.LLM_SUCCESS
        assert [tensor.shape for tensor in linked.decoder.do(show, "target")] == [each.shape for each in target]
    end.do(give)
    # A dial that began at the limit may come to nothing later; then it is the next transfer that dials. The thread that
    # dials lanes stays from the first loss on.
    wait_until(lambda: _pulled(linked) and end.do(residue_of)["fds"] == before, 20)
    assert linked.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(linked.prompt, linked.decoder)
    linked.prompt.do(forget, "row 1")
    wait_until(lambda: linked.prompt.do(picture).pins == 0)


# --- threads ----------------------------------------------------------------------------------------------------------


def send_layers(world: World) -> None:
    config = TransferConfig(1, [1 << 20] * 4)
    world.cm.transfer_cache_async(world.caches["target"], Always(), [config], [0, 1], [2, 3])


def await_pull(world: World) -> None:
    asyncio.run(world.cm.pull_blocks_async(BLOCKS, world.caches["target"], list(ROWS), list(ROWS)))


def await_nothing(world: World) -> None:
    """Await a copy of a row onto itself."""
    row = world.caches["row"]
    asyncio.run(world.cm.copy_cache_async(row, row, 0, 0))


@pytest.mark.gpu
@TRANSPORTS
def test_without_threads_calls_that_need_one_fail_and_are_never_done_later(linked: Pair) -> None:
    decoder = linked.decoder
    decoder.do(make, "target", Spec(blocks=True), 9)
    target, before = decoder.do(show, "target"), decoder.do(picture)
    for function in (send_layers, await_pull):
        with pytest.raises(LLMException, match="start new thread") as caught:
            decoder.do(within, *NO_THREAD, function)
        assert (type(caught.value), caught.value.status_code) == (LLMException, LLMStatusCode.LLM_FAILED)
    assert decoder.do(picture) == before
    # A thread that can start now must not do what was refused.
    decoder.do(await_nothing)
    same_bytes(decoder.do(show, "target"), target)
    decoder.do(within, *NO_THREAD, call, *PULL)
    same_bytes(decoder.do(show, "target"), linked.prompt.do(show, "source"))
    decoder.do(await_pull)
    clusters = [info(1, linked.prompt.port), info(7, 1)]
    assert decoder.do(unlink, clusters[:1]) == SUCCESS
    _, codes = decoder.do(within, *NO_THREAD, link, clusters)
    assert codes == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_LINK_FAILED]
    if decoder.gpu:  # a thread maps the memory of the peer's
        assert decoder.do(unlink, clusters[:1]) == SUCCESS
        linked.link()
    pulls_well(linked, 1)
    bytes_move_both_ways(linked.prompt, decoder)


@pytest.mark.gpu
@pytest.mark.parametrize("named", ["", "llm-datadist"])
def test_without_a_thread_that_digests_one_pull_fails_and_the_next_ones_succeed(shm_pair: Pair, named: str) -> None:
    shm_pair.start(extra={"llm.Checksum": "1"})
    source = shm_pair.prompt.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 1)
    shm_pair.decoder.do(make, "target", Spec(blocks=True), 2)
    shm_pair.prompt.do(take, few_threads, 0, named)
    with pytest.raises(TransferFailed, match="no thread can be started") as caught:
        shm_pair.decoder.do(call, *PULL)
    assert caught.value.status_code is LLMStatusCode.LLM_FAILED
    shm_pair.prompt.do(give)
    for _ in range(3):
        shm_pair.decoder.do(call, *PULL)
    same_bytes(shm_pair.decoder.do(show, "target"), source)
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)


# --- memory -----------------------------------------------------------------------------------------------------------


@contextmanager
def no_memory_at(step: int | str) -> Iterator[None]:
    """Have the arrival of that number, or the first one at a step, raise MemoryError, in whichever thread."""
    passed: list[str] = []
    left = [step]

    def fail(name: str, subject: object, details: tuple[Any, ...]) -> None:
        if name != "use":
            passed.append(name)
            if left == [len(passed) if isinstance(step, int) else name]:
                left.clear()
                raise MemoryError(name)

    with watched(fail):
        yield


@pytest.mark.gpu
@TRANSPORTS
def test_a_caller_without_memory_at_any_step_gets_a_code_and_the_next_call_succeeds(linked: Pair) -> None:
    kinds: list[type[BaseException]] = []
    for at in range(1, 20):
        pull = (call, "pull_cache", offer(linked, at), Use("row"), 1)
        error = failure(linked.decoder.do, within, no_memory_at, (at,), *pull)
        if error is None:
            break
        kinds.append(type(error))
        assert "MemoryError(" in str(error)
        code = LLMStatusCode.LLM_OUT_OF_MEMORY if isinstance(error, OutOfMemory) else LLMStatusCode.LLM_FAILED
        assert error.status_code is code
        linked.decoder.do(picture)
        pulls_well(linked, 100 + at)
        linked.prompt.do(forget, f"row {at}")
    assert set(kinds) == {OutOfMemory, TransferFailed}
    assert len(kinds) > 5
    wait_until(lambda: linked.prompt.do(picture).pins == 0)
    assert linked.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(linked.prompt, linked.decoder)


@pytest.mark.gpu
@TRANSPORTS
@pytest.mark.parametrize("step", ["handle", "handled", "sent"])
def test_an_owner_without_memory_costs_the_link_at_most(linked: Pair, step: str) -> None:
    key = offer(linked, 1)
    linked.prompt.do(take, no_memory_at, step)
    error = failure(linked.decoder.do, call, "pull_cache", key, Use("row"), 1)
    linked.prompt.do(give)
    if error is None:
        compare_row(linked, 1)
    wait_until(lambda: _pulled(linked), 20)
    bytes_move_both_ways(linked.prompt, linked.decoder)


@pytest.mark.gpu
def test_allocating_and_registering_without_memory_fail_with_a_code_and_take_nothing(end: LocalEnd) -> None:
    end.start("PROMPT", 1)
    cm = end.world.cm
    cm.deallocate_cache(cm.allocate_cache(desc()))  # the peak of what was used stays
    before = state(end.world)
    memory = user_memory(end.world, "mine", desc())
    guards = type(end.world.probe.engine.caches.exports.guards)
    # No limit of the process leaves memory for all but the guards.
    with mock.patch.object(guards, "allocate_many", side_effect=MemoryError("bad_alloc")):
        with pytest.raises(OutOfMemory, match=r"^allocate:"):
            cm.allocate_blocks_cache(desc())
        with pytest.raises(OutOfMemory, match=r"^register:"):
            cm.register_blocks_cache(desc(), memory)
    assert state(end.world) == before
