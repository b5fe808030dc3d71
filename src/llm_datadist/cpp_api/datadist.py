"""LlmDataDist: the class of the C++ header; its calls by kind, put together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from llm_datadist._checks import check_dict, check_int, check_type
from llm_datadist.cpp_api import arguments
from llm_datadist.cpp_api.calls import Call
from llm_datadist.cpp_api.copies import CopyCalls
from llm_datadist.cpp_api.links import LinkCalls
from llm_datadist.cpp_api.memory import CacheCalls
from llm_datadist.cpp_api.structs import LlmRole
from llm_datadist.cpp_api.transfers import TransferCalls
from llm_datadist.datadist import LLMDataDist

if TYPE_CHECKING:
    from llm_datadist._memory.device import Device
    from llm_datadist.errors import LLMStatusCode

__all__ = ["LlmDataDist"]


class LlmDataDist(LinkCalls, CacheCalls, TransferCalls, CopyCalls):
    """One end of the links, as C++ sees it. Any thread may call any method, except that Finalize must be alone.

    The calls are documented where they are written: ``cpp_api/links.py``, ``cpp_api/memory.py``,
    ``cpp_api/transfers.py``, ``cpp_api/copies.py``. Every one of them returns ``LLM_FAILED`` when not initialised, and
    may return ``LLM_FAILED`` where the operating system refuses something. There is no destructor: an object that is
    dropped goes on listening and serving until Finalize or the end of the process.

    Args:
        cluster_id: uint64, unique among all that link to each other. Checked by Initialize.
        role: A label; either side may pull and push. Checked by Initialize.
        device: What kDevice means in this process; None: host memory. An extension.

    Raises:
        TypeError: Wrong types (``NoneArgument`` for None).

    Source: API §9.
    """

    def __init__(self, cluster_id: int, role: LlmRole, *, device: Device | None = None) -> None:
        super().__init__()
        self._device = device
        self._cluster_id = check_int("cluster_id", cluster_id)
        self._role = check_type("role", role, LlmRole)
        self._making = threading.Lock()

    def Initialize(self, options: dict[str, str]) -> LLMStatusCode:
        """Become usable: listen if ``OPTION_LISTEN_IP_INFO`` is given, reserve pools if there are options for them.

        Always CacheManager mode with remote cache access, whatever the options say. A repeated call succeeds and does
        nothing; after Finalize it may be called again.

        Args:
            options: The ``OPTION_*`` keys, and every option that ``LLMDataDist.init`` takes. ``OPTION_DEVICE_ID`` is
                required. ``llm.MemPoolConfig`` and ``llm.HostMemPoolConfig`` size the pools of AllocateCache.

        Returns:
            ``LLM_PARAM_INVALID``: a cluster id outside uint64, ``kEnd``, an option that breaks its rule.
            ``LLM_OUT_OF_MEMORY``: a pool does not fit the host. ``LLM_FAILED``: the address cannot be bound.

        Raises:
            TypeError: Not a dict of str to str.

        Source: API §9, §3.1.
        """
        check_dict("options", options, str, str)
        with Call(self, "Initialize") as call:
            dist = self._made()
            if dist._engine is None:
                dist.init(arguments.init_options(options))
        return call.status

    def Finalize(self) -> LLMStatusCode:
        """Give up links, listener, pools and tables; peers are not told. ``LLM_SUCCESS``, also when not initialised.

        Source: API §9, §3.2.
        """
        with Call(self, "Finalize") as call:
            if self._dist is not None:
                self._dist.finalize()
        return call.status

    def _made(self) -> LLMDataDist:
        """Return what does the work, made at the first call: what is wrong with its arguments is a status."""
        with self._making:
            if self._dist is None:
                self._dist = LLMDataDist(arguments.role("role", self._role), self._cluster_id, device=self._device)
            return self._dist

    def __repr__(self) -> str:
        if self._dist is None:
            return f"<LlmDataDist {self._role.name} cluster {self._cluster_id}: not initialised>"
        return f"<LlmDataDist over {self._dist!r}>"
