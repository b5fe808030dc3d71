"""switch_role in v1 mode, where the role says who may do what; link(), which that mode does not have
(interface §3.6)."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, LLMRole, LLMStatusCode
from llm_datadist.errors import LinkError, LLMException, ParamError, StateError
from tests.support.linking import SUCCESS, alone, info, link, unlink
from tests.support.moves import Use, moved, picture, refused, same_bytes, show, wait_until
from tests.support.ranks import drop, host, join, status, table
from tests.support.v1 import DIRECT, desc, kv_call, kv_make, start_end, start_v1

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd
    from tests.support.world import World

LISTEN = "llm.listenIpInfo"
LISTENING = {LISTEN: "127.0.0.1:0"}


def switch(world: World, role: str, options: dict[str, Any] | None = None) -> int | None:
    world.dd.switch_role(LLMRole[role], options)
    return world.dd.listen_port


def test_prompt_and_decoder_change_places_and_caches_ids_and_keys_stay(pair: Pair) -> None:
    start_v1(pair, enable_switch_role=True)
    source = pair.prompt.do(kv_make, "kv", desc(rows=2), 1, (CacheKey(1, 7),))
    target = pair.decoder.do(kv_make, "kv", desc(rows=2), 2)
    pair.decoder.do(kv_call, "pull_cache", CacheKey(1, 7), Use("kv"), 1)
    target = moved(target, source, [(1, 0)])
    same_bytes(pair.decoder.do(show, "kv"), target)
    wait_until(lambda: pair.prompt.do(picture).pins == 0)  # the release is on its way
    for end in (pair.prompt, pair.decoder):
        exist = LLMStatusCode.LLM_EXIST_LINK
        role = "DECODER" if end is pair.prompt else "PROMPT"
        refused([end], [], StateError, ["unlinked first"], switch, role, LISTENING, status=exist)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(pair.prompt, pair.decoder)

    assert pair.prompt.do(switch, "DECODER") is None
    port = pair.decoder.do(switch, "PROMPT", LISTENING)
    late = pair.decoder.do(kv_make, "late", desc(rows=1), 3, (CacheKey(2, 9),))
    assert pair.prompt.do(link, [info(2, port)]) == SUCCESS
    pair.prompt.do(kv_call, "pull_cache", CacheKey(2, 9), Use("kv"), 0)
    same_bytes(pair.prompt.do(show, "kv"), moved(source, late, [(0, 0)]))
    with pytest.raises(LLMException):
        pair.decoder.do(kv_call, "pull_cache", CacheKey(1, 7), Use("kv"), 1)


@pytest.mark.parametrize(
    ("allowed", "role", "options", "kind", "code", "part"),
    [
        (False, "DECODER", None, LLMException, LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "EnableSwitchRole"),
        (False, "PROMPT", None, LLMException, LLMStatusCode.LLM_FEATURE_NOT_ENABLED, "EnableSwitchRole"),
        (True, "PROMPT", LISTENING, ParamError, LLMStatusCode.LLM_PARAM_INVALID, "PROMPT already"),
        (True, "DECODER", {LISTEN: "1.2.3.4:1;1.2.3.5:1"}, LLMException, LLMStatusCode.LLM_FEATURE_NOT_ENABLED, ";"),
        (True, "DECODER", {LISTEN: "1.2.3.4"}, ParamError, LLMStatusCode.LLM_PARAM_INVALID, "ip:port"),
    ],
)
def test_the_rules_of_v1_leave_role_and_listener_as_they_are(
    end: LocalEnd,
    allowed: bool,
    role: str,
    options: dict[str, Any] | None,
    kind: type[Exception],
    code: LLMStatusCode,
    part: str,
) -> None:
    start_end(end, "PROMPT", 1, **DIRECT, listen_ip_info="127.0.0.1:0", enable_switch_role=allowed)
    refused([end], [], kind, [part], switch, role, options, status=code)
    assert end.world.dd.listen_port == end.port
    assert "PROMPT" in repr(end.world.dd)


def test_a_prompt_needs_an_address_that_can_be_bound(end: LocalEnd) -> None:
    start_end(end, "DECODER", 1, **DIRECT, enable_switch_role=True)
    refused([end], [], ParamError, [LISTEN, "PROMPT"], switch, "PROMPT")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        options = {LISTEN: f"127.0.0.1:{busy.getsockname()[1]}"}
        refused([end], [], LinkError, ["cannot listen"], switch, "PROMPT", options, status=LLMStatusCode.LLM_FAILED)
    assert end.do(switch, "PROMPT", LISTENING)
    assert end.do(switch, "MIX") is None


def test_link_by_rank_table_is_not_for_v1_mode(end: LocalEnd) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    arguments = ("name", {1: 0, 2: 1}, table(host(0), host(0)))
    refused([end], [], StateError, ["v1 mode", "link_clusters"], join, *arguments)
    for function in (drop, status):
        refused([end], [], StateError, ["v1 mode"], function, 1)
