"""A GPU as users see it: statistics, metrics, ``top``, ``explain`` name it, and count what goes through windows."""

import msgspec
import pytest

from llm_datadist.metrics import Statistics
from llm_datadist.prometheus import StatisticsCollector
from llm_datadist.tools.cli.top_rows import instance_rows
from tests.support.linking import statistics
from tests.support.moves import BLOCKS, Spec, Use, call, make
from tests.support.pairs import Pair, pairs
from tests.support.world import World

pytestmark = pytest.mark.gpu(True)
gpu_pair = pairs("shm", "tcp")
NAME = "cuda:0 (Fake GPU 0)"


def exported(world: World) -> dict[str, float]:
    """Return the metrics of the GPU, by name."""
    families = [*StatisticsCollector(world.dd).collect()]
    assert all(each.documentation.endswith(": max, not sum.") for each in families if "device" in each.name)
    samples = [sample for each in families for sample in each.samples if "device" in sample.labels]
    assert [each.labels for each in samples] == [{"cluster": str(world.dd.cluster_id), "device": NAME}] * 2
    return {each.name: each.value for each in samples}


@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
def test_pools_name_their_device_and_windows_and_waits_are_counted_at_both_sides(gpu_pair: Pair, method: str) -> None:
    ends = gpu_pair.start(rca=True)
    spec = Spec(tensors=2, rows=4, stride=1024, blocks=True)
    gpu_pair.prompt.do(make, "blocks", Spec(tensors=2, rows=4, stride=1024, blocks=True, blocks_key=BLOCKS), 1)
    gpu_pair.decoder.do(make, "kv", spec, 2)
    for end in ends:
        now: Statistics = end.do(statistics)
        assert [(pool.name, pool.device) for pool in now.pools] == [("device", NAME), ("host", "host")]
        about = {"cluster_id": 1, "role": "MIX", "pid": 1, "age_seconds": 0.0, "truncated": False}
        (row,) = instance_rows([about | {"statistics": msgspec.to_builtins(now)}])
        assert row["device"] == NAME
    before = [end.do(exported) for end in ends]
    gpu_pair.decoder.do(call, method, BLOCKS, Use("kv"), [0, 1, 2], [1, 2, 3])
    after = [end.do(exported) for end in ends]
    window_bytes, wait_seconds = (f"llm_datadist_device_{name}_total" for name in ("window_bytes", "wait_seconds"))
    grown = [now[window_bytes] - then[window_bytes] for now, then in zip(after, before, strict=True)]
    assert grown == [0 if gpu_pair.transport == "shm" else 3 * 1024 * 2] * 2
    # The first window is never there at once, nor are the last bytes.
    waited = [now[wait_seconds] > then[wait_seconds] for now, then in zip(after, before, strict=True)]
    assert waited == [gpu_pair.transport == "tcp"] * 2
    for end, figures in zip(ends, after, strict=True):
        (device,) = end.do(statistics).devices
        assert (device.name, device.window_bytes, device.wait_seconds) == (NAME, *figures.values())


@pytest.mark.parametrize("at_prompt", [True, False])
def test_a_link_over_shm_names_the_gpus_of_both_sides(shm_pair: Pair, at_prompt: bool) -> None:
    shm_pair.prompt.gpu = at_prompt
    mine, theirs = f"{NAME}, GPU 66616b65", "GPU 66616b65"
    sides = [mine, mine] if at_prompt else ["", mine]
    there = theirs if at_prompt else "none that is offered"
    for end, here in zip(shm_pair.start(), sides, strict=True):
        (link,) = end.do(statistics).links
        assert ("GPU" in link.reason) is bool(here)
        assert not here or link.reason.endswith(f"; pools in GPUs: here {here}, there {there}")
