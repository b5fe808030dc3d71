"""What one end of a rendezvous gives the other: its descriptors, and a fresh page for that peer's writers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from llm_datadist.errors import LinkRefused, LLMException
from llm_datadist.memory.segment import SharedSegment
from llm_datadist.transport.fdwire import VERSION, Hello, send_packet

if TYPE_CHECKING:
    import socket

    from llm_datadist.memory.writers import WriterPage
    from llm_datadist.transport.exports import Exports

__all__ = ["Offer"]


class Offer:
    """Made for one peer, used by one thread. Owns the page until somebody takes it; only memfds are offered.

    Args:
        exports: What the peer is given.
        token: Of the rendezvous.

    Attributes:
        hello: What is said.
        fds: The descriptors that go with it; they stay their segments'.

    Raises:
        LinkRefused: There is no memory or descriptor left for the page, or this process is being finalised.
    """

    def __init__(self, exports: Exports, token: bytes) -> None:
        shared = {region: segment for region, segment in exports.regions.items() if isinstance(segment, SharedSegment)}
        regions = [described for described in exports.descriptors() if described.region in shared]
        guards = exports.guards
        try:
            self._page = exports.writers.open() if exports.writable or exports.by_address else None
        except LLMException as error:
            raise LinkRefused(f"no page for the writers of this peer: {error}") from error
        page = None if self._page is None else self._page.segment
        nbytes = 0 if page is None else page.nbytes
        self.hello = Hello(VERSION, token, exports.incarnation, guards.cookie, guards.segment.nbytes, nbytes, regions)
        pages = [] if page is None else [page.fd]
        self.fds = [guards.segment.fd, *pages, *(shared[described.region].fd for described in regions)]

    def send(self, sock: socket.socket) -> None:
        """Send it, once.

        Raises:
            OSError: The socket's, ``BlockingIOError`` and ``TimeoutError`` among them.
        """
        send_packet(sock, self.hello, self.fds)

    def take_page(self) -> WriterPage | None:
        """Return the page for the peer's writers, the caller's from now on; None where peers may not write."""
        page, self._page = self._page, None
        return page

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        page = self.take_page()
        if page is not None:
            page.retire()
