"""The call sequences of real clients: the same calls, the same option values, the same order."""
