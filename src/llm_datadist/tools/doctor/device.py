"""GPUs, as NVIDIA's driver shows them to a process of its own: loading a driver can hang, or end the process."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from typing import Final

import msgspec

from llm_datadist._memory.segment import SharedSegment
from llm_datadist._native import Device, DeviceMemory, PinnedMemory
from llm_datadist.errors import LLMException
from llm_datadist.tools.doctor.finding import Finding, Severity, judge

_SECONDS: Final = 60.0
#: Nothing is wrong with a host that has no driver, or no GPU.
_NONE: Final = ("libcuda.so.1: cannot open shared object file", "cuInit: CUDA_ERROR_NO_DEVICE")
_USE: Final = "nothing needs a driver or a GPU, unless llm.DeviceMemory=cuda puts caches there"
_TORCH: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
#: Meaning of each check that a GPU fails, and what mends it.
_CHECKS: Final = {
    "gpu_devices": ("no cache can lie there", "nvidia-smi; leave it out: CUDA_VISIBLE_DEVICES=0"),
    "gpu_export": ("data lanes move what peers cannot map", "nvidia-smi -i GPU -mig 0, if it is a part of a GPU (MIG)"),
    "gpu_kernel": ("slower copies replace it", "docker run -e NVIDIA_DRIVER_CAPABILITIES=compute,utility"),
    "gpu_pinning": ("copies of host pools are slower", "ulimit -l unlimited (docker run --ulimit memlock=-1)"),
}
#: Errors of a GPU that others use: a full one, and one that a process has for itself.
_BUSY: Final = ("CUDA_ERROR_OUT_OF_MEMORY", "CUDA_ERROR_DEVICE_UNAVAILABLE")
_UNTRIED: Final = (
    "not tried: the GPU's memory is in use, or another process has it for itself (compute mode)",
    "run the command again before an engine starts; nvidia-smi shows who uses the GPU",
)
_decode: Final = msgspec.json.Decoder(list[Finding] | str).decode


def examine(*wanted: int) -> list[Finding]:
    """Return findings about NVIDIA's driver and the GPUs that it shows.

    If it shows none, the only finding tells why. A ``wanted`` GPU, by number, that is missing is a problem.
    """
    found = _ask(*wanted)
    if found is None:
        mend = "run the command again without profilers: env -u CUDA_INJECTION64_PATH -u LD_PRELOAD llm-datadist doctor"
        text = "the process that loads the driver has ended without an answer"
        return [Finding("gpu_driver", Severity.UNKNOWN, text, "the check could not be made", mend)]
    if not isinstance(found, str):
        pieces = [name for name in _TORCH if "expandable_segments:true" in os.environ.get(name, "").lower()]
        value = f"expandable_segments in {' and '.join(pieces)}" if pieces else "no expandable_segments"
        meaning = "for registered memory only: torch's lies in pieces then, which no peer can map; data lanes move it"
        mend = f"allocate caches from the pool, or: unset {' '.join(pieces)}"
        return [*found, judge("gpu_torch", not pieces, value, meaning, mend)]
    good, bad = found.startswith(_NONE) and not wanted, _bad(bool(wanted))
    mend = "docker run --gpus all, or install the NVIDIA driver; nvidia-smi says what it lacks"
    return [judge("gpu_driver", good, f"no GPU: {found}", _USE, mend, bad)]


def _bad(wanted: bool) -> Severity:
    return Severity.PROBLEM if wanted else Severity.WARNING


def _ask(*wanted: int) -> list[Finding] | str | None:
    """Return what :func:`_look` returns in another process, or what became of that; None if it says nothing."""
    command = [sys.executable, "-P", "-m", "llm_datadist.tools.doctor.device", *map(str, wanted)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    with suppress(subprocess.TimeoutExpired):
        printed, _ = child.communicate(timeout=_SECONDS)
        if child.returncode:
            return f"the driver ended its process with status {child.returncode}"
        for line in reversed(printed.splitlines()):  # drivers, and what they load, may print before and after
            with suppress(msgspec.MsgspecError, UnicodeDecodeError):
                answer: list[Finding] | str = _decode(line)
                return answer
        return None
    child.kill()
    with suppress(subprocess.TimeoutExpired):  # it hangs in the kernel
        child.communicate(timeout=1)
    return f"the driver does not answer within {_SECONDS:g} s"


def _look(*wanted: int) -> list[Finding] | str:
    """Try everything on each GPU; return why there is none if the driver says so."""
    version, failed, seen, lacking = "loaded", {name: list[str]() for name in _CHECKS}, list[str](), False
    try:
        ordinals = sorted({*range(Device.count()), *wanted})
    except LLMException as error:
        return str(error)
    for ordinal in ordinals:
        try:
            device = Device.open(ordinal)
            free, total = device.memory()
        except LLMException as error:
            failed["gpu_devices"].append(str(error))
            lacking |= ordinal in wanted and not _is_busy(str(error))
            continue
        version = f"CUDA {device.version // 1000}.{device.version % 1000 // 10}"
        part = ", a part of a GPU (MIG)" if " MIG " in device.name else ""
        seen.append(f"{device.name}, GPU {device.uuid.hex()[:8]}{part}, {free >> 20} of {total >> 20} MiB free")
        failed["gpu_kernel"] += [f"{device.name}: {device.no_kernel}"] if device.no_kernel else []
        for name, check in (("gpu_export", _export), ("gpu_pinning", _pin)):
            try:
                check(ordinal)
            except LLMException as error:
                failed[name].append(str(error))
    values = {name: "; ".join(failed[name]) or "works" for name in _CHECKS} | {
        "gpu_devices": "; ".join(seen + failed["gpu_devices"])
    }
    tried = []
    for name, about in _CHECKS.items():
        if failed[name] and name != "gpu_pinning" and all(map(_is_busy, failed[name])):  # that is the host's memory
            tried.append(Finding(name, Severity.UNKNOWN, values[name], *_UNTRIED))
        elif seen or name == "gpu_devices":
            bad = _bad(lacking and name == "gpu_devices")
            tried.append(judge(name, not failed[name], values[name], *about, bad))
    return [Finding("gpu_driver", Severity.OK, version, _USE), *tried]


def _is_busy(error: str) -> bool:
    return any(each in error for each in _BUSY)


def _export(ordinal: int) -> None:
    memory = DeviceMemory(ordinal, 1)
    fd = memory.export_fd()
    try:
        DeviceMemory(ordinal, memory.size, fd, True).close()
    finally:
        os.close(fd)


def _pin(ordinal: int) -> None:
    with SharedSegment.create("doctor", 1 << 20, peers_may_write=False) as segment:
        PinnedMemory(ordinal, segment.address, segment.nbytes).release()


if __name__ == "__main__":
    sys.stdout.buffer.write(b"\n" + msgspec.json.encode(_look(*map(int, sys.argv[1:]))) + b"\n")
