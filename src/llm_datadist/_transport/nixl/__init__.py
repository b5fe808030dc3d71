"""The transport nixl: UCX moves the bytes, over RDMA if both sides have it; requests use the control channel.

The owner of the memory checks its guards before the first byte and after the last, as with tcp. Each side of a link has
agents of its own, because a transfer that is given up ends its agent, and so every late byte. Read :mod:`.messages`
first, then :mod:`.transport` (the initiator) and :mod:`.worker` (the owner).
"""
