"""switch_role: the listener opens, moves and closes, links stand in the way (interface §3.6)."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMRole, LLMStatusCode
from llm_datadist._links.handshake import bind
from llm_datadist._links.table import LinkTable
from llm_datadist.errors import LinkError, LLMException, ParamError, StateError
from tests.support import linking
from tests.support.background import begin_there, result_there
from tests.support.linking import SUCCESS, bytes_move_both_ways, info, link, links_of, reachable, switch, unlink
from tests.support.moves import refused, wait_until
from tests.support.ranks import drop, host, join, new_name, table
from tests.support.refusals import RULE, TYPE, Spec, Table, refuse
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("LLMDataDist.switch_role")

LISTEN = "llm.listenIpInfo"
EXIST_LINK = LLMStatusCode.LLM_EXIST_LINK


def now(world: World) -> tuple[str, tuple[str, int] | None]:
    """Return the role and where it listens."""
    return repr(world.dd).split()[1], links_of(world).listen_address


def at(port: int | None, ip: str = "127.0.0.1") -> dict[str, str]:
    return {LISTEN: f"{ip}:{port}"}


def test_the_listener_opens_moves_and_closes_and_ports_can_be_used_again_at_once(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    assert end.do(now) == ("DECODER", None)
    first, second = linking.free_port(), linking.free_port()
    for _ in range(3):
        assert end.do(switch, "PROMPT", at(first)) == first
        assert reachable(first)
        assert end.do(switch, "PROMPT", at(second)) == second
        assert (reachable(first), reachable(second)) == (False, True)
        assert end.do(switch, "DECODER") is None
        assert (reachable(first), reachable(second)) == (False, False)
    end.do(switch, "PROMPT", at(first))
    for ip in ("127.0.0.2", "0.0.0.0", "127.0.0.1"):  # the same port on another address
        assert end.do(switch, "PROMPT", at(first, ip)) == first
        assert end.do(now) == ("PROMPT", (ip, first))
        assert reachable(first, "127.0.0.2") == (ip != "127.0.0.1")
    port, before = end.do(switch, "PROMPT", at(0, "127.0.0.2")), end.do(links_of)._listener
    assert end.do(switch, "DECODER", at(0, "127.0.0.2")) == port
    assert end.do(switch, "PROMPT", at(port, "127.0.0.2")) == port
    assert end.do(links_of)._listener is before, "the same address is left alone, also one with a picked port"


def test_every_role_has_its_turn_and_survives_finalize_and_other_options_are_ignored(end: LocalEnd) -> None:
    end.start("MIX", 2)
    for role in ("MIX", "PROMPT", "PROMPT", "DECODER", "MIX"):
        assert end.do(switch, role) is None
        assert end.do(now)[0] == role
    ignored = {"device_id": 7, "enable_cache_manager": False, "sync_kv_timeout": 1}
    assert end.do(switch, "PROMPT", make_config(listen_ip_info="127.0.0.1:0", **ignored))
    engine = end.world.dd._require_engine("test")
    assert (engine.options.sync_kv_timeout_ms, engine.options.cache_manager) == (10_000, True)
    end.do(switch, "DECODER")
    end.world.dd.finalize()
    assert "DECODER" in repr(end.world.dd)
    end.world.dd.init(make_config())
    assert end.do(now) == ("DECODER", None)


def test_an_address_that_cannot_be_bound_is_llm_failed_and_role_and_listener_stay(end: LocalEnd) -> None:
    port = linking.free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    # 0.0.0.0 needs the port on every address, and one of them is taken: the old listener is back.
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.9", port)):
        for ip, number in (("127.0.0.1", busy.getsockname()[1]), ("192.0.2.1", port), ("0.0.0.0", port)):
            with pytest.raises(LinkError) as caught:
                end.do(switch, "DECODER", at(number, ip))
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert f"{ip}:{number}" in str(caught.value)
            assert "the role stays PROMPT" in str(caught.value)
            assert end.do(now) == ("PROMPT", ("127.0.0.1", port))
            assert reachable(port)


def before_binding(monkeypatch: pytest.MonkeyPatch, port: int | None, act: Callable[[], Any]) -> list[Any]:
    """Act once when nothing listens at the port and another address is to be bound; return what came of it."""
    done: list[Any] = []

    def slow_bind(address: tuple[str, int]) -> socket.socket:
        if not reachable(port) and not done:
            done.append(act())
        return bind(address)

    monkeypatch.setattr("llm_datadist._transfer.engine.bind", slow_bind)
    return done


def test_when_neither_can_be_bound_the_error_says_so(end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    port = linking.free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    # Another process takes the old address the moment it is free.
    thief = before_binding(monkeypatch, port, lambda: socket.create_server(("127.0.0.1", port)))
    with pytest.raises(LinkError, match="listens no more"):
        end.do(switch, "DECODER", at(port, "0.0.0.0"))
    thief[0].close()
    assert end.do(now) == ("PROMPT", None)
    assert end.do(switch, "DECODER", at(port)) == port


def test_i13_a_link_and_a_communicator_stand_in_the_way_whichever_end_made_it(shm_pair: Pair) -> None:
    shm_pair.start()
    wait_until(lambda: shm_pair.prompt.do(linking.links) == {2: "ready"})
    for end in (shm_pair.prompt, shm_pair.decoder):
        before = end.do(now)
        for options in (None, at(linking.free_port()), at(end.port or 0)):
            refused([end], [], StateError, ["unlinked first"], switch, "MIX", options, status=EXIST_LINK)
        assert end.do(now) == before
    bytes_move_both_ways(shm_pair.prompt, shm_pair.decoder)
    assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
    linking.alone(shm_pair.prompt)
    assert shm_pair.prompt.do(switch, "PROMPT", at(shm_pair.prompt.port)) == shm_pair.prompt.port
    comm_id = shm_pair.prompt.do(join, new_name(), {1: 0, 2: 1}, table(host(0), host(0)))
    told = [f"communicator {comm_id}"]
    refused([shm_pair.prompt], [], StateError, told, switch, "PROMPT", at(0), status=EXIST_LINK)
    shm_pair.prompt.do(drop, comm_id)
    shm_pair.link()  # a peer that has ended does not stand in the way either
    shm_pair.decoder.stop()
    linking.alone(shm_pair.prompt)
    assert shm_pair.prompt.do(switch, "DECODER") is None


def test_a_link_that_is_being_made_stands_in_the_way(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """The peer has it already when this end is asked to switch."""
    local_pair.start(linked=False)
    decoder = local_pair.decoder
    at_the_gate, go = threading.Event(), threading.Event()
    really = LinkTable.install

    def installed_late(self: LinkTable, made: Any) -> Any:
        at_the_gate.set()
        assert go.wait(60)
        return really(self, made)

    monkeypatch.setattr(LinkTable, "install", installed_late)
    decoder.do(begin_there, "call", link, [info(1, local_pair.prompt.port)])
    assert at_the_gate.wait(60)
    for options in (None, at(0)):
        refused([decoder], [], StateError, ["being made"], switch, "MIX", options, status=EXIST_LINK)
    go.set()
    assert decoder.do(result_there, "call") == SUCCESS
    assert decoder.do(now)[0] == "DECODER"


@pytest.mark.parametrize("free", [True, False])
def test_a_link_made_meanwhile_costs_no_listener(local_pair: Pair, monkeypatch: pytest.MonkeyPatch, free: bool) -> None:
    decoder = local_pair.decoder
    linking.start_both(local_pair.prompt, decoder, local_pair.transport)
    port = decoder.port
    made = before_binding(monkeypatch, port, lambda: decoder.do(link, [info(1, local_pair.prompt.port)]))
    if free:
        assert decoder.do(switch, "PROMPT", at(port, "0.0.0.0")) == port
    else:
        with socket.create_server(("127.0.0.9", port)), pytest.raises(LinkError, match=r"0\.0\.0\.0"):
            decoder.do(switch, "PROMPT", at(port, "0.0.0.0"))
    assert made == [SUCCESS]
    ip = "0.0.0.0" if free else "127.0.0.1"
    assert decoder.do(now) == ("PROMPT" if free else "DECODER", (ip, port))
    assert reachable(port)
    bytes_move_both_ways(decoder, local_pair.prompt)


def test_a_link_that_the_peer_has_just_unlinked_does_not_stand_in_the_way(shm_pair: Pair) -> None:
    """The peer's call returns before the end of the connection has been read here."""
    shm_pair.start(linked=False)
    for _ in range(20):
        shm_pair.link()
        assert shm_pair.decoder.do(unlink, [info(1, shm_pair.prompt.port)]) == SUCCESS
        assert shm_pair.prompt.do(switch, "DECODER") is None
        assert shm_pair.prompt.do(switch, "PROMPT", at(shm_pair.prompt.port)) == shm_pair.prompt.port


SPECS = {
    "role": Spec((1, "PROMPT")),
    "switch_options": Spec(
        ([], "x"),
        (TYPE, LISTEN, {LISTEN: 1}),
        (RULE, "''", {LISTEN: ""}),
        (RULE, "ip:port", {LISTEN: ""}),
        (RULE, "port 'x'", {LISTEN: "127.0.0.1:x"}),
        (RULE, "65536", {LISTEN: "127.0.0.1:65536"}),
        (RULE, "::1:5", {LISTEN: "::1:5"}),
        none_ok=True,
    ),
}


def test_r01_a_wrong_argument_of_switch_role_is_refused(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0")
    before = end.do(now)
    refuse([end], Table("dd.switch_role", {"role": LLMRole.MIX}, SPECS))
    assert end.do(now) == before


def test_with_the_hixl_backend_the_address_cannot_change_and_a_missing_one_leaves_it(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for options in (at(linking.free_port()), at(end.port, "127.0.0.2")):
        refused([end], [], LLMException, [LISTEN, "cannot change"], switch, "MIX", options, status=code)
        assert end.do(now)[0] == "PROMPT"
    for role, same in (("DECODER", None), ("PROMPT", {}), ("MIX", at(end.port))):
        assert end.do(switch, role, same) == end.port
        assert end.do(now)[0] == role


def test_v1_mode_has_rules_of_its_own_which_leave_role_and_listener_and_a_decoder_may_listen(end: LocalEnd) -> None:
    v1 = {"listen_ip_info": "127.0.0.1:0", "enable_cache_manager": False}
    end.start("PROMPT", 1, **v1)
    disabled = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    refused([end], [], LLMException, ["EnableSwitchRole"], switch, "DECODER", status=disabled)
    end.stop()
    end.start("PROMPT", 1, **v1, enable_switch_role=True)
    refused([end], [], ParamError, ["PROMPT already"], switch, "PROMPT", at(0))
    assert end.do(now) == ("PROMPT", ("127.0.0.1", end.port))
    assert end.do(switch, "DECODER") is None
    refused([end], [], ParamError, [LISTEN, "PROMPT"], switch, "PROMPT")
    assert end.do(switch, "PROMPT", at(end.port)) == end.port
    assert end.do(switch, "DECODER", at(end.port)) == end.port
    assert end.do(switch, "MIX") is None
