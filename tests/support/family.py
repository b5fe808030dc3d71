"""Processes of a test's own, to be killed, frozen and born again."""

from __future__ import annotations

import os
import signal
import tempfile
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support.ends import ChildEnd
from tests.support.world import residue_of, settled_of

if TYPE_CHECKING:
    from collections.abc import Iterator


class Family:
    """The processes of one test. Survivors must have nothing left when they have finalized."""

    def __init__(self, transport: str) -> None:
        self.transport = transport
        self._newborn: dict[ChildEnd, Any] = {}

    def born(self, role: str, cluster_id: int, *, port: int | None = 0, **settings: Any) -> ChildEnd:
        end = ChildEnd(f"{role.lower()} {cluster_id}")
        self._newborn[end] = end.do(residue_of)
        extra = {"llm.Transport": self.transport} | settings.pop("extra", {})
        end.start(role, cluster_id, listen_ip_info=f"127.0.0.1:{port}", extra=extra, **settings)
        return end

    def kill(self, end: ChildEnd) -> None:
        del self._newborn[end]
        end.kill()

    def part(self) -> None:
        for end in self._newborn:
            end.signal(signal.SIGCONT)  # after a test that failed while it was frozen
        try:
            for end, newborn in self._newborn.items():
                end.stop()
                assert end.do(settled_of, newborn) == newborn
                end.close()
        finally:
            for end in self._newborn:
                end.kill()


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
