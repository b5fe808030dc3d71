"""Links between instances, and their control messages; no KV data."""

from __future__ import annotations
