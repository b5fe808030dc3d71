"""The names in docs/metrics.md and in deploy/ are those that the collector exports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist.prometheus import StatisticsCollector
from tests.support.source import ROOT

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd

PAGE: Final = ROOT / "docs" / "metrics.md"
#: Kind and labels of each metric, by the name that the page gives it.
Exported = dict[str, tuple[str, tuple[str, ...]]]
_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_ROW: Final = re.compile(r"^\| `(llm_datadist_\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$", re.MULTILINE)


@pytest.fixture
def exported(end: LocalEnd) -> Exported:
    """What an initialised end exports."""
    end.start("PROMPT", 1)
    families: list[Any] = list(StatisticsCollector(end.world.dd).collect())
    return {
        each.name + (_SUFFIXES[each.type][0] if each.type == "counter" else ""): (each.type, tuple(each._labelnames))
        for each in families
    }


def test_the_page_has_exactly_the_metrics_with_kind_and_labels(exported: Exported) -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exported
    assert len(rows) == len(exported)


@pytest.mark.parametrize(
    "path",
    [
        "docs/metrics.md",
        "deploy/grafana/llm-datadist.json",
        "deploy/prometheus/alerts.yml",
        "deploy/prometheus/alerts_test.yml",
    ],
)
def test_page_dashboard_and_rules_ask_for_samples_that_are_exported(exported: Exported, path: str) -> None:
    samples = {
        name if kind == "counter" else name + suffix
        for name, (kind, _) in exported.items()
        for suffix in _SUFFIXES[kind]
    }
    named = set(exported) if path == str(PAGE.relative_to(ROOT)) else set()  # its table has histograms by their name
    asked = set(re.findall(r"\bllm_datadist_\w+", (ROOT / path).read_text()))
    assert asked - samples - named == set() != asked


def test_the_page_and_the_rules_have_the_same_alerts() -> None:
    alert = r"\bLlmDatadist\w+"
    rules = (ROOT / "deploy" / "prometheus" / "alerts.yml").read_text()
    assert re.findall(rf"(?m)^\| `({alert})`", PAGE.read_text()) == re.findall(rf"alert: ({alert})", rules) != []
