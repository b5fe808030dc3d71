"""Users of the peers of unix and TCP sockets, as the kernel of this host knows them."""

from __future__ import annotations

import os
import socket
import struct
from functools import cache
from pathlib import Path
from typing import Final

from llm_datadist._checks import is_loopback
from llm_datadist.errors import LinkRefused

_CREDENTIALS: Final = struct.Struct("=iII")
_PROC: Final = Path("/proc")
_OVERFLOW_UID: Final = _PROC / "sys/kernel/overflowuid"
_USUAL_OVERFLOW_UID: Final = 65534
# linux/sock_diag.h, linux/inet_diag.h. A request: header, ports and hosts, interface and no cookie.
_SOCK_DIAG: Final = 4
_BY_FAMILY: Final = 20
_ESTABLISHED: Final = 1
_DIAG_HEADER: Final = struct.Struct("=IHHII BBxxI")
_DIAG_TAIL: Final = struct.pack("=I8s", 0, b"\xff" * 8)
_DIAG_BYTES: Final = _DIAG_HEADER.size + 36 + len(_DIAG_TAIL)
_DIAG_ANSWER: Final = struct.Struct("=4xH10x xB2x 48x 12x II")


def peer_credentials(sock: socket.socket, users: frozenset[int] = frozenset()) -> tuple[int, int]:
    """Return the peer's (pid, uid). Raises LinkRefused unless its user is this one or among ``users``."""
    pid, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if uid != os.geteuid() and uid not in users:
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid}, this process as uid {os.geteuid()}; llm.SameHostUsers of "
            "both may admit each other's"
        )
    if uid == _overflow_uid() and not _shares_users(pid):
        # All users unknown to this user namespace share that number.
        raise LinkRefused(
            f"same-host peer (pid {pid}) runs as uid {uid} of another user namespace, or as any other user"
        )
    return pid, uid


def why_other_user(sock: socket.socket, users: frozenset[int]) -> str:
    """Return why the TCP peer is not of this user or ``users``; empty if it is, or is on another host."""
    uid, addresses = peer_uid(sock), (sock.getpeername()[0], sock.getsockname()[0])
    if uid < 0 and not any(is_loopback(each.removeprefix("::ffff:")) for each in addresses):
        return ""
    if uid in users | {os.geteuid()} and (uid != _overflow_uid() or _knows_all_users()):
        return ""
    peer = f"the peer runs as uid {uid}" if uid >= 0 else "the user of the peer is unknown"
    return f"{peer}, this process as uid {os.geteuid()}: llm.SameHostUsers of both may admit each other's"


def peer_uid(sock: socket.socket) -> int:
    """Return the user of a TCP peer on this host; -1 for another host, a closed socket or a kernel without tcp_diag.

    The kernel looks up that one socket, in some 30 us, however many there are.
    """
    try:
        (host, port), (own, own_port) = sock.getpeername()[:2], sock.getsockname()[:2]
        hosts = [each.removeprefix("::ffff:") for each in (host, own)]
        family = socket.AF_INET6 if ":" in hosts[0] else socket.AF_INET
        ends = [socket.inet_pton(family, each).ljust(16, b"\0") for each in hosts]
        header = _DIAG_HEADER.pack(_DIAG_BYTES, _BY_FAMILY, 1, 0, 0, family, socket.IPPROTO_TCP, 1 << _ESTABLISHED)
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as kernel:
            kernel.send(header + struct.pack("!HH16s16s", port, own_port, *ends) + _DIAG_TAIL)
            answer = kernel.recv(4096, socket.MSG_DONTWAIT)
    except OSError:
        return -1
    kind, state, uid, inode = _DIAG_ANSWER.unpack_from(answer.ljust(_DIAG_ANSWER.size, b"\0"))
    return uid if kind == _BY_FAMILY and state == _ESTABLISHED and inode else -1  # without an inode: closed


@cache
def _overflow_uid() -> int:
    try:
        return int(_OVERFLOW_UID.read_text())
    except (OSError, ValueError):
        return _USUAL_OVERFLOW_UID


@cache
def _knows_all_users() -> bool:
    """Return False in a user namespace without all users: the others share one number there."""
    try:
        return sum(int(line.split()[2]) for line in (_PROC / "self/uid_map").read_text().splitlines()) >= 2**32 - 1
    except OSError:
        return False


def _shares_users(pid: int) -> bool:
    try:
        return (_PROC / str(pid) / "ns/user").readlink() == (_PROC / "self/ns/user").readlink()
    except OSError:
        return False
