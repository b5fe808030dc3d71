"""The hosts themselves: made by somebody who is not root, or not to be had.

That limits, plugs, cuts and the relay do what they say is seen by the other tests of this folder, which need it.
"""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from tests.hosts.conftest import impossible
from tests.hosts.network import Impossible, Network
from tests.support.ends import ChildEnd
from tests.support.moves import wait_until

if TYPE_CHECKING:
    from tests.support.world import World


def listen(world: World, address: str) -> int:
    world.memory["server"] = server = socket.create_server((address, 0))
    port: int = server.getsockname()[1]
    return port


def accept(world: World) -> None:
    with world.memory.pop("server") as server:
        server.settimeout(10)
        server.accept()[0].close()


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


def test_no_hosts_are_a_reason_to_skip_unless_they_are_required_and_a_missing_tool_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Impossible, match="ip and tc of iproute2 cannot be found") as caught:
        Network(1)
    for wish, outcome in (("", pytest.skip.Exception), ("required", pytest.fail.Exception)):
        monkeypatch.setenv("LLM_DATADIST_HOSTS", wish)
        with pytest.raises(outcome, match="ip and tc of iproute2"):
            impossible(caught.value)


def inhabited() -> set[int]:
    """Return the network namespaces in which any process lives."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        except OSError:
            continue  # it has ended
    return found
