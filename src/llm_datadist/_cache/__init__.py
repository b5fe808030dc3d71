"""Caches: geometry, the registry of their references, and the store of their memory."""
