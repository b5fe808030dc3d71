"""switch_role: the listener opens, moves and closes, links stand in the way, caches live on (interface §3.6)."""

from __future__ import annotations

import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import BlocksCacheKey, LLMConfig, LLMRole, LLMStatusCode
from llm_datadist._links.handshake import bind
from llm_datadist._links.table import LinkTable
from llm_datadist.errors import LinkError, LLMException, NoneArgument, ParamError, StateError
from tests.support.linking import (
    SUCCESS,
    alone,
    begin_there,
    bytes_move_both_ways,
    free_port,
    info,
    link,
    links,
    result_there,
    unlink,
)
from tests.support.moves import Spec, Use, call, make, moved, refused, same_bytes, show, wait_until
from tests.support.ranks import host, join, new_name, table
from tests.support.world import World, make_config

if TYPE_CHECKING:
    from tests.conftest import Pair
    from tests.support.ends import LocalEnd

pytestmark = pytest.mark.covers("LLMDataDist.switch_role")

LISTEN = "llm.listenIpInfo"
EXIST_LINK = LLMStatusCode.LLM_EXIST_LINK


def switch(world: World, role: str, options: dict[str, Any] | None = None) -> int | None:
    """Switch the role; return the port it listens on now."""
    world.dd.switch_role(LLMRole[role], options)
    return world.dd.listen_port


def switch_as_it_is(world: World, role: Any, options: Any) -> None:
    world.dd.switch_role(role, options)


def listening(world: World) -> tuple[str, int] | None:
    engine = world.dd._engine
    assert engine is not None
    return engine.links.listen_address


def role_of(world: World) -> str:
    return repr(world.dd).split()[1]


def at(port: int | None, ip: str = "127.0.0.1") -> dict[str, str]:
    return {LISTEN: f"{ip}:{port}"}


def reachable(port: int | None, ip: str = "127.0.0.1") -> bool:
    with socket.socket() as sock:
        return sock.connect_ex((ip, port or 0)) == 0


# --- the listener -----------------------------------------------------------------------------------------------------


def test_the_listener_opens_moves_and_closes_and_ports_can_be_used_again_at_once(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    assert end.do(listening) is None
    first, second = free_port(), free_port()
    for _ in range(3):
        assert end.do(switch, "PROMPT", at(first)) == first
        assert reachable(first)
        assert end.do(switch, "PROMPT", at(second)) == second
        assert (reachable(first), reachable(second)) == (False, True)
        assert end.do(switch, "DECODER") is None
        assert (reachable(first), reachable(second)) == (False, False)


def test_every_role_has_its_turn_also_the_same_again_and_survives_finalize_and_init(end: LocalEnd) -> None:
    end.start("MIX", 2)
    for role in ("MIX", "PROMPT", "PROMPT", "DECODER", "MIX"):
        assert end.do(switch, role) is None
        assert end.do(role_of) == role
    end.do(switch, "DECODER")
    end.world.dd.finalize()
    assert end.do(role_of) == "DECODER"
    end.world.dd.init(make_config())
    assert (end.do(role_of), end.do(listening)) == ("DECODER", None)


def test_the_same_address_is_left_alone_also_one_with_a_picked_port(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0")
    engine = end.world.dd._engine
    assert engine is not None
    before = engine.links._listener
    assert end.do(switch, "DECODER", at(0)) == end.port
    assert end.do(switch, "PROMPT", at(end.port)) == end.port
    assert engine.links._listener is before


def test_the_same_port_on_another_ip_moves_the_listener(end: LocalEnd) -> None:
    port = free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    for ip in ("127.0.0.2", "0.0.0.0", "127.0.0.1"):
        assert end.do(switch, "PROMPT", at(port, ip)) == port
        assert end.do(listening) == (ip, port)
        assert reachable(port, "127.0.0.2") == (ip != "127.0.0.1")


def test_a_whole_config_will_do_and_its_other_options_are_ignored(end: LocalEnd) -> None:
    end.start("DECODER", 2)
    config = LLMConfig()
    config.device_id = 7
    config.enable_cache_manager = False
    config.sync_kv_timeout = 1
    config.listen_ip_info = "127.0.0.1:0"
    assert end.do(switch, "PROMPT", config.generate_options())
    engine = end.world.dd._engine
    assert engine is not None
    assert engine.options.sync_kv_timeout_ms == 10_000
    assert engine.options.cache_manager


def test_an_address_that_cannot_be_bound_is_llm_failed_and_role_and_listener_stay(end: LocalEnd) -> None:
    port = free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    # 0.0.0.0 needs the port on every address, and one of them is taken: the old listener is back.
    with socket.create_server(("127.0.0.1", 0)) as busy, socket.create_server(("127.0.0.9", port)):
        for ip, number in (("127.0.0.1", busy.getsockname()[1]), ("192.0.2.1", port), ("0.0.0.0", port)):
            with pytest.raises(LinkError) as caught:
                end.do(switch, "DECODER", at(number, ip))
            assert caught.value.status_code is LLMStatusCode.LLM_FAILED
            assert f"{ip}:{number}" in str(caught.value)
            assert "the role stays PROMPT" in str(caught.value)
            assert (end.do(role_of), end.do(listening)) == ("PROMPT", ("127.0.0.1", port))
            assert reachable(port)


def test_when_neither_can_be_bound_the_error_says_that_this_end_listens_no_more(
    end: LocalEnd, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    end.start("PROMPT", 2, listen_ip_info=f"127.0.0.1:{port}")
    thief: list[socket.socket] = []

    def slow_bind(address: tuple[str, int]) -> socket.socket:
        """Another process takes the old address the moment it is free."""
        if not reachable(port) and not thief:
            thief.append(socket.create_server(("127.0.0.1", port)))
        return bind(address)

    monkeypatch.setattr("llm_datadist._transfer.engine.bind", slow_bind)
    with pytest.raises(LinkError, match="listens no more"):
        end.do(switch, "DECODER", at(port, "0.0.0.0"))
    thief[0].close()
    assert (end.do(role_of), end.do(listening)) == ("PROMPT", None)
    assert end.do(switch, "DECODER", at(port)) == port


# --- links stand in the way -------------------------------------------------------------------------------------------


def test_i13_a_link_stands_in_the_way_whichever_end_made_it_and_nothing_changes(shm_pair: Pair) -> None:
    pair = shm_pair
    pair.start()
    wait_until(lambda: pair.prompt.do(links) == {2: "ready"})
    for end in (pair.prompt, pair.decoder):
        before = end.do(listening)
        for options in (None, at(free_port()), at(end.port or 0)):
            refused([end], [], StateError, ["unlinked first"], switch, "MIX", options, status=EXIST_LINK)
        assert end.do(listening) == before
    bytes_move_both_ways(pair.prompt, pair.decoder)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(pair.prompt)
    assert pair.prompt.do(switch, "PROMPT", at(pair.prompt.port)) == pair.prompt.port
    pair.link()  # a peer that has ended does not stand in the way either
    pair.decoder.stop()
    alone(pair.prompt)
    assert pair.prompt.do(switch, "DECODER") is None


def test_a_communicator_that_is_being_prepared_stands_in_the_way(end: LocalEnd) -> None:
    end.start("MIX", 1, link_total_time=60)
    comm_id = end.do(join, new_name(), {1: 0, 2: 1}, table(host(0), host(0)))
    refused([end], [], StateError, [f"communicator {comm_id}"], switch, "PROMPT", at(0), status=EXIST_LINK)
    end.world.dd.unlink(comm_id)
    assert end.do(switch, "PROMPT", at(0))


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
    assert decoder.do(role_of) == "DECODER"


@pytest.mark.parametrize("free", [True, False])
def test_a_link_that_this_end_makes_while_the_listener_moves_in_place_does_not_cost_the_listener(
    local_pair: Pair, monkeypatch: pytest.MonkeyPatch, free: bool
) -> None:
    port = free_port()
    local_pair.start(linked=False)
    decoder = local_pair.decoder
    decoder.stop()
    extra = {"llm.Transport": local_pair.transport}
    decoder.start("DECODER", 2, listen_ip_info=f"127.0.0.1:{port}", extra=extra)
    made: list[Any] = []

    def slow_bind(address: tuple[str, int]) -> socket.socket:
        if not reachable(port) and not made:
            made.append(decoder.do(link, [info(1, local_pair.prompt.port)]))
        return bind(address)

    monkeypatch.setattr("llm_datadist._transfer.engine.bind", slow_bind)
    if free:
        assert decoder.do(switch, "PROMPT", at(port, "0.0.0.0")) == port
    else:
        with socket.create_server(("127.0.0.9", port)), pytest.raises(LinkError, match=r"0\.0\.0\.0"):
            decoder.do(switch, "PROMPT", at(port, "0.0.0.0"))
    assert made == [SUCCESS]
    ip = "0.0.0.0" if free else "127.0.0.1"
    assert (decoder.do(role_of), decoder.do(listening)) == ("PROMPT" if free else "DECODER", (ip, port))
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


# --- caches live on ---------------------------------------------------------------------------------------------------


def test_the_flow_of_the_sample_roles_change_and_caches_ids_and_keys_stay(tcp_pair: Pair) -> None:
    """interface B11 item 6: D pulls from P, both switch, P links to D, D pushes over the link that P made."""
    pair = tcp_pair
    extra = {"llm.Transport": pair.transport}
    settings: dict[str, Any] = {"enable_remote_cache_accessible": True, "extra": extra}
    pair.prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **settings)
    pair.decoder.start("DECODER", 2, **settings)
    p_key, d_key = BlocksCacheKey(1, 0), BlocksCacheKey(2, 0)
    p_bytes = pair.prompt.do(make, "kv", Spec(tensors=2, rows=3, blocks=True, blocks_key=p_key), 1)
    d_bytes = pair.decoder.do(make, "kv", Spec(tensors=2, rows=3, blocks=True, blocks_key=d_key), 2)
    pair.link()
    pair.decoder.do(call, "pull_blocks", p_key, Use("kv"), [0, 1], [0, 2])
    d_bytes = moved(d_bytes, p_bytes, [(0, 0), (2, 1)])
    same_bytes(pair.decoder.do(show, "kv"), d_bytes)
    assert pair.decoder.do(unlink, [info(1, pair.prompt.port)]) == SUCCESS
    alone(pair.prompt, pair.decoder)

    assert pair.prompt.do(switch, "DECODER") is None
    options = make_config(listen_ip_info="127.0.0.1:0")
    port = pair.decoder.do(switch, "PROMPT", options)
    assert pair.prompt.do(link, [info(2, port)]) == SUCCESS
    layers = range(2)
    pair.decoder.do(call, "push_blocks", p_key, Use("kv"), [0, 1, 2], [0, 1, 2], layers, layers, 1)
    same_bytes(pair.prompt.do(show, "kv"), d_bytes)
    same_bytes(pair.decoder.do(show, "kv"), d_bytes)
    bytes_move_both_ways(pair.prompt, pair.decoder)


# --- arguments --------------------------------------------------------------------------------------------------------


WRONG_ARGUMENTS: list[tuple[type[Exception], Any, Any, list[str]]] = [
    (NoneArgument, None, None, ["role"]),
    (TypeError, 1, None, ["role", "int"]),
    (TypeError, "PROMPT", None, ["role", "str"]),
    (TypeError, LLMRole.MIX, [], ["switch_options", "list"]),
    (TypeError, LLMRole.MIX, "x", ["switch_options", "str"]),
    (TypeError, LLMRole.MIX, {LISTEN: 1}, [LISTEN, "int"]),
    (ParamError, LLMRole.MIX, {LISTEN: ""}, ["''", "ip:port"]),
    (ParamError, LLMRole.MIX, {LISTEN: "127.0.0.1"}, ["ip:port"]),
    (ParamError, LLMRole.MIX, {LISTEN: "127.0.0.1:x"}, ["port 'x'"]),
    (ParamError, LLMRole.MIX, {LISTEN: "127.0.0.1:65536"}, ["65536"]),
    (ParamError, LLMRole.MIX, {LISTEN: "::1:5"}, ["::1:5"]),
]


def test_r01_a_wrong_argument_of_switch_role_is_refused(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0")
    before = end.do(listening)
    for kind, role, options, parts in WRONG_ARGUMENTS:
        refused([end], [], kind, parts, switch_as_it_is, role, options)
        assert (end.do(role_of), end.do(listening)) == ("PROMPT", before)


# --- the hixl backend, and v1 -----------------------------------------------------------------------------------------


def test_with_the_hixl_backend_the_address_cannot_change_and_a_missing_one_leaves_it(end: LocalEnd) -> None:
    end.start("PROMPT", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for options in (at(free_port()), at(end.port, "127.0.0.2")):
        refused([end], [], LLMException, [LISTEN, "cannot change"], switch, "MIX", options, status=code)
        assert end.do(role_of) == "PROMPT"
    for role, same in (("DECODER", None), ("PROMPT", {}), ("MIX", at(end.port))):
        assert end.do(switch, role, same) == end.port
        assert end.do(role_of) == role


def test_in_v1_mode_a_decoder_may_listen(end: LocalEnd) -> None:
    end.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", enable_cache_manager=False, enable_switch_role=True)
    assert end.do(switch, "DECODER", at(end.port)) == end.port
