"""The native code under sanitizers: what ``make asan`` runs (docs/notes/testing.md).

The module is built with the address and undefined-behaviour sanitizers into an environment of its own, and the tests
of the native code and of the transports run there. The C++ drivers run with the same two and with the thread sanitizer.
"""

import argparse
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.native.drivers import DRIVERS, LIBRARY, NATIVE, ROOT, Unsupported, build, compiler

BUILD: Final = ROOT / "build" / "asan"

#: The first thing found ends the process, with a stack.
LOUD: Final = {
    "ASAN_OPTIONS": "halt_on_error=1:detect_stack_use_after_return=1:detect_leaks=1",
    "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
    "TSAN_OPTIONS": "halt_on_error=1:second_deadlock_stack=1",
}
#: An interpreter frees little of what it holds when it ends, and next to none of that is ours, so leaks are looked for
#: in the drivers only. Its allocator of small objects is switched off: the sanitizer would see one block of many.
IN_PYTHON: Final = {"ASAN_OPTIONS": "halt_on_error=1:detect_leaks=0", "PYTHONMALLOC": "malloc"}

QUICK: Final = tuple(sorted(str(path) for path in (ROOT / "tests" / "unit").glob("test_native_*.py")))
TESTS: Final = (
    *QUICK,
    "tests/conformance",
    "tests/cpp_library",
    "tests/unit/test_layout.py",
    "tests/unit/test_guards.py",
    "tests/unit/test_writers.py",
    "tests/unit/test_cma.py",
    "tests/unit/test_lanes.py",
    "tests/api/test_moves.py",
    "tests/api/test_move_rules.py",
    "tests/api/test_copies.py",
    "tests/api/test_swaps.py",
    "tests/api/test_checksums.py",
    "tests/api/test_memory_calls.py",
    "tests/api/test_lanes_api.py",
)


_WRONG: Final = """
import numpy as np
from llm_datadist._native import NO_DEADLINE, Plan, Tensors, execute, plan_row
dst, src = (np.zeros(nbytes, np.uint8) for nbytes in (4096, 8192))
ends = (Tensors(np.array([each.ctypes.data], np.uint64), 8192).native for each in (dst, src))
execute(Plan(0, 0, 1, plan_row(0, 0, 8192), False, 8192), *ends, None, NO_DEADLINE)
"""


def main() -> int:
    """Run both parts, or the one asked for; return 0 when all of it was clean."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=["tests", "drivers"], help="default: both")
    parser.add_argument("--quick", action="store_true", help="only the tests of the native code")
    parser.add_argument("--workers", default="auto", help="processes that run the tests (default: one per core)")
    arguments = parser.parse_args()
    clean = True
    try:
        if arguments.only != "tests" and not arguments.quick:
            clean &= run_drivers()
        if arguments.only != "drivers":
            clean &= run_tests(TESTS if not arguments.quick else QUICK, arguments.workers)
    except Unsupported as missing:
        print(f"make asan: {missing}", file=sys.stderr)
        return 1
    print("no sanitizer complained" if clean else "NOT clean, see above")
    return 0 if clean else 1


def run_drivers() -> bool:
    """Build and run each driver with both sets of sanitizers; True when none of them complained."""
    print("building the drivers")
    jobs = [(driver, sanitizers) for sanitizers in ("address,undefined", "thread") for driver in DRIVERS]
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as compilers:
        binaries = list(compilers.map(lambda job: build(job[0], BUILD, job[1]), jobs))
    clean = True
    for (driver, sanitizers), binary in zip(jobs, binaries, strict=True):
        started = time.monotonic()
        code = subprocess.run([binary, *driver.fewer], env=os.environ | LOUD, check=False).returncode
        verdict = "clean" if code == 0 else f"FAILED, it returned {code}"
        print(f"{driver.name} driver with {sanitizers}: {verdict}, {time.monotonic() - started:.0f} s", flush=True)
        clean = clean and code == 0
    return clean


def run_tests(tests: Sequence[str], workers: str) -> bool:
    """Run the tests against the sanitized module; True when none failed."""
    libraries = [_runtime(name) for name in ("libasan.so", "libstdc++.so")]
    python = _environment()
    environment = os.environ | LOUD | IN_PYTHON | {"LD_PRELOAD": " ".join(libraries)}
    _check_it_bites(python, environment)
    # A hang is told later than elsewhere: everything takes several times as long.
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "600"]
    command += ["-n", workers, "--maxprocesses", "8", "--dist", "loadfile", *tests]
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    print(f"tests with address,undefined: {time.monotonic() - started:.0f} s")
    return code == 0


def _runtime(name: str) -> str:
    """Return where the compiler has a library that has to be in the interpreter before all others.

    The sanitizer replaces the allocator, so it must come first; and it wraps the exceptions of the C++ library, which
    it does not find in an interpreter that loads that library later.
    """
    command = [compiler(), f"-print-file-name={name}"]
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    if not path.is_absolute():  # the compiler repeats the name of what it does not have
        raise Unsupported(f"{compiler()} has no {name}: install its sanitizer runtime, or name a compiler in CXX")
    return str(path.resolve())


def _environment() -> str:
    """Return the interpreter whose llm_datadist has the sanitized module, made again when its sources changed.

    All else comes from the environment that runs this.
    """
    venv, stamp = BUILD / "venv", BUILD / ".installed"
    python = str(venv / "bin" / "python")
    made_of = [ROOT / name for name in ("CMakeLists.txt", "cmake/exports.map", "pyproject.toml")]
    sources = [each for folder in (NATIVE, LIBRARY) for each in folder.rglob("*")]
    made_of += [each for each in sources if each.suffix in (".c", ".cpp", ".h", ".hpp", ".ptx")]
    if stamp.exists() and all(path.stat().st_mtime < stamp.stat().st_mtime for path in made_of):
        return python
    print("building the native module", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
    folder = sysconfig.get_path("purelib", vars={"base": str(venv)})
    # A folder named in a .pth file does not have its own .pth files read: an installed llm_datadist there stays unseen.
    Path(folder, "base.pth").write_text(sysconfig.get_path("purelib") + "\n" + sysconfig.get_path("platlib") + "\n")
    settings = ["-Ccmake.define.DATADIST_SANITIZE=ON", f"-Cbuild-dir={BUILD / 'module'}"]
    settings += ["-Ccmake.build-type=RelWithDebInfo", "-Cinstall.strip=false"]  # stacks with names and lines
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", *settings]
    subprocess.run([*install, "-e", "."], cwd=ROOT, check=True)
    stamp.touch()
    return python


def _check_it_bites(python: str, environment: dict[str, str]) -> None:
    """Make sure that a copy beyond its memory is found: also in children of tests, whose path begins with ``src``."""
    command, path = [python, "-c", _WRONG], {"PYTHONPATH": str(ROOT / "src")}
    ran = subprocess.run(command, cwd=ROOT, env=environment | path, capture_output=True, text=True, check=False)
    if "heap-buffer-overflow" not in ran.stderr:
        raise Unsupported(f"{compiler()}: its address sanitizer does not see a copy beyond its memory:\n{ran.stderr}")


if __name__ == "__main__":
    sys.exit(main())
