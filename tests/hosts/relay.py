"""A network between hosts that delays, loses and reorders packets, from a seed: one TUN device in every namespace.

    relay.py SETTINGS    SETTINGS as JSON: see Settings; "ready" when the devices are there, counts as JSON at the end

It ends with its standard input. It stands in for the kernel's netem, which not every kernel has.
"""

from __future__ import annotations

import fcntl
import heapq
import json
import os
import random
import select
import socket
import struct
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

if __name__ == "__main__":  # run as a file
    sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.hosts.namespace import CLONE_NEWNET, enter_user, set_namespace

__all__ = ["DEVICE", "PROGRAM", "Counts", "Settings"]

PROGRAM = (sys.executable, "-I", "-S", os.path.abspath(__file__))
DEVICE = "relay0"
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_MTU_LIMIT = 65536
#: As many packets as a router would hold; one more is lost, as there.
_QUEUE_LIMIT = 4096


@dataclass(frozen=True)
class Settings:
    """What the network does.

    Attributes:
        ends: (process id in the namespace, address there) of every host.
        seed: Of everything that chance decides.
        delay: Seconds that each packet takes at least.
        jitter: Seconds that it may take longer; packets overtake each other where it is not 0.
        loss: Share of the packets that never arrive.
    """

    ends: list[tuple[int, str]]
    seed: int = 0
    delay: float = 0.0
    jitter: float = 0.0
    loss: float = 0.0


@dataclass
class Counts:
    """What became of the packets."""

    passed: int = 0
    lost: int = 0
    overtaken: int = 0


def open_device(pid: int) -> int:
    """Make the TUN device in the namespace of a process; its descriptor works from everywhere."""
    set_namespace(f"/proc/{pid}/ns/net", CLONE_NEWNET)
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


@dataclass
class Relay:
    """Forwards packets between the devices."""

    settings: Settings
    devices: dict[bytes, int]  # by address
    counts: Counts = field(default_factory=Counts)

    def __post_init__(self) -> None:
        self._random = random.Random(self.settings.seed)
        self._late: list[tuple[float, int, int, bytes]] = []  # due, number, device, packet
        self._number = 0
        self._newest: dict[int, int] = {}

    def run(self) -> None:
        """Forward until standard input ends."""
        poll = select.poll()
        for fd in (0, *self.devices.values()):
            poll.register(fd, select.POLLIN)
        while True:
            for fd, _ in poll.poll(self._wait_ms()):
                if fd == 0:
                    return
                self._take(fd)
            self._deliver(time.monotonic())

    def _wait_ms(self) -> float | None:
        return max(0.0, (self._late[0][0] - time.monotonic()) * 1e3) if self._late else None

    def _take(self, source: int) -> None:
        """Take every packet that waits on a device."""
        now = time.monotonic()
        for _ in range(256):  # then the others have their turn
            try:
                packet = os.read(source, _MTU_LIMIT)
            except BlockingIOError:
                return
            target = self.devices.get(packet[16:20]) if packet[0] >> 4 == 4 else None
            if target is None:
                continue  # not ours: IPv6's own noise
            if len(self._late) >= _QUEUE_LIMIT or self._random.random() < self.settings.loss:
                self.counts.lost += 1
                continue
            due = now + self.settings.delay + self._random.random() * self.settings.jitter
            self._number += 1
            heapq.heappush(self._late, (due, self._number, target, packet))

    def _deliver(self, now: float) -> None:
        while self._late and self._late[0][0] <= now:
            _, number, device, packet = heapq.heappop(self._late)
            try:
                os.write(device, packet)
            except OSError:
                self.counts.lost += 1  # the device is down
                continue
            self.counts.passed += 1
            self.counts.overtaken += number < self._newest.get(device, 0)
            self._newest[device] = max(number, self._newest.get(device, 0))


def _main(text: str) -> None:
    settings = Settings(**json.loads(text))
    enter_user(settings.ends[0][0])
    devices = {socket.inet_aton(address): open_device(pid) for pid, address in settings.ends}
    print("ready", flush=True)  # noqa: T201 (it speaks by its pipes)
    relay = Relay(settings, devices)
    relay.run()
    print(json.dumps(asdict(relay.counts)), flush=True)  # noqa: T201


if __name__ == "__main__":
    try:
        _main(sys.argv[1])
    except OSError as error:
        sys.exit(str(error))
