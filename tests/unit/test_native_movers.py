"""Every way of moving a block that this processor has, also those that the library would not choose on it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("c++")


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler here, and the library has been built elsewhere")
def test_every_mover_moves_every_byte_and_no_other(tmp_path: Path) -> None:
    driver = tmp_path / "movers"
    native = ROOT / "src/llm_datadist/_native"
    command = [str(COMPILER), "-std=c++17", "-O1", f"-I{native}", str(ROOT / "tests/native/movers_driver.cpp")]
    subprocess.run([*command, "-o", str(driver)], check=True, timeout=300)
    result = subprocess.run([str(driver)], check=False, timeout=300, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split()[0] == "plain"
