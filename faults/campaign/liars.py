"""Liars and garbage: peers that lie, and what no peer should say, said to a worker's listener or same-host socket.

Liars are peers that link properly and then say what is well formed and not true. It may cost them their own link.

Everything is claimed: the incarnation and the cluster id of a worker's peer, time without end, pins and tensors that
they did not read, caches by generations that are over or to come, addresses, and that they unlink.

What a liar may do by the protocol it does not do, because the campaign would take it for a fault: it consumes no key
over shared memory, where a release is believed, and it writes with no handle that may become true.
"""

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from faults.campaign.memory import Directory, Found, Kind
from faults.campaign.producer import blocks_key, request_of
from faults.campaign.schedule import Epoch
from faults.fuzz.forge import HANDSHAKE, LINK, Forge
from faults.lane_ends import READ, WRITE, frame_of
from faults.strangers import Stranger
from llm_datadist._cache.registry import Namespace
from llm_datadist._links import messages as wire
from llm_datadist._links.identity import new_share
from llm_datadist._links.messages import CONTROL_PREAMBLE, FRAME_HEADER
from llm_datadist._native import Plan, encode_request, plan_row
from llm_datadist._transfer.resolution import Handle, encode_handle
from llm_datadist._transport.tcp.lanes import LANE_PREAMBLE
from llm_datadist.errors import LLMException

_PATIENCE_SECONDS: Final = 2.0
_FOREVER_MS: Final = 2**62
_HELD_SECONDS: Final = 4.0
#: Messages of a flood.
_DIFFERENT: Final = 20
_REPEATED: Final = 25


@dataclass(frozen=True)
class Victim:
    number: int
    port: int
    epoch: Epoch
    directory: Directory
    folder: Path

    @property
    def transport(self) -> str:
        forced: str = self.epoch.settings(self.number)["extra"]["llm.Transport"]
        return "shm" if forced == "auto" else forced

    def peer(self, rng: Random) -> tuple[int, bytes | None]:
        """Return the cluster id and the incarnation of one of its peers."""
        peer = rng.choice(self.epoch.peers(self.number))
        with suppress(FileNotFoundError):
            return peer + 1, (self.folder / f"incarnation-{peer}").read_bytes()
        return peer + 1, None


class Liars:
    """Those that are at it. The supervisor's thread only."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self.linked = 0

    def send(self, seed: int, victim: Victim, seconds: float) -> None:
        self._stop.clear()
        self._threads.append(threading.Thread(target=self._run, args=(Random(seed), victim, seconds), daemon=True))
        self._threads[-1].start()

    def join(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, rng: Random, victim: Victim, seconds: float) -> None:
        until = time.monotonic() + seconds
        # Whoever it lies to may hang up at any moment, be stopped, or be killed.
        with suppress(OSError, LLMException, AssertionError), _Liar(rng, victim) as liar:
            liar.join()
            self.linked += 1
            while time.monotonic() < until and not self._stop.is_set():
                liar.lie()


class _Liar(Stranger):
    """One of them: with an id of its own, or as a peer of the victim."""

    def __init__(self, rng: Random, victim: Victim) -> None:
        own = 900 + rng.randrange(1000), None
        peer, theirs = victim.peer(rng)
        super().__init__(victim.port, *rng.choice((own, own, own, (peer, None), (peer, theirs))))
        self.sock.settimeout(_PATIENCE_SECONDS)
        self._rng, self._victim = rng, victim
        self._forge = Forge(rng.randrange(1 << 30), LINK, wrong=0.0)
        self._pins = [1, 2, 3]
        self._answers: list[wire.Resolved] = []
        self._number = 0

    def join(self) -> None:
        rng, rca, transport = self._rng, self._victim.epoch.rca, self._victim.transport
        choice = {"present": rng.random() < 0.1, "proof": rng.choice((b"", bytes(32))), "share": new_share()}
        sequence = rng.choice((1, 2, 1 << 40, 2**63 - 1))
        self.link(sequence, transport, choice, remote_accessible=rca, transport=transport)

    def lie(self) -> None:
        self._number += 1
        lies: dict[Callable[[], object], float] = {
            self._resolve: 6,
            self._release: 6,
            self._consumed: 3,
            self._verify: 3,
            self._locate: 2,
            lambda: self.say(wire.UnlinkRequest(self._number), wire.UnlinkCancel()): 0.3,
            lambda: self.say(*(self._forge.frame() for _ in range(self._rng.randrange(1, 9)))): 3,
            self._ask_lane: 6 if self.lanes else 0,
            self._flood: 1,
        }
        self._rng.choices(list(lies), list(lies.values()))[0]()
        time.sleep(self._rng.choice((0.0, 0.002, 0.02)))

    def _flood(self) -> None:
        """Say hundreds of one kind at once, but of none that may be believed: nobody else has to wait for them."""
        kind = self._rng.choice(sorted(LINK.keys() - {"release", "consumed"}))
        forge = Forge(self._rng.randrange(1 << 30), {kind: 1}, wrong=0.0)
        self.say(*[forge.frame() for _ in range(_DIFFERENT)] * _REPEATED)

    def _found(self) -> Found | None:
        # Over shared memory the release of a key that was not read is believed.
        keyed = (Kind.KEYED,) * bool(self.lanes)
        kinds = (Kind.BLOCKS, Kind.REBOUND, Kind.ROWS, Kind.INBOX, Kind.INROWS, *keyed)
        return self._victim.directory.pick(self._rng, [self._victim.number], *kinds)

    def _resolve(self) -> None:
        found = self._found()
        if found is None:
            return
        row = self._rng.randrange(found.shape.rows)
        key: Any = None
        if found.kind is Kind.KEYED:
            key = (Namespace.REQUEST, request_of(found, row).req_id, 0)
        elif found.kind in (Kind.BLOCKS, Kind.REBOUND, Kind.INBOX):
            key = (Namespace.BLOCKS, 0, blocks_key(found).model_id)
        cache_id = 0 if key is not None else found.cache_id + self._rng.choice((0, 0, 0, 1, -1))
        push = self._victim.epoch.rca and self._rng.random() < 0.3
        self.say(wire.Resolve(self._number, push, key, cache_id, 0 if key else row, self._rng.choice((0, _FOREVER_MS))))
        answer: Any = self.hear(wire.Resolved | wire.Failed)  # type: ignore[arg-type]
        if isinstance(answer, wire.Resolved):
            self._answers = [*self._answers[-8:], answer]
            self._pins.append(answer.pin)

    def _release(self) -> None:
        self.say(wire.Release(self._rng.choice(self._pins), 0, self._rng.choice((0, 1, 4, 16, 2**40))))

    def _consumed(self) -> None:
        found = self._found()
        if found is not None and (self._victim.epoch.rca or self.lanes):
            self.say(wire.Consumed(found.cache_id, self._rng.randrange(found.shape.rows), 0, found.shape.tensors))

    def _guarded(self) -> tuple[int, list[wire.Guarded]] | None:
        """Return a cache, and guards of it that are not its own, and never will be."""
        if not self._answers:
            return None
        answer, off = self._rng.choice(self._answers), self._rng.choice((-2, -1, 1 << 20, 1 << 62))
        guards = [wire.Guarded(each.slot, max(each.generation + off, 1)) for each in answer.guards]
        return answer.cache_id + self._rng.choice((0, 0, 1, 1000)), guards or [wire.Guarded(1, 1)]

    def _verify(self) -> None:
        if (named := self._guarded()) is not None:
            runs = np.array([0, self._rng.choice((8, 4096, 2**62))], "<u8").tobytes()
            pin = self._rng.choice((0, *self._pins))
            self.say(
                wire.Verify(self._number, named[0], pin, named[1][:4], False, 4096, 0, 2, runs, False, bytes(16), 100)
            )

    def _locate(self) -> None:
        addresses = np.array([self._rng.randrange(2**47) for _ in range(8)], "<u8").tobytes()
        self.say(wire.Locate(self._number, addresses, self._rng.choice((1, 4096, 2**62))))

    def _ask_lane(self) -> None:
        named = self._guarded()
        if named is None:
            return
        write = self._rng.random() < 0.5
        nbytes, at = self._rng.choice((8, 512)), self._rng.choice((0, 512, 2**40))
        handle = encode_handle(Handle(named[0], self._rng.choice((0, 0, *self._pins)), named[1]))
        plan = Plan(0, 0, 2, plan_row(at, at, nbytes), False, 2 * nbytes)
        meta = encode_request(handle, self._rng.choice((4096, 12288, 2**40)), plan, write)
        payload = b"\xee" * (2 * nbytes) if write else b""
        lane = self._rng.choice(self.lanes)
        with suppress(BlockingIOError):
            lane.sendall(frame_of(WRITE if write else READ, self._number, meta, payload))
            lane.recv(1 << 16, socket.MSG_DONTWAIT)


class Rubbish:
    """Owns the connections that were used for it, for a few seconds each. The supervisor's thread only."""

    def __init__(self) -> None:
        self._held: list[tuple[float, socket.socket]] = []

    def throw(self, kind: str, seed: int, port: int, pid: int, folder: Path) -> None:
        rng = Random(seed)
        with suppress(OSError):
            sock = self._rendezvous(pid, folder) if kind == "rendezvous" else self._listener(port)
            if sock is not None:
                self._held.append((time.monotonic() + rng.uniform(0.0, _HELD_SECONDS), sock))
                _say(sock, kind, rng)

    def tidy(self, *, all_of_it: bool = False) -> None:
        now = time.monotonic()
        over = [sock for until, sock in self._held if all_of_it or until < now]
        self._held = [(until, sock) for until, sock in self._held if sock not in over]
        for sock in over:
            sock.close()

    @staticmethod
    def _listener(port: int) -> socket.socket:
        sock = socket.create_connection(("127.0.0.1", port), 0.5)
        sock.setblocking(False)
        return sock

    @staticmethod
    def _rendezvous(pid: int, folder: Path) -> socket.socket | None:
        """Return a connection to the same-host socket of a process, found as any stranger would find it."""
        inodes = set()
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                inodes.add(os.readlink(entry))
        for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
            fields = line.split()
            if len(fields) > 7 and f"socket:[{fields[6]}]" in inodes and fields[5] == "01":
                name = fields[7]
                sock = socket.socket(socket.AF_UNIX, int(fields[4], 16))
                sock.setblocking(False)
                try:
                    sock.connect("\0" + name[1:] if name.startswith("@") else name)
                except OSError:
                    sock.close()
                    continue
                return sock
        return None


def _say(sock: socket.socket, kind: str, rng: Random) -> None:
    match kind:
        case "noise" | "rendezvous":
            data = rng.randbytes(rng.choice((1, 16, 300, 9000)))
        case "half a greeting":
            data = (CONTROL_PREAMBLE + Forge(rng.randrange(1 << 30), HANDSHAKE).frame())[: rng.randrange(1, 60)]
        case "huge frame":
            data = CONTROL_PREAMBLE + FRAME_HEADER.pack(rng.choice((1 << 20, (1 << 20) + 1, (1 << 32) - 1))) + b"x" * 99
        case "frames":
            forge = Forge(rng.randrange(1 << 30), LINK | HANDSHAKE)
            data = CONTROL_PREAMBLE + b"".join(forge.frame() for _ in range(20))
        case "lane":
            data = LANE_PREAMBLE + rng.randbytes(rng.choice((3, 16, 64, 500)))
        case _:
            return
    sock.send(data)
