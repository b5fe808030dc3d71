"""Compare ``_native/copy/cuda_abi.h`` with NVIDIA's headers, which pip gets: what ``make test-cuda-abi`` runs."""

import re
import subprocess
from typing import Final

from tests.device.assemble import installed
from tests.native.drivers import NATIVE, ROOT

#: Of each version of CUDA, the package on PyPI that has its headers.
PACKAGES: Final = {
    "12.1": "nvidia-cuda-runtime-cu12==12.1.105",
    "12.8": "nvidia-cuda-runtime-cu12==12.8.90",
    "13.0": "nvidia-cuda-runtime==13.0.96",
}


if __name__ == "__main__":
    ours = (NATIVE / "copy" / "cuda_abi.h").read_text() + (ROOT / "tests/device/fakeabi.h").read_text()
    functions, constants = (re.findall(each, ours, re.MULTILINE) for each in (r"^CUresult (\w+)\(", r"^    X\((\w+), "))
    for version, package in PACKAGES.items():
        header = installed(ROOT / "build" / "cuda-headers" / version, package, "cuda.h")
        compiler = ["cc", "-std=c11", "-Wall", "-Werror", f"-I{header.parent}"]
        subprocess.run([*compiler, "-fsyntax-only", ROOT / "tests/device/abi_check.c"], check=True)
        text = subprocess.check_output([*compiler, "-E", "-include", "cuda.h", "-xc", "/dev/null"], text=True)
        declared = re.findall(r"\b(cu\w+)\(", text)
        assert set(functions) <= set(declared), set(functions) - set(declared)  # these were compared with nothing
        print(f"CUDA {version}: {len(functions)} functions and {len(constants)} constants are as in cuda.h")
