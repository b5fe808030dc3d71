"""A push over cma that is stopped behind its last check, and goes on when its owner has become another program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import BlocksCacheKey
from llm_datadist.errors import PeerLost
from tests.native.drivers import Unsupported, compiler
from tests.support.ends import ChildEnd
from tests.support.linking import SUCCESS, explain, info, link
from tests.support.memory import map_at
from tests.support.moves import Spec, Use, call, make, wait_until

if TYPE_CHECKING:
    from tests.support.world import World

SPEC = Spec(tensors=1, rows=16, stride=65536, blocks=True)
KEY = BlocksCacheKey(1, 3)
ALL = list(range(SPEC.rows))
PLACE, NBYTES = 3 << 44, SPEC.rows * SPEC.stride

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
    world.caches["fixed"] = world.cm.register_blocks_cache(SPEC.desc, [map_at(PLACE, NBYTES)], KEY)


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
        writer.do(make, "source", SPEC, 1)
        stop.touch()
        writer.begin(call, "push_blocks", KEY, Use("source"), ALL, ALL)
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
        assert owner._process.wait(10) == 0
