"""Get/put stores of KV blocks behind one interface, and the control: a plain folder, which gives wrong bytes.

A store that is to be judged by `test_wrong_kv.py` needs a :class:`Store` and an :class:`Engine`, as the folder's below.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
from numpy.typing import NDArray

from tests.support.kv import POISON, bytes_of

#: Blocks in the memory of an engine.
BLOCKS: Final = 16


@dataclass(frozen=True)
class Identity:
    """Whatever, changed, makes other KV bytes for the same tokens, or other keys for them."""

    revision: str = "main"
    weights: str = "weights of May"
    layout: str = "NHD"
    dtype: str = "bfloat16"
    rope: str = "theta 10000"
    tp_size: int = 2
    tp_rank: int = 0
    hash_algorithm: str = "sha256_cbor"
    hash_seed: str = "0"
    salt: str = ""

    def other(self, field: str) -> "Identity":
        """Return an identity that differs in this field only."""
        old: Any = getattr(self, field)
        changed: dict[str, Any] = {field: old + 1 if isinstance(old, int) else f"{old}'"}
        return replace(self, **changed)

    @property
    def digest(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()


@dataclass(frozen=True)
class Shape:
    """Geometry of an engine's KV: tensors (layers), and bytes of one block in each."""

    tensors: int = 2
    nbytes: int = 8192


USUAL: Final = Shape()


class Engine(ABC):
    """A process with KV memory and a client of the store. Its bytes follow from identity, key and place."""

    identity: Identity
    shape: Shape

    def expected(self, keys: Sequence[bytes]) -> NDArray[np.uint8]:
        """Return the right bytes of these keys, ``(keys, tensors, nbytes)``."""
        return np.stack([bytes_of(self.identity.digest, key, *self.numbers) for key in keys])

    @property
    def numbers(self) -> tuple[int, int]:
        return self.shape.tensors, self.shape.nbytes

    def compute(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Write the right bytes of these keys into the engine's blocks."""
        self.write(blocks, self.expected(keys))

    def wrong(self, keys: Sequence[bytes], blocks: Sequence[int]) -> int:
        """Return how many bytes of the engine's blocks are not those of these keys."""
        return int((self.read(blocks) != self.expected(keys)).sum())

    @abstractmethod
    def write(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        """Write bytes, ``(blocks, tensors, nbytes)``, into the engine's memory."""

    @abstractmethod
    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        """Return bytes of the engine's memory, ``(blocks, tensors, nbytes)``."""

    @abstractmethod
    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Save blocks. Return if the store refuses them, or the save fails, too: the engine goes on then."""

    @abstractmethod
    def give_up(self) -> None:
        """Wait until the engine has lost patience with the save that is under way."""

    @abstractmethod
    def find(self, keys: Sequence[bytes]) -> int:
        """Look keys up; return how many, from the first on, the store claims to have. The engine keeps the hit."""

    @abstractmethod
    def load(self, blocks: Sequence[int]) -> bool:
        """Load the last hit, and keep it; return whether the store claims that all bytes are right."""

    @abstractmethod
    def release(self) -> None:
        """Give the last hit back, but remember it, as a caller does that uses it once more."""

    @abstractmethod
    def reuse(self) -> None:
        """Free the KV memory, and use the same memory for something else, as an engine that preempts does."""

    @abstractmethod
    def die(self) -> None:
        """``kill -9``."""


class Store(ABC):
    """A running store for one test, and the harm that the test does to it."""

    #: Blocks of the default shape that it holds.
    capacity: int

    @abstractmethod
    def engine(self, identity: Identity, shape: Shape = USUAL, name: str = "") -> Engine:
        """Start an engine; ``name`` is what it tells the store about itself, another one each time unless given."""

    @abstractmethod
    def during_save(
        self, engine: Engine, keys: Sequence[bytes], blocks: Sequence[int], what: Callable[[], None]
    ) -> None:
        """Have the engine save; call ``what`` once, before the last byte has moved."""

    @abstractmethod
    def during_load(self, engine: Engine, blocks: Sequence[int], what: Callable[[], None]) -> bool:
        """Have the engine load its last hit; call ``what`` once, before the last byte has moved. As Engine.load."""

    @abstractmethod
    def outlive(self, engine: Engine) -> None:
        """Do what makes the store give up an engine that is stopped: wait until a lease or a timeout is over."""

    @abstractmethod
    def restart(self) -> None:
        """Kill the store, and start it again at the same place."""

    @abstractmethod
    def flip(self, block: NDArray[np.uint8]) -> None:
        """Flip a bit in the store's copy of a block, ``(tensors, nbytes)``."""

    @abstractmethod
    def close(self) -> None:
        """End everything."""


# --- the control ------------------------------------------------------------------------------------------------------


class Died(Exception):
    """Stands for the end of an engine's process."""


class Folder(Store):
    """A file for each key. When there are ``capacity`` of them, the oldest file is renamed and written over."""

    capacity = 8

    def __init__(self, path: Path) -> None:
        self.path = path
        self.age: list[str] = []  # names of files, the oldest first
        #: Called in the middle of the next copy.
        self.amid: Callable[[], None] = lambda: None
        self.files = ExitStack()

    def engine(self, identity: Identity, shape: Shape = USUAL, name: str = "") -> "FolderEngine":
        return FolderEngine(self, identity, shape)

    def during_save(
        self, engine: Engine, keys: Sequence[bytes], blocks: Sequence[int], what: Callable[[], None]
    ) -> None:
        self.amid = what
        engine.save(keys, blocks)

    def during_load(self, engine: Engine, blocks: Sequence[int], what: Callable[[], None]) -> bool:
        self.amid = what
        return engine.load(blocks)

    def outlive(self, engine: Engine) -> None:
        """A folder knows no engines."""

    def restart(self) -> None:
        self.age.clear()
        for number, each in enumerate(sorted(self.path.iterdir())):
            each.rename(self.path / f"old {number}")
            self.age.append(f"old {number}")

    def flip(self, block: NDArray[np.uint8]) -> None:
        for each in self.path.iterdir():
            if (held := bytearray(each.read_bytes())) == block.tobytes():
                held[len(held) // 3] ^= 1
                each.write_bytes(held)

    def close(self) -> None:
        self.files.close()

    def place(self, name: str) -> BinaryIO:
        """Return the file of a key, to be written: a new one, or the oldest."""
        if name not in self.age:
            if len(self.age) == self.capacity:
                (self.path / self.age.pop(0)).rename(self.path / name)
            self.age.append(name)
        return (self.path / name).open("r+b" if (self.path / name).exists() else "w+b")

    def meet(self) -> None:
        amid, self.amid = self.amid, lambda: None
        amid()


class FolderEngine(Engine):
    """An engine of the folder, in this process."""

    def __init__(self, folder: Folder, identity: Identity, shape: Shape) -> None:
        self.identity, self.shape, self._folder = identity, shape, folder
        self._memory = np.full((BLOCKS, *self.numbers), POISON, np.uint8)
        self._hit: list[BinaryIO] = []
        self._dead = False

    def write(self, blocks: Sequence[int], data: NDArray[np.uint8]) -> None:
        self._memory[list(blocks)] = data

    def read(self, blocks: Sequence[int]) -> NDArray[np.uint8]:
        return self._memory[list(blocks)]

    def save(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        try:
            for key, block in zip(keys, blocks, strict=True):
                with self._folder.place(key.hex()) as file:
                    self._put(file, block)
        except Died:
            return

    def _put(self, file: BinaryIO, block: int) -> None:
        for tensor in range(self.shape.tensors):
            file.write(self._memory[block, tensor].tobytes())
            file.flush()
            if tensor == 0:
                self._folder.meet()
            if self._dead:
                raise Died

    def give_up(self) -> None:
        """It has no patience."""

    def find(self, keys: Sequence[bytes]) -> int:
        there = [self._folder.path / key.hex() for key in keys]
        self._hit = [self._folder.files.enter_context(each.open("rb")) for each in there if each.exists()]
        return len(self._hit)

    def load(self, blocks: Sequence[int]) -> bool:
        for number, (file, block) in enumerate(zip(self._hit, blocks, strict=True)):
            if number == len(self._hit) // 2:
                self._folder.meet()
            file.seek(0)
            found = np.frombuffer(file.read(self.shape.tensors * self.shape.nbytes), np.uint8)
            self._memory[block].reshape(-1)[: found.size] = found
        return True

    def release(self) -> None:
        """A file that is open stays open."""

    def reuse(self) -> None:
        self._memory[:] = ~self._memory

    def die(self) -> None:
        self._dead = True
