"""Other paths of ``llm_datadist``'s helpers (R23)."""
