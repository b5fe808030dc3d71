"""Status codes and the exception tree: whose fault it was, whether to try again, and one line of text.

The numeric values are those of the interface (interface §1.2); the tree is ours and every class in it is an
:class:`LLMException`, so code that catches ``LLMException`` and reads ``.status_code`` sees every failure.
"""

from __future__ import annotations

import copy
from enum import IntEnum

__all__ = [
    "AlreadyLinked",
    "AuthFailed",
    "CacheError",
    "CacheMismatch",
    "CacheNotFound",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "GrantEnded",
    "KeyInUse",
    "LLMException",
    "LLMStatusCode",
    "LinkError",
    "LinkRefused",
    "NoneArgument",
    "NotInitialized",
    "NotLinked",
    "OutOfMemory",
    "ParamError",
    "PeerLost",
    "ProtocolError",
    "StateError",
    "Status",
    "TransferAborted",
    "TransferFailed",
    "code_2_status",
]

_BASE = 0x5010B000


class LLMStatusCode(IntEnum):
    """Status of an operation (interface §1.2). ``int(LLM_SUCCESS) == 0``; ``str()`` is ``LLMStatusCode.NAME``.

    Source: interface §1.2.
    """

    LLM_SUCCESS = 0
    LLM_FAILED = 0xFFFFFFFF
    LLM_WAIT_PROCESS_TIMEOUT = _BASE + 0x01
    LLM_KV_CACHE_NOT_EXIST = _BASE + 0x02
    LLM_REPEAT_REQUEST = _BASE + 0x03
    LLM_REQUEST_ALREADY_COMPLETED = _BASE + 0x04
    LLM_PARAM_INVALID = _BASE + 0x05
    LLM_ENGINE_FINALIZED = _BASE + 0x06
    LLM_NOT_YET_LINK = _BASE + 0x07
    LLM_ALREADY_LINK = _BASE + 0x08
    LLM_LINK_FAILED = _BASE + 0x09
    LLM_UNLINK_FAILED = _BASE + 0x0A
    LLM_NOTIFY_PROMPT_UNLINK_FAILED = _BASE + 0x0B
    LLM_CLUSTER_NUM_EXCEED_LIMIT = _BASE + 0x0C
    LLM_PROCESSING_LINK = _BASE + 0x0D
    LLM_DEVICE_OUT_OF_MEMORY = _BASE + 0x0E
    LLM_PREFIX_ALREADY_EXIST = _BASE + 0x0F
    LLM_PREFIX_NOT_EXIST = _BASE + 0x10
    LLM_SEQ_LENOVERLIMIT = _BASE + 0x11
    LLM_NO_FREE_BLOCK = _BASE + 0x12
    LLM_BLOCKS_OUT_OF_MEMORY = _BASE + 0x13
    LLM_EXIST_LINK = _BASE + 0x18
    LLM_FEATURE_NOT_ENABLED = _BASE + 0x19
    LLM_TIMEOUT = _BASE + 0x1A
    LLM_LINK_BUSY = _BASE + 0x1B
    LLM_OUT_OF_MEMORY = _BASE + 0x1C
    LLM_DEVICE_MEM_ERROR = 507053
    LLM_SUSPECT_REMOTE_ERROR = 507057
    LLM_UNKNOWN_ERROR = -1

    def __str__(self) -> str:
        return f"LLMStatusCode.{self.name}"

    @property
    def error(self) -> LLMException | None:
        """Why, in a failure that ``link_clusters`` or ``unlink_clusters`` returned; None in any other (extension)."""
        return vars(self).get("_error")

    def because(self, error: LLMException | None) -> LLMStatusCode:
        """Return the same status, equal to this one, with an :attr:`error` (extension)."""
        if error is None:
            return self
        status = int.__new__(LLMStatusCode, self)
        # A copy keeps no frames, and so none of what they have in hand.
        vars(status).update(_name_=self.name, _value_=self.value, _error=copy.copy(error))
        return status


def code_2_status(code: int) -> LLMStatusCode:
    """Return the status with the numeric value ``code``; a value without a name is ``LLM_FAILED`` (interface §1.2).

    Source: interface §1.2.
    """
    try:
        return LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


class Status:
    """A status code with the question that is usually asked of it (interface §1.2).

    Source: interface §1.2.
    """

    def __init__(self, status: int) -> None:
        self._status = code_2_status(status)

    def is_ok(self) -> bool:
        """Return True for ``LLM_SUCCESS``.

        Source: interface §1.2.
        """
        return self._status is LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code."""
        return self._status

    def __repr__(self) -> str:
        return f"Status({self._status})"


class LLMException(RuntimeError):
    """Root of everything this library raises about its own work (interface §1.3).

    Raised by hand its status defaults to ``LLM_SUCCESS``, as documented (interface R29); nothing the library itself
    raises carries that status.

    Attributes:
        retryable: True when the same call may succeed later without a change by the caller.
        peer: Cluster id of the peer involved, or None.
        phase: Step of the operation that failed (``resolve``, ``copy``, ...), or None.

    Source: interface §1.3.
    """

    default_status = LLMStatusCode.LLM_SUCCESS
    retryable = False

    def __init__(
        self,
        *args: object,
        status_code: LLMStatusCode | None = None,
        peer: int | None = None,
        phase: str | None = None,
    ) -> None:
        super().__init__(*args)
        self._status_code = self.default_status if status_code is None else status_code
        self.peer = peer
        self.phase = phase

    @property
    def status_code(self) -> LLMStatusCode:
        """The interface's status code for this failure."""
        return self._status_code

    def restate(self, status_code: LLMStatusCode) -> None:
        """Replace the status: v1 has its own for some failures (extension)."""
        self._status_code = status_code


class ParamError(LLMException, ValueError):
    """A well-typed argument breaks a rule; nothing has happened (interface R1). The text names argument, value and
    rule."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class NoneArgument(LLMException, TypeError, AttributeError):
    """None was given where it is not allowed; nothing has happened (interface R1)."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class StateError(LLMException):
    """The object is in no state for this call: finalised (``LLM_ENGINE_FINALIZED``), or an illegal transition."""

    default_status = LLMStatusCode.LLM_FAILED


class NotInitialized(StateError):
    """A call that needs ``init`` before it (interface B1: a RuntimeError)."""


class OutOfMemory(LLMException, MemoryError):
    """A pool cannot serve a request. All sizes in bytes.

    Attributes:
        pool: Which pool.
        requested: Bytes asked for (rounded up to pages).
        free: Bytes free in the pool.
        largest_hole: Largest contiguous free range.
        quarantined: Bytes that wait for a foreign reader or writer to end.
    """

    default_status = LLMStatusCode.LLM_OUT_OF_MEMORY
    retryable = True

    def __init__(
        self,
        *args: object,
        pool: str = "",
        requested: int = 0,
        free: int = 0,
        largest_hole: int = 0,
        quarantined: int = 0,
        status_code: LLMStatusCode | None = None,
    ) -> None:
        super().__init__(*args, status_code=status_code)
        self.pool = pool
        self.requested = requested
        self.free = free
        self.largest_hole = largest_hole
        self.quarantined = quarantined


class CacheError(LLMException):
    """Something about a cache or a key, here or at the peer."""

    default_status = LLMStatusCode.LLM_FAILED


class CacheNotFound(CacheError, LookupError):
    """The key or cache id is unknown: not published yet, already consumed, or freed. May be retried later."""

    default_status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    retryable = True


class GrantEnded(CacheError):
    """The grant of the blocks has ended, for ever; the text says why and since when, if its owner has answered."""


class KeyInUse(CacheError):
    """The key is bound to another cache (interface R3)."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class CacheMismatch(CacheError, ParamError):
    """The two ends' geometries do not fit each other; no byte was moved. The text gives both sides."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class LinkError(LLMException):
    """Something about a link; other links are not touched."""

    default_status = LLMStatusCode.LLM_LINK_FAILED
    retryable = True


class NotLinked(LinkError):
    """There is no link to that cluster."""

    default_status = LLMStatusCode.LLM_NOT_YET_LINK


class AlreadyLinked(LinkError):
    """There is a live link to that cluster; it is untouched."""

    default_status = LLMStatusCode.LLM_ALREADY_LINK
    retryable = False


class LinkRefused(LinkError):
    """The peer, or a check on this side, refused the link; the text holds the reason."""


class PeerLost(LinkError):
    """The peer died or went silent during the operation; link again to recover (interface R22)."""

    default_status = LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


class AuthFailed(LinkError):
    """The peer could not prove who it is."""

    retryable = False


class TransferFailed(LLMException):
    """Bytes may have moved but must not be used: the source changed, or the transport failed."""

    default_status = LLMStatusCode.LLM_FAILED
    retryable = True


class TransferAborted(TransferFailed):
    """The operation was given up from this side (unlink, finalize)."""


class ChecksumMismatch(TransferFailed):
    """Both ends were asked after a transfer, and do not hold the same bytes. What was addressed is undefined.

    The first place that differs, as far as it was found; -1 where it was not.

    Attributes:
        cache_id: Id of the peer's cache.
        tensors: How many tensors differ, at least.
        local_tensor: Tensor of the cache here.
        local_block: Its block, or its row where the cache is a continuous one.
        remote_tensor: Tensor of the peer's cache.
        remote_block: Its block or row.
    """

    def __init__(
        self,
        *args: object,
        cache_id: int = -1,
        tensors: int = 0,
        local_tensor: int = -1,
        local_block: int = -1,
        remote_tensor: int = -1,
        remote_block: int = -1,
        peer: int | None = None,
        phase: str | None = None,
        status_code: LLMStatusCode | None = None,
    ) -> None:
        super().__init__(*args, status_code=status_code, peer=peer, phase=phase)
        self.cache_id = cache_id
        self.tensors = tensors
        self.local_tensor = local_tensor
        self.local_block = local_block
        self.remote_tensor = remote_tensor
        self.remote_block = remote_block


class DeadlineExceeded(LLMException, TimeoutError):
    """The call's time is used up.

    Attributes:
        budget_ms: The call's whole budget in milliseconds.
        elapsed_ms: Milliseconds since the call began.
    """

    default_status = LLMStatusCode.LLM_TIMEOUT
    retryable = True

    def __init__(
        self,
        *args: object,
        phase: str | None = None,
        budget_ms: float = 0.0,
        elapsed_ms: float = 0.0,
        peer: int | None = None,
        status_code: LLMStatusCode | None = None,
    ) -> None:
        super().__init__(*args, status_code=status_code, peer=peer, phase=phase)
        self.budget_ms = budget_ms
        self.elapsed_ms = elapsed_ms


class ProtocolError(LLMException):
    """A frame or value from the wire breaks the protocol; its connection is given up."""

    default_status = LLMStatusCode.LLM_FAILED
