"""Connectors for inference engines, and their signed references. A connector needs its engine."""
