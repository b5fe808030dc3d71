"""IPv6 addresses in listen_ip_info, in cluster infos, and under data lanes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMClusterInfo
from llm_datadist.config import parse_listen_ip_info
from llm_datadist.errors import ParamError
from tests.support.linking import SUCCESS, bytes_move_both_ways, has_ipv6, link, links
from tests.support.moves import BLOCKS, Spec, Use, call, make, same_bytes, show

if TYPE_CHECKING:
    from tests.conftest import Pair
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


def test_an_ipv6_address_to_listen_at_stands_in_brackets() -> None:
    assert parse_listen_ip_info("[fe80::1]:26051") == ("fe80::1", 26051)
    for text in ("::1:26051", "[::1]", "[::1]26051", "[1.2.3.4]:26051", "[::g]:26051", "[]:26051", "[::1]:65536"):
        with pytest.raises(ParamError, match="listen_ip_info"):
            parse_listen_ip_info(text)
