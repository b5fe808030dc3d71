"""What this project's tests ask of the inside of an instance. No interface: it changes with the code.

A test that needs a fact from inside gets it here, so that a change inside is a change of this module, not of fifty
tests. What an instance tells its users (``statistics``, ``explain``, ``check_integrity``) is asked there.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from llm_datadist.errors import StateError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llm_datadist._links.link import Link
    from llm_datadist._links.messages import Message
    from llm_datadist._transfer.engine import Engine
    from llm_datadist._transport.lanes import LaneGroup
    from llm_datadist.datadist import LLMDataDist

T = TypeVar("T")


class Probe:
    """The inside of one initialised instance of this process. Threads: any; what it returns is true of that moment.

    Attributes:
        engine: What the instance owns; its public attributes are the tests' too.
    """

    def __init__(self, datadist: LLMDataDist) -> None:
        if datadist._engine is None:
            raise StateError("a probe needs an LLMDataDist that is initialised")
        self.engine: Engine = datadist._engine

    def on_control(self, function: Callable[..., T], *args: Any) -> T:
        """Run short work on the control thread and return its result."""
        return self.engine._control.call(function, *args)

    def post(self, function: Callable[..., object], *args: Any) -> None:
        """Run ``function`` on the control thread soon."""
        self.engine._control.post(function, *args)

    def link(self, peer: int) -> Link:
        """Return the link to a peer. Raises NotLinked as :meth:`LinkManager.get`."""
        return self.engine.links.get(peer)

    def lanes(self, peer: int) -> LaneGroup:
        """Return the data lanes of the link to a peer."""
        connection: Any = self.link(peer).connection
        group: LaneGroup = getattr(connection, "shared", connection)._group
        return group

    @contextmanager
    def answered(
        self, kind: type[Message], answer: Callable[[Link, Any, Callable[[Link, Any], None]], None]
    ) -> Iterator[None]:
        """Have ``answer(link, message, honest)`` called for messages of a kind, on the control thread."""
        handlers = self.engine.links._handlers
        honest = handlers[kind]
        handlers[kind] = lambda link, message: answer(link, message, honest)
        try:
            yield
        finally:
            handlers[kind] = honest
