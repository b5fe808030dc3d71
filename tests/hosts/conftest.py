"""Hosts for the tests of this folder, and the processes of a test that are born on them, started, linked and killed.

Hosts are made once, healed and compared with their first picture after every test.

Where no namespace may be made the tests skip and say why; with ``LLM_DATADIST_HOSTS=required`` they fail instead.
"""

import ctypes
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.network import Host, Impossible, Network
from tests.support.authority import secret_file
from tests.support.ends import ChildEnd, Processes
from tests.support.linking import SUCCESS, explain, info, link, links
from tests.support.moves import wait_until
from tests.support.world import World

HOSTS = 4


class Cluster(Processes):
    """Links between its hosts are authenticated by a file of ``secrets``, as everywhere outside of tests."""

    def __init__(self, network: Network, secrets: dict[str, str]) -> None:
        super().__init__()
        self._authentication = secrets | {"llm.Insecure": "0"}
        self.network = network
        self.hosts = network.hosts
        self._addresses: dict[ChildEnd, str] = {}

    def born(self, host: Host, role: str, cluster_id: int, *, port: int = 0, **settings: Any) -> ChildEnd:
        """Start an LLMDataDist on a host, listening."""
        end = self.child(f"on host {host.number}")
        end.do(enter, host.pid)
        self._addresses[end] = host.address
        extra = self._authentication | settings.pop("extra", {})
        end.start(role, cluster_id, listen_ip_info=f"{host.address}:{port}", extra=extra, **settings)
        return end

    def link(self, here: ChildEnd, there: ChildEnd) -> None:
        """Link ``here`` to ``there``; both ends have their link afterwards."""
        local, remote = self._addresses[here], self._addresses[there]
        codes = here.do(link, [info(there.cluster_id, there.port, ip=remote, local=local)])
        assert codes == SUCCESS, codes
        wait_until(lambda: there.do(links).get(here.cluster_id) == "ready")
        assert here.do(explain, there.cluster_id).sealed

    def part(self) -> None:
        """Nothing is left on the hosts either."""
        super().part()
        for host in self.hosts:
            wait_until(lambda host=host: host.sockets() == [])  # type: ignore[misc]


def enter(world: World, pid: int) -> None:
    """Enter the namespaces of a process; a child of the nursery has one thread, as it must."""
    libc = ctypes.CDLL(None, use_errno=True)
    for kind in ("user", "net"):
        theirs = f"/proc/{pid}/ns/{kind}"
        if os.readlink(theirs) != os.readlink(f"/proc/self/ns/{kind}"):
            with open(theirs, "rb") as file:
                assert libc.setns(file.fileno(), 0) == 0, os.strerror(ctypes.get_errno())


def impossible(error: Impossible) -> None:
    """Skip, unless hosts are required."""
    if os.environ.get("LLM_DATADIST_HOSTS") == "required":
        pytest.fail(f"hosts are required: {error}")
    pytest.skip(str(error))


@pytest.fixture(scope="package")
def made_network() -> Iterator[Network]:
    try:
        network = Network(HOSTS)
    except Impossible as error:
        impossible(error)
    yield network
    network.close()


@pytest.fixture
def network(made_network: Network) -> Iterator[Network]:
    """The hosts as new, and nothing changed about them afterwards."""
    before = made_network.picture()
    yield made_network
    made_network.heal()
    with suppress(AssertionError):
        wait_until(lambda: made_network.picture() == before)
    now = made_network.picture()
    assert {name: set(now[name]) ^ set(lines) for name, lines in before.items() if now[name] != lines} == {}


@pytest.fixture
def cluster(network: Network, tmp_path: Path) -> Iterator[Cluster]:
    """Processes for one test, which leave nothing behind: neither in themselves nor on their hosts."""
    cluster = Cluster(network, secret_file(tmp_path / "secrets", hosts=b"h" * 32))
    yield cluster
    network.heal()  # so that those who part hear of each other
    cluster.part()
