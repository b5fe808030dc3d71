"""LLMClusterInfo, which names a peer to link to, and packed addresses (interface §2.1)."""

from __future__ import annotations

import re
import socket
from typing import Final

from llm_datadist._checks import (
    Attribute,
    check_int,
    check_rule,
    check_type,
    check_uint16,
    check_uint32,
    check_uint64,
    check_unscoped,
    is_ipv6,
)
from llm_datadist.errors import ParamError
from llm_datadist.types.enums import LLMRole

_Endpoint = tuple[int | str, int]
_WITH_PORT: Final = re.compile(r"(\[.*\]|[^:]*):\d*", re.DOTALL)
#: A host name; text that ends like an IPv4 address is not one.
_NAME: Final = re.compile(r"(?!(.*\.)?\d+\.?\Z)(?=.{1,253}\Z)(\w([\w-]{0,61}\w)?(\.|\Z))+", re.ASCII)


def trans_str_ip(ip: str, name: str = "ip") -> int:
    """Pack dotted IPv4 text, the first octet lowest: "1.2.3.4" is 0x04030201.

    Raises:
        ParamError: Not an IPv4 address; the text calls it ``name``.
        TypeError: Not a str.

    Source: interface §2.1.
    """
    check_unscoped(name, check_type(name, ip, str))
    try:
        return int.from_bytes(socket.inet_pton(socket.AF_INET, ip), "little")
    except (OSError, ValueError):
        raise ParamError(f"{name}: {ip!r} is not an IPv4 address of the form 1.2.3.4") from None


def trans_int_ip(ip: int) -> str:
    """Undo :func:`trans_str_ip`: 0x04030201 is "1.2.3.4" (extension)."""
    return socket.inet_ntop(socket.AF_INET, check_uint32("ip", ip).to_bytes(4, "little"))


def host_of(ip: int | str) -> str:
    """Return an endpoint's host as text; a number is packed IPv4."""
    return ip if isinstance(ip, str) else trans_int_ip(ip)


def show_address(address: tuple[str, int]) -> str:
    """Return "host:port", or "[host]:port" of IPv6."""
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_endpoint(ip: object, port: object, where: str = "", *, named: bool = False) -> _Endpoint:
    """Return an endpoint as in a cluster info, also with a host name if ``named``. Errors begin with ``where``."""
    name = f"{where}ip"
    if isinstance(ip, str):
        check_rule("://" not in ip, f"{name}: {ip!r} has a scheme; give the host alone")
        second = f"{where}port" if where else "the second argument"
        check_rule(not _WITH_PORT.fullmatch(ip), f"{name}: {ip!r} has a port, which is {second}; give the host alone")
        inner = ip.removeprefix("[").removesuffix("]")
        host = inner if is_ipv6(inner) else ip if named and _NAME.fullmatch(ip) else trans_str_ip(ip, name)
        return host, check_uint16(f"{where}port", port)
    if not hasattr(ip, "__index__"):
        check_type(name, ip, (str, int))
    return check_uint32(name, ip), check_uint16(f"{where}port", port)


def _role(name: str, value: object) -> LLMRole | int:
    return value if isinstance(value, LLMRole) else check_int(name, value)


class LLMClusterInfo:
    """One cluster to link or to unlink.

    Linking needs exactly one remote endpoint, the peer's ``listen_ip_info``, and learns an unset ``remote_cluster_id``
    (interface R28).

    Source: interface §2.1.
    """

    remote_cluster_id = Attribute[int | None]("The peer's cluster id, uint64; None until it is set.", check_uint64)
    remote_role_type = Attribute[LLMRole | int]("The peer's role; without effect.", _role)
    local_ip_info_list = Attribute[list[_Endpoint]]("The local endpoints: (packed IPv4 or IPv6 text, port).")
    remote_ip_info_list = Attribute[list[_Endpoint]](
        "The remote endpoints: (packed IPv4, IPv6 text or host name, port)."
    )

    def __init__(self) -> None:
        self._remote_cluster_id: int | None = None
        self._remote_role_type: LLMRole | int = 0
        self._local_ip_info_list: list[_Endpoint] = []
        self._remote_ip_info_list: list[_Endpoint] = []

    def append_local_ip_info(self, ip: str | int, port: int) -> None:
        """Add an endpoint of this host; the port has no effect.

        ``ip`` is IPv4 text, an int as from :func:`trans_str_ip`, or (extension) IPv6 text with or without brackets.

        Source: interface §2.1.
        """
        self._local_ip_info_list.append(check_endpoint(ip, port))

    def append_remote_ip_info(self, ip: str | int, port: int) -> None:
        """Add the peer's listen address, as in :meth:`append_local_ip_info`.

        A host name is allowed too; linking looks it up, within its timeout (extension).

        Source: interface §2.1.
        """
        self._remote_ip_info_list.append(check_endpoint(ip, port, named=True))

    def __repr__(self) -> str:
        local = ", ".join(show_address((host_of(ip), port)) for ip, port in self._local_ip_info_list)
        remote = ", ".join(show_address((host_of(ip), port)) for ip, port in self._remote_ip_info_list)
        return f"<LLMClusterInfo {self._remote_cluster_id}: local [{local}], remote [{remote}]>"
