"""vllm-ascend, v1 engine: links on demand, polled without a bound; MHA, MLA and sparse caches."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.clients.ascend_v1 import LAYOUTS, Agent, begin, begin_read, drive
from tests.clients.kv import shown
from tests.support.linking import begin_there, links, result_there
from tests.support.moves import wait_until
from tests.support.ranks import host

if TYPE_CHECKING:
    from tests.clients.conftest import Processes
    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.covers("vllm-ascend, v1 engine")

REMOTE, LOCAL = [3, 4, 5, 9, 23], [0, 1, 17, 8, 2]


def agent(number: int, *, server: int = 0, pod: str | None = None) -> Agent:
    """Worker ``number``: its device has an ip that no host has, which does not matter, because its server has one."""
    return Agent(number, host(server), f"192.0.{os.getpid() % 250}.{number}", pod)


def pulled(decode: ChildEnd, prefill: ChildEnd, other: Agent, layout: str, remote: list[int], local: list[int]) -> None:
    """Link, pull, compare every byte; the last remote blocks are meant where there are fewer local ones."""
    names = [f"kv {model}" for model in range(len(LAYOUTS[layout]))]
    expected = {name: decode.do(shown, name) for name in names}
    decode.do(begin_read, other, remote, local)
    for name, tensors in expected.items():
        sources = prefill.do(shown, name)
        for tensor, source in zip(tensors, sources, strict=True):
            tensor[local] = source[remote[-len(local) :]]
        np.testing.assert_equal(decode.do(shown, name), tensors)


def test_the_first_request_links_both_workers_and_pulls(ends: tuple[ChildEnd, ChildEnd]) -> None:
    prefill, decode = ends
    p, d = agent(1, pod="0"), agent(2, server=1, pod="1")
    for layout in LAYOUTS:
        assert prefill.do(begin, "PROMPT", p, layout, 10, {}) == 33_064
        decode.do(begin, "DECODER", d, layout, 20, {})
        # The decode worker asks the prefill worker over the side channel; its answer comes after its own link.
        prefill.do(begin_there, "link", drive, "add_remote_agent", d)
        pulled(decode, prefill, p, layout, REMOTE, LOCAL)
        assert prefill.do(result_there, "link") == 2
        pulled(decode, prefill, p, layout, REMOTE, LOCAL[:2])
        for end in ends:
            end.do(drive, "close")


def test_two_prefill_workers_serve_slices_to_one_decode_worker(processes: Processes) -> None:
    first, second, decode = (processes.born(name) for name in ("prefill 1", "prefill 2", "decode"))
    p, q, d = agent(1), agent(2), agent(3)
    first.do(begin, "PROMPT", p, "mla", 10, {})
    second.do(begin, "PROMPT", q, "mla", 30, {})
    decode.do(begin, "DECODER", d, "mla", 20, {"ASCEND_TRANSFER_TIMEOUT": "20000"})
    for end in (first, second):
        end.do(begin_there, "link", drive, "add_remote_agent", d)
    pulled(decode, first, p, "mla", REMOTE[:3], LOCAL[:3])
    pulled(decode, second, q, "mla", REMOTE[3:], LOCAL[3:])
    assert [end.do(result_there, "link") for end in (first, second)] == [3, 3]
    assert decode.do(links) == {1: "ready", 2: "ready"}
    for end in (decode, first, second):
        end.do(drive, "close")


def test_the_loop_without_a_bound_ends_because_preparing_becomes_failed(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """The other side never joins (an issue of that client): the environment bounds the time, as the client does not."""
    _, decode = ends
    decode.do(begin, "DECODER", agent(2), "mla", 20, {"HCCL_CONNECT_TIMEOUT": "2"})
    with pytest.raises(RuntimeError, match="link to 1 failed"):
        decode.do(drive, "add_remote_agent", agent(1))
    decode.do(drive, "close")


def test_loopback_addresses_and_a_link_made_late_work(ends: tuple[ChildEnd, ChildEnd]) -> None:
    """Two more of its issues. Here the prefill worker comes seconds after the decode worker began to poll."""
    prefill, decode = ends
    p, d = agent(1), agent(2)
    assert p.server_id.startswith("127.")
    decode.do(begin, "DECODER", d, "mha", 20, {})
    decode.do(begin_there, "link", drive, "add_remote_agent", p)
    prefill.do(begin, "PROMPT", p, "mha", 10, {})
    prefill.do(drive, "add_remote_agent", d)
    assert decode.do(result_there, "link") == 1
    pulled(decode, prefill, p, "mha", REMOTE, LOCAL)
    prefill.do(drive, "remove_remote_agent", 2)
    wait_until(lambda: decode.do(links) == {})
    with pytest.raises(RuntimeError, match="cluster 1 is not linked"):
        decode.do(drive, "read_blocks", 1, REMOTE, LOCAL)
    for end in ends:
        end.do(drive, "close")
