"""The fake driver finds what a driver would not forgive, each program in a process of its own.

It answers as a driver does: ``test_gpu_check.py`` asks it all that is asked of a real one.
"""

import os
import signal
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any, Final

import pytest

from tests.support import source
from tests.support.fakecuda import State, environment, reports

BEGIN: Final = (
    "import os\nfrom ctypes import *\nfrom tests.device.cu import *\nfrom tests.support.fakecuda import load\n"
)
SCENE: Final = BEGIN + "start()\ns, e, fake = stream(), event(), load()\nat, handle = mapped(2 * MIB)\n"


def run(program: str, *, scene: str = SCENE, ends: int = 0, **settings: object) -> tuple[str, list[State]]:
    """Run a program on two devices, where nothing begins that no call waits for.

    Return what it printed and its report, of which a crash leaves none.
    """
    with TemporaryDirectory() as folder:
        report = Path(folder) / "report"
        fake = environment(**({"devices": 2, "delay_us": 60_000_000, "report": report} | settings))
        done = source.run(sys.executable, "-c", scene + dedent(program), env=os.environ | source.PATHS | fake)
        assert done.returncode == ends, done.stderr
        return done.stdout, reports(report)


def test_a_report_separates_what_the_library_keeps_from_what_it_leaks() -> None:
    program = """
        host, device, memory = pinned(4096), allocated(8192), (c_char * 100)()
        mapped(2 * MIB, fd=export(handle)); call("cuMemHostRegister_v2", memory, SIZE(100), 3)
    """
    _, (left,) = run(program)
    leaked = {"handles": 1, "imports": 1, "reservations": 2, "mapped_bytes": 4 << 20, "registered_bytes": 100}
    assert (left.leaked, left.kept) == (leaked, {"streams": 1, "events": 1, "device_bytes": 8192, "host_bytes": 4096})


def test_the_host_crashes_where_it_touches_a_device_address() -> None:
    run("string_at(at, 1)", ends=-signal.SIGSEGV)


def test_a_copy_of_pinned_memory_begins_late_and_fresh_memory_is_no_zeros() -> None:
    run("""
        host, back = pinned(8, b"before!!"), pinned(8)
        copy(at, host, 8, s); copy(back, at + 8, 8, s); host.raw = b"after!!!"; wait(s)
        assert back.raw == b"\\xa7" * 8
        copy(back, at, 8, s); assert back.raw == b"\\xa7" * 8
        wait(s); assert back.raw == b"after!!!"
    """)


@pytest.mark.parametrize(
    ("program", "error", "settings"),
    [
        ("start(2)", "INVALID_DEVICE", {}),
        ("start()", "NO_DEVICE", {"devices": 0}),
        ("start(); allocated(MIB); allocated(2 * MIB)", "OUT_OF_MEMORY", {"memory": 2 << 20}),
        ("start(); mapped(2 * MIB)", "NOT_SUPPORTED", {"posix_fd": 0}),
        ("start(); mapped(2 * MIB)", "OUT_OF_MEMORY", {"fail": "cuMemRelease:1,cuMemMap:2"}),
        ("start(); mapped(2 * MIB, user=1)", "PEER_ACCESS_UNSUPPORTED", {"peers": 0}),
        ('start(); one = event(); start(1); call("cuEventRecord", one, stream())', "INVALID_HANDLE", {}),
    ],
)
def test_a_call_is_refused(program: str, error: str, settings: dict[str, Any]) -> None:
    caught = f"try: {program}\nexcept CudaError as error: print(error.args[1])"
    assert run(caught, scene=BEGIN, **settings)[0] == f"CUDA_ERROR_{error}\n"


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("copy(at, device, 64, s); unmap(at, handle)", "cuMemUnmap"),
        ('copy(at, host, 4096, s); call("cuMemFreeHost", host)', "cuMemFreeHost"),
        ('copy(at, device, 64, s); call("cuStreamDestroy_v2", s)', "cuStreamDestroy"),
        ("copy(at, at + 4095, 4096, s)", "overlaps itself"),
        ('unmap(at, handle); code("cuMemcpyAsync", U64(at), U64(device), SIZE(16), s)', "has no memory"),
        ('code("cuMemcpyAsync", U64(at + 2 * MIB - 8), U64(device), SIZE(16), s)', "has no memory"),
        ('code("cuMemRelease", U64(2))', "does not exist"),
    ],
)
def test_a_mistake_is_a_violation(program: str, found: str) -> None:
    _, (left,) = run("host, device = pinned(4096), allocated(64)\n" + program)
    assert [found in text for text in left.violations] == [True]


def test_a_kernel_moves_its_runs_from_the_last_to_the_first() -> None:
    run("""
        host, back = pinned(24, os.urandom(24)), pinned(24); copy(at, host, 24, s)
        launch(kernel(), [at], [at], [(8, 0, 8), (16, 8, 8)], s)  # one run reads what the other writes
        copy(back, at, 24, s); wait(s)
        assert back.raw == host.raw[:8] + host.raw[:16]
    """)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("mapped(2 * MIB, access=READ)[0]", "is mapped for reading only"),
        ("mapped(2 * MIB, user=1)[0]", "is not accessible"),
        ("addressof(memory)", "is pageable"),
        ("registered(1)", "is not mapped for devices"),
        ("registered(3)", "has another address"),
    ],
)
def test_a_kernel_that_touches_what_it_cannot_ends_all_work(to: str, why: str) -> None:
    program = f"""
        memory = (c_char * 4096)()
        def registered(flags):
            call("cuMemHostRegister_v2", memory, SIZE(4096), flags)
            return addressof(memory)
        launch(kernel(), [{to}], [at], [(0, 0, 16)], s)
        assert (code("cuStreamSynchronize", s), code("cuMemFree_v2", U64(at))) == (700, 700)
    """
    _, (left,) = run(program, host_pointers=0)
    assert (left.sticky, [why in text for text in left.violations]) == (700, [True])


def test_a_view_is_the_bytes_of_device_memory_and_of_nothing_else() -> None:
    run("""
        back = pinned(3); fake.view(at + MIB, 3)[:] = [1, 2, 3]; copy(back, at + MIB, 3, s); wait(s)
        assert back.raw == bytes([1, 2, 3])
        for address, size in (at + 2 * MIB - 1, 2), (addressof(back), 1), (0, 1):
            try: fake.view(address, size)
            except ValueError: continue
            raise AssertionError(address)
    """)


@pytest.mark.parametrize(("visible", "found"), [("0,1,2,3", "4 0 1"), ("2,1,7,0", "2 2 1")])
def test_devices_are_those_that_are_visible(visible: str, found: str) -> None:
    program = f"""
        os.environ["CUDA_VISIBLE_DEVICES"] = "{visible}"
        start(1); count, uuid, ordinal = INT(), create_string_buffer(16), INT()
        call("cuDeviceGetCount", byref(count)); call("cuDeviceGetUuid_v2", uuid, 0)
        call("cuPointerGetAttribute", byref(ordinal), 9, U64(allocated(8)))
        print(count.value, int(uuid.raw.decode().removeprefix("fakecuda-gpu-")), ordinal.value)
    """
    assert run(program, scene=BEGIN, devices=4)[0] == f"{found}\n"
