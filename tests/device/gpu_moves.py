"""Sections of gpu_check.py that move bytes by the library's native code: every byte of random plans; speed."""

from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist import _native
from llm_datadist._native import NO_DEADLINE, DeviceMover, Place, Plan, Tensors, execute
from tests.device import cu
from tests.device.cu import MIB, U64
from tests.device.gpu_driver import FAKE, Bytes, check, check_use, milliseconds, tell
from tests.support import twin

Images = dict[str, NDArray[np.uint8]]
MOVERS: Final = {"kernel": DeviceMover.KERNEL, "copy": DeviceMover.COPY, "auto": DeviceMover.AUTO}
_PAIRS: Final = (
    "device-device device-mapping mapping-device pinned-device device-pinned pageable-device device-pageable"
)
_SECONDS: Final = 0.02 if FAKE else 0.3  # for each figure
#: Of runs; thousands need several launches, one alone may overlap itself.
_KINDS: Final[dict[str, Any]] = {
    "scattered": {"apart": True},
    "tiny": {"apart": True, "most": 24_000},
    "ordered": {"apart": False},
    "overlapping": {"apart": False, "most": 2},
}


class Places:
    """Memory of each place, all of ``nbytes``; "mapping" is the device's at other addresses, as peers have it."""

    def __init__(self, nbytes: int) -> None:
        self._through, self._memory = Bytes(nbytes), _native.DeviceMemory(0, nbytes)
        self._mapping = _native.DeviceMemory(0, nbytes, self._memory.export_fd(), True)
        self._host = {name: np.zeros(nbytes, np.uint8) for name in ("pinned", "pageable")}
        self._pinned = _native.PinnedMemory(0, self._host["pinned"].ctypes.data, nbytes)
        self.at = {"device": self._memory.address, "mapping": self._mapping.address}
        self.at |= {name: memory.ctypes.data for name, memory in self._host.items()}

    def read(self, name: str, begin: int, nbytes: int) -> NDArray[np.uint8]:
        return self._through.read(self.at[name] + begin, nbytes)

    def write(self, name: str, begin: int, content: NDArray[np.uint8]) -> None:
        self._through.write(self.at[name] + begin, content)

    def fill(self, random: np.random.Generator) -> Images:
        """Write random bytes to all places, and return them."""
        nbytes = len(self._host["pinned"])
        images = {name: random.integers(0, 256, nbytes, np.uint8) for name in ("device", "pinned", "pageable")}
        for name, image in images.items():
            self.write(name, 0, image)
        return images | {"mapping": images["device"]}

    def moving(self, plan: Plan, dst: str, begin: int, src: str, extent: int, mover: str) -> Callable[[], int]:
        """Return a call that moves a plan between tensors of ``extent`` bytes: from 0 on, and from ``begin`` on."""
        place = {"pinned": Place(pinned=True), "pageable": Place()}
        to, of = (
            Tensors(
                np.uint64(self.at[name] + first) + np.arange(plan.count, dtype=np.uint64) * np.uint64(extent),
                extent,
                place=place.get(name, Place(device=0, mover=MOVERS[mover])),
            )
            for name, first in ((dst, begin), (src, 0))
        )
        return lambda: execute(plan, to.native, of.native, None, NO_DEADLINE)


def movers() -> None:
    """Move random plans between all pairs of places by each mover; compare every byte of every place."""
    device, spent = milliseconds(lambda: _native.Device.open(0))
    tell(note="ms to open the device", value=spent)
    check("the kernel is compiled", not device.no_kernel, why=device.no_kernel)
    area, random, times = (1 if FAKE else 4) * MIB, np.random.default_rng(1), 1 if FAKE else 4
    places, wrong = Places(2 * area), []
    cases = list(product(_PAIRS.split(), _KINDS, MOVERS, range(times)))
    for pair, kind, mover, _ in cases:
        images, (src, dst), count = places.fill(random), pair.split("-"), int(random.integers(1, 4))
        extent, begin = area // count // 256 * 256, 0 if src == dst and kind in ("ordered", "overlapping") else area
        runs = twin.runs_of(random, extent, **_KINDS[kind], unit=int(random.choice([1, 4, 16, 256])))
        plan = twin.make_plan(runs, ordered=kind == "ordered", count=count)
        moved = places.moving(plan, dst, begin, src, extent, mover)()
        tensors = [slice(i, i + extent) for i in range(0, count * extent, extent)]
        twin.execute(plan, [images[dst][begin:][each] for each in tensors], [images[src][each] for each in tensors])
        if moved != plan.nbytes or not all((places.read(name, 0, 2 * area) == images[name]).all() for name in images):
            wrong.append([pair, kind, mover, count, runs[:4].tolist()])
    check("every byte of every plan is right", not wrong, plans=len(cases), wrong=wrong[:20])
    check_use()


def typical(call: Callable[[], object], most: int = 15) -> float:
    """Return the median of a call's times in seconds, after a first one that does not count."""
    call()
    times: list[float] = []
    while len(times) < 3 or (len(times) < most and sum(times) < _SECONDS):
        times.append(milliseconds(call)[1] / 1e3)
    return median(times)


def rate(nbytes: int, call: Callable[[], object]) -> float:
    """Return GB/s."""
    return float(f"{nbytes / typical(call) / 1e9:.3g}")


def speed(src: str, dst: str, direction: str) -> None:
    """Tell GB/s of scattered blocks by their size, each byte counted once, and the time of few blocks."""
    total, count = (4 * MIB, 2) if FAKE else ((512 if direction == "d2d" else 256) * MIB, 16)
    places, random, on, extent = Places(2 * total), np.random.default_rng(2), cu.stream(), total // count
    images, to, of = places.fill(random), places.at[dst] + total, places.at[src]
    limit = rate(total, partial(_copies, [(U64(to), U64(of))], U64(total), on))
    tell(note=f"{direction}, GB/s of one copy", value=limit)
    for block in [4096 << i for i in range(0, 9, 4 if FAKE else 1)]:
        n = extent // block
        rows, into = random.permutation(n), random.permutation(n)
        runs = np.stack([into * block, rows * block, np.full(n, block)], axis=1).astype(np.uint64)
        plan = twin.make_plan(runs, count=count)
        rates: dict[str, float] = {}
        for mover in [*MOVERS, "pageable"][: 3 if direction == "d2d" else 4]:
            ends = [each.replace("pinned", "pageable") if mover == "pageable" else each for each in (dst, src)]
            places.write(ends[0], total, np.zeros(extent, np.uint8))
            move = places.moving(plan, ends[0], total, ends[1], extent, mover.replace("pageable", "auto"))
            rates[mover] = rate(total, move)
            moved = places.read(ends[0], total, extent).reshape(n, block)[into]
            if not (moved == images[ends[1]][:extent].reshape(n, block)[rows]).all():
                check(f"bytes of {direction} by {mover}, blocks of {block}", right=False)
        moves = [(d, s) for d, s, _ in runs.tolist()]
        pairs = [(U64(to + i + d), U64(of + i + s)) for i in range(0, total, extent) for d, s in moves]
        rates["raw loop"] = rate(total, partial(_copies, pairs, U64(block), on))
        tell(table=f"{direction}, GB/s", KiB=block >> 10, **rates)
    for n in (1, 4, 16) if FAKE else (1, 2, 4, 8, 16, 32, 64, 256):
        plan = twin.make_plan(np.array([(i << 15, i << 15, 1 << 14) for i in range(n)], np.uint64))
        calls = {each: places.moving(plan, dst, total, src, total, each) for each in MOVERS}
        spent = {mover: round(typical(move, 200) * 1e6, 1) for mover, move in calls.items()}
        tell(table=f"{direction}, us of few blocks of 16 KiB", blocks=n, **spent)
    check_use()


def _copies(pairs: list[tuple[U64, U64]], nbytes: U64, on: Any) -> None:
    for to, of in pairs:
        cu.driver.cuMemcpyAsync(to, of, nbytes, on)
    cu.wait(on)


d2d, h2d, d2h = (
    partial(speed, *ends)
    for ends in (("device", "device", "d2d"), ("pinned", "device", "h2d"), ("device", "pinned", "d2h"))
)
