"""The dashboard and the rules of the prefix store in deploy/: their cases hold, and they ask for what it exports."""

import json
import re
import shutil
from pathlib import Path
from typing import Final

import pytest

from llm_datadist.store import StoreServer
from llm_datadist.store.prometheus import StoreCollector
from tests.deploy.server import CONFIG, DEPLOY, needs_prometheus, promtool

RULES: Final = DEPLOY / "prometheus" / "store_alerts.yml"
RULE_TESTS: Final = DEPLOY / "prometheus" / "store_alerts_test.yml"
DASHBOARD: Final = DEPLOY / "grafana" / "llm-datadist-store.json"
_ASKED: Final = re.compile(r"\bllm_datadist_store_\w+")
_ALERTS: Final = re.findall(r"alert: (\w+)", RULES.read_text())


@pytest.fixture
def exported() -> set[str]:
    """Names of all samples of a store."""
    with StoreServer(1 << 20) as server:
        families = list(StoreCollector(server).collect())
    return {each.name + ("_total" if each.type == "counter" else "") for each in families}


@needs_prometheus
def test_promtool_accepts_the_rules_and_their_cases_and_the_configuration_has_them() -> None:
    assert RULES.name in CONFIG.read_text()
    for command in (["check", "rules", RULES], ["test", "rules", RULE_TESTS]):
        done = promtool(*command)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_prometheus
@pytest.mark.parametrize("name", _ALERTS)
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str, tmp_path: Path) -> None:
    assert re.search(rf"alertname: {name}\n +exp_alerts: \[\]", RULE_TESTS.read_text())
    never = re.sub(rf"(?s)({name}\n +expr:) .*?(?=\n        (?:for|labels):)", r"\1 vector(1) > 2", RULES.read_text())
    (tmp_path / RULES.name).write_text(never)
    shutil.copy(RULE_TESTS, tmp_path)
    done = promtool("test", "rules", tmp_path / RULE_TESTS.name)
    assert done.returncode == 1
    assert f"alertname: {name}" in done.stdout + done.stderr


def test_rules_and_panels_ask_for_samples_that_a_store_exports_and_the_panels_for_all_of_them(
    exported: set[str],
) -> None:
    panels = [each for each in json.loads(DASHBOARD.read_text())["panels"] if each["type"] != "row"]
    queries = "\n".join(target["expr"] for panel in panels for target in panel["targets"])
    assert set(_ASKED.findall(queries)) == exported
    assert set(_ASKED.findall(RULES.read_text())) <= exported
    assert set(_ASKED.findall(RULE_TESTS.read_text())) <= exported
