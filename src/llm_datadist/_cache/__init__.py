"""Layer 3: what a cache is, without its bytes: geometry, plans, and who still needs it."""

from __future__ import annotations
