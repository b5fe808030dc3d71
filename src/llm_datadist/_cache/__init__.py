"""Caches: their geometry, the registry of what still needs them, and the store that holds their memory."""
