"""Where members meet: busy ports, strangers at the port of a communicator, and members with odd addresses."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist import LLMStatusCode
from llm_datadist._links.messages import CONTROL_PREAMBLE, CommunicatorId, Refused
from llm_datadist._links.ranktable import PORTS_VARIABLE, RankTable, ports
from llm_datadist.errors import LinkRefused, ParamError
from tests.support.linking import bytes_move_both_ways, info, link, links
from tests.support.moves import refused, wait_until
from tests.support.ranks import (
    FAILED,
    OK,
    PREPARING,
    explained,
    host,
    join,
    join_all,
    new_name,
    settle,
    start_two,
    status,
    table,
)
from tests.support.strangers import Stranger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.conftest import Pair
    from tests.support.ends import End, LocalEnd
    from tests.support.world import World


@contextlib.contextmanager
def taken(address: str, numbers: list[int], *, listening: bool) -> Iterator[None]:
    """Hold ports; a listening one accepts connections, as the kernel does for it, and never says a word."""
    with contextlib.ExitStack() as stack:
        for number in numbers:
            sock = stack.enter_context(socket.socket())
            # Past connections of that port do not count, but from now on it is taken.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((address, number))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            if listening:
                sock.listen(64)
        yield


def free_name() -> str:
    """Return the name of a communicator whose ports no other process uses now: tests run in several."""
    for name in (new_name() for _ in range(100)):
        with contextlib.suppress(OSError), taken("0.0.0.0", ports(name, 1), listening=True):
            return name
    raise AssertionError("no name of a hundred has only free ports")


def set_ports(world: World, value: str | None) -> None:
    if value is None:
        os.environ.pop(PORTS_VARIABLE, None)
    else:
        os.environ[PORTS_VARIABLE] = value


@pytest.mark.parametrize("at", ["0.0.0.0", "the address"])
def test_busy_ports_cost_only_the_next_one(shm_pair: Pair, at: str) -> None:
    # A silent stranger costs one attempt: link_total_time / link_retry_count.
    ends = start_two(shm_pair, link_retry_count=100)
    name, address = free_name(), host(0)
    numbers = ports(name, 1)
    assert len(set(numbers)) == 8
    address_taken = address if at == "the address" else at
    with taken(address_taken, numbers[:2], listening=True), taken(address_taken, numbers[2:6], listening=False):
        ids = join_all(ends, name, table(address, address))
        assert settle(ends, ids) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_without_a_free_port_link_is_link_failed_and_nothing_is_left(end: LocalEnd) -> None:
    end.start("MIX", 1)
    name = free_name()
    code = LLMStatusCode.LLM_LINK_FAILED
    with taken(host(0), ports(name, 1), listening=False):
        parts = [host(0), str(ports(name, 1)[7]), PORTS_VARIABLE]
        refused([end], [], LinkRefused, parts, join, name, {1: 0, 2: 1}, table(host(0), host(0)), status=code)
    assert end.do(join, name, {1: 0, 2: 1}, table(host(0), host(0))) == 1


def test_another_communicator_at_the_first_port_is_passed_by(shm_pair: Pair) -> None:
    """Two communicators of one end whose ports begin alike: the range is so small that they share it."""
    ends = start_two(shm_pair)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        low = probe.getsockname()[1] - 8
    for end in ends:
        end.do(set_ports, f"{low}-{low + 7}")
    try:
        waiting = [ends[0].do(join, new_name(), {1: 0, 9: 1}, table(host(0), host(1))) for _ in range(4)]
        ids = join_all(ends)
        assert settle(ends, ids) == [OK, OK]
        assert {ends[0].do(status, each) for each in waiting} == {PREPARING}, "met by nobody"
    finally:
        for end in ends:
            end.do(set_ports, None)


@pytest.mark.parametrize("text", ["x", "1", "5-4", "0-5", "1-65536", "-", "1-2-3"])
def test_a_wrong_range_of_ports_in_the_environment_is_named(
    end: LocalEnd, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    end.start("MIX", 1)
    monkeypatch.setenv(PORTS_VARIABLE, text)
    refused([end], [], ParamError, [PORTS_VARIABLE, text], join, "n", {1: 0, 2: 1}, table(host(0), host(0)))
    refused([end], [], ParamError, [PORTS_VARIABLE, text], join, "n", {0: 0, 1: 1}, table(host(0), host(0)))


def test_an_address_that_is_not_of_this_host_is_listened_for_on_all_of_them(shm_pair: Pair) -> None:
    """Behind address translation the table names an address that this host does not have."""
    ends = start_two(shm_pair)
    name = new_name()
    # Both say 192.0.2.1 for cluster 1, but what the decoder dials leads to loopback, as a translation would.
    ends[0].do(join, name, {1: 0, 2: 1}, table("192.0.2.1", host(1)))
    with socket.create_connection(("127.0.0.1", _open_port(name))):
        pass
    assert ends[0].do(status, 1) is PREPARING


def _open_port(name: str) -> int:
    for number in ports(name, 1):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", number)):
            return number
    raise AssertionError("nobody listens")


def _is_open(number: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", number)) == 0


# --- strangers --------------------------------------------------------------------------------------------------------


def meeting(communicator: str, rank_table: str, **changes: Any) -> CommunicatorId:
    fields: dict[str, Any] = {
        "name": communicator,
        "members": [(1, 0), (2, 1)],
        "table": RankTable.parse(rank_table).digest,
        "token": b"t" * 16,
    }
    return CommunicatorId(**(fields | changes))


@pytest.mark.parametrize(
    ("cluster_id", "changes", "code"),
    [
        (2, {"name": "another"}, LLMStatusCode.LLM_NOT_YET_LINK),
        (3, {}, LLMStatusCode.LLM_NOT_YET_LINK),
        (1, {}, LLMStatusCode.LLM_NOT_YET_LINK),
        (3, {"members": [(1, 0), (3, 1)]}, LLMStatusCode.LLM_NOT_YET_LINK),
        (2, None, LLMStatusCode.LLM_LINK_FAILED),
    ],
    ids=["another name", "no member", "ourselves", "another idea of the members", "link_clusters"],
)
def test_a_stranger_at_the_port_is_refused_and_the_preparation_goes_on(
    shm_pair: Pair, cluster_id: int, changes: dict[str, Any] | None, code: LLMStatusCode
) -> None:
    ends = start_two(shm_pair)
    name, rank_table = new_name(), table("127.0.0.1", "127.0.0.1")
    ends[0].do(join, name, {1: 0, 2: 1}, rank_table)
    with Stranger(_open_port(name), cluster_id) as stranger:
        wanted = None if changes is None else meeting(name, rank_table, **changes)
        stranger.say(CONTROL_PREAMBLE, stranger.hello(communicator=wanted))
        assert stranger.hear(Refused).code == code
        assert stranger.is_hung_up_on()
    assert ends[0].do(status, 1) is PREPARING
    ends[1].do(join, name, {1: 0, 2: 1}, rank_table)
    assert settle(ends, [1, 1]) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_what_is_no_greeting_at_the_port_costs_its_own_connection_only(shm_pair: Pair) -> None:
    ends = start_two(shm_pair)
    name, rank_table = new_name(), table("127.0.0.1", "127.0.0.1")
    ends[0].do(join, name, {1: 0, 2: 1}, rank_table)
    port = _open_port(name)
    with Stranger(port) as garbage, Stranger(port) as silent, Stranger(port) as half:
        garbage.say(b"GET / HTTP/1.1\r\n\r\n")
        assert garbage.is_hung_up_on()
        half.say(CONTROL_PREAMBLE[:5])
        ends[1].do(join, name, {1: 0, 2: 1}, rank_table)
        assert settle(ends, [1, 1]) == [OK, OK]
        wait_until(lambda: not _is_open(port), 5)  # closed once all are met, whoever is still there
        assert silent.is_hung_up_on()


def test_a_member_with_another_table_fails_the_preparation_whoever_it_is(local_pair: Pair) -> None:
    ends = start_two(local_pair)
    name, rank_table = new_name(), table("127.0.0.1", "127.0.0.1")
    ends[0].do(join, name, {1: 0, 2: 1}, rank_table)
    with Stranger(_open_port(name), 2) as stranger:
        stranger.say(CONTROL_PREAMBLE, stranger.hello(communicator=meeting(name, rank_table, table=b"?" * 16)))
        told = stranger.hear(Refused)
    assert told.code == LLMStatusCode.LLM_PARAM_INVALID
    assert settle(ends[:1], [1]) == [FAILED]
    assert "rank_table differs" in ends[0].do(explained, 1).reason


def test_a_communicator_is_not_looked_for_at_a_listener_of_link_clusters(shm_pair: Pair) -> None:
    shm_pair.start(linked=False)
    assert shm_pair.prompt.port is not None
    with Stranger(shm_pair.prompt.port, 2) as stranger:
        stranger.say(CONTROL_PREAMBLE, stranger.hello(communicator=meeting("n", table(host(0)))))
        assert stranger.hear(Refused).code == LLMStatusCode.LLM_NOT_YET_LINK
    shm_pair.link()


def test_link_clusters_to_the_port_of_a_communicator_is_link_failed_and_says_why(
    shm_pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    ends = start_two(shm_pair)
    name = new_name()
    ends[0].do(join, name, {1: 0, 2: 1}, table("127.0.0.1", "127.0.0.1"))
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert ends[1].do(link, [info(1, _open_port(name))]) == (failed, [failed])
    assert ends[0].do(status, 1) is PREPARING


def test_a_listener_of_link_clusters_at_the_port_is_passed_by(shm_pair: Pair) -> None:
    name = new_name()
    first = ports(name, 1)[0]
    shm_pair.prompt.start("PROMPT", 1, listen_ip_info=f"{host(0)}:{first}", link_total_time=60)
    shm_pair.decoder.start("DECODER", 2, link_total_time=60)
    ends: tuple[End, End] = (shm_pair.prompt, shm_pair.decoder)
    assert settle(ends, join_all(ends, name)) == [OK, OK]
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]
