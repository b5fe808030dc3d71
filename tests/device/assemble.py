"""Assemble the kernel of copy.ptx by NVIDIA's ptxas, from PyPI: what ``make test-ptx`` runs."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Final

from tests.support.source import ROOT, SOURCE

#: Of each version of CUDA, the package on PyPI that has its ptxas, and the architectures to assemble for.
VERSIONS: Final = {
    "12.9": ("nvidia-cuda-nvcc-cu12==12.9.86", [70, 80, 90]),
    "13.5": ("nvidia-cuda-nvcc==13.5.37", [75, 80, 90, 100, 120]),
}


def installed(folder: Path, package: str, file: str) -> Path:
    """Return a file of a package from PyPI, which pip puts into a folder of its own."""
    if not list(folder.rglob(file)):
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--target", folder, package], check=True)
    (found,) = folder.rglob(file)
    return found


if __name__ == "__main__":
    for version, (package, architectures) in VERSIONS.items():
        ptxas = installed(ROOT / "build" / "ptxas" / version, package, "bin/ptxas")
        strict = [str(ptxas), "--verbose", "--warning-as-error", "--warn-on-spills"]
        for architecture in architectures:
            command = [*strict, f"-arch=sm_{architecture}", "-o", "/dev/null", str(SOURCE / "_native/copy/copy.ptx")]
            told = subprocess.run(command, check=False, text=True, capture_output=True)
            figures = re.findall(r"\d+ bytes spill \w+|\d+ registers", told.stderr)
            print(f"CUDA {version}, sm_{architecture}: {', '.join(figures)}")
            if told.returncode != 0:
                sys.exit(told.stderr)
