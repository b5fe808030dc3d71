"""link_clusters: its codes, its rules, and links that work both ways (interface §3.4, B2.1)."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist.errors import NoneArgument, ParamError
from tests.support.ends import ChildEnd
from tests.support.linking import (
    OK,
    SUCCESS,
    alone,
    bytes_move_both_ways,
    info,
    link,
    link_when,
    links,
    start_both,
    unlink,
)
from tests.support.moves import BLOCKS, Spec, Use, call, make, picture, refused, same_bytes, show
from tests.support.strangers import listener, silent_port

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

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


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def explain(world: World, cluster_id: int) -> Any:
    return world.dd.explain(cluster_id)


# --- a link -----------------------------------------------------------------------------------------------------------


REASONS = {
    "inproc": "the peer is in this process",
    "shm": "is on this host, 2 regions mapped",
    "tcp": "data lanes, as llm.Transport asks",
}


def test_a_link_is_usable_both_ways_after_one_call(pair: Pair) -> None:
    pair.start()
    bytes_move_both_ways(pair.prompt, pair.decoder)
    for end, peer in ((pair.prompt, 2), (pair.decoder, 1)):
        there = end.do(explain, peer)
        assert (there.remote_cluster_id, there.state, there.transport) == (peer, "ready", pair.transport)
        reason = REASONS[pair.transport]
        assert reason in there.reason


def test_linking_again_from_either_side_is_already_link_and_changes_nothing(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    for wanted in (1, None):
        assert pair.decoder.do(link, [info(wanted, pair.prompt.port)]) == (ALREADY, [ALREADY])
    for wanted in (2, None):
        assert pair.prompt.do(link, [info(wanted, pair.decoder.port)]) == (ALREADY, [ALREADY])
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_r28_an_unset_cluster_id_is_learned(pair: Pair) -> None:
    pair.start(linked=False)
    assert pair.decoder.do(link, [info(None, pair.prompt.port)]) == SUCCESS
    assert pair.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_r28_another_cluster_id_than_the_announced_one_is_link_failed(pair: Pair) -> None:
    pair.start(linked=False)
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    assert pair.decoder.do(link, [info(3, pair.prompt.port)]) == (FAILED, [FAILED])
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before
    pair.link()


@pytest.mark.parametrize("at_the_listener", [False, True])
def test_a_differing_rca_flag_is_param_invalid_and_leaves_nothing(pair: Pair, at_the_listener: bool) -> None:
    extra = {"llm.Transport": pair.transport}
    for end, role, cluster_id, rca in (
        (pair.prompt, "PROMPT", 1, at_the_listener),
        (pair.decoder, "DECODER", 2, not at_the_listener),
    ):
        end.start(role, cluster_id, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=rca, extra=extra)
    before = [end.do(picture) for end in (pair.prompt, pair.decoder)]
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (INVALID, [INVALID])
    assert pair.prompt.do(link, [info(2, pair.decoder.port)]) == (INVALID, [INVALID])
    assert [end.do(picture) for end in (pair.prompt, pair.decoder)] == before


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


# --- several clusters in one call -------------------------------------------------------------------------------------


def test_several_clusters_partial_success_and_the_last_failure_overall(pair: Pair) -> None:
    pair.start(linked=False)
    with silent_port() as silent:
        good, refused_, mute = info(1, pair.prompt.port), info(8, free_port()), info(9, silent)
        no_address = info(10)
        assert pair.decoder.do(link, [refused_, good, mute], 700) == (TIMEOUT, [FAILED, OK, TIMEOUT])
        assert pair.decoder.do(links) == {1: "ready"}
        assert pair.decoder.do(link, [mute, refused_, good], 700) == (ALREADY, [TIMEOUT, FAILED, ALREADY])
        assert pair.decoder.do(link, [no_address, refused_, info(7, silent, silent)], 700) == (
            INVALID,
            [INVALID, FAILED, INVALID],
        )
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_several_clusters_are_linked_in_parallel(end: LocalEnd) -> None:
    count = 8
    together = threading.Barrier(count)

    def hang_up_when_all_are_here(sock: socket.socket) -> None:
        together.wait(15)
        sock.shutdown(socket.SHUT_RDWR)

    end.start("DECODER", 2)
    with listener(hang_up_when_all_are_here) as port:
        codes = end.do(link, [info(cluster_id, port) for cluster_id in range(10, 10 + count)], 15_000)
    assert codes == (FAILED, [FAILED] * count)
    assert not together.broken, "all were connected at the same time"


def test_one_cluster_twice_in_one_call_makes_one_link(pair: Pair) -> None:
    pair.start(linked=False)
    overall, codes = pair.decoder.do(link, [info(1, pair.prompt.port)] * 2)
    assert (overall, sorted(codes)) == (ALREADY, [OK, ALREADY])
    bytes_move_both_ways(pair.prompt, pair.decoder)


# --- arguments --------------------------------------------------------------------------------------------------------


class _NoInfo:
    pass


@pytest.mark.parametrize(
    ("kind", "clusters", "timeout", "parts"),
    [
        (NoneArgument, None, 1, ["clusters"]),
        (TypeError, {1}, 1, ["clusters", "set"]),
        (TypeError, [_NoInfo()], 1, ["clusters[0]", "_NoInfo"]),
        (NoneArgument, [None], 1, ["clusters[0]"]),
        (NoneArgument, [], None, ["timeout"]),
        (TypeError, [], "1", ["timeout", "str"]),
        (TypeError, [], 1.0, ["timeout", "float"]),
        (ParamError, [], 2**31, ["timeout", "2147483648"]),
        (ParamError, [], 0, ["timeout", "0"]),
        (ParamError, [], -1, ["timeout", "-1"]),
    ],
)
@pytest.mark.parametrize("action", [link, unlink])
def test_r01_a_wrong_argument_is_refused_before_anything_happens(
    end: LocalEnd, action: Any, kind: type[Exception], clusters: Any, timeout: Any, parts: list[str]
) -> None:
    end.start("DECODER", 2)
    refused([end], [], kind, parts, action, clusters, timeout)


def test_an_empty_list_is_param_invalid_for_both_calls(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    assert end.do(link, []) == (INVALID, [])
    assert end.do(link, ()) == (INVALID, [])
    assert end.do(unlink, []) == (INVALID, [])


def test_a_local_ip_is_needed_unless_local_comm_res_is_given_and_not_empty(pair: Pair) -> None:
    extra = {"llm.Transport": pair.transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", local_comm_res="", extra=extra)
    for local_comm_res in (None, ""):
        settings = {} if local_comm_res is None else {"local_comm_res": local_comm_res}
        pair.decoder.start("DECODER", 2, extra=extra, **settings)
        parts = ["clusters[1]", "local_ip_info_list is empty"]
        clusters = [info(7, pair.prompt.port), info(1, pair.prompt.port, local=None)]
        refused([pair.decoder], [], ParamError, parts, link, clusters)
        pair.decoder.stop()
    pair.decoder.start("DECODER", 2, extra=extra, local_comm_res='{"version": "1.2"}')
    assert pair.decoder.do(link, [info(1, pair.prompt.port, local=None)]) == SUCCESS
    bytes_move_both_ways(pair.prompt, pair.decoder)


def test_before_init_every_call_is_a_runtime_error_that_says_so() -> None:
    datadist = LLMDataDist(LLMRole.MIX, 1)
    for attempt in (
        lambda: datadist.link_clusters([LLMClusterInfo()]),
        lambda: datadist.unlink_clusters([LLMClusterInfo()]),
        lambda: datadist.explain(1),
        lambda: datadist.listen_port,
    ):
        with pytest.raises(RuntimeError, match="not initialized"):
            attempt()


# --- the hixl backend: both ends link ---------------------------------------------------------------------------------


def test_transfer_backend_hixl_both_ends_link_and_unlink_for_themselves(pair: Pair) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport, transfer_backend="hixl")
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == SUCCESS
    assert pair.prompt.do(link, [info(2, pair.decoder.port)]) == SUCCESS
    assert pair.prompt.do(link, [info(2, pair.decoder.port)]) == (ALREADY, [ALREADY])
    assert pair.decoder.do(link, [info(1, pair.prompt.port)]) == (ALREADY, [ALREADY])
    bytes_move_both_ways(pair.prompt, pair.decoder)
    # The id alone is enough, forced or not.
    assert pair.decoder.do(unlink, [info(1)]) == SUCCESS
    assert pair.prompt.do(unlink, [info(2)]) == SUCCESS
    alone(pair.prompt, pair.decoder)


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


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("backend", [None, "hixl"])
def test_both_ends_dial_at_once_many_times_and_end_with_one_link(
    pair: Pair, tmp_path: Path, wanted: bool, backend: str | None
) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport, **({} if backend is None else {"transfer_backend": backend}))
    for number in range(10):
        told = both_dial(pair, tmp_path / f"go {number}", wanted, 1)
        # One call may be over before the other begins: then the link is there already, unless both ends are to link.
        assert told in ([[[OK], [OK]]] if backend else [[[OK], [OK]], [[OK], [ALREADY]], [[ALREADY], [OK]]])
        assert (pair.prompt.do(links), pair.decoder.do(links)) == ({2: "ready"}, {1: "ready"})
        if number % 5 == 0:
            bytes_move_both_ways(pair.prompt, pair.decoder)
        unlinker, peer = (pair.prompt, pair.decoder) if number % 2 else (pair.decoder, pair.prompt)
        assert unlinker.do(unlink, [info(peer.cluster_id, peer.port)]) == SUCCESS
        alone(pair.prompt, pair.decoder)


def test_many_threads_of_both_ends_dial_at_once_and_one_link_is_made(pair: Pair, tmp_path: Path) -> None:
    start_both(pair.prompt, pair.decoder, pair.transport)
    for number in range(4):
        told = both_dial(pair, tmp_path / f"go {number}", True, 4)
        assert set(told[0] + told[1]) <= {OK, ALREADY}
        assert OK in told[0] + told[1]
        assert (pair.prompt.do(links), pair.decoder.do(links)) == ({2: "ready"}, {1: "ready"})
        bytes_move_both_ways(pair.prompt, pair.decoder)
        assert pair.prompt.do(unlink, [info(2, pair.decoder.port)]) == SUCCESS
        alone(pair.prompt, pair.decoder)


# --- one cluster id, two processes ------------------------------------------------------------------------------------


def test_rule_8_a_second_process_under_a_linked_cluster_id_is_refused(shm_pair: Pair) -> None:
    shm_pair.start()
    before = shm_pair.prompt.do(picture)
    other = ChildEnd("other")
    other.start("DECODER", 2)
    assert other.do(link, [info(1, shm_pair.prompt.port)]) == (ALREADY, [ALREADY])
    assert shm_pair.prompt.do(picture) == before
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    other.close()
