"""Programs in C++ that link the library: compiled once, and driven by commands over their standard input."""

import hashlib
import os
import select
import shutil
import signal
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from llm_datadist.cpp_api import CacheIndex, LlmRole
from tests.support import cpp
from tests.support.ends import ChildEnd, Processes
from tests.support.linking import free_port
from tests.support.source import ROOT, compiled
from tests.support.world import World, read

INVALID, FAILED, NO_CACHE, NOT_LINKED, ALREADY = 0x5010B005, 0xFFFFFFFF, 0x5010B002, 0x5010B007, 0x5010B008
LINK_FAILED, EXIST_LINK, NOT_ENABLED, TIMEOUT = 0x5010B009, 0x5010B018, 0x5010B019, 0x5010B01A
BUSY, NO_MEMORY, PEER_DIED = 0x5010B01B, 0x5010B01C, 507057
#: Device, four tensors, int32, eight blocks of 64 bytes.
KV: Final = "1 4 3 8,16"
#: Header and library as installed, beside the native module.
FOLDER: Final = compiled("_native").parent.parent / "cpp"
PROGRAMS: Final = ROOT / "tests" / "cpp_library"
COMPILERS: Final = [each for each in ("g++", "clang++") if shutil.which(each)]
_STRICT: Final = ("-Wall", "-Wextra", "-Werror", "-g")
#: Under `make asan` the library is sanitized, and its runtime is in every process.
_SANITIZED: Final = "libasan" in os.environ.get("LD_PRELOAD", "")
_SECONDS: Final = 60.0


def build(source: str, *flags: str, compiler: str = "g++", link: bool = True) -> Path:
    """Return the program of a source beside the tests, compiled against the installed header; kept between runs."""
    flags = ("-std=c++14", "-O1", *_STRICT, *flags)
    if _SANITIZED and "-shared" not in flags:
        flags += ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
    flags += (f"-I{FOLDER}/include", "-pthread")
    after = (f"-L{FOLDER}/lib", f"-Wl,-rpath,{FOLDER}/lib", "-lllm_datadist") if link else ()
    path = Path(source) if Path(source).is_absolute() else PROGRAMS / source
    made_of = [path, *sorted(FOLDER.rglob("*.h")), *([FOLDER / "lib" / "libllm_datadist.so"] if link else [])]
    digest = hashlib.sha256(repr((compiler, flags, after)).encode())
    for each in made_of:
        digest.update(each.read_bytes())
    program = ROOT / "build" / "cpp" / f"{path.stem}-{digest.hexdigest()[:16]}"
    if not program.exists():
        program.parent.mkdir(parents=True, exist_ok=True)
        being_made = program.with_suffix(f".{os.getpid()}")  # another process of the tests may make it, too
        subprocess.run([compiler, *flags, str(path), "-o", str(being_made), *after], check=True)
        being_made.replace(program)
    return program


class Failed(Exception):
    """A command that had to succeed did not."""


class Peer:
    """A process of peer.cpp. Its last error stays until another call fails."""

    def __init__(self, folder: Path | None = None, **environment: str) -> None:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        self.process = subprocess.Popen(
            [build("peer.cpp")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=kept | environment,
            bufsize=0,
            cwd=folder,
        )

    def begin(self, command: str) -> None:
        """Start a command and return at once; :meth:`finish` waits for it."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{command}\n".encode())

    def finish(self) -> tuple[int, str, str]:
        """Return (status, result, last error) of the command that was begun."""
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], _SECONDS)
            part = os.read(self.process.stdout.fileno(), 1 << 20) if ready else b""
            if not part:
                self.process.kill()
                raise TimeoutError(f"no answer; it ended with {self.process.wait()}")
            line += part
        status, text, error = line.decode().rstrip("\n").split("\t")
        return int(status), text, error

    def do(self, command: str) -> tuple[int, str, str]:
        """Do a command; return (status, result, last error)."""
        self.begin(command)
        return self.finish()

    def ok(self, command: str) -> str:
        """Do a command that must succeed; return its result."""
        status, text, error = self.do(command)
        if status != 0:
            raise Failed(f"{command}: 0x{status:08x} {error}")
        return text

    def bytes(self, name: str, tensors: int = 4, rows: int = 8) -> NDArray[np.uint8]:
        """Return every byte of a cache, of shape (tensors, rows, bytes of a row)."""
        return np.frombuffer(bytes.fromhex(self.ok(f"bytes {name}")), np.uint8).reshape(tensors, rows, -1)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self.process.kill()
        self.close()

    def exit(self) -> int:
        """Let it return from main with what it has; return the exit status."""
        self.begin("exit")
        return self.close()

    def close(self) -> int:
        """Close its standard input; return its exit status."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            return self.process.wait(_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)
            raise
        finally:
            self.process.kill()
            self.process.stdout.close()


def init(transport: str, port: int | None = None, **more: str) -> str:
    """Return the command that initializes a peer with pools of 32 MiB; with a port it listens there."""
    pool = '{"memory_size":33554432,"page_shift":12}'
    options = {"DeviceId": "0", "SyncKvCacheWaitTime": "10000", "Transport": transport}
    options |= {"MemPoolConfig": pool, "HostMemPoolConfig": pool}
    if port is not None:
        options["ListenIpInfo"] = f"127.0.0.1:{port}"
    return " ".join(["init", *(f"llm.{name}={value}" for name, value in (options | more).items())])


def born(
    peers: ExitStack, role: LlmRole, cluster_id: int, transport: str, port: int | None = None, **more: str
) -> Peer:
    peer = Peer()
    peers.callback(_ended, peer)
    peer.ok(f"new {cluster_id} {role}")
    peer.ok(init(transport, port, **more))
    return peer


def _ended(peer: Peer) -> None:
    if peer.process.returncode != -signal.SIGKILL:
        assert peer.close() == 0


def cache(peer: Peer, name: str, memory: str, seed: int = 1000) -> NDArray[np.uint8]:
    peer.ok(f"allocate {name} {seed} {KV}" if memory == "pool" else f"own {name} {seed} {KV} 1")
    found = peer.bytes(name)
    wanted = np.arange(seed, seed + 4 * 8 * 16, dtype=np.int32).view(np.uint8).reshape(4, 8, -1)
    assert np.array_equal(found, wanted)
    return found.copy()


def python(processes: Processes, role: LlmRole, cluster_id: int, transport: str) -> tuple[ChildEnd, int]:
    end = processes.child(f"python {cluster_id}")
    return end, end.do(cpp.start, role, cluster_id, transport, {})


def there(end: ChildEnd, name: str) -> NDArray[np.uint8]:
    return np.stack(end.do(_read, name))


def _read(world: World, name: str) -> list[NDArray[np.uint8]]:
    return read(world.caches[name])


def target(index: CacheIndex, row: int = 0) -> str:
    return f"{index.cluster_id} {index.cache_id} {row}"


def run_roles(program: Path, environment: dict[str, str] | None = None) -> None:
    """Run both roles of the example, which compare their bytes."""
    pipe, started = subprocess.PIPE, list[subprocess.Popen[str]]()
    ports = [str(free_port()) for _ in range(2)]
    try:
        for role in ("prompt", "decoder"):
            command = [program, role, *ports]
            started.append(subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=environment))
            assert started[-1].stdout is not None
            assert started[-1].stdout.readline().startswith("listening"), started[-1].communicate()
        assert [each.communicate("\n", _SECONDS) for each in started] == [("bytes equal\n", "")] * 2
        assert [each.returncode for each in started] == [0, 0]
    finally:
        for each in started:
            each.kill()
            each.communicate()
