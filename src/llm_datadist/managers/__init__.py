"""Layer 7: the calls of the cache managers, one file per kind of call, and the rules for their arguments."""
