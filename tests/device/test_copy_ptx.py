"""The kernel of copy.ptx, interpreted: each byte of a plan moves once, and no other byte is loaded or stored."""

from collections.abc import Sequence
from itertools import chain, product
from typing import Final

import numpy as np
import pytest

from tests.device.ptx import Fault, Kernel, Memory
from tests.support.source import SOURCE

Plan = tuple[list[int], list[int], Sequence[Sequence[int]]]  # addresses of both sides, rows of runs

TEXT: Final = (SOURCE / "_native" / "copy" / "copy.ptx").read_text("ascii")
KERNEL: Final = Kernel(TEXT, "datadist_copy")
BASE: Final = 0x7000_0000_0000
DATA: Final = BASE + (16 << 10)  # behind the lists of a plan
#: Around what a loop of the kernel moves at a time.
SHORT: Final = [0, 1, 3, 4, 5, 15, 16, 17, 127, 128, 129]
LONG: Final = [511, 512, 528, 1536, 2047, 2048, 2064, 4080, 4095, 4096, 4097, 8192, 8999]
SEEDS: Final = range(100)


def memory(nbytes: int) -> Memory:
    """Return memory for the lists, and random bytes behind them."""
    made = Memory(BASE, DATA - BASE + nbytes)
    made.bytes[:] = np.random.default_rng(0).integers(0, 256, made.bytes.size, np.uint8)
    return made


def upload(plan: Plan, used: Memory) -> list[int]:
    """Store the lists of a plan; return the arguments of the kernel."""
    dst, src, rows = plan
    words = np.array([*dst, *src, *chain(*rows)], np.uint64).view(np.uint8)
    used.bytes[: words.size] = words
    used.loadable[: words.size] = True
    return [BASE, BASE + 8 * len(dst), BASE + 16 * len(dst), len(dst), len(rows)]


def check(kernel: Kernel, plan: Plan, used: Memory, grid: int = 2, block: int = 64) -> None:
    """Compare each byte, and how often the kernel stored it, with a plain loop."""
    arguments = upload(plan, used)
    expected, stored = used.bytes.copy(), np.zeros_like(used.stored)
    for (dst, src), (to, from_, n) in product(zip(*plan[:2], strict=True), plan[2]):
        at, source = (slice(each - BASE, each - BASE + n) for each in (dst + to, src + from_))
        expected[at] = used.bytes[source]
        stored[at] += 1
        used.storable[at] = used.loadable[source] = True
    kernel.launch(grid, block, arguments, used)
    assert (used.bytes == expected).all()
    assert (used.stored == stored).all()


def check_random(kernel: Kernel, *seeds: int) -> None:
    for seed in seeds:
        rng = np.random.default_rng(seed)
        unit, most = [(1, 600), (4, 2048), (16, 9000)][rng.integers(3)]  # all addresses are multiples of the unit
        pairs, runs, grid, warps = rng.integers(1, [5, 7, 4, 4]).tolist()
        lengths = np.minimum(rng.choice([*SHORT, *LONG, *rng.integers(0, most, 20)], runs), most)
        slot, extent = 9040, 9040 * (runs + 1)
        far = rng.choice([0, 5 << 32])  # such offsets need more than 32 bits
        starts = DATA - far + extent * np.arange(2 * pairs) + unit * rng.integers(32 // unit, size=2 * pairs)
        to, from_ = (far + slot * rng.permutation(runs) + unit * rng.integers(32 // unit, size=runs) for _ in range(2))
        plan = starts[:pairs].tolist(), starts[pairs:].tolist(), np.stack([to, from_, lengths], axis=1).tolist()
        check(kernel, plan, memory(2 * pairs * extent), grid, 32 * warps)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_plan_moves_as_by_a_plain_loop(seed: int) -> None:
    check_random(KERNEL, seed)


def test_each_pair_of_alignments_moves_each_tail() -> None:
    rows = [(160 * i, 160 * (len(SHORT) - i), n) for i, n in enumerate(SHORT)]
    extent, skews = 160 * (len(SHORT) + 1), range(16)
    dst = [DATA + (16 * i + j) * extent + i for i in skews for j in skews]
    src = [DATA + (16 * i + j + 256) * extent + j for i in skews for j in skews]
    check(KERNEL, (dst, src, rows), memory(512 * extent), grid=40, block=256)


@pytest.mark.parametrize(("pairs", "runs"), [(0, 3), (3, 0), (0, 0)])
def test_a_plan_without_pairs_or_runs_moves_nothing(pairs: int, runs: int) -> None:
    check(KERNEL, ([DATA] * pairs, [DATA] * pairs, [(0, 0, 64)] * runs), memory(64))


def test_a_run_onto_itself_leaves_its_bytes() -> None:
    check(KERNEL, ([DATA], [DATA], [(0, 0, 7001)]), memory(7001))


@pytest.mark.parametrize(("skew", "size"), [(0, 16), (8, 4), (4, 4), (2, 1)])
def test_bytes_move_in_the_largest_units_that_both_addresses_allow(skew: int, size: int) -> None:
    used = memory(16384)
    check(KERNEL, ([DATA + 8192 + skew], [DATA], [(0, 0, 5136)]), used, grid=1, block=32)
    assert used.loads == {8: 5 * 32, size: 5136 // size}


def test_an_item_beyond_32_bits_has_its_own_pair_and_run() -> None:
    item, count = (1 << 32) + 5, (1 << 16) + 1
    dst, src, rows = [0] * count, [0] * count, [(0, 0, 0)] * count
    data = (16 + 24) * count + 15 & -16
    dst[item // count], src[item // count], rows[item % count] = BASE + data, BASE + data + 512, (0, 0, 512)
    used = Memory(BASE, data + 1024)
    arguments = upload((dst, src, rows), used)
    used.bytes[data + 512 :] = 7
    used.storable[data : data + 512] = used.loadable[data + 512 :] = True
    KERNEL.launch(item // 8 + 1, 256, arguments, used, only=[item // 8])  # all blocks would take minutes
    assert (used.bytes[data:] == 7).all()
    assert used.stored.sum() == 512


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("and.b64 a, mix, 15;", "and.b64 a, mix, 7;"),
        ("or.b64 mix, d, s;", "or.b64 mix, d, d;"),
        ("add.u64 i, i, 4096;", "add.u64 i, i, 8192;"),
        ("add.u64 i, i, 32;", "add.u64 i, i, 64;"),
        ("@row2 st", "@row1 st"),
        ("shl.b64 i, i, 4;", "shl.b64 i, i, 3;"),
        ("0xfffffffffffffff0", "0xfffffffffffffff8"),
        ("mad.lo.u64 a, run, 24, list;", "mad.lo.u64 a, run, 16, list;"),
        ("mad.wide.u32 item, t, warps, item;", "mul.wide.u32 item, t, warps;"),
        ("add.u64 item, item, step;", "add.u64 item, item, items;"),
        ("setp.ge.u64 p, i, n;", "setp.ge.u64 p, i, end;"),
        ("[a+3584]", "[a+3072]"),
    ],
)
def test_a_planted_fault_is_found(old: str, new: str) -> None:
    assert old in TEXT
    with pytest.raises((AssertionError, Fault)):
        check_random(Kernel(TEXT.replace(old, new), "datadist_copy"), *SEEDS)


@pytest.mark.parametrize(
    ("to", "from_", "skew", "block", "fault"),
    [
        (BASE - DATA - 16, 0, 0, 32, "store of 16 bytes at 0x6ffffffffff0"),
        (208, 0, 0, 32, "store of 16 bytes at 0x700000004100"),
        (64, 80, 0, 32, "load of 16 bytes at 0x700000004080"),
        (64, 0, 4, 32, "load of 8 bytes at 0x700000000004"),
        (64, 0, 0, 16, "a thread does not end"),
    ],
)
def test_a_wrong_access_or_no_end_is_a_fault(to: int, from_: int, skew: int, block: int, fault: str) -> None:
    used = memory(256)
    arguments = upload(([DATA + to], [DATA + from_], [(0, 0, 64)]), used)
    used.loadable[DATA - BASE : DATA - BASE + 128] = used.storable[DATA - BASE + 64 :] = True
    with pytest.raises(Fault, match=fault):
        KERNEL.launch(1, block, [arguments[0] + skew, *arguments[1:]], used)
