"""Rank tables: addresses of the members of a communicator (interface §3.5), and their ports.

Both sides derive the ports from the communicator's name and the listening member's cluster id.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from llm_datadist._checks import check_rule, check_unscoped, clean, is_digits, is_ip
from llm_datadist.errors import ParamError

if TYPE_CHECKING:
    from collections.abc import Iterator

#: "low-high", inclusive, equal at every member. By default below Linux's ports of outgoing connections.
PORTS_VARIABLE: Final = "LLM_DATADIST_LINK_PORTS"
_DEFAULT_PORTS: Final = (27000, 31999)
#: Ports tried, because other processes may have the first.
_CANDIDATES: Final = 8


@dataclass(frozen=True, slots=True)
class RankTable:
    addresses: dict[int, str | None]  # of hosts, by rank; None if the table has none
    digest: bytes  # equal for tables that differ only in spaces and order of fields

    @classmethod
    def parse(cls, text: str) -> RankTable:
        """Parse JSON text. Raises ParamError, which names the field.

        A rank's address is its server's ``host_ip``, else its ``server_id`` if an IP address, else its ``device_ip``.
        """
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ParamError(f"rank_table: not valid JSON: {clean(str(error))}") from None
        check_rule(isinstance(table, dict), f"rank_table: {_kind(table)}, a JSON object is needed")
        addresses: dict[int, str | None] = {}
        for where, server in _entries("rank_table.server_list", table.get("server_list")):
            for at, device in _entries(f"{where}.device", server.get("device")):
                rank = _rank(at, device.get("rank_id"))
                check_rule(rank not in addresses, f"{at}.rank_id: rank {rank} is there twice")
                addresses[rank] = _address(where, server, at, device)
        canonical = json.dumps(table, sort_keys=True, separators=(",", ":")).encode("utf-8", "surrogatepass")
        return cls(addresses, hashlib.sha256(canonical).digest()[:16])

    def address(self, rank: int, cluster_id: int) -> str:
        """Return the address of that rank. Raises ParamError if the table has none."""
        text = f"rank_table.server_list: no device has rank_id {rank}, the rank of cluster {cluster_id}"
        check_rule(rank in self.addresses, text)
        if (address := self.addresses[rank]) is None:
            raise ParamError(
                f"rank_table.server_list: no IP address for rank {rank} (cluster {cluster_id}): its server needs a "
                "host_ip or a server_id that is one, or its device a device_ip"
            )
        return address


def ports(name: str, listener: int) -> list[int]:
    """Return the ports at which cluster ``listener`` may listen for communicator ``name``, in order.

    Raises ParamError if ``LLM_DATADIST_LINK_PORTS`` is not a range of ports.
    """
    low, high = _DEFAULT_PORTS
    if (text := os.environ.get(PORTS_VARIABLE, "")).strip():
        least, dash, most = (part.strip() for part in text.partition("-"))
        good = dash and is_digits(least) and is_digits(most) and 0 < int(least) <= int(most) <= 65535
        check_rule(good, f"{PORTS_VARIABLE}={text!r}: a range of ports such as 27000-31999 is needed")
        low, high = int(least), int(most)
    count = high - low + 1
    seed = f"{listener}:{name}".encode("utf-8", "surrogatepass")
    first = int.from_bytes(hashlib.sha256(seed).digest()[:8], "big")
    # A coprime stride visits every port.
    stride = 1 + (first >> 32) % count
    while math.gcd(stride, count) != 1:
        stride = 1 + stride % count
    return [low + (first + i * stride) % count for i in range(min(_CANDIDATES, count))]


def _entries(name: str, value: object) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name, object) for each element of a non-empty JSON array of objects."""
    check_rule(isinstance(value, list) and value, f"{name}: {_kind(value)}, a JSON array with entries is needed")
    for i, entry in enumerate(value if isinstance(value, list) else ()):
        check_rule(isinstance(entry, dict), f"{name}[{i}]: {_kind(entry)}, a JSON object is needed")
        yield f"{name}[{i}]", entry


def _rank(where: str, value: object) -> int:
    number = int(value) if isinstance(value, str) and is_digits(value) else value
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**32:
        raise ParamError(f'{where}.rank_id: {_kind(value)}, a rank such as "0" is needed')
    return number


def _address(where: str, server: dict[str, Any], at: str, device: dict[str, Any]) -> str | None:
    host, own = server.get("host_ip"), device.get("device_ip")
    for name, value in ((f"{where}.host_ip", host), (f"{at}.device_ip", own)):
        check_unscoped(name, value if isinstance(value, str) else "")
        good = value in (None, "") or is_ip(value)
        check_rule(good, f"{name}: {_kind(value)}, an IP address such as 10.0.0.1 is needed")
    return next((value for value in (host, server.get("server_id"), own) if is_ip(value)), None)


def _kind(value: object) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
