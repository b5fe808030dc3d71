"""The socket that a listener accepts from."""

from __future__ import annotations

import select
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from llm_datadist._links.handshake import listening_socket

_DIALS = 600
_SOMAXCONN = Path("/proc/sys/net/core/somaxconn")


@pytest.mark.skipif(int(_SOMAXCONN.read_text()) < _DIALS, reason=f"{_SOMAXCONN} is below {_DIALS}")
def test_hundreds_of_dials_at_once_need_no_second_attempt_while_nothing_is_accepted() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(listening_socket(("127.0.0.1", 0)))
        socks = [stack.enter_context(socket.socket()) for _ in range(_DIALS)]
        for sock in socks:
            sock.setblocking(False)
            sock.connect_ex(listener.getsockname())
        # Over loopback a first attempt is over when connect returns; a second one comes a second later.
        for number, sock in enumerate(socks):
            ready = select.poll()
            ready.register(sock, select.POLLOUT)
            assert ready.poll(200), f"dial {number} waits for its second attempt"
