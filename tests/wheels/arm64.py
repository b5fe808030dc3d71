"""An arm64 machine to try a wheel on: Debian's Python 3.11 for arm64, unpacked in build/, under qemu-user.

apt-get works with lists and a status of its own here, so that neither the system's architectures nor its packages
change, and root is not needed. qemu translates each thread to ordinary instructions of this machine: it shows whether
the module works, and nothing of the order in which a real arm64 machine makes stores visible
(docs/notes/memory-order.md).
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.support.source import ROOT

BUILD: Final = ROOT / "build" / "arm64"
#: What pip takes for an arm64 machine with the glibc of the wheel's tag.
_PLATFORMS: Final = [f"--platform={tag}_aarch64" for tag in ("manylinux2014", "manylinux_2_27", "manylinux_2_28")]


class Impossible(Exception):
    """Something that this needs is not to be had here."""


@dataclass(frozen=True)
class Arm64:
    """An interpreter for arm64 that finds the packages in ``site`` and nothing of this machine's."""

    qemu: Path
    root: Path
    site: Path

    def command(self, *arguments: str) -> list[str]:
        """Return the command that runs Python with these arguments."""
        python = self.root / "usr" / "bin" / "python3.11"
        path = ["-E", f"PYTHONPATH={self.site}", "-U", "LD_PRELOAD"]
        return [str(self.qemu), *path, "-L", str(self.root), str(python), "-s", *arguments]


def arm64(wheel: Path, site: Path) -> Arm64:
    """Return an interpreter with the wheel, and what it requires, installed in ``site``.

    Raises Impossible for what cannot be had, and CalledProcessError for a wheel that pip does not take.
    """
    if "-cp311-" not in wheel.name:
        raise Impossible(f"Debian's Python for arm64 is 3.11: {wheel.name} is not for it")
    try:
        machine = Arm64(_qemu(), _root(), site)
        _install(site, "numpy", "msgspec")
    except (OSError, subprocess.CalledProcessError) as error:
        raise Impossible(f"no Python for arm64: {error}") from error
    _install(site, "--no-deps", str(wheel))
    return machine


def _install(site: Path, *what: str) -> None:
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(site)]
    subprocess.run([*install, *_PLATFORMS, "--python-version=3.11", "--only-binary=:all:", *what], check=True)


def _qemu() -> Path:
    """Return the system's qemu-aarch64-static, or that of the Debian package, unpacked in build/."""
    if found := shutil.which("qemu-aarch64-static"):
        return Path(found)
    unpacked = BUILD / "qemu" / "usr" / "bin" / "qemu-aarch64-static"
    if not unpacked.exists():
        _unpack("amd64", ["qemu-user-static"], BUILD / "qemu")
    return unpacked


def _root() -> Path:
    root = BUILD / "root"
    if not (root / "usr" / "bin" / "python3.11").exists():
        _unpack("arm64", ["python3.11", "libstdc++6"], root)  # the library is numpy's
    return root


def _unpack(architecture: str, packages: list[str], root: Path) -> None:
    """Unpack Debian packages and what they depend on into ``root``, whole or not at all."""
    apt = BUILD / f"apt-{architecture}"
    archives, new = apt / "archives", root.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    for folder in (apt / "lists" / "partial", archives / "partial", new):
        folder.mkdir(parents=True, exist_ok=True)
    (apt / "status").touch()
    settings = {
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Sandbox::User": "root",
        "Debug::NoLocking": "1",
        "Dir::State": apt,
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": apt / "status",
        "Dir::Cache": apt,
        "Dir::Cache::archives": archives,
    }
    get = ["apt-get", "-qq", "-y", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*get, "update"], check=True)
    subprocess.run([*get, "install", "--download-only", "--no-install-recommends", *packages], check=True)
    for archive in archives.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", archive, new], check=True)
    new.rename(root)
    shutil.rmtree(apt)
