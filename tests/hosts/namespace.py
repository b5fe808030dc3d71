"""A program that makes, keeps and enters network namespaces. Standard library only: it starts in a few milliseconds.

    namespace.py keep root            make a network namespace, run in it what standard input says, end with it
    namespace.py keep user            the same for who is not root: in a new user namespace, whose root this is
    namespace.py keep PID             the same in the user namespace of a keeper
    namespace.py enter PID COMMAND    become COMMAND inside the namespaces of a keeper

Nothing has a name that could be left behind: a namespace lives as long as its processes, and takes its devices with it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

__all__ = ["CLONE_NEWNET", "CLONE_NEWUSER", "PROGRAM", "enter", "set_namespace"]

PROGRAM = (sys.executable, "-I", "-S", os.path.abspath(__file__))
CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def unshare(flags: int) -> None:
    """Leave the namespaces behind that ``flags`` name."""
    _check(_libc.unshare(flags), "unshare")


def set_namespace(path: str, kind: int) -> None:
    """Enter the namespace of that kind behind ``path``; for a user namespace the process must have one thread."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(fd, kind), f"setns {path}")
    finally:
        os.close(fd)


def enter_user(pid: int) -> None:
    """Enter the user namespace of a process, unless it is ours."""
    if os.readlink(f"/proc/{pid}/ns/user") != os.readlink("/proc/self/ns/user"):
        set_namespace(f"/proc/{pid}/ns/user", CLONE_NEWUSER)


def enter(pid: int) -> None:
    """Enter the namespaces of a process."""
    enter_user(pid)
    set_namespace(f"/proc/{pid}/ns/net", CLONE_NEWNET)


def _become_root_here() -> None:
    """Make a user namespace in which we are root, and nobody else is anybody."""
    uid, gid = os.getuid(), os.getgid()
    unshare(CLONE_NEWUSER)
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def _keep(where: str) -> None:
    if where == "user":
        _become_root_here()
    elif where != "root":
        enter_user(int(where))
    unshare(CLONE_NEWNET)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    print("kept", flush=True)  # noqa: T201 (it speaks by its pipes)
    while line := sys.stdin.readline():
        command, text = json.loads(line)
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        print(json.dumps([done.returncode, done.stdout, done.stderr]), flush=True)  # noqa: T201


def _main(arguments: list[str]) -> None:
    if arguments[0] == "enter":
        enter(int(arguments[1]))
        os.execvp(arguments[2], arguments[2:])
    else:
        _keep(arguments[1])


if __name__ == "__main__":
    try:
        _main(sys.argv[1:])
    except OSError as error:
        sys.exit(str(error))
