"""MindIE's separate deployment engine, written as that client writes it, and how tests drive it."""

from __future__ import annotations

import json
import queue
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
)
from tests.clients.kv import addresses, contents
from tests.support.moves import wait_until

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llm_datadist import Cache
    from tests.support.world import World

__all__ = ["BLOCKS", "KINDS", "Member", "address", "begin", "drive", "poll_count", "wait_links"]

KV_LINK_TIMEOUT: Final = 1080
KV_TRANS_TIMEOUT: Final = 10
WINDOW: Final = 16
POLLS: Final = 3
POLL_SECONDS: Final = 0.05
ROLES: Final = {"prefill": LLMRole.PROMPT, "decoder": LLMRole.DECODER, "flex": LLMRole.MIX}
TYPES: Final = {
    "float16": (DataType.DT_FLOAT16, 2),
    "bfloat16": (DataType.DT_BF16, 2),
    "float": (DataType.DT_FLOAT, 4),
    "int8": (DataType.DT_INT8, 1),
}


@dataclass(frozen=True)
class Member:
    """What a scheduler tells about one end of a link."""

    cluster_id: int
    host_ip: str
    device_ip: str
    super_device_id: str | None = None


@dataclass
class Mindie:
    """One engine: caches by model id (0: K, 1: V, 2: quantised K, 3: index), and links made by two daemon threads."""

    role: str
    own: Member
    caches: dict[int, Cache] = field(default_factory=dict)
    comm_ids: dict[int, int] = field(default_factory=dict)
    failed: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)
    polls: int = 0

    def initialise(self) -> LLMDataDist:
        """The options dict is plain: two keys are written into it by hand."""
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.link_total_time = KV_LINK_TIMEOUT
        config.link_retry_count = 80
        config.sync_kv_timeout = KV_TRANS_TIMEOUT * 1000
        options = config.generate_options()
        options["llm.RdmaServiceLevel"] = "4"
        options["llm.RdmaTrafficClass"] = "132"
        self.datadist = LLMDataDist(ROLES[self.role], self.own.cluster_id)
        self.datadist.init(options)
        self._jobs: queue.Queue[Member | None] = queue.Queue()
        self._window: queue.Queue[tuple[Member, int] | None] = queue.Queue()
        self._places = threading.Semaphore(WINDOW)
        self._closing = threading.Event()
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._create, self._watch)]
        for thread in self._threads:
            thread.start()
        return self.datadist

    def register(self, model_id: int, dtype: str, tensors: list[NDArray[np.uint8]], block_shape: list[int]) -> None:
        """(num_blocks, *block_shape), one address per layer."""
        data_type, _ = TYPES[dtype]
        desc = CacheDesc(
            num_tensors=len(tensors),
            shape=[tensors[0].shape[0], *block_shape],
            data_type=data_type,
            placement=Placement.DEVICE,
        )
        key = BlocksCacheKey(self.own.cluster_id, model_id)
        self.caches[model_id] = self.datadist.cache_manager.register_blocks_cache(desc, addresses(tensors), key)

    # --- links -----------------------------------------------------------------------------------------------------

    def ask_for(self, *peers: Member) -> None:
        """Link to these, in the background."""
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
            if comm_id == LLMStatusCode.LLM_ALREADY_LINK:
                raise AssertionError("an id that reads like a status")
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
        for _ in range(POLLS):
            self.polls += 1
            status = self.datadist.query_register_mem_status(comm_id)
            if status in (RegisterMemStatus.OK, RegisterMemStatus.FAILED):
                break
            time.sleep(POLL_SECONDS)
        return status

    def linked(self) -> list[int]:
        """Return the clusters whose communicator was seen to be OK: nobody polls it any more."""
        return sorted(peer for peer, comm_id in list(self.comm_ids.items()) if comm_id in self.ready)

    def unlink(self, cluster_id: int) -> None:
        """By the remote cluster id; it may still be preparing."""
        comm_id = self.comm_ids.pop(cluster_id, None)
        if comm_id is not None:
            self.datadist.unlink(comm_id)

    # --- transfers, and the end ------------------------------------------------------------------------------------

    def pull(self, cluster_id: int, src: list[int], dst: list[int]) -> LLMStatusCode:
        """One call per model id; the first failure fails the request, and its status is only logged."""
        for model_id, cache in self.caches.items():
            try:
                self.datadist.cache_manager.pull_blocks(BlocksCacheKey(cluster_id, model_id), cache, src, dst)
            except LLMException as error:
                return error.status_code
        return LLMStatusCode.LLM_SUCCESS

    def finalize(self) -> None:
        """Unlink everything, then end."""
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
    smaller, bigger = pair
    devices = []
    for rank, member in enumerate(pair):
        device = {"device_id": "0", "device_ip": member.device_ip, "rank_id": str(rank)}
        if member.super_device_id is not None:
            device["super_device_id"] = member.super_device_id
        devices.append(device)
    if smaller.host_ip == bigger.host_ip:
        servers = [{"server_id": smaller.host_ip, "device": devices}]
    else:
        servers = [{"server_id": m.host_ip, "device": [d]} for m, d in zip(pair, devices, strict=True)]
    table: dict[str, Any] = {
        "version": "1.0" if smaller.super_device_id is None else "1.2",
        "server_count": str(len(servers)),
        "server_list": servers,
        "status": "completed",
    }
    if smaller.super_device_id is not None:
        ids = [{"server_id": server["server_id"]} for server in servers]
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": ids}]
    ranks = {member.cluster_id: rank for rank, member in enumerate(pair)}
    return f"link{bigger.device_ip}:{smaller.device_ip}", ranks, json.dumps(table)


# --- at an end --------------------------------------------------------------------------------------------------------

#: Its script has K blocks (128, 1, 512), V blocks (128, 1, 64), 1198 of them; fewer here. An odd number of layers.
BLOCKS: Final = 37
KINDS: Final[dict[int, tuple[str, list[int], int]]] = {
    0: ("float16", [128, 1, 16], 3),
    1: ("bfloat16", [128, 1, 2], 3),
    2: ("int8", [128, 1, 8], 1),
    3: ("float", [128], 5),
}


def address(number: int, host: str) -> str:
    """Return the ip of device ``number`` of this test run: a loopback address beside the run's host."""
    first, second, third, fourth = map(int, host.split("."))
    return f"{first}.{second + 32}.{third}.{(fourth + number) % 256}"


def begin(world: World, role: str, own: Member, seed: int) -> None:
    """Initialise and register K, V, quantised K and index."""
    engine = Mindie(role, own)
    world.dd = engine.initialise()
    world.memory["engine"] = engine
    for model_id, (dtype, shape, layers) in KINDS.items():
        nbytes = TYPES[dtype][1]
        for dim in shape:
            nbytes *= dim
        world.memory[f"kv {model_id}"] = contents(seed + model_id, layers, BLOCKS, nbytes)
        engine.register(model_id, dtype, world.memory[f"kv {model_id}"], shape)


def drive(world: World, method: str, *args: Any) -> Any:
    """Call the engine."""
    return getattr(world.memory["engine"], method)(*args)


def wait_links(world: World, *cluster_ids: int) -> None:
    """Wait until these are linked."""
    engine: Mindie = world.memory["engine"]
    wait_until(lambda: set(cluster_ids) <= set(engine.linked()), 20)


def poll_count(world: World) -> tuple[int, list[int]]:
    """Return how often it asked, and who failed."""
    engine: Mindie = world.memory["engine"]
    return engine.polls, engine.failed
