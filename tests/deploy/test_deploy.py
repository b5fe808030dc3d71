"""What deploy/ ships, under a real Prometheus that scrapes two real processes: every query has data, every rule works.

``make test-deploy`` gets Prometheus where it is missing.
"""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.deploy import traffic
from tests.deploy.server import CONFIG, DEPLOY, RULE_TESTS, RULES, needs_prometheus, prometheus, promtool
from tests.support.ends import ChildEnd
from tests.support.moves import wait_until
from tests.support.world import small_pool

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.deploy.server import Server

DASHBOARD: Final = DEPLOY / "grafana" / "llm-datadist.json"
#: What Grafana puts in for the variables: everything, and the last seconds.
_VARIABLES: Final = {"$__rate_interval": "10s", "$job": ".*", "$cluster": ".*"}
_DATA_SECONDS: Final = 90.0


@cache
def _dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return found


def _panels() -> list[dict[str, Any]]:
    return [panel for panel in _dashboard()["panels"] if panel["type"] != "row"]


def _queries() -> dict[str, str]:
    """Return each query of each panel, variables filled in, by the panel's title."""
    found = {}
    for panel in _panels():
        for target in panel["targets"]:
            query = target["expr"]
            for name, value in _VARIABLES.items():
                query = query.replace(name, value)
            assert "$" not in query, query
            found[f"{panel['title']}: {target['refId']}"] = query
    return found


def _alerts() -> dict[str, str]:
    """Return the text of each alert by its name."""
    parts = re.split(r"(?m)^      - alert: ", RULES.read_text())[1:]
    return {part.partition("\n")[0]: part for part in parts}


# --- two processes that work and fail ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Callable[[], None]]]:
    """A Prometheus that scrapes two linked processes, and a round of their work."""
    prompt, decoder = ChildEnd("prompt", fresh=True), ChildEnd("decoder", fresh=True)
    try:
        common: dict[str, Any] = {"enable_remote_cache_accessible": True, **small_pool(8)}
        prompt.start("PROMPT", 1, listen_ip_info="127.0.0.1:0", **common)
        decoder.start("DECODER", 2, **common)
        rows = prompt.do(traffic.publish)
        decoder.do(traffic.prepare)
        assert prompt.port is not None
        decoder.do(traffic.link_to, 1, prompt.port)
        decoder.do(traffic.link_to, traffic.GONE, prompt.do(traffic.begin_other))
        prompt.do(traffic.end_other)

        losses = iter(range(3))  # a link that is lost again and again is dialled ever more seldom

        def work() -> None:
            decoder.do(traffic.work, rows, prompt.do(traffic.lend))
            if next(losses, None) is not None:
                decoder.do(traffic.lose_link)

        ports = [end.do(traffic.serve) for end in (prompt, decoder)]
        with prometheus(tmp_path_factory.mktemp("prometheus"), ports) as server:
            yield server, work
        for end in (decoder, prompt):
            end.do(traffic.end_serving)
            end.stop()
            end.close()
    finally:
        for end in (prompt, decoder):
            if end.code is None:
                end.kill()


@needs_prometheus
def test_every_query_of_every_panel_has_data_and_one_of_no_metric_has_none(
    busy: tuple[Server, Callable[[], None]],
) -> None:
    server, work = busy
    queries = _queries()
    empty = dict(queries)

    def all_have_data() -> bool:
        work()
        for name, query in list(empty.items()):
            if server.numbers(query):
                del empty[name]
        return not empty

    try:
        wait_until(all_have_data, _DATA_SECONDS)
    except AssertionError:
        pytest.fail(f"no data: {empty}")
    misspelt = {name: query.replace("llm_datadist_", "llm_datadist_no_") for name, query in queries.items()}
    assert {name: numbers for name, query in misspelt.items() if (numbers := server.numbers(query))} == {}


@needs_prometheus
def test_every_rule_is_evaluated_and_says_what_to_do(busy: tuple[Server, Callable[[], None]]) -> None:
    server, _ = busy

    def rules() -> dict[str, Any]:
        return {rule["name"]: rule for group in server.get("rules")["groups"] for rule in group["rules"]}

    wait_until(lambda: all(rule["health"] != "unknown" for rule in rules().values()), 30)
    found = rules()
    assert list(found) == list(_alerts()) != []
    for name, rule in found.items():
        assert rule["health"] == "ok", (name, rule.get("lastError"))
        assert rule["labels"]["severity"] in ("info", "warning", "critical"), name
        assert rule["annotations"].keys() == {"summary", "description"}, name
        assert "Mend: " in rule["annotations"]["description"], name


# --- promtool ---------------------------------------------------------------------------------------------------------


@needs_prometheus
def test_promtool_accepts_configuration_rules_and_their_tests() -> None:
    for command in (["check", "config", CONFIG], ["check", "rules", RULES], ["test", "rules", RULE_TESTS]):
        done = promtool(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "SUCCESS" in done.stdout


@needs_prometheus
@pytest.mark.parametrize("name", list(_alerts()))
def test_each_alert_has_a_case_in_which_it_fires_and_one_in_which_it_does_not(name: str, tmp_path: Path) -> None:
    """The first fails when the alert never fires."""
    assert re.search(rf"alertname: {name}\n +exp_alerts: \[\]", RULE_TESTS.read_text())
    never = re.sub(r"(?s)expr: .*?(?=\n        (?:for|labels):)", "expr: vector(1) > 2", text := _alerts()[name])
    (tmp_path / RULES.name).write_text(RULES.read_text().replace(text, never))
    shutil.copy(RULE_TESTS, tmp_path)
    done = promtool("test", "rules", tmp_path / RULE_TESTS.name)
    assert done.returncode == 1
    assert f"alertname: {name}" in done.stdout + done.stderr, done.stdout + done.stderr


# --- the files alone --------------------------------------------------------------------------------------------------


def test_the_dashboard_asks_one_data_source_that_is_a_variable_and_has_a_place_for_each_panel() -> None:
    names = [variable["name"] for variable in _dashboard()["templating"]["list"]]
    assert names == ["datasource", "job", "cluster"]
    source = {"type": "prometheus", "uid": "${datasource}"}
    asked = [each for panel in _panels() for each in (panel, *panel["targets"])]
    assert all(each["datasource"] == source for each in asked)
    assert all(
        '{job=~"$job",cluster=~"$cluster"' in target["expr"] for panel in _panels() for target in panel["targets"]
    )
    ids = [panel["id"] for panel in _dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in _dashboard()["panels"]]
    cells = [
        (x, y) for at in places for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    titles = [panel["title"] for panel in _dashboard()["panels"] if panel["type"] == "row"]
    assert all(title.endswith("?") for title in titles)
