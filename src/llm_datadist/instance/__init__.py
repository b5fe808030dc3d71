"""Layer 7, the calls of LLMDataDist by kind; ``datadist.py`` puts them together."""
