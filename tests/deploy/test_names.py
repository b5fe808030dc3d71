"""The names in docs/metrics.md and in deploy/ are those that the collector exports."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import pytest

from llm_datadist.prometheus import StatisticsCollector
from tests.deploy.server import DEPLOY
from tests.support.source import ROOT

if TYPE_CHECKING:
    from tests.support.ends import LocalEnd

PAGE: Final = ROOT / "docs" / "metrics.md"
_SUFFIXES: Final = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}
_ROW: Final = re.compile(r"^\| `(llm_datadist_\w+)` \| (\w+) \| ([^|]*) \| [^|]+ \|$", re.MULTILINE)


@pytest.fixture
def exported(end: LocalEnd) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Kind and labels of each metric that an initialised end exports, by the name that the page gives it."""
    end.start("PROMPT", 1)
    families: list[Any] = list(StatisticsCollector(end.world.dd).collect())
    return {
        each.name + (_SUFFIXES[each.type][0] if each.type == "counter" else ""): (each.type, tuple(each._labelnames))
        for each in families
    }


def test_the_page_has_exactly_the_metrics_with_kind_and_labels(exported: dict[str, tuple[str, tuple[str, ...]]]) -> None:
    rows = _ROW.findall(PAGE.read_text())
    assert {name: (kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == exported
    assert len(rows) == len(exported)


@pytest.mark.parametrize("path", ["grafana/llm-datadist.json", "prometheus/alerts.yml", "prometheus/alerts_test.yml"])
def test_dashboard_and_rules_ask_for_metrics_that_are_exported(
    exported: dict[str, tuple[str, tuple[str, ...]]], path: str
) -> None:
    samples = {
        name if kind == "counter" else name + suffix for name, (kind, _) in exported.items() for suffix in _SUFFIXES[kind]
    }
    asked = set(re.findall(r"\bllm_datadist_\w+", (DEPLOY / path).read_text()))
    assert asked - samples == set() != asked


def test_the_queries_of_the_page_ask_for_metrics_that_are_exported(
    exported: dict[str, tuple[str, tuple[str, ...]]],
) -> None:
    bases = {name + suffix for name, (kind, _) in exported.items() for suffix in ("", *_SUFFIXES[kind])}
    assert set(re.findall(r"\bllm_datadist_\w+", PAGE.read_text())) - bases == {"llm_datadist_"} - {"llm_datadist_"}
