"""What no peer should say, said to a worker's listener and to its same-host socket."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Final

from faults.fuzz.forge import HANDSHAKE, LINK, Forge
from llm_datadist._links.messages import CONTROL_PREAMBLE, FRAME_HEADER
from llm_datadist._transport.lanes import LANE_PREAMBLE

_HELD_SECONDS: Final = 4.0


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
