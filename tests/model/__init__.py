"""Models of the protocols that depend on memory order, and what checks them (docs/notes/memory-order.md)."""
