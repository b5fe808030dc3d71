"""What the examples share: starting the roles, and the side channel over which they tell each other small things.

Not part of the library. Serving frameworks have something like it already: that is how a decoder learns which blocks a
prompt has filled, and a prompt that they may be used again.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import LLMClusterInfo, LLMConfig, LLMStatusCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import ArrayLike

__all__ = ["End", "cluster", "options", "run_roles", "same", "succeeded"]

_SECONDS = 60.0
"""Longer than any step takes: what is not there by then does not come."""


class End:
    """One role in its own process: its name, its address, and the side channel to the others.

    Attributes:
        role: Its name.
        listen: "ip:port" for ``LLMConfig.listen_ip_info``; port 0 picks one, see ``LLMDataDist.listen_port``.
        ip: The ip of ``listen``, which is also that of links this end makes.
    """

    def __init__(self, role: str, roles: tuple[str, ...], listen: str, meet: str) -> None:
        self.role = role
        self.listen = listen
        self.ip = listen.rpartition(":")[0]
        self._first = role == roles[0]
        self._others = dict(_accept(meet, len(roles) - 1) if self._first else [_dial(role, meet)])

    def exchange(self, **values: Any) -> dict[str, dict[str, Any]]:
        """Wait until every role is here; return what each has brought (JSON values), by role. A barrier as well."""
        if not self._first:
            (leader,) = self._others.values()
            _write(leader, values)
            everything: dict[str, dict[str, Any]] = _read(leader)
            return everything
        brought = {self.role: values} | {role: _read(other) for role, other in self._others.items()}
        for other in self._others.values():
            _write(other, brought)
        return brought

    def say(self, text: str) -> None:
        """Print a line, with the role in front."""
        sys.stdout.write(f"{self.role}: {text}\n")  # one write: roles share the terminal
        sys.stdout.flush()

    def close(self) -> None:
        """Leave the side channel."""
        for other in self._others.values():
            other.close()


def options(**settings: Any) -> dict[str, str]:
    """Return the options of a process with a pool of 64 MiB; ``settings`` are properties of LLMConfig."""
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.sync_kv_timeout = 10_000
    config.mem_pool_cfg = '{"memory_size": 67108864}'
    for name, value in settings.items():
        setattr(config, name, value)
    return config.generate_options()


def cluster(cluster_id: int, own_ip: str, ip: str, port: int) -> LLMClusterInfo:
    """Return what ``link_clusters`` has to know of a peer that listens on ``ip:port``."""
    info = LLMClusterInfo()
    info.remote_cluster_id = cluster_id
    info.append_local_ip_info(own_ip, 0)
    info.append_remote_ip_info(ip, port)
    return info


def succeeded(result: tuple[LLMStatusCode, list[LLMStatusCode]]) -> None:
    """Stop unless ``link_clusters`` or ``unlink_clusters`` was a success: these return statuses and do not raise."""
    status, each = result
    if status != LLMStatusCode.LLM_SUCCESS:
        raise SystemExit(f"{status}: {', '.join(map(str, each))}")


def same(what: str, found: ArrayLike, expected: ArrayLike) -> None:
    """Stop unless both arrays hold the same, element by element; a single expected value stands for all."""
    got = np.asarray(found)
    if not np.array_equal(got, np.broadcast_to(expected, got.shape)):
        raise SystemExit(f"{what}: wrong bytes arrived")


def run_roles(file: str, roles: Mapping[str, Callable[[End], None]]) -> None:
    """Be the role that the command line names; without one, start every role as a process and report.

    Exits with status 0 only if every role did. The first role is the one that serves the side channel.
    """
    parser = argparse.ArgumentParser(description=(sys.modules["__main__"].__doc__ or "").partition("\n")[0])
    parser.add_argument("--role", choices=roles, help="be this end; without it all of them run here")
    parser.add_argument("--listen", default="127.0.0.1:0", help="ip:port of this end (port 0: pick one)")
    parser.add_argument("--meet", help="ip:port of the side channel: the same for all, an address of the first role")
    asked = parser.parse_args()
    if asked.role is None:
        raise SystemExit(_run_all(Path(file), tuple(roles)))
    if asked.meet is None:
        parser.error("--role needs --meet")
    end = End(asked.role, tuple(roles), asked.listen, asked.meet)
    try:
        roles[asked.role](end)
        end.exchange()  # nobody leaves while another one may still need it
    finally:
        end.close()


def _run_all(file: Path, roles: tuple[str, ...]) -> int:
    """Run one process per role; as soon as one fails, end the others."""
    with socket.create_server(("127.0.0.1", 0)) as meeting:
        port = meeting.getsockname()[1]
        running: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for role in roles:
                first = role == roles[0]
                meet = f"fd:{meeting.fileno()}" if first else f"127.0.0.1:{port}"
                command = [sys.executable, *_warnings(), str(file), "--role", role, "--meet", meet]
                running[role] = subprocess.Popen(command, pass_fds=[meeting.fileno()] if first else [])
            failed = _wait(running)
        finally:
            for process in running.values():
                process.kill()
                process.wait()
    print(f"{file.stem}: {'FAILED: ' + failed if failed else 'OK'}", flush=True)
    return 1 if failed else 0


def _wait(running: dict[str, subprocess.Popen[bytes]]) -> str | None:
    """Wait for all; return what went wrong."""
    ended: list[tuple[str, int]] = []
    change = threading.Condition()

    def watch(role: str, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        with change:
            ended.append((role, code))
            change.notify()

    for role, process in running.items():
        threading.Thread(target=watch, args=(role, process), daemon=True).start()
    with change:
        change.wait_for(lambda: len(ended) == len(running) or any(code for _, code in ended), _SECONDS)
        for role, code in ended:
            if code:
                return f"{role} ended with {code}"
        return None if len(ended) == len(running) else f"not finished within {_SECONDS:g} s"


def _warnings() -> list[str]:
    return [word for option in sys.warnoptions for word in ("-W", option)]


# --- the side channel: one JSON line per message ---------------------------------------------------------------------


def _address(text: str) -> tuple[str, int]:
    ip, _, port = text.rpartition(":")
    return ip, int(port)


def _accept(meet: str, count: int) -> list[tuple[str, socket.socket]]:
    """Wait for the other roles; the launcher hands over a socket that listens already (``fd:N``)."""
    ip, number = _address(meet)
    listener = socket.socket(fileno=number) if ip == "fd" else socket.create_server((ip, number))
    with listener:
        listener.settimeout(_SECONDS)
        others = []
        for _ in range(count):
            other, _ = listener.accept()
            other.settimeout(_SECONDS)
            others.append((str(_read(other)), other))
    return others


def _dial(role: str, meet: str) -> tuple[str, socket.socket]:
    """Connect to the first role, which may not be there yet."""
    limit = time.monotonic() + _SECONDS
    while True:
        try:
            leader = socket.create_connection(_address(meet), _SECONDS)
            break
        except ConnectionRefusedError:
            if time.monotonic() > limit:
                raise
            time.sleep(0.2)
    _write(leader, role)
    return "leader", leader


def _write(to: socket.socket, value: Any) -> None:
    to.sendall(json.dumps(value).encode() + b"\n")


def _read(from_: socket.socket) -> Any:
    """Return the next message; what has come after it stays for the next call."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = from_.recv(65536, socket.MSG_PEEK)
        if not part:
            raise SystemExit("another role has ended")
        line += from_.recv(part.find(b"\n") + 1 or len(part))
    return json.loads(line)
