"""SetRole of the C++-shaped interface (interface §9, §3.6): the guard, the listener, caches that survive, unchanged
state."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.cpp_api import (
    OPTION_DEVICE_ID,
    OPTION_LISTEN_IP_INFO,
    CacheIndex,
    ClusterInfo,
    LlmRole,
    LLMStatusCode,
)
from tests.support.cpp import BAD, OK, Shape, cluster, dist, link, made, run, show, start_pair, unchanged
from tests.support.linking import alone
from tests.support.moves import Use, moved, same_bytes

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.world import World

pytestmark = pytest.mark.covers("cpp_api.LlmDataDist: SetRole UnlinkLlmClusters")

#: A whole set of options, as those given to Initialize; the listener is what counts.
LISTEN = {OPTION_DEVICE_ID: "0", OPTION_LISTEN_IP_INFO: "127.0.0.1:0"}


def port_of(world: World) -> int | None:
    return world.dd.listen_port


def role_of(world: World) -> str:
    return dist(world).datadist._role.name


def test_roles_change_between_two_links_and_caches_stay(pair: Pair) -> None:
    port = start_pair(pair)
    mine, theirs = pair.decoder.do(made, "kv", Shape(), 1), pair.prompt.do(made, "kv", Shape(), 2)
    assert pair.decoder.do(run, "PullKvBlocks", CacheIndex(1, 1), Use("kv"), [1], [2]) is OK
    mine = moved(mine, theirs, [(2, 1)])
    assert pair.decoder.do(run, "UnlinkLlmClusters", [cluster(1, port)], 10_000) == (OK, [OK])
    alone(pair.decoder, pair.prompt)

    assert pair.prompt.do(run, "SetRole", LlmRole.kDecoder) is OK
    assert pair.decoder.do(run, "SetRole", LlmRole.kPrompt, LISTEN) is OK
    assert (pair.prompt.do(role_of), pair.decoder.do(role_of)) == ("DECODER", "PROMPT")
    assert pair.prompt.do(port_of) is None
    new_port = pair.decoder.do(port_of)
    assert new_port is not None
    info = cluster(2, new_port)
    info.local_ip_infos.extend(info.remote_ip_infos)
    assert pair.prompt.do(run, "LinkLlmClusters", [info], 10_000) == (OK, [OK])
    assert pair.decoder.do(run, "PushKvBlocks", Use("kv"), CacheIndex(1, 1), [2, 5], [0, 7]) is OK
    same_bytes(pair.prompt.do(show, "kv"), moved(theirs, mine, [(0, 2), (7, 5)]))
    same_bytes(pair.decoder.do(show, "kv"), mine)


def test_a_link_whoever_made_it_keeps_the_role(shm_pair: Pair) -> None:
    port = start_pair(shm_pair)
    ends = (shm_pair.prompt, shm_pair.decoder)
    exists = LLMStatusCode.LLM_EXIST_LINK
    unchanged(ends, [], exists, (), "SetRole", LlmRole.kDecoder)
    unchanged(ends[::-1], [], exists, (), "SetRole", LlmRole.kPrompt, LISTEN)
    assert (shm_pair.prompt.do(port_of), shm_pair.prompt.do(role_of)) == (port, "PROMPT")
    for end, other in ((shm_pair.prompt, 2), (shm_pair.decoder, 1)):
        assert end.do(run, "UnlinkLlmClusters", [ClusterInfo(other)], 10_000, True) == (OK, [OK])
    alone(*ends)
    assert shm_pair.prompt.do(run, "SetRole", LlmRole.kPrompt, {}) is OK  # the same role is one, too
    assert shm_pair.prompt.do(port_of) is None


def test_the_listener_is_left_alone_where_the_address_stays(shm_pair: Pair) -> None:
    port = start_pair(shm_pair, linked=False)
    same = {OPTION_LISTEN_IP_INFO: f"127.0.0.1:{port}"}
    assert shm_pair.prompt.do(run, "SetRole", LlmRole.kMix, same) is OK
    assert shm_pair.prompt.do(port_of) == port
    link(shm_pair.decoder, 1, port)


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ((LlmRole.kEnd,), ("role", "kEnd")),
        ((LlmRole.kMix, {OPTION_LISTEN_IP_INFO: "127.0.0.1"}), ("127.0.0.1", "ip:port")),
        ((LlmRole.kMix, {OPTION_LISTEN_IP_INFO: "127.0.0.1:65536"}), ("65536",)),
    ],
)
def test_set_role_refuses(local_pair: Pair, args: tuple[Any, ...], parts: tuple[str, ...]) -> None:
    port = start_pair(local_pair, linked=False)
    unchanged([local_pair.prompt], [], BAD, parts, "SetRole", *args)
    assert (local_pair.prompt.do(port_of), local_pair.prompt.do(role_of)) == (port, "PROMPT")


def test_r01_a_wrong_type_is_a_type_error(local_pair: Pair) -> None:
    start_pair(local_pair, linked=False)
    wrong: list[Any] = [(None,), (1,), ("kMix",), (LlmRole.kMix, None), (LlmRole.kMix, "x"), (LlmRole.kMix, {1: "x"})]
    for args in [*wrong, (LlmRole.kMix, {OPTION_LISTEN_IP_INFO: 1})]:
        with pytest.raises(TypeError):
            local_pair.prompt.do(run, "SetRole", *args)
    assert local_pair.prompt.do(role_of) == "PROMPT"
