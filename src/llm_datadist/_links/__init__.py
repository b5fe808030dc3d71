"""Links between instances, and their control messages; no KV data."""
