"""What deploy/ ships, under a real Prometheus that scrapes two real processes: every query has data, every alert fires
for the fault that it is for and for no healthy load.

``make test-deploy`` gets Prometheus where it is missing.
"""

import json
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import pytest

from llm_datadist.prometheus import StatisticsCollector
from tests.deploy.loads import FAULTS, LOADS, Instance, Pair, end_serving, serve, stop_instances
from tests.deploy.server import (
    CONFIG,
    DEPLOY,
    RULE_TESTS,
    RULES,
    Server,
    in_seconds,
    needs_prometheus,
    prometheus,
    promtool,
)
from tests.support.ends import ChildEnd, LocalEnd
from tests.support.moves import wait_until
from tests.support.source import ROOT

DASHBOARD: Final = DEPLOY / "grafana" / "llm-datadist.json"
#: What Grafana puts in for the variables: everything, and the last seconds.
_VARIABLES: Final = {"$__rate_interval": "10s", "$job": ".*", "$cluster": ".*"}
ROUND_SECONDS: Final = 0.1
FAULTS_SECONDS: Final = 120.0


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


# --- processes that work and fail -------------------------------------------------------------------------------------
@contextmanager
def _process(name: str) -> Iterator[ChildEnd]:
    """A process of many instances, which ends as it should unless the test has failed."""
    end = ChildEnd(name)
    try:
        yield end
        end.do(end_serving)
        end.do(stop_instances)
        end.close()
    finally:
        if end.code is None:
            end.kill()


def _every_rule_is_evaluated_and_says_what_to_do(server: Server) -> None:
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


@needs_prometheus
@pytest.mark.timeout(400)
def test_healthy_loads_fire_no_alert_each_fault_exactly_its_own_and_each_query_of_a_panel_has_data(
    tmp_path: Path,
) -> None:
    """A minute of the rules is a second. A query has no data once its metric is misspelt."""
    text = in_seconds(RULES.read_text())
    (rules := tmp_path / RULES.name).write_text(text)
    window, wait = (max(map(int, re.findall(pattern, text))) for pattern in (r"\[(\d+)s\]", r"for: (\d+)s"))
    assert (window, wait, re.findall(r"\dm\b", text)) == (30, 10, [])
    assert list(FAULTS) == list(_alerts())
    queries = _queries()
    empty = dict(queries)
    with ExitStack() as stack:
        prompts, decoders = (stack.enter_context(_process(name)) for name in ("prompts", "decoders"))

        def pair(number: int) -> Pair:
            (folder := tmp_path / str(number)).mkdir()
            return Pair(Instance(prompts, 2 * number), Instance(decoders, 2 * number + 1), folder, stack)

        loads = [load(pair(number)) for number, load in enumerate(LOADS, 1)]
        faults = {name: fault(pair(number)) for number, (name, (fault, _)) in enumerate(FAULTS.items(), 11)}
        ends = {"prompt": (0,), "decoder": (1,), "both": (0, 1)}
        expected = {
            name: {(name, 2 * number + end) for end in ends[sees]}
            for number, (name, (_, sees)) in enumerate(FAULTS.items(), 11)
        }
        for each in [*loads, *faults.values()]:
            stack.callback(each.close)
            next(each)
        server = stack.enter_context(prometheus(tmp_path, [end.do(serve) for end in (prompts, decoders)], rules))
        _every_rule_is_evaluated_and_says_what_to_do(server)

        until = time.monotonic() + window + wait + 5
        while time.monotonic() < until:
            time.sleep(ROUND_SECONDS)
            for load in loads:
                next(load)
            assert server.alerts("10m") == set()
        busy = server.numbers(f"sum by (cluster) (increase(llm_datadist_operation_bytes_total[{window}s])) > 0")
        assert len(busy) == len(loads), "the decoder of each load pulls"

        def fired() -> bool:
            time.sleep(ROUND_SECONDS)  # an ordinary day of more rounds is none
            for each in [*loads, *faults.values()]:
                next(each)
            for name in [name for name, query in empty.items() if server.numbers(query)]:
                del empty[name]
            seen = server.alerts("10m")
            assert seen <= set().union(*expected.values())
            for name in [name for name in faults if expected[name] <= seen]:
                faults.pop(name).close()
            return not faults

        try:
            wait_until(fired, FAULTS_SECONDS)
        except AssertionError as error:
            pytest.fail(f"{error}: not fired: {list(faults)}, fired: {server.alerts('10m')}")
        assert empty == {}, "no data"
        misspelt = {name: query.replace("llm_datadist_", "llm_datadist_no_") for name, query in queries.items()}
        assert {name: numbers for name, query in misspelt.items() if (numbers := server.numbers(query))} == {}


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
    queries = [target["expr"] for panel in _panels() for target in panel["targets"]]
    assert all('{job=~"$job",cluster=~"$cluster"' in query for query in queries)
    ids = [panel["id"] for panel in _dashboard()["panels"]]
    assert len(set(ids)) == len(ids)
    places = [panel["gridPos"] for panel in _dashboard()["panels"]]
    spans = [(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])) for at in places]
    cells = [cell for span in spans for cell in product(*span)]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    titles = [panel["title"] for panel in _dashboard()["panels"] if panel["type"] == "row"]
    assert all(title.endswith("?") for title in titles)


# --- names: those that the collector exports --------------------------------------------------------------------------

PAGE: Final = ROOT / "docs" / "metrics.md"
#: Kind and labels of each metric, by the name that the page gives it.
Exported = dict[str, tuple[str, tuple[str, ...]]]
_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_ROW: Final = re.compile(r"^\| `(llm_datadist_\w+)` \| (\w+) \|([^|]*)\| [^|]+ \|$", re.MULTILINE)


@pytest.fixture
def exported(end: LocalEnd) -> Exported:
    """What an initialised end exports."""
    end.start("PROMPT", 1)
    families: list[Any] = list(StatisticsCollector(end.world.dd).collect())
    return {
        each.name + (_SUFFIXES[each.type][0] if each.type == "counter" else ""): (each.type, _labels(each))
        for each in families
    }


def _labels(family: Any) -> tuple[str, ...]:
    """Return the labels that a family gives its samples; it may have none yet."""
    value = ([("+Inf", 0)], 0) if family.type == "histogram" else (0,)
    family.add_metric(["any"] * 9, *value)
    return tuple(family.samples[-1].labels)


def test_the_page_has_exactly_the_metrics_with_kind_and_labels(exported: Exported) -> None:
    rows = _ROW.findall(PAGE.read_text())
    shown = {name: (kind, ("cluster", *re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows}
    assert shown == exported, "every metric has the label cluster, and those that its row names"
    assert len(rows) == len(exported)


@pytest.mark.parametrize("path", [PAGE, DASHBOARD, RULES, RULE_TESTS], ids=lambda path: path.name)
def test_page_dashboard_and_rules_ask_for_samples_that_are_exported(exported: Exported, path: Path) -> None:
    samples = {
        name if kind == "counter" else name + suffix
        for name, (kind, _) in exported.items()
        for suffix in _SUFFIXES[kind]
    }
    named = set(exported) if path == PAGE else set()  # its table has histograms by their name
    asked = set(re.findall(r"\bllm_datadist_\w+", path.read_text()))
    assert asked - samples - named == set() != asked


def test_the_page_and_the_rules_have_the_same_alerts() -> None:
    alert = r"\bLlmDatadist\w+"
    rules = RULES.read_text()
    assert re.findall(rf"(?m)^\| `({alert})`", PAGE.read_text()) == re.findall(rf"alert: ({alert})", rules) != []
