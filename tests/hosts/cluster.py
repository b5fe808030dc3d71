"""The processes of a test between hosts: born on a host, started, linked, killed, and checked when they part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, info, link, links
from tests.support.moves import wait_until
from tests.support.world import World, residue_of, settled_of

if TYPE_CHECKING:
    from llm_datadist.metrics import LinkStatistics
    from tests.hosts.network import Host, Network

__all__ = ["Cluster", "Crew", "explained"]


class Crew:
    """Child processes on hosts that wait for the next test: starting one takes longer than most tests."""

    def __init__(self) -> None:
        self._idle: dict[Host, list[ChildEnd]] = {}

    def take(self, host: Host) -> ChildEnd:
        """Return a child on a host."""
        idle = self._idle.setdefault(host, [])
        return idle.pop() if idle else ChildEnd(f"on host {host.number}", host.prefix)

    def give(self, host: Host, end: ChildEnd) -> None:
        """Take one back that has nothing left of its test."""
        self._idle[host].append(end)

    def close(self) -> None:
        """End them."""
        for ends in self._idle.values():
            for end in ends:
                end.close()


class Cluster:
    """The processes of one test."""

    def __init__(self, network: Network, crew: Crew) -> None:
        self.network = network
        self.hosts = network.hosts
        self._crew = crew
        self._born: dict[ChildEnd, tuple[Host, str, dict[str, Any]]] = {}

    def born(
        self,
        host: Host,
        role: str,
        cluster_id: int,
        *,
        port: int = 0,
        address: str | None = None,
        extra: dict[str, str] | None = None,
        **settings: Any,
    ) -> ChildEnd:
        """Start an LLMDataDist on a host, listening."""
        end, address = self._crew.take(host), address or host.address
        self._born[end] = (host, address, end.do(_residue))
        end.start(role, cluster_id, listen_ip_info=f"{address}:{port}", extra=extra or {}, **settings)
        return end

    def link(self, here: ChildEnd, there: ChildEnd) -> None:
        """Link ``here`` to ``there``; both ends have their link afterwards."""
        (_, local, _), (_, remote, _) = self._born[here], self._born[there]
        codes = here.do(link, [info(there.cluster_id, there.port, ip=remote, local=local)])
        assert codes == SUCCESS, codes
        wait_until(lambda: there.do(links).get(here.cluster_id) == "ready")

    def kill(self, end: ChildEnd) -> None:
        """``kill -9``."""
        del self._born[end]
        end.kill()

    def part(self) -> None:
        """Finalize everybody, who must have nothing left. The ones that linked come last and go first."""
        for end, (host, _, before) in reversed(self._born.items()):
            end.stop()
            assert end.do(settled_of, before) == before
            self._crew.give(host, end)
        self._born.clear()
        for host in self.hosts:
            wait_until(lambda host=host: host.sockets() == [])  # type: ignore[misc]

    def abandon(self) -> None:
        """Kill those that could not part."""
        for end in tuple(self._born):
            self.kill(end)


def _residue(world: World) -> dict[str, Any]:
    """Look from this module: importing it here opens the sockets of the nursery, which are no test's."""
    return residue_of(world)


def explained(world: World, peer: int) -> LinkStatistics:
    """Return what an end says about a link."""
    return world.dd.explain(peer)
