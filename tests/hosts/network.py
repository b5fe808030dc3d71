"""Hosts for the tests: network namespaces around a router, whose cables, routes and rates the tests change.

            router  10.99.N.1
           /   |   \\                 one veth pair for each host: eth0 there, hostN at the router
    host 1  host 2  host 3           10.99.N.2, and 10.98.0.N where a relay runs (relay.py)

Made by iproute2 and namespace.py, as root or in a user namespace.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tests.hosts import namespace, relay

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Host", "Impossible", "Namespace", "Network"]

#: Sockets in these states belong to somebody: established, connecting (2), close wait, listening.
_HELD = {"01", "02", "03", "08", "0A"}


class Impossible(Exception):
    """Here are no hosts to be made; says why."""


class Namespace:
    """A network namespace and the process that keeps it."""

    def __init__(self, where: str) -> None:
        self._keeper = subprocess.Popen(
            [*namespace.PROGRAM, "keep", where], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True,
        )  # fmt: skip
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "kept\n":
            self._keeper.wait(10)
            assert self._keeper.stderr is not None
            text = " ".join(self._keeper.stderr.read().split())
            self.close()
            raise Impossible(f"no network namespace may be made here ({where}): {text}")

    @property
    def pid(self) -> int:
        """The keeper's process id: who names it names the namespace."""
        return self._keeper.pid

    def run(self, *command: str, text: str = "") -> str:
        """Run a program in the namespace and return what it printed."""
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        print(json.dumps([command, text]), file=self._keeper.stdin, flush=True)
        code, printed, complaint = json.loads(self._keeper.stdout.readline())
        assert code == 0, f"{' '.join(command)}: {complaint}"
        return str(printed)

    def ip(self, *lines: str) -> str:
        """Run ``ip`` with each line, all in one process."""
        return self.run("ip", "-batch", "-", text="\n".join(lines))

    def sockets(self) -> list[str]:
        """Return the TCP sockets that somebody holds, as "local remote state"."""
        lines = Path(f"/proc/{self.pid}/net/tcp").read_text("ascii").splitlines()[1:]
        return [" ".join(fields[1:4]) for fields in map(str.split, lines) if fields[3] in _HELD]

    def picture(self) -> list[str]:
        """Return addresses, routes, rules and queues."""
        text = self.ip("address show up", "route", "rule") + self.run("tc", "qdisc")
        # Those follow by themselves, a little later.
        text = re.sub(r"<[^>]*>|state \w+|refcnt \d+|linkdown", "", text)
        return [" ".join(line.split()) for line in text.splitlines()]

    def close(self) -> None:
        """End it. What still runs inside keeps it alive."""
        for pipe in (self._keeper.stdin, self._keeper.stdout, self._keeper.stderr):
            assert pipe is not None
            pipe.close()
        self._keeper.wait(10)


class Host(Namespace):
    """A namespace with an address."""

    def __init__(self, where: str, number: int) -> None:
        super().__init__(where)
        self.number = number
        self.address = f"10.99.{number}.2"
        self.relayed = f"10.98.0.{number}"
        self._unplugged = self._limited = False

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that runs another one on this host."""
        return (*namespace.PROGRAM, "enter", str(self.pid))

    def bytes_sent(self) -> int:
        """Return how many bytes have left the host."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text("ascii").splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
        raise AssertionError(f"host {self.number} has no eth0")

    def plug_in(self) -> None:
        """Have the cable in, and the way to the others."""
        self.ip("link set eth0 up", f"route replace default via 10.99.{self.number}.1")
        self._unplugged = False

    def pull_plug(self) -> None:
        """Have the cable out: what is sent fails here at once, what others send to it is lost."""
        self.ip("link set eth0 down")
        self._unplugged = True

    def limit(self, megabits: int) -> None:
        """Let no more than this leave the host in a second."""
        self.run(*f"tc qdisc replace dev eth0 root tbf rate {megabits}mbit burst 128kb latency 100ms".split())
        self._limited = True

    def held_up(self) -> int:
        """Return how many packets have waited because of the limit."""
        words = self.run("tc", "-s", "qdisc", "show", "dev", "eth0").split()
        return int(words[words.index("overlimits") + 1])

    def unlimit(self) -> None:
        """Take the limit off."""
        self.run(*["tc", "qdisc", "del", "dev", "eth0", "root"])
        self._limited = False

    def heal(self) -> None:
        """Undo what was done to it."""
        if self._unplugged:
            self.plug_in()
        if self._limited:
            self.unlimit()


class Network:
    """Some hosts and the router between them; close it.

    Raises:
        Impossible: They cannot be made here.
    """

    def __init__(self, hosts: int, *, as_user: bool = False) -> None:
        missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
        if missing:
            raise Impossible(f"{' and '.join(missing)} of iproute2 cannot be found")
        self.router, kind = _first(as_user)
        self.hosts: list[Host] = []
        self._lost: list[tuple[Host, Host]] = []
        try:
            where = "root" if kind == "root" else str(self.router.pid)
            for number in range(1, hosts + 1):
                self.hosts.append(Host(where, number))
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self.router.run("tee", "/proc/sys/net/ipv4/ip_forward", text="1")
        for each in (self.router, *self.hosts):
            # Its own traffic would be counted, and relayed.
            each.run("tee", "/proc/sys/net/ipv6/conf/default/disable_ipv6", text="1")
        for host in self.hosts:
            n = host.number
            self.router.ip(
                f"link add host{n} type veth peer name eth0 netns {host.pid}",
                f"address add 10.99.{n}.1/24 dev host{n}",
                f"link set host{n} up",
            )
            host.ip(f"address add {host.address}/24 dev eth0")
            host.plug_in()

    def lose(self, source: Host, target: Host) -> None:
        """Lose at the router, without a word, what one host sends to another; the other direction stays."""
        self.router.ip(f"rule add from {source.address} to {target.address} priority 10 blackhole")
        self._lost.append((source, target))

    def cut(self, one: Host, other: Host) -> None:
        """Lose what two hosts send to each other."""
        self.lose(one, other)
        self.lose(other, one)

    @contextmanager
    def relay(self, hosts: list[Host], *, seed: int, **chances: float) -> Iterator[relay.Counts]:
        """Connect hosts a second time, by their ``relayed`` addresses, as relay.Settings says.

        Yields the counts of packets, which are filled in at the end.

        Raises:
            Impossible: There may be no TUN device.
        """
        settings = relay.Settings([(host.pid, host.relayed) for host in hosts], seed, **chances)
        process = subprocess.Popen(
            [*relay.PROGRAM, json.dumps(asdict(settings))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        counts = relay.Counts()
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            if process.stdout.readline() != "ready\n":
                raise Impossible(f"no TUN device may be made here: {' '.join(process.stderr.read().split())}")
            for host in hosts:
                host.ip(f"address add {host.relayed}/24 dev {relay.DEVICE}", f"link set {relay.DEVICE} mtu 1500 up")
            yield counts
        finally:
            printed, complaint = process.communicate(timeout=10)
        assert process.returncode == 0, complaint
        counts.__dict__.update(json.loads(printed))

    def heal(self) -> None:
        """Undo all that was done to cables, routes and rates."""
        while self._lost:
            source, target = self._lost.pop()
            self.router.ip(f"rule del from {source.address} to {target.address} priority 10 blackhole")
        for host in self.hosts:
            host.heal()

    def picture(self) -> dict[str, list[str]]:
        """Return what every host and the router look like."""
        return {"router": self.router.picture()} | {f"host {host.number}": host.picture() for host in self.hosts}

    def close(self) -> None:
        """End every namespace."""
        for each in (*self.hosts, self.router):
            each.close()


def _first(as_user: bool) -> tuple[Namespace, str]:
    """Return the router and how it was possible: as root, or in a user namespace."""
    reasons = []
    for kind in ("user",) if as_user else ("root", "user"):
        try:
            return Namespace(kind), kind
        except Impossible as error:
            reasons.append(str(error))
    raise Impossible("; ".join(reasons))
