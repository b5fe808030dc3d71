"""The launcher: what it starts answers, what it ends is gone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servers import Servers


def _group_lives(group: int) -> bool:
    """Return True while a process of the group runs; one that has only to be reaped by its parent has ended."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as stat:
                fields = stat.read().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            return True
    return False


def test_a_killed_server_is_gone_with_all_its_processes_and_another_takes_its_port(servers: Servers) -> None:
    first = servers.start("ordinary").wait()
    assert _group_lives(first.process.pid)
    first.kill()
    assert not first.healthy()
    assert not _group_lives(first.process.pid)
    second = servers.start("ordinary", name="second", port=first.port).wait()
    assert second.get("/v1/models")[0] == 200
    second.stop()
    assert not _group_lives(second.process.pid)


def test_a_server_that_cannot_start_says_why(servers: Servers) -> None:
    server = servers.start("ordinary", options=["--max-model-len", "nonsense"])
    with pytest.raises(RuntimeError, match=r"(?s)ordinary ended with \d+:.*nonsense"):
        server.wait()
