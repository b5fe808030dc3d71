"""Installed software, by its metadata, without imports."""

from __future__ import annotations

import platform
from importlib.metadata import distributions
from pathlib import Path
from typing import Final

from llm_datadist.doctor.finding import Finding, Severity

_DRIVER: Final = Path("/proc/driver/nvidia/version")


def installed(*prefixes: str) -> list[str]:
    """Return ``name version`` of distributions with one of these names, or such a name and a suffix."""
    found = set()
    for each in distributions():
        name = (each.name or "").lower().replace("_", "-")
        if any(name == prefix or name.startswith(f"{prefix}-") for prefix in prefixes):
            found.add(f"{name} {each.version}")
    return sorted(found)


def library() -> Finding:
    """Show the version of this library."""
    found = installed("open-datadist")
    value = f"{', '.join(found) or 'run from its sources'}, Python {platform.python_version()}"
    if len(found) < 2:
        return Finding("library", Severity.OK, value, "both sides of a link need the same version of the protocol")
    meaning = "several versions are on the path, and the first one is imported"
    return Finding(
        "library", Severity.WARNING, value, meaning, "pip uninstall open-datadist; pip install open-datadist"
    )


def nixl() -> Finding:
    """Show the version of NIXL."""
    value = ", ".join(installed("nixl")) or "not installed"
    return Finding(
        "nixl",
        Severity.OK,
        value,
        "the transport nixl uses it, for RDMA between hosts; without it links between hosts are tcp",
    )


def cuda() -> Finding:
    """Show the CUDA runtime and driver; warn if only the driver is missing."""
    runtime = installed("nvidia-cuda-runtime", *(f"nvidia-cuda-runtime-cu{number}" for number in (11, 12, 13)))
    driver = _DRIVER.read_text().splitlines()[0] if _DRIVER.exists() else "no driver"
    meaning = "not needed: this library moves host memory; vLLM on a GPU needs runtime and driver"
    value = f"{', '.join(runtime) or 'no runtime'}, {driver}"
    if runtime and not _DRIVER.exists():
        return Finding("cuda", Severity.WARNING, value, meaning, "docker run --gpus all, or install the NVIDIA driver")
    return Finding("cuda", Severity.OK, value, meaning)


def vllm() -> Finding:
    """Show the version of vLLM; warn without the proxy's aiohttp."""
    found = installed("vllm")
    meaning = "LLMDataDistConnector runs in it; its proxy needs aiohttp"
    value = ", ".join(found) or "not installed"
    if found and not installed("aiohttp"):
        return Finding(
            "vllm", Severity.WARNING, f"{value}, without aiohttp", meaning, "pip install 'open-datadist[vllm]'"
        )
    return Finding("vllm", Severity.OK, value, meaning)


CHECKS: Final = (library, nixl, cuda, vllm)
