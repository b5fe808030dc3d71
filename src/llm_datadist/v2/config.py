"""The path of two classes that no page describes, EngineConfig and ClusterConfig; only the options are here
(interface R23)."""

from llm_datadist.config import Options

__all__ = ["Options"]
