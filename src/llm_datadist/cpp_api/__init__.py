"""The original's C++ class, structs and option keys, in Python (interface §9).

    from llm_datadist.cpp_api import *

    dist = LlmDataDist(cluster_id=1, role=LlmRole.kPrompt)
    status = dist.Initialize({OPTION_DEVICE_ID: "0", OPTION_LISTEN_IP_INFO: "127.0.0.1:26000"})
    desc = CacheDesc(num_tensors=4, data_type=DataType.DT_INT32, shape=[8, 16])
    status, cache_id = dist.RegisterKvCache(desc, addresses)

Calls return an :class:`LLMStatusCode`, or ``(status, value)`` with None for the value after a failure. The reason is
logged at WARNING and in ``LlmDataDist.last_error``. A wrong type, or None, is a TypeError; an integer outside its C++
width is ``LLM_PARAM_INVALID``. Structs are mutable; calls check them. Names are the header's.
"""

from llm_datadist.cpp_api import structs
from llm_datadist.cpp_api.datadist import LlmDataDist
from llm_datadist.cpp_api.structs import *  # noqa: F403 (its __all__ is part of this one)
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.data_type import DataType

__all__ = ["DataType", "LLMStatusCode", "LlmDataDist"]
__all__ += structs.__all__
