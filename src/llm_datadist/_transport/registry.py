"""Transports of an instance: those built in, and one that a package declares as an entry point.

A package's transport is imported only if ``llm.Transport`` of this side names it. nixl is declared by this package, and
``auto`` takes it too where NIXL is installed. No peer can have one imported.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from llm_datadist._log import links_logger as logger
from llm_datadist._option_kinds import TRANSPORT_GROUP, TRANSPORTS, transport_entries
from llm_datadist._transport import instances
from llm_datadist._transport.inproc import InprocTransport
from llm_datadist._transport.nixl.bindings import installed
from llm_datadist._transport.samehost.cma import CmaTransport
from llm_datadist._transport.samehost.shm import ShmTransport
from llm_datadist._transport.tcp.connection import TcpTransport
from llm_datadist._transport.transport import DEVICE, Context, Meeting, Transport
from llm_datadist.config import TRANSPORT
from llm_datadist.errors import LLMException, LLMStatusCode

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    import numpy as np
    from numpy.typing import NDArray

BUILT_IN: Final[tuple[type[Transport], ...]] = (InprocTransport, ShmTransport, CmaTransport, TcpTransport)
"""The order of preference; a package's transport comes before the last."""


def transports_for(asked: str | None) -> list[type[Transport]]:
    """Return the transports of an instance, best first; all its links must use ``asked``, unless that is None.

    Raises LLMException if ``asked`` cannot be imported.
    """
    kinds = [*BUILT_IN]
    if asked is None and installed():
        try:
            kinds.insert(-1, imported("nixl"))
        except LLMException as error:
            logger.warning("links do not use NIXL, which is installed: %s", error)
    elif asked is not None and all(kind.name != asked for kind in BUILT_IN):
        kinds.insert(-1, imported(asked))
    return kinds


def imported(name: str) -> type[Transport]:
    """Return the transport that an entry point declares under ``name``. Raises LLMException with the reason if none."""
    found = [each for each in transport_entries() if each.name == name]
    if name in TRANSPORTS:  # another package cannot take its place
        found = [each for each in found if each.value.startswith(f"{__package__}.")]
    values = ", ".join(each.value for each in found)
    if len(found) == 1 and name != DEVICE:
        try:
            kind: type[object] = found[0].load()
            if issubclass(kind, Transport) and kind.name == kind.capabilities.name == name:
                return kind
            why = f"{values} is not a Transport of that name, which its capabilities have too"
        except Exception as error:  # noqa: BLE001 (code of another package may raise anything)
            why = f"{values}: {type(error).__name__}: {error}"
    elif found:
        why = f"the name is taken, or declared by several packages: {values}"
    else:
        why = f"the metadata of open-datadist do not declare it ({TRANSPORT_GROUP}): install the package again"
    raise LLMException(f"{TRANSPORT}={name}: {why}", status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


class Transports:
    """The transports of one LLMDataDist, which owns this object.

    If ``asked`` names a transport, all links must use that one. If it is None, each handshake chooses.

    Owns: the transports, until :meth:`close`.
    Threads: the control thread calls :meth:`start` and :meth:`stop`, any thread the other methods.
    Errors: if a transport cannot be made, the constructor closes those made before it and raises LLMException.
    """

    def __init__(self, context: Context) -> None:
        self.exports = context.exports
        self.asked = None if context.options.transport == "auto" else context.options.transport
        self._authenticated = context.options.credentials is not None
        self.by_name: dict[str, Transport] = {}
        with ExitStack() as undo:
            for kind in transports_for(self.asked):
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
