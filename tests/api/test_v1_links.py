"""v1: link_clusters of all or none, unlink_clusters, check_link_status, the rules of switch_role (interface §3.6, §3.7,
§8, B2.4)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import CacheKey, LLMException, LLMRole, LLMStatusCode
from llm_datadist.errors import (
    DeadlineExceeded,
    LinkError,
    NoneArgument,
    NotInitialized,
    NotLinked,
    ParamError,
    StateError,
)
from tests.faults.gates import Gate
from tests.support.ends import LocalEnd
from tests.support.frozen import frozen
from tests.support.linking import SUCCESS, alone, begin_there, info, link, links, result_there, unlink
from tests.support.moves import Use, moved, picture, refused, same_bytes, show, wait_until
from tests.support.ranks import drop, host, join, status, table
from tests.support.strangers import silent_port
from tests.support.v1 import DIRECT, desc, gated_call_v1, kv_call, kv_make, start_end, start_v1

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.conftest import Pair
    from tests.support.ends import End
    from tests.support.world import World

pytestmark = pytest.mark.covers("LLMDataDist: check_link_status link_clusters")

OK = LLMStatusCode.LLM_SUCCESS
INVALID, REPEAT = LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_REPEAT_REQUEST
FAILED, ALREADY = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_ALREADY_LINK
NOT_YET, BUSY = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_LINK_BUSY
WAITED = LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT
LISTENING = {"llm.listenIpInfo": "127.0.0.1:0"}


def probe(world: World, cluster_id: int) -> None:
    world.dd.check_link_status(cluster_id)


@pytest.fixture
def prompts() -> Iterator[list[LocalEnd]]:
    """Three PROMPTs in this process, clusters 11, 12 and 13."""
    ends = [LocalEnd(f"prompt {number}") for number in (11, 12, 13)]
    for number, end in zip((11, 12, 13), ends, strict=True):
        start_end(end, "PROMPT", number, **DIRECT)
    yield ends
    for end in ends:
        end.stop()


def test_r19_all_clusters_of_a_call_are_linked_or_none_and_what_was_there_before_stays(
    end: LocalEnd, prompts: list[LocalEnd]
) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    clusters = [info(each.cluster_id, each.port) for each in prompts]
    assert end.do(link, clusters) == (OK, [OK] * 3)
    for each in prompts:
        end.do(probe, each.cluster_id)
    assert end.do(link, clusters[:1]) == (FAILED, [ALREADY])
    assert sorted(end.do(links)) == [11, 12, 13]
    assert end.do(unlink, clusters[:2]) == (OK, [OK] * 2)
    alone(*prompts[:2])
    wrong = info(99, prompts[1].port)
    learned = info(None, prompts[0].port)  # its id is learned, and it is given up all the same
    assert end.do(link, [learned, wrong]) == (FAILED, [FAILED, FAILED])
    with silent_port() as port:  # what does not answer is a time-out of v1, and more than 16 are not too many
        codes = end.do(link, [clusters[0], *(info(100 + i, port) for i in range(20))], 300)
    assert codes == (FAILED, [FAILED, *[WAITED] * 20])
    assert sorted(end.do(links)) == [13]
    alone(*prompts[:2])
    assert end.do(link, [learned]) == SUCCESS
    end.do(probe, 11)


def test_a_call_that_cannot_be_links_nothing_and_unlinking_what_is_not_linked_succeeds(
    end: LocalEnd, prompts: list[LocalEnd]
) -> None:
    clusters = [info(11, prompts[0].port), info(12, prompts[1].port)]
    for role in ("PROMPT", "MIX"):
        start_end(end, role, 1, **DIRECT)
        assert end.do(link, clusters) == (INVALID, [INVALID] * 2)
        with pytest.raises(ParamError, match="only a DECODER"):
            end.do(probe, 11)
        assert end.do(links) == {}
        end.stop()
    start_end(end, "DECODER", 1, **DIRECT)
    for local, remote in ((0, 1), (1, 0), (2, 1), (1, 2), (2, 2), (0, 0)):  # one for the one device
        bad = info(12, *[prompts[1].port] * remote, local=None)
        for _ in range(local):
            bad.append_local_ip_info("127.0.0.1", 0)
        assert end.do(link, [clusters[0], bad]) == (INVALID, [FAILED, INVALID])
        assert end.do(links) == {}
    assert end.do(link, []) == (INVALID, [])
    assert end.do(link, [*clusters, clusters[0]]) == (REPEAT, [FAILED, FAILED, REPEAT])
    assert end.do(links) == {}
    for force in (False, True):
        assert end.do(unlink, clusters, 5000, force) == (OK, [NOT_YET] * 2)
        assert end.do(link, clusters[:1]) == SUCCESS
        assert end.do(unlink, [clusters[1], clusters[0], info(99)], 5000, force) == (OK, [NOT_YET, OK, NOT_YET])
        alone(end, prompts[0])
    assert end.do(link, clusters) == (OK, [OK, OK])


def test_a_running_pull_makes_the_link_busy_for_unlink_and_probe(tcp_pair: Pair, tmp_path: Path) -> None:
    prompt, decoder = tcp_pair.prompt, tcp_pair.decoder
    start_v1(tcp_pair)
    key, cluster = CacheKey(1, 10), info(1, prompt.port)
    src = prompt.do(kv_make, "kv", desc(), 1, (key,))
    dst = decoder.do(kv_make, "kv", desc(), 2)
    args = (1, "before copy", tmp_path, "pull_cache", key, Use("kv"), 3)
    decoder.do(begin_there, "pull", gated_call_v1, *args)
    gate = Gate(tmp_path)
    try:
        gate.wait()
        for force in (False, True):
            assert decoder.do(unlink, [cluster], 5000, force) == (BUSY, [BUSY])
        with pytest.raises(LinkError) as caught:
            decoder.do(probe, 1)
        assert (caught.value.status_code, caught.value.peer) == (BUSY, 1)
    finally:
        gate.open()
        assert decoder.do(result_there, "pull") is None
    same_bytes(decoder.do(show, "kv"), moved(dst, src, [(3, 0)]))
    decoder.do(probe, 1)
    assert decoder.do(unlink, [cluster], 5000, True) == SUCCESS
    alone(prompt, decoder)
    with pytest.raises(NotLinked) as gone:
        decoder.do(probe, 1)
    assert gone.value.status_code is NOT_YET


def test_check_link_status_of_a_stopped_peer_times_out_and_a_lost_link_that_is_unlinked_is_not_dialled_again(
    shm_pair: Pair,
) -> None:
    start_v1(shm_pair, sync_kv_timeout=200, extra={"llm.PeerTimeout": "600"})
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    decoder.do(probe, 1)
    with frozen(prompt), pytest.raises(DeadlineExceeded) as caught:
        decoder.do(probe, 1)
    assert (caught.value.status_code, caught.value.phase, caught.value.budget_ms) == (WAITED, "ping", 200)
    wait_until(lambda: _answers(decoder))  # once it goes on
    prompt.stop()
    wait_until(lambda: decoder.do(links) == {})
    assert len(decoder.do(_redials)) == 1
    assert decoder.do(unlink, [info(1, prompt.port)]) == (OK, [NOT_YET])
    assert decoder.do(_redials) == ()


def _redials(world: World) -> Any:
    return world.dd.statistics().redials


def _answers(end: End) -> bool:
    try:
        end.do(probe, 1)
    except DeadlineExceeded:
        return False
    return True


def test_check_link_status_and_link_by_rank_table_refuse_what_is_no_cluster_id_and_the_other_mode(
    end: LocalEnd,
) -> None:
    start_end(end, "DECODER", 1, **DIRECT)
    wrong: list[tuple[Any, type[Exception]]] = [("1", TypeError), (1.0, TypeError), (None, NoneArgument)]
    wrong += [(-1, ParamError), (2**64, ParamError)]
    for value, kind in wrong:
        with pytest.raises(kind, match="remote_cluster_id"):
            end.world.dd.check_link_status(value)
    arguments = ("name", {1: 0, 2: 1}, table(host(0), host(0)))
    refused([end], [], StateError, ["v1 mode", "link_clusters"], join, *arguments)
    for function in (drop, status):
        refused([end], [], StateError, ["v1 mode"], function, 1)
    end.world.dd.finalize()
    with pytest.raises(NotInitialized):
        end.do(probe, 1)
    end.start("DECODER", 1)
    refused([end], [], StateError, ["v1 mode"], probe, 1)


# --- switch_role ------------------------------------------------------------------------------------------------------


def switch(world: World, role: str, options: dict[str, Any] | None = None) -> int | None:
    world.dd.switch_role(LLMRole[role], options)
    return world.dd.listen_port


def test_a_link_keeps_the_role_and_after_it_keys_and_pulls_go_by_the_role_of_now(shm_pair: Pair) -> None:
    prompt, decoder = shm_pair.prompt, shm_pair.decoder
    start_v1(shm_pair, enable_switch_role=True)
    prompt.do(kv_make, "kv", desc(rows=2), 1, (CacheKey(1, 7),))
    exist = LLMStatusCode.LLM_EXIST_LINK
    for end, role in ((prompt, "DECODER"), (decoder, "PROMPT")):
        refused([end], [], StateError, ["unlinked first"], switch, role, LISTENING, status=exist)
    assert decoder.do(unlink, [info(1, prompt.port)]) == SUCCESS
    alone(prompt, decoder)
    assert prompt.do(switch, "DECODER") is None
    port = decoder.do(switch, "PROMPT", LISTENING)
    source = decoder.do(kv_make, "late", desc(rows=1), 3, (CacheKey(2, 9),))
    target = prompt.do(show, "kv")
    assert prompt.do(link, [info(2, port)]) == SUCCESS
    prompt.do(kv_call, "pull_cache", CacheKey(2, 9), Use("kv"), 1)
    same_bytes(prompt.do(show, "kv"), moved(target, source, [(1, 0)]))
    with pytest.raises(ParamError, match="DECODER"):  # the key is still bound
        prompt.do(kv_call, "remove_cache_key", CacheKey(1, 7))
    assert len(prompt.do(picture).keys) == 1
    with pytest.raises(ParamError, match="PROMPT"):
        decoder.do(kv_call, "pull_cache", CacheKey(1, 7), Use("late"), 0)
    assert decoder.do(link, [info(1, 1)])[0] is INVALID


def test_the_rules_of_switch_role_leave_role_and_listener_as_they_are(end: LocalEnd) -> None:
    """All of them: test_switch_role.py."""
    disabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    start_end(end, "PROMPT", 1, **DIRECT)
    refused([end], [], LLMException, ["EnableSwitchRole"], switch, "DECODER", status=disabled)
    end.stop()
    start_end(end, "PROMPT", 1, **DIRECT, enable_switch_role=True)
    refused([end], [], ParamError, ["PROMPT already"], switch, "PROMPT", LISTENING)
    assert end.world.dd.listen_port == end.port
    assert "PROMPT" in repr(end.world.dd)
    assert end.do(switch, "DECODER") is None
    refused([end], [], ParamError, ["llm.listenIpInfo", "PROMPT"], switch, "PROMPT")
    assert end.do(switch, "PROMPT", LISTENING)
    assert end.do(switch, "MIX") is None
