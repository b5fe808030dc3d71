"""Limits and peers as sides: all bytes of two passes verified, or a reason given before anything starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest

from llm_datadist.bench import SideFailed, sides
from llm_datadist.bench.processes import RunningSide
from llm_datadist.bench.sides import LIMITS, PEERS, find, why_not, why_not_importable
from llm_datadist.bench.sides.base import Role
from llm_datadist.bench.sides.limits import TcpRaw, streaming_bits, useful_threads
from llm_datadist.bench.workload import Memory, Op, Workload

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist.bench.sides.base import Side

_TIMEOUT_S: Final = 60.0
_BETWEEN: Final = {Op.PULL, Op.PUSH, Op.LATENCY}
_INSIDE: Final = {Op.COPY, Op.SWAP}

#: What each side is for; everything else it must refuse.
OPS: Final = {
    "memcpy": _BETWEEN | _INSIDE,
    "memcpy-nt": _BETWEEN | _INSIDE,
    "cma": _BETWEEN,
    "tcp-raw": {Op.PULL, Op.PUSH},
    "nixl": _BETWEEN,
    "nixl-prepared": _BETWEEN,
    "nixl-tcp": _BETWEEN,
    "nixl-tcp-prepared": _BETWEEN,
    "mooncake": _BETWEEN,
    "torch": _INSIDE,
}
#: What must be importable for it.
MODULES: Final = {"mooncake": "mooncake.engine", "torch": "torch"} | dict.fromkeys(
    [name for name in PEERS if name.startswith("nixl")], "nixl"
)


def work(op: Op, block_bytes: int = 5000, memory: Memory = Memory.POOL) -> Workload:
    return Workload(op=op, block_bytes=block_bytes, blocks=70, tensors=3, memory=memory, threads=2)


def expects_reason(side: str) -> bool:
    if side in MODULES:
        command = [sys.executable, "-c", f"import {MODULES[side]}"]
        return subprocess.run(command, capture_output=True, check=False).returncode != 0
    return side == "memcpy-nt" and not streaming_bits()


def passes(side: str, workload: Workload) -> None:
    """Two passes with bytes of their own, so that those of the first do not do for the second."""
    with RunningSide(side, _TIMEOUT_S) as running:
        running.start(workload)
        for seed in (1, 2):
            running.prepare(seed)
            running.run(*(("sample", workload.blocks) if workload.op is Op.LATENCY else ("timed", 2)))
            running.verify(seed)


@pytest.mark.parametrize("side", OPS)
def test_moves_the_right_bytes_or_says_why_not_and_refuses_other_ops(side: str) -> None:
    assert set(OPS) == {*LIMITS, *PEERS}
    absent = expects_reason(side)
    for op in Op:
        reason = why_not(side, work(op))
        assert (reason is not None) == (absent or op not in OPS[side]), reason
        if reason is None:
            passes(side, work(op))
        else:
            assert absent or op in reason


@pytest.mark.parametrize("side", ["memcpy", "cma", "tcp-raw"])
def test_blocks_of_any_size_in_either_memory(side: str) -> None:
    """Not a multiple of anything; more than one write of 1 MiB."""
    passes(side, work(Op.PULL, 1, Memory.REGISTERED))
    passes(side, work(Op.PULL, 33_333))


def test_a_stream_that_writes_beyond_its_rows_is_found() -> None:
    alone = TcpRaw(Role.SOURCE, work(Op.PULL))
    alone.start()
    alone.stop()  # also where no destination has come
    side = TcpRaw(Role.DESTINATION, work(Op.PULL))
    side.start()
    side.poison()
    rows = side.workload.blocks
    source = TcpRaw(Role.SOURCE, side.workload)
    source.own([np.empty_like(each) for each in side.destination_views])
    source.fill(3)
    for view, wanted in zip(side.destination_views, source.source_views, strict=True):
        view[:rows] = wanted[:rows]
    assert side.verify(3)
    last = side.destination_views[-1]
    for row, text in ((rows, "behind the first"), (2 * rows - 1, "behind the first"), (rows - 1, "among the first")):
        kept, last[row, -1] = last[row, -1], last[row, -1] ^ 1
        with pytest.raises(Exception, match=text):
            side.verify(3)
        last[row, -1] = kept


def test_a_lost_source_is_told() -> None:
    workload = work(Op.PULL)
    with RunningSide("tcp-raw", _TIMEOUT_S) as running:
        running.start(workload)
        running.prepare(1)
        running.run("timed", 1)
        source, destination = running._processes
        os.kill(source.pid, signal.SIGKILL)
        with pytest.raises(SideFailed, match=r"tcp-raw \(destination\): timed: (ConnectionReset|BrokenPipe)Error"):
            running._ask(destination, "timed", count=1)


def test_threads_only_where_they_pay() -> None:
    def threads(nbytes: int) -> int:
        return useful_threads(Workload(op=Op.PULL, block_bytes=nbytes, blocks=1, threads=4))

    assert [threads(each << 20) for each in (1, 2, 3, 4, 500)] == [1, 2, 3, 4, 4]
    assert threads(4096) == 1


@pytest.mark.parametrize("side", OPS)
def test_the_footprint_is_what_it_holds(side: str) -> None:
    workload = work(Op.COPY if Op.COPY in OPS[side] else Op.PULL)
    cls: type[Side] = find(side)
    one = workload.tensor_bytes * workload.tensors
    gathered = workload.blocks * workload.block_bytes if side == "torch" else 0
    assert cls.footprint(workload) == one * (1 if workload.op is Op.COPY else 2) + gathered


def test_why_a_peer_or_its_module_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not_importable("json", "json") is None
    assert why_not_importable("no_such_module_here", "some==1") == "not installed (pip install some==1)"
    (tmp_path / "broken_peer_module.py").write_text("raise ImportError('libsomething.so.1: cannot open')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert "libsomething.so.1: cannot open" in (why_not_importable("broken_peer_module", "x") or "")
    # An installed package has no benchmarks/peers.
    monkeypatch.setattr(sides, "_CHECKOUT", tmp_path)
    monkeypatch.delitem(sys.modules, "benchmarks.peers.torch", raising=False)
    assert (why_not("torch", work(Op.COPY)) or "").startswith("not in this installation")
