"""Installed software, by its metadata, without imports; OpenSSL, by calls."""

from __future__ import annotations

import platform
import timeit
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from llm_datadist._links.versions import VERSIONS
from llm_datadist._native import _limits
from llm_datadist.errors import LLMException
from llm_datadist.tools.doctor.finding import Finding, Severity, judge

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_RECORDS: Final = 128


def installed(package: str) -> list[str]:
    """Return ``name version`` of distributions with this name, or this name and a suffix."""
    found = set()
    for each in distributions():
        name = (each.name or "").lower().replace("_", "-")
        if name == package or name.startswith(f"{package}-"):
            found.add(f"{name} {each.version}")
    return sorted(found)


def library() -> Finding:
    """Show the version of this library."""
    found = installed("open-datadist")
    value = f"{', '.join(found) or 'run from its sources'}, Python {platform.python_version()}"
    if len(found) < 2:
        oldest, newest = VERSIONS
        meaning = f"links need a common version of the protocol: this release speaks {oldest} to {newest}"
        return Finding("library", Severity.OK, value, meaning)
    meaning = "several versions are on the path, and the first one is imported"
    mend = "pip uninstall open-datadist; pip install open-datadist"
    return Finding("library", Severity.WARNING, value, meaning, mend)


def cipher() -> Finding:
    """Show the cipher of lanes, its speed on one core, and the OpenSSL that provides it."""
    meaning = "tcp with credentials encrypts with it, at most at this rate for each core of either side"
    try:
        version, path = _limits.cipher_library()
        seconds = min(timeit.repeat(lambda: _limits.limit_cipher(_RECORDS), number=1))
    except LLMException as error:
        mend = "install OpenSSL 3: apt install libssl3, or dnf install openssl-libs"
        return Finding("cipher", Severity.WARNING, str(error), meaning, mend)
    rate = _RECORDS * (64 << 10) / seconds / 1e9
    return Finding("cipher", Severity.OK, f"AES-256-GCM, {rate:.2g} GB/s on one core, {version}, {path}", meaning)


def nixl() -> Finding:
    """Show the version of NIXL."""
    value = ", ".join(installed("nixl")) or "not installed"
    meaning = "the transport nixl uses it, for RDMA between hosts; without it links between hosts are tcp"
    return Finding("nixl", Severity.OK, value, meaning)


def cuda() -> Finding:
    """Show the CUDA runtime and driver; warn if only the driver is missing."""
    runtime = installed("nvidia-cuda-runtime")
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else "no driver"
    meaning = "vLLM on a GPU needs runtime and driver; this library needs the driver only, for llm.DeviceMemory=cuda"
    value = f"{', '.join(runtime) or 'no runtime'}, {driver}"
    good = not runtime or _DRIVER.exists()
    return judge("cuda", good, value, meaning, "docker run --gpus all, or install the NVIDIA driver")


def vllm() -> Finding:
    """Show the version of vLLM; warn without the proxy's aiohttp."""
    found = installed("vllm")
    meaning = "LLMDataDistConnector runs in it; its proxy needs aiohttp"
    good = not found or bool(installed("aiohttp"))
    value = (", ".join(found) or "not installed") + ("" if good else ", without aiohttp")
    return judge("vllm", good, value, meaning, "pip install 'open-datadist[vllm]'")


CHECKS: Final = (library, cipher, nixl, cuda, vllm)
