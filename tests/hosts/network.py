"""Hosts for the tests: network namespaces around a router, whose cables, routes and rates the tests change.

            router  10.99.N.1
           /   |   \\                 one veth pair for each host: eth0 there, hostN at the router
    host 1  host 2  host 3           10.99.N.2

Made by iproute2 and util-linux, as root or in a user namespace.
"""

import re
import shutil
import subprocess
from pathlib import Path

#: Sockets in these states belong to somebody: established, connecting (2), close wait, listening.
_HELD = {"01", "02", "03", "08", "0A"}


class Impossible(Exception):
    """Here are no hosts to be made; says why."""


class Namespace:
    """A network namespace, kept by a process that ends with its standard input: nothing has a name that could be left.

    ``within``: a command that becomes the one behind it, in the user namespace that all are in.
    """

    def __init__(self, within: list[str], *flags: str) -> None:
        self.within = within
        self._keeper = subprocess.Popen(
            [*within, "unshare", "--net", *flags, "sh", "-c", "ip link set lo up && echo kept && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._keeper.stdout is not None
        if self._keeper.stdout.readline() != "kept\n":
            complaint = " ".join(self._keeper.communicate()[1].split())
            raise Impossible(f"no network namespace may be made here: {complaint}")

    @property
    def pid(self) -> int:
        """The keeper's process id: who names it names the namespace."""
        return self._keeper.pid

    @property
    def enter(self) -> list[str]:
        """The beginning of a command that runs the rest of it in the namespace."""
        return [*self.within, "nsenter", f"--net=/proc/{self.pid}/ns/net"]

    def run(self, *command: str, text: str = "") -> str:
        """Run a program in the namespace and return what it printed."""
        done = subprocess.run([*self.enter, *command], input=text, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

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
        self._keeper.communicate(timeout=10)


class Host(Namespace):
    def __init__(self, within: list[str], number: int) -> None:
        super().__init__(within)
        self.number = number
        self.address = f"10.99.{number}.2"
        self._limited = False

    def bytes_sent(self) -> int:
        _, counters = Path(f"/proc/{self.pid}/net/dev").read_text("ascii").split("eth0:")
        return int(counters.split()[8])

    def plug_in(self) -> None:
        """Have the cable in, and the way to the others."""
        self.ip("link set eth0 up", f"route replace default via 10.99.{self.number}.1")

    def pull_plug(self) -> None:
        """Have the cable out: what is sent fails here at once, what others send to it is lost."""
        self.ip("link set eth0 down")

    def limit(self, megabits: int) -> None:
        """Let no more than this leave the host in a second."""
        self.run(*f"tc qdisc replace dev eth0 root tbf rate {megabits}mbit burst 128kb latency 100ms".split())
        self._limited = True

    def held_up(self) -> int:
        """Return how many packets have waited because of the limit."""
        words = self.run("tc", "-s", "qdisc", "show", "dev", "eth0").split()
        return int(words[words.index("overlimits") + 1])

    def unlimit(self) -> None:
        self.run(*["tc", "qdisc", "del", "dev", "eth0", "root"])
        self._limited = False

    def heal(self) -> None:
        self.plug_in()
        if self._limited:
            self.unlimit()


class Network:
    """Some hosts and the router between them; close it.

    Raises:
        Impossible: They cannot be made here.
    """

    def __init__(self, hosts: int) -> None:
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
        if missing:
            raise Impossible(f"{', '.join(missing)} cannot be found")
        self.router = first_namespace()
        self.hosts: list[Host] = []
        self._lost: list[tuple[Host, Host]] = []
        try:
            for number in range(1, hosts + 1):
                self.hosts.append(Host(self.router.within, number))
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        self.router.run("tee", "/proc/sys/net/ipv4/ip_forward", text="1")
        for each in (self.router, *self.hosts):
            # Its own traffic would be counted.
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

    def heal(self) -> None:
        while self._lost:
            source, target = self._lost.pop()
            self.router.ip(f"rule del from {source.address} to {target.address} priority 10 blackhole")
        for host in self.hosts:
            host.heal()

    def picture(self) -> dict[str, list[str]]:
        return {"router": self.router.picture()} | {f"host {host.number}": host.picture() for host in self.hosts}

    def close(self) -> None:
        for each in (*self.hosts, self.router):
            each.close()


def first_namespace() -> Namespace:
    """Return the router: as root, or in a user namespace, whose root it is."""
    reasons = []
    for flags in ((), ("--user", "--map-root-user")):
        try:
            router = Namespace([], *flags)
        except Impossible as error:
            reasons.append(str(error))
            continue
        if flags:
            router.within = ["nsenter", f"--user=/proc/{router.pid}/ns/user", "--preserve-credentials"]
        return router
    raise Impossible("; ".join(reasons))
