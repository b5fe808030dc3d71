"""Ends that become another user. Only root's can."""

import ctypes
import os
from importlib import import_module
from pathlib import Path
from typing import Final

import numpy as np

from tests.support.ends import ChildEnd
from tests.support.world import World

USER: Final = 54321
_PR_SET_DUMPABLE: Final = 4
_CLONE_NEWUSER: Final = 0x10000000


def become(world: World, user: int) -> None:
    np.random.default_rng()  # loaded late, as those are, and that user may not be allowed to read this checkout
    for name in ("x509", "hazmat.primitives.asymmetric.ed25519", "hazmat.primitives.kdf.hkdf"):
        import_module(f"cryptography.{name}")
    os.setgroups([])
    os.setresuid(user, user, user)
    # As if this user had started it: its own folder in /proc is its own.
    assert ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) == 0


def become_root_of(end: ChildEnd, first: int) -> None:
    """Let an end be root of a user namespace of its own, whose ids are those from ``first`` on of this one."""
    end.do(_leave_user_namespace)
    for ids in ("uid_map", "gid_map"):
        Path(f"/proc/{end.pid}/{ids}").write_text(f"0 {first} 65536")
    end.do(become, 0)


def _leave_user_namespace(world: World) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(_CLONE_NEWUSER) == 0, os.strerror(ctypes.get_errno())
