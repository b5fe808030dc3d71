"""The connector for vLLM: a prefill engine's KV cache, pulled by a decode engine under a grant. See docs/vllm.md.

    --kv-transfer-config '{"kv_connector": "LLMDataDistConnector", "kv_role": "kv_producer",
                           "kv_connector_module_path": "llm_datadist.integrations.vllm"}'

| module | owns |
|---|---|
| `connector.py` | the class that vLLM makes, once in its scheduler and once in each worker |
| `scheduler.py` | which requests are offered and fetched; runs in the scheduler's process |
| `worker.py` | the LLMDataDist of one rank: its caches, grants and pulls |
| `engines.py` | the prefill engines that a rank reads: links to them, claims of their grants |
| `offers.py` | what a prefill engine tells a decode engine in `kv_transfer_params`, and what they tell their workers |
| `../references.py` | the signature of what clients carry; no vLLM |
| `layout.py` | where the pages of the layers are, and which rows of the peer's ranks go into which of ours |
| `placement.py` | vLLM's KV cache in a pool of ours |
| `stats.py` | what is counted |
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from llm_datadist.integrations.vllm.connector import LLMDataDistConnector

__all__ = ["LLMDataDistConnector"]

# MultiConnector looks its parts up by name when it reads their numbers, not by module path.
KVConnectorFactory.register_connector(LLMDataDistConnector.__name__, __name__, LLMDataDistConnector.__name__)
