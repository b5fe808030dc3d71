"""docs/doctor.md lists exactly the checks and the options of the code."""

import inspect
import json
import re
import sys

import pytest

from llm_datadist.tools.doctor import device, kernel, limits, peer, versions
from tests.support.source import ROOT
from tests.support.tables import WIDTHS, printed

_MEASURED = re.compile(r"[\d.e+]+ GB/s")  # differs from run to run
_PAGE = (ROOT / "docs" / "doctor.md").read_text()


def test_the_page_lists_exactly_the_checks_and_the_options_of_the_code() -> None:
    own = [each.__name__ for module in (kernel, limits, versions) for each in module.CHECKS]
    own += dict.fromkeys(re.findall(r'"(gpu_\w+)"', inspect.getsource(device)))
    far = dict.fromkeys(re.findall(r'"(peer_\w+)"', inspect.getsource(peer)))
    table = _PAGE.partition("## Checks")[2]
    shown = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert sorted(shown[: len(own)]) == sorted(own)
    assert sorted(shown[len(own) :]) == sorted(far) != []
    typer = pytest.importorskip("typer", reason="the command needs the extra [cli]")
    from llm_datadist.tools.cli.app import app

    known = {name for each in typer.main.get_command(app).commands["doctor"].params for name in each.opts}
    assert set(re.findall(r"^\| `(--[\w-]+)` \|", _PAGE, flags=re.MULTILINE)) == known - {"--help"}


@pytest.mark.parametrize("width", WIDTHS)
def test_at_every_width_the_command_prints_what_its_json_says(width: int | None) -> None:
    command = [sys.executable, "-m", "llm_datadist", "doctor"]
    found = json.loads(_MEASURED.sub("", printed([*command, "--json"], None)))["findings"]
    shown = _MEASURED.sub("", printed(command, width)).splitlines()
    lines = [f"{each['state']:8}{each['name']}: {each['value']}" for each in found]
    assert [line for line in shown if not line.startswith("        ")] == lines
