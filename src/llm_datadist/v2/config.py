"""The path of two classes that no page describes, EngineConfig and ClusterConfig; only the options are here (R23)."""

from llm_datadist.config import Options

__all__ = ["Options"]
