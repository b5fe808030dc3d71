"""Memory that is not there any more when bytes are moved: the file behind it was truncated, or its process has become
another program.

A file that is registered by its mapping is truncated: where the kernel moves the bytes it says EFAULT and the call
fails; where this library touches them by itself the process dies by SIGBUS, as at any other instruction that does.
docs/interface.md, "Requirements for registered memory", has the rules.
"""

import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from faults.gated import stopped
from llm_datadist import BlocksCacheKey
from llm_datadist.errors import LLMException, PeerLost, TransferFailed
from tests.native.drivers import Unsupported, compiler
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, bytes_move_both_ways, explain, info, link, links, start_both
from tests.support.memory import map_at
from tests.support.moves import Spec, Use, call, make, wait_until
from tests.support.world import World

SPEC = Spec(tensors=4, rows=8, stride=mmap.PAGESIZE, blocks=True)
KEY = BlocksCacheKey(1, 3)
ALL = list(range(SPEC.rows))


def register_file(world: World, path: Path) -> None:
    """Register the mapping of a file as cache "file"."""
    nbytes = SPEC.rows * SPEC.stride
    with path.open("w+b") as file:
        file.truncate(SPEC.tensors * nbytes)
        mapping = mmap.mmap(file.fileno(), 0)
    world.memory["mapping"] = mapping
    memory = np.frombuffer(mapping, np.uint8)
    memory[:] = 7
    addresses = [memory.ctypes.data + tensor * nbytes for tensor in range(SPEC.tensors)]
    del memory
    world.caches["file"] = world.cm.register_blocks_cache(SPEC.desc, addresses, KEY)


def drop_file(world: World) -> None:
    world.cm.unregister_cache(world.caches.pop("file").cache_id)
    world.memory.pop("mapping").close()


def _failure(end: ChildEnd, *args: Any) -> LLMException | None:
    """Return what a call raises; None if its process has died."""
    with suppress(EOFError, ConnectionResetError):
        with pytest.raises(LLMException) as caught:
            end.do(call, *args)
        return caught.value
    end.process.wait(10)
    assert end.code == -signal.SIGBUS, end.code
    return None


@pytest.fixture
def ends(request: pytest.FixtureRequest) -> Iterator[tuple[ChildEnd, ChildEnd]]:
    """A prompt and a decoder of their own, linked; a test may kill them."""
    prompt, decoder = ChildEnd("prompt"), ChildEnd("decoder")
    transport, extra = request.param
    start_both(prompt, decoder, transport, extra=extra)
    assert decoder.do(link, [info(1, prompt.port)]) == SUCCESS
    yield prompt, decoder
    for end in (decoder, prompt):
        if end.code is None:
            end.stop()
            end.close()


@pytest.mark.parametrize("ends", [("auto", {}), ("tcp", {})], indirect=True, ids=["cma", "tcp"])
@pytest.mark.parametrize("truncated", ["source", "destination"])
@pytest.mark.parametrize("rows", [ALL, [5]], ids=["all blocks", "a block"])
def test_where_the_kernel_moves_the_bytes_a_truncated_file_fails_the_pull_and_nothing_else(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path, truncated: str, rows: list[int]
) -> None:
    prompt, decoder = ends
    for end in ends:
        end.do(register_file, tmp_path / str(end.cluster_id))
    decoder.do(call, "pull_blocks", KEY, Use("file"), rows, rows)
    os.truncate(tmp_path / ("1" if truncated == "source" else "2"), 0)
    for _ in range(3):
        assert isinstance(_failure(decoder, "pull_blocks", KEY, Use("file"), rows, rows), TransferFailed)
    assert decoder.do(links) == {1: "ready"}
    bytes_move_both_ways(prompt, decoder)
    for end in ends:
        end.do(drop_file)


@pytest.mark.parametrize("ends", [("auto", {})], indirect=True, ids=["shm"])
@pytest.mark.parametrize("verb", ["pull_blocks", "copy_blocks"])
def test_a_copy_of_this_library_into_a_truncated_file_ends_the_process_that_registered_it(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path, verb: str
) -> None:
    prompt, decoder = ends
    prompt.do(make, "kv", SPEC, 1)
    prompt.do(make, "keyed", replace(SPEC, blocks_key=BlocksCacheKey(1, 4)), 1)
    decoder.do(register_file, tmp_path / "memory")
    os.truncate(tmp_path / "memory", 0)
    arguments = {"pull_blocks": (BlocksCacheKey(1, 4), Use("file"), ALL, ALL), "copy_blocks": (Use("file"), {0: [1]})}
    assert _failure(decoder, verb, *arguments[verb]) is None
    wait_until(lambda: prompt.do(links) == {})


@pytest.mark.parametrize("ends", [("tcp", {"llm.Checksum": "1"})], indirect=True, ids=["checksum"])
def test_a_checksum_of_a_truncated_file_ends_the_process_that_registered_it(
    ends: tuple[ChildEnd, ChildEnd], tmp_path: Path
) -> None:
    prompt, decoder = ends
    prompt.do(register_file, tmp_path / "memory")
    decoder.do(make, "target", SPEC, 2)
    (folder := tmp_path / "gate").mkdir()
    # It stands between the last byte and the checksum.
    with stopped(decoder, "after copy", folder, "pull_blocks", KEY, Use("target"), ALL, ALL) as pull:
        os.truncate(tmp_path / "memory", 0)
        with pytest.raises(PeerLost):
            pull.finish()
    wait_until(lambda: prompt.code == -signal.SIGBUS)


# --- another program --------------------------------------------------------------------------------------------------


FIXED = Spec(tensors=1, rows=16, stride=65536, blocks=True)
PLACE, NBYTES, ROWS = 3 << 44, FIXED.rows * FIXED.stride, list(range(FIXED.rows))

STOP_ONCE = r"""
#include <csignal>
#include <cstdlib>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
extern "C" ssize_t process_vm_writev(pid_t pid, const iovec* near, unsigned long count, const iovec* far,
                                     unsigned long far_count, unsigned long flags) {
    if (unlink(getenv("STOP_ONCE")) == 0) kill(getpid(), SIGSTOP);
    return syscall(SYS_process_vm_writev, pid, near, count, far, far_count, flags);
}
"""
OTHER_PROGRAM = """
import ctypes, sys
from tests.support.memory import map_at
place, nbytes, begin, end = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
memory = (ctypes.c_ubyte * nbytes).from_address(map_at(place, nbytes))
ctypes.memset(memory, 17, nbytes)
open(begin, "w").close()
open(begin).close()
with open(end, "w") as answer:
    answer.write(str(nbytes - bytes(memory).count(17)))
"""


def register_at(world: World) -> None:
    world.caches["fixed"] = world.cm.register_blocks_cache(FIXED.desc, [map_at(PLACE, NBYTES)], KEY)


def become_another_program(world: World, folder: Path) -> None:
    command = [sys.executable, "-c", OTHER_PROGRAM, str(PLACE), str(NBYTES), str(folder / "begin"), str(folder / "end")]
    os.execv(sys.executable, command)


def test_a_push_that_comes_late_writes_nothing_of_the_program_that_has_the_pid_by_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, library, stop = tmp_path / "stop.cpp", tmp_path / "stop.so", tmp_path / "stop"
    source.write_text(STOP_ONCE)
    try:
        subprocess.run([compiler(), "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)
    except Unsupported as error:
        pytest.skip(str(error))
    for name in ("begin", "end"):
        os.mkfifo(tmp_path / name)
    with closing(ChildEnd("owner", fresh=True)) as owner:
        with monkeypatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(library))
            patch.setenv("STOP_ONCE", str(stop))
            writer = ChildEnd("writer", fresh=True)
        owner.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", enable_remote_cache_accessible=True)
        writer.start("DECODER", 2, enable_remote_cache_accessible=True)
        owner.do(register_at)
        assert writer.do(link, [info(1, owner.port)]) == SUCCESS
        if writer.do(explain, 1).private_transport != "cma":
            pytest.skip(f"no cma here: {writer.do(explain, 1).reason}")
        writer.do(make, "source", FIXED, 1)
        stop.touch()
        writer.begin(call, "push_blocks", KEY, Use("source"), ROWS, ROWS)
        wait_until(lambda: Path(f"/proc/{writer.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        owner.begin(become_another_program, tmp_path)
        (tmp_path / "begin").read_bytes()  # until the other program has that memory
        writer.signal(signal.SIGCONT)
        with pytest.raises(PeerLost):
            writer.finish()
        (tmp_path / "begin").write_bytes(b"")
        assert (tmp_path / "end").read_text() == "0"
        writer.stop()
        writer.close()
        assert owner.process.wait(10) == 0
