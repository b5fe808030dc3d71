"""The transport nixl with memory of a GPU: descriptors, and pulls and pushes by a stub of NIXL's bindings.

The stub moves a descriptor only if the agent at that side has registered it, with the same segment and device, as NIXL
does. Nothing here says what UCX does with a GPU.
"""

import ctypes
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMClusterInfo, LLMConfig, LLMDataDist, LLMRole, Placement
from llm_datadist._transport import nixl, nixl_agent
from llm_datadist._transport.nixl_agent import Agent, BytesDone, NixlFailed, spans_of
from llm_datadist._transport.transport import Meeting
from llm_datadist.errors import LinkRefused
from tests.support import fakecuda

AGENTS: dict[str, "StubNixl"] = {}


def bytes_at(address: int, nbytes: int) -> Any:
    fake = fakecuda.loaded()
    if fake is not None and fake.has(address):
        return fake.view(address, nbytes)
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


class StubNixl:
    """An agent of NIXL that moves bytes at once, to and from agents of this process."""

    def __init__(self, name: str, config: object) -> None:
        self.name, self.registered = name, list[Any]()
        AGENTS[name] = self

    def registerMem(self, described: Any, backends: object) -> None:  # noqa: N802
        segment, spans = described
        self.registered += [(segment, *span) for span in spans]

    def check(self, segment: str, address: int, nbytes: int, device: int) -> None:
        for known, start, length, where, _ in self.registered:
            if (known, where) == (segment, device) and start <= address and address + nbytes <= start + length:
                return
        raise RuntimeError(f"NIXL_ERR_NOT_FOUND: {segment} {device}")

    def createXferReq(self, verb: str, here: Any, there: Any, peer: str, *_: object) -> Any:  # noqa: N802
        moves = []
        for mine, theirs in zip(here[1].tolist(), there[1].tolist(), strict=True):
            self.check(here[0], *mine)
            AGENTS[peer].check(there[0], *theirs)
            moves.append((theirs, mine) if verb == "WRITE" else (mine, theirs))
        return moves

    def postXferReq(self, moves: Any, _: object) -> None:  # noqa: N802
        for (to, nbytes, _), (of, _, _) in moves:
            bytes_at(to, nbytes)[:] = bytes_at(of, nbytes)

    def getLocalMD(self) -> bytes:  # noqa: N802
        return self.name.encode()

    def loadRemoteMD(self, metadata: bytes) -> str:  # noqa: N802
        return metadata.decode()

    def __getattr__(self, name: str) -> Any:
        return lambda *_: ({}, None) if name == "getPluginParams" else "DONE" if name == "getXferStatus" else None


def pair(segment: str, spans: object) -> tuple[str, object]:
    return segment, spans


BINDINGS = SimpleNamespace(
    nixlAgent=StubNixl, nixlAgentConfig=SimpleNamespace, nixlRegDList=pair, nixlXferDList=pair, DRAM_SEG="DRAM",
    VRAM_SEG="VRAM", NIXL_READ="READ", NIXL_WRITE="WRITE", NIXL_IN_PROG="PROC", NIXL_SUCCESS="DONE",
    NIXL_THREAD_SYNC_STRICT=0,
)  # fmt: skip


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(nixl_agent, "_import_bindings", lambda: BINDINGS)
    monkeypatch.setattr(nixl, "fabric", lambda: "tcp")
    monkeypatch.setattr(nixl, "usable", lambda _: "")
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")
    yield
    AGENTS.clear()


def test_memory_of_a_gpu_is_vram_with_its_ordinal_and_that_of_the_host_dram() -> None:
    agent = Agent("tcp", progress=False, pools=[(4096, 100, -1), (8192, 100, 1)])
    agent.cover(np.array([4096, 8192], np.uint64), 100, 1)  # inside the pools
    agent.cover(np.array([1 << 20], np.uint64), 10, 3)
    agent.cover(np.array([1 << 21], np.uint64), 10)
    assert AGENTS[agent.name].registered == [
        ("DRAM", 4096, 100, 0, ""), ("VRAM", 8192, 100, 1, ""), ("VRAM", 1 << 20, 10, 3, ""),
        ("DRAM", 1 << 21, 10, 0, ""),
    ]  # fmt: skip
    assert agent.covers_any([1 << 20])
    base, offset, nbytes = (np.array([each], np.uint64) for each in (8192, 5, 7))
    assert spans_of(base, offset, nbytes, 1).tolist() == [[8197, 7, 1]]
    source, target = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    for each in (source, target):
        agent.cover(np.array([each.ctypes.data], np.uint64), 64)
    here, there = (np.array([[each.ctypes.data, 64, 0]], np.uint64) for each in (source, target))
    with pytest.raises(NixlFailed, match="VRAM 0"):
        agent.move("WRITE", agent.name, here, there, lambda: None, BytesDone(), (-1, 0))
    assert not target.any()
    agent.move("WRITE", agent.name, here, there, lambda: None, BytesDone())
    assert (target == source).all()


@pytest.mark.parametrize(
    ("asked", "forced", "ucx", "on_gpu", "reason"),
    [
        (True, True, "tcp,cuda_copy", "both", ""),
        (True, True, "tcp,cuda_copy", "mine", ""),
        (True, True, None, "theirs", ""),  # the peer sees to its own
        (False, False, "tcp,cuda_copy", "theirs", "a side has memory of a GPU, for which no one chooses it"),
        (False, True, "tcp,cuda_copy", "mine", "this side does not ask for it"),
        (True, True, None, "mine", "UCX_TLS=: must name cuda_copy and no other"),
        (True, True, "tcp", "both", "UCX_TLS=tcp: must name cuda_copy"),
        (True, True, "tcp,cuda", "mine", "UCX_TLS=tcp,cuda: must name cuda_copy"),
        (
            True,
            True,
            "tcp,cuda_copy,cuda_ipc",
            "mine",
            "UCX_TLS=tcp,cuda_copy,cuda_ipc: must name cuda_copy and no other",
        ),
    ],
)
def test_nixl_moves_memory_of_a_gpu_only_if_asked_to_and_only_by_copies_that_end_with_an_agent(
    monkeypatch: pytest.MonkeyPatch, asked: bool, forced: bool, ucx: str | None, on_gpu: str, reason: str
) -> None:
    monkeypatch.delenv("UCX_TLS") if ucx is None else monkeypatch.setenv("UCX_TLS", ucx)
    transport = object.__new__(nixl.NixlTransport)
    transport.fabric, transport.why_not, transport.asked = "tcp", "", asked
    device = None if on_gpu == "theirs" else mock.Mock(uuid=b"mine")
    wanted = "nixl" if forced else None
    meeting = Meeting({"nixl": transport}, mock.Mock(device=device), wanted, True, bytes(16), dialled=False)
    theirs = {"nixl": b"tcp"} | ({} if on_gpu == "mine" else {"device": b"theirs"})
    meeting.hear(theirs, None, bytes(16), "the peer", 1)
    if reason:
        with pytest.raises(LinkRefused, match=f"not nixl: {reason}"):
            meeting.choose()
    else:
        assert meeting.choose().name == "nixl"
    meeting.close()


def instance(role: LLMRole, cluster_id: int, device: str, transport: str = "nixl") -> LLMDataDist:
    config = LLMConfig()
    config.device_id, config.enable_cache_manager, config.enable_remote_cache_accessible = 0, True, True
    config.listen_ip_info, config.mem_pool_cfg = "127.0.0.1:0", json.dumps({"memory_size": 4 << 20})
    made = LLMDataDist(role, cluster_id)
    made.init(config.generate_options() | {"llm.Transport": transport, "llm.DeviceMemory": device})
    return made


def link(decoder: LLMDataDist, prompt: LLMDataDist) -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 1
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", prompt.listen_port or 0)
    decoder.link_clusters([info], 10_000)


@pytest.mark.gpu(True)
@pytest.mark.parametrize("devices", [("cuda", "cuda"), ("host", "cuda"), ("cuda", "host")])
def test_pulls_and_pushes_move_the_addressed_bytes_of_a_gpu(gpu: bool, devices: tuple[str, str]) -> None:
    assert gpu
    fakecuda.load()
    prompt, decoder = instance(LLMRole.PROMPT, 1, devices[0]), instance(LLMRole.DECODER, 2, devices[1])
    link(decoder, prompt)
    assert decoder.explain(1).transport == "nixl"
    desc, key = CacheDesc(3, [8, 1000], DataType.DT_INT8, Placement.DEVICE), BlocksCacheKey(1, 0)
    there = prompt.cache_manager.allocate_blocks_cache(desc, key)
    here = decoder.cache_manager.allocate_blocks_cache(desc)
    theirs, ours = ([bytes_at(at, 8000).reshape(8, 1000) for at in each.tensor_addrs] for each in (there, here))
    random = np.random.default_rng(1)
    for each in (*theirs, *ours):
        each[:] = random.integers(0, 256, each.shape, np.uint8)
    expected = [[each.copy() for each in side] for side in (theirs, ours)]
    decoder.cache_manager.pull_blocks(key, here, [0, 2, 5], [7, 1, 3])
    decoder.cache_manager.push_blocks(key, here, [7, 0], [4, 6])
    for far, near in zip(*expected, strict=True):
        near[[7, 1, 3]] = far[[0, 2, 5]]
        far[[4, 6]] = near[[7, 0]]
    assert all(
        (a == b).all()
        for side, wanted in zip((theirs, ours), expected, strict=True)
        for a, b in zip(side, wanted, strict=True)
    )
    segments = {(segment, device) for agent in AGENTS.values() for segment, _, _, device, _ in agent.registered}
    assert segments == {("VRAM", 0)} | ({("DRAM", 0)} if "host" in devices else set())
    del theirs, ours
    decoder.finalize()
    prompt.finalize()
