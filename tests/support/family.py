"""Processes of a test's own, to be killed, frozen and born again."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.ends import ChildEnd
from tests.support.world import residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Processes:
    """The processes of one test. Survivors must have nothing left when they have finalized."""

    def __init__(self) -> None:
        self._newborn: dict[ChildEnd, Any] = {}

    def child(self, name: str) -> ChildEnd:
        end = ChildEnd(name)
        self._newborn[end] = end.do(residue_of)
        return end

    def kill(self, end: ChildEnd) -> None:
        end.kill()

    def part(self) -> None:
        """Finalize and end those that were not killed, the last one first: it is the one that linked."""
        alive = [end for end in self._newborn if end.code != -signal.SIGKILL]
        for end in alive:
            end.signal(signal.SIGCONT)  # after a test that failed while it was frozen
        try:
            for end in reversed(alive):
                end.stop()
                assert end.do(settled_of, self._newborn[end]) == self._newborn[end]
                end.close()
        finally:
            for end in alive:
                end.kill()


class Family(Processes):
    """Ends over one transport."""

    def __init__(self, transport: str) -> None:
        super().__init__()
        self.transport = transport

    def born(self, role: str, cluster_id: int, *, port: int | None = 0, **settings: Any) -> ChildEnd:
        end = self.child(f"{role.lower()} {cluster_id}")
        extra = {"llm.Transport": self.transport} | settings.pop("extra", {})
        end.start(role, cluster_id, listen_ip_info=f"127.0.0.1:{port}", extra=extra, **settings)
        return end


@contextmanager
def one_family(transport: str) -> Iterator[Family]:
    """Yield a family; afterwards nothing of the library's may be left in the file system either."""
    before = _files_of_ours()
    family = Family(transport)
    yield family
    family.part()
    assert _files_of_ours() == before


def _files_of_ours() -> list[str]:
    names = [name for folder in ("/dev/shm", tempfile.gettempdir()) for name in os.listdir(folder)]
    return sorted(name for name in names if name.lstrip(".").startswith(("llm-datadist", "llm_datadist")))


def has_ended(pid: int) -> bool:
    """Return whether a process is at most an entry that its parent, who may not be ours, has not collected yet."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text("ascii")
    except (FileNotFoundError, ProcessLookupError):
        return True
