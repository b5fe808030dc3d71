"""What the driver refuses, at each side: a link stands, and what cannot be mapped goes over data lanes, which it says;
or ``init`` fails with the cause. Once healed everything works."""

import os
from collections.abc import Iterator
from contextlib import closing
from typing import Any, Final

import pytest

from llm_datadist import BlocksCacheKey, LLMDataDist, LLMRole, LLMStatusCode, Placement
from llm_datadist.errors import DeviceError, LLMException, OutOfMemory
from tests.support import fakecuda
from tests.support.ends import ChildEnd
from tests.support.kinds import End, LocalEnd, Pair, World
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, statistics, unlink
from tests.support.moves import Spec, Use, call, forget, make, moved, same_bytes, show
from tests.support.world import make_config, small_pool

pytestmark = pytest.mark.gpu(True)
AUTO: Final = {"llm.Transport": "auto"}


def fail(_: World, name: str, code: int) -> None:
    fakecuda.load().fail(name, code)


def told(end: End) -> Any:
    """Return what is known of the one link."""
    (link,) = end.do(statistics).links
    return link


def bytes_move(*ends: End) -> None:
    """Pulls and pushes of each end are right, byte for byte."""
    bytes_move_both_ways(*ends)
    for here, there in (ends, ends[::-1]):
        key = BlocksCacheKey(there.cluster_id, 0)
        before = there.do(make, "pushed", Spec(blocks=True, blocks_key=key), 3)
        source = here.do(make, "source", Spec(blocks=True), 4)
        here.do(call, "push_blocks", key, Use("source"), [1, 2, 5], [7, 0, 4])
        same_bytes(there.do(show, "pushed"), moved(before, source, [(7, 1), (0, 2), (4, 5)]))
        there.do(forget, "pushed")
        here.do(forget, "source")


@pytest.mark.parametrize("sides", ["prompt", "decoder", "both"])
@pytest.mark.parametrize(
    ("step", "failure"),
    [
        ("cuMemExportToShareableHandle", "NOT_SUPPORTED (801)"),
        ("cuMemImportFromShareableHandle", "INVALID_DEVICE (101)"),
        ("cuMemAddressReserve", "OUT_OF_MEMORY (2)"),
        ("cuMemMap", "INVALID_VALUE (1)"),
        ("cuMemSetAccess", "PEER_ACCESS_UNSUPPORTED (217)"),
    ],
)
def test_what_cannot_be_shared_goes_over_lanes_and_the_link_says_why(
    shm_pair: Pair, sides: str, step: str, failure: str
) -> None:
    ends = prompt, decoder = shm_pair.start(linked=False, rca=True, extra=AUTO)
    failing = {"prompt": [prompt], "decoder": [decoder], "both": [*ends]}[sides]
    for end in failing:
        end.do(fail, step, int(failure.split("(")[1][:-1]))
    shm_pair.link()
    bytes_move(*ends)
    for end in ends:
        reason = told(end).reason
        assert (told(end).transport, reason) == ("shm", end.do(explained, told(end).remote_cluster_id))
        assert (f"{step}: CUDA_ERROR_{failure}: by data lanes" in reason) == (end in failing)
        assert ("by data lanes" in reason) == (end in failing)
        assert ("region 1 (GPU " in reason) == (end in failing and "Export" not in step)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    shm_pair.link()  # each call has failed once
    bytes_move(*ends)
    assert ["by data lanes" in told(end).reason for end in ends] == [False, False]


def explained(world: World, cluster_id: int) -> str:
    return world.dd.explain(cluster_id).reason


@pytest.mark.parametrize("side", ["prompt", "decoder"])
def test_a_gpu_at_one_side_only_is_served_over_lanes(shm_pair: Pair, side: str) -> None:
    shm_pair.prompt.gpu, shm_pair.decoder.gpu = side == "prompt", side == "decoder"
    bytes_move(*shm_pair.start(rca=True, extra=AUTO))


@pytest.mark.parametrize(
    ("step", "code", "status"),
    [
        ("cuMemCreate", 2, LLMStatusCode.LLM_OUT_OF_MEMORY),
        ("cuMemAddressReserve", 2, LLMStatusCode.LLM_OUT_OF_MEMORY),
        ("cuMemMap", 1, LLMStatusCode.LLM_FAILED),
        ("cuMemSetAccess", 1, LLMStatusCode.LLM_FAILED),
        ("cuMemGetInfo_v2", 1, LLMStatusCode.LLM_FAILED),
    ],
)
def test_an_init_without_memory_of_the_gpu_names_the_call_and_leaves_nothing(
    end: LocalEnd, step: str, code: int, status: LLMStatusCode
) -> None:
    fakecuda.load().fail(step, code)
    with pytest.raises(LLMException, match=rf"{step.removesuffix('_v2')}: CUDA_ERROR_\w+ \({code}\)") as caught:
        end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    assert caught.value.status_code is status
    if isinstance(caught.value, OutOfMemory):
        assert caught.value.requested == 32 << 20
        assert f"{32 << 20} bytes are wanted" in str(caught.value)
    assert fakecuda.complaints_here() == []
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0")
    make(end.world, "kv", Spec(blocks=True), 1)


def test_an_init_whose_pool_is_larger_than_the_gpu_says_how_much_it_has(end: LocalEnd) -> None:
    with pytest.raises(OutOfMemory, match=r"memory_size is 2147483648 bytes, cuda:0 .* free of 1073741824"):
        end.start("PROMPT", 1, **small_pool(2048))


def test_a_host_pool_that_cannot_be_pinned_is_said_and_swaps_are_right(
    end: LocalEnd, caplog: pytest.LogCaptureFixture
) -> None:
    fakecuda.load().fail("cuMemHostRegister_v2", 712)
    end.start("PROMPT", 1)
    assert "pool host is not pinned" in caplog.text
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED (712)" in caplog.text
    swaps_are_right(end.world)


def swaps_are_right(world: World) -> None:
    device = make(world, "device", Spec(blocks=True), 1)
    host = make(world, "host", Spec(blocks=True, placement=Placement.HOST), 2)
    pairs = {n: 7 - n for n in range(8)}
    call(world, "swap_blocks", Use("host"), Use("device"), pairs)
    same_bytes(show(world, "device"), moved(device, host, [(to, of) for of, to in pairs.items()]))
    call(world, "swap_blocks", Use("device"), Use("host"), {0: 1})
    same_bytes(show(world, "host"), moved(host, show(world, "device"), [(1, 0)]))


def fails_for_good(world: World) -> list[str]:
    """Swap while the driver cannot say whether a copy has ended, then again; return what came of it."""
    make(world, "device", Spec(blocks=True), 1)
    make(world, "host", Spec(blocks=True, placement=Placement.HOST), 2)
    fakecuda.load().fail("cuEventQuery", 999, times=10**6)
    errors = []
    for src, dst in (("host", "device"), ("device", "host"), ("host", "device")):
        with pytest.raises(DeviceError) as caught:
            call(world, "swap_blocks", Use(src), Use(dst), {0: 1})
        errors.append(str(caught.value))
    host = show(world, "host")
    call(world, "copy_blocks", Use("host"), {0: [3]})
    same_bytes(show(world, "host"), moved(host, host, [(3, 0)]))
    return errors


@pytest.mark.gpu(False)
def test_a_device_that_cannot_say_whether_a_copy_has_ended_is_not_used_again_and_the_host_is() -> None:
    end = ChildEnd("whose device fails for good")
    end.gpu = True
    end.start("MIX", 1)
    first, *later = end.do(fails_for_good)
    assert "CUDA_ERROR_UNKNOWN (999)" in first
    assert [text for text in later if "has failed in this process" not in text] == []
    end.kill()  # what its copies may still use stays


# --- processes that have not met a device yet -------------------------------------------------------------------------
@pytest.fixture
def child() -> Iterator[ChildEnd]:
    with closing(ChildEnd("which has met no device yet")) as end:
        end.gpu = True
        yield end
        end.stop()


def init_fails(world: World, options: dict[str, str], variable: str = "", value: str = "") -> tuple[str, str]:
    """Return status and text of an ``init`` that fails."""
    if variable:
        os.environ[variable] = value
    try:
        LLMDataDist(LLMRole.MIX, 1).init(options)
    except LLMException as error:
        return error.status_code.name, str(error)
    raise AssertionError("init has succeeded")


CUDA: Final = make_config(gpu=True)


def load(_: World) -> None:
    fakecuda.load()


@pytest.mark.gpu(False)
def test_an_init_with_no_driver_or_no_such_device_names_it_and_one_that_is_healed_works(child: ChildEnd) -> None:
    disabled = "LLM_FEATURE_NOT_ENABLED"
    status, text = child.do(init_fails, CUDA)
    assert (status, "libcuda.so.1: cannot open shared object file" in text) == (disabled, True), text
    child.do(load)
    for step, code, name in (("cuInit", 100, "NO_DEVICE"), ("cuDevicePrimaryCtxRetain", 2, "OUT_OF_MEMORY")):
        child.do(fail, step, code)
        status, text = child.do(init_fails, CUDA)
        assert (status, f"{step}: CUDA_ERROR_{name} ({code})" in text) == (disabled, True), text
    status, text = child.do(init_fails, make_config(gpu=True, device_id=5))
    assert (status, "no device 5: this process sees 1" in text) == (disabled, True), text
    child.start("MIX", 1)
    child.do(swaps_are_right)


@pytest.mark.gpu(False)
def test_a_device_without_virtual_memory_management_is_refused_by_name(child: ChildEnd) -> None:
    child.do(load)
    status, text = child.do(init_fails, CUDA, "FAKECUDA_VMM", "0")
    assert status == "LLM_FEATURE_NOT_ENABLED"
    assert "virtual memory management" in text


@pytest.mark.gpu(False)
@pytest.mark.parametrize("mover", ["auto", "kernel"])
def test_without_a_compiler_of_the_kernel_plain_copies_move_all(child: ChildEnd, mover: str) -> None:
    child.do(load)
    child.do(fail, "cuModuleLoadData", 221)
    child.start("MIX", 1, extra={"llm.DeviceMover": mover})
    child.do(swaps_are_right)
    assert child.do(kernels) == 0


def kernels(_: World) -> int:
    return fakecuda.load().state().kernels
