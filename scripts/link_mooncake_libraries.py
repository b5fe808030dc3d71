"""Make Mooncake's wheel importable where libibverbs is not installed, with the copy that NIXL's wheel carries.

    .venv-full/bin/python scripts/link_mooncake_libraries.py

For `make bench` only. Mooncake's engine is linked with libibverbs and does not load without it, although tcp, with
which the bench compares, never uses it. Does nothing where Mooncake loads or either package is missing; the bench says
by itself what it cannot use.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

#: What the dynamic loader looks for -> what NIXL's wheel calls it.
_NAMES: Final = {"libibverbs.so.1": "libibverbs-*.so*", "": "libnl-*"}


def _loads() -> bool:
    return (
        subprocess.run([sys.executable, "-c", "import mooncake.engine"], capture_output=True, check=False).returncode
        == 0
    )


def _link(target: Path, name: Path) -> None:
    name.unlink(missing_ok=True)
    name.symlink_to(target)


def main() -> None:
    """Link what is missing, if that helps."""
    packages = Path(sysconfig.get_paths()["platlib"])
    theirs, mooncake = packages / "nixl_cu12.libs", packages / "mooncake_transfer_engine_non_cuda.libs"
    if not theirs.is_dir() or not mooncake.is_dir() or _loads():
        return
    for name, pattern in _NAMES.items():
        for found in theirs.glob(pattern):
            _link(found, mooncake / (name or found.name))
    if not _loads():
        print("Mooncake does not load: it needs libibverbs (Debian, Ubuntu: libibverbs1); the bench runs without it")


if __name__ == "__main__":
    main()
