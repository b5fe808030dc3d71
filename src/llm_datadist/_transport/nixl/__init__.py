"""The transport nixl: UCX moves the bytes, over RDMA if both sides have it; requests use the control channel."""
