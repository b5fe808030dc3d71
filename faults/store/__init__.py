"""The campaign against the prefix store."""
