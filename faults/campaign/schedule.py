"""What is set for one epoch, and which fault comes when: all of it from a seed. No I/O, no clock."""

from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

from faults.campaign.memory import Shape
from faults.gates import STEPS
from faults.relay import Fault
from faults.stalls import STALLS

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
    number: int
    seed: int
    transport: str
    rca: bool  # pushes, and pulls that consume nothing
    checksum: bool
    harmed: bool  # bytes change on their way, and checksums have to find it
    private: bool  # registered memory lies outside the pools at times
    shape: Shape
    sync_ms: int
    peer_timeout: float
    copy_threads: int
    relayed: frozenset[tuple[int, int]]  # which (dialer, listener) go through a relay

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
        words += ["harmed bytes"] * self.harmed + ["non-pool memory"] * self.private
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


#: What a forked child does: it ends at once, ends as an interpreter does, or becomes another program.
CHILDREN: Final = ("os._exit", "sys.exit", "exec")
GARBAGE: Final = ("noise", "half a greeting", "huge frame", "frames", "lane", "rendezvous", "silence")
#: How often each comes, in comparison.
_WEIGHTS: Final = {
    "kill": 3,
    "stop": 5,
    "relay": 8,
    "plan": 4,
    "resume": 4,
    "cut": 4,
    "garbage": 6,
    "stall": 5,
    "gate": 14,
    "storm": 4,
    "exhaust": 2,
    "liar": 6,
    "fork": 5,
    "limit": 4,
    "exit": 2,
    "roll": 1,
    "lull": 4,
}
_MEAN_SECONDS: Final = 0.35
_THROUGH_RELAYS: Final = frozenset({"relay", "plan", "resume", "cut"})
_BURST: Final = 4
_BURST_SECONDS: Final = (0.1, 0.4)


@dataclass(frozen=True)
class Event:
    """One fault: ``what`` happens to a worker or to a relay, ``at`` seconds after the start of the epoch."""

    at: float
    what: str
    worker: int
    pair: tuple[int, int] | None = None
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        details = ", ".join(f"{name}={value}" for name, value in self.details.items())
        return f"{self.at:6.2f} s {self.what} {self.pair or f'worker {self.worker}'} {details}".rstrip()


def schedule(epoch: Epoch, seconds: float) -> list[Event]:
    rng = Random(f"{epoch.seed} schedule")
    events: list[Event] = []
    at = rng.expovariate(1 / _MEAN_SECONDS)
    pairs = sorted(epoch.relayed)
    left, worker = 0, 0  # of a burst, and at whom
    while at < seconds:
        what = rng.choices(tuple(_WEIGHTS), tuple(_WEIGHTS.values()))[0]
        worker = worker if left else rng.randrange(WORKERS)
        fit = [pair for pair in pairs if worker in pair] if left else pairs
        pair = rng.choice(fit) if fit and what in _THROUGH_RELAYS else None
        if pair is not None or what not in _THROUGH_RELAYS:
            details = _details(rng, what, epoch, worker)
            events.append(Event(at, what, worker, pair, details))
            # While everybody rests, or waits for a call to end, more comes.
            left = _BURST if what == "lull" or details.get("unlink") else max(left - 1, 0)
        at += rng.uniform(*_BURST_SECONDS) if left else rng.expovariate(1 / _MEAN_SECONDS)
    return events


def _details(rng: Random, what: str, epoch: Epoch, worker: int) -> dict[str, Any]:
    match what:
        case "kill":
            return {"back_after": rng.choice((0.0, 0.3, 1.5)), "lost": rng.random() < 0.5}  # its GPU before
        case "stop":
            return {"seconds": round(rng.choice((0.05, 0.3, 1.0, 2.5, 5.0)) * rng.uniform(0.7, 1.0), 2)}
        case "relay" | "plan":
            return {"kind": (kind := rng.choice(("control", "lane", "lane", None)))} | {
                "direction": rng.choice(("up", "down")),
                "fault": _fault(rng, harm=epoch.harmed and kind == "lane", begin=what == "plan"),
            }
        case "cut":
            return {"kind": rng.choice(("control", "lane", None)), "reset": rng.random() < 0.5}
        case "lull":
            return {"seconds": rng.choice((0.7, 1.5)), "apart": rng.random() < 0.4}
        case "fork":
            return {"how": rng.choice(CHILDREN)}
        case "limit":
            what, most = rng.choice((("descriptors", 12), ("descriptors", 12), ("threads", 2), ("allocations", 2)))
            return {"what": what, "free": rng.randrange(most), "seconds": rng.choice((0.1, 0.5, 1.0))}
        case "exit" | "roll":
            return {"finalize": rng.random() < 0.3}
        case "liar":
            return {"seed": rng.randrange(1 << 30), "seconds": rng.choice((0.2, 1.0, 3.0))}
        case "garbage":
            return {"kind": rng.choice(GARBAGE), "seed": rng.randrange(1 << 30)}
        case "stall":
            return {"name": rng.choice(sorted(STALLS)), "seconds": rng.choice((0.05, 0.2, 0.6))}
        case "gate":
            step = rng.choice(sorted(STEPS))
            writes = ("before write", "before write", "after write") if epoch.rca else ("before copy", "after copy")
            # There the memory of the other end must not be used again.
            step = rng.choice(writes) if rng.random() < 0.5 else step
            # Mostly within the call's time: after it no byte moves.
            seconds = round(rng.choice((0.3, 0.5, 0.7, 1.5)) * epoch.sync_ms / 1e3, 3)
            return {"step": step, "peer": rng.choice(epoch.peers(worker)), "seconds": seconds} | {
                "unlink": rng.random() < 0.3
            }
        case _:
            return {}


def _fault(rng: Random, *, harm: bool, begin: bool) -> Fault:
    """Return what a network does to a stream, and, where checksums are there to see it, what none should do."""
    kinds = ["truncate", "reset", "half_close", "delay", "throttle", "stall", "drop"]
    kinds += ["corrupt", "corrupt", "corrupt", "duplicate", "drop some"] if harm else []
    at = rng.choice((0, 20, 300, 5_000, 100_000, 1_000_000)) if begin else rng.choice((0, 0, 60, 10_000, 300_000))
    what = rng.choice(kinds)
    count = rng.choice((1, 4, 100)) if what in {"corrupt", "duplicate", "drop some"} else 0
    seconds = rng.choice((0.01, 0.1, 0.7))
    return Fault(what.split()[0], at=at, count=count, seconds=seconds, rate=rng.choice((2e4, 1e6)))
