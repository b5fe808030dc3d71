"""The C++-shaped interface: the class, structs and option keys of the original's C++ header, in Python (interface §9).

    from llm_datadist.cpp_api import *

    dist = LlmDataDist(cluster_id=1, role=LlmRole.kPrompt)
    status = dist.Initialize({OPTION_DEVICE_ID: "0", OPTION_LISTEN_IP_INFO: "127.0.0.1:26000"})
    desc = CacheDesc(num_tensors=4, data_type=DataType.DT_INT32, shape=[8, 16])
    status, cache_id = dist.RegisterKvCache(desc, addresses)

Calls return an :class:`LLMStatusCode` and raise nothing that C++ reports as a status; the reason is logged at WARNING
and kept in ``LlmDataDist.last_error``. What C++ returns through a reference comes back as ``(status, value)``, with
None for the value on failure. An argument of a wrong type, None among them, is a TypeError: C++ would not compile. An
integer outside its C++ width is ``LLM_PARAM_INVALID``. Structs are mutable, as in C++, and are checked by the calls
that take them. Names are those of the header, so they break this library's own style on purpose.
"""

from __future__ import annotations

from llm_datadist.cpp_api import structs
from llm_datadist.cpp_api.datadist import LlmDataDist
from llm_datadist.cpp_api.structs import *  # noqa: F403 (its __all__ is part of the one here)
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.data_type import DataType

__all__ = ["DataType", "LLMStatusCode", "LlmDataDist"]
__all__ += structs.__all__
