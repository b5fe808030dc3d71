"""Rank tables: which address counts, what makes two of them equal, and which ports follow from a name."""

import json
from typing import Any

import pytest

from llm_datadist._links.ranktable import PORTS_VARIABLE, RankTable, ports
from llm_datadist.errors import ParamError


def test_host_ip_comes_first_then_server_id_then_device_ip() -> None:
    rows: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"host_ip": "10.0.0.1", "server_id": "10.0.0.2"}, {"device_ip": "10.0.0.3"}, "10.0.0.1"),
        ({"host_ip": "", "server_id": "10.0.0.2"}, {"device_ip": "10.0.0.3"}, "10.0.0.2"),
        ({"host_ip": None, "server_id": "node0"}, {"device_ip": "10.0.0.3"}, "10.0.0.3"),
        ({"server_id": 7}, {"device_ip": "10.0.0.3"}, "10.0.0.3"),
        ({"server_id": "10.0.0.2"}, {}, "10.0.0.2"),
        ({}, {"device_ip": "10.0.0.3", "rank_id": 0}, "10.0.0.3"),
        ({"server_id": "fd00::1"}, {"device_ip": "10.0.0.3"}, "fd00::1"),
    ]
    for server, device, address in rows:
        table = {"server_list": [server | {"device": [{"rank_id": "0"} | device]}]}
        assert RankTable.parse(json.dumps(table)).address(0, 5) == address


@pytest.mark.parametrize(("field", "of_device"), [("host_ip", False), ("device_ip", True)])
def test_an_address_with_a_scope_says_what_to_give_instead(field: str, of_device: bool) -> None:
    scoped = {field: "fe80::1%eth0"}
    server = {"device": [{"rank_id": "0"} | (scoped if of_device else {})]} | ({} if of_device else scoped)
    with pytest.raises(
        ParamError, match=rf"{field}: 'fe80::1%eth0': .* scope \(%\) is link-local, .*; give that host's"
    ):
        RankTable.parse(json.dumps({"server_list": [server]}))


def test_members_of_one_server_share_its_address_and_the_digest_is_of_what_a_table_says_not_of_how() -> None:
    devices = [{"device_id": str(rank), "device_ip": f"192.0.2.{rank}", "rank_id": str(rank)} for rank in range(2)]
    table = {"version": "1.2", "server_count": "1", "server_list": [{"server_id": "10.0.0.1", "device": devices}]}
    first, second = RankTable.parse(json.dumps(table)), RankTable.parse(json.dumps(table, indent=4, sort_keys=True))
    assert first.addresses == {0: "10.0.0.1", 1: "10.0.0.1"}
    devices[1]["device_id"] = "2"
    assert first.digest == second.digest != RankTable.parse(json.dumps(table)).digest
    assert len(first.digest) == 16


def test_ports_follow_from_the_name_and_the_listener_and_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PORTS_VARIABLE, raising=False)
    assert ports("link", 1) == ports("link", 1)
    assert len({tuple(ports(name, listener)) for name in "abc" for listener in (1, 2, 2**64 - 1)}) == 9
    for number in range(200):
        found = ports(f"communicator {number}", number)
        assert len(set(found)) == 8
        assert all(27000 <= port <= 31999 for port in found)
    monkeypatch.setenv(PORTS_VARIABLE, " 40000 - 40002 ")
    assert sorted(ports("link", 1)) == [40000, 40001, 40002]
    monkeypatch.setenv(PORTS_VARIABLE, "65535-65535")
    assert ports("link", 1) == [65535]
