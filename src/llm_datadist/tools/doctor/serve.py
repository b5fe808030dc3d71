"""The peer of ``doctor --peer``: an instance with a cache, and raw answers for comparison.

The port above the instance's answers ``t`` with the time, ``s`` with ``STREAM_BYTES`` zeros.
"""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.types.cluster import show_address

if TYPE_CHECKING:
    from collections.abc import Iterator

CLUSTER: Final = 0xD0C70001
KEY: Final = BlocksCacheKey(CLUSTER)
BLOCKS: Final = 512
BLOCK_BYTES: Final = 64 << 10
STREAM_BYTES: Final = 64 << 20
CLOCK: Final = struct.Struct("!q")
_CHUNK: Final = bytes(1 << 20)
_SECONDS: Final = 10.0
#: Seconds for one pull, so that slow links are measured: 32 MiB in 20 s are 1.7 MB/s.
PULL_S: Final = 20


def make_end(role: LLMRole, cluster_id: int, given: dict[str, str], listen: str = "") -> LLMDataDist:
    """Return an instance with a pool for one cache; ``with`` initialises it."""
    own = LLMConfig(listen_ip_info=listen, sync_kv_timeout=PULL_S * 1000, mem_pool_cfg=BLOCKS * BLOCK_BYTES)
    return LLMDataDist(role, cluster_id, config=LLMConfig(ge_options=own.generate_options() | given))


def describe() -> CacheDesc:
    """Return the cache of both sides: one tensor of ``BLOCKS`` blocks of ``BLOCK_BYTES``."""
    return CacheDesc(1, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8)


@contextmanager
def serving(host: str, port: int, given: dict[str, str]) -> Iterator[None]:
    """Answer peers during the ``with`` block. Raise OSError if a port is taken, or what ``init`` raises."""
    with make_end(LLMRole.PROMPT, CLUSTER, given, show_address((host, port))) as end:
        cache = end.cache_manager.allocate_blocks_cache(describe(), KEY)
        with _Raw((host, port + 1), _Answer) as raw:
            thread = threading.Thread(target=raw.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
            thread.start()
            try:
                yield
            finally:
                raw.shutdown()
                thread.join()
        end.cache_manager.deallocate_blocks_cache(cache)


class _Raw(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[socketserver.BaseRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


class _Answer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(_SECONDS)
        try:
            while word := self.request.recv(1):
                if word == b"t":
                    self.request.sendall(CLOCK.pack(time.time_ns()))
                elif word == b"s":
                    for _ in range(STREAM_BYTES // len(_CHUNK)):
                        self.request.sendall(_CHUNK)
                else:
                    return
        except OSError:  # the peer has gone, and reports it
            return
