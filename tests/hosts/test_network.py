"""The hosts themselves, with plain sockets: what the other tests of this folder rely on."""

from __future__ import annotations

import hashlib
import os
import socket
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.hosts.conftest import impossible
from tests.hosts.network import Impossible, Network
from tests.support.ends import ChildEnd
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.hosts.cluster import Crew
    from tests.hosts.network import Host
    from tests.support.world import World

SECONDS = 10.0


class Talk:
    """Two children with a connection between them, from the second to the first."""

    def __init__(self, crew: Crew, first: Host, second: Host, *, relayed: bool = False) -> None:
        self._crew = crew
        self.hosts = first, second
        self.ends = crew.take(first), crew.take(second)
        address = first.relayed if relayed else first.address
        port = self.ends[0].do(listen, address)
        self.ends[0].begin(accept)
        self.ends[1].do(connect, address, port)
        self.ends[0].finish()

    def end(self) -> None:
        for host, end in zip(self.hosts, self.ends, strict=True):
            end.do(hang_up)
            self._crew.give(host, end)


def listen(world: World, address: str) -> int:
    world.memory["server"] = server = socket.create_server((address, 0))
    port: int = server.getsockname()[1]
    return port


def accept(world: World) -> None:
    with world.memory.pop("server") as server:
        server.settimeout(SECONDS)
        world.memory["talk"] = server.accept()[0]


def connect(world: World, address: str, port: int) -> None:
    world.memory["talk"] = socket.create_connection((address, port), SECONDS)


def hang_up(world: World) -> None:
    talk = world.memory.pop("talk")
    talk.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # without waiting for what was lost
    talk.close()


def say(world: World, data: bytes) -> None:
    world.memory["talk"].sendall(data)


def hear(world: World, count: int, seconds: float = SECONDS) -> str | None:
    """Return the digest of the next bytes, None when they do not come in time."""
    talk, data = world.memory["talk"], b""
    talk.settimeout(seconds)
    try:
        while len(data) < count:
            more = talk.recv(count - len(data))
            assert more
            data += more
    except TimeoutError:
        return None
    return hashlib.sha256(data).hexdigest()


def hidden_socket(world: World, name: str) -> None:
    server = world.memory["hidden"] = socket.socket(socket.AF_UNIX)
    server.bind(f"\0{name}")
    server.listen()


def finds(world: World, name: str) -> bool:
    with socket.socket(socket.AF_UNIX) as sock:
        return sock.connect_ex(f"\0{name}") == 0


def forget(world: World) -> None:
    world.memory.pop("hidden").close()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def data_of(seed: int, count: int) -> bytes:
    return np.random.default_rng(seed).bytes(count)


@pytest.fixture
def talk(network: Network, crew: Crew) -> Iterator[Talk]:
    """A connection from host 2 to host 1."""
    talk = Talk(crew, *network.hosts[:2])
    yield talk
    talk.end()


def test_every_host_reaches_every_other_by_address_and_none_by_an_abstract_socket(network: Network, crew: Crew) -> None:
    for first in network.hosts:
        for second in network.hosts:
            talk = Talk(crew, first, second)
            here, there = talk.ends
            there.do(say, b"from there")
            assert here.do(hear, 10) == digest(b"from there")
            name = f"llm-datadist-test-{os.getpid()}"
            here.do(hidden_socket, name)
            assert there.do(finds, name) == (first is second)
            here.do(forget)
            talk.end()


def test_a_one_way_cut_loses_one_direction_between_two_hosts_until_it_is_mended(network: Network, talk: Talk) -> None:
    (first, second), (here, there) = network.hosts[:2], talk.ends
    network.lose(first, second)
    here.do(say, b"answer")
    assert there.do(hear, 6, 0.3) is None
    network.find(first, second)
    assert there.do(hear, 6) == digest(b"answer"), "tcp sends it again"


@pytest.mark.parametrize("how", ["cut", "unplugged"])
def test_a_host_that_is_cut_off_hears_nothing_until_it_is_back(network: Network, talk: Talk, how: str) -> None:
    (first, second), (here, there) = network.hosts[:2], talk.ends
    network.cut(first, second) if how == "cut" else first.pull_plug()
    there.do(say, b"question")
    assert here.do(hear, 8, 0.3) is None
    network.reconnect_lanes(first, second) if how == "cut" else first.plug_in()
    assert here.do(hear, 8) == digest(b"question")


def test_a_cut_leaves_the_other_hosts_alone(network: Network, crew: Crew) -> None:
    first, second, third, _ = network.hosts
    network.cut(first, second)
    talk = Talk(crew, first, third)
    talk.ends[1].do(say, b"still here")
    assert talk.ends[0].do(hear, 10) == digest(b"still here")
    talk.end()


def test_a_limit_holds_bytes_up_and_loses_none(network: Network, talk: Talk) -> None:
    host = network.hosts[0]
    host.limit(80)
    sent = host.bytes_sent()
    data = data_of(1, 2 << 20)
    talk.ends[0].begin(say, data)
    assert talk.ends[1].do(hear, len(data)) == digest(data)
    talk.ends[0].finish()
    words = host.run("tc", "-s", "qdisc", "show", "dev", "eth0").split()
    assert int(words[words.index("overlimits") + 1]) > 10
    assert host.bytes_sent() > sent + len(data)


def test_a_relay_delays_loses_and_reorders_packets_and_tcp_delivers_them_all(network: Network, crew: Crew) -> None:
    hosts = network.hosts[:2]
    data = data_of(2, 1 << 20)
    try:
        with network.relay(hosts, seed=5, delay=0.002, jitter=0.002, loss=0.01) as counts:
            talk = Talk(crew, hosts[0], hosts[1], relayed=True)
            talk.ends[0].begin(say, data)
            assert talk.ends[1].do(hear, len(data)) == digest(data)
            talk.ends[0].finish()
            talk.end()
    except Impossible as error:
        impossible(error)
    assert counts.passed > len(data) // 1500
    assert counts.lost > 0
    assert counts.overtaken > 0


def test_hosts_of_somebody_who_is_not_root_work_and_end_with_their_processes() -> None:
    try:
        network = Network(2, as_user=True)
    except Impossible as error:
        impossible(error)
    inode = os.stat(f"/proc/{network.hosts[0].pid}/ns/net").st_ino
    end = ChildEnd("inside", network.hosts[0].prefix)
    assert inode in inhabited()
    port = end.do(listen, network.hosts[0].address)
    end.begin(accept)
    network.hosts[1].run("python3", "-c", f"import socket; socket.create_connection(('10.99.1.2', {port}), 5)")
    end.finish()
    network.close()
    assert inode in inhabited(), "a process is inside still"
    end.kill()
    wait_until(lambda: inode not in inhabited())


@pytest.mark.parametrize(("wish", "outcome"), [("", pytest.skip.Exception), ("required", pytest.fail.Exception)])
def test_no_hosts_are_a_reason_to_skip_unless_they_are_required(
    monkeypatch: pytest.MonkeyPatch, wish: str, outcome: type[BaseException]
) -> None:
    monkeypatch.setenv("LLM_DATADIST_HOSTS", wish)
    with pytest.raises(outcome, match="no namespaces today"):
        impossible(Impossible("no namespaces today"))


def test_a_missing_tool_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Impossible, match="ip and tc of iproute2 cannot be found"):
        Network(1)


def inhabited() -> set[int]:
    """Return the network namespaces in which any process lives."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        except OSError:
            continue  # it has ended
    return found
