"""link(): its arguments, memory that is registered after it, and where members meet: busy ports, strangers at the port
of a communicator, and members with odd addresses (interface §3.5, §6.6)."""

from __future__ import annotations

import contextlib
import json
import socket
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from msgspec import structs

from faults.strangers import Stranger
from llm_datadist import BlocksCacheKey, LLMStatusCode
from llm_datadist._links.messages import CONTROL_PREAMBLE, CommunicatorId, Refused
from llm_datadist._links.ranktable import PORTS_VARIABLE, RankTable, ports
from llm_datadist.errors import LinkRefused, LLMException, ParamError
from tests.support import ranks
from tests.support.linking import bytes_move_both_ways, info, link, links, reachable
from tests.support.moves import Spec, Use, call, make, moved, refused, same_bytes, show, wait_until
from tests.support.ranks import OK, PREPARING, Meeting, drop, host, join, joined, new_name, settle, start_two, status
from tests.support.refusals import NONE, RULE, TYPE, UINT64, UNLINKED, Row, Table, bad, refuse
from tests.support.world import make_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.support.ends import LocalEnd
    from tests.support.pairs import Pair

pytestmark = pytest.mark.covers("LLMDataDist: explain_communicator link query_register_mem_status unlink")


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


@pytest.mark.parametrize("busy", ["0.0.0.0", host(0)], ids=["all addresses", "the address"])
def test_busy_ports_cost_only_the_next_one(shm_pair: Pair, busy: str) -> None:
    # A silent stranger costs one attempt: link_total_time / link_retry_count.
    ends, meeting = start_two(shm_pair, link_retry_count=100), Meeting((1, 2), free_name())
    numbers = ports(meeting.name, 1)
    assert len(set(numbers)) == 8
    with taken(busy, numbers[:2], listening=True), taken(busy, numbers[2:6], listening=False):
        assert settle(ends, meeting.join(*ends)) == [OK, OK]
    bytes_move_both_ways(*ends)


def test_without_a_free_port_link_is_link_failed_and_nothing_is_left(end: LocalEnd) -> None:
    end.start("MIX", 1)
    name = free_name()
    code = LLMStatusCode.LLM_LINK_FAILED
    arguments = (name, {1: 0, 2: 1}, ranks.table(host(0), host(0)))
    with taken(host(0), ports(name, 1), listening=False):
        parts = [host(0), str(ports(name, 1)[7]), PORTS_VARIABLE]
        refused([end], [], LinkRefused, parts, join, *arguments, status=code)
    assert end.do(join, *arguments) == 1


def test_another_communicator_at_the_first_port_is_passed_by(local_pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two communicators of one end whose ports begin alike: the range is so small that they share it."""
    ends = start_two(local_pair)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        low = probe.getsockname()[1] - 8
    monkeypatch.setenv(PORTS_VARIABLE, f"{low}-{low + 7}")
    waiting = [Meeting((1, 9)).join(ends[0])[0] for _ in range(4)]
    joined(*ends)
    assert {ends[0].do(status, each) for each in waiting} == {PREPARING}


def test_a_wrong_range_of_ports_in_the_environment_is_named(end: LocalEnd, monkeypatch: pytest.MonkeyPatch) -> None:
    end.start("MIX", 1)
    for text in ("x", "1", "5-4", "0-5", "1-65536", "-", "1-2-3"):
        monkeypatch.setenv(PORTS_VARIABLE, text)
        for members in ({1: 0, 2: 1}, {0: 0, 1: 1}):
            refused([end], [], ParamError, [PORTS_VARIABLE, text], join, "n", members, ranks.table(host(0), host(0)))


def test_an_address_that_is_not_of_this_host_is_listened_for_on_all_of_them(shm_pair: Pair) -> None:
    """Behind address translation the table names an address that this host does not have."""
    ends = start_two(shm_pair)
    meeting = Meeting((1, 2), table=ranks.table("192.0.2.1", host(1)))
    meeting.join(ends[0])
    assert _open_port(meeting.name)
    assert ends[0].do(status, 1) is PREPARING


def _open_port(name: str) -> int:
    for number in ports(name, 1):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", number)):
            return number
    raise AssertionError("there is no listener")


#: The stranger's id, what it says of the communicator (None: nothing, as link_clusters does), and the refusal.
STRANGERS: Final[dict[str, tuple[int, dict[str, Any] | None, LLMStatusCode]]] = {
    "another name": (2, {"name": "another"}, LLMStatusCode.LLM_NOT_YET_LINK),
    "no member": (3, {}, LLMStatusCode.LLM_NOT_YET_LINK),
    "ourselves": (1, {}, LLMStatusCode.LLM_NOT_YET_LINK),
    "another idea of the members": (3, {"members": [(1, 0), (3, 1)]}, LLMStatusCode.LLM_NOT_YET_LINK),
    "link_clusters": (2, None, LLMStatusCode.LLM_LINK_FAILED),
}


def test_strangers_at_the_port_cost_their_own_connection_only_and_the_preparation_goes_on(shm_pair: Pair) -> None:
    ends = start_two(shm_pair)
    meeting = Meeting((1, 2), table=ranks.table("127.0.0.1", "127.0.0.1"))  # where strangers reach them
    said = CommunicatorId(
        meeting.name, list(meeting.ranks.items()), RankTable.parse(meeting.table).digest, token=b"t" * 16
    )
    meeting.join(ends[0])
    port = _open_port(meeting.name)
    for name, (cluster_id, changes, code) in STRANGERS.items():
        with Stranger(port, cluster_id) as stranger:
            communicator = None if changes is None else structs.replace(said, **changes)
            stranger.say(CONTROL_PREAMBLE, stranger.hello(communicator=communicator))
            assert stranger.hear(Refused).code == code, name
            assert stranger.is_hung_up_on()
        assert ends[0].do(status, 1) is PREPARING
    failed = LLMStatusCode.LLM_LINK_FAILED
    assert ends[1].do(link, [info(1, port)]) == (failed, [failed])  # a good end that takes it for another listener
    assert ends[0].do(status, 1) is PREPARING
    with Stranger(port) as garbage, Stranger(port) as silent, Stranger(port) as half:
        garbage.say(b"GET / HTTP/1.1\r\n\r\n")
        assert garbage.is_hung_up_on()
        half.say(CONTROL_PREAMBLE[:5])
        meeting.join(ends[1])
        assert settle(ends, [1, 1]) == [OK, OK]
        wait_until(lambda: not reachable(port), 5)  # closed once all are met, whatever strangers are still there
        assert silent.is_hung_up_on()
    bytes_move_both_ways(*ends)


def test_a_listener_of_link_clusters_at_the_port_is_passed_by(shm_pair: Pair) -> None:
    name = new_name()
    first = ports(name, 1)[0]
    shm_pair.prompt.start("PROMPT", 1, listen_ip_info=f"{host(0)}:{first}", link_total_time=60)
    shm_pair.decoder.start("DECODER", 2, link_total_time=60)
    ends = [shm_pair.prompt, shm_pair.decoder]
    assert settle(ends, Meeting((1, 2), name).join(*ends)) == [OK, OK]
    assert [end.do(links) for end in ends] == [{2: "ready"}, {1: "ready"}]


LATE: Final = Spec(tensors=1, rows=4, blocks=True, blocks_key=BlocksCacheKey(1, 5), memory="private")
ROWS: Final = Spec(tensors=1, rows=4, memory="private")


def test_r16_after_link_memory_is_accessible_unless_told_otherwise_and_true_may_not_be_said(shm_pair: Pair) -> None:
    ends = start_two(shm_pair, enable_remote_cache_accessible=True, extra={"llm.Transport": "auto"})
    ends[0].do(make, "early", replace(LATE, accessible=True), 1)
    joined(*ends)
    for spec in (replace(LATE, accessible=True), replace(ROWS, accessible=True)):
        refused([ends[0]], [], ParamError, ["remote_accessible", "link()"], make, "late", spec, 1)
    source = ends[0].do(make, "late", LATE, 2)
    ends[0].do(make, "row", replace(ROWS, accessible=False), 3)
    target = ends[1].do(make, "kv", replace(LATE, blocks_key=None, memory="pool"), 4)
    ends[1].do(call, "pull_blocks", BlocksCacheKey(1, 5), Use("kv"), [1, 2], [0, 3])
    same_bytes(ends[1].do(show, "kv"), moved(target, source, [(0, 1), (3, 2)]))
    ends[0].do(ranks.finalize_and_init, make_config())
    ends[0].do(make, "again", replace(LATE, accessible=True), 5)  # nothing was linked since this init


GOOD_TABLE = ranks.table("127.0.0.1", "127.0.0.1")
GOOD: dict[str, Any] = {"comm_name": "n", "cluster_rank_info": {2: 0, 3: 1}, "rank_table": GOOD_TABLE}


def servers(**changes: Any) -> str:
    """Return a table whose first server has these fields."""
    content = json.loads(GOOD_TABLE)
    content["server_list"][0] |= changes
    return json.dumps(content)


def devices(*ranks: Any, **fields: Any) -> str:
    return servers(device=[{"device_id": "0", "rank_id": rank} | fields for rank in ranks])


WRONG: list[Row] = [
    bad(NONE, "comm_name", comm_name=None),
    bad(TYPE, "comm_name", "int", comm_name=1),
    bad(RULE, "comm_name", comm_name=""),
    bad(RULE, "comm_name", "128", comm_name="x" * 128),
    bad(RULE, "comm_name", comm_name="\ud800"),
    bad(RULE, "comm_name", "NUL", comm_name="a\0b"),
    bad(NONE, "cluster_rank_info", cluster_rank_info=None),
    bad(TYPE, "cluster_rank_info", "list", cluster_rank_info=[(2, 0), (3, 1)]),
    bad(TYPE, "cluster_rank_info", "str", cluster_rank_info={"2": 0, 3: 1}),
    bad(NONE, "cluster_rank_info", cluster_rank_info={None: 0, 3: 1}),
    bad(TYPE, "cluster_rank_info[2]", "str", cluster_rank_info={2: "0", 3: 1}),
    bad(NONE, "cluster_rank_info[3]", cluster_rank_info={2: 0, 3: None}),
    bad(RULE, "cluster_rank_info", "0 members", cluster_rank_info={}),
    bad(RULE, "cluster_rank_info", "5 members", cluster_rank_info={2: 0, 3: 1, 4: 2, 5: 3, 6: 4}),
    bad(RULE, "cluster_rank_info", "-1", cluster_rank_info={-1: 0, 2: 1}),
    bad(RULE, "cluster_rank_info", str(2**64), cluster_rank_info={2: 0, 2**64: 1}),
    bad(RULE, "cluster_rank_info[2]", "-1", cluster_rank_info={2: -1, 3: 1}),
    bad(RULE, "cluster_rank_info[3]", str(2**32), cluster_rank_info={2: 0, 3: 2**32}),
    bad(RULE, "ascending", "[1, 0]", cluster_rank_info={3: 1, 2: 0}),
    bad(RULE, "ascending", "[0, 0]", cluster_rank_info={3: 0, 2: 0}),
    bad(RULE, "ascending", cluster_rank_info={np.int64(2): 0, 3: 1, np.uint8(4): 1}),
    bad(RULE, "cluster_rank_info", "2", cluster_rank_info={3: 0, 4: 1}),
    bad(NONE, "rank_table", rank_table=None),
    bad(TYPE, "rank_table", "dict", rank_table={}),
    bad(RULE, "rank_table", "JSON", rank_table="{"),
    bad(RULE, "rank_table", "JSON", rank_table="[" * 100_000),
    bad(RULE, "rank_table", "list", rank_table="[]"),
    bad(RULE, "rank_table.server_list", rank_table="{}"),
    bad(RULE, "rank_table.server_list", "[]", rank_table='{"server_list": []}'),
    bad(RULE, "rank_table.server_list[0]", "int", rank_table='{"server_list": [1]}'),
    bad(RULE, "rank_table.server_list[0].device", "NoneType", rank_table=servers(device=None)),
    bad(RULE, "rank_table.server_list[0].device", rank_table=servers(device=[])),
    bad(RULE, "server_list[0].device[0]", "str", rank_table=servers(device=["0"])),
    bad(RULE, "server_list[0].device[0].rank_id", "None", rank_table=devices(None)),
    bad(RULE, "rank_id", "'a'", rank_table=devices("a")),
    bad(RULE, "rank_id", "True", rank_table=devices(True)),
    bad(RULE, "rank_id", "-1", rank_table=devices(-1)),
    bad(RULE, "rank_id", "4294967296", rank_table=devices("4294967296")),
    bad(RULE, "device[1].rank_id", "twice", rank_table=devices("0", "0")),
    bad(RULE, "rank_id 0", "cluster 2", rank_table=devices("7")),
    bad(RULE, "server_list[0].host_ip", "a host", rank_table=servers(host_ip="a host")),
    bad(RULE, "server_list[0].host_ip", "int", rank_table=servers(host_ip=1)),
    bad(RULE, "device[0].device_ip", "::g", rank_table=devices("0", device_ip="::g")),
    bad(RULE, "no IP address", "rank 0", rank_table=servers(host_ip="", server_id="0", device=[{"rank_id": "0"}])),
]
#: Several things are wrong: interface R19 says which check comes first.
IN_ORDER: list[Row] = [
    bad(NONE, "comm_name", comm_name=None, cluster_rank_info=None, rank_table=None),
    bad(NONE, "cluster_rank_info", cluster_rank_info=None, rank_table=None),
    bad(RULE, "5 members", cluster_rank_info=dict.fromkeys(range(5), 0), rank_table=None),
    bad(RULE, "-1", cluster_rank_info={-1: 0}, rank_table=None),
    bad(NONE, "rank_table", cluster_rank_info={9: 0}, rank_table=None),
    bad(RULE, "1 members", cluster_rank_info={9: 0}, rank_table="{"),
    bad(RULE, "ascending", cluster_rank_info={9: 1, 8: 0}, rank_table="{"),
    bad(RULE, "this cluster, 2", cluster_rank_info={8: 0, 9: 1}, rank_table="{"),
    bad(RULE, "JSON", cluster_rank_info={2: 0, 9: 1}, rank_table="{"),
]


UNKNOWN: list[Row] = [
    bad(UNLINKED, f"communicator {comm_id}", comm_id=comm_id)
    for comm_id in (0, 1, 2**64 - 1, int(LLMStatusCode.LLM_ALREADY_LINK))
]


def test_r01_r19_a_wrong_argument_of_link_is_refused_in_the_documented_order_before_anything_happens(
    end: LocalEnd,
) -> None:
    end.start("DECODER", 2)
    for call_ in ("unlink", "query_register_mem_status", "explain_communicator"):
        refuse([end], Table(f"dd.{call_}", {}, {"comm_id": UINT64}, *UNKNOWN))
    refuse([end], Table("dd.link", GOOD, {}, *WRONG, *IN_ORDER))
    end.do(make, "early", replace(ROWS, accessible=True), 1)  # link() has not been called
    assert end.do(join, *GOOD.values()) == 1, "no id was used up"


def test_with_the_hixl_backend_all_three_calls_are_feature_not_enabled(end: LocalEnd) -> None:
    end.start("DECODER", 2, listen_ip_info="127.0.0.1:0", transfer_backend="hixl")
    code = LLMStatusCode.LLM_FEATURE_NOT_ENABLED
    for function, args in ((join, GOOD.values()), (drop, [1]), (status, [1])):
        refused([end], [], LLMException, ["link_clusters"], function, *args, status=code)
