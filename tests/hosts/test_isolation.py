"""What two containers of a host do not share: the transports that docs/howto-hosts.md promises, each line made real."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from llm_datadist import BlocksCacheKey
from tests.hosts.conftest import enter
from tests.hosts.network import Host, Network
from tests.support.ends import ChildEnd
from tests.support.isolation import Isolation, isolations
from tests.support.linking import SUCCESS, bytes_move_both_ways, explain, info, link
from tests.support.moves import Spec, Use, call, make, moved, same_bytes, show
from tests.support.users import USER, become, become_root_of

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can set processes apart")

#: How `unshare` makes the namespaces; `net` is a host of the network.
NAMESPACES: Final = {
    "mount": ["--mount"],
    "ipc": ["--ipc"],
    "uts": ["--uts"],
    "pid": ["--pid", "--mount-proc", "--fork", "--kill-child"],
    "user": ["--user", "--map-root-user"],
}
#: Of the whole kernel: from then on it tells who is at the other end of a socket by a descriptor, in any pid namespace.
KNOWS_ITS_PEER: Final = (6, 5)


@pytest.fixture
def ends() -> Iterator[list[ChildEnd]]:
    found: list[ChildEnd] = []
    yield found
    for end in reversed(found):
        end.stop()
        end.close()


def _born(isolation: Isolation, host: Host, number: int) -> ChildEnd:
    apart, name = isolation.apart, f"end {number}"
    within = host.enter if "net" in apart else []
    if "ids" in apart:
        end = ChildEnd(name)
        become_root_of(end, 100_000 * (1 + number))
    elif flags := [flag for namespace, flags in NAMESPACES.items() if namespace in apart for flag in flags]:
        end = ChildEnd(name, inside=[*within, "unshare", *flags])
    else:
        end = ChildEnd(name)
        if within:
            end.do(enter, host.pid)
        if "uid" in apart and number:
            end.do(become, USER)
    return end


@pytest.mark.parametrize("isolation", isolations(), ids=str)
def test_two_processes_get_the_transports_that_the_page_promises(
    isolation: Isolation, network: Network, socket_folder: Path, ends: list[ChildEnd]
) -> None:
    if network.router.within:
        pytest.skip("namespaces can be made in a user namespace only")
    addresses = [host.address for host in network.hosts] if "net" in isolation.apart else ["127.0.0.1"] * 2
    socket_folder.chmod(0o1777)
    for number, (role, other) in enumerate((("PROMPT", str(USER)), ("DECODER", "0"))):
        ends.append(end := _born(isolation, network.hosts[number], number))
        known: dict[str, str] = {"llm.ShmSocketDir": str(socket_folder), "llm.SameHostUsers": other}
        options: dict[str, Any] = {name: known[name] for name in isolation.options}
        end.start(role, number + 1, listen_ip_info=f"{addresses[number]}:0", extra=options)
    prompt, decoder = ends
    assert decoder.do(link, [info(1, prompt.port, ip=addresses[0], local=addresses[1])]) == SUCCESS
    kernel = tuple(map(int, re.findall(r"\d+", os.uname().release)[:2]))
    pools = isolation.pools[0 if kernel >= KNOWS_ITS_PEER else -1]
    for end, peer in ((prompt, 2), (decoder, 1)):
        said = end.do(explain, peer)
        assert (said.transport, said.private_transport) == (pools, isolation.registered), said.reason
    bytes_move_both_ways(prompt, decoder)
    spec, key = Spec(blocks=True, memory="private"), BlocksCacheKey(1, 8)
    source = prompt.do(make, "registered", Spec(blocks=True, memory="private", blocks_key=key), 3)
    target = decoder.do(make, "registered", spec, 4)
    decoder.do(call, "pull_blocks", key, Use("registered"), [1, 6], [0, 3])
    same_bytes(decoder.do(show, "registered"), moved(target, source, [(0, 1), (3, 6)]))


def test_the_page_tells_of_each_namespace_and_what_costs_nothing_alone() -> None:
    lines = isolations()
    assert set().union(*(each.apart for each in lines)) == NAMESPACES.keys() | {"net", "ids", "uid"}
    assert [sorted(each.apart) for each in lines if each.registered == "cma"] == [["ipc", "mount", "uts"], ["net"]]
