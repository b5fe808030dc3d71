"""The fake of NVIDIA's driver, ``tests/device/fakecuda.c``: compiled when first needed, loaded, asked, and misled."""

import ctypes
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tests.support.source import ROOT, SOURCE

NAME: Final = "libcuda.so.1"
_SOURCES: Final = [ROOT / "tests" / "device" / name for name in ("fakecuda.c", "fakegpu.h", "fakeabi.h")]
_FLAGS: Final = ("-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Wno-unused-parameter", "-shared", "-fPIC", "-pthread")


class Unsupported(Exception):
    """This host cannot compile the fake; says what is missing."""


@cache
def library() -> Path:
    """Return the compiled fake, which is kept in ``build/fakecuda``; any number of processes may ask at once.

    Raises:
        Unsupported: There is no C compiler.
        subprocess.CalledProcessError: The fake does not compile.
    """
    compiler = os.environ.get("CC", "cc")
    if shutil.which(compiler) is None:
        raise Unsupported(f"no C compiler on the path: {compiler}")
    made_of = hashlib.sha256(repr([compiler, *_FLAGS]).encode())
    for source in (*_SOURCES, SOURCE / "_native" / "copy" / "cuda_abi.h"):
        made_of.update(source.read_bytes())
    path = ROOT / "build" / "fakecuda" / made_of.hexdigest()[:16] / NAME
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / NAME
            command = [compiler, *_FLAGS, f"-Wl,-soname,{NAME}", str(_SOURCES[0]), "-o", str(made)]
            subprocess.run(command, check=True)
            made.replace(path)
    return path


def environment(**settings: object) -> dict[str, str]:
    """Return what a child process needs in its environment to find the fake as libcuda.so.1.

    Args:
        settings: Of FAKECUDA_*, in small letters: ``delay_us=0``. ``tests/device/fakecuda.c`` lists them.
    """
    folders = [str(library().parent), os.environ.get("LD_LIBRARY_PATH", "")]
    named = {f"FAKECUDA_{name.upper()}": str(value) for name, value in settings.items()}
    return named | {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders))}


@dataclass(frozen=True)
class State:
    """What a process has of the fake, or had when it exited.

    Attributes:
        sticky: The error that ended all work, or 0.
        leaked: What the library must free: VMM memory, handles, imports, reservations, registered host memory.
        kept: What the library keeps until its process ends: streams, events, scratch, pinned slots.
    """

    pid: int
    sticky: int
    unfinished_streams: int
    copies: int
    kernels: int
    leaked: dict[str, int]
    kept: dict[str, int]
    violations: list[str]


def reports(path: Path) -> list[State]:
    """Return what the processes left that exited with ``environment(report=path)``, in that order."""
    return [State(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def report(path: Path) -> None:
    """Append what this process has of the fake, if it has been loaded."""
    if (fake := loaded()) is not None:
        with path.open("a") as out:
            out.write(json.dumps(asdict(fake.state())) + "\n")


class Fake:
    """The fake driver of this process.

    Owns: nothing; it stays loaded, so every later ``dlopen`` of libcuda.so.1 in this process finds it.
    Threads: any.
    """

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self._alias: Callable[[int], int | None] = self._library.fakecuda_alias
        self._library.fakecuda_alias.restype, self._library.fakecuda_alias.argtypes = ctypes.c_void_p, [ctypes.c_uint64]

    def fail(self, name: str, code: int, *, after: int = 0, times: int = 1) -> None:
        """Let calls of a driver function return an error: ``times`` of them, once ``after`` have gone well."""
        self._library.fakecuda_fail(name.encode(), code, ctypes.c_long(after), ctypes.c_long(times))

    def heal(self) -> None:
        """Let all calls work again, also after an error that no driver recovers from."""
        self._library.fakecuda_heal()

    def capture(self, stream: int) -> None:
        """Begin to capture a graph from a stream, in global mode; 0: end that."""
        self._library.fakecuda_capture(ctypes.c_void_p(stream))

    def set_delay(self, microseconds: int) -> None:
        """Set the age at which work begins although no call waits for it."""
        self._library.fakecuda_set_delay(ctypes.c_long(microseconds))

    def set_rate(self, bytes_per_second: int) -> None:
        """Set the rate at which each stream moves bytes; 0: as fast as the host."""
        self._library.fakecuda_set_rate(ctypes.c_long(bytes_per_second))

    def hang(self, on: bool) -> None:
        """Let no event complete, nor what follows it in its stream; or let go."""
        self._library.fakecuda_hang(int(on))

    def state(self) -> State:
        """Return what this process has now: counters, objects, violations."""
        text = ctypes.create_string_buffer(1 << 17)
        self._library.fakecuda_state(text, ctypes.c_size_t(len(text)))
        return State(**json.loads(text.value))

    def view(self, address: int, nbytes: int, kept: object = None) -> NDArray[np.uint8]:
        """Return bytes of device memory for the host to read and write; valid as long as they are mapped.

        Args:
            kept: What keeps them mapped, and lives as long as the array.

        Raises:
            ValueError: The bytes are not all in one mapping.
        """
        first, last = (self._alias(at) for at in (address, address + nbytes - 1))
        if first is None or last is None or last - first != nbytes - 1:
            raise ValueError(f"no device memory: {nbytes} bytes at {address:#x}")
        kind: Any = type("Bytes", (ctypes.c_uint8 * nbytes,), {})  # a class of its own has room for an attribute
        found = kind.from_address(first)
        found.kept = kept
        return np.frombuffer(found, np.uint8)

    def has(self, address: int) -> bool:
        """Return True if there is device memory."""
        return self._alias(address) is not None

    def call(self, function: str, *arguments: object) -> None:
        """Call the driver in a context that is this thread's only now: the library must see to its own.

        Raises:
            MemoryError: The call failed, as most do when there is no memory, or no device any more.
        """
        context = ctypes.c_void_p()
        code = self._library.cuInit(0) or self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0)
        if not code:
            self._library.cuCtxPushCurrent_v2(context)
            code = getattr(self._library, function)(*arguments)
            self._library.cuCtxPopCurrent_v2(ctypes.byref(context))
        if code:
            raise MemoryError(f"{function}: {code}")


class UserMemory:
    """Device memory as ``cudaMalloc`` gives it to users; its end frees it."""

    def __init__(self, nbytes: int) -> None:
        self._pid, self._at = os.getpid(), ctypes.c_uint64()
        load().call("cuMemAlloc_v2", ctypes.byref(self._at), ctypes.c_size_t(nbytes))
        self.address = self._at.value

    def __del__(self) -> None:
        if os.getpid() == self._pid and self._at.value:  # in a forked child the driver refuses all
            with suppress(MemoryError):  # and so after an error that it does not survive
                load().call("cuMemFree_v2", self._at)


class Hang:
    """Copies of this process that begin from now on do not end before :meth:`release`; asked as a page trap is."""

    def __init__(self) -> None:
        load().hang(True)

    def wait(self, _: float) -> bool:
        """Return True if a copy has begun."""
        return load().state().unfinished_streams > 0

    def release(self) -> None:
        load().hang(False)


@cache
def load() -> Fake:
    """Load the fake into this process, once. FAKECUDA_* of ``os.environ`` count until the first ``cuInit``."""
    return Fake(library())


def loaded() -> Fake | None:
    """Return the fake, if it has been loaded."""
    return load() if load.cache_info().currsize else None


def complaints(state: State) -> list[str]:
    """Return what a process did wrong that has closed everything: violations, and what it has not given back."""
    left = [f"{count} {what} left" for what, count in state.leaked.items() if count]
    return [f"process {state.pid}: {each}" for each in state.violations + left]


def complaints_here() -> list[str]:
    """Return :func:`complaints` of this process; none where the fake was not needed."""
    fake = loaded()
    return [] if fake is None else complaints(fake.state())
