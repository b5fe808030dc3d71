"""Daemon threads of the user that are in native code while the interpreter exits do not end the process by a signal."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import threading, time
from llm_datadist._native import CopyPool

class Late:
    def __del__(self):  # while modules are taken down: other threads may want the interpreter's lock meanwhile
        sleep(0.3)

def work():
    while True:
        CopyPool(2).close()  # without the lock, and it is wanted back

sleep, late = time.sleep, Late()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
time.sleep(0.05)
"""


def test_a_daemon_thread_in_native_code_does_not_crash_the_exit_of_the_interpreter() -> None:
    ended = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
