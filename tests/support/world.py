"""One end of a test: an LLMDataDist with its caches, in this process or in another one, behind the same few words.

A test sends functions to an end: ``end.do(function, *args)`` calls ``function(world, *args)`` where the world lives.
Functions must be at the top level of a module (they travel by name); results and exceptions travel back.
"""

import ctypes
import gc
import os
import threading
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import Cache, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, Placement
from llm_datadist.cache_manager import CacheManager
from llm_datadist.testing import scene
from llm_datadist.views import tensor_views
from tests.support import fakecuda
from tests.support.probe import Probe, count_ids_again, instances, kept_by

SECRETS_VARIABLE: Final = "LLM_DATADIST_TEST_SECRETS"
GPU_VARIABLE: Final = "LLM_DATADIST_TEST_GPU"
NIXL_VARIABLE: Final = "LLM_DATADIST_TEST_NIXL"
GPU_OPTION: Final = "llm.DeviceMemory"
#: From the first cache id of one ``init`` of a process to that of the next.
SPAN: Final = 10**12


def nixl_stands_in(transport: str) -> bool:
    """Return True where nixl is used instead; it writes nothing without remote cache access, by addresses too."""
    return transport in os.environ.get(NIXL_VARIABLE, "").split(",")


def make_config(**settings: Any) -> dict[str, str]:
    """Return options with a 32 MiB device pool and a 32 MiB host pool; ``extra`` adds raw option strings.

    ``gpu``: caches with Placement.DEVICE lie in a GPU, of the fake driver; so they do with :data:`GPU_VARIABLE`.
    Where the environment names a file of secrets (:data:`SECRETS_VARIABLE`), links are authenticated by it, again and
    again. Nixl stands in for what :data:`NIXL_VARIABLE` names there: `tcp`, `auto` or both.
    """
    extra: dict[str, str] = settings.pop("extra", {})
    if settings.pop("gpu", GPU_VARIABLE in os.environ):
        extra = {GPU_OPTION: "cuda"} | extra
    values: dict[str, Any] = {
        "device_id": 0,
        "enable_cache_manager": True,
        "sync_kv_timeout": 10_000,
        "mem_pool_cfg": '{"memory_size": 33554432, "page_shift": 12}',
        "host_mem_pool_cfg": '{"memory_size": 33554432, "page_shift": 12}',
    } | settings
    config = LLMConfig()
    for name, value in values.items():
        if value is not None:
            setattr(config, name, value)
    secrets = os.environ.get(SECRETS_VARIABLE)
    secured = {"llm.AuthSecretFile": secrets, "llm.MaxLinkAge": "2"} if secrets else {}
    if nixl_stands_in(extra.get("llm.Transport", "auto")):
        extra = extra | {"llm.Transport": "nixl", "llm.NixlPlaintext": "1"}
    return config.generate_options() | secured | extra


def small_pool(mib: int = 1) -> dict[str, Any]:
    """Return settings with one pool of that size and pages of 4 KiB."""
    return {"mem_pool_cfg": f'{{"memory_size": {mib << 20}, "page_shift": 12}}', "host_mem_pool_cfg": None}


def ids_as_in_a_fresh_process() -> None:
    """Let cache ids count from 1 again, unless an instance is live: tests name caches by id."""
    if LLMDataDist.llm_engine_instance is None:
        count_ids_again(SPAN)


@dataclass
class World:
    """What lives at one end. ``caches`` and ``memory`` are for the tests' own functions."""

    name: str
    dd: LLMDataDist = field(init=False)
    caches: dict[str, Cache] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)

    @property
    def cm(self) -> CacheManager:
        return self.dd.cache_manager

    @property
    def probe(self) -> Probe:
        """The inside of the instance, which is initialised."""
        return Probe(self.dd)

    def start(self, role: str, cluster_id: int, options: dict[str, str], device: Any = None) -> int | None:
        """Initialise a fresh LLMDataDist; return the port it listens on."""
        ids_as_in_a_fresh_process()
        if GPU_OPTION in options:
            fakecuda.load()
        self.dd = LLMDataDist(LLMRole[role], cluster_id, device=device)
        self.dd.init(options)
        return self.dd.listen_port

    @property
    def gpu(self) -> bool:
        """True if caches with Placement.DEVICE lie in a GPU."""
        return self.probe.engine.caches.device.ordinal >= 0

    def user_memory(self, nbytes: int, placement: Placement = Placement.DEVICE) -> tuple[int, Any]:
        """Return memory that is no pool's, of a placement: its address, and what keeps it."""
        if self.gpu and placement is Placement.DEVICE:
            memory = fakecuda.UserMemory(nbytes)
            fakecuda.load().view(memory.address, nbytes)[:] = 0
            return memory.address, memory
        array = np.zeros(nbytes, np.uint8)
        return array.ctypes.data, array

    def stop(self) -> None:
        """Check every table, then finalize. Also after a test that finalized by itself."""
        if hasattr(self, "dd"):
            if self.dd in instances():
                self.dd.check_integrity()
            self.dd.finalize()
            del self.dd  # what is alive between tests is frozen: see baseline
        self.caches.clear()
        self.memory.clear()


def cluster_info(
    cluster_id: int | None, *ports: int | None, ip: str = "127.0.0.1", local: str | None = "127.0.0.1"
) -> LLMClusterInfo:
    """Return a cluster info with one remote endpoint per port; None for an id or an address that is left out."""
    cluster = LLMClusterInfo()
    if cluster_id is not None:
        cluster.remote_cluster_id = cluster_id
    if local is not None:
        cluster.append_local_ip_info(local, 0)
    for port in ports:
        assert port is not None
        cluster.append_remote_ip_info(ip, port)
    return cluster


def fill(cache: Cache, seed: int) -> list[NDArray[np.uint8]]:
    """Fill every byte of a cache with a seeded pattern; return copies of it, one (rows, stride) array per tensor."""
    random = np.random.default_rng(seed)
    for raw in byte_views(cache):
        raw[:] = random.integers(0, 256, raw.size, dtype=np.uint8)
    return read(cache)


def read(cache: Cache) -> list[NDArray[np.uint8]]:
    """Return copies of every byte of a cache, one (rows, stride) array per tensor."""
    rows = cache.cache_desc.shape[0]
    return [view.reshape(rows, -1).copy() for view in byte_views(cache)]


def byte_views(cache: Cache) -> list[NDArray[np.uint8]]:
    """Return the bytes of each tensor, wherever they lie; arrays keep it mapped, as those of the host do."""
    fake, addresses = fakecuda.loaded(), cache.tensor_addrs
    if fake is not None and addresses and fake.has(addresses[0]):
        return [fake.view(address, cache.cache_desc.size, kept_by(cache)) for address in addresses]
    return [view.reshape(-1).view(np.uint8) for view in tensor_views(cache)]


def baseline(world: World) -> dict[str, Any]:
    """Return :func:`residue` before a test, and take all that lives now out of the collector's sight.

    What is imported or kept between tests is not the test's; every later look would go through it again, which costs
    more than most tests do. What the test itself makes stays in sight.
    """
    found = residue()
    gc.freeze()
    return found


def settled(before: dict[str, Any]) -> dict[str, Any]:
    """Return :func:`residue` once it equals ``before`` or 5 s have passed, as :func:`scene.settled` compares them."""
    return scene.settled(before, residue)


def residue(_: World | None = None) -> dict[str, Any]:
    """Return what a process holds that a finished test must not add to: threads, descriptors, mappings, GPU memory."""
    gc.collect()
    targets = [each.split(" ", 1)[1].partition("fakecuda-")[0] for each in scene.descriptors()]
    # Raw and counted in one go: a process has hundreds of mappings, and every test looks several times.
    with open("/proc/self/maps", "rb", buffering=0) as maps:
        memfds = maps.readall().count(b" /memfd:")
    return {
        "threads": sorted(thread.name for thread in threading.enumerate() if thread.name != "lldd-call"),
        "kernel threads": sorted(n for n, name in scene.kernel_threads().items() if not name.startswith(scene.KEPT)),
        "fds": Counter(each if each.startswith("/") else each.split(":")[0] for each in targets),
        "memfd mappings": memfds,
        "gpu": fakecuda.complaints_here(),
    }


residue_of = residue  # as an end calls it


def settled_of(world: World, before: dict[str, Any]) -> dict[str, Any]:
    return settled(before)


def anonymous_bytes(_: World | None = None) -> int:
    """Return RssAnon of this process: what it holds of its own. What earlier tests have freed is given back first."""
    ctypes.CDLL(None).malloc_trim(0)
    status = Path("/proc/self/status").read_text("ascii")
    return int(status.partition("RssAnon:")[2].split()[0]) << 10
