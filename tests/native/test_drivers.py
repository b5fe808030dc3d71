"""How the C++ drivers are compiled. ``make asan`` runs them, with sanitizers."""

import subprocess
from pathlib import Path

import pytest

from tests.native import drivers
from tests.native.drivers import DRIVERS, Driver, Unsupported, build, compiler


def test_a_compiler_that_cannot_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="cannot build with -fsanitize=no-such-sanitizer: "):
        build(DRIVERS[0], tmp_path, "no-such-sanitizer")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(Unsupported, match="no C\\+\\+ compiler: no-such-compiler not found"):
        compiler()


def test_a_driver_is_compiled_again_when_what_it_is_made_of_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    headers, source = tmp_path / "native", tmp_path / "tiny_driver.cpp"
    headers.mkdir()
    (tmp_path / "check.hpp").touch()
    header = headers / "answer.hpp"
    monkeypatch.setattr(drivers, "NATIVE", headers)
    monkeypatch.setattr(Driver, "source", source)
    source.write_text('#include "answer.hpp"\nint main() { return answer; }\n')
    for answer in (3, 4):
        header.write_text(f"constexpr int answer = {answer};\n")
        binary = build(Driver("tiny"), tmp_path)
        made = binary.stat().st_mtime_ns
        assert build(Driver("tiny"), tmp_path).stat().st_mtime_ns == made
        assert subprocess.run([binary], check=False).returncode == answer
