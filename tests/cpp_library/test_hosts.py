"""C++ code in a process that has an interpreter already."""

import os
import subprocess
import sys

import pytest

from tests.support.cpp_peer import build
from tests.support.source import PATHS

_POOL = b'{{"memory_size": 1048576, "page_shift": 12}}'
_BEGIN = f"""
import ctypes, sys, threading
lib = ctypes.{{kind}}(sys.argv[1])
lib.reason.restype = ctypes.c_char_p
assert lib.begin({_POOL!r}) == 0, lib.reason()
assert lib.copy() == 0, lib.reason()
assert [lib.value(i) for i in range(16)] == [*range(8), 4, 5, 6, 7, *range(12, 16)]
"""


def _run(program: str, kind: str) -> subprocess.CompletedProcess[str]:
    library = build("host.cpp", "-shared", "-fPIC")
    command = [sys.executable, "-W", "error", "-c", _BEGIN.format(kind=kind) + program, str(library)]
    return subprocess.run(command, check=False, capture_output=True, text=True, env=os.environ | PATHS, timeout=60)


# PyDLL calls with the interpreter's lock, CDLL without.
@pytest.mark.parametrize("kind", ["CDLL", "PyDLL"])
def test_cpp_code_called_by_python_uses_that_interpreter_with_and_without_its_lock(kind: str) -> None:
    ran = _run("thread = threading.Thread(target=lib.copy); thread.start(); thread.join(); print('well')", kind)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "well\n", "")


def test_calls_while_and_after_the_interpreter_ends_fail_and_wait_for_nothing() -> None:
    ran = _run("lib.keep_copying()", "CDLL")
    first, then, over = ran.stdout.splitlines()
    assert (ran.returncode, over) == (0, "over"), ran.stderr
    reason = "0xffffffff the Python interpreter of this process ends"
    assert (first, then) == (reason, f"then {reason}")


def test_a_keyboard_interrupt_in_a_call_is_the_hosts() -> None:
    """Regression: the call swallowed it, and had no reason."""
    ran = _run(
        """
import os, signal, socket
silent = socket.create_server(("127.0.0.1", 0))
def interrupt():
    global accepted
    accepted = silent.accept()
    os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=interrupt).start()
try:
    print(hex(lib.link_to(silent.getsockname()[1]) & 0xffffffff), flush=True)
    threading.Event().wait(60)
except KeyboardInterrupt:
    print("interrupted", lib.reason().decode())
""",
        "CDLL",
    )
    assert (ran.returncode, ran.stdout) == (0, "interrupted KeyboardInterrupt()\n"), ran.stderr


def test_a_child_that_python_forks_while_a_thread_is_inside_a_call_is_refused_and_ends() -> None:
    child = (
        "print(hex(lib.copy() & 0xffffffff), lib.reason().decode(), flush=True); atexit._run_exitfuncs(); os._exit(0)"
    )
    fork = f"import atexit, os\nchild = os.fork()\nif child == 0: {child}\n"
    ran = _run(f"lib.keep_copying(); {fork}print(os.waitpid(child, 0)[1])", "CDLL")
    said, ended, *_ = ran.stdout.splitlines()
    assert (ran.returncode, ended) == (0, "0"), ran.stderr
    assert said.startswith("0xffffffff this process is a fork")
