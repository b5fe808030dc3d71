"""vLLM's ExampleConnector, for prompts of whole blocks and one token: it computes that token only, as ours does."""

from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector

__all__ = ["FilesConnector"]


def _whole_blocks(tokens: int, block_size: int) -> int:
    return tokens // block_size * block_size


example_connector.align_to_block_size = _whole_blocks
FilesConnector = example_connector.ExampleConnector
