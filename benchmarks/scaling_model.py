"""Say what the control plane of a deployment costs, from the number of its instances and of their links.

    python -m benchmarks.scaling_model

Prints the table of docs/scaling.md. What is counted here follows from the protocol, and tests compare it with
heartbeats that run; what a link costs its process (CPU, memory, descriptors) was measured by
benchmarks/measure_growth.py.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from llm_datadist._links.messages import FRAME_HEADER

#: Seconds between two beats of a link, where ``llm.PeerTimeout`` is 4 or more.
PERIOD_S: Final = 1.0
#: Bytes of a segment besides what it carries: Ethernet, IPv4 and TCP with timestamps.
SEGMENT_BYTES: Final = 14 + 20 + 32
#: Bytes of the messages of a handshake without credentials, both directions, at most.
HANDSHAKE_BYTES: Final = 1024
#: What an idle link costs each of its processes over tcp and over shm, rounded up from the figures of docs/scaling.md.
CPU_PERCENT: Final = 0.007
RSS_KIB: Final = {"tcp": 28, "shm": 18}
DESCRIPTORS: Final = {"tcp": 6, "shm": 2}
#: The default of ``llm.MaxLinks`` where the process may open 16,384 descriptors or more.
MAX_LINKS: Final = 1024


@dataclass(frozen=True)
class Fleet:
    """So many instances with so many links in all; ``busiest`` is the most links of one instance."""

    instances: int
    links: int
    busiest: int

    @property
    def beats_per_s(self) -> float:
        """Beats that all instances send in a second: one from each end of each link."""
        return 2 * self.links / PERIOD_S

    def beat_bytes_per_s(self, count: int) -> float:
        """Bytes of these, where each instance has sent ``count`` beats over each link."""
        return self.beats_per_s * beat_bytes(count)

    def wire_bytes_per_s(self, count: int) -> float:
        """Estimate the bytes on the network: each beat is a segment, and is acknowledged by another one."""
        return self.beats_per_s * (beat_bytes(count) + 2 * SEGMENT_BYTES)


def mesh(instances: int) -> Fleet:
    """Every instance is linked with every other."""
    return Fleet(instances, instances * (instances - 1) // 2, instances - 1)


def pairs(prompts: int, decoders: int) -> Fleet:
    """Every decoder is linked with every prompt."""
    return Fleet(prompts + decoders, prompts * decoders, max(prompts, decoders))


def cells(number: int, each: Fleet) -> Fleet:
    """So many fleets that have no links with each other."""
    return Fleet(number * each.instances, number * each.links, each.busiest)


def beat_bytes(count: int) -> int:
    """Return the bytes of the frame of the beat with that number: an array of a text, it, and two totals, here 0."""
    integer = next(
        size for size, end in ((1, 1 << 7), (2, 1 << 8), (3, 1 << 16), (5, 1 << 32), (9, 1 << 64)) if count < end
    )
    return FRAME_HEADER.size + 1 + len("beat") + 1 + integer + 2


def resolved_bytes(tensors: int) -> int:
    """Return a bound of the bytes by which a peer learns where a cache is, once for each cache and link."""
    return 12 * tensors + 256


#: A day after the start.
_COUNT: Final = 86_400
_FLEETS: Final = {
    "16 prompts, 48 decoders": pairs(16, 48),
    "mesh of 64": mesh(64),
    "250 prompts, 750 decoders": pairs(250, 750),
    "mesh of 1,000": mesh(1000),
    "2,500 prompts, 7,500 decoders": pairs(2500, 7500),
    "40 cells of 62 and 188": cells(40, pairs(62, 188)),
    "mesh of 10,000": mesh(10_000),
}


def rows() -> list[str]:
    """Return the table as lines of Markdown."""
    lines = [
        "| deployment | links in all | links of one instance | its CPU, idle | its memory, tcp (shm) | "
        "its descriptors, tcp (shm) | beats/s in all | beat bytes/s of one | network in all |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, fleet in _FLEETS.items():
        most = fleet.busiest
        wall = "" if most <= MAX_LINKS else " (above `llm.MaxLinks`)"
        lines.append(
            f"| {name} | {fleet.links:,} | {most:,}{wall} | {most * CPU_PERCENT:.1f} % | "
            f"{most * RSS_KIB['tcp'] / 1024:.0f} ({most * RSS_KIB['shm'] / 1024:.0f}) MiB | "
            f"{most * DESCRIPTORS['tcp']:,} ({most * DESCRIPTORS['shm']:,}) | {fleet.beats_per_s:,.0f} | "
            f"{most / PERIOD_S * beat_bytes(_COUNT) / 1e3:.1f} kB | {fleet.wire_bytes_per_s(_COUNT) / 1e6:.1f} MB/s |"
        )
    return lines


def main() -> int:
    """Print."""
    print("\n".join(rows()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
