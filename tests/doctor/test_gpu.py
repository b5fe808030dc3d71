"""Each finding about GPUs, made real on the fake driver; what a driver does to the process that loads it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import pytest

from llm_datadist.tools.doctor.finding import Finding, Severity
from tests.doctor.hosts import is_
from tests.support import fakecuda
from tests.support.source import PATHS, run

OK, WARNING, PROBLEM = Severity.OK, Severity.WARNING, Severity.PROBLEM
GPU: Final = "cuda:0 (Fake GPU 0)"
_EXAMINE: Final = """
import sys, msgspec
from llm_datadist.tools.doctor import device
{preparation}
found = device.examine(*{wanted})
assert "libcuda" not in open("/proc/self/maps").read(), "the driver is loaded here"
sys.stdout.buffer.write(msgspec.json.encode(found))
"""
ALL: Final = ["gpu_driver", "gpu_devices", "gpu_export", "gpu_kernel", "gpu_pinning", "gpu_torch"]


def examine(environment: dict[str, str], *, wanted: Sequence[int] = (), preparation: str = "") -> dict[str, Finding]:
    code = _EXAMINE.format(wanted=wanted, preparation=preparation)
    done = run(sys.executable, "-c", code, env=os.environ | PATHS | environment)
    assert done.returncode == 0, done.stderr
    found = msgspec.json.decode(done.stdout, type=list[Finding])
    return {each.name: each for each in found}


def on_fake(**settings: object) -> dict[str, str]:
    try:
        return fakecuda.environment(**settings)
    except fakecuda.Unsupported as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("wanted", [(), (0,)])
def test_without_a_driver_one_finding_says_so_a_problem_only_if_a_gpu_is_asked_for(wanted: Sequence[int]) -> None:
    (finding,) = examine({"LD_LIBRARY_PATH": ""}, wanted=wanted).values()
    mend = "docker run --gpus all" if wanted else ""
    is_(finding, PROBLEM if wanted else OK, "no GPU: libcuda.so.1: cannot open shared object file", mend)
    assert "nothing needs a driver" in finding.meaning


def test_with_a_driver_all_is_tried_on_each_gpu() -> None:
    found = examine(on_fake(devices=2))
    assert list(found) == ALL
    assert {each.state for each in found.values()} == {OK}
    assert found["gpu_driver"].value == "CUDA 12.8"
    about = [f"cuda:{n} (Fake GPU {n}), GPU 66616b65, 1024 of 1024 MiB free" for n in (0, 1)]
    assert found["gpu_devices"].value == "; ".join(about)


@pytest.mark.parametrize(
    ("name", "settings", "value", "mend"),
    [
        ("gpu_driver", {"fail": "cuInit:999"}, "cuInit: CUDA_ERROR_UNKNOWN (999)", "nvidia-smi"),
        ("gpu_devices", {"vmm": 0}, f"{GPU} lacks attribute 102", "CUDA_VISIBLE_DEVICES"),
        ("gpu_export", {"posix_fd": 0}, f"{GPU}: cuMemExportToShareableHandle: CUDA_ERROR", "-mig 0"),
        ("gpu_kernel", {"fail": "cuModuleLoadData:221"}, f"{GPU}: the kernel cannot be", "DRIVER_CAPABILITIES=compute"),
        ("gpu_pinning", {"fail": "cuMemHostRegister_v2:2"}, f"{GPU}: cuMemHostRegister: CUDA_ERROR", "ulimit -l"),
    ],
)
def test_what_a_gpu_cannot_is_a_warning_with_its_name_and_the_drivers_words(
    name: str, settings: dict[str, object], value: str, mend: str
) -> None:
    found = examine(on_fake(**settings))
    assert [each.name for each in found.values() if each.state is not OK] == [name]
    is_(found[name], WARNING, value, mend)


@pytest.mark.parametrize(
    ("settings", "wanted", "state"),
    [
        ({"vmm": 0}, (0,), PROBLEM),
        ({"fail": "cuDevicePrimaryCtxRetain:999:0:1"}, (1,), OK),  # the other one
        ({"fail": "cuDevicePrimaryCtxRetain:999:1"}, (1,), PROBLEM),
        ({}, (2,), PROBLEM),
        ({}, (1,), OK),
    ],
)
def test_a_gpu_that_is_asked_for_and_cannot_be_used_is_a_problem(
    settings: dict[str, object], wanted: Sequence[int], state: Severity
) -> None:
    found = examine(on_fake(devices=2, **settings), wanted=wanted)
    assert found["gpu_driver"].state is OK
    assert found["gpu_devices"].state is (WARNING if state is OK and settings else state)


@pytest.mark.parametrize(
    ("fail", "names"),
    [
        ("cuDevicePrimaryCtxRetain:2", ["gpu_devices"]),
        ("cuDevicePrimaryCtxRetain:46", ["gpu_devices"]),
        ("cuModuleLoadData:2,cuMemCreate:2", ["gpu_export", "gpu_kernel"]),
    ],
)
@pytest.mark.parametrize("wanted", [(), (0,)])
def test_a_gpu_that_is_in_use_was_not_tried(fail: str, names: list[str], wanted: Sequence[int]) -> None:
    found = examine(on_fake(fail=fail), wanted=wanted)
    assert [each.name for each in found.values() if each.state is not OK] == names
    for name in names:
        is_(found[name], Severity.UNKNOWN, "CUDA_ERROR_", "before an engine starts")
        assert "in use" in found[name].meaning


def test_a_host_whose_driver_sees_no_gpu_is_as_good_as_one_without_a_driver() -> None:
    (finding,) = examine(on_fake(fail="cuInit:100")).values()
    is_(finding, OK, "CUDA_ERROR_NO_DEVICE (100)", "")


def test_a_part_of_a_gpu_is_named_as_such() -> None:
    found = examine(on_fake(name="NVIDIA H200 MIG 1g.18gb"))
    assert "MIG 1g.18gb 0), GPU 66616b65, a part of a GPU (MIG), 1024 of" in found["gpu_devices"].value


def test_expandable_segments_of_torch_are_a_warning_about_registered_memory() -> None:
    found = examine(on_fake() | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:64"})
    is_(found["gpu_torch"], WARNING, "in PYTORCH_CUDA_ALLOC_CONF", "allocate caches from the pool")
    assert "for registered memory only" in found["gpu_torch"].meaning


def test_a_driver_that_hangs_or_ends_its_process_is_a_finding(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / fakecuda.NAME)  # opening it waits for a writer
    (hung,) = examine({"LD_LIBRARY_PATH": str(tmp_path)}, preparation="device._SECONDS = 1.0").values()
    is_(hung, WARNING, "the driver does not answer within 1 s", "nvidia-smi")
    ended = "device.sys.executable = '/bin/false'"
    is_(examine({}, preparation=ended)["gpu_driver"], WARNING, "ended its process with status 1", "nvidia-smi")


@pytest.mark.parametrize("said", ["", "and then", "==PROF== Disconnected\n{}\n"])
@pytest.mark.parametrize("answers", [True, False])
def test_what_a_driver_prints_at_its_end_is_not_its_answer(tmp_path: Path, said: str, answers: bool) -> None:
    child = tmp_path / "python"
    child.write_text(f'#!/bin/sh\n{sys.executable if answers else ":"} "$@"\nprintf %s {shlex.quote(said)}\n')
    child.chmod(0o755)
    found = examine(on_fake(), preparation=f"device.sys.executable = {str(child)!r}")
    if answers:
        assert {each.state for each in found.values()} == {OK}
    else:
        is_(found["gpu_driver"], Severity.UNKNOWN, "without an answer", "CUDA_INJECTION64_PATH")
