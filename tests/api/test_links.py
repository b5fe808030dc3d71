"""link_clusters: its codes, its rules, and links that work both ways (interface §3.4, B2.1)."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist.errors import ParamError
from tests.support.linking import (
    OK,
    SUCCESS,
    alone,
    bytes_move_both_ways,
    explain,
    free_port,
    info,
    link,
    link_when,
    links,
    start_both,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, picture, refused, same_bytes, show
from tests.support.strangers import silent_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers(
    "LLMConfig: local_comm_res transfer_backend",
    "LLMDataDist: cluster_id explain link_clusters",
    "LLMStatusCode: LLM_ALREADY_LINK LLM_LINK_FAILED",
    "llm: LocalCommRes TransferBackend",
)

Code = LLMStatusCode
ALREADY, FAILED, TIMEOUT, INVALID = (
    Code.LLM_ALREADY_LINK,
    Code.LLM_LINK_FAILED,
    Code.LLM_TIMEOUT,
    Code.LLM_PARAM_INVALID,
)
BOTH_READY = [{2: "ready"}, {1: "ready"}]
REASONS = {
    "inproc": "the peer is in this process",
    "shm": "is on this host, 2 regions mapped",
    "tcp": "data lanes, as llm.Transport asks",
}


# --- a link -----------------------------------------------------------------------------------------------------------


def test_r28_i01_one_call_makes_one_link_that_both_ends_can_use_and_a_second_changes_nothing(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    ends = (pair.prompt, pair.decoder)
    before = [end.do(picture) for end in ends]
    assert pair.decoder.do(link, [info(3, pair.prompt.port)]) == (FAILED, [FAILED]), "it announces another id"
    assert [end.do(picture) for end in ends] == before
    assert pair.decoder.do(link, [info(None, pair.prompt.port)]) == SUCCESS, "an id that is not set is learned"
    bytes_move_both_ways(*ends)
    for end, peer in zip(ends, (2, 1), strict=True):
        there = end.do(explain, peer)
        assert (there.remote_cluster_id, there.state, there.transport) == (peer, "ready", pair.transport)
        assert REASONS[pair.transport] in there.reason
    before = [end.do(picture) for end in ends]
    for here, there, peer in ((pair.decoder, pair.prompt, 1), (pair.prompt, pair.decoder, 2)):
        for wanted in (peer, None):
            assert here.do(link, [info(wanted, there.port)]) == (ALREADY, [ALREADY])
    assert [end.do(picture) for end in ends] == before
    bytes_move_both_ways(*ends)


def test_a_differing_rca_flag_is_param_invalid_and_leaves_nothing(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    decoder.start("DECODER", 2, listen_ip_info="127.0.0.1:0")
    before = [end.do(picture) for end in (prompt, decoder)]
    assert decoder.do(link, [info(1, prompt.port)]) == (INVALID, [INVALID])
    assert prompt.do(link, [info(2, decoder.port)]) == (INVALID, [INVALID])
    assert [end.do(picture) for end in (prompt, decoder)] == before


def test_a_link_to_ourselves_works_and_pulling_over_it_is_refused(end: LocalEnd) -> None:
    end.start("MIX", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
    assert end.do(link, [info(1, end.port)]) == SUCCESS
    assert end.do(links) == {1: "ready"}
    source = end.do(make, "kv", Spec(blocks=True, blocks_key=BLOCKS), 1)
    refused([end], ["kv"], ParamError, ["cluster"], call, "pull_blocks", BLOCKS, Use("kv"), [0], [1])
    end.do(call, "push_blocks", BLOCKS, Use("kv"), [0], [1])
    wanted = [tensor.copy() for tensor in source]
    for tensor in wanted:
        tensor[1] = tensor[0]
    same_bytes(end.do(show, "kv"), wanted)
    assert end.do(unlink, [info(1, end.port)]) == SUCCESS
    alone(end)
    assert end.do(link, [info(1, end.port)]) == SUCCESS


def test_transfer_backend_hixl_both_ends_link_and_unlink_for_themselves(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_both(prompt, decoder, "shm", transfer_backend="hixl")
    for codes in (SUCCESS, (ALREADY, [ALREADY])):
        assert decoder.do(link, [info(1, prompt.port)]) == codes
        assert prompt.do(link, [info(2, decoder.port)]) == codes
    bytes_move_both_ways(prompt, decoder)
    # The id alone is enough, forced or not.
    assert decoder.do(unlink, [info(1)]) == SUCCESS
    assert prompt.do(unlink, [info(2)]) == SUCCESS
    alone(prompt, decoder)


# --- several clusters in one call -------------------------------------------------------------------------------------


def test_several_clusters_partial_success_and_the_last_failure_overall(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    decoder = shm_pair.decoder
    with silent_port() as silent:
        good, refused_, mute = info(1, shm_pair.prompt.port), info(8, free_port()), info(9, silent)
        # A cluster twice in one call makes one link.
        overall, codes = decoder.do(link, [refused_, good, good, mute], 1500)
        assert (overall, codes[0], sorted(codes[1:3]), codes[3]) == (TIMEOUT, FAILED, [OK, ALREADY], TIMEOUT)
        assert decoder.do(links) == {1: "ready"}
        assert decoder.do(link, [mute, refused_, good], 500) == (ALREADY, [TIMEOUT, FAILED, ALREADY])
        odd = [info(10), refused_, info(7, silent, silent)]
        assert decoder.do(link, odd, 500) == (INVALID, [INVALID, FAILED, INVALID])
    bytes_move_both_ways(shm_pair.prompt, decoder)


def test_a_local_ip_is_needed_unless_local_comm_res_is_given_and_not_empty(local_pair: Pair) -> None:
    prompt, decoder = local_pair.prompt, local_pair.decoder
    prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", local_comm_res="")
    for settings in ({}, {"local_comm_res": ""}):
        decoder.start("DECODER", 2, **settings)
        clusters = [info(7, prompt.port), info(1, prompt.port, local=None)]
        refused([decoder], [], ParamError, ["clusters[1]", "local_ip_info_list is empty"], link, clusters)
        decoder.stop()
    decoder.start("DECODER", 2, local_comm_res='{"version": "1.2"}')
    assert decoder.do(link, [info(1, prompt.port, local=None)]) == SUCCESS
    bytes_move_both_ways(prompt, decoder)


# --- both ends dial at once -------------------------------------------------------------------------------------------


def both_dial(pair: Pair, start: Path, wanted: bool, threads: int) -> list[list[LLMStatusCode]]:
    """Let both ends link to each other at the same moment; return what each was told."""
    ends = (pair.prompt, pair.decoder)
    outcome: list[list[LLMStatusCode]] = [[], []]

    def dial(number: int) -> None:
        peer = ends[1 - number]
        cluster = info(peer.cluster_id if wanted else None, peer.port)
        outcome[number] = ends[number].do(link_when, start, cluster, threads)

    dialers = [threading.Thread(target=dial, args=(number,)) for number in (0, 1)]
    for dialer in dialers:
        dialer.start()
    start.touch()
    for dialer in dialers:
        dialer.join()
    return outcome


@pytest.mark.parametrize(
    ("pair", "backend", "wanted", "threads"),
    [
        ("inproc", None, True, 1),
        ("inproc", "hixl", False, 1),
        ("shm", None, True, 4),
        ("shm", None, False, 1),
        ("shm", "hixl", True, 1),
        ("tcp", None, True, 1),
        ("tcp", None, True, 4),
        ("tcp", "hixl", False, 1),
    ],
    indirect=["pair"],
)
def test_both_ends_dial_at_once_many_times_and_end_with_one_link(
    pair: Pair, tmp_path: Path, backend: str | None, wanted: bool, threads: int
) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport, **({"transfer_backend": backend} if backend else {}))
    for number in range(10 if threads == 1 else 4):
        told = both_dial(pair, tmp_path / f"go {number}", wanted, threads)
        # One call may be over before the other begins: then the link is there already, unless both ends are to link.
        assert set(told[0] + told[1]) <= ({OK} if backend else {OK, ALREADY})
        assert OK in told[0] + told[1]
        assert [end.do(links) for end in (pair.prompt, pair.decoder)] == BOTH_READY
        if number % 5 == 0 or threads > 1:
            bytes_move_both_ways(pair.prompt, pair.decoder)
        unlinker, peer = (pair.prompt, pair.decoder) if number % 2 else (pair.decoder, pair.prompt)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
        alone(pair.prompt, pair.decoder)
