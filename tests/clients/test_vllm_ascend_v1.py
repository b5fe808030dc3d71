"""vllm-ascend, v1 engine: LLMDataDistCMgrConnector. Links on demand, polled; MHA, MLA and sparse caches."""

import os
from typing import Final, NamedTuple

import pytest

from llm_datadist import LLMStatusCode as Code
from tests.clients.kv import Kind, holds, options, play, rank_table
from tests.support.kinds import ChildEnd, Processes
from tests.support.linking import links
from tests.support.moves import wait_until
from tests.support.ranks import PREPARING, host

pytestmark = pytest.mark.covers("vllm-ascend, v1 engine")

#: The registered caches by kind of attention. MHA: K0, V0, K1, V1, ... in one cache; then (k_nope, k_pe, k_idx).
LAYOUTS: Final = {
    "mha": (Kind(8, 24, (1024,)),),
    "mla": (Kind(4, 24, (2048,)), Kind(4, 24, (256,))),
    "sparse": (Kind(4, 24, (2048,)), Kind(4, 24, (256,)), Kind(4, 24, (128,))),
}
REMOTE, LOCAL = [3, 4, 5, 9, 23], [0, 1, 17, 8, 2]
#: No listen address, no pool: rank tables only. The time is 4.096 * 2**20 * 7 us and 3 s, by the environment.
MODE: Final = {"enable_switch_role": True, "enable_cache_manager": True, "enable_remote_cache_accessible": True}
OPTIONS: Final = options(sync_kv_timeout=33_064, **MODE)


class Agent(NamedTuple):
    """What one worker tells another: its device has an ip that no host has, which does not matter."""

    cluster_id: int
    server: int = 0
    super_pod_id: str | None = None

    @property
    def device_ip(self) -> str:
        return f"192.0.{os.getpid() % 250}.{self.cluster_id}"


def joining(prefill: Agent, decode: Agent) -> tuple[str, dict[int, int], str]:
    """Return the arguments of link(): a table of version 1.2, in which device ips are the devices' own."""
    devices = []
    for rank, agent in enumerate((prefill, decode)):
        device = {"device_id": "0", "device_ip": agent.device_ip, "rank_id": str(rank)}
        if agent.super_pod_id is not None:
            device["super_device_id"] = str(rank)
        devices.append((host(agent.server), device))
    pods = sorted({each.super_pod_id for each in (prefill, decode) if each.super_pod_id})
    name = f"pd_comm_{prefill.device_ip}_{decode.device_ip}"
    return name, {prefill.cluster_id: 0, decode.cluster_id: 1}, rank_table(devices, "1.2", pods)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_first_request_links_both_workers_and_pulls(ends: tuple[ChildEnd, ChildEnd], layout: str) -> None:
    (prefill, decode), kinds = ends, LAYOUTS[layout]
    given = joining(Agent(1, 0, "0"), Agent(2, 1, "1"))
    play((prefill, "start", "PROMPT", 1, OPTIONS, kinds, 10, True))
    play((decode, "start", "DECODER", 2, OPTIONS, kinds, 20, True))
    # The decode worker asks the prefill worker over the side channel; its answer comes after its own link.
    play((prefill, "link", *given), (decode, "link", *given), (decode, "ready", 1), (prefill, "ready", 1))
    assert play((decode, "pull", 1, REMOTE, LOCAL)) is Code.LLM_SUCCESS
    # Fewer local blocks take the last of the remote ones.
    assert play((decode, "pull", 1, REMOTE[-2:], LOCAL[:2])) is Code.LLM_SUCCESS
    holds(decode, kinds, 20, (10, REMOTE, LOCAL), (10, REMOTE[-2:], LOCAL[:2]))
    holds(prefill, kinds, 10)
    play((prefill, "finalize"), (decode, "finalize"))


def test_two_prefill_workers_one_of_them_late_serve_one_decode_worker(processes: Processes) -> None:
    first, second, decode = (processes.child(name) for name in ("prefill 1", "prefill 2", "decode"))
    kinds, early, late = LAYOUTS["mla"], joining(Agent(1), Agent(3)), joining(Agent(2), Agent(3))
    assert host(0).startswith("127.")
    play((first, "start", "PROMPT", 1, OPTIONS, kinds, 10, True))
    play((decode, "start", "DECODER", 3, options(sync_kv_timeout=20_000, **MODE), kinds, 20, True))
    play((first, "link", *early), (decode, "link", *early), (decode, "ready", 1), (first, "ready", 1))
    play((decode, "pull", 1, REMOTE[:3], LOCAL[:3]), (decode, "link", *late))
    assert play((decode, "query_register_mem_status", 2)) is PREPARING  # it polls before the other one is there
    play((second, "start", "PROMPT", 2, OPTIONS, kinds, 30, True), (second, "link", *late))
    play((second, "ready", 1), (decode, "ready", 2), (decode, "pull", 2, REMOTE[3:], LOCAL[3:]))
    holds(decode, kinds, 20, (10, REMOTE[:3], LOCAL[:3]), (30, REMOTE[3:], LOCAL[3:]))
    assert decode.do(links) == {1: "ready", 2: "ready"}
    play((first, "unlink", 1))
    wait_until(lambda: decode.do(links) == {2: "ready"})
    assert play((decode, "pull", 1, REMOTE, LOCAL)) is Code.LLM_NOT_YET_LINK
    play((decode, "finalize"), (first, "finalize"), (second, "finalize"))
