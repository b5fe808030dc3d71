"""Older import path: options, but not EngineConfig and ClusterConfig, which no page describes (interface R23)."""

from llm_datadist.config import Options

__all__ = ["Options"]
