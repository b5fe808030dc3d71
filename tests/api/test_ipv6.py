"""IPv6 addresses in listen_ip_info, in cluster infos, and under data lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMClusterInfo, cpp_api
from llm_datadist.config import parse_listen_ip_info
from llm_datadist.cpp_api import arguments as cpp_arguments
from llm_datadist.errors import ParamError
from tests.support import ranks
from tests.support.linking import SUCCESS, bytes_move_both_ways, has_ipv6, link, links
from tests.support.moves import BLOCKS, Spec, Use, call, make, same_bytes, show
from tests.support.ranks import Meeting

if TYPE_CHECKING:
    from tests.support.pairs import Pair
    from tests.support.world import World


def explain(world: World, cluster_id: int) -> tuple[str, str | None]:
    found = world.dd.explain(cluster_id)
    return found.transport, found.private_transport


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
@pytest.mark.parametrize("dialled", ["::1", "[::1]"])
@pytest.mark.parametrize("transport", ["inproc", "shm", "auto", "tcp"])
def test_two_ends_link_and_move_bytes_over_ipv6(request: pytest.FixtureRequest, transport: str, dialled: str) -> None:
    pair: Pair = request.getfixturevalue("local_pair" if transport == "inproc" else "shm_pair")
    extra = {"llm.Transport": transport}
    pair.prompt.start("PROMPT", 1, listen_ip_info="[::1]:0", extra=extra)
    pair.decoder.start("DECODER", 2, extra=extra)
    assert pair.prompt.port is not None
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("::1", 0)
    peer.append_remote_ip_info(dialled, pair.prompt.port)
    assert peer.remote_ip_info_list == [("::1", pair.prompt.port)]
    assert f"[::1]:{pair.prompt.port}" in repr(peer)
    assert pair.decoder.do(link, [peer]) == SUCCESS
    assert pair.decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(pair.prompt, pair.decoder)
    if transport == "auto":  # shm for pools, cma beside it for memory of the process's own
        assert pair.decoder.do(explain, 1) == ("shm", "cma")
        theirs = pair.prompt.do(make, "private", Spec(blocks=True, blocks_key=BLOCKS, memory="private"), 1)
        pair.decoder.do(make, "mine", Spec(blocks=True), 2)
        pair.decoder.do(call, "pull_blocks", BLOCKS, Use("mine"), list(range(8)), list(range(8)))
        same_bytes(pair.decoder.do(show, "mine"), theirs)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_members_of_a_rank_table_meet_over_ipv6_also_where_its_address_is_not_of_this_host(local_pair: Pair) -> None:
    ends = ranks.start_two(local_pair)
    for listens in ("::1", "fd00::1:2:3"):
        meeting = Meeting((1, 2), table=ranks.table(listens, "::1"))
        if listens == "::1":
            ids = meeting.join(*ends)
            assert ranks.settle(ends, ids) == [ranks.OK] * 2
            bytes_move_both_ways(*ends)
        else:
            ids = meeting.join(ends[0])  # listens at all addresses: it does not know how others reach it
        for end, comm_id in zip(ends, ids, strict=False):
            end.do(ranks.drop, comm_id)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
def test_the_cpp_shaped_interface_and_cluster_info_take_ipv6_addresses(local_pair: Pair) -> None:
    local_pair.prompt.start("PROMPT", 1, listen_ip_info="[::1]:0")
    local_pair.decoder.start("DECODER", 2, cluster_info='{"listen_ip_info": [{"ip": "::1", "port": 1}]}')
    there = cpp_api.IpInfo("::1", local_pair.prompt.port or 0)
    (cluster,) = cpp_arguments.cluster_infos([cpp_api.ClusterInfo(1, 0, [cpp_api.IpInfo("[::1]")], [there])])
    assert local_pair.decoder.do(link, [cluster]) == SUCCESS
    bytes_move_both_ways(local_pair.prompt, local_pair.decoder)


def test_an_ipv6_address_to_listen_at_stands_in_brackets() -> None:
    assert parse_listen_ip_info("[fe80::1]:26051") == ("fe80::1", 26051)
    for text in ("::1:26051", "[::1]", "[::1]26051", "[1.2.3.4]:26051", "[::g]:26051", "[]:26051", "[::1]:65536"):
        with pytest.raises(ParamError, match="listen_ip_info"):
            parse_listen_ip_info(text)
