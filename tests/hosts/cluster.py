"""The processes of a test between hosts: born on a host, started, linked, killed, and checked when they part."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING, Any

from tests.support.ends import Processes
from tests.support.linking import SUCCESS, explain, info, link, links
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.hosts.network import Host, Network
    from tests.support.ends import ChildEnd
    from tests.support.world import World


class Cluster(Processes):
    """Links between its hosts are authenticated by a file of ``secrets``, as everywhere outside of tests."""

    def __init__(self, network: Network, secrets: Path) -> None:
        super().__init__()
        self._authentication = {"llm.AuthSecretFile": str(secrets), "llm.Insecure": "0"}
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
