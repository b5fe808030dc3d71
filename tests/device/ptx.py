"""Interpreter of PTX: runs a kernel on the CPU, if it has no barriers, shuffles, shared memory or signed numbers.

A register is an array with an element for each thread. Threads at the same instruction run it together, those furthest
behind first. Nothing orders the threads of such a kernel, so a GPU may run them in this order, too.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Lanes = NDArray[np.intp]
Words = NDArray[np.uint64]
Registers = dict[str, NDArray[Any]]

#: Far more than any launch of the tests takes.
_MOST_STEPS: Final = 30_000
#: Types are read as unsigned; ptxas, not this interpreter, compares them with the registers (`make test-ptx`).
_SUPPORTED: Final = re.compile(
    r"bra|ret|ld\.param\.u\d+|(ld|st)\.global(\.v4)?\.[ub]\d+|mov\.u\d+|cvt\.u64\.u32|cvta\.to\.global\.u64"
    r"|(add|sub|div)\.u\d+|(and|or|shl)\.b\d+|shr\.u\d+|(mul|mad)\.(lo|wide)\.u\d+|setp\.(ge|lt|ne)\.u\d+"
)
_NUMBERS: Final = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.floor_divide}
_BITS: Final = {"and": np.bitwise_and, "or": np.bitwise_or, "shl": np.left_shift, "shr": np.right_shift}
_COMPARISONS: Final = {"ge": np.greater_equal, "lt": np.less, "ne": np.not_equal}
_MOVES: Final[dict[str, Any]] = {"mov": np.positive, "cvta": np.positive, "ld": np.positive, "cvt": np.uint32}
_RESULTS: Final[dict[str, Callable[..., Any]]] = {**_NUMBERS, **_BITS, **_COMPARISONS, **_MOVES}


class Fault(Exception):
    """An access or a loop that a GPU would not survive."""


class Memory:
    """Bytes from an address on; threads may access those that ``loadable`` and ``storable`` mark."""

    def __init__(self, base: int, nbytes: int) -> None:
        self.base = base
        self.bytes = np.zeros(nbytes, np.uint8)
        self.loadable, self.storable = np.zeros((2, nbytes), bool)
        #: How often each byte was stored; how many loads had each size.
        self.stored, self.loads = np.zeros(nbytes, np.uint8), Counter[int]()

    def load(self, addresses: Words, bits: int, count: int) -> NDArray[Any]:
        """Return a row of ``count`` values for each address."""
        at = self._indices("load", addresses, bits // 8 * count, self.loadable)
        self.loads[at.shape[1]] += len(at)
        return self.bytes[at].view(f"<u{bits // 8}")

    def store(self, addresses: Words, bits: int, columns: Sequence[Words]) -> None:
        """Store a row of values, one of each column, at each address."""
        at = self._indices("store", addresses, bits // 8 * len(columns), self.storable)
        self.bytes[at] = np.stack(columns, axis=1).astype(f"<u{bits // 8}").view(np.uint8)
        np.add.at(self.stored, at, 1)

    def _indices(self, verb: str, addresses: Words, size: int, allowed: NDArray[np.bool_]) -> Lanes:
        first = addresses - np.uint64(self.base)  # huge if the address is below
        inside = first <= self.bytes.size - size
        at = np.where(inside, first, 0).astype(np.intp)[:, np.newaxis] + np.arange(size)
        right = inside & allowed[at].all(axis=1) & (addresses % size == 0)
        if not right.all():
            raise Fault(f"{verb} of {size} bytes at {int(addresses[~right][0]):#x}")
        return at


class Kernel:
    """An entry of a text. ValueError for what the interpreter lacks."""

    def __init__(self, text: str, name: str) -> None:
        found = re.search(rf"\.entry {name}\((.*?)\)\s*\{{(.*?)\n\}}", re.sub(r"//.*", "", text), re.DOTALL)
        if found is None:
            raise ValueError(f"no entry {name}")
        parameters = re.findall(r"\.param \.u\d+ (\w+)", found[1])
        self._given = ["%tid.x", "%ntid.x", "%ctaid.x", "%nctaid.x", *parameters]
        self._dtypes = dict.fromkeys(self._given, "u8")
        self._code: list[tuple[str, list[str], list[str]]] = []  # predicate or nothing, name in parts, operands
        self._labels: dict[str, int] = {}
        for statement in re.sub(r"(\w+):", r"\1:;", found[2]).split(";"):
            self._read(" ".join(statement.split()))

    def _read(self, statement: str) -> None:
        if statement.endswith(":"):
            self._labels[statement[:-1]] = len(self._code)
        elif declared := re.fullmatch(r"\.reg \.(?:pred|b(\d+)) (.*)", statement):
            for name, many in re.findall(r"(\w+)(?:<(\d+)>)?", declared[2]):
                names = [f"{name}{i}" for i in range(int(many))] if many else [name]
                self._dtypes |= dict.fromkeys(names, f"u{int(declared[1]) // 8}" if declared[1] else "?")
        elif found := re.fullmatch(r"(?:@(\w+) )?([\w.]+) ?(.*)", statement):
            if not _SUPPORTED.fullmatch(found[2]):
                raise ValueError(f"not supported: {statement}")
            operands = re.findall(r"\{.*?\}|\[.*?\]|[^\s,]+", found[3])
            self._code.append((found[1] or "", found[2].split("."), operands))

    def launch(self, grid: int, block: int, values: list[int], memory: Memory, only: Sequence[int] = ()) -> None:
        """Run the blocks of a grid, or ``only`` some, until all threads have ended."""
        blocks = np.array(only or range(grid), np.uint64)
        special = [np.tile(np.arange(block), len(blocks)), block, np.repeat(blocks, block), grid]
        garbage = np.full(len(blocks) * block, 0xA7A7A7A7A7A7A7A7, np.uint64)  # what no instruction has set
        registers = {name: garbage.astype(dtype) for name, dtype in self._dtypes.items()}
        for name, value in zip(self._given, [*special, *values], strict=True):
            registers[name][:] = value
        at = np.zeros(garbage.size, np.intp)  # what each thread runs next
        for _ in range(_MOST_STEPS):
            if (now := int(at.min())) == len(self._code):
                return
            lanes = np.flatnonzero(at == now)
            predicate, op, operands = self._code[now]
            at[lanes] += 1
            if predicate:
                lanes = lanes[registers[predicate][lanes]]
            if op[0] == "bra":
                at[lanes] = self._labels[operands[0]]
            elif op[0] == "ret":
                at[lanes] = len(self._code)
            else:
                _execute(op, operands, registers, lanes, memory)
        raise Fault("a thread does not end")


def _execute(op: list[str], operands: list[str], registers: Registers, lanes: Lanes, memory: Memory) -> None:
    def value(operand: str) -> Any:
        name, _, offset = operand.strip("[]").partition("+")
        base = registers[name][lanes].astype(np.uint64) if name in registers else np.uint64(int(name, 0))
        return base + np.uint64(int(offset)) if offset else base

    name, bits = op[0], int(op[-1][1:])
    first, second = (each.strip("{}").split(", ") for each in operands[:2])  # a vector has several registers
    if name == "st":
        memory.store(value(operands[0]), bits, [value(each) for each in second])
        return
    if name == "ld" and op[1] == "global":
        results = list(memory.load(value(operands[1]), bits, len(first)).T)
    else:
        a, *rest = (value(each) for each in operands[1:])
        results = [a * rest[0] + rest[1] if name == "mad" else _RESULTS[op[1] if name == "setp" else name](a, *rest)]
    for target, result in zip(first, results, strict=True):
        registers[target][lanes] = result
