"""OpenTelemetry spans of public calls; loaded only with ``llm.Tracing``.

A span is the child of the caller's current one, and is current during the call. A tracer's exceptions are only logged.
"""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Self

from llm_datadist._log import calls_logger as logger
from llm_datadist._transfer.meters import CallSpan, Meters
from llm_datadist._transfer.resolution import RemoteName
from llm_datadist.errors import LLMException, LLMStatusCode

try:
    from opentelemetry import context, trace
    from opentelemetry.trace import SpanKind, StatusCode
except ImportError as error:
    raise LLMException(
        "llm.Tracing needs opentelemetry-api: pip install 'open-datadist[otel]'",
        status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
    ) from error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from opentelemetry.trace import Span
    from opentelemetry.util.types import AttributeValue

    from llm_datadist._native import Timer

_PREFIX: Final = "llm_datadist."

_tracer: Final = trace.get_tracer("llm_datadist")
_current: ContextVar[Call | None] = ContextVar("llm_datadist call", default=None)


class Call(CallSpan):
    """Public call with its span. Threads: one."""

    def __init__(self, name: str, peers: Iterable[int | None], blocks: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.nbytes = 0
        self.transport = ""
        known = [str(each) for each in peers if each is not None]  # text, because an attribute cannot hold uint64
        self._attributes: dict[str, AttributeValue] = {_PREFIX + "operation": name}
        if known:
            self._attributes[_PREFIX + "peer"] = known[0] if len(known) == 1 else known
        if blocks is not None:
            self._attributes[_PREFIX + "blocks"] = blocks
        self._span: Span | None = None
        self._token: Any = None
        self._outer: Any = None

    def __enter__(self) -> Self:
        with _safely():
            kind = SpanKind.CLIENT if _PREFIX + "peer" in self._attributes else SpanKind.INTERNAL
            self._span = _tracer.start_span(self.name, kind=kind, attributes=self._attributes)
            self._token = context.attach(trace.set_span_in_context(self._span))
        self._outer = _current.set(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        _current.reset(self._outer)
        if error is not None:
            self.error = error
            self.status = error.status_code if isinstance(error, LLMException) else LLMStatusCode.LLM_FAILED
        if self._token is not None:
            with _safely():
                context.detach(self._token)
        if self._span is not None:
            with _safely():
                self._describe(self._span)
            with _safely():  # also if it could not be described
                self._span.end()

    def _describe(self, span: Span) -> None:
        if not span.is_recording():
            return
        span.set_attribute(_PREFIX + "bytes", self.nbytes)
        span.set_attribute(_PREFIX + "status", self.status.name)
        if self.transport:
            span.set_attribute(_PREFIX + "transport", self.transport)
        if self.status is LLMStatusCode.LLM_SUCCESS:
            return
        if self.error is not None:
            span.record_exception(self.error)
        span.set_status(StatusCode.ERROR, str(self.error or self.status.name))


class TracedMeters(Meters):
    """Counts operations, with a span for each of them that is a call of its own."""

    @contextmanager
    def span(self, name: str, detail: str = "", *args: object, blocks: int | None = None) -> Iterator[Timer]:
        """Add a span to :meth:`Meters.span`. A part of a call, such as one layer, adds its bytes to the call's span."""
        call = _current.get()
        part = call is not None and call.name == name
        if call is None or not part:
            call = Call(name, [each.cluster_id for each in args if isinstance(each, RemoteName)], blocks)
        with nullcontext() if part else call, super().span(name, detail, *args, blocks=blocks) as timer:
            try:
                yield timer
            finally:
                call.nbytes += timer.nbytes
                call.transport = timer.transport or call.transport

    def call(self, name: str, peers: Iterable[int | None] = ()) -> Call:
        """Return the span of a call that is not counted."""
        return Call(name, peers)


@contextmanager
def _safely() -> Iterator[None]:
    """Log exceptions of the tracer."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 (a user's tracer must not break a transfer)
        logger.warning("a span of OpenTelemetry is lost or incomplete: %r", error)
