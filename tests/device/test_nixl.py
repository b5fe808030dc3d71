"""The transport nixl with memory of a GPU: descriptors, and pulls and pushes by a stub of NIXL's bindings.

The stub moves a descriptor only if the agent at that side has registered it, with the same segment and device, as NIXL
does. Nothing here says what UCX does with a GPU.
"""

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey
from llm_datadist._native.plan import PlanSide
from llm_datadist._transport import connection
from llm_datadist._transport.nixl import slots, worker
from llm_datadist._transport.nixl.agent import Agent, spans_of
from llm_datadist._transport.nixl.bindings import NixlFailed
from llm_datadist._transport.nixl.messages import Ready
from llm_datadist._transport.nixl.transport import NixlTransport
from llm_datadist._transport.transport import Meeting
from llm_datadist.errors import DeviceError, LinkRefused, LLMException, ProtocolError
from tests.support import fakecuda
from tests.support.ends import End
from tests.support.linking import bytes_move_both_ways, explain
from tests.support.moves import BLOCKS, Spec, Use, call, make, moved, same_bytes, show
from tests.support.pairs import Pair

AGENTS: dict[str, "StubNixl"] = {}


def bytes_at(address: int, nbytes: int) -> Any:
    if (fake := fakecuda.load()).has(address):
        return fake.view(address, nbytes)
    return np.ctypeslib.as_array((ctypes.c_ubyte * nbytes).from_address(address))


class StubNixl:
    """An agent of NIXL that moves bytes at once, to and from agents of this process."""

    def __init__(self, name: str, _: object) -> None:
        self.name = name
        self.registered: dict[tuple[str, int], list[range]] = {}
        AGENTS[name] = self

    def registerMem(self, described: Any, _: object) -> None:  # noqa: N802
        for start, nbytes, device, _ in described[1]:
            self.registered.setdefault((described[0], device), []).append(range(start, start + nbytes))

    def createXferReq(self, verb: str, here: Any, there: Any, peer: str, *_: object) -> Any:  # noqa: N802
        for agent, (segment, spans) in ((self, here), (AGENTS[peer], there)):
            for start, nbytes, device in spans.tolist():
                known = agent.registered.get((segment, device), [])
                if not any(start in each and start + nbytes - 1 in each for each in known):
                    raise RuntimeError(f"NIXL_ERR_NOT_FOUND: {segment} {device}")
        pairs = zip(here[1].tolist(), there[1].tolist(), strict=True)
        return [(theirs, mine) if verb == "WRITE" else (mine, theirs) for mine, theirs in pairs]

    def postXferReq(self, moves: Any, _: object) -> None:  # noqa: N802
        for (to, nbytes, _), (of, _, _) in moves:
            bytes_at(to, nbytes)[:] = bytes_at(of, nbytes)

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "getPluginParams": ({}, None),
            "getXferStatus": "DONE",
            "getLocalMD": self.name.encode(),
        }
        return lambda *asked: answers.get(name, asked[0] if asked else None)  # metadata are a name


BINDINGS = SimpleNamespace(
    nixlAgent=StubNixl, nixlAgentConfig=SimpleNamespace, nixlRegDList=lambda *of: of, nixlXferDList=lambda *of: of,
    **{name: name for name in ("DRAM_SEG", "VRAM_SEG", "NIXL_THREAD_SYNC_STRICT")},
    NIXL_READ="READ", NIXL_WRITE="WRITE", NIXL_IN_PROG="PROC", NIXL_SUCCESS="DONE",
)  # fmt: skip


@pytest.fixture(autouse=True)
def stub(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("llm_datadist._transport.nixl.agent.import_bindings", lambda: BINDINGS)
    monkeypatch.setattr("llm_datadist._transport.nixl.transport.fabric", lambda: "tcp")
    monkeypatch.setattr("llm_datadist._transport.nixl.transport.usable", lambda _: "")
    monkeypatch.setenv("UCX_TLS", "tcp,cuda_copy")
    yield
    AGENTS.clear()


def test_memory_of_a_gpu_is_vram_with_its_ordinal_and_that_of_the_host_dram() -> None:
    agent = Agent("tcp", progress=False, pools=[(4096, 100, -1), (8192, 100, 1)])
    agent.cover(np.array([4096, 8192], np.uint64), 100, 1)  # inside the pools
    agent.cover(np.array([1 << 20], np.uint64), 10, 3)
    agent.cover(np.array([1 << 21], np.uint64), 10)
    assert AGENTS[agent.name].registered == {
        ("DRAM_SEG", 0): [range(4096, 4196), range(1 << 21, (1 << 21) + 10)],
        ("VRAM_SEG", 1): [range(8192, 8292)],
        ("VRAM_SEG", 3): [range(1 << 20, (1 << 20) + 10)],
    }
    base, offset, nbytes = np.array([[8192], [5], [7]], np.uint64)
    spans = spans_of(base, offset, nbytes, 1)
    assert spans.tolist() == [[8197, 7, 1]]
    with pytest.raises(NixlFailed, match="DRAM_SEG 1"):
        agent.move("WRITE", agent.name, spans, spans, lambda: None, lambda _: None, (1, -1))
    wrong = mock.Mock(side_effect=TypeError("incompatible arguments"))
    with mock.patch.object(BINDINGS, "nixlRegDList", wrong), pytest.raises(NixlFailed, match="incompatible arguments"):
        agent.cover(np.array([1 << 22], np.uint64), 10)
    with mock.patch.object(BINDINGS, "nixlXferDList", wrong), pytest.raises(NixlFailed, match="incompatible arguments"):
        agent.move("WRITE", agent.name, spans, spans, lambda: None, lambda _: None, (1, 1))


@pytest.mark.parametrize("ordinal", [63, 64, 2**64 - 1])
def test_a_peer_names_a_gpu_below_64(ordinal: int) -> None:
    context, turn = mock.Mock(exports=mock.Mock(regions={})), mock.Mock(return_value=0.1)
    slot, numbers = slots.AgentSlot(context, "tcp", progress=False), np.array([4096], np.uint64)
    plan = mock.Mock(src_first=0, count=1, runs=np.array([[0, 0, 8]], np.uint64))
    end = PlanSide(plan, mock.Mock(bases=numbers, extent=8, place=mock.Mock(device=-1)), False)
    with slot.using(turn) as agent:
        address = agent.address("")
    bases = np.append(numbers, np.uint64(ordinal)).astype("<u8").tobytes()
    there = Ready(1, address, bases, bytes(8))
    wrong = ordinal > 63
    with pytest.raises(ProtocolError if wrong else NixlFailed, match=f"GPU {ordinal};" if wrong else "VRAM_SEG 63"):
        slot.move(turn, end, there, lambda _: None)


@pytest.mark.parametrize(
    ("asked", "forced", "ucx", "on_gpu", "reason"),
    [
        (True, True, "tcp,cuda_copy", "mine", ""),
        (True, True, None, "theirs", ""),  # the peer sees to its own
        (False, False, "tcp,cuda_copy", "theirs", "a side has memory of a GPU, for which no one chooses it"),
        (False, True, "tcp,cuda_copy", "mine", "this side does not ask for it"),
        (True, True, None, "mine", "UCX_TLS=: must name cuda_copy and no other"),
        (True, True, "tcp,cuda_copy,cuda_ipc", "mine", "UCX_TLS=tcp,cuda_copy,cuda_ipc: must name cuda_copy and no"),
    ],
)
def test_nixl_moves_memory_of_a_gpu_only_if_asked_to_and_only_by_copies_that_end_with_an_agent(
    monkeypatch: pytest.MonkeyPatch, asked: bool, forced: bool, ucx: str | None, on_gpu: str, reason: str
) -> None:
    monkeypatch.delenv("UCX_TLS") if ucx is None else monkeypatch.setenv("UCX_TLS", ucx)
    transport = object.__new__(NixlTransport)
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


def start(pair: Pair, *memories: str) -> tuple[End, End]:
    """Start and link a prompt and a decoder, with device pools in these kinds of memory."""
    extra, rca = {"llm.Transport": "nixl"}, {"enable_remote_cache_accessible": True}
    at_prompt, at_decoder = ({"llm.DeviceMemory": each} for each in (*memories, "cuda")[:2])
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", extra=extra | at_prompt, **rca)
    pair.decoder.start("DECODER", 2, extra=extra | at_decoder, **rca)
    pair.link()
    return pair.prompt, pair.decoder


@pytest.mark.gpu(True)
@pytest.mark.parametrize("method", ["pull_blocks", "push_blocks"])
@pytest.mark.parametrize("memories", [("cuda", "host"), ("host", "cuda")])
def test_after_a_failure_of_either_sides_gpu_nothing_moves(
    local_pair: Pair, monkeypatch: pytest.MonkeyPatch, memories: tuple[str, str], method: str
) -> None:
    prompt, decoder = start(local_pair, *memories)
    source = prompt.do(make, "source", Spec(blocks=True, blocks_key=BLOCKS), 3)
    target = decoder.do(make, "target", Spec(blocks=True), 4)
    failed = DeviceError("cuda:0 has failed in this process", code=700, phase="copy")
    with monkeypatch.context() as patch:  # a real failure would outlast the test
        for each in (connection, worker):
            patch.setattr(each, "Device", mock.Mock(open=mock.Mock(side_effect=failed)))
        with pytest.raises(LLMException, match="cuda:0 has failed in this process"):
            decoder.do(call, method, BLOCKS, Use("target"), [1], [0])
    for end, name, was in ((prompt, "source", source), (decoder, "target", target)):
        same_bytes(end.do(show, name), was)


@pytest.mark.gpu(True)
@pytest.mark.parametrize("device", ["cuda", "host"])
def test_bytes_move_both_ways_between_a_gpu_and_what_the_peer_has(local_pair: Pair, device: str) -> None:
    prompt, decoder = start(local_pair, device)
    assert decoder.do(explain, 1).transport == "nixl"
    bytes_move_both_ways(prompt, decoder)
    for i, memory in enumerate(("pool", "private")):  # the latter is registered when it is first used
        key = BlocksCacheKey(1, i)
        source = prompt.do(make, "source", Spec(blocks=True, blocks_key=key, memory=memory), 3)
        target = decoder.do(make, "target", Spec(blocks=True, memory=memory), 4)
        decoder.do(call, "push_blocks", key, Use("target"), [1, 6], [0, 3])
        same_bytes(prompt.do(show, "source"), moved(source, target, [(0, 1), (3, 6)]))
        same_bytes(decoder.do(show, "target"), target)
    kinds = {kind for agent in AGENTS.values() for kind in agent.registered}
    assert kinds == {("VRAM_SEG", 0), ("DRAM_SEG", 0)}  # of the decoder's pools, one is the host's
