"""The C++ drivers compile and run; with sanitizers they run by ``make asan``."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.native.drivers import DRIVERS, Driver, Unsupported, build, compiler

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("driver", DRIVERS, ids=lambda driver: driver.name)
def test_a_driver_compiles_and_finds_nothing_wrong(driver: Driver, tmp_path: Path) -> None:
    try:
        compiler()
    except Unsupported as missing:
        pytest.skip(str(missing))
    ran = subprocess.run([build(driver, tmp_path), *driver.fewer], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_a_compiler_that_cannot_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="cannot build with -fsanitize=no-such-sanitizer: "):
        build(DRIVERS[0], tmp_path, "no-such-sanitizer")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="no C\\+\\+ compiler: no-such-compiler not found"):
        compiler()
