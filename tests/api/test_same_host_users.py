"""Processes of two users on one host: ``llm.SameHostUsers``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.support.linking import SUCCESS, bytes_move_both_ways, explain, info, link
from tests.support.users import USER, become

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.ends import ChildEnd

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.mark.parametrize(
    ("prompt", "decoder", "folder", "transport"),
    [
        (str(USER), "root", False, "shm"),
        (f"7, {USER}", "0", True, "shm"),
        (None, "0", False, "tcp"),
        (str(USER), None, True, "tcp"),
        ("7", "0", False, "tcp"),
    ],
)
def test_memory_is_mapped_where_both_ends_admit_each_others_user(
    four: list[ChildEnd], socket_folder: Path, prompt: str | None, decoder: str | None, folder: bool, transport: str
) -> None:
    socket_folder.chmod(0o1777)
    owner, reader = four[:2]
    reader.do(become, USER)
    place = {"llm.ShmSocketDir": str(socket_folder)} if folder else {}
    for end, (role, number), users in ((owner, ("PROMPT", 1), prompt), (reader, ("DECODER", 2), decoder)):
        admitted = {} if users is None else {"llm.SameHostUsers": users}
        end.start(role, number, listen_ip_info="127.0.0.1:0", extra=place | admitted)
    assert reader.do(link, [info(1, owner.port)]) == SUCCESS
    said = reader.do(explain, 1)
    assert said.transport == transport
    assert ("llm.SameHostUsers of both may admit" in said.reason) is (transport == "tcp"), said.reason
    bytes_move_both_ways(owner, reader)
    reader.stop()
    owner.stop()
