"""What this host, and the way to a peer, can do for this library: findings, each with the command that mends it."""
