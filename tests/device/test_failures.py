"""A GPU that fails for good, or hangs, under a call: what fails, what goes on, and which memory stays."""

from collections.abc import Iterator
from typing import Any, Final

import pytest

from llm_datadist import BlocksCacheKey, LLMException, Placement
from llm_datadist._native._native import set_device_patience
from llm_datadist.errors import DeviceError
from llm_datadist.metrics import Statistics
from tests.support import fakecuda, linking
from tests.support.ends import Family, begin_there, one_family, result_there
from tests.support.kinds import Bytes, ChildEnd, World
from tests.support.linking import SUCCESS, explain, info, link, links, statistics
from tests.support.moves import BLOCKS, Spec, Use, call, forget, make, moved, picture, same_bytes, show, wait_until

pytestmark = pytest.mark.gpu(True)
ON_HOST: Final = BlocksCacheKey(1, 1)
CALLS: Final[dict[str, tuple[Any, ...]]] = {
    "pull_blocks": (BLOCKS, Use("mine"), [1], [2]),
    "push_blocks": (BLOCKS, Use("mine"), [1], [2]),
    "copy_blocks": (Use("mine"), {1: [2]}),
    "swap_blocks": (Use("mine"), Use("host"), {1: 2}),
}
LOCAL: Final = ("copy_blocks", "swap_blocks")
CASES: Final = [(each, method) for each in ("shm", "tcp") for method in CALLS if each == "shm" or method not in LOCAL]
#: Cache of the prompt, and of the decoder, with its shape.
THERE: Final = {"kv": Spec(blocks=True, blocks_key=BLOCKS), "beside": Spec(blocks=True)}
HERE: Final = {"mine": Spec(blocks=True), "host": Spec(blocks=True, placement=Placement.HOST)}


@pytest.fixture
def family(request: pytest.FixtureRequest, gpu: bool) -> Iterator[Family]:
    with one_family(request.param, gpu=gpu) as family:
        yield family


def two(family: Family) -> tuple[ChildEnd, ChildEnd, dict[str, Bytes]]:
    """Start a prompt and a decoder, which is killed at the end: what its device may still use stays."""
    settings: dict[str, Any] = {"enable_remote_cache_accessible": True, "sync_kv_timeout": 1_000}
    prompt, decoder = (family.born(role, 1 + n, **settings) for n, role in enumerate(("PROMPT", "DECODER")))
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    host = Spec(blocks=True, blocks_key=ON_HOST, placement=Placement.HOST)
    made = ((prompt, THERE | {"on host": host}), (decoder, HERE))
    return prompt, decoder, {n: end.do(make, n, spec, len(n)) for end, specs in made for n, spec in specs.items()}


def hosts_go_on(prompt: ChildEnd, decoder: ChildEnd, were: dict[str, Bytes]) -> None:
    """Caches in host memory move over the same link; of the peer nothing changed but what was addressed."""
    decoder.do(call, "pull_blocks", ON_HOST, Use("host"), [0, 5], [5, 6])
    same_bytes([each[5:7] for each in decoder.do(show, "host")], [each[[0, 5]] for each in were["on host"]])
    for name in (*THERE, "on host"):
        for now, was in zip(prompt.do(show, name), were[name], strict=True):
            kept = [n for n in range(8) if (name, n) != ("kv", 2)]
            same_bytes([now[kept]], [was[kept]])
    prompt.do(call, "copy_blocks", Use("beside"), {0: [3]})
    same_bytes(prompt.do(show, "beside"), moved(were["beside"], were["beside"], [(3, 0)]))
    assert prompt.do(links) == {2: "ready"}


def fail(_: World, name: str) -> None:
    fakecuda.load().fail(name, 700)


@pytest.mark.parametrize("step", ["cuEventQuery", "cuMemcpyAsync", "cuEventRecord"])
@pytest.mark.parametrize(("family", "method"), CASES, indirect=["family"])
def test_an_error_that_ends_the_context_fails_all_calls_of_that_gpu_and_nothing_else(
    family: Family, method: str, step: str
) -> None:
    prompt, decoder, were = two(family)
    decoder.do(fail, step)
    for each in (method, *CALLS):
        with pytest.raises(DeviceError, match=r"cuda:0 \(Fake GPU 0\).*CUDA_ERROR_ILLEGAL_ADDRESS \(700\)") as caught:
            decoder.do(call, each, *CALLS[each])
        assert not caught.value.unfinished
    assert "has failed in this process" in str(caught.value)
    hosts_go_on(prompt, decoder, were)
    decoder.do(linking.finalize)
    family.kill(decoder)


@pytest.mark.parametrize("family", ["tcp"], indirect=True)
@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_an_error_of_the_owners_gpu_fails_the_call_and_not_the_gpu_of_its_caller(family: Family, method: str) -> None:
    prompt, decoder, _ = two(family)
    prompt.do(fail, "cuMemcpyAsync")
    for _ in range(2):
        with pytest.raises(LLMException, match=r"ILLEGAL_ADDRESS \(700\)|of the owner's memory has failed"):
            decoder.do(call, method, *CALLS[method])
    for each in LOCAL:
        decoder.do(call, each, *CALLS[each])
    decoder.do(call, "pull_blocks", ON_HOST, Use("host"), [0], [0])
    decoder.stop()
    prompt.do(linking.finalize)
    family.kill(prompt)


def hang(_: World, patience_ms: int = 200) -> None:
    fakecuda.load().hang(True)
    set_device_patience(patience_ms)


def let_go(_: World) -> list[str]:
    """Let all copies end; return what was wrong."""
    fake = fakecuda.load()
    fake.hang(False)
    wait_until(lambda: fake.state().unfinished_streams == 0)
    return fake.state().violations


def waits(world: World) -> float:
    now: Statistics = statistics(world)
    return now.devices[0].wait_seconds


def mapped_bytes(_: World) -> int:
    return fakecuda.load().state().leaked["mapped_bytes"]


@pytest.mark.parametrize("finalized", [False, True])
@pytest.mark.parametrize(("family", "method"), CASES, indirect=["family"])
def test_a_copy_that_does_not_end_fails_its_call_and_keeps_its_memory(
    family: Family, method: str, finalized: bool
) -> None:
    prompt, decoder, were = two(family)
    before, waited = decoder.do(mapped_bytes), decoder.do(waits)
    decoder.do(hang, -59_000 if method == "swap_blocks" else 200)  # a swap has no deadline, but a minute
    with pytest.raises(DeviceError, match=r"cuda:0 \(Fake GPU 0\): it does not answer") as caught:
        decoder.do(call, method, *CALLS[method])
    assert caught.value.unfinished
    assert (decoder.do(waits) > waited) is (decoder.do(explain, 1).transport == "tcp")
    with pytest.raises(DeviceError, match="has failed in this process"):
        decoder.do(call, "copy_blocks", *CALLS["copy_blocks"])
    hosts_go_on(prompt, decoder, were)
    if finalized:
        decoder.do(linking.finalize)
        assert decoder.do(mapped_bytes) == before
        assert decoder.do(let_go) == []
    else:
        old = decoder.do(addresses, "mine")
        decoder.do(forget, "mine")
        new = decoder.do(make, "new", HERE["mine"], 9)
        assert not set(old) & set(decoder.do(addresses, "new"))
        assert decoder.do(let_go) == []
        same_bytes(decoder.do(show, "new"), new)
    family.kill(decoder)


def addresses(world: World, name: str) -> list[int]:
    return list(world.caches[name].tensor_addrs)


@pytest.mark.parametrize("family", ["shm"], indirect=True)
def test_memory_of_a_peer_that_a_hung_push_may_write_is_given_out_again_once_its_process_has_ended(
    family: Family,
) -> None:
    prompt, decoder, _ = two(family)
    decoder.do(hang)
    with pytest.raises(DeviceError):
        decoder.do(call, "push_blocks", *CALLS["push_blocks"])
    prompt.do(forget, "kv")
    assert prompt.do(picture).quarantined_bytes > 0
    family.kill(decoder)
    wait_until(lambda: prompt.do(picture).quarantined_bytes == 0)


def late(_: World, microseconds: int) -> None:
    fakecuda.load().set_delay(microseconds)


def has_begun(_: World) -> bool:
    return fakecuda.load().state().unfinished_streams > 0


@pytest.mark.parametrize("family", ["tcp"], indirect=True)
@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_finalize_waits_for_copies_for_peers_before_it_gives_their_memory_back(family: Family, method: str) -> None:
    """Regression: where the threads of the lanes had ended, nobody waited for the GPU."""
    prompt, decoder, _ = two(family)
    prompt.do(late, 1_500_000)  # longer than `quiesce` waits
    decoder.do(begin_there, "call", call, method, *CALLS[method])
    wait_until(lambda: prompt.do(has_begun))
    prompt.stop()
    assert isinstance(decoder.do(result_there, "call"), LLMException)
    prompt.do(late, 1_000)
