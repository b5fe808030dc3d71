"""The toy, a transport of another package, passes the suite that every transport passes."""

from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

from llm_datadist.testing import Handles, LocalPeer, MemoryHandler, Peer, TransportConformance
from tests.conformance.toy import ToyConnection, ToyServer, ToyTransport


class SuiteConnection(Handles, ToyConnection):
    """Its handles say where the tensors are."""


class ToyPeer(LocalPeer):
    """A peer whose server is called directly, in place of a link."""

    def __init__(self, *, writable: bool) -> None:
        super().__init__(writable=writable)
        self._writable, self._handler = writable, MemoryHandler(self)
        context: Any = SimpleNamespace(owner=self._handler, wire=self)
        self._toy = ToyTransport(context)
        self._server = ToyServer(self._toy)

    def connect(self) -> SuiteConnection:
        return SuiteConnection(self._toy, writable=self._writable)

    def hold(self, slot: int, generation: int) -> None:
        self._handler.hold(slot, generation)

    def ask(self, link: object, data: bytes, deadline: object) -> bytes:
        answers: list[bytes] = []
        self._server.on_request(data, answers.append)
        return answers[0]


class TestToy(TransportConformance):
    def open_peer(self, *, writable: bool) -> AbstractContextManager[Peer]:
        return ToyPeer(writable=writable)
