"""Who is linked to whom, and the small messages between them; never a KV byte."""

from __future__ import annotations
