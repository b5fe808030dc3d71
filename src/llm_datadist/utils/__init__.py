"""Other paths of ``llm_datadist``'s helpers (interface R23)."""
