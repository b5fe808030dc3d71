"""NIXL agents: registered memory, and transfers to or from the memory of one peer.

NIXL cannot stop a transfer. Only the end of its agent does: that closes its connections and, with RDMA, makes its keys
invalid. So each side of a link has up to three agents of its own: a *sender*, which starts transfers, and *receivers*
of its pulls and of the peer's pushes.

Threads: one at a time uses an agent (:mod:`.slots`). Only the receiver of pulls has a thread of UCX, which makes its
progress: at a sender that would fight for one lock with the thread that waits, at half the speed.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
import time
from collections import deque
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np

from llm_datadist._log import links_logger as logger
from llm_datadist._transport.nixl.bindings import (
    NixlFailed,
    import_bindings,
    installed,
    package_version,
    ucx_transports,
)
from llm_datadist._transport.nixl.messages import Address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

#: No cache of registrations: what is moved is registered. To make one UCX reads the program break and stores it for
#: malloc, without malloc's lock. If another thread's malloc raises it in between, that ends the process.
_NO_CACHE: Final = "RCACHE_ENABLE=n"
_RDMA_DEVICES: Final = Path("/sys/class/infiniband")
#: A transfer is posted in parts; its deadline is checked between two.
_PART_BYTES: Final = 16 << 20
_PARTS_ON_THEIR_WAY: Final = 2  # one moves while the next is posted
_PAUSE_SECONDS: Final = 50e-6
_KNOWN_RECEIVERS: Final = 4  # a peer uses two at a time; older ones have ended
#: Longest sleep of a receiver's thread; bytes wake it. NIXL's default, no sleep, takes a whole core.
_SLEEP_MICROSECONDS: Final = 100_000
_QUICK_POLLS: Final = 50  # polls without a pause, enough for a small transfer
HOST: Final = -1  # in place of a GPU's ordinal
_making = threading.Lock()  # tells the threads of a new agent from those of another one
os.register_at_fork(after_in_child=lambda: globals().update(_making=threading.Lock()))


@cache
def usable(fabric: str) -> str:
    """Return why UCX cannot use a fabric, if so. The first agent of a process takes half a second."""
    try:
        Agent(fabric, progress=False).end()
    except NixlFailed as error:
        return str(error)
    return ""


@cache
def fabric() -> str:
    """Return the fabric that UCX can use here: ``rdma``, ``tcp``, or "" if NIXL is not installed.

    A trial agent that may use nothing else proves that UCX can use RDMA devices.
    """
    if not installed():
        return ""
    if _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()):
        if not (reason := usable("rdma")):
            return "rdma"
        logger.info("nixl uses tcp: there are RDMA devices, and UCX cannot use them: %s", reason)
    return "tcp"


def spans_of(
    bases: NDArray[np.uint64], offsets: NDArray[np.uint64], nbytes: NDArray[np.uint64], device: int = HOST
) -> NDArray[np.uint64]:
    """Return NIXL's descriptors (address, bytes, device) of every run of every tensor, shape (T * R, 3)."""
    spans = np.full((len(bases), len(offsets), 3), max(0, device), np.uint64)
    np.add(bases[:, None], offsets[None, :], out=spans[:, :, 0])
    spans[:, :, 1] = nbytes
    return spans.reshape(-1, 3)


class Agent:
    """One NIXL agent, over NIXL's bindings: NIXL's Python class gives a progress thread a whole core.

    ``pools``: spans (address, bytes, ordinal of their GPU or HOST), registered at once.
    Threads: one at a time, :meth:`end` included.
    Errors: NixlFailed for every error of NIXL.
    """

    def __init__(self, fabric: str, *, progress: bool, pools: Iterable[tuple[int, int, int]] = ()) -> None:
        self.name = secrets.token_hex(8)
        self.version = 0  # of what is registered
        self.loaded: dict[str, str] = {}  # receivers of the peer that this agent knows: name -> Address.known_as
        self._pools = list(pools)
        #: Registered outside the pools; replaced, never changed, because other threads read it.
        self.others: set[tuple[int, int, int]] = set()
        self._metadata = b""  # of this version, once needed
        self._nixl: Any = None  # until end(). No frame may hold it, because exceptions keep frames
        self._api = import_bindings()
        try:
            transports = ucx_transports(fabric)
            config = self._api.nixlAgentConfig()
            config.useProgThread, config.useListenThread = progress, False
            config.pthrDelay = _SLEEP_MICROSECONDS
            config.syncMode = self._api.NIXL_THREAD_SYNC_STRICT
            with _making:
                before = _threads()
                self._nixl = self._api.nixlAgent(self.name, config)
                parameters, _ = self._call("getPluginParams", "UCX")
                parameters |= {"ucx_error_handling_mode": "peer", "engine_config": f"TLS={transports},{_NO_CACHE}"}
                self._ucx = [self._call("createBackend", "UCX", parameters)]
                self.threads = _threads() - before
            if self._pools:
                self._register(self._pools)
        except Exception as error:
            self.end()
            raise NixlFailed(f"UCX cannot use {fabric}: {str(error) or type(error).__name__}") from error

    def cover(self, bases: NDArray[np.uint64], extent: int, device: int = HOST) -> None:
        inside = np.zeros(len(bases), bool)
        for address, nbytes, _ in self._pools:
            inside |= (bases >= address) & (bases + np.uint64(extent) <= address + nbytes)
        missing = {(base, extent, device) for base in bases[~inside].tolist()} - self.others
        if missing:
            self._register(sorted(missing))
            self.others = self.others | missing

    def covers_any(self, bases: Iterable[int]) -> bool:
        known = {base for base, _, _ in self.others}
        return not known.isdisjoint(bases)

    def address(self, known: str) -> Address:
        """Return this receiver's address, without the metadata if it is ``known`` to the peer."""
        self._metadata = self._metadata or self._call("getLocalMD")
        here = Address(self.name, self.version, self._metadata, package_version())
        return msgspec.structs.replace(here, metadata=b"") if known == here.known_as else here

    def load(self, address: Address) -> bool:
        """Load a receiver of the peer; return False if its metadata is needed and missing."""
        if self.loaded.get(address.name) != address.known_as:
            if not address.metadata:
                return False
            try:
                name = self._call("loadRemoteMD", address.metadata)
            except NixlFailed as error:
                raise NixlFailed(
                    f"{error}: the metadata of the peer, of NIXL {address.package}, mean nothing to NIXL "
                    f"{package_version()} here"
                ) from error
            if name not in (address.name, address.name.encode()):
                raise NixlFailed("the metadata of the peer are those of another agent than it names")
        self.loaded.pop(address.name, None)
        self.loaded[address.name] = address.known_as  # last in order of use
        if len(self.loaded) > _KNOWN_RECEIVERS:
            oldest = next(iter(self.loaded))
            del self.loaded[oldest]
            self._call("invalidateRemoteMD", oldest)
        return True

    def move(
        self,
        verb: str,
        peer: str,
        here: NDArray[np.uint64],
        there: NDArray[np.uint64],
        turn: Callable[[], object],
        moved: Callable[[int], None],
        devices: tuple[int, int] = (HOST, HOST),
    ) -> None:
        """Move the bytes of the descriptors ``here`` to ("WRITE"), or from ("READ"), those ``there``.

        ``devices``: GPU or HOST, here and there. ``peer`` is loaded. ``turn`` runs between steps and may raise;
        ``moved`` gets the bytes of each part. After an exception bytes may move until :meth:`end`.
        """
        operation = getattr(self._api, f"NIXL_{verb}")
        parts, posted = deque(_parts_of(here[:, 1])), deque[tuple[int, int]]()
        try:
            while parts or posted:
                turn()
                if parts and len(posted) < _PARTS_ON_THEIR_WAY:
                    part, nbytes = parts.popleft()
                    sides = (here[part], devices[0]), (there[part], devices[1])
                    spans = [self._call("nixlXferDList", self._segment(at), each, of="_api") for each, at in sides]
                    handle = self._call("createXferReq", operation, *spans, peer, "", self._ucx)
                    posted.append((handle, nbytes))
                    self._call("postXferReq", handle, "")
                    continue
                handle, nbytes = posted[0]
                self._wait(handle, turn)
                posted.popleft()
                self._release(handle)
                moved(nbytes)
        finally:
            for handle, _ in posted:
                self._release(handle)

    def _wait(self, handle: int, turn: Callable[[], object]) -> None:
        polls = 0
        while (state := self._call("getXferStatus", handle)) == self._api.NIXL_IN_PROG:
            turn()
            polls += 1
            if polls > _QUICK_POLLS:
                time.sleep(_PAUSE_SECONDS)
        if state != self._api.NIXL_SUCCESS:
            raise NixlFailed(f"a transfer ended as {state}")

    def _release(self, handle: int) -> None:
        """Give a handle back. While it moves bytes NIXL may refuse; then the agent's end does it."""
        try:
            self._call("releaseXferReq", handle)
        except NixlFailed as error:
            logger.debug("nixl: a transfer in progress is released with its agent: %s", error)

    def receive(self) -> None:
        """Let bytes in, if no thread of UCX does."""
        self._call("getNotifs", {}, self._ucx)

    def end(self) -> None:
        """End the agent; then no byte passes through it. Idempotent."""
        self._nixl = None

    def cpu_seconds(self) -> float:
        seconds = 0.0
        for thread in self.threads:
            with suppress(OSError):  # it has ended
                seconds += int(Path(f"/proc/self/task/{thread}/schedstat").read_text().split()[0]) / 1e9
        return seconds

    def _segment(self, device: int) -> Any:  # noqa: ANN401 (NIXL has no types)
        return self._api.DRAM_SEG if device == HOST else self._api.VRAM_SEG

    def _register(self, spans: Iterable[tuple[int, int, int]]) -> None:
        described: dict[Any, list[tuple[int, int, int, str]]] = {}
        for address, nbytes, device in spans:
            described.setdefault(self._segment(device), []).append((address, nbytes, max(0, device), ""))
        for segment, each in described.items():
            self._call("registerMem", self._call("nixlRegDList", segment, each, of="_api"), self._ucx)
        self.version += 1
        self._metadata = b""

    def _call(self, method: str, *arguments: Any, of: str = "_nixl") -> Any:  # noqa: ANN401 (NIXL has no types)
        if self._nixl is None:
            raise NixlFailed("the agent has ended")
        try:
            return getattr(getattr(self, of), method)(*arguments)
        except MemoryError:
            raise
        except Exception as error:
            raise NixlFailed(str(error) or type(error).__name__) from error


def _parts_of(nbytes: NDArray[np.uint64]) -> Iterator[tuple[slice, int]]:
    """Yield the parts of a transfer, with the bytes of each; ``nbytes`` of each descriptor. A large one is a part."""
    ends, first, begun = np.cumsum(nbytes), 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, begun + _PART_BYTES, side="right")))
        yield slice(first, last), int(ends[last - 1]) - begun
        first, begun = last, int(ends[last - 1])


def keep_for_ever(owner: object) -> None:
    """Never destroy an owner of agents: in a forked child they would wait for threads of the parent."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))


def _threads() -> frozenset[int]:
    """Return the ids of this process's threads that are unknown to Python."""
    python = {thread.native_id for thread in threading.enumerate()}
    return frozenset(int(name) for name in os.listdir("/proc/self/task") if int(name) not in python)
