"""Sockets for addresses of listeners, (host, port): IPv4, IPv6, or a name of an IPv4 host."""

from __future__ import annotations

import socket


def new_socket(address: tuple[str, int]) -> socket.socket:
    """Return a stream socket that can listen at an address, or connect to it. Raises OSError."""
    return socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)


def is_loopback(host: str) -> bool:
    """Return True if only processes of this host can reach a listener there."""
    return host.startswith("127.") or host == "::1"
