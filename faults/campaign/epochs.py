"""What is set for one epoch: who there is, over what, with which options. All of it from the seed, no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, Final

from faults.campaign.contents import Shape

#: Two prompts and two decoders.
WORKERS: Final = 4
#: One of them is the main thread.
MOVERS: Final = 3
#: "mixed": worker 0 takes nothing but tcp, the others what is best.
TRANSPORTS: Final = ("shm", "tcp", "auto", "cma", "mixed")
_SHAPES: Final = (Shape(4, 24, 64), Shape(8, 32, 512), Shape(2, 24, 1024), Shape(16, 40, 1024))
_POOL_CACHES: Final = 31


@dataclass(frozen=True)
class Epoch:
    """One stretch of the campaign.

    Attributes:
        rca: Remote cache access: pushes, and pulls that consume nothing.
        harmed: Bytes change on their way, and checksums have to find it.
        private: Registered memory lies outside the pools at times.
        relayed: Which (dialer, listener) go through a relay.
    """

    number: int
    seed: int
    transport: str
    rca: bool
    checksum: bool
    harmed: bool
    private: bool
    shape: Shape
    sync_ms: int
    peer_timeout: float
    copy_threads: int
    relayed: frozenset[tuple[int, int]]

    def peers(self, worker: int) -> list[int]:
        return [each for each in range(WORKERS) if each // 2 != worker // 2]

    def settings(self, worker: int) -> dict[str, Any]:
        transport = self.transport
        if transport == "mixed":
            transport = "tcp" if worker == 0 else "auto"
        size = max(_POOL_CACHES * self.shape.nbytes, 8 << 20)
        pool = f'{{"memory_size": {size}, "page_shift": 12}}'
        extra = {
            "llm.Transport": transport,
            "llm.Checksum": str(int(self.checksum)),
            "llm.PeerTimeout": str(self.peer_timeout),
            "llm.CopyThreads": str(self.copy_threads),
        }
        return {
            "extra": extra,
            "enable_remote_cache_accessible": self.rca,
            "sync_kv_timeout": self.sync_ms,
            "mem_pool_cfg": pool,
            "host_mem_pool_cfg": pool,
        }

    def __str__(self) -> str:
        words = [self.transport, "rca" if self.rca else "keys", "checksums" if self.checksum else "no checksums"]
        words += ["harmed bytes"] * self.harmed + ["private memory"] * self.private
        shape = f"{self.shape.tensors}x{self.shape.rows}x{self.shape.words * 8} B"
        return f"epoch {self.number}: {', '.join(words)}, {shape}, {self.sync_ms} ms, {len(self.relayed)} relays"


def plan_epoch(seed: int, number: int, transports: tuple[str, ...]) -> Epoch:
    rng = Random(f"{seed} epoch {number}")
    # In turn, so that a short campaign sees different ones too.
    transport = transports[number % len(transports)]
    turns = len(transports)
    rca = (number if turns % 2 else number + number // turns) % 2 == 1
    checksum = rng.random() < 0.65
    pairs = [(i, j) for i in range(WORKERS) for j in range(WORKERS) if i // 2 != j // 2]
    return Epoch(
        number=number,
        seed=rng.randrange(1 << 48),
        transport=transport,
        rca=rca,
        checksum=checksum,
        # A changed address of a push would be written to: nothing between two ends can find that out.
        harmed=checksum and not rca and rng.random() < 0.7,
        private=transport != "shm" and rng.random() < 0.7,
        shape=rng.choice(_SHAPES),
        sync_ms=rng.choice((200, 500, 1000, 2000)),
        peer_timeout=rng.choice((2.0, 3.0, 10.0)),
        copy_threads=rng.choice((1, 2, 3)),
        relayed=frozenset(pair for pair in pairs if rng.random() < 0.6),
    )
