"""MindIE's separate deployment engine, written as that client writes it: a mesh by rank tables from two daemon
threads, one pull per model id, MIX, unlink while preparing."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Final, NamedTuple

import pytest

from llm_datadist import (
    BlocksCacheKey,
    DataType,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)
from tests.clients.kv import contents, drive, initialised, options, rank_table, registered
from tests.clients.kv import pulled as compared
from tests.support.linking import links
from tests.support.moves import wait_until
from tests.support.ranks import host

if TYPE_CHECKING:
    from llm_datadist import Cache
    from tests.support.ends import ChildEnd
    from tests.support.world import World

pytestmark = pytest.mark.covers("MindIE-LLM")

#: By model id (K, V, quantised K, index): type, shape of a block, an odd number of layers. Its script has K blocks
#: (128, 1, 512), V blocks (128, 1, 64), 1198 of them; fewer here.
KINDS: Final[dict[int, tuple[DataType, list[int], int]]] = {
    0: (DataType.DT_FLOAT16, [128, 1, 16], 3),
    1: (DataType.DT_BF16, [128, 1, 2], 3),
    2: (DataType.DT_INT8, [128, 1, 8], 1),
    3: (DataType.DT_FLOAT, [128], 5),
}
BLOCKS: Final = 37
OK = LLMStatusCode.LLM_SUCCESS
SRC, DST = [3, 4, 5, 36, 0], [30, 31, 0, 7, 12]


class Member(NamedTuple):
    """What a scheduler tells about one end of a link."""

    cluster_id: int
    host_ip: str
    device_ip: str
    super_device_id: str | None = None


@dataclass
class Mindie:
    """One engine: caches by model id, and links made by two daemon threads."""

    role: LLMRole
    own: Member
    caches: dict[int, Cache] = field(default_factory=dict)
    comm_ids: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    polls: int = 0

    def initialise(self) -> LLMDataDist:
        """The options dict is plain: two keys are written into it by hand."""
        given = options(
            enable_cache_manager=True,
            enable_remote_cache_accessible=True,
            link_total_time=1080,
            link_retry_count=80,
            sync_kv_timeout=10_000,
        )
        given |= {"llm.RdmaServiceLevel": "4", "llm.RdmaTrafficClass": "132"}
        self.datadist = initialised(self.role, self.own.cluster_id, given)
        self._jobs: queue.Queue[Member | None] = queue.Queue()
        self._window: queue.Queue[tuple[Member, int] | None] = queue.Queue()
        self._places = threading.Semaphore(16)
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._create, self._watch)]
        for thread in self._threads:
            thread.start()
        return self.datadist

    def ask_for(self, *peers: Member) -> None:
        for peer in peers:
            self._jobs.put(peer)

    def _create(self) -> None:
        while (peer := self._jobs.get()) is not None:
            self._places.acquire()
            if self._closing.is_set():
                break
            try:
                comm_id = self.datadist.link(*arguments(self.own, peer))
            except LLMException:
                self.failed.append(peer.cluster_id)
                self._places.release()
                continue
            assert comm_id != LLMStatusCode.LLM_ALREADY_LINK, "an id that reads like a status"
            self.comm_ids[peer.cluster_id] = comm_id
            self._window.put((peer, comm_id))

    def _watch(self) -> None:
        while (job := self._window.get()) is not None:
            peer, comm_id = job
            try:
                status = self._poll(comm_id)
            except LLMException:
                status = RegisterMemStatus.FAILED
            if status == RegisterMemStatus.OK:
                self.ready.append(comm_id)
                self._places.release()
            elif status == RegisterMemStatus.FAILED:
                self.failed.append(peer.cluster_id)
                self.unlink(peer.cluster_id)
                self._places.release()
            else:  # anything else is still being prepared
                self._window.put(job)

    def _poll(self, comm_id: int) -> RegisterMemStatus:
        for _ in range(3):
            self.polls += 1
            status = self.datadist.query_register_mem_status(comm_id)
            if status in (RegisterMemStatus.OK, RegisterMemStatus.FAILED):
                break
            time.sleep(0.05)
        return status

    def wait_linked(self, cluster_id: int) -> None:
        """Wait until the communicator was seen to be OK: it is not polled any more."""
        wait_until(lambda: self.comm_ids.get(cluster_id) in self.ready, 20)

    def unlink(self, cluster_id: int) -> None:
        """By the remote cluster id; it may still be preparing."""
        comm_id = self.comm_ids.pop(cluster_id, None)
        if comm_id is not None:
            self.datadist.unlink(comm_id)

    def pull(self, cluster_id: int, src: list[int], dst: list[int]) -> LLMStatusCode:
        """One call per model id; the first failure fails the request, and its status is only logged."""
        for model_id, cache in self.caches.items():
            try:
                self.datadist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), cache, src, dst)
            except LLMException as error:
                return error.status_code
        return OK

    def finalize(self) -> None:
        self._closing.set()
        self._jobs.put(None)
        self._places.release()
        self._threads[0].join(10)
        self._window.queue.clear()
        self._window.put(None)
        self._threads[1].join(10)
        for cluster_id in list(self.comm_ids):
            self.unlink(cluster_id)
        self.datadist.finalize()


def arguments(one: Member, other: Member) -> tuple[str, dict[int, int], str]:
    """Return name, ranks and table, the same at both ends: rank 0 is the smaller device ip."""
    pair = sorted((one, other), key=lambda member: tuple(map(int, member.device_ip.split("."))))
    devices = []
    for rank, member in enumerate(pair):
        device = {"device_id": "0", "device_ip": member.device_ip, "rank_id": str(rank)}
        if member.super_device_id is not None:
            device["super_device_id"] = member.super_device_id
        devices.append((member.host_ip, device))
    table = rank_table(devices, "1.0") if one.super_device_id is None else rank_table(devices, "1.2", ["0"])
    ranks = {member.cluster_id: rank for rank, member in enumerate(pair)}
    return f"link{pair[1].device_ip}:{pair[0].device_ip}", ranks, table


def begin(world: World, role: LLMRole, own: Member, seed: int) -> None:
    """Initialise and register all kinds: (num_blocks, *block_shape), one address per layer."""
    world.memory["client"] = engine = Mindie(role, own)
    world.dd = engine.initialise()
    for model_id, (data_type, shape, layers) in KINDS.items():
        tensors = contents(seed + model_id, layers, BLOCKS, prod(shape) * data_type.itemsize)
        world.memory[f"kv {model_id}"] = tensors
        key = BlocksCacheKey(own.cluster_id, model_id)
        engine.caches[model_id] = registered(world.dd, tensors, data_type, shape, key)


def member(number: int, pod: str | None = None) -> Member:
    """Cluster ``number``, on one host; its device has a loopback address beside the run's host."""
    first, second, third, fourth = map(int, host(0).split("."))
    return Member(number, host(0), f"{first}.{second + 32}.{third}.{(fourth + number) % 256}", pod)


def pulled(end: ChildEnd, source: ChildEnd, cluster_id: int) -> None:
    """Pull all kinds, and compare every byte of every kind at both ends."""
    statuses: list[LLMStatusCode] = []
    names = [(f"kv {kind}", f"kv {kind}") for kind in KINDS]
    compared(end, source, names, (SRC, DST), lambda: statuses.append(end.do(drive, "pull", cluster_id, SRC, DST)))
    assert statuses == [OK]


def test_flex_is_mix_and_pulls_both_ways_in_super_pods_and_linking_again_mends_an_unlink(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prefill, flex = ends
    members = [member(1, "1"), member(2, "2")]
    name, ranks, table = arguments(*members)
    assert arguments(*members[::-1]) == (name, ranks, table)
    assert '"version": "1.2"' in table
    assert '"server_count": "1"' in table
    prefill.do(begin, LLMRole.PROMPT, members[0], 10)
    flex.do(begin, LLMRole.MIX, members[1], 20)
    for _ in range(2):
        # The scheduler tells both ends of a link.
        prefill.do(drive, "ask_for", members[1])
        flex.do(drive, "ask_for", members[0])
        prefill.do(drive, "wait_linked", 2)
        flex.do(drive, "wait_linked", 1)
        pulled(flex, prefill, 1)
        pulled(prefill, flex, 2)
        prefill.do(drive, "unlink", 2)
        wait_until(lambda: flex.do(links) == {})
        assert flex.do(drive, "pull", 1, SRC, DST) == LLMStatusCode.LLM_NOT_YET_LINK
        flex.do(drive, "unlink", 1)
    flex.do(drive, "finalize")
    prefill.do(drive, "finalize")


def test_a_window_full_of_absent_peers_goes_on_polling_and_is_unlinked_while_preparing(
    ends: tuple[ChildEnd, ChildEnd],
) -> None:
    prefill, decoder = ends
    members = [member(number) for number in range(1, 24)]
    prefill.do(begin, LLMRole.PROMPT, members[0], 10)
    decoder.do(begin, LLMRole.DECODER, members[1], 20)
    # 15 that never come, the one that does, and more than the window holds.
    decoder.do(drive, "ask_for", *members[2:17], members[0], *members[17:])
    prefill.do(drive, "ask_for", members[1])
    decoder.do(drive, "wait_linked", 1)
    prefill.do(drive, "wait_linked", 2)
    pulled(decoder, prefill, 1)
    wait_until(lambda: decoder.do(drive, "polls") > 50)
    assert decoder.do(drive, "failed") == []
    assert decoder.do(links) == {1: "ready"}
    decoder.do(drive, "finalize")  # unlinks the sixteen that are still being prepared
    prefill.do(drive, "finalize")
