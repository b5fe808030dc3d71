"""The ends of the fuzz targets that need links: a victim, and a healthy peer of it that must not notice.

The healthy peer pulls again and again while the victim is fed, and compares every byte; at each look the victim's
tables must agree with themselves, and the pins of the lost be gone.
"""

import socket
from contextlib import ExitStack
from typing import Any, Final, Self

import numpy as np

from faults.fuzz import Finding
from faults.harness import holds_within
from llm_datadist import types
from llm_datadist._transfer.engine import Engine
from llm_datadist.config import LLMConfig
from llm_datadist.datadist import LLMDataDist
from llm_datadist.errors import LLMStatusCode
from llm_datadist.types.descriptors import Cache
from llm_datadist.views import tensor_views
from tests.support.probe import Probe
from tests.support.world import cluster_info

VICTIM: Final = 1
FRIEND: Final = 2
PATIENCE_SECONDS: Final = 20.0
_KEY: Final = types.CacheKey(1, 2**40, 0)  # its number is out of the forge's reach
_DESC: Final = types.CacheDesc(4, [8, 48], types.DataType.DT_UINT8)
_POOL: Final = '{"memory_size": 4194304, "page_shift": 12}'


class Stage:
    """A victim that listens, and a friend of it that pulls. A context manager; ``extra`` are options of both."""

    def __init__(self, *, rca: bool = False, extra: dict[str, str] | None = None) -> None:
        self.victim = LLMDataDist(types.LLMRole.PROMPT, VICTIM)
        self.friend = LLMDataDist(types.LLMRole.DECODER, FRIEND)
        self._rca = rca
        self._extra = extra or {}
        self._pulls = 0
        self.published: list[Cache] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.callback(self.friend.finalize)
            undo.callback(self.victim.finalize)
            self.victim.init(_options(self._rca, "127.0.0.1:0") | self._extra)
            self.friend.init(_options(self._rca, None) | self._extra)
            self._source = self.victim.cache_manager.allocate_blocks_cache(_DESC, types.BlocksCacheKey(VICTIM, 77))
            self.paged = self.friend.cache_manager.allocate_blocks_cache(_DESC)
            self._row = self.friend.cache_manager.allocate_cache(_DESC)
            self.link()
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._undo.close()

    def link(self) -> None:
        """Link the friend to the victim, unless it is."""
        code, _ = self.friend.link_clusters([cluster_info(VICTIM, self.port)], 10_000)
        if code not in (LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_ALREADY_LINK):
            raise Finding(f"the friend cannot link: {code}")

    @property
    def probe(self) -> Probe:
        """The inside of the victim."""
        return Probe(self.victim)

    @property
    def engine(self) -> Engine:
        return self.probe.engine

    @property
    def port(self) -> int:
        port = self.victim.listen_port
        assert port is not None
        return port

    def publish(self) -> None:
        """Make the caches that frames may name, in place of those of the last time: some keys have been consumed."""
        manager = self.victim.cache_manager
        for old in self.published:
            for request in range(1, 8):
                manager.remove_cache_key(types.CacheKey(VICTIM, request, 0))
            manager.deallocate_cache(old)
        keys = [types.CacheKey(VICTIM, request, 0) for request in range(1, 8)]
        self.published = [manager.allocate_cache(_DESC, keys[:4]), manager.allocate_cache(_DESC, keys[4:])]

    def look(self) -> None:
        """The friend pulls both ways and compares every byte; the victim's tables are checked."""
        self._pulls += 1
        source = _filled(self._source, self._pulls)
        expected = _filled(self.paged, self._pulls + 1_000_000)
        manager = self.friend.cache_manager
        manager.pull_blocks(types.BlocksCacheKey(VICTIM, 77), self.paged, [1, 6], [0, 3])
        expected[:, [0, 3]] = source[:, [1, 6]]
        _same(self.paged, expected)
        published = self.victim.cache_manager.allocate_cache(_DESC, [_KEY])
        try:
            source, expected = _filled(published, self._pulls + 1), _filled(self._row, self._pulls + 2)
            by_id = types.CacheKeyByIdAndIndex(VICTIM, published.cache_id, 0)
            manager.pull_cache(by_id if self._rca else _KEY, self._row, 5)
            expected[:, 5] = source[:, 0]
            _same(self._row, expected)
        finally:
            self.victim.cache_manager.remove_cache_key(_KEY)
            self.victim.cache_manager.deallocate_cache(published)
        self.victim.check_integrity()
        self.friend.check_integrity()

    def settled(self) -> None:
        """Wait until only the friend is linked and no pin is held; then :meth:`look`."""

        def alone() -> bool:
            now = self.victim.statistics()
            return now.pins == 0 and [link.remote_cluster_id for link in now.links] == [FRIEND]

        if not holds_within(alone, PATIENCE_SECONDS, 0.001):
            now = self.victim.statistics()
            raise Finding(f"left behind after all strangers went: {now.pins} pins, links {now.links}")
        self.look()


def _options(rca: bool, listen: str | None) -> dict[str, str]:
    config = LLMConfig()
    config.device_id = 0
    config.enable_cache_manager = True
    config.mem_pool_cfg = _POOL
    config.sync_kv_timeout = 10_000
    config.enable_remote_cache_accessible = rca
    if listen is not None:
        config.listen_ip_info = listen
    return config.generate_options() | {"llm.Transport": "shm"}


def _bytes(cache: Cache) -> list[Any]:
    return [view.reshape(-1).view(np.uint8).reshape(8, 48) for view in tensor_views(cache)]


def _filled(cache: Cache, seed: int) -> Any:
    noise = np.random.default_rng(seed).integers(0, 256, (4, 8, 48), dtype=np.uint8)
    for view, part in zip(_bytes(cache), noise, strict=True):
        view[:] = part
    return noise


def _same(cache: Cache, expected: Any) -> None:
    if not np.array_equal(np.stack(_bytes(cache)), expected):
        raise Finding("a pull between two honest ends moved wrong bytes")


def drain(sock: socket.socket) -> bytes:
    """Return what comes until the end of the stream, which must come."""
    sock.settimeout(PATIENCE_SECONDS)
    heard = bytearray()
    try:
        while more := sock.recv(1 << 16):
            heard += more
    except ConnectionError:
        pass
    except TimeoutError:
        raise Finding(f"nobody hung up on a peer that had said its last; {len(heard)} bytes heard") from None
    return bytes(heard)
