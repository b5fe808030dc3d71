"""The connector for vLLM: a decode engine pulls a prefill engine's KV cache under a grant. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "LLMDataDistConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "llm_datadist.integrations.vllm"}'

| module | owns |
|---|---|
| `connector.py` | the class that vLLM makes |
| `scheduler.py` | offers and fetches of requests; in the scheduler's process |
| `worker.py` | a rank's LLMDataDist: caches, grants, pulls |
| `engines.py` | a rank's prefill engines: links, claims |
| `offers.py` | messages to decode engines and to workers |
| `../references.py` | signatures; no vLLM |
| `layout.py` | places of layers; the ranks' shares of heads |
| `placement.py` | vLLM's KV cache in a pool |
| `stats.py` | counters |
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from llm_datadist.integrations.vllm.connector import LLMDataDistConnector

__all__ = ["LLMDataDistConnector"]

# MultiConnector finds its parts' statistics by name, not by module path.
KVConnectorFactory.register_connector(LLMDataDistConnector.__name__, __name__, LLMDataDistConnector.__name__)
