"""The example in C++ as its user builds and runs it, by each way of finding header and library."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.cpp_peer import FOLDER, run_roles
from tests.support.source import ROOT, run, run_here

EXAMPLE = ROOT / "examples" / "cpp"


def _by_one_line(folder: Path) -> Path:
    (line,) = re.findall(r"^```\n(g\+\+ .*)\n```", (ROOT / "docs" / "cpp.md").read_text(), re.MULTILINE)
    assert f"//   {line.replace('examples/cpp/', '')}\n" in (EXAMPLE / "roles.cpp").read_text()
    options = run_here("cpp", "--cflags", "--libs").stdout.strip()
    asked = "$(llm-datadist cpp --cflags --libs)"
    assert asked in line
    (folder / "examples").symlink_to(ROOT / "examples")
    return _built(folder, line.replace(asked, options))


def _by_pkg_config(folder: Path) -> Path:
    found = f"PKG_CONFIG_PATH={FOLDER}/lib/pkgconfig pkg-config"
    assert run("sh", "-c", f"{found} --modversion llm_datadist").stdout.strip()
    return _built(folder, f"g++ {EXAMPLE}/roles.cpp $({found} --cflags --libs llm_datadist) -o roles")


def _by_cmake(folder: Path) -> Path:
    (line,) = re.findall(r"^# (cmake .*)$", (EXAMPLE / "CMakeLists.txt").read_text(), re.MULTILINE)
    asked = "$(llm-datadist cpp --cmake-dir)"
    assert asked in line
    line = line.replace(asked, run_here("cpp", "--cmake-dir").stdout.strip()).replace("examples/cpp", str(EXAMPLE))
    return _built(folder, line, "build/example/roles")


def _built(folder: Path, command: str, program: str = "roles") -> Path:
    ran = run("sh", "-ec", command, cwd=folder)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return folder / program


@pytest.mark.parametrize("way", [_by_one_line, _by_pkg_config, _by_cmake])
def test_roles_pull_copy_push_and_change_places_in_two_processes(way: Callable[[Path], Path], tmp_path: Path) -> None:
    if not shutil.which(tool := way.__name__.removeprefix("_by_").replace("_", "-").replace("one-line", "g++")):
        pytest.skip(f"no {tool}")
    run_roles(way(tmp_path))


def test_the_command_says_where_everything_is() -> None:
    assert run_here("cpp").stdout == f"{FOLDER}\n"
    assert run_here("cpp", "--cflags").stdout == f"-I{FOLDER}/include\n"
    assert (Path(run_here("cpp", "--cmake-dir").stdout.strip()) / "llm_datadist-config.cmake").is_file()
