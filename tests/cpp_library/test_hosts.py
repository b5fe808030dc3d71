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
