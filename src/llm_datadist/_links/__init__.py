"""Layer 5: who is linked to whom, and the small messages between them. Never a KV byte."""

from __future__ import annotations
