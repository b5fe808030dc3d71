"""The connector for vLLM: a decode engine pulls a prefill engine's KV cache under a grant. See docs/vllm.md.

`connector.py` is vLLM's entry; its halves are `scheduler.py` and `worker.py`.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from llm_datadist.integrations.vllm.connector import LLMDataDistConnector

__all__ = ["LLMDataDistConnector"]

# MultiConnector finds its parts' statistics by name, not by module path.
KVConnectorFactory.register_connector(LLMDataDistConnector.__name__, __name__, LLMDataDistConnector.__name__)
