"""The transport tcp: :mod:`.connection` moves plans over data lanes, :mod:`.lanes` makes, keeps and serves them.

Threads: a transfer runs in the caller's thread; native threads move the bytes; the control thread answers requests.
"""
