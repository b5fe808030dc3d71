"""What the tests of rank tables share: tables of this test run, joining, and waiting for what comes of it.

Several test runs may go on at once on one host: names and addresses hold this run's process id, so that none meets
another one's members.
"""

import itertools
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from llm_datadist import RegisterMemStatus
from llm_datadist.metrics import CommunicatorStatistics
from tests.support.ends import End
from tests.support.moves import wait_until
from tests.support.pairs import Pair
from tests.support.world import World

OK, PREPARING, FAILED = RegisterMemStatus.OK, RegisterMemStatus.PREPARING, RegisterMemStatus.FAILED
_numbers = itertools.count(1)
#: What no test waits for.
SECONDS: Final = {"link_total_time": 60}


def start_two(pair: Pair, **settings: Any) -> tuple[End, End]:
    """Start two ends that do not listen: rank tables need no listen_ip_info."""
    extra = {"llm.Transport": pair.transport} | settings.pop("extra", {})
    pair.prompt.start("PROMPT", 1, extra=extra, **(SECONDS | settings))
    pair.decoder.start("DECODER", 2, extra=extra, **(SECONDS | settings))
    return pair.prompt, pair.decoder


def finalize_and_init(world: World, options: dict[str, str]) -> None:
    """The same object lives again."""
    world.dd.finalize()
    world.dd.init(options)


def new_name() -> str:
    """Return a communicator's name that no other test has."""
    return f"test {os.getpid()} {next(_numbers)}"


def host(number: int) -> str:
    """Return the address of "host" 0 to 3 of this run: all of them are this one."""
    first, second, third = os.getpid().to_bytes(3, "big")
    return f"127.{number * 64 + first}.{second}.{third}"


def table(*hosts: str, **fields: Any) -> str:
    """Return a rank table: one server per entry, rank 0 on the first."""
    servers = [
        {
            "server_id": address,
            "device": [{"device_id": "0", "device_ip": f"192.0.2.{rank + 1}", "rank_id": str(rank)}],
            "host_ip": address,
        }
        for rank, address in enumerate(hosts)
    ]
    head = {"version": "1.0", "status": "completed", "server_count": str(len(servers))}
    return json.dumps(head | {"server_list": servers} | fields)


def join(world: World, name: str, ranks: dict[int, int], rank_table: str) -> int:
    return world.dd.link(name, ranks, rank_table)


@dataclass
class Meeting:
    """A communicator that is to be: ranks follow the order of the cluster ids; one host unless a table is given."""

    members: tuple[int, ...]
    name: str = field(default_factory=new_name)
    table: str = ""

    @property
    def ranks(self) -> dict[int, int]:
        return {cluster_id: rank for rank, cluster_id in enumerate(sorted(self.members))}

    def join(self, *ends: End) -> list[int]:
        rank_table = self.table or table(*(host(0) for _ in self.members))
        return [end.do(join, self.name, self.ranks, rank_table) for end in ends]


def drop(world: World, comm_id: int) -> None:
    world.dd.unlink(comm_id)


def status(world: World, comm_id: int) -> RegisterMemStatus:
    return world.dd.query_register_mem_status(comm_id)


def explained(world: World, comm_id: int) -> CommunicatorStatistics:
    return world.dd.explain_communicator(comm_id)


def settle(ends: Iterable[End], comm_ids: Sequence[int], seconds: float = 20.0) -> list[RegisterMemStatus]:
    """Wait until every end's communicator is decided; return how."""
    pairs = list(zip(ends, comm_ids, strict=True))
    wait_until(lambda: PREPARING not in [end.do(status, comm_id) for end, comm_id in pairs], seconds)
    return [end.do(status, comm_id) for end, comm_id in pairs]


def joined(*ends: End) -> list[int]:
    """Let every end call ``link()``, in this order, and see all become OK; return the communicators' ids."""
    comm_ids = Meeting(tuple(end.cluster_id for end in ends)).join(*ends)
    assert settle(ends, comm_ids) == [OK] * len(ends), [e.do(explained, c) for e, c in zip(ends, comm_ids, strict=True)]
    return comm_ids
