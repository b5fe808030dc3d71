"""Registry of all transports, best first. A new one is a module, or a package, and one line in :data:`ORDER`."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from llm_datadist._transport import instances
from llm_datadist._transport.inproc import InprocTransport
from llm_datadist._transport.nixl.transport import NixlTransport
from llm_datadist._transport.samehost.cma import CmaTransport
from llm_datadist._transport.samehost.shm import ShmTransport
from llm_datadist._transport.tcp.connection import TcpTransport
from llm_datadist._transport.transport import Context, Meeting, Transport

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

ORDER: Final[list[type[Transport]]] = [InprocTransport, ShmTransport, CmaTransport, NixlTransport, TcpTransport]
"""The order of preference."""


class Transports:
    """The transports of one LLMDataDist, which owns them; all links must use ``asked``, unless that is None.

    Threads: control for :meth:`start` and :meth:`stop`, else any.
    Errors: a transport that cannot be made raises LLMException; those before it are closed.
    """

    def __init__(self, context: Context) -> None:
        self.exports = context.exports
        self.asked = None if context.options.transport == "auto" else context.options.transport
        self._authenticated = context.options.credentials is not None
        self.by_name: dict[str, Transport] = {}
        with ExitStack() as undo:
            for kind in ORDER:
                self.by_name[kind.name] = transport = kind(context)
                undo.callback(transport.close)
            undo.pop_all()

    def meet(self, token: bytes, *, dialled: bool) -> Meeting:
        """Return the transports' view of a new handshake, for the caller to close."""
        return Meeting(self.by_name, self.exports, self.asked, self._authenticated, token, dialled)

    def of_preamble(self, preamble: bytes) -> Transport | None:
        """Return the transport whose connections to the listener begin with ``preamble``, if any."""
        return next((each for each in self.by_name.values() if each.preamble == preamble), None)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let peers of this process find this instance, and serve all peers."""
        instances.register(self.exports)
        for each in self.by_name.values():
            each.start(loop)

    def stop(self) -> None:
        instances.unregister(self.exports.incarnation)
        _all([each.stop for each in self.by_name.values()])

    def quiesce(self, tag: int, private: NDArray[np.uint64] | None) -> None:
        for each in self.by_name.values():
            each.quiesce(tag, private)

    def close(self) -> None:
        _all([each.close for each in self.by_name.values()])

    def abandon(self) -> None:
        _all([each.abandon for each in self.by_name.values()])


def _all(calls: Sequence[Callable[[], None]]) -> None:
    """Make every call, in this order, even if one of them raises."""
    with ExitStack() as stack:
        for each in reversed(calls):
            stack.callback(each)
