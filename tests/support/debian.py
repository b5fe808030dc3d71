"""Files of Debian packages: the system's, or unpacked in build/ without installing anything.

python -m tests.support.debian prometheus usr/bin/prometheus
"""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.source import ROOT


def find(package: str, file: str) -> Path | None:
    """Return where ``file`` (its path below /) of a package is, or None."""
    return next((root / file for root in (Path("/"), _unpacked(package)) if (root / file).exists()), None)


def get(package: str, file: str) -> Path:
    """As :func:`find`; where it is missing, download the package and unpack it.

    Raises:
        OSError: That is not possible here; the text names the package.
    """
    if (found := find(package, file)) is not None:
        return found
    folder = _unpacked(package)
    folder.mkdir(parents=True, exist_ok=True)
    fetch = ["apt-get", "-qq", "-o", "APT::Sandbox::User=root", "download", package]
    try:
        if subprocess.run(fetch, cwd=folder, check=False).returncode != 0 and os.geteuid() == 0:
            subprocess.run(["apt-get", "-qq", "update"], check=True)  # a new container has no lists of packages
            subprocess.run(fetch, cwd=folder, check=True)
        (archive,) = folder.glob(f"{package}_*.deb")
        subprocess.run(["dpkg", "-x", archive, folder], check=True)
        archive.unlink()
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        raise OSError(f"install the Debian package {package} ({error})") from error
    return folder / file


def _unpacked(package: str) -> Path:
    return ROOT / "build" / package


if __name__ == "__main__":
    get(*sys.argv[1:])
