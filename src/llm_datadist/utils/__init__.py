"""Older import paths: helpers (interface R23)."""
