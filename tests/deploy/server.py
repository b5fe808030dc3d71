"""A real Prometheus that scrapes some processes of the test, and what asks it."""

import json
import math
import re
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import pytest

from tests.support import debian
from tests.support.linking import free_port
from tests.support.moves import wait_until
from tests.support.source import ROOT, run

DEPLOY: Final = ROOT / "deploy"
RULES: Final = DEPLOY / "prometheus" / "alerts.yml"
RULE_TESTS: Final = DEPLOY / "prometheus" / "alerts_test.yml"
CONFIG: Final = DEPLOY / "prometheus" / "prometheus.yml"

_START_SECONDS: Final = 60.0
#: Local traffic never goes to a proxy.
_direct: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))

_SCRAPING: Final = """
global: {{scrape_interval: 500ms, evaluation_interval: 500ms}}
rule_files: ["{rules}"]
scrape_configs:
  - job_name: llm-datadist
    static_configs: [{{targets: {targets}}}]
"""


def tool(name: str) -> Path | None:
    """Return ``prometheus`` or ``promtool``, where they are installed or unpacked."""
    return debian.find("prometheus", f"usr/bin/{name}")


needs_prometheus: Final = pytest.mark.skipif(
    tool("prometheus") is None, reason="no Prometheus: `make test-deploy` gets it, or the Debian package prometheus"
)


def promtool(*args: object) -> subprocess.CompletedProcess[str]:
    return run(*(str(each) for each in (tool("promtool"), *args)))


@dataclass(frozen=True)
class Server:
    """A Prometheus that is ready. Its paths begin with a word that only this test knows: no other server answers."""

    address: str

    def get(self, path: str, **query: str) -> Any:
        """Return the ``data`` of an answer of its HTTP interface. Raises OSError for any other answer than 200."""
        with _direct.open(f"{self.address}/api/v1/{path}?{urlencode(query)}", timeout=30) as answer:
            return json.load(answer)["data"]

    def alerts(self, since: str) -> set[tuple[str, int]]:
        """Return the alerts that have fired in that time, each with its cluster."""
        query = f'count by (alertname, cluster) (count_over_time(ALERTS{{alertstate="firing"}}[{since}]))'
        found = [each["metric"] for each in self.get("query", query=query)["result"]]
        return {(each["alertname"], int(each["cluster"])) for each in found}

    def numbers(self, query: str) -> list[float]:
        """Return the numbers of all series that a query has now; NaN and infinity are none."""
        values = [float(each["value"][1]) for each in self.get("query", query=query)["result"]]
        return [value for value in values if math.isfinite(value)]

    def answers(self) -> bool:
        try:
            self.get("status/buildinfo")
        except OSError:
            return False
        return True

    def targets_up(self) -> float:
        """Return how many targets answered when they were scraped last."""
        return sum(self.numbers("up"))


def in_seconds(rules: str) -> str:
    """Return rules in which a minute is a second: in ranges and waits, and in numbers that are seconds."""
    short = re.sub(r"(?m)(\[|for: )(\d+)m(\]|$)", r"\1\2s\3", rules)
    return re.sub(r"(_seconds > |\], )(\d+)", lambda found: f"{found[1]}{int(found[2]) // 60}", short)


@contextmanager
def prometheus(folder: Path, ports: list[int], rules: Path = RULES) -> Iterator[Server]:
    """Run a Prometheus with rules that scrapes these ports of 127.0.0.1; it writes into ``folder``."""
    targets = json.dumps([f"127.0.0.1:{port}" for port in ports])
    config, output = folder / "prometheus.yml", folder / "prometheus.log"
    config.write_text(_SCRAPING.format(rules=rules, targets=targets))
    while True:
        own, word = f"127.0.0.1:{free_port()}", secrets.token_hex(8)
        command = [f"--web.listen-address={own}", f"--web.external-url=http://{own}/{word}"]
        command += [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
        with output.open("wb") as log:
            process = subprocess.Popen([str(tool("prometheus")), *command], stdout=log, stderr=log)
        try:
            server = Server(f"http://{own}/{word}")
            if _scrapes(process, server, len(ports)):
                yield server
                return
        finally:
            process.terminate()
            process.wait(30)
        assert "address already in use" in output.read_text(), output.read_text()  # else once more on another port


def _scrapes(process: subprocess.Popen[bytes], server: Server, targets: int) -> bool:
    """Wait until all targets are up; return False if the process ends before it answers."""
    wait_until(lambda: process.poll() is not None or server.answers(), _START_SECONDS)
    if process.poll() is not None:
        return False
    wait_until(lambda: server.targets_up() == targets, _START_SECONDS)
    return True
