"""The transport tcp: :mod:`.connection` moves plans over data lanes, :mod:`.lanes` makes, keeps and serves them.

Threads: a transfer runs in its caller's thread. Native threads move the bytes; while they sleep, the caller may move
those of a small transfer. Native threads answer requests by cached replies, the control thread answers the others.
"""
