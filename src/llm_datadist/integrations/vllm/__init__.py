"""The connectors for vLLM: a decode engine pulls a prefill engine's KV cache under a grant; engines share a store.

`connector.py` is vLLM's entry. The halves of a connector are `scheduler.py` and `worker.py`, or for the prefix store
`store_scheduler.py` and `store_worker.py`. See docs/vllm.md and docs/howto-vllm-store.md.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from llm_datadist.integrations.vllm.connector import LLMDataDistConnector, LLMDataDistStoreConnector

__all__ = ["LLMDataDistConnector", "LLMDataDistStoreConnector"]

# MultiConnector finds its parts' statistics by name, not by module path.
for _each in (LLMDataDistConnector, LLMDataDistStoreConnector):
    KVConnectorFactory.register_connector(_each.__name__, __name__, _each.__name__)
