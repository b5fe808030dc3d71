"""Status codes and exceptions of the library (interface §1.2, §1.3).

The codes are the interface's; the tree below :class:`LLMException` is an extension.
"""

from __future__ import annotations

from contextvars import ContextVar
from enum import IntEnum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "AlreadyLinked",
    "AuthFailed",
    "CacheError",
    "CacheMismatch",
    "CacheNotFound",
    "ChecksumMismatch",
    "DeadlineExceeded",
    "DeviceError",
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
    """Status of an operation; ``str()`` is ``LLMStatusCode.NAME``.

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
        """The reason why the last call that links or unlinks returned this status, or None. An extension.

        A status is one object for the whole process, so the reason stands beside it: the last call of this thread, or
        of this asyncio task, keeps its own. If several clusters failed with this status, it is a :class:`LinkError`
        that quotes each reason. Other threads and tasks do not see it, and the next such call replaces it.
        """
        return link_failures.get({}).get(self)


#: For :attr:`LLMStatusCode.error`: exceptions of the last call that linked or unlinked, in this thread or task.
link_failures: Final[ContextVar[Mapping[LLMStatusCode, LLMException]]] = ContextVar("llm_datadist.link_failures")


def code_2_status(code: int) -> LLMStatusCode:
    """Return the status of a number, ``LLM_FAILED`` for one without a name.

    Source: interface §1.2.
    """
    try:
        return LLMStatusCode(code)
    except ValueError:
        return LLMStatusCode.LLM_FAILED


class Status:
    """A status code and its test for success.

    Source: interface §1.2.
    """

    def __init__(self, status: int) -> None:
        self._status = code_2_status(status)

    def is_ok(self) -> bool:
        """Return True for ``LLM_SUCCESS``."""
        return self._status is LLMStatusCode.LLM_SUCCESS

    @property
    def status_code(self) -> LLMStatusCode:
        """The status code."""
        return self._status

    def __repr__(self) -> str:
        return f"Status({self._status})"


class LLMException(RuntimeError):
    """Root of this library's exceptions.

    Raised by hand, its status is ``LLM_SUCCESS`` (interface R29); the library never raises that.

    Attributes:
        retryable: True if the same call may succeed later.
        peer: The peer's cluster id, or None.
        phase: Step that failed (``resolve``, ``copy``, ...), or None.

    Source: interface §1.3.
    """

    default_status = LLMStatusCode.LLM_SUCCESS
    retryable = False

    def __init__(
        self, *args: object, status_code: LLMStatusCode | None = None, peer: int | None = None, phase: str | None = None
    ) -> None:
        super().__init__(*args)
        self._status_code = self.default_status if status_code is None else status_code
        self.peer = peer
        self.phase = phase

    @property
    def status_code(self) -> LLMStatusCode:
        """The interface's status code."""
        return self._status_code

    def restate(self, status_code: LLMStatusCode) -> None:
        """Replace the status, for v1's own codes. An extension."""
        self._status_code = status_code


class ParamError(LLMException, ValueError):
    """An argument, which the text names, breaks a rule (interface R1).

    No cache, key or byte has changed. Checks against the peer's cache follow one request.
    """

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class NoneArgument(LLMException, TypeError, AttributeError):
    """None where it is not allowed (interface R1)."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class StateError(LLMException):
    """The object's state does not allow the call; finalized: ``LLM_ENGINE_FINALIZED``."""

    default_status = LLMStatusCode.LLM_FAILED


class NotInitialized(StateError):
    """The call needs ``init`` first (interface B1)."""


class OutOfMemory(LLMException, MemoryError):
    """A pool, the host or the process has too little memory; nothing was allocated.

    Attributes:
        pool: Name of the pool; empty without one.
        requested, free, largest_hole: Bytes asked for, in whole pages; free ones; those of the largest free range.
        quarantined: Freed bytes that foreign writers (v1 without a pool: inproc readers too) still use.
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
    """A cache or a key does not allow the operation."""

    default_status = LLMStatusCode.LLM_FAILED


class CacheNotFound(CacheError, LookupError):
    """Unknown key or cache id: not published yet, consumed, removed or freed."""

    default_status = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    retryable = True


class GrantEnded(CacheError):
    """The grant has ended; the text has reason and age, if its owner answered."""


class KeyInUse(CacheError):
    """Another cache has the key (interface R3)."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class CacheMismatch(CacheError, ParamError):
    """The caches do not fit, or the peer refuses; no byte has moved."""

    default_status = LLMStatusCode.LLM_PARAM_INVALID


class LinkError(LLMException):
    """A link or the listener failed; other links are not touched."""

    default_status = LLMStatusCode.LLM_LINK_FAILED
    retryable = True


class NotLinked(LinkError):
    """There is no link to that cluster, or no such communicator."""

    default_status = LLMStatusCode.LLM_NOT_YET_LINK


class AlreadyLinked(LinkError):
    """A link to that cluster exists and stays."""

    default_status = LLMStatusCode.LLM_ALREADY_LINK
    retryable = False


class LinkRefused(LinkError):
    """The peer or this side refused the link, for the text's reason."""


class PeerLost(LinkError):
    """The peer died, went silent or unlinked during the operation (interface R22)."""

    default_status = LLMStatusCode.LLM_SUSPECT_REMOTE_ERROR


class AuthFailed(LinkError):
    """A side lacks credentials or has rejected them, or forbids the link (``llm.PeerPolicy``, ``llm.SameUserOnly``)."""

    retryable = False


class TransferFailed(LLMException):
    """The source or destination ended, or the transport failed; the addressed bytes are undefined."""

    default_status = LLMStatusCode.LLM_FAILED
    retryable = True


class DeviceError(TransferFailed):
    """A GPU failed, or does not answer; after most of its errors it fails every later call of this process at once.

    Links and caches in host memory go on.

    Attributes:
        code: The driver's error code; -1 if a copy does not end.
        unfinished: True if the copy may still run; its memory then stays in use.
    """

    retryable = False

    def __init__(
        self,
        *args: object,
        code: int = 0,
        peer: int | None = None,
        phase: str | None = None,
        status_code: LLMStatusCode | None = None,
    ) -> None:
        super().__init__(*args, status_code=status_code, peer=peer, phase=phase)
        self.code = code
        self.unfinished = code == _UNFINISHED


class TransferAborted(TransferFailed):
    """This side aborted a connection; transfers raise NotLinked or PeerLost instead."""


class ChecksumMismatch(TransferFailed):
    """Source and destination differ after a transfer; the addressed bytes are undefined.

    All but ``tensors`` locate the first difference; -1 if unknown. Rows of continuous caches count as blocks.

    Attributes:
        cache_id: Id of the peer's cache.
        tensors: Least number of tensors that differ.
        local_tensor, local_block: Numbers at this side.
        remote_tensor, remote_block: Numbers at the peer.
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
    """The call's time is over; the link stays usable.

    Attributes:
        budget_ms, elapsed_ms: Milliseconds of the call, and since its begin.
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
    """A message breaks the protocol; its connection ends."""

    default_status = LLMStatusCode.LLM_FAILED


#: Codes of native code that are none of the driver.
_NO_DEVICE, _UNFINISHED = 0, -1
_OUT_OF_MEMORY = 2  # CUDA_ERROR_OUT_OF_MEMORY


def _device_error(text: str, code: int) -> LLMException:
    """Return the exception for an error of native code about a device."""
    if code == _NO_DEVICE:
        return LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
    return OutOfMemory(text) if code == _OUT_OF_MEMORY else DeviceError(text, code=code, phase="copy")
