"""Programs at a peer's port, told apart by their first answers."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress
from typing import Final

from llm_datadist._checks import clean
from llm_datadist._links.messages import CONTROL_PREAMBLE, FRAME_HEADER, Refused, decode
from llm_datadist.errors import ProtocolError

#: A plain preamble of no wire major: every listener of this library refuses it, with or without credentials.
_NO_MAJOR: Final = CONTROL_PREAMBLE[:8] + bytes(4)
_NAMES: Final = {b"HTTP/": "HTTP", b"SSH-": "SSH", b"\x15\x03": "TLS", b"\x16\x03": "TLS"}


def other_program(address: tuple[str, int]) -> str:
    """Return what answers at an address, as "speaks HTTP"; empty if it is this library, or nothing answers."""
    hello = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), hello, server_hostname="peer").do_handshake()
    for question in (_NO_MAJOR, b"GET / HTTP/1.0\r\n\r\n", hello.read()):
        if isinstance(answer := _ask(address, question), Refused):
            break
        if answer:
            named = (f"speaks {name}" for first, name in _NAMES.items() if answer.startswith(first))
            return next(named, f"answers {clean(answer.decode('latin-1'), 40)!r}")
    return ""


def lacks_credentials(address: tuple[str, int]) -> bool:
    """Return True if a listener of this library answers that accepts plain links."""
    answers = (isinstance(_ask(address, each), Refused) for each in (_NO_MAJOR, CONTROL_PREAMBLE))
    return next(answers) and not next(answers)


def _ask(address: tuple[str, int], question: bytes) -> Refused | bytes:
    """Return a message of this library, or the bytes that come back within a second, perhaps none."""
    answer = b""
    with suppress(OSError, ProtocolError), socket.create_connection(address, timeout=1.0) as sock:
        sock.sendall(question)
        answer = sock.recv(4096)
        return message if isinstance(message := decode(answer[FRAME_HEADER.size :]), Refused) else answer
    return answer
