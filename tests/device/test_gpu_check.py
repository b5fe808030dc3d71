"""The check for a GPU runs whole on the fake driver."""

import json
import re
import sys
from pathlib import Path

from tests.device import gpu_check
from tests.support import source
from tests.support.source import ROOT


def test_the_check_for_a_gpu_passes_on_the_fake_and_asks_all_that_the_fake_assumes(tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    command = [sys.executable, "-m", "tests.device.gpu_check", "--fake", "--seconds", "100", "--out", str(out)]
    done = source.run(*command, timeout=110, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert (results["fake"], results["driver"], results["verdict"]) == (True, "fake", "right")
    assert list(results["sections"]) == list(gpu_check.SECTIONS)
    told = [figure for each in results["sections"].values() for figure in each["figures"]]
    asked = {figure["line"] for figure in told if figure.get("line")}
    fake = (ROOT / "tests" / "device" / "fakecuda.c").read_text().splitlines()
    assumed = [line for line in fake if re.search("assumed", line, re.IGNORECASE) and '"Assumed"' not in line]
    assert [line for line in assumed if not any(words in line for words in asked)] == []
    assert [words for words in asked if not any(words in line for line in assumed)] == []
