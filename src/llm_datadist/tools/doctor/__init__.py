"""Checks of this host and the way to a peer: findings, each with the command that mends it."""
